"""Any number of processes that train together have the data, losses and gradients of one."""

import dataclasses
import socket

import pytest
import torch
from support import team_runs
from support.training_configs import MIX, config_of
from support.training_runs import TOML, records, same

import fastlin as fl
from fastlin import cli
from fastlin.training.loop import Loop
from fastlin.training.objective import Objective
from fastlin.training.opening import State
from fastlin.training.team import ALONE, Team, team_of
from fastlin.training.update import LeanUpdate

TARGET = fl.FixedTask([0.2, 0.4, 0.6], bias=True)
SPHERE = {"mix": fl.SphereTasks(3, bias=True), "target": TARGET, "preset": "authors"}
POINTS = {**SPHERE, "target": fl.PointSet(torch.randn(9, 3), torch.randn(9), bias=True)}
PLANS = {
    "tasks at random": {},
    "weights": {"batch_per_task": True},
    "weights of three tasks": {
        "mix": fl.TaskMixture(torch.eye(3), torch.eye(3).expand(3, 3, 3), [0.2, 0.3, 0.5]),
        "batch_per_task": True,
        "batch": 5,
    },
    "tasks in turn": {"regime": "fine-tune", "prompts_in_turn": True},
    "own data": {"own_data": True, "trials": 3},
    "stack": {"model": "stack", "layers": 2, "heads": 2},
    "softmax": {"model": "softmax"},
    "two terms": {"regime": "zs+fs:all", **SPHERE},
    "points": {"regime": "zs+fs:v", **POINTS},
    "side by side": {"regime": ["zs:v", "zs+fs:all"], **SPHERE, "own_data": True},
    "separate": {"regime": "one-prompt", "model": "separate"},
}


class Apart(Team):
    """A process without others; its sums are stored."""

    def add(self, values):
        kept.append(values.clone())


kept: list[torch.Tensor] = []


def begun(config, phase, team=ALONE, **fields):
    """A loop at the start of a phase, and the objective."""
    loop = Loop(dataclasses.replace(config, **fields), team)
    loop._begin(phase)
    return loop, Objective(loop.config, loop.model, loop._sources, team, phase)


def sums(config, phase, turn, **given):
    """Losses and gradients of a step, flat, as the processes add them up."""
    loop, objective = begun(config, phase, **given)
    if isinstance(loop._update, LeanUpdate):
        loss, grads = objective.by_hand(3, 0.25, turn, None)
    else:
        loss = objective.backward(3, 0.25, turn, loop._update.trained, None)
        grads = [raw.grad for raw in loop._update.trained]
    return torch.cat([loss, *(grad.flatten() for grad in grads)]), objective


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", PLANS)
def test_pieces_add_up_to_the_batch(name, size):
    """Losses, gradients and sequences of any number of processes, also of more processes than sequences."""
    config = config_of(**{"batch": 11, **PLANS[name]})
    for phase in range(len(config.regime.phases)):
        whole, of_all = sums(config, phase, 0)
        kept.clear()
        parts = [sums(config, phase, 0, team=Apart(rank, size))[1] for rank in range(size)]
        added = torch.stack(kept).sum(0)[:-2]
        assert torch.allclose(added, whole, rtol=1e-11, atol=1e-12)
        assert whole[: config.shape.trials].all()
        for i, draw in enumerate(of_all._units[0]):
            place = {"seed": config.seed, "step": 3, "stream": 0}
            expected = draw.sources[0].sample(draw.batch, draw.shots, **place)
            pieces = [part._units[0][i] for part in parts]
            found = [draw.sources[0].sample(p.batch, p.shots, offset=p.offset, **place) for p in pieces]
            for have, want in zip(zip(*found, strict=True), expected, strict=True):
                assert same(torch.cat(have), want)


@pytest.mark.parametrize("shards", [1, 3, 16])
@pytest.mark.parametrize("name", ["weights", "own data", "two terms"])
def test_shards_have_the_same_bits_for_any_number_of_processes(name, shards):
    config = config_of(**{"batch": 11, "dtype": torch.float32, **PLANS[name]})
    alone, _ = sums(config, 0, 0, shards=shards)
    assert torch.allclose(alone, sums(config, 0, 0)[0], rtol=1e-4, atol=1e-6)
    width = len(alone)
    for size in (2, 3, 20):
        kept.clear()
        for rank in range(size):
            sums(config, 0, 0, shards=shards, team=Apart(rank, size))
        rows = torch.stack(kept).sum(0)[:-2].view(shards, width)
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert same(total.float(), alone)


