"""callback=: what it is called with, what its exceptions do, and the ready ones."""

import importlib.machinery
import importlib.util
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from support.training_runs import CHECKPOINT, STEPS, TOML, assert_same, interrupt, mixture, train
from support.training_runs import records as written

from fastlin import cli, theory
from fastlin.training import callbacks
from fastlin.training.loop import Loop
from fastlin.training.team import Team

pytestmark = pytest.mark.usefixtures("small_evaluations")


def test_a_record_is_a_line_of_the_file_with_theory_and_folder(tmp_path):
    seen = []
    run = train("joint", out=tmp_path / "run", callback=seen.append)
    more = {"theory": theory.joint(mixture(), 5).loss, "folder": tmp_path / "run"}
    assert seen == [{**line, **more} for line in records(tmp_path / "run")]
    assert [record["step"] for record in seen] == list(range(3, STEPS + 1, 3))
    assert torch.equal(torch.tensor([record["loss"] for record in seen], dtype=torch.float64), run.history["loss"])


def test_a_callback_changes_nothing(undisturbed, tmp_path):
    """Its record is a copy."""
    assert_same(
        train("joint", out=tmp_path / "run", callback=lambda record: record["loss"].clear()), undisturbed("joint")
    )


def test_trials_that_diverged_are_none():
    seen = []
    run = train("plain", preset="paper", optimiser="sgd", lr=1e6, callback=seen.append)
    assert set(run.diverged) == {0, 1, 2}
    assert all(set(record) == {"step", "phase", "lr", "loss", "risk", "theory", "folder"} for record in seen)
    assert (seen[-1]["loss"], seen[-1]["risk"], seen[-1]["folder"]) == ([None] * 3, [None] * 3, None)


def test_a_run_that_resumes_calls_with_new_records(tmp_path):
    seen = []
    interrupt(tmp_path / "run", 11)
    train(out=tmp_path / "run", resume=True, callback=lambda record: seen.append(record["step"]))
    assert seen == [12, 15, 18, 21, 24]
    train(out=tmp_path / "run", resume=True, callback=lambda record: seen.append(record["step"]))
    assert len(seen) == 5


def records(folder):
    return [json.loads(line) for line in written(folder).splitlines()]


class Full(OSError):
    """The disk is full."""


def stopping(at):
    def callback(record):
        if record["step"] == at:
            raise Full(f"at step {at}")

    return callback


@pytest.mark.parametrize("at", [3, 12, 21])
def test_an_exception_leaves_a_checkpoint(tmp_path, undisturbed, at):
    """Step 12 ends the first phase."""
    with pytest.raises(Full, match=f"at step {at}"):
        train("fine-tune", out=tmp_path / "run", callback=stopping(at))
    assert (tmp_path / "run" / CHECKPOINT).exists()
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(3, at + 1, 3))
    steps = []
    resumed = train(
        "fine-tune", out=tmp_path / "run", resume=True, callback=lambda record: steps.append(record["step"])
    )
    assert steps == list(range(at + 3, STEPS + 1, 3))
    assert_same(resumed, undisturbed("fine-tune"))


def test_an_exception_at_the_last_record_leaves_the_result(tmp_path, undisturbed):
    with pytest.raises(Full):
        train(out=tmp_path / "run", callback=stopping(STEPS))
    assert_same(train(out=tmp_path / "run", resume=True), undisturbed("plain"))


