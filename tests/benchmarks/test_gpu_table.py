"""The check on a GPU, as far as it needs none: refusal, rounds, verdicts and the report."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_check, gpu_machine
from benchmarks.gpu_check import Outcome
from benchmarks.rows import Entrant, Race, Result, Session
from fastlin.bench import work
from fastlin.bench.cases import Shape
from fastlin.bench.timing import Timing

LIMITS = gpu_machine.GpuLimits(1, 10e12, "clock x FMA units", 2e12, "memory clock x bus width", 8e12, 1.8e12)
MACHINE = {
    **{"device": "Test GPU", "capability": "8.0", "multiprocessors": 4, "memory": 2**34, "l2": 2**20, "devices": 1},
    **{"driver": "580.65", "architectures": "sm_80", "cuda_of_fastlin": "13.0", "cuda_of_torch": "13.0"},
    **{"versions": {"torch": "2.13"}, "backend": "cuda"},
}
PASSED, OTHERS = Outcome("gpu", 5, 0, (), 1.0), Outcome("others", 9, 3, (), 2.0)


def measured(**timings):
    """A row of a layer with two contenders and one that failed."""
    timings = timings or {"op": (2e-3,), "query row": (8e-3,), "read": (1e-3,)}
    result = Result("loss", timings={name: Timing(seconds) for name, seconds in timings.items()})
    result.errors = {"op": {"loss": 1e-7, "dW": 3e-7}}
    result.failures = {"graphed query row": "RuntimeError: no graph"}
    return gpu.Measured("loss", "prompt_loss, n = 50", Shape(B=1 << 20), {"cold": result, "warm": result})


@pytest.mark.parametrize("main", [gpu.main, gpu_check.main])
def test_without_a_gpu_it_is_said_and_nothing_is_written(main, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main([]) == 2
    assert "is built without CUDA; install a CUDA build of torch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_why_a_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_machine.why_not("cuda").startswith("torch finds no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_machine.why_not("eager") is None
    assert gpu_machine.why_not("fpga").startswith("no backend 'fpga'; there are ")
    found = {"backends": {"cuda": {"available": False, "reason": "no nvcc"}}}
    monkeypatch.setattr(gpu_machine.fl, "info", lambda: found)
    assert gpu_machine.why_not("cuda") == "backend 'cuda' cannot serve: no nvcc"


def test_unknown_rows_are_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--rows", "loss-50,loss-51"])
    assert "no row 'loss-51'; there are loss-50-8192, " in capsys.readouterr().err


def test_rows_are_run_cold_and_warm_and_written(monkeypatch):
    """All that is not the GPU's, on the CPU: a row with the real contenders, and one that cannot run."""
    entrants = {"op": Entrant("op"), "triton": Entrant("op", backend="triton"), "op, CUDA graph": Entrant("graph")}
    sized = gpu.Sized(Race("small", "prompt_loss, n = 6", Shape(n=6, m=5), entrants, ()), 32)
    there = {"triton": {"available": False}, "eager": {"available": True}}
    sized = gpu.without_missing(sized, there)
    assert list(sized.row.entrants) == ["op", "op, CUDA graph"]
    drawn = next(sized for sized in gpu.ROWS if sized.row.name == "sampled")
    assert list(gpu.without_missing(drawn, there).row.shapes) == ["op"]
    assert list(gpu.without_missing(drawn, {"triton": {"available": True}}).row.shapes) == ["op", "triton"]
    clocked, resets = [], []

    def stopwatch(call, calls):
        call()
        clocked.append(calls)
        return 1e-3 * calls

    session = Session("eager", 1, 0, 0, (), True, LIMITS, None, lambda text: None, "cpu", stopwatch)
    (found,) = gpu.run([sized], session, lambda: resets.append(1))
    assert clocked == [1, 1, 20, 20]
    assert len(resets) == 2
    assert not found.wrong
    line, graph = gpu.lines(found, LIMITS)
    assert (line["contender"], line["cold"], line["warm"], line["over op"]) == ("op", 1e-3, 20e-3, 1.0)
    assert line["GB/s"] == pytest.approx(32 * (4 * (6 * 5 + 5 + 1) + 8) / 1e-3 / 1e9)
    assert 0 < line["error"] < 1e-5
    assert graph["cold"] is None
    assert graph["failure"]
    assert json.loads(json.dumps(gpu.as_dict(found, LIMITS), allow_nan=False))["name"] == "small"


