"""Claims of a paper as records, and the models trained to check them."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastlin.data.sources import TaskMixture
from fastlin.training.run import train

# A model counts as trained within this relative distance of its optimum: trials of the tuned preset end within 0.1 %
# after 1500 steps of 4096 sequences, and the effects that claims state are 1.5 % or more.
TRAINED = 0.005
# Streams of the generator: two for random problems, three for starts of a minimisation, one for sampled tokens.
PROBLEMS, STARTS, TOKENS = 0, 2, 5


@dataclass(frozen=True)
class Number:
    """A number of a claim, at a context length n if it has one, and the value expected, if any."""

    quantity: str
    n: int | None
    value: float
    expected: float | None = None


@dataclass(frozen=True)
class Claim:
    name: str
    statement: str  # what the paper says
    finding: str  # what the numbers are
    verdict: str  # what follows from them
    holds: bool | None  # None where the numbers do not decide
    numbers: list[Number]


def entries(checks: Iterable[Callable[[], Claim]], report: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """Check claims; returns them ready for JSON, and calls `report` with each as soon as it is checked."""
    checked = []
    for check in checks:
        entry = asdict(check())
        for number in entry["numbers"]:
            # A risk is infinite when all trials diverged; JSON has no infinity.
            number["value"] = number["value"] if math.isfinite(number["value"]) else None
        checked.append(entry)
        report(entry)
    return checked


@dataclass(frozen=True)
class Cells:
    """Trained models, each in its folder below `out`: reads those that have ended, resumes those that were stopped."""

    out: Path
    trials: int
    steps: int
    batch: int
    seed: int = 0

    def risk(self, name: str, mix: TaskMixture, regime: str, n: int) -> float:
        """Exact risk of the best trial of the full model; infinite when all diverged."""
        sizes: dict[str, Any] = {"trials": self.trials, "steps": self.steps, "batch": self.batch, "seed": self.seed}
        slug = re.sub(r"[\W_]+", "-", name.lower()).strip("-")  # Figure 2(a) becomes figure-2-a
        run = train(mix, regime, n, **sizes, out=self.out / f"{slug}-{regime}-n{n}", resume=True)
        return float(run.risk[run.best])

    def described(self) -> str:
        """The training, for sentences."""
        trials = "1 trial" if self.trials == 1 else f"best of {self.trials} trials"
        return f"{trials}, {self.steps} steps of {self.batch} sequences"


def percent(ratio: float, form: str = ".3g") -> str:
    return f"{100 * ratio:{form}} %"


signed = partial(percent, form="+.3g")
"""A ratio in percent, with its sign."""
