"""Figures, table 1 and claims of the paper on fine-tuning: made, stopped, drawn; claims can hold and fail."""

import csv
import re

import pytest
import torch
from support.op_cases import DOUBLE

import fastlin as fl
from fastlin import cli, plots
from fastlin._files import read_json, write_json
from fastlin.figures import names, report, reproduce, status, sweep
from fastlin.figures.forgetting import FIGURES, axes, claims, problems, regimes, table
from fastlin.figures.reproduce import Effort, Request
from fastlin.theory import forgetting as ff

SHORT = Effort(3, 6, 64)


def shown(record, width=200):
    return report.as_table(record, width)


def make(names, out, **callbacks):
    return reproduce.reproduce([FIGURES[name] for name in names], out, Request(effort=SHORT, jobs=1), **callbacks)


@pytest.fixture
def few_samples(monkeypatch):
    from fastlin.figures.forgetting import theory

    monkeypatch.setattr(theory, "_SAMPLES", {"quick": (256, 8), "paper": (256, 8)})


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_figures():
    assert list(FIGURES) == ["ff1", "ff2", "ff3", "ff4", "ff5", "ff5-separate", "ff5-heads"]
    assert tuple(f"{a}:{b}" for a in ("zs", "zs+fs") for b in ("all", "q", "k", "v")) == regimes.EIGHT
    for name in ("ff5", "ff5-separate", "ff5-heads"):
        first, second = FIGURES[name].cells()
        assert (first.regimes, first.after, first.stretches) == (("pretrain",), None, 1)
        assert (second.regimes, second.after, second.stretches) == (regimes.EIGHT, "pretrain", 2)
    assert [cell.model for cell in FIGURES["ff5-separate"].cells()] == ["separate"] * 2
    assert [cell.attention_heads for cell in FIGURES["ff5-heads"].cells()] == [2, 2]
    paper = reproduce.SCALES["paper"]["forgetting"]
    assert (paper.trials, paper.steps, paper.batch) == (5, 5000, 5000)


@pytest.mark.parametrize(
    ("name", "labels", "last"),
    [
        ("ff1", [f"d = {d}" for d in (6, 11, 16, 21)], 20),
        ("ff2", [f"w = {w:g}" for w in (0.3, 1, 3, 10, 30, 100)], 40),
        ("ff3", [f"w = {w:g}" for w in (0.2, 0.4, 0.6, 0.8, 1.0)], 40),
    ],
)
def test_theory_figures(name, labels, last, tmp_path, few_samples):
    (record,) = make([name], tmp_path)
    first = record["axes"][0]
    lines = [curve for curve in first["curves"] if not curve["points"]]
    assert [curve["label"] for curve in lines] == labels
    assert lines[0]["x"] == list(range(last + 1))
    drawn = [curve for curve in first["curves"] if curve["points"]]
    assert [curve["label"] for curve in drawn] == labels
    for line, points in zip(lines, drawn, strict=True):
        for x, y, error in zip(points["x"], points["y"], points["error"], strict=True):
            # Few batches: tails of Student's t with seven degrees of freedom.
            assert abs(y - line["y"][int(x)]) < 8 * error
    if name == "ff1":
        assert first["marks"] == [(5.0, 0), (10.0, 1), (15.0, 2), (20.0, 3)]
        at = dict(zip(lines[1]["x"], lines[1]["y"], strict=True))
        assert at[9] > at[0] > at[11]
    if name == "ff2":
        assert all(line["y"][0] == pytest.approx(0.1) for line in lines)
    if name == "ff3":
        assert all(line["y"][0] == pytest.approx(0.1 + 2 / 9) for line in lines)
        assert [curve["label"] for curve in record["axes"][1]["curves"]] == [
            "w*(n) of θ0",
            "w*(n) of −θ0",
            "w̄(n), all tasks",
        ]
    rows = rows_of(tmp_path / f"{name}.csv")
    assert len(rows) == sum(len(curve["x"]) for one in record["axes"] for curve in one["curves"])
    assert {row["kind"] for row in rows} == {"theory", "points"}
    assert (tmp_path / f"{name}.md").read_text(encoding="utf-8").count("sampled") >= 1
    assert "standard errors from its line" in record["caption"][0]


