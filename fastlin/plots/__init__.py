"""Pictures of records on disk."""

from fastlin.plots.axes import axes_figure
from fastlin.plots.bench import bench, bench_figures
from fastlin.plots.claims import claims_figure
from fastlin.plots.curves import theory, theory_figure
from fastlin.plots.panel import experiment, panel, panel_figure
from fastlin.plots.steps import training, training_figure
from fastlin.plots.style import add_options, check_installed, chosen

__all__ = [
    "add_options",
    "axes_figure",
    "bench",
    "bench_figures",
    "check_installed",
    "chosen",
    "claims_figure",
    "experiment",
    "panel",
    "panel_figure",
    "theory",
    "theory_figure",
    "training",
    "training_figure",
]
