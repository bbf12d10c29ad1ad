"""Mistakes that people make in Python: each gets one message of fastlin's own, and changes nothing."""

import math
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import fastlin as fl
from fastlin import plots
from fastlin.figures.own import train_panel

mix = fl.TaskMixture([[1.0] * 5, [-1.0] * 5, [0.5] * 5], torch.eye(5).expand(3, 5, 5), [0.2, 0.3, 0.5])
z, q, y, task = mix.sample(16, 8)
p, W, v = torch.zeros(3, 1, 6), torch.eye(6), torch.ones(3, 6)
A = W.repeat(2, 1, 1)
DATA = {"z": z, "q": q, "y": y, "task": task}
LAYER = {**DATA, "p": p, "W": W, "v": v}
DRAWN = {"mix": mix, "n": 8, "batch": 16, "p": p, "W": W, "v": v, "seed": 0, "step": 0}
TRAIN = {"mix": mix, "regime": "joint", "n": 8, "steps": 2, "batch": 16, "progress": False}
MIXTURE = {"means": [[1.0, 0.0], [0.0, 1.0]], "covariances": torch.eye(2).expand(2, 2, 2), "weights": [0.5, 0.5]}
PANEL = {"task": mix, "regimes": "joint", "out": "nowhere", "lengths": [3], "steps": 2, "batch": 16}
with warnings.catch_warnings(action="ignore"):  # torch calls nested tensors a prototype
    RAGGED = torch.nested.nested_tensor([*z[:15], z[15, :3]])
ERRORS = (TypeError, ValueError, fl.BackendError)

