"""Training steps on the device: `fl.train` in CUDA graphs, in emulation.

A step under `DeviceStep` reads nothing back and copies nothing from the host; repeated, its launches and operations
give the following steps bit for bit.
"""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from support import emulation
from support.device_steps import DeviceStep, fake_graphs
from support.training_configs import config_of
from support.training_runs import EVALUATION_BATCH

import fastlin as fl
from fastlin.backends import cuda
from fastlin.backends.update import Schedule
from fastlin.training import graph, judge
from fastlin.training.graph import way_of_steps, why_not_captured
from fastlin.training.loop import Loop

# Of width 6, which kernels of their own serve in float32.
MIX = fl.TaskMixture([[1.0, 2.0, 0.0, 0.0, 1.0], [0.0, 1.0, -1.0, 1.0, 0.0]], [1.0, 2.0], [0.3, 0.7], noise_std=0.3)
SPHERE = fl.SphereTasks(4, noise_std=0.2, bias=True)
TARGET = {"mix": SPHERE, "target": fl.FixedTask([0.2, 0.4, 0.6, 0.8], bias=True), "own_data": False}
POINTS = fl.PointSet(torch.randn(9, 4), torch.randn(9), bias=True)
DIVERGING = {"optimiser": "SGD", "optimiser_options": {}, "lr": 1e6, "clip": None, "units": "literal"}
CASES = {
    "plain": {"regime": "plain"},
    "one trial": {"regime": "joint", "trials": 1},
    "fine-tune": {"regime": "fine-tune"},
    "joint": {"regime": "joint"},
    "joint+heads": {"regime": "joint+heads"},
    "heads in turn": {"regime": "one-prompt", "prompts_in_turn": True},
    "each task": {"regime": "joint", "batch_per_task": True},
    "annealed": {"regime": "zs+fs:v", **TARGET},
    "side by side": {"regime": ["zs:q", "zs+fs:v", "zs+fs:all"], "model": "separate", **TARGET},
    "separate": {"regime": "joint", "model": "separate"},
    "reduced": {"regime": "joint", "model": "reduced"},
    "stack": {"regime": "joint", "model": "stack", "layers": 2},
    "diverging": {"regime": "joint", **DIVERGING},
}


def loop_of(regime, **options):
    """A run of 12 steps with 3 records, all options of the update, and a schedule of the learning rate."""
    given = {
        "mix": MIX,
        "schedule": "one-cycle",
        "clip": 0.5,
        "weight_decay": 0.01,
        "average": 0.4,
        "batch": 40,
        **options,
    }
    config = config_of(regime, steps=12, records=3, backend="cuda", preset="tuned", **given)
    return Loop(config, progress=False)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(judge, "_EVALUATION_BATCH", EVALUATION_BATCH)
    with cuda.emulated(emulation.module()):
        yield


def parameters(loop):
    return {name: raw.detach().clone() for name, raw in loop.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_repeated_steps_are_the_following_steps(case, dtype, emulated):
    """Parameters and records of a run whose steps repeat what one did, and of one that takes each step."""
    plain = loop_of(dtype=dtype, **CASES[case])
    plain.run()
    assert cuda.backend.last_kernel is not None
    with fake_graphs() as graphs:
        loop = loop_of(dtype=dtype, **CASES[case])
        loop.run()
    phases = len(loop.config.regime.phases)
    assert len(graphs.steps) == phases
    assert graphs.repeats == 12 - 2 * phases
    expected = parameters(plain)
    for name, raw in parameters(loop).items():
        assert torch.equal(raw, expected[name]), name
        assert torch.isfinite(raw).all()
    assert loop.records == plain.records
    assert len(loop.records) >= 3
    assert loop.diverged == plain.diverged
    assert bool(loop.diverged) == (case == "diverging")


OF_LOSS = {"attention": 5, "generic": 7}
"""Launches of a loss with gradients of drawn sequences, by the kernels that serve it; four in all others."""
OF_STEP = {"plain": (1, 7), "joint": (1, 8), "joint+heads": (1, 8), "annealed": (2, 8), "stack": (1, 19)}
"""Losses, and operations of torch: factors of the parameters, tasks in order, the ends of a stack, factors and sums of
terms.
"""


@pytest.mark.parametrize("case", OF_STEP)
def test_launches_of_a_step(case, emulated):
    """At most so many, with two for the update."""
    losses, most = OF_STEP[case]
    with fake_graphs() as graphs:
        loop_of(dtype=torch.float32, **CASES[case]).run()
    of_loss = OF_LOSS.get(cuda.backend.last_kernel.split()[-1], 4)
    for step in graphs.steps:
        assert step.launches <= losses * of_loss + 2
        assert len(step.operations) <= most, step.operations


def test_an_update_of_a_step_is_two_launches(emulated, monkeypatch):
    counts, prepare = [], cuda.backend.prepare_update

    def counted(rule, state):
        update = prepare(rule, state)

        def apply(*given):
            before = emulation.launches()
            update(*given)
            counts.append(emulation.launches() - before)

        return apply

    monkeypatch.setattr(cuda.backend, "prepare_update", counted)
    with fake_graphs():
        loop_of("joint+heads").run()
    assert counts == [2, 2]  # the first step, and the second one, which is repeated


def in_step(action):
    with DeviceStep().recording():
        action()


@pytest.mark.parametrize(
    "action",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: bool((t > 0).all()),
        lambda t: float(t[0]),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.tensor([1.0]),
        lambda t: t.new_tensor([1.0]),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: t.to("cpu"),
        lambda t: t.cpu(),
        lambda t: torch.equal(t, t),
    ],
)
def test_what_a_step_must_not_do_is_refused(action):
    values = torch.ones(3)
    in_step(lambda: values.mul_(2.0))
    with pytest.raises(AssertionError):
        in_step(lambda: action(values))


