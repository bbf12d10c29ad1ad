"""The `fastlin` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
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
    from fastlin.experiments.config import check_lengths

    try:
        return check_lengths("N", [int(part) for part in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,5: {error}") from None


def _shard(text: str) -> tuple[int, int]:
    names = {
        "slurm": ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT"),
        "torchrun": ("RANK", "WORLD_SIZE"),
    }.get(text)
    wanted = "wants I/N with integers 0 <= I < N, slurm or torchrun"
    try:
        if names is None:
            place, count = map(int, text.split("/"))
        else:
            values = [int(os.environ[name]) for name in names]
            place, count = values if text == "torchrun" else ((values[0] - values[1]) // values[2], values[3])
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"got {text}, but {error.args[0]} is not set") from None
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"got {text!r}, {wanted}") from None
    if not 0 <= place < count:
        raise argparse.ArgumentTypeError(f"got {place}/{count}, {wanted}")
    return place, count


def _theory(options: argparse.Namespace) -> None:
    from fastlin import plots
    from fastlin.experiments import config, curves

    if options.out is not None:
        plots.check_installed()
    setting = config.load(options.config)
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
        description="Train at every context length of a config. Ctrl-C leaves a checkpoint; --resume goes on from it. "
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
    command.add_argument("--model", default="full", help="reduced, full, separate, stack or softmax (default: full)")
    command.add_argument("--layers", type=int, default=1, metavar="L", help="of a stack")
    command.add_argument("--attention-heads", type=int, default=1, metavar="H")
    command.add_argument("--prompt-tokens", type=int, default=1, metavar="T", help="prompt tokens of each task")
    command.add_argument("--preset", default="tuned", help="paper, authors or tuned (default: tuned)")
    for name, kind in (("steps", int), ("batch", int), ("lr", float)):
        command.add_argument(f"--{name}", type=kind, help="in place of the preset's")
    command.add_argument("--trials", type=int, default=1, metavar="T", help="independent initialisations (default: 1)")
    command.add_argument("--seed", type=int, default=0, metavar="S")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="values",
        metavar="NAME=VALUE",
        help="any other value of the preset, as TOML writes it: --set schedule=cosine --set clip=0.5",
    )
    command.add_argument("--dtype", default="float32", help="float32 or float64 (default: float32)")
    command.add_argument("--backend", default="auto")
    command.add_argument(
        "--device", default="cpu", help="cpu, or cuda: under torchrun each process has its own GPU (default: cpu)"
    )
    command.add_argument(
        "--shards", type=int, metavar="S", help="pieces of a batch: the same bits for any number of processes"
    )
    command.add_argument("--memory", metavar="BYTES", help="of a step, such as 500M or 4G: trials go in chunks (2G)")
    command.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/CONFIG)")
    command.add_argument("--resume", action="store_true", help="go on with what is in the folder, to the same bits")
    command.set_defaults(run=_train)


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="train and draw a figure of the paper, on its theory",
        description="Train every cell of a panel and draw it. A call that was stopped goes on where it was.",
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
    command.add_argument("--jobs", type=int, metavar="J", help="processes (default: one for each thread)")
    command.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="only the I-th of N shares of the cells, from 0; slurm: the one of a job array's task; torchrun: the one "
        "of its rank (default: share with all other calls on the same folder, whatever is left)",
    )
    command.add_argument(
        "--patience",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="take over a cell whose worker, on another machine or stuck, gave no sign of life for so long "
        "(default: 180, at least 10)",
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
    from fastlin.experiments import forgetting, prompts, report, status
    from fastlin.experiments.reproduce import Figure, Request, reproduce

    plots.check_installed()
    out = options.out or Path("runs") / options.scale
    how = {"shard": options.shard, "patience": options.patience}
    request = Request(options.scale, options.preset, options.seed, options.jobs, **how)
    second = {**{name: [figure] for name, figure in forgetting.FIGURES.items()}, "ff": [*forgetting.FIGURES.values()]}
    name = options.figure
    if name == "ff-claims":
        _forgetting_claims(request, out)
        return
    panels: list[Figure] = [*second[name]] if name in second else [*prompts.named(name, [*second, "ff-claims"])]
    if not panels:
        _claims(request, out)
        return
    records: list[dict[str, Any]] = []

    def draw(panel: str) -> None:
        plots.panel(out, panel)

    with status.Line(out) as line:
        try:
            records = reproduce(panels, out, request, drawn=draw, ended=line.ended, tick=line.show)
        except (KeyboardInterrupt, SystemExit) as stop:
            line.close()
            print(f"fastlin: stopped; the same command goes on from {out}", file=sys.stderr)
            raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    for record in records:
        ended = sum(cell["state"] in ("done", "failed") for cell in record["cells"])
        if ended < len(record["cells"]):
            print(f"{record['title']}: {ended} of {len(record['cells'])} cells; the others are of other shards")
            continue
        print(f"{record['title']}", record.get("table") or report.as_table(record), sep="\n", end="")
        print(*(out / f"{record['name']}.{suffix}" for suffix in ("csv", "md", "pdf", "svg", "png")), sep="\n")
    failed = [(record["name"], cell) for record in records for cell in record["cells"] if cell["state"] == "failed"]
    if failed:
        texts = [f"{panel} {cell['key']}: {cell['error']}" for panel, cell in failed]
        raise ValueError("cells failed, the same command tries them again:\n" + "\n".join(texts))


def _claims(request: Any, out: Path) -> None:
    from fastlin import plots
    from fastlin.experiments import claims
    from fastlin.experiments.reproduce import locked

    if request.preset != "tuned" or request.jobs is not None or request.shard is not None:
        raise ValueError(
            "claims: got --preset or --jobs or --shard, wants none: it trains a few cells, with the preset tuned"
        )
    with locked(out):
        record = claims.compute(out, **request.claims(), report=lambda entry: print(claims.line(entry), flush=True))
        print(*claims.write(record, out), *plots.claims(out), sep="\n")


def _forgetting_claims(request: Any, out: Path) -> None:
    from fastlin import plots
    from fastlin.experiments import claims
    from fastlin.experiments.forgetting.claims import compute
    from fastlin.experiments.reproduce import locked

    if request.preset != "tuned" or request.jobs is not None or request.shard is not None:
        raise ValueError(
            "ff-claims: got --preset or --jobs or --shard, wants none: it trains a few models, preset tuned"
        )
    with locked(out):
        effort = request.claims("forgetting")
        record = compute(out, **effort, report=lambda entry: print(claims.line(entry), flush=True))
        print(*claims.write(record, out, "ff-claims"), *plots.panel(out, "ff-claims"), sep="\n")


def _plot(options: argparse.Namespace) -> None:
    from fastlin import plots
    from fastlin.experiments.panel_files import panels_of

    claims, second = ((options.folder / f"{name}.json").exists() for name in ("claims", "ff-claims"))
    names = [record["name"] for record in panels_of(options.folder, empty=claims or second)]
    for name in [*names, *(["ff-claims"] if second else [])]:
        print(*plots.panel(options.folder, name), sep="\n")
    if claims:
        print(*plots.claims(options.folder), sep="\n")


def _status(options: argparse.Namespace) -> None:
    from fastlin.experiments import status

    sys.stdout.write(status.as_text(options.folder))


def _train(options: argparse.Namespace) -> None:
    from fastlin import plots
    from fastlin.experiments import cells, config
    from fastlin.training import team

    setting = config.load(options.config)
    if options.n:
        setting = setting.with_lengths(options.n)
    out = options.out or Path("runs") / Path(options.config).stem
    names = ("model", "layers", "attention_heads", "prompt_tokens", "preset", "steps", "batch", "lr", "trials", "seed")
    given = {name: getattr(options, name) for name in (*names, "dtype", "backend", "shards", "memory")}
    values = dict(map(_value, options.values))
    for name in {**given, "device": None, "n": None, "out": None, "resume": None}:
        if name in values:
            raise ValueError(f"--set: got {name}, which has a flag of its own: --{name.replace('_', '-')}")
    headings = iter([cells.heading()])

    def report(row: dict[str, Any]) -> None:
        print(*headings, cells.line(row), sep="\n", flush=True)

    with team.joined(options.device) as device, team.folder(out) as own:
        first = own == out
        try:
            cells.train_cells(
                setting,
                cells.regimes(options.regime),
                own,
                options.resume or team.restarted(),
                report if first else lambda row: None,
                device=device,
                **given,
                **values,
            )
        except KeyboardInterrupt:
            if first:
                print(f"fastlin: stopped; --resume goes on from {out}", file=sys.stderr)
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
