"""The examples run; the scripts as commands would, the notebook cell by cell."""

import json
import re
import runpy
import sys

import pytest
from support.pages import ROOT

EXAMPLES = ROOT / "examples"


def run(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_script_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"own_data.py", "own_model.py", "many_trials.py"}


def test_own_data(monkeypatch, capsys):
    shown = run("own_data.py", ["--steps", "200", "--batch", "256"], monkeypatch, capsys)
    error, variance = map(float, re.search(r"error ([\d.]+) of E\[y²\] = ([\d.]+)", shown).groups())
    assert error < 0.5 * variance


def test_own_data_from_a_file(monkeypatch, capsys, tmp_path):
    path = tmp_path / "mine.csv"
    rows = [f"{g % 2},{g},{x},{x * g}" for g in range(6) for x in (1.0, 2.0, 3.0, 4.0)]
    path.write_text("\n".join(["family,group,x,label", *rows]) + "\n")
    assert "held-out" in run("own_data.py", ["--csv", str(path), "--n", "3", "--steps", "2"], monkeypatch, capsys)


def test_own_model(monkeypatch, capsys):
    shown = run("own_model.py", ["--steps", "150", "--batch", "128"], monkeypatch, capsys)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[-1] < 0.9 * losses[0]


def test_many_trials(monkeypatch, capsys):
    shown = run("many_trials.py", ["--trials", "2", "--steps", "150", "--batch", "256"], monkeypatch, capsys)
    assert shown.startswith("10 trials")
    best = [float(percent) for percent in re.findall(r"best +([+-][\d.]+)%", shown)]
    assert len(best) == 5
    assert min(best) > -0.01


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_notebook(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "figure.ipynb").read_text())
    assert notebook["nbformat"] == 4
    namespace = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), namespace)
    (axes,) = namespace["figure"].axes
    assert len(axes.lines) == 6
    for name, line in namespace["lines"].items():
        for theory, point in zip(line, namespace["points"][name], strict=True):
            assert 0.95 * theory < point < 3 * theory
