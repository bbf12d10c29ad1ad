"""How docstrings become pages: shapes are shown as they are written.

A numpydoc type such as "Tensor, shape (B, m)" or "Tensor () or (R,)" is prose, which the parser would take for a Python
expression and print in its own way. Names that share a description each get their own entry, with the type that the
signature gives to it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# A word joiner, which nobody sees, is not Python: the parser keeps the text.
_PROSE = "\u2060"
_SECTIONS = ("Parameters", "Returns", "Attributes")


class Shapes(griffe.Extension):
    """Rewrites the sections of arguments and results before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every object that has a docstring of its own."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """A docstring with its types marked as prose, and an entry for each name."""
    lines = text.splitlines()
    out: list[str] = []
    section, i = "", 0
    while i < len(lines):
        if i + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[i + 1]):
            section = lines[i]
            out += lines[i : i + 2]
            i += 2
            continue
        end = i + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        if section in _SECTIONS and lines[i] and not lines[i].startswith(" "):
            names, colon, kind = lines[i].partition(" : ")
            if colon:
                out += [f"{names} : {kind}{_PROSE}", *lines[i + 1 : end]]
            elif section == "Returns":
                out += [f"{names}{_PROSE}", *lines[i + 1 : end]]
            else:
                for name in names.split(", "):
                    out += [name, *lines[i + 1 : end]]
        else:
            out += lines[i:end]
        i = end
    return "\n".join(out)
