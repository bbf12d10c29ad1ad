"""The lean step agrees with autograd and torch.optim, has the same bits for any number of threads, and says when a
trial diverged.
"""

import pytest
import torch
from support import emulation
from support.training_configs import config_of, trace
from support.training_runs import train

import fastlin as fl
from fastlin import backends
from fastlin._files import read_json
from fastlin.backends import cuda
from fastlin.backends.update import UpdateRule, UpdateState
from fastlin.ops import call
from fastlin.ops.sampled import sampled_gradients
from fastlin.training import graph
from fastlin.training.loop import Loop
from fastlin.training.objective import Objective
from fastlin.training.update import LeanUpdate, TorchUpdate, why_not_lean

PRESETS = ("paper", "authors", "tuned")
SPHERE = {"mix": fl.SphereTasks(3, noise_std=0.2, bias=True)}
TARGET = {**SPHERE, "target": fl.FixedTask([0.2, 0.4, 0.6], bias=True)}
POINTS = {**SPHERE, "target": fl.PointSet(torch.randn(9, 3), torch.randn(9), bias=True)}
FORGETTING = {
    "pretrain": SPHERE,
    "zs:all": TARGET,
    "zs+fs:q": TARGET,
    "zs+fs:k": TARGET,
    "zs:v": {**POINTS, "points": None},
}
KINDS = {
    "reduced": {},
    "full": {},
    "full-heads": {"model": "full", "heads": 2},
    "separate": {},
    "separate-heads": {"model": "separate", "heads": 2},
    "stack": {"layers": 3},
    "stack-heads": {"model": "stack", "layers": 2, "heads": 2},
}


def both_ways(config):
    """Raw parameters after each step of the lean step, and of autograd with torch.optim."""
    assert why_not_lean(config) is None
    _, lean = trace(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "why_not_lean", lambda config: "a test")
        patch.setattr(Objective, "by_hand", None)
        _, ordinary = trace(config)
    return lean, ordinary


def assert_agree(config):
    """To rounding, after the few steps of a config: the two ways round differently."""
    lean, ordinary = both_ways(config)
    assert len(lean) == len(ordinary) > 2
    for one, other in zip(lean, ordinary, strict=True):
        for name, values in other.items():
            assert torch.allclose(one[name], values, rtol=1e-11, atol=1e-12), name
    assert any(not torch.equal(lean[0][name], lean[-1][name]) for name in lean[0])


REGIMES = ["plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"]
# The reduced model has no heads to train.
CASES = [(kind, regime) for kind in KINDS for regime in REGIMES if (kind, regime) != ("reduced", "heads")]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("kind", "regime"), CASES)
def test_both_ways_agree(kind, regime, preset):
    options = {"model": kind, **KINDS[kind]}
    if regime == "one-prompt":
        options["prompts_in_turn"] = False
    assert_agree(config_of(regime, preset=preset, **options))


@pytest.mark.parametrize("preset", ["authors", "tuned"])
@pytest.mark.parametrize("regime", FORGETTING)
@pytest.mark.parametrize("kind", ["full", "full-heads", "separate", "separate-heads"])
def test_both_ways_agree_in_fine_tuning_without_forgetting(kind, regime, preset):
    assert_agree(config_of(regime, preset=preset, **{"model": kind, **KINDS[kind]}, **FORGETTING[regime]))


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 3},
        {"own_data": True},
        {"batch_per_task": True, "shards": 2},
        {"optimiser": "SGD", "weight_decay": 0.1},
        {"optimiser": "SGD", "optimiser_options": {"momentum": 0.7}, "clip": 0.01},
        {"optimiser_options": {"betas": (0.5, 0.6), "eps": 1e-3}, "weight_decay": 0.1, "average": 0.7},
    ],
    ids=str,
)
def test_both_ways_agree_with_options(options):
    assert_agree(config_of(**options))


def test_both_ways_agree_on_variants_side_by_side():
    regimes = ["zs:q", "zs+fs:v", "zs+fs:all"]
    assert_agree(config_of(regimes, model="separate", preset="tuned", **TARGET))


