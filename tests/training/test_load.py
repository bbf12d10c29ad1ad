"""`fl.load`: the run of a folder as `fl.train` returned it, runs of version 0.1, and folders that it refuses."""

import shutil
from pathlib import Path

import pytest
import torch
from support.training_runs import assert_same, interrupt, mixture, train

import fastlin as fl
from fastlin._files import FileError, read_json, write_json
from fastlin.settings import load as load_setting

OLD = Path(__file__).parents[1] / "data" / "runs-0.1"
AS_OLD = {"steps": 12, "batch": 64, "trials": 2, "records": 4, "dtype": "float64", "seed": 5}


@pytest.mark.parametrize("regime", ["plain", "fine-tune", "joint+heads"])
@pytest.mark.parametrize("options", [{}, {"model": "separate"}, {"shards": 2, "preset": "paper"}], ids=str)
def test_a_run_comes_back(tmp_path, regime, options):
    run = train(regime, out=tmp_path / "run", **options)
    again = fl.load(tmp_path / "run")
    assert_same(run, again)
    assert again.folder == run.folder
    assert again.seconds == run.seconds
    assert torch.equal(again.excess, run.excess)
    loss, _ = fl.sampled_loss(mixture(), 5, 64, **again.params, **again.options, seed=0, step=0)
    assert loss.shape == (3,)


def test_a_run_of_the_second_paper_comes_back(tmp_path):
    source, task = fl.SphereTasks(3, bias=True), fl.FixedTask([1.0, 0.0, 0.0], bias=True)
    options = {"target": task, "steps": 6, "batch": 32, "trials": 2, "progress": False}
    run = fl.train(source, ["zs:v", "zs:all"], 4, out=tmp_path / "run", **options)
    again = fl.load(str(tmp_path / "run"))
    assert_same(run, again)
    assert again.trials_of("zs:all") == run.trials_of("zs:all")
    first = fl.evaluate(run, task, shots=[0, 3])
    assert torch.equal(fl.evaluate(again, task, shots=[0, 3]).error, first.error)


def test_a_source_of_ones_own(tmp_path):
    class Own(fl.SphereTasks):
        pass

    run = fl.train(Own(3), "plain", 4, steps=4, batch=32, out=tmp_path / "run", progress=False)
    again = fl.load(tmp_path / "run")
    assert torch.equal(again.risk, run.risk)
    assert again.theory is None


def test_a_cell_of_the_command(tmp_path):
    from fastlin.training import table

    setting = load_setting("2c").with_lengths([3])
    table.train_cells(setting, ["joint"], tmp_path, False, lambda row: None, steps=4, batch=32, progress=False)
    assert fl.load(tmp_path / "joint-n3").config["n"] == 3


def test_runs_of_version_0_1(tmp_path):
    """An ended run is read; the last digits may differ between machines. A stopped one has other draws."""
    now = fl.train(mixture(), "joint", 5, **AS_OLD)
    old = fl.load(OLD / "ended")
    assert "draws" not in old.config
    assert old.config == {name: value for name, value in now.config.items() if name != "draws"}
    assert torch.allclose(old.risk, now.risk, rtol=1e-9)
    assert float(old.theory) == pytest.approx(float(now.theory), rel=1e-12)
    for name, value in old.params.items():
        assert torch.allclose(value, now.params[name], rtol=1e-9, atol=1e-12), name
    for folder in ("stopped", "ended"):
        shutil.copytree(OLD / folder, tmp_path / folder)
        with pytest.raises(FileError, match=f"^{tmp_path / folder}: holds a run on version 1 of the draws, this"):
            fl.train(mixture(), "joint", 5, **AS_OLD, out=tmp_path / folder, resume=True)


@pytest.mark.parametrize("other", [1, 3])
def test_a_run_on_other_draws_is_read_and_not_resumed(tmp_path, other):
    run = train("plain", out=tmp_path / "run")
    described = read_json(tmp_path / "run/run.json", dict)
    assert described["config"]["draws"] == run.config["draws"] == 2
    described["config"]["draws"] = other
    write_json(tmp_path / "run/run.json", described)
    assert torch.equal(fl.load(tmp_path / "run").risk, run.risk)
    with pytest.raises(FileError, match=rf"on version {other} of the draws, this fastlin draws version 2; wants a new"):
        train("plain", out=tmp_path / "run", resume=True)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(TypeError, match="folder: got a int, wants the path of a run's folder"):
        fl.load(3)
    with pytest.raises(FileError, match=r"nowhere: holds no run, wants the folder of one that has ended"):
        fl.load(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("mine")
    with pytest.raises(FileError, match=r"other: holds thesis.txt and no run.json"):
        fl.load(tmp_path / "other")
    interrupt(tmp_path / "stopped", 5)
    with pytest.raises(FileError, match=r"stopped: holds a run that has not ended; `train` with resume=True"):
        fl.load(tmp_path / "stopped")


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("run.json", {"version": 2}, "run.json: is a 'fastlin run' of version 2, wants a 'fastlin run' of 1"),
        ("run.json", {"config": []}, "run.json: .*config: got array, wants object"),
        ("run.json", {"config": {}}, "run.json: its config is not that of a run: KeyError"),
        ("result.json", {"risk": "low"}, "result.json: .*risk: got str, wants array"),
        ("result.json", {"risk": [1.0]}, "its numbers of trials disagree"),
        ("result.json", {"best": 9}, "its numbers of trials disagree"),
        ("result.json", {"diverged": [["a", 1]]}, r"result.json: .*diverged\[0\]\[0\]: got str, wants int"),
        ("result.json", {"seconds": None}, "result.json: .*seconds: got null, wants float"),
    ],
)
def test_files_that_do_not_fit_their_schema(tmp_path, file, changes, message):
    """The error names file and field, what it got and what it wants."""
    folder = shutil.copytree(OLD / "ended", tmp_path / "run")
    write_json(folder / file, {**read_json(folder / file, dict), **changes})
    with pytest.raises(FileError, match=message) as error:
        fl.load(folder)
    assert str(folder) in str(error.value)
