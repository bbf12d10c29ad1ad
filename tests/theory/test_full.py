"""The full one-layer model: cubature, simulation of literal tokens, gradients, shapes, free minima."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import fastlin as fl
from fastlin import theory


def parameters(mix, seed, t=2, R=None, H=None, size=0.3):
    """Random p, W, v, with R trials and H attention heads if given."""
    g = torch.Generator().manual_seed(seed)
    m, K = mix.d + 1, mix.K
    trials = () if R is None else (R,)
    heads = trials if H is None else (*trials, H)
    shapes = ((*trials, K, t, m), (*heads, m, m), (*heads, K, m))
    return tuple(size * torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes)


def cubature(d):
    """Points and weights that integrate every polynomial of degree five against N(0, I_d)."""
    eye = np.eye(d)
    points, weights = [np.zeros(d)], [2 / (d + 2)]
    for i, sign in itertools.product(range(d), (1, -1)):
        points.append(sign * np.sqrt(d + 2) * eye[i])
        weights.append((4 - d) / (2 * (d + 2) ** 2))
    for i, j in itertools.combinations(range(d), 2):
        for si, sj in itertools.product((1, -1), repeat=2):
            points.append(np.sqrt((d + 2) / 2) * (si * eye[i] + sj * eye[j]))
            weights.append(1 / (d + 2) ** 2)
    return np.array(points), np.array(weights)


def loss_by_cubature(mix, n, p, W, v, scale):
    """One trial, W (H, m, m), v (H, K, m), p (K, t, m): conditional loss at every cubature point of beta."""
    d, S, s2 = mix.d, mix.feature_cov.numpy(), mix.noise_std**2
    A = scale * W.numpy()[:, :d]
    points, weights = cubature(d)
    total = s2
    for k in range(mix.K):
        root = np.linalg.cholesky(mix.covariances[k].numpy())
        prompt = np.einsum("tm,tl->ml", p[k].numpy(), p[k].numpy())
        a = v[:, k].numpy()
        for point, weight in zip(points, weights, strict=True):
            beta = mix.means[k].numpy() + root @ point
            Z = np.block([[S, (S @ beta)[:, None]], [(S @ beta)[None], np.array([[beta @ S @ beta + s2]])]])
            r = sum(A_h @ (n * Z + prompt) @ a_h for A_h, a_h in zip(A, a, strict=True)) - beta
            value = r @ S @ r
            for (A_i, a_i), (A_j, a_j) in itertools.product(zip(A, a, strict=True), repeat=2):
                value += n * (a_i @ Z @ a_j) * np.trace(S @ A_i @ Z @ A_j.T)
                value += n * (A_i @ Z @ a_j) @ S @ (A_j @ Z @ a_i)
            total += float(mix.weights[k]) * weight * value
    return total


def simulated_errors(mix, n, p, W, v, scale, size, seed):
    """Squared errors (size,) of attention over literal tokens; the mask excludes the last, which is the query."""
    rng = np.random.default_rng(seed)
    d, t = mix.d, p.shape[1]
    k = rng.choice(mix.K, size=size, p=mix.weights.numpy())
    roots = np.linalg.cholesky(mix.covariances.numpy())
    beta = mix.means.numpy()[k] + np.einsum("bij,bj->bi", roots[k], rng.standard_normal((size, d)))
    x = rng.standard_normal((size, n + 1, d)) @ np.linalg.cholesky(mix.feature_cov.numpy()).T
    y = np.einsum("bnd,bd->bn", x, beta) + mix.noise_std * rng.standard_normal((size, n + 1))
    tokens = np.concatenate([p.numpy()[k], np.concatenate([x, y[..., None]], axis=2)], axis=1)
    tokens[:, -1, d] = 0.0
    mask = np.array([1.0] * (t + n) + [0.0])
    prediction = np.zeros(size)
    for W_h, v_h in zip(W.numpy(), v.numpy(), strict=True):
        scores = (tokens[:, -1] @ W_h)[:, None, :] @ tokens.transpose(0, 2, 1) * mask
        prediction += scale * np.einsum("bm,bm->b", (scores @ tokens)[:, 0], v_h[k])
    return (prediction - y[:, -1]) ** 2


@pytest.mark.parametrize(
    ("n", "H", "d", "noise_std"), [(0, 1, 3, 0.5), (1, 2, 2, 0.0), (4, 3, 6, 0.8), (20, 1, 5, 0.3)]
)
def test_loss_equals_the_cubature(random_mixture, n, H, d, noise_std):
    mix = random_mixture(n, d=d, K=2, noise_std=noise_std)
    p, W, v = parameters(mix, seed=n, t=3, R=2, H=H)
    losses = theory.full_population_loss(mix, n, p, W, v, scale=0.7)
    expected = [loss_by_cubature(mix, n, p[r], W[r], v[r], 0.7) for r in range(2)]
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("n", "H", "t", "noise_std", "scale"), [(1, 1, 1, 0.6, 0.4), (3, 2, 2, 0.0, 0.5), (6, 2, 3, 0.9, 0.2)]
)
def test_loss_agrees_with_simulation(random_mixture, n, H, t, noise_std, scale):
    mix = random_mixture(20 + n, d=3, K=3, noise_std=noise_std)
    p, W, v = parameters(mix, seed=n, t=t, R=2, H=H, size=0.3)
    losses = theory.full_population_loss(mix, n, p, W, v, scale=scale)
    for r in range(2):
        errors = simulated_errors(mix, n, p[r], W[r], v[r], scale, 1_200_000 // (n + 1), seed=10 * n + r)
        standard_error = errors.std() / np.sqrt(errors.size)
        assert standard_error < 0.02 * errors.mean()
        assert abs(errors.mean() - float(losses[r])) < 4 * standard_error


@pytest.mark.parametrize("n", [0, 1, 12])
def test_reduced_model_is_a_case_of_the_full_one(random_mixture, n):
    mix = random_mixture(n, d=4, K=3)
    optimum = theory.joint(mix, n)
    W = optimum.W + 0.01
    full = theory.full_population_loss(mix, n, *theory.Optimum(W, optimum.prompts, None, 0.0).attention())
    reduced = theory.population_loss(mix, n, W, optimum.prompts)
    torch.testing.assert_close(full, reduced, rtol=1e-13, atol=0)


def test_every_shape_is_the_same_computation(random_mixture):
    mix = random_mixture(2, d=3, K=2)
    p, W, v = parameters(mix, seed=0, R=4, H=1)
    with_heads = theory.full_population_loss(mix, 5, p, W, v, scale=0.3)
    with_trials = theory.full_population_loss(mix, 5, p, W[:, 0], v[:, 0], scale=0.3)
    alone = torch.stack([theory.full_population_loss(mix, 5, p[r], W[r, 0], v[r, 0], scale=0.3) for r in range(4)])
    torch.testing.assert_close(with_heads, with_trials, rtol=1e-14, atol=0)
    torch.testing.assert_close(with_heads, alone, rtol=1e-13, atol=0)
    assert with_heads.shape == (4,)
    assert alone[0].shape == ()

    head = v[0, 0, 0]
    one_head = theory.full_population_loss(mix, 5, p[0], W[0, 0], head)
    expanded = theory.full_population_loss(mix, 5, p[0], W[0, 0], head.expand(2, 4))
    torch.testing.assert_close(one_head, expanded, rtol=0, atol=0)

    none = theory.full_population_loss(mix, 5, None, W, v)
    torch.testing.assert_close(none, theory.full_population_loss(mix, 5, 0 * p, W, v), rtol=0, atol=0)
    torch.testing.assert_close(none, theory.full_population_loss(mix, 5, p[:, :, :0], W, v), rtol=0, atol=0)


def test_heads_add_inside_the_prediction(random_mixture):
    mix = random_mixture(3, d=3, K=2)
    p, W, v = parameters(mix, seed=1)
    split = theory.full_population_loss(
        mix, 4, p[None], torch.stack([0.25 * W, 0.75 * W])[None], torch.stack([v, v])[None]
    )
    torch.testing.assert_close(split[0], theory.full_population_loss(mix, 4, p, W, v), rtol=1e-13, atol=0)


def test_task_losses_are_those_of_each_task_alone(random_mixture, mixture):
    mix = random_mixture(4, d=3, K=3)
    p, W, v = parameters(mix, seed=2, R=2)
    per_task = theory.full_task_losses(mix, 6, p, W, v)
    assert per_task.shape == (2, 3)
    torch.testing.assert_close(per_task @ mix.weights, theory.full_population_loss(mix, 6, p, W, v))
    for k in range(3):
        alone = mixture(mix.means[k : k + 1], mix.covariances[k : k + 1], [1.0], mix.noise_std, mix.feature_cov)
        own = theory.full_population_loss(alone, 6, p[:, k : k + 1], W, v[:, k : k + 1])
        torch.testing.assert_close(own, per_task[:, k], rtol=1e-13, atol=0)


def test_gradients_against_finite_differences(random_mixture):
    mix = random_mixture(5, d=2, K=2)
    inputs = tuple(x.requires_grad_() for x in parameters(mix, seed=3, R=2, H=2))
    assert torch.autograd.gradcheck(lambda p, W, v: theory.full_population_loss(mix, 3, p, W, v, scale=0.8), inputs)
    theory.full_population_loss(mix, 3, *inputs).sum().backward()
    assert not inputs[1].grad[..., -1, :].any()  # the query's label slot is zero
    assert inputs[1].grad[..., :-1, :].all()
    assert inputs[0].grad.all()
    assert inputs[2].grad.all()


def test_wide_problems_with_many_trials(random_mixture):
    mix = random_mixture(6, d=32, K=2)
    p, W, v = parameters(mix, seed=4, R=50, H=2, size=0.02)
    losses = theory.full_population_loss(mix, 100, p, W, v)
    torch.testing.assert_close(losses[7], theory.full_population_loss(mix, 100, p[7:8], W[7:8], v[7:8])[0])


def test_wrong_arguments_are_named(random_mixture):
    mix = random_mixture(0, d=3, K=2)
    p, W, v = parameters(mix, seed=0)
    cases = [
        ((1.5, p, W, v), "^n: wants a non-negative integer, got 1.5"),
        ((1, p, W[:3], v), r"^W: wants shape \(4, 4\) or \(R, 4, 4\) or \(R, H, 4, 4\), got \(3, 4\)"),
        ((1, p, W, v[:1]), r"^v: wants shape \(2, 4\) or \(4,\), got \(1, 4\)"),
        ((1, p[0], W, v), r"^p: wants shape \(2, t, 4\), got \(2, 4\)"),
        ((1, p[None], W[None], v), r"^v: wants shape \(1, 2, 4\), got \(2, 4\)"),
        ((1, p, W[None], v[None]), r"^p: wants shape \(1, 2, t, 4\), got \(2, 2, 4\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            theory.full_population_loss(mix, *arguments)
    with_bias = fl.TaskMixture(mix.means, mix.covariances, mix.weights, bias=True)
    with pytest.raises(ValueError, match="bias=False"):
        theory.full_population_loss(with_bias, 1, p, W, v)


def prompts_for(c, W, v):
    """Prompt tokens (K, 1, m) that add x'c_k to the prediction; c (K, d), W (m, m), v (K, m)."""
    d = c.shape[1]
    N, w = W[:d, :d], W[:d, d]
    r, u = torch.linalg.solve(N, c.mT).mT, torch.linalg.solve(N, w)
    s = (1 - (r * v[:, :d]).sum(1)) / (v[:, d] - v[:, :d] @ u)
    return torch.cat([r - s[:, None] * u, s[:, None]], dim=1)[:, None]


