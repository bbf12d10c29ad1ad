"""The benchmark measures what it says: right contenders, interleaved rounds, and a trend that sees an outlier."""

import gc
import json
import math
import threading
from dataclasses import replace

import pytest
import torch

from benchmarks import cpu, rows, sampled, trend
from fastlin.bench import cases, checks, machine, peers, timing, work
from fastlin.bench.cases import Shape

SMALL = Shape(B=40, n=6, m=5)
TINY = ["--quick", "--backend", "eager", "--batch", "16", "--memory-batch", "1000", "--widths", "3,5,12,13,16,70"]
NAMES = [row.name for row in cpu.ROWS]


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile fails as it does where there is no C++ compiler; it would also take most of the test's time."""

    def fail(*arguments):
        raise RuntimeError("no compiler\nand a long story")

    def missing(*arguments):
        raise ModuleNotFoundError("No module named 'jax'")

    monkeypatch.setattr(peers, "compiled_query_row", lambda: fail)
    monkeypatch.setitem(sampled.PEERS, "compiled", (fail, 1))
    monkeypatch.setitem(sampled.PEERS, "JAX", (missing, 1))


@pytest.fixture
def restored_threads():
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def run(*arguments, path):
    status = cpu.main([*TINY, *arguments, "--json", str(path)])
    record = json.loads(path.read_text())
    return status, {row["name"]: row for row in record["rows"]}, record


@pytest.mark.parametrize("loss", [peers.query_row, peers.query_row_one_product, peers.op("prompt_loss", "eager")])
@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, n=1, B=1), replace(SMALL, K=3, t=2)])
def test_peers_agree_with_the_reference(loss, shape):
    case = cases.make(shape).to(torch.float64)
    found, expected = case.step(loss)(), case.step(peers.literal("prompt_loss"))()
    assert len(found) == 4
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, R=3), replace(SMALL, op="stack_loss")])
@pytest.mark.parametrize("scores", [checks.AFFORDABLE_SCORES, 10_000])
def test_the_gate_lets_right_results_pass_and_no_others(shape, scores):
    case = cases.make(replace(shape, B=300))
    gate = checks.Gate.of(case, scores)
    loss, *gradients = case.step(peers.op(shape.op, "eager"))()
    gate.check("right", (loss, *gradients))
    for i in range(len(gradients)):
        wrong = [x * 1.001 if i == j else x for j, x in enumerate(gradients)]
        with pytest.raises(checks.WrongResultError, match=r"planted: d\w is off by 1.0e-03"):
            gate.check("planted", (loss, *wrong))
    with pytest.raises(checks.WrongResultError, match="loss is off by nan"):
        gate.check("planted", (loss * math.nan, *gradients))


def test_the_reference_is_asked_for_as_much_as_it_can_do_in_seconds():
    whole = [Shape(n=10), Shape(n=50), Shape("stack_loss", n=50, L=3)]
    assert all(checks.affordable_batch(shape, checks.AFFORDABLE_SCORES) >= shape.B for shape in whole)
    assert checks.affordable_batch(Shape(n=50, R=50), checks.AFFORDABLE_SCORES) < 8192


