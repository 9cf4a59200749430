"""`bench validate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from harness.answers.commands import real, short_path
from harness.answers.table import aligned, laid
from harness.cli.options import ALL, FIGURES, RESULTS, count, examples
from harness.cli.terminal import Terminal, screen
from harness.cli.values import PATH, POSITIVE, SOME_SEEDS, TARGET
from harness.policy import fields
from harness.policy.types import UserError

if TYPE_CHECKING:
    import pandas as pd

    from harness.validate.names import Skipped
    from harness.validate.predicted import Plan
    from harness.validate.staggered import Read

TORCH = "torch"
KINDS = {  # what the simulator is compared with
    "servers": "--engine NAME, which runs servers",
    "files": "files of measured runs",
    "runs": "a folder of stored runs",
    "card": "a folder of make gpu",
    "log": "--log FILE, the start of a server",
}
TAKEN = {  # options that not every kind takes, each with the kinds that take it
    **dict.fromkeys("runs full counts systems loads seeds window_s again".split(), ("servers",)),
    "models": ("servers", "log"),
    "gpu": ("log",),
    "out": ("servers", "files"),
    "shape": ("files",),
    "page": ("files", "runs", "card"),
    "table": ("servers", "runs", "card"),
    "slo": ("servers", "runs"),
}
INVALID = "Runs that did not measure their servers are left out."


@click.command(
    epilog=examples(
        "bench validate",
        "bench validate mine.csv -o /tmp/validate",
        "bench validate --engine llamacpp --table results/cpu/llamacpp-cpu.toml -o results/cpu/validate",
        "bench validate results/h200",
        "bench validate results/h200/torch --table results/h200/h200-measured.toml",
        "bench validate --engine torch --table results/cpu/torch/torch-cpu.toml -o results/cpu/torch/validate",
        "bench validate --log vllm.log --gpu h100",
    )
)
@click.argument("folders", type=PATH, nargs=-1, envvar="MEASURED_DIR", metavar="[FOLDER|FILE.csv]...")
@click.option(
    "--log",
    type=PATH,
    metavar="FILE",
    help="Start-up log of a vLLM server: its weights and KV memory beside the simulator's.",
)
@click.option("--gpu", metavar="KIND", help="With --log: the server's kind of GPU, which its log does not name.")
@click.option("--engine", metavar="NAME", help="Run the same specs on an engine's servers and on the simulator.")
@click.option("--table", metavar="FILE", help="Cost table of the measured machine, by bench calibrate.")
@click.option(
    "--full",
    is_flag=True,
    help="With --engine torch: every system, 4 and 8 models, windows of 60 s; the aims are judged.",
)
@click.option(
    "--models",
    metavar="SHAPE",
    default="llama-small",
    show_default=True,
    help="With --engine: the shape of "
    "every model; of torch, the table's first. With --log: the model, instead of the log's.",
)
@click.option("--counts", metavar="LIST", default="2,4,8", show_default=True, help="With --engine: numbers of models.")
@click.option("--systems", metavar="LIST", help="With --engine: NAME[:PRESET][+FIELD=VALUE...] with commas.")
@click.option(
    "--loads",
    metavar="LIST",
    default="30,70,100",
    show_default=True,
    help="With --engine: per cent of the saturated rate.",
)
@click.option("--seeds", type=SOME_SEEDS, metavar="N", default=5, show_default=True, help="With --engine: repeats.")
@click.option(
    "--window-s", type=POSITIVE, metavar="S", default=10.0, show_default=True, help="With --engine: seconds of a run."
)
@count("--again", "With --engine: retries of an invalid run.", least=0, default=0)
@click.option(
    "--slo",
    metavar="RULE",
    help="SLO rule.  [default: with --engine 10 x a short prompt's TTFT and a start, 8 x a step; of stored runs TTFT "
    "0.5 s, TPOT 50 ms]",
)
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="STEM",
    help="Path of figure and CSV without their endings.  [default: plots/out/validate]",
)
@click.option("--runs", type=PATH, metavar="FOLDER", help="With --engine: folder for runs.  [default: results]")
@click.option(
    "--shape",
    type=PATH,
    metavar="FILE.toml",
    help="Shapes of models that bench list models lacks, as workloads/shapes.toml.",
)
@click.option("--page", type=TARGET, metavar="FILE.md", help="Write the result as a page.")
@click.option("--no-plot", is_flag=True, help="Draw no figure and write no CSV.")
@ALL
def validate(
    *,
    folders: tuple[Path, ...],
    engine: str | None,
    out: Path | None,
    runs: Path | None,
    shape: Path | None,
    page: Path | None,
    no_plot: bool,
    every: bool,
    log: Path | None,
    gpu: str | None,
    **asked: Any,
) -> None:
    """Compare the simulator with measured end-to-end runs.

    Measured runs come from the folders of MEASURED_DIR, or any CSV of the same columns. A folder may also hold
    stored runs of engine torch, or measurements by make gpu of two models at once.

    --engine measures servers now, and compares the ranks of systems, then attainment, then latencies. --log reads the
    start of one server of yours.
    """
    kind = "log" if log is not None else _kind(folders, engine)
    for param in click.get_current_context().command.params:
        kinds = TAKEN.get(name := str(param.name), KINDS)
        if kind not in kinds and _typed(name):
            raise UserError(f"{param.opts[-1]} is for {' and for '.join(KINDS[taken] for taken in kinds)}")
    if log is not None:
        if _typed("folders") or engine is not None:
            raise UserError("--log compares one server's start: no files or --engine beside it")
        _started(log, asked["models"] if _typed("models") else None, gpu)
    elif engine is not None:
        _predicted(engine, out, real(runs or RESULTS), plot=not no_plot, every=every, **asked)
    elif not folders:
        raise UserError(
            "bench validate FOLDER, or MEASURED_DIR, names a folder of measured runs; --engine runs servers"
        )
    elif kind == "files":
        _measured(folders, out, shape, page, plot=not no_plot, every=every)
    else:
        _compare_folder(folders[0], kind, asked["table"], asked["slo"], page, every=every)


def _stem(out: Path | None, name: str) -> Path:
    """Return the path of a figure without its ending, and make its folder; `name` is used if `out` is None."""
    stem = real(out.with_suffix("") if out else FIGURES / name)
    stem.parent.mkdir(parents=True, exist_ok=True)
    return stem


def _kind(folders: tuple[Path, ...], engine: str | None) -> str:
    """Return the kind of comparison, a key of KINDS, from the option --engine or the contents of the only folder."""
    from harness.validate import corun, stored

    if engine is not None or len(folders) != 1:
        return "servers" if engine is not None else "files"
    return "runs" if stored.holds(folders[0]) else "card" if corun.holds(folders[0]) else "files"


def _started(log: Path, model: str | None, gpu: str | None) -> None:
    """Print the weights and KV memory that a server's start-up log reports, next to the simulator's values."""
    from harness.validate import starts

    start = starts.read(log)
    ours = starts.ours(start, model, gpu)
    table = aligned(list(starts.rows(start, ours)))
    click.echo("\n".join((*starts.heads(start, ours, gpu), *table, *starts.notes(ours))))


def _compare_folder(
    folder: Path, kind: str, table: str | None, slo: str | None, page: Path | None, *, every: bool
) -> None:
    """Compare the simulator with a folder's stored runs, or with its measurements of two models at once."""
    from functools import partial

    from harness.rows.record import write_bytes
    from harness.validate import corun, stored

    if kind == "runs" and table is None:
        raise UserError(f"{short_path(folder)} holds stored runs, which need their machine's cost table: --table FILE")
    with Terminal() as teller:
        if kind == "runs":
            progress = partial(teller.progress, "stored runs")
            seen = stored.compare(folder, str(table), slo or stored.SLO, progress)
        else:
            seen = corun.compare(folder, table)
    screen([seen.answer, *aligned(seen.rows), seen.note, *seen.predictions, seen.how], every=every)
    if page is not None:
        options = [f"--table {table}"] * (table is not None) + [f"--slo {slo}"] * (slo is not None)
        command = " ".join(["bench validate", short_path(folder), *options, f"--page {short_path(real(page))}"])
        write_bytes(real(page), seen.page(command, laid).encode())
        click.echo(short_path(real(page)))


