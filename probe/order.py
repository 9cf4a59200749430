"""The order of the measurements on a card (`probe/ORDER.md`); `make gpu` prints the next step.

    python -m probe.order                 # print the next step
    python -m probe.order --call 1        # run the steps of a call that are not done, each with its time limit

Every step is a separate command, and adds one synced line to results/order.jsonl, so a second call resumes. With
DEVICE=cpu the same commands run without a card. The times of duels are then those that the law of rounds predicts, and
the simulator stands in for servers. Steps that measure servers are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from probe import conduct
from probe.plan import ROWS

ROOT = Path(__file__).resolve().parents[1]
JOURNAL = "order.jsonl"
LEAST_S = 20.0  # a step is not started with less
GRACE_S = 10  # from SIGTERM to SIGKILL, for what a step has left to write
FIRST, LAST = ([row.name for row in ROWS[:8]], [row.name for row in ROWS[8:]])  # rows 0 to 7, 8 to 10
RAMP = "--trace traces/sample/ramps4.parquet --scaling time --plan trace --set warmup_s=0 --served 1024 --gpus 1"
JUDGED = "--slo absolute:ttft=1,tpot=0.05 --seeds 1 --no-plot -o {out}/campaign"
SEVEN = ("static", "prism", "muxserve:plusplus", "qlm", "aegaeon", "weaver", "pdmux")
FOUR, SHORT = "llama-3.2-1b*2,llama-3.2-3b,llama-3.1-8b", "--set window_s=16 --set warmup_s=5 --set drain_s=60"
SOON = "--slo absolute:ttft=0.5,tpot=0.05 --seeds 1 --no-plot -o {out}/devices"
EIGHT, SMALL = "llama-3.1-8b*4", "llama-3.2-1b*2 --drop-streams m2,m3"  # the trace has four streams


class Step(NamedTuple):
    """A step in the order of measurements of a card: a command with a time limit.

    The words {python}, {engine}, {devices}, {gpu} and {out} in the command are replaced by values of this machine.
    """

    name: str
    call: int
    limit_s: int
    command: str
    result: str  # a sentence on what it gives
    needed: bool = True  # False: dropped first where time runs out
    dry: bool = True  # whether it runs without a card, too


def ramp(systems: str, models: str, rate: int, engine: str = "{engine}", more: str = "") -> str:
    """Return the command with which systems serve the campaign's requests, at `rate` times their original rate."""
    compare = f"{{python}} -m harness compare --engine {engine} --gpu {{gpu}} --models {models} {RAMP}"
    return f"{compare} --systems {systems} --rate-scale {rate} {JUDGED}{more}"


def devices(systems: str, gpus: int, lengths: str, served: int, rate: int) -> str:
    """Return the command with which systems serve four Llamas on engine torch, at `rate` requests/s for each model."""
    compare = f"{{python}} -m harness compare --engine {{devices}} --gpu {{gpu}} --gpus {gpus} --models {FOUR}"
    trace = f"aegaeon-like+rate_rps=1+lengths={lengths}+max_tokens={served}"
    return f"{compare} --systems {systems} --trace {trace} --served {served} --rate-scale {rate} {SHORT} {SOON}"


STEPS = (
    Step("rows 0 to 7", 1, 200, f"{{python}} -m probe --minutes 3.2 --out {{out}} --only {' '.join(FIRST)}",
         "how lanes share SMs; `bench calibrate FOLDER` then fits [co_run]"),
    Step("vLLM starts", 1, 150, ramp("static:equal,elastic", SMALL, 6),
         "two 1B servers, started one after the other, answer; then two with kvcached"),
    Step("row 11", 1, 210, devices("static,prism,pdmux", 1, "sharegpt", 4096, 6),
         "systems of engine torch on the whole card, prompts up to 4,000 tokens: the law as a whole"),
    Step("static", 2, 170, ramp("static:equal", EIGHT, 2), "four 8B, each a quarter of what is left beside weights"),
    Step("elastic", 2, 110, ramp("elastic", EIGHT, 2), "the same ramp with KV memory on demand"),
    Step("calibrate 1B", 2, 180,
         "{python} -m harness calibrate {engine} --gpu {gpu} --models llama-3.2-1b --rounds 1 -o {out}/vllm",
         "alone, two and four side by side, sleeps and wakes: the servers' cost table", dry=False),
    Step("sleep and wake", 2, 100, ramp("swap:sleep", EIGHT, 2), "the ramp, in turn by sleep and wake", needed=False),
    Step("by turns", 2, 60, ramp("static:equal", SMALL, 6, more=" --set sharing=turns"),
         "without MPS, beside `vLLM starts`, where its daemon runs", needed=False),
    Step("rows 8 to 10", 3, 150, f"{{python}} -m probe --minutes 2.4 --out {{out}} --only {' '.join(LAST)}",
         "partitions with two lanes, priorities, processes with and without MPS"),
    Step("SGLang starts", 3, 150, ramp("static:equal", SMALL, 6, "{sglang}"), "two 1B servers of SGLang answer"),
    Step("seven systems", 3, 260, devices(",".join(SEVEN), 2, "uniform", 512, 4),
         "systems of engine torch on two halves of the card"),
)  # fmt: skip


