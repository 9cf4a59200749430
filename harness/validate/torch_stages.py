"""The torch engine's own stages, with which `make gpu` ends: correctness, calibrate, systems, validate, chats.

    DEVICE=cuda python -m harness.validate.torch_stages --minutes 20    # on this machine's card; DEVICE=cpu: on cores

They need torch and NumPy alone, and SciPy for QLM's MILP: without it QLM's solver is `edf`, and its row says so. Their
requests, models and settings are lines of `torch_stages.jsonl`, which `torch_runs.py` writes. Each run is a process of
its own under a time limit, and leaves one synced line in `<out>/<device>/stages/stages.jsonl`. Beside it lie the plan
(plan.jsonl), the measurements for the cost table (raw.jsonl), and the machine that they are of (calibrate.json). A
second call resumes: runs that are done are not repeated, and runs that failed or were late only if `--again` names
them. On any machine, `bench calibrate FOLDER` then makes a table of the folder, and `bench validate FOLDER` compares
its runs with the simulator.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate import rows
from harness.calibrate.torch import ABOUT
from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.engines.stamps import NAMES, Noted
from harness.engines.torch import kind, nets
from harness.engines.torch.engine import Torch
from harness.engines.torch.setting import Fields
from harness.engines.wallclock import machine_facts
from harness.loop import system
from harness.loop.guard import Fault
from harness.loop.interrupted import terminable
from harness.loop.replay import replay
from harness.policy import fields
from harness.policy.types import GIB, Infeasible, Jobs, Option, Plan, Shape, Unsupported, UserError
from harness.validate import torch_scenarios as scenarios
from harness.validate import torch_timed

ROOT = Path(__file__).resolve().parents[2]
MODULE = "harness.validate.torch_stages"
PLAN = Path(__file__).with_suffix(".jsonl")
JOURNAL, REQUESTS = "stages.jsonl", "plan.jsonl"
SEVEN = ("static", "prism", "muxserve:plusplus", "qlm", "aegaeon", "weaver", "pdmux")
START_S = 120.0  # limits an engine's start, and equally its end
LEAST_S = 5.0  # no run starts with less time left
GONE_S = 20.0  # from SIGTERM to SIGKILL
POOL = {"cpu": GIB, "cuda": 40 * GIB}  # memory of a calibrated device; a card may have less

Line = dict[str, Any]


class Run(NamedTuple):
    """A run of a stage, and the seconds that it may take."""

    stage: str
    name: str
    limit_s: float = math.inf

    @property
    def text(self) -> str:
        """Stage and name, as they are printed and as `--again` takes them."""
        return self.stage if self.name == self.stage else f"{self.stage}: {self.name}"


class Workload(NamedTuple):
    """A line of the plan: what one stage serves on one kind of device."""

    stage: str
    name: str
    device: str
    end_s: float
    config: Mapping[str, Any]
    models: Sequence[Sequence[Any]]  # name, TTFT and TPOT limits, and the fields of its shape
    plan: Mapping[str, Sequence[Any]]  # the forecast of each model
    jobs: Mapping[str, Any]
    specs: Mapping[str, Any]  # keyed by system

    def configured(self, gpu: str) -> Config:
        """Return the configuration of an engine on GPUs of the kind `gpu`."""
        models = tuple(Served(name, Shape(*shape), 1, *slo) for name, slo, shape in self.models)
        plan = {model: Plan(*values) for model, values in self.plan.items()}
        return Config(models, gpu=gpu, plan=plan, **self.config)

    def requests(self) -> Jobs:
        """Return the requests. A null in the file, which stands for no SLO for example, becomes infinity."""
        whole = {"model", "prompt_tokens", "output_tokens"}
        none = {name: [math.inf if x is None else x for x in column] for name, column in self.jobs.items()}
        columns: dict[str, Any] = {
            name: np.array(x, np.int32 if name in whole else np.float64) for name, x in none.items()
        }
        return Jobs(tuple(name for name, *_ in self.models), **columns)


def workloads(path: Path, device: str) -> list[Workload]:
    """Read the plan's lines for a kind of device. UserError where there is none."""
    if not path.is_file():
        raise UserError(f"no plan {path}; python -m harness.validate.torch_runs writes the one of the checkout")
    every = [Workload(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    mine = [workload for workload in every if workload.device == device]
    if not mine:
        raise UserError(f"{path} has nothing for DEVICE={device}")
    return mine


def runs(plan: Iterable[Workload], device: str) -> Iterator[Run]:
    """Yield all runs, in their order."""
    for name in scenarios.SCENARIOS:
        for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
            yield Run("correctness", f"{name}, {dtype}", 2 * START_S)
    yield Run("calibrate", "calibrate")
    for workload in plan:
        for text in workload.specs:
            start_s = float(workload.config["start_s"])
            yield Run(workload.stage, f"{text}, {workload.name}", 2 * START_S + workload.end_s - start_s)


def card() -> str:
    """Return the GPU kind of this machine's card: h200 if its name is "NVIDIA H200". UserError if it is unknown."""
    if not kind.cards():
        raise UserError("DEVICE is cuda, and this machine has no NVIDIA card")
    words = kind.cards()[0].lower().replace("-", " ").split()
    for word in words:
        with suppress(UserError):
            return quantities.gpu(word, None).kind
    raise UserError(f"no cost table has a word of {kind.cards()[0]} as its name")


# ------------------------------------------------------------------ the journal


def states(lines: Iterable[Line]) -> dict[tuple[str, str], str]:
    """Return the state in the last line of each run, by stage and name."""
    return {(line["stage"], line["run"]): line["state"] for line in lines}


# ------------------------------------------------------------------ the parent


def conduct(
    folder: Path,
    plan: Path,
    device: str,
    minutes: float,
    again: Collection[str],
    say: Callable[[str], None],
    only: Collection[str] = (),
) -> dict[str, int]:
    """Do the runs that have no line in the journal yet or that `again` names, for at most `minutes`.

    If `only` names stages, the runs of all other stages are left out. Return the number of runs by their state now.
    Raises UserError for an unknown stage or run, or if the folder was begun with another plan.
    """
    every = list(runs(workloads(plan, device), device))
    if strange := sorted(set(only) - {run.stage for run in every}):
        raise UserError(f'--only "{strange[0]}" is no stage; --list lists them')
    every = [run for run in every if not only or run.stage in only]
    if unknown := [text for text in again if text not in {part for run in every for part in (run.stage, run.text)}]:
        raise UserError(f'--again "{unknown[0]}" is no stage or run; --list lists them')
    folder.mkdir(parents=True, exist_ok=True)
    kept, text = folder / REQUESTS, plan.read_text("utf-8")
    if kept.is_file() and kept.read_text("utf-8") != text:
        raise UserError(f"{folder} was begun with other requests than {plan}: take another --out, or --plan {kept}")
    kept.write_text(text, "utf-8")
    path, end = folder / JOURNAL, time.monotonic() + 60 * minutes
    redo = {run for run in every if {run.stage, run.text} & {*again}}
    for run in every:
        state = states(rows.lines(path)).get((run.stage, run.name))
        if state is not None and run not in redo:
            if state != "done":
                say(f"{run.text}: {state} on an earlier call (--again '{run.text}')")
            continue
        left = end - time.monotonic()
        if left < LEAST_S:
            break
        begun = time.monotonic()
        why = child(run, folder, plan, device, min(run.limit_s, left))
        if why is None:
            line = rows.lines(path)[-1]
            state = line["state"] + (f": {line['why']}" if line.get("why") else "")
        elif left < run.limit_s and why.startswith("late"):
            say(f"{run.text}: cut off by the end of this call; the next one does it")
            break
        else:
            state = why
            ended, _, reason = why.partition(": ")
            rows.append(path, {"stage": run.stage, "run": run.name, "state": ended, "why": reason})
        say(f"{run.text}: {state} ({time.monotonic() - begun:.0f} s)")
    now = states(rows.lines(path))
    counted = [now.get((run.stage, run.name), "left") for run in every]
    return {state: counted.count(state) for state in dict.fromkeys(counted)}


def child(run: Run, folder: Path, plan: Path, device: str, limit_s: float) -> str | None:
    """Do one run in a process of its own.

    Return None if it left its line in the journal, else the reason why it did not.
    """
    with tempfile.TemporaryFile() as log:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        dtype = {"DTYPE": run.name.rpartition(", ")[2]} if run.stage == "correctness" else {}
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--do", *run[:2], "--plan", str(plan), "--at", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "DEVICE": device, **dtype},
        )
        try:
            code = process.wait(limit_s if limit_s < math.inf else None)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"late: it did not end within {limit_s:.0f} s"
        except BaseException:
            stop(process)
            raise
        if not code:
            return None
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"failed: {end}{f': {lines[-1][:300]}' if lines else ''}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a run's process to end and close its engine; kill it if it does not within GONE_S."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ------------------------------------------------------------------ a run


def do(run: Run, folder: Path, plan: Path) -> Line:
    """Do a run, and return its line."""
    device = os.environ.get("DEVICE", "cpu")
    gpu = card() if device == "cuda" else Config(()).gpu
    lines = workloads(plan, device)
    if run.stage == "correctness":
        return correct(run.name.rpartition(", ")[0])
    if run.stage == "calibrate":
        return calibrate(folder, lines, gpu, device)
    text, _, name = run.name.partition(", ")
    (workload,) = (line for line in lines if (line.stage, line.name) == (run.stage, name))
    return serve(workload, text, gpu) | {"device": device}


def correct(name: str) -> Line:
    """Compare the logits of a scenario with those of NumPy."""
    with tempfile.TemporaryDirectory(prefix="bench-torch-") as scratch:
        net = scenarios.draw(Path(scratch))
        os.environ["MODELS_DIR"] = scratch
        engine = scenarios.served(net.shape.name, scenarios.SCENARIOS[name])
        weights = nets.checkpoint(Path(net.folder))
        narrow = engine.kind.float_bytes == 2
        assert engine.logits is not None
        distances = list(scenarios.off(engine.logits, lambda ids: scenarios.forward(net, weights, ids), narrow))
    wrong = [why for _, why in distances if why]
    facts = {"worst": max(far for far, _ in distances), "aim": scenarios.NEAR if narrow else scenarios.OFF}
    return {"state": "wrong" if wrong else "done", "why": "; ".join(wrong), **facts}


def calibrate(folder: Path, plan: Sequence[Workload], gpu: str, device: str) -> Line:
    """Measure steps, loads, moves and turns of each shape into raw.jsonl; a later call adds what is missing."""
    shapes = {(shape := Shape(*of)).name: shape for workload in plan for *_, of in workload.models}
    config = Config((), gpu=gpu, gpus=max(workload.config["gpus"] for workload in plan))
    on = kind.kind(config)
    given = {"pool_bytes": POOL[device], "gpu": gpu}
    if device == "cuda":  # a device is the same part of a card as in the other stages
        given = {"pool_bytes": min(POOL[device], on.mem_bytes), "gpu": gpu, "gpus": config.gpus}
    about = {
        "device": device,
        "on": on.on,
        "sms": on.sms,
        "gbps": dict(on.links),
        **given,
        "shapes": [list(shape) for shape in shapes.values()],
        "measured_on": machine_facts("torch"),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    made = torch_timed.measure(folder, shapes, print, Fields(), given)
    return {"state": "done", "lines": len(made)}


def serve(workload: Workload, text: str, gpu: str) -> Line:
    """Serve a workload by the system `text`, and return its line: counters, and the record of its requests."""
    asked, without = fields.asked(text), dict[str, Option]()
    if asked.name == "qlm" and importlib.util.find_spec("scipy") is None:
        without = {"solver": "edf"}
    make = system.find(asked.name)
    keywords = fields.values(asked._replace(fields={**asked.fields, **without}), fields.domains(make), make.presets)
    config, jobs = workload.configured(gpu), workload.requests()
    line: Line = {"fields": without, "requests": len(jobs), "gpu": gpu}
    try:
        engine = Torch(config, system.build(make, Torch(config, {}).cluster, keywords).options)
        policy = system.build(make, engine.cluster, keywords)
    except (Infeasible, Unsupported) as why:
        return {"state": "skipped", "why": str(why), **line}
    about: Line = {"fidelity": engine.fidelity, "measured_on": dict(engine.measured_on)}
    try:
        outcome = replay(policy, engine, jobs, end_s=workload.end_s)
        noted, stats, judged = engine.noted(), dict(engine.stats()), dict(engine.about())
    except Unsupported as why:
        return {"state": "skipped", "why": str(why), **line}
    finally:
        engine.close()
    side = {"policy_s": outcome.policy_s, "policy_calls": outcome.policy_calls, "slowest_s": outcome.slowest_s}
    counts = {name: int((noted.ends == code).sum()) for code, name in enumerate(NAMES)}
    about |= {"refused": outcome.refused, "first_refused": outcome.first_refused, "stats": stats, **judged}
    about |= {"side": side | dict(engine.side()), "noted": plain(noted)}
    return {"state": "done", "counts": counts, **line, **about}


def plain(noted: Noted) -> Line:
    """Return an engine's record of its requests as JSON values, without the times of tokens.

    Values that are not finite become null, seconds are rounded to a microsecond, and a column of equal values becomes
    that value.
    """
    columns = {name: _column(noted.R[name].tolist()) for name in noted.R.dtype.names or ()}
    return {
        "R": columns,
        "ends": noted.ends.tolist(),
        "places": [list(place) for place in noted.places],
        "late_s": _column(noted.late_s.tolist()),
        "end_s": noted.end_s,
    }


def _column(values: Sequence[float]) -> Any:
    finite = [round(x, 6) if math.isfinite(x) else None for x in values]
    return finite[0] if len({*finite}) == 1 else finite


# ------------------------------------------------------------------ the command


def main(argv: Sequence[str]) -> int:
    """Run the plan, do one run of it, or list its runs; return the exit code.

    The code is 0 on success, 1 if a run failed, was late or was wrong, 2 for an error, and 130 if interrupted.
    """
    parser = argparse.ArgumentParser("torch_stages", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="for all runs of this call (default 20)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of results (default results)")
    parser.add_argument("--plan", type=Path, default=PLAN, help="file of requests (default: the checkout's)")
    parser.add_argument("--again", nargs="+", default=(), metavar="RUN", help="stages or runs to repeat")
    parser.add_argument("--only", nargs="+", default=(), metavar="STAGE", help="do these stages alone")
    parser.add_argument("--list", action="store_true", help="the runs, and how each stands")
    parser.add_argument("--do", nargs=2, metavar=("STAGE", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = os.environ.get("DEVICE", "cpu")
    try:
        kind.kind(Config((), gpu=card() if device == "cuda" else Config(()).gpu))  # raises if there is no such device
        if args.do:
            with terminable():
                line = do(Run(*args.do), args.at, args.plan)
            rows.append(args.at / JOURNAL, {"stage": args.do[0], "run": args.do[1], **line})
            return 0
        folder = args.out / (card() if device == "cuda" else "cpu") / "stages"
        if args.list:
            now = states(rows.lines(folder / JOURNAL))
            for run in runs(workloads(args.plan, device), device):
                print(f"{now.get((run.stage, run.name), 'left'):8} {run.text}")
            return 0
        say = partial(print, flush=True)
        counts = conduct(folder, args.plan, device, args.minutes, args.again, say, args.only)
    except (UserError, Fault, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept; the same command resumes", file=sys.stderr)
        return 130
    print(f"{folder}: {', '.join(f'{count} {state}' for state, count in counts.items())}")
    return int(bool({"failed", "late", "wrong"} & counts.keys()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
