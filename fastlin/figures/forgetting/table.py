"""Table 1: zero-shot and few-shot errors on the tuned task and on its opposite, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# A difference is a finding when it is this many standard errors from zero: with five seeds p = 0.04, two-sided.
_SURE = 3.0
_TASKS = ("θ0", "−θ0")
Corners = Mapping[tuple[str, str, int], Tensor]
"""Errors (seeds,) by regime, task and shots."""


def difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Mean of first - second over seeds, which both have, and its standard error."""
    gap = first - second
    gap = gap[torch.isfinite(gap)]
    if len(gap) < 2:
        return float(gap.mean()), float("inf")
    return float(gap.mean()), float(gap.std()) / len(gap) ** 0.5


def _sure(gap: tuple[float, float]) -> bool:
    return gap[0] > _SURE * gap[1]


def ranks(corners: Corners, regimes: Sequence[str], task: str, shots: int) -> dict[str, str]:
    """Best and worst: those of the fine-tuned that nothing is surely below, or above; the others are better.

    Logarithms are compared: seeds of a regime that blows up differ by factors.
    """
    errors = {regime: corners[regime, task, shots].log() for regime in regimes if (regime, task, shots) in corners}
    found = {}
    for regime, own in errors.items():
        below = any(_sure(difference(own, other)) for other in errors.values())
        above = any(_sure(difference(other, own)) for other in errors.values())
        found[regime] = "best" if not below else "better" if above else "worst"
    return found


def as_text(corners: Corners, regimes: Sequence[str], shots: int) -> str:
    """The table for people: in distribution is the tuned task θ0, out of distribution −θ0."""
    columns = [(task, n) for task in _TASKS for n in (0, shots)]
    head = "".join(f"{f'{task}, {n} shots':>30}" for task, n in columns)
    lines = [f"{'regime':>12}{head}"]
    tuned = [regime for regime in regimes if regime != "pretrain"]
    words = {column: ranks(corners, tuned, *column) for column in columns}
    for regime in regimes:
        text = f"{regime:>12}"
        for task, n in columns:
            errors = corners.get((regime, task, n))
            if errors is None:
                text += f"{'-':>30}"
                continue
            errors = errors[torch.isfinite(errors)]
            spread = float(errors.std()) / len(errors) ** 0.5 if len(errors) > 1 else float("nan")
            word = words[task, n].get(regime, "")
            text += f"{f'{float(errors.mean()):.5g} ± {spread:.1e} {word:6}':>30}"
        lines.append(text)
    note = f"best: no regime is surely below; worst: none is surely above; surely: by {_SURE:g} standard errors of the "
    return "\n".join([*lines, note + "logarithms' difference over seeds."]) + "\n"


def findings(corners: Corners, shots: int) -> list[dict[str, Any]]:
    """The paper's findings, each with the difference that decides it."""
    tuned = sorted({regime for regime, _, _ in corners} - {"pretrain"})
    return [
        _extreme(corners, tuned, "zs:all", "θ0", 0, lowest=True),
        *(_extreme(corners, tuned, "zs:all", task, shots, lowest=False) for task in _TASKS),
        *(_keeps(corners, tuned, task, shots) for task in _TASKS),
        *(_auxiliary(corners, part, task, shots) for part in ("all", "v") for task in _TASKS),
    ]


def _entry(text: str, holds: bool) -> dict[str, Any]:
    return {"text": text, "holds": holds}


def _text(gap: tuple[float, float]) -> str:
    return f"{gap[0]:+.3g} ± {gap[1]:.1g}"


def _extreme(corners: Corners, tuned: Sequence[str], regime: str, task: str, n: int, lowest: bool) -> dict[str, Any]:
    """Whether a regime is the best, or the worst, of those with its objective at a corner of the table."""
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
    return _entry(f"{text}{_text((sign * gap, error))}.", _sure((gap, error)))


def _keeps(corners: Corners, tuned: Sequence[str], task: str, shots: int) -> dict[str, Any]:
    """Whether value-only fine-tuning has the least few-shot error of all that have no few-shot loss."""
    alone = [regime for regime in tuned if regime.startswith("zs:") and regime != "zs:v"]
    gaps = {regime: difference(corners[regime, task, shots], corners["zs:v", task, shots]) for regime in alone}
    nearest = min(gaps, key=lambda regime: gaps[regime][0])
    rise = difference(corners["zs:v", task, shots], corners["pretrain", task, shots])
    text = (
        f"value-only tuning keeps few-shot errors best of the zero-shot regimes at {shots} shots on {task}: "
        f"zs:v − pretrained = {_text(rise)}, {nearest} − zs:v = {_text(gaps[nearest])}."
    )
    return _entry(text, _sure(gaps[nearest]))


def _auxiliary(corners: Corners, part: str, task: str, shots: int) -> dict[str, Any]:
    """Whether the few-shot loss helps on the tuned task, and hurts on its opposite."""
    gap, error = difference(corners[f"zs+fs:{part}", task, shots], corners[f"zs:{part}", task, shots])
    helps = task == "θ0"
    text = f"the few-shot loss {'helps' if helps else 'hurts'} tuning {part} at {shots} shots on {task}: "
    text += f"zs+fs:{part} − zs:{part} = {_text((gap, error))}."
    return _entry(text, _sure((-gap if helps else gap, error)))


def distances(rows: Sequence[tuple[str, Tensor, float, float]]) -> str:
    """Trained errors (seeds,) beside theory, with the largest distance that is allowed, in percent."""
    lines = [f"{'':>28}{'trained':>12}{'± s.e.':>10}{'theory':>12}{'excess':>11}{'within':>9}"]
    for name, errors, optimum, allowed in rows:
        own, spread = (
            float(errors.mean()),
            float(errors.std()) / len(errors) ** 0.5 if len(errors) > 1 else float("nan"),
        )
        excess = 100.0 * (own / optimum - 1.0)
        word = "yes" if abs(excess) <= allowed else "no"
        lines.append(
            f"{name:>28}{own:>12.6f}{spread:>10.1e}{optimum:>12.6f}{excess:>+9.3f} %{f'{allowed:g} %: {word}':>12}"
        )
    return "\n".join(lines) + "\n"
