"""Axes, and what stands around them: titles, ticks, legends and captions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from fastlin import _tables
from fastlin._checks import choice
from fastlin.plots.style import STYLES, Look, check_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

_PAD = 0.06  # inches
# Width of a character in units of the font size. DejaVu Sans has 0.636 for a digit, and less for a line of text.
_DIGIT, _LETTER = 0.64, 0.56
_LONGEST = 24  # characters of a tick's label


@contextmanager
def new_figure(style: str, width: float, *heights: float, columns: int = 1) -> Iterator[Figure]:
    """A figure with axes for every height, in rows; width and heights are in inches, and the style may change them.

    Inside, matplotlib has the fonts and lines of the style. At the end ticks and layout are made with them.
    """
    check_installed()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = STYLES[choice("style", style, STYLES)]
    if sizes.column is not None:
        width, columns = sizes.column, 1
    rows = [sizes.tall * height for height in heights[::columns]]
    parameters: Any = sizes.parameters
    with matplotlib.rc_context(parameters):
        figure = Figure(figsize=(width * min(columns, len(heights)), sum(rows)), dpi=sizes.dpi, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(rows), min(columns, len(heights)), height_ratios=rows)
        for place in range(len(heights)):
            figure.add_subplot(grid[divmod(place, columns)])
        yield figure
        figure.align_ylabels()
        figure.draw_without_rendering()
    # The solver of the layout differs in its last digits from call to call, and SVG has them in the names of clips.
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(edge, 7) for edge in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


def key(look: Look, *, line: bool = True, points: bool = True) -> Line2D:
    """A legend's sample of a curve."""
    from matplotlib.lines import Line2D

    kind = {**(look.line if line else {"linestyle": "none"}), **(look.points if points else {"color": look.colour})}
    return Line2D([], [], **kind)


def wrapped(figure: Figure, sentences: Iterable[str], size: float, share: float = 1.0) -> str:
    """Sentences in lines that fit a share of the figure's width."""
    characters = int(72 * share * (figure.get_figwidth() - 2 * _PAD) / (_LETTER * size))
    return "\n".join(_tables.wrapped(sentence, characters, split_words=True) for sentence in sentences)


def add_title(owner: Figure | Axes, *lines: str) -> None:
    """A title above all axes of a figure, or above one."""
    import matplotlib

    figure = cast("Figure", owner.figure)
    text = wrapped(figure, lines, matplotlib.rcParams["font.size"], 0.9)
    write = figure.suptitle if owner is figure else cast("Axes", owner).set_title
    write(text, parse_math=False)


def add_below(
    figure: Figure, entries: Mapping[str, Any], meaning: Sequence[str] = (), sentences: Sequence[str] = ()
) -> None:
    """A legend and then sentences below the axes, which keep their size: the picture grows.

    `entries` are handles by label; the lines of `meaning` stand above them and say what points and lines are.
    """
    import matplotlib

    small: Any = matplotlib.rcParams["legend.fontsize"]
    (width, height), bottom = figure.get_size_inches(), 0.0
    text = legend = None
    if sentences:
        lines = wrapped(figure, sentences, small)
        text = figure.supxlabel(lines, fontsize=small, ha="left", va="bottom", parse_math=False)
        text.set_in_layout(False)
        bottom += 2 * _PAD + text.get_window_extent().height / figure.dpi
    start = bottom
    if entries:
        legend = _legend(figure, entries, width - _PAD, wrapped(figure, meaning, small, 0.95))
        bottom += _PAD + legend.get_window_extent().height / figure.dpi
    total = height + bottom
    figure.set_size_inches(width, total)
    cast("Any", figure.get_layout_engine()).set(rect=(0.0, bottom / total, 1.0, height / total))
    if text is not None:
        text.set_position((_PAD / width, _PAD / total))
    if legend is not None:
        legend.set_bbox_to_anchor((0.5, start / total))


def add_below_axes(axes: Axes, entries: Mapping[str, Any], meaning: str = "") -> None:
    """A legend below its axes, for axes whose looks mean different things; the first of a row make the picture grow."""
    from matplotlib.transforms import ScaledTranslation

    figure = cast("Figure", axes.figure)
    columns = cast("Any", axes.get_subplotspec()).get_gridspec().ncols
    legend = _legend(axes, entries, figure.get_figwidth() / columns - _PAD, meaning)
    # Below the ticks and the label of the axis.
    size: Any = axes.xaxis.label.get_fontsize()
    down = ScaledTranslation(0.0, -0.052 * size, figure.dpi_scale_trans)
    legend.set_bbox_to_anchor((0.5, 0.0), axes.transAxes + down)
    legend.set_loc("upper center")
    if leftmost(axes):
        figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def _legend(owner: Figure | Axes, entries: Mapping[str, Any], width: float, meaning: str) -> Legend:
    """A legend in as few rows as fit a width in inches."""
    for rows in range(1, len(entries) + 1):
        legend = owner.legend(
            entries.values(),
            entries.keys(),
            ncols=-(-len(entries) // rows),
            loc="lower center",
            bbox_to_anchor=(0.5, 0.0),
            title=meaning or None,
            borderpad=0.2,
            labelspacing=0.35,
            columnspacing=1.6,
            handlelength=3.0,
        )
        legend.get_title().set_multialignment("center")
        if legend.get_window_extent().width <= width * legend.figure.dpi or rows == len(entries):
            break
        legend.remove()
    return legend


def mark_places(
    axes: Axes, places: Sequence[float], scale: str | None = None, labels: Sequence[str] | None = None
) -> None:
    """Ticks at these places of the horizontal axis, as many as have room; scale "symlog" is linear up to 1, for 0."""
    import matplotlib

    if scale is not None:
        axes.set_xscale(scale, **({"linthresh": 1, "linscale": 0.4} if scale == "symlog" else {}))
    texts = [textwrap.shorten(text, _LONGEST) for text in labels or (f"{place:g}" for place in places)]
    points = 72 * 0.75 * cast("Figure", axes.figure).get_figwidth()
    size = _DIGIT * matplotlib.rcParams["xtick.labelsize"]
    at = axes.get_xaxis().get_transform().transform(list(places))
    span, end, shown = at[-1] - at[0] or 1.0, -math.inf, {}
    for place, text, position in zip(places, texts, (at - at[0]) / span * points, strict=True):
        half = (0.5 * len(text) + 0.4) * size
        if position - half >= end:
            shown[place] = text
            end = position + half
    axes.set_xticks([*shown], [*shown.values()])
    axes.set_xticks([], minor=True)


def plain_ticks(axes: Axes) -> None:
    """Ticks of logarithmic axes as 0.1, 1, 10; where an axis has less than two powers of ten, also between them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis, scale, limits in (
        (axes.xaxis, axes.get_xscale(), axes.get_xlim()),
        (axes.yaxis, axes.get_yscale(), axes.get_ylim()),
    ):
        if scale == "log":
            decades = math.log10(limits[1] / limits[0])
            between = (
                (1.0,) if decades > 2 else (1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
            )
            axis.set_major_locator(LogLocator(subs=between, numticks=9))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())


def leftmost(axes: Axes) -> bool:
    """Whether axes are in the first column."""
    spec = axes.get_subplotspec()
    return spec is not None and spec.is_first_col()
