"""`fastlin reproduce --jobs 1`, killed, stopped, and on full or read-only disks: always the same table."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from support.fault_sweeps import table
from support.folders import contents


@pytest.fixture(scope="module")
def seconds(server, undisturbed, tmp_path_factory):
    """How long an undisturbed sweep takes."""
    began = time.monotonic()
    code, said = server.start(tmp_path_factory.mktemp("timed")).wait()
    assert code == 0, said
    return time.monotonic() - began


def finished(server, out, undisturbed):
    """The same command resumes: the table is that of an undisturbed sweep."""
    code, said = server.start(out).wait()
    assert code == 0, said
    assert table(out) == undisturbed


def test_kill_9_at_random_moments(tmp_path, server, undisturbed, seconds, ledger, times):
    """Kills come within half the time of a sweep: one that did not resume would never end."""
    moments = random.Random(0)
    wanted, round_ = 18 * times, 0
    while wanted > 0:
        out, kills = tmp_path / f"{round_}", 0
        while kills < min(wanted, 9):
            sweep = server.start(out)
            time.sleep(moments.uniform(0.0, 0.5) * seconds)
            with suppress(ProcessLookupError):
                os.kill(sweep.process, signal.SIGKILL)
            sweep.wait()
            kills += 1
        finished(server, out, undisturbed)
        ledger.same_bits(kills)
        wanted, round_ = wanted - kills, round_ + 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_SIGTERM_and_Ctrl_C(tmp_path, server, undisturbed, seconds, ledger, times, number, code):
    """A signal writes a checkpoint though none is due, and the sweep resumes from it."""
    moments = random.Random(number)
    sent = 0
    for round_ in range(40 * times):
        out, before = tmp_path / f"{round_}", sent
        while sent < before + 4:
            sweep = server.start(out, checkpoint=1e6)
            sweep.await_record()
            time.sleep(moments.uniform(0.0, 0.1) * seconds)
            with suppress(ProcessLookupError):
                os.kill(sweep.process, number)
            ended, said = sweep.wait()
            # 0 or the signal itself: the signal came after the end of the sweep.
            assert ended in (code, 0, -number), said
            assert ended != code or "fastlin: stopped; rerun the same command to resume" in said
            if ended != code:
                break
            sent += 1
        for place in out.glob("cells/2c/*/"):
            left = {path.name for path in place.iterdir()}
            assert left & {"checkpoint.safetensors", "result.json"} or "records.jsonl" not in left
        finished(server, out, undisturbed)
        if sent >= 4 * times:
            break
    assert sent > 0
    ledger.same_bits(sent)


@pytest.fixture
def small_disk(tmp_path):
    """A function that resizes a small file system, or None where mounting is not allowed."""
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
    """The error names the full disk; with more room the same command resumes."""
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
    """On a read-only mount, or, where mounting is not allowed, without write permission."""
    out = small_disk("10m") / "out" if small_disk else tmp_path / "out"
    sweep = server.start(out)
    sweep.await_record()
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
