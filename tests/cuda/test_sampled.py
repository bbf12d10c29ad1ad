"""Drawn sequences: the CUDA kernels draw the CPU backend's data for the same seed, and the losses are those of it.

Tasks are the same exactly. Numbers are within the bound of test_sampler_kernels.py of the float64 oracle, as those of
every instruction set are; losses and gradients are those of the same data drawn by these kernels and kept.
"""

import pytest
import torch
from data.test_sampler_kernels import AT, BATCH, SOURCES, excess, source_of
from support import cuda_kernels
from support.op_cases import DOUBLE, EAGER_TOLERANCE, assert_close
from support.sampled_cases import AT as AT_OF_LOSSES
from support.sampled_cases import SOURCES as OF_LOSSES
from support.sampled_cases import differentiable, parameters, results, sampled

import fastlin as fl
from fastlin.backends import cpu, cuda
from fastlin.data import sources
from fastlin.ops.sampled import sampled_gradients

DTYPES = (torch.float32, DOUBLE)
OPS = ("sampled_loss", "sampled_stack_loss")


@pytest.fixture
def kernels(machine, monkeypatch):
    """The device, with sources that draw by its kernels also where they are emulated."""
    monkeypatch.setattr(sources, "sampler_on", lambda device, dtype, m: cuda.backend)
    return machine


def draw(source, n, form, device, batch=BATCH, **options):
    method = source.sample_gram if form == "gram" else source.sample
    found = method(batch, n, **{**AT, **options}, device=device)
    assert all(t.device == device for t in found)
    return [t.cpu() for t in found]


@pytest.mark.parametrize("d", [1, 2, 10])
@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", SOURCES)
def test_data_are_those_of_the_oracle(name, form, d, kernels):
    for n, dtype in zip((0, 1, d, 50), (*DTYPES, *DTYPES), strict=True):
        found = draw(source_of(name, d), n, form, kernels, dtype=dtype)
        assert cuda.backend.last_sampler == f"{str(dtype)[6:]} sampled {form}"
        assert excess(found, name, d, n, form) <= 1, (n, dtype)


