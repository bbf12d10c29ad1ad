"""What must hold whatever the numbers are."""

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, make

import fastlin as fl

pytestmark = pytest.mark.usefixtures("backend")

FORMS = [{}, {"R": 2}, {"R": 2, "H": 2}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_tokens_or_gram(op, form):
    case = make(op, **form, see_query=True)
    z, q, *parameters = case.inputs.values()
    from_gram = getattr(fl, {"prompt_loss": "gram_loss", "stack_loss": "gram_stack_loss"}[op])
    assert_close(from_gram(fl.gram(z), q, case.y, case.task, *parameters, see_query=True), case())


@pytest.mark.parametrize("op", ["gram_loss", "gram_stack_loss"])
def test_only_the_symmetric_part_counts(op):
    case = make(op).differentiable()
    noise = torch.randn(6, 5, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    assert_close(case(G=case.inputs["G"] + noise - noise.mT), case())
    (dG,) = torch.autograd.grad(case()[0], case.inputs["G"])
    assert_close(dG, dG.mT, 1e-15)


@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_order_of_tokens(op):
    case = make(op, n=9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    assert_close(case(z=case.inputs["z"][:, order]), case(), 1e-13)


@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss", "gram_loss", "gram_stack_loss", "predict"])
def test_zero_prompt_is_no_prompt(op):
    case = make(op)
    assert_close(case(p=torch.zeros_like(case.inputs["p"])), case(p=None), 1e-15)


def test_prompt_tokens_are_tokens():
    case = make("prompt_loss", K=None, t=3)
    z, p = case.inputs["z"], case.inputs["p"]
    assert_close(case(z=torch.cat([p.expand(6, 3, 5), z], 1), p=None), case(), 1e-13)


@pytest.mark.parametrize("op", ["prompt_loss", "gram_stack_loss"])
def test_pieces_of_a_batch_add_up(op):
    case = make(op, B=10, R=2)
    total = case()[0] * 10
    for part in (slice(0, 3), slice(3, 4), slice(4, 10)):
        first, q, *parameters = case.inputs.values()
        loss, _ = getattr(fl, op)(first[part], q[part], case.y[part], case.task[part], *parameters)
        total = total - loss * len(case.y[part])
    assert (total.abs() < 1e-12 * case()[0] * 10).all()


@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_trials_are_separate_calls(op):
    case = make(op, R=4)
    first, q, *parameters = case.inputs.values()
    rows = [getattr(fl, op)(first, q, case.y, case.task, *(p[r] for p in parameters)) for r in range(4)]
    assert_close(case(), [torch.stack(column) for column in zip(*rows, strict=True)], 1e-13)


def test_weights_of_the_tasks():
    case = make("prompt_loss", B=12, K=3)
    loss, per_task = case()
    counts = torch.bincount(case.task, minlength=3).double()
    assert_close(case(weight=counts / 12)[0], loss, 1e-14)
    assert_close((per_task * counts).sum() / 12, loss, 1e-14)


def test_loss_is_the_squared_error_of_predict():
    for loss_op, op in (("prompt_loss", "predict"), ("stack_loss", "stack_predict")):
        case = make(loss_op, R=2, H=2)
        z, q, *parameters = case.inputs.values()
        yhat = getattr(fl, op)(z, q, case.task, *parameters)
        assert_close(case()[0], (yhat - case.y).square().mean(-1), 1e-14)


def test_reduced_model():
    """x' W (X' y + p_k) is the op with W in the top left block, v = e_m and prompt token [p_k; 1]."""
    generator = torch.Generator().manual_seed(0)
    B, n, d, K = 5, 7, 3, 2
    X, y, x, W, p = (
        torch.randn(*shape, dtype=DOUBLE, generator=generator) for shape in ((B, n, d), (B, n), (B, d), (d, d), (K, d))
    )
    task = torch.tensor([0, 1, 1, 0, 1])
    expected = torch.einsum("bi,ij,bj->b", x, W, torch.einsum("bni,bn->bi", X, y) + p[task])
    z = torch.cat([X, y[..., None]], -1)
    q = torch.cat([x, x.new_zeros(B, 1)], -1)
    merged = torch.nn.functional.pad(W, (0, 1, 0, 1))
    head = torch.eye(d + 1, dtype=DOUBLE)[-1]
    prompts = torch.cat([p, p.new_ones(K, 1)], -1)[:, None]
    # The prompt's own label of 1 squares into G_mm alone, which W's zero row does not read.
    assert_close(fl.predict(z, q, task, prompts, merged, head), expected, 1e-13)


def test_model_with_constant_coordinate():
    """[Z + V Z Z' Q Z / N] at the query's label, tokens in columns [1; x; y]: W = Q', v = last row of V."""
    generator = torch.Generator().manual_seed(1)
    n, d = 6, 3
    m = d + 2
    Q, V = (torch.randn(m, m, dtype=DOUBLE, generator=generator) for _ in range(2))
    Z = torch.randn(m, n + 1, dtype=DOUBLE, generator=generator)
    Z[0] = 1.0
    Z[-1, -1] = 0.0
    expected = (Z + V @ Z @ Z.T @ Q @ Z / (n + 1))[-1, -1]
    found = fl.predict(Z.T[None, :n], Z.T[n:], None, None, Q.T, V[-1], scale=1 / (n + 1), see_query=True)
    assert_close(found[0], expected, 1e-13)
