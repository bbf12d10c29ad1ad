"""`fastlin reproduce`: panels made cell by cell, stopped and gone on with, and what they leave in their folder."""

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from filling import fill_here

from fastlin import cli, plots, theory
from fastlin._files import write_json
from fastlin._tensors import read_json
from fastlin.experiments import claims, farm, leases, prompts, reproduce, status, workplaces
from fastlin.experiments.config import load
from fastlin.experiments.panels import Panel, Series
from fastlin.experiments.reproduce import Effort, Request

SHORT = Effort(2, 6, 64)
SUFFIXES = ("json", "csv", "md")


def run(names, out, request=None, **callbacks):
    """Reproduce panels without pictures; returns records and the names that were to be drawn."""
    drawn = []
    said = {"drawn": drawn.append, "ended": lambda record, cell: None, "tick": lambda: None, **callbacks}
    request = request or Request(effort=SHORT, lengths=(2, 5), jobs=1)
    panels = [prompts.PANELS[name] if isinstance(name, str) else name for name in names]
    return reproduce.reproduce(panels, out, request, **said), drawn


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(reproduce, "run", fill_here)


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_papers_panels():
    assert list(prompts.PANELS) == [
        *("2a", "2b", "2c", "2d", "A1a", "A1b", "A1c", "A1d"),
        *("A2a", "A2b", "A2c", "A2d", "A2e", "A2f"),
    ]
    for name, panel in prompts.PANELS.items():
        cells = panel.cells()
        assert panel.setting == name
        assert len({cell.key for cell in cells}) == len(cells)
        assert [cell.n for cell in cells if cell.regime == "plain" and cell.model != "reduced"] == list(
            load(name).context_lengths
        )
        layers = "abcdef".index(name[2]) % 3 + 1 if name.startswith("A2") else 1
        assert {cell.layers for cell in cells} == {layers}
    both = {(cell.regime, cell.model) for cell in prompts.PANELS["2a"].cells()}
    assert both == {(r, m) for r in ("plain", "fine-tune", "joint") for m in ("reduced", "full")}
    assert {cell.regime for cell in prompts.PANELS["2d"].cells()} == {"plain", "joint", "joint+heads"}
    assert {cell.model for cell in prompts.PANELS["A2b"].cells()} == {"stack"}


def test_leases_of_a_call_that_died_at_the_end_of_a_cell(tmp_path, in_process):
    """Between the note of what became of the cell and the end of the lease a call draws pictures, and may be killed."""

    def ends_here(record, cell):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(["2c"], tmp_path, ended=ends_here)
    cell = tmp_path / "cells/2c" / read_json(tmp_path / "2c.json")["cells"][0]["key"]
    assert leases.generations(cell) == [0]
    assert leases.take(cell, 1, os.getpid(), 5.0)
    other = tmp_path / "cells/2c/.another-cell.lease.0"
    other.touch()
    run(["2c"], tmp_path)
    assert leases.generations(cell) == []
    assert other.exists()


def test_a_panel(tmp_path, in_process):
    ended = []
    records, drawn = run(["2a"], tmp_path, ended=lambda record, cell: ended.append(cell["key"]))
    assert drawn == ["2a"]
    assert len(ended) == 12
    assert all((tmp_path / f"2a.{suffix}").exists() for suffix in SUFFIXES)
    rows = rows_of(tmp_path / "2a.csv")
    mix = load("2a").mixture
    assert [(row["regime"], row["model"], row["n"]) for row in rows] == [
        (regime, model, n)
        for model in ("reduced", "full")
        for regime in ("plain", "fine-tune", "joint")
        for n in ("2", "5")
    ]
    closed = {"plain": theory.plain, "fine-tune": theory.fine_tuned, "joint": theory.joint}
    for row in rows:
        risk, optimum = float(row["risk"]), float(closed[row["regime"]](mix, int(row["n"])))
        assert float(row["theory"]) == pytest.approx(optimum, rel=1e-12)
        assert float(row["normalised"]) == pytest.approx(risk / 30.5, rel=1e-12)
        assert float(row["excess_percent"]) == pytest.approx(100 * (risk / optimum - 1), rel=1e-9)
        assert float(row["min"]) <= risk <= float(row["max"])
        assert (row["panel"], row["trials"], row["diverged"], row["risk_error"]) == ("2a", "2", "0", "0.0")
    caption = records[0]["caption"]
    assert caption[0].startswith("2 trials × 6 steps × batch 64, preset tuned")
    assert any("Assumption 1" in sentence for sentence in caption)
    assert "Figure 2(a)" in (tmp_path / "2a.md").read_text(encoding="utf-8")