def test_a_source_that_draws_tasks_in_its_own_way_is_refused_where_shares_are_not_known():
    class Own(fl.TaskMixture):
        def _task(self, place):
            return torch.ones(place.batch, dtype=torch.int64)

    mix = Own(MIX.means, MIX.covariances, MIX.weights)
    config = config_of(mix=mix, batch_per_task=True)
    sums(config, 0, 0)
    with pytest.raises(ValueError, match="Own: draws tasks in its own way; wants a TaskMixture"):
        sums(config, 0, 0, shards=2)


@pytest.fixture
def wire(monkeypatch):
    """What the first process has broadcast reaches the others."""
    sent = []

    def broadcast(held, source, device):
        assert (source, device) == (0, torch.device("cpu"))
        if sent:
            held[:] = sent.pop(0)
        else:
            sent.append(list(held))

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)


def test_what_the_first_process_broadcasts(wire):
    made = {"a": [1, None, "é"], "x": torch.arange(6.0)}
    assert Team(0, 3).broadcast(lambda: made) is made
    assert Team(2, 3).broadcast(lambda: pytest.fail("asked another")) is made
    assert Team(0, 1).broadcast(lambda: made) is made


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("out: is full"), "out: is full"), (KeyboardInterrupt(), "Key")]
)
def test_an_error_of_the_first_process_ends_all(wire, error, text):
    def fail():
        raise error

    with pytest.raises(type(error)):
        Team(0, 2).broadcast(fail)
    with pytest.raises(ConnectionError, match=f"process 0 of 2 has ended: {text}"):
        Team(1, 2).broadcast(fail)


def test_a_process_that_is_gone(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("Connection reset by peer\nand more")

    monkeypatch.setattr(torch.distributed, "all_reduce", lost)
    with pytest.raises(ConnectionError, match=r"process 1 of 2: another .* \(Connection reset by peer\)$"):
        Team(1, 2).add(torch.zeros(3))


def test_other_arguments_in_another_process(monkeypatch):
    monkeypatch.setattr("fastlin.training.run.team_of", lambda *_: Team(1, 2))
    monkeypatch.setattr(Team, "broadcast", lambda *_: State({**config_of().describe(), "n": 9}))
    with pytest.raises(ValueError, match=r"process 1 got .*, process 0 got .*; wants the same in all"):
        fl.train(MIX, "joint", 4, steps=2)


def test_a_command_of_one_process_under_torchrun(monkeypatch, tmp_path, no_pictures):
    """A process group of one trains as without a group, also after a restart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**place, "TORCHELASTIC_RESTART_COUNT": 1}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "setting.toml").write_text(TOML)
    command = ["train", str(tmp_path / "setting.toml"), "--regime", "plain", "--steps", "4", "--batch", "20"]
    for _ in range(2):
        assert cli.main([*command, "--out", str(tmp_path / "run")]) == 0
    assert not torch.distributed.is_initialized()
    other = fl.train(team_runs.mixture(), "plain", 5, steps=4, batch=20, out=tmp_path / "other")
    assert records(tmp_path / "run" / "plain-n5") == records(other.folder)


def test_parameters_that_differ_between_processes_are_seen(monkeypatch):
    loop, _ = begun(config_of(), 0, team=Team(1, 2))
    monkeypatch.setattr(Team, "broadcast", lambda self, make: make())
    loop._compare_parameters()
    monkeypatch.setattr(Team, "broadcast", lambda self, make: "other")
    with pytest.raises(RuntimeError, match="process 1 of 2 holds other parameters than process 0 at step 0"):
        loop._compare_parameters()


@pytest.mark.parametrize("first", [0, 1, 7, 100])
@pytest.mark.parametrize("batch", [0, 1, 5, 39])
def test_task_counts(first, batch):
    mix = MIX.reweighted([0.3, 0.7], stratify=True)
    task = mix.sample(batch, 0, offset=first)[3]
    assert mix.task_counts(first, batch).tolist() == torch.bincount(task, minlength=2).tolist()


def test_a_team_needs_a_process_group():
    assert team_of(torch.device("cpu")).size == 1
    with pytest.raises(ValueError, match="distributed: got True, wants a process group"):
        fl.train(MIX, "plain", 3, steps=1, distributed=True)
    with pytest.raises(TypeError, match="distributed: got 2, wants True, False or None"):
        fl.train(MIX, "plain", 3, steps=1, distributed=2)
    with pytest.raises(ValueError, match="shards: got 0, wants an integer >= 1"):
        fl.train(MIX, "plain", 3, steps=1, shards=0)
