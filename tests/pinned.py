"""Count the pages that elastic memory keeps for the KV of a run: `python -m tests.pinned [RUN]` replays its requests.

kvcached takes a block of KV from the page that last had a free one, and gives a page back once all its blocks are free
(kvcached/kv_cache_manager.py at 020c6ea, `_alloc` and `free`). Blocks of requests that end at different times share
pages, so some stay for few blocks. The simulator counts packed pages and a part in addition (policy/types.py,
FRAGMENTED). RUN is a folder with a run's rows; without it, `elastic` is simulated on light8 and one H100.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.engines.costs import shapes
from harness.policy.types import FRAGMENTED, MIB
from harness.rows import record, requests
from harness.run import spec as specs
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec

BUFFER = 2 * MIB  # of a page, in each layer, for K and for V
TOKENS = {"sim": 16, "torch": 64}  # of a block, by engine
EACH_S = 0.5  # between two looks


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
        """Give back a block of each of these pages."""
        for page, count in Counter(pages).items():
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


def changes(each: list[Request], tokens: int) -> Iterator[tuple[float, int, int]]:
    """Yield when each request takes a block of so many tokens (1) or gives all of its blocks back (0), in order."""
    events = list[tuple[float, int, int]]()
    for i, r in enumerate(each):
        held = -(-r.prompt // tokens)
        events += [(r.first_s, 1, i)] * held
        a_token_s = (r.done_s - r.first_s) / max(1, r.output)
        behind = range(held * tokens, r.prompt + r.output, tokens)
        events += [(r.first_s + (k - r.prompt) * a_token_s, 1, i) for k in behind]
        events.append((r.done_s, 0, i))
    yield from sorted(events)


def replayed(folder: Path) -> str:
    """Replay a run's requests; return what their pages take beside what the simulator counts."""
    spec = specs.stored(record.meta(folder)["spec"])
    tokens, models = TOKENS[spec.engine], {m.name: m.shape for m in Setup(spec).config.models}
    table = record.read(folder)
    rows = requests.rows(table)
    columns = (table.column(name).to_pylist() for name in ("prompt_tokens", "output_tokens"))
    every = zip(rows.model, rows.arrival_s + rows.ttft_s, rows.arrival_s + rows.e2e_s, *columns, strict=True)
    each = [Request(rows.models[model], *of) for (model, *of), done in zip(every, rows.done, strict=True) if done]

    page_bytes = {m: 2 * s.layers * BUFFER for m, s in models.items()}
    pages = {m: Pages(page_bytes[m] // (tokens * shapes.kv_token_bytes(s))) for m, s in models.items()}
    held, blocks = defaultdict[int, list[int]](list), Counter[str]()
    room = spec.gpus * (spec.pool_bytes or 0) - sum(map(shapes.weight_bytes, models.values()))
    looks, next_s = list[tuple[float, float]](), 0.0
    for at_s, takes, i in changes(each, tokens):
        if at_s >= next_s:
            packed = {m: blocks[m] * (1 + FRAGMENTED / 1024) / pages[m].blocks for m in models}
            counted = sum(math.ceil(packed[m]) * page_bytes[m] for m in models)
            looks.append((counted, sum(len(pages[m].used) * page_bytes[m] for m in models)))
            next_s = at_s + EACH_S
        name = each[i].model
        if takes:
            held[i].append(pages[name].take())
        else:
            pages[name].give(held[i])
        blocks[name] += 1 if takes else -len(held.pop(i))
    counted, kept = np.array(looks).T
    full = counted > 0.5 * room
    times = [f"{kept[of].sum() / counted[of].sum():.2f}" for of in (counted > 0, full)]
    return (
        f"{spec.label}, {spec.models}: {len(each):,} requests, room for {room / MIB:,.0f} MiB of KV. Pages take"
        f" {times[0]} times what the simulator counts, and {times[1]} times where that is over half of the room"
        f" ({100 * full.mean():.0f} % of the time)"
    )


def simulated(rate_scale: float) -> str:
    """Replay a simulated run."""
    spec = Spec("elastic", models="light8", gpus=1, trace="hyperbolic-like", rate_scale=rate_scale,
                pool_bytes=72_241_349_919)  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        return f"{rate_scale:g} times its rate, {replayed(execute(resolve(spec), Path(scratch), ''))}"


if __name__ == "__main__":
    for line in map(replayed, map(Path, sys.argv[1:])) if len(sys.argv) > 1 else map(simulated, (2.5, 3.5, 4.0)):
        print(line)
