"""Own experiments, as a panel: `fastlin train`, and `train_panel` from Python.

    DIR/REGIME-nN/                 the run of a cell; of a sweep DIR/FIELD=VALUE/REGIME-nN/
    DIR/risk.json                  the panel: its cells, closed forms, caption and rows of the table
    DIR/risk.csv, .md              the table
    DIR/risk.png, .pdf, .svg       risk against n, or against the swept field
    DIR/summary.json, training.*   risks of all trials, and risk against steps; of a sweep in DIR/FIELD=VALUE/

All values are checked before the first cell trains. The record is replaced whenever a cell ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastlin import settings
from fastlin._checks import real
from fastlin._files import FileError, create_folder, locked, write_json, write_text
from fastlin._tables import csv_text
from fastlin.data.sources import TaskMixture
from fastlin.figures import panel_files, report
from fastlin.figures.curves import line_lengths
from fastlin.figures.forgetting.axes import Axes, PlottedCurve
from fastlin.figures.own_plan import NAME, ExperimentPlan, Point, Sweep, config_of, places_of, plan_of, text
from fastlin.figures.panel_files import ENDED
from fastlin.figures.panels import AXES, closed_forms
from fastlin.settings import Config
from fastlin.training import callbacks, table, team
from fastlin.training.record import check_folder, first_difference
from fastlin.training.regimes import Regime, named
from fastlin.training.team import Team, team_of

_PATH = f"{NAME}.json"
_RISK = "population risk / E[y²]"
_LINE_POINTS = 60
# An axis with a larger ratio of its ends is logarithmic; that of n as in `fastlin theory`.
_FACTOR, _FACTOR_OF_N = 8.0, 20.0


def train_panel(
    task: str | Path | Config | TaskMixture,
    regimes: str | Regime | Sequence[str | Regime],
    out: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    sweep: Sweep | None = None,
    title: str | None = None,
    resume: bool = False,
    report: Callable[[dict[str, Any]], object] = lambda row: None,
    watch: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train every regime at every context length, and at every value of a swept field; write record and tables.

    Parameters
    ----------
    task : CONFIG.toml or the name of one that ships, Config, or TaskMixture
    regimes : str, Regime or sequence of these
        Rows of `fastlin.training.regimes.REGIMES` by name, or of the user.
    out : path
        The module's docstring lists its files. `fastlin.plots.experiment(out)` draws them.
    lengths : sequence of int, optional
        Context lengths n; required with a TaskMixture, else in place of the config's.
    sweep : tuple (field, values), optional
        A field of the task mixture as CONFIG.toml has it (`fastlin.settings.SWEPT`), or an option.
    title : str, optional
        Stands above pictures and tables, in place of the config's name.
    resume : bool
        Read the cells of the folder that have ended, and resume the one that was stopped, to the same bits.
    report : callable
        Called with the row of `summary.json` of each cell that ends; of a sweep with the field first.
    watch : "tensorboard" or "wandb", optional
        Log the records of each cell (`fastlin.training.callbacks`).
    **options
        Those of `fastlin.train`: trials, steps, batch, lr, seed, model, ...

    Returns
    -------
    dict
        The record in `out`/risk.json. `cells` has the `row` of each cell: regime, n, risk, theory, excess_percent, ...
        `lines` has the closed forms over E[y²]: `x`, and `curves` by name. Of a sweep at several n, `axes` has all
        curves in place of `lines`.

    Examples
    --------
    >>> import tempfile
    >>> from fastlin.figures.own import train_panel
    >>> mix, few = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]]), {"steps": 5, "batch": 64}
    >>> with tempfile.TemporaryDirectory() as out:
    ...     record = train_panel(mix, ["plain", "joint"], out, lengths=[2, 5], **few)
    >>> [(cell["row"]["regime"], cell["row"]["n"]) for cell in record["cells"]]
    [('plain', 2), ('plain', 5), ('joint', 2), ('joint', 5)]
    """
    if watch is not None:
        callbacks.check_watch(watch)
        if options.get("callback") is not None:
            raise ValueError("callback: got one beside watch, wants either")
    real("checkpoint_seconds", options.get("checkpoint_seconds", 0.0), 0.0)
    names = [regimes] if isinstance(regimes, (str, Regime)) else regimes
    config = config_of(task, lengths)
    if title is not None:
        config = replace(config, name=title, values={**config.values, "name": title})
    plan = plan_of(config, [named(regime) for regime in names], sweep, options)
    first = next(iter(plan.runs.values()))
    processes = team_of(first.device, first.distributed)
    busy = FileError(f"{out}: another process is training in this folder; wants a folder for each command, or wait")
    with locked(Path(out), busy) if processes.first else nullcontext():
        return _trained(plan, Path(out), processes, resume, report, watch)


