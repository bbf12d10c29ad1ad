"""What the cuda backend says of itself, what it refuses, and what it hands to its kernels."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from support import emulation
from support.op_cases import DOUBLE, make
from support.sampled_cases import SOURCES
from torch.utils._python_dispatch import TorchDispatchMode

import fastlin as fl
from fastlin import _extension, backends, validation
from fastlin.backends import cpu, cuda

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def no_module(monkeypatch):
    monkeypatch.setattr(_extension, "_load", lambda name: (None, f"{name} is not built"))


@pytest.fixture
def built(monkeypatch):
    """A module that is built; its `reason` is what it says of the device."""
    module = SimpleNamespace(reason="", why_not=lambda: module.reason)
    monkeypatch.setattr(_extension, "_load", lambda name: (module, None))
    return module


@pytest.mark.usefixtures("no_module")
def test_without_its_module():
    assert cuda.backend.supports("prompt_loss", CUDA, torch.float32, 11) == "fastlin._cuda is not built"
    found = fl.info()["backends"]["cuda"]
    assert found == {"available": False, "reason": "fastlin._cuda is not built", "auto": True}
    assert fl.info()["auto"]["cuda"] == ["cuda", "triton", "eager"]


def test_how_a_module_comes_to_be_missing(monkeypatch):
    monkeypatch.setattr(_extension.importlib.util, "find_spec", lambda name: None)
    _extension._load.cache_clear()
    try:
        assert _extension.why_missing(_extension.CUDA).startswith("fastlin._cuda is not built (nvcc was not found when")
        assert _extension.extension(_extension.CUDA) is None
    finally:
        _extension._load.cache_clear()


def test_without_a_driver(built):
    built.reason = "CUDA driver version is insufficient for CUDA runtime version"
    assert cuda.backend.supports("gram", CUDA, DOUBLE, 3) == built.reason
    built.reason = ""
    assert cuda.backend.supports("gram", CUDA, DOUBLE, 3) is None


@pytest.mark.usefixtures("built")
def test_devices_and_dtypes_that_it_does_not_serve():
    assert cuda.backend.supports("gram", CPU, DOUBLE, 3) == "the data are on cpu; wants a cuda device"
    reason = "the data have dtype torch.float16; wants torch.float32 or torch.float64"
    assert cuda.backend.supports("gram", CUDA, torch.float16, 3) == reason
    with pytest.raises(fl.BackendError, match="predict: backend 'cuda' cannot serve this call: the data are on cpu"):
        make("predict", backend="cuda")()


def test_emulation_is_for_a_while():
    case = make("prompt_loss", backend="cuda")
    with cuda.emulated(emulation.module()):
        case()
        assert cuda.backend.supports("gram", CUDA, DOUBLE, 3) == "the data are on cuda; wants a cuda device"
    with pytest.raises(fl.BackendError, match="the data are on cpu"):
        case()


def test_an_error_of_cuda_is_raised_with_its_text():
    """The emulated machine has one device."""
    module, z, task = emulation.module(), torch.zeros(2, dtype=DOUBLE), torch.zeros(1, dtype=torch.int64)
    draw = SOURCES["mixture"].draw(1, 1)
    with pytest.raises(RuntimeError, match=r"^CUDA: gram: \w+"):
        module.gram(True, 7, 0, 0, (1, 1, 1, 1, 1), (z.data_ptr(), z[1:].data_ptr()))
    with pytest.raises(RuntimeError, match=r"^CUDA: sample_tasks: \w+"):
        module.sample_tasks(7, 0, draw.packed(draw.arrays), 1, task.data_ptr())


@pytest.mark.parametrize("op", ["prompt_loss", "gram_stack_loss"])
def test_wrong_task_indices_are_named(op):
    case = make(op, backend="cuda")
    case.task[1] = 3
    with (
        cuda.emulated(emulation.module()),
        pytest.raises(ValueError, match=f"{op}: task holds the index 3; wants 0 <= task < K = 3"),
    ):
        case()


@pytest.fixture
def captured(monkeypatch):
    """Tensors are taken for those of a CUDA graph in capture."""
    monkeypatch.setattr(validation, "_is_captured", lambda tensor: True)


@pytest.mark.usefixtures("captured")
def test_a_capture_reads_no_numbers(monkeypatch):
    """The checks are enqueued: they raise where torch evaluates them at once, as it does on the CPU."""
    task = torch.tensor([0, 1, 2])
    reads = []
    for name in ("tolist", "item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: reads.append(name))
    assert validation.task_indices("predict", 3, task) == 3
    validation.finite("predict", {"z": torch.ones(3), "task": task})
    assert reads == []
    with pytest.raises(RuntimeError, match="predict: task holds an index outside 0 <= task < K = 2"):
        validation.task_indices("predict", 2, task)
    with pytest.raises(RuntimeError, match="predict: z holds values that are not finite"):
        validation.finite("predict", {"z": torch.tensor([torch.inf]), "task": task})
    with pytest.raises(ValueError, match="predict: task alone tells K, which a CUDA graph cannot read; wants p, v or"):
        validation.task_indices("predict", -1, task)


@pytest.fixture
def streams(monkeypatch):
    """A device whose copies stay on the CPU, with two streams and a record of what is told to the allocator."""
    found = SimpleNamespace(current="first", recorded=[], captured=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captured)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: found.recorded.append(stream))
    return found


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_arrays_are_copied_once_and_again_when_they_change(mode, streams):
    """Into the same memory, which a CUDA graph may read; arrays of inference mode, which do not tell, every time."""
    with mode():
        array = torch.arange(3.0)
        copy = cuda._copy(array, CPU)
        assert copy.data_ptr() != array.data_ptr()
        address = copy.data_ptr()
        array += 1
    for _ in range(2):
        assert cuda._copy(array, CPU).data_ptr() == address
        assert torch.equal(copy, array)
    with torch.inference_mode():
        copy.zero_()
    assert torch.equal(cuda._copy(array, CPU), torch.zeros(3)) == (mode is contextlib.nullcontext)
    assert streams.recorded == []


def test_arrays_that_another_stream_reads_are_kept_for_it(streams):
    array, device = torch.arange(3.0), CPU
    cuda._copy(array, device)
    streams.current = "second"
    cuda._copy(array, device)
    assert streams.recorded == ["second"]
    streams.captured = True
    cuda._copy(array, device)
    assert streams.recorded == ["second"]
    count = len(cuda._copies)
    del array
    assert len(cuda._copies) == count - 1


def test_where_sources_draw(monkeypatch):
    """By the cuda kernels on a device that they serve, unless torch transforms or watches what is allocated."""
    assert fl.backends.sampler_on(CPU, torch.float32, 11) is cpu.backend
    monkeypatch.setattr(cuda.backend, "supports", lambda op, device, dtype, m: None if device.type == "cuda" else "no")
    assert fl.backends.sampler_on(CPU, torch.float32, 11) is cpu.backend
    assert fl.backends.sampler_on(CUDA, torch.float32, 11) is cuda.backend
    with TorchDispatchMode():
        assert fl.backends.sampler_on(CUDA, torch.float32, 11) is cpu.backend
    seen = []
    torch.func.grad(lambda x: seen.append(fl.backends.sampler_on(CUDA, torch.float32, 11)) or x)(torch.ones(()))
    assert seen == [cpu.backend]
    monkeypatch.setattr(cuda.backend, "supports", lambda *_: "no GPU")
    assert fl.backends.sampler_on(CUDA, torch.float32, 11) is cpu.backend


def test_auto_takes_it_on_a_cuda_device(monkeypatch):
    monkeypatch.setattr(cuda.backend, "supports", lambda *_: None)
    assert backends.resolve("auto", "predict", CUDA, DOUBLE, 3) == "cuda"
