"""Models: from raw parameters to those of the ops and back, gradients, and training without closed forms."""

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from support.model_cases import BIASED, MIX, MODELS, PLACE, N, build, literal_loss
from support.op_cases import DOUBLE, assert_close, relative_error

import fastlin as fl
from fastlin import theory
from fastlin.models import Start
from fastlin.training.config import RunConfig
from fastlin.training.loop import Loop


def as_layer(model):
    """p, W, v of a model with one layer, float64."""
    forms = {name: None if form is None else form.detach().double() for name, form in model.forms().items()}
    if model.name != "stack":
        return forms
    assert model.shape.layers == 1
    A, C, h = forms["A"][:, 0], forms["C"][:, 0], forms["h"]
    return {"p": forms["p"], "W": A, "v": h @ C.mT}


CASES = [
    (name, H, t, source, units)
    for name, H, t, source, units in itertools.product(
        MODELS, (1, 2), (1, 3), ("plain", "bias"), ("literal", "measured")
    )
    # All pairs of the sizes occur.
    if (H == 2) + (t == 3) + (source == "bias") != 1 or units == "measured"
]


@pytest.mark.parametrize(("name", "H", "t", "source", "units"), CASES)
def test_loss_is_the_oracle_on_the_forms(name, H, t, source, units):
    source = BIASED if source == "bias" else MIX
    model = build(name, source, H=H, t=t, units=units, see_query=t == 3)
    found = model.loss(source, N, 24, **PLACE)
    expected = literal_loss(model, source, N, 24)
    assert found[0].shape == (2,)
    assert found[1].shape == (2, 2)
    assert_close(found, expected)
    assert_close(model.loss(source, N, 24, **PLACE, backend="reference"), expected, 0.0)
    raws = list(model.parameters())
    grads = [torch.autograd.grad(loss.sum(), raws) for loss in (found[0], expected[0])]
    assert_close(*grads, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_loss_with_weights_pieces_and_without_prompts(name):
    model = build(name)
    weight = torch.tensor([0.9, 0.1], dtype=DOUBLE)
    assert_close(model.loss(MIX, N, 24, **PLACE, weight=weight), literal_loss(model, MIX, N, 24, weight=weight))
    whole, _ = model.loss(MIX, N, 24, **PLACE)
    parts = [model.loss(MIX, N, 12, **PLACE, offset=offset)[0] for offset in (0, 12)]
    assert_close(sum(parts) / 2, whole, 1e-12)
    bare, _ = model.loss(MIX, N, 24, **PLACE, prompts=False)
    forms = model.forms(prompts=False)
    assert forms["p"] is None
    assert not torch.allclose(bare, whole)
    with torch.no_grad():
        for raw in model.group("prompts"):
            raw.zero_()
    if model.name != "reduced" or model.shape.task_heads:
        assert_close(model.loss(MIX, N, 24, **PLACE)[0], bare)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("H", "t", "units"), [(1, 1, "measured"), (2, 3, "literal")])
def test_gradients_of_raw_parameters(name, H, t, units):
    """Central differences along a random direction of each raw parameter."""
    model = build(name, H=H, t=t, units=units, start=Start("normal", 0.2, 0.2, 0.2, 1.0))
    loss, _ = model.loss(MIX, N, 16, **PLACE)
    # A trial's loss has the gradient of that trial alone.
    grads = torch.autograd.grad(loss @ torch.tensor([1.0, 10.0], dtype=DOUBLE), list(model.parameters()))
    generator = torch.Generator().manual_seed(0)
    for raw, grad in zip(model.parameters(), grads, strict=True):
        direction = torch.randn(raw.shape, generator=generator, dtype=DOUBLE)
        ends = []
        with torch.no_grad():
            for sign in (1.0, -1.0):
                raw += sign * 1e-5 * direction
                ends.append(literal_loss(model, MIX, N, 16)[0])
                raw -= sign * 1e-5 * direction
        slope = (ends[0] - ends[1]) / 2e-5
        along = (grad * direction).flatten(1).sum(1) / torch.tensor([1.0, 10.0], dtype=DOUBLE)
        assert_close(along, slope, 1e-6)


