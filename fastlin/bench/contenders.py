"""Contenders by label: the op on its backends and its peers, on one problem; built, and checked before they are timed.

fastlin, fastlin:cpu        the op with backend "auto"; on a named one
reference                   fastlin.reference: the paper taken literally
eager, eager-gram           torch: the query's row, or attention layer by layer; the Gram form
vmap, vmap-gram             the same under torch.func.vmap, where there are trials
compile, compile-gram       the same under torch.compile
jax, jax-gram               JAX: jit, vmap over trials, scan over steps where the data are drawn
numpy                       gradients by hand, where that is natural
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin.bench import cases, checks, jax_peers, numpy_peers, peers, sampled_peers
from fastlin.bench.cases import SAMPLED, Shape
from fastlin.bench.forms import FORMS, SHARED
from fastlin.bench.machine import available_cores

Call = Callable[[], Sequence[Any]]
"""What is timed: returns the loss and the gradients, or the result, as tensors or arrays."""

KINDS = ("fastlin", "reference", "eager", "vmap", "compile", "jax", "numpy")
EAGER = ("eager", "vmap")
"""Kinds that a ratio against eager is taken with."""


class SkippedError(RuntimeError):
    """A contender is not for this problem or this machine; the message says why."""


def kind(label: str) -> str:
    """The first word of a label."""
    return label.replace(":", "-").partition("-")[0]


def labels(shape: Shape, backends: Sequence[str] = ("auto",)) -> list[str]:
    """All contenders that a problem of this op and these trials can have."""
    found = ["fastlin" if backend == "auto" else f"fastlin:{backend}" for backend in backends]
    if shape.op not in SAMPLED:
        found.append("reference")
    for one in ("eager" if shape.R is None else "vmap", "compile", "jax"):
        found += [one + f"-{form}" * bool(form) for form in _forms(one)[shape.op]]
    if shape.R is None and shape.op in numpy_peers.OPS:
        found.append("numpy")
    return found


def _forms(one: str) -> dict[str, dict[str, Any]]:
    return SHARED if one == "jax" else FORMS


class Problem:
    """An op at one shape and precision, its data, and the contenders on them.

    Parameters
    ----------
    shape : Shape
    dtype : torch.dtype
    scores : int
        What the reference may do in the check.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, scores: int = checks.AFFORDABLE_SCORES) -> None:
        self.shape, self.dtype, self._scores = shape, dtype, scores
        self._drawn = shape.op in SAMPLED
        if self._drawn:
            self._parameters = {
                name: x.detach().to(dtype).requires_grad_() for name, x in cases.parameters_of(shape).items()
            }
        else:
            self._case = cases.make(shape).to(dtype)

    def build(self, label: str) -> Call:
        """A contender's call.

        Raises
        ------
        SkippedError
            Where it cannot run here.
        """
        one = kind(label)
        if one not in KINDS:
            raise SkippedError(f"no contender {label!r}; there are {', '.join(KINDS)}")
        form = label.partition("-")[2]
        if one in ("eager", "vmap", "compile", "jax") and form not in _forms(one)[self.shape.op]:
            raise SkippedError(f"{self.shape.op} has no form {form or 'of its own'!r}")
        if one == "eager" and self.shape.R is not None:
            raise SkippedError("takes no trials; vmap does")
        if one == "vmap" and self.shape.R is None:
            raise SkippedError("there are no trials to map over")
        if one == "numpy" and (self.shape.R is not None or self.shape.op not in numpy_peers.OPS):
            raise SkippedError("gradients of trials and stacks by hand are what autograd is for")
        if one == "reference" and self._drawn:
            raise SkippedError("draws no data")
        if one == "jax":
            self._ask_jax()
        try:
            return self._build_drawn(label, form) if self._drawn else self._build_given(label, form)
        except ImportError as error:
            raise SkippedError(f"{error}; pip install jax") from None

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters that contenders in torch derive by."""
        return list((self._parameters if self._drawn else self._case.parameters).values())

    def steps(self, label: str) -> int:
        """Steps that one call makes."""
        return jax_peers.STEPS if self._drawn and kind(label) == "jax" else 1

    def check(self, label: str, call: Call) -> dict[str, float]:
        """Errors by tensor, or WrongResultError.

        On given data they are those against the reference, in float64. Contenders that draw other numbers are checked
        by what does not depend on them: the op against eager on the data that it drew, in float64, and a peer's mean
        loss over calls against the op's, in standard errors.
        """
        if not self._drawn:
            return self._gate.check(label, [as_tensor(x) for x in call()])
        if kind(label) == "fastlin":
            return sampled_peers.check_op(self.shape, label.partition(":")[2] or "auto", dtype=self.dtype)
        trials = self.shape.R or 1
        sampled_peers.agree(sampled_peers.losses(call, trials, sampled_peers.PEER_CALLS), self._losses_of_op)
        return {}

    @cached_property
    def _gate(self) -> checks.Gate:
        return checks.Gate.of(self._case, self._scores)

    @cached_property
    def _losses_of_op(self) -> list[float]:
        return sampled_peers.losses(self.build("fastlin"), self.shape.R or 1, sampled_peers.OP_CALLS)

    def _ask_jax(self) -> None:
        if self.dtype != torch.float32:
            raise SkippedError("JAX has float64 only where the whole process is switched to it")
        cores, threads = available_cores(), torch.get_num_threads()
        if threads != cores:
            raise SkippedError(f"JAX takes all {cores} cores; {threads} threads were asked for")

    def _build_given(self, label: str, form: str) -> Call:
        one, case, op = kind(label), self._case, self.shape.op
        if one == "fastlin":
            return case.step(peers.op(op, label.partition(":")[2] or "auto"))
        if one == "reference":
            return case.step(peers.literal(op))
        if one == "jax":
            return jax_peers.given(case, form)
        if one == "numpy":
            return numpy_peers.given(case)
        loss = peers.of_form(op, form, self.shape.R is not None)
        return case.step(peers.compiled(loss, None) if one == "compile" else loss)

    def _build_drawn(self, label: str, form: str) -> Call:
        one, shape = kind(label), self.shape
        if one == "fastlin":
            return sampled_peers.op(shape, self._parameters, label.partition(":")[2] or "auto")
        if one == "jax":
            return jax_peers.drawn(shape, self._parameters)
        model = peers.of_form(shape.op, form, shape.R is not None)
        return sampled_peers.eager(shape, self._parameters, compiled=one == "compile", model=model)


def as_tensor(value: Any) -> Tensor:
    """A result as a tensor, whoever made it."""
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
