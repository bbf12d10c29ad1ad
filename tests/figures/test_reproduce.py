"""`fastlin reproduce`: panels made cell by cell, stopped and resumed, and the files of their folder."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import filelock
import pytest

import fastlin as fl
from fastlin import cli, plots, theory
from fastlin._files import read_json, write_json
from fastlin.figures import claims, forgetting, panel_files, prompts, reproduce, status, sweep
from fastlin.figures.panels import Panel, Series
from fastlin.figures.reproduce import Effort, Request
from fastlin.settings import load

SHORT = Effort(2, 6, 64)
SUFFIXES = ("json", "csv", "md")


def run(names, out, request=None, **callbacks):
    """Reproduce panels without pictures; returns records and the names of the panels to draw."""
    drawn = []
    request = request or Request(effort=SHORT, lengths=(2, 5), jobs=1)
    panels = [prompts.PANELS[name] if isinstance(name, str) else name for name in names]
    return reproduce.reproduce(panels, out, request, drawn=drawn.append, **callbacks), drawn


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


def test_a_panel(tmp_path):
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


def test_what_is_done_is_not_done_again(tmp_path):
    run(["2c"], tmp_path)
    before = (tmp_path / "2c.csv").read_bytes()
    ended = []
    _, drawn = run(["2c"], tmp_path, ended=lambda record, cell: ended.append(cell["key"]))
    assert (ended, drawn) == ([], ["2c"])
    assert (tmp_path / "2c.csv").read_bytes() == before
    # A cell with a finished run and no outcome is read, not trained.
    path = tmp_path / "2c.json"
    record = read_json(path, dict)
    record["cells"][0].update(state="waiting", row=None)
    write_json(path, record)
    (tmp_path / "cells/2c/plain-full-n2.json").unlink()
    run(["2c"], tmp_path, ended=lambda record, cell: ended.append(cell["key"]))
    assert ended == ["plain-full-n2"]
    assert (tmp_path / "2c.csv").read_bytes() == before


def test_another_request_in_the_same_folder(tmp_path):
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
    assert "another process is checking claims in this folder" in capsys.readouterr().err
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


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path):
    foreign = tmp_path / "cells" / "2c" / "joint-full-n5"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine", encoding="utf-8")
    records, _ = run(["2c"], tmp_path)
    states = {cell["key"]: cell["state"] for cell in records[0]["cells"]}
    assert states.pop("joint-full-n5") == "failed"
    assert set(states.values()) == {"done"}
    assert len(rows_of(tmp_path / "2c.csv")) == 5
    assert any("Missing: 1 of 6 cells" in sentence for sentence in records[0]["caption"])
    text = status.as_text(tmp_path)
    assert "failed   2c joint-full-n5: FileError" in text
    assert "thesis.txt" in text
    (foreign / "thesis.txt").unlink()
    records, _ = run(["2c"], tmp_path)
    assert {cell["state"] for cell in records[0]["cells"]} == {"done"}


def test_other_axes(tmp_path):
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


def test_processes_for_cells(monkeypatch):
    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 8)

    def requests(count, later=0):
        first = [sweep.CellRequest(None, Path(f"{i}"), {}) for i in range(count)]
        return first + [sweep.CellRequest(None, Path(f"later-{i}"), {}, first[i].folder) for i in range(later)]

    assert sweep.workers(None, requests(100)) == 8
    assert sweep.workers(None, requests(3)) == 3
    assert sweep.workers(2, requests(100)) == 2
    assert sweep.workers(100, requests(100)) == 100
    # A cell that continues another trains after it.
    assert sweep.workers(None, requests(1, later=1)) == 1
    assert sweep.workers(None, requests(3, later=2)) == 3


def test_shards_are_a_partition(tmp_path):
    panels = [prompts.PANELS["2a"], *forgetting.FIGURES.values()]
    requests = [one for panel in panels for one in reproduce.PanelFolder(tmp_path).open(panel, Request())]
    shards = [reproduce._share(panels, requests, Request(shard=(i, 3))) for i in range(3)]
    assert sorted(map(id, requests)) == sorted(id(one) for shard in shards for one in shard)
    assert max(map(len, shards)) - min(map(len, shards)) <= 3
    for one in requests:
        if one.after is not None:
            (shard,) = (shard for shard in shards if one in shard)
            assert one.after in [other.folder for other in shard]
    # What is done does not change which shard the rest belong to.
    assert reproduce._share(panels, requests[5:], Request(shard=(1, 3))) == [
        one for one in shards[1] if one in requests[5:]
    ]


def test_shards_one_after_the_other(tmp_path, monkeypatch, capsys):
    """The last shard writes the table; if neither saw the other's last cell, `fastlin plot` does."""
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    run(["2c"], whole)
    request = dict(effort=SHORT, lengths=(2, 5), jobs=1)
    records, drawn = run(["2c"], shards, Request(**request, shard=(0, 2)))
    assert (drawn, [cell["state"] for cell in records[0]["cells"]]) == ([], ["done", "waiting"] * 3)
    assert not (shards / "2c.csv").exists()
    monkeypatch.setattr(plots, "panel", lambda folder, name: [folder / f"{name}.png"])
    assert cli.main(["plot", str(shards)]) == 0
    assert "2c: not all cells have ended; not drawn" in capsys.readouterr().err
    _, drawn = run(["2c"], shards, Request(**request, shard=(1, 2)))
    assert drawn == ["2c"]
    assert (shards / "2c.csv").read_bytes() == (whole / "2c.csv").read_bytes()
    # As if both had ended at once, and neither had seen the other's last cell.
    record = read_json(whole / "2c.json", dict)
    for cell in record["cells"]:
        cell.update(state="waiting", row=None)
    write_json(shards / "2c.json", {**record, "caption": []})
    (shards / "2c.csv").unlink()
    assert cli.main(["plot", str(shards)]) == 0
    assert capsys.readouterr().out == f"{shards / '2c.png'}\n"
    assert (shards / "2c.csv").read_bytes() == (whole / "2c.csv").read_bytes()


