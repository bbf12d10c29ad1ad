"""Checks before timing, interleaved rounds, bars, and the peak of the machine."""

import gc
import math
import threading
from dataclasses import replace

import pytest

from fastlin.bench import cases, checks, machine, peers, timing
from fastlin.bench.cases import CaseShape
from fastlin.bench.rows import Bar

SMALL = CaseShape(B=40, n=6, m=5)


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
    whole = [CaseShape(n=10), CaseShape(n=50), CaseShape("stack_loss", n=50, L=3)]
    assert all(checks.affordable_batch(shape, checks.AFFORDABLE_SCORES) >= shape.B for shape in whole)
    assert checks.affordable_batch(CaseShape(n=50, R=50), checks.AFFORDABLE_SCORES) < 8192


def test_rounds_are_interleaved_in_rotating_order():
    ran = []

    def contender(name, **options):
        return timing.Contender(name, lambda: ran.append(name), **options)

    def reset():
        assert not gc.isenabled()
        ran.append("reset")

    contenders = [contender("a"), contender("b", before=lambda: ran.append("before")), contender("c", every=2)]
    found = timing.interleave(contenders, 3, reset=reset)
    assert gc.isenabled()
    assert [name for name in ran if name in "abc"] == [*"abc", *"ba", *"cab"]
    assert ran[:6] == ["reset", "a", "before", "reset", "b", "reset"]
    assert [len(found[name].seconds) for name in "abc"] == [3, 3, 2]


def test_short_calls_are_timed_in_a_row_after_as_many_that_are_not(monkeypatch):
    ran, clocked = [], []

    def clock(call, calls):
        clocked.append(calls)
        call()
        return 2e-3

    monkeypatch.setattr(timing, "wall_clock", clock)
    before = timing.Contender("a", lambda: ran.append("a"), before=lambda: ran.append("before"), steps=4)
    found = timing.timed([before], 0.02)["a"]
    assert clocked == [1, 1, 5, 5, 5]  # 10 ms, three times
    assert ran[:9] == ["before", "a", "a", "before", *5 * "a"]
    assert found.seconds == (5e-4,) * 3
    assert timing.timed([], 1.0) == {}


def test_timing_is_a_median_with_its_spread():
    found = timing.Timing((5.0, 1.0, 2.0, 3.0, 4.0))
    assert (found.median, found.quartiles, found.spread) == (3.0, (2.0, 4.0), 2 / 3)
    assert timing.Timing((2.0,)).spread == 0.0


@pytest.mark.parametrize(
    ("bar", "verdict", "limit"),
    [
        (Bar("eager", ">=", 25, "fastlin"), "ok", 25),
        (Bar("eager", ">=", 31, "fastlin"), "misses", 31),
        (Bar("fastlin", "<=", 2.5e-3), "ok", 2.5e-3),
        (Bar("fastlin", "<=", 1e-3, peak=100e9), "ok", 2e-3),
        (Bar("memory of fastlin", "<=", 1e6, unit="B"), "misses", 1e6),
        (Bar("jax", ">=", 2, "fastlin"), "not measured", 2),
        (Bar("eager@fresh", ">=", 2, "fastlin@fresh"), "misses", 2),
    ],
)
def test_bars_are_judged(bar, verdict, limit):
    """A peer that did not run leaves a bar unmeasured, fastlin misses it; a time is scaled by the measured peak."""
    values = {"eager": 60e-3, "fastlin": 2e-3, "memory of fastlin": 2e6, "eager@fresh": 1.0}
    judged = bar.judge(values, {"jax": "not there", "fastlin@fresh": "wrong"}, 50e9)
    assert (judged["verdict"], judged["limit"]) == (verdict, pytest.approx(limit))
    assert bar.line(judged).endswith(f": {verdict}")


def test_times_have_three_digits():
    assert [timing.in_units(x) for x in (2.5, 0.0123, 4.56e-5, 1.2e-9)] == ["2.5 s", "12.3 ms", "45.6 µs", "1.2 ns"]


def test_the_peak_is_that_of_all_threads_at_once(monkeypatch):
    clock, lock = [0.0], threading.Lock()

    def chains(iterations):
        with lock:
            clock[0] += iterations * 1e-6
        return 64.0 * iterations

    # The clock only moves while chains run, one after another: two threads are as fast as one.
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    assert machine._fma_chains(chains, 2, 1) == pytest.approx(64e6)
