"""Types of records, declared by pages of text: each line describes a field, and the lines fix the memory layout.

A line gives a field's name, type, unit and meaning. The type is f8 (8-byte float), i8 (8-byte integer), or an array of
these: 4i8 is four i8. Units are those of physics and these:

    ratio     a fraction of 1, or a speed relative to that of a step alone on a whole GPU
    count     a number of the things that the meaning names
    row       the index of a row of another record; -1: none
    flag      1 or 0
    code      one of the constants that the meaning names
    bits      a sum of powers of two, each a flag
    address   the memory address of an array
    order     a rank: the lowest comes first
    number    an identifier, not a quantity
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

UNITS = frozenset(
    "s s/piece s/sequence s/token s/token^2 bytes bytes*s bytes/s bytes/sequence bytes/token FLOP/s FLOP/token "
    "FLOP/token^2 SMs layers blocks steps ticks tokens ratio count row flag code bits address order number".split()
)
TYPES = frozenset({"f8", "i8"})


class Field(NamedTuple):
    """A field of a record: one line of the page that declares it."""

    name: str
    type: str
    unit: str
    meaning: str


def record(page: str) -> np.dtype[Any]:
    """Return the NumPy type that a page declares: each line of the page's last paragraph declares a field.

    The earlier paragraphs describe the record in words. Raises ValueError if a line does not declare a field.
    """
    table = page.rpartition("\n\n")[2]
    fields = []
    for line in table.strip().splitlines():
        columns = line.split(None, 3)
        if len(columns) < 4 or columns[1].lstrip("0123456789") not in TYPES or columns[2] not in UNITS:
            raise ValueError(f"not a field's name, type, unit and meaning: {line.strip()!r}")
        fields.append(Field(*columns))
    return np.dtype([(f.name, f.type) for f in fields], align=True, metadata={"fields": tuple(fields)})


def fields(layout: np.dtype[Any]) -> tuple[Field, ...]:
    """Return the fields of a type made by `record`, in the order in which the page lists them."""
    assert layout.metadata is not None
    lines: tuple[Field, ...] = layout.metadata["fields"]
    return lines
