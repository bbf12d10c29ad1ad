"""The command `fastlin bench`."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from fastlin._tables import terminal_width, wrapped

_SIZES = {
    "B": ("sequences", (8192,)),
    "n": ("context lengths", (50,)),
    "m": ("token widths", (11,)),
    "K": ("tasks", (2,)),
    "L": ("layers of a stack, 2 or more", (3,)),
    "R": ("trials; 0 is no trial dimension", (0,)),
}


def add(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="time the ops against other implementations and the machine's limits",
        description="Check the ops and their peers against the float64 reference, then time them in interleaved "
        "rounds. Without a choice of rows, ops or sizes: all ops at B = 8192, n = 50, m = 11, curves over every size "
        "and over threads, and training at the paper's scale, in minutes.",
    )
    command.add_argument("--list", action="store_true", help="print the rows of the table")
    command.add_argument("--rows", type=_words, metavar="NAME,...", help="of the table, in place of the default run")
    command.add_argument("--long", action="store_true", help="the default run and the rows that take minutes each")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    command.add_argument("--ops", type=_words, metavar="OP,...", help="of the public ops, in place of the default run")
    for name, (what, _) in _SIZES.items():
        flags = ["-n", "--n"] if name == "n" else [f"--{name}"]
        command.add_argument(*flags, type=_numbers, metavar=f"{name},...", help=what)
    command.add_argument("--dtypes", type=_words, metavar="D,...", help="float32, float64 (default: float32)")
    command.add_argument("--threads", type=_numbers, metavar="T,...", help="(default: torch's)")
    command.add_argument("--backends", type=_words, metavar="NAME,...", help="of fastlin (default: auto)")
    forms = "KIND[-FORM][@MODIFIER,...], as fastlin/bench/labels.py has them"
    command.add_argument("--peers", metavar="PEER,...", help=f"{forms} (default: all that the op has)")
    command.add_argument("--quick", action="store_true", help="few calls: to see that it runs, not to compare")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    command.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers of the table")
    command.add_argument("--out", type=Path, metavar="DIR", help="folder for bench.json, bench.csv and the pictures")
    command.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="measure nothing: set B's ratios beside A's"
    )
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of --compare: exit 1 when a ratio against eager drops by more (default: 0.2)",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.compare:
        return _compare(options)
    if options.list:
        return _list(options)
    if options.device == "cuda":
        from fastlin.bench import gpu

        reason = gpu.why_not()
        if reason is not None:
            print(f"fastlin: --device cuda: nothing to measure: {reason}", file=sys.stderr)
            return 2
    return _measure(options)


def _list(options: argparse.Namespace) -> int:
    import torch

    from fastlin.bench import rows

    by_name: dict[str, list[rows.Row]] = {}
    for row in rows.every(torch.get_num_threads(), options.device):
        by_name.setdefault(row.name, []).append(row)
    for name, (first, *more) in by_name.items():
        about = f"{first.shape.op} over {first.axis}" if first.shape and more else first.sizes
        print(wrapped(f"{name:16}{'long' if first.long else '':6}{about}", terminal_width(), " " * 22))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from fastlin.bench import compare

    if not 0 <= options.tolerance < 1:
        raise ValueError(f"--tolerance: got {options.tolerance}, wants a share from 0 to 1")
    found = compare.changes(*map(compare.read, options.compare))
    sys.stdout.write(compare.as_text(found, options.tolerance))
    return int(any(change.lost(options.tolerance) for change in found))


def _measure(options: argparse.Namespace) -> int:
    from fastlin import plots
    from fastlin._files import write_text, write_texts
    from fastlin._tables import as_json
    from fastlin.bench import gpu, run, table

    for path in (options.json, options.csv):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: its folder is not there")  # better now than after minutes of measuring
    rows = _rows(options)
    command = shlex.join(["fastlin", *sys.argv[1:]])
    device = gpu.GpuDevice() if options.device == "cuda" else None
    effort = run.QUICK if options.quick else run.BenchEffort()
    record = run.run(rows, effort, command=command, device=device, progress=_show)
    _show("")
    sys.stdout.write(table.as_text(record, min(terminal_width(), table.WIDTH)))
    for path, text in ((options.json, as_json(record)), (options.csv, table.as_csv(record))):
        if path is not None:
            write_text(path, text)
    if options.out is not None:
        write_texts(options.out, {"bench.json": as_json(record), "bench.csv": table.as_csv(record)})
        print(*plots.bench(options.out), sep="\n", file=sys.stderr)
    return int(run.wrong(record))


def _show(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _rows(options: argparse.Namespace) -> list[Any]:
    from dataclasses import replace

    import torch

    from fastlin.bench import rows

    sizes = {name: getattr(options, name) for name in _SIZES}
    threads = options.threads or (torch.get_num_threads(),)
    if min(threads) < 1:
        raise ValueError(f"--threads: got {min(threads)}, wants 1 or more")
    choices = [options.ops, options.dtypes, options.backends, options.peers, *sizes.values()]
    by_size = len(threads) > 1 or any(value is not None for value in choices)
    if by_size and (options.rows or options.long):
        raise ValueError("--rows, --long: got a choice of ops, sizes or peers as well, wants one or the other")
    if by_size:
        return _chosen(options, sizes, threads)
    if options.rows:
        found = rows.named(options.rows, threads[0], options.device)
    else:
        found = rows.default(threads[0], options.device, long=options.long)
    if options.threads:
        found = [replace(row, threads=row.threads or threads[0]) for row in found]
    return [row.small() for row in found] if options.quick else found


def _chosen(options: argparse.Namespace, sizes: dict[str, Any], threads: tuple[int, ...]) -> list[Any]:
    from fastlin import _info
    from fastlin._checks import choice
    from fastlin.bench import rows
    from fastlin.bench.cases import OPS
    from fastlin.bench.labels import DTYPES, split

    ops = [choice("--ops", op, OPS) for op in options.ops or ("prompt_loss",)]
    dtypes = [choice("--dtypes", dtype, DTYPES) for dtype in options.dtypes or ("float32",)]
    peers = None if options.peers is None else split(options.peers)
    backends = options.backends or ("auto",)
    there = _info.info()["backends"]
    for backend in backends:
        if backend != "auto" and not there[choice("--backends", backend, [*there, "auto"])]["available"]:
            raise ValueError(f"--backends: {backend!r} cannot serve: {there[backend]['reason']}")
    for name, (_, usual) in _SIZES.items():
        sizes[name] = sizes[name] or usual
        least = {"L": 2, "R": 0, "n": 0}.get(name, 1)
        if min(sizes[name]) < least:
            raise ValueError(f"--{name}: got {min(sizes[name])}, wants {least} or more")
    sizes["R"] = tuple(R or None for R in sizes["R"])
    return rows.chosen(ops, sizes, dtypes, threads, backends, peers, options.device)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,5") from None
