"""Many trials at once: how the size of the initial weights affects the final risk.

All trials train on one stream of batches that the kernel draws once. The risk of each trial is exact, and is compared
with the optimum.

    python examples/many_trials.py --trials 20 --steps 2000
"""

from __future__ import annotations

import argparse

import torch

import fastlin as fl

SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)


def main() -> None:
    """Train, and print one line per initial size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="trials per initial size")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("-n", "--n", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    d, K = 5, 2
    means = torch.stack([torch.full((d,), 1.5), torch.full((d,), -1.0)])
    mix = fl.TaskMixture(means, weights=[0.4, 0.6])
    R, m, scale = options.trials * len(SIZES), mix.m, 1 / options.n
    size = torch.tensor(SIZES).repeat_interleave(options.trials)
    p = (torch.randn(R, K, 1, m) * size[:, None, None, None]).requires_grad_()
    W = (torch.randn(R, m, m) * size[:, None, None]).requires_grad_()
    v = (torch.eye(m)[-1] + torch.randn(R, K, m) * size[:, None, None]).requires_grad_()
    optimiser = torch.optim.Adam([p, W, v], lr=0.01)
    for step in range(options.steps):
        loss, _ = fl.sampled_loss(mix, options.n, options.batch, p, W, v, seed=0, step=step, scale=scale)
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
    optimum = fl.theory.decoupled(mix, options.n).loss
    with torch.no_grad():
        risk = fl.theory.full_population_loss(mix, options.n, p, W, v, scale=scale)
    print(f"{R} trials of {options.steps} steps; optimum with prompts and heads {optimum:.4f}")
    for one, risks in zip(SIZES, risk.view(len(SIZES), -1), strict=True):
        over = risks / optimum - 1
        print(f"initial size {one:5}: best {over.min():+8.2%}  median {over.median():+8.2%}  worst {over.max():+8.2%}")


if __name__ == "__main__":
    main()
