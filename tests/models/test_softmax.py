"""The softmax model: a literal loop over sequences, laws of attention, trials, pieces, and errors by name."""

import itertools
import re

import pytest
import torch
from support.model_cases import BIASED, MIX, PLACE, SOFTMAX, N, build
from support.op_cases import DOUBLE, assert_close

import fastlin as fl
from fastlin.backends import BackendError
from fastlin.models import Start
from fastlin.ops import softmax
from fastlin.ops.softmax import softmax_loss

POINTS = fl.PointSet(torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30.0) / 10)
FORMS = {"p": torch.ones(2, 2, 1, 4), "W": torch.ones(2, 4, 4), "v": torch.ones(2, 2, 4)}


def literal_loss(model, source, n, batch, *, prompts=True, weight=None, **place):
    """One sequence, attention head and token after the other, in float64."""
    forms = {name: None if form is None else form.double() for name, form in model.forms(prompts).items()}
    H = model.shape.attention_heads
    p, W, v = forms["p"], forms["W"].view(-1, H, source.m, source.m), forms["v"].view(-1, H, source.K, source.m)
    z, q, y, task = source.sample(batch, n, **{**PLACE, **place}, dtype=DOUBLE)
    losses, means = [], []
    for r in range(model.shape.trials):
        squares = [[] for _ in range(source.K)]
        for b, k in enumerate(task.tolist()):
            tokens = [*([] if p is None else p[r, k]), *z[b], *([q[b]] if model.options["see_query"] else [])]
            prediction = torch.zeros((), dtype=DOUBLE)
            for h in range(H):
                shares = [torch.exp(q[b] @ W[r, h] @ token) for token in tokens]
                for share, token in zip(shares, tokens, strict=True):
                    prediction = prediction + share / sum(shares) * (token @ v[r, h, k])
            squares[k].append((prediction - y[b]) ** 2)
        means.append(torch.stack([sum(of) / max(len(of), 1) + torch.zeros((), dtype=DOUBLE) for of in squares]))
        losses.append(sum(sum(of) for of in squares) / batch if weight is None else weight @ means[-1])
    return torch.stack(losses), torch.stack(means)


CASES = [
    (name, source, H, t, n, see_query)
    for name, source, H, t, n, see_query in itertools.product(
        SOFTMAX, ("plain", "bias", "points"), (1, 2), (1, 3), (N, 0), (False, True)
    )
    # All pairs of the sizes occur.
    if ((H == 2) + (t == 3) + (n == 0) + see_query + (source == "bias")) % 2 == 0
]


@pytest.mark.parametrize(("name", "source", "H", "t", "n", "see_query"), CASES)
def test_loss_is_a_loop_over_sequences(name, source, H, t, n, see_query):
    source = {"plain": MIX, "bias": BIASED, "points": POINTS}[source]
    model = build(name, source, H=H, t=t, see_query=see_query)
    found, expected = model.loss(source, n, 12, **PLACE), literal_loss(model, source, n, 12)
    assert found[0].shape == (2,)
    assert found[1].shape == (2, source.K)
    assert_close(found, expected)
    grads = [torch.autograd.grad(loss.sum(), list(model.parameters())) for loss in (found[0], expected[0])]
    if n + t + see_query == 1:
        # A single token has the weight 1 whatever W is.
        assert not grads[0][0].any()
        grads = [rest for _, *rest in grads]
    assert_close(*grads, 1e-10)


@pytest.mark.parametrize("name", SOFTMAX)
def test_loss_with_weights_and_without_prompts(name):
    model, weight = build(name), torch.tensor([0.9, 0.1], dtype=DOUBLE)
    assert_close(model.loss(MIX, N, 12, **PLACE, weight=weight), literal_loss(model, MIX, N, 12, weight=weight))
    bare = model.loss(MIX, N, 12, **PLACE, prompts=False)
    assert_close(bare, literal_loss(model, MIX, N, 12, prompts=False))
    assert not torch.allclose(bare[0], model.loss(MIX, N, 12, **PLACE)[0])
    # A prompt of zero still counts as a token.
    with torch.no_grad():
        model.p.zero_()
    assert not torch.allclose(bare[0], model.loss(MIX, N, 12, **PLACE)[0])


