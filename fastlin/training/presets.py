"""Presets: protocols as named values.

`paper` is the protocol that the paper on task-specific prompts states; what it does not state (initialisation) is as in
`authors`. `authors` is what its published code does. `tuned` reaches the optimum in few steps: parameters in the units
of the data, a schedule, and an average over the last steps.

The authors' noisy runs (sigma = 0.3) and non-isotropic covariance (diag 2^-i) differ from the paper too; these belong
to the task mixture, which a run is given. Their code trains Wq and Wk apart: that is the model `separate`; in merged
models their product starts at its size.

Fine-tuning without forgetting has its own values under the same names: `authors` is what that paper's published code
does, and `paper` the same, since the text does not say more. Its steps are those of each phase.
"""

from __future__ import annotations

from typing import Any

from fastlin.training.checks import choice
from fastlin.training.regimes import Regime

_AUTHORS: dict[str, Any] = {
    "steps": 100_000,
    "batch": 3072,
    "lr": 1e-3,
    "weight_decay": 1e-3,
    "scale": "1/sqrt(d+1)",
    "fixed_head": True,
    "batch_per_task": True,
    "prompts_in_turn": True,
}
# The reduced model has its own initialisation and no scale in the authors' code.
_REDUCED_START = {"scale": 1.0, "start": "normal", "start_attention": 0.1, "start_prompts": 0.1}
# Wq Wk' of two matrices that start uniform within 1/sqrt(d+1), or within that over d+1 in a stack, has entries of the
# size of these bounds.
_FULL_START = {"start_attention": "1/sqrt(3(d+1))"}
_STACK_START = {"start_attention": "1/sqrt(3)/(d+1)^2.5", "start_values": "1/(d+1)^1.5"}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"steps": 20_000, "batch": 8192, "lr": 1e-3},
    "authors": _AUTHORS,
    "tuned": {
        "steps": 6000,
        "batch": 8192,
        "lr": 0.02,
        # A short memory of the gradients' size: with 0.999 trials of joint+heads end 1 % too high at n = 1.
        "optimiser_options": {"betas": (0.9, 0.98)},
        "schedule": "one-cycle",
        "clip": 1.0,
        "average": 0.2,
        "units": "data",
        "trainable_entry": True,
        "start": "normal",
        "start_attention": 0.1,
        "start_values": 0.1,
        "start_heads": 0.1,
        "start_prompts": 0.1,
        "start_readout": 1.0,
    },
}
"""Fields of `RunConfig` by the name of the preset."""
_FORGETTING: dict[str, Any] = {
    "own_data": True,
    "see_query": True,
    "shot_scale": True,
    "heads_averaged": True,
    "fixed_head": True,
}
_FORGETTING_AUTHORS: dict[str, Any] = {
    "steps": 5000,
    "batch": 5000,
    "lr": 0.01,
    "optimiser": "SGD",
    "optimiser_options": {"momentum": 0.9},
    "clip": 1.0,
    "points": 100_000,
    "start": "normal",
    "start_attention": 0.05,
    "start_values": 0.05,
    "start_heads": 0.05,
    **_FORGETTING,
}
FORGETTING = {
    "paper": _FORGETTING_AUTHORS,
    "authors": _FORGETTING_AUTHORS,
    "tuned": {**PRESETS["tuned"], "steps": 3000, "batch": 5000, **_FORGETTING},
}
"""The presets of the regimes of fine-tuning without forgetting; steps of a phase."""
OF_MODEL: dict[tuple[str, str], dict[str, Any]] = {
    ("paper", "reduced"): _REDUCED_START,
    ("authors", "reduced"): {**_REDUCED_START, "trainable_entry": True},
    ("paper", "full"): _FULL_START,
    ("authors", "full"): _FULL_START,
    ("paper", "softmax"): _FULL_START,
    ("authors", "softmax"): _FULL_START,
    ("paper", "stack"): _STACK_START,
    ("authors", "stack"): {**_STACK_START, "residual": 2.0, "see_query": True},
}
"""What a preset has otherwise for one model."""


def values(preset: str, model: str, regime: Regime) -> dict[str, Any]:
    """The fields of `RunConfig` that a preset decides for a model; the regime says which paper's presets they are.

    Parameters
    ----------
    preset, model : str
    regime : Regime

    Returns
    -------
    dict

    Examples
    --------
    >>> from fastlin.training import presets, regimes
    >>> presets.values("paper", "full", regimes.REGIMES["joint"])["lr"]
    0.001
    """
    choice("preset", preset, PRESETS)
    if regime.study == "forgetting":
        base = FORGETTING[preset]
        return {**base, "steps": base["steps"] * len(regime.phases)}
    return {**PRESETS[preset], **OF_MODEL.get((preset, model), {})}
