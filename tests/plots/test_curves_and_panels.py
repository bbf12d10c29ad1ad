"""Pictures of closed forms and panels, checked through the figure that is saved."""

import json

import pytest

from fastlin import plots, settings
from fastlin.figures import curves
from fastlin.plots.style import look

ALL_EQUAL = "plain = fine-tune = joint = shared shift =\njoint+heads = scaled heads = lower bound"
SINGULAR = """
name = "costs $5^$"
dimension = 2
means = [[1, 1], [-1, 0.5]]
covariances = [[1, 0], [2, 0]]
weights = [0.5, 0.5]
noise_std = 0.5
context_lengths = [1, 4]
"""


def record(source, lengths=None):
    found = settings.load(source)
    return curves.compute(found.with_lengths(lengths) if lengths else found, line=True)


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_lines_pass_through_every_length_and_marks_are_at_those_asked_for():
    given = record("2a")
    figure = plots.theory_figure(given)
    drawn = lines(figure)
    assert list(drawn) == [
        "plain",
        "fine-tune",
        "joint",
        "shared shift",
        "joint+heads = scaled heads = lower bound",
    ]
    for label, key in (("plain", "plain"), ("fine-tune", "fine_tuned"), ("joint", "joint")):
        x, y = drawn[label].get_data()
        assert list(x) == list(range(1, 51))
        assert list(y * given["normaliser"]) == pytest.approx(given["line"]["losses"][key])
        assert [x[i] for i in drawn[label].get_markevery()] == [1, 10, 20, 30, 40, 50]
    assert len({line.get_color() for line in drawn.values()}) == 5
    assert len({line.get_marker() for line in drawn.values()}) == 5
    assert drawn["plain"].get_color() == look("plain")[0]


def test_axes_are_labelled_and_show_both_units():
    given = record("2d")
    figure = plots.theory_figure(given)
    axes = figure.axes[0]
    assert axes.get_xlabel() == "context length n (examples)"
    assert axes.get_ylabel() == "population risk / E[y²]"
    assert axes.get_title() == "Figure 2(d): different means and covariances"
    (raw,) = axes.child_axes
    assert raw.get_ylabel() == "population risk (units of y²)"
    figure.draw_without_rendering()
    assert raw.get_ylim() == pytest.approx([edge * given["normaliser"] for edge in axes.get_ylim()])
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("source", "labels"),
    [
        ("2b", [ALL_EQUAL]),
        ("2c", ["plain", "fine-tune", "joint = shared shift", "joint+heads = scaled heads = lower bound"]),
        (
            "A2d",
            [
                "plain",
                "fine-tune",
                "joint",
                "shared shift",
                "joint+heads ≈ scaled heads ≈ lower bound\n(to\u00a00.035\u00a0%)",
            ],
        ),
    ],
)
def test_curves_that_coincide_are_drawn_once(source, labels):
    assert list(lines(plots.theory_figure(record(source, [1, 10])))) == labels


@pytest.mark.parametrize(
    ("lengths", "scale", "ticks"),
    [
        ([1, 3, 20], "linear", [1, 3, 20]),
        ([1, 10, 21], "log", [1, 10, 21]),
        ([0, 10], "linear", [0, 10]),
        ([0, 1, 30], "symlog", [0, 1, 30]),
        ([5], "linear", [5]),
        ([1, 100, 101, 1000], "log", [1, 100, 1000]),
    ],
)
def test_scale_of_the_lengths(lengths, scale, ticks):
    axes = plots.theory_figure(record("2c", lengths)).axes[0]
    assert axes.get_xscale() == scale
    assert list(axes.get_xticks()) == ticks
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(n) for n in ticks]


@pytest.mark.parametrize(("lengths", "scale"), [([1, 50], "linear"), ([1, 5000], "log")])
def test_scale_of_the_risk(lengths, scale):
    assert plots.theory_figure(record("2a", lengths)).axes[0].get_yscale() == scale


def test_a_missing_value_is_a_gap():
    given = record("2a", [1, 5])
    given["line"]["losses"]["scaled_heads"][2] = None
    drawn = lines(plots.theory_figure(given))
    assert {"joint+heads", "scaled heads", "lower bound"} <= set(drawn)
    y = drawn["scaled heads"].get_ydata()
    assert [value != value for value in y] == [False, False, True, False, False]


