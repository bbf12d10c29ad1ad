"""What the public ops accept. Every check of every op is here, and nothing else is.

`arguments` looks at shapes, dtypes, devices and options, which tracing can see; `values` looks at numbers, and runs
where the numbers are.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin import backends
from fastlin.backends.problem import Accepted, Options

DTYPES = (torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)
"""What tokens may be besides, where all else is float32, in which they are multiplied and added."""
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

_accepted: dict[tuple[Any, ...], Accepted] = {}
"""Calls that `arguments` accepted, by all that it looks at: to find one takes 4 us, to examine one 60."""
_MOST_ACCEPTED = 1024


class _Sizes:
    """Sizes seen so far, each with the argument that set it."""

    def __init__(self, op: str, known: Mapping[str, tuple[int, str]] | None = None) -> None:
        self.op = op
        self.bound = dict(known or {})

    def match(self, name: str, tensor: Tensor, forms: Sequence[str], beside: str = "") -> None:
        """Bind the sizes of a tensor to the one of its forms that has as many dimensions, or raise."""
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
    op: str,
    data: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    scale: float,
    see_query: bool,
    backend: str,
    check_finite: bool,
    weight: Any = None,
    first_skip: bool | None = None,
    residual: float = 1.0,
    known: Mapping[str, tuple[int, str]] | None = None,
) -> tuple[Accepted, Tensor | None]:
    """Check the arguments of an op, all but the values inside its tensors.

    Parameters
    ----------
    op : str
        Public name, for the messages.
    data : mapping
        The data by name: first z or G, then q, y, task; the value of task may be None. Empty for an op that draws them.
    parameters : mapping
        p, which may be None, with W and v or A, C and h.
    scale, see_query, backend, check_finite, weight, first_skip, residual
        The op's options.
    known : mapping, optional
        Sizes that are known beforehand, each with what tells it.

    Returns
    -------
    accepted : Accepted
        One object for all calls that are alike in what is looked at here.
    weight : Tensor or None
        As a tensor (K,) like the data.
    """
    settings = (scale, see_query, backend, check_finite, first_skip, residual)
    key = _signature((op, *settings), known, (*data.values(), *parameters.values(), weight), (data.get("y"), weight))
    if key is not None:
        try:
            accepted = _accepted.get(key)
        except TypeError:  # not hashable: symbolic sizes, or a list as an option
            key = None
        else:
            if accepted is not None:
                return accepted, weight
    options, weight = _examine(op, data, parameters, weight, known, *settings)
    accepted = Accepted(options, {})
    if key is not None:
        if len(_accepted) >= _MOST_ACCEPTED:
            _accepted.clear()
        _accepted[key] = accepted
    return accepted, weight


def _signature(
    settings: tuple[Any, ...],
    known: Mapping[str, tuple[int, str]] | None,
    tensors: tuple[Any, ...],
    constants: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """All that `_examine` looks at; None for a call that must be examined whatever came before.

    Such is a call that is traced, where sizes may be symbolic, one with an argument that is not a tensor, and one whose
    constants, y and weight, require grad, which the grad mode makes right or wrong.
    """
    if torch.compiler.is_compiling():
        return None
    # With their types: True == 1 == 1.0, and not all of them are right everywhere.
    key = [settings, *map(type, settings)]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            key += (tensor.shape, tensor.dtype, tensor.device)
        elif tensor is None:
            key.append(None)
        else:
            return None
    for tensor in constants:
        if tensor is not None and tensor.requires_grad:
            return None
    if known is not None:
        key += known.items()
    return tuple(key)


def _examine(
    op: str,
    data: Mapping[str, Any],
    parameters: Mapping[str, Any],
    weight: Any,
    known: Mapping[str, tuple[int, str]] | None,
    scale: Any,
    see_query: Any,
    backend: Any,
    check_finite: Any,
    first_skip: Any,
    residual: Any,
) -> tuple[Options, Tensor | None]:
    """What `arguments` does for a call that it has not seen."""
    sizes = _Sizes(op, known)
    lead = "A" if "A" in parameters else "W"
    anchor_name, anchor = next(iter(data.items()), (lead, parameters[lead]))
    _check_tensor(op, anchor_name, anchor)
    is_half = anchor_name == "z" and anchor.dtype in HALF
    if is_half:
        anchor_name, anchor = "q", data["q"]
        _check_float(op, "q", anchor)
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

    options = _check_options(op, scale, see_query, backend, check_finite, first_skip, residual)
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
    if lead == "A" and (depth > 1 if first_skip is None else first_skip):
        first = float(residual)
    return options._replace(tasks=tasks, first_skip=first), weight


def gram_arguments(z: Any, p: Any, task: Any, q: Any, *, see_query: bool, backend: str, check_finite: bool) -> int:
    """Check the arguments of `gram`, all but the values inside its tensors. Returns K, or -1 when p does not tell."""
    op = "gram"
    _check_tensor(op, "z", z)
    if z.dtype not in (*DTYPES, *HALF):
        raise TypeError(f"{op}: z has dtype {z.dtype}; wants torch.float32 or torch.float64")
    check_like = _check_float_on if z.dtype in HALF else _check_like
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
    _check_options(op, 1.0, see_query, backend, check_finite, None, 1.0)
    if see_query and q is None:
        raise ValueError(f"{op}: q is None; wants q (B, m) when see_query is True")
    return -1 if p is None else tasks


def streams(op: str, stream: Any, trials: int | None) -> list[int] | None:
    """The streams of trials that draw their own data, or None for one stream that all share, checked where it is used.

    Parameters
    ----------
    op : str
        Public name, for the messages.
    stream : int, "trial" or sequence of int
    trials : int or None
        R, or None for a call without trials.
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


def values(op: str, tasks: int, check_finite: bool, named: Mapping[str, Tensor | None]) -> int:
    """Check the numbers: task indices always, finiteness when asked. Returns K.

    Parameters
    ----------
    op : str
        Public name, for the messages.
    tasks : int
        K, or -1 when only the largest task index tells.
    check_finite : bool
    named : mapping
        Tensors by the name that the caller knows; None where absent.
    """
    tasks = task_indices(op, tasks, named.get("task"))
    if check_finite:
        finite(op, named)
    return tasks


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
    """Check task indices where the numbers come later: at run time of compiled code, or when a graph is replayed."""
    valid = ((task >= 0) & (task < tasks)).all()
    torch._assert_async(valid, f"{op}: task holds an index outside 0 <= task < K = {tasks}")


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def finite(op: str, named: Mapping[str, Tensor | None]) -> None:
    """Check that the tensors, by the name that the caller knows, hold finite numbers."""
    for name, tensor in named.items():
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


def _check_like(op: str, name: str, value: Any, anchor_name: str, anchor: Tensor) -> None:
    _check_tensor(op, name, value)
    if value.dtype != anchor.dtype:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; wants {anchor.dtype}, as {anchor_name} has")
    _check_device(op, name, value, anchor_name, anchor)


def _check_float(op: str, name: str, value: Any) -> None:
    """What stands beside tokens in half precision."""
    _check_tensor(op, name, value)
    if value.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; wants torch.float32 beside tokens in half precision")


def _check_float_on(op: str, name: str, value: Any, anchor_name: str, anchor: Tensor) -> None:
    _check_float(op, name, value)
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


def _check_options(
    op: str, scale: Any, see_query: Any, backend: Any, check_finite: Any, first_skip: Any, residual: Any
) -> Options:
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
