"""Threads of torch and threads of Python."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.op_cases import DOUBLE, make, results

import fastlin as fl

PATHS = {
    "streamed": {"op": "prompt_loss", "n": 20},
    "gram": {"op": "prompt_loss", "n": 20, "R": 9},
    "given gram": {"op": "gram_loss", "R": 3, "H": 2},
    "stack": {"op": "stack_loss", "R": 2, "L": 3, "scale": 0.05},
}


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and restores it afterwards."""
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
    """Run a script in another process, where a crash fails the test instead of ending pytest."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


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
