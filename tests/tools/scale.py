"""The cost of a run by models, GPUs and requests: `python -m tests.tools.scale [REQUESTS [SYSTEM ...]] [--limit S]`.

Simulated requests per CPU-second on one core, the writer of rows included. Each size has models of three kinds, most of
them small. `start` is what two machines of that size, their policies and the placement take. Traffic has a Zipf tail
(popularity ~ rank^-0.9), 2 requests a second a GPU, 600 tokens in and 150 out. A case in a process of its own ends at
its limit of CPU seconds, its placement at ten minutes of them. It is then a row that gives the reason.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.loop.system import find
from harness.policy.types import Infeasible, Jobs, Option, Plan, Unsupported, UserError
from tests.tools import speed
from tests.tools.speed import SLO_S, run
from tests.workloads.asked import asked
from traces.arrivals import rng, zipf

SIZES = ((8, 4), (58, 32), (300, 64), (1000, 200))  # models, GPUs
SYSTEMS = (
    "static elastic elastic+replicas swap prism alpaserve alpaserve+search=fast muxserve muxserve:original".split()
)
KINDS = {"llama-3.2-1b": 5, "llama-3.2-3b": 3, "llama-3.1-8b": 2}  # shares in ten models
S, RPS, PROMPT, OUTPUT = 0.9, 2.0, 600, 150  # exponent; requests/s a GPU; tokens
LIMIT_S, PLACEMENT_S = 3600.0, 600.0  # CPU seconds of a case, and of its placement


def served(models: int) -> tuple[Served, ...]:
    """Return so many models of three kinds."""
    counts = {name: models * tenths // 10 for name, tenths in KINDS.items()}
    counts["llama-3.2-1b"] += models - sum(counts.values())
    text = ",".join(f"{name}*{count}" for name, count in counts.items())
    return speed.served(text)


def jobs(names: tuple[str, ...], requests: int, rate: float) -> Jobs:
    """Return Poisson arrivals over models by a Zipf tail, whose ranks are dealt at random."""
    draw = rng(31, "scale")
    shares = zipf(len(names), S)[draw.permutation(len(names))]
    arrival = np.cumsum(draw.exponential(1 / rate, requests))
    return asked(names, arrival, draw.choice(len(names), requests, p=shares), PROMPT, OUTPUT, *SLO_S)


class TooLong(UserError):
    """A step of a case took more CPU seconds than it may."""


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Raise TooLong where the block takes more seconds of this process."""

    def over(*_: object) -> None:
        raise TooLong(f"{what} takes more than {seconds:g} CPU seconds")

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def child(system: str, models: int, gpus: int, requests: int, limit_s: float) -> None:
    """Run a case; print its cost, or the reason why there is none."""
    label, *switched = system.split("+")
    name, _, preset = label.partition(":")
    fields: dict[str, Option] = dict(find(name).presets[preset]) if preset else {}
    fields |= {key: value or True for key, _, value in (each.partition("=") for each in switched)}
    members = served(models)
    names, rate = tuple(m.name for m in members), RPS * gpus
    shares = zipf(models, S)[rng(31, "scale").permutation(models)]
    plan = {m: Plan(rate * share, PROMPT, OUTPUT, "trace") for m, share in zip(names, shares.tolist(), strict=True)}
    config = Config(members, gpus=gpus, noise=quantities.noise("h100", "vllm-graph"), plan=plan)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with limited(PLACEMENT_S, "its placement"):
                run(name, config, jobs(names, 20, rate), Path(folder) / "warm", **fields)
                placement = time.process_time()
                run(name, config, jobs(names, 1, rate), Path(folder) / "one", **fields)
                placement = time.process_time() - placement
            with limited(limit_s, f"a run of {requests:,} requests"):
                work = jobs(names, requests, rate)
                sim_s, write_s, _, outcome = run(name, config, work, Path(folder) / "run", **fields)
        except (Infeasible, Unsupported, UserError) as why:
            print(f"- {why}")
            return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(sim_s + write_s, placement, outcome.policy_s, outcome.policy_calls / requests, peak)


def main(requests: int, systems: Sequence[str], limit_s: float) -> None:
    """Print the table."""
    print(f"{requests:,} requests of a Zipf tail: CPU seconds, one core, writer included")
    print(
        f"{'models':>6} {'GPUs':>5} {'system':21} {'CPU s':>7} {'req/CPU-s':>10} {'start s':>11} {'policy s':>9} "
        f"{'calls/req':>9} {'peak MiB':>9}"
    )
    for models, gpus in SIZES:
        for system in systems:
            words = [sys.executable, "-m", "tests.tools.scale", "--child", system, models, gpus, requests, limit_s]
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
            told = (done.stdout or f"- ended ({done.returncode}): {done.stderr.strip().splitlines()[-1:]}").split()
            if told[0] == "-":
                print(f"{models:6} {gpus:5} {system:21} {' '.join(told)[:150]}", flush=True)
                continue
            total, placement, policy_s, calls, peak = map(float, told)
            print(
                f"{models:6} {gpus:5} {system:21} {total:7.1f} {requests / total:10,.0f} {placement:11.2f} "
                f"{policy_s:9.1f} {calls:9.2f} {peak:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("requests", type=int, nargs="?", default=1_000_000)
        parser.add_argument("systems", nargs="*", default=SYSTEMS)
        parser.add_argument("--limit", type=float, default=LIMIT_S, help="CPU seconds of a case")
        given = parser.parse_args()
        main(given.requests, given.systems, given.limit)