@pytest.mark.parametrize("kind", ["reduced", "full", "separate", "stack"])
def test_a_step_reads_the_parameters_that_it_finds(kind):
    """They are checked and bound in the first step, and may change in place between steps."""
    loop = Loop(config_of(model=kind, **KINDS[kind]), progress=False)
    _, objective, *_ = next(loop._phases())
    before, _ = objective.by_hand(0, 0.0, 0, None)
    before = before.clone()
    for raw in loop.model.parameters():
        raw.mul_(1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "signature", None)
        after = objective.by_hand(0, 0.0, 0, None)
    _, anew, *_ = next(loop._phases())
    expected = anew.by_hand(0, 0.0, 0, None)
    assert torch.equal(after[0], expected[0])
    assert all(map(torch.equal, after[1], expected[1]))
    assert not torch.equal(after[0], before)


class Compiled:
    """The compiled update of parameters (R, ...)."""

    def __init__(self, values, rule, rates, idle=None, units=None, copies=None, backend="cpu"):
        R = len(rates)
        counts = torch.zeros(R, dtype=torch.int64)
        zeros = [[torch.zeros_like(value) for value in values] for _ in range(3)]
        self.state = UpdateState(
            values=[value.clone() for value in values],
            first=zeros[0],
            second=zeros[1] if rule.is_adam else [],
            averages=zeros[2],
            idle=idle or [None] * len(values),
            units=units or [None] * len(values),
            copies=copies or [(1, value[0].numel()) for value in values],
            total=torch.zeros(R, dtype=torch.float64),
            rates=torch.tensor(rates, dtype=torch.float64),
            updates=counts[:1].clone(),
            diverged=counts,
        )
        self.update = backends.load(backend).prepare_update(rule, self.state)


@pytest.fixture(params=["cpu", "cuda"])
def updater(request):
    """A backend with compiled updates; that of CUDA in emulation."""
    if request.param == "cpu":
        yield "cpu"
        return
    with cuda.emulated(emulation.module()):
        before = emulation.launches()
        yield "cuda"
        assert emulation.launches() > before


def random_problem(R=3):
    torch.manual_seed(0)
    values = [torch.randn(R, *size, dtype=torch.float64) for size in ((4, 4), (5,), (2, 3))]
    return values, torch.ones(R, dtype=torch.float64)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["adam", "sgd", "momentum"])
def test_the_update_is_that_of_torch(kind, decay, clip, updater):
    """100 steps with a learning rate for each trial: 1e-12, a few roundings a step."""
    values, loss = random_problem()
    rates, scale = [1e-3, 1e-2, 3e-2], 0.7
    beta1 = {"adam": 0.9, "sgd": 0.0, "momentum": 0.8}[kind]
    rule = UpdateRule(kind == "adam", scale, beta1, 0.98, 1e-8, decay, -1.0 if clip is None else clip)
    # The last parameter has its factor, and three copies of each row.
    units = [torch.randn(4, 4, dtype=torch.float64), None, torch.randn(2, 3, dtype=torch.float64)]
    own = Compiled(values, rule, rates, units=units, copies=[(1, 16), (1, 5), (3, 3)], backend=updater)
    trials = [[value[r].clone().requires_grad_() for value in values] for r in range(3)]
    make = {
        "adam": lambda raws, lr: torch.optim.Adam(raws, lr=lr, betas=(beta1, 0.98), weight_decay=decay),
        "sgd": lambda raws, lr: torch.optim.SGD(raws, lr=lr, weight_decay=decay),
        "momentum": lambda raws, lr: torch.optim.SGD(raws, lr=lr, momentum=beta1, weight_decay=decay),
    }[kind]
    optimisers = [make(raws, lr) for raws, lr in zip(trials, rates, strict=True)]
    averages = [[torch.zeros_like(raw) for raw in raws] for raws in trials]
    for step in range(100):
        grads = [torch.randn_like(value) for value in values]
        weight = 0.0 if step < 60 else 1.0 / (step - 59)
        grads[2] = torch.randn(3, 2, 3, 3, dtype=torch.float64)
        own.update(loss, grads, weight)
        grads = [grads[0] * units[0], grads[1], grads[2].sum(2) * units[2]]
        for r, (raws, optimiser) in enumerate(zip(trials, optimisers, strict=True)):
            for raw, grad in zip(raws, grads, strict=True):
                raw.grad = scale * grad[r]
            if clip is not None:
                norm = torch.cat([raw.grad.flatten() for raw in raws]).norm()
                for raw in raws:
                    raw.grad *= min(1.0, clip / norm)
            optimiser.step()
            if weight:
                torch._foreach_lerp_(averages[r], [raw.detach() for raw in raws], weight)
    for i in range(3):
        for r in range(3):
            assert torch.allclose(own.state.values[i][r], trials[r][i].detach(), rtol=1e-12, atol=1e-12)
            assert torch.allclose(own.state.averages[i][r], averages[r][i], rtol=1e-12, atol=1e-12)
    assert own.state.updates.tolist() == [100]
    assert own.state.total.tolist() == [100.0] * 3


