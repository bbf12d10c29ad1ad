"""Initialisation: depends on the seed and the trial alone, with the sizes of each group."""

import itertools

import pytest
import torch
from support.model_cases import MODELS, SOFTMAX, build

from fastlin.models import Start


@pytest.mark.parametrize("name", [*MODELS, *SOFTMAX])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_start_of_a_trial_depends_on_the_seed_and_the_trial_alone(name, distribution):
    start = Start(distribution, distribution, 0.5, 0.5, 0.5, 1.0)
    one, three, other = (build(name, R=R, H=2, seed=seed, start=start) for R, seed in ((1, 1), (3, 1), (3, 2)))
    for first, all_three, another in zip(one.parameters(), three.parameters(), other.parameters(), strict=True):
        assert torch.equal(first[0], all_three[0])
        for a, b in itertools.combinations(all_three, 2):
            assert not (a == b).any()
        assert not (all_three == another).any()


@pytest.mark.parametrize("name", [*MODELS, *SOFTMAX])
def test_start_statistics(name):
    """Each group has its own standard deviation or bound, around the readout."""
    sizes = {"attention": 0.3, "heads": 0.7, "prompts": 1.5}
    for distribution, readout in (("normal", 0.0), ("uniform", 0.0), ("normal", 2.0)):
        model = build(
            name,
            R=2000,
            start=Start(distribution, distribution, **sizes, values=0.9, readout=readout),
            dtype=torch.float32,
        )
        assert {raw for raws in model.groups.values() for raw in raws} >= {key for key, _ in model.named_parameters()}
        for group in sizes:
            for parameter in model.group(group):
                is_value = any(parameter is getattr(model, name, None) for name in model.value_matrices)
                raw, size = parameter.detach(), 0.9 if is_value else sizes[group]
                if distribution == "uniform":
                    assert size * 0.99 < float(raw.max()) <= size
                    assert -size <= float(raw.min()) < -0.99 * size
                    assert float(raw.std()) == pytest.approx(size / 3**0.5, rel=0.05)
                centre = raw.mean(0)
                noise = 6 * size / 2000**0.5
                assert float((raw - centre).std()) == pytest.approx(
                    size / (3**0.5 if distribution == "uniform" else 1), rel=0.05
                )
                wanted = torch.zeros_like(centre)
                if readout and group == "heads":
                    wanted[..., -1] = readout
                elif readout and is_value:
                    wanted += readout * torch.eye(4)
                assert float((centre - wanted).abs().max()) < noise


def test_groups_of_the_reduced_model():
    assert build("reduced").group("heads") == []
    assert [raw.shape for raw in build("reduced, task heads").group("heads")] == [(2, 2, 4)]
