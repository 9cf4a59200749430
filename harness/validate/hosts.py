"""Fits of host profiles to public end-to-end runs (`measured`): `bench calibrate measured`.

The profiles are stored in `engines/costs/tables/hosts.toml`, with a hash of the fit's inputs (`inputs`). The same file
has the fit of one unnamed card (`unnamed_card`). The simulator replays each measured row under the row's own
conditions. Kernel times come from the cost tables, so a profile has only what the engine adds to them.

Each profile has two errors. `fit` is the error on the fitted rows. `held` is the error of fits that each leave out one
group of rows and predict it. A group has the rows of a run (Poisson), of a prompt or output length (closed loop), or of
a model or batch size (offline). The rows state no sampling flags. Inference-perf, the client of the Poisson runs, sends
none, so vLLM uses the settings of the checkpoint. The same is assumed of the closed loops.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibrate import hosts
from harness.calibrate.rows import F8
from harness.calibrate.tables import Table
from harness.engines.costs import quantities
from harness.engines.machine import Config
from harness.policy.types import UserError
from harness.validate import staggered, unnamed_card
from harness.validate.loads import BLOCK_TOKENS, Batch, Closed, Setting
from harness.validate.measured import MEANS, Case, cases, value
from harness.validate.validate import ours, unscored

FITTED_ON = "2026-11-28"
GPU = "h100"  # every row has it
NEWEST = "vllm-0.15"
LOOPS = ("isl", "osl", "concurrency")  # columns that tell rows apart
BATCHES = ("Model", "Num of Hardware", "Input Output Length", "Batch Size")
POISSON = "sim-to-real-accuracy-validation dcec3fd, its training rows (Apache-2.0)"
CLOSED = "aiconfigurator 095f58a silicon_sample.csv, Qwen3-32B TP2 (Apache-2.0)"
OFFLINE = "LLM-Inference-Bench 4211f5d All_results.csv (BSD-3-Clause)"
# The API's seconds for a token on its way out are a published fit (BLIS, H100); rows show only their sum with api_in_s.
API_OUT_S = 0.0008
# The rows of H100 alone support the same value: E2E of vllm-0.12 is off by 1.7 % (rms) with SAMPLE_S, by 3.3 without a
# sort, and by 2.1 and 2.2 with 0.7e-10 and 1.95e-10.
SORT = (
    "sorting in PyTorch (vllm PR 40376, on a B200: 1.07 and 2.40 ms for 64 and 128 rows of 131,072), longer on cards"
    " below H100's bandwidth (assumed)"
)
SAMPLE_S = 1.36e-10  # seconds a row and entry: the mean of the two measurements in SORT


# ---------------------------------------------------------------------------------------------------- rows


def measured_rows() -> list[Case]:
    """Read the measured rows of `MEASURED_DIR`."""
    return cases(_folder())


def measured_ramps() -> staggered.Measured:
    """Read the rows of `MEASURED_DIR` that measure several models on one card."""
    return unnamed_card.measured_ramps(_folder())


def _folder() -> Path:
    where = os.environ.get("MEASURED_DIR", "")
    if not where:
        raise UserError("set MEASURED_DIR to the folder of public end-to-end measurements")
    return Path(where.split(os.pathsep)[0])  # no host profile is fitted on rows of the other folders


def usable(setting: Setting) -> bool:
    """Tell whether a host profile may be fitted to the rows of a setting.

    The setting must have a load. All requests of a closed loop or batch must fit into KV memory at once, and each
    kernel must have a cost table. One kernel has no cost table: that of Mistral-7B on vLLM 0.5 and 0.6 above 512
    sequences x heads. Because of the model's sliding window, vLLM then uses the first paged-attention kernel, which
    reads grouped KV once for every query head.
    """
    load = setting.load
    if isinstance(load, Closed | Batch):
        many = load.clients if isinstance(load, Closed) else load.size
        old = setting.model == "mistral-7b" and many * setting.shape.q_heads // setting.tp > 512
        if setting.engine == "vllm-0.6" and old:
            return False
        return many * (load.prompt + load.output) <= setting.kv_blocks * BLOCK_TOKENS
    return load is not None


def groups(case: Case) -> tuple[str, ...]:
    """Return the groups to which a case belongs. Each refit leaves out one whole group."""
    setting, load = case.setting, case.setting.load
    if isinstance(load, Closed):
        return f"prompt {load.prompt}", f"output {load.output}"
    if isinstance(load, Batch):
        return setting.model, f"batch {load.size}"
    return (f"{setting.model} {load}",)


def tables(cases: Sequence[Case], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return tables that together match exactly the given cases, by file and the values of `columns`.

    A table has a file and, for each column, a list of values. It matches every combination of these values in the file.
    """
    each = dict.fromkeys((case.file, *((value(case.values[column]),) for column in columns)) for case in cases)
    boxes: list[tuple[Any, ...]] = list(each)
    for k in range(1, len(columns) + 1):
        merged: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for box in boxes:
            rest = (*box[:k], *box[k + 1 :])
            merged[rest] = (*merged.get(rest, ()), *box[k])
        boxes = [(*rest[:k], tuple(sorted(values)), *rest[k:]) for rest, values in merged.items()]
    plain = [[[int(v) if isinstance(v, float) and v == int(v) else v for v in vs] for vs in box[1:]] for box in boxes]
    return [
        {"file": box[0], **dict(zip(columns, values, strict=True))} for box, values in zip(boxes, plain, strict=True)
    ]


