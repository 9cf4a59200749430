"""The page of a stored answer (report/page.py): of a comparison, of a study, or of `bench size`.

It is made from the answer's folder alone: neither the trace nor a run is needed, but for the table of causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.policy import mix
from harness.policy.types import UserError
from harness.report import formats, sentences
from harness.report.causes import CAUSES
from harness.report.columns import Column
from harness.report.page import Grid, Page, Picture, empty, grids
from harness.report.summary import Summary
from harness.report.text_table import joined
from harness.rows import crossings, estimate, record, setting, tidy
from harness.rows.checked import note
from harness.rows.definitions import DEFINITIONS
from harness.rows.estimate import NONE
from harness.rows.sealed import WAY_OUT, Damaged
from harness.rows.statistics import Estimate
from harness.run import slo as slos
from harness.study import misses, size_kept, text
from harness.study.compare import NAME, summary
from harness.study.search import LEVEL
from harness.study.text import Shown

if TYPE_CHECKING:
    import pyarrow as pa

TAILS = "Simulated tails are optimistic: steps vary by their noise alone, without a server's rare stalls."
MADE = {  # how columns of a comparison come about, beside definitions
    "crosses": "The rate at which attainment of all windows together falls below 99 %, between the two nearest rates "
               "that were run. Its interval is a bootstrap over blocks of windows, with the bracket's width.",
    "slope": "The power of the rate with which misses grow at the crossing.",
    "worst": "The model with the lowest attainment.",
    "[low, high]": "A 95 % interval; none is shown where there are too few windows for one.",
    "TTFT, TPOT": "Percentiles over all requests of a window, then the mean over windows; a request that never ended "
                  "counts as infinitely late.",
}  # fmt: skip
SIZED = {
    "GPUs": "The fewest on which each model meets the target in every view, as on every larger count that was tried. "
            "Counts are doubled until one holds, then halved between the last that fails and the first that holds.",
    "pooled": "The same, for all requests together in place of each model.",
    "all %": "Attainment of all requests on that count, in the view where it is least; [low, high] is a 95 % interval "
             "over blocks of the windows.",
    "worst %, worst model %": "The least attainment of a model in any view.",
    "$/day, $/Mtok": "The price of the GPUs that are held, all day, whether busy or not; divided by the prompt and "
                     "output tokens of the whole log.",
    "one count lower": "What fails on the largest count below that was tried: memory (room) or speed (load).",
}  # fmt: skip


def question(folder: Path) -> str:
    """Tell what kind of answer a folder holds: "size", "comparison" or "study". UserError where it holds none."""
    if (folder / record.SIZE).is_file():
        return "size"
    if (folder / record.SWEEP).is_file():
        return "comparison" if record.footer(folder / record.SWEEP).get("study") == NAME else "study"
    if record.exists(folder):
        raise UserError(f"{folder}: one run is no answer: bench explain {folder.name} --misses")
    raise UserError(f"{folder}: no answer here (bench compare, bench study and bench size make one)")


def paged(folder: Path, pictures: Sequence[Picture], version: str) -> Page:
    """Return the page of the answer in a folder, with its figures and the bench's version.

    UserError where there is no answer.
    """
    kind = question(folder)
    command = folder / record.COMMAND
    words = command.read_text("utf-8", errors="replace").strip() if command.is_file() else ""
    source = f"{folder.name} · bench {version}"
    make = {"size": _sized, "comparison": _compared, "study": _studied}[kind]
    return make(folder, pictures, words, source)


# ------------------------------------------------------------------ a comparison


def _compared(folder: Path, pictures: Sequence[Picture], command: str, source: str) -> Page:
    table, about = tidy.stored(folder / record.SWEEP), record.footer(folder / record.SWEEP)
    if (count := len(about["panels"])) != 1:
        raise Damaged(f"{folder / record.SWEEP}: a comparison has one panel, and this has {count}; {WAY_OUT}")
    (panel,), rule = about["panels"], about["definitions"][0]
    shown = summary(table, about, rule, text.unchecked(table))
    names = [system.label for system in shown.systems if not system.control]
    if not names:
        raise Damaged(f"{folder / record.SWEEP}: no row is of a system; {WAY_OUT}")
    where = mix.told(panel["gpu"], shown.gpus) if shown.gpus else panel["gpu"]
    verdict = sentences.verdict(table, shown, rule, LEVEL)
    notes = [*about["notes"], *text.departures(table), *text.own_degrees(table), *text.unchecked_lines(table)]
    notes += [f"invalid: {label}: {why}" for label, why in tidy.invalid(table).items()]
    notes += [f"{label} does not fit: {why}" for label, why in tidy.infeasible(table).items()]
    notes += [line for line in (sentences.why(table, shown, rule, LEVEL),) if line]
    return Page(
        f"Which of {joined(names)} serves the highest rate of {panel['trace']} within its SLOs, on {where}?",
        f"{verdict} ({panel['models']}, {where})" if verdict else "No system has a rate at which it meets its SLOs.",
        pictures,
        [_summary(shown), *_curves(table, shown, rule), *_by_model(table, shown, rule), *_causes(folder, rule)],
        notes,
        _conditions(table, about),
        _fidelity(table),
        [*_definitions(rule), *MADE.items()],
        command,
        f"{source} · {len(about['runs'])} runs",
    )


def _summary(shown: Summary) -> Grid:
    columns = [c for c in shown.columns if c.brief or c.key in {"mean", "ttft", "tpot", "ttft_p50_s", "tpot_p50_s"}]
    rows = [[shown.name(system), *(formats.cell(system, c) for c in columns)] for system in shown.systems]
    at = f"{shown.offered_rps:.3g} requests per second (rate scale {shown.rate_scale:g})"
    return empty(Grid(f"Systems at {at}", ["system", *map(_head, columns)], rows))


def _head(column: Column) -> str:
    """Return the head of a column: "pooled %", "TTFT s P95"; groups of shares are left to the page's definitions."""
    return f"{column.name} %" if column.group.endswith(" %") else f"{column.group} {column.name}"


