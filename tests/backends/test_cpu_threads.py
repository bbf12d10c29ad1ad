"""Threads of torch and threads of Python.

A thread whose shared calls lost time on a busy machine runs calls alone for a while, so a call that must be shared is
made on a new thread of Python.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import toolchain
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


def on_new_thread(function, *arguments, **options):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()


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
        assert_same_bits(on_new_thread(results, case, kernel=kernel), expected)


@pytest.mark.usefixtures("instruction_set")
def test_same_bits_of_gram_and_predictions(threads):
    case = make("predict", B=2100, n=30, m=9)
    threads(1)
    expected = fl.gram(case.inputs["z"]), case()
    for count in (2, 3, 7):
        threads(count)
        assert torch.equal(on_new_thread(fl.gram, case.inputs["z"]), expected[0])
        assert torch.equal(on_new_thread(case), expected[1])


def test_threads_change_between_calls(threads):
    """With many blocks, from one thread of Python."""
    case = make("prompt_loss", B=8192, n=20, m=9, R=20)
    threads(1)
    expected = results(case)
    for count in (2, 5, 1, 3, 2, 8, 1, 2):
        threads(count)
        assert_same_bits(results(case), expected)


@pytest.mark.parametrize("mode", ["blocks", "sharing"])
def test_blocks_on_threads(tmp_path, mode):
    """Each block once, exceptions of other threads, and when calls are shared."""
    flags = ("-O1", "-fopenmp")
    sources = ("testing/threads_driver.cpp", "cpu/parallel.cpp")
    made = toolchain.objects(toolchain.native(), tmp_path, dict.fromkeys(sources, flags))
    toolchain.run([*toolchain.native(), *flags, *made, "-o", tmp_path / "driver"])
    assert toolchain.run([tmp_path / "driver", mode]).startswith("ok ")


def run(script, *arguments, **environment):
    """Run a script in another process, where a crash fails the test instead of ending pytest."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


# Vectors of m doubles, which a block allocates for m > 64 where it finishes a task, while `armed`.
NO_MEMORY = """
#include <cstdlib>
#include <new>
extern "C" int armed = 0;
void* operator new(std::size_t size) {
  void* memory = armed && size == 67 * sizeof(double) ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""

OUT_OF_MEMORY = """
import ctypes, sys
import torch
import fastlin as fl

armed = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "armed")
B, m = 600, 67
z, q, y, task = torch.randn(B, 3, m), torch.randn(B, m), torch.randn(B), torch.arange(B)
W, v = torch.eye(m).requires_grad_(), torch.ones(B, m)
for threads in (1, 2):
    torch.set_num_threads(threads)
    expected = fl.prompt_loss(z, q, y, task, None, W, v, backend="cpu")
    armed.value = 1
    try:
        fl.prompt_loss(z, q, y, task, None, W, v, backend="cpu")
    except MemoryError:
        print("MemoryError")
    armed.value = 0
    found = fl.prompt_loss(z, q, y, task, None, W, v, backend="cpu")
    assert all(map(torch.equal, found, expected))
"""


def test_no_memory_inside_a_block_is_an_error(tmp_path):
    source, library = tmp_path / "no_memory.cpp", tmp_path / "no_memory.so"
    source.write_text(NO_MEMORY)
    toolchain.run([*toolchain.native(), "-shared", "-fPIC", source, "-o", library])
    done = run(OUT_OF_MEMORY, library, LD_PRELOAD=str(library))
    assert (done.returncode, done.stdout) == (0, "MemoryError\n" * 2), done.stderr


EXIT = """
import threading
import torch
import fastlin as fl

torch.set_num_threads(2)
z, q, y = torch.randn(4000, 50, 9), torch.randn(4000, 9), torch.randn(4000)

def call():
    for _ in range(20):
        fl.prompt_loss(z, q, y, None, None, torch.eye(9), torch.ones(9), backend="cpu")

threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
call()
print("done")
"""


def test_the_interpreter_exits_after_calls():
    """While other threads of Python still call, which it waits for, and with the threads of the kernels alive."""
    done = run(EXIT)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


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
