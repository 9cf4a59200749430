"""`bench`: the command line. Only click is imported at the start; each command imports what it needs."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.experiment.sweep import Compared, Entry, Judge
    from harness.report.table import View

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
FIGURES = ROOT / "plots" / "out"
DEFAULT_SCALE = 5.0
PROGRESS_HZ = 4
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # of a disk, wherever it was written to
WORDS = "bench.words"
ROOM = 120  # characters of a line where the width of the terminal is not known


# ------------------------------------------------------------------ errors, output


class Bench(click.Group):
    """A group whose user errors are one line with exit code 2; a bug keeps its traceback and exits with 1."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, and keep its words for those that say what to ask next."""
        ctx.meta[WORDS] = list(args)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, and turn what ends a command into its exit code."""
        from harness.loop.guard import Terminated
        from harness.policy.types import UserError

        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            code = 2
        except click.Abort as error:
            click.echo("interrupted: finished runs are kept; the same command goes on from there", err=True)
            code = 143 if isinstance(error.__cause__, Terminated) else 130
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except BrokenPipeError:  # the reader of our output left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            click.echo(f"error: cannot write {error.filename or 'a file'}: {error.strerror} (free the disk)", err=True)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


class Terminal:
    """Tells the user how a sweep goes on: lines and a bar on stderr, the bar only where someone watches."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._phase = ""
        self._quiet = not sys.stderr.isatty() or bool(os.environ.get("CI"))
        self.kept: tuple[int, int] = (0, 0)

    def say(self, line: str) -> None:
        """Print one line."""
        click.echo(line, err=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bar of a phase; a new phase starts a new one."""
        if what != self._phase:
            self.close()
        self._phase, self.kept = what, (done, total)
        if self._quiet or done == total:
            self.close()
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=what, unit="run", mininterval=1 / PROGRESS_HZ, leave=False,
                             file=sys.stderr, dynamic_ncols=True)  # fmt: skip
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is KeyboardInterrupt:
            self.say(f"{self._phase or 'runs'}: {self.kept[0]} of {self.kept[1]} done and kept")


def _shown(path: Path) -> str:
    """A path as short as it can be said here."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return str(path)
    return near if not near.startswith("..") else str(path)


def _again(option: str, value: str) -> str:
    """The command that runs, once more, with another value of an option."""
    words = iter(click.get_current_context().meta[WORDS])
    kept = []
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return shlex.join(["bench", *kept, option, value])


def _examples(*lines: str) -> dict[str, str]:
    """The end of a command's help."""
    return {"epilog": "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)}


# ------------------------------------------------------------------ completion


def _systems() -> list[str]:
    from harness.loop import system

    return system.names()


def _stems(folder: str, pattern: str = "*.toml") -> list[str]:
    return sorted(path.stem for path in (ROOT / folder).glob(pattern))


def _gpus() -> list[str]:
    return [name for name in _stems("harness/engines/costs/tables") if name != "hosts"]


def _traces() -> list[str]:
    import tomllib

    return sorted(tomllib.loads((ROOT / "traces" / "manifest.toml").read_text("utf-8")))


def _complete(names: Callable[[], Iterable[str]], *, many: bool = False) -> Callable[..., list[str]]:
    """Complete from names; in a list, its last part."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",") if many else ("", "", typed)
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


# ------------------------------------------------------------------ shared options


def _rates(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    from harness.policy.types import UserError

    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f'--rate-scale "{text}" is not a list of numbers, as in 1,2,4') from None
    if bad := [rate for rate in rates if not 0 < rate < float("inf")]:
        raise UserError(f"--rate-scale {bad[0]:g} is not a number above 0")
    return rates


def _settings(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    """`--set KEY=VALUE` as TOML values; a bare word is a string."""
    from harness.experiment.spec import toml_value
    from harness.policy.types import UserError

    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f'"{pair}" is not KEY=VALUE')
        found[key.strip()] = toml_value(value.strip())
    return found


def _grouped(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrap(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return wrap


OUT = click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where runs go.  [default: results/]"
)


def _limited(ctx: click.Context, _param: click.Parameter, seconds: float) -> float:
    """Limit a policy's calls for as long as this command runs."""
    from harness.loop.guard import LIMIT_S

    token = LIMIT_S.set(seconds)
    ctx.call_on_close(lambda: LIMIT_S.reset(token))
    return seconds


LIMIT = click.option("--policy-limit-s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
                     metavar="S", callback=_limited, expose_value=False,
                     help="Wall-clock seconds that a policy may take for an answer; a system that takes longer is "
                     "left out.")  # fmt: skip
WORKERS = click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes.  [default: as many as pay]")
DEFINITION = click.Choice(["both", "ttft", "tpot", "e2e", "token", "qos"])
SLO = _grouped(
    click.option("--slo", metavar="RULE", default="P95", show_default=True,
                 help="Base of the SLO: P95 (measured on dedicated), solo, released, absolute:ttft=S,tpot=S, "
                 "classes:FILE.toml."),
    click.option("--slo-scale", type=float, metavar="X",
                 help="Times the base.  [default: 5; of seconds 1]"),
)  # fmt: skip
SETTING = _grouped(
    click.option("--trace", default="arena-chat", show_default=True, shell_complete=_complete(_traces),
                 metavar="NAME|FILE", help="Trace by name, a generator's as NAME+FIELD=VALUE, or a canonical Parquet."),
    click.option("--models", default="heavy8", show_default=True, metavar="SET|FILE|SHAPES",
                 shell_complete=_complete(lambda: _stems("workloads/sets")),
                 help="Model set by name, its TOML, or shapes as llama-3.1-8b*2,llama-3.2-1b."),
    click.option("--gpus", default=2, show_default=True, metavar="N", help="Number of GPUs."),
    click.option("--gpu", default="h100", show_default=True, metavar="KIND", shell_complete=_complete(_gpus),
                 help="Kind of GPU."),
    click.option("--engine", default="sim", show_default=True, metavar="NAME", help="Where time passes."),
    click.option("--host", default="vllm-0.15", show_default=True, metavar="PROFILE", help="Host costs."),
    click.option("--table", type=str, metavar="FILE", help="A cost table of your own."),
    click.option("--plan", type=click.Choice(["trace", "prefix"]), default="trace", show_default=True,
                 help="What offline planners see: the trace's rates, or those of its first tenth."),
    click.option("--set", "settings", multiple=True, callback=_settings, metavar="KEY=VALUE",
                 help="Any other field of a spec, as chunk_tokens=512 (repeat)."),
)  # fmt: skip


def _rule(slo: str, scale: float | None) -> str:
    """The SLO rule in full: `5xP95`."""
    from workloads.slo import BASES, scaled

    return scaled(slo, scale if scale is not None else DEFAULT_SCALE if slo in BASES else 1.0)


def _entries(systems: Sequence[str], **common: Any) -> list[Entry]:
    """Contestants as asked: NAME[:PRESET][+FIELD=VALUE...], by name or path."""
    from harness.experiment.spec import as_dict, asked, from_dict
    from harness.experiment.sweep import Entry
    from harness.policy.types import UserError

    settings = {key: value for key, value in common.items() if value is not None}
    found = []
    for text in systems:
        spec = from_dict({**settings, **asked(text)})
        assert as_dict(spec)
        found.append(Entry(spec.label, spec))
    labels = [entry.label for entry in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f'system "{twice}" is listed twice')
    return found


@click.group(cls=Bench, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
             **_examples("bench compare --systems dedicated,static,chunked,ideal",
                         "bench list",
                         'eval "$(_BENCH_COMPLETE=bash_source bench)"  # or zsh_source, fish_source'))  # fmt: skip
@click.version_option(package_name="llm-sharing-bench", prog_name="bench")
def main() -> None:
    """One bench for every way of sharing GPUs among LLMs."""


# ------------------------------------------------------------------ compare


@main.command(**_examples(
    "bench compare --systems dedicated,static,chunked,ideal",
    "bench compare --systems static:equal,static:rate,./mine.py --rate-scale 1,2,4 --seeds 5",
    "bench compare --systems chunked+tau=256,chunked --models light8 --gpu a100-80g --controls",
    "bench compare --systems static,chunked --dry-run",
))  # fmt: skip
@click.option("--systems", required=True, metavar="LIST", shell_complete=_complete(_systems, many=True),
              help="NAME[:PRESET][+FIELD=VALUE...],... or paths of .py files (bench list).")  # fmt: skip
@SETTING
@click.option("--rate-scale", "rates", callback=_rates, metavar="LIST",
              help="Rates as multiples of the trace's.  [default: around the knee, found by doubling]")  # fmt: skip
@click.option("--scaling", type=click.Choice(["none", "rotate", "replicate", "time", "clients"]), default="rotate",
              show_default=True, help="How the rate is scaled.")  # fmt: skip
@SLO
@click.option("--definition", type=DEFINITION,
              help="Attainment in the headline; token and qos store the time of each token.  "
              "[default: both; e2e for an SLO by solo latency]")  # fmt: skip
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), metavar="N", help="Runs of each point.")
@click.option("--controls", is_flag=True, help="Add an A/A copy, dedicated and ideal.")
@click.option("--no-plot", is_flag=True, help="No figure.")
@click.option("--json", "form", flag_value="json", help="The table as JSON ...")
@click.option("--csv", "form", flag_value="csv", help="... as CSV ...")
@click.option("--markdown", "form", flag_value="markdown", help="... as Markdown ...")
@click.option("--latex", "form", flag_value="latex", help="... or as LaTeX.")
@click.option("--dry-run", is_flag=True, help="Show the grid and the estimated time; run nothing.")
@LIMIT
@WORKERS
@OUT
def compare(
    *,
    systems: str,
    settings: dict[str, Any],
    rates: tuple[float, ...] | None,
    slo: str,
    slo_scale: float | None,
    definition: str | None,
    seeds: int,
    controls: bool,
    no_plot: bool,
    form: str | None,
    dry_run: bool,
    workers: int | None,
    out: Path | None,
    **setting: Any,
) -> None:
    """Compare systems on a trace: attainment, latency, and the rate at which each still meets its SLOs."""
    from harness.experiment import sweep
    from harness.experiment.run import trace_of
    from harness.report import table

    names = [name.strip() for name in systems.split(",") if name.strip()]
    if controls:
        names += [name for name in sweep.CONTROLS if name not in names]
    entries = _entries(names, **{**setting, **settings})
    if controls:
        entries.append(_copy(entries))
    folder = (out or RESULTS).resolve()
    asked = _rule(slo, slo_scale)
    if dry_run:
        _dry(entries, rates, seeds, asked, folder)
        return
    notice = trace_of(entries[0].spec.trace).notice
    if notice:
        click.echo(notice, err=form is not None)
    with Terminal() as teller:
        found = sweep.compare(entries, folder, rates=rates, seeds=seeds, rule=asked, definition=definition,
                              workers=workers, teller=teller)  # fmt: skip
    silent = (*sweep.CONTROLS, *(entry.label for entry in entries if entry.label.endswith(sweep.AA)))
    rule = definition or found.judge.definition
    shown = table.view(found.table, [e.label for e in entries], rule, sweep.LEVEL, controls=silent)
    stem = (FIGURES if out is None else folder) / f"compare-{found.folder.name.rpartition('-')[2]}"
    plots = bool(not no_plot and shown.rows)
    if form is None:
        _print(found, shown, rule, stem if plots else None)
    elif form == "json":
        click.echo(table.as_json(shown, _about(found, rule)))
    elif form == "csv":
        click.echo(table.as_csv(shown), nl=False)
    else:
        click.echo("\n".join((table.markdown if form == "markdown" else table.latex)(shown)))
    sys.stdout.flush()
    if plots:  # the table first: drawing takes longer than all else
        from plots import fig_compare

        fig_compare.render(found.folder, stem, f"bench plot {_shown(found.folder)}")
    if form is not None:
        click.echo("".join(f"{line}\n" for line in _failed(found.failed)), err=True, nl=False)
    if found.failed:
        sys.exit(2)


