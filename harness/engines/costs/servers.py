"""Default settings of servers by release and card, from `servers.toml`, which cites the server's source for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from harness import toml
from harness.engines.costs import process, quantities
from harness.policy.types import GIB, MIB, UserError
from harness.toml import Count, Natural, NonNegative, Share

FILE = Path(__file__).parent / "servers.toml"
# A prompt is let in if there are blocks for it and one token, for its next piece, or for all up to its last token.
Admission = Literal["prompt", "chunk", "output"]
PREFILL_TOKENS = 16384  # stands for a step of whole prompts where a release has no such step


class Settings(NamedTuple):
    """The settings of a server, named as the fields of a spec.

    If `process_bytes` is None, the memory of a process is the sum of its parts (`process.py`).
    """

    chunk_tokens: int
    batch_cap: int
    mem_fraction: float
    prefill_tokens: int = PREFILL_TOKENS
    process_bytes: int | None = None
    admission: Admission = "prompt"


@dataclass(frozen=True, slots=True)
class Card:
    """Settings on cards with `from_gib` of memory or more."""

    batch_cap: Count
    from_gib: Natural = 0
    but: str = ""  # does not hold for kinds with this in their name
    chunk_tokens: Natural = 0
    prefill_tokens: Natural = 0
    base: NonNegative = 0.0
    per_gpu: NonNegative = 0.0


@dataclass(frozen=True, slots=True)
class Long:
    """The chunk size of servers whose longest request exceeds `above_tokens` tokens."""

    above_tokens: Count
    chunk_tokens: Count


@dataclass(frozen=True, slots=True)
class Release:
    """The default settings of a server's release, and of later releases up to the next entry of the series."""

    series: str
    since: str
    read: tuple[str, ...]
    source: str
    cards: tuple[Card, ...]
    mem_fraction: Share | None = None  # None: by what is reserved
    admission: Admission = "prompt"
    whole: Natural = 0  # least tokens of a step of whole prompts
    long: Long | None = None
    round: Natural = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that the bench gives to host profiles without a server release."""

    hosts: tuple[str, ...]
    source: str
    chunk_tokens: Count
    batch_cap: Count
    mem_fraction: Share


@dataclass(frozen=True, slots=True)
class File:
    """The form of `servers.toml`."""

    release: tuple[Release, ...]
    nvidia_smi_mib: Mapping[str, Count]
    bench: Bench


@cache
def _file() -> File:
    return toml.read(FILE, File)


def bench() -> Settings:
    """Return the settings that the bench gives to servers whose host profile names no release."""
    its = _file().bench
    return Settings(its.chunk_tokens, its.batch_cap, its.mem_fraction)


def unnamed() -> tuple[str, ...]:
    """Return the host profiles that name no release."""
    return _file().bench.hosts


def settings(host: str, card: quantities.GpuSpec, tp: int, longest: Callable[[], int]) -> Settings:
    """Return the settings of a server on a card, by its host profile or release (`vllm-0.28`).

    `tp` is the degree of the server's tensor-parallel group. `longest` returns the tokens of the longest request that
    the server gets. It is called only if the release's settings depend on that number. Raises UserError if `host` names
    neither a profile nor a release.
    """
    if host in unnamed():
        return bench()
    its = release(host)
    at = next(c for c in its.cards if card.mem_bytes >= c.from_gib * GIB and not (c.but and c.but in card.kind))
    chunk = its.long.chunk_tokens if its.long and longest() > its.long.above_tokens else at.chunk_tokens
    prefill = at.prefill_tokens or (max(longest(), its.whole) if its.whole else PREFILL_TOKENS)
    if its.mem_fraction is not None:
        return Settings(chunk, at.batch_cap, its.mem_fraction, prefill, admission=its.admission)
    total = _file().nvidia_smi_mib.get(card.kind, 0) * MIB or card.mem_bytes
    share = round(1 - (at.base + at.per_gpu * tp) * GIB / total, its.round)
    outside = process.CONTEXT + process.COLLECTIVES * (tp > 1)
    return Settings(chunk, at.batch_cap, share, prefill, round(share * outside), its.admission)


def release(name: str) -> Release:
    """Return the release whose settings apply to a series and version, such as `vllm-0.15`.

    Raises UserError if there is no such release.
    """
    series, _, text = name.rpartition("-")
    mine = [entry for entry in _file().release if entry.series == series]
    held = [entry for entry in mine if version(text) and version(entry.since) <= version(text)]
    if not held:
        have = ", ".join(f"{entry.series} from {entry.since} on" for entry in _file().release)
        raise UserError(f"no settings of server {name!r}: {FILE.name} has {have}")
    return max(held, key=lambda entry: version(entry.since))


def version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; () if they are not numbers."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
