"""What can go wrong while a run is under way: divergence, a full disk, a second run, folders that cannot be written."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest
import torch

import fastlin as fl
from fastlin import _tensors, cli
from fastlin.experiments import plan
from fastlin.models import Full, Model
from fastlin.training.loop import Loop
from fastlin.training.record import Folder

CHECKPOINT = "checkpoint.safetensors"
STEPS = 20
SIZES = {"steps": STEPS, "batch": 64, "trials": 3, "records": 10, "lr": 0.02}
STACK = {"model": "stack", "layers": 2}
ADAM = {"optimiser": "adam", "optimiser_options": {}}
MOMENTUM = {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9}}


@pytest.fixture(scope="module", autouse=True)
def small_evaluations():
    """Risks of stacks are taken on small samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_EVALUATION_BATCH", 256)
        yield


def mixture():
    return fl.TaskMixture([[1.0] * 3, [-1.0] * 3], torch.eye(3).expand(2, 3, 3), [0.4, 0.6])


def train(regime="plain", **options):
    return fl.train(mixture(), regime, 5, **{**SIZES, **options})


def same(a, b):
    """Whether all bits are the same, those of NaN too."""
    if a is None or b is None:
        return a is b
    flat = [value.detach().contiguous().flatten().view(torch.uint8) for value in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def result(folder):
    found = json.loads((folder / "result.json").read_text())
    assert found.pop("seconds") > 0
    return found


def assert_same(run, other):
    for name, value in run.params.items():
        assert same(value, other.params[name]), name
    for name, value in run.history.items():
        assert same(value, other.history[name]), name
    assert same(run.risk, other.risk)
    assert (run.best, run.diverged) == (other.best, other.diverged)
    if run.folder and other.folder:
        assert (run.folder / "records.jsonl").read_bytes() == (other.folder / "records.jsonl").read_bytes()
        assert result(run.folder) == result(other.folder)


def before_step(patch, at, what):
    one_step = Loop._one_step

    def patched(self, *arguments):
        if self.step == at:
            what()
        one_step(self, *arguments)

    patch.setattr(Loop, "_one_step", patched)


def stop_at(folder, at, regime="plain", **options):
    """A run that has stopped after the step, with a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, at, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(regime, out=folder, **options)
    assert (folder / CHECKPOINT).exists()


def strict(folder):
    """Records, of which each line is JSON in every language."""

    def never(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=never) for line in (folder / "records.jsonl").read_text().splitlines()]


# --- Divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, STACK], ids=["full", "stack"])
@pytest.mark.parametrize("regime", ["plain", "fine-tune", "joint+heads"])
def test_all_trials_diverge(tmp_path, regime, model):
    options = {**model, "optimiser": "sgd", "optimiser_options": {}, "lr": 1e6, "schedule": "constant"}
    options |= {"units": "literal", "clip": None, "records": STEPS}
    run = train(regime, out=tmp_path / "run", **options)
    assert set(run.diverged) == {0, 1, 2}
    assert all(0 < step < STEPS for step in run.diverged.values())
    assert run.risk.tolist() == [torch.inf] * 3
    assert run.excess is None or run.excess.tolist() == [torch.inf] * 3
    assert run.best in (0, 1, 2)
    for name, value in run.params.items():
        assert value is None or value.isnan().all(), name
    told = {line["diverged"]: line["step"] for line in strict(tmp_path / "run") if "diverged" in line}
    assert told == run.diverged
    assert run.history["step"].tolist() == list(range(1, STEPS + 1))
    for trial, step in run.diverged.items():
        assert (run.history["loss"][step:, trial] == torch.inf).all()
        assert (run.history["risk"][step:, trial] == torch.inf).all()
        assert torch.isfinite(run.history["loss"][:step, trial]).all()
    held = fl.models.load(tmp_path / "run/model.safetensors")
    assert all(raw.isnan().all() for raw in held.parameters())
    json.loads((tmp_path / "run/result.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))
    assert_same(train(regime, out=tmp_path / "run", resume=True, **options), run)


@pytest.mark.parametrize("lr", [1e2, 1e6, 1e12])
def test_records_of_stacks_on_their_way_to_infinity_are_json(tmp_path, lr):
    """A risk can be infinite before a loss is."""
    options = {"optimiser": "sgd", "optimiser_options": {}, "schedule": "constant", "units": "literal", "clip": None}
    run = train(out=tmp_path / "run", lr=lr, records=STEPS, **STACK, **options)
    assert len(run.diverged) == 3
    assert strict(tmp_path / "run")


def test_divergence_in_the_last_step():
    """There is no loss after it, but an infinite risk says the same."""
    options = {"optimiser": "sgd", "optimiser_options": {}, "schedule": "constant", "units": "literal", "clip": None}
    run = train(steps=1, lr=1e30, **STACK, **options)
    assert run.risk.tolist() == [torch.inf] * 3
    assert set(run.diverged) == {0, 1, 2}
    assert all(value is None or value.isnan().all() for value in run.params.values())


def test_command_when_all_trials_diverge(tmp_path, capsys):
    command = ["train", "2c", "--regime", "plain", "--n", "5", "--steps", "6", "--batch", "64", "--trials", "2"]
    command += ["--lr", "1e20", "--out", str(tmp_path / "run"), "--set", "optimiser=sgd", "--set", "units=literal"]
    command += ["--set", "clip=1e30", "--set", "schedule=constant", "--set", "optimiser_options={}"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "0/2"
    json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))


@pytest.fixture
def one_explodes(monkeypatch):
    """Trial 1 starts far outside, with the same model for the others."""
    start = Model.start

    def patched(self, *arguments, **options):
        start(self, *arguments, **options)
        with torch.no_grad():
            (self.W if isinstance(self, Full) else self.A)[1] *= 1e30

    monkeypatch.setattr(Model, "start", patched)


OTHERS = {
    "adam": {**ADAM, "average": 0.5, "clip": 0.5},
    "weight decay": {**ADAM, "optimiser": "adamw", "weight_decay": 0.1, "clip": None},
    "momentum": {**MOMENTUM, "clip": None, "average": 0.0},
    "own data": {**MOMENTUM, "own_data": True, "average": 0.2},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(("regime", "model"), [("plain", STACK), ("fine-tune", {}), ("joint+heads", {})])
def test_other_trials_do_not_notice(request, tmp_path, regime, model, options):
    alone = train(regime, **model, **options)
    assert alone.diverged == {}
    request.getfixturevalue("one_explodes")
    run = train(regime, out=tmp_path / "run", **model, **options)
    assert run.diverged == {1: 0}
    assert strict(tmp_path / "run")[0] == {"step": 0, "diverged": 1}
    others = [0, 2]
    for name, value in run.params.items():
        assert value is None or (same(value[others], alone.params[name][others]) and value[1].isnan().all()), name
    for name in ("loss", "risk", "risk_error"):
        assert same(run.history[name][:, others], alone.history[name][:, others]), name
    assert (run.history["risk"][:, 1] == torch.inf).all()
    assert same(run.risk[others], alone.risk[others])
    assert run.risk[1] == torch.inf
    assert run.best in others


def test_divergence_on_the_way_leaves_the_others(tmp_path, monkeypatch):
    """In the second phase, with averages and momenta of all trials half made."""
    options = {**ADAM, "average": 0.8, "clip": 0.5}
    alone = train("fine-tune", **options)
    job = {}
    init = Loop.__init__
    monkeypatch.setattr(Loop, "__init__", lambda self, given: (job.update(model=given.model), init(self, given))[1])

    @torch.no_grad()
    def explode():
        job["model"].p[2] = torch.inf

    before_step(monkeypatch, 15, explode)
    run = train("fine-tune", out=tmp_path / "run", **options)
    assert run.diverged == {2: 15}
    for name, value in run.params.items():
        assert same(value[:2], alone.params[name][:2]), name
        assert value[2].isnan().all()
    assert same(run.risk[:2], alone.risk[:2])
    assert same(run.history["loss"][:, :2], alone.history["loss"][:, :2])


def test_rows_of_a_trial_that_diverged_rest(tmp_path, monkeypatch):
    """Parameters, averages and the optimiser's state are zero from there on, after a resume too."""
    options = {**ADAM, **STACK, "average": 0.9, "clip": 0.5, "weight_decay": 0.1}
    objective = Loop._objective

    def poisoned(self, *arguments):
        losses = objective(self, *arguments)
        if self.step == 5:
            losses = losses * torch.tensor([1.0, torch.inf, 1.0])
        return losses

    monkeypatch.setattr(Loop, "_objective", poisoned)
    for at in (8, 12):
        stop_at(tmp_path / "run", at, resume=True, **options)
        _, tensors = _tensors.read(tmp_path / "run" / CHECKPOINT, "checkpoint")
        rows = {name: value for name, value in tensors.items() if value.ndim and "total" not in name}
        assert {name.split(".")[1] for name in rows} == {"model", "optimiser", "average"}
        for name, value in rows.items():
            assert len(value) == 3
            assert (value[1] == 0).all(), name
            assert ".p" in name or (value[[0, 2]] != 0).any(), name
    run = train(out=tmp_path / "run", resume=True, **options)
    assert run.diverged == {1: 5}


@pytest.mark.parametrize("at", [1, 9, 14])
@pytest.mark.parametrize("options", [OTHERS["adam"], OTHERS["momentum"]], ids=["adam", "momentum"])
@pytest.mark.parametrize("regime", ["fine-tune", "joint+heads"])
def test_resume_across_a_divergence(one_explodes, tmp_path, regime, options, at):
    whole = train(regime, out=tmp_path / "whole", **options)
    assert whole.diverged == {1: 0}
    stop_at(tmp_path / "run", at, regime, **options)
    assert_same(train(regime, out=tmp_path / "run", resume=True, **options), whole)


def test_resume_before_all_diverge(tmp_path):
    options = {"optimiser": "sgd", "optimiser_options": {}, "lr": 3.0, "schedule": "constant", "units": "literal"}
    options |= {"clip": None, "average": 0.0, "preset": "paper"}
    whole = train(out=tmp_path / "whole", **options)
    first = min(whole.diverged.values())
    assert 1 < first < STEPS - 2, "diverges neither at once nor at the end"
    for at in (first - 1, first, first + 1):
        stop_at(tmp_path / f"run-{at}", at, **options)
        assert_same(train(out=tmp_path / f"run-{at}", resume=True, **options), whole)


# --- Two runs in one folder -------------------------------------------------------------------------------------------


def test_second_run_in_the_same_folder(tmp_path, monkeypatch):
    """From inside the first one: in another process, and in this."""
    folder, said = tmp_path / "run", []
    (tmp_path / "own.toml").write_text(
        "name = 'two'\ndimension = 3\nmeans = [1, -1]\ncovariances = [1, 1]\nweights = [0.4, 0.6]\n"
        "context_lengths = [5]\n"
    )

    def second():
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        command = [sys.executable, "-m", "fastlin", "train", str(tmp_path / "own.toml"), "--regime", "plain"]
        command += ["--out", str(folder), "--resume"]
        said.append(subprocess.run(command, capture_output=True, text=True, check=False))
        with pytest.raises(_tensors.FileError, match="another process is training in this folder"):
            Folder(folder, {}, {}, True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    before_step(monkeypatch, 8, second)
    run = train(out=folder)
    assert said[0].returncode == 1
    expected = f"fastlin: {folder}: another process is training in this folder; wants a folder for each run\n"
    assert said[0].stderr == expected
    monkeypatch.undo()
    assert_same(run, train())


def test_lock_is_free_after_a_run(tmp_path):
    train(out=tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        train(out=tmp_path / "run")
    held = filelock.FileLock(tmp_path / "run/.lock", timeout=0)
    with held, pytest.raises(ValueError, match="another process is training in this folder"):
        train(out=tmp_path / "run", resume=True)
    train(out=tmp_path / "run", resume=True)


# --- Folders that cannot be written -----------------------------------------------------------------------------------


@pytest.fixture
def no_training(monkeypatch):
    def never(*_):
        raise AssertionError("it trains")

    monkeypatch.setattr(Loop, "__init__", never)
    monkeypatch.setattr(plan.Plan, "model", never)


@pytest.mark.parametrize("resume", [False, True])
def test_out_is_a_file(tmp_path, no_training, resume):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ValueError, match=f"^{path}: is a file, wants a folder$"):
        train(out=path, resume=resume)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_out_is_below_a_file(tmp_path, no_training):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises((ValueError, OSError), match=str(path)) as error:
        train(out=path / "runs" / "one")
    assert path.read_text() == "mine"
    assert f"{path / 'runs' / 'one'}: is a file" not in str(error.value), "there is no such file"


@pytest.mark.parametrize("out", ["/proc/fastlin", "/sys/kernel/fastlin"])
def test_folder_where_nobody_can_write(no_training, capsys, out):
    with pytest.raises(OSError, match=out):
        train(out=out)
    command = ["train", "2c", "--regime", "plain", "--n", "5", "--out", out]
    assert cli.main(command) == 1
    assert out in capsys.readouterr().err


def test_folder_whose_lock_cannot_be_made(no_training):
    """Nobody else is training there."""
    with pytest.raises((ValueError, OSError), match="/proc") as error:
        train(out="/proc")
    assert "another process" not in str(error.value)


SCRIPT = """
import json, os, resource, sys
import torch
import fastlin as fl
from fastlin.experiments import plan
from fastlin.training.loop import Loop

torch.set_num_threads(1)
mix = fl.TaskMixture([[1.0] * 3, [-1.0] * 3], torch.eye(3).expand(2, 3, 3), [0.4, 0.6])
out, options = sys.argv[1], json.loads(sys.argv[2])
one_step = Loop._one_step

def train(**more):
    return fl.train(mix, "plain", 5, out=out, **options, **more)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def before_step(at, what):
    def patched(self, *arguments):
        if self.step == at:
            what()
        one_step(self, *arguments)
    Loop._one_step = patched
"""


def run_script(script, folder, timeout=60, **options):
    command = [sys.executable, "-c", SCRIPT + script, str(folder), json.dumps({**SIZES, **options})]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def test_folder_without_permission():
    """As a user whom permissions stop; in a place that this user can reach."""
    script = """
Loop.__init__ = None  # nothing trains
if os.getuid() == 0:
    import torch._dynamo  # optimisers want it, and nobody cannot read it
    os.setuid(65534)
for out in (out, out + "-new"):
    try:
        train()
    except PermissionError as error:
        print(error)
"""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        folder.mkdir(mode=0o555)
        Path(parent).chmod(0o555)
        done = run_script(script, folder)
        assert done.returncode == 0, done.stderr
        denied = "[Errno 13] Permission denied: "
        assert done.stdout == f"{denied}'{folder}/.lock'\n{denied}'{folder}-new'\n"
        assert [path.name for path in Path(parent).rglob("*")] == ["run"]


# --- A full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(out=tmp_path_factory.mktemp("whole") / "run")


def readable(folder):
    """The step of the checkpoint, which is whole."""
    description, tensors = _tensors.read(folder / CHECKPOINT, "checkpoint")
    assert tensors
    return dict(description["state"]["dict"])["step"]


def hidden(folder):
    """What a write that has failed may have left."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]


@pytest.fixture
def limit():
    """Set the size that no file can grow beyond: writes fail for real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_is_full_when_a_checkpoint_is_due(tmp_path, whole):
    """In a process of its own, which ends: the files so far are smaller than the limit, a checkpoint is not."""
    folder = tmp_path / "run"
    done = run_script("before_step(9, lambda: limit(2048))\ntrain(checkpoint_seconds=0)\n", folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large: '{folder / 'checkpoint.safetensors'}'"
    assert readable(folder) == 9
    assert hidden(folder) == []
    assert not (folder / "result.json").exists()
    assert_same(train(out=folder, resume=True), whole)


@pytest.fixture
def full_at_a_record(tmp_path, monkeypatch, limit):
    """The folder of a run with a checkpoint of step 7 that could not write all of the record of step 10; its error."""
    folder, save = tmp_path / "run", Loop._save
    with monkeypatch.context() as patch:
        before_step(patch, 9, lambda: limit((folder / "records.jsonl").stat().st_size + 10))
        patch.setattr(Loop, "_save", lambda self, folder: self.step < 8 and save(self, folder))
        with pytest.raises(OSError, match="File too large") as error:
            train(out=folder, checkpoint_seconds=0)
    limit(resource.RLIM_INFINITY)
    assert error.value.errno == errno.EFBIG
    return folder, error


def test_disk_is_full_when_a_record_is_due(full_at_a_record, whole):
    folder, _ = full_at_a_record
    assert readable(folder) == 7
    # Half a line, that is cut off.
    assert not (folder / "records.jsonl").read_bytes().endswith(b"\n")
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert_same(train(out=copy, resume=True), whole)


def test_a_run_that_has_failed_holds_no_lock(full_at_a_record, whole):
    """While its error is still looked at, as in a notebook."""
    folder, _error = full_at_a_record
    assert_same(train(out=folder, resume=True), whole)


def test_disk_is_full_from_the_start(tmp_path, limit, whole):
    """Not even the description of the run fits."""
    folder = tmp_path / "run"
    limit(100)
    with pytest.raises(OSError, match="File too large"):
        train(out=folder)
    limit(resource.RLIM_INFINITY)
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == []
    assert_same(train(out=folder), whole)


@pytest.mark.parametrize("name", ["model.safetensors", "result.json"])
def test_disk_is_full_at_the_end(tmp_path, monkeypatch, limit, whole, name):
    """The checkpoint stays until there is a result."""
    folder = tmp_path / "run"
    what = {"model.safetensors": (_tensors, "write"), "result.json": (Folder, "_write")}[name]
    write = getattr(*what)

    def limited(*arguments):
        if any(str(argument).endswith(name) for argument in arguments[:2]):
            limit(10)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*what, limited)
        with pytest.raises(OSError, match="File too large"):
            train(out=folder, checkpoint_seconds=0)
    limit(resource.RLIM_INFINITY)
    assert readable(folder) == STEPS - 1
    assert not (folder / name).exists()
    assert hidden(folder) == []
    assert_same(train(out=folder, resume=True), whole)


def test_command_and_a_full_disk(tmp_path, monkeypatch, capsys):
    """One line."""
    folder = tmp_path / "run"

    def full(self, data):
        with open("/dev/full", "wb", buffering=0) as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    before_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    command = ["train", "2c", "--regime", "plain", "--n", "5", "--steps", "6", "--batch", "64", "--out", str(folder)]
    assert cli.main(command) == 1
    said = capsys.readouterr().err
    assert said.startswith("fastlin: ")
    assert "No space left on device" in said
    assert len(said.splitlines()) == 1


def test_nothing_happens_to_other_files(tmp_path):
    """A run touches its own folder alone."""
    (tmp_path / "beside").write_text("mine")
    train(out=tmp_path / "run", checkpoint_seconds=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "run"]
    assert (tmp_path / "beside").read_text() == "mine"
