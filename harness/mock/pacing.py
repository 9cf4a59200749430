"""Times of tokens: at fixed intervals, or by the steps of a batch as a cost table prices them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from harness.mock.agenda import Agenda
from harness.mock.sequence import Sequence

NS = 1_000_000_000


def ns(seconds: float) -> int:
    """Convert seconds to whole nanoseconds."""
    return round(NS * seconds)


class Pacing(Protocol):
    """The maker of tokens of a model's sequences."""

    def start(self, sequence: Sequence, at_ns: int) -> None:
        """Go on with a sequence from where it is: with its prompt, or with the next token."""
        ...

    def stop(self, sequence: Sequence, at_ns: int) -> None:
        """Make no more tokens of it, until it is started again."""
        ...


class Fixed:
    """The first token `ttft_ns` after the start, each other one `itl_ns` later, whatever else runs."""

    def __init__(self, agenda: Agenda, ttft_ns: int, itl_ns: int) -> None:
        self._agenda = agenda
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns

    def start(self, sequence: Sequence, at_ns: int) -> None:
        """Set the time of its next token."""
        sequence.due_ns = at_ns + (self._itl_ns if sequence.made else self._ttft_ns)
        self._agenda.at(sequence.due_ns, self._token, sequence)

    def stop(self, sequence: Sequence, at_ns: int) -> None:  # noqa: ARG002
        """Forget the time of its next token."""
        sequence.due_ns = -1

    def _token(self, sequence: Sequence, at_ns: int) -> None:
        if sequence.due_ns != at_ns:  # stopped since
            return
        sequence.due_ns = -1
        sequence.token(at_ns)
        if sequence.finish is None and sequence.model is not None:
            sequence.due_ns = due_ns = at_ns + self._itl_ns
            self._agenda.at(due_ns, self._token, sequence)


class Gpu:
    """A GPU that runs one step at a time: models with work take turns, a step each.

    A step is the prefill of one prompt, or a decode step of all that run. Prompts go first, in order of arrival, as
    long as fewer than `batch_cap` sequences run. KV memory has no limit.
    """

    def __init__(self, agenda: Agenda, batch_cap: int = 256) -> None:
        self._agenda = agenda
        self._batch_cap = batch_cap
        self._lanes: deque[Lane] = deque()  # whose turn it is stands first
        self._step: list[Sequence] | None = None  # whose step is in flight; None: the GPU is idle

    def lane(self, prefill_s: Callable[[int], float], step_s: Callable[[int, int], float]) -> Lane:
        """Add a model's batch to the GPU.

        `prefill_s` gives the seconds of a prompt of so many tokens.
        `step_s` gives the seconds of a step of (sequences, context tokens).
        """
        lane = Lane(self, prefill_s, step_s)
        self._lanes.append(lane)
        return lane

    def form(self, at_ns: int) -> None:
        """Start the next step, unless one is in flight or nothing is to be done."""
        if self._step is not None:
            return
        for lane in self._lanes:
            if lane.prompts and len(lane.running) < self._batch_cap:
                sequence = lane.prompts.popleft()
                self._step, seconds = [sequence], lane.prefill_s(sequence.prompt_tokens)
            elif lane.running:
                self._step = list(lane.running)
                seconds = lane.step_s(len(lane.running), lane.context_tokens)
            else:
                continue
            self._lanes.remove(lane)
            self._lanes.append(lane)
            self._agenda.at(at_ns + ns(seconds), self._ended, lane)
            return

    def forget(self, sequence: Sequence) -> None:
        """Make no token of a sequence in the step in flight, which takes as long as it was priced."""
        if self._step is not None and sequence in self._step:
            self._step.remove(sequence)

    def _ended(self, lane: Lane, at_ns: int) -> None:
        members, self._step = self._step or [], []  # what is told of may start others: the next step forms after all
        for sequence in members:
            if sequence.model is None:  # gave up at another's token just now
                continue
            if sequence not in lane.running:
                lane.running[sequence] = None
                lane.context_tokens += sequence.prompt_tokens
            lane.context_tokens += 1
            sequence.token(at_ns)
        self._step = None
        self.form(at_ns)


class Lane:
    """The batch of one model on its GPU."""

    def __init__(self, gpu: Gpu, prefill_s: Callable[[int], float], step_s: Callable[[int, int], float]) -> None:
        self._gpu = gpu
        self.prefill_s = prefill_s
        self.step_s = step_s
        self.prompts: deque[Sequence] = deque()  # without KV yet
        self.running: dict[Sequence, None] = {}  # in order of their prefills
        self.context_tokens = 0  # of all that run: prompts and what was made

    def start(self, sequence: Sequence, at_ns: int) -> None:
        """Let it join, by its prompt or by the KV that it has."""
        if sequence.made:
            self.running[sequence] = None
            self.context_tokens += sequence.prompt_tokens + sequence.made
        else:
            self.prompts.append(sequence)
        self._gpu.form(at_ns)

    def stop(self, sequence: Sequence, at_ns: int) -> None:  # noqa: ARG002
        """Take it out of the batch, and of the step in flight."""
        if sequence in self.running:
            del self.running[sequence]
            self.context_tokens -= sequence.prompt_tokens + sequence.made
        elif sequence in self.prompts:
            self.prompts.remove(sequence)
        self._gpu.forget(sequence)
