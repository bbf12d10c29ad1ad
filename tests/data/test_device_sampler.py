"""The device draws a batch if one of its backends can, else the CPU draws and the batch is moved."""

import pytest
import torch
from support.backends import install

import fastlin as fl
from fastlin.backends import cpu
from fastlin.backends.eager import EagerBackend


class Drawer(EagerBackend):
    """Draws widths up to 4."""

    name = "drawer"
    draws = True

    def __init__(self):
        self.drawn = []

    def supports(self, op, device, dtype, m):
        return None if m <= 4 else "too wide"

    def sample(self, draw, is_gram, dtype, device):
        self.drawn.append((is_gram, dtype, device.type))
        return cpu.backend.sample(draw, is_gram, dtype, device)


@pytest.fixture
def meta_sampler(monkeypatch):
    return install(monkeypatch, Drawer(), "meta")


def test_the_device_draws(meta_sampler):
    source = fl.SphereTasks(3)
    for draw, is_gram in ((source.sample, False), (source.sample_gram, True)):
        first, q, _, task = draw(5, 2, dtype=torch.float64, device="meta")
        assert first.device.type == q.device.type == task.device.type == "meta"
        assert meta_sampler.drawn.pop() == (is_gram, torch.float64, "meta")
        draw(5, 2)
        assert meta_sampler.drawn == []


def test_the_cpu_draws_other_widths(meta_sampler):
    source = fl.SphereTasks(4)
    for draw in (source.sample, source.sample_gram):
        assert draw(5, 2, device="meta")[0].device.type == "meta"
    assert meta_sampler.drawn == []
