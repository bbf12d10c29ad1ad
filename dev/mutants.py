"""Plant one bug at a time and see whether the tests find it. `python -m dev.mutants`.

`dev.faults` and `dev.kernel_faults` have the bugs. The tool works on a copy of the tree. For each fault it changes one
file of the copy and runs pytest until its first failure: the tests near the fault, then the other short tests, and with
--long the long ones. A run that hangs counts as a failure. Where the file is below csrc, it compiles the CPU's
extension first; not for the CUDA kernels, which the tests compile in emulation.

Exit status 1: a fault survived, does not apply (stale), or could not be built or run (broken).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dev.fault import KINDS, LAYERS, Fault
from dev.faults import FAULTS

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-n", "2")
BUILD = (sys.executable, "setup.py", "build_ext", "--inplace", "--force")
# Its tests compare the table with the sources, and would find every fault.
OWN_TESTS = "tests/dev/"
# Seconds after which a run hangs: the short suite takes 5 minutes on two cores, the long one half an hour.
SHORT_SECONDS, LONG_SECONDS, BUILD_SECONDS = 1800, 7200, 1800
_FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\[\n]+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
_PASSED, _NO_TESTS = 0, 5  # exit statuses of pytest


@dataclass(frozen=True)
class Result:
    """Outcome of one fault.

    Attributes
    ----------
    found : str
        "short" or "long", the suite that found it; "nobody"; "stale" or "broken".
    by : str
        The first failing test, "timeout", or why the fault is stale or broken.
    met_long : bool
        Whether the long suite ran.
    """

    name: str
    layer: str
    kind: str
    file: str
    found: str
    by: str
    seconds: float
    met_long: bool = False

    def line(self) -> str:
        return f"{self.name:32} {self.layer:10} {self.kind:24} {self.found:7} {self.seconds:6.0f} s  {self.by}".rstrip()


class Broken(Exception):
    """A fault that could not be built, or a run of pytest that failed without a failing test."""


def planted(fault: Fault, text: str) -> str:
    """The text of a fault's file with the bug in it; ValueError where `old` does not occur exactly once."""
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"{fault.file}: has the old text {count} times, wants it once")
    changed = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        try:
            compile(changed, fault.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{fault.file}: does not compile with the fault: {error}") from None
    return changed


def stale(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """A message for each fault that does not apply to the tree at `root`."""
    messages = []
    for fault in faults:
        try:
            planted(fault, (root / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            messages.append(f"{fault.name}: {error}")
    return messages


def copy_tree(to: Path) -> None:
    """Copy what git tracks or would track, the compiled extensions, and the emulated CUDA backend where it is built."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and not name.startswith(OWN_TESTS)]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("fastlin/_*.so")]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("build/emulated/*") if path.is_file()]
    for name in names:
        if (ROOT / name).is_file():  # not a file that was deleted and is still in the index
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


@contextmanager
def with_fault(fault: Fault, tree: Path) -> Iterator[None]:
    """Plant a fault in a copy, and build it; afterwards the file and the extension are as before."""
    path = tree / fault.file
    original = path.read_bytes()
    libraries = {library: library.read_bytes() for library in tree.glob("fastlin/_C.*.so")}
    is_compiled = fault.file.startswith("csrc/") and not fault.file.startswith("csrc/cuda/")
    try:
        path.write_text(planted(fault, original.decode()), encoding="utf-8")
        if is_compiled:
            status, output = run(BUILD, tree, BUILD_SECONDS)
            if status != 0:
                raise Broken(f"does not build: {_last_line(output)}")
        yield
    finally:
        path.write_bytes(original)
        if is_compiled:
            for library, contents in libraries.items():
                library.unlink(missing_ok=True)  # a process may still have it mapped
                library.write_bytes(contents)


def run(command: Sequence[str], tree: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status and output of a command in a copy; None after a timeout. Then its workers end too."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_WAIT_POLICY": "passive",
        "FASTLIN_NO_CUDA": "1",
        "COLUMNS": "200",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            status = None
        except BaseException:
            _kill(process)
            raise
        output.seek(0)
        return status, output.read()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that runs, with the workers that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def first_failure(output: str) -> str | None:
    """The name of the first failing test in pytest's output."""
    match = _FAILURE.search(output)
    return None if match is None else match[1]


def suite(tree: Path, arguments: Sequence[str], seconds: float) -> str | None:
    """The first failing test of a run of pytest, "timeout", or None."""
    status, output = run((*PYTEST, *arguments), tree, seconds)
    if status is None:
        return "timeout"
    if status in (_PASSED, _NO_TESTS):
        return None
    name = first_failure(output)
    if name is None:
        raise Broken(f"pytest ended with status {status}: {_last_line(output)}")
    return name


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def try_fault(fault: Fault, tree: Path, *, with_long: bool, earlier: Result | None = None) -> Result:
    """Plant a fault in a copy and run the suites; `earlier` is that of a survivor, which meets the long suite alone."""
    started = time.monotonic()
    near = fault.near.split()
    short = ("-m", "not long")
    runs = [(*short, *near), (*short, *(f"--ignore={path}" for path in near))] if earlier is None else []
    found, by, met_long = "nobody", "", False
    try:
        with with_fault(fault, tree):
            for arguments in runs:
                failure = suite(tree, arguments, SHORT_SECONDS)
                if failure is not None:
                    found, by = "short", failure
                    break
            if found == "nobody" and with_long:
                met_long = True
                failure = suite(tree, ("-m", "long"), LONG_SECONDS)
                if failure is not None:
                    found, by = "long", failure
    except (OSError, ValueError) as error:
        found, by = "stale", str(error)
    except Broken as error:
        found, by = "broken", str(error)
    seconds = time.monotonic() - started + (0.0 if earlier is None else earlier.seconds)
    return Result(fault.name, fault.layer, fault.kind, fault.file, found, by, round(seconds, 1), met_long)


def is_done(result: Result | None, with_long: bool) -> bool:
    """Whether an earlier run has decided about a fault."""
    if result is None or result.found in ("stale", "broken"):
        return False
    return result.found != "nobody" or result.met_long or not with_long


def write(path: Path, results: Mapping[str, Result]) -> None:
    """Replace the file of results."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps([asdict(result) for result in results.values()], indent=1) + "\n")
    temporary.replace(path)


def read(path: Path) -> dict[str, Result]:
    """Results by the name of the fault."""
    return {row["name"]: Result(**row) for row in json.loads(path.read_text())}


def table(results: Sequence[Result]) -> str:
    """A line for each layer, and one for all: faults planted, found by each suite, survivors."""
    lines = [f"{'layer':12}{'planted':>9}{'short':>9}{'long':>9}{'survivors':>11}"]
    for layer in (*LAYERS, "all"):
        rows = [result for result in results if layer in (result.layer, "all")]
        counts = Counter(result.found for result in rows)
        if rows:
            planted_here = len(rows) - counts["stale"] - counts["broken"]
            lines.append(f"{layer:12}{planted_here:9}{counts['short']:9}{counts['long']:9}{counts['nobody']:11}")
    for word in ("nobody", "stale", "broken"):
        names = [result.name for result in results if result.found == word]
        if names:
            lines.append(f"{'survivors' if word == 'nobody' else word}: {', '.join(names)}")
    return "\n".join(lines)


def counts_by(faults: Sequence[Fault]) -> str:
    """The number of faults of each layer and of each kind."""
    layers, kinds = Counter(fault.layer for fault in faults), Counter(fault.kind for fault in faults)
    lines = [f"{len(faults)} faults"]
    lines += [f"  {name:24} {counts[name]:3}" for names, counts in ((LAYERS, layers), (KINDS, kinds)) for name in names]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dev.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAME,...", help="these faults")
    parser.add_argument("--layer", choices=LAYERS, help="the faults of one layer")
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--check", action="store_true", help="only check that every fault applies, and count them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, after every fault")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="skip the faults of FILE, and add the others to it")
    parser.add_argument("--long", action="store_true", help="run the long suite on the survivors of the short one")
    options = parser.parse_args(arguments)
    faults = list(FAULTS)
    if options.only is not None:
        names = options.only.split(",")
        unknown = set(names) - {fault.name for fault in faults}
        if unknown:
            parser.error(f"--only: no fault {', '.join(sorted(unknown))}; --list shows them")
        faults = [fault for fault in faults if fault.name in names]
    if options.layer is not None:
        faults = [fault for fault in faults if fault.layer == options.layer]
    if options.list:
        print(*(f"{fault.name:32} {fault.layer:10} {fault.kind:24} {fault.file}" for fault in faults), sep="\n")
        return 0
    if options.check:
        messages = stale(faults)
        print(*messages, counts_by(faults), sep="\n")
        return 1 if messages else 0
    results = read(options.resume) if options.resume is not None and options.resume.exists() else {}
    return _try_all(faults, results, options.json or options.resume, options.long)


def _try_all(faults: Sequence[Fault], results: dict[str, Result], out: Path | None, with_long: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="fastlin-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for fault in faults:
            earlier = results.get(fault.name)
            if is_done(earlier, with_long):
                continue
            survivor = earlier if earlier is not None and earlier.found == "nobody" else None
            results[fault.name] = try_fault(fault, tree, with_long=with_long, earlier=survivor)
            print(results[fault.name].line(), flush=True)
            if out is not None:
                write(out, results)
    chosen = [results[fault.name] for fault in faults]
    print(table(chosen))
    return 1 if any(result.found in ("nobody", "stale", "broken") for result in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
