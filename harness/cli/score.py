"""`bench score`."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import click

from harness.answers.commands import short_path
from harness.cli.codes import Code
from harness.cli.options import RESULTS, complete, count, examples, system_names
from harness.cli.terminal import screen
from harness.cli.values import PATH, listed
from harness.policy.types import UserError

SCORES = RESULTS / "scores"
PUBLISHED = RESULTS / "suite"
BEACON = re.compile(r"[0-9a-fA-F]{16,128}")
MOST_WORKERS = 64


@click.command(
    epilog=examples(
        "bench score ./mine.py --quick",
        "bench score ./mine.py",
        "bench score elastic --only herds,drift",
        "bench score ./mine.py --beacon HEX",
        "bench score --table --beacon HEX",
    )
)
@click.argument("system", required=False, shell_complete=complete(system_names), metavar="[NAME|FILE.py]")
@click.option("--only", metavar="LIST", help="Only these scenarios.")
@click.option("--quick", is_flag=True, help="A tenth of the work: few windows, and no intervals.")
@click.option("--beacon", default="", metavar="HEX", help="Seeds from this public value, as in the table's ranking.")
@click.option("--table", "whole", is_flag=True, help="Score every system and entry, and write the table and its page.")
@click.option("--systems", metavar="LIST", help="Only these systems of the table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@count("--workers", "Processes of an entry.", most=MOST_WORKERS, default=2)
@click.option("-o", "--out", type=PATH, metavar="DIR", help="Folder for runs and cards.  [default: results/scores]")
def score(
    *, system: str | None, only: str | None, quick: bool, beacon: str, whole: bool, systems: str | None, as_json: bool,
    workers: int, out: Path | None,
) -> None:  # fmt: skip
    """Score a policy on the suite, a fixed test.

    The card has for each scenario the rate at which 99 % of requests meet their SLO, and what binds above it. It shows
    that rate as a share of the best known and of the bound. The policy runs in a process of its own, with limits. One
    that fails bench check is refused.
    """
    from harness.suite import card, suite, table
    from harness.suite.score import Entry
    from harness.suite.score import score as scored

    if beacon and not BEACON.fullmatch(beacon):
        raise UserError(f'--beacon "{beacon[:60]}" is not a hexadecimal number of 16 to 128 digits')
    if whole is (system is not None):
        raise UserError("name a system or its file, or ask for --table")
    if whole and (only or quick):
        raise UserError("--table takes every scenario in full: leave out --only and --quick")
    asked = suite.load().only(listed("--only", only))
    asked = asked.quick() if quick else asked
    folder, tell = (out or SCORES).resolve(), partial(click.echo, err=True)
    if whole:
        entries = table.entries(PUBLISHED / "entries", listed("--systems", systems))
        for path in table.make(
            entries, asked, beacon.lower(), folder, PUBLISHED if out is None else folder, workers, tell
        ):
            click.echo(short_path(path))
        return
    made = scored(Entry(system or ""), asked, beacon.lower(), folder, workers, tell)
    if made.refused:
        click.echo(f"{made.label} is refused, for it has not passed bench check:", err=True)
        click.echo("\n".join(f"  {why}" for why in made.refused), err=True)
        sys.exit(Code.FAILED)
    page = card.write(made, asked, folder)
    if as_json:
        click.echo(json.dumps(card.facts(made, asked), indent=1))
        return
    screen(card.lines(made, asked), every=True)
    click.echo(short_path(page))