@pytest.mark.parametrize(
    "name", ["full", "full, one prompt", "reduced", "reduced, one prompt", "reduced, task heads", "separate", "stack 2"]
)
def test_gradcheck_of_raw_parameters(name):
    model = build(name, R=1)
    raws = list(model.parameters())

    def loss(*values):
        functional = copy.deepcopy(model)
        for key, value in zip([key for key, _ in model.named_parameters()], values, strict=True):
            del functional._parameters[key]
            setattr(functional, key, value)
        return functional.loss(MIX, 2, 3, **PLACE)[0]

    assert torch.autograd.gradcheck(loss, [raw.detach().clone().requires_grad_() for raw in raws], eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_float32(name):
    model, double = build(name, dtype=torch.float32), build(name)
    for raw, other in zip(model.parameters(), double.parameters(), strict=True):
        assert raw.dtype == torch.float32
        assert torch.equal(raw, other.float())
    loss, per_task = model.loss(MIX, N, 200, **PLACE)
    assert loss.dtype == per_task.dtype == torch.float32
    assert all(form.dtype == torch.float32 for form in model.forms().values())
    assert_close(loss.double(), literal_loss(model, MIX, N, 200)[0], 1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", [MIX, BIASED], ids=["plain", "bias"])
@pytest.mark.parametrize(("R", "H", "t"), [(1, 1, 1), (3, 1, 3), (2, 2, 1)])
def test_shapes_of_the_forms(name, source, R, H, t):
    model = build(name, source, R=R, H=H, t=t)
    K, m, L = source.K, source.m, model.shape.layers
    heads = (H,) if H > 1 else ()
    if model.name == "stack":
        wanted = {"A": (R, L, *heads, m, m), "C": (R, L, *heads, m, m), "h": (R, K, m)}
    else:
        wanted = {"W": (R, *heads, m, m), "v": (R, *heads, K, m)}
    found = {letter: tuple(form.shape) for letter, form in model.forms().items()}
    assert found == {"p": (R, K, t, m), **wanted}


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_one_or_one_for_each_task(name):
    model = build(name, start=Start("normal", heads=0.5))
    heads = model.forms()["h" if model.name == "stack" else "v"]
    assert torch.equal(heads[..., 0, :], heads[..., 1, :]) != model.shape.task_heads


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_one_or_one_for_each_task(name):
    model = build(name, t=2)
    p = model.forms()["p"]
    assert model.p.shape[1] == (2 if model.shape.task_prompts else 1)
    assert torch.equal(p[:, 0], p[:, 1]) != model.shape.task_prompts


@pytest.mark.parametrize("name", ["reduced, one prompt", "full, one prompt", "stack 2, one prompt"])
def test_one_prompt_has_the_gradients_of_all_tasks(name):
    """A shared prompt is that of equal prompts per task, with the sum of their gradients."""
    model = build(name, t=2)
    twin = copy.deepcopy(model)
    twin.shape = dataclasses.replace(model.shape, task_prompts=True)
    twin.p = torch.nn.Parameter(model.p.detach().repeat(1, 2, 1, 1))
    losses = [of.loss(MIX, N, 24, **PLACE)[0] for of in (model, twin)]
    assert_close(losses[0], losses[1], 1e-13)
    one, each = (torch.autograd.grad(loss.sum(), of.p)[0] for loss, of in zip(losses, (model, twin), strict=True))
    assert each.shape[1] == 2
    assert_close(one, each.sum(1, keepdim=True), 1e-12)


@pytest.mark.parametrize("name", ["reduced, one prompt", "full, one prompt", "separate, one prompt"])
@pytest.mark.parametrize("lead", [(2,), ()], ids=["R", "all"])
@pytest.mark.parametrize("tasks", [1, 2])
def test_assign_of_one_prompt(name, lead, tasks):
    model, other = build(name, seed=1), build(name, seed=2)
    forms = {letter: form.detach() for letter, form in model.forms().items()}
    p = forms["p"][:, :tasks] if lead else forms["p"][0, :tasks]
    other.assign(**{**forms, "p": p})
    assert_close(other.forms()["p"], forms["p"] if lead else forms["p"][:1].expand(2, 2, 1, 4), 1e-13)
    different = forms["p"].clone()
    different[:, 1, 0, 0] += 1.0
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"^p: got prompts that differ between tasks, wants one for all: task_prompts"):
        other.assign(**{**forms, "p": different})
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize("name", ["reduced", "reduced, entry fixed", "reduced, task heads"])
@pytest.mark.parametrize("source", [MIX, BIASED], ids=["plain", "bias"])
@pytest.mark.parametrize(("H", "t"), [(1, 1), (2, 3)])
def test_reduced_form(name, source, H, t):
    model = build(name, source, H=H, t=t)
    forms, first = model.forms(), int(source.bias)
    outside = torch.ones(source.m, source.m, dtype=torch.bool)
    outside[first:-1, first:-1] = False
    assert forms["W"][..., outside].count_nonzero() == 0
    assert forms["W"][..., ~outside].count_nonzero() == forms["W"][..., ~outside].numel()
    label = torch.zeros(source.m, dtype=DOUBLE)
    label[-1] = 1.0
    if name != "reduced, task heads":
        assert torch.equal(forms["v"], label.expand_as(forms["v"]))
        assert torch.equal(forms["p"][..., -1], torch.ones(2, 2, t, dtype=DOUBLE))
    else:
        assert not (forms["p"][..., -1] == 1.0).any()


def test_reduced_with_an_entry_is_a_product():
    """The reduced model treats tokens [p; s] and [s p; 1] alike; the entry scales the vector."""
    model = build("reduced", units="literal")
    with torch.no_grad():
        model.p[..., -1] = 3.0
    assert_close(model.forms()["p"][..., :-1], 3.0 * model.p[..., :-1].detach(), 1e-15)
    fixed = build("reduced, entry fixed", units="literal")
    assert fixed.p.shape[-1] == model.p.shape[-1] - 1
    assert torch.equal(fixed.forms()["p"][..., :-1], fixed.p)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("H", "t", "units"), [(1, 1, "measured"), (1, 3, "literal"), (2, 1, "measured")])
