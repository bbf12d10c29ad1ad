"""What all pictures share: colours, markers, and files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin._files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "plain": "#1f77b4",
    "fine_tuned": "#ff7f0e",
    "one_prompt": "#e377c2",
    "joint": "#d62728",
    "shared_shift": "#9467bd",
    "decoupled": "#2ca02c",
    "scaled_heads": "#8c564b",
    "heads_lower_bound": "#7f7f7f",
}
# Curves are told apart without colour too, and where one nearly covers another.
MARKERS = {
    "plain": "o",
    "fine_tuned": "s",
    "one_prompt": "<",
    "joint": "^",
    "shared_shift": "v",
    "decoupled": "D",
    "scaled_heads": "P",
    "heads_lower_bound": "X",
}
# Theory of a regime.
REGIME_CURVES = {"fine-tune": "fine_tuned", "one-prompt": "one_prompt", "joint+heads": "decoupled"}
# A date would make every file differ from the last.
_METADATA = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


def check_installed() -> None:
    """Raise where matplotlib is missing, and say how to get it: before hours of training, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed; pip install 'fastlin[plots]' brings it",
            name="matplotlib",
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, of inches, that needs no window."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, folder: Path, name: str, metadata: dict[str, Any] | None = None) -> list[Path]:
    """Write a picture as PNG, PDF and SVG; or with metadata by suffix, in the formats that it names."""
    import matplotlib

    paths = []
    for suffix, about in (metadata or _METADATA).items():
        path = folder / f"{name}.{suffix}"
        with matplotlib.rc_context({"svg.hashsalt": "fastlin", "pdf.fonttype": 42}), replacing(path) as temporary:
            figure.savefig(temporary, dpi=200, metadata=about)
        paths.append(path)
    return paths
