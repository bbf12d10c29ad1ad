"""Reprs are short: what a thing is, its sizes and key figures, in lines of 80 characters."""

import re
from dataclasses import replace

import pytest
import torch

import fastlin as fl
from fastlin import models, theory
from fastlin.training.judge import BELOW_THEORY

MIX = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5], noise_std=0.5)


def train(regime="joint", **options):
    return fl.train(MIX, regime, 10, **{"trials": 3, "steps": 4, "batch": 64, "progress": False, **options})


class Own(fl.SphereTasks):
    """A source of the user, with an attribute of any kind."""

    def __init__(self):
        super().__init__(3)
        self.table, self.depth = {"a": 1}, 7


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (MIX, "TaskMixture(K=2, d=2, noise_std=0.5)"),
        (fl.SphereTasks(5, noise_std=0.3, bias=True), "SphereTasks(d=5, bias=True, noise_std=0.3, radius=1)"),
        (fl.FixedTask([1.0, 2.0]), "FixedTask(d=2)"),
        (fl.PointSet(torch.ones(7, 3), torch.ones(7)), "PointSet(points=7, d=3)"),
        (fl.PointSet(torch.ones(7, 3), torch.ones(7), bias=True), "PointSet(points=7, d=3, bias=True)"),
        (Own(), "Own(d=3, radius=1, depth=7)"),
        (theory.joint(MIX, 10), "Optimum(loss=0.894068, W=(2, 2), prompts=(2, 2), heads=None)"),
        (theory.decoupled(MIX, 10), "Optimum(loss=0.740566, W=(2, 2), prompts=(2, 3), heads=(2, 3))"),
        (theory.Bound(0.5), "Bound(loss=0.5)"),
        (theory.forgetting.FamilyOptimum(theory.forgetting.pretrained(3), 0.5), "FamilyOptimum(loss=0.5)"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_one_line(source, text):
    assert repr(source) == text


def test_tables_in_notebooks():
    rows = "<tr><th>K</th><td>2</td></tr><tr><th>d</th><td>2</td></tr><tr><th>noise_std</th><td>0.5</td></tr>"
    assert MIX._repr_html_() == f"<table><caption>TaskMixture</caption>{rows}</table>"
    model = models.Full(models.Shape(trials=4, tasks=2, width=3, features=2), models.literal(3))
    assert "<caption>Full</caption><tr><th>trials</th><td>4</td></tr>" in model._repr_html_()
    assert "<td>72 parameters, float32 on cpu</td>" in model._repr_html_()


def test_losses_have_six_digits():
    assert float(theory.joint(MIX, 10)) == pytest.approx(0.894068, abs=5e-7)
    assert repr(fl.SphereTasks(2, noise_std=0.1**0.5)) == "SphereTasks(d=2, noise_std=0.316228, radius=1)"


def test_models():
    shape = models.Shape(trials=4, tasks=2, width=3, features=2)
    small = models.Full(shape, models.literal(3))
    assert repr(small) == "Full(trials=4, tasks=2, width=3, features=2): 72 parameters, float32 on cpu"
    large = replace(shape, layers=3, attention_heads=2, tokens=4, task_heads=True, task_prompts=False)
    shown = repr(models.Stack(large, models.literal(3), dtype=torch.float64))
    assert max(map(len, shown.splitlines())) <= 80
    assert "layers=3, attention_heads=2, tokens=4, task_heads=True, task_prompts=False)" in " ".join(shown.split())


def test_a_run(tmp_path):
    run = train(out=tmp_path / "run")
    first, second, *folder = repr(run).splitlines()
    assert first == "Run: joint, full model, n = 10, 3 trials × 4 steps × batch 64"
    risk, percent = float(run.risk[run.best]), 100 * float(run.excess[run.best])
    start = f"  best risk {risk:.6g} of trial {run.best}, optimum {float(run.theory):.6g}, excess {percent:+.3f} %,"
    assert second.startswith(start)
    assert str(tmp_path / "run") in second + "".join(folder)
    for name, value in (("regime", "joint"), ("excess", f"{percent:+.3f} %"), ("optimum", f"{float(run.theory):.6g}")):
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in run._repr_html_()
    assert "below zero" not in repr(run) + run._repr_html_()


def test_a_run_without_theory():
    run = train("heads", model="stack", layers=2, trials=1)
    first, second = repr(run).splitlines()
    assert first == "Run: heads, stack model, 2 layers, n = 10, 1 trial × 4 steps × batch 64"
    assert re.fullmatch(r"  best risk [\d.]+ ± [\d.]+ of trial 0", second)


def test_runs_below_theory_and_runs_that_diverged():
    run = train()
    low = replace(run, risk=run.risk / 100)
    assert max(map(len, repr(low).splitlines())) <= 80
    assert " ".join(repr(low).split()).endswith(BELOW_THEORY)
    assert f"<p>{BELOW_THEORY}</p>" in low._repr_html_()
    some = replace(run, diverged={2: 3})
    assert repr(some).endswith(", diverged 1")
    gone = replace(run, risk=torch.full((3,), torch.inf), diverged={0: 1, 1: 1, 2: 1})
    assert repr(gone).splitlines()[1].startswith("  risk none, every trial diverged, optimum ")


def test_html_is_escaped(tmp_path):
    shown = train(out=tmp_path / "<b>")._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert theory.joint(MIX, 10)._repr_html_().count("<tr>") == 4
