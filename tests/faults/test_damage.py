"""Files of a run, truncated or with a flipped bit in every region: the same result, or an error that names the file."""

import random
import shutil
from pathlib import Path

import pytest
from support.folders import contents
from support.training_runs import SHORT, before_step, interrupt, records, result, train

from fastlin import _tensors
from fastlin._files import FileError, read_json, write_json
from fastlin.figures import prompts, reproduce
from fastlin.figures.reproduce import Effort, Request
from fastlin.training.record import MODEL

pytestmark = pytest.mark.filterwarnings("ignore:train. resumed on another installation")
REGIONS = 10  # of a file, each of which is hit once
STOPPED = ("run.json", "records.jsonl", "checkpoint.safetensors")
ENDED = ("run.json", "records.jsonl", MODEL, "result.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run that was stopped, and of the same run that has ended."""
    place = tmp_path_factory.mktemp("runs")
    interrupt(place / "stopped", 12, **SHORT)
    train(out=place / "ended", **SHORT)
    return place


def damaged(data, seed):
    """A file with one bit flipped in each of its regions, and truncated in each."""
    source = random.Random(seed)
    for region in range(REGIONS):
        at = min(int((region + source.random()) * len(data) / REGIONS), len(data) - 1)
        flipped = bytearray(data)
        flipped[at] ^= 1 << source.randrange(8)
        yield bytes(flipped)
        yield data[:at]


@pytest.mark.parametrize(
    ("state", "name"), [*(("stopped", name) for name in STOPPED), *(("ended", name) for name in ENDED)]
)
def test_damaged_files_of_a_run(tmp_path, runs, ledger, times, state, name):
    whole = (runs / state / name).read_bytes()
    for seed in range(times):
        for i, data in enumerate(damaged(whole, f"{name} {seed}")):
            folder = shutil.copytree(runs / state, tmp_path / f"{seed}-{i}")
            (folder / name).write_bytes(data)
            before = contents(folder)
            error = error_of(train, out=folder, resume=True, **SHORT)
            if error:
                assert str(folder) in error
                # The error changes no file: with the original file the run resumes.
                assert contents(folder) == before
                ledger.clear_error()
            else:
                assert records(folder) == records(runs / "ended")
                assert result(folder) == result(runs / "ended")
                assert (folder / MODEL).read_bytes() == (runs / "ended" / MODEL).read_bytes()
                ledger.same_bits()
            shutil.rmtree(folder)


def error_of(call, *given, **options):
    """The message of a call's FileError; "" when it succeeds."""
    try:
        call(*given, **options)
    except FileError as error:
        return str(error)
    return ""


def sweep(out):
    """A panel of three cells, in this process."""
    reproduce.reproduce([prompts.PANELS["2c"]], out, Request(effort=Effort(1, 6, 32), lengths=(2,), jobs=1))


@pytest.fixture(scope="module")
def panel(tmp_path_factory):
    out = tmp_path_factory.mktemp("panel")
    sweep(out)
    return out


@pytest.mark.parametrize("name", ["2c.json", "cells/2c/plain-full-n2.json"])
def test_damaged_files_of_a_sweep(tmp_path, panel, ledger, name):
    """An error names the damaged outcome of a cell; without the file, the cell's run is read again."""
    whole = (panel / name).read_bytes()
    table = (panel / "2c.csv").read_bytes()
    for i, data in enumerate(damaged(whole, name)):
        out = shutil.copytree(panel, tmp_path / f"{i}")
        if name != "2c.json":
            record = read_json(out / "2c.json", dict)
            record["cells"][0].update(state="waiting", row=None)
            write_json(out / "2c.json", record)
        (out / name).write_bytes(data)
        before = contents(out)
        error = error_of(sweep, out)
        if error:
            assert str(out / name) in error
            assert contents(out) == before
            (out / name).unlink()
            sweep(out)
            ledger.clear_error()
        else:
            ledger.same_bits()
        assert (out / "2c.csv").read_bytes() == table
        shutil.rmtree(out)


def test_version_skew(tmp_path, runs, ledger, monkeypatch):
    """A checkpoint and a run of another version: an error, and no file changes."""
    folder = shutil.copytree(runs / "stopped", tmp_path / "checkpoint")
    description, tensors = _tensors.read(folder / "checkpoint.safetensors", "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(_tensors, "VERSION", 2)
        _tensors.write(folder / "checkpoint.safetensors", "checkpoint", description, tensors)
    expect(folder, r"checkpoint.safetensors: has format version 2, wants 1; another fastlin wrote it", ledger)
    for kind, values in (("missing", {}), ("other", {"state": {"dict": [["step", 3]]}}), ("list", {"state": []})):
        folder = shutil.copytree(runs / "stopped", tmp_path / kind)
        changed = {name: value for name, value in description.items() if name != "state"} | values
        _tensors.write(folder / "checkpoint.safetensors", "checkpoint", changed, tensors)
        expect(
            folder,
            r"state: got array|missing required field `state`|is not of a run like this one",
            ledger,
        )
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    write_json(folder / "run.json", {**read_json(folder / "run.json", dict), "version": 2})
    expect(folder, r"run.json: is a 'fastlin run' of version 2, wants a 'fastlin run' of 1", ledger)
    # With the file of this version the run resumes.
    shutil.copy(runs / "stopped/run.json", folder / "run.json")
    train(out=folder, resume=True, **SHORT)
    assert records(folder) == records(runs / "ended")


def expect(folder, message, ledger):
    before = contents(folder)
    with pytest.raises(FileError, match=message) as error:
        train(out=folder, resume=True, **SHORT)
    assert str(folder) in str(error.value)
    assert contents(folder) == before
    ledger.clear_error()


PICKLE = b"cos\nsystem\n(S'touch %s'\ntR."


@pytest.mark.parametrize("name", [*STOPPED, MODEL, "result.json", "config.toml"])
def test_reading_a_file_never_runs_it(tmp_path, runs, ledger, monkeypatch, name):
    """Pickles, also in torch's format, in place of every file: nothing loads a pickle."""
    import io
    import pickle

    import torch

    from fastlin import settings

    class Run:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-run",)

    torch_file = io.BytesIO()
    torch.save(Run(), torch_file)
    monkeypatch.setattr(torch, "load", lambda *given, **options: pytest.fail("torch.load"))
    for i, data in enumerate((PICKLE % bytes(tmp_path / "was-run"), pickle.dumps(Run()), torch_file.getvalue())):
        if name == "config.toml":
            (tmp_path / name).write_bytes(data)
            with pytest.raises(settings.ConfigError, match=r"config.toml: not valid TOML"):
                settings.load(tmp_path / name)
        else:
            folder = shutil.copytree(runs / ("stopped" if name in STOPPED else "ended"), tmp_path / f"{i}")
            (folder / name).write_bytes(data)
            with pytest.raises(FileError, match=str(folder)):
                train(out=folder, resume=True, **SHORT)
        assert not (tmp_path / "was-run").exists()
        ledger.clear_error()
    pickle.loads(pickle.dumps(Run()))
    assert (tmp_path / "was-run").exists(), "the pickles do nothing"


def test_text_of_a_record_is_text(tmp_path, monkeypatch):
    """Names in files are keys of tables, never evaluated."""
    with monkeypatch.context() as patch:
        before_step(patch.setattr, 5, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(out=tmp_path / "run", checkpoint_seconds=0, **SHORT)
    path = tmp_path / "run/checkpoint.safetensors"
    description, tensors = _tensors.read(path, "checkpoint")
    _tensors.write(path, "checkpoint", {**description, "state": {"__import__('os').abort()": []}}, tensors)
    with pytest.raises(FileError, match="is not of a run like this one"):
        train(out=tmp_path / "run", resume=True, **SHORT)
