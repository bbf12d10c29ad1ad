"""The ops as torch sees them: schema, fake kernels, autograd and vmap, written once for all backends.

Losses, predictions and Gram matrices are one registered op each, with `fastlin::predict_bwd` for the reverse mode of
the first two. torch.compile sees the registered op. A call that is differentiated goes through an `autograd.Function`,
which is lighter: one that torch.func can transform, or the lightest, for autograd alone (`call.Route`). All share one
computation, one backward, one vmap.

A loss returns its parameters' gradients with its value, and the backward multiplies them by the incoming gradient. For
gradients of the data, which add over trials, and of the per-task losses, the backward runs the reverse mode. A backward
that is itself differentiated runs in torch operations, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastlin import backends, reference, validation
from fastlin.backends import eager
from fastlin.backends.problem import LETTERS
from fastlin.ops import call
from fastlin.ops.arguments import EXTRA, PLACE, Arguments, Given, Tensors, flatten, parse, trials_of
from fastlin.ops.call import Route
from fastlin.ops.vmap import batched
from fastlin.validation import Known, Settings

_OPTIONS = (
    "str op, SymInt tasks, float scale, float first_skip, float skip, bool see_query, bool check_finite, str backend"
)


def loss(
    op: str, tensors: Given, y: Tensor, weight: Any, settings: Settings, known: Known | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and per-task losses; arguments as in `call.signature`."""
    (options, plans), weight = call.signature(op, tensors, y, weight, settings, known)
    if options.backend == "reference":
        losses: tuple[Tensor, Tensor] = literal(op, tensors, y, weight, settings)
        return losses
    tensors = _with_long_task(tensors)
    asked, inputs = _differentiated(tensors)
    # The forward pass makes the gradients of the parameters, if they alone are differentiated.
    wants = "" if "x" in asked or "q" in asked else asked
    args = Arguments(tensors, options, y, weight, None, wants, None, plans)
    results = _dispatch("loss", args, asked, inputs)
    return results[0], results[1]


def loss_and_gradients(
    op: str, tensors: Given, y: Tensor, weight: Any, settings: Settings, known: Known | None, wants: str
) -> tuple[Tensor, ...]:
    """Loss, per-task losses and gradients of loss for the `wants` letters, outside of autograd."""
    (options, plans), weight = call.signature(op, tensors, y, weight, settings, known)
    args = Arguments(_with_long_task(tensors), options, y, weight, None, wants, None, plans)
    return tuple(call.answer("loss", args))


def sampled_loss(args: Arguments, mix: Any, n: int, batch: int, place: Any) -> tuple[Tensor, ...] | None:
    """Loss and per-task losses of sequences that the backend draws from `mix`; arguments are checked.

    Outside of autograd, also the gradients of loss for the letters of `args.wants`.

    None when it cannot draw them: torch traces or transforms the call, the backend does not draw, or the source has no
    `Draw`. The draw is made only when there are numbers: a compiler would take the step for a constant and compile for
    each step.
    """
    options, (asked, inputs) = args.options, _differentiated(args.tensors)
    A, W = args.tensors[PLACE["A"]], args.tensors[PLACE["W"]]
    like = A if W is None else W
    assert like is not None
    route = call.route(like, bool(asked), options.backend, options.check_finite)
    if route is not Route.FUNCTION and route is not Route.DIRECT:
        return None
    if args.plans is None:  # tensors of a subclass: the backend may not read them
        draws = call.checked(args)[1].draws
    else:
        draws = backends.draws(backends.resolve(options.backend, options.op, like.device, like.dtype, like.shape[-1]))
    draw = mix.draw(batch, n, **place) if draws else None
    if draw is None:
        return None
    if route is Route.DIRECT:
        return tuple(call.answer("sampled", args._replace(draw=draw)))
    results: tuple[Tensor, ...] = _PLAIN["loss"](*inputs, asked, args._replace(wants=asked, draw=draw))
    return results


def predict(op: str, tensors: Given, settings: Settings) -> Tensor:
    """Predictions, or Gram matrices; arguments as in `call.signature`."""
    (options, plans), _ = call.signature(op, tensors, None, None, settings)
    if options.backend == "reference":
        yhat: Tensor = literal(op, tensors, None, None, settings)
        return yhat
    name = "predict"
    if op == "gram":
        name = op
        if not options.see_query:
            tensors = (tensors[0], None, *tensors[2:])
    args = Arguments(_with_long_task(tensors), options, plans=plans)
    return _dispatch(name, args, *_differentiated(args.tensors))[0]


