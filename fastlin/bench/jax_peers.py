"""The same work in JAX, which is optional: it is asked for when a contender is made."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlin.bench import forms, sampled_peers
from fastlin.bench.cases import ARGUMENTS, Case, CaseShape

Results = Callable[[], tuple[Any, ...]]
"""What is timed: returns what a `Step` returns, as arrays."""

STEPS = 4
"""Steps of a scan on fresh data."""


def given(case: Case, form: str) -> Results:
    """A form on given data: jit of value_and_grad, vmapped over trials."""
    import jax
    import jax.numpy as jnp

    shape = case.shape
    values = [jnp.asarray(x.detach().numpy()) for x in case.arguments]
    names = ARGUMENTS[shape.op]
    places = tuple(i for i, name in enumerate(names) if name in case.parameters)
    call: Any = forms.SHARED[shape.op][form]
    if "y" in names:
        call = jax.value_and_grad(forms.squared(call), places)
    if shape.R is not None:
        call = jax.vmap(call, tuple(0 if i in places else None for i in range(len(names))))
    run = jax.jit(call)

    def step() -> tuple[Any, ...]:
        found = jax.block_until_ready(run(*values))
        return (found[0], *found[1]) if isinstance(found, tuple) else (found,)

    return step


def draw(shape: CaseShape, key: Any) -> tuple[Any, ...]:
    """z, q, y, task of a batch, as `sampled_peers.tokens` has them, by JAX's generator."""
    import jax
    import jax.numpy as jnp

    d, n, B = shape.m - 1, shape.n, shape.B
    means = jnp.asarray(sampled_peers.source(shape).means.numpy(), jnp.float32)
    keys = jax.random.split(key, 3)
    task = jax.random.randint(keys[0], (B,), 0, shape.K)
    beta = means[task] + jax.random.normal(keys[1], (B, d))
    X = jax.random.normal(keys[2], (B, n + 1, d))
    Y = jnp.einsum("bnd,bd->bn", X, beta)
    z = jnp.concatenate([X[:, :n], Y[:, :n, None]], -1)
    q = jnp.concatenate([X[:, n], jnp.zeros((B, 1))], -1)
    return z, q, Y[:, n], task


def loss(shape: CaseShape) -> Any:
    """Loss and gradients of all trials from drawn data: Gram matrices once, then each trial on them."""
    import jax

    gram_op = "gram_stack_loss" if "stack" in shape.op else "gram_loss"
    form, count = forms.SHARED[gram_op]["gram"], len(ARGUMENTS[gram_op]) - 4
    call: Any = jax.value_and_grad(forms.squared(form), tuple(range(4, 4 + count)))
    if shape.R is not None:
        call = jax.vmap(call, (None,) * 4 + (0,) * count)

    return lambda leaves, z, *others: call(z.swapaxes(1, 2) @ z, *others, *leaves)


def drawn(shape: CaseShape, parameters: dict[str, Tensor], steps: int = STEPS) -> Results:
    """Steps on fresh data: jit of a scan; a call runs `steps` of them and returns the results of the last."""
    import jax
    import jax.numpy as jnp

    leaves = tuple(jnp.asarray(leaf.detach().numpy()) for leaf in parameters.values())
    of_data = loss(shape)

    def step(key: Any, _: Any) -> tuple[Any, Any]:
        key, fresh = jax.random.split(key)
        return key, of_data(leaves, *draw(shape, fresh))

    run = jax.jit(lambda key: jax.lax.scan(step, key, None, length=steps))
    keys = iter(range(1 << 30))

    def call() -> tuple[Any, ...]:
        _, (values, grads) = jax.block_until_ready(run(jax.random.key(next(keys))))
        return (values[-1].sum(), *(grad[-1] for grad in grads))

    return call


def training(shape: CaseShape, parameters: dict[str, Tensor], steps: int = STEPS) -> Callable[[float], Any]:
    """Training on fresh data with Adam: jit of a scan; each call continues from the last, at the given rate.

    A call returns the loss of its last step, summed over trials.
    """
    import jax
    import jax.numpy as jnp

    of_data = loss(shape)
    decay, square_decay, epsilon = 0.9, 0.999, 1e-8

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        key, leaves, means, squares, count, lr = state
        key, fresh = jax.random.split(key)
        value, grads = of_data(leaves, *draw(shape, fresh))
        count = count + 1
        means = [decay * m + (1 - decay) * g for m, g in zip(means, grads, strict=True)]
        squares = [square_decay * s + (1 - square_decay) * g * g for s, g in zip(squares, grads, strict=True)]
        size = lr * jnp.sqrt(1 - square_decay**count) / (1 - decay**count)
        moved = zip(leaves, means, squares, strict=True)
        leaves = [leaf - size * m / (jnp.sqrt(s) + epsilon) for leaf, m, s in moved]
        return (key, leaves, means, squares, count, lr), value.sum()

    run = jax.jit(lambda state: jax.lax.scan(step, state, None, length=steps))
    leaves = [jnp.asarray(leaf.detach().numpy()) for leaf in parameters.values()]
    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    state: list[Any] = [(jax.random.key(0), leaves, zeros, zeros, jnp.float32(0), jnp.float32(0))]

    def call(lr: float) -> tuple[Any, ...]:
        state[0], losses = jax.block_until_ready(run((*state[0][:-1], jnp.float32(lr))))
        return (losses[-1],)

    return call