def _trained(
    plan: ExperimentPlan, out: Path, processes: Team, resume: bool, report: Callable[..., object], watch: str | None
) -> dict[str, Any]:
    record: dict[str, Any] = processes.broadcast(lambda: _opened(plan, out, resume))
    entries = {cell["key"]: cell for cell in record["cells"]}
    cells = {cell.key: cell for cell in plan.cells}
    with nullcontext(out) if processes.first else team.folder(out) as folder:
        for point in plan.points:
            swept = {} if plan.field is None else {plan.field: point.value}

            def ended(row: dict[str, Any], point: Point = point, swept: dict[str, Any] = swept) -> None:
                key = f"{point.folder}{row['folder']}"
                entries[key].update(state="done", seconds=row["seconds"], row={**swept, **cells[key].row(row)})
                write_json(folder / _PATH, record)
                if processes.first:
                    report({**swept, **row})

            def watching(cell: str, point: Point = point) -> Any:
                name = plan.points[0].config.name
                assert watch is not None
                return callbacks.watch_cell(watch, out, name, point.folder + cell)

            watched = None if watch is None else watching
            config = point.config
            if plan.field is not None:
                config = replace(config, name=f"{config.name}, {plan.field} = {text(point.value)}")
            table.train_cells(config, plan.rows, folder / point.folder, resume, ended, watched, **point.options)
        _finish(folder, record)
    return record


def close(out: Path, records: Sequence[dict[str, Any]]) -> list[str]:
    """Write missing tables of a folder of `fastlin train`; returns the names of the records whose cells have ended."""
    complete = []
    for record in records:
        if record.get("runs") and all(cell["state"] in ENDED for cell in record["cells"]):
            complete.append(record["name"])
            if not record["caption"]:
                _finish(out, record)
    return complete


def _opened(plan: ExperimentPlan, out: Path, resume: bool) -> dict[str, Any]:
    """Check the folders of all cells, and write the record; cells of earlier calls that are done stay in it."""
    for key, run in plan.runs.items():
        check_folder(out / key, run.describe(), resume)
    path, asked = out / _PATH, _asked(plan)
    kept: list[dict[str, Any]] = []
    ended: dict[str, dict[str, Any]] = {}
    if path.exists():
        earlier = panel_files.read(path)
        ended = {cell["key"]: cell for cell in earlier["cells"] if cell["row"] is not None}
        kept = [cell for key, cell in ended.items() if key not in plan.runs]
        difference = first_difference(earlier["asked"], asked) if kept else None
        if difference is not None:
            name, theirs, own = difference
            raise FileError(
                f"{path}: was made with {name} = {theirs!r}, this call has {own!r}; "
                "wants the same to add regimes or context lengths, or another folder"
            )
    record = _new_record(plan, asked, kept)
    # The folders have been checked: cells that ended have the same rows again.
    record["cells"] = [ended.get(cell["key"], cell) for cell in record["cells"]]
    if all(cell["row"] is not None for cell in record["cells"]) and len(ended) == len(record["cells"]):
        record |= {name: earlier[name] for name in ("caption", "axes") if name in earlier}
    write_json(create_folder(out) / _PATH, record)
    return record


