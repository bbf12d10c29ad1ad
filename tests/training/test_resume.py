"""Runs that are stopped, by whatever means, go on to the bits of a run that was not.

This file is also a program: it forks a process for each line that it reads, to be killed without a trace.
"""

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import fastlin as fl
from fastlin import cli, plots
from fastlin.experiments import cells, config, plan
from fastlin.training.loop import Loop
from fastlin.training.protocol import OPTIMISERS
from fastlin.training.record import Folder
from fastlin.training.signals import interruptible

CHECKPOINT = "checkpoint.safetensors"
STEPS, EVERY = 24, 5  # steps of a run, and between the checkpoints of one that is to be killed
EVALUATION_BATCH = 256
SIZES = {"steps": STEPS, "batch": 64, "trials": 3, "records": STEPS // 3}
REGIMES = ("plain", "fine-tune", "joint+heads")
MODELS = {"full": {"model": "full"}, "stack": {"model": "stack", "layers": 2}}
OPTIMISER = {
    "adam": {"average": 0.4, "clip": 0.5},
    "momentum": {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9}, "own_data": True, "average": 0.0},
    "lbfgs": {"optimiser": "lbfgs", "optimiser_options": {"max_iter": 3}, "lr": 0.01, "clip": None, "average": 0.7},
}
TOML = """
name = "two tasks"
dimension = 3
means = [1, -1]
covariances = [1, 1]
weights = [0.4, 0.6]
context_lengths = [5]
"""


@pytest.fixture(scope="module", autouse=True)
def small_evaluations():
    """Risks of stacks are taken on small samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_EVALUATION_BATCH", EVALUATION_BATCH)
        yield


def mixture():
    return fl.TaskMixture([[1.0] * 3, [-1.0] * 3], torch.eye(3).expand(2, 3, 3), [0.4, 0.6])


def train(regime, **options):
    return fl.train(mixture(), regime, 5, **{**SIZES, **options})


def doctor(patch, at, what, every=1):
    """Before step `at` something happens; checkpoints that fall due are made at multiples of `every` steps."""
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


# --- The program ------------------------------------------------------------------------------------------------------


def serve():
    """Fork a process for each request; say its id, and how it ended."""
    torch.set_num_threads(1)
    plan._EVALUATION_BATCH = EVALUATION_BATCH
    train("plain", **OPTIMISER["lbfgs"])
    train("plain", **MODELS["stack"])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.exit(perform(**json.loads(line)))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def perform(errors, regime=None, options=None, command=None, moment="step", at=None, every=EVERY):
    """A run that kills itself at a moment, or waits for a signal when `moment` is "pause"."""
    for stream in (1, 2):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)

    def kill(*_):
        send(signal.SIGKILL)

    if moment in ("step", "pause"):
        doctor(setattr, at, kill if moment == "step" else signal.pause, every)
    elif moment == "checkpoint":
        fsync, left = os.fsync, iter(range(at))
        os.fsync = lambda file: fsync(file) if next(left, None) is not None else kill()
    elif moment == "result":
        write = Folder._write
        Folder._write = lambda self, name, value: kill() if name == "result.json" else write(self, name, value)
    elif moment == "forget":
        Folder._forget = kill
    if command is not None:
        return cli.main(command)
    train(regime, **options)
    return 0


class Forker:
    """The program, at work."""

    def __init__(self, errors):
        self.errors, self.busy = errors, False
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **request):
        """The id of a process that is under way."""
        self.wait()
        print(json.dumps({"errors": str(self.errors), **request}), file=self.process.stdin, flush=True)
        self.busy = True
        return int(self.process.stdout.readline())

    def end(self):
        """How it ended."""
        assert self.busy
        self.busy = False
        return int(self.process.stdout.readline())

    def wait(self):
        """Until a process that a test has left alone is gone."""
        if self.busy:
            self.end()

    def __call__(self, **request):
        self.start(**request)
        return self.end()


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    made = Forker(tmp_path_factory.mktemp("forker") / "stderr")
    yield made
    made.process.stdin.close()
    made.process.stdout.close()
    assert made.process.wait(timeout=60) == 0


# --- What is compared -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing stopped, by its arguments; each is made once."""

    @functools.cache
    def run(given):
        regime, options = json.loads(given)
        return train(regime, out=tmp_path_factory.mktemp("undisturbed") / "run", **options)

    return lambda regime, **options: run(json.dumps([regime, options]))


