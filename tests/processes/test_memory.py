"""The largest memory of a process."""

import subprocess
import sys


def run(script):
    """A script in a process of its own, where a crash is a failure and not the end of the tests."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


MEMORY = """
import re, torch, fastlin as fl
torch.set_num_threads(1)
mix = fl.TaskMixture([[1.0] * 4, [0.0] * 4], torch.stack([torch.eye(4)] * 2), [0.5, 0.5], noise_std=0.1)
p, W, v = (t.requires_grad_() for t in (torch.randn(2, 1, 5), 0.01 * torch.eye(5), torch.ones(2, 5)))
def peak():
    # Not ru_maxrss, which starts at the size of the process that has started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
def loss(batch):
    fl.sampled_loss(mix, 100, batch, p, W, v, seed=0, step=0, backend="cpu")[0].backward()
loss(1000)
before = peak()
loss(2_000_000)
print(peak() - before)
mix.sample_gram(2_000_000, 100)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_batch():
    """64 MB at most, where the data take 264 MB, which is seen."""
    of_loss, of_data = map(int, run(MEMORY).stdout.split())
    assert of_loss < 64 * 1024
    assert of_data > 200 * 1024
