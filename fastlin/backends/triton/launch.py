"""Launches: tensors in, partial sums, sums out. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem
from fastlin.backends.triton import plan, source
from fastlin.backends.triton.kernels.attention import attention_kernel
from fastlin.backends.triton.kernels.reduce import sum_runs_kernel
from fastlin.backends.triton.kernels.sampler import sample_kernel, task_kernel
from fastlin.backends.triton.kernels.stream import stream_kernel
from fastlin.backends.triton.kernels.tiles import gram_kernel
from fastlin.backends.triton.source import DeviceSource

RUN = 16
"""Tiles over which the streaming kernel keeps dW in registers."""
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_NO_SOURCE: dict[str, Any] = {"NUMBERS": None, "MEANS": None, "FACTORS": None, "FEATURE": None}
_NO_PLACE = dict.fromkeys(("seed_low", "seed_high", "stream", "step", "offset_low", "offset_high"), 0)


class Asked(NamedTuple):
    """What a call wants: predictions, squared errors with a coefficient for each task, gradients by letter."""

    yhat: bool = False
    y: Tensor | None = None
    coefficients: Tensor | None = None
    gy: Tensor | None = None
    wants: str = ""


class Sums(NamedTuple):
    """Predictions (R, B), sums of squared errors (K, R) and gradients, where they were asked for."""

    yhat: Tensor | None
    squares: Tensor | None
    grads: Gradients


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return not isinstance(attention_kernel, triton.JITFunction)


def streams(problem: Problem, wants: str) -> bool:
    """Whether one pass over the tokens serves.

    It takes 4 n m multiply-adds for a trial, against n m^2 for a Gram matrix that all trials share.
    """
    R, H, m, _ = problem.W.shape
    is_one_layer = problem.A is None and problem.h is None and H == 1 and not problem.is_gram
    return is_one_layer and max(m, 4) >= 4 * R and not set("xq") & set(wants)


def attention(
    problem: Problem,
    asked: Asked,
    tiles: plan.Tiles,
    config: plan.TileConfig,
    precision: str,
    drawn: DeviceSource | None = None,
) -> Sums:
    """Results of a problem whose batch is cut into tiles, piece by piece where the partial sums are many."""
    W, (R, H, m, _) = problem.W, problem.W.shape
    L = 0 if problem.A is None else problem.A.shape[1]
    t = 0 if problem.p is None else problem.p.shape[2]
    shapes: dict[str, tuple[int, ...]] = {
        "p": (t, m),
        "A": (L, H, m, m),
        "C": (L, H, m, m),
        "W": (H, m, m),
        "v": (H, m),
        "h": (m,),
    }
    of_tiles = [letter for letter in asked.wants if letter in shapes and _numel(shapes[letter])]
    given = _inputs(problem, asked, tiles, config, drawn)
    is_streamed = drawn is None and streams(problem, asked.wants)
    B = given["B"]
    yhat = W.new_empty((R, B)) if asked.yhat else None
    data = {f"D{a.upper()}": W.new_empty(getattr(problem, a).shape) if a in asked.wants else None for a in "xq"}
    sums: dict[str, Tensor] = {}
    width = 1 + sum(_numel(shapes[letter]) for letter in of_tiles)
    for first, last in _pieces(tiles.number, R * width * W.element_size()):
        T = last - first
        groups = triton.cdiv(T, RUN)
        rows = {"W": groups} if is_streamed else {}
        part = {letter: W.new_empty((rows.get(letter, T), R, *shapes[letter])) for letter in of_tiles}
        if asked.coefficients is not None:
            part["squares"] = W.new_empty((T, R))
        here = {**given, "YHAT": yhat, "first_tile": first, "last_tile": last, "SQUARES": part.get("squares")}
        if is_streamed:
            here.update({f"D{a.upper()}": part.get(a) for a in "pWv"})
            _launch(stream_kernel, groups * R, W, **here, RUN=RUN)
        else:
            here.update(data, **{f"D{a.upper()}": part.get(a) for a in "pACWvh"})
            _attend(here, problem, precision, drawn, needs_kept=bool(set("pACxq") & set(asked.wants)))
        for name, rows_of in part.items():
            runs = _within(tiles.runs, first, last) if name in ("p", "v", "h", "squares") else None
            total = sum_runs(rows_of, runs)
            sums[name] = sums[name] + total if name in sums else total
    squares = None
    if asked.coefficients is not None:
        squares = sums.get("squares", W.new_zeros((problem.tasks, R)))
    grads = _gradients(problem, sums, shapes, asked.wants)
    grads.update({a: g for a, g in zip("xq", data.values(), strict=True) if g is not None})
    return Sums(yhat, squares, grads)


def _inputs(
    problem: Problem, asked: Asked, tiles: plan.Tiles, config: plan.TileConfig, drawn: DeviceSource | None
) -> dict[str, Any]:
    """What all pieces of a call have in common. The scale goes into W and A: Triton passes numbers in float32."""
    W, (R, _, m, _) = problem.W, problem.W.shape
    given: dict[str, Any] = {
        "P": None if problem.p is None or problem.p.shape[2] == 0 else _plain(problem.p),
        "W": _padded(W * problem.scale, config.M),
        "V": _plain(problem.v),
        "Y": _plain(asked.y),
        "GY": _plain(asked.gy),
        "COEFFICIENT": asked.coefficients,
        "ORDER": tiles.order,
        "TILE": tiles.table,
        "tiles": tiles.number,
        "m": m,
        "t": 0 if problem.p is None else problem.p.shape[2],
        "K": problem.tasks,
        "R": R,
        "SEE_QUERY": problem.see_query,
        "DT": _TYPES[W.dtype],
        "BB": config.BB,
        "M": config.M,
        "BN": config.BN,
        "num_warps": config.warps,
        # Chi variates are decided by operations that round one by one.
        "enable_fp_fusion": drawn is None,
    }
    if drawn is not None:
        strides: tuple[int, ...] = (0,) * 5
        given.update(X=None, Q=None, B=drawn.draw.batch, n=drawn.draw.n)
    else:
        x, q = _readable(problem.data[0], 2 if problem.is_gram else 1), _readable(problem.data[1])
        strides = (*x.stride(), *q.stride())
        given.update(X=x, Q=q, B=q.shape[0], n=x.shape[1])
    return given | dict(zip(("sb", "si", "sj", "qb", "qj"), strides, strict=True))


def _attend(
    here: dict[str, Any], problem: Problem, precision: str, drawn: DeviceSource | None, *, needs_kept: bool
) -> None:
    W, (R, H, _, _) = problem.W, problem.W.shape
    L = 0 if problem.A is None else problem.A.shape[1]
    T, M, BB = here["last_tile"] - here["first_tile"], here["M"], here["BB"]
    # Each group of trials reads, or draws, the data of its tiles anew; gradients of the data are sums over all trials.
    most = plan.PROGRAMS * 16 // M
    groups = 1 if here["DX"] is not None or here["DQ"] is not None else min(R, max(most // T, 1))
    programs = groups * min(T, max(most // groups, 1))
    slots = plan.slots(M, BB)
    room = slots * M * M + 2 * M + (L * needs_kept + 1) * (2 * M + 1) * M * BB
    rho = None
    if L:
        rho = W.new_full((L,), problem.skips[min(1, L)])
        rho[:1] = problem.skips[0]
    _launch(
        attention_kernel,
        programs,
        W,
        **here,
        A=None if problem.A is None else _padded(problem.A * problem.scale, M),
        C=None if problem.C is None else _padded(problem.C, M),
        RHO=rho,
        HEAD=None if problem.h is None else _plain(problem.h * problem.skips[-1]),
        ROOM=W.new_empty(programs * room),
        SLOTS=slots,
        H=H,
        L=L,
        groups=groups,
        IS_GRAM=problem.is_gram,
        PREC=precision if W.dtype is torch.float32 else "ieee",
        **(_NO_SOURCE if drawn is None else drawn.arrays),
        **(_NO_PLACE if drawn is None else drawn.place),
        **({"NOISY": False, "BIAS": 0} if drawn is None else drawn.flags),
    )


def _gradients(problem: Problem, sums: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], wants: str) -> Gradients:
    """Gradients in the full forms, from sums (1, R, ...) or (K, R, ...) over the sequences."""
    R = problem.trials
    factors = {"A": problem.scale, "W": problem.scale, "h": problem.skips[-1]}
    grads: Gradients = {}
    for letter in wants:
        if letter in "xq":
            continue
        K = problem.tasks if letter in "pvh" else 1
        total = sums.get(letter)
        total = problem.W.new_zeros((K, R, *shapes[letter])) if total is None else total
        if letter in factors:
            total = total * factors[letter]
        if letter in "ph":
            grads[letter] = total.transpose(0, 1)
        elif letter == "v":
            grads[letter] = total.permute(1, 2, 0, 3)
        else:
            grads[letter] = total[0]
    return grads


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _pieces(tiles: int, bytes_of_a_tile: int) -> Iterator[tuple[int, int]]:
    size = max(plan.PARTIAL_BYTES // bytes_of_a_tile, 1)
    for first in range(0, tiles, size):
        yield first, min(first + size, tiles)


def _within(runs: Tensor, first: int, last: int) -> Tensor:
    """Runs (2, K) of tiles, as far as they are among the tiles first to last, counted from first."""
    start, end = runs[0].clamp(first, last), (runs[0] + runs[1]).clamp(first, last)
    return torch.stack([start - first, end - start])


def sum_runs(part: Tensor, runs: Tensor | None) -> Tensor:
    """Sums (S, ...) of runs (2, S) of the rows of partial sums (T, ...); None is one run of all.

    Many rows are added in two stages, which is what keeps a million sequences' sums short and exact.
    """
    T = part.shape[0]
    if runs is None:
        runs = torch.full((2, 1), T, dtype=torch.int64, device=part.device)
        runs[0] = 0
    if T > 4 * plan.ROWS:
        S = runs.shape[1]
        table, runs = plan.cut(runs, plan.ROWS, T // plan.ROWS + min(S, T))
        part = _sum(part, table[1:])
    return _sum(part, runs)


def _sum(part: Tensor, runs: Tensor) -> Tensor:
    S, width = runs.shape[1], _numel(part.shape[1:])
    out = part.new_empty((S, *part.shape[1:]))
    if out.numel():
        columns = 64
        programs = S * triton.cdiv(width, columns)
        _launch(
            sum_runs_kernel,
            programs,
            part,
            PART=part,
            RUN=runs.contiguous(),
            runs=S,
            width=width,
            OUT=out,
            ROWS=16,
            COLUMNS=columns,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def gram(z: Tensor, config: plan.TileConfig, precision: str, dtype: torch.dtype) -> Tensor:
    """Gram matrices (B, m, m) of tokens z (B, n, m)."""
    B, n, m = z.shape
    z = _readable(z)
    G = torch.empty((B, m, m), dtype=dtype, device=z.device)
    if G.numel():
        sb, si, sj = z.stride()
        _launch(
            gram_kernel,
            triton.cdiv(B, config.BB),
            G,
            X=z,
            G=G,
            B=B,
            n=n,
            m=m,
            sb=sb,
            si=si,
            sj=sj,
            DT=_TYPES[dtype],
            BB=config.BB,
            M=config.M,
            BN=config.BN,
            PREC=precision if dtype is torch.float32 else "ieee",
            num_warps=config.warps,
            enable_fp_fusion=True,
        )
    return G


def prepare(draw: Draw, device: torch.device) -> DeviceSource:
    """A draw with its tasks, which come first: sequences are taken in their order."""
    recipe, B = draw.recipe, draw.batch
    words = source.place(draw)
    task = None
    if recipe.K > 1:
        task = torch.empty(B, dtype=torch.int64, device=device)
        if B:
            _launch(
                task_kernel,
                triton.cdiv(B, 128),
                task,
                CUMULATIVE=source.copied(recipe.cumulative, device),
                STRATA=source.copied(recipe.strata, device),
                TASKS=task,
                **words,
                B=B,
                K=recipe.K,
                period=0 if recipe.strata is None else len(recipe.strata),
                BB=128,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return DeviceSource(draw, source.arrays(draw, device), words, task)


def sample(
    drawn: DeviceSource, is_gram: bool, dtype: torch.dtype, device: torch.device, config: plan.TileConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (B, n, m) or Gram matrices (B, m, m), queries, targets and tasks."""
    draw = drawn.draw
    B, n, m, M, BB = draw.batch, draw.n, draw.m, config.M, config.BB
    task = torch.zeros(B, dtype=torch.int64, device=device) if drawn.task is None else drawn.task
    x = torch.empty((B, m if is_gram else n, m), dtype=dtype, device=device)
    q, y = x.new_empty((B, m)), x.new_empty((B,))
    if B == 0:
        return x, q, y, task
    tiles = triton.cdiv(B, BB)
    # A program draws the weights of its sequences anew: 64 tokens of each pay for that.
    blocks = 1 if is_gram else max(min(triton.cdiv(n, 64), plan.PROGRAMS // tiles), 1)
    _launch(
        sample_kernel,
        tiles * blocks,
        x,
        **drawn.arrays,
        TASKS=task,
        X=x,
        Q=q,
        Y=y,
        ROOM=x.new_empty(tiles * blocks * (3 * M + 2) * M if M > 16 else 1),
        **drawn.place,
        B=B,
        n=n,
        d=draw.recipe.d,
        blocks=blocks,
        IS_GRAM=is_gram,
        **drawn.flags,
        DT=_TYPES[dtype],
        BB=BB,
        M=M,
        BN=config.BN,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return x, q, y, task


def _launch(kernel: Any, programs: int, like: Tensor, **arguments: Any) -> None:
    """Run programs on the device of a tensor and on its current stream."""
    on_device = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](**arguments, **options())


def options(*, is_amd: bool = torch.version.hip is not None) -> dict[str, int]:
    """Compiler options of every launch.

    Loads that run ahead of a loop would take the registers that the tiles need. NVIDIA's assembler may take all 255:
    left to itself it spills up to 400 bytes to have two programs side by side on a multiprocessor.
    """
    return {"num_stages": 1} if is_amd else {"num_stages": 1, "maxnreg": 255}


def _readable(tensor: Tensor, inner: int = 1) -> Tensor:
    """Data with any strides when their memory holds their numbers; else a copy.

    Kernels count sequences and tokens in 64 bits, and in 32 the last `inner` dimensions, the entries of a token or of a
    matrix: where these lie farther apart, as in memory that has the batch last, they are copied too.
    """
    tensor = _in_memory(tensor)
    farthest = max(tensor.stride()[-inner:]) * plan.padded(tensor.shape[-1])
    return tensor.contiguous() if farthest >= 2**31 else tensor


def _plain(tensor: Tensor | None) -> Tensor | None:
    """A contiguous tensor whose memory holds its numbers."""
    return None if tensor is None else _in_memory(tensor).contiguous()


def _padded(tensor: Tensor, M: int) -> Tensor:
    """Matrices (..., m, m) as (..., M, M), zero beyond m: kernels take them as they take their own."""
    side = M - tensor.shape[-1]
    return torch.nn.functional.pad(_in_memory(tensor), (0, side, 0, side)).contiguous()


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor without torch's marks for zeros and for a sign that memory does not have."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.resolve_neg()
