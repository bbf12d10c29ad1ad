"""Wheels and sdists of copies of the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_of_sources(destination):
    for name in ("pyproject.toml", "setup.py", "LICENSE", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, destination)
    for name in ("csrc", "fastlin"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, destination / name, ignore=ignore)


def build(kind, sources, **environment):
    """Build a "wheel" or an "sdist" into `dist`, with the setuptools that is installed: without network."""
    command = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    return subprocess.run(
        [sys.executable, "-c", command],
        cwd=sources,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
