"""The optimiser update on a GPU is that of the CPU, to rounding; tests/training/test_lean.py compares both with torch.

Norms are added in another order, and powers of beta rounded by another function; all else has the same arithmetic.
"""

import contextlib

import pytest
import torch
from support import emulation
from support.op_cases import DOUBLE

from fastlin import backends
from fastlin.backends import cuda
from fastlin.backends.update import Schedule, UpdateRule, UpdateState

SIZES = ((7, 3), (1100,), (4, 5))  # 1141 numbers of a trial: two chunks
COPIES = [(1, 21), (1, 1100), (3, 5)]
ADAM = UpdateRule(True, 0.7, 0.9, 0.98, 1e-8, 0.1, 0.5)
SGD = UpdateRule(False, 0.7, 0.8, 0.0, 0.0, 0.1, 0.5)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with contextlib.ExitStack() as stack:
        if request.param == "emulated":
            stack.enter_context(cuda.emulated(emulation.module()))
        yield torch.device("cpu" if request.param == "emulated" else "cuda")


def normal(*shape, seed, dtype=DOUBLE):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state_of(device, dtype=DOUBLE, R=3, schedule=None):
    """Parameters of three shapes: with a factor, idle in a trial, and with copies in the gradient."""
    values = [normal(R, *size, seed=i, dtype=dtype).to(device) for i, size in enumerate(SIZES)]
    zeros = [[torch.zeros_like(value) for value in values] for _ in range(3)]
    idle = torch.zeros(R, dtype=torch.uint8, device=device)
    idle[0] = 1
    counts = torch.zeros(R, dtype=torch.int64, device=device)
    return UpdateState(
        values=values,
        first=zeros[0],
        second=zeros[1],
        averages=zeros[2],
        idle=[None, idle, None],
        units=[normal(7, 3, seed=9, dtype=dtype).to(device), None, None],
        copies=COPIES,
        total=torch.zeros(R, dtype=DOUBLE, device=device),
        rates=torch.linspace(1e-3, 1e-2, R, dtype=DOUBLE).to(device),
        updates=counts[:1].clone(),
        diverged=counts,
        schedule=schedule,
    )


def gradients_of(step, device, dtype=DOUBLE, R=3):
    shapes = ((7, 3), (1100,), (4, 3, 5))
    return [normal(R, *shape, seed=100 * step + i, dtype=dtype).to(device) for i, shape in enumerate(shapes)]


def tensors(state):
    return [*state.values, *state.first, *state.second, *state.averages, state.total, state.updates, state.diverged]


def updated(name, rule, device, dtype=DOUBLE, steps=100, weights=lambda step: 0.0 if step < 60 else 1 / (step - 59)):
    """The state after some updates; the last trial's loss is not finite in the 50th."""
    state = state_of(device, dtype)
    update = backends.load(name).prepare_update(rule, state)
    for step in range(steps):
        loss = torch.tensor([1.0, 2.0, torch.nan if step == 49 else 3.0], dtype=dtype, device=device)
        update(loss, gradients_of(step, device, dtype), weights(step))
    return [tensor.cpu() for tensor in tensors(state)]


@pytest.mark.parametrize("clip", [-1.0, 0.5])
@pytest.mark.parametrize("rule", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_update_is_that_of_the_cpu(dtype, rule, clip, device):
    """After 100 updates: 1e-12 in float64; in float32 a few roundings an update."""
    rule, tolerance = rule._replace(clip=clip), 1e-12 if dtype is DOUBLE else 1e-5
    found = updated("cuda", rule, device, dtype)
    expected = updated("cpu", rule, torch.device("cpu"), dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert found[-1].tolist() == [0, 0, 50]
    assert found[-2].tolist() == [100]
    assert torch.equal(found[1][0], normal(3, 1100, seed=1, dtype=dtype)[0])  # idle in the first trial
    assert not torch.equal(found[1][1], normal(3, 1100, seed=1, dtype=dtype)[1])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_an_update_has_the_same_bits_in_any_order_of_threads(order):
    with cuda.emulated(emulation.module()):
        expected = updated("cuda", ADAM, torch.device("cpu"), torch.float32, 3)
        with emulation.device(order=order, multiprocessors=1 + order):
            found = updated("cuda", ADAM, torch.device("cpu"), torch.float32, 3)
    assert all(one.numpy().tobytes() == other.numpy().tobytes() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", [ADAM, ADAM._replace(clip=-1.0), SGD])
def test_an_update_is_two_launches(rule):
    with cuda.emulated(emulation.module()):
        before = emulation.launches()
        updated("cuda", rule, torch.device("cpu"), steps=1)
        assert emulation.launches() - before == 2


def test_a_schedule_is_read_in_device_memory(device):
    """Rates and weights of each step, from one upload; the same bits as with those given by value."""
    steps = [(7 + i, 1.0 / (i + 1), 0.0 if i < 2 else 1 / (i - 1), [0.5 * i, -i]) for i in range(5)]
    schedule = Schedule(4, 2, device)
    own, other = state_of(device, schedule=schedule), state_of(device)
    scheduled, plain = (backends.load("cuda").prepare_update(ADAM, state) for state in (own, other))
    rates, loss, seen = other.rates.clone(), torch.ones(3, dtype=DOUBLE, device=device), []
    for chunk in (steps[:4], steps[4:]):
        schedule.upload(chunk)
        for step, factor, weight, _ in chunk:
            seen.append((int(schedule.step), schedule.factors.tolist()))
            other.rates.copy_(rates * factor)
            for average_weight in (0.0, weight):  # two turns of a step, of which the last one averages
                scheduled(loss, gradients_of(step, device), average_weight if average_weight != weight else None)
                plain(loss, gradients_of(step, device), average_weight)
                if weight == 0.0:
                    break
    assert seen == [(step, factors) for step, _, _, factors in steps]
    assert all(map(torch.equal, tensors(own), tensors(other)))
    before = schedule.words[1:].clone()
    scheduled(loss, gradients_of(0, device), None)
    scheduled(loss, gradients_of(0, device), None)
    assert int(schedule.words[0]) == 3
    assert before.isfinite().all()


def test_what_the_update_refuses():
    with cuda.emulated(emulation.module()):
        state, module = state_of(torch.device("cpu")), emulation.module()
        many = state._replace(**{name: getattr(state, name) * 6 for name in UpdateState._fields[:7]})
        update = backends.load("cuda").prepare_update(ADAM, many)
        with pytest.raises(ValueError, match=r"parameters: got 18, wants an integer in \[0, 16\]"):
            update(torch.ones(3, dtype=DOUBLE), gradients_of(0, "cpu") * 6, 0.0)
        words = state.total.data_ptr()
        rest = (3, [], [[]] * 7, [state.total.data_ptr()] * 5, True, (0.0,) * 7)
        with pytest.raises(ValueError, match="schedule: got 2, wants an integer in"):
            module.update(True, 0, 0, words, (words, 1, 2, True), *rest)
        with pytest.raises(ValueError, match="schedule: got address"):
            module.update(True, 0, 0, words, (words + 1, 1, 3, True), *rest)
        with pytest.raises(ValueError, match="workspace: got address 0"):
            module.update(True, 0, 0, 0, (0, 0, 0, False), *rest)
