"""`bench trace stats`, `convert` and `make`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.commands import short_path
from harness.answers.table import aligned
from harness.cli.options import ALL, FIGURES, STREAMS, chosen_streams, complete, examples, trace_names
from harness.cli.terminal import room, screen
from harness.cli.values import MOST_INT, PATH, POSITIVE, TARGET, Whole, read_pairs
from harness.policy.types import UserError
from traces import readers

if TYPE_CHECKING:
    from traces.load import Trace

NONE = "-"  # stands for a fact that a trace lacks
HOTTEST = 4  # models


@click.group(epilog=examples("bench trace stats arena-chat", "bench trace convert log.csv --column arrival_s=time ..."))
def trace() -> None:
    """Look at traces, convert logs, draw synthetic ones."""


@trace.command(epilog=examples("bench trace stats arena-chat", "bench trace stats mine.parquet --json"))
@click.argument("name", shell_complete=complete(trace_names), metavar="NAME|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option(
    "-o", "--out", type=TARGET, metavar="FIGURE", help="Figure to write.  [default: plots/out/trace-NAME.pdf]"
)
@ALL
def stats(name: str, as_json: bool, no_plot: bool, out: Path | None, every: bool) -> None:
    """Show a trace's popularity, bursts, idle times and lengths.

    Also its herds, its drift over hours, the hits of a prefix cache, and the shipped regime that it resembles; a figure
    shows it over time.
    """
    from harness.run.setup import load_trace
    from traces import resembles
    from traces.stats import MEANS
    from traces.stats import stats as measure

    loaded = load_trace(name)
    facts = measure(loaded)
    near = resembles.likenesses(facts)
    if as_json:
        alike = [item._asdict() for item in near]
        click.echo(json.dumps({"notice": loaded.notice, **facts, "resembles": alike}, indent=1))
        return
    answer = (
        f"{facts['name']} ({facts['tier']}): {facts['requests']} requests of {facts['models']} models in "
        f"{facts['span_s']:g} s, {facts['rate_rps']:.3g} requests/s"
    )
    shown = {key: _fact(facts[key]) for key in MEANS}
    lengths = [f"{key}: {shown.pop(key)}" for key in ("prompt_tokens", "output_tokens")]
    rows = [(key, text, MEANS[key]) for key, text in shown.items() if every or text != NONE]
    top = sorted(facts["counts"].items(), key=lambda pair: -pair[1])
    hottest = "hottest: " + ", ".join(f"{model} {count}" for model, count in (top if every else top[:HOTTEST]))
    notice = [*filter(None, (loaded.notice, loaded.note and f"{facts['name']}: {loaded.note}"))]
    last = [resembles.sentence(facts, near), *([] if no_plot else [_drawn(loaded, answer, name, out)])]
    table = aligned(rows, None if every else room())
    screen([_sentence(facts), answer, *notice, *table, *lengths, hottest, *last], every=every)


def _sentence(facts: Mapping[str, Any]) -> str:
    """Return a sentence on how a trace's load is spread, how long its models pause, and how long its requests are."""
    idle = facts["idle_median_s"]
    rests = f" A pause of more than 10 s is {idle[1]:.0f} s long in the median." if idle else ""
    prompt, output = (facts[key]["p50"] for key in ("prompt_tokens", "output_tokens"))
    busiest = f"of {facts['models']} models the busiest has {100 * facts['top1_share']:.0f} % of the requests."
    return f"{facts['name']}: {busiest}{rests} Prompts have {prompt:.0f} tokens in the median, outputs {output:.0f}."


def _drawn(loaded: Trace, answer: str, name: str, out: Path | None) -> str:
    """Draw a trace; return the path of its figure."""
    from plots import fig_trace

    stem = FIGURES / f"trace-{loaded.name.partition('+')[0].replace('/', '-')}" if out is None else out.with_suffix("")
    arrays = {key: getattr(loaded, key) for key in ("arrival_s", "model", "prompt_tokens", "output_tokens", "span_s")}
    caption = answer + (f". {loaded.note}" if loaded.note else "") + "."
    return short_path(fig_trace.render(arrays, loaded.models, caption, stem, f"bench trace stats {name}")[0])


