"""A record as text in at most 80 columns, and as CSV."""

import textwrap
from collections.abc import Iterator
from typing import Any

from fastlin._tables import Columns, align, csv_text
from fastlin.bench.timing import in_units
from fastlin.plots.bench import AXES, curves, shared_words, table_cases

WIDTH = 80
_LABEL = -19  # with an indent of two
_WIDTHS = {"": _LABEL, "median": 8, "±": 5, "times": 6, "GB/s": 6, "GFLOP/s": 8, "FMA": 5, "read": 6}
_COLUMNS = {
    "cpu": Columns({**_WIDTHS, "first": 8, "memory": 9}, ("memory", "first", "GFLOP/s", "GB/s", "±")),
    "cuda": Columns({**_WIDTHS, "warm": 8}, ("warm", "GFLOP/s", "GB/s", "±")),
}
_METHOD = (
    "Every contender's results agreed with the float64 reference before it was timed. Median of interleaved rounds, ± "
    "interquartile range over median; times: how many times as long as fastlin; GB/s and GFLOP/s: the data once and "
    "the least work known for the op, over the time; FMA and read: achieved fraction of peak compute and read "
    "bandwidth, counting only that work and data, above 100% where the data were still in a cache; "
)
_STATE = {
    "cpu": "first: the first call of a fresh process; memory: at the highest, beyond inputs and outputs.",
    "cuda": "CUDA events; median: L2 overwritten and the queue full before each call; warm: 20 calls in a row, with "
    "their launches.",
}


def as_text(record: dict[str, Any], width: int = WIDTH) -> str:
    return "".join(f"{line}\n" for line in _lines(record, width))


def _lines(record: dict[str, Any], width: int) -> Iterator[str]:
    columns = _COLUMNS[record["device"]]
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield from textwrap.wrap(f"{machine['cpu']}, {machine['cores']} cores, {machine['instruction_set']}", width)
    yield from textwrap.wrap(versions, width)
    for limit in record["limits"]:
        yield from textwrap.wrap(
            f"{limit['dtype']}, threads={limit['threads']}: FMA peak {limit['flops'] / 1e9:.0f} GFLOP/s, "
            f"reads {limit['bandwidth'] / 1e9:.1f} GB/s",
            width,
        )
    yield from textwrap.wrap(_METHOD + _STATE[record["device"]], width)
    for case in table_cases(record):
        yield ""
        yield from textwrap.wrap(f"{case['row']}: {case['name']}", width)
        yield columns.line(columns.widths, width)
        yield from (
            columns.line(_contender(entry)[: len(columns.widths)], width).rstrip() for entry in case["contenders"]
        )
        yield from _remarks(case, width)
    for points in curves(record).values():
        yield from _curve(points, width)
    for name, other in record["others"].items():
        yield ""
        yield from textwrap.wrap(f"{name}: {other['about']}", width)
        for line in other["lines"]:
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="  ")
        if "table" in other:
            own = Columns(other["table"]["widths"], other["table"]["drops"])
            yield from (f"  {line}" for line in own.text(other["table"]["rows"], width - 2).splitlines())
        yield from _remarks(other, width)
    yield ""
    yield from _verdicts(record, width)
    ended = f"{record['seconds']:.0f} s, {record['date']}, load {machine['load']:.2f} at the end"
    yield from textwrap.wrap(ended, width)
    yield from columns.left_out(width).splitlines()


def _contender(entry: dict[str, Any]) -> list[str]:
    def shown(name: str, template: str, factor: float = 1.0) -> str:
        return "" if entry.get(name) is None else template.format(entry[name] * factor)

    def time(name: str) -> str:
        return "" if entry.get(name) is None else in_units(entry[name])

    return [
        f"  {entry['label']}",
        time("median"),
        shown("spread", "{:.0f}%", 100),
        shown("times_fastlin", "{:.3g}"),
        shown("gbs", "{:.1f}"),
        shown("gflops", "{:.1f}"),
        shown("of_peak", "{:.0f}%", 100),
        shown("of_bandwidth", "{:.0f}%", 100),
        time("first_call") or time("warm"),
        shown("memory", "{:.1f} MB", 1e-6),
    ]


def _remarks(part: dict[str, Any], width: int) -> Iterator[str]:
    for heading, found in (("not run", part["skipped"]), ("WRONG", part["wrong"])):
        for label, why in found.items():
            yield from _wrapped(f"{label} {heading}: {why}", width)
    for bar in part["bars"]:
        yield from _wrapped(bar["text"], width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _curve(points: list[dict[str, Any]], width: int) -> Iterator[str]:
    yield ""
    axis = points[0]["axis"]
    words = f"{points[0]['row']}: {AXES[axis]}: {' '.join(shared_words(points))}"
    yield from textwrap.wrap(words, width)
    labels = list(dict.fromkeys(entry["label"] for case in points for entry in case["contenders"]))
    fit = max((width + _LABEL) // 10, 1)
    for first in range(0, len(points), fit):
        part = points[first : first + fit]
        widths = [_LABEL] + [10] * len(part)
        yield align([f"  {axis}", *(case["place"] for case in part)], widths)
        for label in labels:
            medians = [{entry["label"]: entry["median"] for entry in case["contenders"]}.get(label) for case in part]
            yield align([f"  {label}", *("" if median is None else in_units(median) for median in medians)], widths)
    for case in points:
        missed = [bar for bar in case["bars"] if bar["verdict"] != "ok"]
        yield from _remarks(
            {**case, "bars": [{"text": f"{axis}={case['place']}: {bar['text']}"} for bar in missed]}, width
        )


def _verdicts(record: dict[str, Any], width: int) -> Iterator[str]:
    """How many bars were met, and the rows that miss one."""
    parts = [*record["cases"], *({"row": name, **other} for name, other in record["others"].items())]
    verdicts = [(part["row"], bar["verdict"]) for part in parts for bar in part["bars"]]
    if verdicts:
        missing = dict.fromkeys(name for name, verdict in verdicts if verdict == "misses")
        text = f"bars: {sum(verdict == 'ok' for _, verdict in verdicts)} of {len(verdicts)} are met"
        yield from textwrap.wrap(text + (f"; misses: {', '.join(missing)}" if missing else ""), width)


def as_csv(record: dict[str, Any]) -> str:
    shape = ("op", "B", "n", "m", "K", "t", "R", "L")
    numbers = (
        *("times_fastlin", "median", "spread", "gbs", "gflops", "of_peak", "of_bandwidth", "first_call", "memory"),
        *("warm", "error"),
    )
    lines = []
    for case in record["cases"]:
        sizes = [case["shape"][name] for name in shape]
        for entry in case["contenders"]:
            measured = [entry.get(name) for name in numbers]
            lines.append([case["row"], case["axis"], *sizes, case["dtype"], case["threads"], entry["label"], *measured])
    return csv_text(["row", "axis", *shape, "dtype", "threads", "contender", *numbers], lines)