@pytest.mark.parametrize("name", ["ff5", "ff5-separate", "ff5-heads"])
def test_eight_regimes(name, tmp_path):
    (record,) = make([name], tmp_path)
    assert [cell["state"] for cell in record["cells"]] == ["done", "done"]
    for one, cosine in zip(record["axes"], (1.0, -1.0), strict=True):
        assert [curve["label"] for curve in one["curves"]] == ["pretrain", *regimes.EIGHT]
        task = regimes.Setting().task.at_cosine(cosine)
        # The curve is the mean over seeds of the run's own errors.
        call = {**FIGURES[name].cells()[1].call(), "preset": "tuned", "seed": 0, "trials": 3, "steps": 12, "batch": 64}
        run = fl.train(**call, records=20, out=tmp_path / "cells" / name / "tuned", resume=True)
        errors = fl.evaluate(run, task, range(21)).error
        for curve in one["curves"][1:]:
            own = errors[:, run.trials_of(curve["label"])]
            assert curve["y"] == pytest.approx(own.mean(1).tolist())
            assert curve["error"] == pytest.approx((own.std(1) / 3**0.5).tolist())
    assert len(record["findings"]) == 9
    for line in (*regimes.EIGHT, "θ0, 20 shots", "−θ0, 0 shots", "best", "worst"):
        assert line in shown(record)
    assert len(rows_of(tmp_path / f"{name}.csv")) == 2 * 9 * 21
    same = [curve for curve in record["axes"][0]["curves"] if curve["label"] in ("zs:q", "zs:k")]
    assert (same[0]["y"] == same[1]["y"]) == (name != "ff5-separate")


def test_trained_points_on_theory(tmp_path):
    (record,) = make(["ff4"], tmp_path)
    curves = record["axes"][0]["curves"]
    assert [curve["label"] for curve in curves if curve["points"]] == ["pretrained", "value-only", "full fine-tuning"]
    pretrained = next(curve for curve in curves if not curve["points"])
    family = ff.pretrained(5, 20, noise_var=0.1, task_cov=torch.eye(5, dtype=DOUBLE) / 5)
    theta = torch.eye(5, dtype=DOUBLE)[0]
    assert pretrained["y"] == pytest.approx(ff.error(family, theta, torch.arange(21), noise_var=0.1).tolist())
    # Six steps are not enough, and the table says so.
    assert "no" in shown(record).splitlines()[1]


def test_a_figure_is_resumed_and_drawn_again(tmp_path, monkeypatch, capsys):
    train = sweep.train

    def failing(**options):
        if options["after"] is not None:
            raise ValueError("no")
        return train(**options)

    monkeypatch.setattr(sweep, "train", failing)
    (record,) = make(["ff5"], tmp_path)
    assert [cell["state"] for cell in record["cells"]] == ["done", "failed"]
    assert [curve["label"] for curve in record["axes"][0]["curves"]] == ["pretrain"]
    assert record["findings"] == []
    assert record["cells"][1]["error"] == "ValueError: no"
    monkeypatch.setattr(sweep, "train", train)
    (record,) = make(["ff5"], tmp_path)
    first = (tmp_path / "ff5.csv").read_bytes()
    (again,) = make(["ff5"], tmp_path)
    assert again["axes"] == record["axes"]
    assert (tmp_path / "ff5.csv").read_bytes() == first
    other, _ = make(["ff5"], tmp_path / "other"), None
    assert (tmp_path / "other" / "ff5.csv").read_bytes() == first
    assert other[0]["axes"] == record["axes"]
    text = status.as_text(tmp_path)
    assert "all 2 cells have ended" in text
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert str(tmp_path / "ff5.png") in capsys.readouterr().out


def test_status_counts_only_the_steps_of_the_cell(tmp_path):
    make(["ff5"], tmp_path)
    path = tmp_path / "ff5.json"
    record = read_json(path, dict)
    record["cells"][1].update(state="waiting", row=None)
    write_json(path, record)
    (tmp_path / "cells" / "ff5" / "tuned.json").unlink()
    folder = tmp_path / "cells" / "ff5" / "tuned" / "records.jsonl"
    folder.write_text('{"step": 9}\n')
    found = status.cells(tmp_path)
    assert [cell.progress for cell in found] == [1.0, 0.5]


