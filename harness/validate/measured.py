"""Measured end-to-end runs of real engines: the values of each row, and the conditions of its replay.

The columns of a CSV identify its format (`FORMATS`), whatever the file's name. Each row is one case: a model on some
GPUs, an engine generation (which selects the host profile), and a load. A setting that a row does not state has the
engine's default (`servers`). `validate` prints the simulator's errors on the cases. `hosts` fits host profiles to them.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.costs import quantities
from harness.engines.costs.shapes import weight_bytes
from harness.policy.types import Shape, UserError
from harness.validate import names
from harness.validate.loads import BLOCK_TOKENS, SERVED_TOKENS, WAVES, Batch, Closed, Load, Poisson, Setting
from harness.validate.names import Skipped, UnknownName
from workloads.models import Checkpoint

MOST_SHOWN = 60  # characters of a wrong value
SHAPE = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "ffn", "vocab")  # columns that give a model's shape
ENGINES = ("vllm-0.15", "vllm-0.12", "sglang-0.5", "vllm-0.6")  # generations, whose settings rows may leave out
STAGES = re.compile(r"[\d.]+x\d+(;[\d.]+x\d+)*", re.ASCII)
MOST_COUNT = 2**31 - 1  # our tables hold no more
MOST_SEQS = 65_536  # sequences of a step; no server takes more
MOST_S = 86_400.0  # a mean latency, or a batch, of a day
MOST_REQUESTS = 200_000  # a row's load has no more; those of the files that we know have 9,000
MOST_STAGES = 100
FEWEST_REQUESTS = 20  # a Poisson load that expects fewer is refused; of 20, one draw in 5e8 is empty
SAMPLINGS = ("greedy", "checkpoint")  # values of an optional column of any form
MEANS = ("ttft", "tpot", "e2e", "throughput", "kv_blocks")  # means in seconds; tokens per second; blocks
TAILS = ("ttft_p90", "ttft_p99", "e2e_p90", "e2e_p99")  # seconds; of rows that have them
METRICS = (*MEANS, *TAILS)


class Case(NamedTuple):
    """A measured row: its setting, the stage of its load (None: all stages), and its measurements keyed by metric."""

    file: str
    row: int  # line of the file
    setting: Setting
    stage: int | None
    measured: Mapping[str, float]
    fitted: bool  # its host profile was fitted on it
    values: Mapping[str, str]  # its columns' values
    group: str = ""  # among quantised and mixed models: engine, GPU, number format, MoE or dense


# ------------------------------------------------------------------ files


@dataclass(slots=True)
class CsvRow:
    """A line of a CSV; errors that it raises name the column."""

    path: Path
    line: int
    values: Mapping[str, str]
    shapes: Mapping[str, Shape]  # shapes that the caller adds
    group: str = ""  # is set when the row is read, and copied to its `Case`

    def bad(self, column: str, want: str) -> UserError:
        """Return the error that says that a column's value is not `want`."""
        text = self.values[column]
        text = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
        return UserError(f'{column} is "{text}", not {want}')

    def skipped(self, why: UserError) -> Skipped:
        """Return a record of this row as skipped, with the reason `why`."""
        return Skipped(self.path.name, self.line, str(why))

    def number(self, column: str) -> float:
        """Return the number in a column, which must be above 0."""
        try:
            value = float(self.values[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise self.bad(column, "a number above 0")
        return value

    def count(self, column: str, most: int = MOST_COUNT) -> int:
        """Return the whole number in a column, which must be above 0 and at most `most`."""
        value = self.number(column)
        if value != int(value):
            raise self.bad(column, "a whole number")
        if value > most:
            raise self.bad(column, f"at most {most:,}")
        return int(value)

    def share(self, column: str) -> float:
        """Return the share of memory in a column, above 0 and at most 1."""
        if (value := self.number(column)) > 1:
            raise self.bad(column, "a share, at most 1")
        return value

    def seconds(self, column: str, per_s: float) -> float:
        """Return the latency in a column, converted to seconds; a second has `per_s` of the column's units.

        Raises UserError unless the latency is between a nanosecond and a day.
        """
        value = self.number(column) / per_s
        if not 1e-9 <= value <= MOST_S:
            raise self.bad(column, f"between a nanosecond and a day ({1e-9 * per_s:g} to {MOST_S * per_s:g})")
        return value

    def fits(self, setting: Setting, *columns: str) -> None:
        """Raise UserError if the requests of a setting are longer than its model serves.

        The error names one of `columns`: the one with the largest length.
        """
        load, most = setting.load, setting.shape.max_tokens
        if load is not None and load.prompt + load.output > most:
            longest = max(columns, key=self.count)
            raise self.bad(longest, f"a length of requests of at most {most:,} tokens, which are served")

    def given(self, name: str) -> Shape | None:
        """Return a model's shape: from the row's columns, else from the caller's `shapes`; None if it is in neither."""
        if set(SHAPE) <= set(self.values):
            sizes: dict[str, Any] = {column: self.count(column) for column in SHAPE}
            return Checkpoint(**sizes, gated=True, tied=False, context=SERVED_TOKENS).shape(name)
        return self.shapes.get(name)

    def setting(self, engine: str, gpu: str, model: str, tp: str, load: Load | None, **flags: Any) -> Setting:
        """Return the row's setting; `gpu`, `model` and `tp` are names of columns.

        Raises UnknownName for an unknown GPU or model.
        """
        name = self.values[model]
        given = self.given(name)
        ours = name if given else names.model(name, self.shapes)
        kind = names.gpu(self.values[gpu])
        return Setting(engine, kind, ours, self.count(tp), load, tuple(flags.items()), given, sampling=self.sampling())

    def sampling(self) -> str:
        """Return the sampling that the client asked for: the value of the column `sampling`.

        If there is no value, the result is "greedy" for models whose client is known to ask for greedy sampling, else
        "checkpoint". Raises UserError for an unknown word.
        """
        known = "greedy" if self.values.get("model_path") in names.GREEDY else "checkpoint"
        word = self.values.get("sampling") or known
        if word not in SAMPLINGS:
            raise self.bad("sampling", " or ".join(SAMPLINGS))
        return word

    def stages(self, column: str) -> tuple[tuple[float, float], ...]:
        """Parse a column of stages, RATExSECONDS;..., as pairs of numbers above 0."""
        match = STAGES.fullmatch(self.values[column])
        pairs = [part.split("x") for part in self.values[column].split(";")] if match else []
        try:
            stages = tuple((float(rate), float(seconds)) for rate, seconds in pairs)
        except ValueError:
            stages = ()
        if not stages or min(map(min, stages)) <= 0:
            raise self.bad(column, "RATExSECONDS;...")
        if len(stages) > MOST_STAGES:
            raise self.bad(column, f"at most {MOST_STAGES} stages")
        if sum(rate * seconds for rate, seconds in stages) > MOST_REQUESTS:
            raise self.bad(column, f"at most {MOST_REQUESTS:,} requests")
        return stages


Found = tuple[Setting, int | None, dict[str, float]]
LONG_TOKENS = 16384  # served where rows of long prompts name no limit
LOST_S = 100.0  # a longer mean TTFT is that of a server that was not up yet, or of a queue that no row states


def _poisson(row: CsvRow) -> Found:
    """Read a row of a Poisson load on vLLM 0.15, with times in ms.

    TPOT is computed as (E2E - TTFT) / (output - 1), because some chunks have two tokens.
    """
    stages, output = row.stages("stage_rates_s"), row.count("output_tokens")
    system, prompt = row.count("system_tokens"), row.count("system_tokens") + row.count("question_tokens")
    flags = {"chunk_tokens": row.count("mbt"), "mem_fraction": row.share("mem")}
    flags["batch_cap"] = row.count("max_num_seqs", MOST_SEQS)
    load = Poisson(stages, system, prompt, output)
    setting = row.setting("vllm-0.15", "gpu", "model", "tp", load, **flags)
    row.fits(setting, "system_tokens", "question_tokens", "output_tokens")
    ttft_s, e2e_s = row.seconds("real_ttft_mean", 1e3), row.seconds("real_e2e_mean", 1e3)
    if e2e_s < ttft_s:
        raise row.bad("real_e2e_mean", "at least real_ttft_mean")
    tails = {metric: row.seconds(f"real_{metric}", 1e3) for metric in TAILS if row.values.get(f"real_{metric}")}
    measured = {"ttft": ttft_s, "tpot": (e2e_s - ttft_s) / max(1, output - 1), "e2e": e2e_s, **tails}
    text = row.values["stage"]
    if text != "-1" and text not in map(str, range(len(stages))):
        raise row.bad("stage", "-1 (all) or the number of a stage")
    if sum(rate * seconds for rate, seconds in (stages if text == "-1" else stages[int(text) :][:1])) < FEWEST_REQUESTS:
        raise row.bad("stage_rates_s", f"at least {FEWEST_REQUESTS} requests, where they are scored")
    return setting, None if text == "-1" else int(text), measured


def _closed(row: CsvRow) -> Found:
    """Read a row of a closed loop at fixed lengths, with times in ms.

    E2E is TTFT + (output - 1) x TPOT, which also equals clients / throughput.
    """
    load = Closed(row.count("concurrency", MOST_REQUESTS // WAVES), row.count("isl"), row.count("osl"))
    engine = names.engine(row.values["backend"], row.values["backend_version"], ENGINES)
    setting = row.setting(engine, "system", "model_path", "tp_size", load)
    row.fits(setting, "isl", "osl")
    ttft_s, tpot_s = row.seconds("silicon_ttft_ms", 1e3), row.seconds("silicon_tpot_ms", 1e3)
    return setting, None, {"ttft": ttft_s, "tpot": tpot_s, "e2e": ttft_s + (load.output - 1) * tpot_s}


def _quantised(row: CsvRow) -> Found:
    """Read a row of a closed loop of a quantised model or a mixture of experts, with times in ms.

    The number format is chosen by `names.quantised`. If attention spans fewer GPUs than the experts do, attention is
    data-parallel. The row then states the clients of one attention group only; the setting has those of all groups.
    Raises UnknownName for a row without a version, or with a TTFT above LOST_S.
    """
    clients, tp = row.count("batch_size", MOST_REQUESTS // WAVES), row.count("tp_size")
    cut, spread = row.count("moe_tp_size"), row.count("moe_ep_size")
    if not row.values["backend_version"]:
        raise UnknownName("no version of the engine")
    engine, version = names.generation(row.values["backend"], row.values["backend_version"], ENGINES)
    name, form, kind = names.quantised(row.values["model_path"], row.values["gemm_quant_mode"])
    if kind == "MoE" and (gpus := cut * spread) != tp:
        if gpus % tp:
            raise UnknownName(f"attention on {tp} GPUs, experts on {gpus}")
        name, clients, tp = f"{name}:dp={gpus // tp}", clients * (gpus // tp), gpus
    if spread > 1:
        name += f":ep={spread}"
    ttft_s, tpot_s = row.seconds("silicon_ttft_ms", 1e3), row.seconds("silicon_tpot_ms", 1e3)
    if ttft_s > LOST_S:
        raise UnknownName(f"a mean TTFT of {ttft_s:.0f} s")
    kind_of_gpu = names.gpu(row.values["system"].replace("_", " "))
    least, first = names.LOADS.get(row.values["model_path"], (1.0, False))
    name += names.KV_FORMAT.get((row.values["model_path"], kind_of_gpu), "")
    load = Closed(clients, row.count("isl"), row.count("osl"), least, first)
    setting = Setting(engine, kind_of_gpu, name, tp, load, served=LONG_TOKENS, sampling=row.sampling())
    row.fits(setting, "isl", "osl")
    row.group = f"{version} | {kind_of_gpu} | {form} | {kind}"
    return setting, None, {"ttft": ttft_s, "tpot": tpot_s, "e2e": ttft_s + (load.mean_output - 1) * tpot_s}


def _offline(row: CsvRow) -> Found:
    """Read a row of an offline batch (vLLM 0.5 and 0.6) with outputs as long as the prompts; its latency is in s."""
    if row.values["Framework"] != "vLLM":
        raise names.unknown("engine", row.values["Framework"], ["vLLM"])
    length, size = row.count("Input Output Length"), row.count("Batch Size", MOST_REQUESTS)
    setting = row.setting("vllm-0.6", "Hardware", "Model", "Num of Hardware", Batch(size, length, length))
    row.fits(setting, "Input Output Length")
    return setting, None, {"throughput": 2 * length * size / row.seconds("Latency", 1.0)}


def _pools(row: CsvRow) -> Found:
    """Read a row that states how many KV blocks an engine allocated; such a row has no load."""
    if row.count("block_tokens") != BLOCK_TOKENS:
        raise row.bad("block_tokens", str(BLOCK_TOKENS))
    name, _, version = row.values["engine"].partition(" ")
    flags = {
        "chunk_tokens": row.count("max_num_batched_tokens"),
        "mem_fraction": row.share("gpu_memory_utilization"),
        "batch_cap": 256,  # is not logged; `engines/costs/process.py` says what supports it
    }
    setting = row.setting(names.engine(name, version, ENGINES), "gpu", "model", "tp", None, **flags)
    return setting, None, {"kv_blocks": float(row.count("kv_blocks"))}


FORMATS: Mapping[Callable[[CsvRow], Found], tuple[str, ...]] = {
    _poisson: ("model", "gpu", "tp", "mbt", "mem", "stage", "real_e2e_mean", "real_ttft_mean", "stage_rates_s",
               "system_tokens", "question_tokens", "output_tokens", "max_num_seqs"),
    _closed: ("backend", "backend_version", "model_path", "system", "isl", "osl", "concurrency", "tp_size",
              "silicon_ttft_ms", "silicon_tpot_ms"),
    _quantised: ("backend", "backend_version", "model_path", "system", "isl", "osl", "gemm_quant_mode", "batch_size",
                 "tp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
    _offline: ("Hardware", "Num of Hardware", "Framework", "Model", "Input Output Length", "Batch Size", "Latency"),
    _pools: ("model", "tp", "kv_blocks", "block_tokens", "gpu", "engine", "gpu_memory_utilization",
             "max_num_batched_tokens"),
}  # fmt: skip


class Read(NamedTuple):
    """Cases of a file or folder, and the rows and files that were skipped."""

    cases: list[Case]
    skipped: list[Skipped]


def cases(folder: Path) -> list[Case]:
    """Return the cases of a CSV or of a folder's CSVs, without a list of what was skipped."""
    return read(folder).cases


def read(folder: Path, shapes: Mapping[str, Shape] | None = None, others: Collection[str] = ()) -> Read:
    """Read a CSV, or all CSVs of a folder and of its subfolder `single/`.

    Rows with a bad value are skipped, and so are rows with an unknown engine, GPU or model; `shapes` adds models. A CSV
    in a folder is skipped if its format is unknown. Files with a name in `others` are not read. Raises UserError if a
    file cannot be read, or if there are no CSVs or no rows.
    """
    files = [folder] if folder.is_file() else sorted((*folder.glob("*.csv"), *folder.glob("single/*.csv")))
    if not files:
        raise UserError(f"{folder}: no CSV of measured runs there (MEASURED_DIR, or bench validate FOLDER)")
    files, known = [path for path in files if path.name not in others], len(files)
    rows = [row for path in files for row in _read(path, shapes or {}, alone=path == folder)]
    if not rows and len(files) == known:
        raise UserError(f"{folder}: no rows in its CSVs")
    return Read([row for row in rows if isinstance(row, Case)], [row for row in rows if isinstance(row, Skipped)])


def read_all(
    folders: Collection[Path], shapes: Mapping[str, Shape] | None = None, others: Collection[str] = ()
) -> Read:
    """Read several folders or files, one after the other."""
    parts = [read(folder, shapes, others) for folder in folders]
    return Read([case for part in parts for case in part.cases], [skip for part in parts for skip in part.skipped])


Lines = list[tuple[int, list[str]]]  # lines of a CSV, each with its number


def contents(path: Path) -> tuple[list[str], Lines]:
    """Read a CSV; return its header, and its other lines with their numbers. Raises UserError if it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as source:
            rows = csv.reader(source)
            return next(rows, []), [(rows.line_num, values) for values in rows if values]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def lines(path: Path, shapes: Mapping[str, Shape], header: list[str], rows: Lines) -> Iterator[CsvRow | Skipped]:
    """Yield each line of a CSV as a CsvRow, or as Skipped if it has too few or too many values.

    `header` and `rows` come from `contents`. Raises UserError for a column that occurs twice.
    """
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise UserError(f"{path}:1: column {twice} is there twice")
    for line, values in rows:
        if len(values) != len(header):
            why = f"{len(values)} values for {len(header)} columns ({header[-1]} is the last)"
            yield Skipped(path.name, line, why)
        else:
            yield CsvRow(path, line, dict(zip(header, values, strict=True)), shapes)


def _read(path: Path, shapes: Mapping[str, Shape], *, alone: bool) -> Iterator[Case | Skipped]:
    header, rows = contents(path)
    form = next((form for form, columns in FORMATS.items() if set(columns) <= set(header)), None)
    if form is None:
        near = max(FORMATS.values(), key=lambda columns: len(set(columns) & set(header)))
        why = f"no known columns; the nearest form lacks {', '.join(c for c in near if c not in header)}"
        if alone:
            raise UserError(f"{path}:1: {why}")
        yield Skipped(path.name, 0, why)
        return
    for row in lines(path, shapes, header, rows):
        if isinstance(row, Skipped):
            yield row
            continue
        try:
            setting, stage, measured = form(row)
            weight_bytes(setting.shape, setting.tp)  # raises UserError where its heads do not split over `tp` GPUs
        except UserError as error:
            yield row.skipped(error)
            continue
        fitted = any(_holds(box, row) for box in quantities.fitted(setting.engine))
        yield Case(path.name, row.line, setting, stage, measured, fitted, row.values, row.group)


def _holds(box: Mapping[str, Any], row: CsvRow) -> bool:
    """Tell whether a host profile was fitted to a row, according to one table of the profile's fitted rows.

    `box` is that table. It names a file and, for each of some columns, a list of values. The row must come from this
    file, and its value of each of these columns must be in the column's list.
    """
    return box["file"] == row.path.name and all(
        value(row.values.get(column, "")) in map(value, values) for column, values in box.items() if column != "file"
    )


def value(text: str | float) -> str | float:
    """Convert a column's value to a number if possible, since files write both 64 and 64.0."""
    try:
        return float(text)
    except ValueError:
        return text
