"""Options that several commands share, with their completion and their readers."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from harness.cli import values
from harness.cli.values import WORDS, Number, listed, read_joined
from harness.policy.types import UserError
from harness.rows.definitions import DEFINITIONS
from workloads.usual import TRACE, WORLD

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
FIGURES = ROOT / "plots" / "out"
WIDTH = 80  # characters of a line of help
INDENT = 4  # spaces before an example


def examples(*lines: str) -> str:
    """Format example commands as the epilog of a command's help.

    A command of more than WIDTH characters is broken into lines with backslashes, and its comment is put above it.
    """
    shown = []
    for line in lines:
        command, _, comment = line.partition("  # ")
        if comment and len(line) + INDENT > WIDTH:
            shown.append(f"# {comment}")
        whole = command if comment and len(line) + INDENT > WIDTH else line
        room = WIDTH - INDENT - len(" \\")
        joined = re.sub(r"( --?[a-z-]+) (?!-)", "\\1\0", whole)  # an option and its value stay together
        parts = textwrap.wrap(joined, room, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
        parts = [part.replace("\0", " ") for part in parts]
        shown += [f"{part} \\" for part in parts[:-1]] + parts[-1:] if len(whole) + INDENT > WIDTH else [whole]
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in shown)


# Long lists of options are shown in these groups: a heading, and the options under it.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What runs": (
        "only", "full", "systems", "spread", "trace", "traces", "rename", "drop-streams", "shift", "models", "served",
        "prefix-cache", "plan", "assign", "placement", "rate-scale", "scaling",
    ),
    "On what": ("gpus", "gpu", "engine", "host", "table", "set", "price", "spare", "node", "grow", "deploy"),
    "By which measure": ("slo", "slo-scale", "definition", "target", "controls"),
    "How long": (
        "seeds", "windows", "precision", "budget", "dry-run", "shard", "collect", "status", "policy-limit-s", "workers",
        "executor",
    ),
}  # fmt: skip


class Grouped(click.Command):
    """A command whose help shows options by group, as in GROUPS; options of no group come last, under "Output"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group that has options."""
        records = {param: param.get_help_record(ctx) for param in self.get_params(ctx)}
        of = {name: group for group, names in GROUPS.items() for name in names}
        for group in (*GROUPS, "Output"):
            rows = [
                row
                for param, row in records.items()
                if row and of.get(max(param.opts, key=len).lstrip("-"), "Output") == group
            ]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


# ------------------------------------------------------------------ completion


def system_names() -> list[str]:
    """Return the names of the systems."""
    from harness.loop import system

    return system.names()


def stems(folder: str) -> list[str]:
    """Return the sorted names, without their endings, of the TOML files in a folder of the repository."""
    return sorted(path.stem for path in (ROOT / folder).glob("*.toml"))


def study_names() -> list[str]:
    """Return the names of the studies."""
    return stems("harness/study/studies")


def gpu_names() -> list[str]:
    """Return the kinds of GPU that have a cost table."""
    return [name for name in stems("harness/engines/costs/tables") if name != "hosts"]


def trace_names() -> list[str]:
    """Return the names of the traces."""
    import tomllib

    return sorted(tomllib.loads((ROOT / "traces" / "manifest.toml").read_text("utf-8")))


def every_of(names: Sequence[str], but: Sequence[str] = ()) -> list[str]:
    """Return `names`, with `all` replaced by every system that is neither in `names` nor in `but`."""
    others = [name for name in system_names() if name not in {*names, *but}]
    return [name for text in names for name in (others if text == "all" else [text])]


def complete(names: Callable[[], Iterable[str]], *, many: bool = False) -> Callable[..., list[str]]:
    """Return a shell completion from names; with `many`, it completes the last entry of a list separated by commas."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",") if many else ("", "", typed)
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


# ------------------------------------------------------------------ options


def systems(text: str, **more: Any) -> Callable[[Any], Any]:
    """Return the option that lists systems, with its help."""
    names = complete(system_names, many=True)
    return click.option("--systems", metavar="LIST", shell_complete=names, help=text, **more)


def target(text: str) -> Callable[[Any], Any]:
    """Return the option for a level of attainment in percent, with its help."""
    level = Number(50, 100, min_open=True, max_open=True)
    return click.option("--target", type=level, default=99.0, show_default=True, metavar="PERCENT", help=text)


