import pytest
import torch
from cuda import emulation
from helpers import poisoned

from fastlin.backends import cuda


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request, monkeypatch):
    """A device whose tensors backend="cuda" serves: the CPU, where the kernels are emulated, or a GPU.

    Afterwards its kernels have run.
    """
    monkeypatch.setattr(cuda, "last_kernel", None)
    monkeypatch.setattr(cuda, "last_sampler", None)
    if request.param == "gpu":
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        with cuda.emulated(emulation.module()), poisoned():
            yield torch.device("cpu")
    assert (cuda.last_kernel or cuda.last_sampler) is not None
