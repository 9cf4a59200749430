"""`bench list`, `check`, `calibrate` and `new`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.codes import Code
from harness.cli.options import (
    ALL,
    MOVED,
    PATH,
    RESULTS,
    complete,
    examples,
    gpu_names,
    system_names,
)
from harness.cli.terminal import Terminal, room, screen
from harness.report.commands import short_path

if TYPE_CHECKING:
    from harness.check.findings import Failure
    from harness.loop.engine import Engine

SIM, PART = "sim", "in part"
STAGES = "stages.jsonl"  # of the stages of `make gpu`


@click.group(
    "list", invoke_without_command=True, epilog=examples("bench list", "bench list --matrix", "bench list traces")
)
@click.option("--matrix", is_flag=True, help="Show which preset runs on which engine, and what others lack.")
@click.option("--markdown", is_flag=True, help="With --matrix: print the page docs/matrix.md.")
@ALL
@click.pass_context
def list_(ctx: click.Context, *, matrix: bool, markdown: bool, every: bool) -> None:
    """List systems, engines, traces, figures and definitions.

    Without a command: systems, and where each runs; --all adds presets, and what each engine lacks for them.
    """
    from harness.policy.types import UserError

    if markdown and not matrix:
        raise UserError("--markdown is a form of --matrix: bench list --matrix --markdown")
    if matrix and ctx.invoked_subcommand is not None:
        raise UserError(f"--matrix is of systems and engines, not of {ctx.invoked_subcommand}")
    if every and ctx.invoked_subcommand is not None:
        raise UserError(f"--all comes last: bench list {ctx.invoked_subcommand} --all")
    if ctx.invoked_subcommand is not None:
        return
    from harness.run import matrix as cells

    if matrix:
        rows = list(cells.rows())
        click.echo(cells.page(rows) if markdown else "\n".join(cells.lines(rows)), nl=not markdown)
        return
    from harness.engines.costs import quantities
    from harness.loop import system
    from harness.report.text_table import WIDTH, aligned, clause
    from harness.run.resolve import gaps as gaps_of
    from workloads.models import sets

    engines, broken = cells.usable_engines()

    def lacking(name: str) -> dict[str, dict[str | None, list[str]]]:
        presets = cells.presets_of(name)
        return {where: {preset: gaps_of(name, preset, where) for preset in presets} for where in engines}

    systems, others = cells.tried(system.names(), lacking)
    gaps = []
    lines, short = [("system", "presets", *engines, "what it is")], [("system", "runs on", "what it is")]
    for name, by_engine in systems.items():
        marks = []
        for where, lacks in by_engine.items():
            marks.append("no" if all(lacks.values()) else PART if any(lacks.values()) else "yes")
            alike = len({tuple(names) for names in lacks.values()}) == 1
            told = {None: lacks[None]} if alike else lacks
            gaps += [f"{name}{f':{p}' if p else ''} on {where}: no {', '.join(x)}" for p, x in told.items() if x]
        what = (system.module(name).__doc__ or "-").strip().splitlines()[0]
        lines.append((name, ", ".join(filter(None, cells.presets_of(name))) or "-", *marks, what))
        short.append((name, _runs_on(dict(zip(engines, marks, strict=True)), engines), what))
    beside = sum(runs_on not in {SIM, "none"} for _, runs_on, _ in short[1:])
    answer = f"{len(systems)} systems; {beside} also run on engines other than the simulator (sim)"
    left = min(WIDTH, room()) - sum(max(len(line[k]) for line in short) + 2 for k in (0, 1))
    brief = [(*line, clause(what, left)) for *line, what in short]
    needs = [f"{name} needs {made.lacks}" for name, made in engines.items() if made.lacks]
    kinds, hosts = ", ".join(quantities.gpu_kinds()), ", ".join(quantities.hosts())
    names = f"model sets: {', '.join(sets())} · GPUs: {kinds}"
    after = "next: bench list traces; bench compare --systems all"
    if every:
        gaps = gaps or ["every system runs on every engine with every preset"]
        texts = [*gaps, *needs, *broken, *others, names, f"hosts: {hosts}"]
        screen([answer, *aligned(lines), *texts], tail=[after], every=True)
        return
    signs = "(part): some presets only. servers: kinds of real servers; bench list --matrix names them."
    lack = ", ".join(name for name, made in engines.items() if made.lacks)
    here = [f"engines that cannot run here now: {lack} (--all: why)"] if lack else []
    more = [f"presets, hosts, and what engines lack ({len(gaps)} lines): --all", *here, *broken, *others, names, after]
    screen([answer, *aligned(brief), signs], tail=more, every=False)


def _runs_on(marks: Mapping[str, str], engines: Mapping[str, Engine]) -> str:
    """Return the engines of a system, from a mark for each engine: by name, but those with real servers as a number."""
    some = {name: mark for name, mark in marks.items() if mark != "no"}
    servers = [mark for name, mark in some.items() if engines[name].fidelity == "real"]
    parts = [name + " (part)" * (mark == PART) for name, mark in some.items() if engines[name].fidelity != "real"]
    if servers:
        parts.append(f"{len(servers)} server{'s' * (len(servers) > 1)}" + " (part)" * (PART in servers))
    return ", ".join(parts) or "none"


@list_.command(epilog=examples("bench list traces", "bench list traces --all"))
@ALL
def traces(*, every: bool) -> None:
    """List traces: those here, and public logs to convert.

    A public log that lies in the folder TRACES_DIR is shown with the command that converts it.
    """
    from harness.report.text_table import aligned
    from traces import readers
    from traces.load import drawn, manifest, present

    lines = [("trace", "here", "tier", "models", "requests", "span s", "licence", "what it is")]
    missing, absent = [], []
    for name, entry in manifest().items():
        here = drawn(name) or present(name) is not None
        if not here and "fetch" in entry:
            absent.append(name)
            missing.append(f"{name} is not here ({entry.get('fallback', 'nothing')} stands in): {entry['fetch']}")
        what = (str(entry[key]) for key in ("models", "requests"))
        mark = "drawn" if "drawn" in entry else "yes" if here else "no"
        shown = f"{name}/M-RATE-IN-OUT" if "family" in entry else name
        lines.append((shown, mark, entry["tier"], *what, f"{entry['span_s']:g}", entry["licence"], entry["note"]))
    folder = os.environ.get("TRACES_DIR", "")
    logs = readers.logs(Path(folder)) if folder else {}
    files = sum(map(len, logs.values()))
    public = (
        f"{files} public logs lie in TRACES_DIR" if folder else "TRACES_DIR is not set, so no public logs are listed"
    )
    answer = f"{len(lines) - 1 - len(absent)} of {len(lines) - 1} traces are here; {public}"
    signs = "drawn: made for each seed. replayed: real requests; composed: of real counts; synthetic: fitted."
    converts = [_converts(name, path, Path(folder)) for name, of in logs.items() for path in of]
    after = f"next: bench trace stats {lines[1][0]}"
    if every:
        known = aligned([("reader", "what it reads (bench trace convert --from READER FILE)"), *readers.listing()])
        screen([answer, *aligned(lines), signs, *missing, *known, *converts], tail=[after], every=True)
        return
    heads = ("reader", "logs", "first LOG (bench trace convert --from READER $TRACES_DIR/LOG -o OUT.parquet)")
    some = [heads, *((name, str(len(of)), str(of[0].relative_to(folder))) for name, of in logs.items())]
    fetch = [f"not here: {', '.join(absent)} (--all says how to fetch each)"] if absent else []
    more = [*fetch, "licences in full, what each trace is, readers, every log: --all", after]
    cut = [(line[0].replace("/M-RATE-IN-OUT", "/..."), *line[1:6], line[6].partition(" (")[0]) for line in lines]
    screen([answer, *aligned(cut), signs, *(aligned(some) if logs else ())], tail=more, every=False)


def _converts(reader: str, path: Path, folder: Path) -> str:
    """Return the command that converts a log of TRACES_DIR."""
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    log = shlex.quote(str(path.relative_to(folder)))
    return f"bench trace convert --from {reader} $TRACES_DIR/{log} -o {shlex.quote(stem)}.parquet"


@list_.command(epilog=examples("bench list figures", "bench plot results/arena-chat-3f9c01ab --figure compare"))
def figures() -> None:
    """List the figures that bench plot draws."""
    import plots
    from harness.report.text_table import aligned

    rows = plots.listing()
    answer = f"{len(rows)} figures; bench plot draws those that a folder of results has data for"
    screen([answer, *aligned([("figure", "what it shows"), *rows], room())], every=False)


@list_.command(epilog=examples("bench list definitions", "bench compare --systems static,chunked --definition itl"))
def definitions() -> None:
    """List the definitions of SLO attainment, with formulas."""
    from harness.report.text_table import aligned
    from harness.rows.definitions import DEFINITIONS

    answer = f"{len(DEFINITIONS)} definitions of SLO attainment; --definition NAME says which one judges"
    lines = [("definition", "judges", "needs", "formula")]
    for name, entry in DEFINITIONS.items():
        needs = "token times" if entry.by_token else "-"
        lines.append(
            (name, ", ".join(entry.judges) or "-", needs, entry.formula.partition("\n\n")[0].replace("\n", " "))
        )
    screen([answer, *aligned(lines, room())], every=False)


@click.command(epilog=examples(
    "bench check static", "bench check ./mine.py --full", "bench check --all --store", "bench check --engine sim",
))  # fmt: skip
@click.argument("system", required=False, shell_complete=complete(system_names), metavar="[NAME|FILE.py]")
@click.option("--engine", metavar="NAME|FILE.py", help="Test an engine instead of a system.")
@click.option("--full", is_flag=True, help="Run every workload, also the long ones.")
@click.option("--law", metavar="LAW", help="Test only this law.")
@click.option("--case", metavar="CASE", help="Test only this workload, by the name that a failure prints.")
@click.option("--all", "every", is_flag=True, help="Test every system in systems/.")
@click.option("--store", is_flag=True, help="Write the systems that pass into systems/checked.toml.")
def check(
    *, system: str | None, engine: str | None, full: bool, law: str | None, case: str | None, every: bool, store: bool
) -> None:
    """Test that a system keeps the rules.

    It tests that no request is lost, no future is seen, all options are declared, and runs repeat byte by byte. Systems
    run in the simulator; an engine runs scripted policies. Until it has passed every test as it is now, a file given by
    its path is marked `unchecked` by bench compare, study and tune.
    """
    from harness.check.check import check as conform
    from harness.check.engine import check as conform_engine
    from harness.check.under import under
    from harness.loop import system as systems
    from harness.loop import vetted
    from harness.policy.types import UserError

    if (system is not None) + (engine is not None) + every != 1:
        raise UserError("name a system, or an engine by --engine NAME, or ask for --all")
    if store and (engine is not None or law or case):
        raise UserError("--store keeps what a whole check of systems says: leave out --engine, --law and --case")
    if engine is not None:
        _told(engine, conform_engine(engine, only=law, case=case))
        return
    passed, broken = {}, False
    for name in systems.names() if every else [system or ""]:
        if store and name not in systems.names():
            raise UserError(f"{name} is not in systems/: what it passes is kept without --store")
        content = vetted.content(name)
        if failures := conform(name, quick=not full, only=law, case=case):
            broken = True
        elif not (law or case):
            passed[name] = content
            _keep(content)
        _told(name, failures, last=not every)
        for line in () if failures else _idle_by_rule(systems.find(name)):
            click.echo(line)
    if store:
        vetted.store(passed, systems.names(), under() if full else None)
    if broken:
        sys.exit(Code.FAILED)
    if not every:
        click.echo(f"next: bench compare --systems static,{shlex.quote(system or '')}")


def _idle_by_rule(make: Any) -> Iterator[str]:
    """Yield a line for a system that may leave GPUs idle by its own rule, or one for each preset that alone may."""
    from harness.check.laws import rule

    says = "may leave GPUs idle by its own rule, so the law `idle` is not asked of it"
    if quoted := rule(make):
        yield f"  {says}: {quoted}"
        return
    yield from (f"  preset {name} {says}: {quoted}" for name in make.presets if (quoted := rule(make, name)))


def _keep(content: str) -> None:
    """Note that a file has passed; a folder that cannot be written only means that it stays unchecked."""
    from harness.loop import vetted

    try:
        vetted.keep(content)
    except OSError as error:
        click.echo(f"not kept, so comparisons still say `unchecked`: {error}", err=True)


def _told(name: str, failures: Sequence[Failure], *, last: bool = True) -> None:
    """Print what a check found; the last one ends the command where laws are broken."""
    for failure in failures:
        at = "" if failure.event is None else f" (event {failure.event})"
        click.echo(f"{failure.law}: {failure.message}{at}\n  repeat: {failure.command}")
    broken = f"{len(failures)} laws broken" if len(failures) > 1 else "one law broken"
    click.echo(f"{name}: {broken if failures else 'all laws hold'}")
    if failures and last:
        sys.exit(Code.FAILED)


@click.command(epilog=examples(
    "bench calibrate --engine llamacpp --models llama-small -o results/cpu",
    "bench calibrate --engine attach+urls=http://127.0.0.1:8000 --models llama-3.1-8b -o /tmp/attached",
    "bench calibrate --from results/h200", "bench calibrate --from results/h200/stages",
    "bench compare --systems static,ideal --gpu h200 --table results/h200/h200-measured.toml",
))  # fmt: skip
@click.option("--engine", metavar="NAME", help="Measure the servers of an engine, one alone and four side by side."
              )  # fmt: skip
@click.option("--models", default="llama-small", show_default=True, metavar="SHAPES",
              help="With --engine: shapes of workloads/shapes.toml, with commas.")  # fmt: skip
@MOVED
@click.option("--slots", type=click.IntRange(1), metavar="N",
              help="With --engine: largest batch of a server.  [default: the engine's]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N",
              help="With --engine: how often servers are measured, for hosts whose speed varies.")  # fmt: skip
@click.option("--from", "folder", type=PATH, metavar="FOLDER",
              help="Read results of `make gpu`, or of its stages, instead of running servers.")  # fmt: skip
@click.option("--gpu", "kind", shell_complete=complete(gpu_names), metavar="KIND",
              help="Table to start from.  [default: by the card's name]")  # fmt: skip
@click.option("-o", "--out", type=PATH, metavar="PATH",
              help="A file with --from, else a folder.  [default: FOLDER/KIND-measured.toml; results/ENGINE]",
              )  # fmt: skip
def calibrate(
    *,
    engine: str | None,
    models: str,
    slots: int | None,
    rounds: int,
    folder: Path | None,
    kind: str | None,
    out: Path | None,
) -> None:
    """Measure the cost table of an engine's servers, or of a GPU.

    Servers are measured now; measurements that the folder holds are not repeated.
    """
    from harness.engines.costs import calibrate as calibration
    from harness.policy.fields import asked
    from harness.policy.types import UserError

    if (engine is None) == (folder is None):
        raise UserError("bench calibrate takes one of --engine NAME and --from FOLDER")
    if engine is not None:
        _servers(engine, models, out or RESULTS / asked(engine).name, rounds, {"batch_cap": slots, "gpu": kind})
        return
    assert folder is not None
    if (folder / STAGES).is_file():
        from harness.validate import torch_table

        path, notes = torch_table.staged(folder, out)
    else:
        path, notes = calibration.write(folder, kind, out)
    for note in notes:
        click.echo(note)
    click.echo(f"wrote {short_path(path)} (--table takes it)")


def _servers(engine: str, models: str, folder: Path, rounds: int, given: dict[str, Any]) -> None:
    """Measure the servers of an engine, and say what was found."""
    from harness.validate.calibrate import calibrate
    from plots import fig_calibrate

    fields = {name: value for name, value in given.items() if value}
    names = tuple(dict.fromkeys(name.strip() for name in models.split(",")))
    with Terminal("measurement") as teller:
        fitted = calibrate(engine, names, folder, teller.say, rounds, **fields)
    for note in fitted.notes:
        click.echo(note)
    stem = folder / "calibrate"
    command = f"bench calibrate --engine {engine} -o {short_path(folder)}"
    paths = fig_calibrate.render(fitted.points, stem, command, f"Real: {fitted.machine}. Fitted: the cost table.")
    click.echo(" · ".join(short_path(path) for path in paths))
    click.echo(f"wrote {short_path(fitted.table)} (--table takes it)")
    click.echo(f"next: bench validate --engine {engine} --table {short_path(fitted.table)}")


@click.command(epilog=examples("bench new mine.py && bench check ./mine.py", "bench new classes.toml",
                               "bench new my-set.toml", "bench new my-study.toml"))  # fmt: skip
@click.argument("file", type=PATH, metavar="FILE.py|FILE.toml")
def new(file: Path) -> None:
    """Write a small annotated system, or a TOML to begin with.

    The system passes bench check. A name that ends in classes.toml gets classes of SLOs, set.toml a set of models, and
    study.toml a study.
    """
    from harness.check.new import write

    write(file)
    here = shlex.quote(f"./{file}" if file.parent == Path() else str(file))
    click.echo(short_path(file))
    uses = {"classes.toml": f"bench compare --systems static,prism --slo classes:{here}",
            "set.toml": f"bench size --models {here} --slo absolute:ttft=1,tpot=0.1",
            "study.toml": f"bench study {here} --dry-run"}  # fmt: skip
    use = next((command for name, command in uses.items() if file.name.endswith(name)), None)
    click.echo(f"next: {use or f'bench check {here}; bench compare --systems static,{here}'}")
