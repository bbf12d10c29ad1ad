"""One call of an op: its signature, its route through torch, and its plan, which asks a backend.

`sampled` is `loss` of sequences that the backend draws.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fastlin import backends, validation
from fastlin.backends.base import Backend, BoundLoss, PreparedLoss
from fastlin.backends.draw import Draw
from fastlin.backends.problem import (
    PLAIN_TYPES,
    Gradients,
    Options,
    Problem,
    drop,
    join_last_layer,
    lift,
    split_last_layer,
)
from fastlin.ops.arguments import PLACE, Arguments, Plans, Tensors, trials_of
from fastlin.validation import Known, Settings


class Signature(NamedTuple):
    """What the shapes, dtypes, devices and options of a call decide. Calls that agree in these share one."""

    options: Options
    plans: Plans | None  # by what else a plan depends on (`answer`); None where no plan may be kept


signatures: dict[tuple[Any, ...], Signature] = {}
"""Signatures of calls that were checked: to find one takes 4 us, to check a call 60."""
MOST_SIGNATURES = 1024
_MOST_PLANS = 64


def signature(
    op: str, tensors: Tensors, y: Any, weight: Any, settings: Settings, known: Known | None = None
) -> tuple[Signature, Tensor | None]:
    """The signature of a call, and its weight as a tensor; the first call of a signature is checked.

    Arguments are as in `validation.arguments`: anything that the caller gave.
    """
    key = _key(op, tensors, y, weight, settings, known)
    if key is not None:
        try:
            found = signatures.get(key)
        except TypeError:  # not hashable: symbolic sizes, or a list as an option
            key = None
        else:
            if found is not None:
                return found, weight
    options, weight = validation.arguments(op, tensors, y, weight, settings, known)
    # A tensor of a subclass may be without memory, which is checked in every call.
    is_plain = PLAIN_TYPES.issuperset(type(t) for t in (*tensors, y, weight) if t is not None)
    made = Signature(options, {} if is_plain else None)
    if key is not None:
        if len(signatures) >= MOST_SIGNATURES:
            signatures.clear()
        signatures[key] = made
    return made, weight


def _key(
    op: str, tensors: Tensors, y: Any, weight: Any, settings: Settings, known: Known | None
) -> tuple[Any, ...] | None:
    """Everything that `validation.arguments` reads; None for a call that must be checked every time."""
    # Such is a call that is traced, where sizes may be symbolic, one with an argument that is not a tensor, and one
    # whose constants, y and weight, require grad, which is an error only while grad mode is on.
    if torch.compiler.is_compiling():
        return None
    # With their types: True == 1 == 1.0, and not all of them are right everywhere.
    key = [op, settings, *map(type, settings)]
    for tensor in (*tensors, y, weight):
        if tensor is None:
            key.append(None)
        elif isinstance(tensor, Tensor):
            try:
                key += (type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout)
            except RuntimeError:  # a nested tensor has no shape
                return None
        else:
            return None
    if (y is not None and y.requires_grad) or (weight is not None and weight.requires_grad):
        return None
    if known is not None:
        key += known.items()
    return tuple(key)


class Route(Enum):
    """How a call passes through torch: decided by what torch is doing at the moment."""

    REGISTERED = "the registered op: compilers, fake tensors and the meta device have no numbers, tracers want an op"
    TRACED_TORCH = "eager's torch operations, compiled: torch.func inside torch.compile cannot see through the op"
    TORCH = "eager's torch operations: forward mode differentiates them any number of times"
    TRANSFORMED = "the autograd.Function that torch.func can differentiate and vmap"
    FUNCTION = "the autograd.Function of plain autograd"
    DIRECT = "the backend itself"


def route(first: Tensor, is_differentiated: bool, backend: str, has_checks: bool) -> Route:
    """The route of a call that autograd differentiates or not, on the backend that the caller named.

    `first`, any of its tensors, shows whether there are numbers. With `has_checks`, numbers must be checked beyond the
    task indices.
    """
    functorch = torch._C._are_functorch_transforms_active()
    # torch.jit.trace, make_fx and other dispatch modes record operations.
    if (
        torch.compiler.is_compiling()
        or isinstance(first, FakeTensor)
        or first.is_meta
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        in_torch = functorch and backend in ("auto", "eager") and not has_checks
        return Route.TRACED_TORCH if in_torch else Route.REGISTERED
    if forward_ad._current_level >= 0 or (functorch and _in_forward_mode()):
        return Route.TORCH
    if functorch:
        return Route.TRANSFORMED
    return Route.FUNCTION if is_differentiated else Route.DIRECT


def _in_forward_mode() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def anchor(tensors: Tensors) -> Tensor:
    """A tensor with the dtype, the device and, as its last size, the width m of a call: W, A or, in `gram`, z."""
    A, W = tensors[4], tensors[6]
    if W is not None:
        return W
    if A is not None:
        return A
    z = tensors[0]
    assert z is not None
    return z


def answer(name: str, args: Arguments) -> list[Tensor]:
    """Results of an op by the backend that serves it, with its numbers checked.

    predict: predictions (B,), or (R, B) with trials. predict_bwd: gradients of the wanted letters. loss, sampled: loss
    () or (R,), per-task losses (K,) or (R, K), then gradients of loss for the wanted letters. gram: Gram matrices
    (B, m, m) or (R, B, m, m).
    """
    options, tensors = args.options, args.tensors
    like = anchor(tensors)
    dtype = torch.float32 if like.dtype in validation.HALF else like.dtype
    served = backends.resolve(options.backend, options.op, like.device, dtype, like.shape[-1])
    tasks = options.tasks
    if tasks < 0:
        tasks = validation.task_indices(options.op, -1, tensors[2])
        args = args._replace(options=options._replace(tasks=tasks))
    key = (name, args.wants, tasks if name != "gram" else 0, served)
    plans = args.plans
    plan: Plan | None = None if plans is None else plans.get(key)
    if plan is None:
        args, backend = checked(args)
        plan = Plan(name, args, backend)
        if plans is not None:
            if len(plans) >= _MOST_PLANS:  # K, where task indices alone say it, may differ in every call
                plans.clear()
            plans[key] = plan
        return plan.run(args)
    plan.repeats = True
    if options.tasks >= 0 and not plan.backend.checks_tasks:
        validation.task_indices(options.op, tasks, tensors[2])
    if options.check_finite:
        validation.finite(options.op, validation.named(options.op, tensors, args.y, args.weight))
    return plan.run(args)


def checked(args: Arguments) -> tuple[Arguments, Backend]:
    """Check the numbers in the tensors; put K and the name of the backend that serves into the options."""
    tensors, options = args.tensors, args.options
    like = anchor(tensors)
    dtype = torch.float32 if like.dtype in validation.HALF else like.dtype
    backend = backends.load(backends.resolve(options.backend, options.op, like.device, dtype, like.shape[-1]))
    tasks = options.tasks
    if tasks < 0 or not backend.checks_tasks:
        tasks = validation.task_indices(options.op, tasks, tensors[2])
    if options.check_finite:
        validation.finite(options.op, validation.named(options.op, tensors, args.y, args.weight))
    if not backend.traceable and not _have_memory(args):
        if options.backend != "auto":
            raise backends.BackendError(
                f"{options.op}: backend {backend.name!r} cannot serve this call: it wants tensors with memory of their "
                "own, not a tensor subclass that only wraps others"
            )
        backend = backends.load("eager")
    return args._replace(options=options._replace(tasks=tasks, backend=backend.name)), backend


def _have_memory(args: Arguments) -> bool:
    tensors = [t for t in (*args.tensors, args.y, args.weight, args.gy) if t is not None]
    return all(type(t) in PLAIN_TYPES or t.numel() == 0 or t.data_ptr() != 0 for t in tensors)


def compute(name: str, args: Arguments, backend: Backend) -> list[Tensor]:
    return Plan(name, args, backend).run(args)


class Plan:
    """How calls of one form are computed: the problem that the backend gets, and the way back to the caller's forms.

    `args` are checked; later calls differ from them in their numbers alone.
    """

    def __init__(self, name: str, args: Arguments, backend: Backend) -> None:
        options, (x, _, _, _, A, _, _, v, _) = args.options, args.tensors
        self.backend = backend
        self.options, self.wants = options, args.wants
        # K is unknown only where nothing but the per-task losses depends on it: one shared head, no prompt.
        self.tasks, self.has_tasks = max(options.tasks, 1), options.tasks >= 0
        self.is_gram = options.op.startswith(("gram", "sampled"))
        self.is_stack = A is not None
        # Whether the backend takes and returns the caller's forms.
        self.is_direct = backend.any_form and v is not None and (v.ndim > 1 or backend.shares_heads)
        self.adds_trial = name != "gram" and not self.is_direct and trials_of(args.tensors) is None
        self.widens = x is not None and x.dtype in validation.HALF and not backend.reads_half
        self.skips: tuple[float, ...] = (0.0,)
        if A is not None:
            self.skips = (options.first_skip,) + (options.skip,) * (A.shape[-3 if A.ndim < 5 else 1] - 1)
        self.inner = self._inner()
        self.device_type = anchor(args.tensors).device.type
        self.repeats = False  # a loss is prepared in its second call: one that is not repeated gains nothing
        self.prepared: PreparedLoss | None = None
        self._compute = {
            "predict": self._predict,
            "predict_bwd": self._predict_bwd,
            "loss": self._loss,
            "sampled": self._loss,
            "gram": self._gram,
        }[name]

    def run(self, args: Arguments) -> list[Tensor]:
        try:
            if torch.is_autocast_enabled(self.device_type):
                # Reduced precision would be silent here: a result has the precision of its inputs.
                with torch.autocast(self.device_type, enabled=False):
                    return self._compute(args)
            return self._compute(args)
        except IndexError:
            validation.task_indices(self.options.op, self.options.tasks, args.tensors[2])
            raise

    def bind(self, args: Arguments) -> Callable[[Draw], list[Tensor]]:
        """`run` for one draw after another, on contiguous tensors that stay where they are.

        The results of later calls may overwrite those of earlier ones.
        """
        bound: BoundLoss | None = None
        self.repeats = True
        if self.is_direct:
            problem, _, _ = self._problem(args.tensors)
            prepared = self.backend.prepare(problem, self.inner, True)
            bound = None if prepared is None else prepared.bind(problem, None, args.weight)

        def of_draw(draw: Draw) -> list[Tensor]:
            results = None if bound is None else bound(draw)
            if results is None:
                return self.run(args._replace(draw=draw))
            return [*results[:2], *results[2]]

        return of_draw

    def _inner(self) -> str:
        if not self.is_stack:
            return self.wants
        needs = set(self.wants)
        if "A" in self.wants:
            needs.add("W")
        if "C" in self.wants or "h" in self.wants:
            needs.add("v")
        if len(self.skips) == 1:
            needs -= {"A", "C"}
        if not self.skips[-1]:
            needs -= {"h"}
        return "".join(sorted(needs))

    def _problem(self, tensors: Tensors) -> tuple[Problem, Tensor | None, Tensor | None]:
        """The problem that the backend gets; of a stack also C and h in full form."""
        x, q, task, p, A, C, W, v, h = tensors
        options, tasks = self.options, self.tasks
        if self.widens:
            assert x is not None
            x = x.to(anchor(tensors).dtype)
        if not self.has_tasks:
            task = None
        lifted_C = lifted_h = None
        if not self.is_direct:
            p = None if p is None else lift("p", p, tasks)
            if A is None:
                assert W is not None
                assert v is not None
                W, v = lift("W", W, tasks), lift("v", v, tasks)
            else:
                assert C is not None
                assert h is not None
                lifted_C, lifted_h = lift("C", C, tasks), lift("h", h, tasks)
                A, C, W, v = split_last_layer(lift("A", A, tasks), lifted_C, lifted_h)
                h = lifted_h if self.skips[-1] else None
        assert W is not None
        assert v is not None
        problem = Problem(
            x, self.is_gram, q, task, p, A, C, W, v, h, options.scale, self.skips, options.see_query, tasks
        )
        return problem, lifted_C, lifted_h

    def _predict(self, args: Arguments) -> list[Tensor]:
        return [self._from_trials(self.backend.predict(self._problem(args.tensors)[0]))]

    def _predict_bwd(self, args: Arguments) -> list[Tensor]:
        problem, C, h = self._problem(args.tensors)
        assert args.gy is not None
        gy = args.gy[None] if self.adds_trial else args.gy
        return self._outer(self.backend.predict_bwd(problem, gy, self.inner), args.tensors, C, h)

    def _loss(self, args: Arguments) -> list[Tensor]:
        problem, C, h = self._problem(args.tensors)
        y, weight, draw, backend = args.y, args.weight, args.draw, self.backend
        if self.repeats and self.prepared is None:
            self.prepared = backend.prepare(problem, self.inner, draw is not None)
        bound = None if self.prepared is None else self.prepared.bind(problem, y, weight)
        prepared = None if bound is None else bound(draw)
        if prepared is not None:
            value, per_task, gradients = prepared
            if self.is_direct:
                return [value, per_task, *gradients]
            grads = dict(zip(self.inner, gradients, strict=True))
        elif draw is not None:
            value, per_task, grads = backend.sampled_loss(problem, draw, weight, self.inner)
        else:
            assert y is not None
            value, per_task, grads = backend.loss(problem, y, weight, self.inner)
        results = [self._from_trials(value), self._from_trials(per_task)]
        return results + self._outer(grads, args.tensors, C, h)

    def _gram(self, args: Arguments) -> list[Tensor]:
        x, q, task, p, *_ = args.tensors
        assert x is not None
        G = self.backend.gram(x.float() if self.widens else x)
        if q is not None:
            G = G + q[:, :, None] * q[:, None]
        if p is not None:
            of_tasks = self.backend.gram(p)
            G = G + (of_tasks if task is None else of_tasks.index_select(-3, task))
        return [G]

    def _outer(self, grads: Gradients, tensors: Tensors, C: Tensor | None, h: Tensor | None) -> list[Tensor]:
        """Gradients in the caller's letters, forms and dtypes, in the order of `wants`."""
        if "x" in grads:
            first = tensors[0]
            assert first is not None
            grads["x"] = grads["x"].to(first.dtype)
        if self.is_direct:
            return [grads[letter] for letter in self.wants]
        if C is not None and h is not None:
            grads = join_last_layer(grads, C, h, self.wants)
        results = []
        for letter in self.wants:
            tensor = tensors[PLACE[letter]]
            assert tensor is not None
            results.append(drop(letter, grads[letter], tensor.shape).contiguous())
        return results

    def _from_trials(self, tensor: Tensor) -> Tensor:
        # Not a view: autograd forbids to add to one of several views in place, as in loss += penalty.
        if self.is_direct:
            return tensor
        return tensor[0].clone() if self.adds_trial else tensor.contiguous()
