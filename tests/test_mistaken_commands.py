"""Mistakes that people make at the command line: each gets one message, and changes nothing."""

from pathlib import Path

import pytest

from fastlin import cli

GOOD = """\
name = "mine"
dimension = 2
means = [1.0, -1.0]
covariances = [1.0, 1.0]
weights = [0.5, 0.5]
context_lengths = [3, 6]
"""
JOINT = ("train", "CONFIG", "--regime", "joint", "--steps", "2", "--batch", "16")
# What somebody did; the command line, a change of the config's text; the exit status, what the message has.
COMMANDS = [
    ("a command misspelt", ("trian",), None, 2, "invalid choice: 'trian'"),
    ("no regime", ("train", "CONFIG"), None, 2, "the following arguments are required: --regime"),
    ("no such config", ("theory", "nothing.toml"), None, 1, "nothing.toml: no such file; the settings that ship"),
    ("a number as text", ("theory", "CONFIG"), ("= 2", '= "2"'), 1, "dimension: got '2', wants an integer from 1"),
    ("a field misspelt", ("theory", "CONFIG"), ("means", "mean"), 1, "mean: unknown field (did you mean means?)"),
    (
        "one weight short",
        ("theory", "CONFIG"),
        ("[0.5, 0.5]", "[1.0]"),
        1,
        "weights: got a list of 1, wants a list of 2",
    ),
    ("not TOML", ("theory", "CONFIG"), ("= 2", "="), 1, "not valid TOML"),
    ("a length twice", (*JOINT, "-n", "5,5"), None, 2, "N: has 5 more than once"),
    (
        "a regime misspelt",
        ("train", "CONFIG", "--regime", "jiont"),
        None,
        1,
        "regime: got 'jiont' (did you mean joint?)",
    ),
    ("steps in words", ("train", "CONFIG", "--regime", "joint", "--steps", "two"), None, 2, "invalid int value: 'two'"),
    ("a model misspelt", (*JOINT, "--model", "stackk"), None, 1, "model: got 'stackk' (did you mean stack?)"),
    ("an unknown field", (*JOINT, "--set", "foo=3"), None, 1, "train: got an unknown argument 'foo'"),
    ("a flag as a field", (*JOINT, "--set", "lr=3"), None, 1, "--set: got lr, which has its own flag: --lr"),
    ("no such device", (*JOINT, "--device", "gpu"), None, 1, "device: got 'gpu', wants one that torch can use here"),
    ("no such figure", ("reproduce", "3x"), None, 1, "figure: got '3x', wants one of 2a"),
    ("no such scale", ("reproduce", "2c", "--scale", "big"), None, 1, "scale: got 'big', wants one of quick, paper"),
    ("no jobs", ("reproduce", "2c", "--jobs", "0"), None, 1, "jobs: got 0, wants an integer >= 1"),
    ("a folder of nothing", ("plot", "."), None, 1, "holds no panel"),
    ("a file as folder", ("plot", "CONFIG"), None, 1, "mine.toml: is a file, wants a folder of `fastlin reproduce` or"),
    ("a file to write into", ("theory", "CONFIG", "--out", "CONFIG"), None, 1, "mine.toml: is a file, wants a folder"),
    ("no such folder", ("status", "nowhere"), None, 1, "nowhere: no such folder, wants a folder of"),
    ("a folder as config", ("theory", "."), None, 1, ".: is a directory, wants a TOML file"),
    ("a length below zero", ("theory", "CONFIG", "-n", "0,-1"), None, 2, "N[1]: got -1, wants an integer from 0"),
    ("features below zero", ("theory", "CONFIG"), ("= 2", "= -2"), 1, "dimension: got -2, wants an integer from 1"),
    ("no lengths", ("theory", "CONFIG"), ("[3, 6]", "[]"), 1, "context_lengths: got a list of 0, wants a list of"),
    ("weights beyond one", ("theory", "CONFIG"), ("[0.5, 0.5]", "[0.5, 0.6]"), 1, "of sum 1.1, wants numbers >= 0 of"),
    ("a value without a name", (*JOINT, "--set", "=3"), None, 1, "--set: got '=3', wants NAME=VALUE"),
    ("a sweep of nothing", (*JOINT, "--sweep", "noise_std="), None, 1, "--sweep: got 'noise_std=', wants FIELD=V1,V2"),
    ("a sweep misspelt", (*JOINT, "--sweep", "noise=0,1"), None, 1, "sweep: got 'noise' (did you mean noise_std?)"),
    ("a value twice", (*JOINT, "--sweep", "noise_std=0,0"), None, 1, "sweep: got noise_std = 0 more than once"),
    ("two sweeps", (*JOINT, "--sweep", "lr=1,2", "--sweep", "n=1"), None, 1, "--sweep: got 2 fields, wants one"),
    (
        "lengths of a fixed figure",
        ("reproduce", "ff5", "-n", "3"),
        None,
        1,
        "lengths: got (3,), wants none (no -n): ff5",
    ),
    ("no such row", ("bench", "--rows", "nope"), None, 1, "--rows: got 'nope', wants one of loss-50"),
]


@pytest.mark.parametrize(
    ("line", "change", "status", "message"), [row[1:] for row in COMMANDS], ids=[row[0] for row in COMMANDS]
)
def test_commands(line, change, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(GOOD.replace(*change, 1) if change else GOOD)
    try:
        got = cli.main(["mine.toml" if word == "CONFIG" else word for word in line])
    except SystemExit as stop:
        got = stop.code
    shown = capsys.readouterr()
    assert got == status
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