@pytest.mark.parametrize("source", [MIX, BIASED], ids=["plain", "bias"])
def test_assign_is_the_inverse_of_forms(name, H, t, units, source):
    model, other = (build(name, source, H=H, t=t, units=units, seed=seed) for seed in (1, 2))
    forms = {letter: form.detach() for letter, form in model.forms().items()}
    before = {letter: form.detach().clone() for letter, form in other.forms().items()}
    if name.startswith("separate") and H > 1:
        with pytest.raises(ValueError, match="attention_heads"):
            other.assign(**forms)
        return
    other.assign(**forms)
    for letter, form in other.forms().items():
        assert_close(form, forms[letter], 1e-13, letter)
        if name.startswith("reduced") and letter == "v" and not model.shape.task_heads:
            continue
        assert relative_error(before[letter], forms[letter]) > 0.01


def test_assign_one_for_all_trials_and_without_prompts():
    model = build("full", R=3)
    p, W, v = theory.joint(MIX, N).attention()
    model.assign(p=p, W=W, v=v)
    for letter, one in (("p", p), ("W", W), ("v", v)):
        assert_close(model.forms()[letter], one.expand(3, *one.shape), 1e-13)
    model = build("full", R=3)
    before = model.p.detach().clone()
    model.assign(p=None, W=W, v=v)
    assert torch.equal(model.p, before)
    assert_close(model.forms()["W"], W.expand(3, 4, 4), 1e-13)


OPTIMA = {
    "plain": theory.plain,
    "fine_tuned": theory.fine_tuned,
    "one_prompt": theory.one_prompt,
    "joint": theory.joint,
    "shared_shift": theory.shared_shift,
    "decoupled": theory.decoupled,
    "scaled_heads": theory.scaled_heads,
}
FIXED_HEAD = ("plain", "fine_tuned", "one_prompt", "joint")


def holds(name, optimum):
    kind, changes = MODELS[name]
    if not changes.get("task_prompts", True):
        return optimum in ("plain", "one_prompt")
    if optimum in FIXED_HEAD:
        return True
    if changes.get("task_heads"):
        return True
    return optimum == "shared_shift" and kind != "reduced"


ONE_LAYER = [name for name in MODELS if MODELS[name][1].get("layers", 1) == 1]


@pytest.mark.parametrize("optimum", OPTIMA)
@pytest.mark.parametrize("name", ONE_LAYER)
@pytest.mark.parametrize("units", ["literal", "measured"])
def test_optima_of_the_theory_load_and_have_their_loss(name, optimum, units):
    model, best = build(name, units=units), OPTIMA[optimum](MIX, N)
    p, W, v = best.attention()
    if not holds(name, optimum):
        with pytest.raises(ValueError, match=r"^(v|h|heads|p): got .* wants "):
            model.assign(p=p, W=W, v=v)
        return
    model.assign(p=p, W=W, v=v)
    form = as_layer(model)
    losses = theory.full_population_loss(MIX, N, **form)
    assert losses.shape == (2,)
    assert float((losses / best.loss - 1.0).abs().max()) < 1e-10
    own, _ = model.loss(MIX, N, 50, **PLACE)
    assert_close(own[:1], fl.sampled_loss(MIX, N, 50, p, W, v, **PLACE)[0][None], 1e-9)


