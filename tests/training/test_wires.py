"""Sums over processes by sockets: in threads, which take the part of processes."""

import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastlin.training import wires
from fastlin.training.wires import Wires, connect


@pytest.fixture
def wired():
    """Makes the wires of each of `size` processes."""
    made = []

    def make(size):
        pairs = [socket.socketpair() for _ in range(size - 1)]
        team = [Wires(0, [here for here, _ in pairs], 60.0)]
        team += [Wires(i, [there], 60.0) for i, (_, there) in enumerate(pairs, 1)]
        made.extend(team)
        return team

    yield make
    for one in made:
        one.close()


def added(team, parts):
    """What each of a team has after a sum of their parts."""
    with ThreadPoolExecutor(len(team)) as pool:
        list(pool.map(lambda one, part: one.add(part), team, parts))
    return parts


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 1000, 32768])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_all_have_the_sum(wired, size, count, dtype):
    """One after the other, of several sizes: more than a socket holds too."""
    team = wired(size)
    for repeat in range(3):
        parts = [torch.arange(count).to(dtype) * (rank + repeat) for rank in range(size)]
        expected = sum(part.clone() for part in parts)
        assert all(torch.equal(part, expected) for part in added(team, parts))
        count += 1


def test_the_order_is_that_of_the_processes(wired):
    """The same bits in all, whoever comes first."""
    parts = [torch.full((2,), value, dtype=torch.float64) for value in (1.0, 1e16, -1e16)]
    for part in added(wired(3), parts):
        assert part.tolist() == [0.0, 0.0]  # (1 + 1e16) - 1e16, not 1 + (1e16 - 1e16)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_has_gone(wired, rank):
    team = wired(2)
    team[1 - rank].close()
    with pytest.raises(ConnectionError):
        team[rank].add(torch.zeros(3))


def test_a_process_that_goes_in_the_middle_of_a_sum():
    here, there = socket.socketpair()
    with here:
        there.sendall(bytes(12))
        there.close()
        with pytest.raises(ConnectionResetError, match="its connection was closed"):
            Wires(0, [here], 60.0).add(torch.zeros(3, dtype=torch.float64))


def test_a_sum_that_was_broken_off(wired):
    """Nothing of it is taken for a part of the next one, and who waits is told at once."""
    first, second = wired(2)
    stopped = [True]

    class Stopped(socket.socket):
        def recv_into(self, *given):
            if stopped:
                raise KeyboardInterrupt
            return super().recv_into(*given)

    here = first._sockets[0]
    first._sockets[0] = Stopped(fileno=here.detach())
    second._sockets[0].sendall(bytes(24))
    with pytest.raises(KeyboardInterrupt):
        first.add(torch.ones(3, dtype=torch.float64))
    stopped.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        first.add(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ConnectionError):
        second.add(torch.ones(3, dtype=torch.float64))


def test_who_waits_gives_up_after_a_time():
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        Wires(0, [here], 0.01).add(torch.zeros(3))


class Group:
    """What `connect` asks of a process group, for threads."""

    def __init__(self, size):
        self._barrier, self._sums, self._place = threading.Barrier(size), [], []

    def all_reduce(self, values):
        self._sums.append(int(values))
        self._barrier.wait(10)
        values.fill_(sum(self._sums))
        self._barrier.wait(10)

    def tell(self, rank, text):
        if rank == 0:
            self._place.append(text)
        self._barrier.wait(10)
        return self._place[0]


def connected(size, monkeypatch, place=lambda rank, text: text):
    """Wires of each process, as `connect` gives them; `place` is what a process hears of the place to go to."""
    group = Group(size)
    monkeypatch.setattr(wires.distributed, "all_reduce", group.all_reduce)

    def one(rank):
        return connect(rank, size, 60.0, lambda text: place(rank, group.tell(rank, text)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 8])
def test_connect(size, monkeypatch):
    team = connected(size, monkeypatch)
    parts = [torch.tensor([10.0**rank]) for rank in range(size)]
    assert {part.item() for part in added(team, parts)} == {float("1" * size)}
    for one in team:
        one.close()


def test_a_process_on_another_machine(monkeypatch):
    """It does not find the place: then none has wires."""
    assert connected(3, monkeypatch, lambda rank, text: "/nowhere/door" if rank == 2 else text) == [None] * 3


def test_a_place_that_no_socket_can_have(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert connected(2, monkeypatch) == [None, None]
    assert list(deep.iterdir()) == []


def test_no_room_for_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert connected(2, monkeypatch) == [None, None]


def test_no_socket_to_be_had(monkeypatch):
    class None_(socket.socket):
        def __init__(self, *given, **more):
            if given:
                raise OSError("Too many open files")
            super().__init__(**more)

    monkeypatch.setattr(wires.socket, "socket", None_)
    assert connected(2, monkeypatch) == [None, None]


def test_a_first_process_that_dies_before_it_tells(monkeypatch):
    def dead(text):
        raise ConnectionAbortedError("process 0 has ended")

    with pytest.raises(ConnectionAbortedError, match="process 0 has ended"):
        connect(1, 2, 60.0, dead)
