"""The answer of `bench size` as files that start its servers: `vllm serve` lines, or YAML of llama-swap or Helm.

A server is placed on the GPUs on which the strategy loads its model at the start. If the strategy moves weights, these
are the GPUs on which most of the model's requests ran. Each server has the settings of the simulated server, and a
share of its GPU's memory:

- All memory that engines may use, if no other server is on its GPUs, or if the servers there run one at a time.
- The same, if servers on its GPUs run at the same time under kvcached, which allocates KV memory on demand.
- The sum of its weights, process and KV memory, if servers on its GPUs run at the same time with fixed KV memory.

The files list the actions of the strategy that no server can do.

Keys are those of llama-swap 0bdb372 (config-schema.json, and config.example.yaml for `concurrencyLimit`, the number of
requests beyond which one is refused, 10 unless set). For Helm they are those of the chart of
vllm-project/production-stack a6c01db (helm/values.schema.json, helm/templates/deployment-vllm-multi.yaml). This chart
turns prefix caching off unless the values turn it on.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from harness.engines import commands
from harness.policy import fields
from harness.policy.actions import Limit, Load
from harness.policy.types import GIB, Gpus, UserError
from harness.rows import record
from harness.run.placement import begun
from harness.run.resolve import resolve
from harness.run.server_line import server_line
from harness.run.setup import SIMULATOR, Setup
from harness.study import shared
from harness.study.size import SizeSearch
from harness.study.sized import Question, Sized
from workloads.models import as_asked, parsed, repo

Way = Literal["vllm", "llama-swap", "helm"]
WAYS = get_args(Way)
PORT = 8001  # port the first server has
START_S = 900  # s within which a server must answer
POD_CPUS, POD_BYTES = 4, 8 * GIB  # CPUs per GPU; memory beside a copy of the weights, which a pod holds as it loads
# Orders and queries of a strategy that servers, or a router before them, fulfil by themselves.
PLAIN = re.compile(r"Load(\.way:.*)?|Evict|Limit|Run|Admit|Wake|Cluster\..*|Request\..*|view\..*")
KEY = re.compile(r"(?!yes|true|false|null|off)[a-z][a-zA-Z_]{2,}")


@dataclass(frozen=True, slots=True)
class Seat:
    """A server of the placement, on its GPUs."""

    serve: commands.Serve
    gpus: Gpus  # numbered over the whole cluster
    on: commands.Gpu  # numbered on its node
    node: int
    turns: bool = False  # the servers of its GPUs run one at a time
    beside: bool = False  # others are on its GPUs
    weight_bytes: int = 0  # on each of its GPUs, with its process
    options: tuple[str, ...] = ()  # options of vllm serve for the model's formats
    copy: int = 1  # number among the servers of its model

    @property
    def command(self) -> commands.Command:
        """The command line that starts the server."""
        command = commands.vllm_serve(self.serve, self.on)
        return command._replace(argv=(*command.argv, *self.options))

    @property
    def name(self) -> str:
        """The unique name of the server."""
        return self.serve.model if self.copy == 1 else f"{self.serve.model}:{self.copy}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The servers to start, the release of vLLM, and notes on the servers."""

    seats: tuple[Seat, ...]
    release: str  # a release of vLLM; empty if none is named
    notes: tuple[str, ...]


def deployable(setting: Question) -> None:
    """Raise UserError unless a question is about vLLM servers, the only servers that --deploy can start.

    An engine other than the simulator, or an SGLang host, raises the error.
    """
    engine, host = (str(setting.setting.get(key, default)) for key, default in (("engine", SIMULATOR), ("host", "")))
    if fields.asked(engine).name != SIMULATOR:
        raise UserError(f"--deploy: engine {engine} starts its servers itself: --set engine={SIMULATOR}")
    if host.startswith("sglang-"):
        raise UserError(f"--deploy: the settings of {host} are SGLang's, the files are vLLM's: --host vllm-0.15")


def write(sized: Sized, way: Way, out: Path, into: Path) -> list[Path]:
    """Write the files that start the servers of an answer into the folder `into`, and return their paths.

    If the servers are on several nodes, there is a file for each node, except with Helm. The runs of the answer are
    below `out`. Raises UserError if there is no answer, or if the tool `way` cannot start the servers.
    """
    texts = files(plan(sized, out), way)
    for name, text in texts.items():
        record.write_bytes(into / name, text.encode())
    return [into / name for name in texts]


