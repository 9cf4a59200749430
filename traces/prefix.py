"""Shared prefixes of a trace's prompts: checked ids of their blocks, and the hits of an unlimited prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import Prefix, UserError
from traces.checks import Where

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]


def read(
    hashes: pa.ChunkedArray,
    block_tokens: object,
    model: NDArray[np.int32],
    prompt_tokens: NDArray[np.int32],
    where: Where,
    column: str = "prefix_hashes",
    way_out: str = "bench trace convert --drop-bad",
) -> Prefix:
    """Turn a column of block hashes into ids that are numbered from 0; streams share no ids.

    A row has one id for each whole block of its prompt, or no ids. An additional id for the last, partial block is left
    out, because no engine shares a block that is not full. Any other number of ids raises UserError. An id stands for a
    block and all blocks before it. So an id that follows different ids in two rows raises UserError too.
    """
    if not isinstance(block_tokens, int) or isinstance(block_tokens, bool) or block_tokens < 1:
        raise UserError(f'{where(0)}: column "prefix_hashes" without block_tokens in the metadata (--block-tokens)')
    lists = hashes.combine_chunks()
    given, whole = np.diff(lists.offsets.to_numpy().astype(np.int64)), prompt_tokens.astype(np.int64) // block_tokens
    if (bad := odd(lists, block_tokens, prompt_tokens)).any():
        at = int(bad.argmax())
        what = "an empty id" if None in (lists[at].as_py() or ()) else f"{given[at]} ids"
        raise UserError(
            f'{where(at)}: column "{column}" has {what} for {prompt_tokens[at]} prompt tokens in blocks of '
            f"{block_tokens} ({way_out})"
        )
    kept = np.minimum(given, whole)
    offsets = np.concatenate(([0], np.cumsum(kept)))
    row = np.repeat(np.arange(len(kept)), kept)
    place = np.arange(offsets[-1]) - offsets[row]  # its place in the prompt
    values = lists.flatten().to_numpy(zero_copy_only=False)[(np.cumsum(given) - given)[row] + place]
    prefix = Prefix(block_tokens, offsets, numbered(model[row], values))
    before = np.where(place == 0, -1, np.roll(prefix.ids, 1))
    first = np.unique(prefix.ids, return_index=True)[1]
    broken = before != before[first][prefix.ids]
    if broken.any():
        at = int(broken.argmax())
        raise UserError(
            f'{where(int(row[at]))}: column "{column}" has {values[at]} behind other blocks than '
            f"{where(int(row[first[prefix.ids[at]]]))}: an id must stand for a block and all before it"
        )
    return prefix


def odd(lists: pa.Array, block_tokens: int, prompt_tokens: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell for each row whether it has an empty id, or a number of ids that does not fit the blocks of its prompt.

    A row without ids is valid.
    """
    offsets = lists.offsets.to_numpy().astype(np.int64)
    given, (whole, rest) = np.diff(offsets), np.divmod(prompt_tokens.astype(np.int64), block_tokens)
    ids = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    empty = np.add.reduceat(np.append(ids.is_null().to_numpy(zero_copy_only=False), False), offsets[:-1] - offsets[0])
    return np.asarray((given != 0) & ((given != whole) & (given != whole + (rest > 0)) | (empty > 0)), bool)


def picked(prefix: Prefix, row: I8) -> Prefix:
    """Select the blocks of some rows, in the order of these rows."""
    count = np.diff(prefix.offsets)[row]
    offsets = np.concatenate(([0], np.cumsum(count)))
    at = np.arange(offsets[-1]) + np.repeat(prefix.offsets[row] - offsets[:-1], count)
    return Prefix(prefix.block_tokens, offsets, prefix.ids[at])


def numbered(*keys: NDArray[Any]) -> I8:
    """Return a number for each row's tuple of `keys`; distinct tuples are numbered from 0."""
    number = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        code = np.unique(key, return_inverse=True)[1].astype(np.int64)
        number = np.unique(number * (code.max(initial=0) + 1) + code, return_inverse=True)[1].astype(np.int64)
    return number


def seen_tokens(prefix: Prefix, prompt_tokens: I4) -> I8:
    """Return for each prompt the number of tokens that an unlimited prefix cache has from earlier prompts.

    Only whole blocks count, and never the last token of a prompt.
    """
    new = np.zeros(len(prefix.ids), bool)
    new[np.unique(prefix.ids, return_index=True)[1]] = True
    seen = np.concatenate(([0], np.cumsum(~new)))
    blocks = seen[prefix.offsets[1:]] - seen[prefix.offsets[:-1]]
    return np.asarray(np.minimum(prefix.block_tokens * blocks, prompt_tokens.astype(np.int64) - 1), np.int64)
