"""Figures 4 and 5 and table 1: models that are pretrained, then fine-tuned in each regime, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlin import models
from fastlin.data.sources import FixedTask, SphereTasks
from fastlin.figures.forgetting import table
from fastlin.figures.forgetting.axes import Axes, as_csv, as_dicts, line, points
from fastlin.figures.forgetting.theory import ERROR, SHOTS
from fastlin.models import Model
from fastlin.theory import forgetting
from fastlin.training.evaluate import evaluate
from fastlin.training.record import MODEL

PRETRAIN, TUNED = "pretrain", "tuned"
PARTS = ("all", "q", "k", "v")
EIGHT = tuple(f"{objective}:{part}" for objective in ("zs", "zs+fs") for part in PARTS)


@dataclass(frozen=True, eq=False)
class Training:
    """A run of a figure: pretraining, or the fine-tunings that go on from it.

    Attributes
    ----------
    panel, key : str
    regimes : tuple of str
        Trained side by side.
    setting : Setting
    model : str
    attention_heads : int
    after : str or None
        Key of the cell that it goes on from.
    """

    panel: str
    key: str
    regimes: tuple[str, ...]
    setting: Setting
    model: str
    attention_heads: int
    after: str | None
    place: float = 0.0
    layers: int = 1

    def call(self) -> dict[str, Any]:
        """Arguments of `train` that the cell decides."""
        target = {} if self.after is None else {"target": self.setting.task}
        return {
            "mix": self.setting.source,
            "regime": self.regimes,
            "n": self.setting.shots,
            "model": self.model,
            "attention_heads": self.attention_heads,
            **target,
        }

    @property
    def stretches(self) -> int:
        """Phases, each of the effort's steps."""
        return 1 if self.after is None else 2

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """What the record says of the run."""
        return {
            "regimes": list(self.regimes),
            "risk": summary["best"],
            "excess_percent": summary["excess_percent"],
            "trials": summary["trials"],
            "diverged": summary["diverged"],
        }


