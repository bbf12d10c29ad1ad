"""The fuzzer for a moment, in a process that a crash would end; `docs/faults.md` has a run of a million executions."""

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


def test_a_find_is_told():
    """A reader that does not say which file is damaged."""
    bug = "panel_files.outcome_of = lambda cell: json.loads(cell.with_suffix('.json').read_text())"
    script = f"import sys; sys.argv[1:] = ['--executions', '2000']; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += f"import fuzzing, json\nfrom fastlin.experiments import panel_files\n{bug}\nfuzzing.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "outcome: execution " in done.stderr
