"""Pictures of a record of `fastlin bench`: speed-ups, scaling, roofline, and processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import add_caption, add_title, new_figure, read_record, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For colour-blind readers too (Okabe and Ito); forms other than the first are lighter.
_LOOKS = {
    "fastlin": ("#000000", "o"),
    "reference": ("#7f7f7f", "s"),
    "eager": ("#d55e00", "^"),
    "vmap": ("#b0a000", "v"),
    "compile": ("#0072b2", "D"),
    "jax": ("#009e73", "P"),
    "numpy": ("#cc79a7", "X"),
    "read": ("#56b4e9", "*"),
    "autograd": ("#999999", "."),
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


def _look(label: str) -> tuple[str, str]:
    return _LOOKS[re.split("[-:@]", label)[0]]


def _style(label: str) -> dict[str, Any]:
    return {"color": _look(label)[0], "alpha": 0.55 if "-" in label else 1.0}


def _marked(label: str) -> dict[str, Any]:
    return {**_style(label), "marker": _look(label)[1], "markersize": 5.5, "markeredgecolor": "white"}


def _sizes(words: list[str]) -> str:
    return ", ".join(words).replace("=", " = ")


def _title(case: dict[str, Any], shared: list[str]) -> str:
    """A case on two lines: the op, then the sizes that not all cases share."""
    op, *sizes = case["name"].split()
    return f"{op}\n{' '.join(word for word in sizes if word not in shared)}"


def _bar(axes: Any, place: float, entry: dict[str, Any], size: float) -> None:
    value = entry["times_fastlin"]
    axes.barh(place, value - 1, left=1.0, height=0.8, **_style(entry["label"]))
    text = f"{entry['label']}  {value:.3g}×"
    axes.annotate(text, (max(value, 1.0), place), (4, 0), textcoords="offset points", va="center", fontsize=size)


def _finish_bars(axes: Any) -> None:
    axes.set(xscale="log", xlabel="time over fastlin's (1 is as fast)")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _speedup(case: dict[str, Any], about: str) -> Figure:
    """Time of every peer over fastlin's: one bar each, slowest first."""
    peers = filter(is_peer, case["contenders"])
    entries = sorted(peers, key=lambda entry: float(entry["times_fastlin"]), reverse=True)
    figure = new_figure(8.0, 1.4 + 0.3 * len(entries))
    axes = figure.add_subplot()
    for place, entry in enumerate(entries):
        _bar(axes, place, entry, 9)
    axes.set_yticks([])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    _finish_bars(axes)
    add_title(figure, f"{_sizes(case['name'].split())}\n{about}", 9)
    return figure


def _all_speedups(cases: list[dict[str, Any]], about: str) -> Figure:
    """Time of every peer over fastlin's time, a group of bars for each case."""
    bars = sum(is_peer(entry) for case in cases for entry in case["contenders"])
    figure = new_figure(8.0, 1.2 + _BAR * (bars + len(cases)))
    axes = figure.add_subplot()
    shared = shared_words(cases)
    place, ticks = 0.0, []
    for case in cases:
        first = place
        for entry in filter(is_peer, case["contenders"]):
            _bar(axes, place, entry, 6.5)
            place += 1
        ticks.append(((first + place - 1) / 2, _title(case, shared)))
        place += 1
    axes.set_yticks([tick for tick, _ in ticks], [text for _, text in ticks], fontsize=6.8)
    axes.set_ylim(place - 0.5, -1)
    _finish_bars(axes)
    add_title(figure, f"Time over fastlin's: {_sizes(shared)}\n{about}", 9)
    return figure


