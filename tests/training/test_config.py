"""`fl.train`, the command line and the run's folder all use the fields of `RunConfig`."""

import dataclasses
import inspect
import json
import re

import pytest
import torch
from support.training_configs import ALTERNATIVES, KINDS, MIX, config_of

import fastlin as fl
from fastlin import cli
from fastlin.figures import own
from fastlin.training.config import RunConfig
from fastlin.training.presets import PRESETS
from fastlin.training.regimes import REGIMES

FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}
# Keywords of `fl.train` that belong to the call, not to the run.
OF_THE_CALL = {"after", "out", "resume", "progress", "checkpoint_seconds", "callback"}
TASK = fl.FixedTask([1.0, 0.0, 2.0], noise_std=0.3, bias=True)
BIASED = fl.SphereTasks(3, noise_std=0.3, bias=True)


def test_keywords_of_train_are_fields():
    """Named keywords have the defaults of the fields, or None where the preset decides; the rest are **fields."""
    signature = inspect.signature(fl.train).parameters
    named = {name: p for name, p in signature.items() if p.kind is not p.VAR_KEYWORD and name not in OF_THE_CALL}
    assert set(named) <= set(FIELDS)
    for name, parameter in named.items():
        if parameter.default is not parameter.empty and name not in ALTERNATIVES:
            default = FIELDS[name].default
            assert parameter.default == default or parameter.default == str(default), name
        elif name in ALTERNATIVES:
            assert parameter.default is None, name
    run = fl.train(MIX, "joint", 3, steps=2, batch=8, clip=0.5, schedule="cosine", progress=False)
    assert (run.config["clip"], run.config["schedule"]) == (0.5, "cosine")


def test_flags_are_fields(monkeypatch, tmp_path):
    """Every flag reaches `train` under the name of its field; every other field does by --set."""
    given = {}
    monkeypatch.setattr(
        own, "train_panel", lambda *_, **options: given.update(options) or (_ for _ in ()).throw(OSError)
    )
    flags = {
        name: {int: 3, float: 0.5, str: "float64" if name == "dtype" else "cpu"}[field.metadata["flag"]]
        for name, field in FIELDS.items()
        if "flag" in field.metadata
    }
    command = ["train", "2c", "--regime", "joint", "--out", str(tmp_path)]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    others = set(FIELDS) - set(flags) - {"mix", "regime", "n", "target"}
    for name in others:
        command += ["--set", f"{name}=7"]
    assert cli.main(command) == 1
    call = {"sweep": None, "resume": False, "watch": None}
    assert given.pop("report")
    assert given == {**flags, **dict.fromkeys(others, 7), **call}
    given.clear()
    assert cli.main(["train", "2c", "--regime", "joint", "--out", str(tmp_path)]) == 1
    assert given.pop("report")
    assert given == {"device": "cpu", **call}, "what was not said is left to the fields' defaults"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if "flag" in field.metadata])
def test_a_field_with_a_flag_is_not_set(name, capsys, tmp_path):
    assert cli.main(["train", "2c", "--regime", "joint", "--out", str(tmp_path), "--set", f"{name}=1"]) == 1
    assert f"--set: got {name}, which has its own flag: --{name.replace('_', '-')}" in capsys.readouterr().err


def test_the_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "layers of a stack (default: 1)" in said
    assert "float32 or float64 (default: float32)" in said
    assert "optimiser steps, in place of the preset's --batch" in said


def test_every_field_is_documented():
    text = inspect.getdoc(RunConfig)
    documented = re.findall(r"^([a-z_]+(?:, [a-z_]+)*) : ", text.partition("Examples")[0], re.M)
    assert [name for names in documented for name in names.split(", ")] == sorted(
        FIELDS, key=[name for names in documented for name in names.split(", ")].index
    )


# Softmax averages tokens: the regimes that divide scores by their number refuse it.
PAIRS = [
    (name, model) for name, row in REGIMES.items() for model in KINDS if (row.study, model) != ("forgetting", "softmax")
]


@pytest.mark.parametrize(("regime", "model"), PAIRS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_description_is_restored(regime, model, preset):
    forgetting = REGIMES[regime].study == "forgetting"
    target = {"target": TASK} if ":" in regime else {}
    config = config_of(regime, model=model, preset=preset, mix=BIASED if forgetting else MIX, **target)
    described = config.describe()
    assert json.loads(json.dumps(described)) == described
    again = RunConfig.restore(described)
    assert again.describe() == described
    assert again.regime == config.regime
    assert (again.shape, again.shards) == (config.shape, config.shards)


def test_a_description_of_several_regimes_and_of_functions():
    def halved(progress):
        return 0.5

    config = config_of(["zs:v", "zs+fs:all"], mix=BIASED, target=TASK, preset="tuned", schedule=halved, shards=3)
    again = RunConfig.restore(config.describe())
    assert again.describe() == config.describe()
    assert again.regime == config.regime
    with pytest.raises(RuntimeError, match=r"halved.*the name of this function only"):
        again.schedule(0.5)


def test_a_source_that_is_not_written_out():
    class Own(fl.SphereTasks):
        pass

    assert RunConfig.restore(config_of("plain", mix=Own(3)).describe()) is None
    large = fl.TaskMixture(torch.zeros(1, 150), torch.eye(150)[None], [1.0])
    assert RunConfig.restore(config_of("plain", mix=large).describe()) is None
