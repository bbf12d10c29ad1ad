"""Closed forms of fine-tuning without forgetting in-context learning.

Tokens are z_i = [1; x_i; y_i], the query is z = [1; x; 0]. With n shots there are N = n + 1 columns, query included:

    f = (1/N) { sum_i (v_x'x_i + v y_i)(q + x_i'Q x) + v_x'x (q + x'Q x) }

x ~ N(0, S), y = theta'x + noise of variance s2, <a, b> = a'S b, ||a||^2 = <a, a>. `cov` is S and `task_cov` is
T = E[theta theta'], I/d for the unit sphere; None is the identity. A shot count of None is the limit n -> infinity.
Results are float64 tensors and keep the autograd graph of their arguments.
"""

from fastlin.theory.forgetting.attention import TaskPoints, attention_error, task_points
from fastlin.theory.forgetting.family import (
    Family,
    FamilyOptimum,
    fully_tuned,
    minimal_update_scalar,
    pretrained,
    value_tuned,
)
from fastlin.theory.forgetting.risk import QuadraticForm, error, pretraining_loss, quadratic_form, threshold_shots
from fastlin.theory.forgetting.scalars import (
    AuxiliaryOptimum,
    auxiliary_optimum,
    auxiliary_step_effect,
    average_scalar,
    best_scalar,
    cosine_excess,
    excess_error,
)

__all__ = [
    "AuxiliaryOptimum",
    "Family",
    "FamilyOptimum",
    "QuadraticForm",
    "TaskPoints",
    "attention_error",
    "auxiliary_optimum",
    "auxiliary_step_effect",
    "average_scalar",
    "best_scalar",
    "cosine_excess",
    "error",
    "excess_error",
    "fully_tuned",
    "minimal_update_scalar",
    "pretrained",
    "pretraining_loss",
    "quadratic_form",
    "task_points",
    "threshold_shots",
    "value_tuned",
]
