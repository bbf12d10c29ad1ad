import pytest
import torch

import fastlin as fl
from fastlin.data.strata import LONGEST_PERIOD, balanced_tasks

DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("weights", "period"),
    [
        ([1.0], 1),
        ([0.5, 0.5], 2),
        ([0.3, 0.7], 10),
        ([0.0, 1.0], 1),
        ([0.25, 0.5, 0.25], 4),
        ([1 / 3, 1 / 3, 1 / 3], 3),
        ([0.05, 0.15, 0.35, 0.45], 20),
        ([0.9, 0.05, 0.05], 20),
        ([0.01] * 100, 100),
    ],
)
def test_shares_of_every_prefix(weights, period):
    """Counts stay within one of the share after every sequence, so they meet a whole share exactly."""
    order = balanced_tasks(torch.tensor(weights, dtype=DOUBLE))
    assert len(order) == period
    repeated = order.repeat(3)
    counts = torch.nn.functional.one_hot(repeated, len(weights)).cumsum(0)
    shares = torch.arange(1, len(repeated) + 1)[:, None] * torch.tensor(weights, dtype=DOUBLE)
    assert ((counts - shares).abs() < 1 - 1e-9).all()


def test_weights_without_a_small_denominator():
    weights = torch.tensor([1 / torch.pi, 1 - 1 / torch.pi], dtype=DOUBLE)
    order = balanced_tasks(weights)
    assert len(order) == LONGEST_PERIOD
    assert abs(float((order == 0).double().mean()) - float(weights[0])) < 1 / LONGEST_PERIOD


def test_stratified_mixture():
    means = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    covariances = torch.eye(2).expand(3, 2, 2)
    mix = fl.TaskMixture(means, covariances, [0.2, 0.3, 0.5], stratify=True)
    assert torch.bincount(mix.sample(1000, 1)[3]).tolist() == [200, 300, 500]
    whole = mix.sample_gram(50, 2, offset=2**40 + 3)[3]
    pieces = [mix.sample(25, 2, offset=2**40 + 3 + start)[3] for start in (0, 25)]
    assert torch.equal(torch.cat(pieces), whole)
    random = fl.TaskMixture(means, covariances, [0.2, 0.3, 0.5])
    assert torch.bincount(random.sample(1000, 1)[3]).tolist() != [200, 300, 500]
    # Only the task differs from an unstratified mixture: everything else has separate draws.
    same = random.sample(1000, 1)[3] == mix.sample(1000, 1)[3]
    for a, b in zip(random.sample(1000, 1), mix.sample(1000, 1), strict=True):
        assert torch.equal(a[same], b[same])


@pytest.mark.parametrize("was", [False, True])
@pytest.mark.parametrize("stratify", [False, True])
def test_a_reweighted_mixture_draws_as_one_made_with_these_weights(was, stratify):
    means, covariances = torch.eye(3), torch.eye(3).expand(3, 3, 3)
    changed = fl.TaskMixture(means, covariances, [0.2, 0.3, 0.5], stratify=was).reweighted([0.5, 0.5, 0.0], stratify)
    made = fl.TaskMixture(means, covariances, [0.5, 0.5, 0.0], stratify=stratify)
    assert torch.equal(changed.sample(40, 2)[3], made.sample(40, 2)[3])
    assert torch.equal(changed.sample_gram(40, 2)[3], made.sample_gram(40, 2)[3])
