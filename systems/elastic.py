"""Elastic memory: models stay where the plan puts them, and draw KV pages from what is free, first come first served.

What users of kvcached run (ovg-project/kvcached 04e342f): an engine a model maps physical pages when it needs them and
gives them back, with no quota, priority or guarantee between engines. Its controller can put a model without traffic to
sleep (weights to host memory), and wakes it on the next request; as released that is off.

    idle_s    seconds without a request after which a model sleeps; 0: never (001b7b8, controller/sleep_manager.py,
              SleepConfig: auto_sleep_enabled is False; where it is on, idle_threshold_seconds is 300: preset `sleep`)
    check_s   seconds between two looks at who is idle (the same, check_interval_seconds)

Where models live is its user's to say: `placement` by pressure of KV demand on memory, heaviest weights first, as in
the other systems that place once; by `rate`, so that the busiest GPU has the fewest requests; or `searched`, the lowest
pressure of all placements. `bench tune` chooses.

The engine has the rest (`kv=elastic`): the page is 2 MiB for K and for V in each layer, and an engine keeps five of
them mapped (kvcached/utils.py, PAGE_SIZE and MIN_RESERVED_PAGES). The share of the card, 0.95 there (GPU_UTILIZATION),
is the run's `mem_fraction`, equal for all systems, and so is the batch cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Evict, Load, Run, Wake
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import spread
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start; with `idle_s`, a look-up in a set a request


@dataclass(slots=True)
class Elastic:
    """One placement, KV memory for whoever asks first, and sleep for models without traffic."""

    cluster: Cluster
    idle_s: float = number(0.0, 0, 3600)
    check_s: float = number(60.0, 1, 600)
    placement: str = choice("rate", "searched", "pressure", tuned=True)
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit", "Cluster.homes"}), init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "elastic"}, init=False)
    batches: dict[str, Batch] = field(default_factory=dict, init=False)  # by model
    active_s: dict[str, float] = field(default_factory=dict, init=False)  # when a request last came or ended, by model
    asleep: set[str] = field(default_factory=set, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "kvcached": {"placement": "pressure"},
        "sleep": {"idle_s": 300.0, "placement": "pressure"},
    }

    def __post_init__(self) -> None:
        if self.idle_s > 0:
            self.hears |= {Arrived, Finished}
            self.uses |= {"Evict", "Load.way:sleep"}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place, route and run every model at the start; then put idle models to sleep, and wake them on request."""
        match event:
            case Woke("start"):
                yield from self.start(view.now_s)
            case Woke("check"):
                yield from self.check(view)
            case Arrived(request):
                self.active_s[request.model] = view.now_s
                yield from self.wake(request.model)
            case Finished(_, Batch(Inst(m))):
                self.active_s[m] = view.now_s

    def start(self, now_s: float) -> Iterator[Action]:
        """Load every model, and let it take what memory it finds free."""
        for m, place in spread(self.cluster, elastic=True, by=self.placement).items():
            self.batches[m], self.active_s[m] = Batch(Inst(m, place)), now_s
            yield Load(self.batches[m].inst)
            yield Run(self.batches[m])
            yield Admit(m, self.batches[m])
        if self.idle_s > 0:
            yield Wake(now_s + self.check_s, "check")

    def check(self, view: View) -> Iterator[Action]:
        """Evict the weights of models that have been idle for long enough."""
        yield Wake(view.now_s + self.check_s, "check")
        for m, batch in self.batches.items():
            s = view.batch(batch)
            idle = not s.waiting + s.decoding + s.away and view.now_s - self.active_s[m] >= self.idle_s
            if idle and m not in self.asleep:
                self.asleep.add(m)
                yield Evict(batch.inst)

    def wake(self, m: str) -> Iterator[Action]:
        """Bring the weights of a sleeping model back."""
        if m in self.asleep:
            self.asleep.remove(m)
            yield Load(self.batches[m].inst, "sleep")
