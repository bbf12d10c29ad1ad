"""Fields of a protocol: each has its effect, and a wrong value raises an error that names the field."""

import dataclasses
import itertools
import json
import math
import re

import pytest
import torch
from support.op_cases import DOUBLE, assert_close
from support.training_configs import ALTERNATIVES, KINDS, MIX, N, config_of, recording, trace, with_values

import fastlin as fl
from fastlin.training.config import RunConfig
from fastlin.training.optimiser import SCHEDULES, make_optimiser, multiplier
from fastlin.training.regimes import Phase, Regime
from fastlin.training.start import initial_model

BIASED = fl.SphereTasks(3, noise_std=0.3, bias=True)
# Other arguments under which a field has an effect.
WHERE = {
    "prompts_in_turn": {"regime": "fine-tune"},
    "residual": {"model": "stack", "layers": 2},
    "trainable_entry": {"model": "reduced"},
    "fixed_head": {"model": "separate"},
    "start_values": {"model": "stack"},
    "heads_averaged": {"attention_heads": 2},
    "points": {"regime": "zs:v", "mix": BIASED, "target": fl.FixedTask([1.0, 0.0, 2.0], noise_std=0.3, bias=True)},
}


def test_every_field_is_covered():
    names = [field.name for field in dataclasses.fields(RunConfig)]
    assert list(ALTERNATIVES) == names[names.index("steps") : names.index("dtype")]


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_changing_a_value_changes_the_run(name):
    where = {"regime": "joint", "mix": MIX, **WHERE.get(name, {})}
    regime, mix = where.pop("regime"), where.pop("mix")
    if name == "points":
        where[name] = None
    given = {"steps": 6, "batch": 60, "preset": "paper", "trials": 2, "dtype": DOUBLE, "seed": 3, **where}
    base = fl.train(mix, regime, N, **given)
    again = fl.train(mix, regime, N, **given)
    other = fl.train(mix, regime, N, **{**given, name: ALTERNATIVES[name]})
    forms = {letter: form for letter, form in base.params.items() if form is not None}
    for letter, form in forms.items():
        assert torch.equal(form, again.params[letter])
    assert any(not torch.equal(form, other.params[letter]) for letter, form in forms.items())
    assert not torch.equal(base.risk, other.risk)
    stated = other.config[name]
    assert stated == json.loads(json.dumps(ALTERNATIVES[name]))
    assert {key for key in base.config if base.config[key] != other.config[key]} == {name}


def test_a_step_of_named_descent_by_hand():
    """Learning rate, weight decay and options of a named optimiser."""
    config = config_of(optimiser="sgd", lr=1e-3, weight_decay=0.25, optimiser_options={"momentum": 0.5})
    _, seen = trace(config)
    velocity = None
    for step in range(3):
        model = with_values(config, seen[step])
        loss, _ = model.loss(MIX, N, 60, seed=3, step=step)
        raws = list(model.parameters())
        grads = [g + 0.25 * raw for g, raw in zip(torch.autograd.grad(loss.sum(), raws), raws, strict=True)]
        velocity = grads if velocity is None else [0.5 * v + g for v, g in zip(velocity, grads, strict=True)]
        wanted = [raw - 1e-3 * v for raw, v in zip(raws, velocity, strict=True)]
        assert_close(list(seen[step + 1].values()), wanted, 1e-11)


@pytest.mark.parametrize("name", ["Adam", "ADAMW", "rmsprop", "NAdam", "sgd", "Adagrad", "LBFGS"])
def test_optimisers_by_name(name):
    config = config_of(optimiser=name, lr=1e-4, trials=1 if name == "LBFGS" else 2)
    loop, seen = trace(config)
    kind = {known.lower(): known for known in dir(torch.optim)}[name.lower()]
    made = make_optimiser(config, [torch.nn.Parameter(torch.zeros(2, 2))])
    assert type(made).__name__ == kind
    assert made.param_groups[0]["lr"] == 1e-4
    assert not torch.equal(seen[0]["W"], seen[-1]["W"])
    assert loop.step == 6


def test_adam_is_that_of_torch():
    config = config_of(optimiser_options={"betas": (0.8, 0.95), "eps": 1e-6}, lr=0.01, weight_decay=0.1)
    _, seen = trace(config)
    model = initial_model(config)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(6):
        optimiser.zero_grad()
        model.loss(MIX, N, 60, seed=3, step=step)[0].sum().backward()
        optimiser.step()
    for name, raw in model.named_parameters():
        assert_close(seen[-1][name], raw.detach(), 1e-9)


