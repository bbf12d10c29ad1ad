"""Your own model around the fused op: a network embeds the tokens, then linear attention predicts the label.

Labels are a nonlinear function of the inputs. Gradients flow through the op into the embedding.

    python examples/own_model.py --steps 500
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fastlin as fl


class EmbeddedRegressor(nn.Module):
    """Tokens [f(x); y] with a learned f, one layer of linear attention, a shared head."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(features, 64), nn.GELU(), nn.Linear(64, width))
        self.Wq = nn.Parameter(torch.eye(width + 1))
        self.Wk = nn.Parameter(torch.eye(width + 1))
        self.v = nn.Parameter(torch.eye(width + 1)[-1])

    def forward(self, x: Tensor, y: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
        """Loss of a batch: x (B, n, features), y (B, n), x_query (B, features), y_query (B,)."""
        z = torch.cat([self.f(x), y[..., None]], -1)
        q = nn.functional.pad(self.f(x_query), (0, 1))
        loss, _ = fl.prompt_loss(z, q, y_query, None, None, self.Wq @ self.Wk.mT, self.v, scale=1 / x.shape[1])
        return loss


def draw(batch: int, n: int, features: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences of y = b·sin(3 x); each sequence has its own b."""
    x = torch.rand(batch, n + 1, features, generator=generator) * 2 - 1
    b = torch.randn(batch, features, generator=generator)
    y = (torch.sin(3 * x) * b[:, None]).sum(-1)
    return x[:, :n], y[:, :n], x[:, n], y[:, n]


def main() -> None:
    """Train, and print the loss next to that of predicting zero."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("-n", "--n", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, op included")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = EmbeddedRegressor(features=3, width=8)
    loss_of = torch.compile(model, fullgraph=True) if options.compile else model
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        batch = draw(options.batch, options.n, 3, generator)
        loss = loss_of(*batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % max(options.steps // 5, 1) == 0 or step == options.steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}  predicting zero {batch[3].square().mean().item():.4f}")


if __name__ == "__main__":
    main()
