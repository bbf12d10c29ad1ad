"""Pictures of a record of `fastlin bench`: speed-ups, scaling, roofline, and processes."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastlin.plots.layout import add_below, add_title, key, leftmost, new_figure, plain_ticks
from fastlin.plots.style import Look, cycled, read_record, save
from fastlin.training.regimes import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Black is fastlin; forms other than the first are lighter.
_LOOKS = {
    "fastlin": Look(PALETTE["black"], "o"),
    "reference": Look(PALETTE["grey"], "s"),
    "eager": Look(PALETTE["vermilion"], "^"),
    "vmap": Look(PALETTE["orange"], "v"),
    "compile": Look(PALETTE["blue"], "D"),
    "jax": Look(PALETTE["green"], "P"),
    "numpy": Look(PALETTE["purple"], "X"),
    "read": Look(PALETTE["sky"], "*"),
    "autograd": Look(PALETTE["grey"], "."),
}
AXES = {
    "B": "sequences B",
    "n": "context length n",
    "m": "token width m",
    "d": "features d",
    "L": "layers L",
    "R": "trials R",
    "threads": "threads",
}
_LINES = ("-", "--", ":", "-.")
_Point = tuple[float, float]
_BAR = 0.165  # inches
ABOVE = "Points above a roof: the data were still in a cache, and the roof is that of reading memory."


def bench(folder: Path) -> list[Path]:
    """Draw `bench.json` of a folder beside it, as PNG, PDF and SVG."""
    record = read_record(folder, "bench")
    return [path for name, figure in bench_figures(record).items() for path in save(figure, folder, f"bench-{name}")]


def bench_figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Pictures of a record by name, those that it has data for.

    "speedup" has one bar for each contender of the row loss-50, or of the first row with peers; "speedup-all" has all
    rows of the table; "scaling" the curves; "roofline" the rows that read data; "processes" that row.
    """
    table = table_cases(record)
    with_peers = [case for case in table if any(map(is_peer, case["contenders"]))]
    figures = {}
    if with_peers:
        first = next((case for case in with_peers if case["row"] == "loss-50"), with_peers[0])
        figures["speedup"] = _speedup(first, _about(record))
        figures["speedup-all"] = _all_speedups(with_peers, _about(record))
    if curves(record):
        figures["scaling"] = _scaling(curves(record), _about(record))
    reading = [case for case in with_peers if _rates(case)]
    if reading:
        figures["roofline"] = _roofline(reading, record["limits"], _about(record))
    if "processes" in record["others"]:
        figures["processes"] = _processes(record["others"]["processes"])
    return figures


def table_cases(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in record["cases"] if case["axis"] is None]