def test_a_run_writes_all_rows(tmp_path, capsys, no_compiler, restored_threads):
    status, found, record = run(path=tmp_path / "table.json")
    assert status == 0
    assert list(found) == NAMES
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    for row in found.values():
        assert row["lines"]
        assert row["wrong"] is False
        for line in row["lines"]:
            assert line["verdict"] in ("ok", "misses", "not measured", "no bar")
        for timed in row["timings"].values():
            first, third = timed["quartiles"]
            assert 0 < first <= timed["median"] <= third
    unmeasured = [line for row in found.values() for line in row["lines"] if line["verdict"] == "not measured"]
    assert [line["measured"] for line in unmeasured] == [
        "compiled query row: RuntimeError: no compiler",
        "compiled query row, fresh tokens: RuntimeError: no compiler",
        "compiled: RuntimeError: no compiler",
        "JAX: ModuleNotFoundError: No module named 'jax'",
    ]
    assert record["limits"]["flops_per_core"] > 0
    assert record["settings"]["batch"] == 16
    assert [detail["m"] for detail in found["widths"]["details"]] == [3, 5, 12, 13, 16, 70]
    printed = capsys.readouterr()
    assert printed.err == ""
    table = printed.out.split("\n\n")[1].splitlines()
    assert table[0] == "| work | measured | bar | verdict |"
    assert len(table) == 2 + sum(len(row["lines"]) for row in found.values())
    assert "read bandwidth" in printed.out


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_rows_are_selected(tmp_path, cache):
    _, found, _ = run("--rows", "one,loss-10", "--cache", cache, path=tmp_path / "table.json")
    assert list(found) == ["loss-10", "one"]
    assert set(found["loss-10"]["timings"]) == {"op", "query row", "query row, one product"}
    assert all(len(timed["seconds"]) == 2 for timed in found["loss-10"]["timings"].values())


