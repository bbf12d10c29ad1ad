"""The ops as torch sees them: schema, fake kernels, autograd and vmap, written once for all backends.

Losses and predictions are one op each, `fastlin::loss` and `fastlin::predict`, with `fastlin::predict_bwd` for their
reverse mode (arguments: `_call`). torch.compile sees the registered op. A call that is differentiated goes through an
`autograd.Function`, which is lighter: one that torch.func can transform, or the lightest, for autograd alone
(`_transforms.Path`). All share one computation, one backward, one vmap.

A loss returns its parameters' gradients with its value, and the backward multiplies them by what comes from above.
Where that does not do (gradients of the data, which add over trials, or of the per-task losses) the backward runs
the reverse mode. A backward that is itself differentiated runs in torch operations, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin import backends, validation
from fastlin.backends import eager
from fastlin.backends.draw import Draw
from fastlin.backends.problem import LETTERS, Options, Prepared
from fastlin.ops import _call
from fastlin.ops._call import PLACE, Arguments, Tensors
from fastlin.ops._transforms import Path, batched, differentiated, path

_OPTIONS = (
    "str op, SymInt tasks, float scale, float first_skip, float skip, bool see_query, bool check_finite, str backend"
)


def loss(
    tensors: Tensors,
    y: Tensor,
    weight: Tensor | None,
    options: Options,
    prepared: dict[str, Prepared] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and per-task losses of validated arguments, by the path that fits the moment."""
    asked = differentiated(LETTERS, tensors)
    # The forward pass makes the gradients of the parameters, if they alone are differentiated.
    wants = "" if "x" in asked or "q" in asked else asked
    results = _dispatch("loss", Arguments(tensors, (y, weight, wants), options, prepared), asked)
    return results[0], results[1]


def sampled_loss(
    tensors: Tensors, make_draw: Callable[[], Draw | None], weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor] | None:
    """Loss and per-task losses of sequences that the backend draws.

    None when it does not do that, or not now, or not for this source, which then has no `Draw`. That is only asked for
    when there are numbers: a compiler would take the step for a constant and compile anew for each.
    """
    asked = differentiated(LETTERS, tensors)
    way = path(_call.anchor(tensors), bool(asked), options.backend, options.check_finite)
    if way is not Path.FUNCTION and way is not Path.DIRECT:
        return None
    draw = make_draw()
    given = _call.checked(Arguments(tensors, (draw, weight, asked), options))
    if draw is None or backends.sampler(given.options.backend) is None:
        return None
    if way is Path.DIRECT:
        results: Sequence[Tensor] = _call.compute("sampled", given)
    else:
        results = _apply_sampled(*[tensors[PLACE[letter]] for letter in asked], asked, given)
    return results[0], results[1]


def predict(tensors: Tensors, options: Options) -> Tensor:
    """Predictions of validated arguments, by the path that fits the moment."""
    return _dispatch("predict", Arguments(tensors, (), options), differentiated(LETTERS, tensors))[0]


def _dispatch(name: str, given: Arguments, asked: str) -> Sequence[Tensor]:
    x, options = given.tensors[0], given.options
    assert x is not None
    way = path(x, bool(asked), options.backend, options.tasks < 0 or options.check_finite)
    if way is Path.FUNCTION:
        results = _PLAIN[name](*[given.tensors[PLACE[letter]] for letter in asked], asked, given)
        return (results,) if isinstance(results, Tensor) else results
    if way is Path.DIRECT:
        return _call.answer(name, given)
    flat = (*given.tensors, *given.extra, *options)
    if way is Path.REGISTERED:
        results = _OPS[name](*flat)
        return (results,) if isinstance(results, Tensor) else results
    if way is Path.TRANSFORMED:
        return _TRANSFORMED[name](*flat)
    in_torch = given._replace(options=options._replace(backend="eager"))
    if way is Path.TRACED_TORCH:
        task = given.tensors[2]
        if task is not None and options.tasks >= 0:
            validation.assert_task_indices(options.op, options.tasks, task)
        return _call.compute(name, in_torch)
    return _call.compute(name, _call.checked(in_torch))


