"""MuxServe's synthetic workloads: throughput, and the rate within SLOs, over popularity and rate, beside the paper's.

`bench study muxserve` prints a line a system and exponent, and a line a claim (`muxserving.toml`) with its verdict.
Runs are those of any sweep, kept in `results/muxserve`.

The setting is the release's (hao-ai-lab/MuxServe 2249cfa, benchmark/end_to_end/bench_end_to_end_muxserve.py): 19 LLaMA
(`model2num`: 12 of 7B, 4 of 13B, 2 of 30B, 1 of 65B, the most popular first) on four nodes of eight A100 80 GB; the
k-th most popular model has a rate in proportion to k^-alpha (`gen_power_law_dis`), the first one 40 requests/s x the
rate scale (`get_real_rate`); Poisson arrivals. Rate scales below 0.5 are ours, for a rate at which SLOs are met.
Planners know the rates, as there. Lengths are drawn from a law of ShareGPT's means (`workloads/lengths.py`), its
requests being in no trace at hand. Steps cost what they do on vLLM 0.6; policies see MuxServe's own profile
(PROFILES_DIR), which has no licence and is read from there alone.

`muxserve:original` chooses its degrees of parallelism, and so do AlpaServe and the random placement. `spatial` has
those that the release sets by hand (`gen_spatial_cfg_from_muxserve_cfg`, model2placement: 1, 1, 4 and 8 GPUs), which
MuxServe++ keeps. `temporal` has the placement of `muxserve:original` (`gen_temporal_cfg_from_muxserve_cfg`), and its
models take turns. `first-fit` and `random` are floors: they serve as `muxserve:original` does, on such a placement.

Throughput is the mean over models of requests done a second, weighted by their rates (plot_p_latency.py, read_log). A
request is within its SLO if it ends within `SLO_SCALE` times what it takes alone on the GPUs of `spatial`; which scale
the claim is about is not stated where it is made, so ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.policy.chance import draw
from harness.policy.placement import footprint, one_request
from harness.policy.types import Cluster, Gpus, UserError
from harness.rows import record, requests
from harness.rows.setting import degrees
from harness.run import sweep
from harness.run.setup import Setup, load_models
from harness.run.spec import Spec, asked
from harness.run.teller import Silent, Teller
from harness.study.claims import Line, Part, by_measures
from traces import schema
from workloads.lengths import lengths

PAPER = "MuxServe, ICML 2024"
CLAIMS = Path(__file__).with_name("muxserving.toml")
PROFILE = "muxserve/llama-a100-sm-share.json"  # the release's examples/placement/llama.json
MODELS = "llama-7b*12,llama-13b*4,llama-30b:tp=4*2,llama-65b:tp=8"
COUNT, TOP_RPS = 19, 40.0
ALPHAS = (0.7, 0.9, 1.3, 1.7, 2.1)
BUSY = (0.5, 0.75, 1.0, 1.25)  # rate scales of the release
CALM = (0.0625, 0.125, 0.25)
HOST, LONGEST, LAW = "vllm-0.6", 2048, "geometric"
WARM_S, WINDOW_S = 20.0, 40.0
SEEDS = 3
SLO_SCALE, LEVEL = 8.0, 0.99
STEP_TOKENS = 2048  # muxserve/config.py, max_num_batched_tokens; prompts go whole
MOST_SEQS, PROFILED_SEQS = 256, 2048  # of a batch: as the release's spatial_cfg has it; the largest in its profile
TTFT_S, TPOT_S = 2.0, 0.1  # the SLO that AlpaServe places by: ours


class System(NamedTuple):
    """A system as the study names it."""

    text: str  # as --systems takes it
    placement: str = ""  # of a spec, or one of `FLOORS`
    reads_slo: bool = False
    profiled: bool = False  # its batches are as large as quotas allow, up to the largest that is profiled


SYSTEMS: Mapping[str, System] = {
    "muxserve": System("muxserve:original", profiled=True),
    "spatial": System("dedicated"),
    "temporal": System("muxserve:temporal+kv=paged", "muxserve:original", profiled=True),
    "muxserve++": System("muxserve:plusplus"),
    "alpaserve": System("alpaserve+late=serve+samples=300", reads_slo=True),
    "first-fit": System("muxserve:original", "first-fit", profiled=True),
    "random": System("muxserve:original", "random", profiled=True),
}
OWN = ("muxserve", "temporal", "alpaserve", "first-fit", "random")  # whose degrees are not the model set's


@dataclass(frozen=True)
class Run:
    """A system under a load."""

    system: str
    alpha: float
    scale: float

    def spec(self, seed: int, out: Path) -> Spec:
        """Return the run as a spec; its requests are written below `out`."""
        system = SYSTEMS[self.system]
        named = asked(system.text)
        spec = Spec(
            named["system"], named["preset"], tuple(named["fields"].items()), gpu="a100-80g", gpus=32, host=HOST,
            models=MODELS, served=LONGEST, trace=str(written(self.alpha, self.scale, seed, out)), scaling="none",
            plan="trace", seed=seed, window_s=WINDOW_S, warmup_s=WARM_S,
            slo=f"absolute:ttft={TTFT_S:g},tpot={TPOT_S:g}" if system.reads_slo else "",
            slo_s=tuple((name, TTFT_S, TPOT_S) for name in names()) if system.reads_slo else (),
            chunk_tokens=0, prefill_tokens=STEP_TOKENS, mem_fraction=0.9, admission="prompt",
            batch_cap=PROFILED_SEQS if system.profiled else MOST_SEQS, profile=profile(),
            placement="" if system.placement in FLOORS else system.placement,
        )  # fmt: skip
        return replace(spec, homes=homes_of(system.placement, seed, out)) if system.placement in FLOORS else spec


class Measured(NamedTuple):
    """The results of a run over its window."""

    throughput_rps: float  # requests that end in it, weighted by their models' rates
    done_rps: float  # in all
    within: float  # of the requests that arrive in it, the share within the SLO


# ------------------------------------------------------------------ a run


def profile() -> str:
    """Return the path of MuxServe's profile. UserError where PROFILES_DIR lacks it."""
    folder = os.environ.get("PROFILES_DIR", "")
    path = Path(folder) / PROFILE
    if not folder or not path.is_file():
        raise UserError(
            f"no file {PROFILE} in PROFILES_DIR ({folder or 'not set'}): it is examples/placement/llama.json of "
            "github.com/hao-ai-lab/MuxServe"
        )
    return str(path)


