"""How formulas become MathML, which browsers draw without scripts and without network.

pymdownx.arithmatex finds the formulas, `$...$` in a line and fences of ```math, and
latex2mathml converts them. MathML needs a font with the measures of mathematics, which
few machines have: the pages bring the one of ziamath.
"""

from __future__ import annotations

import html
import re
from importlib.metadata import distribution
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FONT = "STIXTwoMath-Regular.ttf"  # pages.css names it
_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.S
)


def on_files(pages: Files, config: MkDocsConfig) -> Files:
    """Add the font."""
    font = distribution("ziamath").locate_file(f"ziamath/fonts/{FONT}")
    pages.append(File.generated(config, FONT, abs_src_path=str(font)))
    return pages


def on_page_content(text: str, page: Page, **_: Any) -> str:
    """Convert the formulas of a page."""
    text = _FORMULA.sub(lambda found: mathml(*found.groups(), page.file.src_path), text)
    if 'class="arithmatex' in text:
        raise PluginError(
            f"{page.file.src_path}: got a formula in an unknown form, wants what arithmatex writes"
        )
    return text


def mathml(tag: str, escaped: str, where: str) -> str:
    """The MathML of a formula; an error if a part of it was not understood."""
    tex = html.unescape(escaped).strip()
    drawn = convert(tex, display="block" if tag == "div" else "inline")
    # The converter copies commands that it does not know, and ampersands outside of a table, into the text.
    if re.search(r"[\\&]", html.unescape(re.sub(r"<[^>]*>", "", drawn))):
        raise PluginError(
            f"{where}: got {tex!r}, wants commands that latex2mathml knows"
        )
    return drawn
