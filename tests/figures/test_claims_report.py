"""The files and the picture of the claims report."""

import csv
import io
import json

import pytest
import torch
from support.claims import SIZES, Oracle
from support.folders import contents, visible

from fastlin import plots, settings, theory
from fastlin.figures import claims
from fastlin.figures.claims import attention, closed
from fastlin.plots.style import look

NAMES = [
    "Ordering of the optima",
    "Rates of the gaps",
    "Zero means",
    "Size of the optimal prompts",
    "Assumption 1",
    "Proposition 1",
    "The decoupled bound in training",
]


def test_record(made):
    _, record, reported, out = made
    assert [entry["name"] for entry in record["claims"]] == NAMES
    assert reported == record["claims"]
    assert record["training"] == {**SIZES, "seed": 0}
    assert record["versions"]["torch"] == torch.__version__
    # Twenty steps train nothing, and closed forms do not need them.
    assert [entry["holds"] for entry in record["claims"]] == [True, False, None, False, False, False, None]
    assert len(visible(out / "cells" / "claims")) == 4 + 1 + 3
    assert json.loads(claims.as_json(record)) == record
    assert claims.line(record["claims"][0]) == (
        "Ordering of the optima: holds. The ordering holds in every case checked."
    )
    numbers = {(number["quantity"], number["n"]): number["value"] for number in record["claims"][0]["numbers"]}
    assert numbers["comparisons, random problems", None] == 1500


def test_files_are_whole(made, tmp_path):
    record = made[1]
    out = tmp_path / "new" / "folder"
    paths = claims.write(record, out)
    assert [path.name for path in paths] == ["claims.json", "claims.md", "claims.csv"]
    assert json.loads(paths[0].read_text(encoding="utf-8")) == record
    text = paths[1].read_text(encoding="utf-8")
    for i, entry in enumerate(record["claims"], 1):
        assert f"## {i}. {entry['name']}: " in text
        assert all(entry[part] in text for part in ("statement", "finding", "verdict"))
    rows = list(csv.DictReader(io.StringIO(paths[2].read_text(encoding="utf-8"))))
    assert list(rows[0]) == ["claim", "quantity", "n", "value", "expected"]
    numbers = [(entry["name"], number) for entry in record["claims"] for number in entry["numbers"]]
    assert len(rows) == len(numbers)
    for row, (name, number) in zip(rows, numbers, strict=True):
        assert (row["claim"], row["quantity"], float(row["value"])) == (name, number["quantity"], number["value"])
        assert row["n"] == ("" if number["n"] is None else str(number["n"]))
    # A bar inside a cell would make a column.
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {5}
    before = contents(out)
    assert claims.write(record, out) == paths
    assert contents(out) == before


def test_a_report_that_fails_leaves_the_one_before(made, tmp_path):
    claims.write(made[1], tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        claims.write({**made[1], "training": {"steps": float("nan")}}, tmp_path)
    assert contents(tmp_path) == before


def test_trials_that_all_diverged_have_no_number(monkeypatch, tmp_path):
    setting, diverged = settings.load("2b"), Oracle(float("inf"))
    monkeypatch.setattr(claims, "_claims", lambda cells: [lambda: attention.zero_means(setting, diverged)])
    record = claims.compute(tmp_path, **SIZES)
    assert record["claims"][0]["holds"] is None
    assert None in [number["value"] for number in record["claims"][0]["numbers"]]
    claims.write(record, tmp_path)


def test_picture(made, tmp_path):
    claims.write(made[1], tmp_path)
    figure = plots.claims_figure(json.loads((tmp_path / "claims.json").read_text(encoding="utf-8")), caption=True)
    left, right = figure.axes
    drawn = {line.get_label(): line for line in left.get_lines()}
    mix = settings.load("2c").mixture
    n, gap = drawn["FT − JT"].get_data()
    assert (n[0], n[-1]) == (1, 100_000)
    assert gap[-1] == pytest.approx(closed.gaps(mix, 100_000)["fine_tuned_joint"])
    limits = theory.gap_limits(mix)
    for label, limit, power in (
        (f"limit {limits.plain_fine_tuned:.4g} / n²", limits.plain_fine_tuned, 2),
        (f"limit {limits.fine_tuned_joint:.4g} / n²", limits.fine_tuned_joint, 2),
        (f"limit {limits.joint_decoupled:.4g} / n", limits.joint_decoupled, 1),
    ):
        assert drawn[label].get_linestyle() == "--"
        assert drawn[label].get_ydata()[-1] == pytest.approx(limit / 1e5**power)
    x, y = drawn["FT − JT in the paper: order 1/n"].get_data()
    assert list(x * y) == pytest.approx([x[0] * y[0]] * len(x))
    assert all(
        paper >= closed.gaps(mix, int(at))["fine_tuned_joint"] * (1 - 1e-12) for at, paper in zip(x, y, strict=True)
    )
    assert drawn["FT − JT"].get_color() == look("joint")[0]
    flat = {line.get_label().split(":")[0]: line.get_ydata() for line in right.get_lines()}
    for key, find in (("fine-tuned prompts", theory.fine_tuned), ("joint prompts", theory.joint)):
        assert list(flat[key]) == pytest.approx([float(find(mix, 1).prompts.norm())] * len(flat[key]))
    assert flat["the paper"][-1] == pytest.approx(1e5 * float(mix.means.norm()))
    for axes in (left, right):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "context length n (examples)"
        assert axes.get_ylabel()
        assert axes.get_legend() is not None
    assert figure.get_supxlabel().startswith("Left: differences")
    assert "\n\nLeft: differences" in (tmp_path / "claims.md").read_text(encoding="utf-8")
    paths = plots.panel(tmp_path, "claims")
    assert [path.name for path in paths] == ["claims.png", "claims.pdf", "claims.svg"]
    for path, start in zip(paths, (b"\x89PNG", b"%PDF", b"<?xml"), strict=True):
        assert path.read_bytes().startswith(start)
