"""The reduced model: reference values, simulation, stationarity, ordering, limits, degenerate covariances."""

import numpy as np
import pytest
import torch

import fastlin as fl
from fastlin import theory

CASES = ["fig2a", "fig2c", "D1_2a_sigma5", "E2_noisy", "noncommuting"]
OPTIMA = {
    "L_PT": theory.plain,
    "L_FT": theory.fine_tuned,
    "L_JT": theory.joint,
    "L_PGD": theory.decoupled,
    "L_JT_shifted_head": theory.shared_shift,
    "L_heads_scaled": theory.scaled_heads,
    "L_heads_lower": theory.heads_lower_bound,
}


def reference(golden, case):
    return golden["PB_noncommuting"][0] if case == "noncommuting" else golden["PB"][case]


def close(actual, expected, rtol=1e-9, atol=0.0):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMA)
def test_losses_equal_the_reference_values(golden, paper, case, name):
    for n, values in reference(golden, case)["n"].items():
        result = OPTIMA[name](paper[case], int(n))
        close(float(result), values[name])
        close(result.loss / theory.normaliser(paper[case]), values[name + "_norm"])


@pytest.mark.parametrize("case", CASES[:-1])
def test_normaliser_equals_the_reference_value(golden, paper, case):
    close(theory.normaliser(paper[case]), golden["PB"][case]["Ey2"])


@pytest.mark.parametrize("n", [1, 4, 20])
def test_parameters_equal_the_reference_values(golden, paper, n):
    mix, values = paper["noncommuting"], golden["PB_noncommuting"][0]["n"][str(n)]
    plain, tuned, joint = (f(mix, n) for f in (theory.plain, theory.fine_tuned, theory.joint))
    close(plain.W, values["W_PT"])
    close(tuned.W, values["W_PT"])
    close(joint.W, values["W_JT"])
    close(theory.decoupled(mix, n).W, values["W_PGD"])
    close(tuned.prompts, values["P_FT"])
    close(joint.prompts, values["P_JT"])
    assert plain.prompts.shape == (2, 3)
    assert not plain.prompts.any()


@pytest.mark.parametrize("n", [1, 4, 20])
def test_the_printed_fine_tuning_loss_is_too_high_when_nothing_commutes(golden, paper, n):
    mix, values = paper["noncommuting"], golden["PB_noncommuting"][0]["n"][str(n)]
    S, plain = mix.feature_cov, theory.plain(mix, n)
    M = torch.einsum("k,ki,kj->ij", mix.weights, mix.means, mix.means)
    E = n * S @ plain.W - torch.eye(3)
    printed = plain.loss - float(torch.trace(S @ M @ E.mT @ E))
    close(printed, values["L_FT_paper_formula"])
    assert theory.fine_tuned(mix, n).loss < printed - 0.01


def probe(d, K):
    W = 0.05 * torch.eye(d, dtype=torch.float64) + 0.01 * torch.arange(d * d, dtype=torch.float64).view(d, d) / d
    return W, torch.linspace(-1, 1, d, dtype=torch.float64) * torch.arange(1, K + 1)[:, None]


def gradients(mix, n, W, P):
    """The gradient formulas, written out."""
    S, s2 = mix.feature_cov, mix.noise_std**2
    dW, dP = torch.zeros_like(W), torch.zeros_like(P)
    for k in range(mix.K):
        pi, mu, p = mix.weights[k], mix.means[k], P[k]
        R = mix.covariances[k] + torch.outer(mu, mu)
        C = n * (torch.trace(S @ R) + s2) * S + n * (n + 1) * S @ R @ S
        cross = n * (S @ torch.outer(mu, p) + torch.outer(p, mu) @ S)
        inside = S @ W @ (C + cross + torch.outer(p, p))
        dW += 2 * pi * (inside - n * S @ R @ S - S @ torch.outer(mu, p))
        dP[k] = 2 * pi * W.mT @ S @ ((n * W @ S - torch.eye(mix.d)) @ mu + W @ p)
    return dW, dP


@pytest.mark.parametrize("n", [1, 4, 20])
def test_probe_loss_and_gradients(golden, paper, n):
    mix, values = paper["noncommuting"], golden["PB_noncommuting"][0]["n"][str(n)]["probe"]
    W, P = (x.requires_grad_() for x in probe(3, 2))
    loss = theory.population_loss(mix, n, W, P)
    loss.backward()
    close(loss.detach(), values["loss"])
    close(W.grad, values["gW"])
    close(P.grad, values["gP"])


