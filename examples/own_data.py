"""In-context learning on your own data: a CSV with columns family, group, features ..., label.

The rows of a group share one regression problem; a family is a set of similar groups. A sequence is n rows of a group
as context and one more as the query. Each family has its own prompt. Without --csv the script generates a file.

    python examples/own_data.py --csv mine.csv -n 16
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fastlin as fl


def make_up(path: Path, *, groups: int = 400, rows: int = 24, d: int = 4) -> None:
    """Write a CSV with two families, whose weights vary around +1 and -1."""
    rng = np.random.default_rng(0)
    lines = ["family,group," + ",".join(f"x{i}" for i in range(d)) + ",label"]
    for group in range(groups):
        family = group % 2
        weights = 1.0 - 2.0 * family + 0.5 * rng.standard_normal(d)
        for x in rng.standard_normal((rows, d)):
            label = x @ weights + 0.1 * rng.standard_normal()
            lines.append(f"{family},{group}," + ",".join(f"{value:.6f}" for value in (*x, label)))
    path.write_text("\n".join(lines) + "\n")


class Groups:
    """Tokens [x; label] of each group (G, rows, m), and the family of each group (G,)."""

    def __init__(self, path: Path) -> None:
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        _, index, sizes = np.unique(table[:, 1], return_inverse=True, return_counts=True)
        rows = sizes.min()
        order = np.argsort(index, kind="stable")
        starts = np.concatenate([[0], sizes.cumsum()[:-1]])
        picked = order[starts[:, None] + np.arange(rows)]
        self.tokens = torch.tensor(table[picked, 2:], dtype=torch.float32)
        self.family = torch.tensor(table[picked[:, 0], 0], dtype=torch.int64)

    def batch(self, which: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw one sequence from each group in `which` (B,): z (B, n, m), q (B, m), y (B,), task (B,)."""
        rows = torch.rand(len(which), self.tokens.shape[1], generator=generator).argsort(1)[:, : n + 1]
        drawn = self.tokens[which[:, None], rows]
        q, y = drawn[:, n].clone(), drawn[:, n, -1].clone()
        q[:, -1] = 0
        return drawn[:, :n], q, y, self.family[which]


def main() -> None:
    """Train on four fifths of the groups, and report the error on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("-n", "--n", type=int, default=16, help="context length")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.csv or Path(folder) / "made-up.csv"
        if options.csv is None:
            make_up(path)
        groups = Groups(path)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(groups.family), generator=generator)
    held_out, seen = shuffled[: len(shuffled) // 5], shuffled[len(shuffled) // 5 :]
    K, m = int(groups.family.max()) + 1, groups.tokens.shape[2]
    p = torch.nn.Parameter(0.1 * torch.randn(K, 1, m, generator=generator))
    W = torch.nn.Parameter(0.1 * torch.randn(m, m, generator=generator))
    v = torch.nn.Parameter(torch.eye(m)[-1].repeat(K, 1))
    optimiser = torch.optim.Adam([p, W, v], lr=0.02)

    def loss(which: Tensor) -> tuple[Tensor, Tensor]:
        return fl.prompt_loss(*groups.batch(which, options.n, generator), p, W, v, scale=1 / options.n)

    for step in range(options.steps):
        value, _ = loss(seen[torch.randint(len(seen), (options.batch,), generator=generator)])
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        if step % max(options.steps // 5, 1) == 0:
            print(f"step {step:5}  loss {value.item():.4f}")
    with torch.no_grad():
        value, per_task = loss(held_out.repeat(20))
    variance = groups.tokens[held_out][..., -1].square().mean()
    print(f"held-out groups: error {value.item():.4f} of E[y²] = {variance.item():.4f}; by family {per_task.tolist()}")


if __name__ == "__main__":
    main()
