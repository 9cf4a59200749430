"""Elastic memory: models stay where the plan puts them, and take KV pages from free memory, first come first served.

What users of kvcached run (ovg-project/kvcached 04e342f): each model has an engine, which maps physical pages when it
needs them and gives them back. There is no quota, priority or guarantee between engines. kvcached's controller can put
a model without traffic to sleep (weights to host memory) and wake it on the next request; as released this is off.

    idle_s    seconds without a request after which a model sleeps; 0: never (001b7b8, controller/sleep_manager.py,
              SleepConfig: auto_sleep_enabled is False; where it is on, idle_threshold_seconds is 300: preset `sleep`)
    check_s   seconds between two looks for idle models (the same file, check_interval_seconds)

Users decide where models live. `placement=pressure`: by KV demand over free memory, heaviest weights first, as in the
other systems that place once. `rate`: the busiest GPU gets as few requests as possible. `searched`: the lowest pressure
of all placements. `bench tune` chooses. With `replicas`, models have as many copies as the forecast asks for (`copies`
in harness/policy/placement.py), and a request goes to the copy with the fewest requests. Where no copy helps, the run
is skipped, since it would equal that of `elastic`.

The engine does the rest (`kv=elastic`): a page is 2 MiB for K and for V in each layer, and an engine keeps five of them
mapped (kvcached/utils.py, PAGE_SIZE and MIN_RESERVED_PAGES). The share of GPU memory, 0.95 there (GPU_UTILIZATION), is
the run's `mem_fraction`. It is equal for all systems, and so is the batch cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Evict, Load, Run, Wake
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import idlest, replicas, spread
from harness.policy.types import Batch, Cluster, Gpus, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start; with `idle_s`, a look-up in a set a request


@dataclass(slots=True)
class Elastic:
    """A policy that places models once, gives KV memory first come first served, and puts idle models to sleep."""

    cluster: Cluster
    idle_s: float = number(0.0, 0, 3600)
    check_s: float = number(60.0, 1, 600)
    placement: str = choice("rate", "searched", "pressure", tuned=True)
    replicas: bool = False
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit", "Cluster.homes"}), init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "elastic"}, init=False)
    places: dict[str, list[Gpus]] = field(default_factory=dict, init=False)  # by model: its home, then its copies
    active_s: dict[Batch, float] = field(default_factory=dict, init=False)  # when a request last came or ended
    asleep: set[Batch] = field(default_factory=set, init=False)

    mixed: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "kvcached": {"placement": "pressure"},
        "sleep": {"idle_s": 300.0, "placement": "pressure"},
        "replicas": {"replicas": True},
    }

    def __post_init__(self) -> None:
        if self.replicas:
            self.hears |= {Arrived}
        if self.idle_s > 0:
            self.hears |= {Arrived, Finished}
            self.uses |= {"Evict", "Load.way:sleep"}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load, route and run every model at the start; then put idle models to sleep, and wake them on request."""
        match event:
            case Woke("start"):
                yield from self.start(view.now_s)
            case Woke("check"):
                yield from self.check(view)
            case Arrived(request):
                batch = idlest(request.model, self.places[request.model], view)
                self.active_s[batch] = view.now_s
                if len(self.places[request.model]) > 1:
                    yield Admit(request.id, batch)
                yield from self.wake(batch)
            case Finished(_, Batch() as batch):
                self.active_s[batch] = view.now_s

    def start(self, now_s: float) -> Iterator[Action]:
        """Load every model and its copies, without limits on their KV memory."""
        homes = spread(self.cluster, elastic=True, by=self.placement)
        self.places = replicas(self.cluster, homes, elastic=True) if self.replicas else {m: [homes[m]] for m in homes}
        for m, places in self.places.items():
            for place in places:
                batch = Batch(Inst(m, place))
                self.active_s[batch] = now_s
                yield Load(batch.inst)
                yield Run(batch)
                if len(places) == 1:
                    yield Admit(m, batch)
        if self.idle_s > 0:
            yield Wake(now_s + self.check_s, "check")

    def check(self, view: View) -> Iterator[Action]:
        """Evict the weights of models that have been idle for `idle_s`."""
        yield Wake(view.now_s + self.check_s, "check")
        for batch, active_s in self.active_s.items():
            s = view.batch(batch)
            idle = not s.waiting + s.decoding + s.away and view.now_s - active_s >= self.idle_s
            if idle and batch not in self.asleep:
                self.asleep.add(batch)
                yield Evict(batch.inst)

    def wake(self, batch: Batch) -> Iterator[Action]:
        """Load the weights of a sleeping model again."""
        if batch in self.asleep:
            self.asleep.remove(batch)
            yield Load(batch.inst, "sleep")