def test_an_optimiser_of_ones_own_with_a_schedule():
    made = []

    def make(parameters):
        groups = [{"params": parameters[:1], "lr": 1e-3}, {"params": parameters[1:], "lr": 1e-5}]
        made.append(torch.optim.SGD(groups))
        return made[-1]

    rates = []

    def schedule(share):
        if made:
            rates.append([group["lr"] for group in made[-1].param_groups])
        return 1.0 - share

    for name, value in {"lr": 5.0, "weight_decay": 0.1, "optimiser_options": {}}.items():
        with pytest.raises(
            ValueError, match=rf"^{name}: got .* beside a function that makes the optimiser, wants None"
        ):
            config_of(optimiser=make, **{name: value})
    _, seen = trace(config_of(optimiser=make, schedule=schedule))
    assert len(made) == 1
    assert [rate for rate, _ in rates[1:]] == pytest.approx([1e-3 * (1 - i / 6) for i in range(5)])
    assert [rate for _, rate in rates[1:]] == pytest.approx([1e-5 * (1 - i / 6) for i in range(5)])
    assert not torch.equal(seen[0]["p"], seen[1]["p"])


@pytest.mark.parametrize("name", [*SCHEDULES, "own"])
def test_schedules(name):
    given = (lambda share: 0.5 + share) if name == "own" else name
    config = config_of(schedule=given)
    shares = [i / 100 for i in range(101)]
    found = [multiplier(config, share) for share in shares]
    if name == "own":
        assert found == [0.5 + share for share in shares]
    elif name == "constant":
        assert found == [1.0] * 101
    elif name == "linear":
        assert found == pytest.approx([1.0 - share for share in shares])
    elif name == "cosine":
        assert found == pytest.approx([0.5 * (1 + math.cos(math.pi * share)) for share in shares])
    else:
        assert found[0] == pytest.approx(0.04)
        assert found[30] == max(found) == pytest.approx(1.0)
        assert found[100] == pytest.approx(0.0)
        assert found[:31] == sorted(found[:31])
        assert found[30:] == sorted(found[30:], reverse=True)
        assert max(abs(a - b) for a, b in itertools.pairwise(found)) < 0.06
    loop, _ = trace(config_of(schedule=given, lr=1e-3, steps=10))
    assert [record["lr"] for record in loop.records] == pytest.approx(
        [1e-3 * multiplier(config, i / 10) for i in range(10)]
    )


@pytest.mark.parametrize("model", ["reduced", "full", "separate", "stack"])
@pytest.mark.parametrize("scale", [0.25, "1/sqrt(d+1)", "1/(d+1)^1.5"])
def test_scale_is_a_factor_of_the_scores(model, scale):
    number = {"1/sqrt(d+1)": 0.5, "1/(d+1)^1.5": 0.125}.get(scale, scale)
    one, scaled = (initial_model(config_of(model=model, scale=value)) for value in (1.0, scale))
    letter = "A" if model == "stack" else "W"
    assert_close(scaled.forms()[letter], number * one.forms()[letter], 1e-15)
    forms = one.forms()
    op = fl.reference.sampled_stack_loss if model == "stack" else fl.reference.sampled_loss
    wanted, _ = op(MIX, N, 30, **forms, seed=1, step=2, scale=number)
    assert_close(scaled.loss(MIX, N, 30, seed=1, step=2)[0], wanted)


@pytest.mark.parametrize(("model", "layers"), [("reduced", 1), ("full", 1), ("stack", 1), ("stack", 3)])
def test_see_query_and_residual_reach_the_op(model, layers):
    model = initial_model(config_of(model=model, layers=layers, see_query=True, residual=2.0))
    forms = model.forms()
    if model.name == "stack":
        wanted, _ = fl.reference.sampled_stack_loss(MIX, N, 30, **forms, seed=1, step=2, see_query=True, residual=2.0)
    else:
        wanted, _ = fl.reference.sampled_loss(MIX, N, 30, **forms, seed=1, step=2, see_query=True)
    assert_close(model.loss(MIX, N, 30, seed=1, step=2)[0], wanted)


