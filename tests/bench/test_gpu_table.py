"""The table of the GPU and `make gpu-check`, as far as they need none: refusal, rounds, verdicts and the report."""

import json
from types import SimpleNamespace

import pytest
import torch

import fastlin as fl
from benchmarks import gpu_check
from benchmarks.gpu_check import Outcome
from fastlin import cli, plots
from fastlin.bench import cases, gpu, rows, run, table
from fastlin.bench.cases import CaseShape
from fastlin.bench.labels import parse

LIMITS = gpu.GpuLimits(1, 10e12, "clock x FMA units", 2e12, "float32", "memory clock x bus width", 8e12, 1.8e12)
PASSED, OTHERS = Outcome("gpu", 5, 0, ()), Outcome("others", 9, 3, ())
SHAPE = CaseShape(B=32, n=6, m=5)


class FakeGpu(gpu.GpuDevice):
    """All that is not the GPU's, on the CPU, with a clock that says 1 ms a call."""

    torch = "cpu"

    def __init__(self):
        self._limits, self.clocked, self.colds = LIMITS, [], []
        self.make_cold = lambda: self.colds.append(1)

    def stopwatch(self, call, calls):
        call()
        self.clocked.append(calls)
        return 1e-3 * calls

    def describe(self, threads):
        versions = {"torch": "2.13"}
        return {"cpu": "Test GPU", "cores": 4, "instruction_set": "sm_80", "load": 0.0, "versions": versions}


@pytest.fixture(scope="module")
def device():
    return FakeGpu()


