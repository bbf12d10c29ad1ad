"""Which kernels of the cuda backend must serve a call, as its `last_kernel` says."""

from __future__ import annotations

import torch

WIDTHS = (6, 7, 11, 12, 21, 22, 33)
"""Those that are compiled; a drawn batch has exactly one of them."""


def of_given(op: str, R: int | None = None, L: int = 1) -> str:
    """A float32 call of one head and at most eight tasks, with gradients of its parameters."""
    if "stack" in op and L > 1:
        return "stack"
    tokens = op in ("prompt_loss", "predict", "stack_loss", "stack_predict")
    return "tokens" if tokens and R in (None, 1) else "trials"


def of_drawn(
    op: str, m: int, K: int, dtype: torch.dtype, R: int | None = None, H: int | None = None, L: int = 2
) -> str:
    """A call that draws its sequences."""
    if dtype != torch.float32 or m not in WIDTHS or K > 8 or H not in (None, 1):
        return "generic"
    if "stack" in op and L > 1:
        return "stack"
    return "drawn" if R in (None, 1) else "trials"