@dataclass(frozen=True)
class Setting:
    """Tasks uniform on the unit sphere, one of which is tuned on; the authors' values.

    Attributes
    ----------
    dimension : int
    noise_variance : float
    shots : int
        Of pretraining, and most in tests.
    """

    dimension: int = 5
    noise_variance: float = 0.1
    shots: int = 20

    @property
    def source(self) -> SphereTasks:
        """All tasks."""
        return SphereTasks(self.dimension, noise_std=self.noise_variance**0.5, bias=True)

    @property
    def task(self) -> FixedTask:
        """theta0, of norm one."""
        theta = torch.eye(self.dimension, dtype=torch.float64)[0]
        return FixedTask(theta, noise_std=self.noise_variance**0.5, bias=True)

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of the closed forms of what pretraining ends in."""
        moment = torch.eye(self.dimension, dtype=torch.float64) / self.dimension
        return {"shots": self.shots, "noise_var": self.noise_variance, "task_cov": moment}


@dataclass(frozen=True)
class TrainedFigure:
    """A figure of models that were pretrained and fine-tuned.

    Attributes
    ----------
    name, title : str
    regimes : tuple of str
    model : str
    attention_heads : int
    remarks : tuple of str
    setting : Setting
    """

    name: str
    title: str
    regimes: tuple[str, ...] = EIGHT
    model: str = "full"
    attention_heads: int = 1
    remarks: tuple[str, ...] = ()
    setting: Setting = Setting()
    shallower: ClassVar[str | None] = None
    values: ClassVar[tuple[tuple[str, Any], ...]] = ()

    def cells(self, lengths: Sequence[int] | None = None) -> list[Training]:
        """Pretraining, and all fine-tunings of it in one run."""
        same = (self.setting, self.model, self.attention_heads)
        return [
            Training(self.name, PRETRAIN, (PRETRAIN,), *same, after=None),
            Training(self.name, TUNED, self.regimes, *same, after=PRETRAIN),
        ]

    def kind(self, cells: Sequence[Any]) -> str:
        """Which effort of a scale is meant."""
        return "forgetting"

    def opening(self, cells: Sequence[Any]) -> dict[str, Any]:
        """What the record says before anything is trained."""
        return {"axes": [], "remarks": list(self.remarks)}

    def trained(self, record: Mapping[str, Any], folder: Path) -> dict[str, Model]:
        """Models of the cells that have ended, by their keys."""
        done = [cell["key"] for cell in record["cells"] if cell["state"] == "done"]
        return {key: models.load(folder / "cells" / self.name / key / MODEL) for key in done}

    def errors(self, trained: Mapping[str, Model], task: FixedTask, shots: Sequence[int]) -> dict[str, Tensor]:
        """Exact errors (S, seeds) of each regime at shot counts."""
        found: dict[str, Tensor] = {}
        for key, model in trained.items():
            errors = evaluate(model, task, shots, prompts=False, exact=True).error
            names = (PRETRAIN,) if key == PRETRAIN else self.regimes
            found |= {name: errors[:, i :: len(names)] for i, name in enumerate(names)}
        return found

    def protocol(self, record: Mapping[str, Any]) -> str:
        """The training, in words."""
        asked = record["asked"]
        finite = "fresh data" if asked["preset"] == "tuned" else "fine-tuning on 100,000 points, with replacement"
        return (
            f"{asked['trials']} seeds on data of their own, {asked['steps']:,} steps of {asked['batch']:,} sequences "
            f"for pretraining and as many for each fine-tuning, preset {asked['preset']}, {finite}. Errors are exact "
            "for each seed; bars and ± are standard errors over seeds."
        )


def mean(errors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the last dimension, the seeds, and its standard error; over those that are finite."""
    errors = errors[..., torch.isfinite(errors).reshape(-1, errors.shape[-1]).all(0)]
    count = errors.shape[-1]
    if count < 2:
        return errors.mean(-1), torch.full(errors.shape[:-1], torch.nan, dtype=errors.dtype)
    return errors.mean(-1), errors.std(-1) / count**0.5


@dataclass(frozen=True)
class EightRegimes(TrainedFigure):
    """Figure 5: errors on the tuned task and on its opposite, and table 1."""

    def closing(
        self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None
    ) -> tuple[list[str], str, str]:
        """Caption, CSV and table 1 with the findings."""
        trained = self.trained(record, folder)
        shots, axes, corners = range(self.setting.shots + 1), [], {}
        for name, cosine in (("θ0", 1.0), ("−θ0", -1.0)):
            found = self.errors(trained, self.setting.task.at_cosine(cosine), shots)
            order = [PRETRAIN, *self.regimes]
            curves = [
                points(regime, shots, *mean(found[regime]), order.index(regime)) for regime in order if regime in found
            ]
            axes.append(Axes(f"task {name}", SHOTS, ERROR, curves, logarithmic=True))
            for regime, errors in found.items():
                corners[regime, name, 0], corners[regime, name, shots[-1]] = errors[0], errors[-1]
        record["axes"] = as_dicts(axes)
        findings = table.findings(corners, self.setting.shots) if len(trained) == 2 else []
        text = table.as_text(corners, [PRETRAIN, *self.regimes], self.setting.shots) if trained else ""
        record["findings"] = findings
        said = [f"{'Holds' if entry['holds'] else 'Does not hold'}: {entry['text']}" for entry in findings]
        text += "".join(f"{sentence}\n" for sentence in said)
        record["table"] = text
        return [self.protocol(record), *self.remarks, *said], as_csv(self.name, axes), text


