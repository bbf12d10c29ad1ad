"""`fastlin.info`: what this installation can use, and the reasons for what it cannot."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlin import _extension, _instruction_sets, backends
from fastlin._version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


def info() -> dict[str, Any]:
    """Backends, extension, threads, devices and versions of this installation.

    Returns
    -------
    dict
        ``backends``: by name, whether it can serve or the reason why not; ``auto``: the backends that "auto" tries for
        each device type, best first; ``extension``: the build of the compiled part, or the reason why it is missing;
        ``instruction_set``: that of the compiled kernels; ``cuda``: the build of the CUDA kernels, the driver and the
        devices, or the reason why they are off; ``threads``: those of torch; ``devices``: those of torch; ``versions``.

    Examples
    --------
    >>> found = fl.info()
    >>> found["backends"]["eager"]["available"], found["auto"]["cpu"]
    (True, ['cpu', 'eager'])
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
            **{name: _backend(name) for name in backends.names()},
        },
        "auto": {device: [*order, "eager"] for device, order in {"cpu": (), **backends.ORDER}.items()},
        "extension": {
            "available": compiled is not None,
            "reason": _extension.why_missing(),
            **({} if compiled is None else compiled.build_info()),
        },
        "instruction_set": None if compiled is None else _instruction_sets.instruction_set(),
        "cuda": _cuda(),
        "threads": torch.get_num_threads(),
        "devices": ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())],
    }


def _cuda() -> dict[str, Any]:
    compiled = _extension.extension(_extension.CUDA)
    reason = _extension.why_missing(_extension.CUDA)
    if compiled is not None:
        reason = compiled.why_not() or None
    if reason is None and torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    return {
        "available": reason is None,
        "reason": reason,
        **({} if compiled is None else compiled.build_info()),
        "driver": _driver(),
        "devices": [
            "{} (sm_{}{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
            for i in range(torch.cuda.device_count())
        ],
    }


def _driver() -> str | None:
    try:
        version = re.search(r"(\d+\.\d+[.\d]*)", _DRIVER.read_text())
    except OSError:
        return None
    return version[1] if version else None


def _backend(name: str) -> dict[str, Any]:
    device = torch.device("cuda" if name in backends.ORDER.get("cuda", ()) or name == "cuda" else "cpu")
    reason = backends.why_not(name, "prompt_loss", device, torch.float32, 11)
    return {"available": reason is None, "reason": reason, "auto": True}