@pytest.fixture(scope="module")
def record(device):
    """A row with real contenders, and two that cannot run here."""
    labels = ("fastlin", "fastlin@graph", "fastlin:cuda", "eager", "read")
    row = rows.Row("loss", SHAPE, labels, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        return run.run([row], run.QUICK, command="fastlin bench --device cuda", device=device)


@pytest.mark.parametrize("main", [lambda: cli.main(["bench", "--device", "cuda"]), lambda: gpu_check.main([])])
def test_without_a_gpu_it_is_said_and_nothing_is_written(main, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main() == 2
    assert "is built without CUDA; install a CUDA build of torch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_why_a_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.why_not().startswith("torch finds no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backends = {"cuda": {"reason": "no nvcc"}, "triton": {"reason": None}}
    monkeypatch.setattr(gpu._info, "info", lambda: {"backends": backends})
    assert gpu.why_not() == "backend 'cuda' cannot serve: no nvcc"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu.why_not() is None
    assert gpu.published(SimpleNamespace(clock_rate=1, memory_clock_rate=1)) == (None, None)


def test_rows_are_run_cold_and_warm(record, device):
    assert device.clocked == [1] * 6 + [20] * 6  # three contenders, two rounds
    assert len(device.colds) == 6
    (case,) = record["cases"]
    ours, eager, read = case["contenders"]
    assert (ours["label"], ours["median"], ours["warm"], ours["times_fastlin"]) == ("fastlin", 1e-3, 20e-3, 1.0)
    assert ours["gbs"] == pytest.approx(32 * (4 * (6 * 5 + 5 + 1) + 8) / 1e-3 / 1e9)
    assert ours["of_bandwidth"] == pytest.approx(cases.bytes_moved(SHAPE) / 1e-3 / 2e12)
    assert eager["of_peak"] == pytest.approx(2 * cases.multiply_adds(SHAPE) / 1e-3 / 10e12)
    assert 0 < ours["error"] < 1e-5
    assert (read["label"], read["of_peak"]) == ("read", None)
    assert set(case["skipped"]) == {"fastlin@graph", "fastlin:cuda"}
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(plots.bench_figures(record)) == {"speedup", "speedup-all", "roofline"}


def test_the_table_has_the_warm_column(record):
    text = table.as_text({**record, "device": "cuda"})
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "read    warm\n" in text
    assert "  eager                1 ms   0%     1" in text
    assert "20 calls in a row" in " ".join(text.split())


def test_the_rows_of_the_gpu_have_an_op_and_its_other_backends():
    table_of_gpu = rows.every(2, "cuda")
    assert {row.device for row in table_of_gpu} == {"cuda"}
    assert all({"fastlin", "fastlin:triton"} <= set(row.labels) for row in table_of_gpu)
    assert not any(parse(label).kind in ("jax", "numpy") for row in table_of_gpu for label in row.labels)
    (made,) = rows.chosen(["prompt_loss"], {"n": (5,)}, ["float32"], [2], ["auto"], None, "cuda")
    assert (made.device, "jax" in made.labels, "compile" in made.labels) == ("cuda", False, True)


def test_the_report_says_what_failed(record):
    missing = {"cases": [{**record["cases"][0], "skipped": {"fastlin:triton": "cannot serve: no Triton"}}]}
    assert gpu_check.complaints(PASSED, OTHERS, missing) == []
    bad = Outcome("gpu", 0, 2, ("tests.cuda.test_gpu::test_x",))
    failing = {**record["cases"][0], "wrong": {"eager": "dW is off"}, "skipped": {"fastlin@graph": "RuntimeError: no"}}
    why = gpu_check.complaints(bad, OTHERS, {"cases": [failing]})
    assert why == [
        "failed: tests.cuda.test_gpu::test_x",
        "no test of the GPU ran",
        "2 tests of the GPU were skipped",
        "loss: eager: dW is off",
        "loss: fastlin@graph: RuntimeError: no",
    ]
    text = gpu_check.report(why, [bad, OTHERS], record, "yes: A100")
    for part in (
        "# fastlin on Test GPU",
        "CUDA kernels: yes: A100",
        "- no test of the GPU ran",
        "- others: 9 passed, 3 skipped, 0 failed",
        "loss:",
    ):
        assert part in text
    assert "All tests passed" in gpu_check.report([], [PASSED, OTHERS], record, "")


def test_the_record_of_pytest_is_read(tmp_path):
    record = tmp_path / "tests.xml"
    record.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/>'
        '<testcase classname="a" name="c" time="0.5"><failure message="x"/></testcase>'
        '<testcase classname="a" name="d"><skipped/></testcase>'
        '<testcase classname="a" name="e"><error/></testcase></testsuite></testsuites>'
    )
    assert gpu_check.read_tests("gpu", record) == Outcome("gpu", 1, 1, ("a::c", "a::e"))
    assert gpu_check.run_tests("none", ["--no-such-option"], tmp_path).failures == ("pytest did not finish",)


@pytest.mark.parametrize(("hip", "arguments"), [(None, ["-m", "gpu"]), ("6.4", ["-m", "gpu", "tests/triton"])])
def test_the_check_runs_tests_then_measures_and_writes(record, tmp_path, monkeypatch, capsys, hip, arguments):
    ran, out = [], tmp_path / "a" / "report"

    def bench(words):
        assert words == ["bench", "--device", "cuda", "--out", str(out)]
        clean = {**record["cases"][0], "skipped": {}}
        (out / "bench.json").write_text(json.dumps({**record, "cases": [clean]}))

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(gpu_check, "run_tests", lambda name, arguments, folder: ran.append((name, arguments)) or PASSED)
    monkeypatch.setattr(gpu_check.cli, "main", bench)
    assert gpu_check.main(["--out", str(out)]) == 0
    assert ran[0] == ("gpu", arguments)
    assert ran[1][0] == "others"
    kernels = f"CUDA kernels: {cli.cuda_state(fl.info()['cuda'])}\n"
    written, printed = (out / "report.md").read_text(), capsys.readouterr().out
    assert "All tests passed" in written
    assert kernels in written
    assert printed.startswith(kernels)
    assert f"the report is in {out}" in printed


def test_peaks_are_those_of_the_clocks():
    a100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    assert gpu.published(a100) == (None, None)
    a100.clock_rate, a100.memory_clock_rate, a100.memory_bus_width = 1_410_000, 1_593_000, 5120
    flops, bandwidth = gpu.published(a100)
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
    assert gpu.event_clock(lambda: calls.append(1), 4) == pytest.approx(3e-3)
    assert len(calls) == 4
