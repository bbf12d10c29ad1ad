"""Random tensors that depend on (seed, step, stream, sequence, draw) alone.

The compiled extension draws them, or numpy where the extension is missing. Uniforms and chi variates have the same bits
on both paths; normals differ by the rounding of log, sin, cos and sqrt in their dtype. `fastlin.data.philox` has the
layout. Keyword arguments are the coordinates, each 0 by default:

    seed, offset    in [0, 2⁶⁴); row i is sequence `offset` + i modulo 2⁶⁴, so a batch can be drawn in pieces
    step, stream    in [0, 2²⁴) and [0, 2¹⁶)
    block           first block of four draws, in [0, 2²⁴); column j is draw 4 `block` + j, below 2²⁶
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from fastlin import _extension, _instruction_sets
from fastlin.data import philox
from fastlin.data.chi import chi as chi_oracle
from fastlin.data.philox import Coordinates

Oracle = Callable[..., NDArray[np.floating[Any]]]
_DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def uniform(rows: int, columns: int, *, dtype: torch.dtype = torch.float32, **at: Unpack[Coordinates]) -> torch.Tensor:
    """Uniforms (rows, columns) on (0, 1), contiguous, on the CPU; rounding to float32 can give 1."""
    return _fill("fill_uniform", philox.uniforms, rows, columns, dtype, at)


def normal(rows: int, columns: int, *, dtype: torch.dtype = torch.float32, **at: Unpack[Coordinates]) -> torch.Tensor:
    """Standard normals (rows, columns), contiguous, on the CPU, from the words that `uniform` reads."""
    return _fill("fill_normal", philox.normals, rows, columns, dtype, at)


def chi(batch: int, freedom: Sequence[int], at: Coordinates) -> torch.Tensor:
    """Chi variates (batch, len(freedom)), float64: arguments and bits of `fastlin.data.chi.chi`."""
    compiled = _extension.extension()
    if compiled is None:
        return torch.from_numpy(chi_oracle(freedom, batch, at))
    out = np.empty((batch, len(freedom)))
    compiled.fill_chi(out.ctypes.data, batch, list(freedom), "float64", **at, **_machine())
    return torch.from_numpy(out)


def _machine() -> dict[str, Any]:
    return {"instruction_set": _instruction_sets.instruction_set(), "threads": torch.get_num_threads()}


def _fill(kernel: str, oracle: Oracle, rows: int, columns: int, dtype: torch.dtype, at: Coordinates) -> torch.Tensor:
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"dtype: got {dtype}, wants torch.float32 or torch.float64")
    rows, columns, at = philox.validate(rows, columns, **at)
    compiled = _extension.extension()
    if compiled is None:
        return torch.from_numpy(oracle(rows, columns, **at, dtype=name))
    # numpy allocates the buffer: inside torch.func, torch.empty may return a wrapper without memory.
    out = np.empty((rows, columns), dtype=name)
    getattr(compiled, kernel)(out.ctypes.data, rows, columns, name, **at, **_machine())
    return torch.from_numpy(out)
