"""Files of tensors: every bit is read back, and a file with a changed bit is refused."""

import os
import re

import pytest
import torch
from support.folders import contents

from fastlin import _tensors
from fastlin._files import FileError

TENSORS = {
    "a": torch.tensor([1.0, float("nan"), -0.0, float("inf")]),
    "b": torch.arange(6).reshape(2, 3).T,
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "true": torch.tensor([True, False]),
}
DESCRIPTION = {"text": 'é "quoted" \\ \n', "third": 1 / 3, "big": 1 << 64, "none": None, "nest": [{"a": [1.5]}]}


def test_tensors_return_as_they_were(tmp_path):
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", DESCRIPTION, TENSORS)
    description, tensors = _tensors.read(path, "thing")
    assert description == DESCRIPTION
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()
        tensors[name].zero_()  # they can be written to
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_that_share_memory(tmp_path):
    """Such as those of an optimiser, or of units that are all one."""
    whole = torch.arange(6.0)
    _tensors.write(tmp_path / "file", "thing", {}, {"a": whole, "b": whole, "part": whole[2:4]})
    _, tensors = _tensors.read(tmp_path / "file", "thing")
    assert torch.equal(tensors["a"], whole)
    assert torch.equal(tensors["b"], whole)
    assert torch.equal(tensors["part"], whole[2:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_types_of_tensors(tmp_path, dtype):
    """Anything in the state of an optimiser."""
    value = torch.tensor([0, 1, 2]).to(dtype)
    _tensors.write(tmp_path / "file", "thing", {}, {"a": value})
    assert torch.equal(_tensors.read(tmp_path / "file", "thing")[1]["a"], value)


def test_every_bit_counts(tmp_path):
    """A file with any one bit changed is refused, and so is one of any other length."""
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", {"a": [1, "é"]}, {"a": torch.ones(2), "b": torch.tensor(3)})
    data = path.read_bytes()

    def is_refused():
        try:
            _tensors.read(path, "thing")
        except FileError as error:
            return str(error).startswith(f"{path}: ")
        return False

    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(data):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), place)
                assert is_refused(), (place, bit)
            os.pwrite(file.fileno(), bytes([byte]), place)
        assert path.read_bytes() == data
        assert _tensors.read(path, "thing")[0] == {"a": [1, "é"]}
        os.pwrite(file.fileno(), b"\0", len(data))
        assert is_refused()
        for length in reversed(range(len(data))):
            os.truncate(path, length)
            assert is_refused(), length


def test_wrong_files_of_tensors(tmp_path, monkeypatch):
    path = tmp_path / "file.safetensors"
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        _tensors.read(path, "thing")
    _tensors.write(path, "thing", {}, {})
    with pytest.raises(FileError, match=r"file\.safetensors: is a thing, wants a model"):
        _tensors.read(path, "model")
    monkeypatch.setattr(_tensors, "VERSION", 2)
    with pytest.raises(FileError, match=r"file\.safetensors: has format version 1, wants 2; another fastlin wrote it"):
        _tensors.read(path, "thing")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.safetensors"
    _tensors.write(path, "thing", {"old": 1}, {"a": torch.ones(3)})
    before = contents(tmp_path)
    with pytest.raises(TypeError):
        _tensors.write(path, "thing", {"old": object()}, {"a": torch.ones(3)})
    assert contents(tmp_path) == before


def test_equal_contents_are_equal_bytes(tmp_path):
    """Safetensors has its metadata in another order each time."""
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64), "ü": torch.tensor(1.5)}
    found = set()
    for i in range(20):
        _tensors.write(tmp_path / f"{i}", "kind", {"n": 1, "é": "\U0001f600"}, tensors)
        found.add((tmp_path / f"{i}").read_bytes())
    assert len(found) == 1
    description, read = _tensors.read(tmp_path / "0", "kind")
    assert description == {"n": 1, "é": "\U0001f600"}
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
