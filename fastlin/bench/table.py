"""A record as text in 80 columns and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator
from typing import Any

from fastlin.bench.suite import SCALING, TABLE
from fastlin.bench.timing import in_units
from fastlin.plots.bench import AXES, shared_words

WIDTH = 80
_ROW = "  {:12}{:>8}{:>6}{:>7}{:>6}{:>8}{:>5}{:>6}{:>9}{:>10}"
_HEADER = ("", "median", "±", "times", "GB/s", "GFLOP/s", "FMA", "read", "first", "memory")
_METHOD = (
    "Every contender's results agreed with the float64 reference before it was timed. Median of interleaved rounds, ± "
    "interquartile range over median; times: how many times as long as fastlin; GB/s and GFLOP/s: the data once and "
    "the least work known for the op, over the time; FMA and read: their share of the measured peak and read "
    "bandwidth; first: the first call of a fresh process; memory: at the highest, beyond inputs and outputs."
)


def as_text(record: dict[str, Any]) -> str:
    """Everything that people read of a record."""
    return "".join(f"{line}\n" for line in _lines(record))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield from textwrap.wrap(f"{machine['cpu']}, {machine['cores']} cores, {machine['instruction_set']}", WIDTH)
    yield from textwrap.wrap(versions, WIDTH)
    for limit in record["limits"]:
        yield (
            f"{limit['dtype']}, threads={limit['threads']}: FMA peak {limit['flops'] / 1e9:.0f} GFLOP/s, "
            f"reads {limit['bandwidth'] / 1e9:.1f} GB/s"
        )
    yield from textwrap.wrap(_METHOD, WIDTH)
    for case in of_part(record, TABLE):
        yield ""
        yield case["name"]
        yield _ROW.format(*_HEADER)
        yield from (_contender(entry) for entry in case["contenders"])
        yield from _left_out(case)
    for axis in AXES:
        yield from _curve(axis, [case for case in of_part(record, SCALING) if case["axis"] == axis])
    if record["training"] is not None:
        yield from _training(record["training"])
    yield ""
    yield f"{record['seconds']:.0f} s, {record['date']}, load {machine['load']:.2f} at the end"


def of_part(record: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The cases of a part of the record."""
    return [case for case in record["cases"] if case["part"] == part]


def _contender(entry: dict[str, Any]) -> str:
    def shown(name: str, template: str, factor: float = 1.0) -> str:
        return "" if entry.get(name) is None else template.format(entry[name] * factor)

    return _ROW.format(
        entry["label"],
        in_units(entry["median"]),
        shown("spread", "{:.0f}%", 100),
        shown("times_fastlin", "{:.3g}"),
        shown("gbs", "{:.1f}"),
        shown("gflops", "{:.1f}"),
        shown("of_peak", "{:.0f}%", 100),
        shown("of_bandwidth", "{:.0f}%", 100),
        "" if entry.get("first_call") is None else in_units(entry["first_call"]),
        shown("memory", "{:.1f} MB", 1e-6),
    ).rstrip()


def _left_out(case: dict[str, Any]) -> Iterator[str]:
    for heading, found in (("not run", case["skipped"]), ("WRONG", case["wrong"])):
        for label, why in found.items():
            yield from textwrap.wrap(f"{label} {heading}: {why}", WIDTH, initial_indent="  ", subsequent_indent="    ")


def _curve(axis: str, points: list[dict[str, Any]]) -> Iterator[str]:
    if not points:
        return
    yield ""
    yield f"scaling in {AXES[axis]}: {' '.join(shared_words(points))}"
    yield f"  {axis:12}" + "".join(f"{case['place']:>10}" for case in points)
    labels = dict.fromkeys(entry["label"] for case in points for entry in case["contenders"])
    for label in labels:
        medians = [{entry["label"]: entry["median"] for entry in case["contenders"]}.get(label) for case in points]
        yield f"  {label:12}" + "".join(f"{'' if x is None else in_units(x):>10}" for x in medians)
    for case in points:
        yield from _left_out(case)


def _training(training: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"training: one cell and all of figure {training['figure']} at the paper's scale"
    yield from textwrap.wrap(training["extrapolation"], WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield f"  {'':14}{'timed':>34}{'cell':>10}{'figure':>10}{'times':>8}"
    for entry in training["contenders"]:
        timed = f"{entry['steps']} x {entry['trials']} in {in_units(entry['median'] * entry['steps'])}"
        yield (
            f"  {entry['label']:14}{timed:>34}{long_time(entry['cell']):>10}{long_time(entry['figure']):>10}"
            f"{entry['times_fastlin'] or float('nan'):>8.3g}"
        )
    yield "  timed: steps x trials of one stretch"
    yield from _left_out(training)


def long_time(seconds: float) -> str:
    """A time of seconds to days, with three digits."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def as_csv(record: dict[str, Any]) -> str:
    """One line for each case and contender."""
    shape = ("op", "B", "n", "m", "K", "t", "R", "L")
    numbers = ("median", "spread", "times_fastlin", "gbs", "gflops", "of_peak", "of_bandwidth", "first_call", "memory")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["part", "axis", *shape, "dtype", "threads", "contender", *numbers, "error"])
    for case in record["cases"]:
        sizes = [case["shape"][name] for name in shape]
        for entry in case["contenders"]:
            found = [entry.get(name) for name in (*numbers, "error")]
            writer.writerow(
                [case["part"], case["axis"], *sizes, case["dtype"], case["threads"], entry["label"], *found]
            )
    return out.getvalue()
