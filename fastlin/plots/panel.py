"""Trained models on their closed forms: a panel of a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastlin.plots.axes import axes_figure
from fastlin.plots.claims import claims_figure
from fastlin.plots.steps import training
from fastlin.plots.style import add_caption, look, new_figure, place_ticks, read_record, save, with_gaps, wrapped
from fastlin.training.table import holds_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Horizontal offset between the points of different models, as a fraction of the axis.
_ASIDE = 0.006
# Width of the picture in inches, characters in a line of the caption, and its height in inches.
_WIDTH, _CHARACTERS, _LINE = 7.0, 128, 0.135
# Bars shorter than half a marker, this fraction of the axis, are not drawn.
_SEEN = 0.01


def panel(folder: Path, name: str) -> list[Path]:
    """Draw `NAME.json` of a folder of `fastlin reproduce`, a figure or claims; returns the paths of the pictures."""
    record = read_record(folder, name)
    draw = axes_figure if "axes" in record else claims_figure if "picture" in record else panel_figure
    return save(draw(record), folder, name)


def experiment(folder: str | Path, **drawing: Any) -> list[Path]:
    """Draw a folder of `fastlin train`, of `train_panel` or of one run; returns the paths of the pictures.

    Risk against n or the swept field, once all cells have ended, and risk against steps of the cells that have.
    Keywords are those of `panel` and `training`.
    """
    folder, paths, below = Path(folder), [], ["."]
    if (folder / "risk.json").exists():
        record = read_record(folder, "risk")
        if record["drawn"] and record["caption"]:
            paths += panel(folder, "risk", **drawing)
        below = list(dict.fromkeys(str(Path(cell["key"]).parent) for cell in record["cells"]))
    return paths + [path for name in below if holds_runs(folder / name) for path in training(folder / name, **drawing)]


def panel_figure(record: dict[str, Any]) -> Figure:
    """Risk / E[y²] against the panel's axis: the best trial with the spread of all, and the closed forms."""
    text = wrapped(record["caption"], _CHARACTERS)
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None]
    parts = 2 if any(row["excess_percent"] is not None for row in rows) else 1
    figure = new_figure(_WIDTH, 3.2 + 1.2 * parts + _LINE * (text.count("\n") + 1))
    axes, *below = figure.subplots(parts, 1, sharex=True, squeeze=False, height_ratios=(3.2, 1.2)[:parts])[:, 0]
    _draw_lines(axes, record)
    _draw_points(axes, record)
    for lower in below:
        _draw_excess(lower, record)
    places = sorted({cell["place"] for cell in record["cells"]})
    last = figure.axes[-1]
    place_ticks(last, places, record.get("scale"), record.get("ticks"))
    last.set_xlabel(record["axis_label"])
    axes.set(ylabel="population risk / E[y²]", ylim=_limits(record))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8.5, ncols=2)
    axes.set_title(record["title"], fontsize=11, parse_math=False)
    add_caption(figure, text)
    return figure


def _draw_lines(axes: Axes, record: dict[str, Any]) -> None:
    """Closed forms of one layer; dashed where no series belongs to them."""
    lines = record["lines"]
    deep = any(cell["row"]["layers"] > 1 for cell in record["cells"] if cell["row"] is not None)
    series = {cell["row"]["curve"] for cell in record["cells"] if cell["row"] is not None}
    for name, curve in lines["curves"].items():
        label = f"theory{', L = 1' if deep else ''}: {curve['label']}"
        style = "-" if name in series else (0, (5, 1.5))
        risks = with_gaps(curve["normalised"])
        axes.plot(lines["x"], risks, color=look(name)[0], linestyle=style, linewidth=1.5, label=label)


class _Group(NamedTuple):
    x: list[float]  # places, with an offset for each model
    rows: list[dict[str, Any]]
    label: str
    style: dict[str, Any]