def test_what_is_done_is_not_done_again(tmp_path, in_process):
    run(["2c"], tmp_path)
    before = (tmp_path / "2c.csv").read_bytes()
    ended = []
    _, drawn = run(["2c"], tmp_path, ended=lambda record, cell: ended.append(cell["key"]))
    assert (ended, drawn) == ([], ["2c"])
    assert (tmp_path / "2c.csv").read_bytes() == before
    # A cell whose run is there but not noted is read, not trained.
    path = tmp_path / "2c.json"
    record = read_json(path)
    record["cells"][0].update(state="waiting", row=None)
    write_json(path, record)
    (tmp_path / "cells/2c/plain-full-n2.json").unlink()
    run(["2c"], tmp_path, ended=lambda record, cell: ended.append(cell["key"]))
    assert ended == ["plain-full-n2"]
    assert (tmp_path / "2c.csv").read_bytes() == before


def test_another_request_in_the_same_folder(tmp_path, in_process):
    run(["2c"], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"2c\.json: was made with seed = 0, this call has 1; wants the same"):
        run(["2c"], tmp_path, Request(effort=SHORT, lengths=(2, 5), seed=1))
    with pytest.raises(ValueError, match=r"2c\.json: has other cells"):
        run(["2c"], tmp_path, Request(effort=SHORT, lengths=(2, 6)))
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_claims_have_one_process_and_out_is_a_folder(tmp_path, capsys):
    with reproduce.locked(tmp_path):
        assert cli.main(["reproduce", "claims", "--out", str(tmp_path)]) == 1
    assert "another process is at work in this folder" in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="file: is a file, wants a folder"):
        run(["2c"], file)


def test_a_damaged_record_is_told_and_kept(tmp_path):
    path = tmp_path / "2c.json"
    for text in (
        *("{", "[]", "{}", '{"kind": "other", "version": 1}', '{"kind": "fastlin panel", "version": 2}'),
        *(json.dumps({"kind": "fastlin panel", "version": 1, "cells": cells}) for cells in (3, [], [{}])),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"2c\.json: (damaged, or not a file of fastlin|is a '.*' of version)"):
            run(["2c"], tmp_path)
        assert path.read_text(encoding="utf-8") == text


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, in_process):
    foreign = tmp_path / "cells" / "2c" / "joint-full-n5"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine", encoding="utf-8")
    records, _ = run(["2c"], tmp_path)
    states = {cell["key"]: cell["state"] for cell in records[0]["cells"]}
    assert states.pop("joint-full-n5") == "failed"
    assert set(states.values()) == {"done"}
    assert len(rows_of(tmp_path / "2c.csv")) == 5
    assert any("Not there yet: 1 of 6 cells" in sentence for sentence in records[0]["caption"])
    text = status.as_text(tmp_path)
    assert "failed   2c joint-full-n5: FileError" in text
    assert "thesis.txt" in text
    (foreign / "thesis.txt").unlink()
    records, _ = run(["2c"], tmp_path)
    assert {cell["state"] for cell in records[0]["cells"]} == {"done"}


