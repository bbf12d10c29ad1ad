"""Which backend serves, and what is said when one does not."""

import warnings

import pytest
import torch
from support.backends import install
from support.op_cases import assert_close, make

import fastlin as fl
from fastlin import backends
from fastlin.backends.eager import EagerBackend


class Picky(EagerBackend):
    """Serves widths up to 4 and counts its calls."""

    name = "picky"
    traceable = False

    def __init__(self):
        self.calls = []

    def supports(self, op, device, dtype, m):
        return None if m <= 4 else f"m = {m} is above 4"

    def loss(self, *args):
        self.calls.append("loss")
        return super().loss(*args)


@pytest.fixture
def picky(monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    return install(monkeypatch, Picky())


def test_auto_takes_the_first_that_serves(picky):
    small = make("prompt_loss", m=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(small(), small(fl.reference))
    assert picky.calls == ["loss"]


def test_auto_warns_once_when_it_looks_further(picky):
    wide = make("prompt_loss", m=5)
    message = r"prompt_loss: backend 'picky' does not serve this call \(m = 5 is above 4\); eager serves it"
    with pytest.warns(RuntimeWarning, match=message):
        assert_close(wide(), wide(fl.reference))
    assert picky.calls == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide()


def test_a_named_backend_serves_or_says_why(picky):
    with pytest.raises(fl.BackendError, match="prompt_loss: backend 'picky' cannot serve this call: m = 5 is"):
        make("prompt_loss", m=5, backend="picky")()
    make("prompt_loss", m=4, backend="picky")()
    assert picky.calls == ["loss"]
    make("prompt_loss", m=4, backend="eager")()
    assert picky.calls == ["loss"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_backend_that_is_not_there_says_so():
    with pytest.raises(fl.BackendError, match="predict: backend 'cuda' cannot serve this call: "):
        make("predict", backend="cuda")()
    assert fl.info()["backends"]["cuda"]["available"] is False


def test_second_derivatives_of_another_backend_go_through_eager(picky):
    case = make("prompt_loss", m=3, backend="picky").differentiable("W")
    W = case.inputs["W"]
    results = []
    for module, options in ((fl, {}), (fl.reference, {"backend": "reference"})):
        (dW,) = torch.autograd.grad(case(module, **options)[0], W, create_graph=True)
        results.append(torch.autograd.grad(dW.square().sum(), W)[0])
    assert_close(*results)
    assert picky.calls == ["loss"]


def test_info_names_backends_and_reasons(picky):
    found = fl.info()["backends"]
    assert found["picky"] == {"available": False, "reason": "m = 11 is above 4", "auto": True}
    assert found["eager"] == {"available": True, "reason": None, "auto": True}
    assert found["reference"]["auto"] is False
    assert fl.info()["auto"]["cpu"] == ["picky", "eager"]


def test_every_backend_keeps_the_protocol():
    needed = [name for name in vars(backends.Backend) if not name.startswith("_")]
    for name in backends.names():
        module = backends.load(name)
        assert all(hasattr(module, attribute) for attribute in needed), name
        assert module.supports("prompt_loss", torch.device("meta"), torch.float32, 3) is None or name != "eager"
