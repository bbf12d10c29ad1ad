"""Every kind of picture in both styles: texts that do not meet, legends outside the data, captions on request."""

import itertools
import json
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from fastlin import cli, plots
from fastlin.figures import curves, prompts
from fastlin.figures.claims import closed
from fastlin.figures.forgetting import THEORY_FIGURES, regimes
from fastlin.figures.forgetting.axes import as_dicts
from fastlin.plots.style import STYLES, look
from fastlin.settings import load
from fastlin.training.regimes import CLOSED_FORMS, REGIMES

CPU = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.json"


def panel(name, **changes):
    """The record of a shipped panel whose cells end near theory, at the context lengths 1, 20 and 50."""
    figure = {**prompts.PANELS, **prompts.BEYOND}[name]
    cells = []
    for i, cell in enumerate(figure.cells((1, 20, 50))):
        row = {"regime": cell.regime, "model": cell.model, "layers": cell.layers, "curve": cell.curve}
        row |= {"attention_heads": cell.attention_heads, "risk": 3.0 + i % 7, "normaliser": 10.0, "typical": 3.0}
        excess = None if cell.layers > 1 else 0.1 * i - 1
        row |= {"typical_max": 4.0 + i % 7, "excess_percent": excess, "heavy_tail": False, **changes}
        cells.append({"key": cell.key, "place": cell.place, "row": row})
    opening = figure.opening(figure.cells((1, 20, 50)))
    caption = ["Points: the best trial; bars: up to the worst.", "word " * 60, *figure.remarks]
    return {"name": name, "title": figure.title, "caption": caption, "cells": cells, **opening}


def eight():
    """A record of figure 5 of the second paper."""
    curve = {"x": list(range(21)), "error": [0.01] * 21, "points": True}
    order = [regimes.PRETRAIN, *regimes.EIGHT]
    values = [[10.0**i / (n + 1) for n in range(21)] for i in range(len(order))]
    drawn = [{**curve, "label": name, "colour": i, "y": values[i]} for i, name in enumerate(order)]
    one = {"x_label": "test shots n", "y_label": "test error", "logarithmic": True, "marks": [], "curves": drawn}
    axes = [{**one, "title": f"task {task}"} for task in ("θ0", "−θ0")]
    return {"title": "Figure 5: eight ways to fine-tune", "caption": ["word " * 80], "axes": axes, "cells": [1]}


def theory_of_forgetting(figure):
    axes = as_dicts(figure.axes(batch=64, batches=2, seed=0))
    return {"title": figure.title, "caption": list(figure.remarks), "axes": axes, "cells": []}


def trained(lengths):
    records = [{"step": 10**i, "risk": [8.0 / (i + 1), 9.0 / (i + 1)]} for i in range(5)]
    cell = {"best_trial": 0, "theory": 1.0, "excess_percent": 12.3, "records": records, "batch": 8192, "model": "full"}
    regimes = ("plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads")
    cells = [{**cell, "regime": regime, "n": n} for n in lengths for regime in regimes]
    return {"name": "Figure 2(c)", "normaliser": 9.0, "cells": cells}


LONG = [1, 5, 10, 100, 1000]
RECORDS = {
    **{name: (plots.panel_figure, lambda name=name: panel(name)) for name in ("2a", "2d", "A2b", *prompts.BEYOND)},
    "2c of few sequences": (plots.panel_figure, lambda: panel("2c", heavy_tail=True)),
    **{
        f"theory {name}": (plots.theory_figure, lambda name=name: curves.compute(load(name), line=True))
        for name in ("2a", "A1d")
    },
    "theory of 1 to 1000": (plots.theory_figure, lambda: curves.compute(load("A1d").with_lengths(LONG), line=True)),
    "claims": (plots.claims_figure, lambda: {"picture": closed.picture(load("2c"), [1, 10, 100, 1000, 100_000])}),
    "ff5": (plots.axes_figure, eight),
    **{one.name: (plots.axes_figure, lambda one=one: theory_of_forgetting(one)) for one in THEORY_FIGURES},
    "training": (plots.training_figure, lambda: trained((5,))),
    "training at six lengths": (plots.training_figure, lambda: trained((1, 10, 20, 30, 40, 50))),
}


def axis_texts(axis):
    """Texts of an axis that is drawn."""
    shown = [label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)]
    return [*shown, axis.label, axis.offsetText]


def texts(figure):
    """Visible texts with their boxes."""
    figure.draw_without_rendering()
    of_axes = [one for axes in figure.axes for one in (axes, *axes.child_axes)]
    ticks = {text for axes in of_axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    drawn = [text for axes in of_axes for axis in (axes.xaxis, axes.yaxis) for text in axis_texts(axis)]
    others = [text for text in figure.findobj(Text) if text not in ticks]
    return [(one, one.get_window_extent()) for one in drawn + others if one.get_visible() and one.get_text().strip()]


def check(figure):
    found = texts(figure)
    width, height = figure.bbox.size
    for one, box in found:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{one.get_text()!r} leaves the canvas: {box.extents} of {figure.bbox.size}"
    for (one, box), (other, beside) in itertools.combinations(found, 2):
        assert not box.padded(-0.5).overlaps(beside.padded(-0.5)), f"{one.get_text()!r} is on {other.get_text()!r}"
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend() is not None)]
    for legend, axes in itertools.product(legends, figure.axes):
        assert not legend.get_window_extent().overlaps(axes.bbox)
    return legends


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", RECORDS)
def test_no_text_is_on_another_or_off_the_canvas(name, style):
    draw, make = RECORDS[name]
    record = make()
    plain, captioned = (draw(record, style=style, caption=caption) for caption in (False, True))
    assert check(plain)
    check(captioned)
    assert captioned.get_figheight() > plain.get_figheight()
    assert len(plain.get_supxlabel()) < len(captioned.get_supxlabel())
    if style == "paper":
        assert plain.get_figwidth() == captioned.get_figwidth() == 3.35
        assert {text.get_fontsize() for text, _ in texts(captioned)} - {8.0} == set()