@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", SOURCES)
def test_data_are_those_of_the_cpu_backend(name, form, machine):
    """In float64 to 1e-12 of the largest entry: nothing but the last bits of the draws differ."""
    drawn = source_of(name, 7).draw(BATCH, 9, **AT)
    found = [t.cpu() for t in cuda.backend.sample(drawn, form == "gram", DOUBLE, machine)]
    expected = cpu.backend.sample(drawn, form == "gram", DOUBLE, torch.device("cpu"))
    assert torch.equal(found[3], expected[3])
    assert_close(found[:3], expected[:3], 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
def test_pieces_have_the_same_bits(form, dtype, kernels):
    """Wherever the cut is, and around the last sequence: another lane, another block, other neighbours."""
    for name in ("300 tasks", "sphere, everything"):
        for offset, sizes in ((2**32 - 40, [1, 31, 33]), (2**64 - 30, [29, 3, 33])):
            whole = draw(source_of(name, 7), 9, form, kernels, sum(sizes), dtype=dtype, offset=offset)
            start = 0
            for size in sizes:
                at = (offset + start) % 2**64
                part = draw(source_of(name, 7), 9, form, kernels, size, dtype=dtype, offset=at)
                for a, b in zip(part, whole, strict=True):
                    assert torch.equal(a, b[start : start + size])
                start += size


def assert_equal_to_kept(machine, op, name, dtype, n, batch, shape, options, per_task=False):
    """The numbers of a sequence are the same bits, and what differs is the order of sums of 150 terms: 75 eps.

    In float64 eager agrees as well, to the tolerance of all backends.
    """
    source = OF_LOSSES[name]
    given = differentiable(parameters(source, op, n=n, **shape), dtype, machine)
    if "weight" in options:
        options = options | {"weight": torch.tensor(options["weight"], dtype=dtype, device=machine)}
    found = results(sampled(op, source, n, batch, **options, backend="cuda"), given, per_task)
    trials = {name: shape.get(name) for name in "RH"}
    path = cuda_kernels.of_drawn(op, source.m, source.K, dtype, **trials, L=shape.get("L", 2))
    assert cuda.backend.last_kernel == f"{str(dtype)[6:]} sampled {path}"
    data = cuda.backend.sample(source.draw(batch, n, **AT_OF_LOSSES), True, dtype, machine)
    backends = {"cuda": 75 * torch.finfo(dtype).eps} | ({"eager": EAGER_TOLERANCE} if dtype is DOUBLE else {})
    for backend, tolerance in backends.items():

        def kept(backend=backend, **given):
            return getattr(fl, op.replace("sampled", "gram"))(*data, *given.values(), **options, backend=backend)

        for key, value in results(kept, given, per_task).items():
            assert_close(found[key], value, tolerance, f"{key}, {backend}, {n}, {options}")


SHAPES = [
    (OPS[0], {}),
    (OPS[0], {"R": 5, "t": 1}),
    (OPS[0], {"R": 2, "H": 2, "t": None}),
    (OPS[0], {"shared": True, "t": 0}),
    (OPS[1], {"L": 1}),
    (OPS[1], {"R": 3, "L": 3}),
    (OPS[1], {"R": 2, "H": 2}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", OF_LOSSES)
@pytest.mark.parametrize(("op", "shape"), SHAPES, ids=str)
def test_losses_are_those_of_kept_data(op, shape, name, dtype, machine):
    n, options = {"mixture": (9, {}), "sphere": (0, {"see_query": True})}.get(name, (2, {"scale": 0.3}))
    assert_equal_to_kept(machine, op, name, dtype, n, 70, shape, options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch", [0, 1, 31, 32, 33, 150])
def test_batches_weights_and_per_task_gradients(batch, op, machine):
    for name in ("mixture", "300 tasks"):
        K = OF_LOSSES[name].K
        for options in ({}, {"weight": [(k % 5) / K for k in range(K)]}):
            assert_equal_to_kept(machine, op, name, DOUBLE, 5, batch, {"R": 2}, options, per_task=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_large_batches_are_summed_in_pieces(op, dtype, machine, monkeypatch):
    """Six pieces, the last of 30, as test_sampled_batches.py has them for the CPU."""
    for name in ("everything", "fixed"):
        given = differentiable(parameters(OF_LOSSES[name], op, R=2), dtype, machine)
        for weight in (None, torch.full((OF_LOSSES[name].K,), 0.3, dtype=dtype, device=machine)):
            call = sampled(op, OF_LOSSES[name], 9, 530, weight=weight, backend="cuda")
            monkeypatch.setattr(cuda.backend, "piece", 1 << 22)
            whole = results(call, given)
            monkeypatch.setattr(cuda.backend, "piece", 100)
            found = results(call, given)
            for key, value in whole.items():
                assert_close(found[key], value, (1 if "d" not in key else 10) * 265 * torch.finfo(dtype).eps, key)


@pytest.mark.parametrize("op", OPS)
def test_losses_are_those_of_the_cpu_backend(op, machine):
    """The very op on the CPU: float64 to 1e-12, the order of sums and the last bits of the draws."""
    for name, source in OF_LOSSES.items():
        given = parameters(source, op, R=2)
        found = results(sampled(op, source, 9, 150, backend="cuda"), differentiable(given, DOUBLE, machine))
        expected = results(sampled(op, source, 9, 150, backend="cpu"), differentiable(given, DOUBLE))
        for key, value in expected.items():
            assert_close(found[key].cpu(), value, 1e-12, f"{key}, {name}")


@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", OF_LOSSES)
def test_the_step_is_read_from_device_memory(name, form, machine):
    """Data and tasks are those of the same step by value; the step that was given by value is not read."""
    at = {"seed": 3, "stream": 1, "offset": 7}
    step = torch.zeros(1, dtype=torch.int64, device=machine)
    kept = OF_LOSSES[name].draw(BATCH, 5, step=9, **at)._replace(device_step=step)
    for number in (0, 4, 2**24 - 1):
        step.fill_(number)
        draw = OF_LOSSES[name].draw(BATCH, 5, step=number, **at)
        found = cuda.backend.sample(kept, form == "gram", DOUBLE, machine)
        expected = cuda.backend.sample(draw, form == "gram", DOUBLE, machine)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(cuda._drawn_tasks(kept, machine), cuda._drawn_tasks(draw, machine))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["everything", "sphere"])
def test_a_bound_call_reads_the_step_from_device_memory(op, name, machine):
    source, settings, at = OF_LOSSES[name], {"scale": 0.1, "backend": "cuda"}, {"seed": 3, "stream": 1, "offset": 0}
    given = {letter: form.to(machine) for letter, form in parameters(source, op, R=2).items()}
    wants = "".join(letter for letter in "pACWvh" if letter in given)
    of_step = sampled_gradients(op, source, 5, BATCH, given, wants, None, settings, **at)
    step = torch.zeros(1, dtype=torch.int64, device=machine)
    for number in (0, 1, 5):
        step.fill_(number)
        loss, grads = of_step(step)
        expected, expected_grads = of_step(number)
        assert torch.equal(loss, expected)
        assert all(torch.equal(grads[letter], expected_grads[letter]) for letter in wants)
        step += 1
        assert not torch.equal(of_step(step)[0], loss)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_step_in_memory_is_for_kernels_that_read_it(backend):
    source, settings = OF_LOSSES["sphere"], {"scale": 0.1, "backend": backend}
    given = parameters(source, "sampled_loss")
    of_step = sampled_gradients("sampled_loss", source, 5, 8, given, "W", None, settings, seed=3)
    with pytest.raises(ValueError, match="sampled_loss: step is a tensor, wants an integer where no CUDA kernel"):
        of_step(torch.zeros(1, dtype=torch.int64))
