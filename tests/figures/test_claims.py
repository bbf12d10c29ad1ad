"""The claims report: numbers against reference values, verdicts that follow the numbers, and whole files."""

import json
from pathlib import Path

import pytest
import torch
from support.claims import SIZES, Oracle
from support.folders import contents, visible

from fastlin import settings, theory
from fastlin.data.sources import TaskMixture
from fastlin.figures import claims
from fastlin.figures.claims import attention, closed, minima

# The golden minima were found by another minimiser to about six digits.
MINIMISED = 1e-6


@pytest.fixture(scope="module")
def golden():
    return json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())


@pytest.fixture
def cells(tmp_path):
    return claims.Cells(tmp_path, **SIZES)


def values(claim):
    """Quantity and context length to value and expected."""
    found = {(number.quantity, number.n): (number.value, number.expected) for number in claim.numbers}
    assert len(found) == len(claim.numbers)
    return found


def two_tasks(second_mean, second_covariance):
    covariances = torch.stack([torch.eye(2), torch.diag(torch.tensor(second_covariance))])
    return TaskMixture([[1.0, 0.5], second_mean], covariances, [0.5, 0.5])


def test_ordering():
    problems = closed.shipped_problems()
    assert len(problems) == 4 * 6 + 6 * 7
    claim = closed.ordering([*problems, *closed.random_problems(40, seed=3)])
    assert claim.holds is True
    found = values(claim)
    assert found["comparisons, settings that ship", None][0] == 3 * len(problems)
    assert found["comparisons, random problems", None][0] == 3 * 40
    assert [found[f"violations, {kind}", None] for kind in ("settings that ship", "random problems")] == [(0, 0)] * 2
    # Of problems with means that are not zero every step is strict.
    assert found["smallest relative gap, random problems", None][0] > 1e-8


@pytest.mark.parametrize("place", range(3))
def test_ordering_counts_what_is_the_wrong_way_round(place):
    optima = list(closed.OPTIMA)
    optima[place], optima[place + 1] = optima[place + 1], optima[place]
    problems = closed.random_problems(10, seed=0)
    claim = closed.ordering(problems, optima)
    assert claim.holds is False
    assert values(claim)["violations, random problems", None][0] >= 10
    # By less than rounding nothing is wrong.
    nearly = [*closed.OPTIMA[:3], lambda mix, n: theory.joint(mix, n).loss * (1 + 1e-14)]
    assert closed.ordering(problems, nearly).holds is True
    assert (
        closed.ordering(problems, [*nearly[:3], lambda mix, n: theory.joint(mix, n).loss * (1 + 1e-10)]).holds is False
    )


def test_random_problems_are_what_they_are_said_to_be():
    problems = closed.random_problems(200, seed=0)
    assert {problem.mix.d for problem in problems} == {2, 3, 4, 5}
    assert {problem.mix.K for problem in problems} == {2, 3}
    assert min(problem.n for problem in problems) == 1
    assert 80 < max(problem.n for problem in problems) <= 100
    for _, mix, _ in problems:
        S, B = mix.feature_cov, mix.covariances
        assert float((B[0] @ B[1] - B[1] @ B[0]).norm()) > 1e-6
        assert float((S @ B[0] - B[0] @ S).norm()) > 1e-6
        assert mix.noise_std > 0
        assert torch.linalg.eigvalsh(B).min() > 0.049
    again = closed.random_problems(200, seed=0)
    assert all(torch.equal(a.mix.covariances, b.mix.covariances) for a, b in zip(problems, again, strict=True))
    assert not torch.equal(problems[0].mix.means, closed.random_problems(1, seed=1)[0].mix.means)


def test_rates():
    claim = closed.rates(settings.load("2c"))
    assert claim.holds is False
    assert "a valid bound on FT − JT, but a loose one" in claim.verdict
    assert "false: it tends to 0.0529" in claim.verdict
    found = values(claim)
    # The next order is 54/n of FT − JT, the slowest to settle.
    for scaled in ("n² (PT − FT)", "n² (FT − JT)", "n (JT − PGD)"):
        value, expected = found[scaled, 100_000]
        assert value == pytest.approx(expected, rel=1e-3)
    assert found["n (JT − PGD)", 100][1] == pytest.approx(11 * 18.9)
    for gap, slope in (("PT − FT", -2), ("FT − JT", -2), ("JT − PGD", -1), ("(PT − FT) / (FT − JT)", 0)):
        value, expected = found[f"slope of {gap}", 100_000]
        assert expected == slope
        assert value == pytest.approx(slope, abs=0.003)


