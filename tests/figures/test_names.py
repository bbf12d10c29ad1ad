"""The registry of figures: names, groups and claims, in the help text and on the pages of the documentation."""

from pathlib import Path

import pytest

from fastlin import cli
from fastlin.figures import names

DOCS = Path(__file__).parents[2] / "docs"


def test_names_are_different_and_lead_to_their_figures():
    known = names.figures()
    assert len(known) == sum(len(group.figures) for group in names.GROUPS.values())
    assert not set(known) & {*names.GROUPS, *names.CLAIMS}
    for name, figure in known.items():
        assert (figure.name, names.named(name)) == (name, [figure])
    for name, group in names.GROUPS.items():
        assert names.named(name) == list(group.figures.values())
    assert [names.named(name) for name in names.CLAIMS] == [[], []]
    with pytest.raises(ValueError, match=r"figure: got 'ff9' \(did you mean ff.*\?\), wants one of 2a, 2b, "):
        names.named("ff9")


def test_the_help_text_has_every_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert all(name in text for name in (*names.figures(), *names.GROUPS, *names.CLAIMS))


def test_the_documentation_has_every_group_and_the_ends_of_its_range():
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("figures.md", "forgetting.md"))
    ends = [name for group in names.GROUPS.values() for name in (min(group.figures), max(group.figures))]
    assert all(name in text for name in (*ends, *names.GROUPS, *names.CLAIMS))
