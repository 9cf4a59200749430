"""`bench list`, `check`, `calibrate`, `validate` and `new`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from harness.cli.options import FIGURES, complete, examples, gpu_names, system_names
from harness.cli.terminal import Terminal
from harness.report.commands import short_path


@click.group(
    "list", invoke_without_command=True, epilog=examples("bench list", "bench list --matrix", "bench list traces")
)
@click.option(
    "--matrix", is_flag=True, help="Only which system runs on which engine, with what is lacking in short ..."
)
@click.option("--markdown", is_flag=True, help="... as a table of Markdown.")
@click.pass_context
def list_(ctx: click.Context, *, matrix: bool, markdown: bool) -> None:
    """List systems with their presets, and which engine can run them."""
    from harness.policy.types import UserError

    if markdown and not matrix:
        raise UserError("--markdown is a form of --matrix: bench list --matrix --markdown")
    if matrix and ctx.invoked_subcommand is not None:
        raise UserError(f"--matrix is of systems and engines, not of {ctx.invoked_subcommand}")
    if matrix:
        from harness.experiment import matrix as cells

        click.echo("\n".join(cells.lines(list(cells.rows()), markdown=markdown)))
        return
    if ctx.invoked_subcommand is not None:
        return
    from harness.engines.costs import quantities
    from harness.experiment.lookup import blamed
    from harness.experiment.resolve import gaps as gaps_of
    from harness.experiment.spec import Spec
    from harness.loop import engine, system
    from harness.report import table
    from workloads.models import sets

    gaps = []
    engines = engine.names()
    lines = [("system", "presets", *engines, "what it is")]
    for name in system.names():
        with blamed(Spec(name)):
            presets = system.find(name).presets
        marks = []
        for where in engines:
            lacks = {preset: gaps_of(name, preset, where) for preset in (None, *presets)}
            marks.append("no" if all(lacks.values()) else "in part" if any(lacks.values()) else "yes")
            alike = len({tuple(one) for one in lacks.values()}) == 1
            told = {None: lacks[None]} if alike else lacks
            gaps += [f"{name}{f':{p}' if p else ''} on {where}: no {', '.join(x)}" for p, x in told.items() if x]
        first = (system.module(name).__doc__ or "").strip().splitlines()[0]
        lines.append((name, ", ".join(presets) or "-", *marks, first))
    click.echo("\n".join(table.aligned(lines)))
    click.echo("\n".join(gaps) if gaps else "every system runs on every engine with every preset")
    kinds, hosts = ", ".join(quantities.gpu_kinds()), ", ".join(quantities.hosts())
    click.echo(f"model sets: {', '.join(sets())} · GPUs: {kinds} · hosts: {hosts}")
    click.echo("next: bench list traces; bench compare --systems " + ",".join(system.names()))


@list_.command(epilog=examples("bench list traces"))
def traces() -> None:
    """List traces: what is here, its tier, models, requests, span, licence, and how to fetch the rest."""
    from harness.report import table
    from traces.load import drawn, manifest, present

    lines = [("trace", "here", "tier", "models", "requests", "span s", "licence", "what it is")]
    missing = []
    for name, entry in manifest().items():
        here = drawn(name) or present(name) is not None
        if not here and "fetch" in entry:
            missing.append(f"{name} is not here ({entry.get('fallback', 'nothing')} stands in): {entry['fetch']}")
        what = (str(entry[key]) for key in ("models", "requests"))
        mark = "drawn" if "drawn" in entry else "yes" if here else "no"
        shown = f"{name}/M-RATE-IN-OUT" if "family" in entry else name
        lines.append((shown, mark, entry["tier"], *what, f"{entry['span_s']:g}", entry["licence"], entry["note"]))
    click.echo("\n".join(table.aligned(lines)))
    for line in missing:
        click.echo(line)


@click.command(epilog=examples("bench check static", "bench check ./mine.py --full", "bench check --engine sim"))
@click.argument("system", required=False, shell_complete=complete(system_names), metavar="[NAME|FILE.py]")
@click.option("--engine", metavar="NAME|FILE.py", help="Test an engine instead of a system.")
@click.option("--full", is_flag=True, help="Every workload, also the long ones.")
@click.option("--law", metavar="LAW", help="Only one law ...")
@click.option("--case", metavar="CASE", help="... or one workload, as a failure's line repeats it.")
def check(system: str | None, engine: str | None, full: bool, law: str | None, case: str | None) -> None:
    """Test that a system keeps the rules: no lost request, no peeking, nothing undeclared, the same bytes twice.

    Systems are tried in the simulator; an engine with scripted policies.
    """
    from harness.check.check import check as conform
    from harness.check.engine import check as conform_engine
    from harness.policy.types import UserError

    if (system is None) == (engine is None):
        raise UserError("name a system, or an engine by --engine NAME")
    if engine is not None:
        failures, name = conform_engine(engine, only=law, case=case), engine
    else:
        failures, name = conform(system or "", quick=not full, only=law, case=case), system or ""
    for one in failures:
        at = "" if one.event is None else f" (event {one.event})"
        click.echo(f"{one.law}: {one.message}{at}\n  repeat: {one.command}")
    if failures:
        click.echo(f"{name}: {len(failures)} laws broken" if len(failures) > 1 else f"{name}: one law broken")
        sys.exit(1)
    click.echo(f"{name}: all laws hold")
    if engine is None:
        click.echo(f"next: bench compare --systems static,{shlex.quote(name)}")


@click.command(epilog=examples(
    "bench calibrate --from results/h200",
    "bench compare --systems static,ideal --gpu h200 --table results/h200/h200-measured.toml",
))  # fmt: skip
@click.option("--from", "folder", required=True, type=click.Path(path_type=Path), metavar="FOLDER",
              help="Results of `make gpu`.")  # fmt: skip
@click.option("--gpu", "kind", shell_complete=complete(gpu_names), metavar="KIND",
              help="The table to start from.  [default: by the card's name]")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE.toml",
              help="[default: FOLDER/KIND-measured.toml]")  # fmt: skip
def calibrate(folder: Path, kind: str | None, out: Path | None) -> None:
    """A cost table from what `make gpu` measured, with its errors."""
    from harness.engines.costs import calibrate as calibration

    path, notes = calibration.write(folder, kind, out)
    for note in notes:
        click.echo(note)
    click.echo(f"wrote {short_path(path)} (--table takes it)")


@click.command(epilog=examples("bench validate", "bench validate mine.csv -o /tmp/validate"))
@click.argument("folder", type=click.Path(path_type=Path), required=False, envvar="MEASURED_DIR",
                metavar="[FOLDER|FILE.csv]")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="STEM",
              help="Path of figure and CSV without their endings.  [default: plots/out/validate]")  # fmt: skip
@click.option("--no-plot", is_flag=True, help="No figure and no CSV.")
def validate(folder: Path | None, out: Path | None, *, no_plot: bool) -> None:
    """Hold the simulator against measured end-to-end runs (MEASURED_DIR, or any CSV of the same columns)."""
    from harness.experiment import staggered
    from harness.experiment import validate as judge
    from harness.experiment.measured import cases
    from harness.policy.types import UserError
    from harness.report import table

    if folder is None:
        raise UserError("bench validate FOLDER, or MEASURED_DIR, names a folder of measured runs")
    shared = staggered.files(folder)
    for path in shared:
        _staggered(path, out if path == folder else None, plot=not no_plot)
    if folder in shared:
        return
    found = cases(folder)
    with Terminal() as teller:
        frame = judge.points(found, lambda done, total: teller.progress("measured runs", done, total))
    click.echo(f"{len(found)} cases of {frame['file'].nunique()} files; errors of ours in % of what was measured")
    click.echo("\n".join(table.aligned(judge.scores(frame))))
    for note in judge.notes(frame):
        click.echo(note)
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_validate

        stem = (out.with_suffix("") if out else FIGURES / "validate").resolve()
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = fig_validate.render(frame, stem, f"bench validate {short_path(folder)}")
        click.echo(" · ".join(short_path(path) for path in paths))


def _staggered(path: Path, out: Path | None, *, plot: bool) -> None:
    """Print how six models on one card compare with a measured run, and draw it."""
    from harness.experiment import staggered

    measured = staggered.read(path)
    with Terminal() as teller:
        held = staggered.process(measured)
        frame = staggered.points(measured, held, lambda done, of: teller.progress("staggered ramps", done, of))
    click.echo(path.name)
    for note in staggered.notes(frame, held):
        click.echo(f"  {note}")
    sys.stdout.flush()
    if plot:
        from plots import fig_staggered

        stem = (out.with_suffix("") if out else FIGURES / "staggered").resolve()
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = fig_staggered.render(frame, stem, f"bench validate {short_path(path)}")
        click.echo(" · ".join(short_path(made) for made in paths))


@click.command(epilog=examples("bench new mine.py && bench check ./mine.py"))
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py")
def new(file: Path) -> None:
    """Write a small annotated system that passes bench check at once."""
    from harness.check.new import write

    write(file)
    here = shlex.quote(f"./{file}" if file.parent == Path() else str(file))
    click.echo(short_path(file))
    click.echo(f"next: bench check {here}; bench compare --systems static,{here}")