def test_gaps_are_those_of_the_reference_losses(golden):
    for n, losses in golden["PB"]["fig2c"]["n"].items():
        expected = [losses["L_PT"] - losses["L_FT"], losses["L_FT"] - losses["L_JT"], losses["L_JT"] - losses["L_PGD"]]
        # Ten digits of losses up to 30.
        assert list(closed.gaps(settings.load("2c").mixture, int(n)).values()) == pytest.approx(expected, abs=1e-8)


def test_rates_of_gaps_that_were_as_the_paper_has_them(monkeypatch):
    setting = settings.load("2c")
    powers = dict(zip(closed.GAPS, (2, 1, 1), strict=True))
    monkeypatch.setattr(closed, "gaps", lambda mix, n: {key: float(n) ** -power for key, power in powers.items()})
    claim = closed.rates(setting)
    assert claim.holds is True
    assert claim.verdict == "O(1/n) is a valid bound on FT − JT. That the ratio is O(1/n) is true."
    monkeypatch.setattr(closed, "gaps", lambda mix, n: dict.fromkeys(closed.GAPS, n**-0.5))
    claim = closed.rates(setting)
    assert claim.holds is False
    assert claim.verdict == "O(1/n) is not a valid bound on FT − JT. That the ratio is O(1/n) is false: it tends to 1."
    powers["fine_tuned_joint"] = 1.5
    monkeypatch.setattr(closed, "gaps", lambda mix, n: {key: float(n) ** -power for key, power in powers.items()})
    assert closed.rates(setting).verdict == (
        "O(1/n) is a valid bound on FT − JT, but a loose one: the gap falls like n^-1.50. "
        "That the ratio is O(1/n) is false: it goes like n^-0.50."
    )


def test_rates_are_not_decided_by_short_contexts():
    claim = closed.rates(settings.load("2c"), (1, 10, 100))
    assert claim.holds is None
    assert claim.verdict.startswith("Not decided: slopes still change by")


def test_prompts_stay_the_same():
    both = [settings.load(name) for name in ("2c", "A1d")]
    claim = closed.prompts(both)
    assert claim.holds is False
    assert claim.verdict.startswith("The optimal prompts do not depend on n at all")
    found = values(claim)
    for setting in both:
        for label, find in (("FT", theory.fine_tuned), ("JT", theory.joint)):
            where = f"{label}, {setting.name}"
            # W⁻¹ - n S leaves 1e-16 n |W⁻¹| of rounding, 1e-10 of the prompts at n = 1e5.
            assert found[f"largest |p(n) − p(1)| / |p(1)|, {where}", None][0] < 1e-9
            assert found[f"largest distance from the closed form, relative, {where}", None][0] < 1e-9
            norm = float(find(setting.mixture, 7).prompts.norm())
            for n in (1, 100_000):
                assert found[f"norm of the prompts, {where}", n][0] == pytest.approx(norm, rel=1e-9)
            # Without what W⁻¹ mu_k brings the whole of tr(S M) is lost.
            optimum = float(find(setting.mixture, 100_000))
            M = torch.einsum("k,ki,ki->", setting.mixture.weights, setting.mixture.means, setting.mixture.means)
            cost = found[f"loss with −n S μ / loss with p(n), {where}", 100_000][0]
            assert cost == pytest.approx(1 + float(M) / optimum, rel=1e-6)


def test_prompts_that_did_grow(monkeypatch):
    monkeypatch.setattr(closed, "best_prompts", lambda mix, n, optimum: -n * mix.means @ mix.feature_cov)
    claim = closed.prompts([settings.load("2c")])
    assert claim.holds is True
    assert claim.verdict == "The optimal prompts depend on n: they grow like n."


def test_best_prompts_make_the_loss_stationary_where_nothing_commutes():
    _, mix, _ = closed.random_problems(1, seed=5)[0]
    for find in (theory.fine_tuned, theory.joint):
        optimum = find(mix, 6)
        p = closed.best_prompts(mix, 6, optimum).requires_grad_()
        (gradient,) = torch.autograd.grad(theory.population_loss(mix, 6, optimum.W, p), p)
        assert float(gradient.abs().max()) < 1e-13


