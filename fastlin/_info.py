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
_LEAST_DRIVER = {"12": "525", "13": "580"}
"""By the major version of a build's CUDA, as NVIDIA's table of minor version compatibility has it."""


def info() -> dict[str, Any]:
    """Backends, extension, threads, devices and versions of this installation.

    Returns
    -------
    dict
        ``backends``: by name, whether it can serve or the reason why not; ``auto``: the backends that "auto" tries for
        each device type, best first; ``extension``: the build of the compiled part, or the reason why it is missing;
        ``instruction_set``: that of the compiled kernels; ``cuda``: the build of the CUDA kernels, the driver and the
        devices, with the driver that the build needs and the code that runs on each device, or the reason why they are
        off; ``threads``: those of torch; ``devices``: those of torch; ``versions``.

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
    built = {} if compiled is None else compiled.build_info()
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return {
        "available": reason is None,
        "reason": reason,
        **built,
        "needs_driver": needed_driver(built["cuda"]) if "cuda" in built else None,
        "driver": _driver(),
        "devices": [
            "{} (sm_{}{})".format(torch.cuda.get_device_name(i), *capability)
            for i, capability in enumerate(capabilities)
        ],
        "runs": [code_for(capability, built["architectures"]) for capability in capabilities if built],
    }


def needed_driver(cuda: str) -> str | None:
    """The oldest NVIDIA driver that runs a build of a CUDA version, such as "13.0"; None where it is not known."""
    return _LEAST_DRIVER.get(cuda.partition(".")[0])


def code_for(capability: tuple[int, int], architectures: str) -> str:
    """What a GPU runs of a build, such as "sm_80, PTX of compute_80": machine code, PTX that is compiled, or nothing.

    Machine code runs on later GPUs of the same generation, PTX on all later ones.
    """
    built = [divmod(int(number), 10) for number in re.findall(r"sm_(\d+)", architectures)]
    fitting = [(major, minor) for major, minor in built if major == capability[0] and minor <= capability[1]]
    if fitting:
        return "machine code of sm_{}{}".format(*max(fitting))
    ptx = [divmod(int(number), 10) for number in re.findall(r"compute_(\d+)", architectures)]
    if any(version <= capability for version in ptx):
        return (
            "PTX of compute_{}{}, which the driver compiles at the first call; that may take about a minute and look "
            "like a hang, and the driver keeps the result (CUDA_CACHE_PATH); FASTLIN_CUDA_ARCHS=native builds machine "
            "code".format(*max(version for version in ptx if version <= capability))
        )
    return "nothing: FASTLIN_CUDA_ARCHS=native builds machine code"


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