@pytest.mark.parametrize("n", [0, 1, 5, 30])
def test_autograd_equals_the_gradient_formula_and_finite_differences(random_mixture, n):
    mix = random_mixture(n, d=4, K=3)
    W, P = (x.requires_grad_() for x in probe(4, 3))
    theory.population_loss(mix, n, W, P).backward()
    dW, dP = gradients(mix, n, W.detach(), P.detach())
    close(W.grad, dW, rtol=1e-11, atol=1e-11)
    close(P.grad, dP, rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradcheck(lambda W, P: theory.population_loss(mix, n, W, P), (W, P))


def simulate_reduced(mix, n, W, P, size, seed):
    """Squared errors (size,) of masked attention over literal tokens [p; 1], [x_i; y_i], [x; 0]."""
    rng = np.random.default_rng(seed)
    d, S = mix.d, mix.feature_cov.numpy()
    k = rng.choice(mix.K, size=size, p=mix.weights.numpy())
    roots = np.linalg.cholesky(mix.covariances.numpy())
    beta = mix.means.numpy()[k] + np.einsum("bij,bj->bi", roots[k], rng.standard_normal((size, d)))
    x = rng.standard_normal((size, n + 1, d)) @ np.linalg.cholesky(S).T
    y = np.einsum("bnd,bd->bn", x, beta) + mix.noise_std * rng.standard_normal((size, n + 1))
    Z = np.zeros((size, n + 2, d + 1))
    Z[:, 0, :d], Z[:, 0, d] = P.numpy()[k], 1.0
    Z[:, 1:, :d], Z[:, 1:, d] = x, y
    Z[:, -1, d] = 0.0
    A = np.zeros((d + 1, d + 1))
    A[:d, :d] = W.numpy()
    mask = np.diag([1.0] * (n + 1) + [0.0])
    scores = Z[:, -1:] @ A @ Z.transpose(0, 2, 1) @ mask  # last row only
    return ((scores @ Z)[:, 0, d] - y[:, -1]) ** 2


@pytest.mark.parametrize(("n", "noise_std", "K"), [(0, 0.5, 2), (1, 0.0, 2), (4, 0.8, 3), (9, 1.2, 2)])
def test_population_loss_agrees_with_simulation(random_mixture, n, noise_std, K):
    mix = random_mixture(10 + n, d=3, K=K, noise_std=noise_std)
    g = torch.Generator().manual_seed(n)
    optimum = theory.joint(mix, n)
    W = optimum.W + 0.02 * torch.randn(3, 3, generator=g, dtype=torch.float64)
    P = torch.randn(K, 3, generator=g, dtype=torch.float64)
    errors = simulate_reduced(mix, n, W, P, 200_000, seed=n)
    standard_error = errors.std() / np.sqrt(errors.size)
    assert standard_error < 0.02 * errors.mean()
    assert abs(errors.mean() - float(theory.population_loss(mix, n, W, P))) < 4 * standard_error


@pytest.mark.parametrize("seed", range(6))
def test_optima_are_stationary_and_have_the_loss_they_state(random_mixture, seed):
    n = [0, 1, 2, 7, 25, 100][seed]
    mix = random_mixture(seed, d=2 + seed % 3, K=1 + seed % 4, noise_std=[0.0, 0.9][seed % 2])
    for optimum, moves in (
        (theory.plain(mix, n), "W"),
        (theory.fine_tuned(mix, n), "p"),
        (theory.joint(mix, n), "Wp"),
    ):
        W, P = optimum.W.clone().requires_grad_(), optimum.prompts.clone().requires_grad_()
        loss = theory.population_loss(mix, n, W, P)
        close(loss.detach(), optimum.loss, rtol=1e-12)
        loss.backward()
        if "W" in moves:
            assert W.grad.abs().max() < 1e-9
        if "p" in moves:
            assert P.grad.abs().max() < 1e-11
        far = theory.population_loss(mix, n, 1.3 * optimum.W + 0.05, optimum.prompts)
        assert n == 0 or float(far) > optimum.loss


def test_ordering_in_random_problems(random_mixture):
    for seed in range(200):
        n = [0, 1, 3, 10, 50][seed % 5]
        mix = random_mixture(seed, d=1 + seed % 4, K=1 + seed % 3, noise_std=[0.0, 0.5, 2.0][seed % 3])
        losses = [float(OPTIMA[name](mix, n)) for name in OPTIMA]
        plain, tuned, joint, decoupled, shifted, scaled, lower = losses
        room = 1e-12 * plain
        assert plain >= tuned - room >= joint - 2 * room >= decoupled - 3 * room
        assert joint >= shifted - room
        assert decoupled >= scaled - room
        assert scaled >= lower - room
        assert lower >= mix.noise_std**2


def test_regimes_coincide_with_zero_means(mixture):
    eye = torch.eye(10)
    mix = mixture(torch.zeros(2, 10), torch.stack([eye, 2 * eye]), [0.5, 0.5])
    plain, tuned, joint = (f(mix, 7) for f in (theory.plain, theory.fine_tuned, theory.joint))
    assert tuned.loss == pytest.approx(plain.loss, rel=1e-14)
    assert joint.loss == pytest.approx(plain.loss, rel=1e-14)
    assert not tuned.prompts.any()
    assert not joint.prompts.any()


def test_prompts_do_not_depend_on_n(random_mixture):
    mix = random_mixture(3)
    for regime in (theory.fine_tuned, theory.joint):
        close(regime(mix, 50).prompts, regime(mix, 1).prompts, rtol=1e-12)


def test_no_context(random_mixture):
    mix = random_mixture(5, d=3, K=2, noise_std=0.5)
    S, Bbar = mix.feature_cov, torch.einsum("k,kij->ij", mix.weights, mix.covariances)
    abar = float((S * Bbar).sum()) + 0.25
    assert theory.plain(mix, 0).loss == pytest.approx(theory.normaliser(mix), rel=1e-14)
    for regime in (
        theory.fine_tuned,
        theory.joint,
        theory.decoupled,
        theory.shared_shift,
        theory.scaled_heads,
    ):
        assert regime(mix, 0).loss == pytest.approx(abar, rel=1e-13)
    assert theory.heads_lower_bound(mix, 0).loss == pytest.approx(abar, rel=1e-13)


def test_losses_keep_their_digits_for_long_contexts(mixture):
    d, n = 6, 10**10  # isotropic: L = d (d + 1) / (d + 1 + n)
    mix = mixture(torch.zeros(1, d), torch.eye(d)[None], [1.0])
    for regime in (theory.plain, theory.fine_tuned, theory.joint, theory.decoupled):
        assert regime(mix, n).loss == pytest.approx(d * (d + 1) / (d + 1 + n), rel=1e-13)


@pytest.mark.parametrize("noise_std", [0.0, 0.9])
def test_gap_limits(random_mixture, noise_std):
    n = 10**6
    mix = random_mixture(11, d=4, K=3, noise_std=noise_std)
    plain, tuned, joint, decoupled = (f(mix, n).loss for f in list(OPTIMA.values())[:4])
    # With noise a loss is near s2, so a gap of order 1/n^2 has a relative error of eps s2 n^2.
    floor = 4 * np.finfo(float).eps * noise_std**2 * n**2
    limits = theory.gap_limits(mix)
    assert limits.plain_fine_tuned == pytest.approx(n**2 * (plain - tuned), rel=1e-3, abs=floor)
    assert limits.fine_tuned_joint == pytest.approx(n**2 * (tuned - joint), rel=1e-3, abs=floor)
    assert limits.joint_decoupled == pytest.approx(n * (joint - decoupled), rel=1e-3)


def test_trials_share_a_call(random_mixture):
    mix = random_mixture(1, d=3, K=2)
    g = torch.Generator().manual_seed(0)
    W, P = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((5, 3, 3), (5, 2, 3)))
    each = torch.stack([theory.population_loss(mix, 4, W[r], P[r]) for r in range(5)])
    close(theory.population_loss(mix, 4, W, P), each, rtol=1e-13)
    bare = torch.stack([theory.population_loss(mix, 4, W[r], torch.zeros(2, 3)) for r in range(5)])
    close(theory.population_loss(mix, 4, W, None), bare, rtol=1e-13)
    shared = torch.stack([theory.population_loss(mix, 4, W[0], P[r]) for r in range(5)])
    close(theory.population_loss(mix, 4, W[0], P), shared, rtol=1e-13)


