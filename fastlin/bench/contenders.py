"""Contenders on one problem: built by label, and checked before they are timed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin import _info
from fastlin._checks import choice
from fastlin.bench import cases, checks, jax_peers, peers, sampled_peers
from fastlin.bench.cases import SAMPLED, Case, CaseShape
from fastlin.bench.forms import FORMS, SHARED
from fastlin.bench.labels import FORMED, Label, parse
from fastlin.bench.machine import available_cores
from fastlin.bench.timing import last_level_cache

Call = Callable[[], Sequence[Any]]
"""What is timed: returns the loss and the gradients, or the result, as tensors or arrays."""

_LEAST_CACHE = 1 << 25


class SkippedError(RuntimeError):
    """A contender is not for this problem or this machine; the message says why."""


@contextmanager
def noting_failure(label: str, skipped: dict[str, str], wrong: dict[str, str]) -> Iterator[None]:
    """Note why a contender is left out: it cannot run here, its results are wrong, or it failed."""
    try:
        yield
    except SkippedError as error:
        skipped[label] = str(error)
    except checks.WrongResultError as error:
        wrong[label] = str(error)
    except Exception as error:  # whatever keeps a contender from running is what the record says
        skipped[label] = f"{type(error).__name__}: {error}".splitlines()[0]


def labels(shape: CaseShape, backends: Sequence[str] = ("auto",), device: str = "cpu") -> list[str]:
    """The op on these backends, and its usual peers: those that need no choice of form."""
    found = ["fastlin" if backend == "auto" else f"fastlin:{backend}" for backend in backends]
    if shape.op not in SAMPLED:
        found.append("reference")
    on_cpu = device == "cpu"
    for kind in ("eager" if shape.R is None else "vmap", "compile", *(["jax"] if on_cpu else [])):
        own = _forms(kind)[shape.op]
        found += [kind + f"-{form}" * bool(form) for form in ("", "gram") if form in own]
    if shape.R is None and shape.op in peers.NUMPY and on_cpu:
        found.append("numpy")
    return found


def _forms(kind: str) -> dict[str, dict[str, Any]]:
    return SHARED if kind == "jax" else FORMS


class BenchProblem:
    """An op at one shape and precision, its data, and the contenders on them.

    `scores` is what the reference may do in the check, `device` one of torch's.
    """

    def __init__(
        self, shape: CaseShape, dtype: torch.dtype, scores: int = checks.AFFORDABLE_SCORES, device: str = "cpu"
    ) -> None:
        self.shape, self.dtype, self._scores, self.device = shape, dtype, scores, device
        self._drawn = shape.op in SAMPLED
        self._variants: dict[tuple[CaseShape, torch.dtype], BenchProblem] = {(shape, dtype): self}
        if self._drawn:
            made = cases.parameters_of(shape, device)
            self._parameters = {name: x.detach().to(dtype).requires_grad_() for name, x in made.items()}
        else:
            self._case = cases.make(shape, device=device).to(dtype)

    def build(self, text: str) -> Call:
        """A contender's call; SkippedError where it cannot run here, ValueError when there is no such contender."""
        label = parse(text)
        problem = self._variant(label)
        problem._refuse(label)
        try:
            if problem._drawn:
                return problem._build_drawn(label)
            of_case = problem._given(label)
            return problem._fresh(of_case) if "fresh" in label.flags else of_case(problem._case)
        except ImportError as error:
            raise SkippedError(f"{error}; pip install jax") from None

    def check(self, text: str, call: Call) -> dict[str, float]:
        """Errors by tensor, or WrongResultError."""
        # On given data they are those against the reference, in float64. Contenders that draw other numbers are checked
        # by what does not depend on them: the op against eager on the data that it drew, in float64, and a peer's mean
        # loss over calls against the op's, in standard errors.
        label = parse(text)
        problem = self._variant(label)
        if not label.has_results:
            call()
            return {}
        if not problem._drawn:
            return problem._gate.check(text, [as_tensor(x) for x in call()])
        if label.kind == "fastlin":
            return sampled_peers.check_op(problem.shape, label.backend, problem.device, problem.dtype)
        trials = problem.shape.R or 1
        sampled_peers.agree(sampled_peers.losses(call, trials, sampled_peers.PEER_CALLS), problem._losses_of_op)
        return {}

    def steps(self, text: str) -> int:
        return jax_peers.STEPS if self._drawn and parse(text).kind == "jax" else 1

    @property
    def leaves(self) -> list[Tensor]:
        return list((self._parameters if self._drawn else self._case.parameters).values())

    def _variant(self, label: Label) -> BenchProblem:
        sizes: dict[str, Any] = {name: getattr(label, name) for name in ("n", "K") if getattr(label, name) is not None}
        if "trial" in label.flags:
            sizes["R"] = None
        shape = replace(self.shape, **sizes)
        dtype = self.dtype if label.dtype is None else getattr(torch, label.dtype)
        if (shape, dtype) not in self._variants:
            self._variants[shape, dtype] = BenchProblem(shape, dtype, self._scores, self.device)
        return self._variants[shape, dtype]

    def _refuse(self, label: Label) -> None:
        kind, op, trials = label.kind, self.shape.op, self.shape.R is not None
        if kind == "fastlin" and label.backend != "auto":
            there = _info.info()["backends"]
            if not there[choice("backend", label.backend, there)]["available"]:
                raise SkippedError(f"cannot serve: {there[label.backend]['reason']}")
        if kind in FORMED and label.form not in _forms(kind)[op]:
            raise SkippedError(f"{op} has no form {label.form or 'without a name'}")
        if kind == "eager" and trials:
            raise SkippedError("takes no trials; vmap does")
        if kind == "vmap" and not trials:
            raise SkippedError("there are no trials to map over")
        if kind == "numpy" and (trials or op not in peers.NUMPY):
            raise SkippedError("gradients of trials and stacks by hand are what autograd is for")
        if self._drawn and (kind in ("reference", "read") or label.flags & {"fresh", "call", "graph"}):
            raise SkippedError("draws no data" if kind == "reference" else f"{op} reads no tokens")
        if kind == "jax":
            if self.dtype != torch.float32:
                raise SkippedError("JAX has float64 only where the whole process is switched to it")
            cores, threads = available_cores(), torch.get_num_threads()
            if threads != cores:
                raise SkippedError(f"JAX takes all {cores} cores; {threads} threads were asked for")
        if kind in ("jax", "numpy") and self.device != "cpu":
            raise SkippedError(f"{kind} runs on the CPU here")

    @cached_property
    def _gate(self) -> checks.Gate:
        return checks.Gate.of(self._case, self._scores)

    @cached_property
    def _losses_of_op(self) -> list[float]:
        return sampled_peers.losses(self.build("fastlin"), self.shape.R or 1, sampled_peers.OP_CALLS)

    def _given(self, label: Label) -> Callable[[Case], Call]:
        kind, op = label.kind, self.shape.op
        if kind == "read":
            return lambda case: lambda: (case.data["z"].sum(),)
        if kind == "autograd":
            return _autograd
        if kind == "jax":
            return lambda case: jax_peers.given(case, label.form)
        if kind == "numpy":
            return peers.by_numpy
        if kind == "fastlin":
            loss = peers.op(op, label.backend)
        elif kind == "reference":
            loss = peers.literal(op)
        else:
            loss = peers.of_form(op, label.form, self.shape.R is not None)
        if kind == "compile":
            loss = peers.compiled(loss, "reduce-overhead" if "graphs" in label.flags else None)
        if "call" in label.flags:
            return lambda case: lambda: (loss(*case.arguments),)
        if "graph" in label.flags:
            return lambda case: peers.captured(case.step(loss))
        return lambda case: case.step(loss)

    def _fresh(self, of_case: Callable[[Case], Call]) -> Call:
        """Calls on copies of the tokens, one after the other: twice what all caches hold, and one more."""
        # Each thread may have its own last level, and Linux does not report it everywhere.
        z = self._case.data["z"]
        caches = torch.get_num_threads() * max(last_level_cache(), _LEAST_CACHE)
        copies = 1 + math.ceil(2 * caches / z.nbytes)
        cases_ = (replace(self._case, data={**self._case.data, "z": z.clone()}) for _ in range(copies))
        calls = itertools.cycle([of_case(case) for case in cases_])
        return lambda: next(calls)()

    def _build_drawn(self, label: Label) -> Call:
        shape = self.shape
        if label.kind == "fastlin":
            return sampled_peers.op(shape, self._parameters, label.backend)
        if label.kind == "jax":
            return jax_peers.drawn(shape, self._parameters)
        model = peers.of_form(shape.op, label.form, shape.R is not None)
        mode = "reduce-overhead" if "graphs" in label.flags else None
        return sampled_peers.eager(shape, self._parameters, model, label.kind == "compile", mode)


def _autograd(case: Case) -> Call:
    leaf = next(iter(case.parameters.values()))
    return lambda: torch.autograd.grad(leaf.sum(), leaf)


def as_tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