def test_pictures_and_their_notes(tmp_path):
    """Also: a title that is no formula, and files that are the same when they are drawn again."""
    path = tmp_path / "config.toml"
    path.write_text(SINGULAR)
    given = record(path)
    figure = plots.theory_figure(given)
    assert [label[-1] == "*" for label in lines(figure)] == [False, False, True, True, True]
    assert figure.get_supxlabel().startswith("* not attained, the infimum is shown: a mean")
    assert figure.axes[0].get_title() == "costs $5^$"
    (tmp_path / "theory.json").write_text(json.dumps(given))
    kept = {}
    for _ in range(2):
        paths = plots.theory(tmp_path)
        assert [path.name for path in paths] == ["theory.png", "theory.pdf", "theory.svg"]
        for path, start in zip(paths, (b"\x89PNG", b"%PDF", b"<?xml"), strict=True):
            picture = path.read_bytes()
            assert picture.startswith(start)
            assert kept.setdefault(path, picture) == picture
    assert len(list(tmp_path.iterdir())) == 5


def panel_record(rows, places=(1, 10), axis="n"):
    """A panel as `fastlin reproduce` writes it, of rows by key."""
    cells = [{"key": str(i), "place": place, "row": row} for i, (place, row) in enumerate(rows)]
    curve = {"label": "joint", "normalised": [0.5, None, 0.2]}
    return {
        "name": "2x",
        "title": "costs $5^$",
        "axis": axis,
        "axis_label": "context length n",
        "caption": ["A sentence with $ and _ in it.", "word " * 60],
        "lines": {
            "x": [places[0], 5, places[-1]],
            "curves": {"joint": curve, "shared_shift": {**curve, "label": "shift"}},
        },
        "cells": cells,
    }


def panel_row(regime, model, risk, **more):
    row = {
        "regime": regime,
        "model": model,
        "layers": 1,
        "attention_heads": 1,
        "curve": "joint",
        "risk": risk,
        "risk_error": 0.0,
    }
    row |= {
        "normaliser": 10.0,
        "normalised": None if risk is None else risk / 10,
        "typical_max": risk,
        "excess_percent": 1.0,
    }
    return {**row, "heavy_tail": False, "typical": risk, **more}


def test_points_of_a_panel():
    full, reduced = panel_row("joint", "full", 4.0, typical_max=6.0), panel_row("joint", "reduced", 5.0)
    rows = [(1, full), (10, panel_row("joint", "full", None)), (1, reduced), (10, None)]
    figure = plots.panel_figure(panel_record(rows))
    upper, lower = figure.axes
    drawn = lines(figure)
    point, other = drawn["joint, full"], drawn["joint, reduced"]
    assert point.get_ydata().tolist() == pytest.approx([0.4])
    (spread,) = [bar.lines[2][0] for bar in upper.containers]
    assert spread.get_segments()[0][:, 1].tolist() == pytest.approx([0.4, 0.6])
    # Points of two models are side by side and look different.
    assert point.get_xdata()[0] != other.get_xdata()[0]
    assert (point.get_markerfacecolor(), other.get_markerfacecolor()) == (look("joint")[0], "none")
    assert len({drawn[name]._unscaled_dash_pattern for name in ("theory: joint", "theory: shift")}) == 2
    assert drawn["theory: joint"].get_color() == look("joint")[0]
    assert lower.get_ylabel() == "excess (%)"
    assert [text.get_text() for text in lower.get_xticklabels()] == ["1", "10"]
    assert upper.get_ylabel() == "population risk / E[y²]"


def test_a_panel_without_closed_forms_has_no_excess():
    rows = [(1, panel_row("joint", "stack", 4.0, layers=3, excess_percent=None))]
    figure = plots.panel_figure(panel_record(rows))
    assert len(figure.axes) == 1
    assert {"joint, stack L = 3", "theory, L = 1: joint"} <= set(lines(figure))


def test_regimes_of_a_stack_stand_beside_each_other():
    rows = [(1, panel_row(regime, "stack", 4.0, layers=3, excess_percent=None)) for regime in ("plain", "joint")]
    drawn = lines(plots.panel_figure(panel_record(rows)))
    assert drawn["plain, stack L = 3"].get_xdata()[0] < drawn["joint, stack L = 3"].get_xdata()[0]


def test_a_risk_that_rests_on_few_sequences_is_crossed():
    sure, unsure = panel_row("joint", "full", 4.0), panel_row("plain", "full", 900.0, heavy_tail=True, typical=3.0)
    axes = plots.panel_figure(panel_record([(1, sure), (10, unsure)])).axes[0]
    assert axes.get_ylim() == pytest.approx((0.0, 1.08 * 0.5))
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert (cross.get_xdata().tolist(), cross.get_ydata().tolist()) == ([10], pytest.approx([0.3]))


def test_a_panel_with_nothing_done(tmp_path):
    record = panel_record([(1, None), (10, None)])
    (tmp_path / "2x.json").write_text(json.dumps(record), encoding="utf-8")
    assert [path.name for path in plots.panel(tmp_path, "2x")] == ["2x.png", "2x.pdf", "2x.svg"]