def test_arguments_are_promoted_without_loss(random_mixture):
    mix = random_mixture(1, d=2, K=2)
    W, P = torch.tensor([[0.1, 0.0], [0.3, 0.2]]), torch.tensor([[0.1, 0.7], [0.2, 0.3]])
    single = theory.population_loss(mix, 4, W, P)
    assert single.dtype == torch.float64
    close(single, theory.population_loss(mix, 4, W.double(), P.double()), rtol=1e-15)
    lists = theory.population_loss(mix, 4, [[0.1, 0.0], [0.3, 0.2]], [[0.1, 0.7], [0.2, 0.3]])
    arrays = theory.population_loss(mix, 4, np.array([[0.1, 0.0], [0.3, 0.2]]), np.array([[0.1, 0.7], [0.2, 0.3]]))
    assert float(lists) == float(arrays) != float(single)


def flat(mixture, means, noise_std=0.0):
    """Task covariances of rank two in three dimensions, both without e_3."""
    root = torch.tensor([[1.0, 0.3, 0.0], [0.2, 1.5, 0.0]], dtype=torch.float64)
    S = torch.tensor([[1.0, 0.2, 0.3], [0.2, 1.4, 0.1], [0.3, 0.1, 0.8]])
    B = root.mT @ root
    return mixture(means, torch.stack([B, 2 * B]), [0.4, 0.6], noise_std, S)


