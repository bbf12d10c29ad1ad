"""Leases on cells, folders of workers, and shares of a figure."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from folders import contents, visible
from training_runs import mixture

import fastlin as fl
from fastlin import cli
from fastlin._tensors import FileError
from fastlin.experiments import forgetting, leases, prompts, workplaces
from fastlin.experiments.leases import Watch
from fastlin.experiments.reproduce import Folder, Request, _share


@pytest.fixture
def cell(tmp_path):
    return tmp_path / "cells" / "2a" / "plain-full-n2"


def elsewhere(lease, **values):
    """Have a lease be of another machine."""
    about = {**leases.read(lease.path), "machine": "another", **values}
    lease.path.write_text(json.dumps(about), encoding="utf-8")


def take(cell, generation=0, pid=None):
    return leases.take(cell, generation, pid or os.getpid(), 5.0)


def test_one_of_many_gets_a_lease(cell):
    found, barrier = [], threading.Barrier(8)

    def race():
        barrier.wait()
        for generation in range(20):
            found.append((generation, take(cell, generation)))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(generation for generation, lease in found if lease) == list(range(20))


def test_a_lease_ends_by_release_or_death(cell):
    watch = Watch(1e6)
    assert watch.free(cell) == 0
    lease = take(cell)
    assert watch.free(cell) is None
    assert not lease.lost()
    lease.release()
    assert watch.free(cell) == 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    take(cell, 0, child.pid)
    assert watch.free(cell) is None
    child.kill()
    while watch.free(cell) is None:
        time.sleep(0.01)  # a zombie until it is waited for: dead all the same
    assert child.returncode is None
    assert watch.free(cell) == 1
    child.wait()
    child.stdin.close()
    # The same number may be another process by now.
    lease = take(cell, 1)
    lease.path.write_text(json.dumps({**leases.read(lease.path), "born": 1}), encoding="utf-8")
    assert watch.free(cell) == 2


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that a test turns."""
    now = [1000.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    return now


def test_a_silent_lease_is_over(cell, clock):
    elsewhere(take(cell))
    watch = Watch(40.0)
    seen = []
    for _ in range(6):
        seen.append(watch.free(cell))
        clock[0] += 10.0
    assert seen == [None] * 4 + [1, 1]


def test_signs_of_life_keep_a_lease(cell, clock):
    lease = take(cell)
    watch = Watch(40.0)
    for beat in range(20):
        elsewhere(lease, beat=beat)
        assert watch.free(cell) is None
        clock[0] += 35.0
        assert watch.free(cell) is None


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_jumps_of_a_clock_do_not_matter(cell, clock, jump, monkeypatch):
    """Of this machine's clock, and of the one that dates files."""
    elsewhere(take(cell))
    watch = Watch(40.0)
    monkeypatch.setattr(leases.time, "time", lambda: 1e12 + clock[0])
    # However late a look comes, it counts for a quarter of the patience.
    for _ in range(4):
        assert watch.free(cell) is None
        os.utime(cell.with_name(f".{cell.name}.lease.0"), (0, 0))
        clock[0] += jump


def test_a_lease_that_was_taken_over(cell):
    first = take(cell)
    second = take(cell, 1)
    assert first.lost()
    assert not second.lost()
    first.release()
    assert leases.last(cell) == 1
    second.release()
    assert leases.last(cell) is None
    assert second.lost()
    third = take(cell)
    assert first.lost(), "a lease of the same name is another's"
    assert not third.lost()
    # What cannot be read is nobody's word against it.
    third.path.write_bytes(b"\xff{")
    assert not third.lost()


def test_renewal_goes_on_until_the_lease_is_lost(cell):
    lease = leases.take(cell, 0, os.getpid(), 0.01)
    gone = threading.Event()
    with leases.renewed(lease, gone.set):
        while leases.read(lease.path).get("beat", 0) < 3:
            time.sleep(0.005)
        assert not gone.is_set()
        take(cell, 1)
        gone.wait()
    assert leases.read(lease.path)["seconds"] > 0


OPTIONS = {"steps": 12, "batch": 64, "records": 4, "trials": 2}


def test_two_workers_on_one_cell(cell):
    """Both end, in whatever order; the cell has one whole run, and nothing is left of the other."""
    places = [workplaces.begin(cell, token) for token in ("first", "second")]
    assert not places[0].exists(), "the second has taken over"
    places[0] = workplaces.begin(cell, "third")
    places[1] = workplaces.at(cell, "fourth")
    for place in places:
        fl.train(mixture(), "plain", 5, out=place, resume=True, **OPTIONS)
    ends = [contents(place) for place in places]
    workplaces.publish(places[1], cell)
    with pytest.raises(FileNotFoundError):
        workplaces.publish(places[0], cell)
    assert contents(cell) == ends[1]
    for name in ("records.jsonl", "model.safetensors"):
        assert (cell / name).read_bytes() == {str(path): data for path, data in ends[0].items()}[name]
    assert [path.name for path in cell.parent.iterdir()] == [cell.name]
    # One that ends after the other's run has the name.
    fl.train(mixture(), "plain", 5, out=places[0], **OPTIONS)
    workplaces.publish(places[0], cell)
    assert contents(cell) == ends[1]
    assert [path.name for path in cell.parent.iterdir()] == [cell.name]


def stopped(place, monkeypatch, at=6):
    """A run that has a checkpoint of step `at`."""

    def stop(self, *arguments):
        if self.step == at:
            self._save(self.job.folder)
            raise KeyboardInterrupt
        one_step(self, *arguments)

    with monkeypatch.context() as patch:
        one_step = fl.training.loop.Loop._one_step
        patch.setattr(fl.training.loop.Loop, "_one_step", stop)
        with pytest.raises(KeyboardInterrupt):
            fl.train(mixture(), "plain", 5, out=place, resume=True, **OPTIONS)


def test_a_cell_goes_on_from_the_run_that_is_furthest(cell, monkeypatch):
    for token, at in (("a", 3), ("b", 9), ("c", 6)):
        stopped(workplaces.at(cell, token), monkeypatch, at)
    held = (workplaces.at(cell, "b") / "checkpoint.safetensors").read_bytes()
    place = workplaces.begin(cell, "d")
    assert (place / "checkpoint.safetensors").read_bytes() == held
    assert workplaces.started(cell) == [place]
    whole = fl.train(mixture(), "plain", 5, **OPTIONS)
    run = fl.train(mixture(), "plain", 5, out=place, resume=True, **OPTIONS)
    assert torch.equal(run.risk, whole.risk)


def test_a_damaged_checkpoint_is_passed_over_or_told(cell, monkeypatch):
    for token, at in (("a", 3), ("b", 9)):
        stopped(workplaces.at(cell, token), monkeypatch, at)
    bad = workplaces.at(cell, "b") / "checkpoint.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    place = workplaces.begin(cell, "c")
    assert workplaces.started(cell) == [bad.parent, place]
    (place / "checkpoint.safetensors").write_bytes(b"")
    before = contents(cell.parent)
    with pytest.raises(FileError, match=r"checkpoint.safetensors: damaged"):
        workplaces.begin(cell, "d")
    assert contents(cell.parent) == before


def test_a_cell_of_an_earlier_version(cell, monkeypatch):
    """On its way under the cell's own name, or something else that is there."""
    stopped(cell, monkeypatch)
    place = workplaces.begin(cell, "a")
    assert visible(place) == ["checkpoint.safetensors", "records.jsonl", "run.json"]
    fl.train(mixture(), "plain", 5, out=place, resume=True, **OPTIONS)
    workplaces.publish(place, cell)
    assert "result.json" in visible(cell)
    other = cell.with_name("other")
    other.mkdir()
    (other / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileError, match=r"other: holds thesis.txt and no run.json"):
        workplaces.begin(other, "a")
    place = workplaces.begin(cell.with_name("new"), "a")
    with pytest.raises(FileError, match=r"thesis.txt"):
        workplaces.publish(place, other)
    assert (other / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_shards_are_a_partition(tmp_path):
    panels = [prompts.PANELS["2a"], *forgetting.FIGURES.values()]
    orders = [order for panel in panels for order in Folder(tmp_path).open(panel, Request())]
    names = [(order.cell.panel, order.cell.key) for order in orders]
    shards = [
        [(order.cell.panel, order.cell.key) for order in _share(panels, orders, Request(shard=(i, 3)))]
        for i in range(3)
    ]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert max(map(len, shards)) - min(map(len, shards)) <= 3
    for order in orders:
        if order.after is not None:
            (shard,) = (shard for shard in shards if (order.cell.panel, order.cell.key) in shard)
            assert (order.cell.panel, order.after.name) in shard
    # What is done does not change whose the others are.
    assert _share(panels, orders[5:], Request(shard=(1, 3))) == [
        order for order in _share(panels, orders, Request(shard=(1, 3))) if order in orders[5:]
    ]


def test_shards_by_name(monkeypatch):
    slurm = {"ID": "7", "MIN": "3", "STEP": "2", "COUNT": "4"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert cli._shard("slurm") == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli._shard("torchrun") == (1, 2)
    assert cli._shard("3/8") == (3, 8)


@pytest.mark.parametrize("shard", ["", "1", "2/2", "-1/2", "a/b", "1/2/3", "0/0", "slurm", "torchrun"])
def test_wrong_shards(shard, capsys, monkeypatch):
    for name in ("SLURM_ARRAY_TASK_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "2a", f"--shard={shard}"])
    said = capsys.readouterr().err
    assert "argument --shard: got" in said
    assert "wants I/N" in said or "is not set" in said
