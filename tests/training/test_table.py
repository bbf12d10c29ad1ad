"""Cells of a config: `fastlin train`, its folders, table, summary and pictures."""

import json
from pathlib import Path

import pytest

import fastlin as fl
from fastlin import cli, plots, settings, theory
from fastlin.training import judge, table

CONFIG = """
name = "two tasks"
dimension = 3
means = [1.4, -0.6]
covariances = [1, 2]
weights = [0.3, 0.7]
noise_std = 0.3
context_lengths = [2, 5]
"""
SHORT = ["--steps", "4", "--batch", "64", "--trials", "2"]
RUN_FILES = ["model.safetensors", "records.jsonl", "result.json", "run.json"]
TABLES = ["risk.csv", "risk.json", "risk.md"]
PICTURES = ["training.pdf", "training.png", "training.svg"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch):
    """Evaluation takes most of the time of a short run."""
    monkeypatch.setattr(plots, "experiment", lambda folder: [])


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def summary(folder):
    return json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))


def test_one_cell(capsys):
    assert cli.main(["train", "own.toml", "--regime", "joint", "--n", "5", *SHORT, "--seed", "3", "--out", "run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert files("run") == sorted(["joint-n5", *PICTURES, *TABLES, "summary.json"])
    assert files("run/joint-n5") == sorted(RUN_FILES)
    mix = settings.load("own.toml").mixture
    run = fl.train(mix, "joint", 5, steps=4, batch=64, trials=2, seed=3)
    found = summary("run")
    assert (found["name"], found["normaliser"]) == ("two tasks", theory.normaliser(mix))
    (cell,) = found["cells"]
    assert (cell["regime"], cell["n"], cell["folder"], cell["model"], cell["batch"]) == (
        "joint",
        5,
        "joint-n5",
        "full",
        64,
    )
    assert (cell["trials"], cell["diverged"]) == (2, 0)
    assert cell["best"] == float(run.risk[run.best])
    assert cell["min"] == float(run.risk.min())
    assert cell["mean"] == pytest.approx(float(run.risk.mean()))
    assert cell["median"] == pytest.approx(float(run.risk.mean()))
    low, high = run.risk.sort().values.tolist()
    assert cell["q25"] == pytest.approx(low + 0.25 * (high - low))
    assert cell["q75"] == pytest.approx(low + 0.75 * (high - low))
    assert cell["theory"] == theory.joint(mix, 5).loss
    assert cell["excess_percent"] == pytest.approx(100 * float(run.excess[run.best]))
    assert cell["best_error"] == 0.0
    lines = shown.out.splitlines()
    assert lines[0] == table.heading()
    assert lines[1] == table.line(cell)
    assert lines[1].split()[:5] == [
        "joint",
        "5",
        f"{cell['theory']:.5g}",
        f"{cell['best']:.5g}",
        f"{cell['excess_percent']:+.3f}",
    ]
    assert lines[1].split()[-1] == "2/2"
    assert sorted(lines[2:]) == [f"run/{name}" for name in TABLES + PICTURES]


def test_several_cells(capsys):
    assert cli.main(["train", "own.toml", "--regime", "plain,joint+heads,heads", *SHORT, "--out", "out/runs"]) == 0
    shown = capsys.readouterr().out.splitlines()
    wanted = [(regime, n) for regime in ("plain", "joint+heads", "heads") for n in (2, 5)]
    folders = [f"{regime}-n{n}" for regime, n in wanted]
    risk = [f"risk.{suffix}" for suffix in ("csv", "json", "md", "png", "pdf", "svg")]
    assert files("out/runs") == sorted([*folders, *PICTURES, *risk, "summary.json"])
    for folder in folders:
        assert files(Path("out/runs") / folder) == RUN_FILES
    found = summary("out/runs")["cells"]
    assert [(cell["regime"], cell["n"]) for cell in found] == wanted
    assert [cell["folder"] for cell in found] == folders
    assert shown == [
        table.heading(),
        *map(table.line, found),
        *(f"out/runs/{name}" for name in risk),
        *(f"out/runs/training.{s}" for s in ("png", "pdf", "svg")),
    ]
    mix = settings.load("own.toml").mixture
    for cell in found:
        alone = fl.train(mix, cell["regime"], cell["n"], steps=4, batch=64, trials=2)
        assert cell["best"] == float(alone.risk[alone.best])
        assert (cell["theory"] is None) == (cell["regime"] == "heads")
        assert (cell["excess_percent"] is None) == (cell["regime"] == "heads")


def test_pictures_are_pictures():
    assert cli.main(["train", "own.toml", "--regime", "joint", "--n", "2", *SHORT, "--out", "run"]) == 0
    assert Path("run/training.png").read_bytes().startswith(b"\x89PNG")
    assert Path("run/training.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in Path("run/training.svg").read_text(encoding="utf-8")
    before = {name: Path("run", name).read_bytes() for name in PICTURES}
    assert [path.name for path in plots.training(Path("run"))] == ["training.png", "training.pdf", "training.svg"]
    assert {name: Path("run", name).read_bytes() for name in PICTURES} == before


def test_all_regimes_and_the_default_folder(capsys):
    assert cli.main(["train", "own.toml", "--regime", "all", "--n", "2", "--steps", "2", "--batch", "32"]) == 0
    assert [cell["regime"] for cell in summary("runs/own")["cells"]] == [
        "plain",
        "fine-tune",
        "one-prompt",
        "joint",
        "joint+heads",
        "heads",
    ]
    assert "runs/own/training.png" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_resume_reads_what_has_ended(capsys, monkeypatch):
    command = ["train", "own.toml", "--regime", "plain,joint", *SHORT, "--out", "runs"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    assert cli.main(command) == 1
    assert (
        "runs/plain-n2: holds a run already; wants another folder, or resume=True (--resume) to resume it"
        in capsys.readouterr().err
    )
    kept = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file() and path.name != ".lock"}

    def never(*_):
        raise AssertionError("trains again")

    with monkeypatch.context() as patch:
        patch.setattr(fl.training.loop.Loop, "run", never)
        assert cli.main([*command, "--resume"]) == 0
        assert capsys.readouterr().out == first
        assert {path: path.read_bytes() for path in kept} == kept
        # A cell that is missing is trained.
        for path in Path("runs/joint-n5").iterdir():
            path.unlink()
        with pytest.raises(AssertionError, match="trains again"):
            cli.main([*command, "--resume"])
    assert cli.main([*command, "--resume"]) == 0
    assert Path("runs/joint-n5/records.jsonl").read_bytes() == kept[Path("runs/joint-n5/records.jsonl")]


@pytest.mark.usefixtures("no_pictures")
def test_resume_with_other_values_is_refused(capsys):
    command = ["train", "own.toml", "--regime", "joint", "--n", "2", *SHORT, "--out", "run", "--resume"]
    assert cli.main([*command, "--lr", "0.25"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--lr", "0.5"]) == 1
    assert "fastlin: run/joint-n2: holds a run with lr = 0.25, this one has 0.5; wants the same configuration" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("no_pictures")
def test_options_reach_the_run():
    given = [
        *("--model", "stack", "--layers", "2", "--attention-heads", "2", "--prompt-tokens", "3"),
        *("--preset", "paper", "--lr", "0.002", "--seed", "9", "--backend", "eager"),
        *("--set", "schedule=cosine", "--set", "clip=0.5", "--set", "own_data=true", "--set", "start=normal"),
        *("--set", "optimiser_options={betas = [0.5, 0.9]}", "--set", 'scale="1/sqrt(d+1)"', "--set", "start_heads=1"),
    ]
    assert cli.main(["train", "own.toml", "--regime", "joint", "--n", "2", *SHORT, "--out", "run", *given]) == 0
    run = json.loads(Path("run/joint-n2/run.json").read_text(encoding="utf-8"))
    wanted = {
        "model": "stack",
        "layers": 2,
        "attention_heads": 2,
        "prompt_tokens": 3,
        "preset": "paper",
        "lr": 0.002,
        "seed": 9,
        "steps": 4,
        "batch": 64,
        "trials": 2,
        "schedule": "cosine",
        "clip": 0.5,
        "own_data": True,
        "start": "normal",
        "optimiser_options": {"betas": [0.5, 0.9]},
        "scale": "1/sqrt(d+1)",
        "start_heads": 1,
    }
    assert {name: run["config"][name] for name in wanted} == wanted
    assert run["backend"] == "eager"
    assert summary("run")["cells"][0]["best_error"] > 0.0


@pytest.mark.usefixtures("no_pictures")
def test_set_changes_the_numbers():
    for out, given in (("a", []), ("b", ["--set", "average=0.5"]), ("c", [])):
        assert cli.main(["train", "own.toml", "--regime", "joint", "--n", "2", *SHORT, "--out", out, *given]) == 0
    best = {out: summary(out)["cells"][0]["best"] for out in "abc"}
    assert best["a"] == best["c"] != best["b"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--regime", "join"], "regime: got 'join' (did you mean joint?), wants one of plain, "),
        (["--regime", "plain,"], "regime: got '', wants one of plain, "),
        (["--regime", "plain", "--model", "ful"], "model: got 'ful' (did you mean full?), wants one of "),
        (["--regime", "plain", "--layers", "2"], "layers: got 2 for model 'full', wants 1, or model='stack'"),
        (["--regime", "plain", "--steps", "0"], "steps: got 0, wants an integer >= 1"),
        (["--regime", "plain", "--trials", "0"], "trials: got 0, wants an integer >= 1"),
        (["--regime", "plain", "--preset", "papr"], "preset: got 'papr' (did you mean paper?), wants one of "),
        (["--regime", "plain", "--seed", "-1"], "seed: got -1, wants an integer in [0, "),
        (["--regime", "plain", "--set", "clip"], "--set: got 'clip', wants NAME=VALUE"),
        (["--regime", "plain", "--set", "=3"], "--set: got '=3', wants NAME=VALUE"),
        (["--regime", "plain", "--set", "clipp=3"], "train: got an unknown argument 'clipp' (did you mean clip?), "),
        (["--regime", "plain", "--set", "schedule=sine"], "schedule: got 'sine'"),
        (["--regime", "plain", "--set", "clip=big"], "clip: got 'big', wants a finite number >= 0"),
        (["--regime", "plain", "--set", "optimiser_options={beta = 1}"], "optimiser: Adam does not take {"),
        (["--regime", "plain", "--backend", "fast"], ""),
        (["--regime", "plain", "--set", "steps=3", "--steps", "3"], ""),
        (["--regime", "plain", "--n", "2", "--out", "own.toml"], "own.toml: is a file, wants a folder"),
        (["--regime", "plain", "--out", "own.toml/run"], ""),
    ],
)
def test_errors(given, message, capsys):
    """Exit 1 with one line that says what is wrong, and no folder."""
    assert cli.main(["train", "own.toml", "--batch", "16", "--out", "run", *given]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"fastlin: {message}")
    assert shown.count("\n") == 1
    assert files(".") == ["own.toml"]


def test_a_config_that_is_not_there(capsys):
    assert cli.main(["train", "2z", "--regime", "plain"]) == 1
    assert capsys.readouterr().err.startswith("fastlin: 2z: no such file")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_pictures")
def test_settings_that_ship():
    given = ["--regime", "plain", "--n", "1", "--steps", "2", "--batch", "32"]
    assert cli.main(["train", "2c", *given]) == 0
    assert summary("runs/2c")["name"] == "Figure 2(c)"


def test_trials_that_diverge(capsys):
    """All trials diverge: the table has dashes, and there is a picture."""
    given = ["--preset", "paper", "--set", "optimiser=SGD", "--lr", "1e6", "--steps", "20", "--batch", "16"]
    assert (
        cli.main(["train", "own.toml", "--regime", "joint", "--n", "2", *given, "--trials", "2", "--out", "run"]) == 0
    )
    (cell,) = summary("run")["cells"]
    assert (cell["diverged"], cell["best"], cell["min"], cell["mean"], cell["excess_percent"]) == (
        2,
        None,
        None,
        None,
        None,
    )
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "0/2"
    assert files("run") == sorted(["joint-n2", *PICTURES, *TABLES, "summary.json"])


# Figures


def cell(regime="joint", n=5, theory=2.0, excess=10.0, risks=((4.0, 8.0), (2.2, 3.0))):
    records = [{"step": 10 * (i + 1), "risk": list(row)} for i, row in enumerate(risks)]
    return {
        "regime": regime,
        "n": n,
        "best_trial": 0,
        "theory": theory,
        "excess_percent": excess,
        "records": records,
        "batch": 64,
        "model": "full",
    }


def figure(*rows):
    return plots.training_figure({"name": "costs $5^$", "normaliser": 4.0, "cells": list(rows)})


def test_a_curve_is_the_best_trial_over_the_normaliser():
    (axes,) = figure(cell()).axes
    curve, optimum = (
        next(line for line in axes.get_lines() if (line.get_linestyle() == "--") == dashed) for dashed in (False, True)
    )
    assert curve.get_xdata().tolist() == [10, 20]
    assert curve.get_ydata().tolist() == pytest.approx([1.0, 0.55])
    assert curve.get_label() == "joint: +10.00 %"
    assert list(optimum.get_ydata()) == [0.5, 0.5]
    assert curve.get_color() == optimum.get_color()
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.55, 2.0)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_title() == "n = 5"


@pytest.mark.parametrize(
    ("lengths", "caption", "said"), [((5,), False, True), ((5, 2), False, False), ((5, 2), True, True)]
)
def test_an_excess_below_zero_is_explained_where_it_is_shown(lengths, caption, said):
    record = {"name": "mine", "normaliser": 4.0, "cells": [{**cell(n=n), "excess_percent": -1.0} for n in lengths]}
    below = " ".join(plots.training_figure(record, caption=caption).get_supxlabel().split())
    assert (judge.BELOW_THEORY in below) == said


def test_a_panel_for_each_length_and_a_colour_for_each_regime():
    drawn = figure(*(cell(regime, n) for regime in ("plain", "fine-tune", "joint", "joint+heads") for n in (5, 2)))
    assert [axes.get_title() for axes in drawn.axes] == ["n = 2", "n = 5"]
    for axes in drawn.axes:
        curves = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
        assert len(curves) == 4
        assert len({line.get_color() for line in curves}) == 4
        assert len({line.get_marker() for line in curves}) == 4


def test_cells_without_theory_and_with_trials_that_diverged():
    (axes,) = figure(cell("heads", theory=None, excess=None, risks=((4.0, None), (None, None), (2.0, None)))).axes
    (curve,) = axes.get_lines()
    assert curve.get_label() == "heads"
    assert curve.get_xdata().tolist() == [10, 30]
    assert curve.get_ydata().tolist() == [1.0, 0.5]


def test_regimes_by_list():
    assert table.regimes("joint,plain,joint") == ["joint", "plain"]
    assert table.regimes("all") == ["plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"]
    with pytest.raises(ValueError, match="regime: got 'all'"):
        table.regimes("all,plain")


def test_columns_are_under_their_names():
    row = {
        **{"regime": "joint+heads", "n": 1000, "theory": 1.23456789, "best": 1.3, "excess_percent": 5.3},
        **{"min": 1.3, "q25": 1.4, "median": 1.5, "q75": 1.6, "mean": None, "trials": 50},
        "diverged": 1,
    }
    assert len(table.line(row)) == len(table.heading())
    assert table.line(row).split() == [
        *("joint+heads", "1000", "1.2346", "1.3", "+5.300", "%", "1.3", "1.4", "1.5", "1.6", "-", "49/50")
    ]