def test_a_batch_for_each_task():
    """Each task has `batch` sequences, and its loss the task's weight."""
    grads = []
    config = config_of(batch_per_task=True, optimiser=recording(grads))
    loop, seen = trace(config)
    equal = fl.TaskMixture(MIX.means, MIX.covariances, [0.5, 0.5], MIX.noise_std, stratify=True)
    for step in (0, 5):
        model = with_values(config, seen[step])
        data = equal.sample_gram(120, N, seed=3, step=step, dtype=DOUBLE)
        assert data[3].bincount().tolist() == [60, 60]
        total = torch.zeros(2, dtype=DOUBLE)
        for k, weight in enumerate((0.3, 0.7)):
            of_task = [part[data[3] == k] for part in data]
            total = total + weight * fl.gram_loss(*of_task, **model.forms())[0]
        assert_close(grads[step], list(torch.autograd.grad(total.sum(), [model.W, model.v, model.p])), 1e-10)
        assert_close(torch.tensor(loop.records[step]["loss"], dtype=DOUBLE), total.detach(), 1e-11)


@pytest.mark.parametrize("batch_per_task", [True, False])
def test_prompts_in_turn(batch_per_task):
    """A step of the second phase updates one task at a time: the prompts of other tasks have no gradient."""
    grads = []
    config = config_of(
        "fine-tune", prompts_in_turn=True, batch_per_task=batch_per_task, optimiser=recording(grads), steps=8
    )
    _, seen = trace(config)
    assert [len(grad) for grad in grads] == [2] * 4 + [1] * 8
    turns = [[bool((grad[0][:, k] != 0).any()) for k in range(2)] for grad in grads[4:]]
    assert turns == [[True, False], [False, True]] * 4
    # With as many sequences of that task as a step has, and its loss unweighted.
    for k in range(2):
        model = with_values(config, seen[4])
        only = fl.TaskMixture(MIX.means, MIX.covariances, [1.0 - k, float(k)], MIX.noise_std)
        loss, _ = model.loss(only, N, 60, seed=3, step=4)
        # Plain descent has moved only the prompts of the other task, on which this loss does not depend.
        assert_close(grads[4 + k], list(torch.autograd.grad(loss.sum(), [model.p])), 1e-10)


def test_prompts_in_turn_leaves_joint_training_alone():
    grads = []
    trace(config_of("joint", prompts_in_turn=True, optimiser=recording(grads)))
    assert all((grad[2][:, k] != 0).any() for grad in grads for k in range(2))


@pytest.mark.parametrize("values", [{"batch_per_task": True}, {"prompts_in_turn": True}])
def test_tasks_of_a_users_own_keep_their_way_of_drawing(values):
    """A subclass that draws its own weights keeps doing so, task by task."""

    class Doubled(fl.TaskMixture):
        def _beta(self, place, task):
            return 2.0 * super()._beta(place, task)

    grads, prompts = {}, Regime("prompts", (Phase(("prompts",), prompts=True),))
    for kind in (fl.TaskMixture, Doubled):
        store = grads[kind] = []
        mix = kind(MIX.means, MIX.covariances, MIX.weights, MIX.noise_std)
        trace(config_of(prompts, mix=mix, optimiser=recording(store), **values))
    assert not torch.equal(grads[Doubled][0][0], grads[fl.TaskMixture][0][0])


def test_own_data():
    """Trial r draws from its own stream; the first has the data that all share otherwise."""
    grads, shared = [], []
    config = config_of(own_data=True, optimiser=recording(grads), trials=3)
    trace(config)
    trace(config_of(optimiser=recording(shared), trials=3))
    model = initial_model(config)
    for r in range(3):
        loss, _ = model.loss(MIX, N, 60, seed=3, step=0, stream=r)
        wanted = torch.autograd.grad(loss[r], model.W)[0]
        assert_close(grads[0][0][r], wanted[r], 1e-10)
    assert_close(grads[0][0][0], shared[0][0][0], 1e-12)
    assert not torch.allclose(grads[0][0][1], shared[0][0][1])


def test_clip_shortens_each_trials_gradient():
    free, clipped = [], []
    model = initial_model(config_of(trials=3))
    loss, _ = model.loss(MIX, N, 60, seed=3, step=0)
    grads = torch.autograd.grad(loss.sum(), [model.W, model.v, model.p])
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
    limit = float(norms.median())
    assert (norms > 1.05 * limit).sum() == 1
    trace(config_of(trials=3, optimiser=recording(free)))
    trace(config_of(trials=3, optimiser=recording(clipped), clip=limit))
    assert_close(free[0], list(grads), 1e-10)
    factors = (limit / norms).clamp(max=1.0)
    for found, grad in zip(clipped[0], grads, strict=True):
        assert_close(found, factors.view(-1, *[1] * (grad.ndim - 1)) * grad, 1e-10)
    found = torch.stack([grad.flatten(1).norm(dim=1) for grad in clipped[0]]).norm(dim=0)
    assert float(found.max()) == pytest.approx(limit)
    assert float(found.min()) == pytest.approx(float(norms.min()))


