"""Runs of several processes: this file is also the program of one of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import fastlin as fl
from fastlin.training import judge

BATCH = 256  # of an evaluation


def mixture(bias=False):
    return fl.TaskMixture([[1.0] * 3, [-1.0] * 3], torch.eye(3).expand(2, 3, 3), [0.4, 0.6], bias=bias)


def sources(study):
    """Positional arguments of `train` after the regime, by the paper."""
    if study == "prompts":
        return mixture(), {}
    theta = torch.arange(1.0, 4.0) / 5.0
    return fl.SphereTasks(3, bias=True), {"target": fl.FixedTask(theta, bias=True)}


CASES = {
    "uneven": {"regime": "joint", "batch": 61, "dtype": "float32", "preset": "paper"},
    "stack": {"regime": "heads", "model": "stack", "layers": 2},
    "side by side": {"regime": ["zs:v", "zs+fs:all"], "points": 50, "own_data": True},
    "diverges": {"regime": "plain", "lr": 3.0, "optimiser": "sgd", "preset": "paper"},
    "two sequences": {"regime": "fine-tune", "batch": 2, "preset": "paper"},
    "shards": {"regime": "joint+heads", "batch": 63, "shards": 4, "dtype": "float32"},
    "alone": {"regime": "plain", "distributed": False},
}


def train(case, **more):
    given = {"steps": 30, "batch": 40, "trials": 2, "records": 6, "dtype": "float64", **CASES[case], **more}
    regime = given.pop("regime")
    mix, target = sources("forgetting" if case == "side by side" else "prompts")
    return fl.train(mix, regime, 4, **target, **given)


def summary(run):
    """All numbers of a run, as tensors."""
    steps = torch.tensor(sorted(run.diverged.items())).reshape(-1, 2)
    return {
        "risk": run.risk,
        "error": run.risk_error,
        "diverged": steps,
        **run.history,
        **dict(run.model.named_parameters()),
    }


def launch(size, cases, folder, seconds=240):
    """Results of each process, by case: `size` processes train all cases."""
    given = [str(size), str(folder), json.dumps(cases)]
    workers = [
        subprocess.Popen([sys.executable, __file__, str(rank), *given], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    end = time.monotonic() + seconds
    try:
        errors = [worker.communicate(timeout=max(end - time.monotonic(), 1))[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * size, "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def main(rank, size, folder, cases):
    torch.set_num_threads(1)
    judge._EVALUATION_BATCH = BATCH
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=int(rank), world_size=int(size))
    found = {}
    for case in json.loads(cases):
        out = {} if case == "alone" else {"out": Path(folder) / case}
        found[case] = {name: value.detach() for name, value in summary(train(case, **out)).items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
