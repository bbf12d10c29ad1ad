"""Models in files: loading returns what was saved, and other files are refused."""

import pickle
import re

import pytest
import safetensors
import torch
from support.model_cases import MIX, MODELS, PLACE, SOFTMAX, N, build
from support.op_cases import DOUBLE

from fastlin import _tensors, models


@pytest.mark.parametrize("name", [*MODELS, *SOFTMAX])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_save_and_load(name, dtype, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a pickle")

    for module, names in ((pickle, ("dump", "dumps", "load", "loads")), (torch, ("save", "load"))):
        for function in names:
            monkeypatch.setattr(module, function, never)
    model = build(name, R=3, H=2, t=3, dtype=dtype, see_query=True)
    path = tmp_path / "model.safetensors"
    models.save(model, path, note="of a test")
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    assert b'\\"note\\": \\"of a test\\"' in path.read_bytes()
    found = models.load(path)
    assert type(found) is type(model)
    assert (found.shape, found.options, found.loss_unit) == (model.shape, model.options, model.loss_unit)
    assert found.describe() == model.describe()
    ours, theirs = model.state_dict(), found.state_dict()
    assert list(ours) == list(theirs)
    for key, value in ours.items():
        assert theirs[key].dtype == value.dtype == dtype
        assert torch.equal(theirs[key], value)
    assert torch.equal(found.loss(MIX, N, 24, **PLACE)[0], model.loss(MIX, N, 24, **PLACE)[0])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_says_nothing_of_shared_prompts(tmp_path):
    """Such files are of models with a prompt for each task."""
    model, path = build("full", R=3), tmp_path / "model.safetensors"
    description = model.describe()
    del description["shape"]["task_prompts"]
    _tensors.write(path, "model", description, model.state_dict())
    found = models.load(path)
    assert found.shape == model.shape
    assert torch.equal(found.p, model.p)


def test_load_of_what_is_no_model(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError):
        models.load(path)
    models.save(build("full"), path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=re.escape(f"{path}: damaged")):
        models.load(path)
    path.write_bytes(data[:-9])
    with pytest.raises(ValueError, match=re.escape(f"{path}: damaged")):
        models.load(path)
