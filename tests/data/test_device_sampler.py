"""A batch for another device is drawn there when a backend of that device draws, and comes from the CPU otherwise."""

import sys
from types import ModuleType

import pytest
import torch

import fastlin as fl
from fastlin import backends
from fastlin.backends import cpu


@pytest.fixture
def meta_sampler(monkeypatch):
    """A backend of the meta device that draws widths up to 4."""
    module = ModuleType("fastlin.backends.drawer")
    module.drawn = []

    def sample(draw, is_gram, dtype, device):
        module.drawn.append((is_gram, dtype, device.type))
        return cpu.sample(draw, is_gram, dtype, device)

    module.supports = lambda op, device, dtype, m: None if m <= 4 else "too wide"
    module.sample, module.sampled_loss = sample, None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(backends.ORDER, "meta", ("drawer",))
    return module


def test_the_device_draws(meta_sampler):
    source = fl.SphereTasks(3)
    for draw, is_gram in ((source.sample, False), (source.sample_gram, True)):
        first, q, _, task = draw(5, 2, dtype=torch.float64, device="meta")
        assert first.device.type == q.device.type == task.device.type == "meta"
        assert meta_sampler.drawn.pop() == (is_gram, torch.float64, "meta")
        draw(5, 2)
        assert meta_sampler.drawn == []


def test_what_it_does_not_serve_comes_from_the_cpu(meta_sampler):
    source = fl.SphereTasks(4)
    for draw in (source.sample, source.sample_gram):
        assert draw(5, 2, device="meta")[0].device.type == "meta"
    assert meta_sampler.drawn == []