def test_nothing_to_attend_to():
    model = build("softmax")
    loss, per_task = model.loss(MIX, 0, 12, **PLACE, prompts=False)
    _, _, y, task = MIX.sample(12, 0, **PLACE, dtype=DOUBLE)
    assert_close(loss, y.square().mean().expand(2))
    assert_close(per_task[0], torch.stack([y[task == k].square().mean() for k in range(2)]))
    grads = torch.autograd.grad(loss.sum(), [model.W, model.v])
    assert not any(grad.any() for grad in grads)
    loss, per_task = model.loss(MIX, N, 0, **PLACE)
    assert (loss.tolist(), per_task.tolist()) == ([0.0] * 2, [[0.0] * 2] * 2)


def attend(z, model, q, task):
    p, W, v = (model.forms()[letter].detach() for letter in "pWv")
    return softmax._attend(z, q, task, p, W[:, None], v[:, None], False)


def test_the_order_of_context_tokens_does_not_matter():
    model = build("softmax, task heads", t=2)
    z, q, _, task = MIX.sample(20, 9, **PLACE, dtype=DOUBLE)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert_close(attend(z[:, order], model, q, task), attend(z, model, q, task), 1e-13)
    assert not torch.allclose(attend(z[:, :8], model, q, task), attend(z, model, q, task))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_large_scores_choose_a_token(dtype):
    """exp of these scores overflows; the token with the largest has all the weight."""
    model = build("softmax", dtype=dtype)
    with torch.no_grad():
        model.W *= 1e7
    z, q, _, task = MIX.sample(20, 9, **PLACE, dtype=dtype)
    p, W, v = (model.forms()[letter].detach() for letter in "pWv")
    for r in range(2):
        tokens = torch.cat([p[r, task], z], 1)
        scores = torch.einsum("bi,ij,btj->bt", q, W[r], tokens)
        first, second = scores.topk(2).values.unbind(1)
        assert float((first - second).min()) > 40.0
        assert float(scores.abs().max()) > 1e4
        chosen = tokens[torch.arange(20), scores.argmax(1)]
        products = chosen * v[r, task]
        # Four products and three sums, twice.
        band = 2 * 7 * torch.finfo(dtype).eps * products.abs().sum(-1)
        assert ((attend(z, model, q, task)[r] - products.sum(-1)).abs() <= band).all()
    loss, _ = model.loss(MIX, 9, 20, **PLACE)
    grads = torch.autograd.grad(loss.sum(), list(model.parameters()))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_two_heads_come_close_to_linear_attention():
    """Linear attention on tokens minus their mean, up to the square of the scores."""
    size = 1e-4
    z, q, _, task = MIX.sample(20, 9, **PLACE, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(2)
    W, v = (torch.randn(*shape, generator=generator, dtype=DOUBLE) for shape in ((1, 4, 4), (1, 2, 4)))
    pair = [torch.stack([size * W, -size * W], 1), torch.stack([v, -v], 1) / (2 * size)]
    found = softmax._attend(z, q, task, None, *pair, False)
    centred = z - z.mean(1, keepdim=True)
    linear = fl.predict(centred, q, task, None, W, v, scale=1 / 9)
    # Scores are below 100 times the size.
    assert_close(found, linear, (100 * size) ** 2)


@pytest.mark.parametrize("name", SOFTMAX)
def test_float32(name):
    model = build(name, dtype=torch.float32)
    loss, per_task = model.loss(MIX, N, 60, **PLACE)
    assert loss.dtype == per_task.dtype == torch.float32
    assert_close(loss.double(), literal_loss(model, MIX, N, 60)[0], 1e-5)


def test_a_trial_is_the_same_whatever_the_number_of_trials():
    one, three = (build("softmax", R=R, H=2) for R in (1, 3))
    losses = [model.loss(MIX, N, 50, **PLACE)[0] for model in (one, three)]
    assert_close(losses[1][:1], losses[0], 1e-13)
    grads = [torch.autograd.grad(loss.sum(), model.W)[0] for loss, model in zip(losses, (one, three), strict=True)]
    assert_close(grads[1][:1], grads[0], 1e-12)


def test_trials_with_their_own_data():
    model = build("softmax", R=3)
    place = {"seed": 5, "step": 6}
    loss, per_task = model.loss(MIX, N, 30, **place, stream=[4, 9, 4])
    for stream in (4, 9):
        own = model.loss(MIX, N, 30, **place, stream=stream)
        rows = [r for r, of in enumerate((4, 9, 4)) if of == stream]
        assert_close((loss[rows], per_task[rows]), (own[0][rows], own[1][rows]), 1e-13)
    assert torch.equal(
        model.loss(MIX, N, 30, **place, stream="trial")[0], model.loss(MIX, N, 30, **place, stream=range(3))[0]
    )
    grads = torch.autograd.grad(loss[1], list(model.parameters()))
    assert all(grad[1].any() and not grad[[0, 2]].any() for grad in grads)


class Counted:
    """A source of tokens only, which stores the size and offset of each draw."""

    m, K = MIX.m, MIX.K

    def __init__(self):
        self.drawn = []

    def sample(self, batch, n, *, offset, **place):
        self.drawn.append((offset, batch))
        return MIX.sample(batch, n, offset=offset, **place)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.9, 0.1], dtype=DOUBLE)])
