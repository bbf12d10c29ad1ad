"""One call of an op: from flat arguments to a backend's problem, and back to the caller's shapes.

There are three ops, `predict`, `predict_bwd` and `loss`. Each takes the nine tensors of `LETTERS`, then its own
extra arguments, then `Options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import backends, validation
from fastlin.backends.problem import (
    Gradients,
    Options,
    Problem,
    drop,
    join_last_layer,
    lift,
    split_last_layer,
)

LETTERS = ("x", "q", "task", "p", "A", "C", "W", "v", "h")
"""The tensors that every op takes, in order. x is z or G; a layer lacks A, C, h, and a stack lacks W, v."""
PARAMETERS = "pACWvh"

EXTRA: dict[str, tuple[str, ...]] = {
    "predict": (),
    "predict_bwd": ("Tensor gy", "str wants"),
    "loss": ("Tensor y", "Tensor? weight", "str wants"),
}
"""What each op takes between the tensors and the options: gy is the gradient of the predictions, `wants` the letters
whose gradients it returns, in order."""

Tensors = Sequence[Tensor | None]


class Arguments(NamedTuple):
    """The flat arguments of an op, in their three groups."""

    tensors: Tensors
    extra: Sequence[Any]
    options: Options

    @property
    def wants(self) -> str:
        """Letters of the gradients among the results."""
        return str(self.extra[-1]) if self.extra else ""


def parse(name: str, flat: Sequence[Any]) -> Arguments:
    """Group the flat arguments of an op."""
    start, stop = len(LETTERS), len(LETTERS) + len(EXTRA[name])
    return Arguments(flat[:start], flat[start:stop], Options(*flat[stop:]))


def checked(given: Arguments) -> Arguments:
    """Check the numbers in the tensors; put K and the backend that serves into the options."""
    x, *others = given.tensors
    assert x is not None
    options = given.options
    named = {"G" if is_gram(options) else "z": x, **dict(zip(LETTERS[1:], others, strict=True))}
    if len(given.extra) == len(EXTRA["loss"]):
        named.update(y=given.extra[0], weight=given.extra[1])
    tasks = validation.values(options.op, options.tasks, options.check_finite, named)
    backend = backends.resolve(options.backend, options.op, x.device, x.dtype, x.shape[-1])
    return given._replace(options=options._replace(tasks=tasks, backend=backend))


def compute(name: str, given: Arguments) -> list[Tensor]:
    """Results of an op, by the backend that its options name.

    Returns
    -------
    list of Tensor
        predict: predictions (B,), or (R, B) with trials. predict_bwd: gradients of the wanted letters. loss: loss ()
        or (R,), per-task losses (K,) or (R, K), then gradients of loss for the wanted letters.
    """
    q = given.tensors[1]
    assert q is not None
    if torch.is_autocast_enabled(q.device.type):
        # Reduced precision would be silent here: a result has the precision of its inputs.
        with torch.autocast(q.device.type, enabled=False):
            return compute(name, given)
    call = _Call(given)
    backend = backends.load(given.options.backend)
    if name == "predict":
        return [call.from_trials(backend.predict(call.problem))]
    inner = call.inner(given.wants)
    if name == "predict_bwd":
        gy = given.extra[0] if call.trials else given.extra[0][None]
        return call.outer(backend.predict_bwd(call.problem, gy, inner), given.wants)
    y, weight, _ = given.extra
    value, per_task, grads = backend.loss(call.problem, y, weight, inner)
    return [call.from_trials(value), call.from_trials(per_task), *call.outer(grads, given.wants)]


def trials_of(tensors: Tensors) -> int | None:
    """R, or None for a call without trials."""
    A, W = tensors[LETTERS.index("A")], tensors[LETTERS.index("W")]
    if A is not None:
        return A.shape[0] if A.ndim > 3 else None
    assert W is not None
    return W.shape[0] if W.ndim > 2 else None


def is_gram(options: Options) -> bool:
    """Whether x holds Gram matrices, as in the ops that take them and in those that draw them."""
    return options.op.startswith(("gram", "sampled"))


class _Call:
    """The problem of a call, and the way back to the caller's letters and shapes."""

    def __init__(self, given: Arguments) -> None:
        self.given = dict(zip(LETTERS, given.tensors, strict=True))
        self.trials = trials_of(given.tensors)
        options = given.options
        # Without K nothing but the per-task losses depends on the task: one shared head, no prompt.
        tasks = max(options.tasks, 1)
        self.full = {
            letter: lift(letter, tensor, tasks)
            for letter, tensor in self.given.items()
            if letter in PARAMETERS and tensor is not None
        }
        x, q, task = given.tensors[:3]
        assert x is not None
        assert q is not None
        if self.given["A"] is None:
            A, C, W, v, h = None, None, self.full["W"], self.full["v"], None
            skips = [0.0]
        else:
            A, C, W, v = split_last_layer(self.full["A"], self.full["C"], self.full["h"])
            skips = [options.first_skip] + [options.skip] * (self.full["A"].shape[1] - 1)
            h = self.full["h"] if skips[-1] else None
        self.problem = Problem(
            x=x,
            is_gram=is_gram(options),
            q=q,
            task=None if options.tasks < 0 else task,
            p=self.full.get("p"),
            A=A,
            C=C,
            W=W,
            v=v,
            h=h,
            scale=options.scale,
            skips=tuple(skips),
            see_query=options.see_query,
        )

    def inner(self, wants: str) -> str:
        """Letters of the problem whose gradients the caller's letters need."""
        if self.given["A"] is None:
            return wants
        needs = set(wants)
        if "A" in wants:
            needs.add("W")
        if "C" in wants or "h" in wants:
            needs.add("v")
        if self.problem.A is None:
            needs -= {"A", "C"}
        if self.problem.h is None:
            needs -= {"h"}
        return "".join(sorted(needs))

    def outer(self, grads: Gradients, wants: str) -> list[Tensor]:
        """Gradients in the caller's letters and shapes, in the order of `wants`."""
        if self.given["A"] is not None:
            grads = join_last_layer(grads, self.full["C"], self.full["h"], wants)
        result = []
        for letter in wants:
            given = self.given[letter]
            assert given is not None
            result.append(drop(letter, grads[letter], given.shape).contiguous())
        return result

    def from_trials(self, tensor: Tensor) -> Tensor:
        """A result that leads with R in the form that the caller expects."""
        return (tensor[0] if self.trials is None else tensor).contiguous()