def rates(alpha: float, scale: float) -> list[float]:
    """Return requests a second of each model, the most popular first."""
    return [TOP_RPS * scale * (k + 1) ** -alpha for k in range(COUNT)]


@cache
def names() -> list[str]:
    """Return the models in the order of their rates."""
    return list(load_models(MODELS).names)


@cache
def written(alpha: float, scale: float, seed: int, out: Path) -> Path:
    """Write Poisson arrivals of all models, at least one of each, as a trace of one window; returns its path."""
    rng = np.random.default_rng(seed)
    counts = [max(1, int(rng.poisson(rate * WINDOW_S))) for rate in rates(alpha, scale)]
    arrival_s, model = rng.uniform(0, WINDOW_S, sum(counts)), np.repeat(names(), counts)
    order, drawn = np.argsort(arrival_s, kind="stable"), lengths("sharegpt", LAW, sum(counts), rng, longest=LONGEST)
    path = out / f"muxserve-{alpha:g}-{scale:g}-{seed}.parquet"
    note = f"Poisson arrivals at rates of a power law, {LAW} lengths of ShareGPT's means"
    return schema.drawn(path, arrival_s[order], model[order].tolist(), drawn, span_s=WINDOW_S, note=note)


def indices(rows: requests.Rows) -> NDArray[np.int32]:
    """Return the model of each request, as its place in `names`."""
    return np.array([names().index(name) for name in rows.models], np.int32)[rows.model]


def alone_s(rows: requests.Rows, spec: Spec) -> NDArray[np.float64]:
    """Return the seconds that each request takes alone on idle GPUs, as many as the model set gives its model."""
    first_s, later_s = Setup(spec).solo_s(indices(rows), rows.prompt_tokens, rows.output_tokens)
    return np.asarray(first_s + (rows.output_tokens - 1) * later_s, np.float64)


