"""Files of a run: whole or not there, and refused, untouched, when they are not what they should be."""

import json
import os
import pickle
import re
import shutil
import signal
import struct

import pytest
import safetensors.torch
import torch

import fastlin as fl
from fastlin import _tensors, cli
from fastlin._files import replacing
from fastlin._tensors import FileError
from fastlin.training.loop import Loop

STEPS = 20
SIZES = {
    "steps": STEPS,
    "batch": 64,
    "trials": 2,
    "records": 10,
    "lr": 0.02,
    "clip": 1.0,
    "optimiser_options": {"betas": [0.9, 0.99]},
}


def mixture(last=-1.0):
    return fl.TaskMixture([[1.0] * 3, [-1.0, -1.0, last]], torch.eye(3).expand(2, 3, 3), [0.4, 0.6])


def train(out, mix=None, n=5, **options):
    return fl.train(mix or mixture(), "plain", n, out=out, **{**SIZES, **options})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was stopped before step 9, after four records, and the same one, ended."""
    folder, one_step = tmp_path_factory.mktemp("runs"), Loop._one_step

    def stopping(self, *arguments):
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        one_step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_one_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(folder / "stopped")
    train(folder / "ended")
    return folder


@pytest.fixture
def stopped(runs, tmp_path):
    return shutil.copytree(runs / "stopped", tmp_path / "run")


@pytest.fixture
def ended(runs, tmp_path):
    return shutil.copytree(runs / "ended", tmp_path / "run")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder, named, **options):
    """A call that is refused, naming what is wrong; nothing in the folder has changed, and nobody is locked out."""
    before = contents(folder)
    options = {"resume": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda self: pytest.fail("it trains"))
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(str(named))) as error:
                train(folder, **options)
            assert isinstance(error.value, FileError)
    assert contents(folder) == before
    return str(error.value)


def assert_goes_on(folder, runs):
    """To the end of the run that was not stopped."""
    run, whole = train(folder, resume=True), train(runs / "ended", resume=True)
    for name, value in run.params.items():
        assert value is None if whole.params[name] is None else torch.equal(value, whole.params[name])
    assert (folder / "records.jsonl").read_bytes() == (runs / "ended/records.jsonl").read_bytes()
    assert torch.equal(run.risk, whole.risk)


def test_stopped_run_is_as_the_tests_want_it(stopped, runs):
    assert sorted(path.name for path in stopped.iterdir() if path.name[0] != ".") == [
        "checkpoint.safetensors",
        "records.jsonl",
        "run.json",
    ]
    assert len((stopped / "records.jsonl").read_text().splitlines()) == 4
    assert_goes_on(stopped, runs)


# --- replacing --------------------------------------------------------------------------------------------------------


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "file.json"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == tmp_path
        # What a run leaves when it is killed here is hidden, and is not taken for a file of the user.
        assert temporary.name.startswith(".")
    assert path.read_text() == "new"
    with replacing(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "new"
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("there", [False, True])
def test_replacing_leaves_nothing_after_an_error(tmp_path, error, there):
    path = tmp_path / "file"
    if there:
        path.write_text("old")

    def write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert contents(tmp_path) == ({path.relative_to(tmp_path): b"old"} if there else {})


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_replacing_when_the_disk_fails(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(5, "Input/output error")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="Input/output error"), replacing(path) as temporary:
        temporary.write_text("new")
    monkeypatch.undo()
    assert contents(tmp_path) == {path.relative_to(tmp_path): b"old"}


def test_replacing_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    """Contents first: after a power cut the name has either the old contents or the new."""
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(file):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def note_replace(source, target):
        done.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert done[:2] == [("fsync", str(temporary)), ("replace", str(temporary))]


# --- Files of tensors -------------------------------------------------------------------------------------------------

TENSORS = {
    "a": torch.tensor([1.0, float("nan"), -0.0, float("inf")]),
    "b": torch.arange(6).reshape(2, 3).T,
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "true": torch.tensor([True, False]),
}
DESCRIPTION = {"text": 'é "quoted" \\ \n', "third": 1 / 3, "big": 1 << 64, "none": None, "nest": [{"a": [1.5]}]}


def test_tensors_return_as_they_were(tmp_path):
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", DESCRIPTION, TENSORS)
    description, tensors = _tensors.read(path, "thing")
    assert description == DESCRIPTION
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()
        tensors[name].zero_()  # they can be written to
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_that_share_memory(tmp_path):
    """Such as those of an optimiser, or of units that are all one."""
    whole = torch.arange(6.0)
    _tensors.write(tmp_path / "file", "thing", {}, {"a": whole, "b": whole, "part": whole[2:4]})
    _, tensors = _tensors.read(tmp_path / "file", "thing")
    assert torch.equal(tensors["a"], whole)
    assert torch.equal(tensors["b"], whole)
    assert torch.equal(tensors["part"], whole[2:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_types_of_tensors(tmp_path, dtype):
    """Whatever an optimiser keeps."""
    value = torch.tensor([0, 1, 2]).to(dtype)
    _tensors.write(tmp_path / "file", "thing", {}, {"a": value})
    assert torch.equal(_tensors.read(tmp_path / "file", "thing")[1]["a"], value)


def test_every_bit_counts(tmp_path):
    """A file with any one bit changed is refused, and so is one of any other length."""
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", {"a": [1, "é"]}, {"a": torch.ones(2), "b": torch.tensor(3)})
    data = path.read_bytes()

    def is_refused():
        try:
            _tensors.read(path, "thing")
        except FileError as error:
            return str(error).startswith(f"{path}: ")
        return False

    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(data):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), place)
                assert is_refused(), (place, bit)
            os.pwrite(file.fileno(), bytes([byte]), place)
        assert path.read_bytes() == data
        assert _tensors.read(path, "thing")[0] == {"a": [1, "é"]}
        os.pwrite(file.fileno(), b"\0", len(data))
        assert is_refused()
        for length in reversed(range(len(data))):
            os.truncate(path, length)
            assert is_refused(), length


def test_wrong_files_of_tensors(tmp_path, monkeypatch):
    path = tmp_path / "file.safetensors"
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        _tensors.read(path, "thing")
    _tensors.write(path, "thing", {}, {})
    with pytest.raises(FileError, match=r"file\.safetensors: is a thing, wants a model"):
        _tensors.read(path, "model")
    monkeypatch.setattr(_tensors, "VERSION", 2)
    with pytest.raises(FileError, match=r"file\.safetensors: has format version 1, wants 2; another fastlin wrote it"):
        _tensors.read(path, "thing")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", {"old": 1}, {"a": torch.ones(3)})
    before = contents(tmp_path)
    with pytest.raises(TypeError):
        _tensors.write(path, "thing", {"old": object()}, {"a": torch.ones(3)})
    assert contents(tmp_path) == before


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class Marker:
    """What is unpickled, runs."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def flipped(place):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[place if place >= 0 else len(data) + place] ^= 4
        path.write_bytes(data)

    return damage


