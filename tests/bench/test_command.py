"""`fastlin bench`: its record, table, CSV and pictures, its refusals, and the comparison of two records."""

import copy
import csv
import io
import json
from dataclasses import replace

import pytest
import torch

from fastlin import cli, plots
from fastlin.bench import compare, forms, peers, rows, run, table
from fastlin.bench.cases import OPS
from fastlin.bench.timing import in_units
from fastlin.plots.bench import ABOVE, table_cases

TINY = ["--quick", "--B", "24", "--n", "4,6", "--m", "4"]
COLUMNS = {"label", "first_call", "memory", "error", "median", "quartiles", "spread", "seconds", "times_fastlin"}


def bench(*arguments):
    return cli.main(["bench", *arguments])


@pytest.fixture
def restored_threads():
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def record():
    """Some of the default run with few sequences and without compilers: three curves, the training, four cases."""
    threads = torch.get_num_threads()
    wanted = ("loss-50", "stack", "sampled", "sampled-stack", "curve-n", "curve-L", "curve-threads", "training")
    kept = [row.small() for row in rows.named(wanted, threads, "cpu")]
    quick = [
        replace(row, labels=tuple(label for label in row.labels if label.startswith(("fastlin", "eager", "vmap"))))
        for row in kept
    ]
    return run.run(quick, run.QUICK, command="fastlin bench", probing=False)


def test_a_run_writes_json_csv_and_pictures(tmp_path, capsys, restored_threads):
    names = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]
    choice = ["--ops", "prompt_loss,gram", "--dtypes", "float64", "--threads", "1", "--backends", "auto,eager"]
    assert bench(*TINY, *choice, "--peers", "eager,numpy", *names) == 0
    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    record = compare.read(tmp_path / "a.json")
    assert record == json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [case["name"] for case in record["cases"]] == [
        f"{op} B=24 n={n} m=4 float64 threads=1" for op in ("prompt_loss", "gram") for n in (4, 6)
    ]
    first = record["cases"][0]
    assert [entry["label"] for entry in first["contenders"]] == ["fastlin", "fastlin:eager", "eager", "numpy"]
    for case in record["cases"]:
        assert case["wrong"] == {}
        for entry in case["contenders"]:
            assert set(entry) >= COLUMNS | {"gflops", "gbs", "of_peak", "of_bandwidth"}
            low, high = entry["quartiles"]
            assert 0 < low <= entry["median"] <= high
            assert entry["error"] < 1e-12
        assert case["contenders"][0]["times_fastlin"] == 1.0
    assert record["others"] == {}
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert [limit["dtype"] for limit in record["limits"]] == ["float64"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert len(lines) == sum(len(case["contenders"]) for case in record["cases"])
    assert (lines[0]["contender"], lines[0]["n"], float(lines[0]["median"])) == (
        "fastlin",
        "4",
        first["contenders"][0]["median"],
    )
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"bench-speedup", "bench-speedup-all", "bench-roofline"}


def test_the_default_run_has_every_op_every_axis_and_the_paper(record):
    full = rows.default(2)
    assert {row.shape.op for row in full if row.shape} == set(OPS)
    curves = [row for row in full if row.axis]
    assert list(dict.fromkeys(row.axis for row in curves)) == ["B", "n", "d", "L", "R", "threads"]
    assert {row.dtype for row in full} == {"float32", "float64"}
    assert [row.position(2) for row in full if row.axis == "d"] == [2, 5, 10, 20, 40, 80]
    assert [row.position(2) for row in full if row.axis == "threads"] == [1, 2]
    text = table.as_text(record)
    assert all(len(line) <= 80 for line in text.splitlines())
    narrow = table.as_text(record, 60).splitlines()
    assert max(map(len, narrow)) <= 60
    assert "                     median    ± times  GB/s  FMA  read" in narrow
    assert "                        cell    figure   times" in narrow
    assert "not shown in 60 columns: GFLOP/s, first, memory" in narrow
    for line in (
        "curve-n: context length n: prompt_loss B=64 m=11",
        "training: training at the paper's scale: a cell",
    ):
        assert line in text


def test_rows_are_named_once_but_for_curves(capsys):
    every = rows.every(2, "cpu")
    points = [row.name for row in every if row.axis]
    names = [row.name for row in every if not row.axis]
    assert len(set(names)) == len(names)
    assert not set(names) & set(points)
    long = {row.name for row in every if row.long}
    assert long >= {"widths", "cell", "forgetting", "busy", "soak", "processes"}
    assert {row.name for row in rows.default(2)} == {row.name for row in every} - long
    assert rows.default(2, long=True) == every
    assert bench("--list") == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(dict.fromkeys(row.name for row in every))
    assert bench("--list", "--device", "cuda") == 0
    assert capsys.readouterr().out.startswith("loss-50-8192 ")


