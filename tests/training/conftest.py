import functools
import json

import pytest
from support.training_runs import EVALUATION_BATCH, Forker, train

from fastlin import plots
from fastlin.training import judge


@pytest.fixture(scope="module")
def small_evaluations():
    """Sample the risks of stacks on few sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "_EVALUATION_BATCH", EVALUATION_BATCH)
        yield


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    made = Forker(tmp_path_factory.mktemp("forker") / "stderr")
    yield made
    made.process.stdin.close()
    made.process.stdout.close()
    assert made.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An uninterrupted run by its arguments, trained once per session."""

    @functools.cache
    def run(given):
        regime, options = json.loads(given)
        return train(regime, out=tmp_path_factory.mktemp("undisturbed") / "run", **options)

    return lambda regime, **options: run(json.dumps([regime, options]))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "experiment", lambda folder: [])
