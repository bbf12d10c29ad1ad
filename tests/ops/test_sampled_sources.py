"""Sources that are not as they were made: subclasses with a way of their own, replaced and changed arrays."""

import re

import pytest
import torch
from support.op_cases import DOUBLE, assert_close

import fastlin as fl
from fastlin import backends
from fastlin.backends import cpu

EYE = torch.eye(3, dtype=DOUBLE)
AT = {"seed": 3, "step": 4}
W, v = EYE.new_ones(4, 4) / 4 + torch.eye(4, dtype=DOUBLE), torch.ones(2, 4, dtype=DOUBLE)


def mixture(kind=fl.TaskMixture):
    return kind([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], torch.stack([EYE, 2 * EYE]), [0.4, 0.6], noise_std=0.3)


class OwnTargets(fl.TaskMixture):
    def sample_gram(self, *args, **options):
        G, q, y, task = super().sample_gram(*args, **options)
        return G, q, 0 * y + 100, task


class OwnWeights(fl.TaskMixture):
    def _beta(self, place, task):
        return 0 * super()._beta(place, task)


class OwnFeatures(fl.TaskMixture):
    def _features(self, normals):
        return 3 * super()._features(normals)


class Named(fl.TaskMixture):
    def __repr__(self):
        return "a mixture"


@pytest.mark.parametrize("kind", [OwnTargets, OwnWeights])
def test_a_subclass_draws_in_its_own_way_on_every_backend(kind):
    source = mixture(kind)
    found = [fl.sampled_loss(source, 5, 40, None, W, v, **AT, backend=name) for name in ("cpu", "eager", "reference")]
    assert_close(found[0], found[2])
    assert_close(found[1], found[2])
    assert found[0][0] != fl.sampled_loss(mixture(), 5, 40, None, W, v, **AT)[0]
    z, _, y, _ = mixture(OwnWeights).sample(6, 4, dtype=DOUBLE)
    assert mixture(OwnWeights).draw(6, 4) is None
    assert z[..., -1].std() < 0.5
    assert y.abs().max() < 2


def test_features_of_a_subclass():
    z, q, y, _ = mixture(OwnFeatures).sample(6, 4, dtype=DOUBLE)
    normal, query, label, _ = mixture().sample(6, 4, dtype=DOUBLE)
    assert_close((z[..., :3], q), (3 * normal[..., :3], 3 * query))
    assert (y != label).all()


def test_a_subclass_that_changes_nothing_of_it_is_served_by_the_kernel(monkeypatch):
    monkeypatch.setattr(cpu.backend, "last_kernel", None)
    found = fl.sampled_loss(mixture(Named), 5, 40, None, W, v, **AT)
    assert cpu.backend.last_kernel.endswith("float64 sampled rows")
    assert_close(found, fl.sampled_loss(mixture(), 5, 40, None, W, v, **AT), 0.0)


@pytest.mark.parametrize("change", [lambda means: means.float(), lambda means: means.T.contiguous().T])
def test_replaced_means_are_read_as_what_they_are(change):
    source = mixture()
    source.means = change(source.means)
    assert_close(
        fl.sampled_loss(source, 5, 40, None, W, v, **AT), fl.sampled_loss(mixture(), 5, 40, None, W, v, **AT), 0.0
    )


def test_means_of_another_shape_are_refused():
    source = mixture()
    source.means = source.means[:1]
    with pytest.raises(ValueError, match=r"means: got shape \(1, 3\), wants \(2, 3\), as when the source was made"):
        fl.sampled_loss(source, 5, 40, None, W, v, **AT)


def test_another_width_is_refused():
    source = mixture()
    source.bias = True
    with pytest.raises(ValueError, match="mix: draws m = 5, K = 2; wants the sizes that it had when it was made"):
        fl.sampled_loss(source, 5, 40, None, W, v, **AT)


@pytest.mark.parametrize("again", [{}, {"create_graph": True}])
def test_a_source_that_changes_before_the_backward_is_seen(again):
    source, leaf = mixture(), W.clone().requires_grad_()
    loss, per_task = fl.sampled_loss(source, 5, 40, None, leaf, v, **AT, backend="cpu")
    source.means.mul_(2)
    if not again:
        torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="sampled_loss: mix was changed in place after the loss was computed"):
        torch.autograd.grad(per_task.sum(), leaf, **again)