def _measured(
    folders: tuple[Path, ...], out: Path | None, shape: Path | None, page: Path | None, *, plot: bool, every: bool
) -> None:
    """Compare the simulator with files of measured runs; print the result, write the page and draw the figures."""
    from harness.rows.record import write_bytes
    from harness.validate import idle, measured, staggered
    from harness.validate import page as pages
    from harness.validate import validate as judge
    from workloads.models import read_shapes

    shapes = read_shapes(shape) if shape else {}
    shared = [path for folder in folders for path in staggered.files(folder)]
    ran, lacking = _staggered({path: staggered.read(path, shapes) for path in shared})
    ramps = [line for ramp in ran for line in (ramp.path.name, *(f"  {note}" for note in ramp.notes))]
    aims = [f"{ramp.path.name}: {staggered.met(ramp.notes)}" for ramp in ran]
    if len(folders) == 1 and folders[0] in shared:
        screen(["; ".join(aims), *(f"skipped {skip}" for skip in lacking), *ramps], every=every)
        sys.stdout.flush()
        if plot:
            _draw_staggered(ran, out)
        return
    runs = measured.read_all(folders, shapes, {path.name for path in shared})
    skipped = [*runs.skipped, *lacking]
    with Terminal() as teller:
        everything = judge.points(runs.cases, lambda done, total: teller.progress("measured runs", done, total))
    frame = everything[everything["group"] == ""]
    counts = f"{len(runs.cases)} cases of {everything['file'].nunique()} files, {len(skipped)} skipped"
    rows = list(judge.scores(frame)) if len(frame) else []
    table = [*aligned(line if every else line[: judge.BRIEF] for line in rows), judge.SIGNS] if rows else []
    if groups := judge.groups(everything):
        aim = "/".join(f"{x:g}" for x in judge.GROUP_AIM)
        table += [f"quantised models and mixtures: no row was fitted on; median/P95 of errors (aim: {aim})"]
        table += [*aligned(groups), *(judge.furthest(everything) if every else ())]
    notes = [*judge.notes(frame), *(f"skipped {skip}" for skip in skipped)]
    screen([f"{judge.answer(frame)}{counts}", *table, *notes, *(ramps if every else aims)], every=every)
    sys.stdout.flush()
    if page is not None:
        ramp_notes = [note for ramp in ran for note in ramp.notes]
        text = pages.page(everything, skipped, ramp_notes, idle.footprint(), laid)
        write_bytes(real(page), text.encode())
        click.echo(short_path(real(page)))
    if plot:
        _draw_staggered(ran, None)
    if plot and len(frame):
        from plots import scatter

        command = f"bench validate {' '.join(map(short_path, folders))}"
        paths = scatter.render(scatter.runs, frame, _stem(out, "validate"), command)
        click.echo(" · ".join(short_path(path) for path in paths))


