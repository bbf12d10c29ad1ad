"""What the public ops accept: their arguments, shapes and options, and every check of them.

`arguments` checks shapes, dtypes, devices and options, which tracing can see; `task_indices` and `finite` numbers.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastlin import backends
from fastlin.backends.problem import LETTERS as LETTERS
from fastlin.backends.problem import Options

DTYPES = (torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)
"""Tokens may have these dtypes beside float32 tensors; they are multiplied and added in float32."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Forms without trials, with trials, with trials and attention heads. A symbol is one size, shared by all arguments.
_FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "W": (("m m",), ("R m m",), ("R H m m",)),
    "A": (("L m m",), ("R L m m",), ("R L H m m",)),
    "C": (("L m m",), ("R L m m",), ("R L H m m",)),
    "p": (("K t m",), ("R K t m",), ("R K t m",)),
    "v": (("K m", "m"), ("R K m",), ("R H K m",)),
    "h": (("K m", "m"), ("R K m",), ("R K m",)),
}
_DATA_FORMS = {"z": "B n m", "G": "B m m", "q": "B m", "y": "B", "task": "B", "weight": "K"}
_MAY_BE_ZERO = "Bnt"
_LARGEST = sys.float_info.max
_FEW = 32


Known = Mapping[str, tuple[int, str]]
"""Sizes that are known before the tensors are, each with the name of the argument that has it."""


class Op(NamedTuple):
    """What a public op takes: the names of its data, of its parameters, and of its options."""

    data: tuple[str, ...]
    parameters: tuple[str, ...]
    options: tuple[str, ...]


_LAYER, _STACK = ("p", "W", "v"), ("p", "A", "C", "h")
_LAYER_OPTIONS = ("scale", "see_query")
_STACK_OPTIONS = ("scale", "see_query", "first_skip", "residual")
OPS = {
    "prompt_loss": Op(("z", "q", "y", "task"), _LAYER, _LAYER_OPTIONS),
    "gram_loss": Op(("G", "q", "y", "task"), _LAYER, _LAYER_OPTIONS),
    "stack_loss": Op(("z", "q", "y", "task"), _STACK, _STACK_OPTIONS),
    "gram_stack_loss": Op(("G", "q", "y", "task"), _STACK, _STACK_OPTIONS),
    "predict": Op(("z", "q", "task"), _LAYER, _LAYER_OPTIONS),
    "stack_predict": Op(("z", "q", "task"), _STACK, _STACK_OPTIONS),
    "sampled_loss": Op((), _LAYER, _LAYER_OPTIONS),
    "sampled_stack_loss": Op((), _STACK, _STACK_OPTIONS),
    "softmax_loss": Op((), _LAYER, ("see_query",)),
    "gram": Op(("z", "q", "task"), ("p",), ("see_query",)),
}
"""The ops. A loss takes `weight` besides; all take `backend` and `check_finite`."""


class Settings(NamedTuple):
    """The options of a call as the caller gave them."""

    scale: Any = 1.0
    see_query: Any = False
    first_skip: Any = None
    residual: Any = 1.0
    backend: Any = "auto"
    check_finite: Any = False


def named(op: str, tensors: Sequence[Any], y: Any = None, weight: Any = None) -> dict[str, Any]:
    """Tensors in the order of `LETTERS`, y and, of a loss, weight, by the names that the caller knows."""
    by_letter = {**dict(zip(LETTERS, tensors, strict=True)), "y": y}
    row = OPS[op]
    found = {name: by_letter["x" if name in ("z", "G") else name] for name in (*row.data, *row.parameters)}
    return {**found, "weight": weight} if op.endswith("loss") else found