def in_the_middle(path):
    flipped(path.stat().st_size // 2)(path)


def first_byte_of_tensors(path):
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    flipped(8 + length)(path)


def truncated(share):
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def last_byte_lost(path):
    os.truncate(path, path.stat().st_size - 1)


def foreign(path):
    safetensors.torch.save_file({"weight": torch.ones(3)}, path, {"format": "pt"})


def pickled(path):
    torch.save({"step": 8, "marker": Marker(path.with_name("unpickled"))}, path)


def bare_pickle(path):
    path.write_bytes(pickle.dumps(Marker(path.with_name("unpickled"))))


def another_kind(path):
    description, tensors = _tensors.read(path, "checkpoint")
    _tensors.write(path, "model", description, tensors)


def another_version(path):
    description, tensors = _tensors.read(path, "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tensors, "VERSION", 99)
        _tensors.write(path, "checkpoint", description, tensors)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated(0.0), "damaged, or not a file of fastlin"),
        (truncated(0.3), "damaged, or not a file of fastlin"),
        (truncated(0.9), "damaged, or not a file of fastlin"),
        (last_byte_lost, "damaged, or not a file of fastlin"),
        (flipped(0), "damaged, or not a file of fastlin"),
        (flipped(9), "damaged, or not a file of fastlin"),
        (flipped(200), "damaged"),
        (in_the_middle, "damaged"),
        (first_byte_of_tensors, "damaged: its checksum is not that of its contents"),
        (flipped(-1), "damaged: its checksum is not that of its contents"),
        (foreign, "not a file of fastlin"),
        (pickled, "damaged, or not a file of fastlin"),
        (bare_pickle, "damaged, or not a file of fastlin"),
        (another_kind, "is a model, wants a checkpoint"),
        (another_version, "has format version 99, wants 1; another fastlin wrote it"),
    ],
)
def test_damaged_checkpoint(stopped, damage, reason):
    path = stopped / "checkpoint.safetensors"
    damage(path)
    assert f"{path}: {reason}" in refused(stopped, path)
    assert not (stopped / "unpickled").exists()


