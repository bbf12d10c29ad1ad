"""Units: raw parameters independent of the units of the data, and literal ones."""

import pytest
import torch
from support.model_cases import BIASED, COV, FEATURES, MEANS, MIX, MODELS, PLACE, SOFTMAX, N, build
from support.op_cases import DOUBLE, assert_close, relative_error

import fastlin as fl
from fastlin import models, theory
from fastlin.models import Units


def rescaled(labels, features, bias):
    """The source with y in other units, and each feature in its own; numbers are powers of two, so products exact."""
    D = torch.diag(torch.tensor(features, dtype=DOUBLE))
    back = torch.linalg.inv(D)
    return fl.TaskMixture(
        labels * MEANS @ back,
        labels**2 * back @ COV @ back,
        [0.4, 0.6],
        noise_std=0.3 * labels,
        feature_cov=D @ FEATURES @ D,
        bias=bias,
    )


@pytest.mark.parametrize("name", [*MODELS, *SOFTMAX])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("H", [1, 2])
@pytest.mark.parametrize(("labels", "features"), [(8.0, [1.0] * 3), (1.0, [4.0, 0.5, 2.0]), (0.25, [2.0, 8.0, 0.5])])
def test_measured_units_are_equivariant(name, bias, H, labels, features):
    """The same raw parameters predict labels in the units of the source."""
    before, after = (BIASED if bias else MIX), rescaled(labels, features, bias)
    model, other = build(name, before, H=H), build(name, after, H=H)
    for raw, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(raw, same)
    losses = model.loss(before, N, 40, **PLACE)[0], other.loss(after, N, 40, **PLACE)[0]
    assert_close(losses[1], labels**2 * losses[0], 1e-11)
    assert other.loss_unit == pytest.approx(labels**2 * model.loss_unit, rel=1e-12)
    tokens = torch.tensor([1.0] * bias + [*features, labels], dtype=DOUBLE)
    if model.name != "stack" and not name.startswith("reduced"):
        W, v = (model.forms()[letter] / form for letter, form in (("W", tokens[:, None] * tokens), ("v", tokens)))
        assert_close(other.forms()["W"], W, 1e-12)
        assert_close(other.forms()["v"], labels * v, 1e-12)
        assert_close(other.forms()["p"], model.forms()["p"] * tokens, 1e-12)


def test_measured_units():
    """The formulas of the module, with root mean squares that are known."""
    units = models.measured(MIX, N, seed=3, stream=9)
    label = theory.normaliser(MIX)
    size = torch.cat([FEATURES.diagonal(), torch.tensor([label], dtype=DOUBLE)]).sqrt()
    c = N + MIX.m
    expected = Units(
        prompt=c**0.5 * size,
        attention=1.0 / (c * size[:, None] * size),
        values=size / size[:, None],
        head=label**0.5 / size,
        loss=label,
    )
    for found, wanted in zip(units[:4], expected[:4], strict=True):
        assert relative_error(found, wanted) < 0.05
        assert torch.allclose(found, wanted, rtol=0.06, atol=0.0)
    assert units.loss == pytest.approx(label, rel=0.05)
    # A column of zeros has no unit.
    silent = fl.FixedTask([0.0, 0.0, 0.0])
    assert models.measured(silent, N, seed=0, stream=0).loss == 1.0


def test_literal_units():
    model = build("stack 2", units="literal", scale=0.25)
    assert torch.equal(model.forms()["A"], 0.25 * model.A)
    assert torch.equal(model.forms()["C"], model.C)
    assert torch.equal(model.forms()["p"], model.p)
    assert model.loss_unit == 1.0
    layer = build("separate", units="literal", scale=0.25)
    assert_close(layer.forms()["W"], 0.25 * layer.Wq @ layer.Wk.mT, 1e-15)
    assert_close(layer.forms()["v"][:, 0], (layer.Wv @ layer.h[..., None])[..., 0], 1e-14)


def test_units_of_softmax_attention():
    """Softmax averages tokens: the units do not depend on n."""
    linear, other = (models.measured(MIX, N, seed=3, stream=9, linear=linear) for linear in (True, False))
    c = N + MIX.m
    assert_close(other.prompt, linear.prompt / c**0.5, 1e-15)
    assert_close(other.attention, linear.attention * c, 1e-15)
    assert torch.equal(other.head, linear.head)
    assert other.loss == linear.loss


def test_units_of_attention_that_the_op_divides():
    """A scale of 1/(n + 1) in the op is a factor of the units, so that both start alike."""
    place = {"seed": 0, "stream": 1}
    for n in (0, 7):
        divided, plain = (
            fl.models.measured(fl.SphereTasks(3), n, shot_scale=scale, **place) for scale in (True, False)
        )
        assert torch.equal(divided.attention / (n + 1), plain.attention)
