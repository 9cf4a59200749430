"""A small Llama on the processor, in real time: the smallest engine whose kernels run, and the example for others.

Every model of a run is stood in for by the same four layers (`llama.TINY`), with random weights of its own: the seconds
are real, the models are not, so rows say `emulated`. Output lengths are those of the workload.

One process and one core, seen as one GPU of `pool_bytes`, else MEMORY. Lanes step in turns, each step a whole
forward pass: the prompts that are let in, whole, and a token of each other member. KV lies in blocks; a member that
finds none takes those of the latest one of its batch, which starts anew. A load copies weights within host memory, and
is refused for now where there is no room. Nothing else shares the core but what the machine does beside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from harness.engines import llama
from harness.engines.machine import Config, Machine, Refusal
from harness.engines.wallclock import Live, NoProfile, WallClock, WallView, machine_facts
from harness.policy.actions import Action, Admit, Drop, Limit, Load, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, Woke
from harness.policy.types import MIB, Batch, Cluster, Fidelity, Gpu, Host, Inst, Model, Option, Phase, UserError
from harness.policy.view import KvState, View, Weights

MEMORY = 512 * MIB  # for weights and KV, unless `pool_bytes` says otherwise


class TorchCpu(WallClock):
    """Steps the stand-ins of a run's models."""

    can = frozenset({"Load", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    tells = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, Done, Load})
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "preempt": ("recompute",), "process": ("gpu",)}
    fidelity: Fidelity = "emulated"
    wall_clock = exclusive = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lacks = "" if find_spec("torch") else "torch: pip install torch"
        self.measured_on = {**machine_facts("torch"), "every model a": llama.TINY.name}
        self.mem_bytes = config.pool_bytes or MEMORY
        self.block_bytes = config.block_tokens * llama.KV_TOKEN_BYTES
        sizes = llama.TINY.layers, 1, llama.WEIGHT_BYTES, llama.KV_TOKEN_BYTES, self.block_bytes
        models = {m.name: Model(*sizes, m.shape.max_tokens, m.ttft_slo_s, m.tpot_slo_s) for m in config.models}
        self.cluster = Cluster((Gpu("cpu", 0, self.mem_bytes, 1, ()),), models, dict(config.plan), NoProfile())
        self.master: dict[str, list[Any]] = {}  # weights in host memory
        self.pool: Any = None  # of keys and values
        self.free = list(range(self.mem_bytes // self.block_bytes))  # blocks of it
        self.blocks: dict[int, list[int]] = {}  # by request
        self.tokens: dict[int, list[int]] = {}
        self.loaded: dict[Inst, list[Any]] = {}  # in order of Load
        self.limits: dict[str, int | None] = {}
        self.lanes: deque[Batch] = deque()  # the next one to step first
        self.loads = 0

    def ready(self) -> None:
        """Draw weights, take memory, and step once, for torch sets itself up then; see Engine."""
        if self.lacks:
            raise UserError(f"torchcpu needs {self.lacks}")
        import torch

        torch.set_num_threads(1)
        self.master = {m.name: llama.weights(k) for k, m in enumerate(self.config.models)}
        zero = torch.zeros(1, dtype=torch.long)
        self.pool = llama.pool(len(self.free) * self.config.block_tokens)
        with torch.inference_mode():
            llama.forward(llama.weights(0), zero, zero, [(0, 1, zero)], self.pool)

    def close(self) -> None:
        """Let the tensors go; see Engine."""
        self.master, self.loaded, self.pool = {}, {}, None

    def view(self) -> View:
        """See Engine."""
        return Seen(self)

    def stats(self) -> dict[str, float]:
        """See Engine."""
        return {**super().stats(), "loads": float(self.loads)}

    def act(self, action: Action) -> Refusal | None:
        """See WallClock; whatever has a field that is not in `can` is refused."""
        match action:
            case Load(inst, "host"):
                return self._nowhere(inst) or self._load(action)
            case Limit(model, 0, kv_bytes) if model in self.cluster.models:
                self.limits[model] = kv_bytes
            case Admit(_, batch):
                return self._nowhere(batch.inst) or self.admit(action)
            case Drop(rid):
                if failed := self.gone(rid):
                    return failed
                self.tell([self.end(self.live[rid], "dropped")])
            case Run(batch) if action == Run(batch):
                if failed := self._nowhere(batch.inst):
                    return failed
                if batch not in self.lanes:
                    self.lanes.append(batch)
            case _:
                return "never", "torchcpu cannot do that"
        return None

    def _nowhere(self, inst: Inst) -> Refusal | None:
        known = inst.model in self.cluster.models and inst.place == (0,)
        return None if known else ("never", f"no {inst.model} on {inst.place}: there is one GPU, 0")

    def _load(self, action: Load) -> Refusal | None:
        inst = action.inst
        if inst not in self.loaded:
            if self.free_bytes() < llama.WEIGHT_BYTES:
                return "not now", f"no room for {inst.model}"
            self.loaded[inst] = [tensor.clone() for tensor in self.master[inst.model]]
            self.loads += self.begun
            self.clock()
        if self.begun:
            self.tell([Done(action)])
        return None

    def kv_bytes(self, one: Live) -> int:
        """See WallClock."""
        return len(self.blocks.get(one.rid, ())) * self.block_bytes

    def free_bytes(self) -> int:
        """Return the bytes that neither weights nor KV take."""
        kv_blocks = sum(map(len, self.blocks.values()))
        return self.mem_bytes - llama.WEIGHT_BYTES * len(self.loaded) - self.block_bytes * kv_blocks

    def room_bytes(self, model: str) -> int:
        """Return the bytes of KV that a model may still take."""
        free, limit = self.free_bytes(), self.limits.get(model)
        return max(0, free if limit is None else min(free, limit - self.used_bytes(model)))

    def rounded(self, tokens: int) -> int:
        """Bytes of whole blocks for so many tokens."""
        return -(-tokens // self.config.block_tokens) * self.block_bytes

    def hold(self, one: Live, tokens: int) -> bool:
        """Hold blocks for so many tokens of a request; False where there is no room."""
        more = self.rounded(tokens) - self.kv_bytes(one)
        if more > self.room_bytes(one.model):
            return False
        self.blocks.setdefault(one.rid, []).extend(self.free.pop() for _ in range(more // self.block_bytes))
        return True

    def release(self, one: Live) -> None:
        """See WallClock."""
        if blocks := self.blocks.pop(one.rid, []):
            self.free += blocks
            self.freed()
        one.kv_tokens = 0

    def waits_for(self, one: Live) -> str:
        """See WallClock."""
        assert one.batch is not None
        if one.batch.inst not in self.loaded:
            return "load"
        fits = one.kv_tokens or self.rounded(one.ctx_tokens + 1) <= self.room_bytes(one.model)
        return "queue" if fits or one.batch not in self.lanes else "kv"

    def step(self) -> bool:
        """See WallClock: the lanes take turns."""
        for _ in range(len(self.lanes)):
            batch = self.lanes[0]
            self.lanes.rotate(-1)
            if batch.inst in self.loaded:
                stepping = self._formed(batch)
                if stepping:
                    self._run(batch, stepping)
                if stepping or self._told:
                    return True
        return False

    def _formed(self, batch: Batch) -> list[Live]:
        """Return the members that step together: those with KV, each with room for one more token, then prompts."""
        members, events = list(self.batches.get(batch, ())), list[Event]()
        for one in members:
            while one.kv_tokens and not self.hold(one, one.ctx_tokens):
                victim = [other for other in members if other.kv_tokens][-1]
                if victim is members[0]:
                    events.append(self.end(one, "failed"))
                else:
                    self.release(victim)
                    events.append(self.preempted(victim))
        stepping, left = [one for one in members if one.kv_tokens], self.config.prefill_tokens
        for one in [one for one in members if one.rid in self.live and not one.kv_tokens and not events]:
            most = self.mem_bytes - llama.WEIGHT_BYTES if (limit := self.limits.get(one.model)) is None else limit
            if self.rounded(one.ctx_tokens + 1) > most:
                events.append(self.end(one, "failed"))
                continue
            full = len(stepping) == self.config.batch_cap or one.ctx_tokens > left < self.config.prefill_tokens
            if full or not self.hold(one, one.ctx_tokens + 1):
                break
            stepping.append(one)
            left -= one.ctx_tokens
        self.tell(events)
        return self._formed(batch) if events and not stepping else stepping  # who was taken away made room for others

    def _run(self, batch: Batch, stepping: list[Live]) -> None:
        """Step: a token for each member, which may be its last."""
        import torch

        self.charge(stepping)
        begun_s, bt = self.now_s, self.config.block_tokens
        tokens, at, pieces = list[int](), list[int](), list[tuple[int, int, Any]]()
        for one in stepping:
            ids = self.tokens.setdefault(one.rid, [k % llama.TINY.vocab for k in range(one.ctx_tokens)])
            blocks = torch.tensor(self.blocks[one.rid])[:, None] * bt + torch.arange(bt)
            pieces.append((len(tokens), len(tokens) + len(ids) - one.kv_tokens, blocks.flatten()[: len(ids)]))
            at += range(one.kv_tokens, len(ids))
            tokens += ids[one.kv_tokens :]
        with torch.inference_mode():
            found = llama.forward(self.loaded[batch.inst], torch.tensor(tokens), torch.tensor(at), pieces, self.pool)
        self.clock()
        if self.over:  # what ends after the run's end is none of its
            return
        for one, token in zip(stepping, found, strict=True):
            self.tokens[one.rid].append(token)
        self.stepped(batch, stepping, begun_s)


class Seen(WallView):
    """What policies see of it."""

    def __init__(self, engine: TorchCpu) -> None:
        super().__init__(engine)
        self._own = engine

    def weights(self, inst: Inst) -> Weights:
        """See View."""
        return "in" if isinstance(inst.place, Host) or inst in self._own.loaded else "out"

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """See View."""
        return tuple(Inst(m, home) for m in self._own.master) if isinstance(home, Host) else tuple(self._own.loaded)

    def free_bytes(self, home: int | Host) -> int:
        """See View; no KV goes to the host."""
        return 0 if isinstance(home, Host) else self._own.free_bytes()

    def kv(self, model: str, gpu: int) -> KvState:  # noqa: ARG002 - there is one
        """See View."""
        return KvState(self._own.used_bytes(model), self._own.limits.get(model), self._own.room_bytes(model))

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """See View."""
        return Run(batch) if phase == "mixed" and batch in self._own.lanes else None


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> TorchCpu:  # noqa: ARG001 - not priced
    """Configure the engine of this file; see harness/loop/engine.py."""
    return TorchCpu(config)