def _checked_compute(name: str, flat: Sequence[Any]) -> list[Tensor]:
    return _call.answer(name, _call.parse(name, flat))


def _predict_impl(*flat: Any) -> Tensor:
    return _checked_compute("predict", flat)[0]


def _bwd_impl(*flat: Any) -> list[Tensor]:
    return _checked_compute("predict_bwd", flat)


def _loss_impl(*flat: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    value, per_task, *grads = _checked_compute("loss", flat)
    return value, per_task, grads


def _define(name: str, implementation: Any, returns: str) -> Any:
    tensors = [f"Tensor{'' if letter in 'xq' else '?'} {letter}" for letter in LETTERS]
    schema = f"({', '.join([*tensors, *_call.EXTRA[name], _OPTIONS])}) -> {returns}"
    return torch.library.custom_op(f"fastlin::{name}", implementation, mutates_args=(), schema=schema)


_predict_op = _define("predict", _predict_impl, "Tensor")
_bwd_op = _define("predict_bwd", _bwd_impl, "Tensor[]")
_loss_op = _define("loss", _loss_impl, "(Tensor, Tensor, Tensor[])")
_OPS = {"predict": _predict_op, "loss": _loss_op}


def _empty(tensors: Tensors, *shape: int) -> Tensor:
    """A result of the fake kernels, with leading R where the call has trials."""
    R = _call.trials_of(tensors)
    return _call.anchor(tensors).new_empty(shape if R is None else (R, *shape))


def _empty_gradients(given: Arguments) -> list[Tensor]:
    by_letter = dict(zip(LETTERS, given.tensors, strict=True))
    return [t.new_empty(t.shape) for t in (by_letter[letter] for letter in given.wants) if t is not None]


def _predict_fake(*flat: Any) -> Tensor:
    return _empty(_call.parse("predict", flat).tensors, flat[0].shape[0])


def _bwd_fake(*flat: Any) -> list[Tensor]:
    return _empty_gradients(_call.parse("predict_bwd", flat))


def _loss_fake(*flat: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    given = _call.parse("loss", flat)
    known = given.options.tasks
    tasks: Any = known if known >= 0 else torch.library.get_ctx().new_dynamic_size()
    return _empty(given.tensors), _empty(given.tensors, tasks), _empty_gradients(given)


def _predict_setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    _predict_save(ctx, LETTERS, _call.parse("predict", inputs))


def _predict_save(ctx: Any, inputs: Sequence[str], given: Arguments) -> None:
    ctx.save_for_backward(*given.tensors)
    ctx.letters, ctx.options = inputs, given.options


def _predict_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return _reverse(ctx, ctx.saved_tensors, gy)


def _loss_setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    given = _call.parse("loss", inputs)
    _, _, *grads = output
    if grads and isinstance(grads[0], list):
        grads = grads[0]
    ctx.mark_non_differentiable(*grads)
    _loss_save(ctx, LETTERS, given, grads)


def _loss_save(ctx: Any, inputs: Sequence[str], given: Arguments, grads: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given.tensors, *given.extra[:2], *grads)
    ctx.letters, ctx.made, ctx.options = inputs, given.wants, given.options


def _loss_backward(ctx: Any, g_loss: Tensor | None, g_per_task: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    n = len(LETTERS)
    saved = ctx.saved_tensors
    if g_loss is not None and g_per_task is None and not torch.is_grad_enabled():
        if ctx.made == ctx.letters:  # the gradients come first, in their order
            scaled = _scaled(saved[n + 2 :], g_loss)
            return (*scaled, *(None,) * (len(ctx.needs_input_grad) - len(scaled)))
        if set(_needed(ctx)) <= set(ctx.made):
            return _in_order(ctx, ctx.made, _scaled(saved[n + 2 :], g_loss))
    tensors, (y, weight) = saved[:n], saved[n : n + 2]
    if g_loss is None and g_per_task is None:
        return (None,) * len(ctx.needs_input_grad)
    draw = getattr(ctx, "draw", None)
    if draw is not None:
        _check_unchanged(ctx)
        sampler = backends.sampler(ctx.options.backend)
        assert sampler is not None
        like = _call.anchor(tensors)
        x, q, y, task = sampler.sample(draw, True, like.dtype, like.device)
        tensors = (x, q, task, *tensors[3:])
    if torch.is_grad_enabled():
        yhat = _call.compute("predict", Arguments(tensors, (), ctx.options._replace(backend="eager")))[0]
    else:
        yhat = _predict_op(*tensors, *ctx.options._replace(check_finite=False))
    gy = 2 * (yhat - y) * eager.error_coefficients(tensors[2], y, weight, g_loss, g_per_task)
    return _reverse(ctx, tensors, gy)


def _scaled(grads: Sequence[Tensor], g_loss: Tensor) -> list[Tensor]:
    """Gradients of the loss, () or (R,), times what comes from above."""
    if g_loss.ndim == 0:
        return [grad * g_loss for grad in grads]
    return [grad * g_loss.reshape(g_loss.shape + (1,) * (grad.ndim - 1)) for grad in grads]


def _reverse(ctx: Any, tensors: Tensors, gy: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of what needs them; in torch operations when they may be differentiated again."""
    needs = _needed(ctx)
    if torch.is_grad_enabled():
        options = ctx.options._replace(backend="eager")
        return _in_order(ctx, needs, _call.compute("predict_bwd", Arguments(tensors, (gy, needs), options)))
    options = ctx.options._replace(check_finite=False)
    return _in_order(ctx, needs, _bwd_op(*tensors, gy, needs, *options))


def _needed(ctx: Any) -> str:
    return "".join([a for a, needed in zip(ctx.letters, ctx.needs_input_grad, strict=False) if needed])


def _in_order(ctx: Any, letters: str, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients at the places of the inputs."""
    ordered: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for letter, grad in zip(letters, grads, strict=True):
        ordered[ctx.letters.index(letter)] = grad
    return tuple(ordered)


class _Predict(torch.autograd.Function):
    """Predictions of flat arguments, for torch.func."""

    forward = staticmethod(_predict_impl)
    setup_context = staticmethod(_predict_setup)
    backward = staticmethod(_predict_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[Tensor, int]:
        return batched(_transformed_predict, "predict", info.batch_size, in_dims, flat, may_nest=True)[0], 0


class _Loss(torch.autograd.Function):
    """Loss, per-task losses and gradients of flat arguments, for torch.func."""

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        return tuple(_checked_compute("loss", flat))

    setup_context = staticmethod(_loss_setup)
    backward = staticmethod(_loss_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = batched(_transformed_loss, "loss", info.batch_size, in_dims, flat, may_nest=True)
        return tuple(results), (0,) * len(results)


class _PlainPredict(torch.autograd.Function):
    """Predictions for plain autograd: the tensors it differentiates in, their letters, then all arguments.

    A forward that sets up its own context costs 15 us, one with `setup_context` 60: torch inspects its signature in
    every call. Each tensor among the inputs costs 0.5 us, so that those without gradient are left out.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *_, asked, given = args
        _predict_save(ctx, asked, given)
        return _call.answer("predict", given)[0]

    backward = staticmethod(_predict_backward)


class _PlainLoss(torch.autograd.Function):
    """Loss and per-task losses for plain autograd, as `_PlainPredict`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *_, asked, given = args
        value, per_task, *grads = _call.answer("loss", given)
        _loss_save(ctx, asked, given, grads)
        return value, per_task

    backward = staticmethod(_loss_backward)


def _sampled_backward(ctx: Any, g_loss: Tensor | None, g_per_task: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients through the per-task losses, which are those of a loss with their coefficients for weights.

    The sequences are drawn again, for each trial, and none is kept.
    """
    _check_unchanged(ctx)
    tensors, grads = ctx.saved_tensors[: len(LETTERS)], ctx.saved_tensors[len(LETTERS) + 2 :]
    has_trials = g_per_task.ndim == 2
    rows: list[list[Tensor]] = []
    for r, weight in enumerate(g_per_task if has_trials else [g_per_task]):
        trial = [None if t is None else t[r : r + 1] for t in tensors] if has_trials else tensors
        given = Arguments(trial, (ctx.draw, weight.contiguous(), ctx.made), ctx.options)
        rows.append(_call.compute("sampled", given)[2:])
    sums = [torch.cat(parts) if has_trials else parts[0] for parts in zip(*rows, strict=True)]
    if g_loss is not None:
        sums = [total + part for total, part in zip(sums, _scaled(grads, g_loss), strict=True)]
    return _in_order(ctx, ctx.made, sums)


def _check_unchanged(ctx: Any) -> None:
    if ctx.draw.versions != ctx.versions:
        raise RuntimeError(
            f"{ctx.options.op}: mix was changed in place after the loss was computed; wants it as it was, since the "
            "backward draws the same sequences again"
        )


class _SampledLoss(torch.autograd.Function):
    """`_PlainLoss` of sequences that the backend draws: again, when the backward needs them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *_, asked, given = args
        value, per_task, *grads = _call.compute("sampled", given)
        draw, weight, wants = given.extra
        _loss_save(ctx, asked, Arguments(given.tensors, (None, weight, wants), given.options), grads)
        ctx.draw, ctx.versions = draw, draw.versions
        return value, per_task

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, g_per_task: Tensor | None) -> tuple[Tensor | None, ...]:
        if g_per_task is None or torch.is_grad_enabled():
            return _loss_backward(ctx, g_loss, g_per_task)
        return _sampled_backward(ctx, g_loss, g_per_task)


_apply_sampled: Callable[..., Any] = super(torch.autograd.Function, _SampledLoss).apply
_apply_predict: Callable[..., Any] = _Predict.apply
_apply_loss: Callable[..., Any] = _Loss.apply


def _transformed_predict(*flat: Any) -> list[Tensor]:
    return [_apply_predict(*flat)]


def _transformed_loss(*flat: Any) -> list[Tensor]:
    return list(_apply_loss(*flat))


_TRANSFORMED = {"predict": _transformed_predict, "loss": _transformed_loss}
# Function.apply asks for functorch first, 3 us, which `path` has done.
_PLAIN: dict[str, Callable[..., Any]] = {
    "predict": super(torch.autograd.Function, _PlainPredict).apply,
    "loss": super(torch.autograd.Function, _PlainLoss).apply,
}


def _predict_vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[Tensor, int]:
    return batched(lambda *a: [_predict_op(*a)], "predict", info.batch_size, in_dims, flat, may_nest=False)[0], 0


def _bwd_vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[list[Tensor], list[int]]:
    results = batched(lambda *a: list(_bwd_op(*a)), "predict_bwd", info.batch_size, in_dims, flat, may_nest=False)
    return results, [0] * len(results)


def _loss_vmap(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[Any, Any]:
    def call(*a: Any) -> list[Tensor]:
        value, per_task, grads = _loss_op(*a)
        return [value, per_task, *grads]

    value, per_task, *grads = batched(call, "loss", info.batch_size, in_dims, flat, may_nest=False)
    return (value, per_task, grads), (0, 0, [0] * len(grads))


_predict_op.register_fake(_predict_fake)
_bwd_op.register_fake(_bwd_fake)
_loss_op.register_fake(_loss_fake)
_predict_op.register_autograd(_predict_backward, setup_context=_predict_setup)
_loss_op.register_autograd(_loss_backward, setup_context=_loss_setup)
_predict_op.register_vmap(_predict_vmap)
_bwd_op.register_vmap(_bwd_vmap)
_loss_op.register_vmap(_loss_vmap)
