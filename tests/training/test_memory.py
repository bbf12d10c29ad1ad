"""Trials in chunks: the same results, within a budget of memory."""

import pytest
import torch
from training.test_team import PLANS, sums
from training_plans import MIX, plan_of
from training_runs import assert_same, same

import fastlin as fl
from fastlin.training.memory import DEFAULT, LANES, chunks, size_in_bytes


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 50, 60, 1000])
@pytest.mark.parametrize("size", [None, 1, 7, 16, 32, 2000])
def test_chunks_are_all_trials_in_order(count, size):
    parts = chunks(count, size)
    assert [trial for part in parts for trial in part] == list(range(count))
    assert all(len(part) == (size or count) for part in parts[:-1])
    assert len(parts[-1]) < (size or count) + LANES
    assert len(parts) == 1 or size < LANES or len(parts[-1]) >= LANES


@pytest.mark.parametrize("trials", [50, 60])
@pytest.mark.parametrize("name", ["tasks at random", "weights", "own data", "stack", "two terms", "side by side"])
def test_chunks_have_the_same_bits(name, trials, instruction_set):
    plan = plan_of(**{"batch": 90, "dtype": torch.float32, **PLANS[name], "trials": trials})
    for phase in range(len(plan.regime.phases)):
        assert same(sums(plan, phase, 0, seeds_at_once=16)[0], sums(plan, phase, 0)[0])


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("name", PLANS)
def test_chunks_in_eager_torch(name, size):
    """To rounding: torch may multiply matrices of another size in another order."""
    plan = plan_of(**{"batch": 20, **PLANS[name], "trials": 5})
    phase = len(plan.regime.phases) - 1
    found, whole = (sums(plan, phase, 0, seeds_at_once=seeds)[0] for seeds in (size, None))
    assert torch.allclose(found, whole, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:train. the sampled risk")
@pytest.mark.parametrize("options", [{}, {"model": "stack", "layers": 2, "dtype": "float64"}], ids=["full", "stack"])
def test_a_run_within_a_budget_is_the_same_run(options, monkeypatch, tmp_path):
    """In one process on the kernels, its sampled risk too."""
    monkeypatch.setattr("fastlin.experiments.plan._EVALUATION_BATCH", 64)
    sizes = {"steps": 6, "batch": 64, "trials": 70, "records": 3, **options}
    whole = fl.train(MIX, "joint", 4, **sizes, out=tmp_path / "whole")
    seen = []
    place = "fastlin.training.objective.chunks"
    monkeypatch.setattr(place, lambda count, size: seen.append(size) or chunks(count, size))
    # Kernels take 24 MiB, all trials hold 0.1 or 0.4 MB throughout, and what is left serves 50 at once.
    budget = 25_950_000 if options else 25_550_000
    run = fl.train(MIX, "joint", 4, **sizes, memory=budget, out=tmp_path / "run")
    assert seen
    assert LANES <= seen[0] < 70
    assert_same(run, whole)


@pytest.mark.parametrize(
    ("given", "bytes_"), [(None, DEFAULT), (1000, 1000), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("2kB", 2048)]
)
def test_sizes(given, bytes_):
    assert size_in_bytes(given) == bytes_


@pytest.mark.parametrize("given", ["much", "-1G", True, 1.5, "1E9"])
def test_what_is_no_size(given):
    with pytest.raises(ValueError, match=r"memory: got .*, wants bytes, or a text such as '500M' or '4G'"):
        fl.train(MIX, "plain", 3, steps=1, memory=given)


def test_a_budget_that_one_trial_exceeds():
    with pytest.raises(
        ValueError, match=r"memory: got 1048576 bytes, wants \d+ or more for 2 trials, 1 at once .* shards=S"
    ):
        fl.train(MIX, "plain", 3, steps=1, trials=2, batch=4096, memory="1M", backend="eager")