def test_idle_parameters_and_diverged_trials_stand_still(updater):
    values, loss = random_problem()
    idle = [None, torch.tensor([0, 1, 0], dtype=torch.uint8), None]
    own = Compiled(values, UpdateRule(True, 1.0, 0.9, 0.9, 1e-8, 0.1, 1.0), [1e-2] * 3, idle, backend=updater)
    trained = own.state.values
    # The gradient of an idle parameter does not count in the norm.
    grads = [torch.ones_like(value) for value in values]
    grads[1][1] = torch.nan
    own.update(loss, grads, 0.0)
    assert torch.equal(trained[1][1], values[1][1])
    assert torch.isfinite(torch.cat([value.flatten() for value in trained])).all()
    before = [value[2].clone() for value in trained]
    for bad in (torch.inf, 1.0, torch.nan):
        loss[2] = bad
        own.update(loss, grads, 0.0)
    assert own.state.diverged.tolist() == [0, 0, 2]
    for value, kept in zip(trained, before, strict=True):
        assert torch.equal(value[2], kept)
        assert not torch.equal(value[0], kept)


@pytest.fixture
def threads():
    """Set torch's number of threads; afterwards it is as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_update_has_the_same_bits_for_any_number_of_threads(threads, dtype):
    torch.manual_seed(0)
    values = [torch.randn(70, 1000, dtype=dtype)]
    grads, loss = [torch.randn_like(values[0])], torch.ones(70, dtype=dtype)
    made = []
    for count in (1, 2, 5):
        threads(count)
        own = Compiled(values, UpdateRule(True, 1.0, 0.9, 0.9, 1e-8, 0.1, 1.0), [1e-2] * 70)
        for _ in range(3):
            own.update(loss, grads, 0.3)
        made.append([own.state.values[0], own.state.first[0], own.state.second[0], own.state.averages[0]])
    for other in made[1:]:
        assert all(map(torch.equal, made[0], other))
    assert not torch.equal(made[0][0], values[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"model": "separate"}, {"model": "stack", "layers": 2}], ids=str)
def test_a_run_has_the_same_bytes_for_any_number_of_threads(threads, tmp_path, options, dtype):
    """In the units of the data, whose mean torch would split among threads."""
    files = []
    for count in (1, 2, 3):
        threads(count)
        train(out=tmp_path / f"{count}", dtype=dtype, batch=1500, **options)
        names = ("model.safetensors", "records.jsonl")
        files.append([(tmp_path / f"{count}" / name).read_bytes() for name in names])
    assert files[0] == files[1] == files[2]


def test_a_divergence_is_noted_at_its_step_without_reading_in_every_step(monkeypatch):
    """Numbers are read when a record is due, and the step is exact."""
    config = config_of(steps=40, trials=3)
    loop = Loop(config, progress=False)
    loop._record_every = 20
    by_hand, reads = Objective.by_hand, []

    def poisoned(self, step, *arguments):
        losses, grads = by_hand(self, step, *arguments)
        return (losses * torch.tensor([1.0, 1.0, torch.nan]) if step == 7 else losses), grads

    monkeypatch.setattr(Objective, "by_hand", poisoned)
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def read(self, *arguments, original=original):
            reads.append(loop.step)
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, read)
    loop.run()
    assert loop.diverged == {2: 7}
    assert {"step": 7, "diverged": 2} in loop.records
    assert set(reads) <= {0, 20, 40}


def test_the_record_says_which_way_ran(tmp_path):
    train(out=tmp_path / "lean")
    train(out=tmp_path / "other", optimiser="RMSprop")
    train(out=tmp_path / "options", optimiser_options={"amsgrad": True})
    steps = [read_json(tmp_path / name / "run.json", dict)["step"] for name in ("lean", "other", "options")]
    assert steps == ["lean", "autograd: optimiser RMSprop", "autograd: optimiser Adam with betas, amsgrad"]


def test_what_the_lean_step_does_not_serve():
    assert why_not_lean(config_of(model="softmax")) == "model softmax"
    assert why_not_lean(config_of(optimiser="AdamW")) == "optimiser AdamW"
    assert why_not_lean(config_of(backend="reference")) == "backend reference"
    assert why_not_lean(config_of(backend="eager")) == "backend eager"
    for config, kind in ((config_of(), LeanUpdate), (config_of(model="softmax"), TorchUpdate)):
        loop = Loop(config, progress=False)
        loop._begin(0)
        assert type(loop._update) is kind
    with pytest.raises(ValueError, match="optimiser: Adam does not take"):
        config_of(optimiser_options={"betas": (0.9, 1.5)})
    with pytest.raises(ValueError, match="optimiser: SGD does not take"):
        config_of(optimiser="SGD", optimiser_options={"momentum": -1.0})


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_arguments_of_the_compiled_update(backend):
    with cuda.emulated(emulation.module()):
        check_arguments(backend)


def check_arguments(backend):
    values, loss = random_problem()
    rule = UpdateRule(True, 1.0, 0.9, 0.9, 1e-8, 0.0, -1.0)
    own = Compiled(values, rule._replace(is_adam=False), [1e-2] * 3, backend=backend)
    wrong = backends.load(backend).prepare_update(rule, own.state)
    with pytest.raises(ValueError, match="second: got address 0, wants the address of 48 elements"):
        wrong(loss, values, 0.0)
    uneven = Compiled(values, rule, [1e-2] * 3, copies=[(1, 16), (1, 2), (1, 6)], backend=backend)
    with pytest.raises(ValueError, match="run: got 2, wants a divisor of 5"):
        uneven.update(loss, values, 0.0)
    assert own.state.updates.tolist() == [0]
    assert torch.equal(own.state.values[0], values[0])
    with pytest.raises(fl.BackendError, match="backend 'eager' has no optimiser update"):
        backends.load("eager").prepare_update(rule, own.state)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_calls_that_are_bound_once_agree_with_calls_of_their_own(backend):
    torch.manual_seed(0)
    mix, m = fl.SphereTasks(3), 4
    forms = {"A": torch.randn(2, m, m) / m, "C": torch.randn(2, m, m) / m, "h": torch.randn(1, m), "p": None}
    options = {"scale": 0.1, "backend": backend}
    place = {"seed": 3, "stream": 1, "offset": 0}
    of_step = sampled_gradients("sampled_stack_loss", mix, 6, 40, forms, "A", None, options, **place)
    for step in range(3):
        loss, grads = of_step(step)
        A = forms["A"].clone().requires_grad_()
        expected, _ = fl.sampled_stack_loss(mix, 6, 40, None, A, forms["C"], forms["h"], step=step, **place, **options)
        (gradient,) = torch.autograd.grad(expected, A)
        assert torch.allclose(loss, expected, rtol=1e-5)
        assert torch.allclose(grads["A"], gradient, rtol=1e-4, atol=1e-5)
        forms["A"].mul_(0.9)
