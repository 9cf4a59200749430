"""A model of the mock: what it answers, and whether it is awake."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.mock.agenda import Agenda
from harness.mock.pacing import Pacing
from harness.mock.sequence import Sequence

State = Literal["awake", "draining", "falling asleep", "asleep", "waking"]
Mode = Literal["abort", "wait", "keep"]
Told = Callable[[int], None]  # is called with the time at which an order is carried out
LEVELS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Served:
    """A model's limits and its seconds of sleep and wake."""

    name: str
    max_tokens: int  # longest prompt + output
    sleep_ns: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))  # by level
    wake_ns: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))  # from this level
    idle_ns: int | None = None  # after which it falls asleep by itself, to level 1; None: never
    wakes: bool = False  # a request wakes it; else requests are held until it is told to wake


class Model:
    """One model: its sequences, and its sleep by vLLM's levels and modes.

    Level 0 holds requests and no more, 1 has the weights in host memory, 2 nowhere. Mode "abort" ends all sequences at
    once, "wait" falls asleep after their last tokens, and with "keep" they go on when it is awake again. What arrives
    while it is not awake is held (vLLM 00080ee, v1/engine/core.py: EngineCore.sleep, pause_scheduler, is_sleeping).
    """

    def __init__(
        self, served: Served, pacing: Pacing, agenda: Agenda, says: Callable[[str], None] = lambda _: None
    ) -> None:
        self.served = served
        self.state: State = "awake"
        self.level = 0  # of its sleep, or of its last
        self.waiting = 0  # sequences without a token
        self.live: dict[Sequence, None] = {}  # in the batch
        self.held: deque[Sequence] = deque()  # until it is awake
        self._pacing = pacing
        self._agenda = agenda
        self._says = says  # what its server's log would have
        self._sleeps: list[Told] = []  # orders under way
        self._wakes: list[Told] = []
        self._used_ns = -1  # when it last had work

    @property
    def sleeping(self) -> bool:
        """True while requests are held, as vLLM's `/is_sleeping` reports it."""
        return self.state != "awake"

    def submit(self, sequence: Sequence, at_ns: int, after_ns: int = 0) -> None:
        """Answer a sequence; it joins `after_ns` later."""
        sequence.model = self
        self.waiting += 1
        if after_ns:
            self._agenda.at(at_ns + after_ns, self._join, sequence)
        else:
            self._join(sequence, at_ns)

    def cancel(self, sequence: Sequence, at_ns: int) -> None:
        """Cancel a sequence whose client is gone: nothing more is made, or told."""
        if sequence.model is not self:
            return
        if sequence in self.held:
            self.held.remove(sequence)
        self.waiting -= not sequence.made
        self.ended(sequence, at_ns)

    def ended(self, sequence: Sequence, at_ns: int) -> None:
        """Take out a sequence that is over."""
        if sequence in self.live:
            self._pacing.stop(sequence, at_ns)
            del self.live[sequence]
        sequence.model = None
        if not self.live:
            self._idle(at_ns)

    def sleep(self, level: int, mode: Mode, at_ns: int, told: Told) -> None:
        """Sleep; `told` hears when it is asleep. A sleeping one stays as it is, a waking one wakes first."""
        if self.state == "asleep":
            told(at_ns)
            return
        if self.state == "waking":
            self._wakes.append(lambda at_ns: self.sleep(level, mode, at_ns, told))
            return
        self._sleeps.append(told)
        if self.state != "awake":
            return
        self.level, self.state = level, "draining"
        for sequence in list(self.live):
            if mode == "wait":
                break
            if mode == "abort":
                self._abort(sequence, at_ns)
            else:
                self._pacing.stop(sequence, at_ns)
                del self.live[sequence]
                self.held.append(sequence)
        if not self.live and self.state == "draining":
            self._fall(at_ns)

    def wake(self, at_ns: int, told: Told | None = None) -> None:
        """Wake, after it has fallen asleep if it is about to; `told` hears when it is awake."""
        if self.state == "awake":
            if told is not None:
                told(at_ns)
            return
        self._wakes.append(told or (lambda _at_ns: None))
        if self.state == "asleep":
            self.state = "waking"
            self._agenda.at(at_ns + self.served.wake_ns[self.level], Model._woken, self)

    def begin(self, at_ns: int) -> None:
        """Start with the server: idle time counts from now."""
        self._idle(at_ns)

    def _join(self, sequence: Sequence, at_ns: int) -> None:
        if sequence.model is not self:  # its client left before it joined
            return
        if self.state == "awake":
            self.live[sequence] = None
            if not sequence.made:
                sequence.begun_ns = at_ns
            self._pacing.start(sequence, at_ns)
            return
        self.held.append(sequence)
        if self.served.wakes and not self._wakes:
            self.wake(at_ns)

    def _abort(self, sequence: Sequence, at_ns: int) -> None:
        self.waiting -= not sequence.made
        sequence.finish = "abort"
        self._pacing.stop(sequence, at_ns)
        del self.live[sequence]
        sequence.model = None
        sequence.tell(sequence, at_ns)

    def _idle(self, at_ns: int) -> None:
        if self.state == "draining":
            self._fall(at_ns)
        elif self.state == "awake" and self.served.idle_ns is not None:
            self._used_ns = at_ns
            self._agenda.at(at_ns + self.served.idle_ns, Model._nods_off, self)

    def _nods_off(self, at_ns: int) -> None:
        idle_ns = self.served.idle_ns
        if idle_ns is not None and self.state == "awake" and not self.live and at_ns - self._used_ns == idle_ns:
            self.level = 1
            self._fall(at_ns)

    def _fall(self, at_ns: int) -> None:
        self.state = "falling asleep"
        self._agenda.at(at_ns + self.served.sleep_ns[self.level], Model._slept, self)

    def _slept(self, at_ns: int) -> None:
        self.state = "asleep"
        self._says("server is entering sleeping state")
        told, self._sleeps = self._sleeps, []
        for tell in told:
            tell(at_ns)
        if self._wakes or (self.held and self.served.wakes):
            self.wake(at_ns)

    def _woken(self, at_ns: int) -> None:
        self.state = "awake"
        self._says("server is exiting sleeping state")
        told, self._wakes = self._wakes, []
        held, self.held = self.held, deque()
        for sequence in held:
            self._join(sequence, at_ns)
        for tell in told:
            tell(at_ns)
        if not self.live:
            self._idle(at_ns)