def test_a_failed_assign_changes_nothing():
    model = build("full")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _, W, v = theory.decoupled(MIX, N).attention()
    with pytest.raises(ValueError, match="differ between tasks"):
        model.assign(W=W, v=v)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def zeros(*shape):
    return torch.zeros(*shape, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("name", "sizes", "change", "message"),
    [
        ("full", {}, {"W": None}, r"^full: got p, v; wants W, v"),
        ("full", {}, {"A": zeros(1, 4, 4)}, r"^full: got .*A.*; wants W, v"),
        ("full", {}, {"q": zeros(4)}, r"^full: got .*q.*; wants W, v"),
        ("stack 2", {}, {}, r"^stack: got p, W, v; wants A, C, h"),
        ("stack 1", {"H": 2}, {}, r"^stack: got p, W, v; wants A, C, h"),
        ("full", {}, {"W": zeros(5, 5)}, r"^W\b.*\(5, 5\)"),
        ("full", {}, {"W": zeros(3, 4, 4)}, r"^W\b.*\(3, 4, 4\)"),
        ("full", {"H": 2}, {}, r"^W\b.*\(4, 4\)"),
        ("full, task heads", {}, {"v": zeros(3, 4)}, r"^v\b.*\(3, 4\)"),
        ("full", {}, {"v": zeros(2, 5)}, r"^v\b.*\(2, 5\)"),
        ("full", {}, {"p": zeros(2, 1, 5)}, r"^p\b.*\(2, 1, 5\)"),
        ("full", {}, {"p": zeros(3, 1, 4)}, r"^p\b.*\(3, 1, 4\)"),
        ("full", {}, {"p": zeros(1, 1, 4)}, r"^p\b.*\(1, 1, 4\)"),
        ("full", {}, {"p": zeros(2, 3, 4)}, r"^p\b.*\(2, 3, 4\)"),
        ("full, one prompt", {}, {"p": zeros(3, 1, 4)}, r"^p: got shape \(3, 1, 4\), wants .* or \(1, 1, 4\)"),
        ("full, one prompt", {}, {"p": zeros(1, 4)}, r"^p\b.*\(1, 4\)"),
        ("full", {"t": 3}, {}, r"^p\b.*\(2, 1, 4\)"),
        ("separate", {"H": 2}, {"W": zeros(2, 4, 4), "v": zeros(2, 2, 4)}, r"^attention_heads: "),
        ("stack 1", {}, {"W": zeros(5, 5)}, r"^[WA]\b.*\(.*5, 5\)"),
        ("reduced", {}, {"W": torch.ones(4, 4, dtype=DOUBLE)}, r"^W: got entries outside the block of the features"),
        ("reduced", {}, {"v": torch.ones(2, 4, dtype=DOUBLE)}, r"^v: got other heads than e_m, wants e_m"),
        ("full", {}, {"v": torch.arange(8.0, dtype=DOUBLE).view(2, 4)}, r"^(v|heads): got heads that differ"),
    ],
)
def test_wrong_loads(name, sizes, change, message):
    """Errors name the argument; nothing is broadcast over tokens or heads, which would change the predictor."""
    model = build(name, **sizes)
    p, W, v = theory.joint(MIX, N).attention()
    with pytest.raises((ValueError, TypeError), match=message):
        model.assign(**{"p": p, "W": W, "v": v, **change})


@pytest.mark.parametrize("name", ["reduced", "full", "separate", "stack", "softmax"])
@pytest.mark.parametrize("preset", ["tuned", "paper", "authors"])
def test_training_never_calls_a_closed_form(name, preset, monkeypatch):
    def never(*_, **__):
        raise AssertionError("training asks the theory")

    for function in theory.__all__:
        if function not in ("forgetting", "NotAttained", "Optimum", "Bound", "Attention", "GapLimits"):
            monkeypatch.setattr(theory, function, never)
    monkeypatch.setattr(theory.Optimum, "attention", never)
    monkeypatch.setattr(theory.moments.Moments, "of", never)
    with pytest.raises(AssertionError, match="asks the theory"):
        fl.theory.joint(MIX, N)
    config = RunConfig.resolve(
        MIX, "fine-tune", N, model=name, trials=2, records=2, preset=preset, steps=4, batch=64, dtype=DOUBLE
    )
    loop, seen = Loop(config, progress=False), []
    model = loop.model
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def risk(model, prompts):
        seen.append(prompts)
        return torch.ones(2), torch.zeros(2)

    loop.judge = SimpleNamespace(current=risk, optimum=None)
    loop.run()
    assert seen == [False, True]
    assert not torch.equal(model.state_dict()["p"], before["p"])
