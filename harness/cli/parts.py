"""Code that several commands share: shards of studies, and the command that is stored in the folder of its answer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import options_of, short_path
from harness.answers.table import aligned
from harness.cli.values import WORDS

if TYPE_CHECKING:
    from harness.run.shard import Progress, Shard
    from harness.run.teller import Teller
    from harness.study.study import Study

MOST_LINES = 20  # searches that are listed
# Options that change where and how an answer is made or shown, not the answer.
WITH_VALUE = frozenset({"-o", "--out", "--workers", "--executor", "--shard", "--policy-limit-s"})
ALONE = frozenset({"--collect", "--json", "--csv", "--markdown", "--latex", "--all", "--no-plot",
                   "-q", "--quiet", "-v", "--verbose"})  # fmt: skip


def keep_command(folder: Path) -> None:
    """Write the running command line into the folder of its answer, with only those options that change the answer."""
    from harness.rows import record

    line = _without(WITH_VALUE, ALONE) + "\n"
    path = folder / record.COMMAND
    if not path.is_file() or path.read_bytes() != line.encode():
        record.write_bytes(path, line.encode())


def make_part(
    asked: Study, shard: Shard, out: Path, workers: int | None, told: Teller, *, full: bool, stem: str
) -> int:
    """Run one shard of a study, print what was run, and return the exit code."""
    from harness.cli.codes import Code
    from harness.study import shards

    part = shards.measure_shard(asked, out, shard, full=full, stem=stem, workers=workers, teller=told)
    searches = f"{part.searches} of {part.of} searches, " if part.of else ""
    click.echo(f"shard {shard}: {searches}{part.runs:,} runs are stored in {short_path(out)}")
    for name, why in part.failed.items():
        click.echo(f"{name}: {why}", err=True)
    tell_collect()
    return Code.REFUSED if part.failed else Code.DONE


@contextmanager
def collecting(progress: Callable[[], Iterable[Progress]], *, on: bool) -> Iterator[None]:
    """If `on`, only read stored runs within the block, and make none.

    If a run is missing, print the progress of each search, and raise Missing.
    """
    from harness.run import sweep

    if not on:
        yield
        return
    try:
        with sweep.stored_only():
            yield
    except sweep.Missing:
        status(progress(), every=False, err=True)
        click.echo(f"what makes them: {_without()}, or each of its shards: --shard I/N", err=True)
        raise


def status(searches: Iterable[Progress], *, every: bool = True, err: bool = False) -> None:
    """Print the progress of searches: a summary, then a line for each search.

    Without `every` a search that is done has no line.
    """
    searches = list(searches)
    done = sum(not search.phase for search in searches)
    stored, missing = (sum(x) for x in zip(*((s.stored, s.missing) for s in searches), strict=True))
    more = f"; at least {missing:,} are missing" if missing else ""
    click.echo(f"{done} of {len(searches)} searches are done, {stored:,} runs are stored{more}", err=err)
    shown = [search for search in searches if every or search.phase]
    rows = [("search", "stored", "missing", "in")]
    rows += [(_named(s.panels), f"{s.stored:,}", f"{s.missing:,}", s.phase or "done") for s in shown[:MOST_LINES]]
    click.echo("\n".join(aligned(rows)), err=err)
    if len(shown) > MOST_LINES:
        click.echo(f"and {len(shown) - MOST_LINES} more", err=err)


def _named(panels: tuple[str, ...]) -> str:
    first = panels[0].strip(" /") or "all"
    return first if len(panels) == 1 else f"{first} and {len(panels) - 1} more"


def tell_collect() -> None:
    """Print the command that shows the results of all shards."""
    click.echo(f"once all shards are done: {_without({'--shard'})} --collect")


def _without(with_value: Collection[str] = (), alone: Collection[str] = ()) -> str:
    """Return this command line without some options: those in `with_value`, with their values, and flags in `alone`."""
    words = click.get_current_context().meta.get(WORDS, ())
    rest = (part for name, part in options_of(words, with_value) if name not in {*with_value, *alone})
    return shlex.join(["bench", *chain.from_iterable(rest)])
