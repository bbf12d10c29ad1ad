"""What all pictures share: styles, the looks of regimes, and files."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastlin._files import replacing
from fastlin.training.regimes import CLOSED_FORMS, PALETTE, REGIMES

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

# Without dates, drawing a record again gives the same files.
_METADATA = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


class Style(NamedTuple):
    """Sizes of a style; font sizes are in points, other lengths in inches."""

    font: float
    small: float
    line: float  # points
    dpi: int
    column: float | None = None  # width of every picture; its axes stand below each other
    tall: float = 1.0  # heights of axes, as a multiple of those on the screen

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of matplotlib."""
        thin = 0.5 * self.line
        ticks = {f"{axis}tick.{kind}.width": thin for axis in "xy" for kind in ("major", "minor")}
        sizes = {f"{axis}tick.labelsize": self.small for axis in "xy"}
        return {
            **ticks,
            **sizes,
            "font.size": self.font,
            "axes.labelsize": self.font,
            "axes.titlesize": self.font,
            "figure.titlesize": self.font,
            "legend.fontsize": self.small,
            "legend.title_fontsize": self.small,
            "legend.frameon": False,
            "axes.linewidth": thin,
            "grid.linewidth": thin,
            "grid.alpha": 0.25,
            "lines.linewidth": self.line,
            "lines.markersize": 4.0 * self.line,
            "lines.markeredgewidth": thin,
            "errorbar.capsize": 1.4 * self.line,
        }


STYLES = {
    "screen": Style(font=10.5, small=9.0, line=1.6, dpi=200),
    # A column of a page in two columns: 3.35 inches.
    "paper": Style(font=8.0, small=8.0, line=1.1, dpi=300, column=3.35, tall=0.68),
}

# The cycle of curves that are neither regimes nor closed forms; docs/figures.md shows it.
COLOURS = tuple(PALETTE[name] for name in ("blue", "orange", "green", "vermilion", "purple", "sky", "black", "grey"))
MARKERS = "osD^<vPp"
DASHES: tuple[tuple[float, ...] | None, ...] = (None, (5, 1.5), (5, 1.5, 1, 1.5), (2.5, 1), (1, 1), (8, 2))


class Look(NamedTuple):
    """How a regime or a closed form is drawn; no two that share a picture have the same."""

    colour: str
    marker: str
    dashes: tuple[float, ...] | None = None
    filled: bool = True

    @property
    def line(self) -> dict[str, Any]:
        """Colour and dashes, as keywords of `plot`."""
        return {"color": self.colour, "linestyle": "-" if self.dashes is None else (0, self.dashes)}

    @property
    def points(self) -> dict[str, Any]:
        """Colour and marker, as keywords of `plot`."""
        return {"color": self.colour, "marker": self.marker, **faces(self.colour, filled=self.filled)}


def faces(colour: str, *, filled: bool) -> dict[str, str]:
    """Colours of a marker: full with a white edge, or an open one."""
    return {"markerfacecolor": colour if filled else "white", "markeredgecolor": "white" if filled else colour}


def cycled(number: int) -> Look:
    """The look of a curve by its number."""
    return Look(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)])


# In the second paper a colour is what fine-tuning trains; dashes and open markers are for the few-shot loss.
_PARTS = {"all": Look(PALETTE["blue"], "s"), "q": Look(PALETTE["orange"], "D")}
_PARTS |= {"k": Look(PALETTE["vermilion"], "^"), "v": Look(PALETTE["green"], "v")}


def look(name: str) -> Look:
    """How a closed form is drawn, or a regime: as its closed form."""
    row = REGIMES.get(name)
    form = CLOSED_FORMS.get(name) if row is None else row.closed_form
    if form is not None:
        return Look(form.colour, form.marker, form.dashes)
    objective, _, part = name.partition(":")
    if part in _PARTS:
        return _PARTS[part] if objective == "zs" else _PARTS[part]._replace(dashes=(4, 1.5), filled=False)
    return Look(PALETTE["black"], "p" if name == "heads" else "o")


def check_installed() -> None:
    """Raise an error if matplotlib is missing; called before training, which can take hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed; pip install 'fastlin[plots]' brings it",
            name="matplotlib",
        )


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of every command that draws; `chosen` reads them."""
    text = "screen, or paper: 3.35 inches wide, 8 pt (default: screen)"
    command.add_argument("--style", choices=STYLES, help=text)
    command.add_argument("--caption", action="store_true", help="put the caption of the .md file in the picture too")


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of the drawing functions, for the options of `add_options` that were given."""
    return {name: getattr(options, name) for name in ("style", "caption") if getattr(options, name)}


def read_record(folder: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return record


def with_gaps(values: Iterable[float | None]) -> list[float]:
    """Values for matplotlib, with NaN, which it does not draw, for None."""
    return [math.nan if value is None else value for value in values]


def save(figure: Figure, folder: Path, name: str, metadata: dict[str, Any] | None = None) -> list[Path]:
    """Write a picture as PNG, PDF and SVG, or with `metadata` in the formats that it has as keys.

    PDF embeds its fonts as TrueType; SVG has its text as outlines.
    """
    import matplotlib

    paths = []
    for suffix, about in (metadata or _METADATA).items():
        path = folder / f"{name}.{suffix}"
        with matplotlib.rc_context({"svg.hashsalt": "fastlin", "pdf.fonttype": 42}), replacing(path) as temporary:
            figure.savefig(temporary, dpi="figure", metadata=about)
        paths.append(path)
    return paths