def card() -> str:
    """Return the kind of the first card: the first word of its name that is not a brand; "" without a card.

    For "NVIDIA H200" it is h200.
    """
    if (tool := shutil.which("nvidia-smi")) is None:
        return ""
    ask = [tool, "--query-gpu=name", "--format=csv,noheader"]
    name = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
    words = name[0].lower().replace("-", " ").split() if name else []
    return next((word for word in words if word not in {"nvidia", "tesla", "geforce", "rtx"}), "")


def command(step: Step, out: Path, device: str) -> list[str]:
    """Return a step's command as a list of words, with the values of this machine filled in."""
    here = {"python": sys.executable, "out": str(out), "gpu": "h100"}
    here |= dict.fromkeys(("engine", "sglang", "devices"), "sim")
    if device != "cpu":
        here |= {"engine": "vllm", "sglang": "sglang+attention=triton+sampling=pytorch", "devices": "torch"}
        here |= {"gpu": card()}
    return [word.format(**here) for word in step.command.split()]


def done(out: Path) -> set[str]:
    """Return the names of the steps that ended without an error."""
    return {line["step"] for line in conduct.lines(out / JOURNAL) if line.get("state") == "done"}


def run(steps: Sequence[Step], out: Path, seconds: float, device: str) -> Iterator[dict[str, Any]]:
    """Run the steps that are not done, within `seconds` in total.

    Write one line about each step to the journal, and yield this line.
    """
    out.mkdir(parents=True, exist_ok=True)
    end_s, ended = time.monotonic() + seconds, done(out)
    (out / "order").mkdir(exist_ok=True)
    for step in steps:
        limit_s = min(float(step.limit_s), end_s - time.monotonic())
        if step.name in ended or limit_s < LEAST_S or (device == "cpu" and not step.dry):
            continue
        begun_s = time.monotonic()
        log = out / "order" / f"{step.name.replace(' ', '-')}.log"
        words = ["timeout", "-k", str(GRACE_S), f"{limit_s:.0f}", *command(step, out, device)]
        with log.open("ab") as file:
            env = {**os.environ, "DEVICE": device}
            code = subprocess.run(words, cwd=ROOT, env=env, stdout=file, stderr=file, check=False).returncode
        state = "done" if code == 0 else "late" if code in {124, 137} else "failed"
        line = {"step": step.name, "state": state, "code": code, "s": round(time.monotonic() - begun_s, 1)}
        line |= {"command": " ".join(words), "t": round(time.time(), 3)}
        with conduct.opened(out / JOURNAL) as journal:
            conduct.write(journal, json.dumps(line))
        yield line


def main(argv: Sequence[str]) -> int:
    """Print the next step or, with `--call`, run the steps of that call.

    Return 1 if a step failed or exceeded its time limit, else 0.
    """
    parser = argparse.ArgumentParser("probe.order", description=__doc__.split("\n")[0])
    parser.add_argument("--call", type=int, choices=sorted({step.call for step in STEPS}))
    parser.add_argument("--seconds", type=float, default=560.0, help="for all steps of the call (default 560)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of results (default results)")
    args = parser.parse_args(argv)
    if args.call is None:
        step = next((step for step in STEPS if step.name not in done(args.out)), None)
        way = step and f"next: {step.name} ({step.limit_s} s): {step.result}; python -m probe.order --call {step.call}"
        print(way or "all steps are done")
        return 0
    device, well = os.environ.get("DEVICE", "cuda"), True
    for line in run([s for s in STEPS if s.call == args.call], args.out.resolve(), args.seconds, device):
        well &= line["state"] == "done"
        print(f"{line['step']:14} {line['state']} in {line['s']:.0f} s", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
