"""Exact errors of any one-layer model on tokens with a constant: the family, simulation, and averages over tasks."""

import pytest
import torch
from support.op_cases import DOUBLE

import fastlin as fl
from fastlin.theory import forgetting as ff

D = 3
SIZE, BATCHES = 20_000, 50


def problem(seed, R=2, H=2):
    g = torch.Generator().manual_seed(seed)
    root, theta = torch.randn(D, D, generator=g, dtype=DOUBLE), torch.randn(D, generator=g, dtype=DOUBLE)
    cov = root @ root.mT / D + 0.3 * torch.eye(D, dtype=DOUBLE)
    W = 0.3 * torch.randn(R, H, D + 2, D + 2, generator=g, dtype=DOUBLE)
    v = 0.5 * torch.randn(R, H, D + 2, generator=g, dtype=DOUBLE)
    p = 0.5 * torch.randn(R, 2, D + 2, generator=g, dtype=DOUBLE)
    return cov, theta, W, v, p


@pytest.mark.parametrize("n", [0, 1, 5, 1000])
def test_members_of_the_family_have_its_error(n):
    cov, theta, _, _, _ = problem(0)
    g = torch.Generator().manual_seed(1)
    family = ff.Family(
        0.5 * torch.randn(D, generator=g, dtype=DOUBLE), 0.7, 0.4, 0.4 * torch.randn(D, D, generator=g, dtype=DOUBLE)
    )
    tasks = torch.stack([theta, -theta, 2.0 * theta.flip(0)])
    errors = ff.attention_error(*family.attention(), tasks, n, cov=cov, noise_var=0.3)
    torch.testing.assert_close(errors, ff.error(family, tasks, n, cov, 0.3), rtol=1e-12, atol=0.0)


def simulated(source, n, W, v, p, **options):
    prompts = None if p is None else p[:, None]
    losses = torch.stack(
        [
            fl.sampled_loss(source, n, SIZE, prompts, W, v[:, :, None], seed=5, step=i, scale=1 / (n + 1), **options)[0]
            for i in range(BATCHES)
        ]
    )
    return losses.mean(0), losses.std(0) / BATCHES**0.5


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("see_query", [False, True])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_any_model_against_simulation(n, see_query, prompts):
    cov, theta, W, v, p = problem(2)
    p = p if prompts else None
    source = fl.FixedTask(theta, noise_std=0.3**0.5, feature_cov=cov, bias=True)
    mean, error = simulated(source, n, W, v, p, see_query=see_query)
    exact = ff.attention_error(W, v, theta, n, p=p, cov=cov, noise_var=0.3, see_query=see_query)
    assert ((mean - exact).abs() < 5 * error).all()
    # Small enough to detect a missing term.
    assert (error < 0.02 * exact).all()


def test_heads_add():
    cov, theta, W, v, _ = problem(3)
    one = ff.attention_error(W[:, :1], v[:, :1], theta, 4, cov=cov)
    halves = ff.attention_error(0.5 * W[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1), theta, 4, cov=cov)
    torch.testing.assert_close(one, halves, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(one, ff.attention_error(W[:, 0], v[:, 0], theta, 4, cov=cov), rtol=1e-14, atol=0.0)
    single = ff.attention_error(W[1, 0], v[1, 0], theta, 4, cov=cov)
    assert single.shape == ()
    torch.testing.assert_close(single, one[1], rtol=1e-14, atol=0.0)


def test_scale_and_gradients():
    cov, theta, W, v, p = problem(4)
    scaled = ff.attention_error(W, v, theta, 3, cov=cov, scale=0.1)
    folded = ff.attention_error(0.1 * W, v, theta, 3, cov=cov, scale=1.0)
    torch.testing.assert_close(scaled, folded, rtol=1e-12, atol=0.0)
    inputs = tuple(x.clone().requires_grad_(True) for x in (W, v, theta, p))
    assert torch.autograd.gradcheck(lambda W, v, t, p: ff.attention_error(W, v, t, 3, p=p, cov=cov), inputs)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
def test_task_points_average_polynomials_of_degree_four(d):
    sphere = ff.task_points(d, radius=1.7)
    assert float(sphere.weight.sum()) == pytest.approx(1.0, abs=1e-12)
    x = sphere.theta
    torch.testing.assert_close(x.norm(dim=1), torch.full((len(x),), 1.7, dtype=DOUBLE))
    second = torch.einsum("t,ti,tj->ij", sphere.weight, x, x)
    torch.testing.assert_close(second, torch.eye(d, dtype=DOUBLE) * 1.7**2 / d, atol=1e-12, rtol=0.0)
    fourth = torch.einsum("t,ti,ti,tj,tj->ij", sphere.weight, x, x, x, x)
    wanted = (1.0 + 2.0 * torch.eye(d, dtype=DOUBLE)) * 1.7**4 / (d * (d + 2))
    torch.testing.assert_close(fourth, wanted, atol=1e-12, rtol=0.0)
    g = torch.Generator().manual_seed(d)
    root, mean = torch.randn(d, d, generator=g, dtype=DOUBLE), torch.randn(d, generator=g, dtype=DOUBLE)
    cov = root @ root.mT
    normal = ff.task_points(d, mean=mean, task_cov=cov)
    c = normal.theta - mean
    torch.testing.assert_close(
        torch.einsum("t,ti->i", normal.weight, c), torch.zeros(d, dtype=DOUBLE), atol=1e-10, rtol=0
    )
    torch.testing.assert_close(torch.einsum("t,ti,tj->ij", normal.weight, c, c), cov, atol=1e-9, rtol=0)
    third = torch.einsum("t,ti,tj,tk->ijk", normal.weight, c, c, c)
    assert float(third.abs().max()) < 1e-9 * max(1.0, float(cov.max()) ** 1.5)
    fourth = torch.einsum("t,ti,tj,tk,tl->ijkl", normal.weight, c, c, c, c)
    pairs = torch.einsum("ij,kl->ijkl", cov, cov)
    wanted = pairs + pairs.permute(0, 2, 1, 3) + pairs.permute(0, 3, 2, 1)
    torch.testing.assert_close(fourth, wanted, atol=1e-8 * float(cov.max()) ** 2, rtol=1e-9)


@pytest.mark.parametrize("kind", ["sphere", "mixture"])
def test_averages_over_tasks_against_simulation(kind):
    cov, theta, W, v, _ = problem(6)
    same = {"noise_std": 0.5, "feature_cov": cov, "bias": True}
    if kind == "sphere":
        source, points = fl.SphereTasks(D, 1.3, **same), ff.task_points(D, radius=1.3)
    else:
        source = fl.TaskMixture(theta[None], cov[None], [1.0], **same)
        points = ff.task_points(D, mean=theta, task_cov=cov)
    mean, error = simulated(source, 4, W, v, None, see_query=True)
    exact = points.mean(ff.attention_error(W, v, points.theta, 4, cov=cov, noise_var=0.25))
    assert ((mean - exact).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W": torch.zeros(3, 3)}, "W: wants shape"),
        ({"v": torch.zeros(4)}, "v: wants shape"),
        ({"n": -1}, "n: wants a non-negative integer"),
        ({"p": torch.zeros(2, 4)}, "p: wants shape"),
        ({"noise_var": -1.0}, "noise_var: wants a finite non-negative number"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"W": torch.zeros(5, 5), "v": torch.zeros(5), "theta": torch.zeros(3), "n": 2, **changes}
    with pytest.raises(ValueError, match="^" + message):
        ff.attention_error(**arguments)