@pytest.mark.parametrize("noise_std", [0.0, 0.6])
@pytest.mark.parametrize("n", [0, 1, 8])
def test_singular_covariances_with_means_in_their_range(mixture, n, noise_std):
    mix = flat(mixture, [[1.0, -0.5, 0.0], [0.3, 0.8, 0.0]], noise_std)
    for regime in list(OPTIMA.values())[:6]:
        optimum = regime(mix, n)
        assert torch.isfinite(optimum.prompts).all()
        close(theory.full_population_loss(mix, n, *optimum.attention()), optimum.loss, rtol=1e-11)


@pytest.mark.parametrize("n", [1, 8])
def test_singular_covariances_with_a_mean_outside(mixture, n):
    mix = flat(mixture, [[1.0, -0.5, 0.7], [0.3, 0.8, 0.0]], 0.6)
    for regime in (theory.plain, theory.fine_tuned):
        optimum = regime(mix, n)
        close(theory.population_loss(mix, n, optimum.W, optimum.prompts), optimum.loss, rtol=1e-11)
    for regime in (theory.joint, theory.decoupled, theory.shared_shift, theory.scaled_heads):
        with pytest.raises(ValueError, match="infimum") as caught:
            regime(mix, n)
        nearly = mixture(mix.means, mix.covariances + 1e-9 * torch.eye(3), mix.weights, 0.6, mix.feature_cov)
        stated = float(str(caught.value).split("infimum ")[1].split()[0])
        assert stated == pytest.approx(regime(nearly, n).loss, rel=1e-6)


def test_a_mean_outside_does_no_harm_without_context(mixture):
    mix = flat(mixture, [[1.0, -0.5, 0.7], [0.3, 0.8, 0.0]], 0.6)
    for regime in (theory.joint, theory.decoupled, theory.shared_shift, theory.scaled_heads):
        optimum = regime(mix, 0)
        close(theory.full_population_loss(mix, 0, *optimum.attention()), optimum.loss, rtol=1e-11)


def test_known_tasks_and_no_tasks(mixture):
    known = mixture([[1.0, 2.0], [-1.0, 0.5]], torch.zeros(2, 2, 2), [0.5, 0.5])
    for regime in (theory.decoupled, theory.scaled_heads):
        optimum = regime(known, 5)
        assert optimum.loss == 0.0
        assert float(theory.full_population_loss(known, 5, *optimum.attention())) < 1e-20
    nothing = mixture(torch.zeros(2, 2), torch.zeros(2, 2, 2), [0.5, 0.5])
    for regime in OPTIMA.values():
        assert float(regime(nothing, 5)) == 0.0


def test_wrong_arguments_are_named(random_mixture, mixture):
    mix = random_mixture(0)
    W, P = torch.eye(3), torch.zeros(2, 3)
    for n in (-1, 2.0, "3", None, True):
        for call in (*OPTIMA.values(), lambda mix, n: theory.population_loss(mix, n, W, P)):
            with pytest.raises(ValueError, match=r"^n: wants a non-negative integer, got"):
                call(mix, n)
    with pytest.raises(ValueError, match=r"^W: wants shape \(3, 3\) or \(R, 3, 3\), got \(4, 4\)"):
        theory.population_loss(mix, 1, torch.eye(4), P)
    with pytest.raises(ValueError, match=r"^prompts: wants shape \(2, 3\) or \(5, 2, 3\), got \(4, 2, 3\)"):
        theory.population_loss(mix, 1, torch.zeros(5, 3, 3), torch.zeros(4, 2, 3))
    with pytest.raises(ValueError, match=r"^W: wants real numbers"):
        theory.population_loss(mix, 1, torch.eye(3, dtype=torch.complex64), P)
    with_bias = fl.TaskMixture(mix.means, mix.covariances, mix.weights, bias=True)
    with pytest.raises(ValueError, match="bias=False"):
        theory.plain(with_bias, 1)
    with pytest.raises(ValueError, match=r"^mix: wants a task mixture, got str without means"):
        theory.plain("mixture", 1)
    with pytest.raises(ValueError, match="invertible mean task covariance"):
        theory.gap_limits(mixture(torch.ones(1, 2), torch.zeros(1, 2, 2), [1.0]))
