"""Softmax attention through fastlin.train: sampled risk, no closed forms, one backend, and what it learns."""

import json
from dataclasses import replace

import pytest
import torch
from support.op_cases import DOUBLE, assert_close
from support.training_runs import TOML, assert_same, mixture

import fastlin as fl
from fastlin import cli, theory
from fastlin.ops.softmax import softmax_loss
from fastlin.training import judge
from fastlin.training.regimes import REGIMES

MIX, N = mixture(), 5
POINTS = fl.PointSet(torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30.0) / 10)


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    monkeypatch.setattr(judge, "_EVALUATION_BATCH", 1024)


def short(mix=MIX, regime="joint", n=N, **options):
    return fl.train(mix, regime, n, **{"model": "softmax", "steps": 6, "batch": 64, "trials": 2, **options})


@pytest.mark.parametrize("regime", ["plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"])
def test_risk_is_sampled_and_no_closed_form_is_asked(regime, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a closed form of linear attention")

    monkeypatch.setattr(theory, "full_population_loss", never)
    for name, row in REGIMES.items():
        form = row.closed_form and row.closed_form._replace(optimum=never)
        monkeypatch.setitem(REGIMES, name, replace(row, closed_form=form))
    run = short(regime=regime, trials=3)
    assert (run.theory, run.excess) == (None, None)
    assert (run.risk_error > 0).all()
    assert (run.history["risk_error"] > 0).all()
    loss, _ = softmax_loss(MIX, N, 64, **run.params, **run.options, seed=1, step=2)
    wanted, _ = run.model.loss(MIX, N, 64, seed=1, step=2, prompts=run.params["p"] is not None)
    assert torch.equal(loss, wanted.detach())
    # As many sequences as the risk was taken on.
    fresh, _ = softmax_loss(MIX, N, 1 << 16, **run.params, **run.options, seed=3, step=2)
    assert ((run.risk - fresh).abs() < 5 * run.risk_error).all()


def test_the_record_says_eager(tmp_path):
    run = short(out=tmp_path / "run")
    assert json.loads((tmp_path / "run/run.json").read_text())["backend"] == "eager"
    assert_same(short(backend="eager"), short())
    assert_same(short(out=tmp_path / "run", resume=True), run)


def test_a_trial_does_not_depend_on_the_others():
    for own_data in (False, True):
        one, three = (short(trials=trials, dtype=DOUBLE, steps=10, own_data=own_data) for trials in (1, 3))
        assert_close(three.risk[:1], one.risk, 1e-10)
        assert_close(three.history["loss"][:, :1], one.history["loss"], 1e-10)
        assert len(set(three.risk.tolist())) == 3


def test_trials_with_their_own_data_start_alike_and_part():
    """Trial 0 has the stream that all trials share without own_data; trial 1 has another."""
    shared, own = (
        short(own_data=own_data, steps=1, records=1, dtype=DOUBLE).history["loss"][0] for own_data in (False, True)
    )
    assert_close(own[:1], shared[:1], 1e-12)
    assert not torch.isclose(own[1], shared[1])


def test_nothing_to_attend_to():
    run = short(regime="plain", n=0)
    assert ((run.risk - theory.normaliser(MIX)).abs() < 5 * run.risk_error).all()


def test_a_source_of_points():
    run = short(mix=POINTS, regime="joint")
    assert torch.isfinite(run.risk).all()
    assert (run.risk_error > 0).all()


def test_two_heads_come_close_to_linear_attention():
    """One head is an average of labels; the difference of two is nearly linear attention, on one token less."""
    given = {"regime": "plain", "steps": 600, "batch": 1024, "records": 1, "seed": 1}
    one, two = (short(**given, attention_heads=heads) for heads in (1, 2))
    fewer = theory.plain(MIX, N - 1).loss
    assert (two.risk + 3 * two.risk_error < one.risk).all()
    assert (two.risk - 3 * two.risk_error < fewer).all()
    assert (one.risk < theory.normaliser(MIX)).all()


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(TOML)
    command = ["train", "own.toml", "--regime", "plain,joint", "--model", "softmax", "--steps", "4", "--batch", "32"]
    assert cli.main([*command, "--out", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:3]
    # No theory, and no excess over it.
    assert [line.split()[2::2][:2] for line in lines] == [["-", "-"]] * 2
    assert cli.main([*command, "--out", "other", "--backend", "cpu"]) == 1
    assert "backend: got 'cpu', which does not have softmax; wants 'auto' or 'eager'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