def _curves(table: pa.Table, shown: Summary, rule: str) -> Iterator[Grid]:
    """Yield attainment by rate, a row a rate, if there are several."""
    frame = tidy.summary(table, ["offered_rps"])
    offered = frame.groupby("rate_scale")["mean"].mean()
    by = {system.label: crossings.attained(table, "rate_scale", system.label, rule)
          for system in shown.systems if not system.infeasible}  # fmt: skip
    if len(offered) > 1 and by:
        rows = []
        for x, rps in offered.items():
            shares = (of.get(float(str(x))) for of in by.values())
            rows.append([f"{rps:.3g}", *(estimate.text(e and e.times(100), estimate.SHARE) for e in shares)])
        yield Grid(f"SLO attainment ({rule}) by rate, %", ["req/s", *by], rows)


def _by_model(table: pa.Table, shown: Summary, rule: str) -> Iterator[Grid]:
    wanted = {rule: 100.0, "ttft_p95_s": 1.0, "tpot_p95_s": 1e3}
    frame = tidy.summary(table, [*wanted], ("model",))
    frame = frame[frame["rate_scale"] == shown.rate_scale]
    rows = []
    for (label, model), values in frame.groupby(["label", "model"], observed=True, sort=False):
        means = dict(zip(values["definition"], values["mean"], strict=True))
        cells = (factor * means.get(name, float("nan")) for name, factor in wanted.items())
        rows.append([str(label), str(model), *(NONE if isnan(x) else f"{x:.4g}" for x in cells)])
    if rows:
        yield Grid("Models at that rate", ["system", "model", f"{rule} %", "TTFT P95 s", "TPOT P95 ms"], rows)


