"""Backends that tests make."""

import sys
from types import ModuleType

from fastlin import backends


def install(monkeypatch, backend, device="cpu"):
    """Make a backend the first that "auto" tries on a device type; returns it."""
    module = ModuleType(f"fastlin.backends.{backend.name}")
    module.backend = backend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(backends.ORDER, device, (backend.name,))
    return backend
