"""Every figure, group of figures and report of claims, by the name that `fastlin reproduce` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from fastlin._checks import choice
from fastlin.figures import claims, forgetting, prompts
from fastlin.figures.figure import Figure
from fastlin.figures.forgetting import claims as forgetting_claims


class Group(NamedTuple):
    """Figures that one name reproduces together."""

    about: str
    figures: Mapping[str, Figure]


GROUPS = {
    "all": Group("the panels of the paper on prompts", prompts.PANELS),
    "beyond": Group("experiments that this paper does not have", prompts.BEYOND),
    "ff": Group("the figures of the paper on fine-tuning", forgetting.FIGURES),
}
CLAIMS: dict[str, ModuleType] = {"claims": claims, "ff-claims": forgetting_claims}
"""Modules that check the claims of a paper, each with `compute` and its EFFORT."""


def figures() -> dict[str, Figure]:
    return {name: figure for group in GROUPS.values() for name, figure in group.figures.items()}


def named(name: str) -> list[Figure]:
    """The figure of a name, or the figures of a group; none for a report of claims."""
    known = figures()
    choice("figure", name, [*known, *GROUPS, *CLAIMS])
    return [known[name]] if name in known else [*GROUPS[name].figures.values()] if name in GROUPS else []


def described() -> str:
    """All names in one sentence, for help texts."""
    groups = [f"{name}: {group.about} ({', '.join(group.figures)})" for name, group in GROUPS.items()]
    return "; ".join([*groups, f"{', '.join(CLAIMS)}: the claims of either paper, checked"])
