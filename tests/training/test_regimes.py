"""Regimes: what each row trains and what it freezes, on every model, and rows of the user."""

import functools
import itertools
import re

import pytest
import torch
from support import training_configs
from support.op_cases import DOUBLE, assert_close
from support.training_configs import N, recording, trace

import fastlin as fl
from fastlin.training.regimes import REGIMES, Phase, Regime, Term, named
from fastlin.training.start import initial_model

EYE = torch.eye(3, dtype=DOUBLE)
MIX = fl.TaskMixture([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], torch.stack([EYE, 2 * EYE]), [0.4, 0.6], noise_std=0.3)
TARGET = fl.TaskMixture([[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]], torch.stack([EYE, EYE]), [0.5, 0.5])
OF_GROUP = {
    "reduced": {"attention": {"W"}, "heads": {"v"}, "prompts": {"p"}},
    "full": {"attention": {"W"}, "heads": {"v"}, "prompts": {"p"}},
    "separate": {"attention": {"Wq", "Wk", "Wv"}, "heads": {"h"}, "prompts": {"p"}},
    "stack": {"attention": {"A", "C"}, "heads": {"h"}, "prompts": {"p"}},
    "softmax": {"attention": {"W"}, "heads": {"v"}, "prompts": {"p"}},
}
# What trains in each phase; whether tasks have their own heads.
TABLE = {
    "plain": ([{"attention", "heads"}], False),
    "fine-tune": ([{"attention", "heads"}, {"prompts"}], False),
    "one-prompt": ([{"attention", "heads", "prompts"}], False),
    "joint": ([{"attention", "heads", "prompts"}], False),
    "joint+heads": ([{"attention", "heads", "prompts"}], True),
    "heads": ([{"attention", "heads"}], True),
}

config_of = functools.partial(training_configs.config_of, mix=MIX, preset="tuned", batch=64)


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_the_table():
    assert {name for name, row in REGIMES.items() if row.study == "prompts"} == set(TABLE)
    for name, (phases, task_heads) in TABLE.items():
        row = REGIMES[name]
        assert [set(phase.trains) for phase in row.phases] == phases
        assert [phase.prompts for phase in row.phases] == ["prompts" in trained for trained in phases]
        assert row.task_heads == task_heads
        assert row.task_prompts == (name != "one-prompt")
        assert all(phase.objective == (Term(),) for phase in row.phases)


@pytest.mark.parametrize("preset", ["tuned", "authors"])
@pytest.mark.parametrize("regime", TABLE)
@pytest.mark.parametrize(
    ("model", "layers", "heads"),
    [
        *(("reduced", 1, 1), ("full", 1, 1), ("full", 1, 2), ("separate", 1, 2), ("stack", 1, 1), ("stack", 3, 2)),
        *(("softmax", 1, 1), ("softmax", 1, 2)),
    ],
)
def test_parameters_change_where_the_row_says(regime, model, layers, heads, preset):
    # The average replaces iterates at the end of a phase.
    loop, seen = trace(config_of(regime, model=model, layers=layers, heads=heads, preset=preset))
    phases, task_heads = TABLE[regime]
    steps, names = 6 // len(phases), set(seen[0])
    for i, groups in enumerate(phases):
        wanted = set().union(*(OF_GROUP[model][group] for group in groups)) & names
        if preset == "authors" and not task_heads and model in ("separate", "stack"):
            # The published code has e_m for all tasks, and trains value matrices.
            wanted -= {"h"}
        rows = seen[i * steps : (i + 1) * steps + 1]
        for before, after in itertools.pairwise(rows):
            assert changed(before, after) <= wanted
        assert changed(rows[0], rows[-1]) == wanted
        # Every trial moves.
        for name in wanted:
            moved = (rows[-1][name] != rows[0][name]).flatten(1)
            assert moved.any(1).all(), name
    assert [record["phase"] for record in loop.records] == [i for i in range(len(phases)) for _ in range(steps)]
    assert loop.model.shape.task_heads == task_heads
    assert seen[-1]["p"].shape[1] == (1 if regime == "one-prompt" else 2)
    if task_heads:
        name = "h" if model in ("separate", "stack") else "v"
        assert seen[-1][name].shape[-2:] == (2, 4)
        assert not torch.allclose(seen[-1][name][..., 0, :], seen[-1][name][..., 1, :])


