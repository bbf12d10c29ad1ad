"""Models of every kind by name, the sources they are built for, and the oracle of their loss."""

from __future__ import annotations

import torch
from support.op_cases import DOUBLE

import fastlin as fl
from fastlin import models
from fastlin.models import Shape, Start

N = 4
PLACE = {"seed": 5, "step": 6, "stream": 7}
COV = torch.stack([torch.diag(torch.tensor(row, dtype=DOUBLE)) for row in ([1.0, 0.5, 2.0], [2.0, 1.0, 1.0])])
FEATURES = torch.diag(torch.tensor([1.0, 4.0, 0.25], dtype=DOUBLE))
MEANS = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], dtype=DOUBLE)
MIX = fl.TaskMixture(MEANS, COV, [0.4, 0.6], noise_std=0.3, feature_cov=FEATURES)
BIASED = fl.TaskMixture(MEANS, COV, [0.4, 0.6], noise_std=0.3, feature_cov=FEATURES, bias=True)
START = Start("normal", attention=0.5, heads=0.5, prompts=0.5, readout=1.0)
# Models by name: the kind, and what differs from one layer, one attention head, a shared head and prompts per task.
MODELS = {
    "reduced": ("reduced", {}),
    "reduced, entry fixed": ("reduced", {"trainable_entry": False}),
    "reduced, task heads": ("reduced", {"task_heads": True}),
    "reduced, one prompt": ("reduced", {"task_prompts": False}),
    "full": ("full", {}),
    "full, task heads": ("full", {"task_heads": True}),
    "full, one prompt": ("full", {"task_prompts": False}),
    "separate": ("separate", {}),
    "separate, task heads": ("separate", {"task_heads": True}),
    "separate, one prompt": ("separate", {"task_prompts": False}),
    "stack 1": ("stack", {"layers": 1}),
    "stack 2": ("stack", {"layers": 2, "residual": 2.0}),
    "stack 1, one prompt": ("stack", {"task_prompts": False}),
    "stack 3, task heads": ("stack", {"layers": 3, "task_heads": True}),
    "stack 2, one prompt": ("stack", {"layers": 2, "task_heads": True, "task_prompts": False}),
}
# Models without linear attention: another oracle, and no closed form.
SOFTMAX = {
    "softmax": ("softmax", {}),
    "softmax, task heads": ("softmax", {"task_heads": True}),
    "softmax, one prompt": ("softmax", {"task_prompts": False}),
}


def build(
    name,
    source=MIX,
    *,
    R=2,
    H=1,
    t=1,
    units="measured",
    dtype=DOUBLE,
    see_query=False,
    seed=1,
    start=START,
    n=N,
    scale=0.3,
):
    kind, changes = {**MODELS, **SOFTMAX}[name]
    options = {key: changes[key] for key in ("residual", "trainable_entry") if key in changes}
    sizes = {key: changes[key] for key in ("layers", "task_heads", "task_prompts") if key in changes}
    features = source.m - 1 - int(getattr(source, "bias", False))
    shape = Shape(R, source.K, source.m, features, attention_heads=H, tokens=t, **sizes)
    found = (
        models.measured(source, n, seed=0, stream=65_535, linear=kind != "softmax")
        if units == "measured"
        else models.literal(source.m, scale)
    )
    model = models.KINDS[kind](shape, found, see_query=see_query, dtype=dtype, **options)
    model.start(start, seed=seed, stream=65_534)
    return model


def literal_loss(model, source, n, batch, **options):
    """The oracle's loss at the parameters of the model."""
    op = fl.reference.sampled_stack_loss if model.name == "stack" else fl.reference.sampled_loss
    if model.name == "stack":
        options["residual"] = model.options["residual"]
    forms = {name: None if form is None else form.double() for name, form in model.forms().items()}
    return op(source, n, batch, **forms, **PLACE, see_query=model.options["see_query"], **options)