def test_the_table_says_what_share_of_the_peaks_was_reached():
    op, eager, read, failed = gpu.lines(measured(), LIMITS)
    shape = Shape(B=1 << 20)
    assert op["of bandwidth"] == pytest.approx(work.bytes_moved(shape) / 2e-3 / 2e12)
    assert op["of FMA peak"] == pytest.approx(2 * work.multiply_adds(shape) / 2e-3 / 10e12)
    assert eager["over op"] == 4.0
    assert read["of FMA peak"] is None
    text = gpu.tables([measured()], LIMITS)
    assert "### prompt_loss, n = 50, B = 1,048,576" in text
    assert "| query row | 8 ms (±0 %) | 8 ms | 296 | 15% |" in text
    assert "| graphed query row | RuntimeError: no graph |" in text
    assert failed["contender"] == "graphed query row"
    assert work.bytes_moved(Shape("sampled_loss")) == 0


def test_the_report_says_what_failed():
    assert gpu_check.complaints(PASSED, OTHERS, [measured()]) == []
    text = gpu_check.markdown(MACHINE, LIMITS, [PASSED, OTHERS], [measured()])
    for part in (
        "# fastlin on Test GPU",
        "All tests passed",
        "driver: 580.65",
        "- gpu: 5 passed, 0 skipped",
        "| op | 2 ms",
    ):
        assert part in text
    no_op = measured(read=(1e-3,))
    no_op.states["cold"].failures["op"] = "WrongResultError: dW is off"
    bad = Outcome("gpu", 0, 2, ("tests.cuda.test_gpu::test_x",), 1.0)
    assert gpu_check.complaints(bad, OTHERS, [no_op]) == [
        "failed: tests.cuda.test_gpu::test_x",
        "no test of the GPU ran",
        "2 tests of the GPU were skipped",
        "loss: op: WrongResultError: dW is off",
    ]
    assert "- no test of the GPU ran" in gpu_check.markdown(MACHINE, LIMITS, [bad, OTHERS], [no_op])


def test_the_record_of_pytest_is_read(tmp_path):
    record = tmp_path / "tests.xml"
    record.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/>'
        '<testcase classname="a" name="c" time="0.5"><failure message="x"/></testcase>'
        '<testcase classname="a" name="d"><skipped/></testcase>'
        '<testcase classname="a" name="e"><error/></testcase></testsuite></testsuites>'
    )
    assert gpu_check.read_tests("gpu", record) == Outcome("gpu", 1, 1, ("a::c", "a::e"), 2.0)


def test_pytest_is_run_and_a_crash_is_a_failure(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text("def test_one(): pass\n")
    found = gpu_check.run_tests("one", [str(test), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)], tmp_path)
    assert (found.passed, found.failures) == (1, ())
    assert gpu_check.run_tests("none", ["--no-such-option"], tmp_path).failures == ("pytest did not finish",)


def test_the_check_runs_tests_then_measures_and_writes_both_reports(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(gpu_machine, "why_not", lambda backend: None)
    monkeypatch.setattr(gpu_check, "run_tests", lambda name, arguments, folder: ran.append((name, arguments)) or PASSED)
    monkeypatch.setattr(gpu, "measure", lambda backend, names, quick: (MACHINE, LIMITS, [measured()]))
    out = tmp_path / "a" / "report"
    assert gpu_check.main(["--out", str(out)]) == 0
    assert ran[0] == ("gpu", ["-m", "gpu"])
    assert ran[1][0] == "others"
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.md"]
    record = json.loads((out / "report.json").read_text())
    assert record["machine"]["device"] == "Test GPU"
    assert record["complaints"] == []
    assert f"the report is in {out}" in capsys.readouterr().out


def test_on_amd_it_is_triton_that_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_machine.why_not("triton").startswith("torch finds no GPU")
    assert gpu_machine.published(SimpleNamespace(clock_rate=1, memory_clock_rate=1)) == (None, None)
    asked = []
    monkeypatch.setattr(gpu_machine, "why_not", lambda backend: asked.append(backend))
    monkeypatch.setattr(gpu_check, "run_tests", lambda name, arguments, folder: asked.append(arguments) or PASSED)
    monkeypatch.setattr(gpu, "measure", lambda backend, names, quick: (MACHINE, LIMITS, [measured()]))
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert asked[:2] == ["triton", ["-m", "gpu", "tests/triton"]]


def test_peaks_are_those_of_the_clocks():
    a100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    assert gpu_machine.published(a100) == (None, None)
    a100.clock_rate, a100.memory_clock_rate, a100.memory_bus_width = 1_410_000, 1_593_000, 5120
    flops, bandwidth = gpu_machine.published(a100)
    assert flops == pytest.approx(19.5e12, rel=1e-3)
    assert bandwidth == pytest.approx(2.039e12, rel=1e-3)


def test_events_give_the_time_of_one_call(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(calls)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 3.0 * (end.at - self.at)  # ms

    calls = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert gpu_machine.event_clock(lambda: calls.append(1), 4) == pytest.approx(3e-3)
    assert len(calls) == 4