def plan(sized: Sized, out: Path) -> Plan:
    """Return the servers of an answer, with notes on them.

    Raises UserError if there is no answer, if a model uses data or expert parallelism, or if it spans nodes.
    """
    if sized.best is None:
        raise UserError("--deploy: no strategy holds the target, so there is nothing to deploy")
    kind, label, gpus = sized.best
    work = SizeSearch(sized.asked, out)
    view = work.views[0]
    spec = resolve(work.under(kind, view).spec(work.spec(kind, label, gpus, view, view.seeds[0])))
    setup = Setup(spec)
    policy = setup.policy
    moves = "Evict" in policy.uses
    start = begun(spec)
    at: dict[str, list[Gpus]] = {}
    if moves:
        at = {m: [place] for m, place in shared.places(sized.curves[kind, label].tried[gpus].runs).items()}
    else:
        for action in start:
            if isinstance(action, Load) and isinstance(action.inst.place, tuple):
                at.setdefault(action.inst.model, []).append(action.inst.place)
        at = {m: list(dict.fromkeys(each)) for m, each in at.items()}
    limits = {(action.model, action.gpu): action.kv_bytes for action in start if isinstance(action, Limit)}
    seats = tuple(_seats(setup, at, limits))
    series, _, release = setup.spec.host.rpartition("-")
    notes = [f"{gpus} {kind} with {label}, as bench size found them; port {PORT} is the first of {len(seats)}"]
    notes.append(server_line(setup))
    if beyond := sorted(name for name in policy.uses if not PLAIN.fullmatch(name)):
        notes.append(f"{label} also orders {', '.join(beyond)}, which these servers do not: they may meet fewer SLOs")
    if moves and not any(seat.turns for seat in seats):
        notes.append(f"{label} moves models or takes them out; here each stays where most of its requests ran")
    if shared.at_once(setup) and any(seat.beside and not seat.turns for seat in seats):
        notes.append("servers of one GPU compute at the same time under MPS: nvidia-cuda-mps-control -d, before them")
    if any(seat.on.elastic for seat in seats):
        notes.append("servers of one GPU share its KV memory by kvcached, which their environment must have")
    if "Limit" in policy.uses and any(seat.on.elastic for seat in seats):
        notes.append(f"{label} limits the KV memory of each as it runs; these files set no limit")
    copies = {seat.serve.model: seat.copy for seat in seats if seat.copy > 1}
    notes += [f"{m} has {n} servers: send each request to one of them" for m, n in copies.items()]
    notes += [f"{m} had no request: it has no server" for m in setup.models.names if m not in at]
    return Plan(seats, release if series == "vllm" else "", tuple(notes))