def _scaling(found: dict[str, list[dict[str, Any]]], about: str) -> Figure:
    """Time against each size, and against threads."""
    from matplotlib.ticker import NullLocator

    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = new_figure(3.4 * columns, 2.9 * rows + 0.5)
    shown: dict[str, Any] = {}
    for i, points in enumerate(found.values()):
        axis = points[0]["axis"]
        axes = figure.add_subplot(rows, columns, i + 1)
        for label in dict.fromkeys(entry["label"] for case in points for entry in case["contenders"]):
            timed = [(case["place"], e) for case in points for e in case["contenders"] if e["label"] == label]
            x, y = [place for place, _ in timed], [1e3 * entry["median"] for _, entry in timed]
            (shown[label],) = axes.plot(x, y, linewidth=1.2, **_marked(label))
            low, high = ([1e3 * entry["quartiles"][side] for _, entry in timed] for side in (0, 1))
            axes.fill_between(x, low, high, color=_style(label)["color"], alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2 if axis in ("L", "threads") else 10)
        axes.set_yscale("log")
        places = [case["place"] for case in points]
        ticks = places if len(places) < 8 else places[:: len(places) // 6]
        axes.set_xticks(ticks, [str(place) for place in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(AXES[axis], fontsize=8)
        axes.set_ylabel("ms" if i % columns == 0 else "", fontsize=8)
        axes.set_title(" ".join(shared_words(points)), fontsize=6.8, parse_math=False)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8)
    add_title(figure, f"Loss and gradients of all parameters, medians and quartiles\n{about}", 9)
    return figure


def shared_words(cases: list[dict[str, Any]]) -> list[str]:
    """The words that all cases have in their names."""
    others = [set(case["name"].split()) for case in cases]
    return [word for word in cases[0]["name"].split() if all(word in other for other in others)]


def _roofline(cases: list[dict[str, Any]], limits: list[dict[str, Any]], about: str) -> Figure:
    """Useful GFLOP/s against useful operations per byte, under the machine's measured limits."""
    figure = new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    intensities = [2 * case["multiply_adds"] / case["bytes"] for case in cases]
    x = [min(intensities) / 2, *sorted(intensities), max(intensities) * 2]
    roofs = {(limit["dtype"], limit["threads"]): limit for limit in limits}
    kept = list(dict.fromkeys((case["dtype"], case["threads"]) for case in cases))
    for i, limit in enumerate(roofs[key] for key in kept):
        ridge = limit["flops"] / limit["bandwidth"]
        xs = sorted([*x, *([ridge] if x[0] < ridge < x[-1] else [])])
        text = (
            f"measured: {limit['flops'] / 1e9:.0f} GFLOP/s, {limit['bandwidth'] / 1e9:.1f} GB/s\n"
            f"({limit['dtype']}, threads = {limit['threads']})"
        )
        roof = [_roof(limit, at) for at in xs]
        axes.plot(xs, roof, color="black", linestyle=_LINES[i % len(_LINES)], linewidth=1.1, label=text)
    labelled, above = set(), []
    shared = shared_words(cases)
    for case, intensity in zip(cases, intensities, strict=True):
        roof_here = _roof(roofs[case["dtype"], case["threads"]], intensity)
        for entry in _rates(case):
            label = None if entry["label"] in labelled else entry["label"]
            axes.plot(intensity, entry["gflops"], linestyle="none", label=label, **_marked(entry["label"]))
            labelled.add(entry["label"])
            if entry["gflops"] > roof_here:
                above.append(entry["label"])
    for number, (case, intensity) in enumerate(zip(cases, intensities, strict=True), 1):
        best = max(entry["gflops"] for entry in _rates(case))
        axes.annotate(str(number), (intensity, best), (4, 4), textcoords="offset points", fontsize=7)
        text = _title(case, shared).replace("\n", " ")
        axes.plot([], [], linestyle="none", marker=f"${number}$", color="black", label=text)
    axes.set(xscale="log", yscale="log", ylabel="useful GFLOP/s")
    axes.set_xlabel("useful floating-point operations per byte of data")
    axes.grid(alpha=0.25, which="both")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    if above:
        add_caption(figure, ABOVE)
    add_title(figure, f"Roofline: the least work and traffic of each op over the time taken\n{about}", 9)
    return figure


def _roof(limit: dict[str, Any], intensity: float) -> float:
    return float(min(limit["flops"], limit["bandwidth"] * intensity)) / 1e9


def _processes(found: dict[str, Any]) -> Figure:
    """Sequences a second over those of one process, for each case."""
    figure = new_figure(6.0, 3.6)
    axes = figure.add_subplot()
    sizes: list[int] = []
    for (name, by_size), marker in zip(found["found"].items(), "os^Dv", strict=False):
        sizes = [int(size) for size in by_size]
        axes.plot(sizes, [one["over_one"] for one in by_size.values()], marker=marker, label=name)
    axes.axhline(0.9, color="black", linestyle=":", linewidth=0.8)
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(f"processes, on {found['cores']} cores in all")
    axes.set_ylabel("sequences a second, over one process")
    axes.legend(frameon=False)
    return figure
