"""Ctrl-C and the GIL, in real processes and against real time."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.folders import visible
from support.op_cases import make
from support.training_runs import TOML

import fastlin as fl
from fastlin import cli, plots
from fastlin._files import read_json


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


def test_other_python_threads_run_during_a_call():
    """A thread that counts gets on while a kernel runs, which it could not if the call held the GIL."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    def progress(B):
        case = make("stack_loss", B=B, n=2, m=8, L=4, scale=0.01, backend="cpu")
        before = counted[0]
        case()
        return counted[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # Who holds the GIL is not made to let it go.
    counter = threading.Thread(target=count)
    counter.start()
    try:
        of_a_small_call, of_a_large_call = progress(1), progress(400_000)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        counter.join()
    assert of_a_large_call > 10 * (of_a_small_call + 1)


INTERRUPTED = """
import os, signal, sys, threading, time
import torch, fastlin as fl

torch.set_num_threads({threads})
{problem}
small = call(64)
call({some})
start = time.perf_counter()
call({some})
# As many as take four seconds on this machine.
expected = 4.0
many = int({some} * expected / (time.perf_counter() - start))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.perf_counter()
try:
    call(many)
except KeyboardInterrupt:
    print("interrupted", (time.perf_counter() - start) / expected)
assert all(torch.equal(a, b) for a, b in zip(call(64), small))
call({some})
print("works")
"""

STACK = """
data = [torch.randn(1, 2, 16), torch.randn(1, 16), torch.randn(1)]
model = [0.1 * torch.randn(6, 16, 16), 0.1 * torch.randn(6, 16, 16), torch.randn(16)]

def call(part):
    return fl.stack_loss(*(t.expand(part, *t.shape[1:]) for t in data), None, None, *model, scale=0.01, backend="cpu")
"""
LONG = """
z, q, y = torch.randn(512, 1, 16), torch.randn(512, 16), torch.randn(512)
W, v = torch.randn(16, 16), torch.randn(16)

def call(n):
    return fl.prompt_loss(z.expand(-1, n, -1), q, y, None, None, W, v, scale=1 / n, backend="cpu")
"""
PROBLEMS = {
    "stack": {"problem": STACK, "some": 4000},
    "long contexts": {"problem": LONG, "some": 20_000},
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_keyboard_interrupt(threads, problem):
    """A call of many seconds ends soon after a signal, at a small part of its work, and the next calls are right."""
    done = run(INTERRUPTED.format(threads=threads, **PROBLEMS[problem]))
    assert done.returncode == 0, done.stderr
    interrupted, works = done.stdout.splitlines()
    assert interrupted.startswith("interrupted ")
    assert float(interrupted.split()[1]) < 0.5
    assert works == "works"


def test_keyboard_interrupt_without_a_handler():
    """It leaves the process as any other KeyboardInterrupt does."""
    script = INTERRUPTED.format(threads=2, **PROBLEMS["stack"])
    done = run(script.replace("except KeyboardInterrupt", "except ZeroDivisionError"))
    assert done.returncode == -2
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "works" not in done.stdout


def test_stopped_by_ctrl_c_and_resumed(tmp_path, monkeypatch):
    """Exit 130 with a checkpoint; --resume ends with the bits of a run that was not stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "experiment", lambda folder: [])
    Path("own.toml").write_text(TOML, encoding="utf-8")
    command = [sys.executable, "-m", "fastlin", "train", "own.toml", "--regime", "joint", "--n", "2"]
    command += ["--steps", "1000", "--batch", "256", "--lr", "0.01", "--trials", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--out", "stopped"], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    records = Path("stopped/joint-n2/records.jsonl")
    while not (records.exists() and records.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "fastlin: stopped; --resume resumes stopped\n"
    assert "checkpoint.safetensors" in visible(Path("stopped/joint-n2"))
    assert "result.json" not in visible(Path("stopped/joint-n2"))
    given = ["train", "own.toml", *command[5:]]
    assert cli.main([*given, "--out", "stopped", "--resume"]) == 0
    assert cli.main([*given, "--out", "whole"]) == 0
    assert Path("stopped/joint-n2/records.jsonl").read_bytes() == Path("whole/joint-n2/records.jsonl").read_bytes()
    first, second = (read_json(Path(out, "summary.json"), dict)["cells"][0] for out in ("stopped", "whole"))
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in second.items() if k != "seconds"}
    assert math.isfinite(first["best"])
    # Not the bytes of the files: safetensors writes the entries of its header in any order.
    ends = [fl.models.load(Path(out, "joint-n2/model.safetensors")).state_dict() for out in ("stopped", "whole")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