def descend(loss, start, tolerance=1e-6):
    """BFGS from `start`, a list of tensors; each variable is scaled by the size of its start."""
    sizes = [x.numel() for x in start]
    units = torch.cat([x.abs().max().clamp(min=1e-3).expand(x.numel()) for x in start])

    def unpack(flat):
        return [f.view(x.shape) for f, x in zip((flat * units).split(sizes), start, strict=True)]

    def value_and_gradient(flat):
        flat = torch.tensor(flat, requires_grad=True)
        value = loss(*unpack(flat))
        value.backward()
        return float(value.detach()), flat.grad.numpy()

    first = (torch.cat([x.reshape(-1) for x in start]) / units).numpy()
    result = minimize(value_and_gradient, first, jac=True, method="BFGS", options={"gtol": tolerance, "maxiter": 2000})
    return result.fun, unpack(torch.tensor(result.x))


def perturbed(x, generator, size=0.05):
    return x + size * x.abs().max() * torch.randn(x.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("case", "key"), [("fig2a", "2a|n=10"), ("fig2c", "2c|n=10")])
def test_unconstrained_minima_equal_the_reference_values(golden, paper, case, key):
    mix, values, n = paper[case], golden["PB_unconstrained_numeric"][key], 10
    g = torch.Generator().manual_seed(0)

    def loss(W, v, c=None):
        p = None if c is None else prompts_for(c, W, v.expand(2, 11))
        return theory.full_population_loss(mix, n, p, W, v)

    _, W, v = theory.plain(mix, n).attention()
    plain, (W, v) = descend(loss, [perturbed(W, g), perturbed(v[0], g)])
    assert plain == pytest.approx(values["PT_unc"], rel=1e-6)

    tuned, _ = descend(lambda c: loss(W, v, c), [mix.means])
    assert tuned == pytest.approx(values["FT_unc"], rel=1e-6)

    _, W, v = theory.shared_shift(mix, n).attention()
    joint, _ = descend(loss, [perturbed(W, g), perturbed(v[0], g), perturbed(mix.means, g)])
    assert joint == pytest.approx(values["JT_unc"], rel=1e-6)

    _, W, v = theory.decoupled(mix, n).attention()
    heads, _ = descend(loss, [perturbed(W, g), perturbed(v, g), perturbed(mix.means, g)])
    assert heads == pytest.approx(values["HEADS_unc"], rel=1e-6)