def literal(op: str, tensors: Sequence[Any], y: Any, weight: Any, settings: Settings, **draws: Any) -> Any:
    """The op by `fastlin.reference`, which takes the caller's arguments by name."""
    options = {name: getattr(settings, name) for name in validation.OPS[op].options}
    named = validation.named(op, tensors, y, weight)
    oracle: Callable[..., Any] = getattr(reference, op)
    return oracle(**draws, **named, **options, check_finite=settings.check_finite)


def _with_long_task(tensors: Given) -> Given:
    task = tensors[2]
    return tensors if task is None or task.dtype is torch.int64 else (*tensors[:2], task.long(), *tensors[3:])


def _differentiated(tensors: Tensors) -> tuple[str, list[Tensor]]:
    asked, inputs = "", []
    if torch.is_grad_enabled():
        for letter, tensor in zip(LETTERS, tensors, strict=True):
            if tensor is not None and tensor.requires_grad:
                asked += letter
                inputs.append(tensor)
    return asked, inputs


def _dispatch(name: str, args: Arguments, asked: str, inputs: list[Tensor]) -> Sequence[Tensor]:
    options, first = args.options, args.tensors[0]
    assert first is not None
    needs_tasks = options.tasks < 0 and name != "gram"  # K is then the largest task index, plus one
    route = call.route(first, bool(asked), options.backend, needs_tasks or options.check_finite)
    if route is Route.FUNCTION:
        results = _PLAIN[name](*inputs, asked, args)
        return (results,) if isinstance(results, Tensor) else results
    if route is Route.DIRECT:
        return call.answer(name, args)
    if route is Route.REGISTERED:
        results = _OPS[name].registered(*flatten(name, args))
        return (results,) if isinstance(results, Tensor) else results
    if route is Route.TRANSFORMED:
        return _OPS[name].transformed(*flatten(name, args))
    in_torch = args._replace(options=options._replace(backend="eager"))
    if route is Route.TRACED_TORCH:
        task = args.tensors[2]
        if task is not None and options.tasks >= 0:
            validation.assert_task_indices(options.op, options.tasks, task)
        return call.compute(name, in_torch, eager.backend)
    return call.compute(name, *call.checked(in_torch))


