"""Pictures of closed forms, looked at through the figure that is saved."""

import json

import pytest

from fastlin import plots
from fastlin.experiments import config, curves
from fastlin.plots.style import COLOURS

ALL_EQUAL = "plain = fine-tuned = joint = shared shift\n= decoupled = scaled heads = lower bound"
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
    found = config.load(source)
    return curves.compute(found.with_lengths(lengths) if lengths else found, line=True)


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_lines_pass_through_every_length_and_marks_are_at_those_asked_for():
    given = record("2a")
    figure = plots.theory_figure(given)
    drawn = lines(figure)
    assert list(drawn) == [
        "plain",
        "fine-tuned",
        "joint",
        "shared shift",
        "decoupled = scaled heads = lower bound",
    ]
    for label, key in (("plain", "plain"), ("fine-tuned", "fine_tuned"), ("joint", "joint")):
        x, y = drawn[label].get_data()
        assert list(x) == list(range(1, 51))
        assert list(y * given["normaliser"]) == pytest.approx(given["line"]["losses"][key])
        assert [x[i] for i in drawn[label].get_markevery()] == [1, 10, 20, 30, 40, 50]
    assert len({line.get_color() for line in drawn.values()}) == 5
    assert len({line.get_marker() for line in drawn.values()}) == 5
    assert drawn["plain"].get_color() == COLOURS["plain"]


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
        ("2c", ["plain", "fine-tuned", "joint = shared shift", "decoupled = scaled heads = lower bound"]),
        (
            "A2d",
            [
                "plain",
                "fine-tuned",
                "joint",
                "shared shift",
                "decoupled ≈ scaled heads ≈ lower bound\n(to\u00a00.035\u00a0%)",
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
    assert {"decoupled", "scaled heads", "lower bound"} <= set(drawn)
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
