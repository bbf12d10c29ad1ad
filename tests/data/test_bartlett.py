"""The drawn Gram matrix has the distribution of the tokens' Gram matrix.

The tests compare two independent samples of 30,000 sequences, from two streams: every entry (marginals), and random
linear and quadratic forms that mix entries with the query and its label (joint). They use two-sample Kolmogorov-Smirnov
tests and the differences between the means of all powers and products up to order four, in standard errors. The seed is
fixed, so the outcome is the same in every run. The level of each case is 1e-3, shared equally by its tests.
"""

from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from scipy import stats

import fastlin as fl
from fastlin.data.layout import BatchDraws, check_draws

DOUBLE = torch.float64
B = 30_000
LEVEL = 1e-3


def covariance(d, seed):
    root = torch.randn(d, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / d + 0.2 * torch.eye(d, dtype=DOUBLE)


def mixture(**options):
    means = [[1.0, -0.5, 0.5], [0.0, 1.0, -1.0]]
    return fl.TaskMixture(means, torch.stack([covariance(3, 1), 2 * covariance(3, 2)]), [0.4, 0.6], **options)


SOURCES = {
    "mixture": mixture(),
    "noise": mixture(noise_std=0.8),
    "features": mixture(noise_std=0.8, feature_cov=covariance(3, 5)),
    "constant": mixture(bias=True),
    "constant, noise, features": mixture(bias=True, noise_std=0.8, feature_cov=covariance(3, 5)),
    "sphere": fl.SphereTasks(3, radius=1.5, noise_std=0.4, bias=True),
    "fixed": fl.FixedTask([1.0, -2.0, 0.5], noise_std=0.3),
    "one feature": fl.FixedTask([0.7], noise_std=0.5, bias=True),
}


def statistics(G, q, y, forms, has_remainder):
    """Entries of G, random forms of G, q and y, and the residual of a regression on noisy labels: (B, count)."""
    m = G.shape[-1]
    rows, columns = np.triu_indices(m)
    A, a, b = forms
    linear = torch.einsum("bij,sij->bs", G, A)
    mixed = torch.einsum("bi,bij,sj->bs", q, G, a) + y[:, None] * torch.einsum("bij,si,sj->bs", G, a, b)
    square = torch.einsum("bij,bjk,sk,si->bs", G, G, a, b)
    parts = [G[:, rows, columns], linear, mixed, square]
    if has_remainder:
        features, cross = G[:, :-1, :-1], G[:, :-1, -1:]
        parts.append((G[:, -1:, -1:] - cross.mT @ torch.linalg.solve(features, cross))[:, 0])
    return torch.cat(parts, 1).numpy()


def by_kernel(source, n, seed, dtype=DOUBLE):
    return [t.to(DOUBLE) for t in source.sample_gram(B, n, seed=seed, stream=1, dtype=dtype)[:3]]


def in_torch(source, n, seed):
    return source._gram_in_torch(check_draws(B, n, seed, 0, 1, 0)[0], n)[:3]


def smallest_p(source, n, seed=11, draw=by_kernel):
    """Smallest p-value over all tests, times their number."""
    m = source.m
    generator = torch.Generator().manual_seed(7)
    forms = [torch.randn(*shape, dtype=DOUBLE, generator=generator) for shape in ((6, m, m), (6, m), (6, m))]
    z, q, y, _ = source.sample(B, n, seed=seed, stream=0, dtype=DOUBLE)
    has_remainder = source.noise_std > 0 and n > m - 1
    tokens = statistics(fl.gram(z), q, y, forms, has_remainder)
    G, q, y = draw(source, n, seed)
    drawn = statistics(G, q, y, forms, has_remainder)
    varies = tokens.std(0) > 1e-9 * (1 + np.abs(tokens).max(0))
    np.testing.assert_allclose(drawn[:, ~varies], tokens[:, ~varies], atol=1e-9)
    tokens, drawn = tokens[:, varies], drawn[:, varies]
    p = [stats.ks_2samp(a, b).pvalue for a, b in zip(tokens.T, drawn.T, strict=True)]
    # Products of up to four standardised statistics: moments to order four of entries and forms, marginal and joint.
    scale = np.concatenate([tokens, drawn]).std(0)
    tokens, drawn = tokens / scale, drawn / scale
    chosen = np.random.default_rng(0).permutation(tokens.shape[1])[:6]
    for order in (1, 2, 3, 4):
        for powers in combinations_with_replacement(chosen, order):
            a, b = (np.prod(x[:, list(powers)], axis=1) for x in (tokens, drawn))
            error = ((a.var() + b.var()) / B) ** 0.5
            p.append(2 * stats.norm.sf(abs(a.mean() - b.mean()) / error))
    return min(p) * len(p) if p else 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", SOURCES)
def test_distribution(name, n):
    """n below, at and above the number of features, 3, with and without noise, constant and feature covariance."""
    assert smallest_p(SOURCES[name], n) > LEVEL


def by_single_kernel(source, n, seed):
    return by_kernel(source, n, seed, torch.float32)


@pytest.mark.parametrize(
    ("name", "n"), [("mixture", 2), ("noise", 3), ("noise", 9), ("features", 4), ("sphere", 4), ("one feature", 9)]
)
def test_distribution_in_float32(name, n):
    """30,000 draws resolve 1e-2 of an entry's deviation; rounding is 1e-7 of the entry."""
    assert smallest_p(SOURCES[name], n, draw=by_single_kernel) > LEVEL


@pytest.mark.parametrize(
    ("name", "n", "draw"),
    [
        ("mixture", 2, by_single_kernel),
        ("mixture", 4, by_kernel),
        ("noise", 9, by_kernel),
        ("features", 4, by_single_kernel),
        ("fixed", 50, by_kernel),
        ("fixed", 50, by_single_kernel),
    ],
)
@pytest.mark.parametrize("shift", [-1, 1])
def test_compiled_draws_for_another_n_are_seen(name, n, draw, shift):
    """All degrees of freedom off by one: 2 % of a diagonal entry at n = 50, a tenth of its deviation."""
    wrong = smallest_p(SOURCES[name], n, draw=lambda source, n, seed: draw(source, n + shift, seed))
    assert wrong < LEVEL


@pytest.mark.parametrize("name", SOURCES)
def test_no_context(name):
    G, q, y, task = SOURCES[name].sample_gram(5, 0, dtype=DOUBLE)
    assert (G == 0).all()
    for found, expected in zip((q, y, task), SOURCES[name].sample(5, 0, dtype=DOUBLE)[1:], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "n", "slot"), [("mixture", 4, 0), ("mixture", 4, 2), ("noise", 9, 3), ("constant", 3, 1), ("sphere", 5, 3)]
)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_degree_of_freedom_is_seen(name, n, slot, shift, monkeypatch):
    right = BatchDraws.chi

    def wrong(self, freedom):
        assert freedom[slot] > 0
        return right(self, [k + shift * (i == slot) for i, k in enumerate(freedom)])

    monkeypatch.setattr(BatchDraws, "chi", wrong)
    assert smallest_p(SOURCES[name], n, draw=in_torch) < LEVEL


