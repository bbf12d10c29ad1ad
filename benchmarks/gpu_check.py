"""On a machine with a GPU: all tests on it, then `fastlin bench --device cuda`. `make gpu-check`.

Tests of the GPU are those of both backends, cuda and triton; on AMD those of triton. The folder gets report.md beside
what the tests and the benchmark write. The command ends with 0 when every test passed, tests of the GPU were among them
and none of those was skipped, and fastlin ran in every row with right results; with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fastlin import _info, cli
from fastlin._files import replacing
from fastlin.bench import gpu, table
from fastlin.bench.compare import read
from fastlin.bench.labels import parse

ROOT = Path(__file__).parents[1]
WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest did: counts, and the names of the tests that failed."""

    name: str
    passed: int
    skipped: int
    failures: tuple[str, ...]


def run_tests(name: str, arguments: Sequence[str], folder: Path) -> Outcome:
    """Run pytest; what it prints goes to the terminal."""
    record = folder / f"tests-{name}.xml"
    record.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "pytest", *arguments, f"--junitxml={record}"], cwd=ROOT, check=False)
    return read_tests(name, record) if record.exists() else Outcome(name, 0, 0, ("pytest did not finish",))


def read_tests(name: str, record: Path) -> Outcome:
    """The counts of a JUnit file."""
    failures, passed, skipped = [], 0, 0
    for case in ElementTree.parse(record).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(name, passed, skipped, tuple(failures))


def complaints(of_gpu: Outcome, others: Outcome, record: dict[str, Any]) -> list[str]:
    """Why the check fails; empty when it does not."""
    found = [f"failed: {name}" for tests in (of_gpu, others) for name in tests.failures]
    if of_gpu.passed == 0:
        found.append("no test of the GPU ran")
    if of_gpu.skipped > 0:
        found.append(f"{of_gpu.skipped} tests of the GPU were skipped")
    for case in record["cases"]:
        failed = {label: why for label, why in case["skipped"].items() if parse(label).kind == "fastlin"}
        bad = {**case["wrong"], **{label: why for label, why in failed.items() if not why.startswith("cannot serve")}}
        found += [f"{case['row']}: {label}: {why}" for label, why in bad.items()]
    return found


def report(why: Sequence[str], tests: Sequence[Outcome], record: dict[str, Any], kernels: str) -> str:
    """The report, in Markdown; `kernels` says what code runs on the GPU, and on what driver."""
    verdict = "".join(f"- {reason}\n" for reason in why) or "All tests passed, all results were right.\n"
    counts = "".join(f"- {t.name}: {t.passed} passed, {t.skipped} skipped, {len(t.failures)} failed\n" for t in tests)
    times = f"```text\n{table.as_text(record)}```\n"
    head = f"# fastlin on {record['machine']['cpu']}\n\nCUDA kernels: {kernels}\n\n{verdict}"
    return f"{head}\n## Tests\n\n{counts}\n## Times\n\n{times}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Test, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Everything, on a GPU.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), metavar="FOLDER", help="of the report")
    parser.add_argument("--quick", action="store_true", help="few calls: to see that it runs, not to compare")
    options = parser.parse_args(arguments)
    kernels = cli.cuda_state(_info.info()["cuda"])
    print(f"CUDA kernels: {kernels}", flush=True)
    reason = gpu.why_not()
    if reason is not None:
        sys.stderr.write(f"gpu-check: this machine cannot run it: {reason}\n")
        return 2
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = [
        run_tests("gpu", ["-m", "gpu", *(["tests/triton"] if gpu.tested_backend() == "triton" else [])], folder),
        run_tests("others", ["-m", "not gpu", "-n", str(WORKERS)], folder),
    ]
    cli.main(["bench", "--device", "cuda", "--out", str(folder), *(["--quick"] if options.quick else [])])
    record = read(folder / "bench.json")
    why = complaints(tests[0], tests[1], record)
    with replacing(folder / "report.md") as temporary:
        temporary.write_text(report(why, tests, record, kernels))
    print(*why, f"the report is in {folder}", sep="\n")
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
