"""The kernels compile for GPUs that are not here, within budgets of registers, stack and shared memory."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NEXT_TRITON, needs_next_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

PROGRAM = Path(__file__).parent / "launches.py"
NVIDIA = ("sm_80", "sm_90", "sm_100")
# Of one block, which Triton does not check: 163 KB on sm_80, 227 KB on sm_90 and sm_100, 64 KB on gfx942.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TENSOR_CORES = ("HMMA", "UTCHMMA", "HGMMA", "XF32")
ATOMICS = ("RED", "REDG", "ATOM", "ATOMG")
MAIN = ["layer", "stack", "sampled stack"]


def table(rows):
    """Rows of the program for people."""
    lines = [f"{'call':16} {'kernel':17}   m dtype    target  {'regs':>4} {'stack':>5} {'shared':>6} {'s':>5}"]
    for row in rows:
        lines.append(
            f"{row['call']:16} {row['kernel']:17} {row['m']:3} {row['dtype']:8} {row['target']:7} "
            f"{row['registers']:4} {row['stack']:5} {row['shared']:6} {row['seconds']:5} "
            + " ".join(f"{name}:{count}" for name, count in row["opcodes"].items() if count)
        )
    return "\n".join(lines)


@pytest.fixture
def compiled(record_property):
    """Rows of the program; their table is shown in the summary of the tests."""

    def run(*arguments, site=None):
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH"), str(PROGRAM.parents[2])]))
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
        command = [sys.executable, PROGRAM, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        record_property("table", table(rows))
        return rows

    return run


def check(row, stack=16):
    """No spill beyond what Triton's own assembler flag can cause, no atomic, no tensor core where IEEE was asked."""
    assert row["stack"] <= stack, row
    assert row["shared"] <= SHARED[row["target"]], row
    assert not any(row["opcodes"].get(name) for name in ATOMICS), row
    assert not any(row["opcodes"].get(name) for name in TENSOR_CORES), row
    if not row["fused"]:
        assert row.get("fused64", 0) == 0, row


@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_default_configuration(target, request, compiled):
    calls = [] if request.config.getoption("--triton-sweep") or target == "sm_90" else ["--calls", *MAIN]
    rows = compiled("--targets", target, *calls)
    assert {"stream_kernel", "attention_kernel", "sum_runs_kernel", "task_kernel"} <= {row["kernel"] for row in rows}
    for row in rows:
        check(row)


@pytest.mark.parametrize(("m", "dtype"), [(11, "float64"), (21, "float32")])
def test_other_widths_and_float64(m, dtype, compiled):
    for row in compiled("--targets", "sm_90", "--width", m, "--dtype", dtype, "--calls", "layer", "stack"):
        check(row)


@pytest.mark.parametrize(("m", "dtype"), [(21, "float64"), (33, "float32")])
def test_wide_tokens(m, dtype, compiled):
    """A matrix of M = 64, or of 32 in float64, takes too many registers: the stack spills, the layer does not."""
    for row in compiled("--targets", "sm_90", "--width", m, "--dtype", dtype, "--calls", "layer", "stack"):
        check(row, 16 if row["kernel"] != "attention_kernel" else 1024)


def test_tensor_cores_are_there_when_they_are_asked_for(compiled):
    rows = compiled("--targets", "sm_80", "--calls", "stack", "--precision", "tf32")
    (row,) = [row for row in rows if row["kernel"] == "attention_kernel"]
    assert row["opcodes"]["HMMA"] > 0
    assert row["stack"] <= 16


@needs_next_triton
def test_the_next_triton(compiled):
    rows = compiled("--targets", "sm_90", "--calls", "layer", "stack", site=NEXT_TRITON)
    assert {row["triton"] for row in rows} != {importlib.metadata.version("triton")}
    for row in rows:
        check(row)
