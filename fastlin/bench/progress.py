"""What is being done, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable


def one_line() -> Callable[[str], None]:
    """Writes over one line of stderr when it is a terminal, else nothing."""
    if not sys.stderr.isatty():
        return lambda text: None

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    return show
