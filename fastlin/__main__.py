"""`python -m fastlin` is the `fastlin` command."""

import sys

from fastlin.cli import main

# Worker processes import this file too.
if __name__ == "__main__":
    sys.exit(main())
