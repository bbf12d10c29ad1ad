"""Tables and captions of panels."""

import csv
import io

import pytest

from fastlin.figures import report
from fastlin.training.judge import BELOW_THEORY


def cell(regime, risk, *, n=5, error=0.0, layers=1, heads=1, model="full", place=None, **more):
    row = {
        "regime": regime,
        "model": model,
        "layers": layers,
        "attention_heads": heads,
        "n": n,
        "noise_variance": 0.0,
        "risk": risk,
        "risk_error": error,
        "normaliser": 10.0,
        "normalised": None if risk is None else risk / 10.0,
        "theory": 4.0,
        "excess_percent": None if risk is None else 100 * (risk / 4.0 - 1),
        "median": risk,
        "max": risk,
        "trials": 3,
        "diverged": 0,
        "heavy_tail": False,
        **more,
    }
    return {"key": f"{regime}-{model}-L{layers}-n{n}", "place": n if place is None else place, "row": row}


def panel(*cells, axis="n"):
    asked = {"trials": 3, "steps": 1500, "batch": 4096, "preset": "tuned", "values": {"lr": 0.01}}
    return {"name": "2x", "axis": axis, "asked": asked, "cells": list(cells), "remarks": ["A remark."]}


def test_order_of_regimes():
    right = panel(cell("plain", 5.0), cell("joint", 4.0), cell("plain", 3.0, n=9), cell("joint", 2.0, n=9))
    assert report.violations(right, None) == []
    wrong = panel(cell("plain", 4.0), cell("joint", 4.1), cell("plain", 3.0, n=9), cell("joint", 2.0, n=9))
    assert report.violations(wrong, None) == ["joint full n=5 is 2.5 % above plain full n=5"]


@pytest.mark.parametrize(
    ("risk", "error", "reported"),
    [(4.019, 0.0, False), (4.021, 0.0, True), (4.1, 0.06, False), (4.1, 0.04, True), (None, None, False)],
)
def test_what_counts_as_out_of_order(risk, error, reported):
    """More than 0.5 % and more than two standard errors."""
    found = report.violations(panel(cell("plain", 4.0), cell("joint", risk, error=error)), None)
    assert bool(found) == reported


def test_models_are_not_compared_with_each_other():
    assert report.violations(panel(cell("plain", 4.0, model="reduced"), cell("plain", 5.0)), None) == []
    assert report.violations(panel(cell("plain", 4.0, heads=2), cell("joint", 5.0)), None) == []


def test_order_of_depths():
    shallow = panel(cell("plain", 5.0), cell("joint", 4.0))
    deep = panel(cell("plain", 5.5, layers=2, model="stack"), cell("joint", 3.0, layers=2, model="stack"))
    assert report.violations(deep, shallow) == ["plain stack L=2 n=5 is 10.0 % above plain full n=5"]
    axis = panel(cell("joint", 4.0, place=1), cell("joint", 4.4, layers=2, model="stack", place=2), axis="layers")
    assert report.violations(axis, None) == ["joint stack L=2 n=5 is 10.0 % above joint full n=5"]


def test_caption():
    record = panel(
        cell("plain", 4.0),
        cell("joint", 4.2, diverged=2),
        cell("joint", 3.0, n=9, error=2.5, heavy_tail=True),
        {"key": "joint-full-L1-n12", "place": 12, "row": None},
    )
    first, *rest = report.caption(record, None)
    assert first.startswith("3 trials × 1,500 steps × batch 4,096, preset tuned, lr = 0.01.")
    assert rest == [
        "Excess over theory, full model: -25.00 % to +5.00 %.",
        BELOW_THEORY,
        "2 of 9 trials diverged.",
        "Heavy tails: a few sequences dominate the mean risk, so crossed points show medians of batches: "
        "joint full n=9 (3 ± 2.5).",
        "Missing: 1 of 4 cells.",
        "Order: joint full n=5 is 5.0 % above plain full n=5.",
        "A remark.",
    ]


def test_tables():
    record = panel(cell("plain", 4.0), cell("joint", 3.0, error=0.25), cell("joint", None, n=9))
    rows = list(csv.DictReader(io.StringIO(report.as_csv(record))))
    assert [(row["panel"], row["regime"], row["risk"]) for row in rows] == [
        ("2x", "plain", "4.0"),
        ("2x", "joint", "3.0"),
        ("2x", "joint", ""),
    ]
    lines = report.as_table(record).splitlines()
    assert "exact" in lines[1]
    assert "+0.000 %" in lines[1]
    assert "0.25" in lines[2]
    assert "-25.000 %" in lines[2]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1] == BELOW_THEORY
    assert report.as_csv(panel()) == ""


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (115, "regime model L H n σ² risk ± s.e. theory excess risk/E[y²] median max trials"),
        (100, "regime model L H n σ² risk ± s.e. theory excess risk/E[y²] trials"),
        (80, "regime model L H n σ² risk theory excess trials"),
        (60, "regime model L H n σ² risk excess"),
    ],
)
def test_columns_of_a_narrow_terminal(width, left):
    record = panel(cell("joint+heads", 3.0, error=0.25, n=1000, model="separate"))
    lines = report.as_table(record, width).splitlines()
    assert " ".join(lines[0].split()) == left
    assert max(map(len, lines)) <= width
    assert "An excess below zero is possible" in " ".join(lines)


def test_the_excess_is_explained_only_where_it_is_below_zero():
    for excess, explained in ((-0.0004, False), (0.0, False), (None, False), (-0.0006, True)):
        record = panel(cell("plain", 4.0, excess_percent=excess))
        assert (BELOW_THEORY in report.as_table(record)) == explained
        assert (BELOW_THEORY in report.caption(record, None)) == explained