@pytest.mark.parametrize("regime", TABLE)
def test_runs_give_prompts_where_the_last_phase_has_them(regime):
    run = fl.train(MIX, regime, N, steps=2, batch=64, trials=2)
    assert (run.params["p"] is None) == (regime in ("plain", "heads"))
    assert torch.equal(run.params["v"][:, 0], run.params["v"][:, 1]) == (not TABLE[regime][1])
    if run.params["p"] is not None:
        assert run.params["p"].shape == (2, 2, 1, 4)
        assert torch.equal(run.params["p"][:, 0], run.params["p"][:, 1]) == (regime == "one-prompt")
    assert Regime.restore(run.config["regime"]) == REGIMES[regime]


def test_one_prompt_in_phases():
    """Tasks that share a prompt may fine-tune it, but not one task after the other."""
    rows = REGIMES["fine-tune"].phases
    tuned = Regime("own", rows, task_prompts=False)
    _, seen = trace(config_of(tuned))
    assert seen[-1]["p"].shape == (2, 1, 1, 4)
    assert changed(seen[3], seen[-1]) == {"p"}
    for options in ({"preset": "authors"}, {"prompts_in_turn": True}):
        message = "prompts_in_turn: got True for regime 'own', whose 2 tasks share one prompt; wants False"
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            config_of(tuned, **options)
    single = fl.TaskMixture(MIX.means[:1], MIX.covariances[:1], [1.0])
    ends = [trace(config_of(row, mix=single, preset="authors"))[1][-1] for row in (tuned, "fine-tune")]
    assert torch.equal(ends[0]["p"], ends[1]["p"])


def test_phases_share_the_steps_and_start_anew():
    """An odd step goes to the last phase; each phase has its own schedule."""
    loop, _ = trace(
        config_of("fine-tune", preset="paper", steps=7, schedule="linear", lr=1e-4, optimiser="SGD", average=0.0)
    )
    assert [record["phase"] for record in loop.records] == [0, 0, 0, 1, 1, 1, 1]
    assert [record["lr"] for record in loop.records] == pytest.approx(
        [1e-4 * share for share in (1.0, 2 / 3, 1 / 3, 1.0, 0.75, 0.5, 0.25)]
    )


def test_phases_of_the_same_kind_are_told_apart():
    again = Phase(("attention", "heads"), prompts=False)
    loop, _ = trace(config_of(Regime("twice", (again, again))))
    assert [record["phase"] for record in loop.records] == [0, 0, 0, 1, 1, 1]


ZERO_SHOT = Term(shots=0, weight=(0.25, 1.0), source="target")
FEW_SHOT = Term(weight=(1.0, 0.0))
MIXED = Regime("mixed", (Phase(("attention", "prompts"), prompts=True, objective=(ZERO_SHOT, FEW_SHOT)),))


@pytest.mark.parametrize("units", ["literal", "data"])
def test_a_mixed_objective_is_the_weighted_sum(units):
    """Gradients of the first two steps against those of the terms alone; weights move between the steps."""
    grads = []
    config = config_of(
        MIXED, target=TARGET, optimiser=recording(grads), schedule="constant", clip=None, average=0.0, units=units
    )
    loop, seen = trace(config)
    assert len(grads) == 6
    model = initial_model(config)
    for step, share in ((0, 0.0), (1, 1 / 6), (5, 5 / 6)):
        with torch.no_grad():
            for name, raw in model.named_parameters():
                raw.copy_(seen[step][name])
        at = {"seed": 3, "step": step}
        zero = model.loss(TARGET, 0, 64, **at, stream=0)[0]
        few = model.loss(MIX, N, 64, **at, stream=1)[0]
        total = ((0.25 + 0.75 * share) * zero + (1.0 - share) * few).sum() / model.loss_unit
        wanted = torch.autograd.grad(total, [model.W, model.p])
        assert_close(grads[step], list(wanted), 1e-10)
        mean = ((0.25 + 0.75 * share) * zero + (1.0 - share) * few).detach()
        assert_close(torch.tensor(loop.records[step]["loss"], dtype=DOUBLE), mean, 1e-10)
    assert not (grads[0][0] == 0).all()


def test_a_weight_of_zero_takes_a_term_out():
    silent = Regime("x", (Phase(("attention",), False, (Term(weight=(0.0, 0.0), source="target"), Term())),))
    alone = Regime("y", (Phase(("attention",), False, (Term(shots=2, weight=(0.0, 0.0)), Term())),))
    ends = [trace(config_of(row, target=target))[1][-1] for row, target in ((silent, TARGET), (alone, None))]
    assert torch.equal(ends[0]["W"], ends[1]["W"])


