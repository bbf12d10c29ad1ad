"""`fastlin reproduce`: its processes are killed, and what others see of it."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from filling import fill_here

from fastlin._files import write_json
from fastlin._tensors import read_json
from fastlin.experiments import leases, prompts, reproduce, status
from fastlin.experiments.reproduce import Effort, Request


def run(out, request, tick=lambda: None):
    panels = [prompts.PANELS["2c"]]
    return reproduce.reproduce(panels, out, request, drawn=lambda _: None, ended=lambda *_: None, tick=tick)


COMMAND = """
import sys
from pathlib import Path
from fastlin.experiments import prompts, reproduce
from fastlin.experiments.reproduce import Effort, Request
if __name__ == "__main__":
    request = Request(effort=Effort(2, 400, 256), lengths=(2, 5), jobs=2)
    reproduce.reproduce([prompts.PANELS["2c"]], Path(sys.argv[1]), request,
                        drawn=lambda name: None, ended=lambda record, cell: None, tick=lambda: None)
"""


def test_killed_at_random_moments_the_table_is_the_same(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(COMMAND, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}

    def start(out):
        return subprocess.Popen([sys.executable, script, out], env=environment)

    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    began = time.monotonic()
    assert start(whole).wait() == 0
    seconds = time.monotonic() - began
    moments = random.Random(0)
    for _ in range(2):
        process = start(pieces)
        try:
            process.wait(moments.uniform(0.3, 0.9) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
    assert start(pieces).wait() == 0
    assert (pieces / "2c.csv").read_bytes() == (whole / "2c.csv").read_bytes()


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_that_dies_is_replaced(tmp_path, times):
    """As when the system ends a process that takes too much memory: its cell is tried again, once."""

    def kill(*_):
        for path in tmp_path.glob("cells/2c/.*.lease.*"):
            process = (leases.read(path) or {}).get("pid")
            if process is not None and process not in killed and len(killed) < times:
                killed.append(process)
                os.kill(process, signal.SIGKILL)

    killed = []
    request = Request(effort=Effort(1, 1000, 64), lengths=(2,), jobs=1)
    (record,) = run(tmp_path, request, tick=kill)
    states = [cell["state"] for cell in record["cells"]]
    assert sorted(states) == ["done", "done", "done" if times == 1 else "failed"]
    assert times == 1 or next(cell["error"] for cell in record["cells"] if cell["error"]) == ("its process died, twice")


def test_status_knows_the_dead(tmp_path, monkeypatch):
    """On this machine by their process, on others by the signs of life that do not come."""
    monkeypatch.setattr(reproduce, "run", fill_here)
    run(tmp_path, Request(effort=Effort(2, 6, 64), lengths=(2, 5), jobs=1))
    record = read_json(tmp_path / "2c.json")
    for cell in record["cells"]:
        cell.update(state="waiting", row=None, seconds=None)
        (tmp_path / f"cells/2c/{cell['key']}.json").unlink()
    write_json(tmp_path / "2c.json", record)
    here, there, alive = (tmp_path / f"cells/2c/{cell['key']}" for cell in record["cells"][:3])
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    leases.take(here, 0, child.pid, 5.0)
    for cell in (there, alive):
        lease = leases.take(cell, 0, os.getpid(), 0.2)
        lease.path.write_text(json.dumps({**leases.read(lease.path), "machine": "another"}), encoding="utf-8")
    timer = threading.Timer(0.1, lambda: lease.path.write_text('{"beat": 1}', encoding="utf-8"))
    timer.start()
    assert status.silent_cells(tmp_path) == {here, there}
    timer.join()
    text = status.as_text(tmp_path)
    assert text.count("running  2c") == 0, "nor does the third one give a sign any more"
