"""The forms of quantities in cost tables, against which a user's table is checked.

A file of `tables/` states the quantities of a GPU kind, and a user's table replaces some of these. `fit`, `held` and
`held_parts` are errors of a fit; a quantity without them is a roofline of unknown error. `factors` has one number for
each point of `axes`, where the last axis varies fastest. (Classes with two base classes have no slots.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypeVar

from harness import toml
from harness.toml import Ge, Gt, Le, MinLen

Text = Annotated[str, MinLen(1)]
Number = Annotated[int | float, Ge(0)]
Numbers = Annotated[tuple[Number, ...], MinLen(1)]
Errors = Mapping[str, Any]
T = TypeVar("T")


def read(path: Path, form: type[T]) -> T:
    """Read a TOML file into a dataclass. Raises UserError, which names the file and the line or key of a mistake."""
    return toml.convert(toml.tables(path), form, f"{path.name}: ")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The source, formula and errors that every quantity of a cost table has."""

    source: Text
    formula: Text
    error: str = ""
    fit: Errors | None = None
    held: Errors | None = None
    held_parts: Mapping[str, Errors] | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Correction factors of a formula, on a grid of axes."""

    axes_of: tuple[str, ...] = ()
    axes: tuple[Numbers, ...] = ()
    factors: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if self.factors and len(self.factors) != prod(len(axis) for axis in self.axes):
            raise ValueError("factors must hold one number for each point of axes")


@dataclass(frozen=True, kw_only=True)
class Gemm(Grid, Quantity):
    """Products of matrices."""

    launch_s: Number
    fill_s: Number
    hbm_frac: Number
    tiles: Annotated[tuple[tuple[Number, Number, Number], ...], MinLen(1)]
    best_flops_frac: Number


@dataclass(frozen=True, kw_only=True)
class Small(Quantity):
    """A layer's kernels that are neither GEMM nor attention."""

    floor_s: Number
    hbm_frac: Number


@dataclass(frozen=True, kw_only=True)
class Prefill(Grid, Quantity):
    """Attention of a prompt."""

    floor_s: Number
    tile_s: Number
    hbm_frac: Number
    longest: Number
    power: Number
    head_dims: Numbers
    flops_frac: Numbers


@dataclass(frozen=True, kw_only=True)
class Attention(Grid):
    """Attention of decode steps for one kind of heads: grouped-query heads, or heads that each have a KV head."""

    floor_s: Number
    merge_s: Number
    kv_head_s: Number
    head_s: Number
    tail_s: Number
    lone_s: Number
    hbm_frac: Number
    flops_frac: Number
    tail_power: Number
    fit: Errors | None = None
    held: Errors | None = None
    held_parts: Mapping[str, Errors] | None = None


@dataclass(frozen=True, kw_only=True)
class Decode(Quantity):
    """Attention of decode steps, by kind of heads: grouped-query heads, or heads that each have a KV head."""

    gqa: Attention
    mha: Attention


@dataclass(frozen=True, kw_only=True)
class Collective(Quantity):
    """All-reduces of a tensor-parallel group, or exchanges between the groups of data-parallel attention."""

    elements: Numbers
    tp2_s: Numbers
    tp4_s: Numbers
    tp8_s: Numbers
    wire: Number | None = None  # bytes/s of a ring, beyond which it is no faster


@dataclass(frozen=True, kw_only=True)
class Share(Quantity):
    """The arithmetic and the HBM bandwidth that steps reach on a part of a GPU's SMs."""

    arith_power: Number
    saturation: Number
    power: Number


@dataclass(frozen=True, kw_only=True)
class Turns(Quantity):
    """The turns that kernels of several models take on a GPU; `coef.COST` describes the numbers."""

    passes: Annotated[int | float, Ge(1)]
    decode_fill: Annotated[int | float, Gt(0), Le(1)]
    prompt_fill: Annotated[int | float, Gt(0), Le(1)]
    apart: Annotated[int | float, Ge(1)]
    crowd: Number
    few_tokens: Number
    many_tokens: Number

    def __post_init__(self) -> None:
        if self.few_tokens > self.many_tokens:
            raise ValueError("few_tokens must not be above many_tokens")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A user's table: quantities that replace those of a GPU kind."""

    kind: str | None = None  # the kind of GPU
    gemm: Gemm | None = None
    small: Small | None = None
    prefill: Prefill | None = None
    decode: Decode | None = None
    share: Share | None = None
    co_run: Turns | None = None
    all_reduce: Collective | None = None
    all_gather: Collective | None = None
    reduce_scatter: Collective | None = None
