"""Colours, markers, captions and files of all pictures."""

from __future__ import annotations

import importlib.util
import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin._files import replacing
from fastlin.training.regimes import CLOSED_FORMS, REGIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHARACTERS = 80  # in the tick labels of an axis
# Without dates, drawing a record again gives the same files.
_METADATA = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


def look(name: str) -> tuple[str, str]:
    """Colour and marker of a closed form, or of a regime: those of its closed form."""
    row = REGIMES.get(name)
    form = CLOSED_FORMS.get(name) if row is None else row.closed_form
    return ("#17becf", "*") if form is None else (form.colour, form.marker)


def edged(marker: str, size: float, edge: float) -> dict[str, Any]:
    return {"marker": marker, "markersize": size, "markeredgecolor": "white", "markeredgewidth": edge}


def check_installed() -> None:
    """Raise an error if matplotlib is missing; called before training, which can take hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed; pip install 'fastlin[plots]' brings it",
            name="matplotlib",
        )


def new_figure(width: float, height: float) -> Figure:
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def read_record(folder: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return record


def with_gaps(values: Iterable[float | None]) -> list[float]:
    """Values for matplotlib, with NaN, which it does not draw, for None."""
    return [math.nan if value is None else value for value in values]


def place_ticks(axes: Axes, places: list[float], scale: str | None, labels: list[str] | None = None) -> None:
    """Ticks of an x axis at places that are far enough apart; "symlog" is linear up to 1, to show 0."""
    if scale is not None:
        axes.set_xscale(scale, **({"linthresh": 1, "linscale": 0.4} if scale == "symlog" else {}))
    drawn = [math.log(max(place, 0.5) if scale == "symlog" else place) if scale else place for place in places]
    span, shown = (drawn[-1] - drawn[0]) or 1.0, [0]
    for i in range(1, len(places)):
        if drawn[i] - drawn[shown[-1]] >= 0.035 * span:
            shown.append(i)
    texts = [labels[i] if labels else f"{places[i]:g}" for i in shown]
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if sum(map(len, texts)) > _CHARACTERS else {}
    axes.set_xticks([places[i] for i in shown], [textwrap.shorten(text, _CHARACTERS) for text in texts], **turned)
    axes.set_xticks([], minor=True)


def wrapped(sentences: Iterable[str], characters: int) -> str:
    return "\n".join(textwrap.fill(sentence, characters) for sentence in sentences)


def add_title(figure: Figure, text: str, size: float) -> None:
    figure.suptitle(text, fontsize=size, parse_math=False)


def add_caption(figure: Figure, text: str, size: float = 7.2) -> None:
    figure.supxlabel(text, fontsize=size, x=0.02, ha="left", parse_math=False)


def save(figure: Figure, folder: Path, name: str, metadata: dict[str, Any] | None = None) -> list[Path]:
    """Write a picture as PNG, PDF and SVG, or with `metadata` in the formats that it has as keys."""
    import matplotlib

    paths = []
    for suffix, about in (metadata or _METADATA).items():
        path = folder / f"{name}.{suffix}"
        with matplotlib.rc_context({"svg.hashsalt": "fastlin", "pdf.fonttype": 42}), replacing(path) as temporary:
            figure.savefig(temporary, dpi=200, metadata=about)
        paths.append(path)
    return paths