def _groups(record: dict[str, Any]) -> list[_Group]:
    """The cells that have a risk, by regime and model; points of full models and stacks are filled."""
    cells: dict[tuple[str, str, int], list[tuple[float, dict[str, Any]]]] = {}
    for cell in record["cells"]:
        row = cell["row"]
        if row is not None and row["risk"] is not None:
            cells.setdefault((row["regime"], row["model"], row["attention_heads"]), []).append((cell["place"], row))
    # Regimes of one model share an offset: each is on its own line. Stacks have no lines; their regimes may coincide.
    kinds = {key: key if key[1] == "stack" else key[1:] for key in cells}
    # Models and heads that are swept are at different places; on a logarithmic axis an offset has no one size.
    alone = record["axis"] in ("model", "attention_heads") or record.get("scale") is not None
    beside = [] if alone else list(dict.fromkeys(kinds.values()))
    span = max(record["lines"]["x"], default=1.0) - min(record["lines"]["x"], default=0.0) or 1.0
    groups = []
    for (regime, model, heads), points in cells.items():
        (colour, marker), filled = look(regime), model in ("full", "stack")
        kind = kinds[regime, model, heads]
        aside = _ASIDE * span * (2 * beside.index(kind) - len(beside) + 1) if kind in beside else 0.0
        style = {
            "linestyle": "none",
            "marker": marker if model != "softmax" else "+x"[heads > 1],
            "markersize": 6.5 if filled else 8.5,
            "markerfacecolor": colour if filled else "none",
            "markeredgecolor": "white" if filled else colour,
            "markeredgewidth": 0.7 if filled else 1.3,
            "color": colour,
        }
        depths = {row["layers"] for _, row in points}
        label = f"{regime}, {model}" + (f" L = {max(depths)}" if len(depths) == 1 and max(depths) > 1 else "")
        label += f" H = {heads}" if heads > 1 else ""
        groups.append(_Group([place + aside for place, _ in points], [row for _, row in points], label, style))
    return groups


def _draw_points(axes: Axes, record: dict[str, Any]) -> None:
    """The best trial of each cell, and a bar up to the worst where it is long enough to see."""
    _, top = _limits(record)
    for group in _groups(record):
        drawn = [_drawn(row) for row in group.rows]
        above = [row["typical_max"] / row["normaliser"] - y for row, y in zip(group.rows, drawn, strict=True)]
        seen = [(x, y, bar) for x, y, bar in zip(group.x, drawn, above, strict=True) if bar > _SEEN * top]
        if seen:
            x, y, bars = zip(*seen, strict=True)
            both_ways, colour = [[0.0] * len(bars), bars], group.style["color"]
            axes.errorbar(x, y, yerr=both_ways, fmt="none", color=colour, elinewidth=1, capsize=2.5)
        axes.plot(group.x, drawn, label=group.label, **group.style)
        crossed = [(x, y) for x, y, row in zip(group.x, drawn, group.rows, strict=True) if row["heavy_tail"]]
        if crossed:
            axes.plot(*zip(*crossed, strict=True), linestyle="none", marker="x", color="black", markersize=9, zorder=5)


def _drawn(row: dict[str, Any]) -> float:
    """Risk of the best trial over E[y²]; the median of batches when a few sequences dominate the mean."""
    return float(row["typical" if row["heavy_tail"] else "risk"]) / float(row["normaliser"])


def _draw_excess(axes: Axes, record: dict[str, Any]) -> None:
    axes.axhline(0.0, color="black", linewidth=0.8)
    for group in _groups(record):
        smaller = {**group.style, "markersize": 0.8 * group.style["markersize"]}
        axes.plot(group.x, with_gaps(row["excess_percent"] for row in group.rows), **smaller)
    axes.set_ylabel("excess (%)")
    axes.grid(alpha=0.25)


def _limits(record: dict[str, Any]) -> tuple[float, float]:
    """Limits of the risk axis: theory and the best trials. Longer bars are cut."""
    values = [risk for curve in record["lines"]["curves"].values() for risk in curve["normalised"] if risk is not None]
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None and cell["row"]["risk"] is not None]
    values += [_drawn(row) for row in rows]
    return 0.0, 1.08 * max(values, default=1.0)