def test_other_axes(tmp_path, in_process):
    noise = Panel("noise", "noise", "2c", (Series("joint", curve="joint"),), axis="noise", places=(0.0, 2.0), n=4)
    depth = Panel(
        "depth",
        "depth",
        "2c",
        (Series("joint", curve="joint"),),
        axis="layers",
        places=(1.0, 2.0),
        n=4,
        values=(("lr", 0.5),),
    )
    records, _ = run([noise, depth], tmp_path, Request(effort=SHORT, jobs=2))
    rows = rows_of(tmp_path / "noise.csv")
    assert [float(row["noise_variance"]) for row in rows] == pytest.approx([0.0, 2.0])
    closed = [float(theory.joint(load("2c").with_noise(variance).mixture, 4)) for variance in (0.0, 2.0)]
    assert [float(row["theory"]) for row in rows] == pytest.approx(closed, rel=1e-12)
    lines = records[0]["lines"]
    assert (lines["x"][0], lines["x"][-1]) == (0.0, 2.0)
    assert lines["curves"]["joint"]["normalised"][-1] == pytest.approx(closed[-1] / 30.9, rel=1e-12)
    described = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("cells/depth/*/run.json")]
    assert [run["config"]["lr"] for run in described] == [0.5, 0.5]
    rows = rows_of(tmp_path / "depth.csv")
    assert [(row["model"], row["layers"], row["excess_percent"] == "") for row in rows] == [
        ("full", "1", False),
        ("stack", "2", True),
    ]
    assert float(rows[1]["risk_error"]) > 0
    for variance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="variance: got"):
            load("2c").with_noise(variance)


def test_workers_share_the_threads(monkeypatch):
    monkeypatch.setattr(farm.torch, "get_num_threads", lambda: 8)
    assert farm.workers(None, 100) == (8, 1)
    assert farm.workers(None, 3) == (3, 2)
    assert farm.workers(2, 100) == (2, 4)
    assert farm.workers(100, 100) == (100, 1)


def test_status_on_the_way(tmp_path, in_process):
    texts = []
    run(["2c"], tmp_path, tick=lambda: texts.append(status.as_text(tmp_path)))
    assert f"running  2c plain-full-n2: 0 %, process {os.getpid()} of " in texts[0]
    assert "1 of 6 cells have ended; time left:" in texts[1]
    assert "nobody is at work" not in texts[1]
    assert "all 6 cells have ended" in status.as_text(tmp_path)
    record = read_json(tmp_path / "2c.json")
    keys = [cell["key"] for cell in record["cells"]]
    for cell in record["cells"][:3]:
        cell.update(state="waiting", row=None, seconds=None)
        (tmp_path / f"cells/2c/{cell['key']}.json").unlink()
    write_json(tmp_path / "2c.json", record)
    shutil.rmtree(tmp_path / f"cells/2c/{keys[2]}")
    assert [cell.state for cell in status.cells(tmp_path)] == ["stopped"] * 2 + ["waiting"] + ["done"] * 3
    assert "nobody is at work here" in status.as_text(tmp_path)
    lease = leases.take(tmp_path / f"cells/2c/{keys[0]}", 0, os.getpid(), 5.0)
    place = workplaces.at(lease.cell, lease.token)
    place.mkdir()
    (place / "records.jsonl").write_text('{"step": 3}\n{"step"', encoding="utf-8")
    found = status.cells(tmp_path)
    assert [cell.state for cell in found] == ["running", "stopped", "waiting", *["done"] * 3]
    assert found[0].share == 0.5
    assert "nobody is at work" not in status.as_text(tmp_path)


