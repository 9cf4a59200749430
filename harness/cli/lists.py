"""`bench list`: the names to choose from, with a command for each kind.

`bench list` itself reads names and first lines. It imports neither systems nor engines. `bench list systems` also tries
each system on each engine, to show where it runs.
"""

from __future__ import annotations

import ast
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.table import WIDTH, aligned, clause, printed
from harness.cli.options import ALL, examples, gpu_names, stems, system_names
from harness.cli.terminal import room, screen
from harness.policy.types import GIB, UserError

if TYPE_CHECKING:
    from harness.loop.engine import Engine
    from harness.run.matrix import Coverage

SIM, PART = "sim", "in part"
Rows = list[tuple[str, ...]]  # rows of a table; the first is the head


@click.group(
    "list", invoke_without_command=True, epilog=examples("bench list", "bench list models", "bench list --matrix")
)
@click.option("--matrix", is_flag=True, help="Show which preset runs on which engine, and what others lack.")
@click.option("--markdown", is_flag=True, help="With --matrix: print the page docs/matrix.md.")
@click.pass_context
def list_(ctx: click.Context, *, matrix: bool, markdown: bool) -> None:
    """List systems, engines, models, GPUs, traces and studies.

    Without a command: what each system is, and the names of the rest.
    """
    if markdown and not matrix:
        raise UserError("--markdown is a form of --matrix: bench list --matrix --markdown")
    if matrix and ctx.invoked_subcommand is not None:
        raise UserError(f"--matrix is of systems and engines, not of {ctx.invoked_subcommand}")
    if ctx.invoked_subcommand is not None:
        return
    if matrix:
        from harness.run import matrix as cells

        rows = list(cells.rows())
        click.echo(page(rows) if markdown else "\n".join(printed(cells.parts(rows))), nl=not markdown)
    else:
        _names()


def page(rows: Sequence[Coverage]) -> str:
    """Return the matrix as a Markdown page; docs/matrix.md is this page, made on a host without a GPU."""
    from harness.run import matrix

    return matrix.PAGE + "".join(f"{line}\n" for line in printed(matrix.parts(rows), markdown=True))


def _names() -> None:
    """Print what each system is, and the names of engines, sets of models and GPUs."""
    from harness.loop import engine, system

    names, engines, sets, kinds = system_names(), engine.names(), stems("workloads/sets"), gpu_names()
    width = min(WIDTH, room()) - max(map(len, names)) - 2
    rows = [("system", "what it is"), *((name, clause(summary(system.path(name)), width)) for name in names)]
    answer = f"{len(names)} systems, {len(engines)} engines, {len(sets)} sets of models, {len(kinds)} GPUs"
    others = " | ".join(name for name in list_.commands if name != "systems")
    more = [
        f"engines: {', '.join(engines)}",
        f"sets of models: {', '.join(sets)} · GPUs: {', '.join(kinds)}",
        f"where each system runs: bench list systems, or --matrix; in full: bench list {others}",
        "next: bench compare --systems all",
    ]
    screen([answer, *aligned(rows)], tail=more, every=False)


def listing(package: Any) -> list[tuple[str, str]]:
    """List the figures of `plots`, or the readers of `traces.readers`, by name.

    Beside each name is the first line of the module's docstring, or the error if its file cannot be loaded.
    """
    lines = []
    for name in package.names():
        try:
            lines.append((name, (package.find(name).__doc__ or "").strip().partition("\n")[0]))
        except UserError as error:
            lines.append((name, str(error)))
    return lines


def summary(file: Path) -> str:
    """Return the first line of a file's docstring, without importing it."""
    try:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or "-"
    except (SyntaxError, ValueError) as error:
        return f"broken: not Python ({error})"
    return text.partition("\n")[0]


