"""Own experiments: `fastlin train` with several n or a sweep, `train_panel`, and their folders."""

import csv
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.folders import contents

import fastlin as fl
from fastlin import cli, plots, settings, theory
from fastlin._files import read_json
from fastlin.figures import own, own_plan
from fastlin.figures.own import train_panel
from fastlin.training.loop import Loop
from fastlin.training.regimes import REGIMES, ClosedForm

CONFIG = """
name = "two tasks"
dimension = 3
means = [1.4, -0.6]
covariances = [1, 2]
weights = [0.3, 0.7]
noise_std = 0.3
context_lengths = [2, 5]
"""
SIZES = {"steps": 3, "batch": 32, "trials": 2}
SHORT = ["--steps", "3", "--batch", "32", "--trials", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "experiment", lambda folder: [])


def rows(folder):
    with Path(folder, "risk.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(folder):
    """Heading and rows of the table in risk.md."""
    text = Path(folder, "risk.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return lines[0], lines[2:]


def test_risk_against_n():
    """One table in three formats, and the closed forms of the config, as `fastlin theory` has them."""
    record = train_panel("own.toml", ["plain", "joint"], "run", **SIZES)
    mix = settings.load("own.toml").mixture
    assert record == read_json(Path("run/risk.json"), dict)
    found = [(row["regime"], int(row["n"])) for row in rows("run")]
    assert found == [(regime, n) for regime in ("plain", "joint") for n in (2, 5)]
    for row, cell in zip(rows("run"), record["cells"], strict=True):
        run = fl.load(Path("run", cell["key"]))
        assert float(row["risk"]) == cell["row"]["risk"] == float(run.risk[run.best])
        assert float(row["theory"]) == float(run.theory)
        assert float(row["normalised"]) == float(row["risk"]) / theory.normaliser(mix)
    assert record["lines"]["x"] == [2, 3, 4, 5]
    joint = [theory.joint(mix, n).loss / theory.normaliser(mix) for n in (2, 3, 4, 5)]
    assert record["lines"]["curves"]["joint"]["normalised"] == pytest.approx(joint, rel=1e-12)
    heading, lines = markdown("run")
    assert heading[0] == "regime"
    assert [line[0] for line in lines] == ["plain", "plain", "joint", "joint"]
    figure = plots.panel_figure(record)
    drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert drawn["joint, full"].get_xdata().tolist() == [2, 5]
    assert drawn["theory: joint"].get_ydata() == pytest.approx(joint)


def test_a_config_that_was_made_in_python():
    config = settings.load("own.toml")
    mix = config.mixture
    ours = train_panel(mix, ["joint"], "mine", lengths=[2], sweep=("noise_std", torch.tensor([0.3, 1.0])), **SIZES)
    file = train_panel(config, "joint", "file", title="A title", lengths=[2], sweep=("noise_std", [0.3, 1.0]), **SIZES)
    assert [cell["row"]["risk"] for cell in ours["cells"]] == pytest.approx([c["row"]["risk"] for c in file["cells"]])
    assert [record["title"].partition(":")[0] for record in (ours, file)] == ["own tasks", "A title"]
    with pytest.raises(ValueError, match="lengths: got None beside a TaskMixture"):
        train_panel(mix, ["joint"], "no", **SIZES)
    with pytest.raises(
        TypeError, match=r"task: got a TaskMixture, wants a CONFIG\.toml, or a TaskMixture without bias"
    ):
        train_panel(fl.TaskMixture([[1.0]], [[[1.0]]], [1.0], bias=True), ["joint"], "no", lengths=[2], **SIZES)
    with pytest.raises(ValueError, match="regimes: got joint, joint, wants different ones"):
        train_panel(config, ["joint", "joint"], "no", **SIZES)
    assert not Path("no").exists()


def test_a_regime_of_ones_own():
    first = fl.training.regimes.Phase(("prompts",), True)
    mine = fl.training.regimes.Regime("mine", (first, fl.training.regimes.Phase(("attention", "heads"), True)))
    record = train_panel("own.toml", ["plain", mine], "run", **SIZES)
    assert [cell["row"]["theory"] is None for cell in record["cells"]] == [False, False, True, True]
    assert [path.name for path in plots.experiment("run")][:1] == ["risk.png"]


@pytest.mark.parametrize(
    ("text", "values", "folders"),
    [
        ("noise_std=0,0.5", [0, 0.5], ["noise_std=0", "noise_std=0.5"]),
        ("dimension=2,4", [2, 4], ["dimension=2", "dimension=4"]),
        ("means=[1,-1],[2.5,0]", [[1, -1], [2.5, 0]], ["means=1,-1", "means=2.5,0"]),
        ("feature_cov=1,[1,2,3]", [1, [1, 2, 3]], ["feature_cov=1", "feature_cov=1,2,3"]),
        ("batch=16,64", [16, 64], ["batch=16", "batch=64"]),
        ("clip=none,0.5", [None, 0.5], ["clip=none", "clip=0.5"]),
        ("model=full,reduced", ["full", "reduced"], ["model=full", "model=reduced"]),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_at_one_n(text, values, folders, capsys):
    field = text.partition("=")[0]
    sizes = [word for word in SHORT if field != "batch"] or ["--steps", "3", "--trials", "2"]
    command = ["train", "own.toml", "--regime", "plain,joint", "--n", "2", *sizes, "--sweep", text, "--out", "run"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(field)
    assert sorted(path.name for path in Path("run").iterdir() if path.is_dir()) == sorted(folders)
    names = [read_json(Path("run") / folder / "summary.json", dict)["name"] for folder in folders]
    assert names == [f"two tasks, {field} = {own_plan.text(value)}" for value in values]
    record = read_json(Path("run/risk.json"), dict)
    assert [cell["row"][field] for cell in record["cells"]] == [value for value in values for _ in range(2)]
    assert next(iter(rows("run")[0])) == field
    assert markdown("run")[0][0] == field
    # Each value is the run that a call with this value alone makes.
    config = settings.load("own.toml")
    for value, folder in zip(values, folders, strict=True):
        of_task = field in settings.SWEPT
        mix = config.with_value(field, value).mixture if of_task else config.mixture
        options = {"steps": 3, "batch": 32, "trials": 2} | ({} if of_task else {field: value})
        run = fl.train(mix, "joint", 2, **options)
        (row,) = [c["row"] for c in record["cells"] if c["key"] == f"{folder}/joint-n2"]
        assert row["risk"] == float(run.risk[run.best])
        assert row["theory"] == pytest.approx(theory.joint(mix, 2).loss, rel=1e-12)
    numbers = all(isinstance(value, (int, float)) for value in values)
    places = [cell["place"] for cell in record["cells"][::2]]
    assert places == (values if numbers else [0, 1])
    figure = plots.panel_figure(record)
    axes = figure.axes[-1]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        f"{value:g}" if numbers else own_plan.text(value) for value in values
    ]
    line = next(line for line in figure.axes[0].get_lines() if line.get_label() == "theory: joint")
    assert line.get_ydata()[-1] == pytest.approx(record["cells"][-1]["row"]["theory_normalised"])
    assert (len(line.get_xdata()) > 2) == (field in ("noise_std", "dimension"))


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_at_several_n(capsys):
    """A line family for each value: its closed form, and points of the same colour."""
    command = ["train", "own.toml", "--regime", "plain,heads", *SHORT, "--sweep", "noise_std=0.5,2", "--out", "run"]
    assert cli.main(command) == 0
    record = read_json(Path("run/risk.json"), dict)
    assert [axes["title"] for axes in record["axes"]] == ["plain", "heads"]
    plain, heads = (axes["curves"] for axes in record["axes"])
    assert [(curve["label"], curve["points"]) for curve in plain] == [
        *[("noise_std = 0.5", False), ("noise_std = 2", False)],
        *[("noise_std = 0.5", True), ("noise_std = 2", True)],
    ]
    assert [curve["points"] for curve in heads] == [True, True]
    mix = settings.load("own.toml").with_value("noise_std", 2).mixture
    assert plain[1]["y"] == pytest.approx([theory.plain(mix, n).loss / theory.normaliser(mix) for n in (2, 3, 4, 5)])
    assert plain[3]["x"] == [2, 5]
    assert plain[3]["y"] == [c["row"]["normalised"] for c in record["cells"] if "std=2/plain" in c["key"]]
    # Drawing and closing again change nothing.
    kept = contents(Path("run"))
    assert cli.main(["plot", "run"]) == 0
    assert contents(Path("run")) == kept
    # A field of the run has one closed form.
    options = {**SIZES, "sweep": ("lr", [0.01, 0.1])}
    axes = train_panel("own.toml", ["plain"], "lr", **options)["axes"][0]
    assert [(curve["label"], curve["colour"]) for curve in axes["curves"]] == [
        *[("theory: plain", 0), ("lr = 0.01", 1), ("lr = 0.1", 2)]
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["noise=1,2"], "sweep: got 'noise' (did you mean noise_std?), wants one of dimension, means, "),
        (["noise_std"], "--sweep: got 'noise_std', wants FIELD=V1,V2,..."),
        (["noise_std="], "--sweep: got 'noise_std=', wants FIELD=V1,V2,..."),
        (["noise_std=0,-1"], "noise_std: got -1.0, wants a finite number >= 0"),
        (["noise_std=1,1.0"], "sweep: got noise_std = 1.0 more than once, wants different values"),
        (["dimension=2,x"], "dimension: got 'x', wants an integer from 1 to 4096"),
        (["means=[1,2],[1]"], "means = [1]: covariances: got a list of 2, wants a list of 1, one for each of means"),
        (["feature_cov=1,-1"], "feature_cov: has the eigenvalue -1, wants a positive semi-definite matrix"),
        (["clip=1,big"], "clip: got 'big', wants a finite number >= 0"),
        (["layers=1,2"], "layers: got 2 for model 'full', wants 1, or model='stack'"),
        (["model=full,ful"], "model: got 'ful' (did you mean full?), wants one of "),
        (["batch=16,32"], "sweep: got batch, which also has the value 32; wants one of both"),
        (["n=1,2"], "sweep: got n, wants another field: -n has a list of its own"),
        (["lr=1,2", "--sweep", "clip=1"], "--sweep: got 2 fields, wants one"),
    ],
)
def test_errors_before_any_work(given, message, capsys):
    assert cli.main(["train", "own.toml", "--regime", "joint", *SHORT, "--out", "run", "--sweep", *given]) == 1
    assert capsys.readouterr().err.startswith(f"fastlin: {message}")
    assert [path.name for path in Path().iterdir()] == ["own.toml"]


@pytest.mark.usefixtures("no_pictures")
def test_a_stopped_sweep_resumes(monkeypatch, capsys):
    """Status and plot work on the way; --resume ends with the files of a sweep that was not stopped."""
    command = ["train", "own.toml", "--regime", "plain,joint", "--n", "2", *SHORT, "--sweep", "noise_std=0,1"]
    assert cli.main([*command, "--out", "whole"]) == 0
    trained, run = [], Loop.run

    def stop(loop):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(loop)
        run(loop)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", stop)
        with pytest.raises(SystemExit) as code:
            cli.main([*command, "--out", "run"])
    assert code.value.code == 130
    capsys.readouterr()
    assert cli.main(["status", "run"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 4 cells have ended" in shown
    assert "started  risk noise_std=1/plain-n2: 0 %" in shown
    assert "rerun `fastlin train` with --resume to resume" in shown
    assert cli.main(["plot", "run"]) == 0
    assert capsys.readouterr().err == "risk: not all cells have ended; not drawn\n"
    assert cli.main([*command, "--out", "run"]) == 1
    assert "run/noise_std=0/plain-n2: holds a run already" in capsys.readouterr().err
    assert cli.main([*command, "--out", "run", "--resume"]) == 0
    for name in ("risk.csv", "risk.md", "noise_std=1/plain-n2/records.jsonl", "noise_std=1/joint-n2/records.jsonl"):
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()
    # Another value is refused before the cell that is missing trains.
    kept = contents(Path("run"))
    assert cli.main([*command, "--out", "run", "--resume", "--lr", "0.5"]) == 1
    assert "run/noise_std=0/plain-n2: holds a run with lr = " in capsys.readouterr().err
    assert contents(Path("run")) == kept


def test_later_calls_add_cells():
    train_panel("own.toml", ["plain"], "run", lengths=[2], **SIZES)
    record = train_panel("own.toml", ["joint"], "run", lengths=[2, 5], **SIZES)
    assert [cell["key"] for cell in record["cells"]] == ["plain-n2", "joint-n2", "joint-n5"]
    assert sorted(record["lines"]["curves"]) == ["joint", "plain"]
    with pytest.raises(ValueError, match=r"run/risk.json: was made with steps = 3, this call has 4; wants the same"):
        train_panel("own.toml", ["heads"], "run", **{**SIZES, "steps": 4})
    assert not Path("run/heads-n2").exists()


def test_folders_of_runs_and_of_earlier_versions(capsys):
    """`plot` and `status` take the folder of one run, and one with summary.json alone."""
    train_panel("own.toml", ["joint"], "run", lengths=[2], **SIZES)
    for name in ("risk.json", "risk.csv", "risk.md"):
        Path("run", name).unlink()
    for folder in ("run", "run/joint-n2"):
        assert cli.main(["status", folder]) == 0
        assert "all 1 cells have ended" in capsys.readouterr().out
        assert cli.main(["plot", folder]) == 0
        assert capsys.readouterr().out.splitlines() == [f"{folder}/training.{s}" for s in ("png", "pdf", "svg")]
    Path("run/joint-n2/result.json").unlink()
    assert cli.main(["status", "run/joint-n2"]) == 0
    assert "started  run joint-n2: 100 %" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_progress_of_the_whole_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["train", "own.toml", "--regime", "plain", *SHORT, "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert "1 of 2 cells have ended; time left: " in said
    assert "all 2 cells have ended" in said


def test_a_killed_close_is_made_up_for(capsys, monkeypatch):
    """Killed between the last cell and its tables: `plot` writes them."""
    train_panel("own.toml", ["joint"], "whole", **SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(own, "_finish", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            train_panel("own.toml", ["joint"], "run", **SIZES)
    assert not Path("run/risk.csv").exists()
    assert json.loads(Path("run/risk.json").read_text(encoding="utf-8"))["caption"] == []
    assert cli.main(["plot", "run"]) == 0
    assert Path("run/risk.csv").read_bytes() == Path("whole/risk.csv").read_bytes()
    assert "run/risk.png" in capsys.readouterr().out


def test_a_closed_form_of_ones_own_is_not_taken_for_the_one_of_its_name():
    def plain(mix, n):
        return theory.joint(mix, n)

    form = ClosedForm(plain, "mine", "#000000", "o", "for the test")
    record = train_panel("own.toml", replace(REGIMES["plain"], name="mine", closed_form=form), "run", **SIZES)
    assert [cell["row"]["theory"] for cell in record["cells"]] == [None, None]
    assert record["lines"]["curves"] == {}


def test_resuming_keeps_what_has_ended(monkeypatch):
    """Also where it is stopped before the first cell."""
    record = train_panel("own.toml", ["plain", "joint"], "run", **SIZES)
    monkeypatch.setattr(own.table, "train_cells", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_panel("own.toml", ["plain", "joint"], "run", resume=True, **SIZES)
    assert read_json(Path("run/risk.json"), dict) == record


def test_two_commands_in_one_folder():
    def second(row):
        with pytest.raises(
            ValueError, match="run: another process is training in this folder; wants a folder for each"
        ):
            train_panel("own.toml", "joint", "run", **SIZES)

    record = train_panel("own.toml", "plain", "run", report=second, **SIZES)
    assert [cell["row"]["regime"] for cell in record["cells"]] == ["plain", "plain"]


def test_a_callback_sees_every_cell():
    seen = []
    train_panel("own.toml", "plain", "run", callback=seen.append, **SIZES)
    assert {record["folder"].name for record in seen} == {"plain-n2", "plain-n5"}


@pytest.mark.parametrize("models", [["full", "softmax"], ["softmax", "full"]])
def test_closed_forms_of_swept_models(models):
    record = train_panel("own.toml", "joint", "run", lengths=[2], sweep=("model", models), **SIZES)
    assert list(record["lines"]["curves"]) == ["joint"]


def test_each_cell_of_a_sweep_is_watched_by_its_own_name(monkeypatch):
    names = []
    monkeypatch.setattr(own.callbacks, "check_watch", lambda package: None)
    monkeypatch.setattr(
        own.callbacks, "watch_cell", lambda *given: (names.append(given), nullcontext(lambda record: None))[1]
    )
    train_panel("own.toml", "plain", "run", lengths=[2], sweep=("noise_std", [0, 1]), watch="wandb", **SIZES)
    where = ("wandb", Path("run"), "two tasks")
    assert names == [(*where, "noise_std=0/plain-n2"), (*where, "noise_std=1/plain-n2")]


WRONG_CALLS = [
    ({"task": fl.SphereTasks(2)}, "task: got a SphereTasks, wants a TaskMixture, a Config, a CONFIG.toml or"),
    ({"lengths": 5}, "lengths: got 5, wants a list of context lengths"),
    ({"sweep": "noise_std"}, "sweep: got 'noise_std', wants (field, values), as in"),
    ({"sweep": ("noise_std", 0.5)}, "sweep: got ('noise_std', 0.5), wants (field, values), as in"),
    ({"sweep": ("dtype", [torch.float32] * 2)}, "sweep: got dtype = float32 more than once, wants different values"),
    ({"watch": "wadnb"}, "watch: got 'wadnb' (did you mean wandb?), wants one of tensorboard, wandb"),
    ({"checkpoint_seconds": -1}, "checkpoint_seconds: got -1, wants a finite number >= 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_CALLS, ids=[message[:24] for _, message in WRONG_CALLS])
def test_wrong_calls(wrong, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        train_panel(**{"task": "own.toml", "regimes": "plain", "out": "run", **SIZES, **wrong})
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["lengths", "sweep", "title", "callback"])
def test_only_fields_of_a_run_are_set(name, capsys):
    assert cli.main(["train", "own.toml", "--regime", "plain", "--out", "run", "--set", f"{name}=1"]) == 1
    assert capsys.readouterr().err.startswith(f"fastlin: --set: got {name}, wants a field of a run")
    assert not Path("run").exists()
