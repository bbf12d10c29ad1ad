"""Pictures of a record of `fastlin bench`: speed-ups, scaling, and the machine's roof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people who do not see all colours (Okabe and Ito); a Gram form is the lighter one of its kind.
_COLOURS = {
    "fastlin": "#000000",
    "reference": "#7f7f7f",
    "eager": "#d55e00",
    "vmap": "#b0a000",
    "compile": "#0072b2",
    "jax": "#009e73",
    "numpy": "#cc79a7",
}
_MARKERS = {"fastlin": "o", "reference": "s", "eager": "^", "vmap": "v", "compile": "D", "jax": "P", "numpy": "X"}
AXES = {
    "B": "sequences B",
    "n": "context length n",
    "d": "features d",
    "L": "layers L",
    "R": "trials R",
    "threads": "threads",
}
_LINES = ("-", "--", ":", "-.")
_BAR = 0.165  # inches


def bench(folder: Path) -> list[Path]:
    """Draw `bench.json` of a folder beside it, as PNG, PDF and SVG."""
    record = json.loads((folder / "bench.json").read_text())
    return [path for name, figure in bench_figures(record).items() for path in save(figure, folder, f"bench-{name}")]


def bench_figures(record: dict[str, Any]) -> dict[str, Figure]:
    """The pictures that a record has data for, by name: "speedup", "scaling", "roofline"."""
    table = [case for case in record["cases"] if case["part"] == "table"]
    points = [case for case in record["cases"] if case["part"] == "scaling"]
    figures = {}
    if any(len(case["contenders"]) > 1 for case in table):
        figures["speedup"] = _speedup(table, _about(record))
    if points:
        figures["scaling"] = _scaling(points, _about(record))
    if any(case["bytes"] for case in table):
        figures["roofline"] = _roofline(table, record["limits"], _about(record))
    return figures


def _about(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return (
        f"{machine['cpu']}, threads: {machine['threads']}, torch {machine['versions']['torch']}, {record['date'][:10]}"
    )


def _kind(label: str) -> str:
    return label.replace(":", "-").partition("-")[0]


def _style(label: str) -> dict[str, Any]:
    return {"color": _COLOURS[_kind(label)], "alpha": 0.55 if label.endswith("-gram") else 1.0}


def _marked(label: str) -> dict[str, Any]:
    return {**_style(label), "marker": _MARKERS[_kind(label)], "markersize": 5.5, "markeredgecolor": "white"}


def _title(case: dict[str, Any]) -> str:
    """A case in two lines: the op, then its sizes."""
    op, *sizes = case["name"].split()
    return f"{op}\n{' '.join(word for word in sizes if not word.startswith(('B=', 'm=', 'threads=')))}"


def _speedup(cases: list[dict[str, Any]], about: str) -> Figure:
    """How many times as long as fastlin every peer takes, a group of bars for each case."""
    bars = sum(len(case["contenders"]) for case in cases)
    figure = new_figure(8.0, 1.2 + _BAR * (bars + len(cases)))
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for case in cases:
        peers = [entry for entry in case["contenders"] if entry["times_fastlin"] and entry["label"] != "fastlin"]
        first = place
        for entry in peers:
            value = entry["times_fastlin"]
            axes.barh(place, value - 1, left=1.0, height=0.85, **_style(entry["label"]))
            axes.annotate(
                f"{entry['label']}  {value:.3g}×",
                (max(value, 1.0), place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=6.5,
            )
            place += 1
        if peers:
            ticks.append(((first + place - 1) / 2, _title(case)))
            place += 1
    axes.set_yticks([tick for tick, _ in ticks], [text for _, text in ticks], fontsize=6.8)
    axes.set_ylim(place - 0.5, -1)
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time over fastlin's (1 is as fast)")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    shape = cases[0]["shape"]
    figure.suptitle(f"Speed-up of fastlin, B = {shape['B']}, m = {shape['m']}\n{about}", fontsize=9, parse_math=False)
    return figure


def _scaling(points: list[dict[str, Any]], about: str) -> Figure:
    """Time against each size, and against threads."""
    axes_of = [axis for axis in AXES if any(case["axis"] == axis for case in points)]
    columns = min(3, len(axes_of))
    rows = -(-len(axes_of) // columns)
    figure = new_figure(3.4 * columns, 2.9 * rows + 0.5)
    shown: dict[str, Any] = {}
    for i, axis in enumerate(axes_of):
        axes = figure.add_subplot(rows, columns, i + 1)
        cases = sorted((case for case in points if case["axis"] == axis), key=lambda case: int(case["place"]))
        for label in dict.fromkeys(entry["label"] for case in cases for entry in case["contenders"]):
            found = [(case["place"], e) for case in cases for e in case["contenders"] if e["label"] == label]
            x, y = [place for place, _ in found], [1e3 * entry["median"] for _, entry in found]
            (shown[label],) = axes.plot(x, y, linewidth=1.2, **_marked(label))
            low, high = ([1e3 * entry["quartiles"][side] for _, entry in found] for side in (0, 1))
            axes.fill_between(x, low, high, color=_style(label)["color"], alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2 if axis in ("L", "threads") else 10)
        axes.set_yscale("log")
        _plain_ticks(axes, [case["place"] for case in cases])
        axes.set_xlabel(AXES[axis], fontsize=8)
        axes.set_ylabel("ms" if i % columns == 0 else "", fontsize=8)
        words = [word for word in shared_words(cases) if word != "float32" and not word.startswith("threads=")]
        axes.set_title(" ".join(words), fontsize=7.5, parse_math=False)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8)
    figure.suptitle(
        f"Loss and gradients of all parameters, medians and quartiles\n{about}", fontsize=9, parse_math=False
    )
    return figure


def _plain_ticks(axes: Axes, places: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xticks(places, [str(place) for place in places])
    axes.xaxis.set_minor_locator(NullLocator())


def shared_words(cases: list[dict[str, Any]]) -> list[str]:
    """The words that the names of all cases have."""
    others = [set(case["name"].split()) for case in cases]
    return [word for word in cases[0]["name"].split() if all(word in other for other in others)]


def _roofline(cases: list[dict[str, Any]], limits: list[dict[str, Any]], about: str) -> Figure:
    """Useful GFLOP/s against useful operations a byte, under what the machine can do."""
    figure = new_figure(8.0, 4.8)
    axes = figure.add_subplot()
    drawn = [case for case in cases if case["bytes"]]
    intensities = [2 * case["multiply_adds"] / case["bytes"] for case in drawn]
    x = [min(intensities) / 2, *sorted(intensities), max(intensities) * 2]
    kept = {(case["dtype"], case["threads"]) for case in drawn}
    roofs = [limit for limit in limits if (limit["dtype"], limit["threads"]) in kept]
    for i, limit in enumerate(roofs):
        ridge = limit["flops"] / limit["bandwidth"]
        xs = sorted([*x, *([ridge] if x[0] < ridge < x[-1] else [])])
        roof = [min(limit["flops"], limit["bandwidth"] * at) / 1e9 for at in xs]
        text = f"measured: {limit['flops'] / 1e9:.0f} GFLOP/s {limit['dtype']}, {limit['bandwidth'] / 1e9:.1f} GB/s"
        axes.plot(xs, roof, color="black", linestyle=_LINES[i % len(_LINES)], linewidth=1.1, label=text)
    labelled = set()
    for case, intensity in zip(drawn, intensities, strict=True):
        for entry in case["contenders"]:
            label = entry["label"]
            axes.plot(
                intensity,
                entry["gflops"],
                linestyle="none",
                label=None if label in labelled else label,
                **_marked(label),
            )
            labelled.add(label)
    for number, (case, intensity) in enumerate(zip(drawn, intensities, strict=True), 1):
        best = max((entry["gflops"] for entry in case["contenders"]), default=None)
        if best is not None:
            axes.annotate(str(number), (intensity, best), (4, 4), textcoords="offset points", fontsize=7)
            text = _title(case).replace("\n", " ").replace(" float32", "")
            axes.plot([], [], linestyle="none", marker=f"${number}$", color="black", label=text)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("useful floating-point operations a byte of data")
    axes.set_ylabel("useful GFLOP/s")
    axes.grid(alpha=0.25, which="both")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    figure.suptitle(
        f"Roofline: the least work and traffic of each op over the time taken\n{about}", fontsize=9, parse_math=False
    )
    return figure