def test_operations_are_repeated_on_the_memory_that_they_had():
    values, total, step = torch.ones(3), torch.zeros(()), DeviceStep()
    with step.recording():
        doubled = 2.0 * values
        total.add_(doubled.view(-1)[:2].sum())
        values.mul_(3.0)
    step.repeat()
    step.repeat()
    assert values.tolist() == [27.0] * 3
    assert doubled.tolist() == [18.0] * 3
    assert total.item() == 4.0 + 12.0 + 36.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"own_data": True}, "phase 0: own_data"),
        ({"shards": 2}, "phase 0: shards"),
        (
            {"regime": "zs:v", "mix": SPHERE, "target": POINTS, "own_data": False},
            "phase 1: target is a PointSet, whose",
        ),
    ],
)
def test_where_a_step_is_not_captured_the_run_says_why(options, reason, emulated):
    given = {"regime": "plain", **options}
    with fake_graphs() as graphs:
        loop = loop_of(**given)
        said = way_of_steps(loop.config, 1)
        assert said.startswith(f"lean, in a CUDA graph, but not {reason}")
        loop.run()
        assert len(graphs.steps) == len(loop.config.regime.phases) - 1
        assert way_of_steps(loop_of("joint").config, 1) == "lean, in a CUDA graph"
        assert way_of_steps(loop_of("joint").config, 2) == "lean, in a CUDA graph, but not phase 0: 2 processes"
        assert way_of_steps(loop_of("joint", optimiser="RMSprop").config, 1) == "autograd: optimiser RMSprop"
    assert way_of_steps(loop_of("joint").config, 1) == "lean"
    assert why_not_captured(loop_of("joint").config, 0, 1) == "device cpu"


@pytest.fixture
def torch_cuda(monkeypatch):
    """torch.cuda, as far as `captured` uses it, on a machine without a GPU: what happens, and on which stream."""
    found = SimpleNamespace(current="current", events=[], fails=False)

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            found.events.append(f"{self.name} waits for {other.name}")

    streams = {"current": Stream("current"), "side": Stream("side")}

    @contextlib.contextmanager
    def use(stream):
        before, found.current = found.current, stream.name
        try:
            yield
        finally:
            found.current = before

    @contextlib.contextmanager
    def capture(graph, stream):
        """As torch does it: an error leaves the stream."""
        before, found.current = found.current, f"{stream.name}, captured"
        if found.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        found.current = before

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams["current"])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: streams["side"])
    made = SimpleNamespace(replay=lambda: found.events.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    return found


def test_a_step_is_taken_then_captured_then_replayed(torch_cuda):
    replay = graph.captured(lambda: torch_cuda.events.append(f"step on {torch_cuda.current}"), torch.device("cuda"))
    replay()
    assert torch_cuda.events == [
        "side waits for current",
        "step on side",
        "current waits for side",
        "step on side, captured",
        "replay",
    ]


def test_a_capture_that_fails_leaves_the_steps_as_they_are(emulated, torch_cuda, monkeypatch):
    expected = loop_of("joint")
    expected.run()
    torch_cuda.fails = True
    monkeypatch.setattr(graph, "_has_graphs", lambda device: True)
    loop = loop_of("joint")
    with pytest.warns(UserWarning, match="launched kernel by kernel: its capture fails: operation not permitted"):
        loop.run()
    assert loop.records == expected.records
    assert torch_cuda.current == "current"


def test_a_run_that_resumes_between_two_records_has_the_same_bits(emulated, tmp_path):
    """The rest of the interval is uploaded anew."""
    with fake_graphs():
        whole = loop_of("joint")
        whole.run()
        first, saved = loop_of("joint"), {}
        monkey = pytest.MonkeyPatch()
        one_step = Loop._one_step

        def stops(self, *given):
            if self.step == 6 and not saved:
                saved.update(state=copy.deepcopy(state_of(self)), records=copy.deepcopy(self.records))
            one_step(self, *given)

        monkey.setattr(Loop, "_one_step", stops)
        first.run()
        monkey.undo()
        again = loop_of("joint")
        again.restore(*saved["state"], saved["records"])
        again.run()
    assert again.records == whole.records
    assert all(torch.equal(raw, parameters(whole)[name]) for name, raw in parameters(again).items())


def state_of(loop):
    """What `Loop._save` writes."""
    kept = []
    loop._save(SimpleNamespace(save=lambda tree, tensors: kept.extend((tree, tensors))))
    return kept


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (4096, [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11]]),
        (3, [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10], [11]]),
    ],
)
def test_a_run_uploads_the_steps_up_to_the_next_record(rows, expected, emulated, monkeypatch):
    """At once, up to a most; the phases of 6 steps have records after 4, 6, 8 and 12."""
    uploads, upload = [], Schedule.upload
    monkeypatch.setattr(graph, "_MOST_ROWS", rows)
    monkeypatch.setattr(
        Schedule, "upload", lambda self, steps: (uploads.append([s for s, *_ in steps]), upload(self, steps))
    )
    with fake_graphs():
        loop_of("fine-tune").run()
    assert uploads == expected
