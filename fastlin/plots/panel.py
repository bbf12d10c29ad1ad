"""Trained models on their closed forms: a panel of a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastlin._checks import choice
from fastlin._files import FileError
from fastlin.plots.axes import axes_figure
from fastlin.plots.claims import claims_figure
from fastlin.plots.layout import add_below, add_title, key, mark_places, new_figure
from fastlin.plots.steps import training
from fastlin.plots.style import STYLES, look, read_record, save, with_gaps
from fastlin.training.table import holds_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Horizontal offset between the points of different models, as a fraction of the axis.
_ASIDE = 0.009
# Bars shorter than half a marker, this fraction of the axis, are not drawn.
_SEEN = 0.01
# How markers are filled: in the regime's colour, or open, or in half. A stack has the points of a full model.
_FILLS = {("full", 1): "full", ("reduced", 1): "none", ("softmax", 1): "left", ("softmax", 2): "bottom"}
_FILLED = {"full": "filled", "none": "open", "left": "left half filled", "bottom": "lower half filled"}


def panel(folder: Path, name: str, *, style: str = "screen", caption: bool = False) -> list[Path]:
    """Draw `NAME.json` of a folder of `fastlin reproduce`, a figure or claims; returns the paths of the pictures."""
    record = read_record(folder, name)
    draw = axes_figure if "axes" in record else claims_figure if "picture" in record else panel_figure
    return save(draw(record, style=style, caption=caption), folder, name)


def panel_figure(record: dict[str, Any], *, style: str = "screen", caption: bool = False) -> Figure:
    """Risk / E[y²] against the panel's axis: the best trial with the spread of all, and the closed forms.

    A regime's points and its closed form have one look and one entry of the legend.
    """
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None]
    excess = any(row["excess_percent"] is not None for row in rows)
    with new_figure(style, 6.4, *((3.3, 1.4) if excess else (4.0,))) as figure:
        axes, groups = figure.axes[0], _groups(record)
        theory = "theory, L = 1" if any(row["layers"] > 1 for row in rows) else "theory"
        for name, curve in record["lines"]["curves"].items():
            risks, label = with_gaps(curve["normalised"]), f"{theory}: {curve['label']}"
            axes.plot(record["lines"]["x"], risks, **look(name).line, label=label)
        _draw_points(axes, record, groups)
        axes.set(ylabel="population risk / E[y²]", ylim=_limits(record))
        for lower in figure.axes[1:]:
            _draw_excess(lower, groups)
            lower.sharex(axes)
            axes.tick_params(labelbottom=False)
        for one in figure.axes:
            one.grid(True)
        places = sorted({cell["place"] for cell in record["cells"]})
        mark_places(axes, places, record.get("scale"), record.get("ticks"))
        figure.axes[-1].set_xlabel(record["axis_label"])
        add_title(axes, record["title"])
        add_below(figure, _entries(record), _meaning(record, groups), record["caption"] if caption else ())
    return figure


def experiment(folder: str | Path, *, style: str = "screen", caption: bool = False) -> list[Path]:
    """Draw a folder of `fastlin train`, of `train_panel` or of one run; returns the paths of the pictures.

    Risk against n or the swept field, once all cells have ended, and risk against steps of the cells that have.
    Keywords are those of `panel` and `training`.
    """
    folder, paths, below = Path(folder), [], ["."]
    choice("style", style, STYLES)
    has_panel = (folder / "risk.json").exists()
    if not has_panel and not holds_runs(folder):
        raise FileError(f"{folder}: holds no run, wants a folder of `fastlin train`, of train_panel or of a run")
    if has_panel:
        record = read_record(folder, "risk")
        if record["drawn"] and record["caption"]:
            paths += panel(folder, "risk", style=style, caption=caption)
        below = list(dict.fromkeys(str(Path(cell["key"]).parent) for cell in record["cells"]))
    for name in below:
        if holds_runs(folder / name):
            paths += training(folder / name, style=style, caption=caption)
    return paths


class _Group(NamedTuple):
    """Points of one regime and model."""

    regime: str
    label: str
    fill: str
    x: list[float]  # places, with an offset for each model
    rows: list[dict[str, Any]]

    @property
    def style(self) -> dict[str, Any]:
        points = look(self.regime).points
        if self.fill != "full":
            colour = points["color"]
            points |= {"fillstyle": self.fill, "markerfacecolor": colour, "markeredgecolor": colour}
            points["markerfacecoloralt"] = "white"
        return {**points, "linestyle": "none"}


def _groups(record: dict[str, Any]) -> list[_Group]:
    """The cells that have a risk, by regime and model."""
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
        kind = kinds[regime, model, heads]
        aside = _ASIDE * span * (2 * beside.index(kind) - len(beside) + 1) if kind in beside else 0.0
        fill = _FILLS.get((model, min(heads, 2)), "full")
        depths = {row["layers"] for _, row in points}
        label = f"{regime}, {model}" + (f" L = {max(depths)}" if len(depths) == 1 and max(depths) > 1 else "")
        label += f" H = {heads}" if heads > 1 else ""
        groups.append(_Group(regime, label, fill, [place + aside for place, _ in points], [row for _, row in points]))
    return groups


def _entries(record: dict[str, Any]) -> dict[str, Any]:
    """Samples by label: one for each regime, with its closed form, and one for each line without points."""
    curves = dict(record["lines"]["curves"])
    forms: dict[str, set[str | None]] = {}
    for cell in record["cells"]:
        if cell["row"] is not None:
            forms.setdefault(cell["row"]["regime"], set()).add(cell["row"]["curve"])
    entries = {regime: key(look(regime), line=bool(own & set(curves))) for regime, own in forms.items()}
    alone = {name: curve for name, curve in curves.items() if not any(name in own for own in forms.values())}
    return entries | {curve["label"]: key(look(name), points=False) for name, curve in alone.items()}


def _meaning(record: dict[str, Any], groups: list[_Group]) -> list[str]:
    """What points and lines are."""
    fills: dict[str, list[str]] = {}
    layers = {row["layers"] for group in groups for row in group.rows}
    for group in groups:
        for row in group.rows:
            heads = f", {row['attention_heads']} heads" if row["attention_heads"] > 1 else ""
            fills.setdefault(group.fill, []).append(row["model"] + heads)
    models = {fill: " and ".join(dict.fromkeys(names)) for fill, names in fills.items()}
    if len(models) > 1:
        models = {fill: f"{_FILLED[fill]}: {text}" for fill, text in models.items()}
    deep = f", L = {max(layers)}" if len(layers) == 1 and max(layers) > 1 else ""
    sentences = [f"Points: trained models ({', '.join(models.values())}{deep})."] if groups else []
    if any(row["heavy_tail"] for group in groups for row in group.rows):
        sentences.append("Crossed: medians.")
    if record["lines"]["curves"]:
        sentences.append("Lines: closed form" + (" of L = 1." if layers - {1} else "."))
    return [" ".join(sentences)]


def _draw_points(axes: Axes, record: dict[str, Any], groups: list[_Group]) -> None:
    """The best trial of each cell, and a bar up to the worst where it is long enough to see."""
    _, top = _limits(record)
    for group in groups:
        drawn = [_drawn(row) for row in group.rows]
        above = [row["typical_max"] / row["normaliser"] - y for row, y in zip(group.rows, drawn, strict=True)]
        seen = [(x, y, bar) for x, y, bar in zip(group.x, drawn, above, strict=True) if bar > _SEEN * top]
        if seen:
            x, y, bars = zip(*seen, strict=True)
            axes.errorbar(x, y, yerr=[[0.0] * len(bars), bars], fmt="none", color=group.style["color"], elinewidth=1)
        axes.plot(group.x, drawn, **group.style, label=group.label)
        crossed = [(x, y) for x, y, row in zip(group.x, drawn, group.rows, strict=True) if row["heavy_tail"]]
        if crossed:
            axes.plot(
                *zip(*crossed, strict=True), linestyle="none", marker="x", color="black", markeredgewidth=1, zorder=5
            )


def _drawn(row: dict[str, Any]) -> float:
    """Risk of the best trial over E[y²]; the median of batches when a few sequences dominate the mean."""
    return float(row["typical" if row["heavy_tail"] else "risk"]) / float(row["normaliser"])


def _draw_excess(axes: Axes, groups: list[_Group]) -> None:
    axes.axhline(0.0, color="black", linewidth=0.8)
    for group in groups:
        axes.plot(group.x, with_gaps(row["excess_percent"] for row in group.rows), **group.style)
    axes.margins(y=0.15)
    axes.set_ylabel("excess (%)")


def _limits(record: dict[str, Any]) -> tuple[float, float]:
    """Limits of the risk axis: theory and the best trials. Longer bars are cut."""
    values = [risk for curve in record["lines"]["curves"].values() for risk in curve["normalised"] if risk is not None]
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None and cell["row"]["risk"] is not None]
    values += [_drawn(row) for row in rows]
    return 0.0, 1.08 * max(values, default=1.0)