class _Sizes:
    """Sizes bound so far, each with the name of the argument that bound it."""

    def __init__(self, op: str, known: Known | None = None) -> None:
        self.op = op
        self.bound = dict(known or {})

    def match(self, name: str, tensor: Tensor, forms: Sequence[str], beside: str = "") -> None:
        """Bind the sizes of a tensor by the form that has its number of dimensions, or raise."""
        for form in forms:
            symbols = form.split()
            if len(symbols) == tensor.ndim:
                break
        else:
            raise ValueError(self._shape_message(name, tensor, forms, beside))
        for symbol, size in zip(symbols, tensor.shape, strict=True):
            if symbol not in self.bound:
                if size == 0 and symbol not in _MAY_BE_ZERO:
                    raise ValueError(
                        f"{self.op}: {name} has shape {tuple(tensor.shape)}, so {symbol} = 0; wants {symbol} >= 1"
                    )
                self.bound[symbol] = (size, name)
            elif size != self.bound[symbol][0]:
                raise ValueError(self._shape_message(name, tensor, [form], beside))

    def get(self, symbol: str, default: int) -> int:
        return self.bound[symbol][0] if symbol in self.bound else default

    def _shape_message(self, name: str, tensor: Tensor, forms: Sequence[str], beside: str) -> str:
        wants = " or ".join("(" + ", ".join(form.split()) + ("," if len(form) == 1 else "") + ")" for form in forms)
        known = {
            s: self.bound[s] for form in forms for s in form.split() if s in self.bound and self.bound[s][1] != name
        }
        sizes = ", ".join(f"{symbol} = {size} (from {source})" for symbol, (size, source) in known.items())
        return f"{self.op}: {name} has shape {tuple(tensor.shape)}; wants {wants}{beside}" + (
            f" with {sizes}" if sizes else ""
        )


def arguments(
    op: str, tensors: Sequence[Any], y: Any, weight: Any, settings: Settings, known: Known | None = None
) -> tuple[Options, Tensor | None]:
    """Check the arguments of an op, all but the values inside its tensors, which are in the order of `LETTERS`.

    Returns the options, and the weight of a loss as a tensor (K,) like the data, or None.
    """
    by_name = named(op, tensors, y)
    if op == "gram":
        return _gram_arguments(**by_name, settings=settings), None
    data = {name: by_name[name] for name in OPS[op].data}
    parameters = {name: by_name[name] for name in OPS[op].parameters}
    sizes = _Sizes(op, known)
    lead = "A" if "A" in parameters else "W"
    anchor_name, anchor = next(iter(data.items()), (lead, parameters[lead]))
    _check_tensor(op, anchor_name, anchor)
    is_half = anchor_name == "z" and anchor.dtype in HALF
    if is_half:
        anchor_name, anchor = "q", data["q"]
        _check_float(op, "q", anchor, "q", anchor)
    if anchor.dtype not in DTYPES:
        raise TypeError(f"{op}: {anchor_name} has dtype {anchor.dtype}; wants torch.float32 or torch.float64")
    for name, tensor in data.items():
        if name == "z" and is_half:
            _check_device(op, name, tensor, anchor_name, anchor)
        elif name == "task":
            if tensor is None:
                continue
            _check_task(op, tensor, anchor_name, anchor)
        else:
            _check_like(op, name, tensor, anchor_name, anchor)
        sizes.match(name, tensor, [_DATA_FORMS[name]])
    if "y" in data and data["y"].requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: y requires grad; wants y.detach(): the loss is not differentiated in its targets")

    present = {name: tensor for name, tensor in parameters.items() if tensor is not None or name != "p"}
    for name, tensor in present.items():
        _check_like(op, name, tensor, anchor_name, anchor)
    rank = present[lead].ndim - len(_FORMS[lead][0][0].split())
    if not 0 <= rank <= 2:
        sizes.match(lead, present[lead], [form for forms in _FORMS[lead] for form in forms])
    beside = f" beside {lead} ({', '.join(_FORMS[lead][rank][0].split())})"
    for name in (lead, *(name for name in present if name != lead)):
        sizes.match(name, present[name], _FORMS[name][rank], "" if name == lead else beside)

    options = _check_options(op, settings)
    if weight is not None:
        weight = _check_weight(op, weight, anchor_name, anchor)
        sizes.match("weight", weight, [_DATA_FORMS["weight"]])
    one_task = "task" in data and data["task"] is None
    tasks = sizes.get("K", 1 if one_task else -1)
    if one_task and tasks != 1:
        source = sizes.bound["K"][1]
        raise ValueError(f"{op}: task is None, which is one task, but {source} has K = {tasks}; wants task (B,)")
    depth = sizes.get("L", 1)
    first = 0.0
    if lead == "A" and (depth > 1 if settings.first_skip is None else settings.first_skip):
        first = float(settings.residual)
    return options._replace(tasks=tasks, first_skip=first), weight


