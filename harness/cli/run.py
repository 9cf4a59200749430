"""`bench run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import explain_command, real, short_path
from harness.cli.options import LIMIT, OUT, RESULTS, examples, slo_rule
from harness.cli.terminal import Terminal
from harness.cli.values import PATH
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.spec import Spec


@click.command(epilog=examples("bench run mine.toml", "bench run mine.toml -o /tmp/out"))
@click.argument("spec", type=PATH, metavar="SPEC.toml")
@click.option("--dry-run", is_flag=True, help="Show the resolved spec and the estimated time; run nothing.")
@click.option("--record", "keep", is_flag=True, help="Run again, and store each turn of each lane.")
@click.option("--engine", metavar="NAME", help="Simulator or real servers, instead of the file's engine.")
@LIMIT
@OUT
def run(*, spec: Path, dry_run: bool, keep: bool, engine: str | None, out: Path | None) -> None:
    """Run one spec, a TOML file.

    The file has `system = "static"` and any other field; --dry-run shows all.
    """
    from dataclasses import replace

    from harness.answers import explain as words
    from harness.answers.notes import by_model
    from harness.answers.table import printed
    from harness.rows import record
    from harness.run import score, streams, sweep
    from harness.run.execute import recorded
    from harness.run.resolve import resolve
    from harness.run.setup import Setup
    from harness.run.spec import as_dict, read
    from harness.study.bases import check_rule, slo_target
    from harness.study.table import scored_alone

    folder = real(out or RESULTS)
    asked = read(spec)
    asked = asked if engine is None else replace(asked, engine=engine)
    try:
        ready = resolve(asked)
        rule = asked.slo or slo_rule(None, None, asked.models)
        check_rule(rule, asked.models)
        if dry_run:
            click.echo(json.dumps(as_dict(ready), indent=1, sort_keys=True))
        click.echo("".join(f"{line}\n" for line in streams.lines(Setup(ready), every=dry_run)), nl=False, err=dry_run)
        if dry_run:
            _cost(asked, ready, rule, folder)
            return
        with Terminal() as teller:
            under = slo_target(asked, rule, folder, teller=teller)
            wanted = under.spec(asked)
            (task,) = sweep.tasks([wanted])
            if keep:
                path = recorded(task.spec, folder, task.code)
            else:
                (path,) = sweep.sweep([wanted], folder, teller=teller)
            # The scores say which SLO judged the run.
            scored = scored_alone(task, under, folder)
    except UserError as error:
        raise UserError(f"{spec}: {error}") from None
    about = record.meta(path)
    if why := about["skipped"] or about["infeasible"]:
        click.echo(f"{'skipped' if about['skipped'] else 'infeasible'}: {why}")
    else:
        counts = ", ".join(f"{n} {state}" for state, n in sorted(about["counts"].items()))
        met = f"attainment {100 * score.attained(path, under, [under.definition])[under.definition]:.1f} %"
        click.echo(f"{asked.label}: {counts}; {met} ({under.definition}, {rule})")
    lines = list(words.verdict(about))
    if about.get("served"):
        lines += printed(by_model(scored, wanted.rate_scale, under.definition))
    click.echo("".join(f"{line}\n" for line in lines), nl=False)
    click.echo(short_path(path))
    click.echo(f"next: {explain_command(path, under.rule, '--misses')}")


def _cost(asked: Spec, ready: Spec, rule: str, folder: Path) -> None:
    """Print the estimated time of a run: processor time, or wall-clock time if its engine runs in real time."""
    from harness.run import estimates, realtime
    from harness.study.bases import ahead

    if realtime.span(ready) is None:
        click.echo(f"about {estimates.Costs.of(folder).cpu_s(ready):.1f} s")
        return
    known = ahead(asked, rule, folder)
    if known.bases:
        click.echo(f"SLO {rule}: {realtime.duration(known.bases)} of base runs unless they are stored")
    span = realtime.span(ready, known.drain_s)
    time = f"{realtime.duration([span] if span else [])}, beside starts of servers"
    click.echo(f"not run: {why}" if (why := realtime.lacking(ready)) else time)
