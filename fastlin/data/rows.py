"""Small linear algebra on many rows in a fixed order of operations, so that no row depends on its neighbours.

A matrix product's bits depend on how a library blocks the batch; these do not, and a kernel can repeat them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def factor(covariance: Tensor) -> Tensor:
    """F (d, d) with F F' = covariance: the Cholesky factor, or a square root when it is singular."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed) != 0:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt()
    return root


def apply_factor(F: Tensor, normals: Tensor) -> Tensor:
    """F (..., d, d) times normals (..., d), column by column."""
    out = F[..., :, 0] * normals[..., :1]
    for j in range(1, normals.shape[-1]):
        out = out + F[..., :, j] * normals[..., j : j + 1]
    return out


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last dimension, in order."""
    out = a[..., 0] * b[..., 0]
    for j in range(1, a.shape[-1]):
        out = out + a[..., j] * b[..., j]
    return out


def gram(rows: Tensor) -> Tensor:
    """Sums of outer products (B, m, m) of rows (B, r, m), in order."""
    out = rows.new_zeros(rows.shape[0], rows.shape[2], rows.shape[2])
    for row in rows.unbind(1):
        out = out + row[:, :, None] * row[:, None]
    return out