def result(folder):
    found = json.loads((folder / "result.json").read_text())
    assert found.pop("seconds") > 0
    return found


def assert_same(run, other):
    """All bits that are not times."""
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
    """Whether all bits are the same, those of NaN too."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(values):
    return values.detach().contiguous().flatten().view(torch.uint8)


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


ENDED = ["model.safetensors", "records.jsonl", "result.json", "run.json"]

# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regime", "model", "optimiser"),
    [
        ("plain", "full", "adam"),
        ("plain", "stack", "momentum"),
        ("plain", "full", "lbfgs"),
        ("fine-tune", "stack", "adam"),
        ("fine-tune", "full", "momentum"),
        ("fine-tune", "stack", "lbfgs"),
        ("joint+heads", "full", "adam"),
        ("joint+heads", "stack", "momentum"),
        ("joint+heads", "full", "lbfgs"),
    ],
)
def test_killed_three_times(tmp_path, forker, undisturbed, regime, model, optimiser):
    """Before there is a checkpoint, then in the first half, then in the second, which is phase 2 of fine-tune."""
    options = {**MODELS[model], **OPTIMISER[optimiser]}
    folder = tmp_path / "run"
    given = {**options, "out": str(folder), "resume": True}
    assert forker(regime=regime, options={**given, "checkpoint_seconds": 1e9}, at=4) == -signal.SIGKILL
    assert visible(folder) == ["records.jsonl", "run.json"]
    for at in (8, 19):
        assert forker(regime=regime, options={**given, "checkpoint_seconds": 0}, at=at) == -signal.SIGKILL
        assert visible(folder) == [CHECKPOINT, "records.jsonl", "run.json"]
        # Records go on after the checkpoint at the last multiple of five: they are cut off and made again.
        assert json.loads((folder / "records.jsonl").read_text().splitlines()[-1])["step"] == at // 3 * 3
    assert_same(train(regime, **given), undisturbed(regime, **options))
    assert visible(folder) == ENDED


@pytest.mark.parametrize(
    ("moment", "at", "left"),
    [
        ("step", 0, ["run.json"]),
        ("step", 12, [CHECKPOINT, "records.jsonl", "run.json"]),
        ("step", STEPS - 1, [CHECKPOINT, "records.jsonl", "run.json"]),
        # Contents of a file on their way to the disk: run.json, the first checkpoint, a later one.
        ("checkpoint", 0, []),
        ("checkpoint", 1, ["run.json"]),
        ("checkpoint", 9, [CHECKPOINT, "records.jsonl", "run.json"]),
        ("result", None, [CHECKPOINT, "model.safetensors", "records.jsonl", "run.json"]),
        ("forget", None, [CHECKPOINT, *ENDED]),
    ],
)
def test_killed_at_every_kind_of_moment(tmp_path, forker, undisturbed, moment, at, left):
    regime = "fine-tune"
    folder = tmp_path / "run"
    given = {"out": str(folder), "resume": True}
    options = {**given, "checkpoint_seconds": 0 if at != 0 else 1e9}
    assert forker(regime=regime, options=options, moment=moment, at=at, every=1) == -signal.SIGKILL
    assert visible(folder) == left
    assert_same(train(regime, **given), undisturbed(regime))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "training", lambda folder: [])


def test_killed_command(tmp_path, forker, no_pictures):
    (tmp_path / "own.toml").write_text(TOML)
    command = ["train", str(tmp_path / "own.toml"), "--regime", "fine-tune", "--steps", "20", "--batch", "64"]
    command += ["--trials", "2", "--set", "own_data=true"]
    killed, whole = [*command, "--out", str(tmp_path / "killed")], [*command, "--out", str(tmp_path / "whole")]
    child = forker.start(command=killed, moment="pause", at=15)
    await_step(tmp_path / "killed", 15, child)
    os.kill(child, signal.SIGKILL)
    assert forker.end() == -signal.SIGKILL
    assert cli.main(whole) == 0
    assert cli.main([*killed, "--resume"]) == 0
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
    models = [fl.models.load(tmp_path / name / "model.safetensors") for name in ("killed", "whole")]
    for raw, other in zip(*(model.parameters() for model in models), strict=True):
        assert same(raw, other)


def records(folder):
    return (folder / "records.jsonl").read_bytes()


def await_step(folder, step, child):
    """Return once a record of the step is there."""
    end = time.monotonic() + 20
    while not (folder / "records.jsonl").exists() or f'"step": {step},'.encode() not in records(folder):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            pytest.fail(f"{folder}: step {step} does not come")
        time.sleep(0.01)


# --- SIGTERM and SIGINT -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_command(tmp_path, forker, no_pictures, number, code):
    (tmp_path / "own.toml").write_text(TOML)
    command = ["train", str(tmp_path / "own.toml"), "--regime", "plain", "--steps", "20", "--batch", "64"]
    stopped = [*command, "--out", str(tmp_path / "stopped")]
    child = forker.start(command=stopped, moment="pause", at=7, every=1)
    await_step(tmp_path / "stopped", 7, child)
    os.kill(child, number)
    assert forker.end() == code
    assert visible(tmp_path / "stopped") == [CHECKPOINT, "records.jsonl", "run.json"]
    said = forker.errors.read_text()
    assert "Traceback" not in said
    assert ("--resume goes on from" in said) == (number == signal.SIGINT)
    assert cli.main([*stopped, "--resume"]) == 0
    assert cli.main([*command, "--out", str(tmp_path / "whole")]) == 0
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert result(tmp_path / "stopped") == result(tmp_path / "whole")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("at", [0, 3, STEPS // 2 - 1, STEPS // 2, STEPS - 2])
def test_signal_leaves_a_checkpoint(tmp_path, monkeypatch, undisturbed, number, error, at):
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patch:
        doctor(patch.setattr, at, lambda: send(number))
        with pytest.raises(error) as stop:
            train("fine-tune", out=tmp_path / "run")
    assert {each: signal.getsignal(each) for each in before} == before
    if error is SystemExit:
        assert stop.value.code == 143
    # The step that was under way is done, and is not done again.
    assert CHECKPOINT in visible(tmp_path / "run")
    done = []
    with monkeypatch.context() as patch:
        one_step = Loop._one_step
        patch.setattr(Loop, "_one_step", lambda self, *given: (done.append(self.step), one_step(self, *given)))
        run = train("fine-tune", out=tmp_path / "run", resume=True)
    assert done == list(range(at + 1, STEPS))
    assert_same(run, undisturbed("fine-tune"))
    assert {each: signal.getsignal(each) for each in before} == before


def test_signal_in_the_last_step_is_not_lost(tmp_path, monkeypatch):
    """Ctrl-C stops a command of many cells, whenever it comes."""
    (tmp_path / "own.toml").write_text(TOML)
    setting = config.load(tmp_path / "own.toml").with_lengths([5, 6])
    doctor(monkeypatch.setattr, STEPS - 1, lambda: send(signal.SIGINT))
    done = []
    with pytest.raises(KeyboardInterrupt):
        cells.train_cells(setting, ["plain"], tmp_path / "out", False, done.append, **SIZES)
    assert len(done) <= 1
    monkeypatch.undo()
    cells.train_cells(setting, ["plain"], tmp_path / "out", True, done.append, **SIZES)
    for n in (5, 6):
        whole = fl.train(setting.mixture, "plain", n, out=tmp_path / f"whole-{n}", **SIZES)
        assert records(tmp_path / f"out/plain-n{n}") == records(whole.folder)
        assert result(tmp_path / f"out/plain-n{n}") == result(whole.folder)


def test_second_interrupt_ends_at_once(tmp_path, monkeypatch, undisturbed):
    """In the middle of a step: without a checkpoint of it, and the one before stays."""
    doctor(monkeypatch.setattr, 9, lambda: (send(signal.SIGINT), send(signal.SIGINT)), EVERY)
    with pytest.raises(KeyboardInterrupt):
        train("plain", out=tmp_path / "run", checkpoint_seconds=0)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(train("plain", out=tmp_path / "run", resume=True), undisturbed("plain"))


def test_without_a_folder_signals_are_as_they_were(monkeypatch):
    seen = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    doctor(monkeypatch.setattr, 2, lambda: seen.append([signal.getsignal(signal.SIGINT), signal.getsignal(15)]))
    train("plain", steps=4)
    assert seen == [handlers]


def test_handlers_return_after_an_error(tmp_path, monkeypatch):
    def fail():
        assert signal.getsignal(signal.SIGTERM) is not before
        raise RuntimeError("no")

    before = signal.getsignal(signal.SIGTERM)
    doctor(monkeypatch.setattr, 2, fail)
    with pytest.raises(RuntimeError, match="no"):
        train("plain", out=tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_train_too(tmp_path, undisturbed):
    """Only the main thread can have handlers."""
    found = []
    thread = threading.Thread(target=lambda: found.append(train("plain", out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert_same(found[0], undisturbed("plain"))


def test_interruptible():
    before = signal.getsignal(signal.SIGTERM)
    with interruptible(True) as caught:
        caught.raise_if_caught()
        send(signal.SIGTERM)
        assert caught.caught == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            caught.raise_if_caught()
    assert signal.getsignal(signal.SIGTERM) is before
    with interruptible(False) as caught:
        assert signal.getsignal(signal.SIGTERM) is before
        caught.raise_if_caught()


# --- What a checkpoint holds ------------------------------------------------------------------------------------------


def interrupt(patch, folder, at, regime="plain", **options):
    """A run that has stopped before step `at`, and its checkpoint."""
    with patch.context() as inner:
        doctor(inner.setattr, at - 1, lambda: send(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(regime, out=folder, **options)
    return folder / CHECKPOINT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(set(OPTIMISERS) - {"lbfgs", "sparseadam", "muon"}))
def test_every_optimiser_of_torch_goes_on(tmp_path, monkeypatch, name, dtype):
    options = {"optimiser": name, "optimiser_options": {}, "dtype": dtype, "lr": 0.01, "steps": 12, "records": 4}
    interrupt(monkeypatch, tmp_path / "run", 7, **options)
    resumed = train("plain", out=tmp_path / "run", resume=True, **options)
    assert_same(resumed, train("plain", **options))


@pytest.mark.parametrize(
    "options",
    [
        {"average": 1.0},
        {"average": 0.2, "clip": 0.01},
        {"own_data": True, "batch_per_task": True},
        {"prompts_in_turn": True},
        {"optimiser_options": {"amsgrad": True, "betas": [0.5, 0.9]}, "weight_decay": 0.1},
        {"optimiser_options": {"fused": False, "foreach": True}},
        {"model": "reduced"},
        {"model": "separate", "attention_heads": 2, "prompt_tokens": 2},
        {"trials": 1, "dtype": torch.float64, "preset": "authors"},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [4, 22])
def test_every_option_goes_on(tmp_path, monkeypatch, options, at):
    interrupt(monkeypatch, tmp_path / "run", at, "fine-tune", **options)
    resumed = train("fine-tune", out=tmp_path / "run", resume=True, **options)
    assert_same(resumed, train("fine-tune", **options))


def own_optimiser(parameters):
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "lr": 0.01}]
    return torch.optim.AdamW(groups)


def own_schedule(progress):
    return 1.0 - progress / 2


def test_functions_of_the_user_go_on(tmp_path, monkeypatch):
    options = {"optimiser": own_optimiser, "schedule": own_schedule}
    interrupt(monkeypatch, tmp_path / "run", 16, "joint", **options)
    resumed = train("joint", out=tmp_path / "run", resume=True, **options)
    assert_same(resumed, train("joint", **options))
    assert resumed.history["lr"][-1] == 0.02 * own_schedule((STEPS - 1) / STEPS)


def test_stopped_after_every_step(tmp_path, undisturbed):
    """A run of as many pieces as it has steps."""
    for at in range(1, STEPS):
        with pytest.MonkeyPatch.context() as patch:
            doctor(patch.setattr, at - 1, lambda: send(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train("fine-tune", out=tmp_path / "run", resume=True)
    assert_same(train("fine-tune", out=tmp_path / "run", resume=True), undisturbed("fine-tune"))


def test_seconds_add_up(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        doctor(patch.setattr, 3, lambda: (threading.Event().wait(0.3), send(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            train("plain", out=tmp_path / "run")
    assert train("plain", out=tmp_path / "run", resume=True).seconds > 0.3


def test_checkpoints_fall_due(tmp_path, monkeypatch):
    """By the clock, and none when it has not come to that."""
    made, save = [], Loop._save
    monkeypatch.setattr(Loop, "_save", lambda self, folder: (made.append(self.step), save(self, folder)))
    train("plain", out=tmp_path / "none", checkpoint_seconds=1e9)
    assert made == []
    train("plain", out=tmp_path / "all", checkpoint_seconds=0)
    assert made == list(range(STEPS))
    assert visible(tmp_path / "all") == ENDED


def test_checkpoints_change_nothing(tmp_path, undisturbed):
    run = train("fine-tune", out=tmp_path / "run", checkpoint_seconds=0)
    assert_same(run, undisturbed("fine-tune"))
    assert_same(run, train("fine-tune"))


# --- Runs that have ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_run_that_has_ended_is_read(monkeypatch, undisturbed, regime, model):
    run = undisturbed(regime, **MODELS[model], **OPTIMISER["adam"])
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.folder.iterdir() if path.stat().st_size
    }

    def never(*_):
        raise AssertionError("it trains")

    monkeypatch.setattr(Loop, "run", never)
    read = train(regime, out=run.folder, resume=True, **MODELS[model], **OPTIMISER["adam"])
    assert_same(read, run)
    assert (read.seconds, read.folder) == (run.seconds, run.folder)
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.folder.iterdir() if path.stat().st_size}
    assert after == before


def test_resume_of_nothing_is_a_start(tmp_path, undisturbed):
    """So that one command can be repeated until it is done."""
    assert_same(train("plain", out=tmp_path / "new" / "run", resume=True), undisturbed("plain"))
    with pytest.raises(ValueError, match=r"^resume: got True without out, wants the folder"):
        train("plain", resume=True)


# --- Pickle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", OPTIMISER)
def test_nothing_is_unpickled(tmp_path, monkeypatch, undisturbed, optimiser):
    options = OPTIMISER[optimiser]
    expected = undisturbed("joint+heads", **options)

    def never(*_, **__):
        raise AssertionError("a pickle is loaded")

    for module, names in ((pickle, ("load", "loads", "Unpickler", "_Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch.serialization, "load", never)
    interrupt(monkeypatch, tmp_path / "run", 9, "joint+heads", **options)
    run = train("joint+heads", out=tmp_path / "run", resume=True, **options)
    assert_same(run, expected)
    assert_same(train("joint+heads", out=tmp_path / "run", resume=True, **options), expected)
    fl.models.save(run.model, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path / "run/model.safetensors"):
        held = fl.models.load(path).state_dict()
        assert held.keys() == run.model.state_dict().keys()
        assert all(same(value, held[name]) for name, value in run.model.state_dict().items())


if __name__ == "__main__":
    serve()
