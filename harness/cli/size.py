"""`bench size`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import click

from harness.answers.commands import short_path
from harness.answers.table import WIDTH, aligned
from harness.cli import options
from harness.cli.asked import Asked, asks
from harness.cli.parts import collecting, keep_command, tell_collect
from harness.cli.terminal import Terminal, folded, prose
from harness.cli.values import listed, read_joined
from harness.policy.types import UserError
from workloads.usual import SIZED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.run.shard import Shard
    from harness.study.deploy import Way
    from harness.study.size import Outlook

LEAST_GROWTH = 0.01  # times the traffic
RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
MOST_GPUS = 4096


@click.command(
    cls=options.Grouped,
    epilog=options.examples(
        "bench size --trace log.csv --models mine.toml --slo absolute:ttft=1,tpot=0.05",
        "bench size --trace mine.parquet --models mine.toml --gpu h100,l40s --gpus 1-32 --target 99 "
        "--price h100=2.5,l40s=0.9 --slo absolute:ttft=2,tpot=0.1",
        "bench size --trace azure-conv --spread 12:zipf=1.2 --models 'llama-3.1-8b*12' --spare 1 --node 8",
    ),
)
@options.TRACED
@click.option(
    "--gpu",
    "kinds",
    default="h100",
    show_default=True,
    metavar="KIND[,KIND]",
    shell_complete=options.complete(options.gpu_names, many=True),
    help="Kinds of GPU, each tried by itself; h100*2+l40s*4 is one cluster of two kinds.",
)
@click.option(
    "--gpus",
    "span",
    default="1-64",
    show_default=True,
    metavar="LEAST-MOST",
    help="Counts that are tried first; fewer follow while they hold, unless one count is given. Of several "
    "kinds in one cluster, whole copies of it.",
)
@options.target("Share of requests that meet their SLO, for every model.")
@options.systems("Strategies; all: every one.", default=",".join(SIZED), show_default=True)
@click.option(
    "--price",
    multiple=True,
    callback=read_joined,
    metavar="KIND=USD",
    help="Price of a GPU an hour, instead of the listed one; several by commas.",
)
@options.count("--spare", "Spare GPUs to rent: arithmetic, no failure is run.", least=0, most=MOST_GPUS, default=0)
@options.count("--node", "GPUs of a node: whole ones are bought.", most=MOST_GPUS, default=1)
@click.option(
    "--grow", default="1.25,1.5,2", show_default=True, metavar="LIST", help="Times the traffic, of the answer."
)
@click.option(
    "--deploy",
    type=click.Choice(["vllm", "llama-swap", "helm"]),
    metavar="WAY",
    help="Write files that start the answer: vllm (a shell script), llama-swap or helm (YAML).",
)
@options.SERVING
@options.SLO
@click.option("--definition", type=options.DEFINITION, help="Definition of attainment.  [default: that of --slo]")
@options.count("--windows", "Windows that a generator draws.", most=50, default=3)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option(
    "--dry-run", is_flag=True, help="Show the streams, the counts that may be tried and the time; run nothing."
)
@options.PARTS
@options.RUNNING
@options.out("Folder for runs, the figure, and logs that are converted.  [default: results/]")
@asks
def size(
    asked: Asked,
    *,
    kinds: str,
    span: str,
    target: float,
    price: dict[str, str],
    spare: int,
    node: int,
    grow: str,
    deploy: Way | None,
    windows: int,
    shard: Shard | None,
    collect: bool,
    as_json: bool,
    no_plot: bool,
    dry_run: bool,
) -> None:
    """Find the fewest GPUs, and what they cost.

    On these, a strategy meets the SLOs of every model in the whole trace. A trace of more than two hours is judged by
    its busiest hour too. The answer names the cheapest, what binds it, which models share a GPU, and what more traffic
    takes.
    """
    from harness.answers import size as words
    from harness.study import deploy as deployed
    from harness.study.size import SizeSearch
    from harness.study.size_kept import keep
    from harness.study.sized import Question

    if "rate_scale" in asked.setting:
        raise UserError("--set rate_scale: traffic is replayed as it is; --grow asks for multiples of it")
    least, most = _span(span)
    question = Question.of(
        asked.setting,
        listed("--gpu", kinds) or [],
        options.every_of(listed("--systems", asked.systems) or [], but=("unshared",)),
        price,
        asked.rule,
        asked.definition,
        _growth(grow),
        target=target / 100,
        least=least,
        most=most,
        spare=spare,
        node=node,
        windows=windows,
    )
    if deploy is not None:
        deployed.deployable(question)
    folder = asked.folder
    if dry_run:
        _dry(*SizeSearch(question, folder).outlook())
        return
    with Terminal() as progress:
        if shard is not None:
            mine, every = SizeSearch(question, folder, asked.workers, progress).part(shard)
        else:
            with collecting(lambda: SizeSearch(question, folder).progress(), on=collect):
                sized = SizeSearch(question, folder, asked.workers, progress).done()
    if shard is not None:
        click.echo(f"shard {shard}: {mine} of {every} searches are done, their runs stored in {short_path(folder)}")
        tell_collect()
        return
    answer = keep(sized, text := words.words(sized), folder)
    keep_command(answer)
    if as_json:
        click.echo(json.dumps(words.facts(sized), indent=1))
    else:
        first, *rest = words.lines(text, len(sized.placed))
        prose(first)
        folded(rest, WIDTH)
    figure = []
    if not no_plot and not all(row.unfit for row in sized.tried):
        from plots import fig_size

        figure = fig_size.render(answer, asked.figure(answer.name), f"bench plot {short_path(answer)}")[:1]
    files = [] if deploy is None else deployed.write(sized, deploy, folder, answer)
    click.echo(" · ".join(short_path(path) for path in (answer, *figure, *files)), err=as_json)
    if sized.failed and not as_json:
        click.echo(f"next: bench explain {short_path(answer)}")


def _dry(searches: Sequence[Outlook], streams: Sequence[str]) -> None:
    """Show the streams of the log, then each search with its cost."""
    rows = [("GPU", "system", "GPUs", "runs", "minutes")]
    for search in searches:
        span, runs, minutes = f"{search.least}-{search.most}", f"<= {search.runs}", f"<= {search.seconds / 60:.2g}"
        rows.append((search.kind, search.system, span, runs, minutes))
    total = sum(search.seconds for search in searches) / 60
    for line in (*streams, *aligned(rows)):
        click.echo(line)
    click.echo(
        f"at most {total:.2g} min on one core, beside base runs of the SLO; stored runs that are current cost nothing"
    )


def _span(text: str) -> tuple[int, int]:
    match = RANGE.fullmatch(text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST_GPUS:
        raise UserError(f'--gpus "{text}" is not LEAST-MOST, as 1-64, up to {MOST_GPUS}')
    return least, most


def _growth(text: str) -> list[float]:
    try:
        times = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        times = [0.0]
    if bad := [x for x in times if not LEAST_GROWTH <= x <= 100]:
        raise UserError(f'--grow "{text}": {bad[0]:g} is not a number from {LEAST_GROWTH:g} to 100')
    return times
