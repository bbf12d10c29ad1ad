"""Rows that are functions: each runs, returns plain numbers and lines, and fits 80 columns."""

import json

import pytest

from fastlin import plots
from fastlin.bench import processes, rows, run, table

FUNCTIONS = {row.name: row for row in rows.CPU if row.function is not None}


def measured(name, monkeypatch):
    return run.run([FUNCTIONS[name].small()], run.QUICK, command="fastlin bench", probing=False)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"processes", "training", "soak"}))
def test_a_function_returns_numbers_and_lines(name, monkeypatch):
    record = measured(name, monkeypatch)
    found = json.loads(json.dumps(record, allow_nan=False))["others"][name]
    assert (found["wrong"], found["skipped"]) == ({}, {})
    assert found["values"]
    assert all(value > 0 for value in found["values"].values())
    assert found["lines"]
    assert all(len(line) <= 80 for line in table.as_text(record).splitlines())
    named = {key for bar in FUNCTIONS[name].bars for key in (bar.what, bar.over) if key}
    assert named <= set(found["values"])


def test_a_loop_that_computes_something_else_is_wrong(monkeypatch):
    monkeypatch.setattr("fastlin.bench.end_to_end.relative_error", lambda found, true: 0.1)
    record = measured("cell", monkeypatch)
    assert record["others"]["cell"]["wrong"] == {"fastlin": "W differs from plain torch by 0.1"}
    assert run.wrong(record)


def test_shares_are_medians_of_rounds(monkeypatch):
    def stretches(sizes, rounds):
        def ones(size):
            return [{"step": step / size, "busy": 2.0, "bytes": 1256, "sum": 1e-4} for step in (3.0, 1.0, 2.0)]

        found = {name: {size: ones(size) for size in sizes} for name in processes.CASES}
        found["1 trial, batch 8192"][2][0]["step"] = 7.0  # a slow moment
        return found

    monkeypatch.setattr(processes, "stretches", stretches)
    record = measured("processes", monkeypatch)
    found = record["others"]["processes"]
    assert len(found["lines"]) == 1 + 2 * len(processes.CASES)
    assert found["lines"][1].split()[-5:] == ["1", "0.00", "1.00", "1.00", "-"]
    assert found["values"]["1 trial, batch 8192, 2 processes"] == 2.0
    assert len(plots.bench_figures(json.loads(json.dumps(record)))["processes"].axes[0].lines) == 6


def test_groups_of_processes_take_turns(monkeypatch):
    small = {"1 trial, batch 64": {"trials": 1, "batch": 64}}
    monkeypatch.setattr(processes, "CASES", small)
    popen = processes.subprocess.Popen
    # The processes of a group have a module of their own.
    program = (
        "from fastlin.bench import processes as p; "
        f"p.CASES = {small}; p._WORK = 640; joined = p.joined('cpu'); joined.__enter__(); p.serve()"
    )

    def start(command, **options):
        at = command.index("-m", command.index("--nproc-per-node"))
        return popen([*command[:at], "--no-python", processes.sys.executable, "-c", program], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    for found in processes.stretches([1, 2], 2)["1 trial, batch 64"].values():
        assert len(found) == 2
        assert all(one["step"] > 0 and one["busy"] > 0 and one["bytes"] == 1256 for one in found)