@list_.command(epilog=examples("bench list systems", "bench list --matrix"))
def systems() -> None:
    """List systems, and the engines that each runs on."""
    from harness.loop import system
    from harness.run import matrix as cells
    from harness.run.resolve import gaps

    engines, broken = cells.usable_engines()

    def lacking(name: str) -> dict[str, list[tuple[str, ...]]]:
        presets = cells.presets_of(name)
        return {where: [gaps(name, preset, where) for preset in presets] for where in engines}

    tried, others = cells.tried(system.names(), lacking)
    rows = [("system", "runs on", "what it is")]
    for name, by_engine in tried.items():
        marks = {where: "no" if all(lacks) else PART if any(lacks) else "yes" for where, lacks in by_engine.items()}
        what = (system.module(name).__doc__ or "-").strip().splitlines()[0]
        rows.append((name, _runs_on(marks, engines), what))
    servers = sum(runs_on not in {SIM, "none"} for _, runs_on, _ in rows[1:])
    answer = f"{len(tried)} systems; {servers} also run on engines other than the simulator (sim)"
    width = min(WIDTH, room()) - sum(max(len(row[k]) for row in rows) + 2 for k in (0, 1))
    signs = "(part): some presets only. servers: kinds of real servers; bench list --matrix names them."
    lack = ", ".join(name for name, made in engines.items() if made.lacks)
    here = [f"engines that cannot run here now: {lack} (bench list engines: why)"] if lack else []
    tail = [*here, *broken, *others, "next: bench compare --systems all"]
    screen([answer, *aligned([(*row[:2], clause(row[2], width)) for row in rows]), signs], tail=tail, every=False)


def _runs_on(marks: Mapping[str, str], engines: Mapping[str, Engine]) -> str:
    """Return in words the engines that run a system; real servers are only counted.

    `marks` says for each engine whether it runs the system: in full, in part, or not.
    """
    some = {name: mark for name, mark in marks.items() if mark != "no"}
    servers = [mark for name, mark in some.items() if engines[name].fidelity == "real"]
    parts = [name + " (part)" * (mark == PART) for name, mark in some.items() if engines[name].fidelity != "real"]
    if servers:
        parts.append(f"{len(servers)} server{'s' * (len(servers) > 1)}" + " (part)" * (PART in servers))
    return ", ".join(parts) or "none"


@list_.command(epilog=examples("bench list engines", "bench compare --systems static,dedicated --engine vllm"))
def engines() -> None:
    """List engines, and what each needs to run here."""
    from harness.loop import engine
    from harness.run import matrix as cells

    made, broken = cells.usable_engines()
    rows = [("engine", "rows are", "runs here", "what it is")]
    for name, built in made.items():
        rows.append((name, built.fidelity, "no" if built.lacks else "yes", summary(engine.path(name))))
    able = sum(not built.lacks for built in made.values())
    answer = f"{len(made)} engines, of which {able} can run here now; --engine NAME"
    needs = (f"{name} needs {built.lacks}" for name, built in made.items() if built.lacks)
    screen([answer, *aligned(rows, room()), *needs, *broken], every=True)


@list_.command(
    epilog=examples(
        "bench list models",
        "bench compare --systems static --models Qwen/Qwen3-14B,phi-4",
        "bench size --models ./config.json --slo absolute:ttft=1,tpot=0.1",
    )
)
def models() -> None:
    """List sets of models and shapes, with their bytes.

    Each name is for --models; a shape has two names, one of which is its id on huggingface.co. The weights of a set are
    those of all its models.
    """
    from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
    from workloads.models import model_set, repos, sets, shapes

    of_sets = [("set", "models", "weights GiB", "shapes")]
    for name in sets():
        members = model_set(name).members
        size = sum(weight_bytes(member.shape, member.tp) * member.tp for member in members) / GIB
        counts = ", ".join(f"{n} x {shape}" for shape, n in Counter(member.shape.name for member in members).items())
        of_sets.append((name, str(len(members)), f"{size:.1f}", counts))
    ids = {name: repo for repo, name in repos().items()}
    of_shapes = [("shape", "weights GiB", "KV KiB a token", "context tokens", "id on huggingface.co")]
    for name, its in shapes().items():
        weights, kv = f"{weight_bytes(its) / GIB:.2f}", f"{kv_token_bytes(its) / 1024:g}"
        of_shapes.append((name, weights, kv, str(its.max_tokens), ids.get(name, "-")))
    answer = f"{len(sets())} sets and {len(shapes())} shapes; a config.json or a .gguf file is a model too"
    screen([answer, *aligned(of_sets, room()), "", *aligned(of_shapes)], every=True)


