"""Errors at chosen shots: exact where a closed form covers the model, sampled elsewhere, on tasks at any angle."""

import re

import numpy as np
import pytest
import torch
from support.op_cases import DOUBLE, assert_close

import fastlin as fl
from fastlin.theory import forgetting as ff

COV = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=DOUBLE)
SAME = {"noise_std": 0.4, "feature_cov": COV, "bias": True}
TASK = fl.FixedTask([1.0, 0.5, -1.0], **SAME)
SOURCES = {
    "task": TASK,
    "sphere": fl.SphereTasks(3, 1.5, **SAME),
    "mixture": fl.TaskMixture([[1.0, 0.0, 0.5], [0.0, -1.0, 0.0]], torch.stack([COV, 0.5 * COV]), [0.3, 0.7], **SAME),
}


def family():
    return ff.value_tuned(TASK.theta, 0.7, shots=9, cov=COV, noise_var=0.16)


def trained(source, regime="pretrain", **options):
    return fl.train(source, regime, 5, steps=6, batch=64, trials=3, records=1, **options)


@pytest.mark.parametrize("name", SOURCES)
def test_exact_and_sampled_errors_agree(name):
    run = trained(SOURCES[name])
    shots = [0, 1, 8]
    exact = fl.evaluate(run, SOURCES[name], shots)
    assert exact.exact
    assert exact.shots == (0, 1, 8)
    assert exact.error.shape == (3, 3)
    assert (exact.standard_error == 0).all()
    sampled = fl.evaluate(run, SOURCES[name], shots, exact=False, batches=40)
    assert not sampled.exact
    assert ((exact.error - sampled.error).abs() < 5 * sampled.standard_error).all()
    assert (sampled.standard_error < 0.05 * sampled.error).all()


@pytest.mark.parametrize("name", SOURCES)
def test_prompts_and_heads_of_tasks_count(name):
    run = trained(SOURCES[name], "joint+heads")
    exact = fl.evaluate(run, SOURCES[name], [0, 4])
    sampled = fl.evaluate(run, SOURCES[name], [0, 4], exact=False, batches=40)
    assert exact.exact
    assert ((exact.error - sampled.error).abs() < 5 * sampled.standard_error).all()


def test_a_model_with_and_without_its_prompts():
    run = trained(TASK, "joint")
    assert_close(fl.evaluate(run.model, TASK, 3).error, fl.evaluate(run, TASK, 3).error, 1e-12)
    without = fl.evaluate(run.model, TASK, 3, prompts=False).error
    assert not torch.allclose(without, fl.evaluate(run, TASK, 3).error)


def test_a_member_of_the_family():
    found = fl.evaluate(family(), TASK, range(6))
    assert_close(found.error[:, 0], ff.error(family(), TASK.theta, torch.arange(6), COV, 0.16), 1e-12)
    sampled = fl.evaluate(family(), TASK, [0, 5], exact=False, batches=40)
    assert ((sampled.error[:, 0] - found.error[[0, 5], 0]).abs() < 5 * sampled.standard_error[:, 0]).all()


def test_tasks_that_the_model_treats_alike_may_be_any_number():
    """The error on a mixture is the average over its tasks, for the family and for a model of one task."""
    mixture = SOURCES["mixture"]
    alone = [fl.TaskMixture(mixture.means[k : k + 1], mixture.covariances[k : k + 1], [1.0], **SAME) for k in range(2)]
    for model in (family(), trained(TASK)):
        each = [fl.evaluate(model, one, [0, 4]).error for one in alone]
        found = fl.evaluate(model, mixture, [0, 4])
        assert_close(found.error, 0.3 * each[0] + 0.7 * each[1], 1e-12)
        sampled = fl.evaluate(model, mixture, [0, 4], exact=False, batches=40)
        assert ((found.error - sampled.error).abs() < 5 * sampled.standard_error).all()
    assert fl.evaluate(trained(mixture), TASK, 3).error.shape == (1, 3)
    heads = trained(mixture, "heads")
    with pytest.raises(ValueError, match=r"^source: has 1 tasks, wants 2, since the model has its own v for each$"):
        fl.evaluate(heads, TASK, 3)


def test_shots_may_be_numbers_of_numpy_and_torch():
    for shots in (np.int64(3), np.arange(3, 4), torch.tensor([3]), torch.tensor(3)):
        assert fl.evaluate(family(), TASK, shots).shots == (3,)


def test_stacks_and_points_are_sampled():
    stack = trained(TASK, "pretrain", model="stack", layers=2)
    for model, source in ((stack, TASK), (family(), fl.PointSet.drawn(TASK, 50))):
        found = fl.evaluate(model, source, 2, batch=256, batches=8)
        assert not found.exact
        assert (found.standard_error > 0).all()
        with pytest.raises(ValueError, match=r"^exact: got True where no closed form"):
            fl.evaluate(model, source, 2, exact=True)


def test_more_batches_and_other_seeds():
    small, large = (fl.evaluate(family(), TASK, 3, exact=False, batch=512, batches=size) for size in (16, 256))
    assert 2.0 < float(small.standard_error / large.standard_error) < 8.0
    other = fl.evaluate(family(), TASK, 3, exact=False, batch=512, batches=16, seed=1)
    assert float(other.error) != float(small.error)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, "model: got a int"),
        ({"source": fl.FixedTask}, TypeError, "source: got the class FixedTask, wants a task source"),
        (
            {"source": fl.FixedTask([1.0, 0.0, 0.0])},
            ValueError,
            "source: has token width 4, wants 5",
        ),
        ({"shots": [-1]}, ValueError, "shots: "),
        ({"shots": []}, ValueError, "shots: got none, wants at least one"),
        ({"shots": 1.5}, TypeError, "shots: got 1.5 (float), wants an integer"),
        ({"batches": 1}, ValueError, "batches: got 1, wants 2 or more"),
        ({"batch": 0}, ValueError, "batch: got 0, wants 1 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        fl.evaluate(**{"model": family(), "source": TASK, "shots": 2, **arguments})


@pytest.mark.parametrize("cosine", [-1.0, -0.3, 0.0, 0.8, 1.0])
def test_tasks_at_an_angle(cosine):
    other = TASK.at_cosine(cosine)
    S, a, b = COV, TASK.theta, other.theta
    assert float(b @ S @ b) == pytest.approx(float(a @ S @ a), rel=1e-12)
    assert float(a @ S @ b / (a @ S @ a)) == pytest.approx(cosine, abs=1e-12)
    assert (other.noise_std, other.bias, other.m) == (0.4, True, 5)
    assert torch.equal(other.feature_cov, COV)
    plain = fl.FixedTask([0.0, 2.0]).at_cosine(cosine).theta
    assert float(plain[1]) == pytest.approx(2 * cosine, abs=1e-12)


def test_angles_that_are_not_there():
    with pytest.raises(ValueError, match=r"^cosine: got 1.5, wants a number from -1 to 1"):
        TASK.at_cosine(1.5)
    with pytest.raises(ValueError, match=r"^cosine: got 0.0 for theta"):
        fl.FixedTask([2.0]).at_cosine(0.0)
    assert fl.FixedTask([2.0]).at_cosine(-1.0).theta.tolist() == [-2.0]