@pytest.mark.parametrize("name", ["speedup", "speedup-all", "scaling", "roofline", "processes"])
def test_pictures_of_benchmarks(name):
    record = json.loads(CPU.read_text(encoding="utf-8"))
    cases = ("1 trial, batch 8192", "50 trials, batch 8192", "1 trial, batch 131072", "50 trials, batch 131072")
    ratios = {"1": {"over_one": 1.0}, "2": {"over_one": 0.7}, "4": {"over_one": 0.3}}
    record["others"]["processes"] = {"cores": 2, "found": dict.fromkeys(cases, ratios)}
    check(plots.bench_figures(record)[name])


def test_a_regime_has_one_entry():
    (legend,) = plots.panel_figure(panel("2a")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "fine-tune", "joint", "shared shift"]
    samples = [(line.get_marker(), line.get_linestyle() != "None") for line in legend.get_lines()]
    assert samples == [("o", True), ("s", True), ("^", True), ("None", True)]
    said = "Points: trained models (open: reduced, filled: full). Lines: closed form."
    assert legend.get_title().get_text() == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2d", "Points: trained models (full). Lines: closed form."),
        ("A2b", "Points: trained models (stack, L = 2). Lines: closed form of L = 1."),
        ("depth", "Points: trained models (full and stack). Lines: closed form of L = 1."),
    ],
)
def test_the_legend_says_what_points_and_lines_are(name, said):
    assert plots.panel_figure(panel(name)).legends[0].get_title().get_text() == said


def test_lines_of_theory_have_every_length_or_a_hundred_places():
    assert prompts.PANELS["2a"].lines([1, 50])["x"] == list(range(1, 51))
    assert len(prompts.BEYOND["noise"].lines([0.0, 20.0])["x"]) > 100
    assert len(curves.line_lengths([1, 100_000])) > 100


def test_a_record_with_sparse_lines_is_drawn():
    record = panel("2a")
    for curve in record["lines"]["curves"].values():
        curve["normalised"] = curve["normalised"][::10]
    record["lines"]["x"] = record["lines"]["x"][::10]
    check(plots.panel_figure(record))


def test_files_of_a_paper(tmp_path):
    (tmp_path / "2a.json").write_text(json.dumps(panel("2a")), encoding="utf-8")
    paths = {path.suffix: path.read_bytes() for path in plots.panel(tmp_path, "2a", style="paper")}
    assert b"/FontFile2" in paths[".pdf"]
    assert b"/Type3" not in paths[".pdf"]
    assert float(re.search(rb"/MediaBox \[ 0 0 (\S+)", paths[".pdf"])[1]) == pytest.approx(3.35 * 72)
    assert re.search(rb'width="241.2pt"', paths[".svg"])
    assert b"<text" not in paths[".svg"]


def test_options_of_the_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "claims.json").write_text("{}", encoding="utf-8")
    given = []
    monkeypatch.setattr(plots, "panel", lambda folder, name, **options: given.append(options) or [])
    for options in ([], ["--style", "paper"], ["--caption", "--style", "screen"]):
        assert cli.main(["plot", str(tmp_path), *options]) == 0
    assert given == [{}, {"style": "paper"}, {"style": "screen", "caption": True}]
    for command in ("plot", "reproduce", "train", "theory"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert {"--style", "--caption"} <= set(capsys.readouterr().out.replace("[", " ").replace("]", " ").split())
    with pytest.raises(ValueError, match="style: got 'poster', wants"):
        plots.panel_figure(panel("2a"), style="poster")


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as people without the middle cones see it.
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
NORMAL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def times(matrix, vector):
    return [sum(m * x for m, x in zip(row, vector, strict=True)) for row in matrix]


def lab(colour, eye):
    """CIE 1976 L*a*b* of a colour #rrggbb, as an eye sees it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(max(c, 0.0), 1.0) for c in times(eye, linear)]
    x, y, z = (
        t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116
        for t in (value / white for value, white in zip(times(TO_XYZ, seen), WHITE, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first, second, eye):
    return sum((a - b) ** 2 for a, b in zip(lab(first, eye), lab(second, eye), strict=True)) ** 0.5


TOGETHER = {
    "closed forms": list(CLOSED_FORMS),
    "regimes of training": [name for name, row in REGIMES.items() if row.study == "prompts"],
    "fine-tuning": [name for name, row in REGIMES.items() if row.study == "forgetting"],
}


def test_colours_are_as_far_apart_as_measured_elsewhere():
    """The distances of CIE 1976 are known for white, and for red to green."""
    assert distance("#ffffff", "#000000", NORMAL) == pytest.approx(100.0, abs=0.01)
    assert distance("#ff0000", "#00ff00", NORMAL) == pytest.approx(170.6, abs=0.3)
    assert distance("#ff0000", "#808000", DEUTERANOPIA) < 0.5 * distance("#ff0000", "#808000", NORMAL)


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("eye", [NORMAL, DEUTERANOPIA], ids=["normal", "deuteranopia"])
def test_regimes_of_one_picture_are_told_apart(names, eye):
    """By colour, at 15 or more where 2.3 is just seen; and by marker, dashes or an open marker."""
    for first, second in itertools.combinations(map(look, names), 2):
        assert first[1:] != second[1:]
        if first.colour == second.colour:  # the same is tuned, with the few-shot loss and without
            assert first.filled != second.filled
            assert first.dashes != second.dashes
            continue
        assert distance(first.colour, second.colour, eye) > 15
