"""Replay the requests of a run and count the pages that elastic memory keeps for their KV.

kvcached takes a block of KV from the page that last had a free one, and gives a page back once all its blocks are free
(kvcached/kv_cache_manager.py at 020c6ea, `_alloc` and `free`). Blocks of requests that end at different times share
pages, so some stay for few blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.engines.costs import shapes
from harness.policy.types import KEPT_PAGES, MIB
from harness.rows import record, requests
from harness.run import spec as specs
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec

BUFFER = 2 * MIB  # of a page, in each layer, for K and for V
TOKENS = 16  # of a block


class Pages:
    """The pages of one model's KV, by kvcached's rule."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks  # of a page
        self.used = dict[int, int]()  # blocks, by page
        self._open = dict[int, None]()  # pages with a free block, the last one last
        self._made = 0

    def take(self) -> int:
        """Take a block; return its page."""
        page = self._open.popitem()[0] if self._open else self._made
        self._made += page == self._made
        self.used[page] = self.used.get(page, 0) + 1
        if self.used[page] < self.blocks:
            self._open[page] = None
        return page

    def give(self, pages: Iterable[int]) -> None:
        """Give back a block of each of these pages, those of the last blocks first."""
        for page, count in Counter(reversed([*pages])).items():
            self._open.pop(page, None)
            self.used[page] -= count
            if self.used[page]:
                self._open[page] = None
            else:
                del self.used[page]


class Request(NamedTuple):
    """A request as its KV sees it."""

    model: str
    first_s: float
    done_s: float
    prompt: int
    output: int


def changes(each: list[Request]) -> Iterator[tuple[float, int, int]]:
    """Yield when each request takes a block (1) or gives all of its blocks back (0), in order."""
    events = list[tuple[float, int, int]]()
    for i, r in enumerate(each):
        held = -(-r.prompt // TOKENS)
        events += [(r.first_s, 1, i)] * held
        a_token_s = (r.done_s - r.first_s) / max(1, r.output)
        behind = range(held * TOKENS, r.prompt + r.output, TOKENS)
        events += [(r.first_s + (k - r.prompt) * a_token_s, 1, i) for k in behind]
        events.append((r.done_s, 0, i))
    yield from sorted(events)


class Count(NamedTuple):
    """KV of a run over its window, in bytes * s beyond the pages that each model keeps mapped anyway."""

    replayed: float
    packed: float  # the fewest pages that hold as many blocks
    counted: float  # by the run


def replayed(folder: Path) -> Count:
    """Replay a run's requests."""
    meta = record.meta(folder)
    spec = specs.stored(meta["spec"])
    models = {m.name: m.shape for m in Setup(spec).config.models}
    table = record.read(folder)
    rows = requests.rows(table)
    columns = (table.column(name).to_pylist() for name in ("prompt_tokens", "output_tokens"))
    every = zip(rows.model, rows.arrival_s + rows.ttft_s, rows.arrival_s + rows.e2e_s, *columns, strict=True)
    each = [Request(rows.models[model], *of) for (model, *of), done in zip(every, rows.done, strict=True) if done]

    page_bytes = {m: 2 * s.layers * BUFFER for m, s in models.items()}
    pages = {m: Pages(page_bytes[m] // (TOKENS * shapes.kv_token_bytes(s))) for m, s in models.items()}
    held, blocks, since_s = dict[int, list[int]](), Counter[str](), dict.fromkeys(models, 0.0)
    byte_s = [0.0, 0.0]
    for at_s, takes, i in changes(each):
        name, at_s = each[i].model, min(max(at_s, 0.0), spec.window_s or math.inf)
        for k, count in enumerate((len(pages[name].used), -(-blocks[name] // pages[name].blocks))):
            byte_s[k] += (at_s - since_s[name]) * max(0, count - KEPT_PAGES) * page_bytes[name]
        since_s[name] = at_s
        if takes:
            held.setdefault(i, []).append(pages[name].take())
        else:
            pages[name].give(held[i])
        blocks[name] += 1 if takes else -len(held.pop(i))
    return Count(byte_s[0], byte_s[1], meta["stats"]["kv_byte_s"])


def simulated(rate_scale: float, folder: Path) -> Path:
    """Simulate `elastic` on light8 and one H100; return the folder of its rows."""
    spec = Spec("elastic", models="light8", gpus=1, trace="hyperbolic-like", pool_bytes=72_241_349_919)
    return execute(resolve(replace(spec, rate_scale=rate_scale)), folder, "")
