"""Who imports whom: never upward, and nothing heavy before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fastlin"

# Layers from the bottom; a module may import from its own layer's package and from the ones listed for it.
ALLOWED = {
    "_version": set(),
    "_checks": set(),
    "_extension": {"_version"},
    "_instruction_sets": {"_extension"},
    "backends": {"_extension", "_instruction_sets", "_version"},
    "validation": {"backends"},
    "reference": {"validation"},
    "ops": {"_checks", "backends", "reference", "validation"},
    "_info": {"_extension", "_instruction_sets", "_version", "backends"},
    "data": {"_checks", "_tables", "_extension", "_instruction_sets", "backends"},
    "theory": {"_tables"},
    "_files": set(),
    "_tables": set(),
    "_threads": set(),
    "_tensors": {"_files"},
    "models": {"_files", "_tables", "_tensors", "data", "ops"},
    "settings": {"data", "theory"},
    "training": {
        "_checks",
        "_files",
        "_info",
        "_tables",
        "_tensors",
        "_threads",
        "backends",
        "data",
        "models",
        "ops",
        "settings",
        "theory",
    },
    "plots": {"_checks", "_files", "_tables", "training"},
    "figures": {
        "_checks",
        "_files",
        "_info",
        "_tables",
        "_threads",
        "data",
        "models",
        "ops",
        "settings",
        "theory",
        "training",
    },
    "bench": {
        "_checks",
        "_extension",
        "_files",
        "_info",
        "_tables",
        "data",
        "figures",
        "ops",
        "plots",
        "reference",
        "settings",
        "training",
        "validation",
    },
    "__main__": {"cli"},
    "cli": {"_checks", "_info", "_tables", "_version", "backends", "bench", "figures", "plots", "settings", "training"},
}


def part_of(name):
    """The part of the package that a dotted module name belongs to."""
    return name.split(".")[1] if name.startswith("fastlin.") else None


def imports_of(path):
    """Dotted names of fastlin that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fastlin")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "fastlin":
                yield from (f"fastlin.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("fastlin."):
                yield node.module


def files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} has no place in the layers"
    for name in imports_of(path):
        target = part_of(name)
        assert target == part or target in ALLOWED[part], f"{path.name} imports {name}"


def test_layers_have_no_cycle():
    done = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, below in ALLOWED.items() if part not in done and below <= done}
        assert ready, f"cycle among {set(ALLOWED) - done}"
        done |= ready


def test_backends_do_not_know_each_other():
    shared = {f"fastlin.backends{part}" for part in ("", ".base", ".compiled", ".draw", ".problem", ".update")}
    own = "fastlin.backends.triton"
    for path in (PACKAGE / "backends").rglob("*.py"):
        if path != PACKAGE / "backends" / "__init__.py":
            found = {name for name in imports_of(path) if "triton" not in path.parts or not name.startswith(own)}
            assert found <= shared | {"fastlin._extension", "fastlin._instruction_sets"}, path.name


def test_import_is_light():
    """Neither the extensions nor Triton nor the libraries of plots and clusters are loaded before they are needed."""
    heavy = ("fastlin._C", "fastlin._cuda", "triton", "matplotlib", "dask", "distributed")
    script = f"import sys, fastlin; print(*(m for m in {heavy} if m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_no_two_classes_have_one_name():
    modules = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
