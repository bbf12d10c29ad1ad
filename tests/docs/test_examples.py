"""The examples run; the scripts as commands would, the notebook cell by cell, with the outputs that it stores."""

import base64
import json
import re
import runpy
import struct
import sys

import pytest
from support import notebook
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


def printed(outputs):
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def size_of_picture(outputs):
    (picture,) = (output["data"]["image/png"] for output in outputs if output["output_type"] == "display_data")
    header = base64.b64decode(picture)[:24]
    assert header.startswith(b"\x89PNG")
    return struct.unpack(">II", header[16:])


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_notebook(monkeypatch):
    """It shows what it has stored; trained numbers may differ in their last digits between instruction sets."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    stored = json.loads(notebook.NOTEBOOK.read_text())
    assert stored["nbformat"] == 4
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(len(line.rstrip("\n")) <= 88 for cell in cells for line in cell["source"])
    outputs, names = notebook.run(stored)
    for cell, now in zip(cells, outputs, strict=True):
        source, before = "".join(cell["source"]), cell["outputs"]
        if "fl.train" not in source:
            assert printed(now) == printed(before)
        for new, old in zip(printed(now).split(), printed(before).split(), strict=True):
            assert new == old or float(new) == pytest.approx(float(old), rel=5e-3)
        if "plt.show" in source:
            assert size_of_picture(now) == size_of_picture(before)
    assert str(ROOT) not in json.dumps(stored)
    points = names["points"]
    for name, line in names["lines"].items():
        assert points[name] == pytest.approx([line[n - 1] for n in names["lengths"]], rel=0.05)
    for plain, tuned, joint, heads in zip(*points.values(), strict=True):
        assert plain > tuned > joint > heads
