import json

import pytest
import torch

import fastlin as fl
from fastlin import _extension, cli


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
    monkeypatch.setattr(_extension, "_load", lambda: (None, "fastlin._C is not built"))
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


@pytest.mark.parametrize("arguments", [[], ["fly"], ["reproduce", "9z"], ["info", "--fast"]])
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
    assert cli.main(["reproduce", "reduced", "--out", str(blocker / "run")]) == 1
    assert capsys.readouterr().err.startswith("fastlin: ")
