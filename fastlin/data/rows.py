"""Small linear algebra of the task sources.

`apply_factor`, `dot` and `gram` act on each row of a batch in a fixed order of operations, which a kernel can repeat.
The bits of a library's matrix product depend on how it blocks the batch; theirs do not.
"""

import torch
from torch import Tensor


def factor(covariance: Tensor) -> Tensor:
    """F (d, d) with F F' = covariance: the Cholesky factor, or a square root of a singular covariance."""
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


def turned(theta: Tensor, S: Tensor, cosine: float) -> Tensor:
    """Theta (d,) turned to this cosine, with norm and angle in <a, b> = a'S b.

    It turns towards the coordinate axis that is most nearly orthogonal to it.
    """
    cosine = float(cosine)
    if not -1.0 <= cosine <= 1.0:
        raise ValueError(f"cosine: got {cosine}, wants a number from -1 to 1")
    along, size = S @ theta, float(theta @ S @ theta)
    other = torch.zeros_like(theta)
    if abs(cosine) < 1.0:
        if len(theta) == 1 or not size > 0.0:
            raise ValueError(f"cosine: got {cosine} for theta {theta.tolist()}, wants 1 or -1: theta cannot turn")
        least = int((along.square() / S.diagonal()).argmin())
        other[least] = 1.0
        other = other - float(along[least]) / size * theta
        other = other * (size / float(other @ S @ other)) ** 0.5
    result: Tensor = cosine * theta + (1.0 - cosine**2) ** 0.5 * other
    return result