def test_damaged_checkpoint_and_the_command(stopped, tmp_path, capsys):
    (stopped / "checkpoint.safetensors").write_bytes(b"")
    config = tmp_path / "own.toml"
    config.write_text(
        "name = 'two'\ndimension = 3\nmeans = [1, -1]\ncovariances = [1, 1]\nweights = [0.4, 0.6]\n"
        "context_lengths = [5]\n"
    )
    command = ["train", str(config), "--regime", "plain", "--out", str(stopped), "--resume", "--trials", "2"]
    command += ["--steps", str(STEPS), "--batch", "64", "--lr", "0.02", "--set", "clip=1.0"]
    command += ["--set", "optimiser_options={betas=[0.9, 0.99]}"]
    run = json.loads((stopped / "run.json").read_text())
    run["config"]["records"] = 100  # the command's
    (stopped / "run.json").write_text(json.dumps(run))
    assert cli.main(command) == 1
    assert capsys.readouterr().err.startswith(f"fastlin: {stopped / 'checkpoint.safetensors'}: damaged")


@pytest.mark.parametrize("damage", [truncated(0.5), in_the_middle, flipped(-1), foreign, pickled, truncated(0.0)])
def test_damaged_model(ended, damage):
    path = ended / "model.safetensors"
    damage(path)
    refused(ended, path)
    with pytest.raises(FileError, match=re.escape(str(path))):
        fl.models.load(path)
    assert not (ended / "unpickled").exists()


def test_checkpoint_is_not_a_model(stopped):
    with pytest.raises(FileError, match=r"checkpoint\.safetensors: is a checkpoint, wants a model"):
        fl.models.load(stopped / "checkpoint.safetensors")


# --- Records ----------------------------------------------------------------------------------------------------------


def shorter(path):
    os.truncate(path, path.stat().st_size - 1)


def a_line_less(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("damage", [shorter, a_line_less, truncated(0.0), flipped(0), in_the_middle, flipped(-1)])
def test_damaged_records(stopped, damage):
    path = stopped / "records.jsonl"
    damage(path)
    assert "are not what the run had written" in refused(stopped, path)


def test_records_that_are_gone(stopped):
    path = stopped / "records.jsonl"
    path.unlink()
    refused(stopped, path)


@pytest.mark.parametrize("extra", ['{"step": 10, "phase": 0}\n', '{"half": ', "\n\n", "\xff" * 10_000])
def test_records_after_the_checkpoint_are_cut_off(stopped, runs, extra):
    with (stopped / "records.jsonl").open("a") as file:
        file.write(extra)
    assert_goes_on(stopped, runs)


def test_records_without_a_checkpoint_begin_anew(stopped, runs):
    (stopped / "checkpoint.safetensors").unlink()
    assert_goes_on(stopped, runs)


def not_json(path):
    path.write_bytes(path.read_bytes()[:-5] + b"\n")


def not_text(path):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


@pytest.mark.parametrize("damage", [not_json, not_text])
def test_damaged_records_of_a_run_that_has_ended(ended, damage):
    path = ended / "records.jsonl"
    damage(path)
    refused(ended, path)


# --- run.json and result.json -----------------------------------------------------------------------------------------

WRONG = ["", "{", "null", "[]", "3", "{}", '"text"', "\xff", '{"kind": "x"}', '{"name": "x", "version": "1.0"}']


@pytest.mark.parametrize("text", WRONG)
def test_wrong_description(stopped, text):
    path = stopped / "run.json"
    path.write_bytes(text.encode("latin-1"))
    assert refused(stopped, path).startswith(f"{path}: damaged, or not a file of fastlin: ")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("kind", "npm package", "is a 'npm package' of version 1, wants a 'fastlin run' of 1"),
        ("version", 2, "is a 'fastlin run' of version 2, wants a 'fastlin run' of 1"),
        ("config", 3, "damaged, or not a file of fastlin"),
        ("config", "text", "damaged, or not a file of fastlin"),
    ],
)
def test_description_of_something_else(stopped, name, value, reason):
    path = stopped / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert f"{path}: {reason}" in refused(stopped, path)


