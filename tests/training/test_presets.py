"""Presets: their values, and arguments that override them."""

import dataclasses

import pytest
import torch
from support.op_cases import DOUBLE
from support.training_configs import ALTERNATIVES, KINDS, config_of, trace

import fastlin as fl
from fastlin.training.config import RunConfig
from fastlin.training.loop import Loop
from fastlin.training.optimiser import OPTIMISERS
from fastlin.training.presets import PRESETS
from fastlin.training.start import initial_model

TEN = fl.TaskMixture(torch.ones(2, 10), torch.eye(10).expand(2, 10, 10), [0.5, 0.5])


def resolved(preset, model, **given):
    """The config of a run on ten features."""
    return RunConfig.resolve(TEN, "joint", 5, preset=preset, model=model, **given)


@pytest.mark.parametrize("model", KINDS)
def test_paper(model):
    paper = resolved("paper", model)
    assert (paper.steps, paper.batch, paper.lr) == (20_000, 8192, 1e-3)
    assert OPTIMISERS[paper.optimiser.lower()] is torch.optim.Adam
    assert (paper.weight_decay, paper.schedule, paper.clip, paper.average) == (0.0, "constant", None, 0.0)
    assert (paper.batch_per_task, paper.prompts_in_turn, paper.see_query) == (False, False, False)
    assert (paper.units, paper.number("scale"), paper.residual) == ("literal", 1.0, 1.0)


@pytest.mark.parametrize("model", KINDS)
def test_authors(model):
    authors = resolved("authors", model)
    assert (authors.steps, authors.batch, authors.batch_per_task) == (100_000, 3072, True)
    assert (authors.lr, authors.weight_decay, authors.prompts_in_turn) == (1e-3, 1e-3, True)
    assert OPTIMISERS[authors.optimiser.lower()] is torch.optim.Adam
    assert (authors.units, authors.schedule, authors.clip, authors.average) == ("literal", "constant", None, 0.0)
    assert authors.number("scale") == pytest.approx(1.0 if model == "reduced" else 11**-0.5)
    assert authors.residual == (2.0 if model == "stack" else 1.0)
    assert authors.see_query == (model == "stack")
    if model == "reduced":
        sizes = [authors.number(f"start_{name}") for name in ("attention", "prompts")]
        assert (authors.start, sizes) == ("normal", [0.1, 0.1])
    else:
        # That of torch.nn.Linear(d+1, ...): uniform within 1 / sqrt(d+1), over d+1 in a stack.
        bound = 11 ** (-1.5 if model == "stack" else -0.5)
        assert authors.start == "uniform"
        # Merged, the entries of Wq Wk' have the variance 11 (bound^2 / 3)^2, which is that of a uniform one within:
        merged = (3 * 11 * (bound**2 / 3) ** 2) ** 0.5
        assert authors.number("start_attention") == pytest.approx(bound if model == "separate" else merged)
        assert authors.number("start_values") == pytest.approx(bound)
        assert authors.number("start_heads") == pytest.approx(11**-0.5)
    assert authors.fixed_head
    assert authors.trainable_entry == (model == "reduced")


@pytest.mark.parametrize("model", KINDS)
def test_authors_steps_are_shared_by_the_phases(model):
    config = config_of("fine-tune", model=model, preset="authors", steps=None)
    loop = Loop(config)
    assert loop._ends == [50_000, 100_000]


@pytest.mark.parametrize("model", ["full", "separate", "stack"])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_authors_prompts_start_standard_normal(model, preset):
    """REFERENCES.md: prompts N(0, 1), beside matrices that are uniform."""
    p = initial_model(config_of(model=model, preset=preset, trials=2000)).p.detach()
    assert float(p.std()) == pytest.approx(1.0, rel=0.03)
    assert float(p.abs().max()) > 2.0
    kurtosis = float(p.pow(4).mean() / p.square().mean() ** 2)
    assert kurtosis == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("model", KINDS)
def test_paper_starts_as_the_authors(model):
    """The paper does not state its initialisation."""
    paper, authors = (resolved(preset, model) for preset in ("paper", "authors"))
    for name in ("start", "start_attention", "start_values", "start_heads", "start_prompts", "start_readout"):
        assert getattr(paper, name) == getattr(authors, name), name


@pytest.mark.parametrize("model", KINDS)
def test_tuned_learns_in_the_units_of_the_data(model):
    tuned = resolved("tuned", model)
    assert (tuned.units, tuned.trainable_entry, tuned.schedule) == ("data", True, "one-cycle")
    assert tuned.clip is not None
    assert tuned.average > 0.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("regime", ["fine-tune", "joint+heads"])
def test_presets_train(preset, model, dtype, regime):
    config = config_of(regime, model=model, preset=preset, dtype=dtype)
    loop, seen = trace(config)
    assert loop.step == 6
    assert loop.diverged == {}
    assert not torch.equal(seen[0]["p"], seen[-1]["p"])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("optimiser", ["SGD", "RMSprop", torch.optim.SGD])
def test_another_optimiser_is_not_told_the_presets_options(preset, optimiser):
    loop, seen = trace(config_of("joint", preset=preset, optimiser=optimiser, lr=1e-4))
    assert loop.step == 6
    assert not torch.equal(seen[0]["W"], seen[-1]["W"])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", KINDS)
def test_given_values_are_in_place_of_the_presets(preset, model):
    base = resolved(preset, model)
    assert resolved(preset, model, steps=None, lr=None, residual=None).describe() == base.describe()
    for name, value in ALTERNATIVES.items():
        if (name, model) == ("shot_scale", "softmax"):
            continue  # refused
        found = resolved(preset, model, **{name: value})
        assert getattr(found, name) == {**base.optimiser_options, **value} if name == "optimiser_options" else value
        # Another optimiser does not get the preset's options.
        also = {"optimiser_options": base.optimiser_options} if name == "optimiser" else {}
        changed = dataclasses.replace(found, **{name: getattr(base, name)}, **also)
        assert changed.describe() == base.describe()
    # None is a value of clip.
    assert resolved("tuned", model, clip=None).clip is None