def _fact(value: Any) -> str:
    if value is None or value == []:
        return NONE
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " / ".join(map(_fact, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _unpacked(ctx: click.Context, _param: click.Parameter, most_gb: float | None) -> None:
    """Allow a packed file to unpack to `most_gb` GB for as long as this command runs."""
    from traces.guarded import MOST_GB

    if most_gb is not None:
        token = MOST_GB.set(most_gb)
        ctx.call_on_close(lambda: MOST_GB.reset(token))


@trace.command(
    epilog=examples(
        "bench trace convert --from burstgpt BurstGPT_1.csv -o burstgpt.parquet",
        "bench trace convert log.csv -o mine.parquet --column arrival_s=time --column model=name "
        "--column prompt_tokens=in --column output_tokens=out --time-unit ms",
        "bench compare --systems static,chunked --trace mine.parquet --models llama-3.1-8b*4",
    )
)
@click.argument("source", type=PATH, metavar="FILE")
@click.option("-o", "--out", type=TARGET, required=True, metavar="OUT.parquet", help="File to write.")
@click.option(
    "--from",
    "reader",
    type=click.Choice(readers.names()),
    metavar="FORMAT",
    help="A known format (bench list traces).  [default: as its columns tell]",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    callback=read_pairs,
    metavar="CANONICAL=OWN",
    help="A column by its name in the file, with dots inside of objects; usual names need none.",
)
@click.option(
    "--time-unit",
    type=click.Choice(["s", "ms", "us", "ns", "clock", "datetime"]),
    help="Unit of arrival_s; clock: HH:MM:SS.mmm.  [default: guessed, and said]",
)
@click.option("--model", metavar="NAME", help="One model for all rows, instead of a column.")
@click.option("--name", metavar="NAME", help="Name of the trace.  [default: the file's]")
@click.option(
    "--tier", type=click.Choice(["replayed", "composed", "synthetic"]), help="Tier of the trace.  [default: replayed]"
)
@click.option("--licence", metavar="TEXT", help="Licence of the data.  [default: not stated]")
@click.option(
    "--span-s", type=POSITIVE, metavar="S", help="Period of the trace.  [default: the last stamp and one mean gap]"
)
@click.option("--drop-bad", is_flag=True, help="Leave out rows without time, tokens or model; count them by reason.")
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Leave out rows with more tokens.")
@click.option(
    "--spread", metavar="N[:FIELD=V,...]", help="Deal sessions to N models, as 12:zipf=1.2,idle=some,together=pairs."
)
@STREAMS
@click.option("--rate-rps", type=POSITIVE, metavar="R", help="Rate that --from servegen draws.  [default: 10]")
@click.option("--block-tokens", type=click.IntRange(1), metavar="N", help="Block size of prefix_hashes.")
@click.option("--sort", is_flag=True, help="Sort the rows by time.")
@click.option("--trust-times", is_flag=True, help="Accept times that look like another unit.")
@click.option(
    "--unpack-gb",
    type=POSITIVE,
    callback=_unpacked,
    expose_value=False,
    metavar="GB",
    help="Most that a packed file may unpack to.  [default: 8]",
)
def convert(
    source: Path,
    out: Path,
    reader: str | None,
    columns: dict[str, str],
    spread: str | None,
    **options: Any,
) -> None:
    """Make a canonical trace of a log or a released format.

    FILE is CSV, Parquet, or JSON in any arrangement; text may be in gzip. For prometheus and servegen it is
    a folder. Its format is known by its columns, or named by --from; other options replace the settings of a format. In
    any other file, columns are known by their usual names. Of a log only stamps, counts, names of models and keyed
    hashes of sessions and prompt blocks are read. The column prefix_hashes has the ids of the blocks that prompts
    share; --block-tokens is the size of a block.
    """
    from traces import convert as converter
    from traces import deal, schema
    from traces.kept import changed

    if out.suffix != ".parquet":
        raise click.BadParameter("a canonical trace is a .parquet", param_hint="--out")
    if reader is not None and columns:
        raise UserError(f"--from {reader} knows its columns: give no --column")
    if reader != "servegen" and options["rate_rps"] is not None:
        raise UserError("--rate-rps is of --from servegen: a log has its own rate (bench compare --rate-scale)")
    how = deal.spread(spread) if spread else None
    given = {name: value for name, value in options.items() if value not in {None, False}}
    if columns or (reader is None and "block_tokens" in given):
        rows, report = converter.table(source, columns, **given), source.name
        report += readers.summary(schema.metadata(rows))
    elif reader is not None:
        rows = readers.read(reader, source, **given)
        report = f"{source.name} read as a log of {reader}{readers.summary(schema.metadata(rows))}"
    else:
        rows, report = readers.converted(source, **given)
    rows, report = changed(rows, report, how, chosen_streams(click.get_current_context()))
    schema.write(rows, out)
    span_s = schema.metadata(rows)["span_s"]
    click.echo(report)
    count, models = rows.num_rows, len(rows["model"].unique())
    click.echo(f"{count:,} requests of {models} models in {span_s:g} s, {count / span_s:.3g} requests/s")
    click.echo(short_path(out))
    click.echo(f"next: bench trace stats {shlex.quote(short_path(out))}")


def _makers() -> list[str]:
    from traces.synthetic import PRESETS

    return list(PRESETS)


@trace.command(
    epilog=examples(
        "bench trace make hyperbolic-like --models 18 --span 7200",
        "bench trace make arena-like --models 8 --seed 7 -o mine.parquet",
        "bench trace make aegaeon-like+rate_rps=0.5 -o mine.parquet",
    )
)
@click.argument("name", shell_complete=complete(_makers), metavar="NAME[+FIELD=VALUE...]")
@click.option("--models", type=click.IntRange(1), metavar="N", help="Number of streams.  [default: the preset's]")
@click.option("--span", "span_s", type=POSITIVE, metavar="S", help="Length of the trace.  [default: the preset's]")
@click.option("--seed", default=0, show_default=True, type=Whole(0, MOST_INT), metavar="N", help="Seed of all draws.")
@click.option("-o", "--out", type=TARGET, metavar="OUT.parquet", help="File to write.  [default: none]")
def make(name: str, models: int | None, span_s: float | None, seed: int, out: Path | None) -> None:
    """Draw a synthetic trace from a fitted generator.

    Its statistics are shown beside the measured ones that it is fitted to.
    """
    from traces import drawing, realism, schema, synthetic
    from traces.load import of_table

    changes = {"models": models, "span_s": span_s}
    p = synthetic.preset(name + "".join(f"+{key}={value}" for key, value in changes.items() if value is not None))
    if out is not None and out.suffix != ".parquet":
        raise click.BadParameter("a canonical trace is a .parquet", param_hint="--out")
    compared = realism.realism(str(p))
    rows = drawing.table(p, seed, None if compared is None else compared.verdict)
    click.echo(f"{p} · {rows.num_rows} requests of {p.models} models in {p.span_s:g} s, seed {seed}")
    if compared is None:
        click.echo("no measured target exists for it (bench trace stats describes it)")
    else:
        drawn = realism.measure(of_table(rows, str(p)), compared.target)
        click.echo("\n".join(aligned(realism.table(drawn, compared.mean, compared.target))))
        click.echo(f"target: {compared.target.source}; windows of {compared.target.window_s:g} s")
        click.echo(f"fit {compared.verdict}")
    if out is not None:
        schema.write(rows, out)
        click.echo(short_path(out))
