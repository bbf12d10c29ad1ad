"""Without triton, and without a GPU: everything else works, and the backend says why it does not serve."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from support.op_cases import HAS_TRITON, make

import fastlin as fl
from fastlin.backends import triton


def test_not_installed():
    """Import, another backend and `fastlin info`, in a process that cannot import triton."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fastlin as fl\n"
        "from fastlin.cli import main\n"
        "z = torch.ones(2, 3, 4)\n"
        "print(float(fl.prompt_loss(z, z[:, 0], z[:, 0, 0], None, None, torch.eye(4), torch.ones(4))[0]))\n"
        "try: fl.gram(z, backend='triton')\n"
        "except fl.BackendError as error: print(error)\n"
        "main(['info'])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "gram: backend 'triton' cannot serve this call: triton is not installed; pip install 'fast" in run.stdout
    (line,) = [line for line in run.stdout.splitlines() if line.split()[:1] == ["triton"]]
    assert "triton is not installed" in line


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(monkeypatch):
    monkeypatch.setattr(triton._launch(), "interprets", lambda: False)
    assert triton.backend.supports("predict", torch.device("cuda"), torch.float32, 3) == "torch sees no GPU"
    assert fl.info()["backends"]["triton"] == {"available": False, "reason": "torch sees no GPU", "auto": True}
    with pytest.raises(fl.BackendError, match="predict: backend 'triton' cannot serve this call: the data are on cpu;"):
        make("predict", backend="triton")()


def test_a_triton_that_does_not_load(monkeypatch):
    def broken():
        raise ImportError("no such library")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton, "_launch", broken)
    triton.why_missing.cache_clear()
    try:
        reason = triton.backend.supports("predict", torch.device("cuda"), torch.float32, 3)
    finally:
        triton.why_missing.cache_clear()
    assert reason == "triton does not load: ImportError: no such library"
