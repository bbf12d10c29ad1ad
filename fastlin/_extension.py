"""The compiled extension `fastlin._C`, loaded when it is first asked for."""

import functools
import importlib
import importlib.util
from types import ModuleType

from fastlin._version import __version__

_NAME = "fastlin._C"


def extension() -> ModuleType | None:
    """`fastlin._C`, or None when it cannot be used; `why_missing` then says why."""
    return _load()[0]


def loaded() -> ModuleType:
    """`fastlin._C` where it is known to be there."""
    module = extension()
    assert module is not None, why_missing()
    return module


def why_missing() -> str | None:
    """The reason that `extension()` is None and what to do about it, or None when it is there."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    if importlib.util.find_spec(_NAME) is None:
        return None, (
            f"{_NAME} is not built (a source tree, or an install with FASTLIN_NO_EXTENSION=1); "
            "install fastlin without that variable and with a C++17 compiler"
        )
    try:
        module = importlib.import_module(_NAME)
    except ImportError as error:
        return None, f"{_NAME} does not load: {error}; reinstall fastlin with this Python"
    built = getattr(module, "__version__", "unknown")
    if built != __version__:
        return (
            None,
            f"{_NAME} was built for fastlin {built}, this is fastlin {__version__}; reinstall fastlin",
        )
    return module, None