def _new_record(plan: ExperimentPlan, asked: Mapping[str, Any], kept: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of a plan whose cells wait, behind cells of earlier calls."""
    config, field = plan.points[0].config, plan.field
    rows = [cell["row"] for cell in kept]
    lengths = sorted({*plan.lengths, *(row["n"] for row in rows)})
    named_forms = [(row["regime"], row["curve"]) for row in rows] + [(cell.regime, cell.curve) for cell in plan.cells]
    forms = dict.fromkeys(regime for regime, _ in named_forms) | {
        r: form for r, form in named_forms if form is not None
    }
    at_one_n = "" if len(lengths) > 1 else f", n = {lengths[0]}"
    title = f"{config.name}{at_one_n}" if field is None else f"{config.name}: sweep of {field}{at_one_n}"
    opening: dict[str, Any] = {"runs": ".", "remarks": [config.description] if config.description else []}
    if field is not None and len(lengths) > 1:
        opening["axes"] = [_axes(plan, regime, form, lengths) for regime, form in forms.items()]
    else:
        opening |= _axis(plan, lengths, [form for form in dict.fromkeys(forms.values()) if form])
    record = panel_files.new_record(NAME, title, asked, opening, plan.cells)
    for cell in record["cells"]:
        cell["steps"] = plan.runs[cell["key"]].steps
    record["cells"] = [*kept, *record["cells"]]
    record["drawn"] = "axes" in record or len({cell["place"] for cell in record["cells"]}) > 1
    return record


def _asked(plan: ExperimentPlan) -> dict[str, Any]:
    """What decides the numbers, beside regimes and context lengths; lists where a sweep has several values."""
    described = [run.describe() for run in plan.runs.values()]
    fixed = ("preset", "seed", "trials", "steps", "batch")
    asked: dict[str, Any] = {}
    for name in [*fixed, *plan.points[0].options]:
        found = [run[name] for run in described if name in run and name not in asked]
        distinct = [value for i, value in enumerate(found) if value not in found[:i]]
        if distinct:
            asked[name] = distinct[0] if len(distinct) == 1 else distinct
    values = {name: asked.pop(name) for name in list(asked) if name not in fixed}
    task = {name: plan.points[0].config.values[name] for name in settings.SWEPT if name != plan.field}
    sweep = None if plan.field is None else {plan.field: [point.value for point in plan.points]}
    as_read: dict[str, Any] = json.loads(json.dumps({**asked, "values": values, "task": task, "sweep": sweep}))
    return as_read


def _axis(plan: ExperimentPlan, lengths: Sequence[int], forms: Sequence[str]) -> dict[str, Any]:
    """Axis and closed forms of a panel: against n, or at one n against the swept field."""
    points = plan.points
    if plan.field is None:
        x: list[float] = [*line_lengths(lengths)] if len(lengths) > 1 else [*lengths]
        at = [(points[0].config, int(n)) for n in x]
        return {
            "axis": "n",
            "axis_label": AXES["n"],
            "scale": _scale(lengths, _FACTOR_OF_N),
            "lines": closed_forms(forms, x, at),
        }
    numbers = places_of([point.value for point in points])
    scale = None if numbers is None else _scale(numbers, _FACTOR)
    about: dict[str, Any] = {"axis": plan.field, "axis_label": plan.field, "scale": scale}
    about["ticks"] = None if numbers is not None else [text(point.value) for point in points]
    at = [(point.config, lengths[0]) for point in sorted(points, key=lambda point: point.place)]
    x = sorted(point.place for point in points)
    if numbers is not None and plan.field in settings.SWEPT:
        x = _between(x, scale, whole=plan.field == "dimension")
        values = [int(place) if plan.field == "dimension" else place for place in x]
        at = [(points[0].config.with_value(plan.field, value), lengths[0]) for value in values]
    return {**about, "lines": closed_forms(forms, x, at)}


def _between(places: Sequence[float], scale: str | None, whole: bool) -> list[float]:
    """Places for a smooth line, with those given."""
    first, last = places[0], places[-1]
    shares = [i / (_LINE_POINTS - 1) for i in range(_LINE_POINTS)]
    x = [first * (last / first) ** s if scale == "log" else first + (last - first) * s for s in shares]
    return sorted({*(float(round(place)) for place in x), *places} if whole else {*x[1:-1], *places})


def _scale(places: Sequence[float], factor: float) -> str | None:
    """Scale of an axis whose ends may have this ratio before it becomes logarithmic."""
    low, high = min(places), max(places)
    if low > 0:
        return "log" if high > factor * low else None
    # The scale is linear up to 1.
    counts = all(float(place).is_integer() for place in places)
    return "symlog" if low == 0 and counts and high > factor else None


def _axes(plan: ExperimentPlan, regime: str, form: str | None, lengths: Sequence[int]) -> dict[str, Any]:
    """A regime against n, with a closed form for each value of a field of the task, or one for all options."""
    of_task = plan.field in settings.SWEPT
    x = line_lengths(lengths)
    curves = []
    for i, point in enumerate(plan.points if of_task else plan.points[:1]):
        for drawn in closed_forms([form] if form else [], x, [(point.config, n) for n in x])["curves"].values():
            label = f"{plan.field} = {text(point.value)}" if of_task else f"theory: {drawn['label']}"
            curves.append(PlottedCurve(label, [*map(float, x)], drawn["normalised"], colour=i))
    return {
        **asdict(Axes(regime, AXES["n"], _RISK, curves)),
        "ticks": [*lengths],
        "scale": _scale(lengths, _FACTOR_OF_N),
    }


def _add_points(record: dict[str, Any]) -> None:
    """Add the risks of the cells to the axes of their regimes."""
    ((field, values),) = record["asked"]["sweep"].items()
    rows = report.done(record)
    for axes in record["axes"]:
        axes["curves"] = [curve for curve in axes["curves"] if not curve["points"]]
        for i, value in enumerate(values):
            own = sorted((r for r in rows if (r["regime"], r[field]) == (axes["title"], value)), key=lambda r: r["n"])
            if own:
                x, y = [float(row["n"]) for row in own], [row["normalised"] for row in own]
                colour = i + (field not in settings.SWEPT)
                curve = PlottedCurve(f"{field} = {text(value)}", x, y, points=True, colour=colour)
                axes["curves"].append(asdict(curve))


def _finish(out: Path, record: dict[str, Any]) -> None:
    """Write record, table and caption of an experiment whose cells have ended."""
    field = next(iter(record["asked"]["sweep"] or [None]))
    points = "Points: the best trial. Lines: closed forms of one layer." if "axes" in record else report.POINTS
    record["caption"] = [*record["remarks"], f"{report.effort(record['asked'])} {points}", *report.findings(record)]
    if "axes" in record:
        _add_points(record)
    rows = report.done(record)
    write_text(out / f"{NAME}.csv", csv_text(rows[0], ([_cell(v) for v in row.values()] for row in rows)))
    pictures = [f"![Risk]({NAME}.png)"] if record["drawn"] else []
    pictures += [] if field else ["![Risk against steps](training.png)"]
    lines = "\n".join(f"- {sentence}" for sentence in record["caption"])
    parts = [f"# {record['title']}", *pictures, lines, report.as_markdown(record, field)]
    write_text(out / f"{NAME}.md", "\n\n".join(parts))
    # The record last: without its caption, `close` writes all of them.
    write_json(out / _PATH, record)


def _cell(value: Any) -> Any:
    return text(value) if isinstance(value, (list, dict)) else value