def test_a_wrong_op_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(rows.LOSSES, "op", lambda op, backend: lambda *x: 1.01 * peers.query_row(*x))
    status, found, _ = run("--rows", "loss-10,widths", path=tmp_path / "table.json")
    assert status == 1
    assert {line["verdict"] for line in found["widths"]["lines"] if line["bar"]} == {"misses"}
    assert "op" not in found["loss-10"]["timings"]
    assert found["loss-10"]["lines"][0]["verdict"] == "misses"
    assert "op: loss is off by 1.0e-02" in found["loss-10"]["lines"][0]["measured"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "loss-50,loss-51"], "no row 'loss-51'; there are loss-50, "),
        (["--backend", "cuda"], "backend 'cuda' cannot serve: "),
        (["--backend", "fpga"], "no backend 'fpga'; there are "),
        (["--batch", "0"], "'0' is not a positive number"),
        (["--json", "no/such/folder/table.json"], "no/such/folder is not a folder"),
    ],
)
def test_what_cannot_be_run_is_said(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cpu.main(arguments)
    assert message in capsys.readouterr().err


def test_rounds_are_interleaved_in_rotating_order():
    ran = []

    def contender(name, **options):
        return timing.Contender(name, lambda: ran.append(name), **options)

    def reset():
        assert not gc.isenabled()
        ran.append("reset")

    contenders = [contender("a"), contender("b", before=lambda: ran.append("before")), contender("c", every=2)]
    found = timing.interleave(contenders, 3, reset)
    assert gc.isenabled()
    assert ran[:4] == ["a", "before", "b", "c"]
    assert [name for name in ran[4:] if name in "abc"] == [*"abc", *"ba", *"cab"]
    assert ran[4:10] == ["reset", "a", "before", "reset", "b", "reset"]
    assert [len(found[name].seconds) for name in "abc"] == [3, 3, 2]


def test_a_slow_race_is_cut_short():
    contender = timing.Contender("a", lambda: None)
    assert len(timing.interleave([contender], 50, None, seconds=0)["a"].seconds) == timing.FEWEST_ROUNDS


def test_without_reset_a_contender_runs_before_it_is_timed():
    ran = []
    timing.interleave([timing.Contender("a", lambda: ran.append("a"), calls=5)], 2, None)
    assert len(ran) == 1 + 2 * (5 + 5)


@pytest.mark.parametrize(("reset", "stopwatch", "calls"), [(None, None, 7), (int, None, 1), (None, lambda *_: 1.0, 1)])
def test_calls_in_a_row_are_for_loops_by_the_wall_clock(monkeypatch, reset, stopwatch, calls):
    monkeypatch.setattr(timing, "calls_in_a_row", lambda call: 7)
    timed = []
    monkeypatch.setattr(timing, "wall_clock", lambda call, calls: timed.append(calls) or 1.0)
    given = stopwatch and (lambda call, calls: timed.append(calls) or stopwatch(call, calls))
    timing.interleave([timing.Contender("a", lambda: None)], 2, reset, stopwatch=given)
    assert timed == [calls, calls]


def test_fresh_tokens_are_others_in_each_call(monkeypatch):
    case, seen = cases.make(Shape(B=8, n=3)), []
    z = case.data["z"]
    monkeypatch.setattr(rows, "last_level_cache", lambda: z.nbytes)
    monkeypatch.setattr(rows, "_LEAST_CACHE", 1)
    monkeypatch.setattr(rows.torch, "get_num_threads", lambda: 2)
    monkeypatch.setitem(rows.LOSSES, "op", lambda op, backend: lambda z, *rest: seen.append(z))
    call = rows._call(rows.Entrant("call", fresh=True), case, "cpu")
    for _ in range(6):
        call()
    assert len({held.data_ptr() for held in seen}) == 5  # twice the caches of two threads, and one more
    assert all(torch.equal(held, z) and held.data_ptr() != z.data_ptr() for held in seen)
    assert seen[0] is seen[5]


def test_timing_is_a_median_with_its_spread():
    found = timing.Timing((5.0, 1.0, 2.0, 3.0, 4.0))
    assert (found.median, found.quartiles, found.spread) == (3.0, (2.0, 4.0), 2 / 3)
    assert timing.Timing((2.0,)).spread == 0.0


def smooth_costs():
    """Cost per token-element that falls, has a floor and rises again, with lanes of 8 and a few percent of noise."""
    return {
        m: (1 + 3 / m + m / 50) * (math.ceil(m / 8) * 8 / m) ** 0.2 * (1 + 0.03 * math.sin(7 * m)) for m in cpu.WIDTHS
    }


def test_the_trend_follows_a_smooth_cost():
    found = trend.over_trend(smooth_costs())
    assert max(ratio for m, ratio in found.items() if m >= 12) < 1.25


@pytest.mark.parametrize("slow", [12, 17, 33, 65, 192, 257])
def test_the_trend_flags_a_planted_outlier(slow):
    costs = smooth_costs()
    costs[slow] *= 1.9
    found = trend.over_trend(costs)
    assert [m for m, ratio in found.items() if m >= 12 and ratio > 1.5] == [slow]


def test_two_slow_neighbours_do_not_hide_each_other():
    costs = smooth_costs()
    for m in (33, 31):
        costs[m] *= 2
    assert [m for m, ratio in trend.over_trend(costs).items() if m >= 12 and ratio > 1.5] == [31, 33]


def test_too_few_widths_have_no_trend():
    assert trend.over_trend({3: 1.0, 4: 1.0, 5: 1.0}) == {}


def test_the_share_of_the_peak_counts_useful_work():
    shape = Shape(B=8192, n=50, m=11, R=50)
    assert work.multiply_adds(shape) == 8192 * (50 * 66 + 4 * 121 * 50)
    limits = machine.Limits(threads=2, flops=100e9, flops_source="", bandwidth=1.0)
    result = rows.Result("trials", timings={"op": timing.Timing((9.0e-3,))})
    line = rows.Within("op", 4.5e-3, peak=100e9).line("work", result, shape, limits)
    assert line.verdict == "ok"
    assert line.limit == pytest.approx(9.0e-3)
    assert line.measured == "9 ms (±0 %), 50 % of the measured peak"


def test_the_peak_is_that_of_all_threads_at_once(monkeypatch):
    clock, lock = [0.0], threading.Lock()

    def chains(iterations):
        with lock:
            clock[0] += iterations * 1e-6
        return 64.0 * iterations

    # The clock only moves while chains run, one after another: two threads are as fast as one.
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    assert machine._fma_chains(chains, 2, 1) == pytest.approx(64e6)