@pytest.mark.parametrize(("share", "of"), [(0.0, 1), (0.2, 2), (0.25, 2), (0.5, 5), (0.7, 7), (1.0, 10)])
def test_average_is_the_mean_of_the_last_iterates(share, of):
    """The average covers the steps that begin in the last part of the phase, and leaves the iterates unchanged."""
    given = {"steps": 10, "lr": 0.01}
    _, iterates = trace(config_of(**given))
    _, averaged = trace(config_of(**given, average=share))
    for name, last in averaged[-1].items():
        mean = torch.stack([seen[name] for seen in iterates[-of:]]).mean(0)
        assert_close(last, mean, 1e-12)
    for before, after in zip(iterates[1:-1], averaged[1:-1], strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_average_ends_each_phase():
    """The second phase starts from the average of the first."""
    given = {"steps": 8, "lr": 0.01}
    _, iterates = trace(config_of("plain", steps=4, lr=0.01))
    _, averaged = trace(config_of("fine-tune", **given, average=0.5))
    mean = torch.stack([seen["W"] for seen in iterates[3:5]]).mean(0)
    assert_close(averaged[4]["W"], mean, 1e-12)
    assert all(torch.equal(seen["W"], averaged[4]["W"]) for seen in averaged[4:])


@pytest.mark.parametrize("model", KINDS)
def test_start_values_reach_the_model(model):
    sizes = {"start_attention": 0.2, "start_values": 0.6, "start_heads": 0.4, "start_prompts": 0.8}
    both = {"start": "uniform", "start_prompts_as": "uniform"}
    uniform = initial_model(config_of("joint+heads", model=model, trials=500, **both, **sizes))
    expected = {"Wv": 0.6, "C": 0.6, "v": 0.4, "h": 0.4, "p": 0.8}
    for name, raw in uniform.named_parameters():
        size = expected.get(name, 0.2)
        assert 0.98 * size < float(raw.detach().abs().max()) <= size
    both = {"start": "normal", "start_prompts_as": "normal"}
    normal = initial_model(config_of("joint+heads", model=model, trials=500, **both, **sizes, start_readout=3.0))
    for name, raw in normal.named_parameters():
        size, values = expected.get(name, 0.2), raw.detach()
        assert float((values - values.mean(0)).std()) == pytest.approx(size, rel=0.05)
    assert float(normal.group("heads")[0].detach()[..., -1].mean()) == pytest.approx(3.0, abs=0.1)


def test_start_sizes_of_the_number_of_features():
    model = initial_model(config_of(trials=500, start_attention="1/(d+1)^1.5", start_heads="1/sqrt(d+1)"))
    assert 0.12 < float(model.W.detach().abs().max()) <= 0.125
    assert 0.49 < float(model.v.detach().abs().max()) <= 0.5


def test_units_of_the_data_reach_the_model():
    assert initial_model(config_of(units="data")).loss_unit == pytest.approx(fl.theory.normaliser(MIX), rel=0.05)
    assert initial_model(config_of(units="literal")).loss_unit == 1.0


NAMES = ", ".join(field.name for field in dataclasses.fields(RunConfig)[3:])
WRONG = [
    ({"steps": 0}, ValueError, "steps: got 0, wants an integer >= 1"),
    ({"steps": 2.0}, ValueError, "steps: got 2.0, wants an integer >= 1"),
    ({"steps": True}, ValueError, "steps: got True, wants an integer >= 1"),
    ({"steps": 1 << 24}, ValueError, "steps: got 16777216, wants 1 to 16777215"),
    ({"batch": -1}, ValueError, "batch: got -1, wants an integer >= 1"),
    ({"batch": "8"}, ValueError, "batch: got '8', wants an integer >= 1"),
    ({"lr": -0.1}, ValueError, "lr: got -0.1, wants a finite number >= 0"),
    ({"lr": math.inf}, ValueError, "lr: got inf, wants a finite number >= 0"),
    ({"lr": "fast"}, ValueError, "lr: got 'fast', wants a finite number >= 0"),
    ({"weight_decay": -1}, ValueError, "weight_decay: got -1, wants a finite number >= 0"),
    ({"average": 1.5}, ValueError, "average: got 1.5, wants a finite number from 0 to 1"),
    ({"clip": math.nan}, ValueError, "clip: got nan, wants a finite number >= 0"),
    ({"clip": -1.0}, ValueError, "clip: got -1.0, wants a finite number >= 0"),
    ({"residual": "two"}, ValueError, "residual: got 'two', wants a finite number"),
    ({"start_readout": math.inf}, ValueError, "start_readout: got inf, wants a finite number"),
    ({"batch_per_task": 1}, ValueError, "batch_per_task: got 1, wants True or False"),
    ({"prompts_in_turn": "yes"}, ValueError, "prompts_in_turn: got 'yes', wants True or False"),
    ({"own_data": 0}, ValueError, "own_data: got 0, wants True or False"),
    ({"see_query": "no"}, ValueError, "see_query: got 'no', wants True or False"),
    ({"trainable_entry": 2}, ValueError, "trainable_entry: got 2, wants True or False"),
    ({"scale": "1/d"}, ValueError, "scale: got '1/d', wants one of 1/sqrt(d+1), 1/(d+1)^1.5"),
    ({"start_attention": "1/sqrt(d)"}, ValueError, "start_attention: got '1/sqrt(d)' (did you mean 1/sqrt(d+1)?)"),
    ({"start_heads": math.nan}, ValueError, "start_heads: got nan, wants a finite number"),
    ({"start_prompts": [1.0]}, ValueError, "start_prompts: got [1.0], wants a finite number"),
    ({"units": "datas"}, ValueError, "units: got 'datas' (did you mean data?), wants one of data, literal"),
    ({"start": "gaussian"}, ValueError, "start: got 'gaussian', wants one of normal, uniform"),
    ({"schedule": "cosin"}, ValueError, "schedule: got 'cosin' (did you mean cosine?), wants one of constant, linear,"),
    ({"optimiser": "Adamm"}, ValueError, "optimiser: got 'adamm' (did you mean adam?), wants one of "),
    ({"optimiser": 3}, ValueError, "optimiser: got 3, wants one of "),
    ({"optimiser_options": [1]}, ValueError, "optimiser_options: got [1], wants a mapping of names to values"),
    ({"optimiser_options": {"beta": 1}}, ValueError, "optimiser: Adam does not take {"),
    ({"optimiser_options": {"betas": (2.0, 0.9)}}, ValueError, "optimiser: Adam does not take {'betas': (2.0, 0.9)}: "),
    (
        {"schedul": "cosine"},
        TypeError,
        f"train: got an unknown argument 'schedul' (did you mean schedule?), wants one of {NAMES}",
    ),
    (
        {"optimizer": "Adam"},
        TypeError,
        "train: got an unknown argument 'optimizer' (did you mean optimiser?), wants one of ",
    ),
    ({"preset": "tune"}, ValueError, "preset: got 'tune' (did you mean tuned?), wants one of paper, authors, tuned"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=[str(change) for change, *_ in WRONG])
def test_wrong_values(change, error, message, tmp_path):
    """The error comes before any work: no folder is created."""
    with pytest.raises(error, match="^" + re.escape(message)):
        fl.train(MIX, "joint", N, **{"batch": 16, "steps": 2, **change}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_decay_of_zero_is_zero():
    """The default decay of AdamW is 0.01."""
    for kind in ("AdamW", torch.optim.AdamW):
        made = make_optimiser(config_of(optimiser=kind), [torch.nn.Parameter(torch.zeros(2, 2))])
        assert made.param_groups[0]["weight_decay"] == 0.0
        assert made.param_groups[0]["lr"] == 1e-3


def test_options_of_the_same_optimiser_are_added():
    tuned = config_of(preset="tuned", optimiser="adam", optimiser_options={"amsgrad": True})
    assert tuned.optimiser_options == {"betas": (0.9, 0.98), "amsgrad": True}


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimisers_in_which_trials_would_interact(name):
    with pytest.raises(ValueError, match=rf"^optimiser: {name} couples all parameters.* wants trials=1"):
        config_of(optimiser=name, trials=2)


def test_functions_without_a_name_are_told_apart():
    first, second = (config_of(schedule=schedule).describe()["schedule"] for schedule in (lambda s: 1.0, lambda s: 0.5))
    assert first != second
