"""Names of contenders, the same in tables, records, rows and bars: KIND[-FORM][:BACKEND][@MODIFIER,...].

    fastlin, fastlin:eager      the op with backend "auto"; with a named one
    reference                   fastlin.reference: the paper's formulas, literally
    eager                       torch: the query's row of the attention, or attention layer by layer in a stack
    eager-gram                  torch: the Gram form
    eager-product               torch: the query's row with both vectors in one matrix product
    eager-linear                torch: a stack with keys and values multiplied first
    vmap, compile, jax          the same forms under torch.func.vmap over trials; torch.compile; JAX (jit, vmap, scan)
    numpy                       BLAS, gradients by hand
    read                        z.sum(): reads the tokens once
    autograd                    torch.autograd.grad of one sum: the part of a call that is torch's

Modifiers: threads=N, n=N, K=N; float32, float64; fresh (other tokens in each call, from memory); call (the op alone,
without torch.autograd.grad); trial (one trial of the row's R); graph (a CUDA graph of the step); graphs (torch.compile
in its mode "reduce-overhead").
"""

import re
from dataclasses import dataclass
from functools import cache

from fastlin._checks import choice

KINDS = ("fastlin", "reference", "eager", "vmap", "compile", "jax", "numpy", "read", "autograd")
FORMED = ("eager", "vmap", "compile", "jax")
"""Kinds that have forms."""
EAGER = ("eager", "vmap")
"""Kinds that a ratio against eager is taken with."""
FORMS = ("gram", "product", "linear")
DTYPES = ("float32", "float64")
FLAGS = ("fresh", "call", "trial", "graph", "graphs")
NUMBERS = ("threads", "n", "K")
_GRAMMAR = re.compile(r"(\w+)(?:-(\w+))?(?::(\w+))?(?:@(.+))?")


@dataclass(frozen=True)
class Label:
    """A label's parts; None is the row's own value."""

    kind: str
    form: str = ""
    backend: str = "auto"
    flags: frozenset[str] = frozenset()
    dtype: str | None = None
    threads: int | None = None
    n: int | None = None
    K: int | None = None
    plain: bool = True  # whether the label has no modifier

    @property
    def has_results(self) -> bool:
        """Whether it returns the loss and gradients, or the result, of the op."""
        return self.kind not in ("read", "autograd") and "call" not in self.flags

    @property
    def same_work(self) -> bool:
        """Whether it does the work of the row's shape, dtype and threads."""
        own = (self.dtype, self.threads, self.n, self.K)
        return self.has_results and own == (None,) * 4 and "trial" not in self.flags


@cache
def parse(text: str) -> Label:
    """The parts of a label, or a ValueError that says what is wanted."""
    name = f"contender {text!r}"
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(f"contender: got {text!r}, wants KIND[-FORM][:BACKEND][@MODIFIER,...]")
    kind, form, backend, modifiers = match.groups()
    choice(name, kind, KINDS)
    if form is not None:
        choice(name, form, FORMS if kind in FORMED else [f"{kind} without a form"])
    if backend is not None and kind != "fastlin":
        raise ValueError(f"{name}: got a backend, wants one only after fastlin")
    flags: set[str] = set()
    values: dict[str, int | str] = {}
    for word in modifiers.split(",") if modifiers else ():
        key, equals, number = word.partition("=")
        if equals and key in NUMBERS and number.isdigit():
            values[key] = int(number)
        elif word in DTYPES:
            values["dtype"] = word
        else:
            flags.add(choice(name, word, [*FLAGS, *DTYPES, *(f"{key}=N" for key in NUMBERS)]))
    return Label(kind, form or "", backend or "auto", frozenset(flags), plain=not modifiers, **values)  # type: ignore[arg-type]


def split(text: str) -> tuple[str, ...]:
    """Labels between commas; a word that is a modifier belongs to the label before it."""
    words: list[str] = []
    for word in text.split(","):
        if words and "@" in words[-1] and re.match(r"\w+", word)[0] not in KINDS:  # type: ignore[index]
            words[-1] += f",{word}"
        else:
            words.append(word)
    for word in words:
        parse(word)
    return tuple(words)
