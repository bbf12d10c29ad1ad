"""Claims as JSON, CSV and Markdown."""

from pathlib import Path
from typing import Any

from fastlin._files import write_texts
from fastlin._tables import as_json as as_json
from fastlin._tables import csv_text, markdown

_ABOUT = (
    "PT, FT and JT are plain, fine-tuned and joint training, PGD is debiased preconditioned gradient descent. Losses "
    "are population risks, exact unless said to be sampled. Trained models are full models, the best trial of the "
    "preset tuned; they can end below PT, FT and JT, which are optima of the reduced model."
)
_COLUMNS = (("n", ""), ("value", ".7g"), ("expected", ".7g"))
_HOLDS = {True: "holds", False: "does not hold", None: "not decided"}


def as_csv(record: dict[str, Any]) -> str:
    columns = ("quantity", "n", "value", "expected")
    numbers = [(entry["name"], number) for entry in record["claims"] for number in entry["numbers"]]
    return csv_text(["claim", *columns], ([name, *(number[key] for key in columns)] for name, number in numbers))


def as_markdown(record: dict[str, Any], name: str = "claims") -> str:
    """A table of verdicts, the picture, then for each claim what the paper says, what was found, and the numbers."""
    training = ", ".join(f"{name} = {value}" for name, value in record["training"].items())
    paragraphs = ["# Claims of the paper, checked"]
    paragraphs += [f"{record['paper']}. {record.get('about', _ABOUT)} Training: {training}."]
    verdicts = [(entry["name"], f"**{_HOLDS[entry['holds']]}**", entry["verdict"]) for entry in record["claims"]]
    rows = [[str(i), *verdict] for i, verdict in enumerate(verdicts, 1)]
    paragraphs.append(markdown(["", "claim", "verdict", ""], rows).rstrip())
    caption = record["caption"] if "axes" in record else record["picture"]["caption"]
    paragraphs += [f"![The picture of the claims]({name}.png)", *caption]
    for i, entry in enumerate(record["claims"], 1):
        numbers = [
            [number["quantity"], *("" if number[key] is None else format(number[key], form) for key, form in _COLUMNS)]
            for number in entry["numbers"]
        ]
        paragraphs += [
            f"## {i}. {entry['name']}: {_HOLDS[entry['holds']]}",
            f"**The paper.** {entry['statement']}",
            f"**Found.** {entry['finding']}",
            f"**Verdict.** {entry['verdict']}",
            markdown(["quantity", "n", "value", "expected"], numbers, numbers=3).rstrip(),
        ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n\n".join([*paragraphs, f"Made with {versions}."]) + "\n"


def line(entry: dict[str, Any]) -> str:
    return f"{entry['name']}: {_HOLDS[entry['holds']]}. {entry['verdict']}"


def write(record: dict[str, Any], out: Path, name: str = "claims") -> list[Path]:
    """Write NAME.json, NAME.md and NAME.csv into the folder `out`; returns their paths."""
    texts = {"json": as_json(record), "md": as_markdown(record, name), "csv": as_csv(record)}
    return write_texts(out, {f"{name}.{suffix}": text for suffix, text in texts.items()})
