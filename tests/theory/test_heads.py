"""Heads: constructions that attain their losses, bounds on the infimum, the minimum of scaled heads."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fastlin import theory

REGIMES = [theory.decoupled, theory.shared_shift, theory.scaled_heads]


def as_tensor(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("n", [0, 1, 6, 40])
def test_attention_attains_the_stated_loss(random_mixture, regime, n):
    for seed in range(4):
        mix = random_mixture(seed, d=2 + seed, K=1 + seed, noise_std=0.4 * seed)
        optimum = regime(mix, n)
        p, W, v = optimum.attention()
        assert p.shape == (mix.K, 1, mix.d + 1)
        assert v.shape == (mix.K, mix.d + 1)
        assert not W[-1].any()
        assert not W[:, -1].any()
        attained = theory.full_population_loss(mix, n, p, W, v)
        assert float(attained) == pytest.approx(optimum.loss, rel=1e-11)
        assert float(optimum) == optimum.loss


def tokens_of(mix, n, k, size, seed):
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(mix.covariances[k].numpy())
    beta = mix.means[k].numpy() + rng.standard_normal((size, mix.d)) @ root.T
    x = rng.standard_normal((size, n + 1, mix.d)) @ np.linalg.cholesky(mix.feature_cov.numpy()).T
    return x, np.einsum("bnd,bd->bn", x, beta) + mix.noise_std * rng.standard_normal((size, n + 1))


def attend(p, W, v, x, y):
    """Masked attention over literal tokens [p; (x_i, y_i); (x, 0)], last row, read by the head."""
    context = np.concatenate([x, y[..., None]], axis=2)
    tokens = np.concatenate([np.broadcast_to(p, (len(x), *p.shape)), context], axis=1)
    tokens[:, -1, -1] = 0.0
    mask = np.ones(tokens.shape[1])
    mask[-1] = 0.0
    scores = tokens @ W @ tokens.transpose(0, 2, 1) * mask
    return ((scores @ tokens) @ v)[:, -1]


def debiased_descent(W, mu, x, y):
    """x' { W X'(y - X mu) + mu }."""
    X, query = x[:, :-1], x[:, -1]
    step = np.einsum("bnd,bn->bd", X, y[:, :-1] - X @ mu) @ W.T + mu
    return np.einsum("bd,bd->b", query, step)


def test_debiased_attention_is_debiased_descent_for_any_preconditioner(random_mixture):
    mix = random_mixture(7, d=4, K=3)
    W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, A, v = theory.debiased_attention(mix, W)
    for k in range(3):
        x, y = tokens_of(mix, 5, k, 50, seed=k)
        expected = debiased_descent(W.numpy(), mix.means[k].numpy(), x, y)
        np.testing.assert_allclose(attend(p[k].numpy(), A.numpy(), v[k].numpy(), x, y), expected, rtol=1e-10)
    loss = theory.full_population_loss(mix, 5, p, A, v)
    torch.testing.assert_close(loss, theory.debiased_loss(mix, 5, W), rtol=1e-11, atol=0)
    with pytest.raises(ValueError, match=r"^W: wants an invertible matrix, got one of rank 1 of 4"):
        theory.debiased_attention(mix, torch.ones(4, 4))


def test_decoupled_agrees_with_simulation(random_mixture):
    n, mix = 6, random_mixture(8, d=3, K=2, noise_std=0.5)
    optimum = theory.decoupled(mix, n)
    mean, variance = 0.0, 0.0
    for k in range(2):
        x, y = tokens_of(mix, n, k, 100_000, seed=k)
        errors = (debiased_descent(optimum.W.numpy(), mix.means[k].numpy(), x, y) - y[:, -1]) ** 2
        weight = float(mix.weights[k])
        mean += weight * errors.mean()
        variance += weight**2 * errors.var() / errors.size
    assert variance**0.5 < 0.02 * mean
    assert abs(mean - optimum.loss) < 4 * variance**0.5


@pytest.mark.parametrize("n", [1, 8])
def test_decoupled_is_the_best_debiased_descent(random_mixture, n):
    mix = random_mixture(9, d=3, K=3)
    optimum = theory.decoupled(mix, n)
    W = optimum.W.clone().requires_grad_()
    loss = theory.debiased_loss(mix, n, W)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(optimum.loss, rel=1e-13)
    assert W.grad.abs().max() < 1e-10
    batch = theory.debiased_loss(mix, n, torch.stack([optimum.W, 1.1 * optimum.W]))
    assert float(batch[1]) > float(batch[0])


def test_loss_of_heads_does_not_depend_on_the_means(random_mixture, mixture):
    mix = random_mixture(10, d=3, K=2)
    moved = mixture(5 * mix.means + 1, mix.covariances, mix.weights, mix.noise_std, mix.feature_cov)
    for regime in (theory.decoupled, theory.scaled_heads, theory.heads_lower_bound):
        assert float(regime(moved, 5)) == pytest.approx(float(regime(mix, 5)), rel=1e-12)


def test_shared_shift_is_the_best_common_shift(random_mixture, mixture):
    mix = random_mixture(11, d=3, K=3)

    def shifted(m):
        return mixture(mix.means - m, mix.covariances, mix.weights, mix.noise_std, mix.feature_cov)

    optimum = theory.shared_shift(mix, 7)
    m = mix.weights @ mix.means
    torch.testing.assert_close(-optimum.heads[:, :3], m.expand(3, 3))
    assert optimum.loss == pytest.approx(theory.joint(shifted(m), 7).loss, rel=1e-13)
    assert theory.shared_shift(shifted(as_tensor([3.0, -1.0, 2.0])), 7).loss == pytest.approx(optimum.loss, rel=1e-12)
    for i in range(3):
        for step in (0.1, -0.1):
            aside = m + step * torch.eye(3, dtype=torch.float64)[i]
            assert theory.joint(shifted(aside), 7).loss > optimum.loss


def scaled_loss(mix, n, s):
    """The scaled-heads loss with the best W for given s, and its gradient; written from the definition."""
    s = torch.tensor(s, requires_grad=True)
    S, s2, eye = mix.feature_cov, mix.noise_std**2, torch.eye(mix.d, dtype=torch.float64)
    SB = S @ mix.covariances
    a = SB.diagonal(dim1=1, dim2=2).sum(1) + s2
    C0 = n * a[:, None, None] * S + n * (n + 1) * SB @ S
    pull = n * torch.einsum("k,kij->ij", mix.weights * s, mix.covariances) @ S
    W = torch.linalg.solve(torch.einsum("k,kij->ij", mix.weights * s**2, C0), pull, left=False)
    E = n * s[:, None, None] * (W @ S) - eye
    spread = (S @ E @ mix.covariances * E).sum((1, 2))
    noise = s**2 * ((S @ W @ (C0 - n**2 * SB @ S)) * W).sum((1, 2))
    loss = s2 + mix.weights @ (spread + noise)
    loss.backward()
    return float(loss.detach()), s.grad.numpy()


@pytest.mark.parametrize("seed", range(8))
def test_scaled_heads_reach_the_minimum_over_scales(random_mixture, seed):
    n, K = [1, 3, 10, 200][seed % 4], 2 + seed % 3
    mix = random_mixture(seed, d=3, K=K, noise_std=[0.0, 2.0][seed % 2])
    optimum = theory.scaled_heads(mix, n)
    rng = np.random.default_rng(seed)
    ends = [
        minimize(lambda s: scaled_loss(mix, n, s), s, jac=True, method="BFGS", options={"gtol": 1e-12}).fun
        for s in (np.ones(K), *(0.1 + rng.exponential(size=(3, K))))
    ]
    assert optimum.loss == pytest.approx(min(ends), rel=1e-12)
    scales = optimum.heads[:, -1]
    assert float(mix.weights @ scales**2) == pytest.approx(1.0)
    assert scaled_loss(mix, n, scales.numpy())[0] == pytest.approx(optimum.loss, rel=1e-12)
    assert np.abs(scaled_loss(mix, n, scales.numpy())[1]).max() < 1e-8


def test_bounds_meet_when_one_preconditioner_is_best_for_every_task(random_mixture, mixture):
    mix = random_mixture(12, d=3, K=2, noise_std=0.0)
    B = mix.covariances[0]
    for covariances, noise_std in ((torch.stack([B, B]), 0.8), (torch.stack([B, 3 * B]), 0.0)):
        same = mixture(mix.means, covariances, mix.weights, noise_std, mix.feature_cov)
        upper = theory.decoupled(same, 5).loss
        assert theory.scaled_heads(same, 5).loss == pytest.approx(upper, rel=1e-13)
        assert theory.heads_lower_bound(same, 5).loss == pytest.approx(upper, rel=1e-13)
    assert theory.heads_lower_bound(mix, 5).loss < theory.scaled_heads(mix, 5).loss < theory.decoupled(mix, 5).loss


@pytest.mark.parametrize(("n", "decoupled", "reached"), [(4, 1.864846, 1.857860), (20, 0.610582, 0.609577)])
def test_heads_can_do_better_than_debiased_descent(mixture, n, decoupled, reached):
    covariances = torch.stack([torch.diag(as_tensor(b)) for b in ([4.0, 0.1, 0.1], [0.1, 0.1, 4.0])])
    mix = mixture([[1.0, 0.5, -0.5], [-1.0, 1.0, 0.5]], covariances, [0.5, 0.5])
    assert theory.decoupled(mix, n).loss == pytest.approx(decoupled, abs=1e-6)
    start = theory.scaled_heads(mix, n)
    p, W, v = start.attention()
    sizes = [p.numel(), W.numel(), v.numel()]
    noise = np.random.default_rng(0).standard_normal(sum(sizes))

    def value_and_gradient(flat):
        flat = torch.tensor(flat, requires_grad=True)
        parts = [f.view(x.shape) * x.abs().max() for f, x in zip(flat.split(sizes), (p, W, v), strict=True)]
        loss = theory.full_population_loss(mix, n, *parts)
        loss.backward()
        return float(loss.detach()), flat.grad.numpy()

    first = torch.cat([(x / x.abs().max()).reshape(-1) for x in (p, W, v)]).numpy() + 0.02 * noise
    best = minimize(value_and_gradient, first, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 5000}).fun
    assert best == pytest.approx(reached, abs=1e-6)
    assert theory.heads_lower_bound(mix, n).loss < best < start.loss - 1e-4


def test_a_task_without_signal_needs_a_zero_head(mixture):
    covariances = torch.stack([torch.eye(2), torch.zeros(2, 2)])
    mix = mixture([[1.0, 2.0], [0.5, -1.0]], covariances, [0.5, 0.5], 0.5)
    with pytest.raises(ValueError, match="head of size zero"):
        theory.scaled_heads(mix, 4)
    # The task without signal costs its noise; the other one is a separate problem.
    other = mixture([[1.0, 2.0]], torch.eye(2)[None], [1.0], 0.5)
    assert theory.heads_lower_bound(mix, 4).loss == pytest.approx(0.5 * 0.25 + 0.5 * theory.decoupled(other, 4).loss)


def test_bound_is_a_number_and_has_a_loss(random_mixture):
    bound = theory.heads_lower_bound(random_mixture(0), 3)
    assert float(bound) == bound.loss > 0


def test_wide_problems_on_several_threads(mixture):
    """d = 200, where torch's batched solve is wrong on several threads. The bound is a sum over tasks."""
    d, n = 200, 7
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    covariances = roots @ roots.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)
    means = torch.randn(2, d, generator=generator, dtype=torch.float64)
    mix = mixture(means, covariances, [0.4, 0.6], 0.5)
    alone = [theory.decoupled(mixture(means[k : k + 1], covariances[k : k + 1], [1.0], 0.5), n).loss for k in (0, 1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        bound = theory.heads_lower_bound(mix, n).loss
        scaled, decoupled = theory.scaled_heads(mix, n).loss, theory.decoupled(mix, n).loss
    finally:
        torch.set_num_threads(threads)
    assert bound == pytest.approx(0.4 * alone[0] + 0.6 * alone[1], rel=1e-12)
    assert bound <= scaled <= decoupled
