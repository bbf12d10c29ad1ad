"""Two records: whether fastlin lost against eager. Ratios are compared, never times, which belong to a machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlin.bench.labels import EAGER, parse
from fastlin.bench.run import FORMAT


@dataclass(frozen=True)
class Change:
    """How many times as long as fastlin an eager form takes, in the record before and after; None: not measured."""

    case: str
    ours: str
    peer: str
    before: float
    after: float | None

    def lost(self, tolerance: float) -> bool:
        """Whether the ratio dropped by more than that share, or is gone."""
        return self.after is None or self.after < (1 - tolerance) * self.before


def read(path: Path) -> dict[str, Any]:
    """A record of `fastlin bench --json`, or a ValueError for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: got a file that is not JSON ({error}), wants one of fastlin bench --json") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or "cases" not in record:
        raise ValueError(f"{path}: got another file, wants one of fastlin bench --json, format {FORMAT}")
    return record


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Ratios against eager of the cases that both records have, by name; a ValueError when there are none."""
    then, now = _ratios(before), _ratios(after)
    measured = {case["name"] for case in after["cases"]}
    found = [Change(*key, ratio, now.get(key)) for key, ratio in then.items() if key[0] in measured]
    if not found:
        raise ValueError("the records have no case in common: nothing to compare")
    return found


def _ratios(record: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Times of eager forms over those of fastlin, by case, fastlin's backend and form."""
    # A curve may have a case of the table once more, timed for less long: the first one counts.
    found: dict[tuple[str, str, str], float] = {}
    for case in record["cases"]:
        medians = {entry["label"]: entry["median"] for entry in case["contenders"] if parse(entry["label"]).plain}
        for ours in medians:
            for peer in medians:
                if parse(ours).kind == "fastlin" and parse(peer).kind in EAGER:
                    found.setdefault((case["name"], ours, peer), medians[peer] / medians[ours])
    return found


def as_text(found: list[Change], tolerance: float) -> str:
    worst: dict[str, float] = {}
    for change in found:
        share = (change.after or 0.0) / change.before
        worst[change.case] = min(share, worst.get(change.case, share))
    lines = [f"  {'times faster than':22}{'before':>8}{'after':>8}{'change':>8}"]
    for case in sorted(worst, key=lambda name: worst[name]):
        lines.append(case)
        lines += [_line(change, tolerance) for change in found if change.case == case]
    lost = sum(change.lost(tolerance) for change in found)
    lines.append(f"{lost} of {len(found)} ratios dropped by more than {tolerance:.0%}")
    return "".join(f"{line}\n" for line in lines)


def _line(change: Change, tolerance: float) -> str:
    who = f"  {change.peer + change.ours.removeprefix('fastlin'):22}{change.before:>8.3g}"
    mark = "  dropped" if change.lost(tolerance) else ""
    if change.after is None:
        return f"{who}{'gone':>8}{'':>8}{mark}"
    return f"{who}{change.after:>8.3g}{change.after / change.before - 1:>+8.0%}{mark}"
