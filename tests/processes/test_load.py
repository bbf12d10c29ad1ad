"""Load: long runs, many Python threads, forked and spawned processes, other users of OpenMP in the process."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fastlin as fl
from fastlin.bench.soak import MemoryWatch, Usage

ROOT = Path(__file__).parents[2]


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, **options
    )


def run_script(script, tmp_path):
    """A script that is a file, as spawned processes want it."""
    path = tmp_path / "script.py"
    path.write_text(script)
    return run(str(path), env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_memory_threads_and_files_of_a_long_run_do_not_grow():
    """A million steps are for `fastlin bench --rows soak`."""
    done = run("-m", "fastlin", "bench", "--rows", "soak", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  3000 steps in " in done.stdout


@pytest.mark.parametrize(
    ("last", "grown"),
    [
        (Usage(1_009_000, 2, 5), []),
        (Usage(1_020_000, 2, 5), ["resident"]),
        (Usage(1_000_000, 3, 6), ["threads", "files"]),
    ],
)
def test_a_soak_tells_what_grew(last, grown):
    watch = MemoryWatch(10, [Usage(1_000_000, 2, 5), last])
    assert [fault.split()[0] for fault in watch.faults] == grown


def losses(seed):
    """A loss, its gradients and a prediction of one's own data and parameters, as bytes."""
    place = torch.Generator().manual_seed(seed)
    mix = fl.TaskMixture([[1.0] * 4], torch.eye(4)[None], [1.0])
    W, v = (torch.randn(shape, generator=place).mul_(0.1).requires_grad_() for shape in ((5, 5), (1, 5)))
    found = []
    for step in range(20):
        drawn, _ = fl.sampled_loss(mix, 10, 300 + seed, None, W, v, seed=seed, step=step)
        z, q, y, _ = mix.sample(200, 7, seed=seed, step=step)
        given, _ = fl.prompt_loss(z, q, y, None, None, W, v)
        found += [drawn, given, *torch.autograd.grad(drawn + given, (W, v)), fl.predict(z, q, None, None, W, v)]
    return [value.detach() for value in found]


def test_eight_threads_call_ops_at_once():
    expected = [losses(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for found, alone in zip(pool.map(losses, range(8)), expected, strict=True):
            assert all(map(torch.equal, found, alone))


FORK = """
import os
import torch
import fastlin as fl

torch.set_num_threads(2)
B = 4000
data = [torch.randn(B, 50, 9), torch.randn(B, 9), torch.randn(B), None, None]
parameters = [(torch.randn(9, 9) / 50).requires_grad_(), torch.randn(9, requires_grad=True)]

def call(backend):
    loss, _ = fl.prompt_loss(*data, *parameters, backend=backend)
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]

backends = ["eager", *({"cpu"} if fl.info()["extension"]["available"] else ())]
expected = {backend: call(backend) for backend in backends}
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.allclose(*pair, rtol=1e-4) for name in backends for pair in zip(call(name), expected[name]))
             else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.get_num_threads() == 2
assert all(torch.equal(*pair) for name in backends for pair in zip(call(name), expected[name]))
print("done")
"""


def test_a_forked_child_calls_ops(tmp_path):
    """After the parent's threads have worked, which a child does not have; both backends, and the parent goes on."""
    done = run_script(FORK, tmp_path)
    assert done.stdout == "done\n", done.stderr


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset
import fastlin as fl

MIX = fl.TaskMixture([[1.0] * 4], torch.eye(4)[None], [1.0])

def batch(step):
    z, q, y, _ = MIX.sample(3000, 50, seed=1, step=step)
    return fl.prompt_loss(z, q, y, None, None, torch.eye(5), torch.ones(5), scale=0.02)[0]

class Losses(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, step):
        return batch(step)

if __name__ == "__main__":
    torch.set_num_threads(2)
    expected = torch.stack([batch(step) for step in range(4)])
    for context in ("fork", "spawn"):
        found = torch.cat(list(DataLoader(Losses(), num_workers=2, multiprocessing_context=context)))
        assert torch.equal(found, expected), context
    print("done")
"""


def test_workers_of_a_data_loader_call_ops(tmp_path):
    done = run_script(WORKERS, tmp_path)
    assert done.stdout == "done\n", done.stderr


SHARED = """
import os
import numpy as np
import scipy.linalg
import torch
import fastlin as fl

torch.set_num_threads(3)
z, q, y = torch.randn(4000, 50, 9), torch.randn(4000, 9), torch.randn(4000)
square, array = torch.randn(3_000_000), np.random.default_rng(0).normal(size=(300, 300))
threads = []
for _ in range(5):
    array @ array
    scipy.linalg.svd(array)
    square.exp()
    threads.append(len(os.listdir("/proc/self/task")))
    for _ in range(3):
        fl.prompt_loss(z, q, y, None, None, torch.eye(9), torch.ones(9))
    threads.append(len(os.listdir("/proc/self/task")))
assert threads == threads[:1] * 10, threads
copies = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "libomp" in line or "iomp" in line}
assert len(copies) <= 1, copies
print("done")
"""


def test_one_team_of_threads_beside_numpy_and_scipy(tmp_path):
    """Calls that alternate with torch's, numpy's and scipy's start no thread: the team is torch's, of one libgomp."""
    done = run_script(SHARED, tmp_path)
    assert done.stdout == "done\n", done.stderr