def _gram_arguments(z: Any, q: Any, task: Any, p: Any, settings: Settings) -> Options:
    op = "gram"
    _check_tensor(op, "z", z)
    if z.dtype not in (*DTYPES, *HALF):
        raise TypeError(f"{op}: z has dtype {z.dtype}; wants torch.float32 or torch.float64")
    check_like = _check_float if z.dtype in HALF else _check_like
    sizes = _Sizes(op)
    sizes.match("z", z, [_DATA_FORMS["z"]])
    if p is not None:
        check_like(op, "p", p, "z", z)
        sizes.match("p", p, [form for forms in _FORMS["p"][:2] for form in forms])
    if task is not None:
        _check_task(op, task, "z", z)
        sizes.match("task", task, [_DATA_FORMS["task"]])
    tasks = sizes.get("K", 1)
    if task is None and tasks != 1:
        raise ValueError(f"{op}: task is None, which is one task, but p has K = {tasks}; wants task (B,)")
    if q is not None:
        check_like(op, "q", q, "z", z)
        sizes.match("q", q, [_DATA_FORMS["q"]])
    options = _check_options(op, settings)
    if settings.see_query and q is None:
        raise ValueError(f"{op}: q is None; wants q (B, m) when see_query is True")
    return options._replace(tasks=-1 if p is None else tasks)


def streams(op: str, stream: Any, trials: int | None) -> list[int] | None:
    """The stream of each of R trials, or None for one stream that all trials share, which its user checks.

    `stream` is an integer, "trial" or a sequence of integers; `trials` is R, or None for a call without trials.
    """
    if hasattr(stream, "__index__") and getattr(stream, "ndim", 0) == 0:
        return None
    wants = 'wants an integer, "trial", or an integer for each of the R trials'
    if trials is None:
        raise ValueError(f"{op}: stream is {stream!r}, but the parameters have no trials; wants an integer")
    if isinstance(stream, str):
        if stream != "trial":
            raise ValueError(f"{op}: stream is {stream!r}; {wants}")
        return list(range(trials))
    try:
        each = [operator.index(entry) for entry in stream]
    except TypeError:
        raise TypeError(f"{op}: stream is {stream!r}; {wants}") from None
    if len(each) != trials:
        raise ValueError(f"{op}: stream has {len(each)} entries, but the parameters have R = {trials} trials; {wants}")
    return each


def task_indices(op: str, tasks: int, task: Tensor | None) -> int:
    """Check task indices against K, or -1 when only the largest of them tells it. Returns K.

    While a CUDA graph is captured nothing is read: the check is captured too, and a replay that fails it ends in a
    device-side assertion.
    """
    if task is not None and _is_captured(task):
        if tasks < 0:
            raise ValueError(f"{op}: task alone tells K, which a CUDA graph cannot read; wants p, v or weight with K")
        assert_task_indices(op, tasks, task)
    elif task is not None:
        if task.ndim == 1 and 0 < task.numel() <= _FEW:
            # 0.7 us for one sequence, where the two numbers of a reduction take 5; at 64 sequences they are equal.
            indices = task.tolist()
            low, high = min(indices), max(indices)
        else:
            low, high = (int(end) for end in task.aminmax()) if task.numel() else (0, 0)
        if tasks < 0:
            tasks = max(high, 0) + 1
        if low < 0 or high >= tasks:
            found = low if low < 0 else high
            raise ValueError(f"{op}: task holds the index {found}; wants 0 <= task < K = {tasks}")
    return max(tasks, 1)


