"""Claims that closed forms decide: the order of the optima, the rates of the gaps, the size of the prompts."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import theory
from fastlin._threads import one_thread
from fastlin.data import random
from fastlin.data.sources import TaskMixture
from fastlin.figures.claims.entry import PROBLEMS, Claim, Number, percent
from fastlin.settings import Config, load, shipped

Optima = Sequence[Callable[[TaskMixture, int], theory.Optimum]]
OPTIMA: Optima = (theory.plain, theory.fine_tuned, theory.joint, theory.decoupled)
"""From the highest loss to the lowest, as in Corollary 1: PT, FT, JT, PGD."""
GAPS = {"plain_fine_tuned": "PT − FT", "fine_tuned_joint": "FT − JT", "joint_decoupled": "JT − PGD"}
POWERS = {"plain_fine_tuned": 2, "fine_tuned_joint": 2, "joint_decoupled": 1}

# Relative. Losses are sums of positive terms, accurate to about 1e-15; differences below this are rounding.
ROUNDING = 1e-12
# The next term of a gap is c/n of it, with c about 50: slopes are off by c / (n ln 10), 0.02 from n = 1000 on and
# 0.002 from n = 10,000 on. The orders 1/n and 1/n² are 1 apart.
_SLOPE = 0.05
# Relative. W^-1 - n S cancels all but 1/n of its digits, which leaves 1e-16 n |W^-1| / |p| = 1e-10 at n = 1e5.
_CANCELLED = 1e-8


class OrderingCase(NamedTuple):
    """A mixture and a context length; each kind has its own count of violations."""

    kind: str
    mix: TaskMixture
    n: int


def shipped_problems() -> list[OrderingCase]:
    configs = [load(path) for path in dict.fromkeys(shipped().values())]
    return [OrderingCase("settings that ship", one.mixture, n) for one in configs for n in one.context_lengths]


def random_problems(count: int, seed: int) -> list[OrderingCase]:
    """Mixtures with d = 2 to 5, K = 2 or 3, full covariances that do not commute, noise, and n = 1 to 100."""
    return [OrderingCase("random problems", *_random_problem(seed, step)) for step in range(count)]


def _random_problem(seed: int, step: int) -> tuple[TaskMixture, int]:
    u = random.uniform(1, 7, seed=seed, step=step, stream=PROBLEMS, dtype=torch.float64)[0]
    d, K, n = 2 + int(4 * u[0]), 2 + int(2 * u[1]), round(100 ** float(u[2]))
    weights = 0.1 + u[4 : 4 + K]
    normals = random.normal(1 + 2 * K, d * d, seed=seed, step=step, stream=PROBLEMS + 1, dtype=torch.float64)
    factors = normals.view(-1, d, d)[: 1 + K]
    covariances = factors @ factors.mT / d + 0.05 * torch.eye(d, dtype=torch.float64)
    means = normals[1 + K :, :d]
    return TaskMixture(means, covariances[1:], weights / weights.sum(), 2.0 * float(u[3]), covariances[0]), n


@one_thread()
def ordering(problems: Iterable[OrderingCase], optima: Optima = OPTIMA) -> Claim:
    """Corollary 1: no optimum is above the one before it."""
    relative_gaps: dict[str, list[float]] = {}
    for kind, mix, n in problems:
        losses = [float(optimum(mix, n)) for optimum in optima]
        relative_gaps.setdefault(kind, []).extend((high - low) / high for high, low in itertools.pairwise(losses))
    numbers, wrong = [], 0
    for kind, gaps_of_kind in relative_gaps.items():
        violations = sum(gap < -ROUNDING for gap in gaps_of_kind)
        wrong += violations
        numbers += [
            Number(f"comparisons, {kind}", None, len(gaps_of_kind)),
            Number(f"violations, {kind}", None, violations, 0),
            Number(f"smallest relative gap, {kind}", None, min(gaps_of_kind)),
        ]
    total = sum(map(len, relative_gaps.values()))
    finding = f"Of {total} pairs of neighbouring losses, {wrong} are in the wrong order by more than rounding."
    verdict = "The ordering holds in every case checked." if wrong == 0 else "The ordering does not hold."
    statement = "Corollary 1: L_PGD ≤ L_JT ≤ L_FT ≤ L_PT."
    return Claim("Ordering of the optima", statement, finding, verdict, wrong == 0, numbers)


def gaps(mix: TaskMixture, n: int) -> dict[str, float]:
    """PT − FT, FT − JT and JT − PGD at one context length."""
    losses = [float(optimum(mix, n)) for optimum in OPTIMA]
    return {key: high - low for key, (high, low) in zip(GAPS, itertools.pairwise(losses), strict=True)}


@one_thread()
def rates(setting: Config, lengths: Sequence[int] = (100, 1000, 10_000, 100_000)) -> Claim:
    """How fast the gaps close as n grows: slopes between the last two lengths, scaled gaps, and their ratio.

    Not decided where the slopes of the last two intervals still differ; needs three lengths or more.
    """
    limits = theory.gap_limits(setting.mixture)._asdict()
    gap_at = {n: gaps(setting.mixture, n) for n in lengths}
    ratio = {n: at["plain_fine_tuned"] / at["fine_tuned_joint"] for n, at in gap_at.items()}
    limit = limits["plain_fine_tuned"] / limits["fine_tuned_joint"]
    earlier, before, last = lengths[-3:]
    slope = {key: _slope(before, last, gap_at[before][key], gap_at[last][key]) for key in GAPS}
    ratio_slope = _slope(before, last, ratio[before], ratio[last])
    turn = max(abs(_slope(earlier, before, gap_at[earlier][key], gap_at[before][key]) - slope[key]) for key in GAPS)

    numbers = []
    for key, label in GAPS.items():
        power = POWERS[key]
        scaled = f"n{'²' if power == 2 else ''} ({label})"
        numbers += [Number(scaled, n, n**power * gap_at[n][key], limits[key]) for n in lengths]
        numbers += [Number(f"slope of {label}", last, slope[key], -power)]
    numbers += [Number("(PT − FT) / (FT − JT)", n, ratio[n], limit) for n in lengths]
    numbers += [Number("slope of (PT − FT) / (FT − JT)", last, ratio_slope, 0)]

    far = max(abs(last ** POWERS[key] * gap_at[last][key] / limits[key] - 1) for key in GAPS)
    valid = slope["fine_tuned_joint"] <= _SLOPE - 1
    loose = slope["fine_tuned_joint"] <= -1 - _SLOPE
    falls = ratio_slope <= _SLOPE - 1
    verdict = f"O(1/n) is {'a valid' if valid else 'not a valid'} bound on FT − JT"
    verdict += f", but a loose one: the gap falls like n^{slope['fine_tuned_joint']:.2f}." if loose else "."
    course = f"tends to {ratio[last]:.4g}" if abs(ratio_slope) <= _SLOPE else f"goes like n^{ratio_slope:.2f}"
    verdict += f" That the ratio is O(1/n) is {'true' if falls else f'false: it {course}'}."
    if turn > _SLOPE:
        verdict = f"Not decided: slopes still change by {turn:.2g} between n = {earlier} and {last}."
    statement = "Corollary 1 and its discussion: FT − JT is of order 1/n, and (PT − FT) / (FT − JT) is O(1/n)."
    finding = (
        f"{setting.name}: between n = {before} and {last} the three gaps fall like "
        f"{', '.join(f'n^{slope[key]:.3f}' for key in GAPS)}. Scaled by n², n² and n they end within "
        f"{percent(far)} of their limits; the ratio of the first two ends at {ratio[last]:.4g}."
    )
    return Claim("Rates of the gaps", statement, finding, verdict, None if turn > _SLOPE else valid and falls, numbers)


def _slope(first: float, last: float, low: float, high: float) -> float:
    return math.log(high / low) / math.log(last / first)


def best_prompts(mix: TaskMixture, n: int, optimum: theory.Optimum) -> Tensor:
    """Prompts (K, d) at which the loss is stationary for the W of an optimum: rows (W^-1 - n S) mu_k."""
    # The closed forms of the prompts do not contain n; this formula does, and so can show that n cancels.
    means = mix.means
    inverse: Tensor = torch.linalg.solve(optimum.W, means.mT)
    return inverse.mT - n * means @ mix.feature_cov


@one_thread()
def prompts(settings: Sequence[Config], lengths: Sequence[int] = (1, 10, 100, 1000, 10_000, 100_000)) -> Claim:
    """Whether the optimal prompts grow with the context, as -n S mu_k would."""
    numbers, moved, distance, slope, cost = [], 0.0, [], [], []
    first, last = lengths[0], lengths[-1]
    for setting in settings:
        mix = setting.mixture
        for label, find in (("FT", theory.fine_tuned), ("JT", theory.joint)):
            stationary = {n: best_prompts(mix, n, find(mix, n)) for n in lengths}
            drift = max(_apart(p, stationary[first]) for p in stationary.values())
            closed = max(_apart(p, find(mix, n).prompts) for n, p in stationary.items())
            moved = max(moved, drift, closed)
            slope.append(_slope(first, last, float(stationary[first].norm()), float(stationary[last].norm())))
            papers = -last * mix.means @ mix.feature_cov
            distance.append(_apart(papers, stationary[last]))
            optimum = find(mix, last)
            cost.append(float(theory.population_loss(mix, last, optimum.W, papers)) / float(optimum))
            where = f"{label}, {setting.name}"
            numbers += [
                Number(f"norm of the prompts, {where}", n, float(p.norm()), float(stationary[first].norm()))
                for n, p in ((first, stationary[first]), (last, stationary[last]))
            ]
            numbers += [
                Number(f"largest |p(n) − p({first})| / |p({first})|, {where}", None, drift, 0),
                Number(f"largest distance from the closed form, relative, {where}", None, closed, 0),
                Number(f"|p(n) + n S μ| / |p(n)|, {where}", last, distance[-1]),
                Number(f"loss with −n S μ / loss with p(n), {where}", last, cost[-1]),
            ]
    still = moved <= _CANCELLED
    grow = min(slope) >= 1 - _SLOPE
    if still:
        verdict = "The optimal prompts do not depend on n at all: W⁻¹ μ grows as fast as n S μ and cancels it."
    else:
        verdict = f"The optimal prompts depend on n: they {'grow' if grow else 'do not grow'} like n."
    statement = "Theorems 2 and 3, discussion: for large n the prompts are about −n S μ_k, so they grow with n."
    finding = (
        f"In {len(settings)} settings with n from {first} to {last} the prompts that make the loss stationary, "
        f"(W⁻¹ − n S) μ_k, move by at most {moved:.1g} of their size: n S μ_k cancels to rounding. At n = {last} "
        f"the distance from them to −n S μ_k is at least {min(distance):.3g} times their size, and with −n S μ_k the "
        f"loss is at least {min(cost):.3g} times as high."
    )
    return Claim("Size of the optimal prompts", statement, finding, verdict, grow, numbers)


def _apart(p: Tensor, q: Tensor) -> float:
    return float((p - q).norm() / q.norm())


_CAPTION = (
    "Left: differences of the population risk of the plain (PT), fine-tuned (FT), joint (JT) and debiased (PGD) "
    "optima. Dashes: their limits for long contexts. Dots: the rate 1/n that the paper states for FT − JT, drawn "
    "as a tangent to the gap. Right: norm over all tasks of the prompts that make the loss stationary, the same at "
    "every n, and of −n S μ, which the paper states for long contexts."
)


@one_thread()
def picture(setting: Config, lengths: Sequence[int]) -> dict[str, Any]:
    """Data of the picture: gaps and their limits, norms of the prompts and of -n S mu, at every length."""
    mix = setting.mixture
    gaps_at = [gaps(mix, n) for n in lengths]
    size = float((mix.means @ mix.feature_cov).norm())
    norms = {
        find.__name__: [float(best_prompts(mix, n, find(mix, n)).norm()) for n in lengths]
        for find in (theory.fine_tuned, theory.joint)
    }
    return {
        "name": setting.name,
        "n": list(lengths),
        "labels": GAPS,
        "gaps": {key: [at[key] for at in gaps_at] for key in GAPS},
        "limits": theory.gap_limits(mix)._asdict(),
        "powers": POWERS,
        "prompts": {**norms, "paper": [n * size for n in lengths]},
        "caption": [_CAPTION],
    }
