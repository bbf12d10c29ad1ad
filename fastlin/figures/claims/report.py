"""The claims as JSON, as CSV, and as a report for people."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from fastlin._files import replacing

_ABOUT = (
    "PT, FT and JT are plain, fine-tuned and joint training, PGD is debiased preconditioned gradient descent; losses "
    "are population risks, exact unless said to be sampled. Trained cells are full models with the preset tuned; the "
    "best trial counts."
)
_HOLDS = {True: "holds", False: "does not hold", None: "not decided"}


def as_json(record: dict[str, Any]) -> str:
    """The record as JSON."""
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(record: dict[str, Any]) -> str:
    """A row for each number: claim, quantity, n, value, expected."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["claim", "quantity", "n", "value", "expected"])
    for entry in record["claims"]:
        for number in entry["numbers"]:
            writer.writerow([entry["name"], *(number[key] for key in ("quantity", "n", "value", "expected"))])
    return text.getvalue()


def as_markdown(record: dict[str, Any]) -> str:
    """The report: verdicts at a glance, then each claim with what the paper says, what was found, and the numbers."""
    settings = ", ".join(f"{name} = {value}" for name, value in record["training"].items())
    lines = [
        "# Claims of the paper, checked",
        "",
        f"{record['paper']}. {record.get('about', _ABOUT)} Training: {settings}.",
        "",
        "| | claim | verdict | |",
        "|---|---|---|---|",
    ]
    for i, entry in enumerate(record["claims"], 1):
        lines.append(f"| {i} | {entry['name']} | **{_HOLDS[entry['holds']]}** | {_cell(entry['verdict'])} |")
    for i, entry in enumerate(record["claims"], 1):
        lines += [
            "",
            f"## {i}. {entry['name']}: {_HOLDS[entry['holds']]}",
            "",
            f"**The paper.** {entry['statement']}",
            "",
            f"**Found.** {entry['finding']}",
            "",
            f"**Verdict.** {entry['verdict']}",
            "",
            "| quantity | n | value | expected |",
            "|---|---:|---:|---:|",
        ]
        for number in entry["numbers"]:
            n = "" if number["n"] is None else number["n"]
            lines.append(
                f"| {_cell(number['quantity'])} | {n} | {_text(number['value'])} | {_text(number['expected'])} |"
            )
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, "", f"Made with {versions}."]) + "\n"


def _cell(text: str) -> str:
    """Text inside a table, where a bar would start a new column."""
    return text.replace("|", "\\|")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


def line(entry: dict[str, Any]) -> str:
    """A claim on one line."""
    return f"{entry['name']}: {_HOLDS[entry['holds']]}. {entry['verdict']}"


def write(record: dict[str, Any], out: Path, name: str = "claims") -> list[Path]:
    """Write NAME.json, NAME.md and NAME.csv into the folder `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.json": as_json(record), f"{name}.md": as_markdown(record), f"{name}.csv": as_csv(record)}
    for name, text in texts.items():
        with replacing(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [out / name for name in texts]