def test_a_class_is_no_source():
    with pytest.raises(TypeError, match="sampled_loss: mix is the class TaskMixture; wants a task source"):
        fl.sampled_loss(fl.TaskMixture, 5, 40, None, W, v, **AT)


def test_wide_sources():
    """Thousands of features have room for their draws, at any rank that does."""
    G, _, _, _ = fl.SphereTasks(3000).sample_gram(1, 5, dtype=torch.float32)
    assert torch.linalg.matrix_rank(G[0, :20].double(), rtol=1e-5) == 5
    with pytest.raises(ValueError, match="draws of one kind for a sequence"):
        fl.SphereTasks(4100).sample_gram(1, 4100)


def test_steps_are_not_compiled_one_by_one():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    source = mixture()

    @torch.compile(backend=backend)
    def loss(W, step):
        return fl.sampled_loss(source, 5, 40, None, W, v, seed=3, step=step)[0]

    made = []
    for step in range(7):
        assert_close(loss(W, step), fl.sampled_loss(source, 5, 40, None, W, v, seed=3, step=step)[0])
        made.append(len(graphs))
    assert made[0] > 0
    assert made[2] == made[-1]
    torch._dynamo.reset()


class OwnSource:
    """A source with `sample` alone; `change` edits what it draws."""

    K, m = 2, 4

    def __init__(self, change=lambda batch: batch):
        self.change = change

    def sample(self, batch, n, **options):
        return self.change(mixture().sample(batch, n, **options))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_tasks_of_a_source_may_be_any_integers(backend, dtype):
    source = OwnSource(lambda batch: (*batch[:3], batch[3].to(dtype)))
    found = fl.sampled_loss(source, 5, 40, None, W, v, **AT, backend=backend)
    assert_close(found, fl.sampled_loss(OwnSource(), 5, 40, None, W, v, **AT, backend="reference"))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: tuple(t.float() if t.is_floating_point() else t for t in b), TypeError, "W has dtype torch.float64"),
        (lambda b: (b[0], b[1][:3], *b[2:]), ValueError, "q has shape (3, 4)"),
        (lambda b: (*b[:3], None), ValueError, "task is None"),
        (lambda b: (*b[:3], b[3] + 1), ValueError, "task holds the index 2"),
        (lambda b: (b[0] * torch.nan, *b[1:]), ValueError, "z holds 800 values that are not finite"),
    ],
    ids=["dtype", "rows", "no task", "task index", "not finite"],
)
def test_what_a_source_draws_is_checked(backend, change, error, message):
    with pytest.raises(error, match=re.escape("the data that mix draws do not fit: prompt_loss: " + message)):
        fl.sampled_loss(OwnSource(change), 5, 40, None, W, v, **AT, backend=backend, check_finite=True)


def test_drawn_gram_matrices_are_checked():
    class NotFinite(fl.TaskMixture):
        def sample_gram(self, *args, **options):
            G, *others = super().sample_gram(*args, **options)
            return G / 0, *others

    with pytest.raises(ValueError, match="gram_loss: G holds"):
        fl.sampled_loss(mixture(NotFinite), 5, 40, None, W, v, **AT, check_finite=True)


def test_an_infinite_gradient_of_an_absent_task_is_no_wrong_weight():
    source = mixture().reweighted([1.0, 0.0])
    leaf = W.clone().requires_grad_()
    _, per_task = fl.sampled_loss(source, 5, 40, None, leaf, v, **AT, check_finite=True)
    per_task.sqrt().sum().backward()
    first = fl.sampled_loss(source, 5, 40, None, leaf, v, **AT)[1][0]
    assert_close(leaf.grad, torch.autograd.grad(first.sqrt(), leaf)[0])


def test_a_source_of_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        source = mixture()
    leaf = W.clone().requires_grad_()
    fl.sampled_loss(source, 5, 40, None, leaf, v, **AT)[1].square().sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_backend_that_does_not_draw_may_come_later(monkeypatch):
    expected = fl.sampled_loss(mixture(), 5, 40, None, W, v, **AT)
    monkeypatch.setitem(backends.ORDER, "cpu", ())
    backends.resolve.cache_clear()
    assert_close(fl.sampled_loss(mixture(), 5, 40, None, W, v, **AT), expected)
