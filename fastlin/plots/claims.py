"""Two claims of the paper on task-specific prompts beside the closed forms: rates of the gaps, size of the prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlin.plots.layout import add_below, add_below_axes, add_title, key, new_figure
from fastlin.plots.style import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A gap has the colour of the lower of its two optima.
_CURVES = {"plain_fine_tuned": "fine_tuned", "fine_tuned_joint": "joint", "joint_decoupled": "decoupled"}
_PROMPTS = {"fine_tuned": "fine-tuned prompts", "joint": "joint prompts"}
_DOTS = (1, 1.5)
_PAPER = "FT − JT in the paper: order 1/n"


def claims_figure(record: dict[str, Any], *, style: str = "screen", caption: bool = False) -> Figure:
    """Gaps between the optima, and norms of the optimal prompts, against the context length."""
    picture = record["picture"]
    with new_figure(style, 5.2, 3.8, 3.8, columns=2) as figure:
        left, right = figure.axes
        for axes, draw in ((left, _draw_gaps), (right, _draw_prompts)):
            draw(axes, picture)
            axes.set(xscale="log", yscale="log", xlabel="context length n (examples)")
            axes.margins(x=0.02)
            axes.grid(True)
        add_below_axes(left, _gap_entries(picture), "Dashes: limits for long contexts.")
        add_below_axes(right, {str(line.get_label()): line for line in right.get_lines()})
        add_title(figure, f"Setting of {picture['name']}: two claims of the paper beside the closed forms")
        add_below(figure, {}, sentences=picture.get("caption", ()) if caption else ())  # old records have none
    return figure


def _gap_entries(picture: dict[str, Any]) -> dict[str, Any]:
    """Samples by label: one for a gap with its limit, and one for the paper's rate."""
    entries = {
        f"{label}, limit {_rate(picture, name)}": key(look(_CURVES[name])._replace(dashes=None))
        for name, label in picture["labels"].items()
    }
    return entries | {_PAPER: key(look("joint")._replace(dashes=_DOTS), points=False)}


def _rate(picture: dict[str, Any], name: str) -> str:
    return f"{picture['limits'][name]:.4g} / n{'²' if picture['powers'][name] == 2 else ''}"


def _draw_gaps(axes: Axes, picture: dict[str, Any]) -> None:
    """Gaps with their limits, and the paper's rate for FT − JT."""
    n = picture["n"]
    for name, label in picture["labels"].items():
        gap, limit, power = picture["gaps"][name], picture["limits"][name], picture["powers"][name]
        _draw_curve(axes, n, gap, label, _CURVES[name])
        # A limit far above the gap would stretch the axis.
        shown = [(m, limit / m**power) for m, here in zip(n, gap, strict=True) if limit / m**power < 4 * here]
        colour = look(_CURVES[name]).colour
        axes.plot(*zip(*shown, strict=True), color=colour, label=f"limit {_rate(picture, name)}", linestyle="--")
    gap = picture["gaps"]["fine_tuned_joint"]
    # n times the gap is largest where the gap falls like 1/n: the line is tangent to the gap there, and above it after.
    touch = max(range(len(n)), key=lambda i: n[i] * gap[i])
    tangent = [n[touch] * gap[touch] / m for m in n[touch:]]
    axes.plot(n[touch:], tangent, label=_PAPER, **look("joint")._replace(dashes=_DOTS).line)
    axes.set_ylabel("gap in population risk (units of y²)")
    axes.set_title("How fast the gaps close")


def _draw_prompts(axes: Axes, picture: dict[str, Any]) -> None:
    n, norms = picture["n"], picture["prompts"]
    for name, label in _PROMPTS.items():
        _draw_curve(axes, n, norms[name], f"{label}: {norms[name][0]:.4g} at every n", name)
    axes.plot(n, norms["paper"], label="the paper: about −n S μ", color="black", linestyle=(0, _DOTS))
    axes.set_ylabel("norm of the prompts, all tasks")
    axes.set_title("Whether the optimal prompts grow")


def _draw_curve(axes: Axes, n: list[int], y: list[float], label: str, form: str) -> None:
    """A curve with the colour and marker of a closed form."""
    axes.plot(n, y, label=label, markevery=0.1, **look(form).points)
