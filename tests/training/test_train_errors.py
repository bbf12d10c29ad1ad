"""Errors of fastlin.train name the wrong argument, before any work; folders in use are refused."""

import re

import pytest
import torch
from support.folders import visible
from support.training_runs import assert_same, mixture, train

import fastlin as fl
from fastlin.backends import BackendError
from fastlin.training.regimes import Phase, Regime, Term

MIX = mixture()
WIDE = fl.TaskMixture([[1.0] * 4, [0.0] * 4], torch.eye(4).expand(2, 4, 4), [0.5, 0.5])
ON_TARGET = Regime("own", (Phase(("attention",), False, (Term(source="target"),)),))
WRONG = [
    ({"mix": None}, TypeError, "mix: got None, wants a task source such as fastlin.SphereTasks(10)"),
    ({"mix": 3}, TypeError, "mix: got a int, wants a task source such as fastlin.SphereTasks(10)"),
    ({"mix": fl.TaskMixture}, TypeError, "mix: got the class TaskMixture, wants a task source"),
    ({"regime": "Joint"}, ValueError, "regime: got 'Joint' (did you mean joint?), wants one of "),
    ({"regime": None}, TypeError, "regime: got None, wants one of "),
    ({"n": -1}, ValueError, "n: got -1, wants an integer in [0, "),
    ({"n": 1.5}, TypeError, "n: got 1.5 (float), wants an integer"),
    ({"n": "4"}, TypeError, "n: got '4' (str), wants an integer"),
    (
        {"model": "fulll"},
        ValueError,
        "model: got 'fulll' (did you mean full?), wants one of reduced, full, separate, stack, softmax",
    ),
    ({"model": None}, ValueError, "model: got None, wants one of reduced, full, separate, stack, softmax"),
    ({"layers": 0, "model": "stack"}, ValueError, "layers: got 0, wants an integer >= 1"),
    ({"layers": 2}, ValueError, "layers: got 2 for model 'full', wants 1, or model='stack'"),
    ({"layers": 2, "model": "softmax"}, ValueError, "layers: got 2 for model 'softmax', wants 1, or model='stack'"),
    ({"layers": 1.0}, TypeError, "layers: got 1.0 (float), wants an integer"),
    ({"attention_heads": 0}, ValueError, "attention_heads: got 0, wants an integer >= 1"),
    ({"attention_heads": "2"}, TypeError, "attention_heads: got '2' (str), wants an integer"),
    ({"prompt_tokens": 0}, ValueError, "prompt_tokens: got 0, wants an integer >= 1"),
    ({"prompt_tokens": -1}, ValueError, "prompt_tokens: got -1, wants an integer "),
    ({"trials": 0}, ValueError, "trials: got 0, wants an integer >= 1"),
    ({"trials": 2.5}, TypeError, "trials: got 2.5 (float), wants an integer"),
    (
        {"trials": 70_000, "own_data": True},
        ValueError,
        "trials: got 70000 with their own data in 1 terms, wants at most",
    ),
    ({"records": 0}, ValueError, "records: got 0, wants an integer >= 1"),
    ({"seed": -1}, ValueError, "seed: got -1, wants an integer in [0, 18446744073709551616)"),
    ({"seed": 0.0}, TypeError, "seed: got 0.0 (float), wants an integer"),
    ({"target": MIX}, ValueError, "target: got a TaskMixture, wants None: regime 'joint' does not train on it"),
    ({"regime": ON_TARGET}, ValueError, "target: got None, wants a task source: regime 'own' trains on it"),
    ({"regime": ON_TARGET, "target": 3}, TypeError, "target: got a int, wants a task source"),
    (
        {"regime": ON_TARGET, "target": WIDE},
        ValueError,
        "target: has token width 5 and 2 tasks, wants 4 and 2, those of mix",
    ),
    ({"dtype": torch.float16}, ValueError, "dtype: got torch.float16, wants torch.float32 or torch.float64"),
    ({"dtype": "half"}, ValueError, "dtype: got half, wants torch.float32 or torch.float64"),
    ({"device": "gpu"}, ValueError, "device: got 'gpu', wants one that torch can use here: Expected one of"),
    ({"device": "cuda:99"}, ValueError, "device: got 'cuda:99', wants one that torch can use here: "),
    ({"device": 1.5}, ValueError, "device: got '1.5', wants one that torch can use here: "),
    ({"backend": "fast"}, ValueError, "backend"),
    (
        {"backend": "cpu", "model": "softmax"},
        BackendError,
        "backend: got 'cpu', which does not have softmax; wants 'auto' or 'eager'",
    ),
    (
        {"backend": "reference", "model": "softmax"},
        BackendError,
        "backend: got 'reference', which does not have softmax",
    ),
    ({"backend": "cuda", "model": "softmax"}, BackendError, "backend: got 'cuda', which does not have softmax"),
    ({"backend": None}, (ValueError, TypeError), "backend"),
    ({"checkpoint_seconds": "soon"}, (ValueError, TypeError), "checkpoint_seconds: got 'soon'"),
    ({"checkpoint_seconds": float("nan")}, ValueError, "checkpoint_seconds: got nan"),
    ({"out": 5}, TypeError, "out: got 5"),
    (
        {"out": None, "resume": True},
        ValueError,
        "resume: got True without out, wants the folder of the run to resume",
    ),
    ({"steps": 0}, ValueError, "steps: got 0"),
    ({"batch": 0}, ValueError, "batch: got 0"),
    ({"lr": -1.0}, ValueError, "lr: got -1.0"),
    ({"learning_rate": 1.0}, TypeError, "train: got an unknown argument 'learning_rate'"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), WRONG, ids=[f"{i}-{'-'.join(change)}" for i, (change, *_) in enumerate(WRONG)]
)
def test_wrong_calls(change, error, message, tmp_path):
    """Each names the argument, before any work: no folder is made."""
    given = {"mix": MIX, "regime": "joint", "n": 4, "steps": 2, "batch": 16, "out": tmp_path / "run", **change}
    with pytest.raises(error, match="^(sampled_loss: )?" + re.escape(message)):
        fl.train(**given)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: holds notes.txt and no run.json; wants a new folder")):
        train("joint", out=tmp_path)
    assert visible(tmp_path) == ["notes.txt"]
    run = train("joint", out=tmp_path / "run")
    assert run.folder == tmp_path / "run"
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'run'}: holds a run already; wants another folder")):
        train("joint", out=tmp_path / "run")
    assert_same(train("joint", out=tmp_path / "run", resume=True), run)
    with pytest.raises(ValueError, match=re.escape("holds a run with seed = 0, this one has 1; wants the same")):
        train("joint", out=tmp_path / "run", resume=True, seed=1)
