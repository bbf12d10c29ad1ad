"""The panels of "Provable Benefits of Task-Specific Prompts for In-context Learning" (arXiv 2503.02102)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastlin.figures.panels import Panel, Series
from fastlin.training.regimes import REGIMES

_LENGTHS = "The paper does not list n: these are the lengths of its published code."
_FORMS = (
    "Theorem 2's risk of fine-tuning and Theorem 3's prompts are drawn in their corrected form; "
    "with features of covariance I and diagonal task covariances both agree with the printed ones."
)
_ASSUMPTION = "Assumption 1 (the reduced model) is a restriction when the means are not zero"
_RESTRICTED = f"{_ASSUMPTION}."
_SHIFTED = f"{_ASSUMPTION} (shared shift: a shared head that subtracts the mean of the means)."
_NOISE = "E[y²] includes the noise."
_NOISY_BOUND = (
    "E[y²] includes the noise. The paper's appendix omits σ² in the risk of joint+heads; the line includes it."
)
_READING = "I → Σ* = diag(0.9, 0.9⁻¹, …, 0.9⁻⁹) is read as the covariance of the tasks; features stay isotropic."
_DEPTH = (
    "L layers are L attentions with separate weights, with a residual in every layer from L = 2 on; the paper does not "
    "say. There is no closed form for L > 1: lines are those of L = 1."
)
_HEADS = "Proposition 1: with proportional task covariances and no noise the line joint+heads is the heads' optimum."
_NOISY_HEADS = "Proposition 1's equality fails with noise and unequal covariances: heads can go 0.03 % below the line."

_NON_ISOTROPIC = "noisy labels, non-isotropic tasks"
_REGIMES = ("plain", "fine-tune", "joint")
_ONE_PROMPT = ("plain", "one-prompt", "joint")


def _beside_theory(regimes: Sequence[str], model: str = "full", layers: int = 1) -> tuple[Series, ...]:
    """A model in several regimes, each beside its closed form."""
    forms = [(regime, REGIMES[regime].closed_form) for regime in regimes]
    return tuple(Series(regime, model, layers, curve=form and form.name) for regime, form in forms)


def _heads(layers: int = 1) -> tuple[Series, ...]:
    return _beside_theory(("plain", "joint", "joint+heads"), layers=layers)


def _panel(name: str, title: str, series: tuple[Series, ...], *remarks: str, **options: Any) -> Panel:
    """A panel of the paper; its setting has the same name."""
    return Panel(name, f"Figure {name[:-1]}({name[-1]}): {title}", name, series, (*remarks, _LENGTHS), **options)


def _depth_panel(letter: str, layers: int, noisy: bool) -> Panel:
    title = f"{layers} layer{'s' * (layers > 1)}, {'noisy labels' if noisy else 'no noise'}"
    remarks = (_DEPTH, _READING, *((_NOISY_BOUND,) if noisy else ()))
    shallower = f"A2{chr(ord(letter) - 1)}" if layers > 1 else None
    return _panel(f"A2{letter}", title, _heads(layers), *remarks, shallower=shallower)


_FULL = _beside_theory(_REGIMES)
_BOTH = _beside_theory(_REGIMES, "reduced") + _FULL
_SHIFT: dict[str, Any] = {"also": ("shared_shift",)}

PANELS = {
    panel.name: panel
    for panel in (
        _panel("2a", "full against reduced model", _BOTH, _SHIFTED, _FORMS, **_SHIFT),
        _panel("2b", "zero means, all regimes coincide", _BOTH, "With zero means all closed forms are one line."),
        _panel("2c", "full model against theory", _FULL, _RESTRICTED, _FORMS),
        _panel("2d", "task-specific heads", _heads(), _RESTRICTED, _HEADS),
        _panel("A1a", "as 2(a), noisy labels", _BOTH, _SHIFTED, _FORMS, _NOISE, **_SHIFT),
        _panel("A1b", "as 2(c), noisy labels", _FULL, _RESTRICTED, _FORMS, _NOISE),
        _panel("A1c", f"as 2(a), {_NON_ISOTROPIC}", _BOTH, _SHIFTED, _FORMS, _READING, _NOISE, **_SHIFT),
        _panel("A1d", f"as 2(d), {_NON_ISOTROPIC}", _heads(), _RESTRICTED, _READING, _NOISY_HEADS, _NOISY_BOUND),
        *(_depth_panel(letter, layers, noisy=False) for letter, layers in zip("abc", (1, 2, 3), strict=True)),
        *(_depth_panel(letter, layers, noisy=True) for letter, layers in zip("def", (1, 2, 3), strict=True)),
    )
}

# Questions that the paper leaves open, with its settings.
BEYOND = {
    panel.name: panel
    for panel in (
        Panel(
            "noise",
            "Beyond the paper: sensitivity to label noise, n = 20",
            "2c",
            _beside_theory((*_REGIMES, "joint+heads")),
            ("Setting 2(c). E[y²] includes σ², which no model can predict.",),
            axis="noise",
            places=(0.0, 1.0, 2.0, 5.0, 10.0, 20.0),
            n=20,
        ),
        Panel(
            "depth",
            "Beyond the paper: depth, n = 10",
            "A2a",
            _heads(),
            ("Setting A2(a–c).", _DEPTH, _READING),
            axis="layers",
            places=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
            n=10,
            # With the preset's 0.02 and 0.1 every trial of six layers diverges within 2000 steps.
            values=(("lr", 0.01), ("start_attention", 0.03), ("start_values", 0.03)),
        ),
        Panel(
            "softmax",
            "Beyond the paper: softmax attention beside linear attention",
            "2c",
            (
                *_beside_theory(("plain", "joint")),
                *(Series(name, "softmax", attention_heads=heads) for heads in (1, 2) for name in ("plain", "joint")),
            ),
            (
                "Setting 2(c). Softmax attention trains in eager torch and has no closed form: its risks are sampled.",
                "One softmax head averages labels with positive weights; two heads can subtract.",
            ),
        ),
        Panel(
            "one-prompt",
            "Beyond the paper: the task index hidden, one prompt for all tasks",
            "2a",
            _beside_theory(_ONE_PROMPT, "reduced") + _beside_theory(_ONE_PROMPT),
            ("Setting 2(a), whose means do not add up to zero: if they did, one prompt would not help.", _RESTRICTED),
        ),
    )
}
