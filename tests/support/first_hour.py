"""A newcomer's first hour, with public names alone: op, own model, config, sweep, figure, run, callback.

`python first_hour.py` works in the current folder, and prints the files that it leaves.
"""

import subprocess
import sys
from pathlib import Path

import torch

import fastlin as fl

# The op, and the four lines that it stands for.
mix = fl.TaskMixture([[1.0] * 5, [-1.0] * 5, [0.5] * 5], weights=[0.2, 0.3, 0.5])
z, q, y, task = mix.sample(batch=256, n=8)
torch.manual_seed(0)
p, W, v = 0.1 * torch.randn(3, 1, 6), 0.1 * torch.randn(6, 6), torch.randn(3, 6)
loss, per_task = fl.prompt_loss(z, q, y, task, p, W, v, scale=1 / 8)
Z = torch.cat([p[task], z, q[:, None]], 1)
scores = Z @ W @ Z.mT / 8
scores[..., -1] = 0
yhat = (scores @ (Z @ v[task][..., None]))[:, -1, 0]
torch.testing.assert_close(loss, (yhat - y).square().mean())
assert per_task.shape == (3,)


class Model(torch.nn.Module):
    """One layer with a prompt for each task."""

    def __init__(self):
        super().__init__()
        self.W = torch.nn.Parameter(0.1 * torch.randn(6, 6))
        self.p = torch.nn.Parameter(0.1 * torch.randn(3, 1, 6))

    def forward(self, z, q, y, task):
        return fl.prompt_loss(z, q, y, task, self.p, self.W, torch.eye(6)[-1], scale=1 / z.shape[1])


model = Model()
optimiser = torch.optim.Adam(model.parameters(), lr=3e-2)
losses = []
for step in range(100):
    loss, per_task = model(*mix.sample(batch=256, n=8, step=step))
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

# A run that is watched, kept and loaded again.
seen = []
run = fl.train(mix, "joint", 8, trials=2, steps=50, batch=256, out="run", callback=seen.append, progress=False)
again = fl.load("run")
assert torch.equal(run.risk, again.risk)
assert len(seen) == len(run.history["step"]) > 1
assert "joint" in repr(run)
loss, _ = fl.sampled_loss(mix, 8, 256, **again.params, **again.options, seed=1, step=0)
assert loss.shape == (2,)

# A config, its closed forms, a sweep over the noise, and the figure.
Path("mine.toml").write_text("""\
name = "mine"
dimension = 5
means = [1.0, -1.0, 0.5]
covariances = [1.0, 1.0, 1.0]
weights = [0.2, 0.3, 0.5]
context_lengths = [4, 8]
""")


def fastlin(*words):
    """What the command prints."""
    return subprocess.run(
        [sys.executable, "-m", "fastlin", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


assert "joint" in fastlin("theory", "mine.toml")
sizes = ("--regime", "plain,joint", "--trials", "2", "--steps", "30", "--batch", "128")
fastlin("train", "mine.toml", *sizes, "--sweep", "noise_std=0,1", "--out", "sweep")
fastlin("train", "mine.toml", *sizes, "--out", "lengths")
assert "8" in fastlin("status", "sweep")
fastlin("plot", "sweep")
print(*sorted(str(path) for folder in ("sweep", "lengths") for path in Path(folder).glob("*.*")), sep="\n")