def out(text: str) -> Callable[[Any], Any]:
    """Return the option for the folder of runs, with its help."""
    return click.option("-o", "--out", type=values.PATH, is_eager=True, metavar="DIR", help=text)


def grouped(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine several options into one decorator."""

    def wrap(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return wrap


def count(
    name: str, text: str, *, least: int = 1, most: int | None = None, default: int | None = None, metavar: str = "N"
) -> Callable[[Any], Any]:
    """Return an option that takes a whole number; its help shows the default, if there is one."""
    kind = click.IntRange(least, most)
    return click.option(name, type=kind, default=default, show_default=True, metavar=metavar, help=text)


ALL = click.option("--all", "every", is_flag=True, help="Every line and column.  [default: one screen]")
OUT = out("Folder for runs, and for logs that are converted.  [default: results/]")


def _limited(ctx: click.Context, _param: click.Parameter, seconds: float) -> float:
    """Set the time limit of a policy's answers, in seconds, for this command alone."""
    from harness.loop.guard import LIMIT_S

    token = LIMIT_S.set(seconds)
    ctx.call_on_close(lambda: LIMIT_S.reset(token))
    return seconds


LIMIT = click.option(
    "--policy-limit-s",
    type=Number(values.SHORTEST_S, values.LONGEST_S),
    default=60.0,
    show_default=True,
    metavar="S",
    callback=_limited,
    expose_value=False,
    help="Wall-clock seconds a policy may take for an answer; a slower system is left out.",
)


def _executed(ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    """Execute runs on the cluster that the option names, for as long as this command runs."""
    if text is not None and not ctx.resilient_parsing:
        from harness.run import cluster, executor

        ctx.with_resource(executor.using(cluster.named(text)))
    return text


EXECUTOR = click.option(
    "--executor",
    metavar="KIND[:ADDRESS]",
    callback=_executed,
    expose_value=False,
    help="Run on a cluster: ray or ray:ADDRESS (make cluster).",
)


RUNNING = grouped(
    LIMIT,
    click.option(
        "--workers", type=values.PROCESSES, metavar="N", help="Worker processes.  [default: as many as pay off]"
    ),
    EXECUTOR,
)


def read_shard(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
    """Read `--shard I/N`."""
    from harness.run import shard

    return None if text is None else shard.read(text)


def _collected(ctx: click.Context, _param: click.Parameter, on: bool) -> bool:
    """Remove --collect from the stored command line, so that suggested next commands lack it."""
    ctx.meta[WORDS] = [word for word in ctx.meta.get(WORDS, ()) if word != "--collect"]
    return on


PARTS = grouped(
    click.option(
        "--shard",
        metavar="I/N",
        callback=read_shard,
        help="Run only this part of the work, the I-th of N; --collect shows the results of all.",
    ),
    click.option(
        "--collect", is_flag=True, callback=_collected, help="Run nothing: show results, or which runs are missing."
    ),
)


def _heard(ctx: click.Context, _param: click.Parameter, level: str | None) -> None:
    """Set the verbosity of stderr for as long as this command runs."""
    from harness.cli.terminal import LEVEL

    if level is not None:
        token = LEVEL.set(level)
        ctx.call_on_close(lambda: LEVEL.reset(token))


HEARD = [  # options of every command
    click.Option(["-v", "--verbose", "heard_verbose"], flag_value="verbose", type=str, default=None, expose_value=False,
                 callback=_heard, help="Report progress on stderr, a line a second, with the time."),
    click.Option(["-q", "--quiet", "heard_quiet"], flag_value="quiet", type=str, default=None, expose_value=False,
                 callback=_heard, help="Print only warnings and errors on stderr."),
]  # fmt: skip


def _trusted(_ctx: click.Context, _param: click.Parameter, on: bool) -> None:
    """Allow this command to import any file of code, not only those that its user names."""
    from harness.loop import strangers

    if on:
        strangers.trust()


TRUST = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    callback=_trusted,
    help="Run the system's file that stored results name. It is code: know who wrote it.",
)


def _of_log(name: str, read: Callable[[click.Context, click.Parameter, Any], Any], **more: Any) -> Callable[[Any], Any]:
    """Return an option on the streams or sessions of a log; its value, read by `read`, is stored for `_as_trace`."""

    def keep(ctx: click.Context, param: click.Parameter, given: Any) -> None:
        ctx.meta[f"bench.{param.name}"] = read(ctx, param, given)

    return click.option(name, is_eager=True, expose_value=False, callback=keep, **more)


def _read_spread(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
    from traces.deal import spread

    return None if text is None else spread(text)


def _read_dropped(_ctx: click.Context, param: click.Parameter, text: str | None) -> list[str]:
    return listed(param.opts[0], text) or []


def _read_shifts(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, float]:
    given = dict[str, float]()
    for name, text in read_joined(ctx, param, pairs).items():
        try:
            given[name] = float(text.removesuffix("s"))
        except ValueError:
            given[name] = math.nan
        if not math.isfinite(given[name]):
            raise UserError(f'--shift {name}: "{text}" is no number of seconds')
    return given


def chosen_streams(ctx: click.Context) -> Any:
    """Return the changes to a log's streams (rename, drop, shift) that the command line asks for; None without any.

    Raises UserError if --drop-streams is '*' and the command has no set of models.
    """
    from harness.run.setup import load_models
    from traces.chosen import EVERY, chosen

    rename, drop, shift_s = (ctx.meta.get(f"bench.{key}") for key in ("rename", "drop_streams", "shift"))
    models = ctx.params.get("models")
    every = EVERY in (drop or ())
    if every and models is None:
        raise UserError(f"--drop-streams '{EVERY}' needs a set of models: name the streams")
    members = load_models(str(models)).members if every else ()
    return chosen(rename or {}, drop or (), [member.stream or member.name for member in members], shift_s or {})


def _as_trace(ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Convert a log by the options on its streams and sessions, and return the path of the trace.

    Stderr says how the log was converted. A text that names no file, and to which no such option applies, is the name
    of a trace. It is returned as it is.
    """
    how, streams = ctx.meta.get("bench.spread"), chosen_streams(ctx)
    if how is None and streams is None and not Path(text).is_file():
        return text
    from traces.kept import meant

    trace, report = meant(text, (ctx.params.get("out") or RESULTS) / "traces", how, streams)
    if report:
        click.echo(f"{report}: {os.path.relpath(trace)}", err=True)
    return trace


SCALING = click.option(
    "--scaling",
    type=click.Choice(["none", "rotate", "replicate", "time", "clients"]),
    default="rotate",
    show_default=True,
    help="How the rate is scaled.",
)
ONCE = 2  # seeds with --scaling none: each half runs once
FIRST_SEEDS, MORE = 9, 1_000_000  # seeds of each point, and simulated requests for more seeds of undecided systems
SEEDS = click.option(
    "--seeds",
    type=values.SOME_SEEDS,
    metavar="N",
    help=f"Seeds of each point.  [default: {FIRST_SEEDS}, then as --budget allows]",
)
ENOUGH = grouped(
    click.option(
        "--precision",
        type=Number(0, 1, min_open=True),
        metavar="SHARE",
        help="Add no more seeds once a ratio's interval is within this share.  [default: 0.1]",
    ),
    click.option(
        "--budget",
        type=values.Whole(0, values.MOST_INT),
        metavar="N",
        help="Simulated requests to spend on more seeds of undecided systems, in each panel.",
    ),
)
DEFINITION = click.Choice(list(DEFINITIONS))
SLO = grouped(
    click.option(
        "--slo",
        metavar="RULE",
        help="Base of the SLO: P95 (measured on dedicated; P95@h100: on that kind), solo, released, "
        "absolute:ttft=S,tpot=S, classes:FILE.toml.  [default: released where the set has it (light8), "
        "else P95]",
    ),
    click.option("--slo-scale", type=Number(), metavar="X", help="Multiple of the base.  [default: 5; 1 for seconds]"),
)
STREAMS = grouped(
    _of_log("--rename", read_joined, multiple=True, metavar="OLD=NEW",
            help="Give a stream of the log the name of its model; several by commas."),
    _of_log("--drop-streams", _read_dropped, metavar="NAME,...",
            help="Leave out requests of these streams of the log; '*': all for which the set has no model."),
    _of_log("--shift", _read_shifts, multiple=True, metavar="NAME=S",
            help="Let requests of a stream, or of a gateway (column src), come S seconds later (-S: earlier)."),
)  # fmt: skip
TRACED = grouped(
    _of_log("--spread", _read_spread, metavar="N[:FIELD=V,...]",
            help="Deal the log's sessions to N models, as 12:zipf=1.2,idle=some,together=pairs."),
    click.option("--trace", default=TRACE, show_default=True, callback=_as_trace,
                 shell_complete=complete(trace_names),
                 metavar="NAME|FILE", help="Trace by name, a generator as NAME+FIELD=VALUE, a canonical Parquet, or a "
                 "log, which is converted."),
    STREAMS,
    click.option("--models", default=WORLD["models"], show_default=True, is_eager=True, metavar="SET|FILE|SHAPES",
                 shell_complete=complete(lambda: stems("workloads/sets")),
                 help="Model set by name, a TOML file, or models (bench list models) as "
                 "llama-3.1-8b*2,Qwen/Qwen3-14B,m/config.json:tp=2:dtype=fp8."),
)  # fmt: skip
SERVED = grouped(
    count(
        "--served",
        "Longest prompt + output, in tokens.  [default: as the trace needs, up to the model's limit]",
        least=2,
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=None,
        help="Reuse the KV cache of shared prefixes.  [default: if the trace has prefixes]",
    ),
)
HOSTED = grouped(
    click.option(
        "--host",
        default="vllm-0.15",
        show_default=True,
        metavar="PROFILE",
        help="CPU cost profile of a serving engine (bench list hosts).",
    ),
    click.option("--table", type=str, metavar="FILE", help="Cost table (bench calibrate writes one)."),
)
SET = click.option(
    "--set",
    "settings",
    multiple=True,
    callback=values.read_settings,
    metavar="KEY=VALUE",
    help="Any other field of a spec, as chunk_tokens=512 (repeat).",
)
SERVING = grouped(SERVED, HOSTED, SET)
SETTING = grouped(
    TRACED,
    SERVED,
    click.option("--gpus", type=values.Gpus(), default=WORLD["gpus"], show_default=True, metavar="N",
                 help="Number of GPUs. light8 on one H100 has 67.28 GiB for weights and KV, as in Prism's release, "
                 "unless --set changes its memory. Elsewhere processes reduce a GPU's memory."),
    click.option("--gpu", default=WORLD["gpu"], show_default=True, metavar="KIND", shell_complete=complete(gpu_names),
                 help="Kind of GPU; h100*2+l40s*4 is one cluster of two kinds."),
    click.option("--engine", default=WORLD["engine"], show_default=True, metavar="NAME[+FIELD=VALUE...]",
                 help="Simulator or real servers: a name (bench list engines) or a .py file. For running "
                 "OpenAI-compatible servers attach+urls=URL[,URL][+key_env=NAME]; models match by name, else in order."
                 ),
    HOSTED,
    click.option("--plan", type=click.Choice(["held-out", "window", "trace", "prefix"]), default="held-out",
                 show_default=True, help="Requests that offline planners see: the half of the trace that is not "
                 "replayed (synthetic: another seed), the replayed window, the trace, or its first tenth."),
    click.option("--assign", type=click.Choice(["released", "shuffled", "square"]), default="released",
                 show_default=True,
                 help="Streams of the models. Released: as the set says, else by equal names, else in the trace's "
                 "order or by traffic; the output names the rule. Shuffled: by each seed. Square: a Latin square of "
                 "seeds, where each of the busiest streams meets each size of model once."),
    click.option("--placement", default="", metavar="FILE|SYSTEM",
                 help="One placement for all systems: a TOML file of MODEL = [GPU, ...], or a system's first one.  "
                 "[default: each system's own]"),
    SET,
)  # fmt: skip


def slo_rule(slo: str | None, scale: float | None, models: str) -> str:
    """Return the SLO rule with its scale, as in `5xP95`.

    If `slo` is None, the rule is the usual one of the set `models`; if `scale` is None, the scale is the usual one.
    """
    from harness.run.setup import load_models
    from workloads.slo import full_rule

    return full_rule(slo, scale, load_models(models))
