"""Bugs that are put into a copy of the kernels are found by the tests."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastlin

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FOLDER = Path(__file__).parent
INTERPRETED = {
    "a wrong mask": ("tiles.py", "is_there = lane < count", "is_there = lane < count - 1"),
    "a lost tail block": ("stream.py", "for first in range(0, n, BN)", "for first in range(0, n - BN + 1, BN)"),
    "a lost row of a sum": ("reduce.py", "there = (row < count)", "there = (row < count - 1)"),
    "a transposed factor": ("attention.py", "BB, M), S0, m, M, PREC, YT=True)", "BB, M), S0, m, M, PREC)"),
}


@pytest.fixture
def planted(tmp_path):
    """Put a bug into a copy of the package; returns the folder to import it from."""

    def plant(file, right, wrong):
        shutil.copytree(
            Path(fastlin.__file__).parent, tmp_path / "fastlin", ignore=shutil.ignore_patterns("__pycache__")
        )
        path = tmp_path / "fastlin/backends/triton/kernels" / file
        text = path.read_text()
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong))
        return str(tmp_path)

    return plant


def run(folder, program, **variables):
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *program], env=environment, cwd=folder, capture_output=True, text=True)


PROBLEMS = """
import sys; sys.path.insert(0, {tests!r})
import fastlin as fl
from helpers import assert_close, make, results
assert fl.__file__.startswith({folder!r})
for op in ("prompt_loss", "stack_loss"):
    case = make(op, B=7, n=17, m=3, K=3, t=1, seed=1)
    found, exact = results(case, backend="triton"), results(case, fl.reference)
    for name, value in exact.items():
        assert_close(found[name], value, what=f"{{op}} {{name}}")
"""


@pytest.mark.parametrize("bug", INTERPRETED)
def test_the_reference_finds(bug, planted):
    folder = planted(*INTERPRETED[bug])
    problems = PROBLEMS.format(tests=str(FOLDER.parent), folder=folder)
    found = run(folder, ["-c", problems], TRITON_INTERPRET="1")
    assert found.returncode == 1
    assert "relative error" in found.stderr, found.stderr[-2000:]


def test_the_reference_finds_nothing_where_nothing_is(planted):
    folder = planted("tiles.py", "is_there = lane < count", "is_there = lane < count")
    found = run(folder, ["-c", PROBLEMS.format(tests=str(FOLDER.parent), folder=folder)], TRITON_INTERPRET="1")
    assert found.returncode == 0, found.stderr[-2000:]


def test_the_opcodes_find_a_tf32_dot(planted):
    """The interpreter does not round to TF32; the compiled kernel shows its tensor cores."""
    right = "tl.dot(X, Y, input_precision=PREC, out_dtype=X.dtype)"
    folder = planted("matrices.py", right, "tl.dot(X, Y, out_dtype=X.dtype)")
    program = [str(FOLDER / "launches.py"), "--targets", "sm_80", "--calls", "stack"]
    found = run(folder, program, TRITON_INTERPRET="0")
    assert found.returncode == 0, found.stderr[-2000:]
    (row,) = [line for line in found.stdout.splitlines() if "attention_kernel" in line]
    assert '"HMMA": 0' not in row
