import functools
import importlib.metadata
import signal

import pytest
import torch
from support import emulation
from support.op_cases import INSTRUCTION_SETS, poisoned
from support.selection import mark_long

from fastlin import backends
from fastlin.backends import cpu, cuda
from fastlin.ops import call


def pytest_report_header():
    """Which triton is tested: `make test-all` runs two."""
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed"


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """pytest-xdist sets COLUMNS in its processes; tests see a pipe, where nothing is left out, or set their own."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_collection_modifyitems(items):
    mark_long(items)


def pytest_runtest_setup(item):
    """What needs a GPU is skipped with the reason where there is none."""
    marker = item.get_closest_marker("gpu")
    if marker is not None and (reason := why_no_gpu(*marker.args)) is not None:
        pytest.skip(reason)


@functools.cache
def why_no_gpu(backend="cuda"):
    reason = backends.why_not(backend, "prompt_loss", torch.device("cuda"), torch.float32, 11)
    return reason or (None if torch.cuda.is_available() else "torch sees no GPU")


def pytest_terminal_summary(terminalreporter):
    """Tables that tests recorded, as ("table", text), are shown though the tests passed."""
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
    show_faults(terminalreporter)


def show_faults(terminalreporter):
    """Faults that tests injected, by their kind, and what came of them."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = {}
    for report in reports:
        for name, row in report.user_properties:
            if name == "faults" and report.when == "call":
                kind, *numbers = row
                found[kind] = [a + b for a, b in zip(found.get(kind, [0, 0, 0]), numbers, strict=True)]
    if found:
        terminalreporter.section("injected faults")
        rows = [*found.items(), ("all", [sum(numbers) for numbers in zip(*found.values(), strict=True)])]
        terminalreporter.write_line(f"{'':44}{'injected':>10}{'same bits':>11}{'clear error':>13}")
        for kind, (injected, same, told) in rows:
            terminalreporter.write_line(f"{kind:44}{injected:>10}{same:>11}{told:>13}")


def pytest_addoption(parser):
    parser.addoption("--faults", type=int, default=1, metavar="N", help="inject N times as many faults")
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
    call.signatures.clear()
    yield
    backends.resolve.cache_clear()
    call.signatures.clear()


@pytest.fixture(params=["eager", *(f"cpu-{name}" for name in INSTRUCTION_SETS), "cuda-emulated"])
def backend(request, monkeypatch):
    """The backend that "auto" takes, by name: eager, cpu on every instruction set that the machine has, and cuda in
    emulation.
    """
    yield from _serving(request.param, monkeypatch)


@pytest.fixture(params=["eager", f"cpu-{INSTRUCTION_SETS[0]}", "cuda-emulated"])
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
    monkeypatch.setattr(cpu.backend, "last_kernel", None)
    monkeypatch.setitem(backends.ORDER, "cpu", () if name == "eager" else (name,))
    if name == "cuda":
        monkeypatch.setattr(cuda.backend, "last_kernel", None)
        with cuda.emulated(emulation.module()), poisoned():
            yield name
        assert cuda.backend.last_kernel is not None
        assert cpu.backend.last_kernel is None
        return
    if name == "eager":
        yield name
        assert cpu.backend.last_kernel is None
        return
    with cpu.using(label), poisoned():
        yield name
    assert cpu.backend.last_kernel is not None
    assert cpu.backend.last_kernel.split()[0] == label
