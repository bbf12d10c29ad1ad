"""Files of tensors: safetensors with a description and a checksum, written atomically; no pickle."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fastlin._files import FileError, replacing

VERSION = 1


def write(path: Path, kind: str, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace `path` by a file of tensors and a JSON description; `kind` names the sort of file, for `read`."""
    # Copies: the format does not allow tensors that share memory.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    body = {"kind": kind, "version": VERSION, "description": description}
    text = json.dumps(body, allow_nan=True)
    metadata = {"fastlin": text, "sha256": _digest(text, copies)}
    data = _in_order(safetensors.torch.save(copies, metadata))
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _in_order(data: bytes) -> bytes:
    """Sort the metadata, which safetensors writes in any order, so that equal contents have equal bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a file; a FileError where it is foreign, damaged, or of another kind."""
    data = path.read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        (length,) = struct.unpack("<Q", data[:8])
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError, struct.error) as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None
    text = metadata.get("fastlin")
    if text is None:
        raise FileError(f"{path}: not a file of fastlin: wants safetensors with its description in the header")
    if metadata.get("sha256") != _digest(text, tensors):
        raise FileError(f"{path}: damaged: its checksum is not that of its contents")
    body = json.loads(text)
    if body["version"] != VERSION:
        raise FileError(f"{path}: has format version {body['version']}, wants {VERSION}; another fastlin wrote it")
    if body["kind"] != kind:
        raise FileError(f"{path}: is a {body['kind']}, wants a {kind}")
    if not isinstance(body["description"], dict):
        raise FileError(f"{path}: damaged, or not a file of fastlin: its description is not a table")
    return body["description"], tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the description and of the names, dtypes, shapes and bytes of the tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
