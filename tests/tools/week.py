"""A week of traffic in one run: `python -m tests.tools.week [REQUESTS [SYSTEM ...]]` prints seconds and peak memory.

Each system has a process of its own, which plans, simulates, writes and scores the run as `bench compare` does. The
trace has 16 models of three kinds, whose popularity has a Zipf tail, and rates that follow the hour of the day. It is
written in pieces into the folder for temporary files, and the rows go there too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from traces import schema
from traces.arrivals import rng, zipf

WEEK_S, DAY_S, MODELS = 7 * 86400.0, 86400.0, 16
SET = "llama-3.2-1b*8,llama-3.2-3b*5,llama-3.1-8b*3"
TOKENS = (1024, 256)  # at most, of prompt and output; on average a fifth of them
SWING = 0.6  # of the rate, about its mean over a day
SLO = "absolute:ttft=2,tpot=0.1"


def write(path: Path, requests: int) -> None:
    """Write a week of so many requests: each hour has its share by a cosine, spread over it at random."""
    draw, shares = rng(7, "week"), zipf(MODELS, 1.0)
    edges = np.linspace(0.0, WEEK_S, 7 * 24 * 12 + 1)  # five minutes each
    weight = 1.0 + SWING * np.cos(2 * np.pi * edges[:-1] / DAY_S)
    counts = np.diff(np.rint(np.concatenate([[0.0], np.cumsum(weight)]) / weight.sum() * requests).astype(np.int64))
    done, writer = 0, None
    for begin, end, n in zip(edges[:-1], edges[1:], counts.tolist(), strict=True):
        columns = {
            "request_id": np.arange(done, done + n),
            "arrival_s": np.sort(draw.uniform(begin, end, n)),
            "model": [f"m{k:02}" for k in draw.choice(MODELS, n, p=shares)],
            **{
                name: np.minimum(1 + draw.geometric(5 / most, n), most)
                for name, most in zip(("prompt_tokens", "output_tokens"), TOKENS, strict=True)
            },
        }
        rows = schema.table(columns, {"name": f"week-{requests}", "tier": "synthetic", "span_s": WEEK_S})
        writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
        writer.write_table(rows)
        done += n
    assert writer is not None
    writer.close()


def child(system: str, trace: str, gpus: int, folder: str) -> None:
    """Compare one system with nobody, and print what that took, as JSON."""
    from harness.run.execute import execute
    from harness.run.resolve import resolve
    from harness.run.score import scorable
    from harness.run.spec import Spec
    from harness.study.bases import slo_target

    clock = {"begin": time.process_time()}
    name, _, preset = system.partition(":")
    asked = Spec(name, preset or None, trace=trace, models=SET, gpus=gpus, scaling="none", slo=SLO, plan="trace")
    spec = resolve(asked)
    run = execute(spec, Path(folder), "week")
    clock["run"] = time.process_time()
    from harness.rows import tidy

    scored = tidy.score(
        scorable(system, run, slo_target(spec, SLO, Path(folder))), definitions=("both", "ttft", "tpot")
    )
    clock["scored"] = time.process_time()
    both = scored.filter(scored["definition"].cast("string").to_numpy(zero_copy_only=False) == "both")
    pooled = both["value"].to_pylist()[both["over"].to_pylist().index("pooled")]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([clock["run"] - clock["begin"], clock["scored"] - clock["run"], peak, pooled]))


def main(requests: int, systems: list[str], gpus: int) -> None:
    """Print a row a system."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "week.parquet"
        write(trace, requests)
        print(f"{requests:,} requests of {MODELS} models in a week on {gpus} GPUs; of one core, the writer included")
        print(
            f"{'system':16} {'run CPU s':>10} {'score CPU s':>12} {'req/CPU-s':>10} {'peak MiB':>9} {'attained %':>11}"
        )
        for system in systems:
            words = [sys.executable, "-m", "tests.tools.week", "--child", system, str(trace), str(gpus), folder]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{system:16} {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            run_s, score_s, peak, attained = json.loads(done.stdout)
            print(
                f"{system:16} {run_s:10.0f} {score_s:12.0f} {requests / (run_s + score_s):10,.0f} {peak:9.0f} "
                f"{100 * attained:11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("requests", type=int, nargs="?", default=5_000_000)
        parser.add_argument("systems", nargs="*", default=["static", "elastic", "elastic:replicas", "swap", "prism"])
        parser.add_argument("--gpus", type=int, default=16)
        asked = parser.parse_args()
        main(asked.requests, asked.systems, asked.gpus)
