"""Closed forms against the context length: values, what is said where there is none, and the forms on paper."""

import csv
import itertools
import json
import math
import pickle
import warnings

import pytest
import torch

from fastlin import theory
from fastlin.data.sources import TaskMixture
from fastlin.figures import curves
from fastlin.settings import Config, load
from fastlin.training.regimes import REGIMES

KEYS = ["plain", "fine_tuned", "joint", "shared_shift", "decoupled", "scaled_heads", "heads_lower_bound"]
SINGULAR = {"means": [[1.0, 1.0], [-1.0, 0.5]], "weights": [0.5, 0.5], "noise_std": 0.5}


def mixture(third):
    """Two tasks whose covariances have the variance `third` in a direction that the means have a part in."""
    covariances = [[[1.0, 0.0], [0.0, third]], [[2.0, 0.0], [0.0, third]]]
    return TaskMixture(covariances=covariances, **SINGULAR)


def settings(mix, lengths, name="test", description=""):
    return Config(name, description, tuple(lengths), mix, {"name": name})


def test_losses_are_those_of_the_theory():
    found = load("A2d").with_lengths([0, 1, 10])
    at = curves.evaluate(found.mixture, found.context_lengths)
    assert (at["n"], list(at["losses"]), at["notes"]) == ([0, 1, 10], KEYS, [])
    for key in KEYS:
        assert at["losses"][key] == [float(getattr(theory, key)(found.mixture, n)) for n in (0, 1, 10)]
    for i in range(3):
        losses = [at["losses"][key][i] for key in KEYS]
        assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(losses)), losses


def test_record():
    found = load("2c").with_lengths([3, 1])
    record = curves.compute(found, line=True)
    assert record["name"] == "Figure 2(c)"
    assert record["description"] == found.description
    assert record["normaliser"] == pytest.approx(28.9)
    assert list(record["labels"]) == KEYS
    assert record["config"] == {**load("2c").values, "context_lengths": [1, 3]}
    assert record["versions"]["torch"] == torch.__version__
    assert record["n"] == [1, 3]
    assert record["line"]["n"] == [1, 2, 3]
    for key in KEYS:
        assert record["normalised"][key] == [loss / record["normaliser"] for loss in record["losses"][key]]
        assert record["line"]["losses"][key][::2] == record["losses"][key]
    assert json.loads(curves.as_json(record)) == record
    assert curves.compute(found, line=False)["line"] is None


def test_an_infimum_that_is_not_attained_is_shown_and_said():
    at = curves.evaluate(mixture(0.0), [0, 4])
    reason = "a mean lies outside the range of the singular mean task covariance"
    noted = ["joint", "shared_shift", "decoupled", "scaled_heads"]
    text = f"not attained, the infimum is shown: {reason}"
    assert at["notes"] == [{"curve": key, "text": text, "n": [4]} for key in noted]
    nearly = curves.evaluate(mixture(1e-10), [0, 4])
    assert nearly["notes"] == []
    for key in KEYS:
        assert at["losses"][key] == pytest.approx(nearly["losses"][key], rel=1e-6)


def test_not_attained_is_an_error_with_its_infimum():
    with pytest.raises(theory.NotAttained) as caught:
        theory.joint(mixture(0.0), 4)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, ValueError)
        assert error.infimum == pytest.approx(theory.joint(mixture(1e-10), 4).loss, rel=1e-6)
        assert str(error).startswith(f"mix: {error.reason}, so no finite prompts attain the infimum ")
        assert str(error).endswith(f" of the loss; wants {error.wants}")


def test_a_task_without_variance_has_no_head():
    mix = TaskMixture([[1.0], [0.0]], [[[1.0]], [[0.0]]], [0.5, 0.5], noise_std=1.0)
    at = curves.evaluate(mix, [3])
    assert [(note["curve"], note["text"].split(": ")[1]) for note in at["notes"]] == [
        ("scaled_heads", "the context carries no information about a task, which needs a head of size zero")
    ]
    assert at["losses"]["heads_lower_bound"][0] <= at["losses"]["scaled_heads"][0] < at["losses"]["decoupled"][0]


