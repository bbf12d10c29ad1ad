import importlib
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.packages import build, copy_of_sources

from fastlin import _extension
from fastlin._version import __version__
from fastlin.data import random


@pytest.fixture(autouse=True)
def fresh_loader():
    _extension._load.cache_clear()
    yield
    _extension._load.cache_clear()


def serve(monkeypatch, load):
    """Make the loader find an extension and import it by `load`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", load)


def test_loaded_or_reason():
    module, reason = _extension.extension(), _extension.why_missing()
    assert (module is None) != (reason is None)
    assert module is not None, reason
    assert module.__version__ == __version__


def test_build_info():
    module = _extension.extension()
    assert module is not None, _extension.why_missing()
    info = module.build_info()
    assert info["version"] == __version__
    assert info["cxx_standard"] >= 201703
    assert info["optimized"] is True
    assert "-O3" in info["flags"]
    assert info["compiler"]


def test_not_built(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _extension.extension() is None
    assert "not built" in _extension.why_missing()
    assert "FASTLIN_NO_EXTENSION" in _extension.why_missing()
    assert random.normal(2, 3).shape == (2, 3)


def test_import_error(monkeypatch):
    def load(name):
        raise ImportError("undefined symbol: xyz")

    serve(monkeypatch, load)
    assert _extension.extension() is None
    assert "undefined symbol: xyz" in _extension.why_missing()


@pytest.mark.parametrize("built", ["9.9.9", None])
def test_other_version_is_not_used(monkeypatch, built):
    stale = ModuleType("fastlin._C")
    if built is not None:
        stale.__version__ = built
    serve(monkeypatch, lambda name: stale)
    assert _extension.extension() is None
    assert f"built for fastlin {built or 'unknown'}, this is fastlin {__version__}" in _extension.why_missing()


def test_loaded_once(monkeypatch):
    module = ModuleType("fastlin._C")
    module.__version__ = __version__
    calls = []
    serve(monkeypatch, lambda name: calls.append(name) or module)
    assert _extension.extension() is _extension.extension() is module
    assert _extension.why_missing() is None
    assert calls == ["fastlin._C"]


def test_install_without_extension_says_why(tmp_path):
    copy_of_sources(tmp_path)
    built = build("wheel", tmp_path, FASTLIN_NO_EXTENSION="1")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert (installed / "fastlin" / "py.typed").exists()
    script = "from fastlin import _extension as e; print(e.__file__, e.extension(), e.why_missing(), sep='\\n')"
    # Without site (-S) an editable install does not lend its own _C.
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    found = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path / "dist",
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    file, module, reason = found.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert module == "None"
    assert "FASTLIN_NO_EXTENSION=1" in reason


def test_install_without_compiler_fails(tmp_path):
    copy_of_sources(tmp_path)
    built = build("wheel", tmp_path, CC="no-such-compiler", CXX="no-such-compiler", FASTLIN_NO_CUDA="1")
    assert built.returncode != 0
    assert "FASTLIN_NO_EXTENSION=1 installs without it" in built.stderr
