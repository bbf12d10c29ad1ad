"""Faults around a run: a second run in its folder, folders that cannot be written, a full disk."""

import errno
import functools
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest
from support import training_runs
from support.training_runs import CHECKPOINT, TOML, assert_same, before_step, send

from fastlin import _tensors, cli
from fastlin._files import FileError
from fastlin.training import record, run
from fastlin.training.loop import Loop
from fastlin.training.record import Folder

pytestmark = [
    pytest.mark.usefixtures("small_evaluations"),
    pytest.mark.filterwarnings("ignore:train. the sampled risk of trials"),
]
STEPS = training_runs.SHORT["steps"]

train = functools.partial(training_runs.train, **training_runs.SHORT)


def test_second_run_in_the_same_folder(tmp_path, monkeypatch):
    """Start a second run from inside the first, in another process and in this one."""
    folder, said = tmp_path / "plain-n5", []
    (tmp_path / "own.toml").write_text(TOML)

    def second():
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        command = [sys.executable, "-m", "fastlin", "train", str(tmp_path / "own.toml"), "--regime", "plain"]
        command += ["--out", str(tmp_path), "--resume"]
        said.append(subprocess.run(command, capture_output=True, text=True, check=False))
        with pytest.raises(FileError, match="another process is training in this folder"):
            Folder(folder, {}, {}, True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    before_step(monkeypatch.setattr, 8, second)
    run = train(out=folder)
    assert said[0].returncode == 1
    # The command compares configurations before it asks for the lock.
    expected = f"fastlin: {folder}: holds a run with trials = 3, this one has 1; wants the same configuration"
    assert said[0].stderr.startswith(expected)
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


@pytest.fixture
def no_training(monkeypatch):
    def never(*_):
        raise AssertionError("it trains")

    monkeypatch.setattr(Loop, "__init__", never)
    monkeypatch.setattr(run, "initial_model", never)


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
    """The error must not blame another process."""
    with pytest.raises((ValueError, OSError), match="/proc") as error:
        train(out="/proc")
    assert "another process" not in str(error.value)


SCRIPT = """
import json, os, resource, sys
import torch
import fastlin as fl
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


def run_script(script, folder, **options):
    command = [sys.executable, "-c", SCRIPT + script, str(folder), json.dumps({**training_runs.SHORT, **options})]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_folder_without_permission():
    """Run as an unprivileged user, in a folder that this user can reach."""
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(out=tmp_path_factory.mktemp("whole") / "run")


def readable(folder):
    """The step of the checkpoint, which must be intact."""
    description, tensors = _tensors.read(folder / CHECKPOINT, "checkpoint")
    assert tensors
    return dict(description["state"]["dict"])["step"]


def hidden(folder):
    """Temporary files that a failed write may have left."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]


@pytest.fixture
def limit():
    """Set the process's file size limit, so that writes really fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_is_full_when_a_checkpoint_is_due(tmp_path, whole):
    """Train in a child process; only a checkpoint exceeds the limit."""
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
        before_step(patch.setattr, 9, lambda: limit((folder / "records.jsonl").stat().st_size + 10))
        patch.setattr(Loop, "_save", lambda self, folder: self.step < 8 and save(self, folder))
        with pytest.raises(OSError, match="File too large") as error:
            train(out=folder, checkpoint_seconds=0)
    limit(resource.RLIM_INFINITY)
    assert error.value.errno == errno.EFBIG
    return folder, error


def test_disk_is_full_when_a_record_is_due(full_at_a_record, whole):
    folder, _ = full_at_a_record
    assert readable(folder) == 7
    # Resuming cuts off the half line.
    assert not (folder / "records.jsonl").read_bytes().endswith(b"\n")
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert_same(train(out=copy, resume=True), whole)


def test_a_run_that_has_failed_holds_no_lock(full_at_a_record, whole):
    """Resume while the exception is still referenced, as in a notebook."""
    folder, _error = full_at_a_record
    assert_same(train(out=folder, resume=True), whole)


def test_disk_is_full_from_the_start(tmp_path, limit, whole):
    """run.json does not fit."""
    folder = tmp_path / "run"
    limit(100)
    with pytest.raises(OSError, match="File too large"):
        train(out=folder)
    limit(resource.RLIM_INFINITY)
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == []
    assert_same(train(out=folder), whole)


@pytest.mark.parametrize("name", ["model.safetensors", "result.json"])
def test_disk_is_full_at_the_end(tmp_path, monkeypatch, limit, whole, name):
    """The checkpoint is kept until the result is written."""
    folder = tmp_path / "run"
    what = {"model.safetensors": (_tensors, "write"), "result.json": (record, "write_json")}[name]
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
    """The error is one line."""
    folder = tmp_path / "run"

    def full(self, data):
        with open("/dev/full", "wb", buffering=0) as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    before_step(monkeypatch.setattr, 3, lambda: send(signal.SIGTERM))
    command = ["train", "2c", "--regime", "plain", "--n", "5", "--steps", "6", "--batch", "64", "--out", str(folder)]
    assert cli.main(command) == 1
    said = capsys.readouterr().err
    assert said.startswith("fastlin: ")
    assert "No space left on device" in said
    assert len(said.splitlines()) == 1


def test_nothing_happens_to_other_files(tmp_path):
    """A run changes its own folder only."""
    (tmp_path / "beside").write_text("mine")
    train(out=tmp_path / "run", checkpoint_seconds=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "run"]
    assert (tmp_path / "beside").read_text() == "mine"
