"""Short runs that are interrupted or killed, and their comparison.

This file is also a program: it forks a process for each line of its input, so that tests can kill it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import fastlin as fl
from fastlin import cli
from fastlin._files import read_json
from fastlin.training import judge, record
from fastlin.training.loop import Loop
from fastlin.training.record import Folder

CHECKPOINT = "checkpoint.safetensors"
STEPS, EVERY = 24, 5  # steps of a run, and between the checkpoints of one that is to be killed
EVALUATION_BATCH = 256
SIZES = {"steps": STEPS, "batch": 64, "trials": 3, "records": STEPS // 3}
# Sizes of runs with faults.
SHORT = {"steps": 20, "batch": 64, "trials": 3, "records": 10, "lr": 0.02}
MODELS = {"full": {"model": "full"}, "stack": {"model": "stack", "layers": 2}}
OPTIMISER = {
    "adam": {"average": 0.4, "clip": 0.5},
    "momentum": {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9}, "own_data": True, "average": 0.0},
    "lbfgs": {
        "trials": 1,
        "optimiser": "lbfgs",
        "optimiser_options": {"max_iter": 3},
        "lr": 0.01,
        "clip": None,
        "average": 0.7,
    },
}
TOML = """
name = "two tasks"
dimension = 3
means = [1, -1]
covariances = [1, 1]
weights = [0.4, 0.6]
context_lengths = [5]
"""


def mixture(last=-1.0):
    return fl.TaskMixture([[1.0] * 3, [-1.0, -1.0, last]], torch.eye(3).expand(2, 3, 3), [0.4, 0.6])


def train(regime="plain", **options):
    return fl.train(mixture(), regime, 5, **{**SIZES, **options})


def before_step(patch, at, what, every=1):
    """Call `what` before step `at`; allow checkpoints only at multiples of `every` steps.

    Attributes are set by `patch`, as setattr does.
    """
    one_step, save = Loop._one_step, Loop._save

    def patched_step(self, *arguments):
        if self.step == at:
            what()
        one_step(self, *arguments)

    def patched_save(self, folder):
        if self.step % every == 0:
            save(self, folder)

    patch(Loop, "_one_step", patched_step)
    patch(Loop, "_save", patched_save)


def send(number):
    os.kill(os.getpid(), number)


def interrupt(folder, at, regime="plain", **options):
    """Train, and interrupt before step `at`; leaves a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch.setattr, at - 1, lambda: send(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(regime, out=folder, **options)
    assert (folder / CHECKPOINT).exists()


def serve():
    """Fork a process for each request; print its id and its exit code."""
    torch.set_num_threads(1)
    judge._EVALUATION_BATCH = EVALUATION_BATCH
    train("plain", **OPTIMISER["lbfgs"])
    train("plain", **MODELS["stack"])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.exit(perform(**json.loads(line)))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def perform(errors, regime=None, options=None, command=None, moment="step", at=None, every=EVERY):
    """Train, and kill this process at `moment`, or wait for a signal there with "pause"."""
    for stream in (1, 2):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)

    def kill(*_):
        send(signal.SIGKILL)

    if moment in ("step", "pause"):
        before_step(setattr, at, kill if moment == "step" else signal.pause, every)
    elif moment == "checkpoint":
        fsync, left = os.fsync, iter(range(at))
        os.fsync = lambda file: fsync(file) if next(left, None) is not None else kill()
    elif moment == "result":
        write = record.write_json
        record.write_json = lambda path, value: kill() if path.name == "result.json" else write(path, value)
    elif moment == "forget":
        Folder._forget = kill
    if command is not None:
        return cli.main(command)
    train(regime, **options)
    return 0


class Forker:
    """Runs the program."""

    def __init__(self, errors):
        self.errors, self.busy = errors, False
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **request):
        """Start a process; returns its id."""
        self.wait()
        print(json.dumps({"errors": str(self.errors), **request}), file=self.process.stdin, flush=True)
        self.busy = True
        return int(self.process.stdout.readline())

    def end(self):
        """Wait for the process; returns its exit code."""
        assert self.busy
        self.busy = False
        return int(self.process.stdout.readline())

    def wait(self):
        """Wait for a process that an earlier test left."""
        if self.busy:
            self.end()

    def __call__(self, **request):
        self.start(**request)
        return self.end()


def result(folder):
    found = read_json(folder / "result.json", dict)
    assert found.pop("seconds") > 0
    return found


def assert_same(run, other):
    """Compare all bits except times."""
    assert run.params.keys() == other.params.keys()
    for name, value in run.params.items():
        assert same(value, other.params[name]), name
    for (name, raw), (_, held) in zip(run.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert same(raw, held), name
    for name, value in run.history.items():
        assert same(value, other.history[name]), name
    assert same(run.risk, other.risk)
    assert same(run.risk_error, other.risk_error)
    assert (run.best, run.diverged, run.config) == (other.best, other.diverged, other.config)
    assert str(run.theory) == str(other.theory)
    if run.folder and other.folder:
        assert (run.folder / "records.jsonl").read_bytes() == (other.folder / "records.jsonl").read_bytes()
        assert result(run.folder) == result(other.folder)


def same(a, b):
    """Whether all bits are equal, those of NaN too."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(values):
    return values.detach().contiguous().flatten().view(torch.uint8)


def records(folder):
    return (folder / "records.jsonl").read_bytes()


def await_step(folder, step, child):
    """Wait until the records include the step."""
    end = time.monotonic() + 20
    while not (folder / "records.jsonl").exists() or f'"step": {step},'.encode() not in records(folder):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            pytest.fail(f"{folder}: step {step} does not come")
        time.sleep(0.01)


if __name__ == "__main__":
    serve()
