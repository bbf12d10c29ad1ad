"""What is there, what is not, and why."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from fastlin import _extension, backends
from fastlin._version import __version__
from fastlin.backends import cpu


def info() -> dict[str, Any]:
    """Backends, extension, threads, devices and versions of this installation.

    Returns
    -------
    dict
        ``backends``: for each name whether it can serve and, if not, the reason; ``auto``: what "auto" tries for each
        device type, best first; ``extension``: the compiled part and how it was built, or the reason why it is
        missing; ``instruction_set``: the one that compiled kernels run on; ``threads``: torch's; ``devices``: what
        torch sees; ``versions``.
    """
    compiled = _extension.extension()
    return {
        "versions": {
            "fastlin": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "backends": {
            "reference": {"available": True, "reason": None, "auto": False},
            **{name: _backend(name) for name in (*backends.names(), *backends.ABSENT)},
        },
        "auto": {device: [*order, "eager"] for device, order in {"cpu": (), **backends.ORDER}.items()},
        "extension": {
            "available": compiled is not None,
            "reason": _extension.why_missing(),
            **({} if compiled is None else compiled.build_info()),
        },
        "instruction_set": None if compiled is None else cpu.instruction_set(),
        "threads": torch.get_num_threads(),
        "devices": ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())],
    }


def _backend(name: str) -> dict[str, Any]:
    device = torch.device("cuda" if name in backends.ORDER.get("cuda", ()) or name == "cuda" else "cpu")
    reason = backends.why_not(name, "prompt_loss", device, torch.float32, 11)
    return {"available": reason is None, "reason": reason, "auto": True}
