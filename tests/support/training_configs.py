"""Configs of a few steps, traces of their parameters and gradients, and another value for each preset's field."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from support.op_cases import DOUBLE

import fastlin as fl
from fastlin.training.config import RunConfig
from fastlin.training.loop import Loop
from fastlin.training.start import initial_model

N = 4
EYE = torch.eye(3, dtype=DOUBLE)
MIX = fl.TaskMixture([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], torch.stack([EYE, 2 * EYE]), [0.3, 0.7], noise_std=0.3)
KINDS = ("reduced", "full", "separate", "stack", "softmax")
# A value for each field that a preset decides, other than the preset's.
ALTERNATIVES = {
    "steps": 5,
    "batch": 61,
    "lr": 2e-3,
    "optimiser": "RMSprop",
    "optimiser_options": {"betas": (0.5, 0.9)},
    "weight_decay": 0.5,
    "schedule": "linear",
    "clip": 1e-6,
    "average": 0.5,
    "batch_per_task": True,
    "prompts_in_turn": True,
    "own_data": True,
    "units": "data",
    "scale": 0.5,
    "see_query": True,
    "shot_scale": True,
    "heads_averaged": True,
    "points": 50,
    "residual": 0.5,
    "trainable_entry": True,
    "start": "normal",
    "start_prompts_as": "uniform",
    "fixed_head": True,
    "start_attention": 0.3,
    "start_values": 0.3,
    "start_heads": 0.3,
    "start_prompts": 0.3,
    "start_readout": 1.0,
}


def config_of(regime="joint", *, mix=MIX, heads=1, trials=2, preset="paper", dtype=DOUBLE, **values):
    given = {"steps": 6, "batch": 60, "seed": 3, "records": 10, **values}
    return RunConfig.resolve(mix, regime, N, attention_heads=heads, trials=trials, preset=preset, dtype=dtype, **given)


def trace(config, model=None):
    """The loop of a config, and its raw parameters before the first step and after each."""
    loop, seen = Loop(config, progress=False), []
    if model is not None:
        loop.model = model

    def keep(model, prompts):
        seen.append({name: raw.detach().clone() for name, raw in model.named_parameters()})
        return torch.ones(config.shape.trials), torch.zeros(config.shape.trials)

    keep(loop.model, False)
    loop.judge = SimpleNamespace(current=keep, optimum=None)
    loop._record_every = 1
    loop.run()
    return loop, seen


def recording(store, lr=1e-4, **options):
    """Plain gradient descent that leaves the gradients of every step, by name of the parameter, in `store`."""

    def make(parameters):
        optimiser = torch.optim.SGD(parameters, lr=lr, **options)
        optimiser.register_step_post_hook(
            lambda optimiser, *_: store.append([raw.grad.clone() for raw in optimiser.param_groups[0]["params"]])
        )
        return optimiser

    return make


def with_values(config, values):
    """The model of a config with other raw parameters."""
    model = initial_model(config)
    with torch.no_grad():
        for name, raw in model.named_parameters():
            raw.copy_(values[name])
    return model
