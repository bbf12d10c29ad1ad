"""What a Markdown page holds: code blocks, links, and the anchors that links may go to."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_COMMANDS = ("$", "make", "fastlin", "pip", "python")


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks(text):
    """Fenced blocks by their language; an indented one is a "console" when it starts with a command, else "text"."""
    found, fence, indented, before = [], None, None, ""
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        if line.startswith("```"):
            if fence is None:
                fence = Block(number, line[3:].strip(), "")
            else:
                found.append(fence)
                fence = None
        elif fence is not None:
            fence = fence._replace(text=fence.text + line + "\n")
        elif line.startswith("    ") and (indented is not None or before == ""):
            indented = indented or Block(number, "", "")
            indented = indented._replace(text=indented.text + line[4:] + "\n")
        elif indented is not None and line:
            # What stands below `::: name` are options of mkdocstrings.
            language = "console" if indented.text.split()[0] in _COMMANDS else "text"
            found.append(indented._replace(language=language))
            indented = None
        before = line
    return found


def prose(text):
    """The page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text):
    """As the renderers make them: lower case, without punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles}