def _seats(
    setup: Setup, at: Mapping[str, Sequence[Gpus]], limits: Mapping[tuple[str, int], int | None]
) -> Iterator[Seat]:
    """Yield the servers by GPU, then by model."""
    config, cluster, policy = setup.config, setup.engine.cluster, setup.policy
    moves, elastic = "Evict" in policy.uses, policy.options.get("kv") == "elastic"
    models, shapes = cluster.models, dict(zip(setup.models.names, as_asked(setup.spec.models), strict=True))
    tenants = {g: [(m, len(place)) for m in at for place in at[m] if g in place] for g in range(len(cluster.gpus))}
    taken = {g: sum(models[m].at(tp).weight_bytes for m, tp in here) for g, here in tenants.items()}
    unplaced = {g: cluster.gpus[g].mem_bytes - taken[g] for g in tenants}
    group = _groups([place for each in at.values() for place in each])
    first = {node: config.nodes.index(node) for node in config.nodes}
    everyone = sorted((place, m, k) for m, each in at.items() for k, place in enumerate(each, start=1))
    for port, (place, m, copy) in enumerate(everyone, start=PORT):
        weight_bytes = models[m].at(len(place)).weight_bytes
        shares = any(len(tenants[g]) > 1 for g in place)
        turns = moves and len({x for g in group[place] for x in tenants[g]}) > 1
        turns = turns and (not elastic or any(unplaced[g] < 0 for g in group[place]))
        node = config.nodes[place[0]]
        if any(config.nodes[g] != node for g in place):
            raise UserError(f"--deploy: {m} is on GPUs {list(place)} of several nodes, which no line here starts")
        member = next(member for member in setup.served.members if member.name == m)
        if member.shape.dp > 1 or member.shape.ep > 1:
            raise UserError(f"--deploy: {m} is cut by dp or ep, and the lines state tensor parallelism alone")
        card = setup.machine.of(config.kinds[place[0]]).spec.mem_bytes
        whole = config.mem_fraction if config.pool_bytes is None else config.pool_bytes / card
        shared = elastic and shares and not turns
        if shares and not turns and not elastic:  # each has the KV of its limit, else an equal share of the rest
            kv = min(unplaced[g] // len(tenants[g]) if (x := limits.get((m, g))) is None else x for g in place)
            whole = (weight_bytes + kv) / card
        near = tuple(g - first[node] for g in place)
        account = f"bench-{port}" if shared else None
        fraction = math.floor(1000 * whole) / 1000
        on = commands.Gpu(near[0], fraction, elastic=account, v1_runner=shared, others=near[1:])
        chunk = config.chunk_tokens or config.prefill_tokens
        serve = commands.Serve(m, weights(shapes[m]), port, models[m].max_tokens, config.batch_cap, chunk, drawn=False)
        yield Seat(serve, place, on, node, turns, shares, weight_bytes, _formats(shapes[m]), copy)


def weights(shape: str) -> Path:
    """Return the weights that a server loads: an id on huggingface.co, or a path.

    A path is that of a GGUF file, or of the folder with a config.json.
    """
    path = Path(repo(shape))
    if not path.exists():
        return path
    return (path.parent if path.suffix == ".json" else path).absolute()


def _formats(shape: str) -> tuple[str, ...]:
    """Return vLLM's options for the formats of a model's weights and KV cache.

    FP8 weights are made from BF16 weights. Other formats of weights have files of their own, and need no option.
    """
    entry = parsed(shape)
    weights = ("--quantization", "fp8") if entry.dtype == "fp8" else ()
    kv = ("--kv-cache-dtype", entry.kv_dtype) if entry.kv_dtype not in {None, "bf16"} else ()
    return (*weights, *(text for text in kv if text))


def _groups(places: Sequence[Gpus]) -> dict[Gpus, frozenset[int]]:
    """Return, for each place, the GPUs of all places that overlap with it, directly or through other places."""
    joined: list[frozenset[int]] = []
    for place in places:
        touching = [gpus for gpus in joined if gpus & set(place)]
        joined = [gpus for gpus in joined if gpus not in touching] + [frozenset(place).union(*touching)]
    return {place: next(gpus for gpus in joined if place[0] in gpus) for place in places}


# ------------------------------------------------------------------ files


def files(made: Plan, way: Way) -> dict[str, str]:
    """Return the text of each file of a plan, keyed by file name.

    Raises UserError if models take turns on GPUs and the tool `way` cannot swap them.
    """
    taking = next((seat for seat in made.seats if seat.turns), None)
    if taking is not None and way != "llama-swap":
        where = " and ".join(map(str, taking.gpus))
        raise UserError(f"--deploy {way}: models take turns on GPU {where}, which llama-swap does: --deploy llama-swap")
    if way == "helm":
        return {"values.yaml": _yaml(made, _values(made))}
    nodes = sorted({seat.node for seat in made.seats})
    text, stem, suffix = (_lines, "vllm", "sh") if way == "vllm" else (_swap, "llama-swap", "yaml")
    names = {node: f"{stem}-node{node}.{suffix}" if len(nodes) > 1 else f"{stem}.{suffix}" for node in nodes}
    return {name: text(made, [seat for seat in made.seats if seat.node == node]) for node, name in names.items()}


def _lines(made: Plan, seats: Sequence[Seat]) -> str:
    """Return a shell script that starts the servers one by one, as each measures the free memory of its GPU."""
    up = f'up() {{ until curl -sf "http://{commands.HOST}:$1/health"; do kill -0 $! || exit 1; sleep 1; done; }}'
    lines = ["#!/bin/sh", *(f"# {note}" for note in made.notes), up]
    for seat in seats:
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in seat.command.env.items())
        lines += [f"{env} {shlex.join(seat.command.argv)} &", f"up {seat.serve.port}"]
    return "\n".join([*lines, "wait"]) + "\n"


