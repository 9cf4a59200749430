"""Fit of the unnamed card of kvcached's runs, to one set of runs of a 7B model; `hosts` writes it to `hosts.toml`.

The card's speed is fitted to the first instance of elastic memory at the peaks in `ALONE`. That instance has the card
to itself for nearly all of its time. For each of these peaks, a further fit of the speed leaves out that peak. These
fits give the range of each constant (`band`) and the errors on the peaks that were left out (`held`). The seconds of a
turn (`quantum_s`) are fitted to the TPOT of all instances at the peak `BESIDE`, where steps are the shortest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibrate import hosts
from harness.calibrate.rows import F8
from harness.calibrate.tables import error
from harness.engines.costs import quantities
from harness.policy.types import GIB
from harness.validate.staggered import GPU, HOST, Measured, ours, read, tpot_s

ALONE = (5, *range(25, 34))  # peaks at which instances of elastic memory do not lack it
BESIDE = 5  # the peak at which steps are so short that the quantum of a turn shows
START = {"scale_decode": 1.4, "scale_prefill": 1.5, "api_in_s": 0.008}
METRICS = ["mean_ttft_s", "mean_tpot_s", "mean_e2e_s"]
FILE = "kvcached_amd/staggered_7b_1024.csv"
SWITCHING = 0.035  # processes lose this share of the GPU's time by taking turns; its source is in `tables`
RUNS = "kvcached 88b6753 (Apache-2.0), staggered ramps of six Qwen2.5-7B without MPS on an unnamed 192 GB AMD card"


def measured_ramps(folder: Path) -> Measured:
    """Read the rows of `FILE` in a folder of measured runs."""
    (ramps,) = read(folder / FILE).measured
    return ramps


def inputs(run: Measured) -> str:
    """Hash the inputs of the fits: the load, rows of elastic memory, and the table of the card's kernels."""
    table = {op: q for op, q in quantities.quantities(GPU).items() if op != "co_run"}  # it prices a model beside others
    rows = run.rows[run.rows["system"] == "elastic"]
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    load = run.load
    told = (load.shape.name, load.models, load.prompt, load.cap, load.output)
    digest.update(repr((told, rows.to_dict("list"))).encode())
    return digest.hexdigest()[:16]


def first_instance(run: Measured, peaks: Sequence[int]) -> F8:
    """Return the measured values of the first instance of elastic memory, (peaks, METRICS), in s."""
    rows = run.rows[(run.rows["system"] == "elastic") & (run.rows["instance"] == 1)].set_index("peak")
    return rows.loc[list(peaks), METRICS].to_numpy(np.float64)


def alone(run: Measured, host: quantities.HostProfile, peaks: Sequence[int]) -> F8:
    """Simulate the first instance of elastic memory, alone on the card; return (peaks, METRICS), in s."""
    runs = [ours(run.load, "elastic", peak, GIB, models=1, host=host) for peak in peaks]
    return np.stack([frame.loc[0, METRICS].to_numpy(np.float64) for frame in runs])


def fit(run: Measured, peaks: Sequence[int] = ALONE) -> quantities.HostProfile:
    """Fit the kernel scales and API seconds of the host profile to the first instance, to three digits."""
    want = first_instance(run, peaks)

    def log_error(host: quantities.HostProfile) -> F8:
        error: F8 = np.log(alone(run, host, peaks) / want).ravel()
        return error

    return hosts.rounded(hosts.fit(quantities.host(HOST, GPU), START, log_error, step=0.03, most=12), list(START))


def fit_quantum(run: Measured, host: quantities.HostProfile) -> tuple[float, F8]:
    """Fit the seconds of a turn, in steps of 0.1 ms, to the TPOTs of all instances.

    Return the seconds, and each instance's ratio of simulated to measured TPOT.
    """
    want = tpot_s(run.rows.assign(who="measured"), "measured", "elastic", BESIDE)

    def off(ms: float) -> F8:
        got = ours(run.load, "elastic", BESIDE, GIB, host=host, quantum_s=ms / 1e3).assign(who="ours")
        error: F8 = tpot_s(got, "ours", "elastic", BESIDE) / want
        return error

    best = min((k / 10 for k in range(1, 201)), key=lambda ms: float(np.square(np.log(off(ms))).mean()))
    return best / 1e3, off(best)


def tables(run: Measured, fitted_on: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two tables in the form of `hosts.toml`: the card's entry in the host profile, and the entry `turns`."""
    host, want = fit(run), first_instance(run, ALONE)
    splits = [fit(run, [peak for peak in ALONE if peak != out]) for out in ALONE]
    held = np.concatenate([alone(run, split, [peak]) for split, peak in zip(splits, ALONE, strict=True)])
    quantum_s, beside = fit_quantum(run, host)
    its = {"file": FILE, "set": ["sweep1024-kvcached"]}
    card = {
        "source": f"vLLM 0.14, the card taken for an MI300X: {RUNS}. Fitted on one set of one 7B, unchecked for other"
        " models: scale_decode, scale_prefill, api_in_s, on TTFT, TPOT and E2E of the first instance of elastic memory"
        " at peaks 5 and 25 to 33; else as vllm-0.15. band: the range over fits without a peak each",
        "fitted_on": fitted_on,
        "rows": [its | {"inst": [1], "peak": list(ALONE)}],
        **{name: getattr(host, name) for name in START},
        "band": {name: _ends([getattr(split, name) for split in splits]) for name in START},
        "fit": error(alone(run, host, ALONE).ravel(), want.ravel()),
        "held": error(held.ravel(), want.ravel()),
    }
    turns = {
        "quantum_s": quantum_s,
        "switching": SWITCHING,
        "source": "plain processes on one GPU run a step each in turn, and a turn lasts at least this long while others"
        f" are busy: {RUNS}. Fitted on one set, on the mean TPOT of the six instances. CUDA without MPS is assumed to"
        " behave alike until measured. switching: two and three processes bound by the GPU do .96 and .97 of the work"
        " of one without MPS on a GB10 (prismaquant issue 283)",
        "fitted_on": fitted_on,
        "rows": [its | {"peak": [BESIDE]}],
        "fit": error(beside, np.ones(len(beside))),
    }
    return card, turns


def _ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
