"""A prompt that is being answered, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Finish = Literal["length", "stop", "abort"]


class Owner(Protocol):
    """The model that answers a sequence."""

    waiting: int

    def ended(self, sequence: Sequence, at_ns: int) -> None:
        """Hear that it is over."""
        ...


class Sequence:
    """One choice of a request. `tell(sequence, at_ns)` is called for each token, and once more if it is aborted."""

    __slots__ = (
        "begun_ns",
        "due_ns",
        "ends",
        "finish",
        "index",
        "made",
        "model",
        "output_tokens",
        "prompt_tokens",
        "tell",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        tell: Callable[[Sequence, int], None],
        *,
        index: int = 0,
        ends: Finish = "length",
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tell = tell
        self.index = index  # of its choice in the answer
        self.ends: Finish = ends  # what is said after the last token
        self.finish: Finish | None = None  # None: it goes on
        self.made = 0  # tokens so far
        self.begun_ns = -1  # when its prompt was begun
        self.due_ns = -1  # of the next token, where each has a time of its own
        self.model: Owner | None = None  # that answers it; None: none yet, or none any more

    def token(self, at_ns: int) -> None:
        """Make a token."""
        self.made += 1
        if self.made == self.output_tokens:
            self.finish = self.ends
        model = self.model
        assert model is not None
        if self.made == 1:
            model.waiting -= 1
        if self.finish is not None:
            model.ended(self, at_ns)
        self.tell(self, at_ns)