def test_rows_are_selected_by_name(tmp_path, restored_threads):
    path = tmp_path / "a.json"
    assert bench("--rows", "one,threads,normals,workspace", "--quick", "--json", str(path)) == 0
    record = compare.read(path)
    assert [case["row"] for case in record["cases"]] == ["threads", "one", "workspace"]
    assert list(record["others"]) == ["normals"]
    threads, one, workspace = record["cases"]
    assert [entry["label"] for entry in threads["contenders"]] == ["fastlin@threads=1", "fastlin@threads=2"]
    assert [entry["label"] for entry in one["contenders"]] == ["fastlin", "fastlin@call", "autograd"]
    assert workspace["contenders"][0]["memory"] >= 0
    assert workspace["contenders"][0]["median"] is None


def test_bars_are_printed_and_change_no_exit_code(monkeypatch, capsys):
    strict = (rows.Bar("eager", ">=", 1e9, "fastlin"), rows.Bar("jax", ">=", 1.0, "fastlin"))
    shape = rows.CaseShape(B=24, n=4, m=4)
    monkeypatch.setattr(rows, "CPU", (rows.Row("mine", shape, ("fastlin", "eager"), strict),))
    monkeypatch.setattr(rows.Row, "small", lambda row: row)
    assert bench("--rows", "mine", "--quick") == 0
    printed = capsys.readouterr().out
    assert "  bar eager >= 1e+09x fastlin, got " in printed
    assert ": misses\n  bar jax >= 1x fastlin: not measured\n" in printed
    assert "bars: 0 of 2 are met; misses: mine\n" in printed


def test_the_figure_follows_from_the_stretches(record):
    training = record["others"]["training"]
    assert (training["cells"], training["n"], training["wrong"]) == (18, 25, {})
    by_label = {entry["label"]: entry for entry in training["contenders"]}
    assert {label: (entry["steps"], entry["trials"]) for label, entry in by_label.items()} == {
        "fastlin": (2, 50),
        "eager@trial": (1, 1),
        "vmap-gram": (1, 50),
    }
    for entry in by_label.values():
        assert entry["cell"] == pytest.approx(entry["median"] * 20_000 * 50 / entry["trials"])
        assert entry["figure"] == pytest.approx(18 * entry["cell"])
        assert entry["times_fastlin"] == pytest.approx(entry["cell"] / by_label["fastlin"]["cell"])


def test_pictures_show_every_contender(record):
    figures = plots.bench_figures(record)
    assert set(figures) == {"speedup", "speedup-all", "scaling", "roofline"}

    def bars(name):
        return sum(len(group) for group in figures[name].axes[0].containers)

    peers_timed = [e["label"] for case in table_cases(record) for e in case["contenders"]]
    assert bars("speedup-all") == sum(label != "fastlin" and "@" not in label for label in peers_timed)
    assert bars("speedup") == 3  # eager, eager-gram, eager-product
    title = figures["speedup"].get_suptitle()
    assert title.startswith(f"prompt_loss, B = 64, n = 50, m = 11, float32, threads = {torch.get_num_threads()}\n")
    assert [axes.get_xlabel() for axes in figures["scaling"].axes] == ["context length n", "layers L", "threads"]
    assert len(figures["scaling"].axes[0].lines) == 3


def test_a_picture_has_the_threads_of_its_row_not_of_the_run(record):
    one = copy.deepcopy(record)
    case = next(case for case in one["cases"] if case["row"] == "loss-50")
    case["name"], case["threads"] = case["name"].replace(f"threads={case['threads']}", "threads=7"), 7
    one["limits"].append({**one["limits"][0], "threads": 7})
    figures = plots.bench_figures({**one, "cases": [case]})
    assert "threads = 7\n" in figures["speedup"].get_suptitle()
    assert str(record["machine"]["threads"]) not in figures["speedup"].get_suptitle().split("\n")[0][-2:]


def test_a_point_above_its_roof_has_a_word_why(record):
    def caption(bandwidth):
        made = copy.deepcopy(record)
        for limit in made["limits"]:
            limit.update(bandwidth=bandwidth, flops=1e15)
        return plots.bench_figures(made)["roofline"].get_supxlabel()

    assert caption(1e15) == ""
    assert caption(1.0) == ABOVE


def test_a_wrong_contender_is_not_timed_and_ends_in_failure(tmp_path, monkeypatch, capsys):
    right = forms.FORMS["prompt_loss"]["gram"]
    monkeypatch.setitem(forms.FORMS["prompt_loss"], "gram", lambda *x: 1.01 * right(*x))
    peers.of_form.cache_clear()
    assert bench(*TINY, "--peers", "eager-gram", "--json", str(tmp_path / "a.json")) == 1
    peers.of_form.cache_clear()
    case = compare.read(tmp_path / "a.json")["cases"][0]
    assert "loss is off by" in case["wrong"]["eager-gram"]
    assert [entry["label"] for entry in case["contenders"]] == ["fastlin"]
    assert "eager-gram WRONG: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "prompt_los"], "--ops: got 'prompt_los' (did you mean prompt_loss?)"),
        (["--dtypes", "float16"], "--dtypes: got 'float16'"),
        (["--backends", "fpga"], "--backends: got 'fpga'"),
        (["--backends", "cuda"], "--backends: 'cuda' cannot serve: "),
        (["--peers", "eagre"], "contender 'eagre': got 'eagre' (did you mean eager?)"),
        (["--peers", "eager@frsh"], "contender 'eager@frsh': got 'frsh' (did you mean fresh?)"),
        (["--rows", "loss-51"], "--rows: got 'loss-51' (did you mean loss-50?)"),
        (["--rows", "loss-50", "--n", "5"], "--rows, --long: got a choice of ops, sizes or peers as well"),
        (["--B", "0"], "--B: got 0, wants 1 or more"),
        (["--L", "1"], "--L: got 1, wants 2 or more"),
        (["--threads", "0,1"], "--threads: got 0, wants 1 or more"),
        (["--json", "no/such/folder/a.json"], "a.json: its folder is not there"),
        (["--compare", "no.json", "such.json"], "no.json"),
    ],
)
def test_what_cannot_be_run_is_said(arguments, message, capsys):
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


def test_numbers_are_lists(capsys):
    with pytest.raises(SystemExit):
        bench("--n", "1,x")
    assert "'1,x' is not a list like 1,2,5" in capsys.readouterr().err


def slower(record, factor):
    """A record in which fastlin takes that many times as long, in the first case of the table."""
    made = copy.deepcopy(record)
    entry = table_cases(made)[0]["contenders"][0]
    assert entry["label"] == "fastlin"
    entry["median"] *= factor
    return made


@pytest.mark.parametrize(
    ("factor", "tolerance", "status"),
    [(1.0, "0.2", 0), (1.2, "0.2", 0), (1.3, "0.2", 1), (1.3, "0.3", 0), (0.5, "0.0", 0)],
)
def test_a_ratio_that_drops_fails(record, tmp_path, capsys, factor, tolerance, status):
    for name, made in (("a", record), ("b", slower(record, factor))):
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert bench("--compare", *files, "--tolerance", tolerance) == status
    printed = capsys.readouterr().out
    assert ("  dropped" in printed) == bool(status)
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_absolute_times_do_not_matter(record):
    """A machine that is twice as slow has the same ratios."""
    slow = copy.deepcopy(record)
    for case in slow["cases"]:
        for entry in case["contenders"]:
            entry["median"] *= 2
    found = compare.changes(record, slow)
    assert found
    assert all(change.after == pytest.approx(change.before) for change in found)


def test_a_ratio_that_is_gone_fails(record):
    """A case in which fastlin is no longer timed lost; one that was not asked for did not."""
    gone = copy.deepcopy(record)
    gone["cases"][0]["contenders"].pop(0)
    lost = [change for change in compare.changes(record, gone) if change.lost(0.2)]
    assert {change.case for change in lost} == {record["cases"][0]["name"]}
    assert "gone" in compare.as_text(lost, 0.2)
    fewer = {**record, "cases": record["cases"][1:]}
    assert not any(change.lost(0.0) for change in compare.changes(record, fewer))
    with pytest.raises(ValueError, match="no case in common"):
        compare.changes(record, {**record, "cases": []})


@pytest.mark.parametrize("text", ["no", "[]", '{"format": 0, "cases": []}'])
def test_another_file_is_not_compared(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: got .*, wants one of fastlin bench --json"):
        compare.read(path)


def test_times_are_written_with_three_digits():
    assert [in_units(x) for x in (95.4, 1234, 20_000, 500_000)] == ["95.4 s", "20.6 min", "5.56 h", "5.79 days"]
