"""Speed, side by side in one run: `make bench`. Machines are noisy; compare the ratios, quote the medians.

Simulated requests per CPU-second on one core, by the code path of every run: chunking and pages on, token times off,
decision log off, step noise on, Parquet writer included. Start-up and compiling are stated apart.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop.replay import Outcome, replay
from harness.loop.system import find
from harness.policy.types import Jobs, Option, Plan
from harness.rows import record
from tests.workloads.asked import asked
from workloads.models import model_set

VIDUR = {"80 % load": 450.0, "0.5 req/s": 103.0}  # requests per CPU-second, measured 2026-11 with its writer on


class Case(NamedTuple):
    """A policy on a machine under a load; requests of 600 tokens in, 300 out."""

    system: str
    models: str
    rate: float  # requests a second
    sizes: tuple[int, ...] = (100_000,)
    gpu: str = "h100"
    gpus: int = 2


LONG = (100_000, 1_000_000)
CASES = {
    "80 % load": Case("dedicated", "llama-3.1-8b", 7.2, LONG, "a100-80g", 1),  # one A100 is saturated at 9.0
    "80 % load, pdmux": Case("pdmux", "llama-3.1-8b", 7.2, gpu="a100-80g", gpus=1),
    "80 % load, disaggregated": Case("disaggregated", "llama-3.1-8b", 7.2, gpu="a100-80g"),  # one of two GPUs decodes
    "0.5 req/s": Case("dedicated", "llama-3.1-8b", 0.5, LONG, "a100-80g", 1),
    "heavy8 on 2, static": Case("static", "heavy8", 8.0, LONG),
    # light8 on two H100 leaves 99 % attainment of 5 x P95 at about 60 requests of this length a second
    "light8 on 2, prism": Case("prism", "light8", 48.0),
    "... at 150 % load": Case("prism", "light8", 90.0),
    "light8 on 2, muxserve": Case("muxserve", "light8", 48.0),
    "light8 on 2, qlm": Case("qlm", "light8", 48.0),
    "2 models on 4, weaver": Case("weaver", "llama-3.1-8b*2", 16.0, (20_000,), "a100-40g", 4),
    "40 models on 16, aegaeon": Case("aegaeon", "aegaeon+models=40", 20.0, (20_000,), gpus=16),
    "a mixture": Case("dedicated", "gpt-oss-20b", 8.0, gpus=1),
    "a dense model beside it": Case("dedicated", "llama-3.1-8b", 8.0, gpus=1),
    "... at 0.1 req/s each": Case("aegaeon", "aegaeon+models=40", 4.0, (20_000,), gpus=16),
}
SLO_S = (0.2, 0.05)  # TTFT, TPOT: about 5 x P95 of the set's 8B


def served(models: str) -> tuple[Served, ...]:
    """Return the models of a set, whose requests have at most 2,048 tokens."""
    return tuple(Served(m.name, m.shape._replace(max_tokens=2048), m.tp, *SLO_S) for m in model_set(models).members)


def jobs(models: tuple[str, ...], n: int, rate: float, prompt: int = 600, output: int = 300) -> Jobs:
    """Return Poisson arrivals of equal requests over models at random."""
    rng = np.random.default_rng(7)
    arrival_s = np.cumsum(rng.exponential(1 / rate, n))
    return asked(models, arrival_s, rng.integers(0, len(models), n), prompt, output, *SLO_S)


def run(system: str, config: Config, work: Jobs, folder: Path, **fields: Option) -> tuple[float, float, Sim, Outcome]:
    """Return CPU seconds of the simulation and of the writer, the engine, and what the policy took."""
    engine = Sim(config)
    policy = find(system)(engine.cluster, **fields)
    engine = Sim(config, policy.options)
    policy = find(system)(engine.cluster, **fields)  # options decide the page size that it may know
    a = time.process_time()
    outcome = replay(policy, engine, work)
    b = time.process_time()
    record.write(folder, engine.rows(), {"spec": {}, "fidelity": "simulated"})
    return b - a, time.process_time() - b, engine, outcome


def child(name: str, n: int) -> None:
    """Run a case in a process of its own; print requests per CPU-second, seconds, peak memory, the policy's part."""
    case = CASES[name]
    members = served(case.models)
    names = tuple(m.name for m in members)
    plan = dict.fromkeys(names, Plan(case.rate / len(members), 600, 300, "trace"))
    config = Config(members, gpu=case.gpu, gpus=case.gpus, noise=quantities.noise("h100", "vllm-graph"), plan=plan)
    with tempfile.TemporaryDirectory() as folder:
        t = time.process_time()
        run(case.system, config, jobs(names, 50, case.rate), Path(folder) / "warm")
        start = time.process_time() - t
        work = jobs(names, n, case.rate)
        sim_s, write_s, engine, outcome = run(case.system, config, work, Path(folder) / "run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stats = engine.stats()
    print(n / (sim_s + write_s), sim_s, write_s, start, peak, stats["steps"] / n, end=" ")
    print(outcome.policy_s, outcome.policy_calls / n, outcome.slowest_s)


def main() -> None:
    """Print the table."""
    print("requests per CPU-second, one core, writer included (median of 3)")
    print(
        f"{'case':24} {'requests':>10} {'req/CPU-s':>12} {'sim s':>7} {'policy s':>9} {'calls/req':>10} "
        f"{'slowest ms':>11} {'write s':>8} {'peak MiB':>9} {'vs Vidur':>9}"
    )
    per: dict[tuple[str, int], float] = {}
    step_s: dict[str, float] = {}  # CPU seconds of a turn
    for name, case in CASES.items():
        for n in case.sizes:
            command = [sys.executable, __file__, name, str(n)]
            runs = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(3))
            lines = [run.stdout.split() for run in runs]
            rate, sim_s, write_s, _, peak, steps, policy_s, calls, slowest_s = (
                statistics.median(float(x[k]) for x in lines) for k in range(9)
            )
            step_s[name] = sim_s / steps / n
            per[name, n] = rate
            vidur = f"{rate / VIDUR[name]:8,.0f}x" if name in VIDUR else ""
            print(
                f"{name:24} {n:10,} {rate:12,.0f} {sim_s:7.2f} {policy_s:9.2f} {calls:10.2f} {1e3 * slowest_s:11.2f} "
                f"{write_s:8.2f} {peak:9.0f} {vidur:>9}".rstrip(),
                flush=True,
            )
        if len(case.sizes) > 1:
            a, b = (per[name, n] for n in case.sizes)
            print(f"{'':24} time per request at 1,000,000 over 100,000: {a / b:.2f}")

    ratio = step_s["a mixture"] / step_s["a dense model beside it"]
    print(f"a step of a mixture over a dense one: {ratio:.2f} (at most 1.5)")

    print("\nwall seconds, warm (median of 3)")
    for name, words in {
        "bench --help": "--help",
        "bench compare, new runs": "compare --systems dedicated,static,chunked,unshared --rate-scale 1 --seeds 1",
    }.items():
        print(f"{name:24} {statistics.median(wall(words.split()) for _ in range(3)):10.2f}", flush=True)


def wall(words: list[str]) -> float:
    """Return wall seconds of a command line; a comparison starts from nothing stored."""
    with tempfile.TemporaryDirectory() as folder:
        extra = ["-o", folder, "--no-plot"] if words[0] == "compare" else []
        t = time.perf_counter()
        subprocess.run([sys.executable, "-m", "harness", *words, *extra], check=True, capture_output=True)
        return time.perf_counter() - t


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
