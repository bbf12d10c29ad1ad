"""One prompt for all tasks: stationarity, a numerical minimum, its place among the optima, and what hides the task."""

import pytest
import torch

from fastlin import theory


def single(mix, mixture):
    """The one Gaussian task with the moments of beta."""
    mean = mix.weights @ mix.means
    second = torch.einsum("k,kij->ij", mix.weights, mix.covariances + mix.means[:, :, None] * mix.means[:, None])
    return mixture(mean[None], (second - torch.outer(mean, mean))[None], [1.0], mix.noise_std, mix.feature_cov)


def loss_of(mix, n, W, p):
    return theory.population_loss(mix, n, W, p.expand(mix.K, -1))


@pytest.mark.parametrize("seed", range(6))
def test_it_is_stationary_and_has_the_loss_it_states(random_mixture, seed):
    n = [0, 1, 2, 7, 25, 100][seed]
    mix = random_mixture(seed, d=2 + seed % 3, K=1 + seed % 4, noise_std=[0.0, 0.9][seed % 2])
    optimum = theory.one_prompt(mix, n)
    assert optimum.prompts.shape == (mix.K, mix.d)
    assert torch.equal(optimum.prompts, optimum.prompts[:1].expand(mix.K, -1))
    W, p = optimum.W.clone().requires_grad_(), optimum.prompts[0].clone().requires_grad_()
    loss = loss_of(mix, n, W, p)
    assert float(loss.detach()) == pytest.approx(optimum.loss, rel=1e-12)
    loss.backward()
    assert W.grad.abs().max() < 1e-9
    assert p.grad.abs().max() < 1e-11
    assert float(theory.full_population_loss(mix, n, *optimum.attention())) == pytest.approx(optimum.loss, rel=1e-12)
    if n:
        assert float(loss_of(mix, n, 1.3 * optimum.W + 0.05, optimum.prompts[0])) > optimum.loss


@pytest.mark.parametrize("n", [1, 5])
def test_minimisation_ends_there(random_mixture, n):
    mix = random_mixture(21 + n, d=3, K=3)
    W = (0.1 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    p = torch.full((3,), 0.1, dtype=torch.float64).requires_grad_()
    descent = torch.optim.LBFGS(
        [W, p], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure():
        descent.zero_grad()
        loss = loss_of(mix, n, W, p)
        loss.backward()
        return loss

    descent.step(closure)
    optimum = theory.one_prompt(mix, n)
    assert float(loss_of(mix, n, W.detach(), p.detach())) == pytest.approx(optimum.loss, rel=1e-12)
    # A loss within 1e-12 of the least leaves a millionth of the parameters open.
    torch.testing.assert_close(W.detach(), optimum.W, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(p.detach(), optimum.prompts[0], rtol=1e-6, atol=1e-6)


def test_it_lies_between_plain_and_joint(random_mixture):
    for seed in range(100):
        n = [0, 1, 3, 10, 50][seed % 5]
        mix = random_mixture(seed, d=1 + seed % 4, K=1 + seed % 3, noise_std=[0.0, 0.5, 2.0][seed % 3])
        plain, one, joint = (f(mix, n).loss for f in (theory.plain, theory.one_prompt, theory.joint))
        room = 1e-12 * plain
        assert plain + room >= one >= joint - room
        if mix.K == 1:
            assert one == pytest.approx(joint, rel=1e-12)
        elif n:
            assert plain > one > joint


def test_the_tasks_enter_as_one(random_mixture, mixture):
    mix = random_mixture(4, d=3, K=3)
    together = single(mix, mixture)
    optimum, wanted = theory.one_prompt(mix, 6), theory.joint(together, 6)
    assert optimum.loss == pytest.approx(wanted.loss, rel=1e-12)
    torch.testing.assert_close(optimum.W, wanted.W, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(optimum.prompts[:1], wanted.prompts, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 10])
def test_it_is_plain_when_the_mean_of_all_is_zero(paper, mixture, n):
    """As in fig. 2c, up to the rounding of 0.3 * 2.1 - 0.7 * 0.9, and with means of exactly zero."""
    plain, one = (f(paper["fig2c"], n) for f in (theory.plain, theory.one_prompt))
    assert one.loss == pytest.approx(plain.loss, rel=1e-14)
    assert float(one.prompts.abs().max()) < 1e-13
    torch.testing.assert_close(one.W, plain.W, rtol=1e-13, atol=1e-15)
    eye = torch.eye(3, dtype=torch.float64)
    even = mixture([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]], torch.stack([eye, 2 * eye]), [0.5, 0.5])
    assert not theory.one_prompt(even, n).prompts.any()


def test_known_tasks(mixture):
    """Two vectors spread along a line that does not hold their mean; along one that does; and no spread at all."""
    zero, far = torch.zeros(2, 2, 2), [[1.0, 1.0], [-1.0, 1.0]]
    with pytest.raises(theory.NotAttained) as caught:
        theory.one_prompt(mixture(far, zero, [0.5, 0.5], 0.5), 5)
    nearly = theory.one_prompt(mixture(far, zero + 1e-9 * torch.eye(2), [0.5, 0.5], 0.5), 5)
    assert caught.value.infimum == pytest.approx(nearly.loss, rel=1e-6)
    inside = mixture([[3.0, 0.0], [-1.0, 0.0]], zero, [0.5, 0.5], 0.5)
    optimum = theory.one_prompt(inside, 5)
    assert float(loss_of(inside, 5, optimum.W, optimum.prompts[0])) == pytest.approx(optimum.loss, rel=1e-12)
    assert float(theory.one_prompt(mixture(torch.zeros(2, 2), zero, [0.5, 0.5]), 5)) == 0.0


def test_wrong_arguments_are_named(random_mixture):
    for n in (-1, 2.0, "3", None, True):
        with pytest.raises(ValueError, match=r"^n: wants a non-negative integer, got"):
            theory.one_prompt(random_mixture(0), n)
    with pytest.raises(ValueError, match=r"^mix: wants a task mixture, got str without means"):
        theory.one_prompt("mixture", 1)
