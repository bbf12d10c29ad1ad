"""First calls and memory are those of a fresh process."""

import pytest
import torch

from fastlin.bench import probe as probes
from fastlin.bench.cases import CaseShape
from fastlin.bench.probe import Probe


@pytest.fixture(scope="module")
def probe():
    with Probe() as made:
        yield made


def test_memory_is_what_the_call_adds(probe):
    B, n, m = 60_000, 20, 11
    found = probe.measure(CaseShape(B=B, n=n, m=m), "fastlin:eager", "float32", 1)
    tokens = 4 * B * n * m
    assert 0.05 * tokens < found["memory"] < 10 * tokens
    assert found["first_call"] > 0


def test_what_a_fork_answers():
    request = {"shape": {"B": 2000, "n": 50, "m": 5}, "label": "eager", "dtype": "float32", "threads": 1}
    answer = probes.measure({**request, "threads": torch.get_num_threads()})
    assert answer["first_call"] > 0
    assert answer["memory"] >= 0


def test_where_the_system_does_not_tell_there_is_no_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "_CLEAR", tmp_path / "no" / "such")
    assert probes.growth(tuple) is None


def test_every_request_has_a_process_of_its_own(probe):
    """The reference forms all scores, (n + 2)^2 a sequence; a process that had done so would not grow again."""
    B, n = 2000, 50
    request = (CaseShape(B=B, n=n, m=5), "reference", "float64", 1)
    scores = 8 * B * (n + 2) ** 2
    assert [probe.measure(*request)["memory"] > 0.5 * scores for _ in range(2)] == [True, True]


def test_a_process_that_fails_says_why_and_the_next_one_runs(probe):
    small = CaseShape(B=4, n=3, m=3)
    with pytest.raises(RuntimeError, match=r"the measuring process failed: .*fpga"):
        probe.measure(small, "fastlin:fpga", "float32", 1)
    assert probe.measure(small, "eager", "float32", 1)["first_call"] > 0


def test_a_process_that_is_gone_is_an_error():
    with Probe() as made:
        made._process.kill()
        made._process.wait()
        with pytest.raises(RuntimeError, match="the measuring process failed: it ended"):
            made.measure(CaseShape(B=4, n=3, m=3), "eager", "float32", 1)
