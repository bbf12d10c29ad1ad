"""The kernels compile for GPUs that are not here, within budgets of registers, stack and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.op_cases import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

PROGRAM = Path(__file__).parents[1] / "support" / "triton_launches.py"
NVIDIA = ("sm_80", "sm_90", "sm_100")
# Of one block, which Triton does not check: 163 KB on sm_80, 227 KB on sm_90 and sm_100, 64 KB on gfx942.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TENSOR_CORES = ("HMMA", "UTCHMMA", "HGMMA", "XF32")
ATOMICS = ("RED", "REDG", "ATOM", "ATOMG")
MAIN = ["layer", "gram layer", "stack", "stack, data", "sampled stack"]
WIDTHS = (11, 21, 33)  # of each padded width


def table(rows):
    """Rows of the program for people."""
    lines = [f"{'call':16} {'kernel':17}   m dtype    target  regs stack spill shared     s"]
    for row in rows:
        lines.append(
            f"{row['call']:16} {row['kernel']:17} {row['m']:3} {row['dtype']:8} {row['target']:7} "
            f"{row['registers']:4} {row['stack']:5} {row['spilled']:5} {row['shared']:6} {row['seconds']:5} "
            + " ".join(f"{name}:{count}" for name, count in row["opcodes"].items() if count)
        )
    return "\n".join(lines)


@pytest.fixture
def compiled(record_property):
    """Rows of the program; their table is shown in the summary of the tests."""

    def run(*arguments):
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PROGRAM.parents[2])]))
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
        command = [sys.executable, PROGRAM, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        record_property("table", table(rows))
        return rows

    return run


def check(row):
    """No spill beyond what Triton's own assembler flag can cause, no atomic, no tensor core where IEEE was asked."""
    assert row["spilled"] <= 16, row
    assert row["shared"] <= SHARED[row["target"]], row
    assert not any(row["opcodes"].get(name) for name in ATOMICS), row
    if row["precision"] == "ieee":
        assert not any(row["opcodes"].get(name) for name in TENSOR_CORES), row
    # Without tensor cores for float64, as on sm_100, its dots are fused multiply-adds: 32 in a sampler at m = 11.
    if not row["fused"] and (row["target"], row["dtype"]) != ("sm_100", "float64"):
        assert row.get("fused64", 0) == 0, row


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", WIDTHS)
@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_default_configurations(target, m, dtype, request, compiled):
    """Every kind of launch on sm_90, with --triton-sweep on all; elsewhere those that need most registers."""
    calls = [] if request.config.getoption("--triton-sweep") or target == "sm_90" else ["--calls", *MAIN]
    rows = compiled("--targets", target, "--width", m, "--dtype", dtype, *calls)
    assert {"stream_kernel", "attention_kernel", "sum_runs_kernel", "task_kernel"} <= {row["kernel"] for row in rows}
    for row in rows:
        check(row)


@pytest.mark.parametrize("m", WIDTHS)
@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_tensor_cores_are_there_when_they_are_asked_for(target, m, compiled):
    calls = ["stack", "stack, data", "sampled stack"]
    rows = compiled("--targets", target, "--width", m, "--calls", *calls, "--precision", "tf32")
    for row in rows:
        check(row)
    (row,) = [row for row in rows if row["kernel"] == "attention_kernel" and row["call"] == "stack"]
    assert any(row["opcodes"].get(name) for name in TENSOR_CORES), row
