"""Processes that train together: torch.distributed on this machine, and torchrun with kills and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import team_runs
from support.folders import visible
from support.op_cases import DOUBLE
from support.training_runs import TOML, assert_same, records, same

import fastlin as fl

ROOT = Path(__file__).parents[2]

# Of 30 steps. In float64 what rounding leaves is far below; float32 has 6e-8 in each sum, which steps carry on.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Numbers and folders of the same runs in this process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastlin.training.judge._EVALUATION_BATCH", team_runs.BATCH)
        yield {case: team_runs.summary(team_runs.train(case, out=folder / case)) for case in team_runs.CASES}, folder


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["uneven", "stack", "side by side", "diverges", "shards", "alone"]),
        (4, ["uneven", "two sequences", "shards"]),
    ],
)
def test_processes_train_as_one(alone, tmp_path, size, cases):
    """Curves, risks, parameters and divergence; all processes have the same bits, and the first has written."""
    expected, folder = alone
    found = team_runs.launch(size, cases, tmp_path)
    for case in cases:
        for name, value in expected[case].items():
            for rank in range(1, size):
                assert same(found[rank][case][name], found[0][case][name]), (case, name)
            own = found[0][case][name]
            if case in ("shards", "alone") or not value.is_floating_point():
                assert same(own, value.detach()), (case, name)
            else:
                bound = BOUNDS[torch.float32 if case == "uneven" else DOUBLE]
                assert torch.allclose(own, value, rtol=bound, atol=bound, equal_nan=True), (case, name)
        if case == "shards":
            assert records(tmp_path / case) == records(folder / case)
    if "diverges" in cases:
        assert len(found[0]["diverges"]["diverged"]) == 2


# A process of torchrun: slow enough for a signal to come in time; the one of a rank may kill itself, but once.
PROCESS = """
import os, signal, sys, time
from fastlin import cli
from fastlin.training.loop import Loop

one_step = Loop._one_step

def patched(self, *given):
    is_first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if sys.argv[1] == f"kill {os.environ['RANK']}" and self.step == 12 and is_first_try:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "slow":
        time.sleep(0.1)
    one_step(self, *given)

Loop._one_step = patched
sys.exit(cli.main(sys.argv[2:]))
"""
SIZES = {"steps": 24, "batch": 41, "trials": 2}


@pytest.fixture
def started(tmp_path):
    """Starts torchrun with two processes of `fastlin train`, whose checkpoints are made in every step."""
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "setting.toml").write_text(TOML)
    processes = []

    def start(how, *options):
        sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
        command = ["train", tmp_path / "setting.toml", "--regime", "joint", *sizes, "--shards", "2"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        process = subprocess.Popen(
            [*map(str, [*torchrun, tmp_path / "process.py", how, *command, "--out", tmp_path / "runs"])],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """The run of these tests in one process."""
    return fl.train(team_runs.mixture(), "joint", 5, out=tmp_path_factory.mktemp("whole") / "run", **SIZES, shards=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_again_after_a_process_was_killed(started, tmp_path, undisturbed_run, rank):
    """Kill -9 of one process ends the others, with a word about it; what they start again ends as if nothing was."""
    # torchrun looks every 2 s: at 0.1 s, its default, it may end the other process before that has noticed.
    process = started(f"kill {rank}", "--max-restarts", "1", "--monitor-interval", "2")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert f"process {1 - rank} of 2: another process of the run has ended or cannot be reached" in errors
    assert out.count("joint") == 1
    folder = tmp_path / "runs" / "joint-n5"
    assert records(folder) == records(undisturbed_run.folder)
    run = fl.train(team_runs.mixture(), "joint", 5, out=folder, resume=True, **SIZES, shards=2)
    assert_same(run, undisturbed_run)
    assert [name for name in visible(tmp_path / "runs") if "training" not in name] == [
        "joint-n5",
        *("risk.csv", "risk.json", "risk.md"),
        "summary.json",
    ]


def test_a_signal_stops_all_at_one_step_and_one_process_goes_on(started, tmp_path, undisturbed_run):
    """SIGTERM to torchrun leaves a checkpoint; another number of processes ends the run with the same bits."""
    process, folder = started("slow"), tmp_path / "runs" / "joint-n5"
    end = time.monotonic() + 120
    while not (folder / "records.jsonl").exists() or b'"step": 3,' not in records(folder):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "another process of the run" not in errors
    assert (folder / "checkpoint.safetensors").exists()
    assert not (folder / "result.json").exists()
    run = fl.train(team_runs.mixture(), "joint", 5, out=folder, resume=True, **SIZES, shards=2)
    assert_same(run, undisturbed_run)