def test_a_lost_normal_is_seen(monkeypatch):
    right = BatchDraws.normal

    def wrong(self, section, columns):
        out = right(self, section, columns)
        if section == 5:
            out[:, -1] = out[:, 0]
        return out

    monkeypatch.setattr(BatchDraws, "normal", wrong)
    assert smallest_p(SOURCES["mixture"], 4, draw=in_torch) < LEVEL


def test_rank_and_exact_identities():
    """Without noise X'X and beta determine y'y and X'y; for n < d the rank is n."""
    source = fl.FixedTask([1.0, -2.0, 0.5])
    for n in (1, 2, 3, 50):
        G = source.sample_gram(20, n, dtype=DOUBLE)[0]
        X, cross = G[:, :3, :3], G[:, :3, 3]
        torch.testing.assert_close(X @ source.theta, cross, rtol=1e-12, atol=1e-12 * n)
        assert (torch.linalg.matrix_rank(X) == min(n, 3)).all()
        assert torch.equal(G, G.mT)


def test_huge_contexts():
    """n = 10^9: G/n is S up to n^-1/2."""
    source = mixture(noise_std=0.5, feature_cov=covariance(3, 5), bias=True)
    n = 10**9
    G = source.sample_gram(50, n, dtype=DOUBLE)[0] / n
    assert ((G[:, 0, 0] - 1).abs() < 1e-15).all()
    assert (G[:, 1:4, 1:4] - source.feature_cov).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", SOURCES)
def test_pieces_have_the_same_bits(name, dtype):
    options = {"seed": 5, "step": 6, "stream": 7, "dtype": dtype}
    for method in ("sample", "sample_gram"):
        draw = getattr(SOURCES[name], method)
        whole = draw(67, 5, offset=2**33, **options)
        pieces = [draw(size, 5, offset=2**33 + start, **options) for start, size in ((0, 1), (1, 32), (33, 34))]
        for together, *parts in zip(whole, *pieces, strict=True):
            assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("name", SOURCES)
def test_queries_do_not_depend_on_the_form_or_on_n(name):
    for found, expected in zip(SOURCES[name].sample_gram(9, 7)[1:], SOURCES[name].sample(9, 2)[1:], strict=True):
        assert torch.equal(found, expected)
