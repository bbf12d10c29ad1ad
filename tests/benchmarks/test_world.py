"""The table and picture of throughput against processes, on numbers that are made up."""

import subprocess
import sys

from benchmarks import world


def test_table_and_picture(tmp_path):
    def stretches(size):
        return [{"step": step / size, "busy": 2.0, "bytes": 1256, "sum": 1e-4} for step in (3.0, 1.0, 2.0)]

    table = {name: {size: stretches(size) for size in (1, 2)} for name in world.CASES}
    table["1 trial, batch 8192"][2][0]["step"] = 7.0  # a slow moment
    lines = world.rows(table)
    assert len(lines) == 2 + 2 * len(world.CASES)
    assert lines[2] == "| 1 trial, batch 8192 | 1 | 0.00 | 1.00 | 1.00 | - |"
    assert lines[3] == "| 1 trial, batch 8192 | 2 | 0.01 | 2.00 | 1.00 | 1256 bytes, 100 µs |"
    world.draw(table, tmp_path / "world.png")
    assert (tmp_path / "world.png").stat().st_size > 5000


def test_groups_that_take_turns(monkeypatch):
    """Of two sizes, with a small case in place of the others."""
    small = {"1 trial, batch 64": {"trials": 1, "batch": 64}}
    monkeypatch.setattr(world, "CASES", small)
    popen = subprocess.Popen
    # The processes of a group have a module of their own.
    program = (
        "import sys; from benchmarks import world; "
        f"world.CASES = {small}; world._WORK = 640; sys.argv = ['world', '--worker']; world.main()"
    )

    def start(command, **options):
        at = command.index("-m", command.index("--nproc-per-node"))
        return popen([*command[:at], "--no-python", sys.executable, "-c", program], **options)

    monkeypatch.setattr(world.subprocess, "Popen", start)
    table = world.measure([1, 2], 2)
    for found in table["1 trial, batch 64"].values():
        assert len(found) == 2
        assert all(one["step"] > 0 and one["busy"] > 0 and one["bytes"] == 1256 for one in found)
