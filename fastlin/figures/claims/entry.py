"""What a claim of the report is made of, and the cells that are trained for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastlin.data.sources import TaskMixture
from fastlin.training.run import train

# Relative distance from its optimum at which a model counts as trained: trials of the tuned preset end within 0.1 %
# after 1500 steps of 4096 sequences, and what a claim is about is 1.5 % or more.
TRAINED = 0.005
# Streams of the generator: two of random problems, three of the starts of a minimisation, one of sampled tokens.
PROBLEMS, STARTS, TOKENS = 0, 2, 5


@dataclass(frozen=True)
class Number:
    """A number of a claim, and what it is expected to be, if anything; n is None where there is no context length."""

    quantity: str
    n: int | None
    value: float
    expected: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper beside what was found.

    Attributes
    ----------
    name, statement : str
        What it is called, and what the paper says.
    finding, verdict : str
        What the numbers are, and what follows from them.
    holds : bool or None
        Whether the claim is true by the numbers; None where they do not decide.
    numbers : list of Number
    """

    name: str
    statement: str
    finding: str
    verdict: str
    holds: bool | None
    numbers: list[Number]


@dataclass(frozen=True)
class Cells:
    """Trained models, each in a folder of its own: one that has ended is read, one that was stopped goes on.

    Attributes
    ----------
    out : Path
        Of the folders.
    trials, steps, batch, seed : int
        Of `train`.
    """

    out: Path
    trials: int
    steps: int
    batch: int
    seed: int = 0

    def risk(self, name: str, mix: TaskMixture, regime: str, n: int) -> float:
        """Exact risk of the best trial of the full model, infinite when all diverged."""
        run = train(
            mix,
            regime,
            n,
            trials=self.trials,
            steps=self.steps,
            batch=self.batch,
            seed=self.seed,
            out=self.out / f"{_slug(name)}-{regime}-n{n}",
            resume=True,
        )
        return float(run.risk[run.best])

    def described(self) -> str:
        """The training, in words."""
        trials = "1 trial" if self.trials == 1 else f"best of {self.trials} trials"
        return f"{trials}, {self.steps} steps of {self.batch} sequences"


def _slug(name: str) -> str:
    """A name as part of a path: Figure 2(a) is figure-2-a."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def percent(ratio: float) -> str:
    """A relative size as people read it."""
    return f"{100 * ratio:.3g} %"


def signed(ratio: float) -> str:
    """A relative difference as people read it."""
    return f"{100 * ratio:+.3g} %"
