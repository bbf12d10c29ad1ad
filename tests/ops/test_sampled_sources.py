"""Sources that are not as they were made: subclasses with a way of their own, replaced and changed arrays."""

import pytest
import torch
from helpers import DOUBLE, assert_close

import fastlin as fl
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


def test_a_subclass_that_changes_nothing_of_it_is_served_by_the_kernel(monkeypatch):
    monkeypatch.setattr(cpu, "last_kernel", None)
    found = fl.sampled_loss(mixture(Named), 5, 40, None, W, v, **AT)
    assert cpu.last_kernel.endswith("float64 sampled")
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
    with pytest.raises(TypeError, match="sampled_loss: mix is a ABCMeta; wants a task source"):
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
