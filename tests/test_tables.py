"""Text tables: what a narrow terminal leaves out, and how wide a terminal is."""

import os

import pytest

from fastlin import _tables
from fastlin._tables import UNLIMITED, Columns

COLUMNS = Columns({"name": -6, "n": 4, "risk": 8, "more": 5}, drops=("more", "n"))
ROWS = [["a", 1, "0.5", "x"], ["b", 20, "0.25", "y"]]


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (UNLIMITED, "name     n    risk more\na        1     0.5    x\nb       20    0.25    y\n"),
        (23, "name     n    risk more\na        1     0.5    x\nb       20    0.25    y\n"),
        (22, "name     n    risk\na        1     0.5\nb       20    0.25\nnot shown in 22\n  columns: more\n"),
        (17, "name      risk\na          0.5\nb         0.25\nnot shown in 17\n  columns: n,\n  more\n"),
        (5, "name      risk\na          0.5\nb         0.25\nnot\n  shown\n  in\n  5\n  columns:\n  n,\n  more\n"),
    ],
)
def test_columns_are_left_out_in_order(width, text):
    assert COLUMNS.text(ROWS, width) == text
    assert COLUMNS.line(ROWS[0], width) == text.splitlines()[1]


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        COLUMNS.line(["a", 1], 80)


def test_words_stay_whole():
    path = "runs/" + "x" * 30
    assert _tables.wrapped(f"see {path} and joint-heads", 20, "  ") == f"see\n  {path}\n  and joint-heads"
    assert _tables.wrapped("an excess of 1.5 % at n = 10", 14) == "an excess of\n1.5 % at\nn = 10"


@pytest.mark.parametrize(("columns", "found"), [("60", 60), ("0", 132), ("", 132), ("wide", 132), (None, 132)])
def test_width_of_a_terminal(monkeypatch, columns, found):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((132, 50)))
    assert _tables.terminal_width() == found


def test_a_pipe_has_no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    read, write = os.pipe()
    assert _tables.terminal_width(write) == UNLIMITED
    os.close(read)
    os.close(write)
