"""Two claims of the paper on task-specific prompts beside the truth: rates of the gaps, and size of the prompts."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import COLOURS, MARKERS, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A gap has the look of the lower of its two optima.
_CURVES = {"plain_fine_tuned": "fine_tuned", "fine_tuned_joint": "joint", "joint_decoupled": "decoupled"}
_PROMPTS = {"fine_tuned": "fine-tuned prompts", "joint": "joint prompts"}
_DOTS = (0, (1, 1.5))


def claims(folder: Path) -> list[Path]:
    """Draw `claims.json` of a folder; returns the paths of claims.png, claims.pdf and claims.svg beside it."""
    figure = claims_figure(json.loads((folder / "claims.json").read_text(encoding="utf-8")))
    return save(figure, folder, "claims")


def claims_figure(record: dict[str, Any]) -> Figure:
    """Gaps between the optima, and norms of the optimal prompts, against the context length."""
    picture = record["picture"]
    figure = new_figure(10.6, 5.0)
    left, right = figure.subplots(1, 2)
    _draw_gaps(left, picture)
    _draw_prompts(right, picture)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("context length n (examples)")
        axes.margins(x=0.02)
        axes.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    right.legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.suptitle(f"Setting of {picture['name']}: two claims of the paper beside the closed forms", fontsize=10.5)
    caption = (
        "Left: differences of the population risk of the plain (PT), fine-tuned (FT), joint (JT) and debiased (PGD) "
        "optima. Dashes are their limits for long contexts; dots are the 1/n that the paper has for FT − JT, drawn "
        "through the gap where it falls like that. Right: norm over all tasks of the prompts that make the loss "
        "stationary, which is the same at every n, and of −n S μ, which the paper has for long contexts."
    )
    figure.supxlabel(textwrap.fill(caption, 180), fontsize=8, x=0.02, ha="left")
    return figure


def _draw_gaps(axes: Axes, picture: dict[str, Any]) -> None:
    """Gaps with their limits, and the paper's rate of the second."""
    n = picture["n"]
    for key, label in picture["labels"].items():
        gap, limit, power = picture["gaps"][key], picture["limits"][key], picture["powers"][key]
        colour, marker = COLOURS[_CURVES[key]], MARKERS[_CURVES[key]]
        axes.plot(n, gap, color=colour, label=label, linewidth=1.6, marker=marker, markevery=0.1, markersize=5)
        # Where the limit is far above the gap it would only stretch the axis.
        shown = [(m, limit / m**power) for m, here in zip(n, gap, strict=True) if limit / m**power < 4 * here]
        rate = f"{limit:.4g} / n{'²' if power == 2 else ''}"
        axes.plot(*zip(*shown, strict=True), color=colour, label=f"limit {rate}", linestyle="--", linewidth=1.1)
    gap = picture["gaps"]["fine_tuned_joint"]
    # n times the gap is largest where the gap falls like 1/n: from there on the line is tangent to it, and above.
    touch = max(range(len(n)), key=lambda i: n[i] * gap[i])
    axes.plot(
        n[touch:],
        [n[touch] * gap[touch] / m for m in n[touch:]],
        color=COLOURS["joint"],
        label="FT − JT in the paper: order 1/n",
        linestyle=_DOTS,
        linewidth=1.8,
    )
    axes.set_ylabel("gap in population risk (units of y²)")
    axes.set_title("How fast the gaps close", fontsize=10)


def _draw_prompts(axes: Axes, picture: dict[str, Any]) -> None:
    """Norms of the prompts, and what the paper has."""
    n, norms = picture["n"], picture["prompts"]
    for key, label in _PROMPTS.items():
        axes.plot(
            n,
            norms[key],
            color=COLOURS[key],
            label=f"{label}: {norms[key][0]:.4g} at every n",
            linewidth=1.6,
            marker=MARKERS[key],
            markevery=0.1,
            markersize=5,
        )
    axes.plot(n, norms["paper"], color="black", label="the paper: about −n S μ", linestyle=_DOTS, linewidth=1.8)
    axes.set_ylabel("norm of the prompts, all tasks")
    axes.set_title("Whether the optimal prompts grow", fontsize=10)