def test_an_exception_without_a_folder():
    steps = []

    def callback(record):
        steps.append(record["step"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(callback=callback)
    assert steps == [3]


def test_only_the_first_process_calls(monkeypatch):
    """Every process takes part in the broadcast, with a callback or without."""
    calls, broadcasts = [], []

    class Recorded(Team):
        def broadcast(self, make):
            broadcasts.append(self.rank)
            return make() if self.first else None

    for rank in (0, 1):
        loop = Loop.__new__(Loop)
        loop.team, loop.folder, loop.failure = Recorded(rank, 2), None, None
        loop.judge = types.SimpleNamespace(optimum=None)
        loop._callback = lambda record, rank=rank: calls.append(rank)
        loop._call_back({"step": 1})
    assert (calls, broadcasts) == ([0], [0, 1])


def test_what_is_not_a_function_is_refused(tmp_path):
    with pytest.raises(TypeError, match="callback: got 3, wants a function of a record, or None"):
        train(out=tmp_path / "run", callback=3)
    assert not (tmp_path / "run").exists()


RECORD = {"step": 5, "phase": 0, "lr": 0.1, "loss": [4.0, None, 2.0], "risk": [None] * 3, "theory": 2.0, "folder": None}


def test_scalars():
    losses = {"lr": 0.1, "loss/min": 2.0, "loss/median": 3.0, "loss/max": 4.0}
    assert callbacks.scalars(RECORD) == losses
    risks = {"risk/min": 1.9, "risk/median": 3.0, "risk/max": 8.0}
    found = callbacks.scalars({**RECORD, "risk": [8.0, 3.0, 1.9]})
    assert found == {**losses, **risks, "excess_percent": pytest.approx(-5.0)}
    assert callbacks.scalars({**RECORD, "risk": [8.0, 3.0, 1.9], "theory": None}) == {**losses, **risks}


def module(monkeypatch, name, **members):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


class Log:
    """Stands for a SummaryWriter and for a run of wandb."""

    def __init__(self, place, made, **options):
        self.place, self.options, self.rows, self.ended = place, options, {}, False
        made.append(self)

    def add_scalar(self, name, value, step):
        self.rows.setdefault(step, {})[name] = value

    def log(self, numbers, step):
        self.rows[step] = numbers

    def flush(self):
        pass

    def close(self):
        self.ended = True

    finish = close


@pytest.fixture
def logs(monkeypatch):
    """The logs that the stubs of both packages opened."""
    made = []
    module(monkeypatch, "tensorboard")
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda place, **given: Log(place, made, **given))
    module(monkeypatch, "wandb", init=lambda project, **given: Log(project, made, **given))
    return made


def expected(seen):
    return {record["step"]: callbacks.scalars(record) for record in seen}


def test_tensorboard_logs_each_record(logs, tmp_path):
    seen = []
    watch = callbacks.TensorBoard(tmp_path / "events")
    assert logs == []
    run = train("joint", callback=lambda record: (seen.append(record), watch(record)))
    (log,) = logs
    assert (log.place, log.options) == (str(tmp_path / "events"), {"purge_step": 3})
    assert log.rows == expected(seen)
    assert log.rows[STEPS]["risk/min"] == float(run.history["risk"][-1].min())
    assert not log.ended
    watch.close()
    assert log.ended


def test_wandb_logs_each_record(logs):
    seen = []
    with callbacks.WandB("prompts", name="joint", mode="offline") as watch:
        train("joint", callback=lambda record: (seen.append(record), watch(record)))
    (log,) = logs
    assert (log.place, log.options) == ("prompts", {"name": "joint", "mode": "offline"})
    assert log.rows == expected(seen)
    assert log.ended


@pytest.mark.parametrize(("make", "extra"), [(callbacks.TensorBoard, "tensorboard"), (callbacks.WandB, "wandb")])
def test_a_missing_package_names_the_extra(monkeypatch, make, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as error:
        make("here")
    assert str(error.value) == f"{extra}: not installed; pip install 'fastlin[{extra}]' brings it"
    assert error.value.name == extra


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = []
    with callbacks.TensorBoard(tmp_path) as watch:
        train("joint", callback=lambda record: (seen.append(record), watch(record)))
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, values in (("loss/min", [min(record["loss"]) for record in seen]), ("lr", [r["lr"] for r in seen])):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [record["step"] for record in seen]
        assert [event.value for event in scalars] == pytest.approx(values)


@pytest.fixture
def command(tmp_path, monkeypatch, no_pictures):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(TOML)
    return ["train", "own.toml", "--regime", "plain,joint", "--steps", "4", "--batch", "64", "--out", "run", "--watch"]


def test_the_command_watches_each_cell(logs, command):
    for package in ("tensorboard", "wandb"):
        assert cli.main([*command, package, "--resume"]) == 0
        for cell in ("plain-n5", "joint-n5"):
            shutil.rmtree(Path("run", cell))
    assert [log.place for log in logs] == [
        *(f"run/tensorboard/{cell}-n5" for cell in ("plain", "joint")),
        *["two tasks"] * 2,
    ]
    assert [log.options for log in logs[2:]] == [
        {"name": f"{cell}-n5", "dir": Path("run")} for cell in ("plain", "joint")
    ]
    assert all(list(log.rows) == [1, 2, 3, 4] and log.ended for log in logs)


def test_the_command_without_the_package(command, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main([*command, "wandb"]) == 1
    assert capsys.readouterr().err == "fastlin: wandb: not installed; pip install 'fastlin[wandb]' brings it\n"
    assert not Path("run").exists()
