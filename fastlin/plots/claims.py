"""Two claims of the paper on task-specific prompts beside the closed forms: rates of the gaps, size of the prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlin.plots.style import add_caption, look, new_figure, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A gap has the colour of the lower of its two optima.
_CURVES = {"plain_fine_tuned": "fine_tuned", "fine_tuned_joint": "joint", "joint_decoupled": "decoupled"}
_PROMPTS = {"fine_tuned": "fine-tuned prompts", "joint": "joint prompts"}
_DOTS = (0, (1, 1.5))


def claims_figure(record: dict[str, Any]) -> Figure:
    """Gaps between the optima, and norms of the optimal prompts, against the context length."""
    picture = record["picture"]
    figure = new_figure(10.6, 5.0)
    left, right = figure.subplots(1, 2)
    _draw_gaps(left, picture)
    _draw_prompts(right, picture)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="context length n (examples)")
        axes.margins(x=0.02)
        axes.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    right.legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.suptitle(f"Setting of {picture['name']}: two claims of the paper beside the closed forms", fontsize=10.5)
    caption = (
        "Left: differences of the population risk of the plain (PT), fine-tuned (FT), joint (JT) and debiased (PGD) "
        "optima. Dashes: their limits for long contexts. Dots: the rate 1/n that the paper states for FT − JT, drawn "
        "as a tangent to the gap. Right: norm over all tasks of the prompts that make the loss stationary, the same at "
        "every n, and of −n S μ, which the paper states for long contexts."
    )
    add_caption(figure, wrapped([caption], 180), 8)
    return figure


def _draw_gaps(axes: Axes, picture: dict[str, Any]) -> None:
    """Gaps with their limits, and the paper's rate for FT − JT."""
    n = picture["n"]
    for key, label in picture["labels"].items():
        gap, limit, power = picture["gaps"][key], picture["limits"][key], picture["powers"][key]
        colour = _draw_curve(axes, n, gap, label, _CURVES[key])
        # A limit far above the gap would stretch the axis.
        shown = [(m, limit / m**power) for m, here in zip(n, gap, strict=True) if limit / m**power < 4 * here]
        rate = f"{limit:.4g} / n{'²' if power == 2 else ''}"
        axes.plot(*zip(*shown, strict=True), color=colour, label=f"limit {rate}", linestyle="--", linewidth=1.1)
    gap = picture["gaps"]["fine_tuned_joint"]
    # n times the gap is largest where the gap falls like 1/n: the line is tangent to the gap there, and above it after.
    touch = max(range(len(n)), key=lambda i: n[i] * gap[i])
    tangent = [n[touch] * gap[touch] / m for m in n[touch:]]
    label = "FT − JT in the paper: order 1/n"
    axes.plot(n[touch:], tangent, color=look("joint")[0], label=label, linestyle=_DOTS, linewidth=1.8)
    axes.set_ylabel("gap in population risk (units of y²)")
    axes.set_title("How fast the gaps close", fontsize=10)


def _draw_prompts(axes: Axes, picture: dict[str, Any]) -> None:
    n, norms = picture["n"], picture["prompts"]
    for key, label in _PROMPTS.items():
        _draw_curve(axes, n, norms[key], f"{label}: {norms[key][0]:.4g} at every n", key)
    axes.plot(n, norms["paper"], color="black", label="the paper: about −n S μ", linestyle=_DOTS, linewidth=1.8)
    axes.set_ylabel("norm of the prompts, all tasks")
    axes.set_title("Whether the optimal prompts grow", fontsize=10)


def _draw_curve(axes: Axes, n: list[int], y: list[float], label: str, form: str) -> str:
    """A curve in the colour of a closed form, which is returned."""
    colour, marker = look(form)
    axes.plot(n, y, color=colour, label=label, linewidth=1.6, marker=marker, markevery=0.1, markersize=5)
    return colour
