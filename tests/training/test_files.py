"""Files of a run are written atomically; wrong or damaged files are refused and left unchanged."""

import os
import pickle
import re
import shutil
import struct

import pytest
import safetensors.torch
import torch
from support.folders import contents, visible
from support.training_runs import SHORT, TOML, interrupt, mixture

import fastlin as fl
from fastlin import _tensors, cli
from fastlin._files import FileError, read_json, write_json
from fastlin.training.loop import Loop

STEPS = SHORT["steps"]
SIZES = {**SHORT, "trials": 2, "clip": 1.0, "optimiser_options": {"betas": [0.9, 0.99]}}


def train(out, mix=None, n=5, **options):
    return fl.train(mix or mixture(), "plain", n, out=out, **{**SIZES, **options})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run stopped before step 9, after four records, and the same run ended."""
    folder = tmp_path_factory.mktemp("runs")
    interrupt(folder / "stopped", 9, **SIZES)
    train(folder / "ended")
    return folder


@pytest.fixture
def stopped(runs, tmp_path):
    return shutil.copytree(runs / "stopped", tmp_path / "run")


@pytest.fixture
def ended(runs, tmp_path):
    return shutil.copytree(runs / "ended", tmp_path / "run")


def refused(folder, named, **options):
    """The call raises an error that names the fault, changes nothing in the folder and releases the lock."""
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


def assert_resumes(folder, runs):
    """Resume to the bits of the uninterrupted run."""
    run, whole = train(folder, resume=True), train(runs / "ended", resume=True)
    for name, value in run.params.items():
        assert value is None if whole.params[name] is None else torch.equal(value, whole.params[name])
    assert (folder / "records.jsonl").read_bytes() == (runs / "ended/records.jsonl").read_bytes()
    assert torch.equal(run.risk, whole.risk)


def test_stopped_run_is_as_the_tests_want_it(stopped, runs):
    assert visible(stopped) == ["checkpoint.safetensors", "records.jsonl", "run.json"]
    assert len((stopped / "records.jsonl").read_text().splitlines()) == 4
    assert_resumes(stopped, runs)


class Marker:
    """Unpickling runs code."""

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
    stopped = stopped.rename(tmp_path / "plain-n5")
    (stopped / "checkpoint.safetensors").write_bytes(b"")
    config = tmp_path / "own.toml"
    config.write_text(TOML)
    command = ["train", str(config), "--regime", "plain", "--out", str(tmp_path), "--resume", "--trials", "2"]
    command += ["--steps", str(STEPS), "--batch", "64", "--lr", "0.02", "--set", "clip=1.0"]
    command += ["--set", "optimiser_options={betas=[0.9, 0.99]}"]
    run = read_json(stopped / "run.json", dict)
    run["config"]["records"] = 100  # the command's
    write_json(stopped / "run.json", run)
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
    assert_resumes(stopped, runs)


def test_records_without_a_checkpoint_begin_anew(stopped, runs):
    (stopped / "checkpoint.safetensors").unlink()
    assert_resumes(stopped, runs)


def not_json(path):
    path.write_bytes(path.read_bytes()[:-5] + b"\n")


def not_text(path):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


@pytest.mark.parametrize("damage", [not_json, not_text])
def test_damaged_records_of_a_run_that_has_ended(ended, damage):
    path = ended / "records.jsonl"
    damage(path)
    refused(ended, path)


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
    write_json(path, {**read_json(path, dict), name: value})
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
    write_json(path, {**read_json(path, dict), name: value})
    refused(ended, path)


def test_result_without_its_model(ended):
    (ended / "model.safetensors").unlink()
    before = contents(ended)
    with pytest.raises((FileError, FileNotFoundError), match=re.escape(str(ended / "model.safetensors"))):
        train(ended, resume=True)
    assert contents(ended) == before


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
    assert said == f"{folder}: holds a run already; wants another folder, or resume=True (--resume) to resume it"


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
    """The error names the field that differs, and does not print both mixtures."""
    said = refused(stopped, "means", mix=mixture(-2.0))
    assert "feature_cov" not in said
