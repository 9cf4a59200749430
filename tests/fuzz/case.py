"""A command line with something odd in it, and what a good end of it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

NONE: Mapping[str, str] = MappingProxyType({})
Around = Literal["", "stdout closed", "stderr closed", "reader gone", "folder gone"]


class Case(NamedTuple):
    """A command line for an empty folder, and the end that is asked of it."""

    name: str  # group/what
    argv: tuple[str, ...]  # of bench
    culprit: str = ""  # a part that the line of a refusal must contain; "": not judged
    accept: bool = True  # whether exit code 0 is a sane answer
    env: Mapping[str, str] = NONE  # changes of the environment; "": unset
    around: Around = ""  # what is wrong with the process itself
