"""A small `fastlin reproduce` for tests that kill its processes. Run as a program, with the command's arguments."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from fastlin import cli, plots
from fastlin.figures import forgetting, prompts, reproduce
from fastlin.figures.panels import Cell, Panel

STEPS = 12_000  # a second a cell, so that signals arrive during training


@dataclass(frozen=True)
class Deadly(Panel):
    """A panel whose last cell kills the worker that trains it."""

    def cells(self, lengths=None):
        *cells, last = super().cells(lengths)
        return [*cells, DeadlyCell(**vars(last))]


class DeadlyCell(Cell):
    def call(self):
        with Path(os.environ["DEATHS"]).open("a") as file:
            file.write("died\n")
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments):
    effort = reproduce.Effort(2, STEPS, 64)
    reproduce.SCALES["quick"] = {"layer": effort, "forgetting": effort}
    # A checkpoint every tenth of a second, in every process.
    often = (("checkpoint_seconds", 0.1),)
    panel = replace(prompts.PANELS["2c"], places=(2.0,), values=often)
    prompts.PANELS["2c"] = panel
    prompts.PANELS["deadly"] = Deadly(**{**vars(panel), "name": "deadly"})
    forgetting.FIGURES["ff4"].__class__.values = often
    plots.panel = lambda folder, name, **look: []
    return cli.main(["reproduce", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