def _causes(folder: Path, rule: str) -> Iterator[Grid]:
    """Yield why requests missed, if the runs are still there."""
    with suppress(UserError):
        of_all = misses.of_sweep(folder, definition=rule)
        rows = []
        for row in of_all.rows:
            shares = {wait: row.explained.get(wait, 0) for wait in CAUSES}
            if not row.hollow:
                cells = (f"{100 * n / row.missed:.0f}" if row.missed else NONE for n in shares.values())
                rows.append([row.label, f"{row.offered:,}", f"{row.missed:,}", *cells])
        if rows:
            heads = ["system", "requests", "missed", *(f"{CAUSES[wait].phrase} %" for wait in CAUSES)]
            yield empty(Grid("Why requests missed, in percent of the misses", heads,
                             [[cell if cell != "0" else NONE for cell in row] for row in rows]))  # fmt: skip


def _conditions(table: pa.Table, about: Mapping[str, Any]) -> list[tuple[str, str]]:
    panels = about["panels"]

    def each(key: str) -> str:
        return ", ".join(dict.fromkeys(str(panel[key]) for panel in panels if panel.get(key) not in {None, ""}))

    traces = (f"{p['trace']} ({p['tier']}{': ' + p['note'] if p['note'] else ''})" for p in panels)
    plans = setting.plans(value for value in table["plan_origin"].unique().to_pylist() if value)
    machines = (setting.machine(panel["own"]) for panel in panels)
    windows = dict.fromkeys(f"{panel['window_s']:g} s" for panel in panels if panel.get("window_s"))
    return [
        ("Traffic", "; ".join(dict.fromkeys(traces))),
        ("Models", each("models")),
        (
            "GPUs",
            ", ".join(
                dict.fromkeys(
                    mix.told(panel["gpu"], panel["gpus"]) if panel["gpus"] else panel["gpu"] for panel in panels
                )
            ),
        ),
        ("Engine's host costs", each("host")),
        ("Server", "; ".join(dict.fromkeys(p["server"].removeprefix("server: ") for p in panels if p.get("server")))),
        ("Machine", ", ".join(dict.fromkeys(filter(None, machines)))),
        ("SLO", ", ".join(sorted({*table["slo"].unique().to_pylist()}))),
        ("Seconds of the SLO", _seconds(about)),
        ("Windows", f"{about['seeds']} of {', '.join(windows)}" if windows else str(about["seeds"])),
        ("Rates", f"scaled by {', '.join(sorted(table['scaling'].cast('string').unique().drop_null().to_pylist()))}"),
        ("Planners see", plans),
    ]


def _seconds(about: Mapping[str, Any]) -> str:
    """Return the limits of each model, once where all have the same."""
    judges = about["judges"]
    seconds = slos.target_of(judges[0]).seconds if len(judges) == 1 else None
    told = {f"TTFT {ttft:.3g} s, TPOT {1e3 * tpot:.3g} ms": name for name, (ttft, tpot) in (seconds or {}).items()}
    if len(told) == 1:
        return next(iter(told))
    each = (f"{name} {ttft:.3g} s, {1e3 * tpot:.3g} ms" for name, (ttft, tpot) in (seconds or {}).items())
    return "; ".join(each)


def _fidelity(table: pa.Table) -> str:
    """Say what is simulated or real, and whether measured runs judge that."""
    kinds = sorted(table["fidelity"].cast("string").unique().to_pylist())
    if kinds != ["simulated"]:
        on = table["machine"].cast("string").unique().to_pylist() if "machine" in table.column_names else []
        return f"{' and '.join(kinds).capitalize()}{': ' + ', '.join(filter(None, on)) if any(on) else ''}."
    pairs = sorted({*zip(table["gpu"].to_pylist(), table["host"].to_pylist(), strict=True)})
    return _simulated([(str(gpu), str(host)) for gpu, host in pairs])


def _simulated(pairs: Iterable[tuple[str, str]]) -> str:
    told = [f"{gpu} with {host}: {note(gpu, host) or 'compared with measured end-to-end runs (bench validate)'}"
            for gpu, host in pairs]  # fmt: skip
    return f"Simulated. {'; '.join(told)}. {TAILS}"


