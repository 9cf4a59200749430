"""`bench check` and `new`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.commands import short_path
from harness.cli.codes import Code
from harness.cli.options import complete, examples, system_names
from harness.cli.values import PATH
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.check.findings import Failure


@click.command(
    epilog=examples(
        "bench check static", "bench check ./mine.py --full", "bench check --all --store", "bench check --engine sim"
    )
)
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
    from harness.check.engine import check as conform_engine
    from harness.check.under import under
    from harness.loop import system as systems
    from harness.rows import vetted

    if (system is not None) + (engine is not None) + every != 1:
        raise UserError("name a system, or an engine by --engine NAME, or ask for --all")
    if store and (engine is not None or law or case):
        raise UserError("--store keeps what a whole check of systems says: leave out --engine, --law and --case")
    if engine is not None:
        if _print_findings(engine, conform_engine(engine, only=law, case=case)):
            sys.exit(Code.FAILED)
        return
    if store and not every and system not in systems.names():
        raise UserError(f"{system} is not in systems/: what it passes is kept without --store")
    names = systems.names() if every else [system or ""]
    passed = {name: content for name in names if (content := _passed(name, full, law, case))}
    if store and passed:
        vetted.store(passed, systems.names(), under() if full else None)
    if len(passed) < len(names):
        sys.exit(Code.FAILED)
    if not every:
        rival = "elastic" if system == "static" else "static"
        click.echo(f"next: bench compare --systems {shlex.quote(system or '')},{rival}")


def _passed(name: str, full: bool, law: str | None, case: str | None) -> str:
    """Check a system and print the findings; if it passed every law and case, store that it did.

    Returns the hash that the system's file had before the check, or "" if the system broke a law.
    """
    from harness.check.check import check as conform
    from harness.check.reached import Reached
    from harness.loop import system as systems
    from harness.rows import vetted

    content, seen = vetted.content(name), None
    with suppress(SyntaxError, ValueError):  # the law `starts` reports it
        seen = Reached(name)
    failures = conform(name, quick=not full, only=law, case=case, reached=seen)
    if not (failures or law or case):
        try:
            vetted.keep(content, seen.text if seen else "")
        except (OSError, UserError) as error:  # a folder that cannot be written
            click.echo(f"not kept, so comparisons still say `unchecked`: {error}", err=True)
    if _print_findings(name, failures):
        return ""
    if seen and seen.text:
        click.echo(f"  no {'case' if not case else f'run of {case}'} reached {seen.text}")
    for line in _idle_by_rule(systems.find(name)):
        click.echo(line)
    return content


def _idle_by_rule(make: Any) -> Iterator[str]:
    """Yield a line if a system's rule allows idle GPUs; else yield a line for each preset whose rule allows them."""
    from harness.check.laws import rule

    says = "may leave GPUs idle by its own rule, so the law `idle` is not asked of it"
    if quoted := rule(make):
        yield f"  {says}: {quoted}"
        return
    yield from (f"  preset {name} {says}: {quoted}" for name in make.presets if (quoted := rule(make, name)))


def _print_findings(name: str, failures: Sequence[Failure]) -> bool:
    """Print the failures of a check; tell whether there are any."""
    for failure in failures:
        at = "" if failure.event is None else f" (event {failure.event})"
        click.echo(f"{failure.law}: {failure.message}{at}\n  repeat: {failure.command}")
    broken = f"{len(failures)} laws broken" if len(failures) > 1 else "one law broken"
    click.echo(f"{name}: {broken if failures else 'all laws hold'}")
    return bool(failures)


@click.command(
    epilog=examples(
        "bench new mine.py && bench check ./mine.py",
        "bench new classes.toml",
        "bench new my-set.toml",
        "bench new my-study.toml",
    )
)
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
    uses = {
        "classes.toml": f"bench compare --systems static,prism --slo classes:{here}",
        "set.toml": f"bench size --models {here} --slo absolute:ttft=1,tpot=0.1",
        "study.toml": f"bench study {here} --dry-run",
    }
    use = next((command for name, command in uses.items() if file.name.endswith(name)), None)
    click.echo(f"next: {use or f'bench check {here}; bench compare --systems static,{here}'}")
