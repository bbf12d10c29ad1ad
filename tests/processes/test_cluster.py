"""`fastlin reproduce` on dask: local and outside clusters, whose processes are killed during training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from distributed import Client
from support.fault_sweeps import table

from fastlin._files import read_json
from fastlin.figures import prompts
from fastlin.figures.reproduce import Effort, Request, reproduce

PROGRAM = Path(__file__).parents[1] / "support" / "small_sweep.py"
SECONDS = 120


def start(out, figure="2c", *more, **environment):
    """Start the command in a new process group, and collect its output."""
    return subprocess.Popen(
        [sys.executable, PROGRAM, figure, "--out", out, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def end(process, code=0):
    """Output of a process, which must end with the code."""
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, said
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The tables of a sweep without dask."""
    out = tmp_path_factory.mktemp("undisturbed")
    for figure in ("2c", "ff4"):
        end(start(out, figure, "--jobs", "1"))
    return {"2c": table(out), "ff4": table(out, "ff4", ("pretrain", "tuned"))}


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def trained(out, panel="2c"):
    """Checkpoints of the cells that are training."""
    return list(out.glob(f"cells/{panel}/*/checkpoint.safetensors"))


def workers(process):
    """Worker processes of a command."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if any("spawn_main" in word for word in child.cmdline())]
    return []


def test_a_panel_of_each_paper(tmp_path, undisturbed):
    said = end(start(tmp_path, "2c", "--jobs", "2"))
    assert said.startswith("dask dashboard: http://127.0.0.1:")
    assert table(tmp_path) == undisturbed["2c"]
    end(start(tmp_path, "ff4", "--jobs", "2"))
    assert table(tmp_path, "ff4", ("pretrain", "tuned")) == undisturbed["ff4"]


def test_a_worker_is_killed(tmp_path, undisturbed):
    process = start(tmp_path, "2c", "--jobs", "2")
    until(lambda: trained(tmp_path))
    workers(process)[0].kill()
    said = end(process)
    assert table(tmp_path) == undisturbed["2c"]
    assert sum(": risk " in line for line in said.splitlines()) == 3


def test_a_cell_that_kills_its_workers(tmp_path):
    """The command tries it three times and reports it; the other cells are trained."""
    deaths = tmp_path / "deaths"
    said = end(start(tmp_path, "deadly", "--jobs", "2", DEATHS=str(deaths)), 1)
    assert deaths.read_text().splitlines() == ["died"] * 3
    assert "deadly joint-full-n2: 3 workers died while training it" in said
    states = [cell["state"] for cell in read_json(tmp_path / "deadly.json", dict)["cells"]]
    assert states == ["done", "done", "failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_checkpoints_and_no_workers(tmp_path, undisturbed, number):
    """SIGTERM to the command; SIGINT to all its processes, as a terminal sends it."""
    process = start(tmp_path, "2c", "--jobs", "2")
    until(lambda: trained(tmp_path))
    held = workers(process)
    assert len(held) == 2
    begun = {path.parent for path in trained(tmp_path)}
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said = end(process, 128 + number)
    assert said.splitlines()[-1] == f"fastlin: stopped; rerun the same command to resume {tmp_path}"
    assert "Traceback" not in said
    until(lambda: not any(worker.is_running() for worker in held))
    assert all((cell / "checkpoint.safetensors").exists() or (cell / "result.json").exists() for cell in begun)
    end(start(tmp_path, "2c", "--jobs", "2"))
    assert table(tmp_path) == undisturbed["2c"]


def test_the_command_is_killed(tmp_path, undisturbed):
    """Its workers end too, and the same command resumes."""
    process = start(tmp_path, "2c", "--jobs", "2")
    until(lambda: trained(tmp_path))
    held = workers(process)
    process.kill()
    process.communicate()
    until(lambda: not any(worker.is_running() for worker in held))
    end(start(tmp_path, "2c", "--jobs", "1"))
    assert table(tmp_path) == undisturbed["2c"]


def test_two_commands_on_one_folder(tmp_path, undisturbed):
    """The second waits for cells that the first trains: one table, and both exit with 0."""
    processes = [start(tmp_path, "2c", "--jobs", "1") for _ in range(2)]
    for process in processes:
        end(process)
    assert table(tmp_path) == undisturbed["2c"]


class Outside:
    """A scheduler and a worker that the command did not start."""

    def __init__(self, folder):
        self.file = folder / "scheduler.json"
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", self.file
        )
        until(lambda: self.file.exists() and self.file.read_text().endswith("}"))
        self.worker = self._start("worker", "--nthreads", "1", "--scheduler-file", self.file)

    def _start(self, what, *arguments):
        command = [sys.executable, "-m", "dask", what, *map(str, arguments)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def address(self):
        return json.loads(self.file.read_text())["address"]

    def close(self):
        for process in (self.scheduler, self.worker):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def outside(tmp_path):
    made = Outside(tmp_path)
    yield made
    made.close()


def test_an_outside_cluster(tmp_path, outside, undisturbed):
    """By its file, by its address, and from Python."""
    end(start(tmp_path / "file", "2c", "--dask", str(outside.file)))
    assert table(tmp_path / "file") == undisturbed["2c"]
    end(start(tmp_path / "address", "ff4", "--dask", outside.address()))
    assert table(tmp_path / "address", "ff4", ("pretrain", "tuned")) == undisturbed["ff4"]
    request = Request(effort=Effort(1, 6, 32), lengths=(2,))
    with Client(outside.address()) as client:
        (record,) = reproduce([prompts.PANELS["2c"]], str(tmp_path / "python"), request, client=client)
    assert [cell["state"] for cell in record["cells"]] == ["done"] * 3
    (alone,) = reproduce([prompts.PANELS["2c"]], tmp_path / "alone", replace(request, jobs=1))
    assert [cell["row"] for cell in record["cells"]] == [cell["row"] for cell in alone["cells"]]


def test_the_scheduler_of_an_outside_cluster_is_killed(tmp_path, outside, undisturbed):
    process = start(tmp_path / "out", "2c", "--dask", outside.address())
    until(lambda: trained(tmp_path / "out"))
    address = outside.address()
    outside.scheduler.kill()
    said = end(process, 1)
    assert said.splitlines()[-1] == (
        f"fastlin: lost the connection to dask's scheduler at {address}; cells that are done or have a checkpoint are "
        "kept: rerun the same command to resume"
    )
    assert "Traceback" not in said
    end(start(tmp_path / "out", "2c", "--jobs", "1"))
    assert table(tmp_path / "out") == undisturbed["2c"]


def test_Ctrl_C_on_an_outside_cluster(tmp_path, outside, undisturbed):
    """The cell stops with a checkpoint; the cluster keeps running."""
    process = start(tmp_path / "out", "2c", "--dask", str(outside.file))
    (begun, *_) = until(lambda: trained(tmp_path / "out"))
    process.send_signal(signal.SIGINT)
    end(process, 130)
    assert begun.exists() or begun.with_name("result.json").exists()
    assert outside.worker.poll() is None
    end(start(tmp_path / "out", "2c", "--dask", str(outside.file)))
    assert table(tmp_path / "out") == undisturbed["2c"]


UNGUARDED = """
import os, sys
from pathlib import Path
from fastlin.figures import prompts
from fastlin.figures.reproduce import Effort, Request, reproduce
Path(sys.argv[1], f"process-{os.getpid()}").touch()
reproduce([prompts.PANELS["2c"]], sys.argv[1], Request(effort=Effort(1, 4, 16), lengths=(2,), jobs=2))
"""


def test_a_script_without_a_guard(tmp_path):
    """One error line, and at most two worker processes started."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "RuntimeError: reproduce: its worker processes could not start; a script that calls it needs"
    )
    assert done.stderr.count("Traceback") == 1
    assert len(list(tmp_path.glob("process-*"))) <= 3


def test_without_dask(tmp_path):
    """`--jobs 1` does not need dask; more jobs print what to install."""
    (tmp_path / "distributed.py").write_text("raise ModuleNotFoundError('No module named distributed')")
    hidden = {"PYTHONPATH": str(tmp_path)}
    assert "pip install 'fastlin[cluster]', or --jobs 1" in end(start(tmp_path / "a", "2c", "--jobs", "2", **hidden), 1)
    assert "pip install 'fastlin[cluster]'" in end(
        start(tmp_path / "a", "2c", "--dask", "tcp://127.0.0.1:1", **hidden), 1
    )
    end(start(tmp_path / "b", "2c", "--jobs", "1", **hidden))