def _predicted(
    engine: str, out: Path | None, runs: Path, *, plot: bool, every: bool, slo: str | None, **asked: Any
) -> None:
    """Compare the simulator with an engine's servers, or devices, on the same specs."""
    from harness.run import realtime
    from harness.validate import predicted, ranks

    if asked["table"] is None:
        raise UserError(f"--engine {engine} needs the servers' cost table: --table FILE (bench calibrate writes one)")
    plan, skipped = _plan(engine, asked)
    with Terminal() as teller:
        ahead = realtime.duration(predicted.spans(plan, runs, slo))
        teller.say(f"{ahead} on {engine}, beside starts; runs are kept, and a second call resumes")
        comparison = predicted.predict(plan, runs, teller, slo)
    frame, void = comparison.frame, ""
    lines = [*ranks.summary(ranks.pairs(frame, comparison.attainment))]
    lines += [f"SLO {comparison.rule}; attainment: {comparison.attainment}", *comparison.notes, *skipped]
    if not len(ranks.valid(frame)):
        void = "No run on the servers is valid: all that follows comes from INVALID runs."
        lines.insert(0, void)
        frame = frame.assign(invalid=False)
    printed = list(lines)
    pairs, cells = ranks.pairs(frame, comparison.attainment), ranks.cells(frame, comparison.attainment)
    lines += aligned(list(ranks.pair_rows(pairs)))
    lines.append("attainment in %; error of the simulated latencies, beside the spread of the servers' repeats")
    lines += aligned(list(ranks.cell_rows(cells, comparison.attainment)))
    devices, attainment = fields.asked(engine).name == TORCH, comparison.attainment
    met = ranks.verdict_lines(cells, attainment, judged=plan.judged) if devices else ranks.aims(cells)
    for cell in ranks.misses(cells, attainment) if devices else ():
        reason = predicted.cause(comparison.waits, cell.condition, cell.label)
        met.append(f"{ranks.miss(cell, comparison.attainment)}{'; ' * bool(reason)}{reason}")
    screen(lines, tail=met, every=every)
    sys.stdout.flush()
    if plot and cells:
        import pandas as pd

        from harness.rows.record import write_bytes
        from harness.validate.page import compared
        from plots import scatter

        stem = _stem(out, "validate")
        who = "Torch's devices: emulated" if devices else "Servers: real"
        caption = f"{who}, {comparison.machine}. Simulator: simulated, with their cost table. {void or INVALID}"
        command = f"bench validate --engine {engine} --table {asked['table']}"
        paths = scatter.render(scatter.servers, pd.DataFrame(cells), stem, command, comparison.attainment, caption)
        page = compared(command, printed, pairs, cells, comparison.attainment, met, laid)
        write_bytes(stem.with_suffix(".md"), page.encode())
        click.echo(" · ".join(short_path(path) for path in (*paths, stem.with_suffix(".md"))))


