"""One call of an op: from flat arguments to a backend's problem, and back to the caller's shapes.

There are three registered ops, `predict`, `predict_bwd` and `loss`. Each takes the nine tensors of `LETTERS`, then its
own extra arguments, then `Options`. `sampled` is `loss` of sequences that the backend draws: without x, q and task, and
with a `Draw` in place of y.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import backends, validation
from fastlin.backends.problem import (
    LETTERS,
    PLAIN_TYPES,
    Gradients,
    Options,
    Prepared,
    Problem,
    drop,
    join_last_layer,
    lift,
    split_last_layer,
)

PLACE = {letter: place for place, letter in enumerate(LETTERS)}
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
    prepared: dict[str, Prepared] | None = None
    """What is prepared for calls of this signature, where that is known."""

    @property
    def wants(self) -> str:
        """Letters of the gradients among the results."""
        return str(self.extra[-1]) if self.extra else ""


def parse(name: str, flat: Sequence[Any]) -> Arguments:
    """Group the flat arguments of an op."""
    start, stop = len(LETTERS), len(LETTERS) + len(EXTRA[name])
    return Arguments(flat[:start], flat[start:stop], Options(*flat[stop:]))


def answer(name: str, given: Arguments) -> list[Tensor]:
    """Results of an op whose numbers were not looked at: as prepared by an earlier call of its signature, if any."""
    if given.prepared:
        ready = given.prepared.get(given.wants)
        results = None if ready is None else ready(given.tensors, given.extra)
        if results is not None:
            return results
    return compute(name, checked(given))


def checked(given: Arguments) -> Arguments:
    """Check the numbers in the tensors; put K and the backend that serves into the options."""
    like, task, options = anchor(given.tensors), given.tensors[2], given.options
    backend = backends.resolve(options.backend, options.op, like.device, like.dtype, like.shape[-1])
    tasks = options.tasks
    if tasks < 0 or not getattr(backends.load(backend), "checks_tasks", False):
        tasks = validation.task_indices(options.op, tasks, task)
    if options.check_finite:
        validation.finite(options.op, _named(given))
    if not _have_memory(given) and not backends.load(backend).traceable:
        if options.backend != "auto":
            raise backends.BackendError(
                f"{options.op}: backend {backend!r} cannot serve this call: it wants tensors with memory of their own, "
                "not a tensor subclass that only wraps others"
            )
        backend = "eager"
    return Arguments(given.tensors, given.extra, _resolved(options, tasks, backend), given.prepared)


@functools.lru_cache(1024)
def _resolved(options: Options, tasks: int, backend: str) -> Options:
    """The options of a call whose K and backend are known; kept, since to make them takes 1.3 us."""
    return options._replace(tasks=tasks, backend=backend)


_PLAIN_TYPES = {*PLAIN_TYPES, type(None), str}


def _have_memory(given: Arguments) -> bool:
    """Whether the tensors of a call have addresses that a kernel can read; those of a subclass may not."""
    if _PLAIN_TYPES.issuperset(map(type, given.tensors)) and _PLAIN_TYPES.issuperset(map(type, given.extra)):
        return True
    tensors = [t for t in (*given.tensors, *given.extra) if isinstance(t, Tensor)]
    return all(t.numel() == 0 or t.data_ptr() != 0 for t in tensors)


def anchor(tensors: Tensors) -> Tensor:
    """The tensor that every call has: W or A. All others have its dtype and device, and m is its last size."""
    A, W = tensors[PLACE["A"]], tensors[PLACE["W"]]
    like = A if W is None else W
    assert like is not None
    return like


def _named(given: Arguments) -> dict[str, Tensor | None]:
    """The tensors by the names that the caller knows."""
    first = "G" if is_gram(given.options) else "z"
    named = dict(zip((first, *LETTERS[1:]), given.tensors, strict=True))
    if len(given.extra) == len(EXTRA["loss"]):
        named.update({"y": given.extra[0]} if isinstance(given.extra[0], Tensor) else {}, weight=given.extra[1])
    return named


def compute(name: str, given: Arguments) -> list[Tensor]:
    """Results of an op, by the backend that its options name.

    Returns
    -------
    list of Tensor
        predict: predictions (B,), or (R, B) with trials. predict_bwd: gradients of the wanted letters. loss: loss ()
        or (R,), per-task losses (K,) or (R, K), then gradients of loss for the wanted letters.
    """
    device = anchor(given.tensors).device.type
    if torch.is_autocast_enabled(device):
        # Reduced precision would be silent here: a result has the precision of its inputs.
        with torch.autocast(device, enabled=False):
            return compute(name, given)
    backend = backends.load(given.options.backend)
    call = _Call(given, backend)
    try:
        results = _ask(backend, name, call, given)
        if name == "loss" and given.prepared is not None:
            _prepare(backend, call, given)
        return results
    except IndexError:
        validation.task_indices(given.options.op, given.options.tasks, given.tensors[2])
        raise


def _prepare(backend: backends.Backend, call: _Call, given: Arguments) -> None:
    """Has the next loss of this signature prepared, if nothing but its shapes must be looked at."""
    prepare = getattr(backend, "prepare", None)
    _, _, task, p, *_, v, _ = given.tensors
    # A shared head without prompts and weights leaves K to the largest task index.
    weight = given.extra[1]
    says_tasks = task is None or p is not None or weight is not None or (v is not None and v.ndim > 1)
    is_plain = says_tasks and call.is_direct and call.problem.x is given.tensors[0] and not given.options.check_finite
    if prepare is not None and is_plain and given.prepared is not None:
        given.prepared[given.wants] = prepare(call.problem, *given.extra)


def _ask(backend: backends.Backend, name: str, call: _Call, given: Arguments) -> list[Tensor]:
    if name == "predict":
        return [call.from_trials(backend.predict(call.problem))]
    wants = given.wants
    inner = call.inner(wants)
    if name == "predict_bwd":
        gy = given.extra[0][None] if call.adds_trial else given.extra[0]
        return call.outer(backend.predict_bwd(call.problem, gy, inner), wants)
    y, weight, _ = given.extra
    if name == "sampled":
        sampler = backends.sampler(given.options.backend)
        assert sampler is not None
        value, per_task, grads = sampler.sampled_loss(call.problem, y, weight, inner)
    else:
        value, per_task, grads = backend.loss(call.problem, y, weight, inner)
    return [call.from_trials(value), call.from_trials(per_task), *call.outer(grads, wants)]


def trials_of(tensors: Tensors) -> int | None:
    """R, or None for a call without trials."""
    A, W = tensors[PLACE["A"]], tensors[PLACE["W"]]
    if A is not None:
        return A.shape[0] if A.ndim > 3 else None
    assert W is not None
    return W.shape[0] if W.ndim > 2 else None


def is_gram(options: Options) -> bool:
    """Whether x holds Gram matrices, as in the ops that take them and in those that draw them."""
    return options.op.startswith(("gram", "sampled"))


class _Call:
    """The problem of a call, and the way back to the caller's letters and shapes."""

    def __init__(self, given: Arguments, backend: backends.Backend) -> None:
        x, q, task, p, A, C, W, v, h = self.given = given.tensors
        options = given.options
        # Without K nothing but the per-task losses depends on the task: one shared head, no prompt.
        tasks = max(options.tasks, 1)
        self.is_stack = A is not None
        # Whether the backend answers in the caller's forms.
        self.is_direct = (
            getattr(backend, "any_form", False)
            and v is not None
            and (v.ndim > 1 or getattr(backend, "shares_heads", False))
        )
        if x is not None and x.dtype in validation.HALF and not getattr(backend, "reads_half", False):
            x = x.to(anchor(given.tensors).dtype)
        skips: tuple[float, ...] = (0.0,)
        if A is None:
            assert W is not None
            assert v is not None
            if not self.is_direct:
                p, W, v = p if p is None else lift("p", p, tasks), lift("W", W, tasks), lift("v", v, tasks)
        else:
            assert C is not None
            assert h is not None
            A, self.C, self.h = lift("A", A, tasks), lift("C", C, tasks), lift("h", h, tasks)
            skips = (options.first_skip,) + (options.skip,) * (A.shape[1] - 1)
            A, C, W, v = split_last_layer(A, self.C, self.h)
            h = self.h if skips[-1] else None
            p = p if p is None else lift("p", p, tasks)
        task = None if options.tasks < 0 else task
        self.problem = Problem(
            x, is_gram(options), q, task, p, A, C, W, v, h, options.scale, skips, options.see_query, tasks
        )
        # Whether the problem has a trial that the caller does not have.
        self.adds_trial = not self.is_direct and trials_of(given.tensors) is None

    def inner(self, wants: str) -> str:
        """Letters of the problem whose gradients the caller's letters need."""
        if not self.is_stack:
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
        """Gradients in the caller's letters, shapes and dtypes, in the order of `wants`."""
        if "x" in grads:
            first = self.given[PLACE["x"]]
            assert first is not None
            grads["x"] = grads["x"].to(first.dtype)
        if self.is_direct:
            return [grads[letter] for letter in wants]
        if self.is_stack:
            grads = join_last_layer(grads, self.C, self.h, wants)
        result = []
        for letter in wants:
            given = self.given[PLACE[letter]]
            assert given is not None
            result.append(drop(letter, grads[letter], given.shape).contiguous())
        return result

    def from_trials(self, tensor: Tensor) -> Tensor:
        """A result that leads with R in the form that the caller expects."""
        # Not a view: autograd forbids to add to one of several views in place, as in loss += penalty.
        if self.is_direct:
            return tensor
        return tensor[0].clone() if self.adds_trial else tensor.contiguous()
