"""Translation of a policy's actions into kernel calls, and refusals of actions that cannot be carried out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from harness.engines.costs import quantities, shapes
from harness.engines.machine import Config, Machine, Refusal, unfit
from harness.engines.sim import kernel, state
from harness.engines.sim.host_memory import HostMemory
from harness.engines.sim.names import Names, attendable
from harness.engines.sim.requests import Requests
from harness.engines.sim.view import PHASES
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Done, Event, Freed
from harness.policy.types import GIB, Batch, Host, Inst

SOURCES: Mapping[quantities.Link, int] = {"pcie": state.PCIE, "spread": state.SPREAD, "disk": state.DISK}
NOT_THERE = "KV is attended on as many other GPUs as its batch has, and not on its own"


class Orders:
    """A translator of a policy's actions into kernel calls.

    It also queues those events that the kernel itself does not report.
    """

    def __init__(self, names: Names, config: Config, machine: Machine) -> None:
        self._names, self._config, self._ways, self.S = names, config, machine.ladder, names.S
        self._specs = [machine.of(kind).spec for kind in config.kinds]
        self.spare = 2 * config.batch_cap + 64, 2 * config.node_gpus + 16  # events, transfers that an action may need
        self.requests: Requests | None = None  # made when the run begins
        self.hears: frozenset[type] = frozenset()
        self.events: deque[Event] = deque()  # told after the kernel's events
        self.standing: dict[tuple[int, int], Run] = {}  # (row of a batch, its lane 0 or 1) maps to the lane's order
        self.actions: dict[int, Action] = {}  # the kernel's number maps to the action
        self.loaded: dict[int, list[int]] = {}  # by GPU: instances in order of their last Load, some gone since
        self.landing: set[Inst] = set()  # an eviction was refused while their weights were on their way
        self._short = False  # there was no room for a load before the start
        self.memories = self._host_memories()

    def _host_memories(self) -> list[HostMemory]:
        """Return each node's host memory, filled with the models that have the highest planned request rates.

        The list is empty if the spec sets no `host_bytes`: every host then stores the weights of all models.
        """
        c = self._config
        if c.host_bytes is None:
            return []
        sizes = {m.name: shapes.weight_bytes(m.shape) for m in c.models}
        order = sorted(sizes, key=lambda m: c.plan[m].rate_rps if m in c.plan else 0.0)
        return [HostMemory(c.host_bytes, sizes, order, self._coming_in) for _ in range(c.nodes[-1] + 1)]

    def _coming_in(self, i: int) -> bool:
        return self._names.weights.item(i) in (state.QUEUED, state.LOADING)

    def begin(self, requests: Requests, hears: frozenset[type]) -> None:
        """Start to accept actions on these requests; `hears` contains the types of events that the policy receives."""
        self.requests, self.hears = requests, hears
        if self._short:
            self.events.append(Freed())  # from now on a load may wait for memory

    def do(self, action: Action) -> Done | None:
        """Start an action.

        Return a `Done` marked "not now" if the action cannot start yet but may start later, else None. Any other
        refusal is queued as an event.
        """
        S, (events, transfers) = self.S, self.spare
        if len(S.events) - S.events_told[0] < events or S.transfer_spare[0] < transfers:
            self._make_room(events, transfers)
        S.quiet_s[0] = -math.inf
        arm = ARMS[type(action)]
        try:
            refusal = arm(self, action)
        except (KeyError, ValueError, IndexError) as error:
            refusal = "never", f"{type(error).__name__}: {error}"
        if refusal is None:
            return None
        if refusal[0] == "not now":
            return Done(action, *refusal)
        self.events.append(Done(action, *refusal))
        return None

    def _make_room(self, events: int, transfers: int) -> None:
        """Enlarge the kernel's logs until they have room for the events and transfers of one action.

        In all other cases, the kernel's `advance` checks for this room.
        """
        S = self.S
        if len(S.events) - S.events_told[0] < events:
            S.grow("events", len(S.events) + events)
        if S.transfer_spare[0] < transfers:
            S.more_free("transfer", len(S.transfers) + transfers)

    def _note(self, action: Action, parts: int = 1) -> int:
        """Register an action of `parts` parts with the kernel, and return its number.

        The kernel reports the action's end if the policy receives the ends of such actions, or if a part failed.
        """
        S = self.S
        if S.action_spare[0] == 0:
            S.more_free("action", len(S.actions) + 64)
        a: int = kernel.note(S.at, parts, int(type(action) in self.hears))
        self.actions[a] = action
        return a

    def _end(self, action: Action) -> None:
        """Report the end of an action that needed no kernel call, if the policy receives the ends of such actions."""
        if type(action) in self.hears:
            self.events.append(Done(action))

    # ------------------------------------------------------------ weights

    def load(self, action: Load) -> Refusal | None:
        """Queue a load, which then waits for memory.

        If the weights are about to leave, cancel their eviction instead. Before the run starts, place the weights at no
        cost instead, or refuse the action with "not now" if they do not fit.
        """
        names, S, way = self._names, self.S, action.way
        i = names.inst_row(action.inst)
        if way not in self._ways:
            return "never", f'no way "{way}" to load'
        now = names.weights.item(i)
        if now in (state.IN, state.QUEUED, state.LOADING):
            if self.requests is not None and now == state.IN:
                self._end(action)
            return None
        if now in (state.DRAINING, state.LEAVING):
            evicted = self._pop_evict(i)
            kernel.set_weights(S.at, i, state.IN)
            self.events.append(Done(evicted, "gone", "loaded again"))
            self._end(action)
            return None
        if kernel.never(S.at, i, 0):
            need = S.insts[i]["footprint"] / GIB
            return "never", f"{action.inst.model} needs {need:.1f} GiB, more than the GPU has"
        memory = self.memories[names.node(i)] if self.memories else None
        if self.requests is not None:
            self._queue_load(action, i, memory)
        elif not kernel.place(S.at, i):
            self._short = True
            return "not now", f"no room for {action.inst.model} on {list(names.places[i])}"
        elif memory:
            memory.read(action.inst.model)
        for g in names.places[i]:
            here = self.loaded.get(g, ())
            self.loaded[g] = [*(k for k in here if k != i and names.weights.item(k) != state.OUT), i]
        return None

    def _queue_load(self, action: Load, i: int, memory: HostMemory | None) -> None:
        """Queue the load of instance `i`.

        If its node's host memory is limited and lacks the weights, the load reads them from disk.
        """
        S, gpus, rung = self.S, self._names.places[i], self._ways[action.way]
        source, bytes_s = rung.source, self._specs[gpus[0]].h2d
        if memory and not memory.read(action.inst.model, i) and source != "disk":
            source, disk_s = "disk", S.links["bytes_per_s"].item(4 * (self._config.gpus + self._names.node(i)))
            bytes_s = min(bytes_s, disk_s / len(gpus))
        tail_s = rung.after_s(S.insts["weight_bytes"].item(i), bytes_s)
        kernel.load(S.at, i, self._note(action), SOURCES[source], tail_s)

    def evict(self, action: Evict) -> Refusal | None:
        """Evict weights at the next step boundary or, with `drain`, once the instance has no member left.

        If the load of the weights still waits for memory, the load is cancelled. If the load has its memory and is
        under way, the eviction is refused with "not now".
        """
        i, drain = self._names.inst_row(action.inst), action.drain
        now = self._names.weights.item(i)
        if now == state.OUT or isinstance(action.inst.place, Host):
            return "gone", "its weights are not in"
        if now == state.LOADING:
            self.landing.add(action.inst)
            load = self.S.transfers["action"].item(self._load_of(i))
            self.S.actions["heard"][load] = 1  # the end of the load is told
            return "not now", "its weights are still on their way"
        if now == state.QUEUED:
            self._withdraw(self._load_of(i), "gone", "evicted")
            self._end(action)
            return None
        if now == state.LEAVING or (now == state.DRAINING and drain):
            return "gone", "it is leaving already"
        if now == state.DRAINING:
            self.events.append(Done(self._pop_evict(i), "gone", "evicted at its next boundary instead"))
        kernel.evict(self.S.at, i, int(drain), self._note(action))
        return None

    def landed(self, event: Event) -> Event:
        """Return `Freed` if the event ends a load during which an eviction was refused, else the event itself.

        After `Freed`, the end of the load is the next event if the policy receives the ends of loads.
        """
        if not (isinstance(event, Done) and isinstance(event.action, Load) and event.action.inst in self.landing):
            return event
        self.landing.remove(event.action.inst)
        if Load in self.hears:
            self.S.events_read[0] -= 1  # the end itself is told next
        return Freed()

    def _pop_evict(self, i: int) -> Action:
        """Return the Evict action that an instance is executing, and free its number in the kernel.

        The caller reports the action's end.
        """
        a = self.S.insts["evict"].item(i)
        kernel.forget(self.S.at, a)
        return self.actions[a]

    def limit(self, action: Limit) -> Refusal | None:
        """Set the limit, in bytes, of a model's KV on a GPU."""
        names, model, gpu = self._names, action.model, action.gpu
        if model not in names.model or not 0 <= gpu < self._config.gpus:
            return "never", f"no {model} on GPU {gpu}"
        names.limits[model, gpu] = action.kv_bytes
        for i in names.accounts(model, gpu):
            kernel.limit(self.S.at, i, names.cap(model, names.places[i]))
        return None

    # ------------------------------------------------------------ transfers that wait for memory

    def give_up(self) -> bool:
        """Fail the first transfer that waits for memory, because nothing can free memory any more.

        Return False if no transfer waits for memory.
        """
        X, x = self.S.transfers, int(self.S.s["transfer_head"])
        while x >= 0 and X[x]["stage"] != state.GRANT:
            x = int(X[x]["next"])
        if x >= 0:
            self._withdraw(x, "never", "no memory, and nothing left that could free any")
        return x >= 0

    def _load_of(self, inst: int) -> int:
        """Return the row of the transfer that loads an instance."""
        X, x = self.S.transfers, int(self.S.s["transfer_head"])
        while X[x]["inst"] != inst or X[x]["kind"] != state.LOAD:
            x = int(X[x]["next"])
        return x

    def _withdraw(self, x: int, *refusal: *Refusal) -> None:
        """Cancel a transfer that waits for memory.

        If all other parts of its action have ended, report the action as refused.
        """
        S, a = self.S, self.S.transfers["action"].item(x)
        if self.memories and S.transfers["kind"].item(x) == state.LOAD:
            i = S.transfers["inst"].item(x)
            self.memories[self._names.node(i)].withdrawn(self._names.insts[i].model, i)
        if kernel.withdraw(S.at, x):
            kernel.forget(S.at, a)
            self.events.append(Done(self.actions[a], *refusal))

    # ------------------------------------------------------------ requests

    def gone(self, rid: int) -> Refusal | None:
        """Return a refusal if a request has not arrived or has already ended, else None."""
        if self.requests is None or not self.requests.came(rid):
            return "never", f"no request {rid}"
        return ("gone", "the request has ended") if self.requests.states.item(rid) >= state.DONE else None

    def drop(self, action: Drop) -> Refusal | None:
        """Drop a request."""
        if refusal := self.gone(action.rid):
            return refusal
        kernel.on_request(self.S.at, action.rid, state.P_DROP, 0)
        return None

    def admit(self, action: Admit) -> Refusal | None:
        """Admit one request, or all future requests of a model, to a batch."""
        names, who, batch = self._names, action.who, action.batch
        model = batch.inst.model
        if isinstance(who, str):
            if model != who:
                return "never", f"a batch of {model} cannot serve {who}"
            self.S.route[names.model[who]] = names.batch_row(batch)
            return None
        if refusal := self.gone(who):
            return refusal
        if self._model_of(who) != model:
            return "never", f"a batch of {model} cannot serve request {who}"
        kernel.on_request(self.S.at, who, state.P_ADMIT, names.batch_row(batch))
        return None

    def _model_of(self, rid: int) -> str:
        assert self.requests is not None
        jobs = self.requests.jobs
        return jobs.models[jobs.model.item(rid)]

    # ------------------------------------------------------------ lanes and KV

    def run(self, order: Run) -> Refusal | None:
        """Open or close a lane; the order stays in force until the lane's next order."""
        if isinstance(place := order.batch.inst.place, Host):
            return "never", "host memory runs nothing"
        most = min((self._specs[g].sms for g in place if 0 <= g < len(self._specs)), default=0)
        if refusal := unfit(order, most):
            return refusal
        b = self._names.batch_row(order.batch)
        named = (order.seqs, order.chunk_tokens, order.sms, order.slice_layers)
        seqs, chunk, sms, layers = [-1 if x is None else x for x in named]
        for_s = math.inf if order.for_s is None else float(order.for_s)
        steps = -1 if order.steps is None else order.steps
        op_s = -1.0 if order.op_s is None else float(order.op_s)
        close = int(steps == 0)
        kernel.run_lane(self.S.at, b, PHASES[order.phase], close, for_s, steps, seqs, chunk, sms, layers, op_s)
        if steps != 0:
            self.standing[b, int(order.phase == "decode")] = order
        return None

    def move(self, action: Move) -> Refusal | None:
        """Move or discard the KV of a request, or that of all members of a batch."""
        S, names, who, to = self.S, self._names, action.who, action.to
        if isinstance(who, Batch):
            b = names.batch_row(who)
            if action.attend and not attendable(names.places[S.batches["inst"].item(b)], to):
                return "never", NOT_THERE
            n = kernel.movables(S.at, b, int(to is None))
            if n == 0:
                return "gone", "no KV to move"
            model = self._config.models[names.model[who.inst.model]]
            parts = 2 * max(model.tp, *model.degrees, 1)
            self._make_room(self.spare[0] + n, (1 + parts) * n)  # a batch may be any size
            account = -1 if to is None else names.account(who.inst.model, to, action.attend)
            kernel.move_batch(S.at, b, account, int(action.attend), self._note(action, n))
            return None
        if refusal := self.gone(who):
            return refusal
        if S.requests["state"].item(who) == state.HELD:
            return "gone", "a request in no batch has no KV"
        b = S.requests["batch"].item(who)
        if action.attend and not attendable(names.places[S.batches["inst"].item(b)], to):
            return "never", NOT_THERE
        account = -1 if to is None else names.account(self._model_of(who), to, action.attend)
        kernel.move(S.at, who, account, int(action.attend), self._note(action))
        return None


# `Wake` is missing, as replay keeps timers; a table is used, for a pattern match takes a microsecond
ARMS: Mapping[type[Action], Callable[[Orders, Any], Refusal | None]] = {
    Load: Orders.load,
    Evict: Orders.evict,
    Limit: Orders.limit,
    Admit: Orders.admit,
    Drop: Orders.drop,
    Run: Orders.run,
    Move: Orders.move,
}