def _plan(engine: str, asked: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """Return what is run on both an engine and the simulator, and a line for each system that cannot be run."""
    from harness.validate import predicted, tiers
    from workloads.models import named

    devices = fields.asked(engine).name == TORCH
    if asked["full"] and not devices:
        raise UserError(f"--full is a tier of --engine torch; --counts, --systems and others say what {engine} runs")
    base = (
        tiers.plan(engine, asked["table"], full=asked["full"])
        if devices
        else predicted.Plan(engine, asked["table"], named(asked["models"]))
    )
    values: dict[str, tuple[str, Any]] = {  # the field of a plan that each option sets, and its value
        "models": ("model", named(asked["models"])),
        "systems": ("systems", asked["systems"] and tuple(asked["systems"].split(","))),
        "counts": ("counts", _counts(asked["counts"])),
        "seeds": ("repeats", asked["seeds"]),
        "window_s": ("window_s", asked["window_s"]),
        "loads": ("shares", tuple(load / 100 for load in _numbers("--loads", asked["loads"]))),
        "again": ("again", asked["again"]),
    }
    plan = base._replace(**dict(value for option, value in values.items() if _typed(option)))
    return tiers.runnable(plan) if devices else (plan, [])


def _typed(option: str) -> bool:
    """Tell whether the user gave an option on the command line."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _counts(text: str) -> tuple[int, ...]:
    counts = _numbers("--counts", text)
    if bad := next((number for number in counts if number != int(number)), None):
        raise UserError(f"--counts {bad:g} is not a whole number")
    return tuple(map(int, counts))


def _numbers(option: str, text: str) -> list[float]:
    """Read the numbers above 0 of an option's list."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise UserError(f'{option} "{text}" is not a list of numbers above 0')
    return numbers


class _Ramp(NamedTuple):
    """A simulation of equal models with staggered load on one card, to compare with a measured run."""

    path: Path
    title: str
    frame: pd.DataFrame
    notes: list[str]


def _staggered(ramps: Mapping[Path, Read]) -> tuple[list[_Ramp], list[Skipped]]:
    """Simulate each measured run of equal models on one card; return the simulations, and what was skipped."""
    from harness.policy.types import Infeasible
    from harness.validate import staggered
    from harness.validate.names import Skipped

    ran, skipped = list[_Ramp](), [skip for read in ramps.values() for skip in read.skipped]
    for path, run in [(path, run) for path, read in ramps.items() for run in read.measured]:
        try:
            with Terminal() as teller:
                held = staggered.process(run)
                frame = staggered.points(run, held, lambda done, of: teller.progress("staggered ramps", done, of))
        except Infeasible as error:
            skipped.append(Skipped(path.name, 0, f"{run.load}: {error}"))
            continue
        notes = list(staggered.notes(run.load, frame, held))
        ran.append(_Ramp(path, f"{run.load} ({path.name})", frame, notes))
    return ran, skipped


def _draw_staggered(ran: Sequence[_Ramp], out: Path | None) -> None:
    """Draw each simulated ramp together with its measured run, and print the paths of the figures."""
    if not ran:
        return
    from plots import fig_staggered

    stem = _stem(out, "staggered")
    for k, ramp in enumerate(ran, start=1):
        at = stem if k == 1 else stem.with_name(f"{stem.name}-{k}")
        paths = fig_staggered.render(ramp.frame, at, f"bench validate {short_path(ramp.path)}", ramp.title)
        click.echo(" · ".join(short_path(made) for made in paths))