def test_the_live_line(tmp_path, in_process, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with status.Line(tmp_path) as line:

        def tick():
            line._shown = 0.0
            line.show()

        run(["2c"], tmp_path, ended=line.ended, tick=tick)
    shown = terminal.getvalue()
    assert "0/6 cells [? left] plain-full-n2 0 %" in shown
    assert "5/6 cells [" in shown
    assert "2c 6/6 joint-full-n5: risk " in shown


def test_time_left():
    def cell(state, share, seconds, panel="a", layers=1):
        return status.CellStatus(panel, "k", state, layers, share, seconds, None)

    assert status.seconds_left([cell("waiting", 0.0, None)]) is None
    found = [cell("done", 1.0, 10.0), cell("running", 0.5, 5.0), cell("waiting", 0.0, None)]
    assert status.seconds_left(found) == pytest.approx(15.0)
    found += [cell("running", 0.5, 5.0)]
    assert status.seconds_left(found) == pytest.approx(10.0)
    # A panel of its own pace, and one that has none yet takes that of all.
    found = [cell("done", 1.0, 10.0), cell("done", 1.0, 30.0, "b"), cell("waiting", 0.0, None, "b")]
    assert status.seconds_left(found) == pytest.approx(30.0)
    assert status.seconds_left([*found[:2], cell("waiting", 0.0, None, "c")]) == pytest.approx(20.0)
    assert status.seconds_left([*found[:2], cell("waiting", 0.0, None, "c", layers=3)]) == pytest.approx(60.0)
    assert status.clock(59.6) == "1:00"
    assert status.clock(3725) == "1:02:05"


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(reproduce.SCALES, "quick", {"layer": SHORT})
    out = tmp_path / "out"
    assert cli.main(["reproduce", "2d", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "Figure 2(d)" in shown.out
    assert shown.out.rstrip().endswith("2d.png")
    assert shown.err.count("2d ") == 18
    pictures = [out / f"2d.{suffix}" for suffix in ("png", "pdf", "svg")]
    before = [path.read_bytes() for path in pictures]
    for path in pictures:
        path.unlink()
    assert cli.main(["plot", str(out)]) == 0
    assert [path.read_bytes() for path in pictures] == before
    assert cli.main(["status", str(out)]) == 0
    assert "all 18 cells have ended" in capsys.readouterr().out


def test_the_claims_command(tmp_path, monkeypatch, capsys):
    given = {}

    def compute(out, *, report, **options):
        given.update(options)
        report({"name": "A claim", "holds": True, "verdict": "So it is."})
        return {}

    def write(record, out):
        (out / "claims.json").write_text("{}", encoding="utf-8")
        return [out / "claims.json"]

    monkeypatch.setattr(claims, "compute", compute)
    monkeypatch.setattr(claims, "write", write)
    monkeypatch.setattr(plots, "claims", lambda folder: [folder / "claims.png"])
    assert cli.main(["reproduce", "claims", "--seed", "3", "--out", str(tmp_path)]) == 0
    assert given == {"seed": 3, "trials": 2, "steps": 1500, "batch": 4096}
    assert capsys.readouterr().out.splitlines() == [
        "A claim: holds. So it is.",
        str(tmp_path / "claims.json"),
        str(tmp_path / "claims.png"),
    ]
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "claims.png")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "claims", "--preset", "paper"], "claims: got --preset or --jobs or --shard"),
        (["reproduce", "claims", "--jobs", "2"], "claims: got --preset or --jobs or --shard"),
        (["reproduce", "2e"], "figure: got '2e'"),
        (["reproduce", "clams"], "did you mean claims"),
        (["reproduce", "2a", "--scale", "huge"], "scale: got 'huge', wants one of quick, paper"),
        (["reproduce", "2a", "--preset", "tunde"], "did you mean tuned"),
        (["reproduce", "2a", "--jobs", "0"], "jobs: got 0, wants an integer >= 1"),
        (["reproduce", "2a", "--seed", "-1"], "seed: got -1"),
        (["reproduce", "2a", "--patience", "0"], "patience: got 0.0, wants a number of seconds >= 10"),
        (["reproduce", "2a", "--patience", "9.9"], "patience: got 9.9, wants a number of seconds >= 10"),
        (["reproduce", "2a", "--patience", "nan"], "patience: got nan, wants a number of seconds >= 10"),
        (["reproduce", "2a", "--patience", "inf"], "patience: got inf, wants a number of seconds >= 10"),
        (["reproduce", "claims", "--shard", "0/2"], "claims: got --preset or --jobs or --shard"),
        (["status", "nowhere"], "nowhere: no such folder"),
        (["plot", "."], "holds no panel"),
    ],
)
def test_errors_of_the_command(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []
