"""KV blocks that several sequences of a request share: reference counts, and copy on write (PagedAttention, 4.4).

Samples of a prompt share the blocks that the prompt fills. If its last block is only partly filled, each sequence
copies the block before it writes to the block. Only the last sequence to write needs no copy. Beams are chosen again at
each token: each new beam continues one of the previous beams. If several new beams continue the same beam, they share
all of its blocks.

The beams that continue depend on the model and the text. Here each new beam draws the beam that it continues uniformly
and independently, which needs no parameter. A number that only this assumption decides is an input, not a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16  # section 7.2


class Blocks:
    """Blocks of KV memory in use, each with the number of sequences that use it."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        """Return the number of blocks in use."""
        return len(self.holders)

    def prompt(self, tokens: int) -> list[int]:
        """Return the blocks of a new sequence with this number of tokens."""
        return [self._new() for _ in range(-(-tokens // BLOCK_TOKENS))]

    def fork(self, sequence: Sequence[int]) -> list[int]:
        """Return the blocks of a new sequence that continues `sequence`; the two share all of these blocks."""
        for block in sequence:
            self.holders[block] += 1
        return list(sequence)

    def append(self, sequence: list[int], tokens: int) -> None:
        """Append a token to a sequence that has `tokens` tokens; a shared last block is copied first."""
        if tokens % BLOCK_TOKENS == 0:
            sequence.append(self._new())
        elif self.holders[sequence[-1]] > 1:
            self.free(sequence[-1:])
            sequence[-1] = self._new()

    def free(self, sequence: Iterable[int]) -> None:
        """Release a sequence's blocks; a block that no other sequence uses becomes free."""
        for block in sequence:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]

    def _new(self) -> int:
        self._next += 1
        self.holders[self._next] = 1
        return self._next


def in_use(prompt: int, output: int, sequences: int, beams: np.random.Generator | None) -> list[int]:
    """Return the number of blocks in use after each token but the first, for a request with several sequences.

    The KV of each sequence's first token is written in the step of its second token. `beams` draws the beam that each
    sequence continues. If it is None, the sequences are samples, and each continues itself.
    """
    blocks = Blocks()
    first = blocks.prompt(prompt)
    running = [first, *(blocks.fork(first) for _ in range(sequences - 1))]
    held = []
    for tokens in range(prompt, prompt + output - 1):
        if beams is not None and tokens > prompt:
            parents = beams.integers(sequences, size=sequences)
            forked = [blocks.fork(running[parent]) for parent in parents]
            for sequence in running:
                blocks.free(sequence)
            running = forked
        for sequence in running:
            blocks.append(sequence, tokens)
        held.append(len(blocks))
    return held


def saved(lengths: NDArray[np.int32], sequences: int, beams: np.random.Generator | None = None) -> float:
    """Return the share of blocks that sharing saves, over all tokens of all requests.

    It is a share of the blocks that are in use without sharing: the ratio of PagedAttention's Figure 15. `lengths` has
    prompt and output tokens, shape (n, 2).
    """
    used = total = 0
    for prompt, output in lengths.tolist():
        used += sum(in_use(prompt, output, sequences, beams))
        ends = np.arange(prompt + 1, prompt + output)
        total += sequences * int((-(-ends // BLOCK_TOKENS)).sum())
    return 1.0 - used / total
