"""What only a GPU can show: streams, several devices, CUDA graphs, compiled code, batches of 10^8 and more."""

import pytest
import torch
from support.op_cases import DOUBLE, LOSSES, PREDICTIONS, assert_close, gradients, make
from support.sampled_cases import AT, SOURCES, differentiable, parameters, sampled
from support.training_configs import config_of

import fastlin as fl
from fastlin.backends import cuda
from fastlin.training import graph
from fastlin.training.loop import Loop

pytestmark = pytest.mark.gpu
OPS = LOSSES + PREDICTIONS
DEVICE = torch.device("cuda")


def on_gpu(op, **given):
    return make(op, **given, backend="cuda").on(DEVICE)


def flat(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("op", OPS)
def test_a_stream_of_its_own(op):
    """The data arrive late on a side stream: a kernel on any other stream would read zeros."""
    case, side = on_gpu(op, B=500), torch.cuda.Stream()
    expected = case(fl.reference)
    late = {name: torch.zeros_like(t) for name, t in case.inputs.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for name, t in case.inputs.items():
            late[name].copy_(t)
        found = case(**late)
    side.synchronize()
    assert_close(found, expected)


def test_nothing_waits_for_the_device():
    """What torch would have to wait for raises; the check of the task indices, which does, is not among it."""
    case = on_gpu("prompt_loss", K=None).differentiable("p", "W", "v")
    given = differentiable(parameters(SOURCES["mixture"], "sampled_loss", R=2), DOUBLE, DEVICE)
    call = sampled("sampled_loss", SOURCES["mixture"], 9, 500, backend="cuda")
    call(**given)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case()[0].backward()
        call(**given)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", OPS)
def test_a_captured_call_is_replayed_on_new_numbers(op):
    case = on_gpu(op, R=2).differentiable()
    leaves = list(case.leaves().values())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = flat(case())
        grads = torch.autograd.grad(sum(value.sum() for value in values), leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.9)
    graph.replay()
    again = flat(case(fl.reference))
    assert_close([value.detach() for value in values], [value.detach() for value in again])
    assert_close(grads, torch.autograd.grad(sum(value.sum() for value in again), leaves))


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_a_captured_draw_reads_the_source_as_it_is(op):
    source = fl.TaskMixture(torch.ones(2, 3), torch.stack([torch.eye(3)] * 2), [0.5, 0.5])
    given = differentiable(parameters(source, op, R=2), DOUBLE, DEVICE)
    call = sampled(op, source, 9, 500, backend="cuda")
    call(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, per_task = call(**given)
        grads = torch.autograd.grad(loss.sum(), list(given.values()))
    for change in (0.0, 1.0):
        source.means += change
        expected = call(**given)
        graph.replay()
        assert_close([loss.detach(), per_task.detach()], [value.detach() for value in expected], 0.0)
        assert_close(grads, torch.autograd.grad(expected[0].sum(), list(given.values())), 0.0)


def test_every_device_is_served():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    expected = make("stack_loss", R=2)(fl.reference)
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        case = make("stack_loss", R=2, backend="cuda").on(device)
        found = case()
        assert all(t.device == device for t in found)
        assert_close([t.cpu() for t in found], expected)
        z, *_ = SOURCES["mixture"].sample(33, 5, device=device)
        assert z.device == device
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("op", OPS)
def test_compiled_code(op):
    case = on_gpu(op).differentiable("p")

    @torch.compile(fullgraph=True)
    def double(p):
        return [2 * value for value in flat(case(p=p))]

    p = case.inputs["p"]
    found, expected = double(p), [2 * value for value in flat(case(fl.reference))]
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found[0].sum(), p), torch.autograd.grad(expected[0].sum(), p))
    assert cuda.backend.last_kernel == "float64 generic"


def test_wrong_task_indices_are_named():
    case = on_gpu("prompt_loss", B=100)
    case.task[50] = 3
    with pytest.raises(ValueError, match="prompt_loss: task holds the index 3; wants 0 <= task < K = 3"):
        case()


def test_data_are_drawn_on_the_device():
    cuda.backend.last_sampler = None
    for method in (SOURCES["mixture"].sample, SOURCES["mixture"].sample_gram):
        found = method(100, 5, **AT, device="cuda", dtype=DOUBLE)
        assert cuda.backend.last_sampler is not None
        assert_close([t.cpu() for t in found[:3]], method(100, 5, **AT, dtype=DOUBLE)[:3], 1e-12)


@pytest.mark.parametrize("batch", [10**8, 2**32 + 5])
def test_a_huge_batch_that_is_drawn(batch):
    """Per-task losses of halves add up to those of the whole; the standard error tells them from other data's."""
    source = fl.TaskMixture(torch.ones(2, 1), torch.ones(2, 1, 1), [0.5, 0.5], stratify=True)
    given = parameters(source, "sampled_loss", t=None)
    given = {name: None if t is None else t.float().to(DEVICE) for name, t in given.items()}
    whole = sampled("sampled_loss", source, 3, batch, backend="cuda", offset=0)(**given)[1]
    half = batch // 2 - batch // 2 % 2
    parts = [
        sampled("sampled_loss", source, 3, size, backend="cuda", offset=offset)(**given)[1].double() * (size / batch)
        for size, offset in ((half, 0), (batch - half, half))
    ]
    assert_close(whole.double(), sum(parts), 1e-6)


def test_a_huge_batch_of_tokens():
    """More numbers than 32 bits count: the last sequences are read where they are."""
    B, m = 2**31 // 3 + 1000, 3
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB of free memory")
    z = torch.zeros(B, 1, m, device=DEVICE)
    q = torch.zeros(B, m, device=DEVICE)
    W, v = torch.eye(m, device=DEVICE), torch.ones(1, m, device=DEVICE)
    z[-1] = q[-1] = 1.0
    yhat = fl.predict(z, q, None, None, W, v, backend="cuda")
    assert yhat[-1].item() == 9.0
    assert yhat[:-1].abs().max().item() == 0.0


def trained(regime, **options):
    given = {"schedule": "one-cycle", "clip": 0.5, "average": 0.4, "batch": 500, "preset": "tuned", **options}
    loop = Loop(config_of(regime, steps=24, records=3, device="cuda", **given), progress=False)
    loop.run()
    return loop


@pytest.mark.parametrize("options", [{}, {"model": "separate"}, {"model": "stack", "layers": 2}], ids=str)
@pytest.mark.parametrize("regime", ["plain", "fine-tune", "joint+heads"])
def test_captured_steps_have_the_bits_of_steps_that_are_launched(regime, options, monkeypatch):
    captured = trained(regime, **options)
    assert graph.way_of_steps(captured.config, 1) == "lean, in a CUDA graph"
    monkeypatch.setattr(graph, "_has_graphs", lambda device: False)
    launched = trained(regime, **options)
    assert captured.records == launched.records
    assert all(map(torch.equal, captured.model.parameters(), launched.model.parameters()))


def test_no_step_between_two_records_waits():
    """Nothing is read back and nothing copied from the host: torch would have to wait for the device."""
    loop = Loop(config_of("joint", steps=24, records=2, device="cuda"), progress=False)
    _, objective, first, end = next(loop._phases())
    loop._one_step(objective, first, end)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(11):
            loop._one_step(objective, first, end)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loop._update.total).all()