# What somebody did; the function, its right arguments, the wrong ones; the message.
CALLS = [
    ("numpy arrays", fl.prompt_loss, LAYER, {"z": z.numpy()}, "z is a ndarray; wants a torch.Tensor"),
    ("a list of tasks", fl.prompt_loss, LAYER, {"task": [0] * 16}, "task is a list; wants a torch.Tensor"),
    (
        "features first",
        fl.prompt_loss,
        LAYER,
        {"z": z.mT},
        "q has shape (16, 6); wants (B, m) with B = 16 (from z), m = 8",
    ),
    ("tasks from one", fl.prompt_loss, LAYER, {"task": task + 1}, "task holds the index 3; wants 0 <= task < K = 3"),
    (
        "tasks as floats",
        fl.prompt_loss,
        LAYER,
        {"task": task.float()},
        "task has dtype torch.float32; wants an integer dtype",
    ),
    ("tasks one-hot", fl.prompt_loss, LAYER, {"task": torch.eye(3)[task].long()}, "task has shape (16, 3); wants (B,)"),
    ("no task", fl.prompt_loss, LAYER, {"task": None}, "task is None, which is one task, but p has K = 3"),
    (
        "mixed dtypes",
        fl.prompt_loss,
        LAYER,
        {"z": z.double()},
        "q has dtype torch.float32; wants torch.float64, as z has",
    ),
    ("integer targets", fl.prompt_loss, LAYER, {"y": y.long()}, "y has dtype torch.int64; wants torch.float32"),
    (
        "targets that train",
        fl.prompt_loss,
        LAYER,
        {"y": y.clone().requires_grad_()},
        "y requires grad; wants y.detach()",
    ),
    ("W and v swapped", fl.prompt_loss, LAYER, {"W": v, "v": W}, "W has shape (3, 6); wants (m, m) with m = 6"),
    (
        "trials in W alone",
        fl.prompt_loss,
        LAYER,
        {"W": A},
        "p has shape (3, 1, 6); wants (R, K, t, m) beside W (R, m, m)",
    ),
    ("another backend's name", fl.prompt_loss, LAYER, {"backend": "gpu"}, "backend is 'gpu'; wants one of 'auto'"),
    (
        "weights of two tasks",
        fl.prompt_loss,
        LAYER,
        {"weight": [0.5, 0.5]},
        "weight has shape (2,); wants (K,) with K = 3",
    ),
    ("scale as a word", fl.prompt_loss, LAYER, {"scale": "1/n"}, "scale is '1/n', a str; wants a real number"),
    ("scale not a number", fl.prompt_loss, LAYER, {"scale": math.nan}, "scale is nan; wants a finite number"),
    ("see_query as a word", fl.prompt_loss, LAYER, {"see_query": "yes"}, "see_query is 'yes'; wants True or False"),
    (
        "NaN in the data",
        fl.prompt_loss,
        LAYER,
        {"z": z * math.nan, "check_finite": True},
        "z holds 768 values that are not finite, of 768; wants finite",
    ),
    (
        "tokens as Gram",
        fl.gram_loss,
        {**LAYER, "G": fl.gram(z), "z": None},
        {"G": z},
        "G has shape (16, 8, 6); wants (B, m, m)",
    ),
    (
        "one layer as stack",
        fl.stack_loss,
        {**DATA, "p": p, "A": A, "C": A, "h": v},
        {"A": W},
        "A has shape (6, 6); wants (L, m, m)",
    ),
    (
        "layers that differ",
        fl.stack_loss,
        {**DATA, "p": p, "A": A, "C": A, "h": v},
        {"C": A[:1]},
        "C has shape (1, 6, 6); wants (L, m, m)",
    ),
    ("prompts without tasks", fl.gram, {"z": z}, {"p": p}, "task is None, which is one task, but p has K = 3"),
    (
        "a class as source",
        fl.sampled_loss,
        DRAWN,
        {"mix": fl.SphereTasks},
        "mix is the class SphereTasks; wants a task source such as",
    ),
    ("a name as source", fl.sampled_loss, DRAWN, {"mix": "2c"}, "mix is a str; wants a task source such as"),
    ("half a token", fl.sampled_loss, DRAWN, {"n": 8.5}, "n: got 8.5 (float), wants an integer"),
    ("a negative batch", fl.sampled_loss, DRAWN, {"batch": -1}, "batch: got -1, wants an integer in"),
    (
        "no label slot",
        fl.sampled_loss,
        DRAWN,
        {"p": None, "W": torch.eye(5), "v": torch.ones(5)},
        "W has shape (5, 5); wants (m, m) with m = 6 (from mix)",
    ),
    (
        "fewer prompts than tasks",
        fl.sampled_loss,
        DRAWN,
        {"p": p[:2], "v": v[:2]},
        "p has shape (2, 1, 6); wants (K, t, m)",
    ),
    ("a negative seed", mix.sample, {"batch": 4, "n": 3}, {"seed": -1}, "seed: got -1, wants an integer in"),
    (
        "integers drawn",
        mix.sample,
        {"batch": 4, "n": 3},
        {"dtype": torch.int32},
        "dtype: got torch.int32, wants a floating-point dtype",
    ),
    (
        "numbers of numpy",
        mix.sample_gram,
        {"batch": 4, "n": 3},
        {"dtype": float},
        "dtype: got <class 'float'>, wants a floating-point dtype",
    ),
    (
        "no such device",
        mix.sample,
        {"batch": 4, "n": 3},
        {"device": "gpu"},
        "device: got 'gpu', wants one that torch can use here",
    ),
    (
        "weights beyond one",
        fl.TaskMixture,
        MIXTURE,
        {"weights": [0.5, 0.6]},
        "weights: got [0.5, 0.6] of sum 1.1, wants numbers >= 0 of sum 1",
    ),
    ("a negative weight", fl.TaskMixture, MIXTURE, {"weights": [1.5, -0.5]}, "weights: got [1.5, -0.5] of sum 1.0"),
    (
        "not a covariance",
        fl.TaskMixture,
        MIXTURE,
        {"covariances": -torch.eye(2).expand(2, 2, 2)},
        "covariances[0]: has the eigenvalue -1",
    ),
    ("a flat list of means", fl.TaskMixture, MIXTURE, {"means": [1.0, 2.0]}, "means: got "),
    (
        "negative noise",
        fl.SphereTasks,
        {"d": 4},
        {"noise_std": -1.0},
        "noise_std: got -1.0, wants a finite number >= 0",
    ),
    ("half a feature", fl.SphereTasks, {"d": 4}, {"d": 4.5}, "d: got 4.5 (float), wants an integer"),
    (
        "theory of several n",
        fl.theory.joint,
        {"mix": mix, "n": 8},
        {"n": [1, 2]},
        "n: wants a non-negative integer, got [1, 2]",
    ),
    (
        "theory of a sphere",
        fl.theory.joint,
        {"mix": mix, "n": 8},
        {"mix": fl.SphereTasks(3)},
        "mix: wants a task mixture, got SphereTasks",
    ),
    (
        "a regime misspelt",
        fl.train,
        TRAIN,
        {"regime": "joint_heads"},
        "regime: got 'joint_heads' (did you mean joint+heads?)",
    ),
    ("mix and regime swapped", fl.train, TRAIN, {"mix": "joint", "regime": mix}, "regime: got "),
    (
        "no target",
        fl.train,
        TRAIN,
        {"regime": "zs:all"},
        "target: got None, wants a task source: regime 'zs:all' trains on it",
    ),
    ("a target unused", fl.train, TRAIN, {"target": fl.FixedTask([1.0] * 5)}, "target: got a FixedTask, wants None"),
    ("progress as a word", fl.train, TRAIN, {"progress": "yes"}, "progress: got 'yes', wants True or False"),
    ("a preset misspelt", fl.train, TRAIN, {"preset": "papers"}, "preset: got 'papers' (did you mean paper?)"),
    ("a model of another kind", fl.train, TRAIN, {"model": "transformer"}, "model: got 'transformer', wants one of "),
    ("layers of no stack", fl.train, TRAIN, {"layers": 3}, "layers: got 3 for model 'full', wants 1, or model='stack'"),
    ("no steps", fl.train, TRAIN, {"steps": 0}, "steps: got 0, wants an integer >= 1"),
    ("a negative rate", fl.train, TRAIN, {"lr": -1.0}, "lr: got -1.0, wants a finite number >= 0"),
    (
        "another library's name",
        fl.train,
        TRAIN,
        {"batch_size": 16},
        "train: got an unknown argument 'batch_size' (did you mean batch?)",
    ),
    (
        "half precision",
        fl.train,
        TRAIN,
        {"dtype": "float16"},
        "dtype: got float16, wants torch.float32 or torch.float64",
    ),
    (
        "resume nothing",
        fl.train,
        TRAIN,
        {"resume": True},
        "resume: got True without out, wants the folder of the run to resume",
    ),
    (
        "a class to train on",
        fl.train,
        TRAIN,
        {"mix": fl.SphereTasks},
        "mix: got the class SphereTasks, wants a task source such as",
    ),
    (
        "no folder",
        fl.load,
        {"folder": "."},
        {"folder": "nowhere"},
        "nowhere: holds no run, wants the folder of one that has ended",
    ),
    (
        "sparse tokens",
        fl.prompt_loss,
        LAYER,
        {"z": z.to_sparse()},
        "z has layout torch.sparse_coo; wants torch.strided",
    ),
    (
        "ragged sequences",
        fl.prompt_loss,
        LAYER,
        {"z": RAGGED},
        "z is a nested tensor; wants a torch.Tensor whose sequences have one length",
    ),
    (
        "a matrix as text",
        fl.theory.population_loss,
        {"mix": mix, "n": 8, "W": W[:5, :5]},
        {"W": "W"},
        "W: wants an arr",
    ),
    ("targets as a column", fl.prompt_loss, LAYER, {"y": y[:, None]}, "y has shape (16, 1); wants (B,) with B = 16"),
    ("data on two devices", fl.prompt_loss, LAYER, {"q": q.to("meta")}, "q is on device meta; wants cpu, as z is"),
    ("complex tokens", fl.prompt_loss, LAYER, {"z": z.cfloat()}, "z has dtype torch.complex64; wants torch.float32"),
    ("no matrix", fl.prompt_loss, LAYER, {"W": None}, "W is a NoneType; wants a torch.Tensor"),
    ("a module as matrix", fl.prompt_loss, LAYER, {"W": torch.nn.Linear(6, 6)}, "W is a Linear; wants a torch.Tensor"),
    ("tasks below zero", fl.prompt_loss, LAYER, {"task": task - 1}, "task holds the index -1; wants 0 <= task < K = 3"),
    (
        "a GPU's backend",
        fl.prompt_loss,
        LAYER,
        {"backend": "cuda"},
        "backend 'cuda' cannot serve this call: the data are on cpu",
    ),
    (
        "a stack of no layers",
        fl.stack_loss,
        {**DATA, "p": p, "A": A, "C": A, "h": v},
        {"A": A[:0], "C": A[:0]},
        "A has shape (0, 6, 6), so L = 0; wants L >= 1",
    ),
    ("a matrix too small for the oracle", fl.reference.prompt_loss, LAYER, {"W": W[:3]}, "W has shape (3, 6); wants"),
    (
        "sizes as truth values",
        mix.sample,
        {"batch": 4, "n": 3},
        {"batch": True},
        "batch: got True (bool), wants an int",
    ),
    ("ragged means", fl.TaskMixture, MIXTURE, {"means": [[1.0, 2.0], [1.0]]}, "means[1]: got shape (1,), wants (2,)"),
    (
        "complex means",
        fl.TaskMixture,
        MIXTURE,
        {"means": 1j * torch.ones(2, 2)},
        "means: got torch.complex64, wants re",
    ),
    (
        "sparse means",
        fl.TaskMixture,
        MIXTURE,
        {"means": torch.ones(2, 2).to_sparse()},
        "means: got layout torch.sparse",
    ),
    (
        "noise as text",
        fl.TaskMixture,
        MIXTURE,
        {"noise_std": "0.1"},
        "noise_std: got '0.1', wants a finite number >= 0",
    ),
    ("several n", fl.train, TRAIN, {"n": [1, 2]}, "n: got [1, 2] (list), wants an integer"),
    ("a rate as text", fl.train, TRAIN, {"lr": "1e-3"}, "lr: got '1e-3', wants a finite number >= 0"),
    (
        "a number as callback",
        fl.train,
        TRAIN,
        {"callback": 3},
        "callback: got 3, wants a function of a record, or None",
    ),
    ("a file as folder", fl.train, TRAIN, {"out": __file__}, f"{__file__}: is a file, wants a folder"),
    (
        "a number as folder",
        fl.load,
        {"folder": "."},
        {"folder": 3},
        "folder: got a int, wants the path of a run's folder",
    ),
    (
        "pictures of nothing",
        plots.experiment,
        {"folder": "."},
        {"folder": "nowhere"},
        "nowhere: holds no run, wants a f",
    ),
    (
        "a style misspelt",
        plots.experiment,
        {"folder": "."},
        {"style": "papr"},
        "style: got 'papr' (did you mean paper?)",
    ),
    ("a panel of no regimes", train_panel, PANEL, {"regimes": []}, "regimes: got none, wants one or more"),
    (
        "a panel of no lengths",
        train_panel,
        PANEL,
        {"lengths": None},
        "lengths: got None beside a TaskMixture, wants the",
    ),
    ("another logger", train_panel, PANEL, {"watch": "mlflow"}, "watch: got 'mlflow', wants one of tensorboard, wandb"),
    (
        "a sweep below zero",
        train_panel,
        PANEL,
        {"sweep": ("noise_std", [0, -1])},
        "noise_std: got -1.0, wants a finite number >= 0",
    ),
]


@pytest.mark.parametrize(
    ("function", "right", "wrong", "message"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_calls(function, right, wrong, message):
    with pytest.raises(ERRORS) as caught:
        function(**{name: value for name, value in {**right, **wrong}.items() if name != "z" or value is not None})
    assert re.match(rf"(\w+: )?{re.escape(message)}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)
    raised_in = Path(traceback.extract_tb(caught.tb)[-1].filename)
    assert raised_in.is_relative_to(Path(fl.__file__).parent), f"raised by {raised_in}"
