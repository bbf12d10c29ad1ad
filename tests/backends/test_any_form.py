"""A backend that takes the parameters of a layer as the caller gave them."""

import pytest
import torch
from support.backends import install
from support.op_cases import LOSSES, PREDICTIONS, assert_close, gradients, make

import fastlin as fl
from fastlin.backends.eager import EagerBackend
from fastlin.backends.problem import lift


class Plain(EagerBackend):
    """Eager behind an adapter that lifts what it gets, and answers in the forms that it got."""

    name = "plain"
    traceable = False
    any_form = True

    def __init__(self):
        self.ranks = []

    def full(self, problem):
        self.ranks.append(problem.W.ndim)
        letters = {a: getattr(problem, a) for a in "pWv"}
        lifted = problem._replace(**{a: t if t is None else lift(a, t, problem.tasks) for a, t in letters.items()})
        assert (lifted.tasks, lifted.heads) == (problem.tasks, problem.heads)
        assert lifted.front == (problem.front or (1,))
        return lifted

    def back(self, problem, grads):
        return {a: grad.reshape(getattr(problem, a).shape) for a, grad in grads.items()}

    def predict(self, problem):
        return super().predict(self.full(problem)).reshape(*problem.front, -1)

    def predict_bwd(self, problem, gy, wants):
        assert gy.shape == (*problem.front, problem.q.shape[0])
        return self.back(problem, super().predict_bwd(self.full(problem), gy.reshape(-1, gy.shape[-1]), wants))

    def loss(self, problem, y, weight, wants):
        value, per_task, grads = super().loss(self.full(problem), y, weight, wants)
        return value.reshape(problem.front), per_task.reshape(*problem.front, -1), self.back(problem, grads)


@pytest.fixture
def plain(monkeypatch):
    return install(monkeypatch, Plain())


FORMS = [{}, {"R": 1}, {"R": 2}, {"R": 2, "H": 2}, {"t": None}, {"shared_head": True}, {"K": None}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("op", LOSSES + PREDICTIONS)
def test_values_and_gradients(op, form, plain):
    case = make(op, **form, backend="plain")
    literal = {"backend": "reference"}
    assert_close(case(), case(fl.reference, **literal))
    expected = 4 if form.get("shared_head") or "stack" in op else case.inputs["W"].ndim
    assert plain.ranks == [expected]
    parameters = [name for name in case.inputs if name not in "zGq"]
    for ready in (case.differentiable(*parameters), case.differentiable()):
        for per_task in (True, False):
            found = gradients(ready, per_task=per_task)
            assert_close(found, gradients(ready, fl.reference, per_task=per_task, **literal))


def test_vmap_over_parameters(plain):
    case = make("prompt_loss", backend="plain")
    W = torch.stack([case.inputs["W"], -case.inputs["W"]])
    rows = [case(fl.reference, W=w, backend="reference")[0] for w in W]
    assert_close(torch.vmap(lambda W: case(W=W)[0])(W), torch.stack(rows))
