"""Task sources, parameters and results for the ops that draw their own data, and the same ops on data that are kept."""

from __future__ import annotations

import torch
from support.op_cases import DOUBLE, EAGER_TOLERANCE, assert_close

import fastlin as fl
from fastlin.backends import cpu

AT = {"seed": 2**40 + 3, "step": 4, "stream": 300, "offset": 2**32 - 50}
DTYPES = (torch.float32, DOUBLE)


def mixture(K=3, d=4, **options):
    """K general tasks; the last but one has no weight, the last little."""
    generator = torch.Generator().manual_seed(K)
    root = torch.randn(K, d, d, dtype=DOUBLE, generator=generator)
    weights = torch.rand(K, dtype=DOUBLE, generator=generator) + 0.5
    if K > 2:
        weights[-2:] = torch.tensor([0.0, 1e-3])
    means = torch.randn(K, d, dtype=DOUBLE, generator=generator)
    return fl.TaskMixture(means, root @ root.mT / d, weights / weights.sum(), **options)


SOURCES = {
    "mixture": mixture(noise_std=0.4),
    "everything": mixture(noise_std=0.4, bias=True, feature_cov=torch.diag(torch.arange(1.0, 5.0)), stratify=True),
    "one task": mixture(1),
    "300 tasks": mixture(300, noise_std=0.4),
    "sphere": fl.SphereTasks(4, noise_std=0.1, bias=True),
    "fixed": fl.FixedTask([1.0, 2.0, 3.0, -1.0]),
}


def parameters(source, op, *, R=None, H=None, L=2, t=2, shared=False, n=9, seed=1):
    """Parameters by name, of a size that keeps predictions near one."""
    generator = torch.Generator().manual_seed(seed)
    K, m, size = source.K, source.m, ((n + 3) * source.m) ** -1.0
    trials, heads, tasks = () if R is None else (R,), () if H is None else (H,), () if shared else (source.K,)

    def normal(size, *shape):
        return size * torch.randn(*shape, dtype=DOUBLE, generator=generator)

    found = {"p": None if t is None else normal(1.0, *trials, K, t, m)}
    if op == "sampled_loss":
        return found | {"W": normal(size, *trials, *heads, m, m), "v": normal(1.0, *trials, *heads, *tasks, m)}
    layers = {name: normal(size**0.5, *trials, L, *heads, m, m) for name in "AC"}
    return found | layers | {"h": normal(1.0, *trials, *tasks, m)}


def differentiable(given, dtype, device="cpu"):
    return {name: None if t is None else t.to(dtype=dtype, device=device).requires_grad_() for name, t in given.items()}


def results(call, given, per_task=False):
    """Loss, per-task losses and gradients of the loss, or of both, by name, for different weights of the trials."""
    values = dict(zip(("loss", "per_task"), call(**given), strict=True))
    total = values["loss"].new_zeros(())
    for value in list(values.values())[: 2 if per_task else 1]:
        count = torch.arange(1, value.numel() + 1, dtype=value.dtype, device=value.device).reshape(value.shape)
        total = total + (value * (count / value.numel() + 0.5).cos()).sum()
    leaves = {name: t for name, t in given.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad(total, list(leaves.values()))
    made = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: value.detach() for name, value in values.items()} | made


def sampled(op, source, n, batch, **options):
    return lambda **given: getattr(fl, op)(source, n, batch, *given.values(), **{**AT, **options})


def kept(op, source, n, batch, dtype, **options):
    """The same on data that are drawn first."""
    data = source.sample_gram(batch, n, **AT, dtype=dtype)
    return lambda **given: getattr(fl, op.replace("sampled", "gram"))(*data, *given.values(), **options)


def assert_equal_to_kept(op, name, dtype, n, batch, shape, options, per_task=False, label=None):
    """The numbers of a sequence are the same, and what differs is the order of sums of 150 terms: 75 eps.

    In float64 eager agrees as well, to the tolerance of all backends.
    """
    source = SOURCES[name]
    given = differentiable(parameters(source, op, n=n, **shape), dtype)
    cpu.backend.last_kernel = None
    found = results(sampled(op, source, n, batch, **options), given, per_task)
    if label is not None:
        assert cpu.backend.last_kernel == label
    backends = {"cpu": 75 * torch.finfo(dtype).eps} | ({"eager": EAGER_TOLERANCE} if dtype is DOUBLE else {})
    for backend, tolerance in backends.items():
        expected = results(kept(op, source, n, batch, dtype, **options, backend=backend), given, per_task)
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{key}, {backend}, {n}, {options}")
