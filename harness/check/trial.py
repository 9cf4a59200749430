"""A trial: a system serves a case in the simulator, and both the system and the engine are watched.

A `Probe` wraps the system: it records decisions, lends views, and notes what the system does with them. A `Stand` wraps
the engine: it refuses actions if the case asks for that, and reads memory use after every event.
"""

from __future__ import annotations

import math
import signal
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import MISSING, fields, replace
from functools import cache
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from harness.check.cases import IDLE, Case
from harness.check.findings import Breach
from harness.engines import machine
from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.loop import engine as engines
from harness.loop import system
from harness.loop.answers import fault
from harness.loop.engine import Engine
from harness.loop.guard import Fault
from harness.loop.recorder import Decision, Read, positions
from harness.loop.recorder import Note as StandingNote
from harness.loop.replay import Livelock, replay
from harness.loop.standing import same_subject
from harness.loop.system import System
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake, brief
from harness.policy.events import Arrived, Done, Event, Finished, Freed, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import Cluster, Host, Infeasible, Jobs, Option, Shape, Unsupported
from harness.policy.view import View

ACTIONS = (Load, Evict, Limit, Admit, Drop, Run, Move, Wake)
EVENTS = (Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done)
READS = r"Request\.slo|Cluster\.degrees|Cluster\.homes|Cluster\.plan:window|view\.\w+"
USES = rf"({READS}|Wake|({'|'.join(a.__name__ for a in ACTIONS[:-1])})(\.\w+(:\w+)?)?)"
QUERIES = {name for name in vars(View) if not name.startswith("_")}
REFUSABLE = (Load, Admit, Limit, Run)  # what can fail on a real engine at any time
LACK_S = 0.05  # s for which something is lacking then

PATIENCE_S = 120.0  # of virtual time after the last arrival: several times what the slowest case takes to drain
SWAPS = 64  # loads, by its slowest way, for which it gets more time: an ordered queue may swap for each request
MOST_PER_S, MOST_PER_REQUEST, MOST = 500, 100, 1000  # decisions; polling every 10 ms makes 100 a second
MOST_ACTIONS, LONGEST_S = 10_000, 20.0  # actions of an answer; processor seconds of it, a first compilation included


class Subject(NamedTuple):
    """A system in a case, with the values of a preset or the defaults; `fields` replaces some of these values."""

    make: Any
    preset: str | None
    name: str  # names the case
    case: Case
    fields: tuple[tuple[str, Option], ...] = ()

    def __str__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.fields)
        return f"case {self.name}" + (f", preset {self.preset}" if self.preset else "") + settings

    def policy(self, cluster: Cluster) -> System:
        """Build a fresh policy. Raises Infeasible if the system raises it, and Fault if the system fails."""
        return system.build(
            self.make, cluster, {**(self.make.presets[self.preset] if self.preset else {}), **dict(self.fields)}
        )

    def assemble(self) -> tuple[System, Engine]:
        """Build a fresh policy and an engine for it, with the page size that the policy's options set."""
        config = self.case.config
        priced = _priced(tuple((m.shape, m.tp) for m in config.models), config.gpu, config.host)
        policy = self.policy(machine.cluster(config, priced=priced))
        engine = engines.find("sim")(config, policy.options, priced)
        return self.policy(engine.cluster), engine


def subject(make: Any, preset: str | None, name: str, case: Case) -> Subject:
    """Return a system in a case. A system that states how many GPUs it needs (`gpus_needed`) gets that many."""
    config = case.config
    if hasattr(make, "gpus_needed"):
        config = replace(config, gpus=make.gpus_needed(machine.cluster(config).models, config.node_gpus))
    return Subject(make, preset, name, case._replace(config=config))


@cache
def _priced(shapes: tuple[tuple[Shape, int], ...], gpu: str, host: str) -> machine.Machine:
    return machine.machine(Config(tuple(Served("", *each) for each in shapes), gpu=gpu, host=host))


class Held(NamedTuple):
    """The GPUs that are empty and the models that are loaded, from `from_s` until the next `Held` of a trial."""

    from_s: float
    empty: frozenset[int]  # GPUs without KV, and without weights in or under way
    models: frozenset[str]  # whose weights are in or under way somewhere


class Trial(NamedTuple):
    """A subject's run: decisions, notes, rows and memory."""

    subject: Subject
    jobs: Jobs
    uses: frozenset[str]
    decisions: Sequence[Decision]
    notes: Sequence[tuple[str, Breach]]  # laws broken while it ran
    error: BaseException | None = None  # what ended the run
    impossible: str | None = None  # why there was no run
    rows: Sequence[Mapping[str, Any]] = ()  # as requests.parquet has them
    refused: Sequence[Action] = ()  # actions that the stand-in refused
    repeats: Sequence[tuple[int, Action]] = ()  # orders repeated to a timer (Probe.repeats)
    seen: int = 0  # requests that had come by the end
    kv_bytes: int = 0  # held at the end, on GPUs
    held: Sequence[Held] = ()  # occupancy in order of time; the last one is at the end
    hears: frozenset[type] = frozenset()


