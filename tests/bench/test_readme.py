"""README.md and docs/benchmarks.md say what the committed record says, and their pictures are of that record."""

import re

import pytest
from PIL import Image

from benchmarks import readme
from fastlin.bench.cases import OPS
from fastlin.bench.compare import read
from fastlin.plots.bench import curves, table_cases


@pytest.mark.parametrize(
    ("page", "made"), readme.sections(read(readme.RECORD)).items(), ids=lambda value: getattr(value, "name", "")
)
def test_pages_agree_with_the_record(page, made):
    assert readme.with_section(page, made) == page.read_text()


def test_readme_is_short():
    """At most 900 words outside code, tables and link targets."""
    text = re.sub(r"```.*?```", "", readme.README.read_text(), flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)).split()) <= 900


def test_pictures_are_of_the_record():
    assert "docs/speedup.png" in readme.README.read_text()
    for name in readme.PICTURES:
        assert f"({name}.png)" in readme.PAGE.read_text()
        with Image.open(readme.PAGE.with_name(f"{name}.png")) as picture:
            assert picture.info["Description"] == readme.checksum(readme.RECORD)


def test_the_record_has_every_op_every_axis_and_the_paper():
    record = read(readme.RECORD)
    assert {case["shape"]["op"] for case in table_cases(record)} == set(OPS)
    assert {points[0]["axis"] for points in curves(record).values()} == {"B", "n", "d", "L", "R", "threads"}
    assert all(part["wrong"] == {} for part in (*record["cases"], record["others"]["training"]))
    assert record["command"].startswith("fastlin bench")
    assert {"torch", "fastlin", "python"} <= set(record["machine"]["versions"])


def test_a_changed_record_changes_the_pages():
    record = read(readme.RECORD)
    before = readme.sections(record)
    table_cases(record)[0]["contenders"][0]["median"] *= 3
    record["others"]["training"]["contenders"][0]["cell"] *= 3
    after = readme.sections(record)
    assert all(after[page] != before[page] for page in before)


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END + readme.BEGIN, 2 * (readme.BEGIN + readme.END)])
def test_markers_must_be_there_once(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md: wants"):
        readme.with_section(page, "")