def curves(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Points by row, in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        if case["axis"] is not None:
            found.setdefault(case["row"], []).append(case)
    return {name: sorted(points, key=lambda case: int(case["place"])) for name, points in found.items()}


def _about(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['cpu']}, torch {machine['versions']['torch']}, {record['date'][:10]}"


def is_peer(entry: dict[str, Any]) -> bool:
    """Whether it does fastlin's work on fastlin's data."""
    label = entry["label"]
    return bool(entry["times_fastlin"]) and "@" not in label and label not in ("fastlin", "read", "autograd")


def _rates(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The contenders that a roofline has points of."""
    return [entry for entry in case["contenders"] if case["bytes"] and entry["gflops"]]


def _look(label: str) -> Look:
    """That of the kind of a contender; other forms of it, and fresh data, are open."""
    return _LOOKS[re.split("[-:@]", label)[0]]._replace(filled=not re.search("[-@]", label))


def _sizes(words: list[str]) -> str:
    return ", ".join(words).replace("=", " = ")


def _title(case: dict[str, Any], shared: list[str]) -> str:
    """A case on two lines: the op, then the sizes that not all cases share."""
    op, *sizes = case["name"].split()
    return f"{op}\n{' '.join(word for word in sizes if word not in shared)}"


def _bar(axes: Any, place: float, entry: dict[str, Any], text: str, size: float) -> None:
    from matplotlib.colors import to_rgb

    value, shown = entry["times_fastlin"], _look(entry["label"])
    share = 1.0 if shown.filled else 0.4  # of the colour, the rest is white
    face = [share * channel + 1.0 - share for channel in to_rgb(shown.colour)]
    axes.barh(place, value - 1, left=1.0, height=0.8, linewidth=0.8, color=face, edgecolor=shown.colour)
    axes.annotate(text, (max(value, 1.0), place), (4, 0), textcoords="offset points", va="center", fontsize=size)


def _finish_bars(axes: Any, room: float) -> None:
    """`room` is the factor to the right of the longest bar, for its text."""
    axes.set(xscale="log", xlabel="time over fastlin's (1 is as fast)")
    axes.set_xlim(right=axes.get_xlim()[1] * room)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    plain_ticks(axes)


def _speedup(case: dict[str, Any], about: str) -> Figure:
    """Time of every peer over fastlin's: one bar each, slowest first."""
    peers = filter(is_peer, case["contenders"])
    entries = sorted(peers, key=lambda entry: float(entry["times_fastlin"]), reverse=True)
    with new_figure("screen", 7.2, 1.3 + 0.3 * len(entries)) as figure:
        (axes,) = figure.axes
        for place, entry in enumerate(entries):
            _bar(axes, place, entry, f"{entry['times_fastlin']:.3g} ×", 9)
        axes.set_yticks(range(len(entries)), [entry["label"] for entry in entries])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(entries) - 0.4, -0.6)
        _finish_bars(axes, 1.6)
        what = "loss and gradients of all parameters; " if "loss" in case["name"].split()[0] else ""
        add_title(figure, _sizes(case["name"].split()), what + about)
    return figure


def _all_speedups(cases: list[dict[str, Any]], about: str) -> Figure:
    """Time of every peer over fastlin's time, a group of bars for each case."""
    bars = sum(is_peer(entry) for case in cases for entry in case["contenders"])
    with new_figure("screen", 7.6, 1.2 + _BAR * (bars + len(cases))) as figure:
        (axes,) = figure.axes
        shared = shared_words(cases)
        place, ticks = 0.0, []
        for case in cases:
            first = place
            for entry in filter(is_peer, case["contenders"]):
                _bar(axes, place, entry, f"{entry['label']}  {entry['times_fastlin']:.3g} ×", 8)
                place += 1
            ticks.append(((first + place - 1) / 2, _title(case, shared)))
            place += 1
        axes.set_yticks([tick for tick, _ in ticks], [text for _, text in ticks], fontsize=8)
        axes.set_ylim(place - 0.5, -1)
        _finish_bars(axes, 5)
        add_title(figure, f"Every op, losses with their gradients: {_sizes(shared)}", about)
    return figure


def _scaling(found: dict[str, list[dict[str, Any]]], about: str) -> Figure:
    """Time against each size, and against threads."""
    from matplotlib.ticker import NullLocator

    with new_figure("screen", 3.4, *[2.9] * len(found), columns=3) as figure:
        entries: dict[str, Any] = {}
        for axes, points in zip(figure.axes, found.values(), strict=True):
            axis = points[0]["axis"]
            for label in dict.fromkeys(entry["label"] for case in points for entry in case["contenders"]):
                timed = [(case["place"], e) for case in points for e in case["contenders"] if e["label"] == label]
                x, y = [place for place, _ in timed], [1e3 * entry["median"] for _, entry in timed]
                shown = _look(label)._replace(dashes=_look(label).dashes if _look(label).filled else (4, 1.5))
                axes.plot(x, y, **{**shown.points, **shown.line})
                entries[label] = key(shown)
                low, high = ([1e3 * entry["quartiles"][side] for _, entry in timed] for side in (0, 1))
                axes.fill_between(x, low, high, color=shown.colour, alpha=0.15, linewidth=0)
            axes.set_xscale("log", base=2 if axis in ("L", "threads") else 10)
            axes.set_yscale("log")
            plain_ticks(axes)
            places = [case["place"] for case in points]
            ticks = places if len(places) < 8 else places[:: len(places) // 6]
            axes.set_xticks(ticks, [str(place) for place in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set(xlabel=AXES[axis], ylabel="time (ms)" if leftmost(axes) else "")
            op, *sizes = shared_words(points)
            axes.set_title(f"{op}\n{_sizes(sizes)}", fontsize=8.5, parse_math=False)
            axes.grid(True)
        add_title(figure, "Loss and gradients of all parameters: medians and quartiles of the time", about)
        add_below(figure, entries)
    return figure


def shared_words(cases: list[dict[str, Any]]) -> list[str]:
    """The words that all cases have in their names."""
    others = [set(case["name"].split()) for case in cases]
    return [word for word in cases[0]["name"].split() if all(word in other for other in others)]


def _roofline(cases: list[dict[str, Any]], limits: list[dict[str, Any]], about: str) -> Figure:
    """Useful GFLOP/s against useful operations per byte, under the machine's measured limits."""
    with new_figure("screen", 7.6, 4.6) as figure:
        (axes,) = figure.axes
        intensities = [2 * case["multiply_adds"] / case["bytes"] for case in cases]
        x = [min(intensities) / 2, *sorted(intensities), max(intensities) * 2]
        roofs = {(limit["dtype"], limit["threads"]): limit for limit in limits}
        entries: dict[str, Any] = {}
        lines = []
        for style, name in zip(_LINES, dict.fromkeys(map(_roof_key, cases)), strict=False):
            limit = roofs[name]
            ridge = limit["flops"] / limit["bandwidth"]
            xs = sorted([*x, *([ridge] if x[0] < ridge < x[-1] else [])])
            lines.append([(at, _roof(limit, at)) for at in xs])
            numbers = [str(number) for number, case in enumerate(cases, 1) if _roof_key(case) == name]
            own = (
                f"number{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if len(numbers) < len(cases) / 2 else "others"
            )
            text = f"limits, {name[0]}, threads = {name[1]} ({own}): "
            text += f"{limit['flops'] / 1e9:.0f} GFLOP/s, {limit['bandwidth'] / 1e9:.1f} GB/s"
            (entries[text],) = axes.plot(*zip(*lines[-1], strict=True), color="black", linestyle=style, linewidth=1.1)
        drawn: list[_Point] = []
        above = False
        for case, intensity in zip(cases, intensities, strict=True):
            for entry in _rates(case):
                shown = _look(entry["label"])
                drawn.append((intensity, float(entry["gflops"])))
                axes.plot(*drawn[-1], **shown.points, linestyle="none")
                entries.setdefault(re.split("[-:@]", entry["label"])[0], key(shown._replace(filled=True), line=False))
                above = above or entry["gflops"] > _roof(roofs[_roof_key(case)], intensity)
        axes.set(xscale="log", yscale="log", ylabel="useful GFLOP/s")
        axes.set_xlabel("useful floating-point operations per byte of data")
        axes.grid(True)
        plain_ticks(axes)
        best = [max(float(entry["gflops"]) for entry in _rates(case)) for case in cases]
        _number(axes, list(zip(intensities, best, strict=True)), drawn, lines)
        shared = shared_words(cases)
        # The dtype of most cases is not repeated.
        usual = max((case["dtype"] for case in cases), key=[case["dtype"] for case in cases].count)
        titles = [_title(case, [*shared, usual]).replace("\n", " ").replace("=", " = ") for case in cases]
        # No-break spaces keep the words of a case on one line.
        names = "; ".join(f"{number}: {title}".replace(" ", "\u00a0") for number, title in enumerate(titles, 1))
        add_title(figure, f"Every op at {_sizes(shared)}: work and traffic over time", about)
        meaning = [f"{names}.", "Open markers: the Gram form and other forms, or fresh data."]
        add_below(figure, entries, meaning, [ABOVE] if above else ())
    return figure


def _number(axes: Axes, points: list[_Point], drawn: list[_Point], lines: list[list[_Point]]) -> None:
    """Numbers beside points, 1 first, each where it meets neither the numbers before it nor what is drawn."""
    from matplotlib.path import Path as Outline
    from matplotlib.transforms import Bbox

    figure = cast("Figure", axes.figure)
    figure.draw_without_rendering()
    half = 3.0 * figure.dpi / 72
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in axes.transData.transform(drawn)]
    outlines = [Outline(axes.transData.transform(line)) for line in lines]
    for number, point in enumerate(points, 1):
        offset: Any = {"xytext": (0, 0), "textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8.5}
        text = axes.annotate(str(number), point, **offset)
        for distance, angle in product((9, 14, 20, 27), (60, 120, 0, 180, -60, -120)):
            text.xyann = (distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle)))
            box = text.get_window_extent()
            crossed = any(outline.intersects_bbox(box, filled=False) for outline in outlines)
            if not crossed and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _roof_key(case: dict[str, Any]) -> tuple[str, int]:
    return case["dtype"], case["threads"]


def _roof(limit: dict[str, Any], intensity: float) -> float:
    return float(min(limit["flops"], limit["bandwidth"] * intensity)) / 1e9


def _processes(found: dict[str, Any]) -> Figure:
    """Sequences a second over those of one process, for each case."""
    with new_figure("screen", 6.4, 3.6) as figure:
        (axes,) = figure.axes
        entries: dict[str, Any] = {}
        for number, (name, by_size) in enumerate(found["found"].items()):
            sizes, entries[name] = [int(size) for size in by_size], key(cycled(number))
            ratios = [one["over_one"] for one in by_size.values()]
            axes.plot(sizes, ratios, **{**cycled(number).points, **cycled(number).line})
            axes.set_xticks(sizes)
        axes.axhline(0.9, color=PALETTE["grey"], linewidth=0.8)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel(f"processes, on {found['cores']} cores in all")
        axes.set_ylabel("sequences a second, over one process")
        axes.grid(True)
        add_title(figure, "Training of one problem by several processes that share each batch")
        add_below(figure, entries, ["Thin line: nine tenths of one process."])
    return figure
