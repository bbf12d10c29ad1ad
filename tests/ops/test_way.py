"""The way of a repeated call from the public op to the extension: short, and downward from file to file."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import fastlin as fl

PACKAGE = Path(fl.__file__).parent
MIX = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5], noise_std=0.1)
Z, Q, Y, TASK = MIX.sample(batch=64, n=10)
G = fl.gram(Z)
MOST_FUNCTIONS, MOST_FILES = 20, 7


def parameters(*front):
    return [torch.ones(*front, *shape).requires_grad_() for shape in ((2, 1, 3), (3, 3), (2, 3))]


CALLS = {
    "prompt_loss": lambda p: lambda step: fl.prompt_loss(Z, Q, Y, TASK, *p),
    "prompt_loss, no prompt, shared head": lambda p: lambda step: fl.prompt_loss(Z, Q, Y, TASK, None, p[1], p[2][0]),
    "gram_loss": lambda p: lambda step: fl.gram_loss(G, Q, Y, TASK, *p),
    "sampled_loss": lambda p: lambda step: fl.sampled_loss(MIX, 10, 64, *p, seed=0, step=step),
}


def way(call):
    """Functions of fastlin that a third call enters before the kernel `attention`, as (file, name)."""
    call(0)
    call(1)
    entered, reached = [], []

    def hook(frame, event, argument):
        if event == "c_call" and getattr(argument, "__name__", "") == "attention":
            reached.append(argument)
        name, file = frame.f_code.co_name, Path(frame.f_code.co_filename)
        is_function = not (name.startswith("<") and name.endswith("comp>")) and name != "<genexpr>"
        if event == "call" and not reached and is_function and file.is_relative_to(PACKAGE):
            entered.append((str(file.relative_to(PACKAGE)), name))

    sys.setprofile(hook)
    try:
        call(2)
    finally:
        sys.setprofile(None)
    assert reached
    return entered


@pytest.mark.parametrize("mode", ["gradients", "no gradients"])
@pytest.mark.parametrize("front", [(), (4,)], ids=["one trial", "four trials"])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_short(name, front, mode):
    front = () if "shared head" in name else front
    with torch.set_grad_enabled(mode == "gradients"):
        entered = way(CALLS[name](parameters(*front)))
    assert len(entered) <= MOST_FUNCTIONS, entered
    assert len({file for file, _ in entered}) <= MOST_FILES, entered


def imports_of(path):
    """Modules of fastlin.ops that a module of it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fastlin.ops":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastlin.ops."):
            yield node.module.removeprefix("fastlin.ops.")


def test_modules_of_the_ops_import_downward():
    below = {path.stem: set(imports_of(path)) for path in (PACKAGE / "ops").glob("*.py") if path.stem != "__init__"}
    order = ["softmax", "sampled", "api", "registered", "vmap", "call", "arguments"]
    assert set(order) == set(below)
    for place, module in enumerate(order):
        assert below[module] <= set(order[place + 1 :]), module