def assert_task_indices(op: str, tasks: int, task: Tensor) -> None:
    """Check task indices when compiled code runs, or when a CUDA graph is replayed."""
    valid = ((task >= 0) & (task < tasks)).all()
    torch._assert_async(valid, f"{op}: task holds an index outside 0 <= task < K = {tasks}")


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def finite(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Check that tensors, by the caller's names, hold finite numbers."""
    for name, tensor in tensors.items():
        if tensor is None or name == "task":
            continue
        are_finite = torch.isfinite(tensor).all()
        if _is_captured(tensor):
            torch._assert_async(are_finite, f"{op}: {name} holds values that are not finite")
        elif not are_finite:
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{op}: {name} holds {bad} values that are not finite, of {tensor.numel()}; "
                "wants finite values under check_finite=True"
            )


def _check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; wants a torch.Tensor")
    if value.is_nested:
        raise TypeError(f"{op}: {name} is a nested tensor; wants a torch.Tensor whose sequences have one length")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {value.layout}; wants torch.strided, as {name}.to_dense() has")


def _check_like(op: str, name: str, value: Any, anchor_name: str, anchor: Tensor) -> None:
    _check_tensor(op, name, value)
    if value.dtype != anchor.dtype:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; wants {anchor.dtype}, as {anchor_name} has")
    _check_device(op, name, value, anchor_name, anchor)


def _check_float(op: str, name: str, value: Any, anchor_name: str, anchor: Tensor) -> None:
    _check_tensor(op, name, value)
    if value.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; wants torch.float32 beside tokens in half precision")
    _check_device(op, name, value, anchor_name, anchor)


def _check_task(op: str, task: Any, anchor_name: str, anchor: Tensor) -> None:
    _check_tensor(op, "task", task)
    if task.dtype not in INTEGERS:
        raise TypeError(f"{op}: task has dtype {task.dtype}; wants an integer dtype such as torch.int64")
    _check_device(op, "task", task, anchor_name, anchor)


def _check_device(op: str, name: str, value: Tensor, anchor_name: str, anchor: Tensor) -> None:
    if value.device != anchor.device:
        raise ValueError(f"{op}: {name} is on device {value.device}; wants {anchor.device}, as {anchor_name} is")


def _check_weight(op: str, weight: Any, anchor_name: str, anchor: Tensor) -> Tensor:
    if isinstance(weight, np.ndarray):
        weight = weight.tolist()
    if not isinstance(weight, Tensor):
        wants = "wants a torch.Tensor or a list of K numbers"
        if not isinstance(weight, (list, tuple)):
            raise TypeError(f"{op}: weight is a {type(weight).__name__}; {wants}")
        for i, entry in enumerate(weight):
            if not isinstance(entry, Real):
                raise TypeError(f"{op}: weight[{i}] is {entry!r}, a {type(entry).__name__}; {wants}")
        return torch.tensor([float(w) for w in weight], dtype=anchor.dtype, device=anchor.device)
    _check_like(op, "weight", weight, anchor_name, anchor)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: weight requires grad; wants weight.detach(): the loss is not differentiated in it")
    return weight


def _check_options(op: str, settings: Settings) -> Options:
    scale, see_query, first_skip, residual, backend, check_finite = settings
    numbers: dict[str, Any] = {"scale": scale, "residual": residual}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{op}: {name} is {number!r}, a {type(number).__name__}; wants a real number")
        # Comparisons, unlike math.isfinite, can be traced with a symbolic number.
        if number < -_LARGEST or not number <= _LARGEST:
            raise ValueError(f"{op}: {name} is {number!r}; wants a finite number")
    for name, flag in (("see_query", see_query), ("check_finite", check_finite)):
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} is {flag!r}; wants True or False")
    if first_skip is not None and not isinstance(first_skip, bool):
        raise TypeError(f"{op}: first_skip is {first_skip!r}; wants None, True or False")
    known = ("auto", "reference", *backends.names())
    if backend not in known:
        raise ValueError(f"{op}: backend is {backend!r}; wants one of {', '.join(map(repr, known))}")
    return Options(op, -1, float(scale), 0.0, float(residual), see_query, check_finite, backend)
