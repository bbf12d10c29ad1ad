"""The `fastlin` command."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fastlin import _info, _tables, plots
from fastlin._version import __version__
from fastlin.backends import BackendError
from fastlin.bench import command as bench

Command = Callable[[argparse.Namespace], "int | None"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fastlin", description="Kernels, theory and experiments for in-context learning with linear attention."
    )
    parser.add_argument("--version", action="version", version=f"fastlin {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    about = _add(commands, "info", _show_info, "show versions, devices and backends, and why one is missing")
    about.add_argument("--json", action="store_true", help="print JSON")
    _add_train(commands)
    _add_reproduce(commands)
    plot = _add(commands, "plot", _plot, "draw the figures of a folder again")
    plots.add_options(plot)
    for command in (plot, _add(commands, "status", _status, "show the progress of the figures of a folder")):
        command.add_argument("folder", type=Path, metavar="DIR", help="a folder of fastlin reproduce or fastlin train")
    _add_theory(commands)
    bench.add(commands)

    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. With stdout on /dev/null, Python does not report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, TypeError, BackendError, ModuleNotFoundError) as error:
        print(f"fastlin: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fastlin: stopped", file=sys.stderr)
        return 130
    return status


def _add(commands: Any, name: str, run: Command, summary: str, description: str | None = None) -> Any:
    command = commands.add_parser(name, help=summary, description=description or f"{summary[0].upper()}{summary[1:]}.")
    command.set_defaults(run=run)
    return command


def _show_info(options: argparse.Namespace) -> None:
    about = _info.info()
    if options.json:
        print(json.dumps(about, indent=1))
        return
    extension, state = about["extension"], f"no: {about['extension'].get('reason')}"
    if extension["available"]:
        state = f"yes: {extension['compiler']}, {extension['flags']}; {about['instruction_set']}"
    rows = {**about["versions"], "threads": about["threads"], "devices": ", ".join(about["devices"])}
    width = _tables.terminal_width()
    for name, value in {**rows, "extension": state, "cuda": cuda_state(about["cuda"])}.items():
        print(_tables.wrapped(f"{name:15} {value}", width, " " * 16))
    print("backends")
    for name, backend in about["backends"].items():
        print(_tables.wrapped(f"  {name:13} {_availability(backend)}", width, " " * 16))
    for device, order in about["auto"].items():
        print(f"auto on {device:7} {' → '.join(order)}")


def cuda_state(cuda: dict[str, Any]) -> str:
    """The CUDA kernels of `fastlin.info`, in a line: devices and the code that they run, driver and build."""
    built = f"built for {cuda['architectures']} by CUDA {cuda['cuda']}" if "architectures" in cuda else None
    if built and cuda["needs_driver"]:
        built += f", which needs driver {cuda['needs_driver']} or newer"
    if not cuda["available"]:
        return "; ".join(["no: " + cuda["reason"], *([built] if built else [])])
    devices = [f"{device} runs {code}" for device, code in zip(cuda["devices"], cuda["runs"], strict=True)]
    return f"yes: {'; '.join(devices)}; driver {cuda['driver'] or 'unknown'}; {built}"


def _availability(backend: dict[str, Any]) -> str:
    if backend["available"]:
        return "yes" if backend["auto"] else "yes, when named"
    return f"no: {backend['reason']}"


def _add_config(command: Any) -> None:
    """The argument CONFIG, and an option for the context lengths."""
    from fastlin import settings

    shipped = ", ".join(settings.shipped())
    command.add_argument("config", metavar="CONFIG", help=f"a TOML file, or a setting that ships: {shipped}")
    _add_lengths(command, "context lengths, in place of the config's")


def _add_lengths(command: Any, text: str) -> None:
    # torchrun reads --n as one of its own options, also after the script's name; it passes -n on.
    command.add_argument("-n", "--n", type=_lengths, metavar="N,N,...", help=text)


def _setting(options: argparse.Namespace) -> Any:
    from fastlin import settings

    setting = settings.load(options.config)
    return setting.with_lengths(options.n) if options.n else setting


def _lengths(text: str) -> tuple[int, ...]:
    from fastlin.settings import check_lengths

    try:
        return check_lengths("N", [int(part) for part in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,5: {error}") from None


def _add_theory(commands: Any) -> None:
    description = "The population risk of the closed-form optima against the context length, raw and over E[y²]."
    command = _add(commands, "theory", _theory, "print and draw the closed forms of a task mixture", description)
    _add_config(command)
    files = "theory.json, theory.csv and the picture as PNG, PDF and SVG"
    command.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {files}")
    plots.add_options(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON in place of the table")
    form.add_argument("--csv", action="store_true", help="print CSV in place of the table")


def _theory(options: argparse.Namespace) -> None:
    from fastlin.figures import curves

    if options.out is not None:
        plots.check_installed()
    width = _tables.terminal_width()
    record = curves.compute(_setting(options), line=options.json or options.out is not None)
    show = curves.as_json if options.json else curves.as_csv if options.csv else partial(curves.as_table, width=width)
    paths = []
    if options.out is not None:
        paths = [*curves.write(record, options.out), *plots.theory(options.out, **plots.chosen(options))]
    sys.stdout.write(show(record))
    for path in paths:
        print(path, file=sys.stderr)


def _add_train(commands: Any) -> None:
    from fastlin.training import table

    description = (
        "Train at every context length of a config, and at every value of --sweep; write the table (risk.csv, .json, "
        ".md), risk against steps (training.png) and, for several context lengths or a --sweep, risk against n or the "
        "swept field on closed forms (risk.png). Ctrl-C leaves a checkpoint; --resume resumes from it. Under torchrun "
        "the processes share each batch."
    )
    command = _add(commands, "train", _train, "train a model in a regime, and compare it with its optimum", description)
    regimes = f"{', '.join(table.regimes('all'))}, or all"
    command.add_argument("--regime", required=True, metavar="R,R,...", help=regimes)
    _add_config(command)
    for name, option in _run_flags().items():
        text = option.metadata["help"]
        if option.default is not None and "preset's" not in text:
            text += f" (default: {str(option.default).removeprefix('torch.')})"
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, type=option.metadata["flag"], metavar=name.upper(), help=text)
    text = "any other field of a run, in TOML: --set schedule=cosine --set clip=0.5"
    command.add_argument("--set", action="append", default=[], dest="values", metavar="NAME=VALUE", help=text)
    watch = "log each record: events below DIR/tensorboard, or a run of a project named as the config"
    command.add_argument("--watch", choices=("tensorboard", "wandb"), help=watch)
    text = "train at each value of a field of the config or an option: noise_std=0,0.5,1 or means=[1,-1],[2,-2]"
    command.add_argument("--sweep", action="append", default=[], metavar="FIELD=V1,V2,...", help=text)
    command.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/CONFIG)")
    command.add_argument("--resume", action="store_true", help="resume the runs of the folder, with the same bits")
    plots.add_options(command)


def _run_flags() -> dict[str, Any]:
    from fastlin.training.config import RunConfig

    return {option.name: option for option in fields(RunConfig) if "flag" in option.metadata}


def _train(options: argparse.Namespace) -> None:
    from fastlin.figures import own, own_plan, status
    from fastlin.training import table, team
    from fastlin.training.judge import below_theory

    setting = _setting(options)
    out = options.out or Path("runs") / Path(options.config).stem
    flags = {name: getattr(options, name) for name in _run_flags()}
    values = dict(map(_value, options.values))
    for name in {**flags, "n": None, "out": None, "resume": None}:
        if name in values:
            flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
            raise ValueError(f"--set: got {name}, which has its own flag: {flag}")
    for name in {*inspect.signature(own.train_panel).parameters, "callback"} & values.keys():
        raise ValueError(f"--set: got {name}, wants a field of a run")
    values |= {name: value for name, value in flags.items() if value is not None and name != "device"}
    sweep = _swept(options.sweep)
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        first, heading = ("", "") if sweep is None else (f"{own_plan.text(row[sweep[0]]):15} ", f"{sweep[0]:15} ")
        if not rows:
            print(heading + table.heading(len(heading)))
        print(first + table.line(row, len(first)), flush=True)
        rows.append(row)
        if sys.stderr.isatty():
            print(status.progress(status.cells(out)), file=sys.stderr)

    with team.joined(options.device or "cpu") as device:
        first = team.leads()
        if sweep is None or sweep[0] != "device":
            values["device"] = device
        try:
            regimes, resume = table.regimes(options.regime), options.resume or team.restarted()
            watch = options.watch
            own.train_panel(setting, regimes, out, sweep=sweep, resume=resume, report=report, watch=watch, **values)
        except KeyboardInterrupt:
            if first:
                print(f"fastlin: stopped; --resume resumes {out}", file=sys.stderr)
            raise SystemExit(130) from None
        width = _tables.terminal_width()
        if first:
            print(table.COLUMNS.left_out(width, 0 if sweep is None else 16), end="")
        for note in below_theory(row["excess_percent"] for row in rows):
            print(_tables.wrapped(note, width))
        if first:
            print(*(out / f"{own_plan.NAME}.{suffix}" for suffix in ("csv", "json", "md")), sep="\n")
            try:
                pictures = plots.experiment(out, **plots.chosen(options))
                print(*(path for path in pictures if path.parent == out), sep="\n")
                if sweep is not None:
                    print(out / f"{sweep[0]}=*" / "training.png")
            except ModuleNotFoundError as error:
                print(f"fastlin: no pictures: {error}", file=sys.stderr)


def _value(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is TOML or, where it is not, a word. The word none means None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set: got {text!r}, wants NAME=VALUE")
    if value.lower() == "none":
        return name, None
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _swept(texts: Sequence[str]) -> tuple[str, list[Any]] | None:
    """FIELD=V1,V2,...: values are TOML or words, as those of --set; commas within brackets belong to a value."""
    if len(texts) > 1:
        raise ValueError(f"--sweep: got {len(texts)} fields, wants one")
    if not texts:
        return None
    field, equals, rest = texts[0].partition("=")
    if not equals or not field or not rest:
        raise ValueError(f"--sweep: got {texts[0]!r}, wants FIELD=V1,V2,...")
    values: list[str] = []
    for part in rest.split(","):
        if values and any(values[-1].count(a) > values[-1].count(b) for a, b in ("[]", "{}")):
            values[-1] += f",{part}"
        else:
            values.append(part)
    return field, [_value(f"{field}={value}")[1] for value in values]


def _add_reproduce(commands: Any) -> None:
    from fastlin.figures import names

    description = "Train every cell of a figure and draw it. Run the same command again to resume after a stop."
    command = _add(commands, "reproduce", _reproduce, "train and draw figures of the papers, with theory", description)
    command.add_argument("figure", metavar="FIGURE", help=f"a figure, or a group of figures: {names.described()}")
    scales = (
        "quick, or paper: 50 trials × 20,000 steps × batch 8192; for ff 5 trials × 5000 steps per phase × batch 5000 "
        "(default: quick)"
    )
    command.add_argument("--scale", default="quick", help=scales)
    _add_lengths(command, "context lengths of figures over n, in place of their settings'")
    command.add_argument("--preset", default="tuned", help="paper, authors or tuned (default: tuned)")
    command.add_argument("--seed", type=int, default=0, metavar="S")
    where = command.add_mutually_exclusive_group()
    jobs = (
        "number of single-threaded processes of a local dask cluster (default: torch's number of threads); "
        "1 trains the cells one after another in this process"
    )
    where.add_argument("--jobs", type=int, metavar="J", help=jobs)
    scheduler = "a running dask cluster: the address or the file of its scheduler"
    where.add_argument("--dask", metavar="ADDRESS|FILE", help=scheduler)
    shard = "train only every N-th cell, starting at cell I, counted from 0"
    command.add_argument("--shard", type=_shard, metavar="I/N", help=shard)
    command.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/SCALE)")
    plots.add_options(command)


def _shard(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"got {text!r}, wants I/N with integers 0 <= I < N")
    return index, count


def _reproduce(options: argparse.Namespace) -> None:
    from fastlin.figures import names, status, sweep
    from fastlin.figures.reproduce import Request, reproduce

    plots.check_installed()
    out = options.out or Path("runs") / options.scale
    request = Request(options.scale, options.preset, options.seed, options.jobs, lengths=options.n, shard=options.shard)
    figures = names.named(options.figure)
    if options.figure in names.CLAIMS:
        _claims(options, request, out)
        return
    cluster: Any = nullcontext() if options.dask is None else sweep.cluster_at(options.dask)
    with cluster as client, status.Line(out) as line:
        try:
            draw = partial(plots.panel, out, **plots.chosen(options))
            records = reproduce(figures, out, request, client=client, drawn=draw, ended=line.ended, tick=line.show)
        except (KeyboardInterrupt, SystemExit) as stop:
            line.close()
            print(f"fastlin: stopped; rerun the same command to resume {out}", file=sys.stderr)
            raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    failed = [text for record in records for text in _show_record(record, out)]
    if failed:
        raise ValueError("cells failed; rerun the same command to retry them:\n" + "\n".join(failed))


def _show_record(record: dict[str, Any], out: Path) -> list[str]:
    """Print the table of a figure and the paths of its files; returns its failed cells with their errors."""
    from fastlin.figures import report
    from fastlin.figures.panel_files import ENDED

    cells = record["cells"]
    ended = sum(cell["state"] in ENDED for cell in cells)
    if ended < len(cells):
        print(f"{record['title']}: {ended} of {len(cells)} cells; the rest belong to other shards")
    else:
        width = _tables.terminal_width()
        print(_tables.wrapped(record["title"], width), report.as_table(record, width), sep="\n", end="")
        print(*(out / f"{record['name']}.{suffix}" for suffix in ("csv", "md", "pdf", "svg", "png")), sep="\n")
    return [f"{record['name']} {cell['key']}: {cell['error']}" for cell in cells if cell["state"] == "failed"]


def _show_claim(entry: dict[str, Any]) -> None:
    from fastlin.figures import claims

    print(_tables.wrapped(claims.line(entry), _tables.terminal_width()), flush=True)


def _claims(options: argparse.Namespace, request: Any, out: Path) -> None:
    from fastlin.figures import claims, names, reproduce

    name = options.figure
    given = (request.jobs, request.lengths, request.shard, options.dask)
    if request.preset != "tuned" or any(value is not None for value in given):
        raise ValueError(
            f"{name}: got --preset, --jobs, --dask, --shard or -n, wants none: "
            "it trains a few models with the preset tuned"
        )
    module = names.CLAIMS[name]
    with reproduce.locked(out):
        effort = request.claims(module.EFFORT)
        record = module.compute(out, **effort, report=_show_claim)
        print(*claims.write(record, out, name), *plots.panel(out, name, **plots.chosen(options)), sep="\n")


def _plot(options: argparse.Namespace) -> None:
    from fastlin.figures import names, own
    from fastlin.figures.panel_files import panels_of
    from fastlin.figures.reproduce import close_panels
    from fastlin.training import table

    folder = options.folder
    claims = [name for name in names.CLAIMS if (folder / f"{name}.json").exists()]
    records = panels_of(folder, empty=bool(claims) or table.holds_runs(folder))
    complete = close_panels(folder, names.figures())
    for name in [*complete, *claims]:
        print(*plots.panel(folder, name, **plots.chosen(options)), sep="\n")
    complete += own.close(folder, records)
    if table.holds_runs(folder) or any(record.get("runs") for record in records):
        for path in plots.experiment(folder, **plots.chosen(options)):
            print(path)
    for record in records:
        if record["name"] not in complete:
            print(f"{record['name']}: not all cells have ended; not drawn", file=sys.stderr)


def _status(options: argparse.Namespace) -> None:
    from fastlin.figures import status

    sys.stdout.write(status.as_text(options.folder, _tables.terminal_width()))
