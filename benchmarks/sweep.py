"""The row over widths m: a race at each, and whether any width costs more than its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import trend
from benchmarks.rows import Entrant, Line, Result, Session, Verdict, failed, race
from fastlin.bench import checks
from fastlin.bench.cases import Shape


@dataclass(frozen=True)
class Sweep:
    """A row that runs one race per width.

    Attributes
    ----------
    name : str
    shape : Shape
        But for m and B.
    entrants : mapping
        "op", and those it is compared with.
    speedups : tuple
        (largest width, peer, times) of the bars; each holds for the widths above the one before it of that peer.
    trend_from : int
        Smallest width that must keep to the trend of its neighbours.
    trend_limit : float
    largest : int
        Bytes of z; B is reduced where it would be more.
    rounds : int
    """

    name: str
    shape: Shape
    entrants: Mapping[str, Entrant]
    speedups: tuple[tuple[int, str, float | None], ...]
    trend_from: int = 12
    trend_limit: float = 1.5
    largest: int = 500_000_000
    rounds: int = 9

    def run(self, session: Session) -> Result:
        """Race at every width, then compare with the bars."""
        total = Result(self.name)
        for m in session.widths:
            B = max(min(session.batch, self.largest // (4 * self.shape.n * m)), 1)
            shape = replace(self.shape, m=m, B=B)
            # There are 35 widths: each gets a small part of what a row may take.
            share = {"scores": checks.AFFORDABLE_SCORES // 30, "seconds": 3}
            one = race(f"{self.name}, m = {m}", shape, self.entrants, self.rounds, session, **share)
            total.wrong |= one.wrong
            total.failures.update({f"{label}, m = {m}": why for label, why in one.failures.items()})
            total.errors.update({f"{label}, m = {m}": errors for label, errors in one.errors.items()})
            total.timings.update({f"{label}, m = {m}": timing for label, timing in one.timings.items()})
            total.details.append({"m": m, "B": B, **{label: t.median for label, t in one.timings.items()}})
        timed = [detail for detail in total.details if "op" in detail]
        ratios = trend.over_trend({d["m"]: d["op"] / (d["B"] * self.shape.n * d["m"]) for d in timed})
        for detail in timed:
            detail["ns per token-element"] = 1e9 * detail["op"] / (detail["B"] * self.shape.n * detail["m"])
            detail["over trend"] = ratios.get(detail["m"])
        total.lines = [*self._speedup_lines(total), self._trend_line(total)]
        return total

    def _speedup_lines(self, total: Result) -> list[Line]:
        lines = []
        covered: dict[str, int] = {}
        for up_to, peer, limit in self.speedups:
            above = covered.get(peer, 0)
            covered[peer] = up_to
            within = [d for d in total.details if above < d["m"] <= up_to]
            widths = [d["m"] for d in within]
            work = f"m from {min(widths, default=above)} to {max(widths, default=up_to)}, n = {self.shape.n}"
            bar = "" if limit is None else f">= {limit:g}x {peer}"
            ratios = {d["m"]: d[peer] / d["op"] for d in within if peer in d and "op" in d}
            if not ratios or len(ratios) < len(within):
                lines.append(_incomplete(work, bar, total, within))
                continue
            worst = min(ratios, key=lambda m: ratios[m])
            measured = f"{ratios[worst]:.3g}x {peer} at the worst, m = {worst}"
            met: Verdict = "no bar" if limit is None else "ok" if ratios[worst] >= limit else "misses"
            lines.append(Line(work, measured, bar, met, ratios[worst], limit))
        return lines

    def _trend_line(self, total: Result) -> Line:
        work = f"m >= {self.trend_from}, time per token-element"
        bar = f"<= {self.trend_limit:g}x the neighbours' trend"
        within = [d for d in total.details if d["m"] >= self.trend_from]
        ratios = {d["m"]: d["over trend"] for d in within if d.get("over trend") is not None}
        if not ratios or len(ratios) < len(within):
            return _incomplete(work, bar, total, within)
        worst = max(ratios, key=lambda m: ratios[m])
        above = [m for m, ratio in ratios.items() if ratio > self.trend_limit]
        measured = f"{ratios[worst]:.3g}x at the worst, m = {worst}"
        if len(above) > 1:
            measured += f"; above: {', '.join(map(str, above))}"
        return Line(work, measured, bar, "misses" if above else "ok", ratios[worst], self.trend_limit)


def _incomplete(work: str, bar: str, total: Result, within: list[dict[str, Any]]) -> Line:
    """The line of a bar of a sweep in which not all widths were timed."""
    widths = {f"m = {d['m']}" for d in within}
    for label, why in total.failures.items():
        if label.split(", ")[-1] in widths:
            return failed(work, bar, label, why)
    return Line(work, "too few widths", bar, "not measured")
