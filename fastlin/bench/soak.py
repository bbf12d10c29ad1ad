"""A long run of training steps, whose memory, threads and open files must not grow.

The problem is tiny, so that a million steps take minutes: what grows by a byte a step shows. The run writes checkpoints
and records, as any run does.
"""

import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from fastlin.bench.rows import Row
from fastlin.data.sources import TaskMixture
from fastlin.training.run import train

STEPS, FEW_STEPS = 1_000_000, 3000
LARGEST_GROWTH = 0.01
"""Of the resident memory after the warm-up, as a share of what it was there."""
_WARM_UP = 0.1
_SAMPLES = 200


@dataclass(frozen=True)
class Usage:
    """What a process holds: bytes of resident memory, threads and open files."""

    resident: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Self:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), threads, files)


@dataclass
class MemoryWatch:
    """A constant schedule that looks at the process now and then, since the loop asks it in every step."""

    steps: int
    seen: list[Usage] = field(default_factory=list)  # from the end of the warm-up on
    asked: int = 0

    def __call__(self, progress: float) -> float:
        self.asked += 1
        if progress >= _WARM_UP and self.asked % max(self.steps // _SAMPLES, 1) == 0:
            self.seen.append(Usage.now())
        return 1.0

    @property
    def growth(self) -> float:
        """Of the resident memory, from the first look to the largest, as a share of the first."""
        return max(usage.resident for usage in self.seen) / self.seen[0].resident - 1.0

    @property
    def faults(self) -> list[str]:
        first, last = self.seen[0], self.seen[-1]
        counts = [("threads", first.threads, last.threads), ("files", first.files, last.files)]
        found = [f"{name} grew from {before} to {after}" for name, before, after in counts if after > before]
        if self.growth > LARGEST_GROWTH:
            found.append(f"resident memory grew by {100 * self.growth:.2f} % from {first.resident} bytes")
        return found


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Train with 64 sequences a step, n = 5, d = 3, watched; what grew makes the row wrong."""
    mix = TaskMixture([[1.0] * 3, [-1.0] * 3], noise_std=0.1)
    steps = FEW_STEPS if quick else STEPS
    watch = MemoryWatch(steps)
    options: dict[str, Any] = {"preset": "paper", "steps": steps, "batch": 64, "lr": 1e-3, "schedule": watch}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = train(mix, "joint", 5, out=out, checkpoint_seconds=10.0, progress=False, **options)
    first, last = watch.seen[0], watch.seen[-1]
    lines = [
        f"{steps} steps in {run.seconds:.0f} s, {len(watch.seen)} looks after the warm-up",
        f"resident memory {first.resident / 1e6:.1f} MB, at the end {last.resident / 1e6:.1f} MB, "
        f"at most {100 * watch.growth:+.3f} %",
        f"threads {first.threads} to {last.threads}, files {first.files} to {last.files}",
    ]
    wrong = {"fastlin": "; ".join(watch.faults)} if watch.faults else {}
    values = {"growth": watch.growth, "seconds of a step": run.seconds / steps}
    return {"lines": lines, "values": values, "seen": [asdict(usage) for usage in watch.seen], "wrong": wrong}