def measured(run: Run, rows: requests.Rows, alone: NDArray[np.float64]) -> Measured:
    """Measure a run by its requests, and the seconds that each takes alone."""
    done_s = rows.arrival_s + rows.e2e_s
    ended = rows.done & (done_s >= 0.0) & (done_s < WINDOW_S)  # also of the warm-up, whose requests queue up
    weights = np.array(rates(run.alpha, run.scale))
    each_rps = np.bincount(indices(rows)[ended], minlength=COUNT) / WINDOW_S
    within = (rows.done & (rows.e2e_s <= SLO_SCALE * alone))[requests.in_window(rows, WINDOW_S)]
    return Measured(float(weights @ each_rps / weights.sum()), float(each_rps.sum()), float(within.mean()))


# ------------------------------------------------------------------ floors


@cache
def homes_of(floor: str, seed: int, out: Path) -> tuple[tuple[str, Gpus], ...]:
    """Return one of the placements of `FLOORS`, which is the same under all loads."""
    spec = Run("muxserve", ALPHAS[0], BUSY[0]).spec(0, out)
    return tuple(FLOORS[floor](Setup(spec).engine.cluster, seed).items())


def places(cluster: Cluster, name: str) -> list[Gpus]:
    """Return the groups of GPUs on which a model may live: of each of its degrees, side by side within a node."""
    gpus = len(cluster.gpus)
    return [
        tuple(range(g, g + tp))
        for tp in cluster.models[name].degrees
        for g in range(0, gpus - tp + 1, tp)
        if cluster.gpus[g].node == cluster.gpus[g + tp - 1].node
    ]


def first_fit(cluster: Cluster, seed: int = 0) -> dict[str, Gpus]:  # noqa: ARG001 - one of `FLOORS`
    """Give each model, in their order, the first GPUs with room, of the least of its degrees that has any."""
    return _fitted(cluster, lambda name, _: places(cluster, name))


def random(cluster: Cluster, seed: int) -> dict[str, Gpus]:
    """Give each model one of its places by a hash of the seed, of those with room."""

    def shuffled(name: str, k: int) -> list[Gpus]:
        every = places(cluster, name)
        return sorted(every, key=lambda place: draw(seed, 1000 * k + every.index(place)))

    return _fitted(cluster, shuffled)


def _fitted(cluster: Cluster, ordered: Callable[[str, int], Sequence[Gpus]]) -> dict[str, Gpus]:
    """Give each model the first of its places in an order that has room for its weights and one longest request."""
    left = [float(gpu.mem_bytes) for gpu in cluster.gpus]
    homes: dict[str, Gpus] = {}
    for k, (name, model) in enumerate(cluster.models.items()):
        for place in ordered(name, k):
            at = model.at(len(place))
            need = footprint(at, elastic=False) + one_request(at)
            if all(left[g] >= need for g in place):
                homes[name] = place
                for g in place:
                    left[g] -= need
                break
        else:
            raise UserError(f"no room is left for {name} on {len(left)} GPUs")
    return homes


FLOORS: Mapping[str, Callable[[Cluster, int], dict[str, Gpus]]] = {"first-fit": first_fit, "random": random}


# ------------------------------------------------------------------ all of it


Results = Mapping[tuple[str, float, float, int], Measured]  # by system, alpha, rate scale and seed


def keys_of(seeds: int) -> list[tuple[str, float, float, int]]:
    """List the system, exponent, rate scale and seed of each run."""
    return [(name, alpha, scale, seed) for name in SYSTEMS for alpha in ALPHAS for scale in (*CALM, *BUSY)
            for seed in range(seeds)]  # fmt: skip


def inputs() -> Sequence[Path]:
    """List the files outside of the repository that the answer rests on: MuxServe's profile."""
    return [Path(profile())]


def count(seeds: int) -> int:
    """Count the runs of the claims."""
    return len(keys_of(seeds))


def specs(seeds: int, out: Path) -> Iterator[Spec]:
    """Yield the specs of all runs that the claims need; their traces are written below `out`."""
    return (Run(*key[:3]).spec(key[3], out) for key in keys_of(seeds))


def setting() -> str:
    """Describe models, GPUs and lengths of all runs."""
    return f"19 LLaMA, 32 x a100-80g, {LAW} lengths of ShareGPT's means, {HOST}"


def ran(seeds: int, out: Path, workers: int | None = None, teller: Teller | None = None) -> Results:
    """Run what is not stored in `out`; return all results."""
    keys = keys_of(seeds)
    runs = [(Run(*key[:3]), key[3]) for key in keys]
    specs = [run.spec(seed, out) for run, seed in runs]
    folders = sweep.sweep(specs, out, workers=workers, teller=teller or Silent(), what="muxserve")
    alone: dict[tuple[float, float, int], NDArray[np.float64]] = {}  # the same for all systems
    results = {}
    for key, (run, seed), spec, folder in zip(keys, runs, specs, folders, strict=True):
        rows, load = requests.rows(record.read(folder)), (run.alpha, run.scale, seed)
        if load not in alone:
            alone[load] = alone_s(rows, spec)
        results[key] = measured(run, rows, alone[load])
    return results


