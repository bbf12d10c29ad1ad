"""The reference against the formulas of the paper, one number at a time."""

import math

import pytest
import torch
from support.op_cases import DOUBLE, LOSSES, assert_close, make

import fastlin as fl


def attention_by_hand(Z, Wq, Wk, Wv, seen, scale):
    """Row by row: out_i = scale sum_{j seen} <Wq' z_i, Wk' z_j> Wv' z_j."""
    rows = []
    for z_i in Z:
        out = torch.zeros(Wv.shape[1], dtype=DOUBLE)
        for j in range(seen):
            out = out + scale * float((z_i @ Wq) @ (Z[j] @ Wk)) * (Z[j] @ Wv)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("see_query", [False, True])
@pytest.mark.parametrize(("L", "first_skip"), [(1, None), (1, True), (2, None), (2, False), (3, True)])
def test_stack_by_hand(L, first_skip, see_query):
    generator = torch.Generator().manual_seed(L)
    B, n, m, K, t, scale, rho = 3, 4, 3, 2, 2, 0.2, 1.5

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    Wq, Wk, Wv, p, h = normal(L, m, m), normal(L, m, m), normal(L, m, m), normal(K, t, m), normal(K, m)
    z, q, task = normal(B, n, m), normal(B, m), torch.tensor([1, 0, 1])
    found = fl.reference.stack_predict(
        z,
        q,
        task,
        p,
        Wq @ Wk.mT,
        Wv,
        h,
        scale=scale,
        see_query=see_query,
        first_skip=first_skip,
        residual=rho,
    )
    for b in range(B):
        Z = torch.cat([p[task[b]], z[b], q[b : b + 1]])
        for layer in range(L):
            seen = t + n + see_query
            attended = attention_by_hand(Z, Wq[layer], Wk[layer], Wv[layer], seen, scale)
            skip = layer > 0 or (L > 1 if first_skip is None else first_skip)
            Z = attended + (rho * Z if skip else 0)
        assert float(found[b]) == pytest.approx(float(Z[-1] @ h[task[b]]), rel=1e-12)


def test_layer_is_a_stack_of_one():
    """With v_k = Wv h_k."""
    case = make("stack_predict", L=1)
    A, C, h = (case.inputs[name] for name in "ACh")
    z, q, p = (case.inputs[name] for name in "zqp")
    assert_close(fl.reference.predict(z, q, case.task, p, A[0], h @ C[0].T), case(fl.reference), 1e-14)


def test_attention_heads_add():
    case = make("predict", R=2, H=3)
    z, q, p, W, v = case.inputs.values()
    total = sum(fl.reference.predict(z, q, case.task, p, W[:, i], v[:, i]) for i in range(3))
    assert_close(case(fl.reference), total, 1e-14)


def test_stack_heads_add_inside_the_layer():
    """Two heads are not the sum of two stacks, but two equal halves of C are one head."""
    case = make("stack_predict", R=1, L=3)
    halves = torch.stack([0.25 * case.inputs["C"], 0.75 * case.inputs["C"]], 2)
    both = case.inputs["A"][:, :, None].expand(-1, -1, 2, -1, -1)
    assert_close(case(fl.reference, A=both, C=halves), case(fl.reference), 1e-13)


@pytest.mark.parametrize("op", LOSSES)
def test_losses_by_hand(op):
    case = make(op, K=4, B=9)
    predictor = {"stack_loss": "stack_predict", "gram_stack_loss": "stack_predict"}.get(op, "predict")
    if op.startswith("gram"):
        tokens = torch.linalg.cholesky(case.inputs["G"] + 1e-9 * torch.eye(5, dtype=DOUBLE)).mT
        z, parameters = tokens, list(case.inputs.values())[1:]
    else:
        z, *parameters = case.inputs.values()
    q, *parameters = parameters
    yhat = getattr(fl.reference, predictor)(z, q, case.task, *parameters)
    tolerance = 1e-6 if op.startswith("gram") else 1e-13
    squares = [(float(a) - float(b)) ** 2 for a, b in zip(yhat, case.y, strict=True)]
    means = []
    for k in range(4):
        own = [s for s, task in zip(squares, case.task, strict=True) if int(task) == k]
        means.append(sum(own) / len(own) if own else 0.0)
    assert means[3] == 0.0
    loss, per_task = case(fl.reference)
    assert float(loss) == pytest.approx(sum(squares) / 9, rel=tolerance)
    assert per_task.tolist() == pytest.approx(means, rel=tolerance)
    weight = [0.1, 0.2, 0.3, 0.4]
    loss, _ = case(fl.reference, weight=weight)
    assert float(loss) == pytest.approx(sum(w * mean for w, mean in zip(weight, means, strict=True)), rel=tolerance)


def test_gram_by_hand():
    case = make("predict", K=2, t=2)
    z, q, p = (case.inputs[name] for name in "zqp")
    G = fl.reference.gram(z, p, case.task, q, see_query=True)
    for b in range(len(z)):
        tokens = [*p[case.task[b]], *z[b], q[b]]
        assert_close(G[b], sum(torch.outer(token, token) for token in tokens), 1e-14)


def test_options_of_the_ops_are_taken():
    case = make("prompt_loss")
    expected = case(fl.reference)
    assert_close(case(fl.reference, backend="reference", check_finite=True), expected, 0.0)
    with pytest.raises(ValueError, match=r"reference\.prompt_loss: backend is 'eager'; wants 'auto' or"):
        case(fl.reference, backend="eager")
    broken = case.inputs["W"].clone()
    broken[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"prompt_loss: W holds 1 values that are not finite"):
        case(fl.reference, W=broken, check_finite=True)


@pytest.mark.parametrize(
    ("op", "form", "change", "message"),
    [
        ("prompt_loss", {}, {"task": torch.full((6,), -1)}, "prompt_loss: task holds the index -1"),
        ("prompt_loss", {}, {"y": torch.zeros(1, dtype=DOUBLE)}, r"prompt_loss: y has shape \(1,\); wants \(B,\)"),
        ("prompt_loss", {}, {"v": torch.zeros(2, 5, dtype=DOUBLE)}, r"prompt_loss: v has shape \(2, 5\)"),
        ("stack_loss", {}, {"C": torch.zeros(3, 5, 5, dtype=DOUBLE)}, r"stack_loss: C has shape \(3, 5, 5\)"),
        ("stack_predict", {"R": 2}, {"p": torch.zeros(3, 3, 2, 5, dtype=DOUBLE)}, "stack_predict: p has shape"),
        ("gram_loss", {}, {"weight": [1.0]}, r"gram_loss: weight has shape \(1,\); wants \(K,\)"),
        ("predict", {"K": 6}, {"task": None}, "predict: task is None, which is one task, but p has K = 6"),
    ],
)
def test_wrong_calls_are_refused(op, form, change, message):
    case = make(op, **form)
    fields = {name: change[name] for name in ("y", "task") if name in change}
    case = type(case)(**{**vars(case), **fields})
    with pytest.raises(ValueError, match=f"^{message}"):
        case(fl.reference, **{name: value for name, value in change.items() if name not in fields})
