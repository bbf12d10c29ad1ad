"""The interpreter's tests, in a process of their own: the variable is read when a kernel is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_suite(file, request):
    sweep = ["--triton-sweep"] if request.config.getoption("--triton-sweep") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *sweep, FOLDER / file]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(run.stdout[-3000:])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert " passed" in run.stdout
