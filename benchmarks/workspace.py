"""Memory that a call takes beyond its inputs and outputs, measured in a process of its own.

The process makes the inputs, makes one call with a few sequences, which loads and starts what is loaded and started
once, and then compares the highest resident size during the call with the size before it. Linux keeps that mark as
VmHWM in /proc/self/status; writing 5 to /proc/self/clear_refs sets it back. (ru_maxrss cannot be set back, and a child
inherits its parent's.)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import cases, peers, sampled_peers
from benchmarks.cases import Shape


def measure(shape: Shape, backend: str, threads: int) -> int:
    """Bytes beyond inputs and outputs of one call with gradients, in a fresh process.

    Raises
    ------
    RuntimeError
        When the process fails; the message ends with its last words.
    """
    request = json.dumps({"shape": asdict(shape), "backend": backend, "threads": threads})
    # A fixed threshold: glibc would raise it as blocks are freed, and keep later ones resident for reuse.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workspace", request],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"the measuring process failed: {last[0]}")
    return int(json.loads(done.stdout)["bytes"])


def growth(shape: Shape, backend: str) -> int:
    """Bytes by which this process grows during one call with gradients, less its outputs."""
    if shape.op.startswith("sampled"):
        first, step = (_sampled(replace(shape, B=B), backend) for B in (4, shape.B))
    else:
        case = cases.make(shape)
        loss = peers.op(shape.op, backend)
        first, step = case.head(4).step(loss), case.step(loss)
    first()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    results = step()
    peak = _status("VmHWM")
    return max(peak - before - sum(x.nbytes for x in results), 0)


def _sampled(shape: Shape, backend: str) -> sampled_peers.Step:
    """A call that draws its data."""
    model = cases.make(replace(shape, op="prompt_loss", B=1))
    return sampled_peers.op(shape, model.parameters, backend)


def _status(field: str) -> int:
    """Bytes that a field of /proc/self/status says."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    """Answer the request that `measure` sends on the command line."""
    parser = argparse.ArgumentParser(description="Measure the workspace of a call; run by benchmarks.cpu.")
    parser.add_argument("request", type=json.loads, help="shape, backend and threads as JSON")
    request = parser.parse_args().request
    torch.set_num_threads(request["threads"])
    print(json.dumps({"bytes": growth(Shape(**request["shape"]), request["backend"])}))


if __name__ == "__main__":
    main()
