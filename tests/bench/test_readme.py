"""README.md says what the committed record says, and its pictures are of that record."""

import pytest
from PIL import Image

from benchmarks import readme
from fastlin.bench.cases import OPS
from fastlin.bench.compare import read
from fastlin.plots.bench import curves, table_cases


def test_readme_agrees_with_the_record():
    text = readme.README.read_text()
    assert readme.with_section(text, readme.section(read(readme.RECORD))) == text


def test_pictures_are_of_the_record():
    drawn = [name for name in readme._PICTURES if f"benchmarks/results/{name}.png" in readme.README.read_text()]
    assert drawn == ["speedup", "scaling", "roofline"]
    for name in (*drawn, "speedup-all"):
        with Image.open(readme.RECORD.with_name(f"{name}.png")) as picture:
            assert picture.info["Description"] == readme.checksum(readme.RECORD)


def test_the_record_has_every_op_every_axis_and_the_paper():
    record = read(readme.RECORD)
    assert {case["shape"]["op"] for case in table_cases(record)} == set(OPS)
    assert {points[0]["axis"] for points in curves(record).values()} == {"B", "n", "d", "L", "R", "threads"}
    assert all(part["wrong"] == {} for part in (*record["cases"], record["others"]["training"]))
    assert record["command"].startswith("fastlin bench")
    assert {"torch", "fastlin", "python"} <= set(record["machine"]["versions"])


def test_a_changed_record_changes_the_section():
    record = read(readme.RECORD)
    before = readme.section(record)
    ours = table_cases(record)[0]["contenders"][0]
    ours["median"] *= 3
    assert readme.section(record) != before


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END + readme.BEGIN, 2 * (readme.BEGIN + readme.END)])
def test_markers_must_be_there_once(text):
    with pytest.raises(ValueError, match=r"README\.md: wants"):
        readme.with_section(text, "")
