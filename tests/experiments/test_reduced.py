import csv
import json

import pytest
import torch
from helpers import assert_close

import fastlin as fl
from fastlin import cli, plots, theory
from fastlin.experiments import reduced

SHORT = reduced.Setting(d=3, n=4, steps=60, batch=256, peak_lr=0.1)


def test_training_goes_to_the_optimum(tmp_path):
    result = reduced.train(SHORT, tmp_path)
    mix = SHORT.mixture()
    rows = list(csv.DictReader((tmp_path / "loss.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 61))
    for regime, optimum in (("plain", theory.plain(mix, 4)), ("joint", theory.joint(mix, 4))):
        first, last = float(rows[0][regime]), float(rows[-1][regime])
        assert optimum.loss < last < first
        assert last / optimum.loss - 1 < 0.1 * (first / optimum.loss - 1)
        assert result[regime]["risk"] == last
        assert result[regime]["theory"] == optimum.loss
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["setting"]["n"] == 4
    assert record["info"]["versions"]["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.csv", "record.json"]


def test_the_same_seed_gives_the_same_run(tmp_path):
    for name in "ab":
        reduced.train(SHORT, tmp_path / name)
    assert (tmp_path / "a/loss.csv").read_bytes() == (tmp_path / "b/loss.csv").read_bytes()


def test_full_form_is_the_reduced_model():
    """Against the exact losses of both regimes, by a sample of 200,000 sequences: five standard errors."""
    mix, n = SHORT.mixture(), 4
    joint = theory.joint(mix, n)
    W = torch.stack([theory.plain(mix, n).W, joint.W]).float()
    z, q, y, task = mix.sample(200_000, n, seed=1)
    p, full_W, v = reduced.full_form(W, joint.prompts.float())
    yhat = fl.predict(z, q, task, p, full_W, v).double()
    squares = (yhat - y).square()
    error = squares.std(-1) / 200_000**0.5
    expected = torch.tensor([theory.plain(mix, n).loss, joint.loss], dtype=torch.float64)
    assert ((squares.mean(-1) - expected).abs() < 5 * error).all()
    direct = torch.einsum(
        "bi,ij,bj->b", q[:, :3], W[1], torch.einsum("bni,bn->bi", z[..., :3], z[..., 3]) + joint.prompts.float()[task]
    )
    assert_close(yhat[1].float(), direct, 1e-5)


def test_picture_and_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reduced, "Setting", lambda: SHORT)
    assert cli.main(["reproduce", "reduced", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split() == ["regime", "risk", "theory", "excess"]
    assert shown.out.splitlines()[-1] == str(tmp_path / "loss.png")
    assert "step 60/60" in shown.err
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert plots.reduced(tmp_path) == tmp_path / "loss.png"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    from fastlin._files import replacing

    target = tmp_path / "file.txt"
    target.write_text("old")

    def write():
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