def test_zero_means():
    claim = attention.zero_means(settings.load("2b"), Oracle(1e-3))
    assert claim.holds is True
    found = values(claim)
    assert max(value for (quantity, _), (value, _) in found.items() if quantity.endswith("closed form − 1")) < 1e-15
    # The golden value has ten digits.
    assert found["risk of the trained model, joint", 10][1] == pytest.approx(7.857142857, rel=1e-9)
    poor = attention.zero_means(settings.load("2b"), Oracle(0.01))
    assert poor.holds is None
    assert poor.verdict == "The closed forms coincide; the trained models are not within 0.5 % of them."
    other = attention.zero_means(settings.load("2a"), Oracle(0.0))
    assert other.holds is False
    assert other.verdict == "The regimes do not coincide in this setting."


def test_assumption(golden, made):
    claim = made[0]["Assumption 1"]
    assert claim.holds is False
    found = values(claim)
    reference = golden["PB_unconstrained_numeric"]["2a|n=10"]
    assert found["L_JT, the reduced model's optimum", 10][0] == pytest.approx(reference["JT"], rel=1e-9)
    assert found["minimum of the full model", 10][0] == pytest.approx(reference["JT_unc"], rel=MINIMISED)
    assert found["minimum of the full model", 40][0] == pytest.approx(4.38163, rel=MINIMISED)
    for n in (10, 40):
        value, expected = found["minimum of the full model", n]
        assert value == pytest.approx(expected, rel=MINIMISED)
        assert found["disagreement of the starts, relative", n][0] < minima.AGREE


def test_a_common_shift_of_all_means_does_not_move_the_minimum(golden):
    mix = settings.load("2c").mixture
    found = minima.minimum(mix, 10, theory.joint(mix, 10), task_heads=False, seed=1)
    assert found.loss == pytest.approx(golden["PB_unconstrained_numeric"]["2a|n=10"]["JT_unc"], rel=MINIMISED)
    assert float(theory.full_population_loss(mix, 10, *found.attention)) == found.loss
    assert torch.equal(found.attention.v[0], found.attention.v[1])


@pytest.mark.parametrize(("excess", "verdict"), [(-1e-3, "gets below"), (1e-3, "does not get below")])
def test_assumption_says_where_training_ends(monkeypatch, excess, verdict):
    def half_as_high(mix, n, near, **options):
        return minima.Minimum(near.loss / 2, near.attention(), 0.0)

    monkeypatch.setattr(attention, "minimum", half_as_high)
    claim = attention.assumption(settings.load("2a"), Oracle(excess))
    assert claim.holds is False
    assert claim.verdict == (
        f"Assumption 1 is a restriction in this setting; the trained model {verdict} the reduced optimum."
    )
    assert "-50 % at n = 10, -50 % at n = 40" in claim.finding


def test_assumption_costs_nothing_with_zero_means():
    claim = attention.assumption(settings.load("2b"), Oracle(0.0), lengths=(10,))
    assert claim.holds is True
    assert claim.verdict == "Assumption 1 costs nothing in this setting."


def test_proposition(made):
    claim = made[0]["Proposition 1"]
    assert claim.holds is False
    assert claim.verdict == "L_PGD is an upper bound and not the infimum, also on sampled tokens."
    found = values(claim)
    for n, decoupled, least in ((4, 1.864846, 1.857860), (20, 0.610582, 0.609577)):
        # Half a unit of the last digit that the reference has.
        assert found["L_PGD, counterexample", n][0] == pytest.approx(decoupled, abs=5.1e-7)
        assert found["minimum with heads and prompts, counterexample", n][0] == pytest.approx(least, abs=5.1e-7)
        assert found["lower bound of any heads and prompts, counterexample", n][0] < least
        difference, exact = found["sampled difference of the squared errors", n]
        distance = found["its distance from the exact one, in standard errors", n][0]
        assert distance == pytest.approx((difference - exact) / found["its standard error", n][0])
        assert abs(distance) < 4
    assert found["L_PGD, Figure A1(d)", 10][0] == pytest.approx(20.606431, abs=5.1e-7)
    assert found["scaled heads, Figure A1(d)", 10][0] == pytest.approx(20.599393, abs=5.1e-7)