class _Op:
    """A registered op, and the same as an autograd.Function that torch.func can transform.

    `returns` is the end of its schema. `pack` makes what the op returns from the list of its results, `fake` results
    without numbers from the arguments. Without `setup` and `backward`, which are torch's, it is not differentiable.
    """

    def __init__(
        self,
        name: str,
        returns: str,
        pack: Callable[[list[Any]], Any],
        fake: Callable[[Arguments], list[Tensor]],
        setup: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.pack = name, pack
        tensors = [f"Tensor{'' if letter == 'x' else '?'} {letter}" for letter in LETTERS]
        extra = [f"{kind} {extra}" for extra, kind in EXTRA[name].items()]
        schema = f"({', '.join([*tensors, *extra, _OPTIONS])}) -> {returns}"
        self.registered = torch.library.custom_op(
            f"fastlin::{name}", lambda *flat: pack(self.answer(*flat)), mutates_args=(), schema=schema
        )
        self.registered.register_fake(lambda *flat: pack(fake(parse(name, flat))))
        self.registered.register_vmap(self._vmap)
        if backward is not None:
            self.registered.register_autograd(backward, setup_context=setup)
            self.transformed = _transformed(self, setup, backward)

    def answer(self, *flat: Any) -> list[Tensor]:
        return call.answer(self.name, parse(self.name, flat))

    def results(self, *flat: Any) -> list[Tensor]:
        """The results of the registered op, in one list."""
        packed = self.registered(*flat)
        if isinstance(packed, Tensor):
            return [packed]
        return [result for part in packed for result in (part if isinstance(part, list) else [part])]

    def _vmap(self, info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[Any, Any]:
        results = batched(self.results, self.name, info.batch_size, in_dims, flat, may_nest=False)
        return self.pack(results), self.pack([0] * len(results))


def _transformed(op: _Op, setup: Any, gradient: Any) -> Callable[..., tuple[Tensor, ...]]:
    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*flat: Any) -> tuple[Tensor, ...]:
            return tuple(op.answer(*flat))

        setup_context = staticmethod(setup)
        backward = staticmethod(gradient)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
            apply: Any = Transformed.apply
            results = batched(lambda *a: list(apply(*a)), op.name, info.batch_size, in_dims, flat, may_nest=True)
            return tuple(results), (0,) * len(results)

    apply: Callable[..., tuple[Tensor, ...]] = Transformed.apply
    return apply


def _empty(tensors: Tensors, *shape: int) -> Tensor:
    R = trials_of(tensors)
    return call.anchor(tensors).new_empty(shape if R is None else (R, *shape))


def _predict_fake(args: Arguments) -> list[Tensor]:
    x = args.tensors[0]
    assert x is not None
    return [_empty(args.tensors, x.shape[0])]


def _gradients_fake(args: Arguments) -> list[Tensor]:
    tensors = (args.tensors[PLACE[letter]] for letter in args.wants)
    return [t.new_empty(t.shape) for t in tensors if t is not None]


def _loss_fake(args: Arguments) -> list[Tensor]:
    known = args.options.tasks
    tasks: Any = known if known >= 0 else torch.library.get_ctx().new_dynamic_size()
    return [_empty(args.tensors), _empty(args.tensors, tasks), *_gradients_fake(args)]


def _gram_fake(args: Arguments) -> list[Tensor]:
    z, _, _, p, *_ = args.tensors
    assert z is not None
    B, _n, m = z.shape
    dtype = torch.float32 if z.dtype in validation.HALF else z.dtype
    return [z.new_empty((B, m, m) if p is None or p.ndim == 3 else (p.shape[0], B, m, m), dtype=dtype)]


def _predict_save(ctx: Any, inputs: Sequence[str], args: Arguments) -> None:
    ctx.save_for_backward(*args.tensors)
    ctx.letters, ctx.options = inputs, args.options


def _predict_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return _reverse(ctx, ctx.saved_tensors, gy)


def _setup(name: str) -> Callable[..., None]:
    return lambda ctx, inputs, output: _predict_save(ctx, LETTERS, parse(name, inputs))


def _gram_backward(ctx: Any, dG: Tensor) -> tuple[Tensor | None, ...]:
    """With S = dG + dG': dz_i = S z_i, dp_k = sum of S p_k over the task's sequences, dq = S q."""
    z, q, task, p, *_ = ctx.saved_tensors
    needs = _needed(ctx)
    S = dG + dG.mT
    total = S.sum(0) if S.ndim == 4 else S
    grads = {}
    if "x" in needs:
        grads["x"] = (z.to(total.dtype) @ total).to(z.dtype)
    if "q" in needs:
        grads["q"] = (total @ q[..., None])[..., 0]
    if "p" in needs:
        if task is None:
            of_tasks = S.sum(-3, keepdim=True)
        else:
            shape = (*S.shape[:-3], p.shape[-3], *S.shape[-2:])
            of_tasks = S.new_zeros(shape).index_add(S.ndim - 3, task, S)
        grads["p"] = p @ of_tasks
    return _in_order(ctx, needs, [grads[letter] for letter in needs])


def _loss_setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    _, _, *grads = output
    if grads and isinstance(grads[0], list):
        grads = grads[0]
    ctx.mark_non_differentiable(*grads)
    _loss_save(ctx, LETTERS, parse("loss", inputs), grads)


def _loss_save(ctx: Any, inputs: Sequence[str], args: Arguments, grads: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*args.tensors, args.y, args.weight, *grads)
    ctx.letters, ctx.made, ctx.options, ctx.draw = inputs, args.wants, args.options, args.draw
    if args.draw is not None:
        ctx.versions = args.draw.versions


def _loss_backward(ctx: Any, g_loss: Tensor | None, g_per_task: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    n = len(LETTERS)
    saved = ctx.saved_tensors
    if g_loss is not None and g_per_task is None and not torch.is_grad_enabled():
        if ctx.made == ctx.letters:  # the gradients come first, in their order
            scaled = _scaled(saved[n + 2 :], g_loss)
            return (*scaled, *(None,) * (len(ctx.needs_input_grad) - len(scaled)))
        if set(_needed(ctx)) <= set(ctx.made):
            return _in_order(ctx, ctx.made, _scaled(saved[n + 2 :], g_loss))
    if g_loss is None and g_per_task is None:
        return (None,) * len(ctx.needs_input_grad)
    tensors, (y, weight) = saved[:n], saved[n : n + 2]
    if ctx.draw is not None:
        if ctx.draw.versions != ctx.versions:
            raise RuntimeError(
                f"{ctx.options.op}: mix was changed in place after the loss was computed; wants it as it was, since "
                "the backward draws the same sequences again"
            )
        if g_per_task is not None and not torch.is_grad_enabled():
            return _sampled_backward(ctx, g_loss, g_per_task)
        like = call.anchor(tensors)
        _, backend = call.checked(Arguments(tensors, ctx.options._replace(check_finite=False)))
        x, q, y, task = backend.sample(ctx.draw, True, like.dtype, like.device)
        tensors = (x, q, task, *tensors[3:])
    if torch.is_grad_enabled():
        (yhat,) = call.compute("predict", Arguments(tensors, ctx.options), eager.backend)
    else:
        yhat = _PREDICT.registered(*tensors, *ctx.options._replace(check_finite=False))
    gy = 2 * (yhat - y) * eager.error_coefficients(tensors[2], y, weight, g_loss, g_per_task)
    return _reverse(ctx, tensors, gy)


def _sampled_backward(ctx: Any, g_loss: Tensor | None, g_per_task: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients through the per-task losses, which are those of a loss with their coefficients for weights."""
    # The sequences are drawn again, for each trial, and none is kept.
    tensors, grads = ctx.saved_tensors[: len(LETTERS)], ctx.saved_tensors[len(LETTERS) + 2 :]
    has_trials, options = g_per_task.ndim == 2, ctx.options._replace(check_finite=False)
    rows: list[list[Tensor]] = []
    for r, weight in enumerate(g_per_task if has_trials else [g_per_task]):
        trial = [None if t is None else t[r : r + 1] for t in tensors] if has_trials else tensors
        args = Arguments(trial, options, weight=weight.contiguous(), wants=ctx.made, draw=ctx.draw)
        rows.append(call.answer("sampled", args)[2:])
    sums = [torch.cat(parts) if has_trials else parts[0] for parts in zip(*rows, strict=True)]
    if g_loss is not None:
        sums = [total + part for total, part in zip(sums, _scaled(grads, g_loss), strict=True)]
    return _in_order(ctx, ctx.made, sums)


def _scaled(grads: Sequence[Tensor], g_loss: Tensor) -> list[Tensor]:
    if g_loss.ndim == 0:
        return [grad * g_loss for grad in grads]
    return [grad * g_loss.reshape(g_loss.shape + (1,) * (grad.ndim - 1)) for grad in grads]


def _reverse(ctx: Any, tensors: Tensors, gy: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs that need them; in torch operations when they may be differentiated again."""
    needs = _needed(ctx)
    if torch.is_grad_enabled():
        args = Arguments(tensors, ctx.options, gy=gy, wants=needs)
        return _in_order(ctx, needs, call.compute("predict_bwd", args, eager.backend))
    options = ctx.options._replace(check_finite=False)
    return _in_order(ctx, needs, _PREDICT_BWD.registered(*tensors, gy, needs, *options))


def _needed(ctx: Any) -> str:
    return "".join([a for a, needed in zip(ctx.letters, ctx.needs_input_grad, strict=False) if needed])


def _in_order(ctx: Any, letters: str, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    ordered: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for letter, grad in zip(letters, grads, strict=True):
        ordered[ctx.letters.index(letter)] = grad
    return tuple(ordered)


def _loss_pack(results: list[Any]) -> tuple[Any, Any, list[Any]]:
    return results[0], results[1], results[2:]


_PREDICT = _Op("predict", "Tensor", itemgetter(0), _predict_fake, _setup("predict"), _predict_backward)
_PREDICT_BWD = _Op("predict_bwd", "Tensor[]", list, _gradients_fake)
_LOSS = _Op("loss", "(Tensor, Tensor, Tensor[])", _loss_pack, _loss_fake, _loss_setup, _loss_backward)
_GRAM = _Op("gram", "Tensor", itemgetter(0), _gram_fake, _setup("gram"), _gram_backward)
_OPS = {"predict": _PREDICT, "loss": _LOSS, "gram": _GRAM}


def _plain(name: str, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """`predict` or `gram` for plain autograd: takes the tensors to differentiate in, their letters, the arguments."""
    # A forward that sets up its own context costs 15 us, one with `setup_context` 60: torch inspects its signature in
    # every call. Each tensor among the inputs costs 0.5 us, so that those without gradient are left out.

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            *_, asked, args = inputs
            _predict_save(ctx, asked, args)
            return call.answer(name, args)[0]

        backward = staticmethod(gradient)

    return _apply_of(Plain)


class _PlainLoss(torch.autograd.Function):
    """Loss and per-task losses for plain autograd, as `_plain`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *_, asked, args = inputs
        value, per_task, *grads = call.answer("loss" if args.draw is None else "sampled", args)
        _loss_save(ctx, asked, args, grads)
        return value, per_task

    backward = staticmethod(_loss_backward)


def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    # Function.apply asks for functorch first, 3 us, which `call.route` has done.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


_PLAIN: dict[str, Callable[..., Any]] = {
    "predict": _plain("predict", _predict_backward),
    "gram": _plain("gram", _gram_backward),
    "loss": _apply_of(_PlainLoss),
}