@dataclass(frozen=True)
class OnTheory(TrainedFigure):
    """Figure 4: pretrained, value-only and fully fine-tuned models on the curves of theory."""

    name: str = "ff4"
    title: str = "Figure 4: trained models on their closed forms, task θ0"
    regimes: tuple[str, ...] = ("zs:v", "zs:all")
    remarks: tuple[str, ...] = (
        "Value-only theory is at the scalar w that training ended in. Full fine-tuning has other minimisers than the "
        "family's, whose few-shot errors differ: its dashed line is the family's at w = 1, shown and not judged.",
    )

    def closing(
        self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None
    ) -> tuple[list[str], str, str]:
        """Caption, CSV and the distances from theory."""
        trained, setting = self.trained(record, folder), self.setting
        task, shots = setting.task, range(setting.shots + 1)
        n = torch.arange(setting.shots + 1)
        found = self.errors(trained, task, shots)
        scalars = self.scalars(trained)
        families = {
            PRETRAIN: forgetting.pretrained(setting.dimension, **setting.known),
            "zs:v": forgetting.value_tuned(task.theta, scalars.get("zs:v", torch.ones(1)).mean(), **setting.known),
            "zs:all": forgetting.fully_tuned(task.theta),
        }
        names = {PRETRAIN: "pretrained", "zs:v": "value-only", "zs:all": "full fine-tuning"}
        curves, theory = [], {}
        for colour, (regime, family) in enumerate(families.items()):
            theory[regime] = forgetting.error(family, task.theta, n, noise_var=setting.noise_variance)
            curves.append(line(names[regime], shots, theory[regime], colour, dashed=regime == "zs:all"))
            if regime in found:
                curves.append(points(names[regime], shots, *mean(found[regime]), colour))
        axes = [Axes("task θ0", SHOTS, ERROR, curves, logarithmic=True)]
        record["axes"] = as_dicts(axes)
        rows = []
        if len(trained) == 2:
            pretraining = evaluate(trained[PRETRAIN], setting.source, [setting.shots], prompts=False).error[0]
            optimum = forgetting.pretraining_loss(setting.dimension, **setting.known)
            value = setting.noise_variance + 2.0 / (setting.dimension + 4)
            last = setting.shots
            rows = [
                ("pretraining loss", pretraining, float(optimum), 0.5),
                ("value-only, zero-shot", found["zs:v"][0], value, 0.5),
                ("full fine-tuning, zero-shot", found["zs:all"][0], setting.noise_variance, 0.5),
                (f"pretrained, {last} shots", found[PRETRAIN][-1], float(theory[PRETRAIN][-1]), 2.0),
                (f"value-only, {last} shots", found["zs:v"][-1], float(theory["zs:v"][-1]), 2.0),
            ]
        text = table.distances(rows)
        record["table"] = text
        judged = [
            f"{name}: {100 * (float(mean(errors)[0]) / optimum - 1):+.3f} % from theory"
            for name, errors, optimum, _ in rows
        ]
        w = mean(scalars["zs:v"])[0] if "zs:v" in scalars else torch.tensor(torch.nan)
        said = [f"{'; '.join(judged)}; w = {float(w):.4f}."] if judged else []
        return [self.protocol(record), *said, *self.remarks], as_csv(self.name, axes), text

    def scalars(self, trained: Mapping[str, Model]) -> dict[str, Tensor]:
        """The free scalar (seeds,) that each regime ended in, with Q in the size of the pretrained optimum."""
        Q = forgetting.pretrained(self.setting.dimension, **self.setting.known).Q
        found: dict[str, Tensor] = {}
        for key, model in trained.items():
            names = (PRETRAIN,) if key == PRETRAIN else self.regimes
            every = scalar(model, Q)
            found |= {name: every[i :: len(names)] for i, name in enumerate(names)}
        return found


def scalar(model: Model, Q: Tensor) -> Tensor:
    """The scalar v (R,) of one-layer models in the units where the features' block of W is as large as Q."""
    with torch.no_grad():
        forms = model.forms(False)
    W, v = forms["W"], forms["v"]
    assert W is not None
    assert v is not None
    inside = W.double()[..., 1:-1, 1:-1].mT
    return v.double()[..., 0, -1] * (inside * Q).sum((-2, -1)) / (Q * Q).sum()