@list_.command(epilog=examples("bench list gpus", "bench compare --systems static,prism --gpu l40s"))
def gpus() -> None:
    """List kinds of GPU, with their memory and rates."""
    rows = gpu_rows()
    answer = f"{len(rows) - 1} kinds of GPU; --gpu KIND. Checked: against measured end-to-end runs, by host"
    screen([answer, *aligned([(kind, *rates) for kind, _, *rates in rows], room())], every=False)


def gpu_rows() -> Rows:
    """Return each kind of GPU with its memory, its rates, and the hosts on which it was checked."""
    from harness.engines.costs import quantities
    from harness.rows import checked

    head = ("kind", "card", "memory GiB", "SMs", "bf16 TFLOP/s", "HBM TB/s", "PCIe GB/s", "NVLink GB/s", "checked")
    rows: Rows = [head]
    for gpu in map(quantities.gpu, quantities.gpu_kinds()):
        rates = (gpu.flops / 1e12, gpu.hbm / 1e12, gpu.h2d / 1e9, gpu.nvlink / 1e9)
        on = ", ".join(host for host, kinds in checked.PAIRS.items() if gpu.kind in kinds) or "no"
        memory = f"{gpu.mem_bytes / GIB:.1f}"
        rows.append((gpu.kind, gpu.name, memory, str(gpu.sms), *(f"{rate:g}" for rate in rates), on))
    return rows


@list_.command(epilog=examples("bench list hosts", "bench compare --systems static,prism --host sglang-0.5"))
def hosts() -> None:
    """List host profiles: the CPU time of serving engines."""
    rows = host_rows()
    answer = f"{len(rows) - 1} host profiles, on an H100; --host PROFILE"
    screen([answer, *aligned(rows)], every=False)


def host_rows() -> Rows:
    """Return each host profile with the times that it adds."""
    from harness.engines.costs import quantities

    rows: Rows = [("profile", "ms a step", "us a sequence", "ms of API a request", "a step's part is")]
    for name in quantities.hosts():
        host = quantities.host(name, "h100")
        times = (1e3 * host.host0, 1e6 * host.host1, 1e3 * (host.api_in_s + host.api_out_s))
        part = "added" if host.serial else "hidden behind the GPU"
        rows.append((name, *(f"{time:.3g}" for time in times), part))
    return rows


@list_.command(epilog=examples("bench list studies", "bench study fig7 --dry-run"))
def studies() -> None:
    """List studies: figures of papers, and others."""
    from harness.study import load

    rows = [("study", "layout", "conditions", "systems", "after")]
    for name in load.names():
        entry = load.study(name)
        rows.append((name, entry.layout, str(len(entry.condition)), str(len(entry.systems)), entry.paper))
    answer = f"{len(rows) - 1} studies come with the bench; bench study NAME runs one, --dry-run shows its cost"
    screen([answer, *aligned(rows, min(WIDTH, room()))], every=False)


@list_.command(epilog=examples("bench list traces", "bench list traces --all"))
@ALL
def traces(*, every: bool) -> None:
    """List traces: those here, and public logs to convert.

    A public log that lies in the folder TRACES_DIR is shown with the command that converts it.
    """
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
        known = aligned([("reader", "what it reads (bench trace convert --from READER FILE)"), *listing(readers)])
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

    rows = listing(plots)
    answer = f"{len(rows)} figures; bench plot draws those that a folder of results has data for"
    screen([answer, *aligned([("figure", "what it shows"), *rows], room())], every=False)


@list_.command(epilog=examples("bench list definitions", "bench compare --systems static,chunked --definition itl"))
def definitions() -> None:
    """List the definitions of SLO attainment, with formulas."""
    from harness.rows.definitions import DEFINITIONS

    answer = f"{len(DEFINITIONS)} definitions of SLO attainment; --definition NAME says which one judges"
    lines = [("definition", "judges", "needs", "formula")]
    for name, entry in DEFINITIONS.items():
        needs = "token times" if entry.by_token else "-"
        formula = entry.formula.partition("\n\n")[0].replace("\n", " ")
        lines.append((name, ", ".join(entry.judges) or "-", needs, formula))
    screen([answer, *aligned(lines, room())], every=False)
