import csv
import json
import subprocess
import sys

import pytest
import torch

import fastlin as fl
from fastlin import _extension, cli
from fastlin.bench import command as bench
from fastlin.figures import reproduce


def test_info_says_what_is_there(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for line in (
        f"fastlin         {fl.__version__}",
        f"torch           {torch.__version__}",
        "backends",
        "auto on cpu",
    ):
        assert line in shown
    assert "eager         yes" in shown
    assert "reference     yes, when named" in shown


def test_info_says_what_is_missing_and_why(capsys, monkeypatch):
    monkeypatch.setattr(_extension, "_load", lambda name: (None, f"{name} is not built"))
    assert cli.main(["info"]) == 0
    assert "extension       no: fastlin._C is not built" in capsys.readouterr().out
    found = fl.info()
    assert found["extension"] == {"available": False, "reason": "fastlin._C is not built"}
    assert found["instruction_set"] is None


def test_unavailable_backend_is_shown_with_its_reason():
    assert cli._availability({"available": False, "reason": "no driver", "auto": True}) == "no: no driver"


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == fl.info()


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train", "2c"], ["info", "--fast"], ["theory"]])
def test_wrong_commands(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: fastlin" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"fastlin {fl.__version__}\n"


def test_unwritable_folder(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert cli.main(["train", "2c", "--regime", "plain", "--out", str(blocker / "run")]) == 1
    assert capsys.readouterr().err.startswith("fastlin: ")


def test_theory_prints_tables(capsys):
    assert cli.main(["theory", "2c"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Figure 2(c): ")
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["10", "10.6633", "9.9303", "7.5743", "7.5743", "5.2381", "5.2381", "5.2381"] in rows
    assert ["10", "0.368973", "0.343610", "0.262086", "0.262086", "0.181249", "0.181249", "0.181249"] in rows
    assert shown.err == ""


def test_theory_at_other_lengths_as_json_and_csv(capsys):
    assert cli.main(["theory", "A2b", "--n", "4,2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["n"], record["line"]["n"]) == ([2, 4], [2, 3, 4])
    assert cli.main(["theory", "A2b", "--n", "4,2", "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [int(row["n"]) for row in rows] == [2, 4]
    assert [float(row["joint"]) for row in rows] == record["losses"]["joint"]


def test_theory_writes_records_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(
        'name = "own"\ndimension = 2\nmeans = [1]\ncovariances = [1]\nweights = [1]\ncontext_lengths = [1, 3]\n'
    )
    assert cli.main(["theory", "own.toml", "--out", "out/own"]) == 0
    shown = capsys.readouterr()
    names = ["theory.json", "theory.csv", "theory.png", "theory.pdf", "theory.svg"]
    assert shown.err.splitlines() == [f"out/own/{name}" for name in names]
    assert sorted(path.name for path in (tmp_path / "out/own").iterdir()) == sorted(names)
    assert shown.out.startswith("own\n\npopulation risk\n")
    for name, option in (("theory.json", "--json"), ("theory.csv", "--csv")):
        assert cli.main(["theory", "own.toml", option]) == 0
        assert capsys.readouterr().out == (tmp_path / "out/own" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2z"], "2z: no such file; the settings that ship with fastlin are 2a, 2b, 2c, 2d, A1a, "),
        (["."], ".: is a directory, wants a TOML file"),
        (["wrong.toml"], "wrong.toml: nam: unknown field (did you mean name?), wants one of name, description, "),
        (["2a", "--out", "wrong.toml/out"], "wrong.toml: is a file, wants a folder"),
    ],
)
def test_theory_of_wrong_configs(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text('nam = "x"\n')
    assert cli.main(["theory", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"fastlin: {message}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,x", "invalid literal for int() with base 10: 'x'"),
        ("", "invalid literal for int() with base 10: ''"),
        ("1,-1", "N[1]: got -1, wants an integer from 0 to 1099511627775"),
        ("2,2", "N: has 2 more than once, wants a list of different integers from 0 to 1099511627775"),
    ],
)
def test_theory_at_wrong_lengths(capsys, text, reason):
    with pytest.raises(SystemExit) as stop:
        cli.main(["theory", "2a", f"--n={text}"])
    assert stop.value.code == 2
    assert f"argument -n/--n: {text!r} is not a list like 1,2,5: {reason}" in capsys.readouterr().err


def test_as_a_module_and_into_a_closed_pipe():
    shown = subprocess.run(
        f"{sys.executable} -m fastlin theory 2c --json | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == '{\n "name":'
    assert shown.stderr == ""


@pytest.mark.parametrize("flag", ["-n", "--n"])
def test_context_lengths_have_one_flag(flag, tmp_path, monkeypatch):
    """theory, train and reproduce take a list of them; bench has the same flag for the shapes of its ops."""
    found = {}
    monkeypatch.setattr(cli, "_theory", lambda options: found.update(theory=options.n))
    monkeypatch.setattr(cli, "_train", lambda options: found.update(train=options.n))
    monkeypatch.setattr(bench, "_run", lambda options: found.update(bench=options.n))
    monkeypatch.setattr(reproduce, "reproduce", lambda *given, **_: found.update(reproduce=given[2].lengths) or [])
    for command in (["theory", "2c"], ["train", "2c", "--regime", "joint"], ["bench"], ["reproduce", "2c"]):
        assert cli.main([*command, flag, "5,10", *(["--out", str(tmp_path)] if command[0] == "reproduce" else [])]) == 0
    assert found == dict.fromkeys(("theory", "train", "bench", "reproduce"), (5, 10))
