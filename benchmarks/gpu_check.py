"""On a machine with a GPU: all tests on it, then the table of `benchmarks.gpu`, and one report. `make gpu-check`.

Tests of the GPU are those of both backends, cuda and triton; with --backend triton, as on AMD, of that one.

The folder gets report.md and report.json; the tests' own records are beside them. The command ends with 0 when every
test passed, tests of the GPU were among them and none of those was skipped, and every contender's results were right;
with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import gpu, gpu_machine, report
from benchmarks.gpu import Measured
from benchmarks.gpu_machine import GpuLimits
from fastlin._files import replacing

ROOT = Path(__file__).parents[1]
WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest did: counts, and the names of the tests that failed."""

    name: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    seconds: float

    @property
    def status(self) -> str:
        """In words."""
        return f"{self.passed} passed, {self.skipped} skipped, {len(self.failures)} failed in {self.seconds:.0f} s"


def run_tests(name: str, arguments: Sequence[str], folder: Path) -> Outcome:
    """Run pytest; what it prints goes to the terminal."""
    record = folder / f"tests-{name}.xml"
    record.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "pytest", *arguments, f"--junitxml={record}"], cwd=ROOT, check=False)
    if not record.exists():
        return Outcome(name, 0, 0, ("pytest did not finish",), 0.0)
    return read_tests(name, record)


def read_tests(name: str, record: Path) -> Outcome:
    """The counts of a JUnit file."""
    failures, passed, skipped, seconds = [], 0, 0, 0.0
    for case in ElementTree.parse(record).iter("testcase"):
        seconds += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(name, passed, skipped, tuple(failures), seconds)


def complaints(of_gpu: Outcome, others: Outcome, rows: Sequence[Measured]) -> list[str]:
    """Why the check fails; empty when it does not."""
    found = [f"failed: {name}" for tests in (of_gpu, others) for name in tests.failures]
    if of_gpu.passed == 0:
        found.append("no test of the GPU ran")
    if of_gpu.skipped > 0:
        found.append(f"{of_gpu.skipped} tests of the GPU were skipped")
    for row in rows:
        failures = row.states["cold"].failures | row.states["warm"].failures
        found += [
            f"{row.name}: {label}: {why}"
            for label, why in failures.items()
            if row.wrong or label.startswith("op") or label == "triton"
        ]
    return found


def markdown(machine: dict[str, Any], limits: GpuLimits, tests: Sequence[Outcome], rows: Sequence[Measured]) -> str:
    """The report."""
    why = complaints(tests[0], tests[1], rows)
    verdict = "".join(f"- {reason}\n" for reason in why) if why else "All tests passed, all results were right.\n"
    counts = "".join(f"- {t.name}: {t.status}\n" for t in tests)
    return (
        f"# fastlin on {machine['device']}\n\n{verdict}\n## Machine and method\n\n{gpu.head(machine, limits)}\n"
        f"## Tests\n\n{counts}\n## Times\n\n{gpu.tables(rows, limits)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Test, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Everything, on a GPU.")
    parser.add_argument(
        "--backend",
        default=gpu_machine.default_backend(),
        metavar="NAME",
        help="the one under test, which others are compared with (default: cuda; triton on AMD)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), metavar="FOLDER", help="of the report")
    parser.add_argument("--quick", action="store_true", help="two rounds: to see that it runs, not to compare")
    options = parser.parse_args(arguments)
    reason = gpu_machine.why_not(options.backend)
    if reason is not None:
        sys.stderr.write(f"gpu-check: this machine cannot run it: {reason}\n")
        return 2
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = [
        run_tests("gpu", ["-m", "gpu", *(["tests/triton"] if options.backend == "triton" else [])], folder),
        run_tests("others", ["-m", "not gpu", "-n", str(WORKERS)], folder),
    ]
    names = [sized.row.name for sized in gpu.ROWS]
    machine, limits, rows = gpu.measure(options.backend, names, quick=options.quick)
    why = complaints(tests[0], tests[1], rows)
    record = {
        "machine": machine,
        "limits": asdict(limits),
        "complaints": why,
        "tests": [asdict(t) for t in tests],
        "rows": [gpu.as_dict(row, limits) for row in rows],
    }
    report.write(folder / "report.json", record)
    text = markdown(machine, limits, tests, rows)
    with replacing(folder / "report.md") as temporary:
        temporary.write_text(text)
    sys.stdout.write(f"{text}\nthe report is in {folder}\n")
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
