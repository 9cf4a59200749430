"""Shards: independent parts of a study's work, for machines that do not communicate with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import NamedTuple, TypeVar

from harness.policy.types import UserError

T = TypeVar("T")
MOST = 1_000_000


class Shard(NamedTuple):
    """One of `of` independent parts of a study's work; `number` says which one, counted from 1."""

    number: int
    of: int

    def part(self, items: Iterable[T], key: Callable[[T], str]) -> list[T]:
        """Return this shard's items: every `of`-th in the order of key hashes, so that shards have equal sizes."""
        by_hash = sorted(items, key=lambda item: sha256(key(item).encode()).digest())
        return by_hash[self.number - 1 :: self.of]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class Progress(NamedTuple):
    """The progress of a search: its panels, its numbers of stored and of missing runs so far, and its phase."""

    panels: tuple[str, ...]
    stored: int
    missing: int
    phase: str  # "": nothing is missing


def read(text: str) -> Shard:
    """Read I/N. Raises UserError if the text is not a shard."""
    index, _, of = text.partition("/")
    if not (index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of) <= MOST):
        raise UserError(f'--shard "{text}" is not I/N, as in 1/7: a shard, of how many')
    return Shard(int(index), int(of))
