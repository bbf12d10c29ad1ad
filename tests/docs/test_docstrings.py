"""Every public name has a numpydoc docstring with its arguments, their shapes and an example that runs."""

import doctest
import importlib
import inspect
import re

import pytest
import torch

import fastlin as fl

MODULES = ("fastlin", "fastlin.theory", "fastlin.theory.forgetting", "fastlin.models")
TRAINING = {
    "fastlin.training.regimes": ("Term", "Phase", "Regime", "named", "together"),
    "fastlin.training.callbacks": ("TensorBoard", "WandB", "scalars"),
    "fastlin.training.config": ("RunConfig",),
    "fastlin.training.presets": ("values",),
    "fastlin.figures.own": ("train_panel",),
}
ARRAY = re.compile(r"\b(Tensor|array)\b")
SHAPE = re.compile(r"\((\w[^()]*|\.\.\.[^()]*)?\)|As in `")


def public():
    """Names and objects; modules and plain values, which have no docstring of their own, are left out."""
    names = {module: importlib.import_module(module).__all__ for module in MODULES} | TRAINING
    for module, members in names.items():
        for name in members:
            found = getattr(importlib.import_module(module), name)
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{module}.{name}", found


def methods():
    seen = {}
    for name, found in public():
        if inspect.isclass(found):
            for base in found.__mro__:
                if base.__module__.startswith("fastlin"):
                    for attribute, member in vars(base).items():
                        member = getattr(member, "__func__", getattr(member, "fget", member))
                        if inspect.isfunction(member) and not attribute.startswith("_"):
                            seen.setdefault(member, f"{name}.{attribute}")
    return [(name, member) for member, name in seen.items()]


PUBLIC, METHODS = list(public()), methods()


def sections(text):
    """Sections of a numpydoc docstring, each as its items: the line that names it, and what is indented below."""
    lines, found, current = text.splitlines(), {}, None
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if below.startswith("---") and line.strip():
            current = found.setdefault(line.strip(), [])
        elif current is not None and line.strip() and not line.startswith("---"):
            if line.startswith(" ") and current:
                current[-1] += "\n" + line
            else:
                current.append(line)
    return found


def named(items):
    return {name.strip(" *") for item in items for name in item.splitlines()[0].split(" : ")[0].split(",")}


def arguments(found):
    """What must be documented: arguments of a function; of a class those of a constructor or fields of its own."""
    if inspect.isfunction(found):
        return set(inspect.signature(found).parameters)
    if hasattr(found, "_fields") or "__dataclass_fields__" in vars(found):
        return set(getattr(found, "_fields", None) or found.__dataclass_fields__)
    if "__init__" in vars(found) and not issubclass(found, Exception):
        return set(inspect.signature(found).parameters)
    return set()


def problems(found):
    """What a docstring lacks."""
    text = inspect.cleandoc(found.__doc__ or "")
    have = sections(text)
    documented = have.get("Parameters", []) + have.get("Attributes", [])
    lacking = [f"{name} is not documented" for name in sorted(arguments(found) - named(documented))]
    results = have.get("Returns", [])
    if inspect.isfunction(found) and inspect.signature(found).return_annotation not in ("None", None) and not results:
        lacking.append("has no Returns")
    lacking += [
        f"{item.splitlines()[0]!r} has no shape"
        for item in documented + results
        if ARRAY.search(item.splitlines()[0])
        if not SHAPE.search(item)
    ]
    if not any(">>>" in item for item in have.get("Examples", [])):
        lacking.append("has no example")
    return lacking


@pytest.mark.parametrize("found", [found for _, found in PUBLIC], ids=[name for name, _ in PUBLIC])
def test_public_names_are_documented(found):
    assert problems(found) == []


@pytest.mark.parametrize("name", fl.reference.__all__)
def test_references_are_documented_by_their_ops(name):
    """A reference takes the arguments of the op of its name, which documents them."""
    taken = [set(inspect.signature(getattr(module, name)).parameters) for module in (fl.reference, fl)]
    assert taken[0] - {"model", "options"} <= taken[1]
    assert ">>>" in getattr(fl.reference, name).__doc__


@pytest.mark.parametrize("found", [found for _, found in METHODS], ids=[name for name, _ in METHODS])
def test_methods_are_documented(found):
    assert found.__doc__


REFERENCES = [(f"fastlin.reference.{name}", getattr(fl.reference, name)) for name in fl.reference.__all__]
EXAMPLES = [(name, found) for name, found in [*PUBLIC, *METHODS, *REFERENCES] if ">>>" in (found.__doc__ or "")]


@pytest.mark.parametrize("found", [found for _, found in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_examples_are_narrow(found):
    """As the blocks of the pages are; behind the prompt."""
    examples = doctest.DocTestParser().get_examples(found.__doc__)
    code = [line for example in examples for line in example.source.splitlines()]
    assert [line for line in code if len(line) > 88] == []


@pytest.mark.parametrize("found", [found for _, found in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_examples_run(found):
    """With `fl` and `torch` imported, as the pages say."""
    globs = {"fl": fl, "torch": torch}
    example = doctest.DocTestParser().get_doctest(found.__doc__, globs, found.__qualname__, None, None)
    shown = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=shown.append)
    assert not shown, "".join(shown)
