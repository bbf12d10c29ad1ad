"""Batches of sequences that kernels draw: summed in pieces, by any number of threads, with a stream for each trial."""

import re

import numpy as np
import pytest
import torch
from support.op_cases import DOUBLE, assert_close
from support.sampled_cases import (
    AT,
    DTYPES,
    SOURCES,
    assert_equal_to_kept,
    differentiable,
    kept,
    parameters,
    results,
    sampled,
)

import fastlin as fl
from fastlin.backends import cpu

OPS = ("sampled_loss", "sampled_stack_loss")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["mixture", "everything", "300 tasks"])
def test_large_batches_are_summed_in_pieces(name, op, dtype, monkeypatch):
    """Six pieces, the last of 30. A sum of 530 terms in another order differs by less than 530 eps / 2 of its terms'
    sizes, which for gradients are up to some ten times the sum's; of per-task losses the terms are positive.
    """
    source = SOURCES[name]
    for weight in (None, [1.0 / source.K] * source.K):
        call = sampled(op, source, 9, 530, weight=weight)
        given = differentiable(parameters(source, op, R=3), dtype)
        monkeypatch.setattr(cpu.backend, "piece", 1 << 18)
        whole = results(call, given)
        monkeypatch.setattr(cpu.backend, "piece", 100)
        found = results(call, given)
        for key, value in whole.items():
            assert_close(found[key], value, (1 if "d" not in key else 10) * 265 * torch.finfo(dtype).eps, key)
        with torch.no_grad():
            assert_close(call(**given), [found["loss"], found["per_task"]], 0.0)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_per_task_losses_in_pieces(op, monkeypatch):
    monkeypatch.setattr(cpu.backend, "piece", 40)
    assert_equal_to_kept(op, "mixture", DOUBLE, 9, 150, {"R": 2}, {}, per_task=True)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_any_number_of_threads_has_the_same_bits(op, dtype, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu.backend, "piece", 1500)
    for name in ("everything", "300 tasks"):
        given = differentiable(parameters(SOURCES[name], op, R=2), dtype)
        try:
            found = []
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                found.append(results(sampled(op, SOURCES[name], 9, 2100), given))
        finally:
            torch.set_num_threads(before)
        for other in found[1:]:
            for key, value in found[0].items():
                assert torch.equal(other[key], value), (name, key)


@pytest.mark.parametrize("call", ["whole", "pieces", "kept"])
def test_another_default_device(call, monkeypatch):
    """What a call allocates is where its parameters are, whatever torch's default is."""
    source = SOURCES["mixture"]
    given = parameters(source, "sampled_loss")
    loss = kept("sampled_loss", source, 9, 100, DOUBLE) if call == "kept" else sampled("sampled_loss", source, 9, 100)
    if call == "pieces":
        monkeypatch.setattr(cpu.backend, "piece", 30)
    expected = loss(**given)
    with torch.device("meta"):
        found = loss(**given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "shape", "weight"),
    [
        (OPS[0], {"H": 2}, None),
        (OPS[0], {"t": None}, [0.2, 0.3, 0.5]),
        (OPS[1], {}, None),
        (OPS[1], {}, [0.2, 0.3, 0.5]),
    ],
)
@pytest.mark.parametrize("stream", ["trial", [7, 300, 7], (65535, 0, 256), range(5, 8), torch.tensor([1, 2, 3])])
def test_trials_with_streams_of_their_own(stream, op, shape, weight, dtype):
    """Bit for bit the separate calls, in losses and all gradients, also those of per-task losses."""

    def everything(given, stream):
        given = {name: t for name, t in given.items() if t is not None}
        loss, per_task = sampled(op, source, 9, 50, stream=stream, weight=weight)(**{"p": None, **given})
        grads = [torch.autograd.grad(x.sum(), list(given.values()), retain_graph=True) for x in (3 * loss, per_task)]
        return loss, per_task, *grads[0], *grads[1]

    source = SOURCES["mixture"]
    given = differentiable(parameters(source, op, R=3, **shape), dtype)
    found = everything(given, stream)
    for r, s in enumerate(range(3) if isinstance(stream, str) else stream):
        one = {name: None if t is None else t[r : r + 1].detach().requires_grad_() for name, t in given.items()}
        for a, b in zip(found, everything(one, int(s)), strict=True):
            assert torch.equal(a[r : r + 1], b)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", OPS)
def test_one_stream_is_that_stream_for_every_trial(op):
    """Trials that share their data have what each would have alone, to rounding."""
    given = differentiable(parameters(SOURCES["mixture"], op, R=3), DOUBLE)
    shared, own = (results(sampled(op, SOURCES["mixture"], 9, 50, stream=s), given) for s in (9, [9, 9, 9]))
    assert_close(list(shared.values()), list(own.values()), 1e-13)


@pytest.mark.usefixtures("any_backend")
def test_streams_that_differ_give_other_losses():
    given = parameters(SOURCES["mixture"], "sampled_loss", R=1)
    losses = [float(sampled("sampled_loss", SOURCES["mixture"], 9, 50, stream=[s])(**given)[0]) for s in range(300)]
    assert len(set(losses)) == 300


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("stream", "R", "error", "message"),
    [
        ([1, 2], 3, ValueError, "stream has 2 entries, but the parameters have R = 3 trials; wants an integer, "),
        ([1, 2, 3, 4], 3, ValueError, "stream has 4 entries, but the parameters have R = 3 trials; wants an integer, "),
        ([], 3, ValueError, "stream has 0 entries, but the parameters have R = 3 trials"),
        ("trial", None, ValueError, "stream is 'trial', but the parameters have no trials; wants an integer"),
        ([1], None, ValueError, "stream is [1], but the parameters have no trials; wants an integer"),
        ("trials", 3, ValueError, "stream is 'trials'; wants an integer, \"trial\", or an integer for each of the R"),
        ("", 3, ValueError, "stream is ''; wants an integer"),
        ([1.0, 2.0, 3.0], 3, TypeError, 'stream is [1.0, 2.0, 3.0]; wants an integer, "trial", or'),
        (1.5, 3, TypeError, 'stream is 1.5; wants an integer, "trial", or'),
        (None, 3, TypeError, 'stream is None; wants an integer, "trial", or'),
        ([1, 2, 2**16], 3, ValueError, "stream: got 65536, wants an integer in [0, 65536)"),
        ([1, 2, -1], 3, ValueError, "stream: got -1, wants an integer in [0, 65536)"),
    ],
)
def test_wrong_streams(op, stream, R, error, message):
    given = parameters(SOURCES["mixture"], op, R=R)
    with pytest.raises(error, match=re.escape(message)):
        sampled(op, SOURCES["mixture"], 9, 5, stream=stream)(**given)


def test_streams_of_numpy():
    given = parameters(SOURCES["mixture"], "sampled_loss", R=3)
    found, expected = (
        fl.sampled_loss(SOURCES["mixture"], 9, 5, *given.values(), **{**AT, "stream": s})
        for s in (np.array([1, 2, 3]), [1, 2, 3])
    )
    assert_close(found, expected, 0.0)


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_the_reference_takes_streams_of_trials(op):
    given = parameters(SOURCES["mixture"], op, R=3).values()
    results = [
        getattr(m, op)(SOURCES["mixture"], 9, 5, *given, **{**AT, "stream": "trial"}) for m in (fl, fl.reference)
    ]
    assert_close(*results)
    same = getattr(fl.reference, op)(SOURCES["mixture"], 9, 5, *given, **{**AT, "stream": [0, 1, 2]})
    assert_close(same, results[1], 0.0)
