"""Training of PB's reduced model f = x' W (X'y + p_k), without prompts and jointly with them, on their optima.

The two regimes are two trials of one `prompt_loss`: the reduced model is W = [[W, 0], [0, 0]] with head e_m and prompt
token [p_k; 1], and plain training is the prompt token 0. The optimal W is of order 1/(n + E[y^2]) and the optimal
prompts of order n + E[y^2], so both are trained in that unit.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastlin import theory
from fastlin._files import replacing
from fastlin._info import info
from fastlin.data.sources import TaskMixture
from fastlin.ops.functional import prompt_loss

REGIMES = ("plain", "joint")


@dataclass(frozen=True)
class Setting:
    """Figure 2(c) of the paper at one context length, and how it is trained.

    Attributes
    ----------
    means, weights : tuple of float
        Means as multiples of the all-ones vector, and probabilities of the tasks; covariances are I.
    d, n : int
        Number of features, context length.
    steps, batch : int
        Optimiser steps, fresh sequences in each.
    peak_lr : float
        Adam's largest learning rate, in a one-cycle schedule.
    seed : int
        Of the data.
    """

    means: tuple[float, ...] = (2.1, -0.9)
    weights: tuple[float, ...] = (0.3, 0.7)
    d: int = 10
    n: int = 10
    steps: int = 900
    batch: int = 4096
    peak_lr: float = 0.05
    seed: int = 0

    def mixture(self) -> TaskMixture:
        """The setting's task source."""
        means = [[mean] * self.d for mean in self.means]
        return TaskMixture(means, torch.eye(self.d).expand(len(self.means), -1, -1), self.weights)


def train(setting: Setting, out: Path) -> dict[str, dict[str, float]]:
    """Train both regimes, write `record.json` and `loss.csv` into the folder `out`.

    Returns
    -------
    dict
        For each regime: risk of the final parameters, theory, and excess in percent.
    """
    out.mkdir(parents=True, exist_ok=True)
    mix, n, K, d = setting.mixture(), setting.n, len(setting.means), setting.d
    unit = n + theory.normaliser(mix)
    optima = {"plain": theory.plain(mix, n).loss, "joint": theory.joint(mix, n).loss}
    W = torch.zeros(2, d, d, requires_grad=True)
    prompts = torch.zeros(K, d, requires_grad=True)
    optimiser = torch.optim.Adam([W, prompts], lr=setting.peak_lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, setting.peak_lr, total_steps=setting.steps)
    rows: list[dict[str, float]] = []
    interval = max(setting.steps // 100, 1)
    start = time.monotonic()
    for step in range(setting.steps):
        z, q, y, task = mix.sample(setting.batch, n, seed=setting.seed, step=step)
        loss, _ = prompt_loss(z, q, y, task, *full_form(W / unit, unit * prompts), backend="eager")
        optimiser.zero_grad()
        torch.autograd.backward(loss.sum())
        optimiser.step()
        schedule.step()
        if (step + 1) % interval == 0 or step == setting.steps - 1:
            with torch.no_grad():
                both = torch.stack([torch.zeros_like(prompts), unit * prompts])
                risk = theory.population_loss(mix, n, W / unit, both).tolist()
            rows.append({"step": step + 1, **dict(zip(REGIMES, risk, strict=True))})
        if (step + 1) % (10 * interval) == 0:
            _report(step + 1, setting.steps, rows[-1], time.monotonic() - start)
    result = {
        regime: {
            "risk": rows[-1][regime],
            "theory": optima[regime],
            "excess_percent": 100 * (rows[-1][regime] / optima[regime] - 1),
        }
        for regime in REGIMES
    }
    record = {
        "setting": asdict(setting),
        "normaliser": theory.normaliser(mix),
        "result": result,
        "seconds": time.monotonic() - start,
        "backend": "eager",
        "info": info(),
    }
    with replacing(out / "loss.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *REGIMES])
        writer.writeheader()
        writer.writerows(rows)
    with replacing(out / "record.json") as path:
        path.write_text(json.dumps(record, indent=1) + "\n")
    return result


def full_form(W: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters p (2, K, 1, m), W (2, m, m), v (2, K, m) of the ops; the prompt token of the first trial is zero.

    Parameters
    ----------
    W : Tensor (2, d, d)
    prompts : Tensor (K, d)
    """
    K, d = prompts.shape
    token = torch.cat([prompts, prompts.new_ones(K, 1)], -1)
    p = torch.stack([torch.zeros_like(token), token])[:, :, None]
    head = torch.zeros(2, K, d + 1)
    head[..., d] = 1.0
    return p, torch.nn.functional.pad(W, (0, 1, 0, 1)), head


def _report(step: int, steps: int, row: dict[str, float], seconds: float) -> None:
    left = seconds * (steps / step - 1)
    risks = "  ".join(f"{regime} {row[regime]:.4f}" for regime in REGIMES)
    print(f"step {step}/{steps}  {risks}  {step / seconds:.0f} steps/s  {left:.0f} s left", file=sys.stderr)
