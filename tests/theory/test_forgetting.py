"""Fine-tuning without forgetting: reference values, simulation of literal tokens, optimality, limits."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fastlin.theory import forgetting as ff


def as_tensor(x):
    return torch.as_tensor(x, dtype=torch.float64)


def random_problem(seed, d=4):
    """A generic member of the family, a task, and a full covariance."""
    g = torch.Generator().manual_seed(seed)
    v_x, theta = (torch.randn(d, generator=g, dtype=torch.float64) for _ in range(2))
    v, q = torch.randn(2, generator=g, dtype=torch.float64)
    root, Q = (torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(2))
    cov = root @ root.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)
    return ff.Family(0.5 * v_x, v, q, 0.4 * Q), theta, cov


@pytest.mark.parametrize("task", ["th0", "-th0", "e2"])
def test_errors_equal_the_reference_values(golden, task):
    (case,) = golden["FF"]
    d, m, theta0 = case["d"], case["m"], as_tensor(case["theta0"])
    data = {"cov": as_tensor(case["Sigma"]), "noise_var": case["sigma2"]}
    theta = {"th0": theta0, "-th0": -theta0, "e2": torch.eye(d, dtype=torch.float64)[1]}[task]
    for shots, values in case["tasks"][task].items():
        n = int(shots)
        c_avg, c_star = ff.average_scalar(d, n, **data), ff.best_scalar(theta0, theta, n, **data)
        families = {
            "pretrained_m": ff.pretrained(d, m, **data),
            "pretrained_inf": ff.pretrained(d, **data),
            "full_c0": ff.fully_tuned(theta0, 0.0),
            "full_c1": ff.fully_tuned(theta0),
            "value_c1": ff.value_tuned(theta0, **data),
            "value_cavg": ff.value_tuned(theta0, c_avg, **data),
            "value_cstar_th0": ff.value_tuned(theta0, ff.best_scalar(theta0, theta0, n, **data), **data),
            "value_cstar_task": ff.value_tuned(theta0, c_star, **data),
            "value_m_c1": ff.value_tuned(theta0, shots=m, **data),
        }
        computed = {name: ff.error(family, theta, n, **data) for name, family in families.items()}
        computed |= {"c_star_task": c_star, "c_avg": c_avg}
        assert computed.keys() == values.keys()
        for name, value in values.items():
            assert float(computed[name]) == pytest.approx(value, rel=1e-9), (name, n)


def test_optima_equal_the_reference_values(golden):
    (case,) = golden["FF"]
    d, m, theta0 = case["d"], case["m"], case["theta0"]
    data = {"cov": case["Sigma"], "noise_var": case["sigma2"]}
    torch.testing.assert_close(ff.pretrained(d, m, **data).Q, as_tensor(case["Q11_m"]), rtol=1e-9, atol=1e-12)
    assert float(ff.pretraining_loss(d, m, **data)) == pytest.approx(case["pretrain_loss"], rel=1e-9)
    for shots, name in ((None, "zero_shot_min_value_only_minf"), (m, "zero_shot_min_value_only_m")):
        zero_shot = ff.error(ff.value_tuned(theta0, shots=shots, **data), theta0, 0, **data)
        assert float(zero_shot) == pytest.approx(case[name], rel=1e-9)


def simulated_errors(family, theta, n, cov, noise_var, size, seed):
    """Squared errors of [Z + V Z Z'Q Z / N] at its last row and column; tokens [1; x; y], query included."""
    rng = np.random.default_rng(seed)
    d, N = family.d, n + 1
    x = rng.standard_normal((size, N, d)) @ np.linalg.cholesky(cov.numpy()).T
    y = x @ theta.numpy() + noise_var**0.5 * rng.standard_normal((size, N))
    Z = np.concatenate([np.ones((size, N, 1)), x, y[..., None]], axis=2).transpose(0, 2, 1)
    Z[:, -1, -1] = 0.0
    V, Q = np.zeros((d + 2, d + 2)), np.zeros((d + 2, d + 2))
    V[-1, 1:-1], V[-1, -1] = family.v_x.numpy(), float(family.v)
    Q[0, 0], Q[1:-1, 1:-1] = float(family.q), family.Q.numpy()
    output = Z + V @ Z @ Z.transpose(0, 2, 1) @ Q @ Z / N
    return (output[:, -1, -1] - y[:, -1]) ** 2


@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_error_agrees_with_simulation(n):
    family, theta, cov = random_problem(n)
    errors = simulated_errors(family, theta, n, cov, 0.3, 800_000 // (n + 1), seed=n)
    standard_error = errors.std() / np.sqrt(errors.size)
    assert standard_error < 0.02 * errors.mean()
    assert abs(errors.mean() - float(ff.error(family, theta, n, cov, 0.3))) < 4 * standard_error


def test_attention_parameters_give_the_prediction():
    family, _, _ = random_problem(11)
    W, v = family.attention()
    rng = np.random.default_rng(0)
    n, d = 5, 4
    x, y = rng.standard_normal((n + 1, d)), rng.standard_normal(n + 1)
    y[-1] = 0.0
    z = as_tensor(np.column_stack([np.ones(n + 1), x, y]))
    G = z.mT @ z  # the query is seen
    prediction = (W.mT @ z[-1]) @ (G @ v) / (n + 1)
    values = x @ family.v_x.numpy() + float(family.v) * y
    keys = float(family.q) + x @ family.Q.numpy() @ x[-1]
    assert float(prediction) == pytest.approx(values @ keys / (n + 1), rel=1e-12)


def test_error_broadcasts_over_tasks_and_shots():
    family, theta, cov = random_problem(1)
    thetas = torch.stack([theta, -theta, 2 * theta])
    shots = [0, 1, 5, 20]
    table = ff.error(family, thetas[:, None], shots, cov, 0.2)
    assert table.shape == (3, 4)
    assert table.dtype == torch.float64
    for i, n in enumerate(shots):
        torch.testing.assert_close(table[:, i], ff.error(family, thetas, n, cov, 0.2), rtol=1e-14, atol=0)
        torch.testing.assert_close(table[1, i], ff.error(family, -theta, n, cov, 0.2), rtol=1e-13, atol=0)
    scalars = ff.best_scalar(theta, thetas[:, None], torch.tensor(shots), cov, 0.2)
    torch.testing.assert_close(scalars[2, 3], ff.best_scalar(theta, 2 * theta, 20, cov, 0.2))


@pytest.mark.parametrize("n", [0, 3])
def test_error_is_differentiable_in_every_field(n):
    family, theta, cov = random_problem(2, d=3)
    fields = [getattr(family, f.name).clone().requires_grad_() for f in dataclasses.fields(family)]
    theta.requires_grad_()

    def loss(*arguments):
        return ff.error(ff.Family(*arguments[:4]), arguments[4], n, cov, 0.3)

    assert torch.autograd.gradcheck(loss, (*fields, theta))
    loss(*fields, theta).backward()
    assert (n == 0) == (float(fields[1].grad) == 0.0)  # without shots no label is in the context
    assert all(x.grad.all() for x in (fields[0], fields[2], fields[3]))


def test_error_has_the_stated_limit():
    family, theta, cov = random_problem(3)
    limit = ff.error(family, theta, None, cov, 0.3)
    near = ff.error(family, theta, 10**9, cov, 0.3)
    assert float(limit) == pytest.approx(float(near), rel=1e-6)


@pytest.mark.parametrize("prior", ["identity", "sphere", "full"])
def test_pretraining_is_optimal_in_the_family(prior):
    d, m, s2 = 3, 6, 0.4
    _, _, cov = random_problem(4, d)
    _, _, T = random_problem(5, d)
    task_cov = {"identity": None, "sphere": torch.eye(d) / d, "full": T}[prior]
    T = torch.eye(d, dtype=torch.float64) if task_cov is None else as_tensor(task_cov)
    # E_n is quadratic in theta: tasks +-sqrt(d) times the columns of a root of T average it exactly
    tasks = d**0.5 * torch.linalg.cholesky(T).mT
    tasks = torch.cat([tasks, -tasks])

    def average(fields):
        return ff.error(ff.Family(*fields), tasks, m, cov, s2).mean()

    best = ff.pretrained(d, m, cov, s2, task_cov)
    fields = [getattr(best, f.name).clone().requires_grad_() for f in dataclasses.fields(best)]
    loss = average(fields)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(ff.pretraining_loss(d, m, cov, s2, task_cov)), rel=1e-12)
    assert max(float(x.grad.abs().max()) for x in fields) < 1e-12

    def value_and_gradient(flat):
        flat = torch.tensor(flat, requires_grad=True)
        value = average([flat[:d], flat[d], flat[d + 1], flat[d + 2 :].view(d, d)])
        value.backward()
        return float(value.detach()), flat.grad.numpy()

    start = 0.5 * np.random.default_rng(0).standard_normal(2 + d + d * d)
    end = minimize(value_and_gradient, start, jac=True, method="BFGS", options={"gtol": 1e-8}).fun
    assert end == pytest.approx(float(loss.detach()), rel=1e-9)


def test_pretraining_with_a_singular_prior_and_its_limit():
    _, _, cov = random_problem(6, 3)
    T = torch.diag(as_tensor([1.0, 0.5, 0.0]))
    nearly = ff.pretrained(3, 5, cov, 0.2, T + 1e-11 * torch.eye(3))
    torch.testing.assert_close(ff.pretrained(3, 5, cov, 0.2, T).Q, nearly.Q, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ff.pretrained(3, 10**9, cov, 0.2).Q, ff.pretrained(3, None, cov).Q, rtol=1e-6, atol=0)
    assert float(ff.pretraining_loss(3, 10**9, cov, 0.2)) == pytest.approx(
        float(ff.pretraining_loss(3, None, cov, 0.2))
    )
    with pytest.raises(ValueError, match=r"^cov: wants an invertible matrix"):
        ff.pretrained(3, None, T)


@pytest.mark.parametrize("noise_var", [0.0, 0.7])
def test_few_shots_help_above_the_threshold(noise_var):
    _, theta, cov = random_problem(7, 5)
    family = ff.pretrained(5, None, cov, noise_var)
    threshold = float(ff.threshold_shots(theta, cov, noise_var))
    zero_shot = ff.error(family, theta, 0, cov, noise_var)
    for n in range(1, 40):
        few_shot = ff.error(family, theta, n, cov, noise_var)
        if abs(n - threshold) > 1e-9:
            assert bool(few_shot < zero_shot) == (n > threshold)
    t = float(theta @ cov @ theta)
    n = 9
    stated = noise_var + t / (n + 1) + n * 5 * (t + noise_var) / (n + 1) ** 2
    assert float(ff.error(family, theta, n, cov, noise_var)) == pytest.approx(stated, rel=1e-12)


def test_full_tuning_follows_its_formulas():
    _, theta, cov = random_problem(8)
    theta0 = random_problem(9)[1]
    s2, c, n = 0.3, 1.7, 6

    def norm2(x):
        return float(x @ cov @ x)

    family = ff.fully_tuned(theta0, c)
    N = n + 1
    stated = s2 + norm2(theta - theta0 / N) + n / N**2 * (norm2(theta0 + c * theta) + c**2 * s2)
    assert float(ff.error(family, theta, n, cov, s2)) == pytest.approx(stated, rel=1e-12)
    assert float(ff.error(family, theta, 0, cov, s2)) == pytest.approx(s2 + norm2(theta - theta0), rel=1e-12)
    assert float(ff.error(family, theta, None, cov, s2)) == pytest.approx(s2 + norm2(theta), rel=1e-12)
    assert float(ff.error(family, theta0, 0, cov, s2)) == pytest.approx(s2, rel=1e-12)


@pytest.mark.parametrize("shots", [None, 3, 30])
def test_value_tuning_is_the_zero_shot_optimum(shots):
    _, theta0, cov = random_problem(10)
    family = ff.value_tuned(theta0, 0.6, shots, cov, 0.3)
    v_x = family.v_x.clone().requires_grad_()
    error = ff.error(dataclasses.replace(family, v_x=v_x), theta0, 0, cov, 0.3)
    error.backward()
    assert v_x.grad.abs().max() < 1e-12
    away = dataclasses.replace(family, v_x=1.1 * family.v_x)
    assert float(ff.error(away, theta0, 0, cov, 0.3)) > float(error.detach())
    torch.testing.assert_close(family.Q, ff.pretrained(4, shots, cov, 0.3).Q)
    if shots is None:
        t0 = float(theta0 @ cov @ theta0)
        assert float(error.detach()) == pytest.approx(0.3 + 2 * t0 / 8, rel=1e-12)
    close = ff.value_tuned(theta0, 0.6, 10**9, cov, 0.3)
    torch.testing.assert_close(close.v_x, theta0 / 8, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [1, 4, 30, None])
def test_scalars_are_the_minimisers_they_claim_to_be(n):
    _, theta0, cov = random_problem(12)
    theta, s2 = random_problem(13)[1], 0.4

    def at(c):
        return ff.error(ff.value_tuned(theta0, c, None, cov, s2), theta, n, cov, s2)

    best = ff.best_scalar(theta0, theta, n, cov, s2)
    c = best.clone().requires_grad_()
    at(c).backward()
    assert abs(float(c.grad)) < 1e-12
    for c in (0.0, 0.3, 1.0, 2.5):
        excess = ff.excess_error(theta0, theta, n, c, cov, s2)
        assert float(at(c) - at(best)) == pytest.approx(float(excess), rel=1e-9, abs=1e-13)

    T = random_problem(14)[2]
    tasks = 2 * torch.linalg.cholesky(T).mT  # d = 4: columns times sqrt(d)
    tasks = torch.cat([tasks, -tasks])
    c = ff.average_scalar(4, n, cov, s2, T).clone().requires_grad_()
    ff.error(ff.value_tuned(theta0, c, None, cov, s2), tasks, n, cov, s2).mean().backward()
    assert abs(float(c.grad)) < 1e-12


def test_scalars_in_the_limit_of_many_shots():
    _, theta0, cov = random_problem(15)
    theta, s2, k = random_problem(16)[1], 0.4, 8
    t0, t, g = (float(a @ cov @ b) for a, b in ((theta0, theta0), (theta, theta), (theta, theta0)))
    cos = g / (t * t0) ** 0.5
    far = 10**9
    assert float(ff.best_scalar(theta0, theta, None, cov, s2)) == pytest.approx(
        float(ff.best_scalar(theta0, theta, far, cov, s2)), rel=1e-7
    )
    own = ff.best_scalar(theta0, theta0, torch.arange(0, 200), cov, s2)
    assert bool((own.diff() > 0).all())
    assert float(ff.best_scalar(theta0, theta0, None, cov, s2)) == pytest.approx(7 / 8, rel=1e-12)
    assert float(ff.average_scalar(4, far, cov, s2)) == pytest.approx(float(ff.average_scalar(4, None)), rel=1e-7)

    def at(c):
        return float(ff.error(ff.value_tuned(theta0, c, None, cov, s2), theta, None, cov, s2))

    assert at(1.0) == pytest.approx(s2 + t0 / k**2, rel=1e-12)
    best = ff.best_scalar(theta0, theta, None, cov, s2)
    assert at(best) == pytest.approx(s2 + t0 / k**2 * (1 - cos**2), rel=1e-12)
    excess = float(ff.cosine_excess(theta0, theta, cov))
    assert excess == pytest.approx((t0**0.5 * cos - t**0.5) ** 2 / k**2, rel=1e-12)
    assert excess == pytest.approx(at(ff.best_scalar(theta0, theta0, None, cov, s2)) - at(best), rel=1e-9)
    assert excess == pytest.approx(float(ff.excess_error(theta0, theta, None, 7 / 8, cov, s2)), rel=1e-12)
    assert float(ff.cosine_excess(theta0, -theta0, cov)) == pytest.approx(4 * t0 / k**2, rel=1e-12)


def test_minimal_update_keeps_the_pretrained_scalar():
    start = ff.pretrained(3, 7)
    kept = float(ff.minimal_update_scalar(start))
    assert kept == 1.0
    _, v = start.attention()
    theta0 = as_tensor([1.0, 2.0, 0.5])
    distance = {c: float((ff.value_tuned(theta0, c, 7).attention()[1] - v).norm()) for c in (0.5, 0.9, 1.0, 1.1)}
    assert min(distance, key=distance.get) == kept


@pytest.mark.parametrize("weight", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_auxiliary_optimum_is_stationary(weight, n):
    _, theta0, cov = random_problem(17)
    s2 = 0.3
    alpha, c = ff.auxiliary_optimum(theta0, n, weight, cov, s2)
    v_x, c = (alpha * theta0).requires_grad_(), c.clone().requires_grad_()
    family = ff.Family(v_x, c, 0.0, torch.linalg.inv(cov))
    loss = ff.error(family, theta0, 0, cov, s2) + weight * ff.error(family, theta0, n, cov, s2)
    loss.backward()
    assert v_x.grad.abs().max() < 1e-12
    assert c.grad.abs() < 1e-12
    if weight == 0:
        assert float(alpha) == pytest.approx(1 / 8, rel=1e-12)
        assert float(c.detach()) == pytest.approx(float(ff.best_scalar(theta0, theta0, n, cov, s2)), rel=1e-12)


def test_auxiliary_step_effect_is_exact():
    _, theta0, cov = random_problem(18)
    family, s2, step = ff.value_tuned(theta0, 1.0, None, cov, 0.3), 0.3, 0.02
    v_x = family.v_x.clone().requires_grad_()
    ff.error(dataclasses.replace(family, v_x=v_x), theta0, 5, cov, s2).backward()
    moved = dataclasses.replace(family, v_x=family.v_x - step * v_x.grad)
    rise = ff.error(moved, theta0, 0, cov, s2) - ff.error(family, theta0, 0, cov, s2)
    assert float(rise) == pytest.approx(float(ff.auxiliary_step_effect(v_x.grad, step, cov)), rel=1e-10)


@pytest.mark.parametrize("n", [1, 6, 25])
def test_quadratic_form_is_the_price_of_shots(n):
    family, theta, cov = random_problem(19)
    Q, s2 = 0.5 * (family.Q + family.Q.mT), 0.3
    A, b, C = ff.quadratic_form(Q, theta, n, cov, s2)
    for v_x in (family.v_x, torch.zeros(4), theta):
        member = ff.Family(v_x, 1.0, 0.0, Q)
        price = ff.error(member, theta, n, cov, s2) - ff.error(member, theta, 0, cov, s2)
        v_x = v_x.double()
        assert float(price) == pytest.approx(float(-v_x @ A @ v_x + 2 * b @ v_x + C), rel=1e-11)
    assert torch.linalg.eigvalsh(ff.quadratic_form(torch.linalg.inv(cov), theta, n, cov, s2).A).min() > 0


def test_numbers_are_not_rounded_to_single_precision():
    family = ff.Family([0.1, 0.2], 0.3, 0.7, [[0.1, 0.2], [0.3, 0.4]])
    assert float(family.v) == 0.3
    assert float(family.v_x[0]) == 0.1
    assert float(family.Q[1, 1]) == 0.4
    assert float(ff.fully_tuned([0.1, 0.2], 0.3).v) == 0.3


def test_wrong_arguments_are_named():
    family = ff.pretrained(3)
    theta = torch.ones(3)
    cases = [
        (
            lambda: ff.Family(torch.zeros(3), 1.0, 0.0, torch.eye(2)),
            r"^Q: wants shape \(3, 3\), got \(2, 2\)",
        ),
        (
            lambda: ff.Family(torch.zeros(3, 1), 1.0, 0.0, torch.eye(3)),
            r"^v_x: wants shape \(d,\), got \(3, 1\)",
        ),
        (
            lambda: ff.Family(torch.zeros(3), torch.ones(2), 0.0, torch.eye(3)),
            r"^v: wants shape \(\), got \(2,\)",
        ),
        (lambda: ff.error(family, torch.ones(4), 1), r"^theta: wants shape \(..., 3\), got \(4,\)"),
        (lambda: ff.error(family, theta, -1), "^n: wants non-negative integers, got -1"),
        (lambda: ff.error(family, theta, 1.5), "^n: wants non-negative integers, got 1.5"),
        (lambda: ff.error(family, theta, "one"), "^n: wants non-negative integers, got 'one'"),
        (lambda: ff.error(family, theta, True), "^n: wants non-negative integers"),
        (
            lambda: ff.error(family, theta, 1, noise_var=-1.0),
            "^noise_var: wants a finite non-negative number",
        ),
        (lambda: ff.error(family, theta, 1, cov=torch.eye(2)), r"^cov: wants shape \(3, 3\), got \(2, 2\)"),
        (lambda: ff.error(family, theta, 1, cov=torch.ones(3, 3).triu()), "^cov: wants a symmetric matrix"),
        (
            lambda: ff.pretrained(3, cov=-torch.eye(3)),
            "^cov: wants a positive semi-definite matrix, got the eigenvalue -1",
        ),
        (
            lambda: ff.average_scalar(2, 1, task_cov=[[1.0, 2.0], [2.0, 1.0]]),
            "^task_cov: wants a positive semi-definite",
        ),
        (lambda: ff.pretrained(2.5), "^d: wants a non-negative integer, got 2.5"),
        (lambda: ff.pretrained(0), "^d: wants at least one feature, got 0"),
        (lambda: ff.pretrained(3, shots=-2), "^shots: wants a non-negative integer, got -2"),
        (lambda: ff.value_tuned(torch.ones(2, 2)), r"^theta0: wants shape \(d,\), got \(2, 2\)"),
        (lambda: ff.best_scalar(theta, torch.zeros(3), 4), "^theta: wants a task that is not zero"),
        (lambda: ff.auxiliary_optimum(theta, 0, 1.0), "^n: wants at least one shot"),
        (lambda: ff.auxiliary_optimum(theta, 1, -1.0), "^weight: wants a finite non-negative number"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
