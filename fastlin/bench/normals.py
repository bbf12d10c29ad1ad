"""What a random normal costs."""

import statistics
from typing import Any

import torch

from fastlin import _extension, _info
from fastlin.bench.rows import Row
from fastlin.bench.timing import wall_clock


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Normals on one thread, written to a buffer that stays in the cache: the median of many short stretches."""
    out = torch.empty(512, 64)
    try:
        fill = _extension.loaded().fill_normal
    except ImportError as error:
        return {"lines": [], "values": {}, "skipped": {"fastlin": str(error)}}
    options = {"instruction_set": _info.info()["instruction_set"], "threads": 1}

    def seconds(step: int) -> float:
        return wall_clock(lambda: fill(out.data_ptr(), *out.shape, "float32", 1, step, 0, 0, 0, **options), 1)

    each = statistics.median(seconds(step) for step in range(20 if quick else 2000)) / out.numel()
    deviation = float(out.std())
    if not abs(deviation - 1) < 0.05:
        return {"lines": [], "values": {}, "wrong": {"fastlin": f"normals have standard deviation {deviation:.3g}"}}
    return {"lines": [f"{1e9 * each:.2f} ns a normal (fill_normal, float32)"], "values": {"fastlin": each}}
