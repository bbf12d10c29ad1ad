"""Figures 4 and 5 and table 1: pretrained models, fine-tuned in several regimes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin import models
from fastlin.data.sources import FixedTask, SphereTasks
from fastlin.figures.figure import FigureCell
from fastlin.figures.forgetting import table
from fastlin.figures.forgetting.axes import ERROR, SHOTS, Axes, AxesFigure, line, points
from fastlin.models import Model
from fastlin.theory import forgetting
from fastlin.training.evaluate import evaluate
from fastlin.training.judge import excess
from fastlin.training.record import MODEL

PRETRAIN, TUNED = "pretrain", "tuned"
PARTS = ("all", "q", "k", "v")
EIGHT = tuple(f"{objective}:{part}" for objective in ("zs", "zs+fs") for part in PARTS)


@dataclass(frozen=True, eq=False)
class Training(FigureCell):
    """A run of a figure: pretraining, or its fine-tuning in several regimes at once."""

    panel: str
    key: str
    regimes: tuple[str, ...]
    setting: Setting
    model: str
    attention_heads: int
    after: str | None = None
    stretches: int = 1
    place: float = 0.0
    layers: int = 1

    def call(self) -> dict[str, Any]:
        sizes = {"n": self.setting.shots, "model": self.model, "attention_heads": self.attention_heads}
        target = {} if self.after is None else {"target": self.setting.task}
        return {"mix": self.setting.source, "regime": self.regimes, **sizes, **target}

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {name: summary[name] for name in ("excess_percent", "trials", "diverged")}
        return {"regimes": list(self.regimes), "risk": summary["best"], **numbers}


@dataclass(frozen=True)
class Setting:
    """Pretraining tasks uniform on the unit sphere, and the task to fine-tune on, with the authors' values."""

    dimension: int = 5
    noise_variance: float = 0.1
    shots: int = 20  # context length of pretraining, and the largest in tests

    @property
    def source(self) -> SphereTasks:
        return SphereTasks(self.dimension, noise_std=self.noise_variance**0.5, bias=True)

    @property
    def task(self) -> FixedTask:
        """The fine-tuning task theta0, of norm one."""
        theta = torch.eye(self.dimension, dtype=torch.float64)[0]
        return FixedTask(theta, noise_std=self.noise_variance**0.5, bias=True)

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of the closed forms of the pretrained optimum."""
        moment = torch.eye(self.dimension, dtype=torch.float64) / self.dimension
        return {"shots": self.shots, "noise_var": self.noise_variance, "task_cov": moment}


@dataclass(frozen=True)
class TrainedFigure(AxesFigure):
    name: str
    title: str
    regimes: tuple[str, ...] = EIGHT
    model: str = "full"
    attention_heads: int = 1
    remarks: tuple[str, ...] = ()
    setting: Setting = Setting()

    def cells(self, lengths: Sequence[int] | None = None) -> list[Training]:
        same = (self.setting, self.model, self.attention_heads)
        return [
            Training(self.name, PRETRAIN, (PRETRAIN,), *same),
            Training(self.name, TUNED, self.regimes, *same, after=PRETRAIN, stretches=2),
        ]

    def trained(self, record: Mapping[str, Any], folder: Path) -> dict[str, Model]:
        """Models of the cells that are done, by key."""
        done = [cell["key"] for cell in record["cells"] if cell["state"] == "done"]
        return {key: models.load(folder / "cells" / self.name / key / MODEL) for key in done}

    def errors(self, trained: Mapping[str, Model], task: FixedTask, shots: Sequence[int]) -> dict[str, Tensor]:
        """Exact errors (S, seeds) of each regime, by shots."""
        return self._by_regime(
            {key: evaluate(model, task, shots, prompts=False, exact=True).error for key, model in trained.items()}
        )

    def _by_regime(self, by_cell: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers of all trials (..., R), by cell, as numbers of the seeds (..., seeds), by regime."""
        by_regime: dict[str, Tensor] = {}
        for key, values in by_cell.items():
            names = (PRETRAIN,) if key == PRETRAIN else self.regimes
            by_regime |= {name: values[..., i :: len(names)] for i, name in enumerate(names)}
        return by_regime

    def protocol(self, record: Mapping[str, Any]) -> str:
        asked = record["asked"]
        finite = "fresh data" if asked["preset"] == "tuned" else "fine-tuning on 100,000 points, with replacement"
        return (
            f"{asked['trials']} seeds with separate data; {asked['steps']:,} steps of {asked['batch']:,} sequences for "
            f"pretraining and as many for each fine-tuning; preset {asked['preset']}, {finite}. Errors are exact for "
            "each seed; bars and ± are standard errors over seeds."
        )


