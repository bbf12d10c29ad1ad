"""CONTRIBUTING.md names functions that exist, and its tree is that of the repository."""

import importlib
import re

import pytest
from support.pages import ROOT, blocks

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WAYS = ("The way of one training step", "The way of fastlin reproduce 2c")
DEEPEST = 8  # spaces before a name in the tree; continued descriptions have more


def section(title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S).group(1)


def names(title):
    """The dotted name that opens each item of a numbered list."""
    items = re.findall(r"^\d+\. (.*)$", section(title), re.M)
    matches = [re.match(r"`(fastlin(?:\.\w+)+)` \w", item) for item in items]
    assert all(matches), [item for item, match in zip(items, matches, strict=True) if not match]
    return [match.group(1) for match in matches]


def resolve(name):
    """The object of a dotted name: attributes of its longest prefix that is a module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or ""):
                raise
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def tree():
    """Paths of the tree's folders and files; folders end with a slash."""
    (block,) = blocks(section("The tree"))
    paths, parents = [], []
    for line in block.text.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent <= DEEPEST:
            parents[indent // 2 :] = [line.split()[0]]
            paths.append("".join(parents))
    return paths


@pytest.mark.parametrize("name", [name for way in WAYS for name in names(way)])
def test_names_resolve(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("title", WAYS)
def test_lists_are_numbered_in_order(title):
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section(title), re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 10


def test_a_name_that_does_not_exist_is_found():
    with pytest.raises(AttributeError):
        resolve("fastlin.training.loop.Loop.nothing")


@pytest.mark.parametrize("path", tree())
def test_tree_exists(path):
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


@pytest.mark.parametrize("top", ["fastlin", "csrc"])
def test_tree_is_complete(top):
    folders = {f"{top}/{path.name}/" for path in (ROOT / top).iterdir() if path.is_dir() and path.name[0] not in "_."}
    assert folders <= set(tree())
