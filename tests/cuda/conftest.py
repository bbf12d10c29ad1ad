import pytest
import torch
from support import emulation
from support.op_cases import poisoned

from fastlin.backends import cuda


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request, monkeypatch):
    """A device whose tensors backend="cuda" serves: the CPU, where the kernels are emulated, or a GPU.

    Afterwards its kernels have run.
    """
    monkeypatch.setattr(cuda.backend, "last_kernel", None)
    monkeypatch.setattr(cuda.backend, "last_sampler", None)
    if request.param == "gpu":
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        with cuda.emulated(emulation.module()), poisoned():
            yield torch.device("cpu")
    assert (cuda.backend.last_kernel or cuda.backend.last_sampler) is not None