def fails(mix, n):
    raise RuntimeError("the matrix is singular")


def warns(mix, n):
    warnings.warn("not settled", RuntimeWarning, stacklevel=1)
    return theory.Bound(1.25)


def warns_and_is_not_attained(mix, n):
    warns(mix, n)
    raise theory.NotAttained(1.5, "no reason", "one")


@pytest.mark.parametrize(
    ("optimum", "loss", "remarks"),
    [
        (fails, None, ["cannot be computed: the matrix is singular"]),
        (lambda mix, n: math.nan, None, ["cannot be computed: the closed form gives nan"]),
        (lambda mix, n: math.inf, None, ["cannot be computed: the closed form gives inf"]),
        (warns, 1.25, ["not settled"]),
        (warns_and_is_not_attained, 1.5, ["not attained, the infimum is shown: no reason", "not settled"]),
    ],
    ids=["fails", "nan", "inf", "warns", "both"],
)
def test_what_a_closed_form_may_do(monkeypatch, optimum, loss, remarks):
    monkeypatch.setitem(curves.CURVES, "joint", curves.CURVES["joint"]._replace(optimum=optimum))
    record = curves.compute(settings(mixture(1.0), [1, 2]), line=True)
    assert record["losses"]["joint"] == [loss] * 2
    assert record["normalised"]["joint"] == [None if loss is None else loss / record["normaliser"]] * 2
    assert record["notes"] == [{"curve": "joint", "text": text, "n": [1, 2]} for text in remarks]
    cell = "-*" if loss is None else f"{loss:.5f}*"
    table = curves.as_table(record).splitlines()
    assert [line.split()[3] for line in table[5:7]] == [cell] * 2
    rows = list(csv.DictReader(curves.as_csv(record).splitlines()))
    assert [row["joint"] for row in rows] == ["" if loss is None else str(loss)] * 2
    assert {row["noted"] for row in rows} == {" ".join(["joint"] * len(remarks))}


def test_threads_are_given_back(monkeypatch):
    seen = []
    plain = curves.CURVES["plain"]._replace(optimum=lambda *_: seen.append(torch.get_num_threads()) or 1)
    monkeypatch.setitem(curves.CURVES, "plain", plain)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        curves.evaluate(mixture(1.0), [1])
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("lengths", "line"),
    [((5,), [5]), ((0, 3), [0, 1, 2, 3]), ((10, 12, 13), [10, 11, 12, 13]), ((1, 150), list(range(1, 151)))],
)
def test_a_short_line_has_every_integer(lengths, line):
    assert curves.line_lengths(lengths) == line


@pytest.mark.parametrize("lengths", [(0, 7, 1000), (1, 10**6), (5000, 5001, 6000), (3, (1 << 40) - 1)])
def test_a_long_line_is_spread_over_all_sizes(lengths):
    line = curves.line_lengths(lengths)
    assert line == sorted(set(line))
    assert set(lengths) <= set(line)
    assert (line[0], line[-1]) == (lengths[0], lengths[-1])
    assert 50 < len(line) <= 150 + len(lengths)
    steps = [b / a for a, b in itertools.pairwise(line) if a >= 100]
    assert max(steps) < 1.3


