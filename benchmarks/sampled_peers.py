"""What a user would write instead of the sampled ops: draw a batch of tokens, then the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastlin as fl
from benchmarks import cases, peers
from benchmarks.cases import Shape

Step = Callable[[], tuple[Tensor, ...]]
"""One training step's work: draws fresh data; returns the loss, summed over trials, and the gradients."""


def source(shape: Shape) -> fl.TaskMixture:
    """K Gaussian tasks with different means, identity covariances and equal weights."""
    d, K = shape.m - 1, shape.K
    means = torch.linspace(-1, 1, K * d, dtype=torch.float64).reshape(K, d)
    return fl.TaskMixture(means, torch.eye(d, dtype=torch.float64).expand(K, d, d), torch.full((K,), 1 / K))


def op(shape: Shape, parameters: dict[str, Tensor], backend: str) -> Step:
    """The sampled op; every call is another step of the generator."""
    mix, leaves = source(shape), tuple(parameters.values())
    public: Any = getattr(fl, shape.op)
    steps = iter(range(1 << 24))

    def call() -> tuple[Tensor, ...]:
        loss, _ = public(mix, shape.n, shape.B, *leaves, seed=1, step=next(steps), backend=backend)
        total = loss if shape.R is None else loss.sum()
        return (total.detach(), *torch.autograd.grad(total, leaves))

    return call


def tokens(shape: Shape, means: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, q, y, task of a batch, by torch's generator."""
    d = shape.m - 1
    place = means.device
    task = torch.randint(0, shape.K, (shape.B,), device=place)
    beta = means[task] + torch.randn(shape.B, d, device=place)
    X = torch.randn(shape.B, shape.n + 1, d, device=place)
    Y = torch.einsum("bnd,bd->bn", X, beta)
    z = torch.cat([X[:, : shape.n], Y[:, : shape.n, None]], -1)
    q = torch.cat([X[:, shape.n], torch.zeros(shape.B, 1, device=place)], -1)
    return z, q, Y[:, shape.n], task


def eager(
    shape: Shape,
    parameters: dict[str, Tensor],
    compiled: bool = False,
    mode: str | None = None,
    model: cases.Loss | None = None,
) -> Step:
    """Tokens and the query-row form, or that of a stack, in torch operations; all of it under torch.compile."""
    leaves = tuple(parameters.values())
    means = source(shape).means.to(leaves[0].device, torch.float32)
    usual = stack_on_tokens if shape.op == "sampled_stack_loss" else peers.query_row
    of_tokens = model or usual

    def loss() -> Tensor:
        return of_tokens(*tokens(shape, means), *leaves)

    run = torch.compile(loss, dynamic=False, mode=mode) if compiled else loss

    def call() -> tuple[Tensor, ...]:
        value = run()
        return (value.detach(), *torch.autograd.grad(value, leaves))

    return call


def stack_on_tokens(
    z: Tensor, q: Tensor, y: Tensor, task: Tensor, p: Tensor, A: Tensor, C: Tensor, h: Tensor
) -> Tensor:
    """A stack as a researcher writes it: full masked attention over the concatenated tokens, layer by layer."""
    Z = torch.cat([p[task], z, q[:, None]], 1)
    seen = Z.new_ones(Z.shape[1])
    seen[-1] = 0.0
    for A_l, C_l in zip(A, C, strict=True):
        Z = Z + (Z @ A_l @ Z.mT * seen) @ (Z @ C_l)
    return ((Z[:, -1] * h[task]).sum(-1) - y).square().mean()


def linear_stack_on_tokens(
    z: Tensor, q: Tensor, y: Tensor, task: Tensor, p: Tensor, A: Tensor, C: Tensor, h: Tensor
) -> Tensor:
    """The same with keys and values multiplied first, which makes the attention linear in n."""
    Z = torch.cat([p[task], z], 1)
    x = q[:, None]
    for A_l, C_l in zip(A, C, strict=True):
        T = A_l @ (Z.mT @ Z) @ C_l
        Z, x = Z + Z @ T, x + x @ T
    return ((x[:, 0] * h[task]).sum(-1) - y).square().mean()


def jax_gram(shape: Shape, parameters: dict[str, Tensor], steps: int) -> Step:
    """JAX: jit of a scan over steps; each draws tokens, forms their Gram matrices, and vmaps loss and gradient.

    A call runs `steps` steps and returns the results of the last. Raises ImportError where JAX is not installed.
    """
    import jax
    import jax.numpy as jnp

    d, n, B = shape.m - 1, shape.n, shape.B
    means = jnp.asarray(source(shape).means.numpy(), jnp.float32)
    leaves = tuple(jnp.asarray(leaf.detach().numpy()) for leaf in parameters.values())

    def loss(leaf: Any, G: Any, q: Any, y: Any, task: Any) -> Any:
        p, W, v = leaf
        prompt = p[task]
        values = jnp.einsum("bij,bj->bi", G, v[task])
        values += jnp.einsum("bti,bt->bi", prompt, jnp.einsum("btj,bj->bt", prompt, v[task]))
        return jnp.mean((jnp.einsum("bi,bi->b", q @ W, values) - y) ** 2)

    def step(key: Any, _: Any) -> tuple[Any, Any]:
        key, *keys = jax.random.split(key, 4)
        task = jax.random.randint(keys[0], (B,), 0, shape.K)
        beta = means[task] + jax.random.normal(keys[1], (B, d))
        X = jax.random.normal(keys[2], (B, n + 1, d))
        Y = jnp.einsum("bnd,bd->bn", X, beta)
        z = jnp.concatenate([X[:, :n], Y[:, :n, None]], -1)
        q = jnp.concatenate([X[:, n], jnp.zeros((B, 1))], -1)
        G = jnp.einsum("bni,bnj->bij", z, z)
        return key, jax.vmap(jax.value_and_grad(loss), (0, None, None, None, None))(leaves, G, q, Y[:, n], task)

    run = jax.jit(lambda key: jax.lax.scan(step, key, None, length=steps))
    keys = iter(range(1 << 30))

    def call() -> tuple[Tensor, ...]:
        _, (values, grads) = jax.block_until_ready(run(jax.random.key(next(keys))))
        last = (values[-1].sum(), *(grad[-1] for grad in grads))
        return tuple(torch.from_numpy(np.asarray(x).copy()) for x in last)

    return call