def test_a_large_batch_is_taken_in_pieces(monkeypatch, weight):
    """Also by the backward pass, which draws them again; losses and gradients are those of the whole."""
    model = build("softmax, task heads")
    options = {**PLACE, "offset": 3, "weight": weight}
    whole = model.loss(MIX, N, 50, **options)
    # 2 trials at 6 tokens of 4 numbers and 6 copies: 96 a sequence.
    monkeypatch.setattr(softmax, "_PIECE", 20 * 96)
    source = Counted()
    found = model.loss(source, N, 50, **options)
    assert source.drawn == [(3, 20), (23, 20), (43, 10)]
    assert_close(found, whole, 1e-13)
    grads = [torch.autograd.grad(losses[0].sum(), list(model.parameters())) for losses in (found, whole)]
    assert sorted(source.drawn[3:]) == [(3, 20), (23, 20), (43, 10)]
    assert_close(*grads, 1e-12)
    with torch.no_grad():
        assert_close(model.loss(source, N, 50, **options), whole, 1e-13)
    monkeypatch.setattr(softmax, "_PIECE", 1)
    assert_close(model.loss(MIX, N, 50, **options), whole, 1e-13)


def test_second_derivatives():
    model = build("softmax", R=1)
    p, W, v = (model.forms()[letter].detach().clone(memory_format=torch.contiguous_format) for letter in "pWv")
    leaves = [form.requires_grad_() for form in (p, W, v)]
    assert torch.autograd.gradgradcheck(lambda p, W, v: softmax_loss(MIX, 3, 4, p, W, v, **PLACE)[0], leaves)


def test_parameters_without_trials():
    model = build("softmax, task heads")
    p, W, v = (model.forms()[letter].detach() for letter in "pWv")
    found = softmax_loss(MIX, N, 20, p[1], W[1], v[1], **PLACE)
    assert (found[0].shape, found[1].shape) == ((), (2,))
    assert_close(found, [of[1] for of in model.loss(MIX, N, 20, **PLACE)], 1e-13)
    shared = softmax_loss(MIX, N, 20, p[1], W[1], v[1, 0], **PLACE)
    assert_close(shared, softmax_loss(MIX, N, 20, p[1], W[1], v[1, :1].expand(2, 4), **PLACE), 1e-13)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"backend": "cpu"}, BackendError, "softmax_loss: backend 'cpu' does not have softmax attention; wants 'auto'"),
        ({"backend": "reference"}, BackendError, "softmax_loss: backend 'reference' does not have softmax attention"),
        ({"backend": "quick"}, ValueError, "softmax_loss: backend is 'quick'; wants one of "),
        ({"mix": 3}, TypeError, "softmax_loss: mix is a int; wants a task source"),
        ({"W": torch.ones(2, 3, 4)}, ValueError, "softmax_loss: W has shape (2, 3, 4); wants "),
        ({"v": torch.ones(2, 3, 4)}, ValueError, "softmax_loss: v has shape (2, 3, 4); wants "),
        ({"p": torch.ones(2, 2, 4)}, ValueError, "softmax_loss: p has shape (2, 2, 4); wants "),
        ({"stream": [1, 2, 3]}, ValueError, "softmax_loss: stream has 3 entries, but the parameters have R = 2"),
        ({"weight": torch.ones(3)}, ValueError, "softmax_loss: weight has shape (3,); wants "),
        ({"see_query": 1}, TypeError, "softmax_loss: see_query is 1; wants True or False"),
    ],
)
def test_errors(change, error, message):
    given = {"mix": MIX, **FORMS, **PLACE, **change}
    with pytest.raises(error, match="^" + re.escape(message)):
        softmax_loss(n=N, batch=8, **given)


@pytest.mark.parametrize("name", SOFTMAX)
def test_attention_heads_start_with_opposite_readouts(name):
    model = build(name, H=3, start=Start("normal", heads=0.0, readout=2.0))
    label = torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=DOUBLE)
    for h, sign in enumerate((1.0, -1.0, 1.0)):
        assert torch.equal(model.v[:, h].detach(), (sign * label).expand_as(model.v[:, h]))
