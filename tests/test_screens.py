"""What the commands print fits a terminal of 60 columns: no line is longer."""

import json
from pathlib import Path

import pytest

from fastlin import cli, plots
from fastlin.figures import status
from fastlin.figures.status import CellStatus
from fastlin.training import judge, progress

TOML = """
name = "two tasks with a long name"
description = "means that do not add up to zero, so that the full model can go below the reduced one"
dimension = 3
means = [2, -1]
covariances = [1, 1]
weights = [0.5, 0.5]
context_lengths = [5, 10]
"""
TRAIN = [
    "train",
    "own.toml",
    "--regime",
    "plain,joint+heads",
    "--steps",
    "3",
    "--batch",
    "64",
    "--trials",
    "3",
    "--resume",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "experiment", lambda folder, **look: [])
    Path("own.toml").write_text(TOML)


@pytest.fixture(params=[60, 100])
def columns(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def screen(capsys, columns, *arguments):
    """Lines of stdout, each no longer than the terminal is wide."""
    capsys.readouterr()
    assert cli.main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns] == []
    return lines


def test_theory(capsys, columns):
    lines = screen(capsys, columns, "theory", "own.toml", "-n", "5,10")
    assert any(line.startswith("joint+heads   W, a prompt") for line in lines)


def test_info(capsys, columns):
    assert any(line.startswith("extension ") for line in screen(capsys, columns, "info"))


def test_train(capsys, columns):
    heading, *rows = screen(capsys, columns, *TRAIN)
    left = {60: "regime n theory best excess trials", 100: "regime n theory best excess q25 median q75 mean trials"}
    assert heading.split() == left[columns].split()
    assert [row.split()[:2] for row in rows[:4]] == [[r, n] for r in ("plain", "joint+heads") for n in ("5", "10")]
    assert rows[4].startswith(f"not shown in {columns} columns: min")
    assert [Path(row).name for row in rows[5:] if row] == ["risk.csv", "risk.json", "risk.md"]


def test_an_excess_below_zero_is_explained(capsys, columns, monkeypatch):
    """Where a risk is a tenth of what it was."""
    final = judge.Judge.final

    def lower(self, model, prompts):
        estimate, best = final(self, model, prompts)
        return estimate._replace(risk=estimate.risk / 100), best

    monkeypatch.setattr(judge.Judge, "final", lower)
    lines = screen(capsys, columns, *TRAIN, "--out", "low")
    assert judge.BELOW_THEORY in " ".join(lines)


@pytest.mark.parametrize("given", [["bench", "--list"], ["bench", "--compare", "a.json", "a.json"]])
def test_bench(capsys, columns, given):
    case = {
        "name": "prompt_loss B=8192 n=50 m=11",
        "contenders": [{"label": "fastlin", "median": 1.0}, {"label": "eager", "median": 9.0}],
    }
    Path("a.json").write_text(json.dumps({"format": 2, "cases": [case]}))
    assert screen(capsys, columns, *given)


def test_status(monkeypatch):
    error = "RuntimeError: " + "a long message about what was wrong " * 5
    about = {"layers": 1, "seconds": 5.0}
    found = [
        CellStatus("2c", "joint-full-L1-n10", "started", progress=0.5, error=None, **about),
        CellStatus("2c", "plain-full-L1-n10", "failed", progress=1.0, error=error, **about),
        CellStatus("forgetting", "tuned", "done", progress=1.0, error=None, **about),
    ]
    monkeypatch.setattr(status, "cells", lambda folder: found)
    for width, states in ((60, 4), (40, 3)):
        lines = status.as_text(Path(), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines[0].split()) == 1 + states
        assert "started  2c joint-full-L1-n10: 50 %" in lines


class Bar:
    """Stands for tqdm."""

    text = ""

    def set_description_str(self, text):
        self.text = text


def test_the_line_of_a_figure(monkeypatch, columns):
    keys = [f"joint+heads-full-L1-n{n}" for n in range(10, 20)]
    found = [CellStatus("2c", key, "started", 1, 0.5, None, None) for key in keys]
    monkeypatch.setattr(status, "cells", lambda folder: found)
    line = status.Line(Path())
    line._bar = Bar()
    line.show()
    assert line._bar.text.startswith("0/10 cells, ? left, 10 in training, joint+heads-full-L1-n10 50 %"[: columns - 30])
    assert columns - 30 < len(line._bar.text) < columns


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (120, "joint+heads n=10  42 %, 2520/6000 steps, 0:35 left, 100 steps/s, 0.82M seq/s, loss 7.5 (+0.10 %)"),
        (90, "joint+heads n=10  42 %, 2520/6000 steps, 0:35 left, 100 steps/s, loss 7.5 (+0.10 %)"),
        (80, "joint+heads n=10  42 %, 2520/6000 steps, 0:35 left, loss 7.5 (+0.10 %)"),
        (60, "joint+heads n=10  42 %, 0:35 left, loss 7.5 (+0.10 %)"),
        (40, "joint+heads n=10  42 %, 0:35 left"),
        (30, "joint+heads n=10  42 %"),
    ],
)
def test_the_line_of_a_run(monkeypatch, width, text):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    line = progress.Progress(False, "joint+heads n=10", 20, 6000)
    line._bar, line._start = Bar(), 975.0
    line._shown = 0.0
    line.show(2520, 8192, [{"loss": [8.0, 7.5], "risk": [7.5075]}], 7.5)
    assert line._bar.text == text


def test_a_cell_that_ended_explains_its_excess_once(capsys, columns):
    line = status.Line(Path())
    cell = {"key": "joint", "seconds": 1.0, "state": "done", "row": {"risk": 1.0, "excess_percent": -1.5}}
    for _ in range(2):
        line.ended({"name": "2a", "cells": [cell]}, cell)
    shown = capsys.readouterr().err
    assert shown.count("2a 1/1 joint: risk 1 (excess -1.50 %), 1.0 s\n") == 2
    assert " ".join(shown.split()).count(" ".join(judge.BELOW_THEORY.split())) == 1
    assert max(map(len, shown.splitlines())) <= columns
