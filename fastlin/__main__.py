"""`python -m fastlin` is the `fastlin` command."""

import sys

from fastlin.cli import main

sys.exit(main())
