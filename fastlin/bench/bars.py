"""Bars: limits that a row's numbers are set beside. A bar that is missed is printed, and changes no exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastlin.bench.timing import in_units

Verdict = Literal["ok", "misses", "not measured"]
Unit = Literal["s", "B", ""]


@dataclass(frozen=True)
class Bar:
    """A limit for a number of a row."""

    what: str  # a contender, for its time; "memory of CONTENDER"; or a value that the row's function returns
    sense: Literal[">=", "<="]
    limit: float
    over: str | None = None  # a contender whose time is the unit
    unit: Unit = "s"
    peak: float | None = None  # FLOP/s of a core that a time limit was set for: it is scaled to the measured ones

    def judge(self, values: Mapping[str, float], failed: Mapping[str, str], flops_per_core: float) -> dict[str, Any]:
        """The bar in words, what was measured, and the verdict.

        A peer that could not run leaves the bar unmeasured; fastlin misses the bar when it could not run.
        """
        limit = self.limit * (self.peak / flops_per_core if self.peak else 1.0)
        names = (self.what, *([self.over] if self.over else []))
        text = f"{self.what} {self.sense} {self._shown(limit)}" + (f" {self.over}" if self.over else "")
        if self.peak:
            text += f" ({self._shown(self.limit)} at {self.peak / 1e9:g} GFLOP/s a core)"
        missing = [name for name in names if name not in values]
        if missing:
            ours = any(name in failed and name.startswith("fastlin") for name in missing)
            return {"bar": text, "value": None, "limit": limit, "verdict": "misses" if ours else "not measured"}
        value = values[self.what] / (values[self.over] if self.over else 1.0)
        met = value >= limit if self.sense == ">=" else value <= limit
        return {"bar": text, "value": value, "limit": limit, "verdict": "ok" if met else "misses"}

    def _shown(self, value: float) -> str:
        if self.over or not self.unit:
            return f"{value:.3g}x"
        return in_units(value) if self.unit == "s" else f"{value / 1e6:.3g} MB"

    def line(self, judged: Mapping[str, Any]) -> str:
        found = "" if judged["value"] is None else f", got {self._shown(judged['value'])}"
        return f"bar {judged['bar']}{found}: {judged['verdict']}"


def faster_than(peer: str, times: float, ours: str = "fastlin") -> Bar:
    return Bar(peer, ">=", times, ours)
