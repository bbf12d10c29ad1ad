"""Plans of a few steps, the parameters and gradients on their way, and another value for all that a protocol holds."""

from __future__ import annotations

import torch
from helpers import DOUBLE

import fastlin as fl
from fastlin.experiments.plan import Plan
from fastlin.training.loop import Job, Loop

N = 4
EYE = torch.eye(3, dtype=DOUBLE)
MIX = fl.TaskMixture([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], torch.stack([EYE, 2 * EYE]), [0.3, 0.7], noise_std=0.3)
KINDS = ("reduced", "full", "separate", "stack", "softmax")
# A value for each field of a protocol that is not the preset's.
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


def plan_of(
    regime="joint",
    *,
    mix=MIX,
    target=None,
    model="full",
    layers=1,
    heads=1,
    trials=2,
    preset="paper",
    dtype=DOUBLE,
    **values,
):
    return Plan.of(
        mix,
        regime,
        N,
        target=target,
        model=model,
        layers=layers,
        attention_heads=heads,
        prompt_tokens=1,
        trials=trials,
        seed=3,
        records=10,
        preset=preset,
        values={"steps": 6, "batch": 60, **values},
        dtype=dtype,
        device="cpu",
        backend="auto",
    )


def trace(plan, model=None):
    """The loop of a plan, and its raw parameters before the first step and after each."""
    model, seen = plan.model() if model is None else model, []

    def keep(model, prompts):
        seen.append({name: raw.detach().clone() for name, raw in model.named_parameters()})
        return torch.ones(plan.shape.trials), torch.zeros(plan.shape.trials)

    keep(model, False)
    loop = Loop(
        Job(
            model=model,
            regime=plan.regime,
            protocol=plan.protocol,
            sources=plan.sources,
            n=plan.n,
            seed=plan.seed,
            risk=keep,
            optimum=None,
            backend="auto",
            record_every=1,
            folder=None,
            checkpoint_seconds=30.0,
            progress=False,
        )
    )
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


def with_values(plan, values):
    """The model of a plan with other raw parameters."""
    model = plan.model()
    with torch.no_grad():
        for name, raw in model.named_parameters():
            raw.copy_(values[name])
    return model
