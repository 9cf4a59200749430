"""Speed, side by side in one run: `make bench`. Machines are noisy; compare the ratios, quote the medians.

Simulated requests per CPU-second on one core, by the code path of every run: chunking and pages on, token times off,
decision log off, step noise on, Parquet writer included; start-up and compiling stated apart.
"""

from __future__ import annotations

import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from harness import record
from harness.engines import cost
from harness.engines.sim import Config, Served, Sim
from harness.replay import replay
from harness.system import find
from harness.types import Jobs, Plan
from workloads.models import model_set, shape

VIDUR = {"80 % load": 450.0, "0.5 req/s": 103.0}  # requests per CPU-second, measured 2026-11 with its writer on


def jobs(models: tuple[str, ...], n: int, rate: float, prompt: int = 600, output: int = 300) -> Jobs:
    """Poisson arrivals of equal requests over models at random."""
    rng = np.random.default_rng(7)
    full = np.full(n, math.inf)
    return Jobs(models, np.cumsum(rng.exponential(1 / rate, n)), rng.integers(0, len(models), n).astype(np.int32),
                np.full(n, prompt, np.int32), np.full(n, output, np.int32), full, full)  # fmt: skip


def run(system: str, config: Config, work: Jobs, folder: Path) -> tuple[float, float, Sim]:
    """CPU seconds of the simulation and of the writer, and the engine."""
    engine = Sim(config)
    policy = find(system)(engine.cluster)
    engine = Sim(config, policy.options)
    a = time.process_time()
    replay(policy, engine, work)
    b = time.process_time()
    record.write(folder, engine.rows(), {"spec": {}, "fidelity": "simulated"})
    return b - a, time.process_time() - b, engine


def child(case: str, n: int) -> None:
    """One case in a process of its own; prints requests per CPU-second, seconds and peak memory."""
    if case == "heavy8 on 2, static":
        models = model_set("heavy8").members
        served = tuple(Served(m.name, m.shape._replace(max_tokens=2048), m.tp) for m in models)
        gpus, rate, system = 2, 8.0, "static"
    else:
        served, gpus, system = (Served("8b", shape("llama-3.1-8b")),), 1, "dedicated"
        rate = 0.5 if case == "0.5 req/s" else 7.2  # 80 % of what saturates one A100
    config = Config(served, gpu="h100" if gpus > 1 else "a100-80g", gpus=gpus, noise=cost.noise("h100", "vllm-graph"),
                    plan={m.name: Plan(rate / len(served), 600, 300, "trace") for m in served})  # fmt: skip
    names = tuple(m.name for m in served)
    with tempfile.TemporaryDirectory() as folder:
        t = time.process_time()
        run(system, config, jobs(names, 50, rate), Path(folder) / "warm")
        start = time.process_time() - t
        work = jobs(names, n, rate)
        sim_s, write_s, engine = run(system, config, work, Path(folder) / "run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = engine.stats()["steps"]
    print(n / (sim_s + write_s), sim_s, write_s, start, peak, steps / n)


def main() -> None:
    """The table."""
    print("requests per CPU-second, one core, writer included (median of 3)")
    print(f"{'case':24} {'requests':>10} {'req/CPU-s':>12} {'sim s':>7} {'write s':>8} {'peak MiB':>9} {'vs Vidur':>9}")
    per: dict[tuple[str, int], float] = {}
    for case, sizes in {
        "80 % load": (100_000, 1_000_000),
        "0.5 req/s": (100_000, 1_000_000),
        "heavy8 on 2, static": (100_000, 1_000_000),
    }.items():
        for n in sizes:
            lines = [
                subprocess.run(
                    [sys.executable, __file__, case, str(n)], check=True, capture_output=True, text=True
                ).stdout.split()
                for _ in range(3)
            ]
            rate, sim_s, write_s, _, peak, _ = (statistics.median(float(x[k]) for x in lines) for k in range(6))
            per[case, n] = rate
            vidur = f"{rate / VIDUR[case]:8,.0f}x" if case in VIDUR else ""
            print(f"{case:24} {n:10,} {rate:12,.0f} {sim_s:7.2f} {write_s:8.2f} {peak:9.0f} {vidur:>9}", flush=True)
        a, b = (per[case, n] for n in sizes)
        print(f"{'':24} time per request at 1,000,000 over 100,000: {a / b:.2f}")

    print("\nwall seconds, warm (median of 3)")
    for name, words in {
        "bench --help": ["--help"],
        "bench compare, new runs": [
            "compare",
            "--systems",
            "dedicated,static,chunked,ideal",
            "--rate-scale",
            "1",
            "--seeds",
            "1",
        ],
    }.items():
        print(f"{name:24} {statistics.median(wall(words) for _ in range(3)):10.2f}", flush=True)


def wall(words: list[str]) -> float:
    """Wall seconds of a command line; a comparison starts from nothing stored."""
    with tempfile.TemporaryDirectory() as folder:
        extra = ["-o", folder, "--no-plot"] if words[0] == "compare" else []
        t = time.perf_counter()
        subprocess.run([sys.executable, "-m", "harness", *words, *extra], check=True, capture_output=True)
        return time.perf_counter() - t


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