def test_terms_have_their_own_draws():
    """The same term twice is twice the data, not twice the gradient."""
    grads = []
    twice = Regime("x", (Phase(("attention",), False, (Term(weight=(0.5, 0.5)), Term(weight=(0.5, 0.5)))),))
    config = config_of(twice, optimiser=recording(grads), clip=None, schedule="constant", average=0.0)
    trace(config)
    model = initial_model(config)
    parts = [model.loss(MIX, N, 64, seed=3, step=0, stream=stream, prompts=False)[0] for stream in (0, 1)]
    one, two = (torch.autograd.grad(part.sum() / model.loss_unit, model.W)[0] for part in parts)
    assert not torch.allclose(one, two)
    assert_close(grads[0][0], 0.5 * (one + two), 1e-10)


def test_a_users_regime_trains():
    run = fl.train(MIX, MIXED, N, target=TARGET, steps=4, batch=64, trials=2)
    assert run.theory is None
    assert run.excess is None
    assert run.config["regime"]["name"] == "mixed"
    assert set(run.config["sources"]) == {"mix", "target"}
    assert torch.isfinite(run.risk).all()


def phase(**changes):
    return Phase(**{"trains": ("attention",), "prompts": False, **changes})


def row(*phases):
    return Regime("own", phases)


WRONG = [
    (3, TypeError, f"regime: got 3, wants one of {', '.join(REGIMES)} or a Regime"),
    ("joined", ValueError, "regime: got 'joined' (did you mean joint?), wants one of plain, "),
    (row(), ValueError, "regime: has no phases, wants at least one"),
    (row(phase(trains=())), ValueError, "regime.phases[0].trains: got (), wants one or more different names"),
    (row(phase(), phase(objective=())), ValueError, "regime.phases[1].objective: has no terms, wants one or more"),
    (
        row(phase(), phase(trains=("attention", "prompt"))),
        ValueError,
        "regime.phases[1].trains: got 'prompt' (did you mean prompts?), wants one of attention, heads, prompts",
    ),
    (row(phase(trains=("prompts",))), ValueError, "regime.phases[0]: trains prompts that it does not prepend"),
    (
        row(phase(objective=(Term(source="goal"),))),
        ValueError,
        "regime.phases[0].objective[0].source: got 'goal', wants one of mix, target",
    ),
    (row(phase(objective=(Term(shots=-1),))), ValueError, "regime.phases[0].objective"),
    (row(phase(objective=(Term(shots=1.5),))), (ValueError, TypeError), "regime.phases[0].objective"),
    (row(phase(objective=(Term(weight=(1.0,)),))), (ValueError, TypeError), "regime.phases[0].objective"),
    (row(phase(objective=(Term(weight=1.0),))), (ValueError, TypeError), "regime.phases[0].objective"),
    (row(phase(objective=(Term(weight=(1.0, float("nan"))),))), ValueError, "regime.phases[0].objective"),
    (row("plain"), TypeError, "regime.phases[0]"),
    (row(phase(objective=("mix",))), TypeError, "regime.phases[0].objective"),
    (row(phase(trains=("attention", "attention"))), ValueError, "regime.phases[0].trains"),
    (row(phase(objective=(Term(source="target"),))), ValueError, "target: got None, wants a task source"),
]


@pytest.mark.parametrize(("regime", "error", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_rows(regime, error, message, tmp_path):
    with pytest.raises(error, match="^" + re.escape(message)):
        fl.train(MIX, regime, N, steps=2, batch=16, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_row_that_trains_what_the_model_does_not_have(tmp_path):
    with pytest.raises(ValueError, match=re.escape("regime.phases[0]")):
        fl.train(MIX, row(phase(trains=("heads",))), N, model="reduced", steps=2, batch=16, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_for_every_phase():
    with pytest.raises(ValueError, match=r"^steps: got 1, wants 2 to .*: one or more for each phase"):
        fl.train(MIX, "fine-tune", N, steps=1, batch=16)


def test_rows_by_name_and_as_given():
    assert named("joint") is REGIMES["joint"]
    assert named(MIXED) is MIXED
    assert MIXED.prompts
    assert MIXED.describe()["phases"][0]["objective"][0] == {"shots": 0, "weight": (0.25, 1.0), "source": "target"}
    assert ZERO_SHOT.weight_at(0.5) == 0.625
