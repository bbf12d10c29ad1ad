"""What fastlin bench measures, one row of one table for each case: its shape, contenders and bars.

The command, `pytest benchmarks`, the record behind the README and the table of the GPU take their rows from here.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from fastlin._checks import choice
from fastlin.bench import contenders
from fastlin.bench.cases import CaseShape
from fastlin.bench.labels import parse
from fastlin.bench.timing import in_units

Unit = Literal["s", "B", ""]


@dataclass(frozen=True)
class Bar:
    """A limit for a number of a row. One that is missed is printed, and changes no exit code."""

    what: str  # a contender, for its time; "memory of CONTENDER"; or a value that the row's function returns
    sense: Literal[">=", "<="]
    limit: float
    over: str | None = None  # a contender whose time is the unit
    unit: Unit = "s"
    peak: float | None = None  # FLOP/s of a core that a time limit was set for: it is scaled to the measured ones

    def judge(self, values: Mapping[str, float], failed: Mapping[str, str], flops_per_core: float) -> dict[str, Any]:
        """The bar in words, what was measured, and the verdict.

        A peer that could not run leaves the bar unmeasured; fastlin misses the bar when it could not run.
        """
        limit = self.limit * (self.peak / flops_per_core if self.peak else 1.0)
        names = (self.what, *([self.over] if self.over else []))
        text = f"{self.what} {self.sense} {self._shown(limit)}" + (f" {self.over}" if self.over else "")
        if self.peak:
            text += f" ({self._shown(self.limit)} at {self.peak / 1e9:g} GFLOP/s a core)"
        missing = [name for name in names if name not in values]
        if missing:
            ours = any(name in failed and name.startswith("fastlin") for name in missing)
            return {"bar": text, "value": None, "limit": limit, "verdict": "misses" if ours else "not measured"}
        value = values[self.what] / (values[self.over] if self.over else 1.0)
        met = value >= limit if self.sense == ">=" else value <= limit
        return {"bar": text, "value": value, "limit": limit, "verdict": "ok" if met else "misses"}

    def _shown(self, value: float) -> str:
        if self.over or not self.unit:
            return f"{value:.3g}x"
        return in_units(value) if self.unit == "s" else f"{value / 1e6:.3g} MB"

    def line(self, judged: Mapping[str, Any]) -> str:
        found = "" if judged["value"] is None else f", got {self._shown(judged['value'])}"
        return f"bar {judged['bar']}{found}: {judged['verdict']}"


def faster_than(peer: str, times: float, ours: str = "fastlin") -> Bar:
    return Bar(peer, ">=", times, ours)


@dataclass(frozen=True)
class Row:
    """One case: an op at a shape, in a precision, on some threads; or a function that measures something else.

    A function is called with the row and `quick`. It returns a dict of plain data: "lines" of text, perhaps a "table"
    below them, "values" by name, which bars refer to, and "wrong" and "skipped" as a case has them.
    """

    name: str  # points of a curve share it
    shape: CaseShape | None  # None for a function
    labels: tuple[str, ...] = ("fastlin",)
    bars: tuple[Bar, ...] = ()
    dtype: str = "float32"
    threads: int | None = None  # None are those of the run
    axis: str | None = None  # of a curve: "B", "n", "m", "d", "L", "R" or "threads"
    device: str = "cpu"
    long: bool = False  # runs only by name or with `--long`
    memory_only: bool = False  # one call's memory is measured, in a separate process, and no time
    function: str | None = None  # MODULE.NAME in fastlin.bench
    about: str = ""  # what the function measures

    def __post_init__(self) -> None:
        for label in self.labels:
            parse(label)

    def title(self, threads: int) -> str:
        """The case without its contenders, as tables and comparisons call it, when the run has these threads."""
        return f"{self.sizes} threads={self.threads or threads}" if self.shape else self.about

    @property
    def sizes(self) -> str:
        shape = self.shape
        if shape is None:
            return self.about
        text = f"{shape.op} B={shape.B} n={shape.n} m={shape.m}"
        text += f" L={shape.L}" * ("stack" in shape.op) + f" R={shape.R}" * (shape.R is not None)
        text += f" K={shape.K}" * (shape.K != CaseShape.K) + f" t={shape.t}" * (shape.t != CaseShape.t)
        return f"{text} {self.dtype}"

    def small(self) -> Self:
        """The same with few sequences and trials, and without bars, which are for other sizes: to see that it runs."""
        if self.shape is None:
            return replace(self, bars=())
        B, R = min(self.shape.B, 64), None if self.shape.R is None else min(self.shape.R, 4)
        return replace(self, shape=replace(self.shape, B=B, R=R), bars=())

    def position(self, threads: int) -> int | None:
        """Where on its axis the point is."""
        if self.axis is None or self.shape is None:
            return None
        if self.axis == "threads":
            return self.threads or threads
        return self.shape.m - 1 if self.axis == "d" else int(getattr(self.shape, self.axis) or 1)


def _case(name: str, labels: str, *bars: Bar, **fields: Any) -> Row:
    sizes = {key: fields.pop(key) for key in ("op", "B", "n", "m", "K", "R", "L") if key in fields}
    return Row(name, CaseShape(**sizes), tuple(labels.split()), bars, **fields)


def _function(name: str, function: str, about: str, *bars: Bar, labels: str = "fastlin", long: bool = False) -> Row:
    return Row(name, None, tuple(labels.split()), bars, function=function, about=about, long=long)


def _curve(axis: str, labels: str, places: Sequence[int], **sizes: Any) -> list[Row]:
    return [
        _case(f"curve-{axis}", labels, axis=axis, **sizes, **({"m": at + 1} if axis == "d" else {axis: at}))
        for at in places
    ]


def _memory(name: str, limit: float, **sizes: Any) -> Row:
    return _case(name, "fastlin", Bar("memory of fastlin", "<=", limit, unit="B"), memory_only=True, long=True, **sizes)


def _near_reading(times: float, modifier: str = "") -> Bar:
    return Bar(f"fastlin{modifier}", "<=", times, f"read{modifier}")


WIDTHS = (
    *(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 21, 22, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65),
    *(96, 127, 128, 129, 192, 255, 256, 257),
)
PEAK = 100e9  # FLOP/s of a core, for which the time bars were set
_FEW = "fastlin eager eager-gram"
_WIDE = "fastlin eager eager-product"
_THREADS = "fastlin@threads=1 fastlin@threads=2"
_TRAINERS = "fastlin eager@trial vmap-gram compile-gram jax-gram"
_CELL = (Bar("fastlin", "<=", 65.0, peak=116e9), Bar("fastlin", "<=", 1.1, "kernel and optimiser"))
_STEP = (
    *(Bar(f"beyond {size}", "<=", 90e-6) for size in ("1 x 8192", "4 x 256", "50 x 8192")),
    Bar("step of 4 x 256", "<=", 250e-6),
)

# 18 MB of tokens at n = 50: a loop over one batch may find them in a cache, one over batches does not.
_LOSS_50 = (
    "fastlin reference eager eager-gram eager-product compile compile-gram numpy jax jax-gram read "
    "fastlin@fresh compile@fresh read@fresh"
)

CPU: tuple[Row, ...] = (
    _case(
        "loss-50",
        _LOSS_50,
        faster_than("reference", 300),
        faster_than("eager", 25),
        faster_than("compile", 8),
        _near_reading(3),
        faster_than("compile@fresh", 8, "fastlin@fresh"),
        _near_reading(3, "@fresh"),
    ),
    _case("loss-10", _WIDE, faster_than("eager", 15), n=10),
    _case("loss-200", f"{_FEW} eager-product read", faster_than("eager", 25), _near_reading(2), n=200),
    _case("loss-800", "fastlin read", _near_reading(2), n=800, long=True),
    _case("trials", "fastlin vmap-gram jax-gram", Bar("fastlin", "<=", 4.5e-3, peak=PEAK), R=50),
    _case("float64", f"{_FEW} fastlin@float32", Bar("fastlin", "<=", 2.5, "fastlin@float32"), dtype="float64"),
    _case("threads", _THREADS, Bar("fastlin@threads=1", ">=", 1.7, "fastlin@threads=2"), R=50, threads=2),
    _case("tasks", "fastlin fastlin@K=100 fastlin@K=1000 fastlin@K=10000", B=65536, long=True),
    _case("one", "fastlin fastlin@call autograd", Bar("fastlin@call", "<=", 40e-6), B=1),
    _case("stack", f"{_FEW} compile-gram jax-gram", op="stack_loss"),
    _case("stack-reference", "fastlin reference", faster_than("reference", 100), op="stack_loss", long=True),
    _case("gram-loss", "fastlin eager-gram", op="gram_loss"),
    _case("gram-stack-loss", "fastlin eager-gram", op="gram_stack_loss"),
    _case("predict", "fastlin reference eager eager-gram numpy", op="predict"),
    _case("stack-predict", _FEW, op="stack_predict"),
    _case("gram", "fastlin eager-gram numpy", op="gram"),
    _case("sampled", _FEW, faster_than("eager", 40), op="sampled_loss"),
    _case("sampled-compile", "fastlin compile", faster_than("compile", 20), op="sampled_loss", long=True),
    _case(
        "sampled-trials",
        "fastlin vmap-gram jax-gram eager@trial",
        Bar("fastlin", "<=", 6e-3, peak=PEAK),
        faster_than("eager@trial", 400 / 50),  # 400 times for each trial
        faster_than("jax-gram", 25),
        op="sampled_loss",
        R=50,
    ),
    _case("sampled-n", "fastlin fastlin@n=1000", Bar("fastlin@n=1000", "<=", 1.15, "fastlin"), op="sampled_loss", n=20),
    _case("sampled-stack", f"{_FEW} eager-linear", faster_than("eager", 100), op="sampled_stack_loss"),
    _memory("workspace", 32e6, B=1_000_000, n=20),
    _memory("sampled-memory", 64e6, op="sampled_loss", B=10_000_000, n=100),
    *_curve("B", _FEW, (8, 64, 512, 4096, 32768)),
    *_curve("n", _FEW, (5, 20, 80, 320)),
    *_curve("d", _FEW, (2, 5, 10, 20, 40, 80), B=2048),
    *_curve("L", _FEW, (2, 4, 8), op="stack_loss", B=512),
    *_curve("R", "fastlin vmap-gram", (1, 4, 16, 64), B=2048),
    *(_case("widths", _WIDE, faster_than("eager", 5 if m <= 65 else 2), axis="m", m=m, long=True) for m in WIDTHS),
    _function("normals", "step.normals", "a random normal on one core", Bar("fastlin", "<=", 1.2e-9)),
    _function(
        "training", "end_to_end.measure", "training at the paper's scale: a cell, and figure 2d", labels=_TRAINERS
    ),
    _function("step", "step.measure", "a training step: trials x batch, and what it takes beyond its kernel", *_STEP),
    _function(
        "cell", "end_to_end.cell", "a training cell: the loop, its kernel and optimiser, eager", *_CELL, long=True
    ),
    _function("forgetting", "forgetting.measure", "figure 5 of the second paper, against eager loops", long=True),
    _function("busy", "busy.measure", "two threads on cores that another process, or torch, uses too", long=True),
    _function("soak", "soak.measure", "a million training steps: memory, threads and files", long=True),
    _function("processes", "processes.measure", "training against the number of processes", long=True),
)

_GPU_OPS = "fastlin fastlin@graph fastlin:triton fastlin:eager read"
_GPU_LAYER = f"{_GPU_OPS} eager eager-product compile compile@graphs"
_GPU_STACK = f"{_GPU_OPS} eager-linear compile-linear compile-linear@graphs"
_GPU_SAMPLED = "fastlin fastlin:triton eager compile compile@graphs"
_GPU_TRIALS = "fastlin fastlin:triton eager@trial compile@trial compile@trial,graphs"
LARGE, HUGE = 1 << 16, 1 << 18

CUDA: tuple[Row, ...] = (
    _case("loss-50-8192", _GPU_LAYER, device="cuda"),
    _case("loss-10", _GPU_LAYER, B=HUGE, n=10, device="cuda"),
    _case("loss-50", _GPU_LAYER, B=HUGE, device="cuda"),
    _case("loss-200", _GPU_LAYER, B=HUGE, n=200, device="cuda"),
    _case("width-33", _GPU_LAYER, B=LARGE, m=33, device="cuda"),
    _case("trials", _GPU_OPS, B=LARGE, R=50, device="cuda"),
    _case("stack", _GPU_STACK, op="stack_loss", B=LARGE, device="cuda"),
    _case("sampled-8192", _GPU_SAMPLED, op="sampled_loss", device="cuda"),
    _case("sampled", _GPU_SAMPLED, op="sampled_loss", B=HUGE, device="cuda"),
    _case("sampled-trials", _GPU_TRIALS, op="sampled_loss", B=LARGE, R=50, device="cuda"),
    _case("sampled-stack", f"{_GPU_SAMPLED} eager-linear", op="sampled_stack_loss", B=LARGE, device="cuda"),
)


def default(threads: int, device: str = "cpu", *, long: bool = False) -> list[Row]:
    """The rows of a run without a choice, on a machine that gives it this many threads."""
    return [row for row in every(threads, device) if long or not row.long]


def every(threads: int, device: str) -> list[Row]:
    if device != "cpu":
        return list(CUDA)
    counts = sorted({threads, *(1 << i for i in range(threads.bit_length()) if 1 << i <= threads)})
    return [*CPU, *(_case("curve-threads", "fastlin", axis="threads", R=50, threads=count) for count in counts)]


def named(names: Iterable[str], threads: int, device: str) -> list[Row]:
    rows = every(threads, device)
    there = list(dict.fromkeys(row.name for row in rows))
    wanted = {choice("--rows", name, there) for name in names}
    return [row for row in rows if row.name in wanted]


def chosen(
    ops: Sequence[str],
    sizes: dict[str, Sequence[Any]],
    dtypes: Sequence[str],
    threads: Sequence[int],
    backends: Sequence[str],
    peers: Sequence[str] | None,
    device: str = "cpu",
) -> list[Row]:
    """Rows of every combination; L counts for stacks only, so other ops take its first. Peers None: those of the op."""
    rows = []
    for op, dtype, count in itertools.product(ops, dtypes, threads):
        own = {name: values if name != "L" or "stack" in op else values[:1] for name, values in sizes.items()}
        for values in itertools.product(*own.values()):
            shape = CaseShape(op, **dict(zip(own, values, strict=True)))
            labels = contenders.labels(shape, backends, device)
            if peers is not None:
                labels = [*labels[: len(backends)], *peers]
            rows.append(Row("chosen", shape, tuple(labels), dtype=dtype, threads=count, device=device))
    return rows
