"""Memory as the engine counts it: the granules of a device, and the pages of KV that a model takes from them.

Weights and KV share one pool of granules, as on a GPU they share one pool of physical handles. The KV of a model on a
device is an account: a range of addresses in which pages are mapped. With `kv=paged` a page is one block. A page that
becomes free stays mapped until its granules are needed elsewhere. With `kv=elastic` a page has as many blocks as fit
into one buffer for K and one for V in each layer. A page is unmapped as soon as none of its blocks is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import groupby

from harness.engines.torch.nets import Net
from harness.engines.torch.wire import Pages

Runs = list[tuple[int, int]]  # (offset, bytes) in a device's memory


class Lowest:
    """A pool of the integers from 0 up to a bound; the lowest free integer is taken first.

    Integers that were never taken need no memory.
    """

    def __init__(self, bound: int) -> None:
        self._bound, self._fresh = bound, 0  # all from `_fresh` on are free
        self._back = set[int]()  # numbers that were given back
        self._heap: list[int] = []  # holds those of `_back`, and numbers claimed since

    def __len__(self) -> int:
        return len(self._back) + self._bound - self._fresh

    def take(self) -> int:
        """Take the lowest free number. Raises IndexError if no number is free."""
        while self._back:
            if (number := heappop(self._heap)) in self._back:
                self._back.remove(number)
                return number
        self._heap.clear()
        if self._fresh == self._bound:
            raise IndexError("none is free")
        self._fresh += 1
        return self._fresh - 1

    def claim(self, number: int) -> bool:
        """Take a number that was given back before; return False if it is not free now."""
        free = number in self._back
        self._back.discard(number)
        return free

    def give(self, number: int) -> None:
        """Make a number free again."""
        self._back.add(number)
        heappush(self._heap, number)
        if len(self._heap) > 2 * self._bound:
            self._heap = sorted(self._back)


class Arena:
    """The memory of a device or of the host, divided into granules."""

    def __init__(self, size: int, granule: int) -> None:
        self.size, self.granule = size // granule * granule, granule
        self._free = Lowest(self.size // granule)
        self.accounts: list[Account] = []

    def whole(self, size: int) -> int:
        """Round a number of bytes up to whole granules; the result is in bytes."""
        return -(-size // self.granule) * self.granule

    @property
    def free_bytes(self) -> int:
        """The bytes without weights or KV; free KV pages that are still mapped are included."""
        return len(self._free) * self.granule + sum(account.spare_bytes for account in self.accounts)

    def take(self, size: int, last_granules: Sequence[int] = ()) -> list[int]:
        """Take whole granules for `size` bytes, which must be free, and return their indices.

        Each of `last_granules` that is free is taken again, at its old position in the list. All others are the lowest
        free granules, so that long series of adjacent granules arise.
        """
        count = self.whole(size) // self.granule
        for account in self.accounts:
            while len(self._free) < count and account.spare_bytes:
                account.shrink()
        again = [granule if self._free.claim(granule) else None for granule in last_granules[:count]]
        again += [None] * (count - len(again))
        return [self._free.take() if granule is None else granule for granule in again]

    def give(self, granules: list[int]) -> None:
        """Make granules free again."""
        for granule in granules:
            self._free.give(granule)

    def runs(self, granules: list[int]) -> Runs:
        """Join adjacent granules, and return each group as an offset and a size in bytes."""
        spans = []
        for _, group in groupby(enumerate(granules), lambda pair: pair[1] - pair[0]):
            members = [granule for _, granule in group]
            spans.append((members[0] * self.granule, len(members) * self.granule))
        return spans


class Account:
    """The KV memory of one model on a device or on the host; it consists of pages of one or more blocks."""

    def __init__(self, arena: Arena, net: Net, block_tokens: int, *, buffer: int = 0) -> None:
        block_bytes = arena.whole(block_tokens * net.kv_token_bytes)
        self._of_page = max(1, 2 * net.shape.layers * buffer // block_bytes)
        self.page_bytes = self._of_page * block_bytes
        self.pages = Pages(block_tokens, block_bytes, arena.size // self.page_bytes * self._of_page)
        self.limit_bytes: int | None = None
        self.arena, self._elastic = arena, buffer > 0
        self._granules: dict[int, list[int]] = {}  # keyed by mapped page
        self._used: dict[int, int] = {}  # used blocks by page, for pages that have any
        self._blocks: list[int] = []  # free blocks of pages of which some block is used
        self._spare: list[int] = []  # mapped pages of which no block is used
        self._out = Lowest(arena.size // self.page_bytes)  # pages that are not mapped
        self.changes: dict[int, bool] = {}  # by page: whether its first change was that it was mapped
        arena.accounts.append(self)

    @property
    def used_bytes(self) -> int:
        """The bytes of all pages of which at least one block is in use."""
        return len(self._used) * self.page_bytes

    @property
    def used_blocks(self) -> int:
        """The number of blocks that requests use."""
        return sum(self._used.values())

    @property
    def spare_bytes(self) -> int:
        """The bytes of all mapped pages of which no block is in use."""
        return len(self._spare) * self.page_bytes

    @property
    def room_bytes(self) -> int:
        """The bytes of further pages that this account may take into use."""
        free = self.arena.free_bytes
        return max(0, free if self.limit_bytes is None else min(free, self.limit_bytes - self.used_bytes))

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.pages.block_tokens)

    def need_bytes(self, blocks: int) -> int:
        """Return the bytes of the further pages that `blocks` more blocks need."""
        return -(-max(0, blocks - len(self._blocks)) // self._of_page) * self.page_bytes

    def fits(self, blocks: int, reserve_bytes: int = 0) -> bool:
        """Tell whether there is room for `blocks` more blocks, in pages in use or in further pages.

        Further pages must leave `reserve_bytes` of the room free.
        """
        need = self.need_bytes(blocks)
        return not need or need + reserve_bytes <= self.room_bytes

    def take(self, blocks: int) -> list[int]:
        """Take `blocks` blocks, for which there must be room; free blocks of pages in use are taken first."""
        while len(self._blocks) < blocks:
            page = self._spare.pop() if self._spare else self._grown()
            self._used[page] = 0
            self._blocks += reversed(range(page * self._of_page, (page + 1) * self._of_page))
        taken = [self._blocks.pop() for _ in range(blocks)]
        for block in taken:
            self._used[block // self._of_page] += 1
        return taken

    def give(self, blocks: list[int]) -> None:
        """Make blocks free again; with elastic KV, unmap pages that have no other block in use."""
        for block in blocks:
            page = block // self._of_page
            self._used[page] -= 1
            self._blocks.append(block)
            if not self._used[page]:
                del self._used[page]
                self._blocks = [free for free in self._blocks if free // self._of_page != page]
                self._spare.append(page)
        while self._elastic and self._spare:
            self.shrink()

    def shrink(self) -> None:
        """Unmap a page that has no block in use."""
        page = self._spare.pop()
        self.arena.give(self._granules.pop(page))
        self._out.give(page)
        self.changes.setdefault(page, False)

    def _grown(self) -> int:
        """Map a page and return its number."""
        page = self._out.take()
        self._granules[page] = sorted(self.arena.take(self.page_bytes))
        self.changes.setdefault(page, True)
        return page

    def runs(self, page: int) -> Runs:
        """Return the areas of device or host memory that a mapped page occupies, as offsets and sizes in bytes."""
        return self.arena.runs(self._granules[page])

    @property
    def mapped(self) -> Collection[int]:
        """The numbers of the mapped pages."""
        return self._granules.keys()

    def granules(self, block: int) -> list[int]:
        """Return the indices of the granules of a block."""
        page, k = divmod(block, self._of_page)
        count = self.pages.block_bytes // self.arena.granule
        return self._granules[page][k * count : (k + 1) * count]