def _failed(failed: Mapping[str, str]) -> list[str]:
    """One line a system that left a comparison: what its policy did."""
    return [f"{label}: {why}" for label, why in failed.items()]


def _copy(entries: Sequence[Entry]) -> Entry:
    """The A/A copy of the first contestant: the same spec, on seeds of its own."""
    from dataclasses import replace

    from harness.experiment.sweep import AA, AA_SEED, CONTROLS, Entry

    label, spec = next((e for e in entries if e.label not in CONTROLS), entries[0])
    return Entry(label + AA, replace(spec, seed=spec.seed + AA_SEED))


def _dry(entries: Sequence[Entry], rates: tuple[float, ...] | None, seeds: int, rule: str, out: Path) -> None:
    """Show what would be run and how long it may take."""
    from dataclasses import replace

    from harness.experiment import sweep
    from harness.experiment.run import Failed, resolve
    from harness.report import table

    known = sweep.speeds(out)
    if entries[0].spec.scaling == "none":
        rates = rates or (1.0,)
    asked = rates or (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    lines = [("system", "gpus", "rate scales", "seeds", "runs", "seconds")]
    total, failed = 0.0, dict[str, str]()
    for label, spec in entries:
        try:
            spec = resolve(spec)
        except Failed as why:
            failed |= why.why
            continue
        spent = seeds * sum(sweep.estimate_s(replace(spec, rate_scale=rate), known) for rate in asked)
        total += spent
        words = ",".join(f"{rate:g}" for rate in asked) if rates else "knee"
        count = str(seeds * len(asked)) if rates else f"<= {seeds * 2 * len(asked)}"
        lines.append((label, str(spec.gpus), words, str(seeds), count, f"{spent:.1f}"))
    click.echo("\n".join(table.aligned(lines)))
    if rates is None:
        click.echo(
            f"knee: doubled from 1 until all are below {100 * sweep.LOW:g} %, at most to {sweep.TOP:g}; then >= 6 rates"
        )
    click.echo(
        f"SLO {rule}: {len(sweep.TUNING_SEEDS)} base runs unless they are stored" * ("P95" in rule) or f"SLO {rule}"
    )
    from_ = f"speeds of stored runs in {_shown(out)}" if known else f"{sweep.REQUESTS_PER_S:,.0f} requests/s"
    click.echo(f"about {total:.0f} s on one core ({from_}); stored runs that are current cost nothing")
    if failed:
        click.echo("\n".join(_failed(failed)))
        sys.exit(2)


def _headline(found: Compared, shown: View) -> Iterator[str]:
    """What a reader must know before the numbers."""
    from harness.experiment.run import fit_of, models_of, trace_of
    from harness.rows.checked import note
    from workloads.build import closed, plan

    spec = found.reference
    trace, models = trace_of(spec.trace), models_of(spec.models)
    forecast = plan(trace, models)
    load = f"{round(trace.span_s * sum(one.rate_rps for one in forecast.values()))} requests in {trace.span_s:g} s"
    if (loop := closed(trace)) is not None:
        load = f"{loop.clients} clients a model, {loop.sent} requests, {loop.think_s:g} s between them"
    tier = trace.tier + (f" ({trace.note})" if trace.note else "") + _fit(fit_of(trace, models))
    seeds = "1 seed, no interval" if found.seeds == 1 else f"{found.seeds} seeds"
    fidelity = " and ".join(sorted(found.table.column("fidelity").unique().to_pylist()))
    if said := note(spec.gpu, spec.host) if fidelity == "simulated" else "":
        fidelity += f" · {said}"
    base = " (P95 on dedicated)" if found.judge.rule.endswith("P95") else ""
    plans = "" if spec.plan == "trace" else " · plans from a prefix of the trace"
    yield (
        f"{trace.name} · {tier}, {len(models.members)} of {len(trace.models)} models ({_name(spec.models)}), "
        f"{load} · {spec.measured_on or f'{shown.gpus} x {spec.gpu}'} · {fidelity} · "
        f"SLO {found.judge.rule}{base} · {seeds}{plans}"
    )
    rates = ", ".join(f"{rate:g}" for rate in found.rates)
    of = f", of {rates}" if len(found.rates) > 1 else ""
    offered = "" if math.isnan(shown.offered_rps) else f" = {shown.offered_rps:.3g} req/s"
    yield f"at rate scale {shown.rate_scale:g} by {spec.scaling}{offered}{of}{_gaps(found, shown)}"


def _fit(fit: str | None) -> str:
    """How near a synthetic trace comes to what it is fitted to, where that was measured."""
    return f", fit {fit}" if fit else ""


def _gaps(found: Compared, shown: View) -> str:
    """The ratio that says whether models idle long enough to be swapped."""
    from dataclasses import replace

    from harness.experiment.run import cluster_of, jobs_of
    from harness.policy.types import Inst, Unsupported
    from workloads.build import idle_to_swap

    spec = replace(found.reference, rate_scale=shown.rate_scale, slo="", slo_s=(), window_s=None)
    cluster = cluster_of(spec)
    try:
        swaps = [cluster.profile.load_s(Inst(n, tuple(range(m.tp))), "host") for n, m in cluster.models.items()]
    except Unsupported:  # an engine without a cost table
        return ""
    ratio = idle_to_swap(jobs_of(spec), sum(swaps) / len(swaps))
    return "" if math.isnan(ratio) else f"; median idle gap {ratio:.3g} x a swap from the host"


def _name(text: str) -> str:
    return Path(text).stem if text.endswith((".toml", ".parquet", ".py")) else text


def _print(found: Compared, shown: View, rule: str, stem: Path | None) -> None:
    """The answer on one screen."""
    from harness.experiment import sweep
    from harness.experiment.spec import as_dict
    from harness.report import table

    for line in _headline(found, shown):
        click.echo(line)
    tty = sys.stdout.isatty()
    room = ROOM
    if tty:
        import shutil

        room = shutil.get_terminal_size().columns
    if shown.rows:
        click.echo("\n".join(table.terminal(shown, bold=tty and not os.environ.get("NO_COLOR"), room=room)))
    notes = _failed(found.failed) + _gone(found.table, "infeasible") + _gone(found.table, "skipped")
    notes += _refused(found, shown)
    if shown.undefined_tpot:
        notes.append(f"{100 * shown.undefined_tpot:.1f} % of requests have one output token: their TPOT counts as met")
    notes += table.caps(found.table, as_dict(found.reference))
    copy = next((row.label for row in shown.rows if row.label.endswith(sweep.AA)), None)
    notes += [
        line
        for line in (
            table.verdict(found.table, shown, rule, sweep.LEVEL),
            table.why(found.table, shown, rule, sweep.LEVEL),
            copy and table.same(found.table, copy.removesuffix(sweep.AA), copy, shown.rate_scale, rule),
        )
        if line
    ]
    for note in notes:
        click.echo(note)
    click.echo(_shown(found.folder) + (f" · {_shown(stem.with_name(stem.name + '.pdf'))}" if stem else ""))
    click.echo(f"next: {_next(found, shown, rule)}")


def _gone(table: pa.Table, column: str) -> list[str]:
    """One line a label that is infeasible or skipped, with its reason."""
    pairs = zip(table.column("label").to_pylist(), table.column(column).to_pylist(), strict=True)
    return [f"{column}: {label}, {reason}" for label, reason in dict(sorted((a, b) for a, b in pairs if b)).items()]


def _refused(found: Compared, shown: View) -> list[str]:
    """One line a label whose actions the engine refused at the rate shown: how many, and the first."""
    from harness.rows import record

    runs: dict[str, dict[str, None]] = {row.label: {} for row in shown.rows}
    for run, label, rate in zip(*(found.table[x].to_pylist() for x in ("run", "label", "rate_scale")), strict=True):
        if rate == shown.rate_scale and label in runs:  # a skipped one is not shown
            runs[label][run] = None
    lines = []
    for label, names in runs.items():
        every = [record.meta(found.folder.parent / name) for name in names]
        if hit := [about for about in every if about["refused"]]:
            count = sum(about["refused"] for about in hit)
            of = f" in {len(hit)} of {len(every)} runs" if len(every) > 1 else ""
            what = "1 action refused:" if count == 1 else f"{count} actions refused{of}, the first:"
            lines.append(f"{label}: {what} {hit[0]['first_refused']}")
    return lines


def _next(found: Compared, shown: View, rule: str) -> str:
    """What to ask now: why the one that misses most misses."""
    missing = [row for row in shown.rows if not row.infeasible and (e := row.values[rule]) and e.mean < 100]
    if not missing and any(row.infeasible for row in shown.rows):
        return _again("--gpus", str(2 * shown.gpus))
    if not missing and found.reference.scaling == "none":
        return f"bench plot {_shown(found.folder)}"
    if not missing:
        more = _again("--rate-scale", f"{2 * max(found.rates):g}")
        return more if len(found.rates) == 1 else f"bench plot {_shown(found.folder)}"
    worst = min(missing, key=lambda row: row.values[rule].mean)  # type: ignore[union-attr]
    frame = found.table.select(["run", "label", "rate_scale", "seed"]).to_pandas()
    mine = frame[(frame["label"] == worst.label) & (frame["rate_scale"] == shown.rate_scale)].sort_values("seed")
    own = ["--definition", rule] * (rule != found.judge.definition)
    return _explain(found.folder.parent / str(mine["run"].iloc[0]), found.judge, *own, "--misses")


def _explain(run: Path, under: Judge, *options: str) -> str:
    """The command that explains a run as it was judged."""
    return shlex.join(["bench", "explain", _shown(run), "--slo", under.rule, *options])


def _about(found: Compared, rule: str) -> dict[str, Any]:
    """Facts of a comparison for other programs."""
    from harness.experiment.run import fit_of, models_of, trace_of
    from harness.experiment.spec import as_dict
    from harness.report import table
    from harness.rows.checked import checked

    trace = trace_of(found.reference.trace)
    return {
        "trace": trace.name,
        "tier": trace.tier,
        "fit": fit_of(trace, models_of(found.reference.models)),
        "models": found.reference.models,
        "gpu": found.reference.gpu,
        "engine": found.reference.engine,
        "fidelity": sorted(found.table.column("fidelity").unique().to_pylist()),
        "host": found.reference.host,
        "checked": checked(found.reference.gpu, found.reference.host),
        "scaling": found.reference.scaling,
        "plan_origin": found.reference.plan,
        "slo": found.judge.rule,
        "slo_s": found.judge.seconds,
        "definition": rule,
        "rates": found.rates,
        "seeds": found.seeds,
        "folder": str(found.folder),
        "infeasible": _gone(found.table, "infeasible"),
        "skipped": _gone(found.table, "skipped"),
        "failed": _failed(found.failed),
        "caps": table.caps(found.table, as_dict(found.reference)),
    }


# ------------------------------------------------------------------ reproduce


def _figures() -> list[str]:
    return _stems("harness/experiment/figures")


def _listed(text: str | None) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else None


@main.command(**_examples(
    "bench reproduce fig7",
    "bench reproduce fig7 --full",
    "bench reproduce fig7 --systems prism,static --traces arena-chat --models heavy8",
))  # fmt: skip
@click.argument("figure", shell_complete=_complete(_figures), metavar="NAME|FILE.toml")
@click.option("--full", is_flag=True, help="More rates, SLO scales and seeds, longer windows.")
@click.option("--systems", metavar="LIST", shell_complete=_complete(_systems, many=True),
              help="Instead of the figure's; the first one sets the rate of other rows.")  # fmt: skip
@click.option("--traces", metavar="LIST", shell_complete=_complete(_traces, many=True),
              help="Instead of the figure's.")  # fmt: skip
@click.option("--models", metavar="LIST", help="Only the rows' model sets that are listed.")
@click.option("--seeds", type=click.IntRange(1), metavar="N", help="Runs of each point, instead of the figure's.")
@click.option("--no-plot", is_flag=True, help="No figure.")
@LIMIT
@WORKERS
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where runs (and then the figure) go.  [default: results/NAME]")  # fmt: skip
def reproduce(
    *,
    figure: str,
    full: bool,
    systems: str | None,
    traces: str | None,
    models: str | None,
    seeds: int | None,
    no_plot: bool,
    workers: int | None,
    out: Path | None,
) -> None:
    """Run a paper's figure again, and put what comes out beside what the paper says."""
    from harness.experiment import figure as figures
    from harness.experiment import reproduce as again

    asked = figures.figure(figure).only(_listed(systems), _listed(traces), _listed(models), seeds)
    folder = (out or RESULTS / asked.name).resolve()
    with Terminal() as teller:
        found = again.reproduce(asked, folder, full=full, workers=workers, teller=teller)
    click.echo("\n".join([*again.lines(found), *_failed(found.failed)]))
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_paper

        stem = (FIGURES if out is None else folder) / asked.name
        paths = fig_paper.render(found.folder, stem, f"bench plot {_shown(found.folder)}")
        click.echo(" · ".join(_shown(path) for path in (found.folder, *paths[:2])))
    if found.failed:
        sys.exit(2)


# ------------------------------------------------------------------ run, plot, explain


@main.command(**_examples("bench run mine.toml", "bench run mine.toml -o /tmp/out"))
@click.argument("spec", type=click.Path(path_type=Path), metavar="SPEC.toml")
@click.option("--dry-run", is_flag=True, help="Show the resolved spec and the estimated time; run nothing.")
@click.option("--record", "keep", is_flag=True, help="Run it anew, and also store each turn of each lane.")
@LIMIT
@OUT
def run(spec: Path, dry_run: bool, keep: bool, out: Path | None) -> None:
    """Run one spec: a TOML file with `system = "static"` and any other field (--dry-run shows all)."""
    from harness.experiment import sweep
    from harness.experiment.run import recorded, resolve
    from harness.experiment.spec import as_dict, read
    from harness.policy.types import UserError
    from harness.rows import record

    folder = (out or RESULTS).resolve()
    asked = read(spec)
    try:
        ready = resolve(asked)
        rule = asked.slo or _rule("P95", None)
        if dry_run:
            click.echo(json.dumps(as_dict(ready), indent=1, sort_keys=True))
            click.echo(f"about {sweep.estimate_s(ready, sweep.speeds(folder)):.1f} s")
            return
        with Terminal() as teller:
            under = sweep.judge(asked, rule, folder, teller=teller)
            wanted = under.spec(asked)
            (task,) = sweep.tasks([wanted])
            if keep:
                path = recorded(task.spec, folder, task.code)
            else:
                (path,) = sweep.sweep([wanted], folder, teller=teller)
            sweep.scored([(sweep.Entry(asked.label, wanted), task)], under, folder)  # says who judged it
    except UserError as error:
        raise UserError(f"{spec}: {error}") from None
    about = record.meta(path)
    if why := about["skipped"] or about["infeasible"]:
        click.echo(f"{'skipped' if about['skipped'] else 'infeasible'}: {why}")
    else:
        counts = ", ".join(f"{n} {state}" for state, n in sorted(about["counts"].items()))
        click.echo(
            f"{asked.label}: {counts}; attainment {100 * _score(path, under):.1f} % ({under.definition}, {rule})"
        )
    click.echo(_shown(path))
    click.echo(f"next: {_explain(path, under, '--misses')}")


def _score(path: Path, under: Judge) -> float:
    from harness.experiment.sweep import attained

    return attained(path, under)


@main.command(**_examples("bench plot", "bench plot results/arena-chat-3f9c01ab -o fig.pdf"))
@click.argument("sweep", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="STEM",
              help="Path of the figure without its ending.  [default: plots/out/compare-HASH]")  # fmt: skip
def plot(sweep: Path | None, out: Path | None) -> None:
    """Draw a stored sweep (default: the newest) as PDF, PNG and the CSV of its points."""
    from harness.policy.types import UserError
    from harness.rows.record import SWEEP
    from plots import fig_compare, fig_paper

    if sweep is None:
        stored = sorted(RESULTS.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime)
        if not stored:
            raise UserError(f"no sweep in {_shown(RESULTS)}: bench compare makes one")
        sweep = stored[-1].parent
    sweep = sweep.resolve()
    draw, name = (
        (fig_paper.render, sweep.name.rpartition("-")[0]) if fig_paper.drawn(sweep) else
        (fig_compare.render, f"compare-{sweep.name.rpartition('-')[2]}")
    )  # fmt: skip
    stem = (out.with_suffix("") if out else FIGURES / name).resolve()
    note = _stale(sweep)
    if (sweep / SWEEP).is_file():
        click.echo(f"{_shown(sweep)} · SLO {', '.join(_slos(sweep / SWEEP))}")
    for path in draw(sweep, stem, f"bench plot {_shown(sweep)}", note):
        click.echo(_shown(path))
    if note:
        click.echo(f"{note} (bench compare runs them again)", err=True)


def _slos(table: Path) -> list[str]:
    """The SLO rules of a stored sweep."""
    import pyarrow.parquet as pq

    found = set(pq.read_table(table, columns=["slo"])["slo"].to_pylist())
    return sorted(found, key=lambda rule: (len(rule), rule))


def _stale(sweep: Path) -> str:
    """Say which runs of a sweep were made by other sources than the present ones."""
    import pyarrow.parquet as pq

    from harness.experiment.run import code
    from harness.experiment.spec import from_dict
    from harness.rows import record

    path = sweep / record.SWEEP
    if not path.is_file():
        return ""
    about = pq.read_metadata(path).metadata or {}
    stale = set()
    hashes: dict[tuple[str, ...], str] = {}
    for name, label in json.loads(about.get(b"runs", b"{}")).items():
        folder = sweep.parent / name
        if not record.exists(folder):
            continue
        facts = record.meta(folder)
        key = tuple(str(facts["spec"][x]) for x in ("engine", "system", "models", "table", "slo"))
        if key not in hashes:
            hashes[key] = code(from_dict(facts["spec"]))
        if hashes[key] != facts["code_hash"]:
            stale.add(label)
    return f"Stale, made by older sources: {', '.join(sorted(stale))}." if stale else ""


@main.command(**_examples(
    "bench explain results/static-3f9c01ab --misses",
    "bench explain results/static-3f9c01ab --request 217",
))  # fmt: skip
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--request", type=click.IntRange(0), metavar="ID", help="One request: where its time went.")
@click.option("--misses", is_flag=True, help="All misses: what they waited for, by model.")
@click.option("--slo", metavar="RULE", help="Instead of the SLO by which a comparison judged the run.")
@click.option("--slo-scale", type=float, metavar="X", help="Times the base.  [default: 5; of seconds 1]")
@click.option("--definition", type=DEFINITION, help="Of a miss.  [default: both; e2e for an SLO by solo latency]")
def explain(
    run: Path, request: int | None, misses: bool, slo: str | None, slo_scale: float | None, definition: str | None
) -> None:
    """Explain a stored run: where a request's time went, or why requests missed their SLOs."""
    from harness.experiment import sweep
    from harness.experiment.spec import from_dict
    from harness.policy.types import UserError
    from harness.report import explain as words
    from harness.rows import record

    if slo is None and slo_scale is not None:
        raise UserError("--slo-scale has no --slo to scale")
    run = (run if record.exists(run) or not record.exists(RESULTS / run) else RESULTS / run).resolve()
    about = record.meta(run)
    if why := about["skipped"] or about["infeasible"]:
        raise UserError(f"{run}: nothing ran: {why}")
    if request is None and not misses:
        raise UserError("say what to explain: --request ID, or --misses")
    spec = from_dict(about["spec"])
    asked = None if slo is None else _rule(slo, slo_scale)
    with Terminal() as teller:
        under, lines = words.judge(run, spec, asked, _rule("P95", None), teller)
    limits, table = sweep.limits(spec, under), record.read(run)
    click.echo("\n".join(lines))
    if request is not None:
        click.echo("\n".join(words.timeline(table, request, limits)))
    if misses:
        window_s = spec.window_s if spec.window_s is not None else float("inf")
        again = _explain(run, under)
        click.echo("\n".join(words.misses(table, window_s, limits, definition or under.definition, again)))


# ------------------------------------------------------------------ list


@main.group("list", invoke_without_command=True, **_examples("bench list", "bench list traces"))
@click.pass_context
def list_(ctx: click.Context) -> None:
    """List systems with their presets, and which engine can run them."""
    if ctx.invoked_subcommand is not None:
        return
    from harness.engines.costs import cost
    from harness.experiment import run
    from harness.experiment.spec import Spec
    from harness.loop import engine, system
    from harness.report import table
    from workloads.models import sets

    gaps = []
    engines = engine.names()
    lines = [("system", "presets", *engines, "what it is")]
    for name in system.names():
        with run.blamed(Spec(name)):
            presets = system.find(name).presets
        marks = []
        for where in engines:
            lacks = {preset: run.gaps(name, preset, where) for preset in (None, *presets)}
            marks.append("no" if all(lacks.values()) else "in part" if any(lacks.values()) else "yes")
            alike = len({tuple(one) for one in lacks.values()}) == 1
            told = {None: lacks[None]} if alike else lacks
            gaps += [f"{name}{f':{p}' if p else ''} on {where}: no {', '.join(x)}" for p, x in told.items() if x]
        first = (system.module(name).__doc__ or "").strip().splitlines()[0]
        lines.append((name, ", ".join(presets) or "-", *marks, first))
    click.echo("\n".join(table.aligned(lines)))
    click.echo("\n".join(gaps) if gaps else "every system runs on every engine with every preset")
    click.echo(
        f"model sets: {', '.join(sets())} · GPUs: {', '.join(cost.gpu_kinds())} · hosts: {', '.join(cost.hosts())}"
    )
    click.echo("next: bench list traces; bench compare --systems " + ",".join(system.names()))


@list_.command(**_examples("bench list traces"))
def traces() -> None:
    """List traces: what is here, its tier, models, requests, span, licence, and how to fetch the rest."""
    from harness.report import table
    from traces.load import drawn, manifest, present

    lines = [("trace", "here", "tier", "models", "requests", "span s", "licence", "what it is")]
    missing = []
    for name, entry in manifest().items():
        here = drawn(name) or present(name) is not None
        if not here and "fetch" in entry:
            missing.append(f"{name} is not here ({entry['fallback']} stands in): {entry['fetch']}")
        what = (str(entry[key]) for key in ("models", "requests"))
        mark = "drawn" if "drawn" in entry else "yes" if here else "no"
        shown = f"{name}/M-RATE-IN-OUT" if "family" in entry else name
        lines.append((shown, mark, entry["tier"], *what, f"{entry['span_s']:g}", entry["licence"], entry["note"]))
    click.echo("\n".join(table.aligned(lines)))
    for line in missing:
        click.echo(line)


# ------------------------------------------------------------------ trace


@main.group(**_examples("bench trace stats arena-chat", "bench trace convert log.csv --column arrival_s=time ..."))
def trace() -> None:
    """Look at traces, and make canonical ones."""


@trace.command(**_examples("bench trace stats arena-chat", "bench trace stats mine.parquet --json"))
@click.argument("name", shell_complete=_complete(_traces), metavar="NAME|FILE")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def stats(name: str, as_json: bool) -> None:
    """Popularity, burstiness, idleness and lengths of a trace."""
    from harness.experiment.run import trace_of
    from harness.report.table import aligned
    from traces.stats import stats as measure

    found = trace_of(name)
    facts = measure(found)
    if as_json:
        click.echo(json.dumps({"notice": found.notice, **facts}, indent=1))
        return
    if found.notice:
        click.echo(found.notice)
    click.echo("\n".join(aligned((key, _fact(value)) for key, value in facts.items() if key != "counts")))
    top = sorted(facts["counts"].items(), key=lambda pair: -pair[1])[:8]
    click.echo("hottest: " + ", ".join(f"{model} {count}" for model, count in top))


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " / ".join(map(_fact, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@trace.command(**_examples(
    "bench trace convert log.csv -o mine.parquet --column arrival_s=time --column model=name \\",
    "    --column prompt_tokens=in --column output_tokens=out --time-unit ms",
    "bench compare --systems static,chunked --trace mine.parquet --models llama-3.1-8b*4",
))  # fmt: skip
@click.argument("source", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="OUT.parquet", help="Where it goes."
)
@click.option("--column", "columns", multiple=True, callback=_settings, metavar="CANONICAL=OWN",
              help="A column by its name in the file (all four of the example are needed).")  # fmt: skip
@click.option("--time-unit", type=click.Choice(["s", "ms", "us", "ns", "clock", "datetime"]), default="s",
              show_default=True,
              help="Of arrival_s; clock: HH:MM:SS.mmm.")  # fmt: skip
@click.option("--model", metavar="NAME", help="One model for all rows, instead of a column.")
@click.option("--name", metavar="NAME", help="Of the trace.  [default: the file's]")
@click.option("--tier", type=click.Choice(["replayed", "composed", "synthetic"]), default="replayed", show_default=True,
              help="What it is.")  # fmt: skip
@click.option("--licence", default="not stated", show_default=True, help="Of the data.")
@click.option("--span-s", type=float, metavar="S", help="Its period.  [default: the last stamp and one mean gap]")
@click.option("--empty", type=click.Choice(["error", "drop"]), default="error", show_default=True,
              help="Rows without tokens.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Leave out rows with more tokens.")
@click.option("--sort", is_flag=True, help="Rows are not in order of time: sort them.")
@click.option("--trust-times", is_flag=True, help="Times look like another unit, and yet are as said.")
def convert(source: Path, out: Path, columns: dict[str, Any], **options: Any) -> None:
    """Make a canonical trace of any CSV, Parquet or pickle by naming its columns.

    Formats: .csv and .csv.gz (with a header), .parquet, .pkl (lists of records, read by a restricted unpickler).
    """
    from traces import convert as converter
    from traces import schema

    if out.suffix != ".parquet":
        raise click.BadParameter("a canonical trace is a .parquet", param_hint="--out")
    rows = converter.convert(source, {key: str(value) for key, value in columns.items()}, **options)
    schema.write(rows, out)
    facts = schema.metadata(rows)
    dropped = sum(facts[key] for key in ("dropped_empty", "dropped_long"))
    click.echo(f"{rows.num_rows} requests in {facts['span_s']:g} s" + (f", {dropped} rows left out" if dropped else ""))
    click.echo(_shown(out))
    click.echo(f"next: bench trace stats {shlex.quote(_shown(out))}")


def _makers() -> list[str]:
    from workloads.fitted import PRESETS

    return list(PRESETS)


@trace.command(**_examples("bench trace make hyperbolic-like --models 18 --span 7200",
                           "bench trace make arena-like --models 8 --seed 7 -o mine.parquet",
                           "bench trace make aegaeon-like+rate_rps=0.5 -o mine.parquet"))  # fmt: skip
@click.argument("name", shell_complete=_complete(_makers), metavar="NAME[+FIELD=VALUE...]")
@click.option("--models", type=click.IntRange(1), metavar="N", help="Its streams.  [default: the preset's]")
@click.option("--span", "span_s", type=float, metavar="S", help="Its seconds.  [default: the preset's]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of all its draws.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="OUT.parquet", help="Where it goes, if anywhere.")
def make(name: str, models: int | None, span_s: float | None, seed: int, out: Path | None) -> None:
    """Draw a synthetic trace from a fitted generator, and hold its statistics against what it is fitted to."""
    from harness.experiment.run import drawn, judged
    from harness.report.table import aligned
    from traces import fit, schema
    from traces.load import of_table
    from workloads import fitted

    asked = {"models": models, "span_s": span_s}
    p = fitted.preset(name + "".join(f"+{key}={value}" for key, value in asked.items() if value is not None))
    if out is not None and out.suffix != ".parquet":
        raise click.BadParameter("a canonical trace is a .parquet", param_hint="--out")
    found = judged(str(p))
    rows = drawn(str(p), seed, None if found is None else found.verdict)
    click.echo(f"{p} · {rows.num_rows} requests of {p.models} models in {p.span_s:g} s, seed {seed}")
    if found is None:
        click.echo("nothing was measured that it could be held against (bench trace stats tells what it is)")
    else:
        own = fit.measure(of_table(rows, str(p)), found.target)
        click.echo("\n".join(aligned(fit.table(own, found.mean, found.target))))
        click.echo(f"target: {found.target.source}; windows of {found.target.window_s:g} s")
        click.echo(f"fit {found.verdict}")
    if out is not None:
        schema.write(rows, out)
        click.echo(_shown(out))


# ------------------------------------------------------------------ check, new


@main.command(**_examples("bench check static", "bench check ./mine.py --full", "bench check --engine sim"))
@click.argument("system", required=False, shell_complete=_complete(_systems), metavar="[NAME|FILE.py]")
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


@main.command(**_examples(
    "bench calibrate --from results/h200",
    "bench compare --systems static,ideal --gpu h200 --table results/h200/h200-measured.toml",
))  # fmt: skip
@click.option("--from", "folder", required=True, type=click.Path(path_type=Path), metavar="FOLDER",
              help="Results of `make gpu`.")  # fmt: skip
@click.option("--gpu", "kind", shell_complete=_complete(_gpus), metavar="KIND",
              help="The table to start from.  [default: by the card's name]")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE.toml",
              help="[default: FOLDER/KIND-measured.toml]")  # fmt: skip
def calibrate(folder: Path, kind: str | None, out: Path | None) -> None:
    """A cost table from what `make gpu` measured, with its errors."""
    from harness.engines.costs import calibrate as calibration

    path, notes = calibration.write(folder, kind, out)
    for note in notes:
        click.echo(note)
    click.echo(f"wrote {_shown(path)} (--table takes it)")


@main.command(**_examples("bench validate", "bench validate mine.csv -o /tmp/validate"))
@click.argument("folder", type=click.Path(path_type=Path), required=False, envvar="MEASURED_DIR",
                metavar="[FOLDER|FILE.csv]")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="STEM",
              help="Path of figure and CSV without their endings.  [default: plots/out/validate]")  # fmt: skip
@click.option("--no-plot", is_flag=True, help="No figure and no CSV.")
def validate(folder: Path | None, out: Path | None, *, no_plot: bool) -> None:
    """Hold the simulator against measured end-to-end runs (MEASURED_DIR, or any CSV of the same columns)."""
    from harness.policy.types import UserError
    from harness.report import table
    from harness.validation import staggered
    from harness.validation import validate as judge
    from harness.validation.measured import cases

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
        paths = fig_validate.render(frame, stem, f"bench validate {_shown(folder)}")
        click.echo(" · ".join(_shown(path) for path in paths))


def _staggered(path: Path, out: Path | None, *, plot: bool) -> None:
    """Print how six models on one card compare with a measured run, and draw it."""
    from harness.validation import staggered

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
        paths = fig_staggered.render(frame, stem, f"bench validate {_shown(path)}")
        click.echo(" · ".join(_shown(made) for made in paths))


@main.command(**_examples("bench new mine.py && bench check ./mine.py"))
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py")
def new(file: Path) -> None:
    """Write a small annotated system that passes bench check at once."""
    from harness.check.new import write

    write(file)
    here = shlex.quote(f"./{file}" if file.parent == Path() else str(file))
    click.echo(_shown(file))
    click.echo(f"next: bench check {here}; bench compare --systems static,{here}")


if __name__ == "__main__":
    main(prog_name="bench")