@pytest.mark.parametrize("text", [*WRONG, '{"risk": 3}', '{"risk": [1.0, 2.0]}'])
def test_wrong_result(ended, text):
    path = ended / "result.json"
    path.write_bytes(text.encode("latin-1"))
    refused(ended, path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("risk", [1.0]), ("risk", ["x", "y"]), ("best", "x"), ("diverged", [1])],
)
def test_result_of_something_else(ended, name, value):
    path = ended / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    refused(ended, path)


def test_result_without_its_model(ended):
    (ended / "model.safetensors").unlink()
    before = contents(ended)
    with pytest.raises((FileError, FileNotFoundError), match=re.escape(str(ended / "model.safetensors"))):
        train(ended, resume=True)
    assert contents(ended) == before


# --- Folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_something_else(tmp_path, resume):
    folder = tmp_path / "thesis"
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters/one.tex").write_text("Once")
    (folder / "notes.txt").write_text("upon a time")
    said = refused(folder, folder, resume=resume)
    assert said == f"{folder}: holds chapters and no run.json; wants a new folder, or one that holds a run"


def test_folder_with_a_result_alone(ended):
    (ended / "run.json").unlink()
    refused(ended, ended)


@pytest.mark.parametrize("which", ["stopped", "ended"])
def test_folder_of_a_run_without_resume(request, which):
    folder = request.getfixturevalue(which)
    said = refused(folder, folder, resume=False)
    assert said == f"{folder}: holds a run already; wants another folder, or resume=True to go on"


def test_empty_folder(tmp_path, runs):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.DS_Store").write_text("")
    train(tmp_path / "run")
    assert (tmp_path / "run/records.jsonl").read_bytes() == (runs / "ended/records.jsonl").read_bytes()


@pytest.mark.parametrize("which", ["stopped", "ended"])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 6}, "n = 5, this one has 6"),
        ({"seed": 1}, "seed = 0, this one has 1"),
        ({"lr": 0.01}, "lr = 0.02, this one has 0.01"),
        ({"steps": STEPS + 1}, f"steps = {STEPS}, this one has {STEPS + 1}"),
        ({"trials": 3}, "trials = 2, this one has 3"),
        ({"records": 5}, "records = 10, this one has 5"),
        ({"model": "reduced"}, "model = 'full', this one has 'reduced'"),
        ({"clip": None}, "clip = 1.0, this one has None"),
        ({"dtype": torch.float64}, "dtype = 'float32', this one has 'float64'"),
        (
            {"optimiser_options": {"betas": (0.5, 0.9)}},
            "optimiser_options.betas = [0.9, 0.99], this one has [0.5, 0.9]",
        ),
        ({"mix": mixture(-2.0)}, "means"),
        ({"mix": fl.SphereTasks(3)}, "SphereTasks"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_another_configuration(request, which, options, field):
    folder = request.getfixturevalue(which)
    said = refused(folder, field, **options)
    assert said.startswith(f"{folder}: holds a run with ")


def test_changed_means_are_what_is_named(stopped):
    """Not the whole of both mixtures, in which the one field that differs is for the reader to find."""
    said = refused(stopped, "means", mix=mixture(-2.0))
    assert "feature_cov" not in said
