"""`fastlin reproduce` with its processes killed, stopped and slowed down, alone and side by side: always one table."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from faults.sweeps import KEYS, held, remains, table
from folders import contents

from fastlin._tensors import read_json
from fastlin.experiments import status


@pytest.fixture(scope="module")
def seconds(server, undisturbed, tmp_path_factory):
    """How long an undisturbed sweep takes here and now."""
    began = time.monotonic()
    code, said = server.start(tmp_path_factory.mktemp("timed")).wait()
    assert code == 0, said
    return time.monotonic() - began


def finished(server, out, undisturbed, **options):
    """A call goes on to the end: the table is that of an undisturbed sweep, and nothing is left beside it."""
    code, said = server.start(out, **options).wait()
    assert code == 0, said
    assert table(out) == undisturbed
    assert remains(out) == []


def kill(sweep, whom):
    """End some processes of a sweep at once."""
    if whom == "all":
        os.killpg(sweep.process, signal.SIGKILL)
    elif whom == "parent":
        os.kill(sweep.process, signal.SIGKILL)
    else:
        for process in sweep.trainers():
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("whom", ["all", "parent", "trainer"])
def test_kill_9_at_random_moments(tmp_path, server, undisturbed, seconds, ledger, times, whom):
    """Each piece is short: an undisturbed sweep has time for a few, one that starts anew each time has for none."""
    moments = random.Random(whom)
    wanted, round_ = 18 * times, 0
    while wanted > 0:
        out, kills = tmp_path / f"{round_}", 0
        while kills < min(wanted, 9):
            sweep = server.start(out)
            time.sleep(moments.uniform(0.0, 0.5) * seconds)
            with suppress(ProcessLookupError):
                kill(sweep, whom)
            if whom == "trainer":
                # The call itself goes on, with another process.
                time.sleep(moments.uniform(0.0, 0.2) * seconds)
                os.kill(sweep.process, signal.SIGTERM)
            sweep.wait()
            kills += 1
        finished(server, out, undisturbed)
        ledger.same_bits(kills)
        wanted, round_ = wanted - kills, round_ + 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_SIGTERM_and_Ctrl_C(tmp_path, server, undisturbed, seconds, ledger, times, number, code):
    """A checkpoint is left though none was due, no lease is, and the step that was under way is not done again."""
    moments = random.Random(number)
    sent = 0
    for round_ in range(40 * times):
        out, before = tmp_path / f"{round_}", sent
        while sent < before + 4:
            sweep = server.start(out, checkpoint=1e6)
            trainer = sweep.await_trainer()
            time.sleep(moments.uniform(0.0, 0.1) * seconds)
            with suppress(ProcessLookupError):
                os.kill(sweep.process, number)
            ended, said = sweep.wait()
            # 0 or the signal itself: it came after the end of the sweep.
            assert ended in (code, 0, -number), said
            assert ended != code or "fastlin: stopped" in said
            assert not os.path.exists(f"/proc/{trainer}")
            assert held(out) == []
            if ended != code:
                break
            sent += 1
        for place in out.glob("cells/2c/.*.at.*"):
            left = {path.name for path in place.iterdir()}
            assert left & {"checkpoint.safetensors", "result.json"} or "records.jsonl" not in left
        finished(server, out, undisturbed)
        if sent >= 4 * times:
            break
    assert sent > 0
    ledger.same_bits(sent)


def test_workers_side_by_side(tmp_path, server, undisturbed, ledger):
    """Three calls, of which one is killed: the others do its cells, each once."""
    sweeps = [server.start(tmp_path) for _ in range(3)]
    sweeps[0].await_trainer()
    os.killpg(sweeps[0].process, signal.SIGKILL)
    assert sweeps[0].wait()[0] == -signal.SIGKILL
    said = []
    for sweep in sweeps[1:]:
        code, text = sweep.wait()
        assert code == 0, text
        said += [line for line in text.splitlines() if ": risk " in line]
    assert table(tmp_path) == undisturbed
    assert remains(tmp_path) == []
    done = [line.split()[2].rstrip(":") for line in said]
    assert len(done) == len(set(done)), "a cell was trained twice"
    ledger.same_bits()


def test_shards(tmp_path, server, undisturbed):
    """Each does its own cells; whoever ends last writes the table."""
    sweeps = [server.start(tmp_path, shard=f"{i}/3") for i in range(3)]
    texts = [sweep.wait() for sweep in sweeps]
    assert [code for code, _ in texts] == [0, 0, 0]
    for i, (_, text) in enumerate(texts):
        done = [line.split()[2].rstrip(":") for line in text.splitlines() if ": risk " in line]
        assert done == KEYS[i::3]
    assert table(tmp_path) == undisturbed


def test_two_workers_on_one_cell(tmp_path, server, undisturbed, ledger, times):
    """They give no signs of life and have no patience: they take each other's cells over all the time."""
    taken = 0
    for round_ in range(10 * times):
        out, seen = tmp_path / f"{round_}", set()
        sweeps = [server.start(out, patience=0.02, mute=True) for _ in range(3)]
        while not all(sweep.over() for sweep in sweeps):
            seen |= {path.name for path in held(out)}
            time.sleep(0.002)
        for sweep in sweeps:
            code, said = sweep.wait()
            assert code == 0, said
        finished(server, out, undisturbed)
        taken += sum(not name.endswith(".lease.0") for name in seen)
        if taken >= times:
            break
    ledger.same_bits(taken)


