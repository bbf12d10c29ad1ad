"""A trial that diverges stops alone, leaves the bits of the others unchanged, and every file stays valid JSON."""

import functools
import json

import pytest
import torch
from support import training_runs
from support.training_runs import CHECKPOINT, assert_same, before_step, same

import fastlin as fl
from fastlin import _tensors, cli
from fastlin.models import Full, Model
from fastlin.training.loop import Loop
from fastlin.training.objective import Objective

pytestmark = [
    pytest.mark.usefixtures("small_evaluations"),
    pytest.mark.filterwarnings("ignore:train. the sampled risk of trials"),
]
STEPS = training_runs.SHORT["steps"]
STACK = {"model": "stack", "layers": 2}
ADAM = {"optimiser": "adam", "optimiser_options": {}}
MOMENTUM = {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9}}

train = functools.partial(training_runs.train, **training_runs.SHORT)
interrupt = functools.partial(training_runs.interrupt, **training_runs.SHORT)


def strict(folder):
    """Records; each line is strict JSON, without NaN or Infinity."""

    def never(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=never) for line in (folder / "records.jsonl").read_text().splitlines()]


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
    reported = {line["diverged"]: line["step"] for line in strict(tmp_path / "run") if "diverged" in line}
    assert reported == run.diverged
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
    """No later loss shows the divergence; an infinite risk does."""
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
    """Trial 1 starts far outside; the other trials start as usual."""
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
    """A trial diverges in the second phase, with averages and momenta in use."""
    options = {**ADAM, "average": 0.8, "clip": 0.5}
    alone = train("fine-tune", **options)
    loops = []
    init = Loop.__init__
    monkeypatch.setattr(Loop, "__init__", lambda self, *given: (init(self, *given), loops.append(self))[0])

    @torch.no_grad()
    def explode():
        loops[-1].model.p[2] = torch.inf

    before_step(monkeypatch.setattr, 15, explode)
    run = train("fine-tune", out=tmp_path / "run", **options)
    assert run.diverged == {2: 15}
    for name, value in run.params.items():
        assert same(value[:2], alone.params[name][:2]), name
        assert value[2].isnan().all()
    assert same(run.risk[:2], alone.risk[:2])
    assert same(run.history["loss"][:, :2], alone.history["loss"][:, :2])


def test_rows_of_a_trial_that_diverged_rest(tmp_path, monkeypatch):
    """Parameters, averages and optimiser state of the trial stay zero, also after a resume."""
    options = {**ADAM, **STACK, "average": 0.9, "clip": 0.5, "weight_decay": 0.1}
    by_hand = Objective.by_hand

    def poisoned(self, step, *arguments):
        losses, grads = by_hand(self, step, *arguments)
        return (losses * torch.tensor([1.0, torch.inf, 1.0]) if step == 5 else losses), grads

    monkeypatch.setattr(Objective, "by_hand", poisoned)
    for at in (8, 12):
        interrupt(tmp_path / "run", at + 1, resume=True, **options)
        _, tensors = _tensors.read(tmp_path / "run" / CHECKPOINT, "checkpoint")
        rows = {name: value for name, value in tensors.items() if value.ndim and "total" not in name}
        assert {name.split(".")[1] for name in rows} == {"model", "update", "averages"}
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
    interrupt(tmp_path / "run", at + 1, regime, **options)
    assert_same(train(regime, out=tmp_path / "run", resume=True, **options), whole)


def test_resume_before_all_diverge(tmp_path):
    options = {"optimiser": "sgd", "optimiser_options": {}, "lr": 3.0, "schedule": "constant", "units": "literal"}
    options |= {"clip": None, "average": 0.0, "preset": "paper"}
    whole = train(out=tmp_path / "whole", **options)
    first = min(whole.diverged.values())
    assert 1 < first < STEPS - 2, "diverges neither at once nor at the end"
    for at in (first - 1, first, first + 1):
        interrupt(tmp_path / f"run-{at}", at + 1, **options)
        assert_same(train(out=tmp_path / f"run-{at}", resume=True, **options), whole)
