"""Threads of torch, threads of Python, and Ctrl-C."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import DOUBLE, make, results

import fastlin as fl

PATHS = {
    "streamed": {"op": "prompt_loss", "n": 20},
    "gram": {"op": "prompt_loss", "n": 20, "R": 9},
    "given gram": {"op": "gram_loss", "R": 3, "H": 2},
    "stack": {"op": "stack_loss", "R": 2, "L": 3, "scale": 0.05},
}


@pytest.fixture
def threads():
    """Sets the number of torch's threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.isfinite().all(), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("K", [1, 5, 300])
@pytest.mark.parametrize("path", PATHS)
def test_same_bits_for_any_number_of_threads(path, K, dtype, instruction_set, threads):
    case = make(**PATHS[path], B=2100, m=7, K=K, dtype=dtype, see_query=True)
    kernel = f"{instruction_set} {str(dtype).removeprefix('torch.')} {path.removeprefix('given ')}"
    threads(1)
    expected = results(case, kernel=kernel)
    for count in (2, 3, 7):
        threads(count)
        assert_same_bits(results(case, kernel=kernel), expected)


@pytest.mark.usefixtures("instruction_set")
def test_same_bits_of_gram_and_predictions(threads):
    case = make("predict", B=2100, n=30, m=9)
    threads(1)
    expected = fl.gram(case.inputs["z"]), case()
    for count in (2, 3, 7):
        threads(count)
        assert torch.equal(fl.gram(case.inputs["z"]), expected[0])
        assert torch.equal(case(), expected[1])


def run(script):
    """A script in a process of its own, where a crash is a failure and not the end of the tests."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


MORE_THREADS = """
import torch, fastlin as fl
for B in (1, 65, 150, 300, 600, 1000):
    arguments = [torch.randn(B, 50, 9), torch.randn(B, 9), torch.randn(B), None, torch.randn(1, 2, 9)]
    model = [(torch.randn(9, 9) / 50).requires_grad_(), torch.randn(9, requires_grad=True)]
    expected = None
    for threads in (1, 7):
        torch.set_num_threads(threads)
        for _ in range(30):
            loss, per_task = fl.prompt_loss(*arguments, *model, backend="cpu")
            found = [loss, fl.gram(arguments[0], backend="cpu"), *torch.autograd.grad(loss, model)]
            expected = expected or found
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
print("done")
"""


def test_more_threads_than_blocks():
    done = run(MORE_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.parametrize("path", PATHS)
def test_calls_from_several_python_threads(path, instruction_set):
    cases = [make(**PATHS[path], B=130 + seed, m=6, seed=seed) for seed in range(6)]
    expected = [results(case) for case in cases]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            for found, alone in zip(pool.map(results, cases), expected, strict=True):
                assert_same_bits(found, alone)


def test_other_python_threads_run_during_a_call():
    """A thread that counts gets on while a kernel runs, which it could not if the call held the GIL."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    def progress(B):
        case = make("stack_loss", B=B, n=2, m=8, L=4, scale=0.01, backend="cpu")
        before = counted[0]
        case()
        return counted[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # Who holds the GIL is not made to let it go.
    counter = threading.Thread(target=count)
    counter.start()
    try:
        of_a_small_call, of_a_large_call = progress(1), progress(400_000)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        counter.join()
    assert of_a_large_call > 10 * (of_a_small_call + 1)


INTERRUPTED = """
import os, signal, sys, threading, time
import torch, fastlin as fl

torch.set_num_threads({threads})
{problem}
small = call(64)
start = time.perf_counter()
call({some})
expected = (time.perf_counter() - start) * {all} / {some}
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.perf_counter()
try:
    call({all})
except KeyboardInterrupt:
    print("interrupted", (time.perf_counter() - start) / expected)
assert all(torch.equal(a, b) for a, b in zip(call(64), small))
call({some})
print("works")
"""

STACK = """
data = [torch.randn(400_000, 2, 16), torch.randn(400_000, 16), torch.randn(400_000)]
model = [0.1 * torch.randn(6, 16, 16), 0.1 * torch.randn(6, 16, 16), torch.randn(16)]

def call(part):
    return fl.stack_loss(*(t[:part] for t in data), None, None, *model, scale=0.01, backend="cpu")
"""
LONG = """
z, q, y = torch.randn(512, 1, 16), torch.randn(512, 16), torch.randn(512)
W, v = torch.randn(16, 16), torch.randn(16)

def call(n):
    return fl.prompt_loss(z.expand(-1, n, -1), q, y, None, None, W, v, scale=1 / n, backend="cpu")
"""
PROBLEMS = {
    "stack": {"problem": STACK, "some": 2000, "all": 400_000},
    "long contexts": {"problem": LONG, "some": 20_000, "all": 4_000_000},
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_keyboard_interrupt(threads, problem):
    """A call of many seconds ends soon after a signal, at a small part of its work, and the next calls are right."""
    done = run(INTERRUPTED.format(threads=threads, **PROBLEMS[problem]))
    assert done.returncode == 0, done.stderr
    interrupted, works = done.stdout.splitlines()
    assert interrupted.startswith("interrupted ")
    assert float(interrupted.split()[1]) < 0.5
    assert works == "works"


def test_keyboard_interrupt_without_a_handler():
    """It leaves the process as any other KeyboardInterrupt does."""
    script = INTERRUPTED.format(threads=2, **PROBLEMS["stack"])
    done = run(script.replace("except KeyboardInterrupt", "except ZeroDivisionError"))
    assert done.returncode == -2
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "works" not in done.stdout