def test_a_slow_worker(tmp_path, server, undisturbed, ledger, times):
    """It is stopped for longer than others are patient; when it goes on the cell is not its own any more."""
    for round_ in range(2 * times):
        out = tmp_path / f"{round_}"
        slow = server.start(out, patience=0.3)
        trainer = slow.await_trainer()
        for process in (slow.process, trainer):
            os.kill(process, signal.SIGSTOP)
        try:
            code, said = server.start(out, patience=0.3).wait()
            assert code == 0, said
            assert table(out) == undisturbed
        finally:
            for process in (trainer, slow.process):
                os.kill(process, signal.SIGCONT)
        code, said = slow.wait()
        assert code == 0, said
        finished(server, out, undisturbed)
        ledger.same_bits()


def test_clocks_that_jump(tmp_path, server, undisturbed, ledger, times):
    """Every reading of the time of day is another one, and files have been changed in any year."""
    moments = random.Random(0)
    for round_ in range(times):
        out = tmp_path / f"{round_}"
        sweeps = [server.start(out, clock=i) for i in range(2)]
        while not all(sweep.over() for sweep in sweeps):
            # Files and folders come and go meanwhile; os.walk passes over those that are gone.
            for folder, folders, files in os.walk(out):
                for name in (*folders, *files):
                    with suppress(FileNotFoundError):
                        os.utime(os.path.join(folder, name), (0, moments.uniform(0, 4e9)))
            assert not [path for path in held(out) if not path.name.endswith(".lease.0")], "taken over"
            time.sleep(0.02)
        for sweep in sweeps:
            code, said = sweep.wait()
            assert code == 0, said
        finished(server, out, undisturbed)
        ledger.same_bits(len(sweeps))


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of a size, or None where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        yield None
        return

    def resize(size, more=""):
        subprocess.run(["mount", "-o", f"remount,size={size}{more}", place], check=True)
        return place

    yield resize
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("kilobytes", [4, 16, 28, 48])
def test_a_full_disk(tmp_path, server, undisturbed, ledger, small_disk, kilobytes):
    """Whatever cannot be written is told; with room again the same command goes on."""
    if small_disk is None:
        # No file can grow beyond the limit.
        out, limit = tmp_path / "out", {"space": kilobytes << 6}
    else:
        out, limit = small_disk(f"{kilobytes}k") / "out", {}
    code, said = server.start(out, checkpoint=0.0, **limit).wait()
    assert code == 1, said
    assert "No space left on device" in said or "File too large" in said
    assert "Traceback" not in said
    if small_disk is not None:
        small_disk("10m")
    finished(server, out, undisturbed)
    ledger.same_bits()


def test_a_read_only_folder(tmp_path, server, undisturbed, ledger, small_disk):
    """On a disk that nobody can write to, or where that cannot be had for a user whom permissions stop."""
    out = small_disk("10m") / "out" if small_disk else tmp_path / "out"
    sweep = server.start(out)
    sweep.await_trainer()
    os.kill(sweep.process, signal.SIGTERM)
    sweep.wait()
    before = contents(out)
    if small_disk:
        small_disk("10m", ",ro")
    else:
        for path in (out, *out.rglob("*/")):
            path.chmod(0o555)
    code, said = server.start(out).wait()
    assert code == 1
    assert said.startswith("fastlin: [Errno ")
    assert str(out) in said
    assert len(said.splitlines()) == 1
    assert contents(out) == before
    if small_disk:
        small_disk("10m", ",rw")
    else:
        for path in (out, *out.rglob("*/")):
            path.chmod(0o755)
    finished(server, out, undisturbed)
    ledger.clear_error()


def test_status_while_it_runs(tmp_path, server):
    sweep = server.start(tmp_path)
    trainer = sweep.await_trainer()
    text = status.as_text(tmp_path)
    assert f"process {trainer} of " in text or "all 3 cells have ended" in text
    assert sweep.wait()[0] == 0
    assert "all 3 cells have ended" in status.as_text(tmp_path)
    assert read_json(tmp_path / "2c.json")["cells"][0]["state"] == "done"
