"""A short run of the fuzzer, in its own process in case of a crash; `docs/verification.md` has a long one."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("fuzzing.py")


def test_nothing_is_found(request):
    executions = 12_000 * request.config.getoption("--faults")
    command = [sys.executable, PROGRAM, "--executions", str(executions), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" executions, clean")