def mean(errors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the last dimension, the seeds, and its standard error; leaves out seeds that are not finite."""
    errors = errors[..., torch.isfinite(errors).reshape(-1, errors.shape[-1]).all(0)]
    count = errors.shape[-1]
    if count < 2:
        return errors.mean(-1), torch.full(errors.shape[:-1], torch.nan, dtype=errors.dtype)
    return errors.mean(-1), errors.std(-1) / count**0.5


@dataclass(frozen=True)
class EightRegimes(TrainedFigure):
    """Figure 5: errors on the tuned task and on its opposite, and table 1."""

    def result(self, record: dict[str, Any], folder: Path) -> tuple[list[Axes], list[str], dict[str, Any]]:
        trained = self.trained(record, folder)
        shots, axes, corners = range(self.setting.shots + 1), [], {}
        order = [PRETRAIN, *self.regimes]
        for name, cosine in (("θ0", 1.0), ("−θ0", -1.0)):
            errors = self.errors(trained, self.setting.task.at_cosine(cosine), shots)
            shown = [(colour, regime) for colour, regime in enumerate(order) if regime in errors]
            curves = [points(regime, shots, *mean(errors[regime]), colour) for colour, regime in shown]
            axes.append(Axes(f"task {name}", SHOTS, ERROR, curves, logarithmic=True))
            for regime, own in errors.items():
                corners[regime, name, 0], corners[regime, name, shots[-1]] = own[0], own[-1]
        findings = table.findings(corners, self.setting.shots) if len(trained) == 2 else []
        corner_table = table.as_table(corners, order if trained else [], self.setting.shots)
        record["findings"] = findings
        verdicts = [f"{'Holds' if entry['holds'] else 'Does not hold'}: {entry['text']}" for entry in findings]
        corner_table["notes"] += verdicts
        return axes, [self.protocol(record), *self.remarks, *verdicts], corner_table


@dataclass(frozen=True)
class OnTheory(TrainedFigure):
    """Figure 4: pretrained, value-only and fully fine-tuned models, beside their closed forms."""

    name: str = "ff4"
    title: str = "Figure 4: trained models on their closed forms, task θ0"
    regimes: tuple[str, ...] = ("zs:v", "zs:all")
    remarks: tuple[str, ...] = (
        "The value-only closed form uses the scalar w that training ended with. Full fine-tuning also has minimisers "
        "outside the paper's family, with other few-shot errors: its line is the family at w = 1, not a target. "
        "An excess below zero is possible at 20 shots: training does not minimise that error.",
    )

    def result(self, record: dict[str, Any], folder: Path) -> tuple[list[Axes], list[str], dict[str, Any]]:
        trained, setting = self.trained(record, folder), self.setting
        task, shots, last = setting.task, range(setting.shots + 1), setting.shots
        errors = self.errors(trained, task, shots)
        pretrained = forgetting.pretrained(setting.dimension, **setting.known)
        scalars = self._by_regime({key: scalar(model, pretrained.Q) for key, model in trained.items()})
        families = {
            PRETRAIN: pretrained,
            "zs:v": forgetting.value_tuned(task.theta, scalars.get("zs:v", torch.ones(1)).mean(), **setting.known),
            "zs:all": forgetting.fully_tuned(task.theta),
        }
        names = {PRETRAIN: "pretrained", "zs:v": "value-only", "zs:all": "full fine-tuning"}
        curves, theory = [], {}
        for colour, (regime, family) in enumerate(families.items()):
            theory[regime] = forgetting.error(family, task.theta, torch.tensor(shots), noise_var=setting.noise_variance)
            curves.append(line(names[regime], shots, theory[regime], colour))
            if regime in errors:
                curves.append(points(names[regime], shots, *mean(errors[regime]), colour))
        rows = []
        if len(trained) == 2:
            pretraining = evaluate(trained[PRETRAIN], setting.source, [setting.shots], prompts=False).error[0]
            optimum = forgetting.pretraining_loss(setting.dimension, **setting.known)
            value = setting.noise_variance + 2.0 / (setting.dimension + 4)
            rows = [
                ("pretraining loss", pretraining, float(optimum), 0.5),
                ("value-only, zero-shot", errors["zs:v"][0], value, 0.5),
                ("full fine-tuning, zero-shot", errors["zs:all"][0], setting.noise_variance, 0.5),
                (f"pretrained, {last} shots", errors[PRETRAIN][-1], float(theory[PRETRAIN][-1]), 2.0),
                (f"value-only, {last} shots", errors["zs:v"][-1], float(theory["zs:v"][-1]), 2.0),
            ]
        percents = [
            f"{name}: {100 * excess(float(mean(own)[0]), optimum):+.3f} % from theory" for name, own, optimum, _ in rows
        ]
        w = mean(scalars["zs:v"])[0] if "zs:v" in scalars else torch.tensor(torch.nan)
        sentences = [f"{'; '.join(percents)}; w = {float(w):.4f}."] if percents else []
        axes = [Axes("task θ0", SHOTS, ERROR, curves, logarithmic=True)]
        return axes, [self.protocol(record), *sentences, *self.remarks], table.distances(rows)


def scalar(model: Model, Q: Tensor) -> Tensor:
    """The scalar v (R,) of one-layer models, in units where the features' block of W has the size of Q."""
    with torch.no_grad():
        forms = model.forms(False)
    W, v = forms["W"], forms["v"]
    assert W is not None
    assert v is not None
    inside = W.double()[..., 1:-1, 1:-1].mT
    return v.double()[..., 0, -1] * (inside * Q).sum((-2, -1)) / (Q * Q).sum()
