"""The `fastlin` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastlin import _info
from fastlin._version import __version__
from fastlin.backends import BackendError
from fastlin.bench import command as bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fastlin", description="Kernels, theory and experiments for in-context learning with linear attention."
    )
    parser.add_argument("--version", action="version", version=f"fastlin {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    command = commands.add_parser("info", help="what is there, what is not, and why")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_show_info)

    _add_train(commands)
    _add_reproduce(commands)

    command = commands.add_parser(
        "theory",
        help="print and draw the closed forms of a task mixture",
        description="The population risk of the closed-form optima against the context length, raw and over E[y²].",
    )
    command.add_argument(
        "config", metavar="CONFIG", help="a TOML file, or a setting that ships: 2a to 2d, A1a to A1d, A2a to A2f"
    )
    command.add_argument("--n", type=_lengths, metavar="N,N,...", help="context lengths, in place of the config's")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for theory.json, theory.csv and the picture as PNG, PDF and SVG"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON in place of the table")
    form.add_argument("--csv", action="store_true", help="print CSV in place of the table")
    command.set_defaults(run=_theory)

    bench.add(commands)

    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has had enough; nothing is left to tell, not even by Python when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, TypeError, BackendError, ModuleNotFoundError) as error:
        print(f"fastlin: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fastlin: stopped", file=sys.stderr)
        return 130
    return status


def _show_info(options: argparse.Namespace) -> None:
    found = _info.info()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found["versions"].items():
        print(f"{name:15} {value}")
    print(f"{'threads':15} {found['threads']}")
    print(f"{'devices':15} {', '.join(found['devices'])}")
    extension = found["extension"]
    if extension["available"]:
        print(f"{'extension':15} yes: {extension['compiler']}, {extension['flags']}; {found['instruction_set']}")
    else:
        print(f"{'extension':15} no: {extension['reason']}")
    print(f"{'cuda':15} {_cuda_state(found['cuda'])}")
    print("backends")
    for name, backend in found["backends"].items():
        print(f"  {name:13} {_availability(backend)}")
    for device, order in found["auto"].items():
        print(f"auto on {device:7} {' → '.join(order)}")


def _cuda_state(cuda: dict[str, Any]) -> str:
    built = f"built for {cuda['architectures']} by CUDA {cuda['cuda']}" if "architectures" in cuda else None
    if not cuda["available"]:
        return "; ".join(["no: " + cuda["reason"], *([built] if built else [])])
    return f"yes: {', '.join(cuda['devices'])}; driver {cuda['driver'] or 'unknown'}; {built}"


def _availability(backend: dict[str, Any]) -> str:
    if not backend["available"]:
        return f"no: {backend['reason']}"
    return "yes" if backend["auto"] else "yes, when named"


def _lengths(text: str) -> tuple[int, ...]:
    from fastlin.settings import check_lengths

    try:
        return check_lengths("N", [int(part) for part in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,5: {error}") from None


def _shard(text: str) -> tuple[int, int]:
    try:
        place, count = map(int, text.split("/"))
    except ValueError:
        place, count = 0, 0
    if not 0 <= place < count:
        raise argparse.ArgumentTypeError(f"got {text!r}, wants I/N with integers 0 <= I < N")
    return place, count


def _theory(options: argparse.Namespace) -> None:
    from fastlin import plots, settings
    from fastlin.figures import curves

    if options.out is not None:
        plots.check_installed()
    setting = settings.load(options.config)
    if options.n:
        setting = setting.with_lengths(options.n)
    record = curves.compute(setting, line=options.json or options.out is not None)
    show = curves.as_json if options.json else curves.as_csv if options.csv else curves.as_table
    sys.stdout.write(show(record))
    if options.out is not None:
        for path in [*curves.write(record, options.out), *plots.theory(options.out)]:
            print(path, file=sys.stderr)


def _add_train(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train a model in a regime, and set it beside its optimum",
        description="Train at every context length of a config. Ctrl-C leaves a checkpoint; --resume resumes from it. "
        "Under torchrun the processes share each batch.",
    )
    command.add_argument("config", metavar="CONFIG", help="a TOML file, or a setting that ships: 2a to 2d, ...")
    command.add_argument(
        "--regime",
        required=True,
        metavar="R,R,...",
        help="plain, fine-tune, one-prompt, joint, joint+heads, heads, or all",
    )
    # torchrun takes --n for one of its own options, wherever it stands; -n it hands on.
    command.add_argument(
        "-n",
        "--n",
        type=_lengths,
        metavar="N,N,...",
        help="context lengths, in place of the config's",
    )
    for name, option in _run_flags().items():
        default = "" if option.default is None or "preset's" in option.metadata["help"] else _shown(option.default)
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=option.metadata["flag"],
            metavar=name.upper(),
            help=option.metadata["help"] + default,
        )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="values",
        metavar="NAME=VALUE",
        help="any other field of a run, as TOML writes it: --set schedule=cosine --set clip=0.5",
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/CONFIG)")
    command.add_argument("--resume", action="store_true", help="resume what is in the folder, to the same bits")
    command.set_defaults(run=_train)


def _run_flags() -> dict[str, Any]:
    """The fields of a run that have a flag, by name."""
    from fastlin.training.config import RunConfig

    return {option.name: option for option in fields(RunConfig) if "flag" in option.metadata}


def _shown(default: Any) -> str:
    return f" (default: {str(default).removeprefix('torch.')})"


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="train and draw a figure of the paper, on its theory",
        description="Train every cell of a panel and draw it. The same command resumes one that was stopped.",
    )
    command.add_argument(
        "figure",
        metavar="FIGURE",
        help="2a to 2d, A1a to A1d, A2a to A2f, or all: these 14; claims: the paper's, checked; noise, depth, "
        "softmax, one-prompt, or beyond: these four experiments, which the paper does not have. Of the second paper: "
        "ff1 to ff5, ff5-separate, ff5-heads, or ff: these seven; ff-claims",
    )
    command.add_argument(
        "--scale",
        default="quick",
        help="quick, or paper: 50 trials × 20,000 steps × batch 8192; of ff 5 × 5000 a phase × 5000",
    )
    command.add_argument("--preset", default="tuned", help="paper, authors or tuned (default: tuned)")
    command.add_argument("--seed", type=int, default=0, metavar="S")
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs",
        type=int,
        metavar="J",
        help="single-threaded processes, a local dask cluster (default: one for each thread of torch's); 1 trains cell "
        "after cell in this process",
    )
    where.add_argument(
        "--dask", metavar="ADDRESS|FILE", help="a dask cluster that is there: its scheduler's address or file"
    )
    command.add_argument(
        "--shard", type=_shard, metavar="I/N", help="only every N-th cell, from the I-th on, counted from 0"
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/SCALE)")
    command.set_defaults(run=_reproduce)

    command = commands.add_parser("plot", help="draw the panels of a folder again")
    command.add_argument("folder", type=Path, metavar="DIR", help="a folder of fastlin reproduce")
    command.set_defaults(run=_plot)

    command = commands.add_parser("status", help="how far the panels of a folder are, also while they are made")
    command.add_argument("folder", type=Path, metavar="DIR", help="a folder of fastlin reproduce")
    command.set_defaults(run=_status)


def _reproduce(options: argparse.Namespace) -> None:
    from fastlin import plots
    from fastlin.figures import report, status
    from fastlin.figures.reproduce import Request, reproduce

    plots.check_installed()
    out = options.out or Path("runs") / options.scale
    request = Request(options.scale, options.preset, options.seed, options.jobs, shard=options.shard)
    if options.figure in ("claims", "ff-claims"):
        _claims(options.figure, request, options.dask, out)
        return
    panels = _panels(options.figure)
    with _cluster(options.dask) as client, status.Line(out) as line:
        try:
            records = reproduce(
                panels,
                out,
                request,
                client=client,
                drawn=lambda panel: plots.panel(out, panel),
                ended=line.ended,
                tick=line.show,
            )
        except (KeyboardInterrupt, SystemExit) as stop:
            line.close()
            print(f"fastlin: stopped; rerun the same command to resume {out}", file=sys.stderr)
            raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    for record in records:
        ended = sum(cell["state"] in ("done", "failed") for cell in record["cells"])
        if ended < len(record["cells"]):
            print(f"{record['title']}: {ended} of {len(record['cells'])} cells; the rest belong to other shards")
            continue
        print(f"{record['title']}", record.get("table") or report.as_table(record), sep="\n", end="")
        print(*(out / f"{record['name']}.{suffix}" for suffix in ("csv", "md", "pdf", "svg", "png")), sep="\n")
    failed = [(record["name"], cell) for record in records for cell in record["cells"] if cell["state"] == "failed"]
    if failed:
        texts = [f"{panel} {cell['key']}: {cell['error']}" for panel, cell in failed]
        raise ValueError("cells failed, the same command tries them again:\n" + "\n".join(texts))


@contextmanager
def _cluster(place: str | None) -> Iterator[Any]:
    """A client of the dask cluster at a place; None without one."""
    from fastlin.figures import sweep

    if place is None:
        yield None
        return
    with sweep.cluster_at(place) as client:
        yield client


def _figures() -> dict[str, Any]:
    """Every figure by its name."""
    from fastlin.figures import forgetting, prompts

    return {**prompts.PANELS, **prompts.BEYOND, **forgetting.FIGURES}


def _panels(name: str) -> list[Any]:
    """The figures that a name means: one, or all of a group."""
    from fastlin.figures import forgetting, prompts
    from fastlin.training.checks import choice

    known = _figures()
    groups: dict[str, Any] = {"all": prompts.PANELS, "beyond": prompts.BEYOND, "ff": forgetting.FIGURES}
    choice("figure", name, [*known, *groups, "claims", "ff-claims"])
    return [*groups[name].values()] if name in groups else [known[name]]


def _claims(name: str, request: Any, dask: str | None, out: Path) -> None:
    from fastlin import plots
    from fastlin.figures import claims
    from fastlin.figures.forgetting.claims import compute as compute_second
    from fastlin.figures.reproduce import locked

    if request.preset != "tuned" or request.jobs is not None or request.shard is not None or dask is not None:
        raise ValueError(
            f"{name}: got --preset, --jobs, --dask or --shard, wants none: it trains a few models with the preset tuned"
        )
    second = name == "ff-claims"
    compute = compute_second if second else claims.compute
    effort = request.claims("forgetting" if second else "claims")
    with locked(out):
        record = compute(out, **effort, report=lambda entry: print(claims.line(entry), flush=True))
        print(*claims.write(record, out, name), sep="\n")
        print(*(plots.panel(out, name) if second else plots.claims(out)), sep="\n")


def _plot(options: argparse.Namespace) -> None:
    from fastlin import plots
    from fastlin.figures.panel_files import panels_of
    from fastlin.figures.reproduce import close_panels

    claims, second = ((options.folder / f"{name}.json").exists() for name in ("claims", "ff-claims"))
    records = panels_of(options.folder, empty=claims or second)
    complete = close_panels(options.folder, _figures())
    for name in [*complete, *(["ff-claims"] if second else [])]:
        print(*plots.panel(options.folder, name), sep="\n")
    if claims:
        print(*plots.claims(options.folder), sep="\n")
    for record in records:
        if record["name"] not in complete:
            print(f"{record['name']}: not all cells have ended; not drawn", file=sys.stderr)


def _status(options: argparse.Namespace) -> None:
    from fastlin.figures import status

    sys.stdout.write(status.as_text(options.folder))


def _train(options: argparse.Namespace) -> None:
    from fastlin import plots, settings
    from fastlin.training import table, team

    setting = settings.load(options.config)
    if options.n:
        setting = setting.with_lengths(options.n)
    out = options.out or Path("runs") / Path(options.config).stem
    flags = {name: getattr(options, name) for name in _run_flags()}
    values = dict(map(_value, options.values))
    for name in {**flags, "n": None, "out": None, "resume": None}:
        if name in values:
            raise ValueError(f"--set: got {name}, which has a flag of its own: --{name.replace('_', '-')}")
    given = {name: value for name, value in flags.items() if value is not None and name != "device"}
    headings = iter([table.heading()])

    def report(row: dict[str, Any]) -> None:
        print(*headings, table.line(row), sep="\n", flush=True)

    with team.joined(options.device or "cpu") as device, team.folder(out) as own:
        first = own == out
        try:
            table.train_cells(
                setting,
                table.regimes(options.regime),
                own,
                options.resume or team.restarted(),
                report if first else lambda row: None,
                device=device,
                **given,
                **values,
            )
        except KeyboardInterrupt:
            if first:
                print(f"fastlin: stopped; --resume resumes {out}", file=sys.stderr)
            raise SystemExit(130) from None
        if first:
            try:
                print(*plots.training(out), sep="\n")
            except ModuleNotFoundError as error:
                print(f"fastlin: no pictures: {error}", file=sys.stderr)


def _value(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as TOML reads it or, where it cannot, as a word; none is None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set: got {text!r}, wants NAME=VALUE")
    if value.lower() == "none":
        return name, None
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
