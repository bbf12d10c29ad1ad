"""The interpreter's tests, in a process of their own: the variable is read when a kernel is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NEXT_TRITON, needs_next_triton

FOLDER = Path(__file__).parent / "kernels"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(*arguments, site=None):
    """Pytest on the interpreter's tests; `site` has a triton that comes before the installed one."""
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@needs_triton
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_suite(file, request):
    sweep = ["--triton-sweep"] if request.config.getoption("--triton-sweep") else []
    run(*sweep, FOLDER / file)


@needs_next_triton
def test_the_next_triton():
    """A problem for each kernel: both paths over tokens, Gram matrices, tokens and matrices that are drawn."""
    some = "floats_of_one_pass or half_precision or chi_variates or (losses_are_those and three)"
    run(FOLDER, "-k", some, site=NEXT_TRITON)
