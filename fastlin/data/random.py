"""Random tensors that depend on (seed, step, stream, sequence, draw) alone.

The extension serves when it is there, else numpy: uniforms and chi variates have the same bits, normals differ by the
rounding of log, sin, cos and sqrt in their dtype. `fastlin.data.philox` has the layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlin import _extension, _instruction_sets
from fastlin.data import philox
from fastlin.data.chi import chi as chi_oracle
from fastlin.data.philox import Coordinates

_DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def uniform(
    rows: int,
    columns: int,
    *,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    offset: int = 0,
    block: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Uniforms on (0, 1), in float32 on (0, 1] after rounding.

    Parameters
    ----------
    rows, columns
        Row i is sequence `offset` + i modulo 2⁶⁴, column j is draw 4 `block` + j, below 2²⁶.
    seed, offset
        In [0, 2⁶⁴). A batch can be taken in pieces by `offset`.
    step, stream
        In [0, 2²⁴) and [0, 2¹⁶).
    block
        First block of four draws, in [0, 2²⁴).
    dtype
        torch.float32 or torch.float64.

    Returns
    -------
    u
        (rows, columns), contiguous, on the CPU.
    """
    return _fill("fill_uniform", philox.uniforms, rows, columns, seed, step, stream, offset, block, dtype)


def normal(
    rows: int,
    columns: int,
    *,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    offset: int = 0,
    block: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Standard normals by Box-Muller, from the same words as `uniform` with the same arguments.

    Returns
    -------
    x
        (rows, columns), contiguous, on the CPU; columns 2i and 2i+1 come from draws 2i and 2i+1.
    """
    return _fill("fill_normal", philox.normals, rows, columns, seed, step, stream, offset, block, dtype)


def chi(batch: int, freedom: Sequence[int], at: Coordinates) -> torch.Tensor:
    """Chi variates (batch, len(freedom)) of the slots from a block on, float64: `fastlin.data.chi` in bits.

    Parameters
    ----------
    batch
        Number of sequences.
    freedom
        Degrees of freedom of each slot; 0 gives 0.
    at
        Where in the generator; `block` is the first of the section.
    """
    compiled = _extension.extension()
    if compiled is None:
        return torch.from_numpy(chi_oracle(freedom, batch, at))
    out = np.empty((batch, len(freedom)))
    compiled.fill_chi(out.ctypes.data, batch, list(freedom), "float64", **at, **_machine())
    return torch.from_numpy(out)


def _machine() -> dict[str, Any]:
    """What a kernel runs on; the numbers do not depend on the threads."""
    return {"instruction_set": _instruction_sets.instruction_set(), "threads": torch.get_num_threads()}


def _fill(
    kernel: str,
    oracle: Callable[..., NDArray[np.floating[Any]]],
    rows: int,
    columns: int,
    seed: int,
    step: int,
    stream: int,
    offset: int,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"dtype: got {dtype}, wants torch.float32 or torch.float64")
    rows, columns, at = philox.validate(rows, columns, seed=seed, step=step, stream=stream, offset=offset, block=block)
    compiled = _extension.extension()
    if compiled is None:
        return torch.from_numpy(oracle(rows, columns, **at, dtype=name))
    # A buffer of numpy's: inside torch.func a tensor of torch's own may be a wrapper without memory.
    out = np.empty((rows, columns), dtype=name)
    getattr(compiled, kernel)(out.ctypes.data, rows, columns, name, **at, **_machine())
    return torch.from_numpy(out)
