"""Absurd requests: the right answer, or an error that names what is wrong."""

import math

import pytest
import torch

import fastlin as fl

MIX = fl.TaskMixture([[1.0, 0.0], [0.0, 1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
ONE = fl.TaskMixture([[1.0]], [[[1.0]]], [1.0])
MANY = 10**9


def mixture(means=((1.0, 0.0),), covariances=(((1.0, 0.0), (0.0, 1.0)),), weights=(1.0,), **options):
    return fl.TaskMixture(means, covariances, weights, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixture(torch.zeros(1, 1).expand(MANY, 1)), "means: got 1000000000 numbers, wants at most 268435456"),
        (
            lambda: mixture(torch.zeros(1, 2), torch.zeros(1, 1, 1).expand(MANY, 2, 2)),
            "covariances: got 4000000000 num",
        ),
        (lambda: mixture(weights=torch.zeros(1).expand(MANY)), "weights: got 1000000000 numbers"),
        (lambda: fl.SphereTasks(MANY), "d: got 1000000000, wants at most 16384"),
        (lambda: mixture(covariances=[[[1.0, 1.0], [0.0, 1.0]]]), r"covariances\[0\]: differs from its transpose by 1"),
        (lambda: mixture(covariances=[[[1.0, 0.0], [0.0, -1.0]]]), r"covariances\[0\]: has the eigenvalue -1"),
        (lambda: mixture(((1.0,), (0.0,)), torch.ones(2, 1, 1), (1.5, -0.5)), "weights: got .* wants numbers >= 0"),
        (lambda: mixture(((1.0,), (0.0,)), torch.ones(2, 1, 1), (0.5, 0.6)), "weights: got .* of sum 1.1"),
        (lambda: mixture(((math.nan, 0.0),)), "means: got values that are not finite"),
        (lambda: mixture(noise_std=-1.0), "noise_std: got -1.0, wants a finite number >= 0"),
        (lambda: mixture(torch.zeros(0, 2)), r"means: got shape \(0, 2\)"),
        (lambda: mixture(torch.zeros(1, 0)), r"means: got shape \(1, 0\)"),
        (lambda: MIX.sample(1, 10**12), "n: needs 2000000000000 draws of one kind"),
    ],
)
def test_sources(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, "n: got -1"),
        ({"n": 1 << 40}, "n: got 1099511627776"),
        ({"trials": 0}, "trials: got 0"),
        ({"trials": 1 << 31}, "trials: got 2147483648"),
        ({"trials": MANY, "attention_heads": 10**6}, "trials 1000000000, .*: the model does not fit in memory"),
        (
            {"trials": 10**6, "layers": MANY, "model": "stack"},
            "layers 1000000000, .*: the model does not fit in memory",
        ),
        ({"trials": 10**6, "prompt_tokens": MANY, "regime": "joint"}, "prompt_tokens 1000000000: the model does not"),
        ({"batch": 0}, "batch: got 0"),
        ({"batch": 1 << 40}, "batch: got 1099511627776"),
        ({"steps": 0}, "steps: got 0"),
        ({"lr": math.nan}, "lr: got nan"),
        ({"seed": 1 << 64}, "seed: got 18446744073709551616"),
        ({"records": 0}, "records: got 0"),
        ({"checkpoint_seconds": math.nan}, "checkpoint_seconds: got nan"),
    ],
)
def test_training(options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def train(mix=MIX, regime="plain", n=3, **options):
    return fl.train(mix, regime, n, **{"steps": 2, "batch": 8, **options})


@pytest.mark.parametrize(
    ("mix", "n"),
    [
        (MIX, 0),
        (ONE, 0),
        (ONE, 3),
        (MIX, 10**12),
        (mixture(covariances=[[[1.0, 1.0], [1.0, 1.0]]]), 3),
        (mixture(covariances=torch.zeros(1, 2, 2)), 3),
        (mixture(feature_cov=[[0.0, 0.0], [0.0, 1.0]]), 3),
        (mixture(((1.0,), (0.0,)), torch.ones(2, 1, 1), (1.0, 0.0)), 3),
    ],
    ids=["n=0", "d=1, n=0", "d=1", "n=10^12", "singular", "no variance", "singular features", "weight of zero"],
)
def test_edges_are_trained(mix, n):
    """One layer of one task is exact: the risk after a step is that of the closed form for its parameters, finite."""
    run = train(mix, "joint", n)
    assert bool(torch.isfinite(run.risk).all())
    # Nothing is learned from no tokens but what the prompt says.
    assert run.theory is not None
    assert float(run.risk.min()) >= float(run.theory) * (1 - 1e-6)


def test_no_context_is_no_information():
    """At n = 0 without a prompt every prediction is 0: the risk is E[y²]."""
    run = train(MIX, "plain", 0)
    assert float(run.risk[0]) == pytest.approx(fl.theory.normaliser(MIX), rel=1e-12)


def test_strides_beyond_32_bits(tmp_path):
    """A file with a hole of 8 GiB in it, as tokens: nothing of it is copied."""
    stride = (1 << 31) + 8
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.truncate(4 * (stride + 64))
    storage = torch.from_file(str(path), shared=True, size=stride + 64, dtype=torch.float32)
    z = storage.as_strided((2, 3, 4), (stride, 4, 1))
    z.copy_(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    q, y, W, v = torch.ones(2, 4), torch.ones(2), torch.eye(4), torch.ones(4)
    for backend in ("auto", "eager"):
        loss, _ = fl.prompt_loss(z, q, y, None, None, W, v, backend=backend)
        wanted, _ = fl.prompt_loss(z.contiguous(), q, y, None, None, W, v, backend=backend)
        assert torch.equal(loss, wanted)
    assert torch.equal(fl.gram(z), fl.gram(z.contiguous()))


def test_shapes_beyond_32_bits():
    """Tensors without memory: shapes alone."""
    z, q = torch.empty(1 << 20, 1 << 20, 8, device="meta"), torch.empty(1 << 20, 8, device="meta")
    assert fl.gram(z).shape == (1 << 20, 8, 8)
    W, v = torch.empty(8, 8, device="meta"), torch.empty(8, device="meta")
    assert fl.predict(z, q, None, None, W, v).shape == (1 << 20,)
