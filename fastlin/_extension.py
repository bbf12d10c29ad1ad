"""The compiled modules `fastlin._C` and `fastlin._cuda`, each loaded at first use."""

import functools
import importlib
import importlib.util
from types import ModuleType

from fastlin._version import __version__

CPU = "fastlin._C"
CUDA = "fastlin._cuda"

_NOT_BUILT = {
    CPU: (
        "a source tree, or an install with FASTLIN_NO_EXTENSION=1",
        "install fastlin without that variable and with a C++17 compiler",
    ),
    CUDA: (
        "nvcc was not found when fastlin was installed, or FASTLIN_NO_CUDA=1 or FASTLIN_NO_EXTENSION=1 was set",
        "install fastlin from source where nvcc of the CUDA toolkit is on the PATH",
    ),
}
"""Why a module may be missing, and what to do about it."""


def extension(name: str = CPU) -> ModuleType | None:
    """A compiled module, or None when it cannot be used, for the reason of `why_missing`."""
    return _load(name)[0]


def loaded(name: str = CPU) -> ModuleType:
    """A compiled module that is known to be usable."""
    module, reason = _load(name)
    assert module is not None, reason
    return module


def why_missing(name: str = CPU) -> str | None:
    """The reason why `extension(name)` is None and what to do about it; None when the module can be used."""
    return _load(name)[1]


@functools.cache
def _load(name: str) -> tuple[ModuleType | None, str | None]:
    if importlib.util.find_spec(name) is None:
        cause, remedy = _NOT_BUILT[name]
        return None, f"{name} is not built ({cause}); {remedy}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return None, f"{name} does not load: {error}; reinstall fastlin with this Python"
    built = getattr(module, "__version__", "unknown")
    if built != __version__:
        return None, f"{name} was built for fastlin {built}, this is fastlin {__version__}; reinstall fastlin"
    return module, None
