"""Task sources: sequences from documented draws, moments, and errors for wrong arguments."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.op_cases import assert_close

import fastlin as fl
from fastlin.data import philox, random
from fastlin.data.layout import BLOCKS_PER_SECTION
from fastlin.data.sources import TaskMixture

DOUBLE = torch.float64


def covariance(d, seed):
    root = torch.randn(d, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / d + 0.1 * torch.eye(d, dtype=DOUBLE)


def mixture(d=3, K=2, **options):
    means = torch.arange(K * d, dtype=DOUBLE).view(K, d) - d
    weights = torch.arange(1, K + 1, dtype=DOUBLE)
    return TaskMixture(means, torch.stack([covariance(d, k) for k in range(K)]), weights / weights.sum(), **options)


def by_hand(mix, i, n, seed, step, stream):
    """One sequence, number by number, from the documented sections."""
    at = {"seed": seed, "step": step, "stream": stream, "offset": i}

    def normals(section, count):
        return philox.normals(1, count, **at, block=section * BLOCKS_PER_SECTION)[0]

    u = philox.uniforms(1, 1, **at)[0, 0]
    task, below = 0, 0.0
    while task < mix.K - 1 and u >= below + float(mix.weights[task]):
        below += float(mix.weights[task])
        task += 1
    beta = mix.means[task] + torch.linalg.cholesky(mix.covariances[task]) @ torch.tensor(normals(1, mix.d))
    root = torch.linalg.cholesky(mix.feature_cov)
    query = normals(2, mix.d + 1)
    x = root @ torch.tensor(query[: mix.d])
    X = torch.tensor(normals(3, n * mix.d)).view(n, mix.d) @ root.T
    Y = X @ beta + mix.noise_std * torch.tensor(normals(4, n))
    ones = torch.ones(n, 1, dtype=DOUBLE) if mix.bias else torch.ones(n, 0, dtype=DOUBLE)
    z = torch.cat([ones, X, Y[:, None]], 1)
    q = torch.cat([ones.new_ones(int(mix.bias)), x, x.new_zeros(1)])
    return z, q, x @ beta + mix.noise_std * query[mix.d], task


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise_std", [0.0, 0.7])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_sequences_by_hand(n, noise_std, bias):
    mix = mixture(K=3, noise_std=noise_std, feature_cov=covariance(3, 9), bias=bias)
    z, q, y, task = mix.sample(20, n, seed=5, step=6, stream=7, offset=2**40, dtype=DOUBLE)
    assert z.shape == (20, n, 4 + bias)
    assert task.dtype == torch.int64
    for i in range(20):
        expected = by_hand(mix, 2**40 + i, n, 5, 6, 7)
        for found, wanted in zip((z[i], q[i], y[i]), expected[:3], strict=True):
            assert torch.allclose(found, torch.as_tensor(wanted, dtype=DOUBLE), rtol=1e-12, atol=1e-12)
        assert int(task[i]) == expected[3]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_pieces_have_the_same_bits(dtype):
    mix = mixture(d=5, K=3, noise_std=0.3, feature_cov=covariance(5, 1))
    whole = mix.sample(101, 7, seed=1, step=2, dtype=dtype)
    for cuts in ([0, 101], [0, 1, 2, 50, 101], [0, 64, 65, 101]):
        pieces = [
            mix.sample(stop - start, 7, seed=1, step=2, offset=start, dtype=dtype) for start, stop in pairwise(cuts)
        ]
        for whole_part, *parts in zip(whole, *pieces, strict=True):
            assert torch.equal(torch.cat(parts), whole_part)


def test_without_the_extension(monkeypatch):
    """Numpy and the kernels agree up to the rounding of log, sin, cos and sqrt."""
    mix = mixture(noise_std=0.5)
    compiled = mix.sample(50, 4, dtype=DOUBLE)
    monkeypatch.setattr(random._extension, "extension", lambda: None)
    for a, b in zip(compiled, mix.sample(50, 4, dtype=DOUBLE), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-13, atol=1e-13)


def test_moments():
    """Frequencies, means and second moments of 100,000 sequences, within five standard errors."""
    mix, B = mixture(noise_std=0.5, feature_cov=covariance(3, 4)), 100_000
    z, q, y, task = mix.sample(B, 1, seed=3, dtype=DOUBLE)
    share = task.double().mean()
    assert abs(share - mix.weights[1]) < 5 * (mix.weights[0] * mix.weights[1] / B) ** 0.5
    x = z[:, 0, :3]
    error = (x[:, :, None] * x[:, None]).std(0) / B**0.5
    assert (((x[:, :, None] * x[:, None]).mean(0) - mix.feature_cov).abs() < 5 * error).all()
    for k in range(2):
        second = mix.covariances[k] + torch.outer(mix.means[k], mix.means[k])
        expected = float((mix.feature_cov * second).sum()) + 0.25
        squares = torch.cat([y[task == k], z[task == k, 0, 3]]).square()
        assert abs(squares.mean() - expected) < 5 * squares.std() / len(squares) ** 0.5
        moment = q[task == k][:, :3] * y[task == k, None]
        expected = mix.feature_cov @ mix.means[k]
        assert ((moment.mean(0) - expected).abs() < 5 * moment.std(0) / len(moment) ** 0.5).all()


def test_singular_covariances():
    flat = torch.zeros(1, 2, 2, dtype=DOUBLE)
    mix = TaskMixture([[1.0, 2.0]], flat, [1.0], feature_cov=[[1.0, 1.0], [1.0, 1.0]])
    z, _, _, task = mix.sample(10, 3, dtype=DOUBLE)
    assert torch.allclose(z[..., 0].abs(), z[..., 1].abs())
    assert torch.allclose(z[..., 2], z[..., 0] + 2 * z[..., 1])
    assert (task == 0).all()


def test_dtype_and_device():
    mix = mixture()
    assert mix.sample(2, 2)[0].dtype == torch.get_default_dtype()
    double, single = mix.sample(4, 3, dtype=DOUBLE), mix.sample(4, 3, dtype=torch.float32)
    # A normal is right to 7 spacings of float32, and each of the d sums of d + 1 terms adds one for a term.
    assert_close([t.double() for t in single[:3]], double[:3], (7 + 2 * (mix.d + 1)) * 2.0**-23)
    assert torch.equal(single[3], double[3])
    assert mix.sample(2, 2, device="meta")[3].device.type == "meta"


EYE = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("covariances", "written_out"),
    [
        (1.0, [EYE, EYE]),
        (2, [[[2.0, 0.0], [0.0, 2.0]]] * 2),
        ([1, 0.5], [EYE, [[0.5, 0.0], [0.0, 0.5]]]),
        (torch.tensor([1, 0]), [EYE, [[0.0, 0.0]] * 2]),
        ([[1, 2], [3, 4]], [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 4.0]]]),
        ([1.0, [3, 4]], [EYE, [[3.0, 0.0], [0.0, 4.0]]]),
        (([3.0, 1.0], [[2, 1], [1, 2]]), [[[3.0, 0.0], [0.0, 1.0]], [[2.0, 1.0], [1.0, 2.0]]]),
        ([torch.eye(2), np.array([3.0, 4.0])], [EYE, [[3.0, 0.0], [0.0, 4.0]]]),
    ],
)
def test_short_covariances(covariances, written_out):
    """For all tasks a number, or for each a number, a diagonal or a matrix."""
    mix = TaskMixture([[1.0, 2.0], [0.0, 1.0]], covariances)
    assert mix.covariances.tolist() == written_out
    assert mix.weights.tolist() == [0.5, 0.5]
    same = TaskMixture([[1.0, 2.0], [0.0, 1.0]], written_out, [0.5, 0.5])
    assert torch.equal(mix.sample(20, 3)[0], same.sample(20, 3)[0])


def test_short_covariances_of_many_tasks():
    """Matrices beyond the limit of an array are refused before they are made."""
    with pytest.raises(ValueError, match=r"^covariances: got 10000000000 numbers as matrices, wants at most 268435456"):
        TaskMixture(torch.zeros(1_000_000, 100))


def test_an_array_that_may_be_one_matrix_is_refused():
    with pytest.raises(
        ValueError, match=r"^covariances: got shape \(2, 2\), one matrix or the diagonals of 2 tasks; wants"
    ):
        TaskMixture([[1.0, 2.0], [0.0, 1.0]], torch.eye(2))
    assert TaskMixture(torch.zeros(3, 2), torch.ones(3, 2)).covariances.shape == (3, 2, 2)


def test_means_without_a_vector_are_refused():
    with pytest.raises(ValueError, match=r"^means: got 2 entries without a vector, wants \(K, d\)"):
        TaskMixture([torch.tensor(1.0), torch.tensor(-1.0)])


def test_other_short_forms():
    mix = TaskMixture([2, [1.0, 0.0, -1.0]], feature_cov=[1.0, 4.0, 9.0])
    assert mix.means.tolist() == [[2.0, 2.0, 2.0], [1.0, 0.0, -1.0]]
    assert torch.equal(mix.covariances, torch.eye(3, dtype=DOUBLE).expand(2, 3, 3))
    assert torch.equal(mix.feature_cov, torch.tensor([1.0, 4.0, 9.0], dtype=DOUBLE).diag())
    assert torch.equal(mix.reweighted(None).weights, mix.weights)
    assert torch.equal(fl.SphereTasks(2, feature_cov=2).feature_cov, 2 * torch.eye(2, dtype=DOUBLE))
    assert TaskMixture([torch.ones(2), torch.zeros(2)]).means.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": [[1.0, 2.0], [1.0]]}, r"means\[1\]: got shape \(1,\), wants \(2,\)"),
        ({"covariances": [1.0, 2.0]}, r"covariances: got shape \(2,\), wants \(1, 2, 2\)"),
        ({"covariances": [1.0, [1.0, 2.0]]}, "covariances: got 2 entries, wants 1, one for each task"),
        ({"covariances": -1.0}, r"covariances\[0\]: has the eigenvalue -1, wants a positive"),
        ({"covariances": [[1.0, -2.0]]}, r"covariances\[0\]: has the eigenvalue -2, wants a positive"),
        ({"covariances": [torch.ones(3)]}, r"covariances\[0\]: got shape \(3,\), wants \(2, 2\)"),
        ({"feature_cov": math.inf}, "feature_cov: got values that are not finite"),
        ({"feature_cov": [1.0, 2.0, 3.0]}, r"feature_cov: got shape \(3,\), wants \(2, 2\)"),
        ({"means": [1.0, 2.0]}, r"means: got shape \(2,\), wants \(K, d\)"),
        ({"means": [[math.nan, 1.0]]}, "means: got values that are not finite"),
        ({"covariances": torch.eye(2)}, r"covariances: got shape \(2, 2\), wants \(1, 2, 2\)"),
        ({"covariances": [[[1.0, 0.5], [0.0, 1.0]]]}, r"covariances\[0\]: differs from its transpose by 0.5"),
        ({"covariances": [[[1.0, 2.0], [2.0, 1.0]]]}, r"covariances\[0\]: has the eigenvalue -1, wants a positive"),
        ({"weights": [0.5, 0.5]}, r"weights: got shape \(2,\), wants \(1,\)"),
        ({"weights": [0.9]}, r"weights: got \[0\.9\] of sum 0\.9, wants numbers >= 0 of sum 1"),
        ({"noise_std": -1.0}, r"noise_std: got -1\.0, wants a finite number >= 0"),
        ({"feature_cov": [[1.0]]}, r"feature_cov: got shape \(1, 1\), wants \(2, 2\)"),
        ({"feature_cov": [[-1.0, 0.0], [0.0, 1.0]]}, "feature_cov: has the eigenvalue -1"),
    ],
)
def test_wrong_mixtures(change, message):
    valid = {"means": [[1.0, 2.0]], "covariances": [[[1.0, 0.0], [0.0, 1.0]]], "weights": [1.0]}
    TaskMixture(**valid)
    with pytest.raises(ValueError, match=f"^{message}"):
        TaskMixture(**{**valid, **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": -1, "n": 2}, "batch: got -1, wants an integer"),
        ({"batch": 2, "n": -1}, "n: got -1, wants an integer"),
        ({"batch": 2, "n": 2, "step": 2**24}, "step: got 16777216, wants an integer"),
        ({"batch": 2, "n": 2, "seed": -1}, "seed: got -1, wants an integer"),
        ({"batch": 1, "n": 10**7}, "n: needs 30000000 draws of one kind for a sequence, wants at most 8388608"),
    ],
)
def test_wrong_samples(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mixture().sample(**arguments)


def test_sphere():
    """On the sphere, with the direction's second moment I/d within five standard errors."""
    source, B = fl.SphereTasks(4, radius=2.5), 50_000
    z, _, _, task = source.sample(B, 4, seed=2, dtype=DOUBLE)
    beta = torch.linalg.solve(z[..., :4], z[..., 4])
    assert torch.allclose(beta.norm(dim=-1), torch.tensor(2.5, dtype=DOUBLE), rtol=1e-6)
    second = (beta[:, :, None] * beta[:, None]) * 4 / 2.5**2
    assert ((second.mean(0) - torch.eye(4)).abs() < 5 * second.std(0) / B**0.5).all()
    assert (beta.mean(0).abs() < 5 * beta.std(0) / B**0.5).all()
    assert (task == 0).all()
    assert (source.K, source.d, source.m) == (1, 4, 5)


