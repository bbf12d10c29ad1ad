"""Exact closed forms in float64: task-specific prompts here, fine-tuning in `forgetting`."""

from fastlin.theory import forgetting
from fastlin.theory.full import full_population_loss, full_task_losses
from fastlin.theory.heads import (
    debiased_attention,
    debiased_loss,
    decoupled,
    heads_lower_bound,
    scaled_heads,
    shared_shift,
)
from fastlin.theory.optimum import Attention, Bound, NotAttained, Optimum
from fastlin.theory.prompts import (
    GapLimits,
    fine_tuned,
    gap_limits,
    joint,
    normaliser,
    one_prompt,
    plain,
    population_loss,
)

__all__ = [
    "Attention",
    "Bound",
    "GapLimits",
    "NotAttained",
    "Optimum",
    "debiased_attention",
    "debiased_loss",
    "decoupled",
    "fine_tuned",
    "forgetting",
    "full_population_loss",
    "full_task_losses",
    "gap_limits",
    "heads_lower_bound",
    "joint",
    "normaliser",
    "one_prompt",
    "plain",
    "population_loss",
    "scaled_heads",
    "shared_shift",
]
