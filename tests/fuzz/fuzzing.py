"""Fuzz every file reader and the ops, on inputs made from a seed.

    python tests/fuzz/fuzzing.py --executions 1000000 --seed 0
    python tests/fuzz/fuzzing.py --atheris checkpoint -runs=100000      # guided by coverage, where atheris is installed

A target takes bytes. It may raise its documented errors, with a message that names the file or the argument. Anything
else, above all a crash, is a find: the fuzzer prints the bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FunctionType

import torch
from compiled_calls import Compiled
from finds import Find

import fastlin as fl
from fastlin import _files, _tensors, settings
from fastlin._files import FileError, write_json
from fastlin.backends import BackendError
from fastlin.figures import panel_files, status
from fastlin.training import checkpoint, record
from fastlin.training.record import Folder, ended

# Words of the file formats, and words that may break their readers.
WORDS = (
    b'NaN -Infinity 1e999 -0 9223372036854775808 true null "" [] {} [[ { "__metadata__" "dtype" "F32" "F64" "I64" '
    b'"BOOL" "F4" "F6_E2M3" "F8_E8M0" "C64" "shape" "data_offsets" \ud800 inf nan 0x7fffffffffffffff 1979-05-27 [a] = '
    b"\xff \x00 \xef\xbb\xbf "
    b'"step" "kind" "version" "row" "sha256" "tensor" "dict" "list" "bytes"'
).split(b" ")


def mutated(data, source):
    """Bytes with one to sixteen random changes."""
    data = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 4, 16))):
        at = source.randrange(len(data) + 1)
        kind = source.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << source.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = source.randrange(256)
        elif kind == 2:
            data[at:at] = source.choice(WORDS)
        elif kind == 3:
            del data[at : at + source.randrange(1, 32)]
        elif kind == 4:
            data[at:at] = data[at : at + source.randrange(1, 32)]
        elif kind == 5:
            del data[at:]
        else:
            data[at : at + 8] = struct.pack("<Q", source.choice((0, 1, 7, 1 << 31, 1 << 63, len(data), (1 << 64) - 1)))
    return bytes(data)


class Reader:
    """A file reader, with valid files."""

    def __init__(self, workdir, name, corpus, read, errors=(FileError,)):
        self.path, self.corpus, self._read, self._errors = workdir / name, corpus, read, errors

    def __call__(self, data):
        self.path.write_bytes(data)
        try:
            self._read(self.path)
        except self._errors as error:
            if str(self.path.parent) not in str(error):
                raise Find(f"does not name the file: {error}") from error


class Crafted(Reader):
    """A reader of tensor files with a valid checksum and any description."""

    def __call__(self, data):
        try:
            description = json.loads(data)
        except (ValueError, RecursionError):
            return
        _tensors.write(self.path, "checkpoint", description, {"a": torch.ones(2)})
        super().__call__(self.path.read_bytes())


def restored(path):
    """Restore a checkpoint, like a run."""
    folder = Folder.__new__(Folder)
    folder.path, folder._config, folder._file = path.parent, {}, None
    found = folder.restore()
    assert found is not None
    with suppress(KeyError, TypeError, ValueError):  # `train` turns these into an error that names the folder
        checkpoint.restore(*found[:2])


def readers():
    """Every file reader, by name."""
    workdir = Path(tempfile.mkdtemp(prefix="fastlin-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    tensors = {"a": torch.ones(3, 2), "b": torch.zeros((), dtype=torch.float64), "c": torch.arange(4)}
    state = {"dict": [["step", 3], ["model", {"dict": [["a", {"tensor": "a"}]]}]]}
    position = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    description = {"config": hashlib.sha256(b"{}").hexdigest(), "records": position, "state": state}
    _tensors.write(workdir / "checkpoint", "checkpoint", description, tensors)
    run = {"kind": "fastlin run", "version": 1, "config": {"n": 3}, "backend": "cpu", "info": {}}
    result = {
        **{name: [1.5, None] for name in ("risk", "risk_error", "tail", "typical")},
        "best": 0,
        "theory": 1.25,
        "diverged": [[1, 3]],
        "seconds": 1.5,
        "records": {"bytes": 0, "sha256": "x"},
    }
    cell = {
        "key": "a",
        "place": 2.0,
        "layers": 1,
        "state": "done",
        "seconds": 1.0,
        "error": None,
        "warnings": [],
        "row": {},
    }
    panel = {
        "kind": "fastlin panel",
        "version": 1,
        "name": "p",
        "title": "t",
        "shallower": None,
        "caption": [],
        "axes": [],
    }
    panel |= {"asked": {"steps": 3}, "cells": [cell], "info": {}}
    outcome = {"row": {"risk": 1.5}, "seconds": 1.5, "error": None, "warnings": ["w"]}

    def sealed(value):
        write_json(workdir / "json", value)
        return [(workdir / "json").read_bytes(), json.dumps(value).encode()]

    def read_run(path):
        folder = Folder.__new__(Folder)
        folder.path = path.parent
        folder.run_file()

    def read_result(path):
        (path.parent / "run.json").write_text(json.dumps(run))
        ended(path.parent)

    for name in ("run", "result", "checkpoints", "crafted"):
        (workdir / name).mkdir()
    configs = [path.read_bytes() for path in sorted(set(settings.shipped().values()))]
    configs.append(
        b'name = "x"\ndimension = 2\nmeans = [1, [0, 1]]\ncovariances = [1, [[1, 0], [0, 1]]]\nweights = [0.5, 0.5]\n'
        b"noise_std = 0.5\nfeature_cov = [1, 2]\ncontext_lengths = [1, 2]\n"
    )
    whole = (workdir / "checkpoint").read_bytes()
    records = b'{"step": 1, "loss": [1.5, null]}\n{"step": 2, "loss": [1.5, null]}\n{"step": 3'
    return {
        "config": Reader(workdir, "own.toml", configs[-1:] * 4 + configs, settings.load, (settings.ConfigError,)),
        "checkpoint": Reader(workdir, "checkpoints/checkpoint.safetensors", [whole], restored),
        "tensors": Reader(workdir, "model.safetensors", [whole], lambda path: _tensors.read(path, "checkpoint")),
        "records": Reader(workdir, "records.jsonl", [records], status._step, ()),
        "run": Reader(workdir, "run/run.json", sealed(run), read_run),
        "result": Reader(workdir, "result/result.json", sealed(result), read_result),
        "panel": Reader(workdir, "panel.json", sealed(panel), panel_files.read),
        "outcome": Reader(
            workdir, "k.json", sealed(outcome), lambda path: panel_files.outcome_of(path.with_suffix(""))
        ),
        "crafted": Crafted(workdir, "crafted/checkpoint.safetensors", [json.dumps(description).encode()], restored),
    }


class Calls:
    """Calls of the ops, with a few wrong arguments."""

    corpus = (bytes(range(48)), bytes(64))
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    sizes = (0, 1, 2, 3, 5, 8, 17)

    def __call__(self, data):
        source = random.Random(data)
        try:
            self._call(source)
        except (ValueError, TypeError, BackendError) as error:
            if ": " not in str(error):
                raise Find(f"names no argument: {error}") from error

    def _tensor(self, source, shape, dtype, wrong):
        """A tensor in a random layout, sometimes with a wrong shape or dtype."""
        shape = list(shape)
        if source.random() < wrong:
            kind = source.randrange(4)
            if kind == 0 and shape:
                shape[source.randrange(len(shape))] = source.choice(self.sizes)
            elif kind == 1 and shape:
                del shape[source.randrange(len(shape))]
            elif kind == 2:
                shape.insert(source.randrange(len(shape) + 1), source.choice(self.sizes))
            else:
                dtype = source.choice(self.dtypes)
        value = source.choice((0.0, 1.0, 0.5, -2.0, 1e-45, 1e-38, 1e38, 3e4, float("inf"), float("nan")))
        layout = source.randrange(6)
        if layout == 1 and shape:
            return torch.full((1,) * len(shape), 1.0, dtype=dtype).expand(shape)
        if layout == 2 and len(shape) > 1:
            return torch.ones((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)
        if layout == 3 and shape:
            return torch.ones((*shape[:-1], 2 * shape[-1] + 1), dtype=dtype)[..., 1::2]
        if layout == 4 and shape:
            return torch.ones((shape[0] + 3, *shape[1:]), dtype=dtype)[2:-1]
        return torch.full(shape, value if dtype.is_floating_point else 1.0, dtype=torch.float64).to(dtype)

    def _call(self, source):
        B, n, m = source.choice(self.sizes), source.choice(self.sizes), source.choice(self.sizes[1:])
        K, t, L, R, H = (source.choice((1, 1, 2, 3)) for _ in range(5))
        dtype, wrong = source.choice(self.dtypes[:2]), source.choice((0.0, 0.05, 0.2))
        front = source.choice(([], [R], [R, H]))
        stack, is_gram = source.random() < 0.5, source.random() < 0.5

        def tensor(*shape, kind=dtype):
            return self._tensor(source, shape, kind, wrong)

        x = tensor(B, m, m) if is_gram else tensor(B, n, m)
        q, y = tensor(B, m), tensor(B)
        task = tensor(B, kind=torch.int64)
        if task.dtype == torch.int64:
            low, high = source.choice(((0, K), (0, K), (0, 1), (-1, K), (0, K + 1)))
            task = torch.randint(low, max(high, low + 1), task.shape)
        p = None if source.random() < 0.3 else tensor(*front[:1], K, t, m)
        if stack:
            given = (tensor(*front[:1], L, *front[1:], m, m), tensor(*front[:1], L, *front[1:], m, m))
            given = (*given, tensor(*front[:1], K, m))
        else:
            given = (tensor(*front, m, m), tensor(*front, K, m))
        if source.random() < 0.3:
            for parameter in given:
                if parameter.is_floating_point() and parameter.is_leaf:
                    parameter.requires_grad_(True)
        weight = None if source.random() < 0.5 else tensor(K)
        options = {"scale": source.choice((1.0, 0.5, 0.0, -1.0)), "see_query": source.random() < 0.5}
        options["backend"] = source.choice(("auto", "auto", "cpu", "eager"))
        if source.random() < 0.02:
            options["check_finite"] = True
        name = ("gram_" if is_gram else "") + ("stack_loss" if stack else "loss" if is_gram else "prompt_loss")
        loss, per_task = getattr(fl, name)(x, q, y, task, p, *given, weight=weight, **options)
        assert per_task.shape[:-1] == loss.shape, "per_task"
        if loss.requires_grad:
            loss.sum().backward()


def targets():
    """All targets, with their shares of the executions."""
    found = {name: (reader, 3 if name == "config" else 12) for name, reader in readers().items()}
    return {**found, "calls": (Calls(), 12), "compiled": (Compiled(), 12)}


def fuzz(name, target, executions, seed):
    """Run a target on `executions` inputs."""
    source = random.Random(f"{name} {seed}")
    for i in range(executions):
        data = source.choice(target.corpus)
        data = data if i < len(target.corpus) else mutated(data, source)
        try:
            target(data)
        except BaseException:
            print(f"{name}: execution {i} of seed {seed} on {data!r}", file=sys.stderr)
            raise


def guided(name, options):
    """Fuzz one target with atheris, guided by the coverage of the readers."""
    import atheris

    for module in (_files, _tensors, checkpoint, panel_files, record, settings, status):
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                atheris.instrument_func(function)
    target, _ = targets()[name]
    with tempfile.TemporaryDirectory() as corpus:
        for i, data in enumerate(target.corpus):
            Path(corpus, str(i)).write_bytes(data)
        atheris.Setup([sys.argv[0], *options, corpus], target)
        atheris.Fuzz()


def main():
    """The command line above."""
    faulthandler.enable()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", metavar="TARGET", help="fuzz this target with atheris; further options go to it")
    options, rest = parser.parse_known_args()
    if options.atheris:
        guided(options.atheris, rest)
        return
    found = targets()
    total = sum(share for _, share in found.values())
    done = 0
    for name, (target, share) in found.items():
        began, count = time.monotonic(), -(-options.executions * share // total)
        fuzz(name, target, count, options.seed)
        done += count
        print(f"{name:12}{count:>10} executions, {time.monotonic() - began:.0f} s, clean", flush=True)
    print(f"{'all':12}{done:>10} executions, clean")


if __name__ == "__main__":
    main()
