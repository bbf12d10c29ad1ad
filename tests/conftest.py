import signal

import pytest
import torch
from helpers import INSTRUCTION_SETS, poisoned

from fastlin import backends
from fastlin.backends import cpu


def pytest_addoption(parser):
    parser.addoption("--triton-sweep", action="store_true", help="run Triton's interpreter on many more problems")


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_worker():
    """Tests run in as many processes as there are cores; more threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def heard_signals():
    """A shell ignores Ctrl-C for a command in the background, and all that it starts; tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh_choice():
    """What served a call in one test may not be there in the next."""
    backends.resolve.cache_clear()
    yield
    backends.resolve.cache_clear()


@pytest.fixture(params=["eager", *(f"cpu-{name}" for name in INSTRUCTION_SETS)])
def backend(request, monkeypatch):
    """The backend that "auto" takes, by name: eager, and cpu on every instruction set that the machine has."""
    yield from _serving(request.param, monkeypatch)


@pytest.fixture(params=["eager", f"cpu-{INSTRUCTION_SETS[0]}"])
def any_backend(request, monkeypatch):
    """The same for what torch does around a backend, which is one for all instruction sets."""
    yield from _serving(request.param, monkeypatch)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request, monkeypatch):
    """Name of the instruction set that the cpu backend runs on, with "auto" taking that backend."""
    for _ in _serving(f"cpu-{request.param}", monkeypatch):
        yield request.param


@pytest.fixture
def eager_alone(monkeypatch):
    """ "auto" takes eager."""
    monkeypatch.setitem(backends.ORDER, "cpu", ())


def _serving(which, monkeypatch):
    """Make "auto" take one backend; afterwards, its kernels have run, and no others."""
    name, _, label = which.partition("-")
    monkeypatch.setattr(cpu, "last_kernel", None)
    monkeypatch.setitem(backends.ORDER, "cpu", () if name == "eager" else (name,))
    if name == "eager":
        yield name
        assert cpu.last_kernel is None
        return
    with cpu.using(label), poisoned():
        yield name
    assert cpu.last_kernel is not None
    assert cpu.last_kernel.split()[0] == label
