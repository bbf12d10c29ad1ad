"""SIGTERM and SIGINT: a run finishes its step, writes a checkpoint, and resumes to the bits of an uninterrupted run."""

import os
import signal
import threading

import pytest
from support.folders import visible
from support.training_runs import (
    CHECKPOINT,
    EVERY,
    SIZES,
    STEPS,
    TOML,
    assert_same,
    await_step,
    before_step,
    records,
    result,
    send,
    train,
)

import fastlin as fl
from fastlin import cli, settings
from fastlin.training import outcome, table
from fastlin.training.loop import Loop
from fastlin.training.signals import interruptible

pytestmark = [
    pytest.mark.usefixtures("small_evaluations"),
    pytest.mark.filterwarnings("ignore:train. the sampled risk of trials"),
]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_command(tmp_path, forker, no_pictures, number, code):
    (tmp_path / "own.toml").write_text(TOML)
    command = ["train", str(tmp_path / "own.toml"), "--regime", "plain", "--steps", "20", "--batch", "64"]
    stopped = [*command, "--out", str(tmp_path / "stopped")]
    child = forker.start(command=stopped, moment="pause", at=7, every=1)
    await_step(tmp_path / "stopped/plain-n5", 7, child)
    os.kill(child, number)
    assert forker.end() == code
    assert visible(tmp_path / "stopped/plain-n5") == [CHECKPOINT, "records.jsonl", "run.json"]
    said = forker.errors.read_text()
    assert "Traceback" not in said
    assert ("--resume resumes" in said) == (number == signal.SIGINT)
    assert cli.main([*stopped, "--resume"]) == 0
    assert cli.main([*command, "--out", str(tmp_path / "whole")]) == 0
    assert records(tmp_path / "stopped/plain-n5") == records(tmp_path / "whole/plain-n5")
    assert result(tmp_path / "stopped/plain-n5") == result(tmp_path / "whole/plain-n5")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("at", [0, 3, STEPS // 2 - 1, STEPS // 2, STEPS - 2])
def test_signal_leaves_a_checkpoint(tmp_path, monkeypatch, undisturbed, number, error, at):
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patch:
        before_step(patch.setattr, at, lambda: send(number))
        with pytest.raises(error) as stop:
            train("fine-tune", out=tmp_path / "run")
    assert {each: signal.getsignal(each) for each in before} == before
    if error is SystemExit:
        assert stop.value.code == 143
    # The interrupted step is finished, and not repeated.
    assert CHECKPOINT in visible(tmp_path / "run")
    done = []
    with monkeypatch.context() as patch:
        one_step = Loop._one_step
        patch.setattr(Loop, "_one_step", lambda self, *given: (done.append(self.step), one_step(self, *given)))
        run = train("fine-tune", out=tmp_path / "run", resume=True)
    assert done == list(range(at + 1, STEPS))
    assert_same(run, undisturbed("fine-tune"))
    assert {each: signal.getsignal(each) for each in before} == before


def test_signal_in_the_last_step_is_not_lost(tmp_path, monkeypatch):
    """Ctrl-C stops a command of many cells, whenever it comes."""
    (tmp_path / "own.toml").write_text(TOML)
    setting = settings.load(tmp_path / "own.toml").with_lengths([5, 6])
    before_step(monkeypatch.setattr, STEPS - 1, lambda: send(signal.SIGINT))
    done = []
    with pytest.raises(KeyboardInterrupt):
        table.train_cells(setting, ["plain"], tmp_path / "out", False, done.append, **SIZES)
    assert len(done) <= 1
    monkeypatch.undo()
    table.train_cells(setting, ["plain"], tmp_path / "out", True, done.append, **SIZES)
    for n in (5, 6):
        whole = fl.train(setting.mixture, "plain", n, out=tmp_path / f"whole-{n}", **SIZES)
        assert records(tmp_path / f"out/plain-n{n}") == records(whole.folder)
        assert result(tmp_path / f"out/plain-n{n}") == result(whole.folder)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_after_the_last_step(tmp_path, monkeypatch, undisturbed, number, error):
    """A signal while the result is computed: the result is written before the run ends."""
    made, whole = outcome.measure, undisturbed("plain")
    with monkeypatch.context() as patch:
        patch.setattr(outcome, "measure", lambda *given: (send(number), made(*given))[1])
        with pytest.raises(error):
            train("plain", out=tmp_path / "run")
    monkeypatch.setattr(Loop, "_one_step", lambda *_: pytest.fail("trained again"))
    assert_same(train("plain", out=tmp_path / "run", resume=True), whole)


def test_a_signal_of_one_process_alone_counts_at_the_end():
    """Other processes did not get the signal: no step came after it."""
    with interruptible(True, together=True) as caught:
        send(signal.SIGTERM)
        caught.raise_if_caught()
    with pytest.raises(SystemExit):
        caught.raise_at_the_end()


def test_second_interrupt_ends_at_once(tmp_path, monkeypatch, undisturbed):
    """The second signal stops the step: no new checkpoint, and the previous one stays."""
    before_step(monkeypatch.setattr, 9, lambda: (send(signal.SIGINT), send(signal.SIGINT)), EVERY)
    with pytest.raises(KeyboardInterrupt):
        train("plain", out=tmp_path / "run", checkpoint_seconds=0)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(train("plain", out=tmp_path / "run", resume=True), undisturbed("plain"))


def test_without_a_folder_signals_are_as_they_were(monkeypatch):
    seen = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before_step(monkeypatch.setattr, 2, lambda: seen.append([signal.getsignal(signal.SIGINT), signal.getsignal(15)]))
    train("plain", steps=4)
    assert seen == [handlers]


def test_handlers_return_after_an_error(tmp_path, monkeypatch):
    def fail():
        assert signal.getsignal(signal.SIGTERM) is not before
        raise RuntimeError("no")

    before = signal.getsignal(signal.SIGTERM)
    before_step(monkeypatch.setattr, 2, fail)
    with pytest.raises(RuntimeError, match="no"):
        train("plain", out=tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_train_too(tmp_path, undisturbed):
    """Only the main thread can have handlers."""
    found = []
    thread = threading.Thread(target=lambda: found.append(train("plain", out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert_same(found[0], undisturbed("plain"))


def test_signals_that_are_ignored_stay_so():
    """As those of a command that a shell has put in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible(True) as caught:
            os.kill(os.getpid(), signal.SIGINT)
            assert caught.caught is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_interruptible():
    before = signal.getsignal(signal.SIGTERM)
    with interruptible(True) as caught:
        caught.raise_if_caught()
        send(signal.SIGTERM)
        assert caught.caught == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            caught.raise_if_caught()
    assert signal.getsignal(signal.SIGTERM) is before
    with interruptible(False) as caught:
        assert signal.getsignal(signal.SIGTERM) is before
        caught.raise_if_caught()