def _definitions(rule: str) -> Iterator[tuple[str, str]]:
    for name in (rule, *DEFINITIONS[rule].beside):
        yield name, f"The mean over requests of: {' '.join(DEFINITIONS[name].formula.split())}"


# ------------------------------------------------------------------ a study


def _studied(folder: Path, pictures: Sequence[Picture], command: str, source: str) -> Page:
    table, about = tidy.stored(folder / record.SWEEP), record.footer(folder / record.SWEEP)
    first, *others = [line for line in text.lines(Shown(table, about, folder, markdown=True, every=True)) if line] or [
        ""
    ]
    answered = not first.startswith("|")
    tables, notes = grids(others if answered else (first, *others))
    after = f", after {about['paper']}" if about["paper"] else ""
    return Page(
        f"{about['study']}: how do {joined(list(about['systems']))} compare{after}?",
        first if answered else "See the tables.",
        pictures,
        [empty(table) for table in tables],
        notes,
        _conditions(table, about),
        _fidelity(table),
        [*_definitions(about["definitions"][0]), *MADE.items()],
        command or f"bench study {about['study']}",
        f"{source} · {len(about['runs'])} runs",
    )


# ------------------------------------------------------------------ a size


def _sized(folder: Path, pictures: Sequence[Picture], command: str, source: str) -> Page:
    kept = size_kept.kept(folder)
    asked = kept.asked
    best = next((row for row in kept.tried if row.answer and (row.gpu, row.label, row.gpus) == kept.best), None)
    sure = ""
    if best is not None and best.pooled is not None:
        share = Estimate(best.pooled, best.low, best.high, 1).times(100)
        sure = f". Of all requests {estimate.text(share, estimate.SHARE)} % meet their SLO"
    trace = Path(str(asked.setting["trace"])).name
    prices = dict.fromkeys(name for kind in asked.kinds for name in mix.names(kind) if name in asked.prices)
    head, *rows = kept.cells
    tried = [
        [row.gpu, row.label, str(row.gpus), *(NONE if x is None else f"{100 * x:.1f}" for x in (row.pooled, row.worst)),
         row.worst_model or NONE, NONE if row.usd_day is None else f"{row.usd_day:,.0f}", row.unfit or NONE]
        for row in kept.tried
    ]  # fmt: skip
    heads = ["GPU", "system", "GPUs", "all %", "worst model %", "worst model", "$/day", "no room"]
    host = str(asked.setting.get("host") or "vllm-0.15")
    kinds = " or ".join(f"clusters of {kind}" if mix.mixed(kind) else kind for kind in asked.kinds)
    return Page(
        f"How many {kinds} hold {100 * asked.target:g} % of SLOs for every model of "
        f"{_name(str(asked.setting['models']))} on {trace}?",
        f"{kept.sentence}{sure}.",
        pictures,
        [empty(Grid("Strategies, the cheapest first", head, rows)), empty(Grid("All that was tried", heads, tried))],
        [f"{name}: {words}" for name, words in kept.facts],
        [
            ("Traffic", trace), ("Views", ", ".join(kept.views.values())), ("Models", str(asked.setting["models"])),
            ("SLO", asked.rule), ("Judged by", asked.definition), ("GPUs tried", f"{asked.least} to {asked.most}"),
            ("Spare GPUs", str(asked.spare)), ("GPUs a node", str(asked.node)),
            ("Prices", "; ".join(f"{name}: {asked.prices[name].told}" for name in prices)),
            *((key, str(value)) for key, value in asked.setting.items() if key not in {"trace", "models"}),
        ],
        _simulated((kind, host) for kind in asked.kinds),
        [*_definitions(asked.definition), *SIZED.items()],
        command,
        f"{source} · {sum(len(row.runs) for row in kept.tried)} runs",
    )  # fmt: skip


def _name(models: str) -> str:
    return Path(models).stem if models.endswith(".toml") else models