def inputs(cases: Sequence[Case]) -> str:
    """Hash the inputs of the fits: each row's conditions, load and measurements, and the GPU's table of kernel costs.

    The simulator's code is not hashed. After a change of the code, refit the rows that `stages` selects, to see whether
    the profiles in `hosts.toml` still result.
    """
    table = tomllib.loads((quantities.TABLES / f"{GPU}.toml").read_text("utf-8"))
    table.pop("co_run", None)  # it prices a model beside others
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    default = Config(())
    for case in cases:
        load = case.setting.load
        its = {k: v for k, v in vars_of(case.setting.config).items() if v != getattr(default, k)}
        digest.update(repr((case.file, case.row, case.stage, sorted(case.measured.items()), load, its)).encode())
        if load is not None:
            jobs = load.jobs()
            parts = [jobs.arrival_s, jobs.prompt_tokens, jobs.output_tokens]
            parts += [] if jobs.prefix is None else [jobs.prefix.ids]
            for part in parts:
                digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def vars_of(config: Config) -> dict[str, Any]:
    """Return the fields of a configuration, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def stages(cases: Sequence[Case]) -> list[Case]:
    """Select the newest engine's rows that measure one stage of a Poisson run.

    A row of a whole run is left out, because it only repeats the run's stages.
    """
    return [c for c in cases if c.setting.engine == NEWEST and c.setting.load is not None and c.stage is not None]


# ---------------------------------------------------------------------------------------------------- fits


Fit = Callable[[Sequence[Case]], quantities.HostProfile]


def whole(case: Case) -> str:
    """Return the name of the metric that measures whole requests: E2E if the case has it, else throughput.

    In a closed loop E2E and throughput determine each other.
    """
    return "e2e" if "e2e" in case.measured else "throughput"


def first_token(base: quantities.HostProfile) -> Fit:
    """Return a function that fits `api_in_s`, the seconds of API and tokeniser, to cases.

    The fitted value is the median of measured minus simulated TTFT.
    """

    def fit(cases: Sequence[Case]) -> quantities.HostProfile:
        left = [c.measured["ttft"] - simulated["ttft"] for c, simulated in zip(cases, ours(cases, base), strict=True)]
        return base._replace(api_in_s=float(np.median(left)))

    return fit


def whole_requests(base: quantities.HostProfile, start: Mapping[str, float]) -> Fit:
    """Return a function that fits the constants named in `start` to cases, by the metric that `whole` selects."""

    def fit(cases: Sequence[Case]) -> quantities.HostProfile:
        y = np.array([c.measured[whole(c)] for c in cases])

        def log_error(host: quantities.HostProfile) -> F8:
            predicted = [simulated[whole(c)] for c, simulated in zip(cases, ours(cases, host), strict=True)]
            return np.asarray(np.log(np.array(predicted) / y))

        return hosts.fit(base, start, log_error, step=0.05, most=20, robust=0.02)

    return fit


def errors(cases: Sequence[Case], predicted: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | int]]:
    """Return for each metric the median and P95 of the absolute relative error, and the median of the signed one."""
    out = {}
    for metric in MEANS:
        pairs = [
            (simulated[metric], c.measured[metric])
            for c, simulated in zip(cases, predicted, strict=True)
            if metric in c.measured and not unscored(c.setting, metric)
        ]
        if pairs:
            e = np.array([got / measured - 1 for got, measured in pairs])
            numbers = (np.median(np.abs(e)), np.quantile(np.abs(e), 0.95), np.median(e))
            out[metric] = dict(zip(("median", "p95", "bias"), (round(float(v), 4) for v in numbers), strict=True))
            out[metric]["n"] = len(e)
    return out


def left_out(cases: Sequence[Case], fit: Fit) -> tuple[list[Case], list[dict[str, float]]]:
    """Predict cases by fits that leave out one group each; return the cases and their predictions.

    A case that belongs to several groups is returned once for each, predicted by the fit without that group.
    """
    rows: list[Case] = []
    predicted: list[dict[str, float]] = []
    for group in dict.fromkeys(g for c in cases for g in groups(c)):
        held = [c for c in cases if group in groups(c)]
        rows += held
        predicted += ours(held, fit([c for c in cases if group not in groups(c)]))
    return rows, predicted


def profile(
    cases: Sequence[Case], fit: Fit, source: str, formula: str, columns: Sequence[str] = ()
) -> tuple[quantities.HostProfile, dict[str, Any]]:
    """Fit a host profile; return it with its table for `hosts.toml`.

    The entry `rows` of the table identifies the fitted rows by their values of `columns`.
    """
    use = [c for c in cases if usable(c.setting)]
    host = hosts.rounded(fit(use))
    fitted, held = errors(use, ours(use, host)), errors(*left_out(use, fit))
    plain = {k: {n: e[whole(use[0])][n] for n in ("median", "p95", "n")} for k, e in (("fit", fitted), ("held", held))}
    parts = {f"{name} {kind}": e for kind, es in (("fit", fitted), ("held", held)) for name, e in es.items()}
    entry = {
        "source": f"{source}; {len(use)} rows of {len(cases)}",
        "formula": formula,
        "fitted_on": FITTED_ON,
        "rows": tables(use, columns),
    }
    return host, entry | host._asdict() | plain | {"held_parts": parts}


def fit() -> dict[str, dict[str, Any]]:
    """Fit a profile for each measured generation of an engine; return the profiles' tables by name."""
    # Scheduling ahead hides the host's part of a step behind the GPU's; the rows only show that it fits there.
    hidden = quantities.host("vllm-graph", GPU)._replace(
        api_in_s=0.0, api_out_s=API_OUT_S, sample_s=SAMPLE_S, lookahead_steps=1
    )
    serial = hidden._replace(host0=0.0, host1=0.0, serial=True, lookahead_steps=0)
    out: dict[str, dict[str, Any]] = {}
    every = measured_rows()
    runs = stages(every)
    loops, waves, batches = (
        [c for c in every if c.setting.engine == engine and c.setting.load is not None]
        for engine in ("vllm-0.12", "sglang-0.5", "vllm-0.6")
    )
    # The prompts of vLLM 0.15 were hits, so it takes the sustained prefill of 0.12, on the same card and kernels.
    start = {"host0": 1e-3, "host1": 5e-5, "scale_prefill": 1.0}
    sustained = whole_requests(serial, start)([c for c in loops if usable(c.setting)]).scale_prefill
    hidden = hidden._replace(scale_prefill=float(f"{sustained:.3g}"))
    newest, out["vllm-0.15"] = profile(
        runs,
        first_token(hidden),
        f"vLLM 0.15.1, TP1 to 4: {POISSON}. Fitted: api_in_s. host0, host1: as vllm-graph, hidden in every row;"
        f" api_out_s: as vllm-graph, only its sum with api_in_s is seen; scale_prefill: as vllm-0.12; sample_s: {SORT}",
        "max(kernels + sampler, host0 + host1 x sequences); a new prompt joins behind the step already scheduled",
    )
    api_in_s = newest.api_in_s
    _, out["vllm-0.12"] = profile(
        loops,
        whole_requests(serial._replace(api_in_s=api_in_s), start),
        f"vLLM 0.12.0: {CLOSED}, clients at once. Fitted: host0, host1, scale_prefill (a sustained prefill, seen at TP2"
        f" only). API: as vllm-0.15; sample_s: {SORT}",
        "kernels + sampler + host0 + host1 x sequences",
        LOOPS,
    )
    _, out["sglang-0.5"] = profile(
        waves,
        whole_requests(hidden._replace(api_in_s=api_in_s, sample_s=0.0), {"scale_prefill": 1.0}),
        f"SGLang 0.5.1: {CLOSED}, clients at once. Fitted: scale_prefill (a sustained prefill, seen at TP2 only)."
        " API, host0, host1: as vllm-0.15, hidden in every row; sample_s: its sampler does not sort",
        "max(kernels, host0 + host1 x sequences); a new prompt joins behind the step already scheduled",
        LOOPS,
    )
    plain = serial._replace(api_in_s=api_in_s, sample_s=0.0)
    _, out["vllm-0.6"] = profile(
        batches,
        whole_requests(plain, {"host0": 1e-3, "host1": 5e-5, "host_tp": 5e-4}),
        f"vLLM 0.5 and 0.6, TP1 to 4: {OFFLINE}. Fitted: host0, host1, host_tp (the driver hands each step's inputs to"
        " its workers). API: as vllm-0.15, not in these rows; sample_s: the script of these rows sets top_p = 1",
        "kernels + host0 + host_tp x log2(GPUs) + host1 x sequences",
        BATCHES,
    )
    return out