@pytest.mark.parametrize("sampled", [None, (0.007, 0.002), (0.02, 0.001)], ids=["few", "unsure", "not the exact one"])
def test_proposition_says_when_the_sample_does_not_show_it(monkeypatch, sampled):
    if sampled:
        monkeypatch.setattr(attention, "paired", lambda *arguments: sampled)
    claim = attention.proposition(attention.counterexample(), settings.load("A1d"), lengths=(4,), sequences=1000)
    assert claim.holds is False
    assert claim.verdict.endswith("the sample does not show it.")


def test_proposition_holds_where_one_preconditioner_is_best_for_all():
    mix = two_tasks([-1.0, 1.0], [1.0, 1.0])
    claim = attention.proposition(mix, settings.load("2c"), lengths=(4,), sequences=1000)
    assert claim.holds is True
    assert claim.verdict == "L_PGD is the infimum: it equals the lower bound."


def test_proposition_is_not_decided_where_nothing_was_found(monkeypatch):
    def nothing(mix, n, near, **options):
        return minima.Minimum(near.loss, near.attention(), 0.0)

    monkeypatch.setattr(attention, "minimum", nothing)
    claim = attention.proposition(attention.counterexample(), settings.load("2c"), lengths=(4,), sequences=1000)
    assert claim.holds is None
    assert claim.verdict.startswith("Not decided: nothing below L_PGD was found")


def test_pieces_of_a_sample_are_the_sample(monkeypatch):
    mix = attention.counterexample()
    pair = [theory.decoupled(mix, 4).attention(), theory.joint(mix, 4).attention()]
    whole = attention.paired(mix, 4, *pair, sequences=1000, seed=1)
    z, q, y, task = mix.sample(1000, 4, seed=1, stream=5, dtype=torch.float64)
    G = z.mT @ z
    errors = [
        (torch.einsum("bi,ij,bj->b", q, W, ((G + (p.mT @ p)[task]) @ v[task][..., None])[..., 0]) - y).square()
        for p, W, v in pair
    ]
    difference = errors[0] - errors[1]
    assert whole == pytest.approx((float(difference.mean()), float(difference.std()) / 1000**0.5), rel=1e-10)
    monkeypatch.setattr(attention, "_PIECE", 300)
    assert attention.paired(mix, 4, *pair, sequences=1000, seed=1) == pytest.approx(whole, rel=1e-12)


def test_tokens_make_what_they_are_asked_for():
    generator = torch.Generator().manual_seed(0)
    A, v, c = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (2, 4), (2, 3)))
    p = minima.tokens(A, v, c)
    assert p.shape == (2, 1, 4)
    made = torch.einsum("dm,ktm,ktl,kl->kd", A, p, p, v)
    assert float((made - c).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("excess", "holds", "verdict"),
    [
        (1e-3, True, "Training reaches the bound."),
        (0.19, None, "Not decided: these runs do not come within 0.5 % of the bound."),
        (-1e-6, False, "Training gets below the bound."),
    ],
)
def test_bound_reached(golden, excess, holds, verdict):
    claim = attention.bound_reached([settings.load("2a"), settings.load("2d")], Oracle(excess))
    assert (claim.holds, claim.verdict) == (holds, verdict)
    (risk, bound), *_ = [(number.value, number.expected) for number in claim.numbers]
    assert bound == pytest.approx(golden["PB"]["fig2a"]["n"]["50"]["L_PGD"], rel=1e-9)
    assert risk == pytest.approx(bound * (1 + excess))
    theirs = [number.value for number in claim.numbers if "authors" in number.quantity]
    assert theirs == [19, 32, 63]
    assert "do not name" in claim.finding


def test_cells_that_have_ended_are_read(cells, monkeypatch):
    setting = settings.load("2a")
    first = attention.bound_reached([setting], cells)
    assert visible(cells.out) == ["figure-2-a-joint+heads-n50"]
    kept = contents(cells.out)
    monkeypatch.setattr("fastlin.training.loop.Loop.run", lambda self: pytest.fail("trained again"))
    assert attention.bound_reached([setting], cells) == first
    assert contents(cells.out) == kept
    assert "best of 2 trials, 20 steps of 64 sequences" in first.finding