def test_fixed_task():
    source = fl.FixedTask([1.0, -2.0], bias=True)
    z, q, y, _ = source.sample(100, 3, dtype=DOUBLE)
    assert (z[..., 0] == 1).all()
    assert (q[:, 0] == 1).all()
    assert (q[:, -1] == 0).all()
    assert torch.allclose(z[..., 3], z[..., 1] - 2 * z[..., 2])
    assert torch.allclose(y, q[:, 1] - 2 * q[:, 2])


def test_point_set():
    """Every token and query is a point with its label; all points occur about equally often."""
    x = torch.arange(10, dtype=DOUBLE)[:, None] * torch.tensor([1.0, 10.0], dtype=DOUBLE)
    source = fl.PointSet(x, x[:, 0] ** 2, bias=True)
    z, q, y, task = source.sample(2000, 4, seed=1, dtype=DOUBLE)
    index = z[..., 1].long()
    assert torch.equal(z[..., 1:3], x[index])
    assert torch.equal(z[..., 3], x[index, 0] ** 2)
    assert torch.equal(y, q[:, 1] ** 2)
    assert (q[:, 3] == 0).all()
    assert (task == 0).all()
    counts = torch.bincount(torch.cat([index.flatten(), q[:, 1].long()]), minlength=10)
    assert ((counts - 1000).abs() < 5 * (1000 * 0.9) ** 0.5).all()
    pieces = [source.sample(1000, 4, seed=1, offset=start, dtype=DOUBLE)[0] for start in (0, 1000)]
    assert torch.equal(torch.cat(pieces), z)
    assert not hasattr(source, "sample_gram")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fl.SphereTasks(0), ValueError, "d: got 0, wants an integer >= 1"),
        (lambda: fl.SphereTasks(2.5), TypeError, r"d: got 2\.5 \(float\), wants an integer"),
        (lambda: fl.SphereTasks(3, radius=-1), ValueError, "radius: got -1, wants a finite number >= 0"),
        (lambda: fl.SphereTasks(3, radius="big"), TypeError, "radius: got 'big', wants a finite number >= 0"),
        (lambda: fl.FixedTask([[1.0]]), ValueError, r"theta: got shape \(1, 1\), wants \(d,\)"),
        (lambda: fl.FixedTask("abc"), TypeError, "theta: got 'abc', wants an array of numbers"),
        (lambda: fl.PointSet([[1.0], [2.0]], [1.0]), ValueError, r"y: got shape \(1,\), wants \(2,\)"),
        (lambda: fl.PointSet([1.0], [1.0]), ValueError, r"x: got shape \(1,\), wants \(P, d\)"),
    ],
)
def test_wrong_sources(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_sources_keep_their_own_copy():
    theta = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    source = fl.FixedTask(theta)
    before = source.sample(3, 2)[0]
    theta.zero_()
    assert torch.equal(source.sample(3, 2)[0], before)


def test_another_default_device():
    """Sources draw on the CPU and then move the data, for any default device of torch."""
    mix = mixture(noise_std=0.1)
    expected = mix.sample_gram(4, 3, device="cpu")
    with torch.device("meta"):
        assert mix.sample_gram(4, 3)[0].device.type == "meta"
        for a, b in zip(mix.sample_gram(4, 3, device="cpu"), expected, strict=True):
            assert torch.equal(a, b)