def _swap(made: Plan, seats: Sequence[Seat]) -> str:
    """Return a config of llama-swap: GPUs that models share are a group, which swaps models that take turns."""
    group = _groups([seat.gpus for seat in seats])
    models, groups = dict[str, Any](), dict[str, Any]()
    for seat in seats:
        command = seat.command
        models[seat.name] = {
            "cmd": shlex.join(command.argv),
            "env": [f"{key}={value}" for key, value in command.env.items()],
            "proxy": f"http://{commands.HOST}:{seat.serve.port}",
            "ttl": 0,
            "concurrencyLimit": seat.serve.batch_cap,
            **({"useModelName": seat.serve.model} if seat.copy > 1 else {}),
        }
        name = f"gpu {'+'.join(map(str, sorted(group[seat.gpus])))}"
        at = groups.setdefault(name, {"swap": seat.turns, "exclusive": False, "members": []})
        at["members"].append(seat.name)
    stay = [seat.name for seat in seats if not seat.turns]
    hooks = {"hooks": {"on_startup": {"preload": stay}}} if stay else {}
    return _yaml(made, {"healthCheckTimeout": START_S, "models": models, "groups": groups, **hooks})


def _values(made: Plan) -> dict[str, Any]:
    """Return the values of the Helm chart.

    Pods ask for whole GPUs. If some models share a GPU, pods instead name the GPUs that they use. Raises UserError if
    models share GPUs on several nodes.
    """
    pinned = any(seat.beside for seat in made.seats)
    if pinned and len({seat.node for seat in made.seats}) > 1:
        raise UserError(
            "--deploy helm: models share GPUs of several nodes, and a pod names its GPU on one: --deploy vllm"
        )
    specs = []
    for k, seat in enumerate(made.seats):
        if seat.copy > 1 and not pinned:
            continue
        serve, on, n = seat.serve, seat.on, len(seat.gpus)
        env = {key: value for key, value in seat.command.env.items() if key != "CUDA_VISIBLE_DEVICES"}
        if pinned:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(map(str, (on.index, *on.others)))
        copies = 1 if pinned else sum(other.serve.model == serve.model for other in made.seats)
        extra = ["--served-model-name", serve.model, "--max-num-batched-tokens", str(serve.chunk_tokens), *seat.options]
        specs.append(
            {
                "name": f"m{k}-{re.sub('[^a-z0-9]+', '-', serve.model.lower()).strip('-')[:40]}".strip("-"),
                "repository": "vllm/vllm-openai",
                "tag": f"v{made.release}.0" if made.release else "latest",
                "modelURL": str(serve.weights),
                "replicaCount": copies,
                "requestCPU": POD_CPUS * n,
                "requestMemory": f"{math.ceil((seat.weight_bytes * n + POD_BYTES) / GIB)}Gi",
                "requestGPU": 0 if pinned else n,
                "vllmConfig": {
                    "enablePrefixCaching": True,
                    "maxModelLen": serve.max_tokens,
                    "maxNumSeqs": serve.batch_cap,
                    "gpuMemoryUtilization": on.fraction,
                    "tensorParallelSize": n,
                    "extraArgs": extra,
                },
                "env": [{"name": key, "value": value} for key, value in env.items()],
            }
        )
    return {"servingEngineSpec": {**({"runtimeClassName": "nvidia"} if pinned else {}), "modelSpec": specs}}


def _yaml(made: Plan, content: Mapping[str, Any]) -> str:
    """Return content as YAML, after the notes of a plan; scalars are written as JSON, which is valid YAML."""
    return "\n".join([*(f"# {note}" for note in made.notes), *_block(content, "")]) + "\n"


def _block(value: Any, pad: str) -> Iterator[str]:
    entries = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in entries:
        head = "-" if key is None else f"{key if KEY.fullmatch(key) else json.dumps(key)}:"
        if not isinstance(item, dict | list) or not item:
            yield f"{pad}{head} {json.dumps(item)}"
        elif key is None:  # its first line stands behind the dash
            first, *rest = _block(item, f"{pad}  ")
            yield from (f"{pad}- {first.strip()}", *rest)
        else:
            yield f"{pad}{head}"
            yield from _block(item, f"{pad}  ")