Note = Callable[[str, str], None]  # law, what breaks it
Reach = Callable[[], AbstractContextManager[None]]


class TooLong(Livelock):
    """A policy exceeded its processor time."""


class Stale(Exception):
    """A view was used after its decision."""


class Lent:
    """A view that is lent for one decision; every access to it goes through a function."""

    def __init__(self, ask: Callable[..., Any], look: Callable[..., None]) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_look", look)

    def __setattr__(self, name: str, value: object) -> None:
        object.__getattribute__(self, "_look")(name, sets=True)

    def __delattr__(self, name: str) -> None:
        object.__getattribute__(self, "_look")(name, sets=True)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Lent
        object.__getattribute__(self, "_look")(name)
        ask = object.__getattribute__(self, "_ask")
        if name == "now_s":
            return ask(name)
        return lambda *args, **named: ask(name, *positions(name, args, named))


class Probe:
    """A system that wraps another one: it records the other's decisions, lends it views, and notes broken laws."""

    def __init__(self, policy: System, cluster: Cluster, requests: int, reach: Reach = nullcontext) -> None:
        self._reach = reach
        self.hears, self.uses, self.options = policy.hears, policy.uses, policy.options
        self.decisions: list[Decision] = []
        self.notes: list[tuple[str, Breach]] = []
        self._policy, self._cluster, self._ended = policy, cluster, set[int]()
        self.repeats: list[tuple[int, Action]] = []  # decision's index, and an order that stood already
        self._most = MOST + MOST_PER_REQUEST * requests

    def note(self, law: str, what: str) -> None:
        """Note that a law was broken in the decision under way."""
        self.notes.append((law, Breach(what, len(self.decisions))))

    def watch(self, view: View) -> View:
        """Return the view unchanged, because `on` itself lends a watched view (see Log)."""
        return view

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """Do nothing, because `on` itself records decisions (see Log)."""

    def stood(self, note: StandingNote) -> None:
        """Note an action with which the system answers a timer although the loop would issue it again (see Log)."""
        last = self.decisions[-1]
        timer = isinstance(last.event, Woke) and last.event.key != "start"
        if note.fate == "withdrawn" and timer and note.action in last.actions:
            self.repeats.append((len(self.decisions) - 1, note.action))

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Record a decision: give the system a watched view, and return its answer.

        Raises Livelock if there are too many decisions, or too many actions in an answer.
        """
        now_s, reads, at = view.now_s, list[Read](), len(self.decisions)
        if at >= self._most + MOST_PER_S * max(0.0, now_s):
            raise Livelock(f"{at} decisions by {now_s:g} s")

        def look(query: str, *, sets: bool = False) -> None:
            if sets:
                self.note("blind", f"set {query} of the view, which is only read")
                raise AttributeError(query)
            if len(self.decisions) != at:
                self.note("fresh-view", f"{query} was asked of the view of decision {at}")
                raise Stale(query)
            if query not in QUERIES:
                self.note("blind", f"reached for {query} of the view")
                raise AttributeError(query)
            if query == "oracle_tokens" and "view.oracle_tokens" not in self.uses:
                self.note("declared", 'asked oracle_tokens, but "view.oracle_tokens" is not in uses')
                raise PermissionError(query)

        def ask(query: str, *args: Any) -> Any:
            look(query)
            answer = view.now_s if query == "now_s" else getattr(view, query)(*args)
            reads.append(Read(query, args, answer))
            return answer

        self._heard(event)
        lent: Any = Lent(ask, look)
        with _limited(LONGEST_S), self._reach():
            actions = tuple(islice(self._policy.on(event, lent), MOST_ACTIONS))
        for action in actions:
            self._answered(action)
        if len(actions) == MOST_ACTIONS:
            raise Livelock(f"an answer of {MOST_ACTIONS} actions or more to {event}")
        self.decisions.append(Decision(now_s, event, tuple(reads), actions))
        return actions

    def _heard(self, event: Event) -> None:
        done = isinstance(event, Done) and (event.failed or type(event.action) in self.hears)
        if type(event) not in self.hears and not done:
            self.note("declared", f"got {event}, and {type(event).__name__} is not in hears")
        if isinstance(event, Finished):
            if event.rid in self._ended:
                self.note("served", f"request {event.rid} finished twice")
            self._ended.add(event.rid)

    def _answered(self, action: Action) -> None:
        if not isinstance(action, ACTIONS):
            self.note("declared", f"answered {action!r}, which is no action")
            raise TypeError(f"{action!r} is no action")
        if wrong := fault((action,)):
            raise Fault(wrong)
        for need in needs(action):
            if not {need, need.partition(":")[0]} & self.uses:
                self.note("declared", f'answered {brief(action)}, but "{need}" is not in uses')
        named = getattr(action, "who", getattr(action, "rid", None))
        if isinstance(named, int) and named in self._ended:
            self.note("served", f"answered {brief(action)} after request {named} had ended")
        if isinstance(action, Limit) and action.gpu < len(gpus := self._cluster.gpus):
            have = gpus[action.gpu].mem_bytes
            if (action.kv_bytes or 0) > have:
                self.note("memory", f"answered {brief(action)}, and the GPU has {have} bytes")


def held_bytes(engine: Engine) -> list[tuple[int, int]]:
    """Return (weights, KV) for each GPU: the bytes in use, as a policy sees them.

    Weights count once their load has begun.
    """
    view, models = engine.view(), engine.cluster.models
    by_gpu = []
    for g in range(len(engine.cluster.gpus)):
        insts = [inst for inst in view.insts(g) if view.weights(inst) not in {"out", "waiting"}]
        weights = sum(models[m].at(len(at)).weight_bytes for m, at in insts if not isinstance(at, Host))
        by_gpu.append((weights, sum(view.kv(m, g).used_bytes for m in models)))
    return by_gpu


def held(engine: Engine, by_gpu: Sequence[tuple[int, int]]) -> Held:
    """Return which GPUs now have neither weights nor KV, and which models are loaded.

    `by_gpu` is the result of `held_bytes`.
    """
    view = engine.view()
    insts = [view.insts(g) for g in range(len(by_gpu))]
    empty = frozenset(g for g, (here, (_, kv)) in enumerate(zip(insts, by_gpu, strict=True)) if not here and not kv)
    return Held(view.now_s, empty, frozenset(inst.model for here in insts for inst in here))


class Stand:
    """An engine that wraps another one, and refuses some actions as if a resource were lacking.

    The lack ends after LACK_S seconds. If `watched`, the memory of the inner engine is read after every event.
    """

    def __init__(
        self,
        engine: Engine,
        refuse: int,
        note: Note,
        config: Config = IDLE,
        limitless: bool = False,
        watched: bool = True,
    ) -> None:
        self.refused: list[Action] = []
        self.held: list[Held] = []
        self._engine, self._refuse, self._note = engine, refuse, note
        self._start_s, self._seed, self._limitless, self._watched = config.start_s, config.seed, limitless, watched
        self._count, self._free_s = 0, math.inf  # when what is lacking comes free
        self._start_loads: list[Action] | None = []  # None: past the start
        self._stands: list[Action] = []  # orders refused for now, oldest first, except Run
        self._due: list[Action] = []  # these are to be issued again before anything else

    def __getattr__(self, name: str) -> Any:
        """Return the inner engine's attribute of this name; only names that this class does not define come here."""
        return getattr(self._engine, name)

    def poll(self, until_s: float) -> Event | None:
        """Return the next event of the inner engine, or Freed when a lack ends (see Engine)."""
        if self._due:
            self._note("stands", f"{brief(self._due[0])} was not issued again when something came free")
        event = self._engine.poll(min(until_s, self._free_s))
        if event is None and self._engine.view().now_s >= self._free_s:
            self._free_s, event = math.inf, Freed()
        self._due = list(self._stands) if type(event) is Freed else []
        if self._start_loads and isinstance(event, Done) and event.failed and event.action in self._start_loads:
            self._note("memory", f"answered {brief(event.action)} to the start: {event.why}")
        elif self._engine.view().now_s > self._start_s:
            self._start_loads = None
        self._look()
        return event

    def do(self, action: Action) -> Done | None:
        """Refuse an action, or pass it to the inner engine (see Engine)."""
        if isinstance(action, Run):  # the loop may hold a turn, unseen here, in place of another: Run is not followed
            return self._refusal(action)
        again = self._due[:1] == [action]
        if again:
            self._due.pop(0)
        elif self._due:
            self._note("stands", f"{brief(action)} was issued when something came free, before {brief(self._due[0])}")
        self._stands = [order for order in self._stands if again or not same_subject(action, order)]
        refusal = self._refusal(action)
        if refusal is not None and not again:
            self._stands.append(action)
        elif refusal is None and again:
            self._stands.remove(action)
        return refusal

    def _refusal(self, action: Action) -> Done | None:
        self._count += 1
        draw = sha256(f"{self._seed}/{self._count}".encode()).digest()[0]
        route = isinstance(action, Admit) and isinstance(action.who, str)  # only noted, so nothing can be lacking
        if self._refuse and isinstance(action, REFUSABLE) and not route and draw % self._refuse == 0:
            self.refused.append(action)
            self._free_s = min(self._free_s, max(self._start_s, self._engine.view().now_s) + LACK_S)
            return Done(action, "not now", "refused by the test")
        refusal = self._engine.do(action)
        if isinstance(action, Load) and self._start_loads is not None:
            self._start_loads.append(action)
            if refusal is not None:
                self._note("memory", f"answered {brief(action)} to the start: {refusal.why}")
        self._look()
        return refusal

    def _look(self) -> None:
        if not self._watched:
            return
        by_gpu = held_bytes(self._engine)
        for g, (weights, kv) in enumerate(by_gpu):
            have = self._engine.cluster.gpus[g].mem_bytes
            if kv < 0 or (weights + kv > have and not self._limitless):
                self._note("memory", f"GPU {g} holds {weights} bytes of weights and {kv} of KV, of {have}")
        now = held(self._engine, by_gpu)
        if not self.held or self.held[-1][1:] != now[1:]:
            self.held.append(now)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TooLong after `seconds` of processor time; only the main thread can be stopped in this way."""

    def stop(*_: object) -> None:
        raise TooLong(f"thought for {seconds:g} s without an answer")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def run(
    subject: Subject,
    jobs: Jobs | None = None,
    end_s: float | None = None,
    *,
    watched: bool = True,
    reach: Reach = nullcontext,
) -> Trial:
    """Run a subject on the workload of its case, or on `jobs`, to the end or until `end_s`.

    `watched` reads memory after every event, which takes half of a trial's time. It is not needed for decisions and
    rows. The policy's own code runs within contexts of `reach`.
    """
    case = subject.case
    jobs = case.jobs if jobs is None else jobs
    try:
        with reach():
            policy, engine = subject.assemble()
    except Infeasible as why:
        return Trial(subject, jobs, frozenset(), (), (), impossible=str(why))
    except Fault as fault:
        return Trial(subject, jobs, frozenset(), (), (), error=fault.__cause__ or fault)
    probe = Probe(policy, engine.cluster, len(jobs), reach)
    limitless = policy.options.get("memory") == "unlimited"
    stand: Any = Stand(engine, case.refuse, probe.note, case.config, limitless, watched)
    if end_s is None:
        end_s = patience_s(probe.uses, case.size) + (float(jobs.arrival_s[-1]) if len(jobs) else 0.0)
    trial = Trial(subject, jobs, probe.uses, probe.decisions, probe.notes, hears=probe.hears)
    try:
        replay(probe, stand, jobs, end_s=end_s, decision_s=case.decision_s, control_s=case.control_s, log=probe)
    except (Infeasible, Unsupported) as why:
        return trial._replace(impossible=str(why))
    except Fault as fault:
        return trial._replace(error=fault.__cause__ or fault)
    by_gpu = held_bytes(engine)
    return trial._replace(
        rows=[row for batch in stand.rows() for row in batch.to_pylist()],
        refused=stand.refused,
        repeats=probe.repeats,
        seen=_seen(engine, len(jobs)),
        kv_bytes=sum(kv for _, kv in by_gpu),
        held=[*stand.held, held(engine, by_gpu)],
    )


def _seen(engine: Engine, n: int) -> int:
    """Return how many of n requests have arrived; requests arrive in the order of their ids."""
    view = engine.view()

    def there(r: int) -> bool:
        with suppress(KeyError):
            return bool(view.request(r))
        return False

    return bisect_left(range(n), True, key=lambda r: not there(r))


def patience_s(uses: frozenset[str], size: int = 1) -> float:
    """Return the seconds after the last arrival by which all requests must have ended.

    They grow with the `size` of the case, and with the fixed cost of the slowest way to load in `uses`.
    """
    ways = quantities.ladder("h100")
    return size * PATIENCE_S + SWAPS * max((ways[w].fixed_s for w in ways if f"Load.way:{w}" in uses), default=0.0)


def needs(action: Action) -> Iterator[str]:
    """Yield the entries that `uses` must have for an action, such as `Run` and `Run.sms`.

    One entry is the action's name. Each field that differs from its default adds an entry. The entries of `way`,
    `phase` and `steps=0` also have the field's value, as in `Load.way:sleep`. A `Move` adds an entry for the kind of
    its target, such as `Move.to:host`. A `Wake` needs no entry.
    """
    kind = type(action).__name__
    match action:
        case Wake():
            return  # replay's own
        case Move(to=to):
            yield f"Move.to:{'none' if to is None else 'host' if isinstance(to, Host) else 'gpu'}"
    yield kind
    for f in fields(action):
        if f.default is not MISSING and (value := getattr(action, f.name)) != f.default:
            closed = f.name in {"way", "phase"} or (f.name, value) == ("steps", 0)
            yield f"{kind}.{f.name}" + (f":{value}" if closed else "")