def test_table_of_a_figure():
    record = curves.compute(load("2c").with_lengths([1, 10]), line=False)
    assert curves.as_table(record) == (
        "Figure 2(c): equal covariances, means that average to zero\n"
        "\n"
        "population risk\n"
        "                                        shared      joint     scaled      lower\n"
        " n      plain  fine-tune      joint      shift     +heads      heads      bound\n"
        " 1    22.8444    13.3079     9.6887     9.6887     9.1667     9.1667     9.1667\n"
        "10    10.6633     9.9303     7.5743     7.5743     5.2381     5.2381     5.2381\n"
        "\n"
        "population risk / E[y²]\n"
        "                                        shared      joint     scaled      lower\n"
        " n      plain  fine-tune      joint      shift     +heads      heads      bound\n"
        " 1   0.790464   0.460482   0.335248   0.335248   0.317186   0.317186   0.317186\n"
        "10   0.368973   0.343610   0.262086   0.262086   0.181249   0.181249   0.181249\n"
        "\n"
        "n             examples in the context\n"
        "E[y²]         28.9, the risk of the prediction zero\n"
        "plain         W, without prompts\n"
        "fine-tune     a prompt for each task, with the W of plain\n"
        "joint         W and a prompt for each task\n"
        "shared shift  joint, with the head [-m; 1] for all tasks\n"
        "joint+heads   W, a prompt and a head for each task\n"
        "scaled heads  joint+heads, and a scale of each head\n"
        "lower bound   no prompts and heads can go below it\n"
        "In fl.theory, CSV and JSON: fine-tune is fine_tuned, joint+heads is decoupled,\n"
        "lower bound is heads_lower_bound.\n"
    )


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (80, ["plain", "fine-tune", "joint", "shared shift", "joint+heads", "scaled heads", "lower bound"]),
        (79, ["plain", "fine-tune", "joint", "shared shift", "joint+heads", "scaled heads"]),
        (60, ["plain", "fine-tune", "joint", "shared shift", "joint+heads"]),
        (40, ["plain", "joint", "joint+heads"]),
    ],
)
def test_table_in_a_narrow_terminal(width, left):
    """Columns are left out in a stated order; the legend has those that are there, and regimes by their names."""
    record = curves.compute(settings(mixture(0.0), [1, 10], name="own"), line=False)
    lines = curves.as_table(record, width).splitlines()
    assert max(map(len, lines)) <= width
    legend = lines[lines.index("n             examples in the context") :]
    every = [curve.label for curve in curves.CURVES.values()]
    assert [label for label in every if any(line.startswith(f"{label:14}") for line in legend)] == left
    assert len(lines[4].split()) == len(left) + 1
    missing = [label for label in every if label not in left]
    assert (
        " ".join(" ".join(lines).split()).endswith(", ".join(missing)) if missing else "not shown" not in "".join(lines)
    )


def test_labels_of_regimes_are_their_names():
    for row in REGIMES.values():
        assert row.closed_form is None or row.closed_form.label == row.name


def test_table_keeps_digits_of_small_losses_and_says_why_in_a_footnote():
    record = curves.compute(settings(mixture(0.0), [1, 10, 20], name="bare"), line=False)
    table = curves.as_table(record)
    assert table.startswith("bare\n\npopulation risk\n")
    assert (
        "\n* joint, shared shift, joint+heads, scaled heads at n = 1, 10, 20: not attained,\n"
        "  the infimum is shown: a mean lies outside the range of the singular mean task\n"
        "  covariance\n\n"
    ) in table
    assert max(map(len, table.splitlines())) <= 80
    long = curves.compute(load("2a").with_lengths([1, 10**6]), line=False)
    last = curves.as_table(long).partition("\n\nn  ")[0].splitlines()[-1].split()
    assert [float(cell) for cell in last[1:]] == pytest.approx([long["normalised"][key][1] for key in KEYS], rel=1e-4)


def test_csv_has_every_digit():
    record = curves.compute(load("A1d"), line=False)
    rows = list(csv.DictReader(curves.as_csv(record).splitlines()))
    assert list(rows[0]) == ["n", *KEYS, *(f"{key}_normalised" for key in KEYS), "noted"]
    assert [int(row["n"]) for row in rows] == [1, 3, 5, 7, 10, 15, 20]
    for key in KEYS:
        assert [float(row[key]) for row in rows] == record["losses"][key]
        assert [float(row[f"{key}_normalised"]) for row in rows] == record["normalised"][key]
    assert {row["noted"] for row in rows} == {""}


def test_files(tmp_path):
    record = curves.compute(load("2b").with_lengths([2]), line=True)
    out = tmp_path / "a" / "b"
    assert curves.write(record, out) == [out / "theory.json", out / "theory.csv"]
    assert json.loads((out / "theory.json").read_text(encoding="utf-8")) == record
    assert (out / "theory.csv").read_text() == curves.as_csv(record)
    assert sorted(path.name for path in out.iterdir()) == ["theory.csv", "theory.json"]