def test_orders_wait_for_what_they_go_on_from(tmp_path):
    """Real processes: the second cell starts when the first has ended."""
    seen = []

    def ended(record, cell):
        seen.append((cell["key"], [entry["state"] for entry in record["cells"]], cell["error"]))

    reproduce.reproduce(
        [FIGURES["ff4"]],
        tmp_path,
        Request(effort=SHORT, jobs=2),
        drawn=lambda name: None,
        ended=ended,
        tick=lambda: None,
    )
    assert seen == [("pretrain", ["done", "waiting"], None), ("tuned", ["done", "done"], None)]


def corners(errors):
    """Corners of the table from one number for each regime, task and shots; five seeds that differ a little."""
    noise = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=DOUBLE) * 1e-3
    return {key: value + noise * (1 + 0.1 * i) for i, (key, value) in enumerate(errors.items())}


def expected_errors():
    errors = {}
    for regime in ("pretrain", *regimes.EIGHT):
        base = {"all": 1.0, "q": 0.8, "k": 0.8, "v": 0.4}.get(regime.split(":")[-1], 0.35)
        for task in ("θ0", "−θ0"):
            errors[regime, task, 0] = {"all": 0.1, "v": 0.3}.get(regime.split(":")[-1], 0.9)
            few = 0.0 if not regime.startswith("zs+fs") else (-0.05 if task == "θ0" else 0.05)
            errors[regime, task, 20] = base + few
    errors["zs+fs:all", "θ0", 0] = 0.12
    errors["zs:all", "−θ0", 20] = 1.2
    errors["zs+fs:all", "−θ0", 20] = 1.1
    return errors


def test_findings_can_hold_and_can_fail():
    errors = expected_errors()
    found = table.findings(corners(errors), 20)
    texts = [entry["text"] for entry in found]
    assert [entry["holds"] for entry in found] == [True, True, True, True, True, True, False, True, True], texts
    assert "zs:v − zs:all = +0.2" in texts[0]
    errors["zs:q", "θ0", 20] = 5.0
    errors["zs:v", "−θ0", 20] = 0.9
    found = table.findings(corners(errors), 20)
    assert [entry["holds"] for entry in found][:5] == [True, False, True, True, False]
    # What lies within the noise is no finding.
    errors = expected_errors()
    errors["zs+fs:v", "θ0", 20] = errors["zs:v", "θ0", 20] - 1e-5
    assert table.findings(corners(errors), 20)[7]["holds"] is False


def test_ranks():
    errors = {("a", "θ0", 0): 1.0, ("b", "θ0", 0): 2.0, ("c", "θ0", 0): 3.0, ("d", "θ0", 0): 3.0}
    found = table.ranks(corners(errors), ["a", "b", "c", "d"], "θ0", 0)
    assert found == {"a": "best", "b": "better", "c": "worst", "d": "worst"}
    nan = {**corners(errors), ("b", "θ0", 0): torch.full((5,), torch.nan, dtype=DOUBLE)}
    (_, b) = table.as_table(nan, ["a", "b"], 0)["rows"]
    assert (b[0], b[1].split()[0]) == ("b", "nan")


def test_tables_in_a_narrow_terminal():
    """Columns are left out in a stated order, and every line fits."""
    corner_table = table.as_table(corners(expected_errors()), ["pretrain", *regimes.EIGHT], 20)
    excess = table.distances([("full fine-tuning, zero-shot", torch.full((5,), 0.5, dtype=DOUBLE), 0.55, 0.5)])
    for made, width, left in (
        (corner_table, 110, ["regime", "θ0, 0 shots", "θ0, 20 shots", "−θ0, 0 shots", "−θ0, 20 shots"]),
        (corner_table, 100, ["regime", "θ0, 0 shots", "θ0, 20 shots", "−θ0, 20 shots"]),
        (corner_table, 60, ["regime", "θ0, 0 shots", "−θ0, 20 shots"]),
        (excess, 81, ["trained", "± s.e.", "theory", "excess", "within"]),
        (excess, 60, ["trained", "theory", "excess"]),
    ):
        lines = shown({"table": made}, width).splitlines()
        assert re.split(r"  +", lines[0].strip()) == left
        assert max(map(len, lines)) <= width


def test_seeds_that_diverged_do_not_count():
    errors = torch.tensor([[1.0, torch.nan, 3.0], [2.0, torch.nan, 2.0]], dtype=DOUBLE)
    centre, spread = regimes.mean(errors)
    assert centre.tolist() == [2.0, 2.0]
    assert spread.tolist() == pytest.approx([1.0, 0.0])
    assert torch.isnan(regimes.mean(errors[:, :2])[1]).all()


