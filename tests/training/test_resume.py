"""Runs that are killed, or stopped at any step, resume to the bits of an uninterrupted run."""

import json
import os
import pickle
import signal
import threading

import pytest
import torch
from support.folders import visible
from support.training_runs import (
    CHECKPOINT,
    MODELS,
    OPTIMISER,
    STEPS,
    TOML,
    assert_same,
    await_step,
    before_step,
    interrupt,
    records,
    result,
    same,
    send,
    train,
)

import fastlin as fl
from fastlin import cli
from fastlin.training.loop import Loop
from fastlin.training.optimiser import COUPLED, OPTIMISERS

pytestmark = [
    pytest.mark.usefixtures("small_evaluations"),
    pytest.mark.filterwarnings("ignore:train. the sampled risk of trials"),
]
REGIMES = ("plain", "fine-tune", "joint+heads")
ENDED = ["model.safetensors", "records.jsonl", "result.json", "run.json"]


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
    """Kill before the first checkpoint, in the first half, and in the second, which is phase 2 of fine-tune."""
    options = {**MODELS[model], **OPTIMISER[optimiser]}
    folder = tmp_path / "run"
    given = {**options, "out": str(folder), "resume": True}
    assert forker(regime=regime, options={**given, "checkpoint_seconds": 1e9}, at=4) == -signal.SIGKILL
    assert visible(folder) == ["records.jsonl", "run.json"]
    for at in (8, 19):
        assert forker(regime=regime, options={**given, "checkpoint_seconds": 0}, at=at) == -signal.SIGKILL
        assert visible(folder) == [CHECKPOINT, "records.jsonl", "run.json"]
        # Records after the checkpoint at the last multiple of five are cut off and written again.
        assert json.loads((folder / "records.jsonl").read_text().splitlines()[-1])["step"] == at // 3 * 3
    assert_same(train(regime, **given), undisturbed(regime, **options))
    assert visible(folder) == ENDED


@pytest.mark.parametrize(
    ("moment", "at", "left"),
    [
        ("step", 0, ["run.json"]),
        ("step", 12, [CHECKPOINT, "records.jsonl", "run.json"]),
        ("step", STEPS - 1, [CHECKPOINT, "records.jsonl", "run.json"]),
        # Kill in fsync of run.json, of the first checkpoint, of a later one.
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


def test_killed_command(tmp_path, forker, no_pictures):
    (tmp_path / "own.toml").write_text(TOML)
    command = ["train", str(tmp_path / "own.toml"), "--regime", "fine-tune", "--steps", "20", "--batch", "64"]
    command += ["--trials", "2", "--set", "own_data=true"]
    killed, whole = [*command, "--out", str(tmp_path / "killed")], [*command, "--out", str(tmp_path / "whole")]
    child = forker.start(command=killed, moment="pause", at=15)
    await_step(tmp_path / "killed/fine-tune-n5", 15, child)
    os.kill(child, signal.SIGKILL)
    assert forker.end() == -signal.SIGKILL
    assert cli.main(whole) == 0
    assert cli.main([*killed, "--resume"]) == 0
    assert records(tmp_path / "killed/fine-tune-n5") == records(tmp_path / "whole/fine-tune-n5")
    assert result(tmp_path / "killed/fine-tune-n5") == result(tmp_path / "whole/fine-tune-n5")
    models = [fl.models.load(tmp_path / name / "fine-tune-n5/model.safetensors") for name in ("killed", "whole")]
    for raw, other in zip(*(model.parameters() for model in models), strict=True):
        assert same(raw, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(set(OPTIMISERS) - {"lbfgs", "sparseadam", "muon"}))
def test_every_optimiser_of_torch_resumes(tmp_path, name, dtype):
    options = {"optimiser": name, "optimiser_options": {}, "dtype": dtype, "lr": 0.01, "steps": 12, "records": 4}
    options["trials"] = 1 if OPTIMISERS[name] in COUPLED else 3
    interrupt(tmp_path / "run", 7, **options)
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
        {"model": "softmax"},
        {"model": "softmax", "attention_heads": 2, "own_data": True, "batch_per_task": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [4, 22])
def test_every_option_resumes(tmp_path, options, at):
    interrupt(tmp_path / "run", at, "fine-tune", **options)
    resumed = train("fine-tune", out=tmp_path / "run", resume=True, **options)
    assert_same(resumed, train("fine-tune", **options))


def own_optimiser(parameters):
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "lr": 0.01}]
    return torch.optim.AdamW(groups)


def own_schedule(progress):
    return 1.0 - progress / 2


def test_functions_of_the_user_go_on(tmp_path):
    options = {"optimiser": own_optimiser, "schedule": own_schedule}
    interrupt(tmp_path / "run", 16, "joint", **options)
    resumed = train("joint", out=tmp_path / "run", resume=True, **options)
    assert_same(resumed, train("joint", **options))
    assert resumed.history["lr"][-1] == 0.02 * own_schedule((STEPS - 1) / STEPS)


def test_stopped_after_every_step(tmp_path, undisturbed):
    """A run that is interrupted at every step."""
    for at in range(1, STEPS):
        interrupt(tmp_path / "run", at, "fine-tune", resume=True)
    assert_same(train("fine-tune", out=tmp_path / "run", resume=True), undisturbed("fine-tune"))


def test_seconds_add_up(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        before_step(patch.setattr, 3, lambda: (threading.Event().wait(0.3), send(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            train("plain", out=tmp_path / "run")
    assert train("plain", out=tmp_path / "run", resume=True).seconds > 0.3


def test_checkpoints_fall_due(tmp_path, monkeypatch):
    """Checkpoints follow the clock; a run shorter than the interval has none."""
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
    """One command can be repeated until it is done."""
    assert_same(train("plain", out=tmp_path / "new" / "run", resume=True), undisturbed("plain"))
    with pytest.raises(ValueError, match=r"^resume: got True without out, wants the folder"):
        train("plain", resume=True)


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
    interrupt(tmp_path / "run", 9, "joint+heads", **options)
    run = train("joint+heads", out=tmp_path / "run", resume=True, **options)
    assert_same(run, expected)
    assert_same(train("joint+heads", out=tmp_path / "run", resume=True, **options), expected)
    fl.models.save(run.model, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path / "run/model.safetensors"):
        held = fl.models.load(path).state_dict()
        assert held.keys() == run.model.state_dict().keys()
        assert all(same(value, held[name]) for name, value in run.model.state_dict().items())