@pytest.mark.parametrize("shard", ["", "1", "2/2", "-1/2", "a/b", "1/2/3", "0/0", "slurm"])
def test_wrong_shards(shard, capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "2a", f"--shard={shard}"])
    assert f"argument --shard: got {shard!r}, wants I/N" in capsys.readouterr().err


def test_a_cell_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    """Waits for the cell's lock, then reads the result and does not train again."""
    folder, slept = tmp_path / "cells/2c/plain-full-n2", []
    run(["2c"], tmp_path / "whole", Request(effort=SHORT, lengths=(2,), jobs=1))
    shutil.copytree(tmp_path / "whole/cells/2c/plain-full-n2", folder)
    lock = filelock.FileLock(folder / ".lock")
    lock.acquire()

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            lock.release()

    monkeypatch.setattr(sweep.time, "sleep", sleep)
    with monkeypatch.context() as patch:
        patch.setattr(fl.training.loop.Loop, "run", lambda self: pytest.fail("trains"))
        folder_of_panels = reproduce.PanelFolder(tmp_path)
        short = Request(effort=SHORT, lengths=(2,), jobs=1)
        sweep.train_cell(folder_of_panels.open(prompts.PANELS["2c"], short)[0])
    assert len(slept) == 3
    assert panel_files.outcome_of(folder).row == panel_files.outcome_of(tmp_path / "whole/cells/2c/plain-full-n2").row


def test_status_on_the_way(tmp_path):
    texts = []
    run(["2c"], tmp_path, ended=lambda record, cell: texts.append(status.as_text(tmp_path)))
    assert "1 of 6 cells have ended; time left:" in texts[0]
    assert "rerun `fastlin reproduce` to resume" in texts[0]
    assert "all 6 cells have ended" in status.as_text(tmp_path)
    record = read_json(tmp_path / "2c.json", dict)
    keys = [cell["key"] for cell in record["cells"]]
    for cell in record["cells"][:3]:
        cell.update(state="waiting", row=None, seconds=None)
        (tmp_path / f"cells/2c/{cell['key']}.json").unlink()
    write_json(tmp_path / "2c.json", record)
    shutil.rmtree(tmp_path / f"cells/2c/{keys[2]}")
    (tmp_path / f"cells/2c/{keys[0]}/records.jsonl").write_text('{"step": 3}\n{"step"', encoding="utf-8")
    found = status.cells(tmp_path)
    assert [cell.state for cell in found] == ["started"] * 2 + ["waiting"] + ["done"] * 3
    assert found[0].progress == 0.5
    assert f"started  2c {keys[0]}: 50 %" in status.as_text(tmp_path)


def test_the_live_line(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with status.Line(tmp_path) as line:

        def ended(record, cell):
            line.ended(record, cell)
            line._shown = 0.0
            line.show()

        run(["2c"], tmp_path, ended=ended)
    shown = terminal.getvalue()
    assert "1/6 cells, " in shown
    assert "5/6 cells, " in shown
    assert "2c 6/6 joint-full-n5: risk " in shown


def test_time_left():
    def cell(state, share, seconds, panel="a", layers=1):
        return status.CellStatus(panel, "k", state, layers, share, seconds, None)

    assert status.seconds_left([cell("waiting", 0.0, None)]) is None
    found = [cell("done", 1.0, 10.0), cell("started", 0.5, None), cell("waiting", 0.0, None)]
    assert status.seconds_left(found) == pytest.approx(15.0)
    found += [cell("started", 0.5, None)]
    assert status.seconds_left(found) == pytest.approx(10.0)
    # Each panel has its own pace; a panel without finished cells uses the mean of all.
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

    def write(record, out, name):
        (out / "claims.json").write_text("{}", encoding="utf-8")
        return [out / "claims.json"]

    monkeypatch.setattr(claims, "compute", compute)
    monkeypatch.setattr(claims, "write", write)
    monkeypatch.setattr(plots, "panel", lambda folder, name: [folder / f"{name}.png"])
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
        (["reproduce", "claims", "--preset", "paper"], "claims: got --preset, --jobs, --dask, --shard or -n"),
        (["reproduce", "claims", "-n", "5"], "claims: got --preset, --jobs, --dask, --shard or -n"),
        (["reproduce", "claims", "--jobs", "2"], "claims: got --preset, --jobs, --dask, --shard or -n"),
        (["reproduce", "2e"], "figure: got '2e'"),
        (["reproduce", "clams"], "did you mean claims"),
        (["reproduce", "2a", "--scale", "huge"], "scale: got 'huge', wants one of quick, paper"),
        (["reproduce", "2a", "--preset", "tunde"], "did you mean tuned"),
        (["reproduce", "2a", "--jobs", "0"], "jobs: got 0, wants an integer >= 1"),
        (["reproduce", "2a", "--seed", "-1"], "seed: got -1"),
        (["reproduce", "claims", "--dask", "tcp://127.0.0.1:1"], "claims: got --preset, --jobs, --dask, --shard or -n"),
        (["reproduce", "claims", "--shard", "0/2"], "claims: got --preset, --jobs, --dask, --shard or -n"),
        (["status", "nowhere"], "nowhere: no such folder"),
        (["plot", "."], "holds no panel"),
    ],
)
def test_errors_of_the_command(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []
