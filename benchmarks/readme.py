"""What README.md and docs/benchmarks.md say of speed, from the committed record. `python -m benchmarks.readme`.

`make bench-readme` measures first. The record is `benchmarks/results/cpu.json`, of `fastlin bench`. The text between
the markers of both pages, and the pictures in docs/, are made from it and from nothing else. A picture carries the
checksum of its record.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from fastlin import plots
from fastlin._files import replacing
from fastlin._tables import markdown
from fastlin.bench.compare import read
from fastlin.bench.timing import in_units
from fastlin.plots.bench import is_peer, table_cases
from fastlin.plots.style import save

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
RECORD = ROOT / "benchmarks" / "results" / "cpu.json"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
PICTURES = {
    "speedup": "Time of each form over fastlin's, prompt_loss at B = 8192, n = 50",
    "scaling": "Time against sequences, context length, features, layers, trials and threads",
    "roofline": "Useful operations a second against operations a byte, under the machine's measured roofs",
    "speedup-all": "Time of each form over fastlin's, all ops",
}


def main() -> int:
    """Write both sections and draw the pictures."""
    record = read(RECORD)
    for page, made in sections(record).items():
        text = with_section(page, made)
        with replacing(page) as temporary:
            temporary.write_text(text)
    for name, figure in plots.bench_figures(record).items():
        save(figure, PAGE.parent, name, {"png": {"Description": checksum(RECORD)}})
    return 0


def checksum(path: Path) -> str:
    """Of a file, as its pictures carry it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sections(record: dict[str, Any]) -> dict[Path, str]:
    """The text between the markers of each page."""
    return {README: headline(record), PAGE: table(record)}


def with_section(page: Path, made: str) -> str:
    """The text of a page with what stands between the markers replaced; it has each once, in order."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"{page.name}: wants {BEGIN} and then {END}, each once")
    return f"{before}{BEGIN}\n{made}{END}{after}"


def headline(record: dict[str, Any]) -> str:
    """One cell of the paper, here and in other libraries."""
    training, machine = record["others"]["training"], record["machine"]
    times = {entry["label"]: in_units(entry["cell"]) for entry in training["contenders"]}
    peers = {"eager@trial": "in eager torch", "vmap-gram": "with torch.func.vmap", "jax-gram": "in JAX"}
    others = [f"{times[label]} {how}" for label, how in peers.items() if label in times]
    return (
        f"One cell of the paper (a regime at one context length), {training['trials']} trials of "
        f"{training['train_steps']:,} steps of {training['batch']} sequences: **{times['fastlin']} here, "
        f"{', '.join(others)}**. Extrapolated from timed steps on {machine['cores']} cores of an {machine['cpu']} "
        f"({machine['instruction_set']}), {record['date'][:10]}. Eager torch computes only the query's row of the "
        "attention, vmap and JAX its Gram form. [All benchmarks](docs/benchmarks.md).\n"
    )


def table(record: dict[str, Any]) -> str:
    """Every case, the training, and the pictures."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    limits = "; ".join(
        f"{limit['dtype']}, threads = {limit['threads']}: {limit['flops'] / 1e9:.0f} GFLOP/s of FMA, "
        f"reads {limit['bandwidth'] / 1e9:.1f} GB/s"
        for limit in record["limits"]
    )
    pictures = "\n\n".join(f"![{text}]({name}.png)" for name, text in PICTURES.items())
    return (
        f"`{record['command']}` on {machine['cpu']} ({machine['instruction_set']}), {machine['cores']} cores, "
        f"threads = {machine['threads']}, {record['date'][:10]}; {versions}. Measured limits: {limits}. Times of the "
        "other columns are over fastlin's; float32, m = 11, K = 2, losses with the gradients of all parameters.\n\n"
        f"{_cases(record)}\n"
        "`eager` is the form one writes first, the query's row of the "
        "attention, or full attention in a stack; `eager-gram` is the Gram form; with trials, both are under "
        "`torch.func.vmap`; `compile` and `jax` are the faster of their two forms. FMA and read: achieved "
        "fraction of peak compute and read bandwidth, counting only necessary work and data, above 100 % where "
        "the data were still in a cache. Memory is the peak beyond inputs and outputs. "
        "`eager-product` puts both vectors in one matrix product, `eager-linear` multiplies keys and values first, "
        f"`numpy` is BLAS with gradients by hand, `@trial` is one trial at a time.{_fresh(record)}\n\n"
        f"{_training(record['others'].get('training'))}{pictures}\n"
    )


def _fresh(record: dict[str, Any]) -> str:
    """A sentence about tokens that are not in a cache."""
    labels = ("fastlin@fresh", "compile@fresh")
    found = {
        entry["label"]: entry for case in record["cases"] for entry in case["contenders"] if entry["label"] in labels
    }
    if len(found) < len(labels):
        return ""
    ours, peer = (found[label]["median"] for label in labels)
    return (
        " Every call has the same tokens, so they may be in a cache; with other tokens in each call `prompt_loss` at "
        f"n = 50 takes {in_units(ours)}, and `compile` {peer / ours:.3g} times that."
    )


def _cases(record: dict[str, Any]) -> str:
    """A line for each case."""
    columns = "op, sizes, fastlin, reference, eager, eager-gram, compile, jax, FMA, read, memory"
    cells = []
    for case in table_cases(record):
        by_label = {entry["label"]: entry for entry in case["contenders"]}
        ours = by_label.get("fastlin")
        if ours is None or not any(map(is_peer, case["contenders"])):
            continue
        cells.append(
            [
                f"`{case['shape']['op']}`",
                _sizes(case),
                in_units(ours["median"]),
                _times(by_label.get("reference")),
                _times(by_label.get("eager") or by_label.get("vmap")),
                _times(by_label.get("eager-gram") or by_label.get("vmap-gram")),
                _times(_fastest(case, "compile")),
                _times(_fastest(case, "jax")),
                f"{ours['of_peak']:.0%}",
                "" if ours["of_bandwidth"] is None else f"{ours['of_bandwidth']:.0%}",
                "" if ours.get("memory") is None else f"{ours['memory'] / 1e6:.1f} MB",
            ]
        )
    return markdown(columns.split(", "), cells)


def _sizes(case: dict[str, Any]) -> str:
    _, *words = case["name"].split()
    hidden = ("m=11", "float32", f"threads={case['threads']}")
    return ", ".join(word.replace("=", " = ") for word in words if word not in hidden)


def _fastest(case: dict[str, Any], of_kind: str) -> dict[str, Any] | None:
    found = [entry for entry in case["contenders"] if entry["label"] in (of_kind, f"{of_kind}-gram")]
    return min(found, key=lambda entry: float(entry["median"]), default=None)


def _times(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['times_fastlin']:.3g} ×"


def _training(training: dict[str, Any] | None) -> str:
    """A cell and a figure at the paper's scale."""
    if training is None:
        return ""
    cells = [
        [
            f"`{entry['label']}`",
            f"{entry['steps']} × {entry['trials']} in {in_units(entry['median'] * entry['steps'])}",
            in_units(entry["cell"]),
            in_units(entry["figure"]),
            _times(entry),
        ]
        for entry in training["contenders"]
    ]
    header = ["training", "timed: steps × trials", "one cell", f"figure {training['figure']}", "times"]
    text = training["extrapolation"]
    return f"{text[0].upper()}{text[1:]}:\n\n{markdown(header, cells)}\n"


if __name__ == "__main__":
    sys.exit(main())