def held(results: Results, name: str, alpha: float, seed: int) -> float:
    """Return the highest rate scale within SLOs: where attainment first falls below the level, between two scales.

    The least scale where that fails already, the greatest where none does.
    """
    scales = (*CALM, *BUSY)
    shares = [results[name, alpha, scale, seed].within for scale in scales]
    k = next((k for k, share in enumerate(shares) if share < LEVEL), len(scales))
    if k in {0, len(scales)}:
        return scales[max(k - 1, 0)]
    part = (shares[k - 1] - LEVEL) / (shares[k - 1] - shares[k])
    return float(scales[k - 1] * (scales[k] / scales[k - 1]) ** part)


def throughput_gain(results: Results, over: str, seed: int) -> float:
    """Return the greatest ratio of throughputs, of all exponents and the release's rate scales."""
    return max(
        results["muxserve", alpha, scale, seed].throughput_rps / results[over, alpha, scale, seed].throughput_rps
        for alpha in ALPHAS for scale in BUSY
    )  # fmt: skip


def held_gain(results: Results, over: str, seed: int) -> float:
    """Return the greatest ratio of rates within SLOs, of all exponents."""
    return max(held(results, "muxserve", alpha, seed) / held(results, over, alpha, seed) for alpha in ALPHAS)


GAINS = {"throughput": throughput_gain, "held": held_gain}


def lines(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Line]:
    """Yield every claim with its verdict; runs are kept in `out`."""
    return judged(ran(seeds, out, workers, teller), seeds)


def judged(results: Results, seeds: int) -> Iterator[Line]:
    """Yield every claim with its verdict."""

    def values(name: str) -> list[tuple[str, list[float]]]:
        kind, _, over = name.partition("_")
        return [("", [GAINS[kind](results, over, seed) for seed in range(seeds)])]

    return by_measures(CLAIMS, "muxserve", values)


def parts(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Part]:
    """Yield the answer: MuxServe over the others, a table by exponent, then a line a claim."""
    results = ran(seeds, out, workers, teller)
    yield answer(results, seeds)
    yield f"simulated, 32 x a100-80g, {HOST}; policies see MuxServe's profile; {LAW} lengths; {seeds} seeds"
    yield degrees((name, "own" if name in OWN else None) for name in SYSTEMS)
    yield from table(results, seeds)
    yield from judged(results, seeds)


def answer(results: Results, seeds: int) -> str:
    """Say how far MuxServe's throughput is from the others', over exponents and rates."""

    def told(over: str) -> str:
        ratios = [fmean([results["muxserve", alpha, scale, seed].throughput_rps for seed in range(seeds)])
                  / fmean([results[over, alpha, scale, seed].throughput_rps for seed in range(seeds)])
                  for alpha in ALPHAS for scale in BUSY]  # fmt: skip
        return f"{min(ratios):.2f} to {max(ratios):.2f} times {over}'s"

    return f"MuxServe's throughput is {', '.join(told(over) for over in ('spatial', 'temporal'))}"


def table(results: Results, seeds: int) -> Iterator[Part]:
    """Yield throughput at the greatest rate, and the highest rate scale within SLOs, a row a system."""
    yield (
        f"by alpha: req/s at rate scale {BUSY[-1]:g}, then the highest scale with {100 * LEVEL:g} % "
        f"within {SLO_SCALE:g} x alone"
    )
    heads = [f"{alpha:g}" for alpha in ALPHAS]
    rows = [["system", *heads, *heads]]
    for name in SYSTEMS:
        each = [[results[name, alpha, BUSY[-1], seed] for seed in range(seeds)] for alpha in ALPHAS]
        tops = [fmean([result.throughput_rps for result in some]) for some in each]
        most = [fmean([held(results, name, alpha, seed) for seed in range(seeds)]) for alpha in ALPHAS]
        rows.append([name, *(f"{x:.1f}" for x in tops), *(f"{x:.3g}" for x in most)])
    yield rows