def table() -> Table:
    """Fit all profiles again; return the content of `hosts.toml`, with each profile's errors."""
    file = tomllib.loads((quantities.TABLES / "hosts.toml").read_text(encoding="utf-8"))
    profiles = fit()
    ramps = measured_ramps()
    card, turns = unnamed_card.tables(ramps, FITTED_ON)
    next_one = file["host"]["vllm-0.14"]  # is the newest's but for constants fitted on another card
    newest = {k: v for k, v in profiles[NEWEST].items() if k in quantities.HostProfile._fields}
    profiles["vllm-0.14"] = next_one | newest | {"on": {staggered.GPU: card}}
    every = {name: profiles.get(name, old) for name, old in file["host"].items()}
    fitted = {"inputs": inputs(measured_rows()), "card": unnamed_card.inputs(ramps), "source": "make fit-hosts"}

    def notes(_: Path) -> Iterator[str]:
        for name, q in profiles.items():
            yield f"{name} { ({k: q[k] for k in quantities.HostProfile._fields}) }"
            for part, e in q.get("held_parts", {}).items():
                yield f"  {part}: {quantities.error({'fit': e})}, bias {e['bias']:+.1%}"
        numbers = {k: v for k, v in card.items() if k not in ("source", "rows")}
        yield f"{staggered.GPU} {numbers} {turns['quantum_s']}"

    return Table("hosts", file | {"host": every, "turns": turns, "fitted_with": fitted}, notes)
