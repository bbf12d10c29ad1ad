"""A long run of training steps, whose memory, threads and open files must not grow: `python -m benchmarks.soak`.

The problem is tiny, so that a million steps take minutes: what grows by a byte a step would show. Checkpoints and
records are written on the way, as in any run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import fastlin as fl

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
    def now(cls) -> Usage:
        """Of this process, from /proc."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), threads, files)


@dataclass
class Watch:
    """A constant schedule that looks at the process now and then, since the loop asks it in every step.

    Attributes
    ----------
    steps : int
        Of the run.
    seen : list of Usage
        From the end of the warm-up on.
    """

    steps: int
    seen: list[Usage] = field(default_factory=list)
    asked: int = 0

    def __call__(self, progress: float) -> float:
        """The factor of the learning rate, 1."""
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
        """What has grown that must not."""
        first, last = self.seen[0], self.seen[-1]
        found = [
            f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
            for name in ("threads", "files")
            if getattr(last, name) > getattr(first, name)
        ]
        if self.growth > LARGEST_GROWTH:
            found.append(f"resident memory grew by {100 * self.growth:.2f} % from {first.resident} bytes")
        return found


def soak(steps: int, folder: Path, *, checkpoint_seconds: float = 10.0, **options: Any) -> tuple[Watch, fl.Run]:
    """Train for that many steps of 64 sequences, n = 5, d = 3, watched."""
    mix = fl.TaskMixture([[1.0] * 3, [-1.0] * 3], torch.eye(3).expand(2, 3, 3), [0.5, 0.5], noise_std=0.1)
    watch = Watch(steps)
    run = fl.train(
        mix,
        "joint",
        5,
        preset="paper",
        steps=steps,
        batch=64,
        lr=1e-3,
        schedule=watch,
        out=folder,
        checkpoint_seconds=checkpoint_seconds,
        **options,
    )
    return watch, run


def main() -> int:
    """Soak, print what was seen, and end with 1 when something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="file for what was seen")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        watch, run = soak(options.steps, Path(folder) / "run")
    first, last = watch.seen[0], watch.seen[-1]
    print(f"{options.steps} steps in {run.seconds:.0f} s, {len(watch.seen)} looks after the warm-up")
    print(f"resident memory {first.resident / 1e6:.1f} MB, at the end {last.resident / 1e6:.1f} MB, ", end="")
    print(f"at most {100 * watch.growth:+.3f} %")
    print(f"threads {first.threads} to {last.threads}, files {first.files} to {last.files}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(usage) for usage in watch.seen]) + "\n", encoding="utf-8")
    print(*watch.faults, sep="\n", file=sys.stderr)
    return 1 if watch.faults else 0


if __name__ == "__main__":
    sys.exit(main())