def test_distance_of_points_from_lines():
    line = axes.line("a", [0, 1], torch.tensor([1.0, 2.0]), 0)
    one = axes.Axes("", "n", "", [line, axes.points("a", [1], torch.tensor([2.5]), torch.tensor([0.1]), 0)])
    assert axes.distance(one) == pytest.approx(5.0)
    assert axes.distance(axes.Axes("", "n", "")) == 0.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("claims")
    return problems.train_models(problems.AUTHORS, out, trials=3, steps=500, batch=1500, seed=0)


def test_claims_hold_for_models_that_are_trained(trained):
    found = []
    for claim in (
        claims.reached([trained]),
        claims.threshold(trained, 0),
        claims.degradation(trained, 0),
        claims.minimal_update(trained),
        claims.scalars(trained, found),
        claims.cosine(trained, found),
        claims.auxiliary_step(trained),
    ):
        assert claim.holds is True, claim
        assert all(number.quantity for number in claim.numbers)
    assert [one.title for one in found] == ["the best scalar", "excess error at 20 shots"]


def test_claims_do_not_hold_for_models_that_are_not(tmp_path):
    bad = problems.train_models(problems.AUTHORS, tmp_path, trials=2, steps=4, batch=64, seed=0)
    assert claims.reached([bad]).holds is False
    assert claims.minimal_update(bad).holds is False
    assert claims.scalars(bad, []).holds is False
    assert claims.cosine(bad, []).holds is False
    assert claims.auxiliary_step(bad).holds is False


def test_the_vertex_of_a_parabola():
    assert float(claims._vertex(lambda w: torch.tensor(3.0 * (w - 0.3) ** 2 + 1.0, dtype=DOUBLE))) == pytest.approx(0.3)


def test_rescaled_models_are_the_same_predictors(trained):
    models = problems.ValueOnly(trained)
    W, v = models.W, models.v
    theta = trained.problem.task.theta
    same = ff.attention_error(W, v, theta, 7, noise_var=0.1)
    assert same.tolist() == pytest.approx(trained.errors("zs:v", trained.problem.task, [7])[0].tolist(), rel=1e-9)
    assert (W[:, 1:-1, 1:-1].diagonal(dim1=1, dim2=2).sum(1)).tolist() == pytest.approx([5.0] * 3)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(reproduce.SCALES["quick"], "forgetting", SHORT)
    # All of them in three formats take a minute to draw.
    figures = {name: FIGURES[name] for name in ("ff4", "ff5")}
    monkeypatch.setitem(names.GROUPS, "ff", names.Group("two figures", figures))
    assert cli.main(["reproduce", "ff", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for name, figure in figures.items():
        for suffix in ("csv", "md", "png", "pdf", "svg"):
            assert (tmp_path / f"{name}.{suffix}").exists()
        assert figure.title in out
    assert "pretraining loss" in out
    assert "Does not hold" in out
    assert cli.main(["reproduce", "ff-claims", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Threshold of shots: " in out
    assert {"ff-claims.json", "ff-claims.md", "ff-claims.csv", "ff-claims.png"} <= {p.name for p in tmp_path.iterdir()}
    text = (tmp_path / "ff-claims.md").read_text(encoding="utf-8")
    assert text.count("\n## ") == 7
    assert "2602.23197" in text
    assert cli.main(["reproduce", "ff-claims", "--out", str(tmp_path), "--jobs", "2"]) == 1
    assert "ff-claims: got --preset, --jobs" in capsys.readouterr().err
    drawn = []
    monkeypatch.setattr(plots, "panel", lambda folder, name: drawn.append(name) or [])
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert drawn == ["ff4", "ff5", "ff-claims"]
    assert cli.main(["reproduce", "ff6", "--out", str(tmp_path)]) == 1
    assert "ff4, ff5, all, beyond, ff, claims, ff-claims" in capsys.readouterr().err


def test_pictures_have_one_legend_where_all_axes_have_the_same(tmp_path):
    (record,) = make(["ff5"], tmp_path)
    figure = plots.axes_figure(record)
    assert len(figure.legends) == 1
    assert all(one.get_legend() is None for one in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pretrain", *regimes.EIGHT]
    assert all(one.get_yscale() == "log" for one in figure.axes)
