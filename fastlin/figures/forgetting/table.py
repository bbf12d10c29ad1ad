"""Table 1: zero-shot and few-shot errors on the tuned task and on its opposite, and the findings."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin.figures.report import own_table
from fastlin.training.judge import excess

# A difference is significant at this many standard errors from zero: with five seeds p = 0.04, two-sided.
_SIGNIFICANT = 3.0
_TASKS = ("θ0", "−θ0")
Corners = Mapping[tuple[str, str, int], Tensor]
"""Errors (seeds,) by regime, task and shots."""


def difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Mean over seeds of first - second, paired by seed, and its standard error."""
    gap = first - second
    gap = gap[torch.isfinite(gap)]
    if len(gap) < 2:
        return float(gap.mean()), float("inf")
    return float(gap.mean()), _standard_error(gap)


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def _positive(gap: tuple[float, float]) -> bool:
    return gap[0] > _SIGNIFICANT * gap[1]


def ranks(corners: Corners, regimes: Sequence[str], task: str, shots: int) -> dict[str, str]:
    """Best: no regime is significantly below. Worst: none is significantly above. Better: all others."""
    # Compares logarithms: seeds of a regime that blows up differ by factors.
    errors = {regime: corners[regime, task, shots].log() for regime in regimes if (regime, task, shots) in corners}
    words = {}
    for regime, own in errors.items():
        below = any(_positive(difference(own, other)) for other in errors.values())
        above = any(_positive(difference(other, own)) for other in errors.values())
        words[regime] = "best" if not below else "better" if above else "worst"
    return words


def as_table(corners: Corners, regimes: Sequence[str], shots: int) -> dict[str, Any]:
    """The table; in distribution is the tuned task θ0, out of distribution −θ0."""
    columns = [(task, n) for task in _TASKS for n in (0, shots)]
    tuned = [regime for regime in regimes if regime != "pretrain"]
    words = {column: ranks(corners, tuned, *column) for column in columns}

    def cell(regime: str, task: str, n: int) -> str:
        errors = corners.get((regime, task, n))
        if errors is None:
            return "-"
        errors = errors[torch.isfinite(errors)]
        return f"{float(errors.mean()):.5g} ± {_standard_error(errors):.1e} {words[task, n].get(regime, ''):6}"

    headings = [f"{task}, {n} shots" for task, n in columns]
    rows = [[regime, *(cell(regime, *column) for column in columns)] for regime in regimes]
    note = (
        f"best: no regime is surely below; worst: none is surely above; surely: by {_SIGNIFICANT:g} standard errors of "
        "the logarithms' difference over seeds."
    )
    # The paper's findings are about the tuned task at zero shots, and about what other tasks lose with shots.
    drops = [headings[i] for i in (2, 1)]
    return own_table({"regime": 10, **dict.fromkeys(headings, 25)}, rows, drops, [note])


def findings(corners: Corners, shots: int) -> list[dict[str, Any]]:
    tuned = sorted({regime for regime, _, _ in corners} - {"pretrain"})
    return [
        _extreme(corners, tuned, "zs:all", "θ0", 0, lowest=True),
        *(_extreme(corners, tuned, "zs:all", task, shots, lowest=False) for task in _TASKS),
        *(_keeps(corners, tuned, task, shots) for task in _TASKS),
        *(_auxiliary(corners, part, task, shots) for part in ("all", "v") for task in _TASKS),
    ]


def _text(gap: tuple[float, float]) -> str:
    return f"{gap[0]:+.3g} ± {gap[1]:.1g}"


def _extreme(corners: Corners, tuned: Sequence[str], regime: str, task: str, n: int, lowest: bool) -> dict[str, Any]:
    """Whether a regime has the lowest, or highest, error of those with its objective, for a task and shots."""
    sign = 1.0 if lowest else -1.0
    gaps = {}
    for other in tuned:
        if other != regime and other.split(":")[0] == regime.split(":")[0]:
            gap, error = difference(corners[other, task, n], corners[regime, task, n])
            gaps[other] = (sign * gap, error)
    nearest = min(gaps, key=lambda other: gaps[other][0])
    gap, error = gaps[nearest]
    word, what = ("best", "zero shots") if lowest else ("worst", f"{n} shots")
    text = f"full fine-tuning ({regime}) is the {word} of zs:X at {what} on {task}: {nearest} − {regime} = "
    return {"text": f"{text}{_text((sign * gap, error))}.", "holds": _positive((gap, error))}


def _keeps(corners: Corners, tuned: Sequence[str], task: str, shots: int) -> dict[str, Any]:
    """Whether value-only fine-tuning has the lowest few-shot error of the regimes without a few-shot loss."""
    alone = [regime for regime in tuned if regime.startswith("zs:") and regime != "zs:v"]
    gaps = {regime: difference(corners[regime, task, shots], corners["zs:v", task, shots]) for regime in alone}
    nearest = min(gaps, key=lambda regime: gaps[regime][0])
    rise = difference(corners["zs:v", task, shots], corners["pretrain", task, shots])
    text = (
        f"value-only tuning keeps few-shot errors best of the zero-shot regimes at {shots} shots on {task}: "
        f"zs:v − pretrained = {_text(rise)}, {nearest} − zs:v = {_text(gaps[nearest])}."
    )
    return {"text": text, "holds": _positive(gaps[nearest])}


def _auxiliary(corners: Corners, part: str, task: str, shots: int) -> dict[str, Any]:
    """Whether the few-shot loss helps on the tuned task, or hurts on its opposite."""
    gap, error = difference(corners[f"zs+fs:{part}", task, shots], corners[f"zs:{part}", task, shots])
    helps = task == "θ0"
    text = f"the few-shot loss {'helps' if helps else 'hurts'} tuning {part} at {shots} shots on {task}: "
    text += f"zs+fs:{part} − zs:{part} = {_text((gap, error))}."
    return {"text": text, "holds": _positive((-gap if helps else gap, error))}


def distances(rows: Sequence[tuple[str, Tensor, float, float]]) -> dict[str, Any]:
    """Trained errors (seeds,) beside theory, with the largest excess allowed, in percent, either way."""
    widths = {"": 28, "trained": 10, "± s.e.": 10, "theory": 10, "excess": 11, "within": 12}
    lines = []
    for name, errors, optimum, allowed in rows:
        own = float(errors.mean())
        percent = 100.0 * excess(own, optimum)
        numbers = [f"{own:.6f}", f"{_standard_error(errors):.1e}", f"{optimum:.6f}", f"{percent:+.3f} %"]
        word = "yes" if abs(percent) <= allowed else "no"
        lines.append([name, *numbers, f"{allowed:g} %: {word}"])
    return own_table(widths, lines, drops=["± s.e.", "within"])
