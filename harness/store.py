"""One way to keep things: what was made of some inputs stands for as long as these stay the same.

A kept thing lies at a path, whole or absent. Its inputs stand among its facts, or as a digest in its name. What is
absent, cut, damaged or made of other inputs is made anew. `harness/rows/stored.py` lists the kinds of files that the
bench keeps beside its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Facts = Mapping[str, Any]
NONE: Facts = MappingProxyType({})


def digest(*inputs: object) -> str:
    """Return the SHA-256 of the text of some inputs, for the name of what is made of them."""
    return sha256(" ".join(map(str, inputs)).encode()).hexdigest()


def named(path: Path) -> Facts:
    """Return no facts: the inputs of the thing are in its name. Raises OSError where there is none."""
    path.stat()
    return NONE


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Things of one form on disk.

    `write(path, thing, facts)` puts a thing in place whole, with its inputs among the facts. `read` and `facts` raise
    an error of `lost` for what is absent, cut or damaged.
    """

    read: Callable[[Path], T]
    write: Callable[[Path, T, Facts], object]
    facts: Callable[[Path], Facts] = named
    lost: tuple[type[Exception], ...] = (OSError,)

    def current(self, path: Path, inputs: Facts = NONE, lost: Callable[[], object] = lambda: None) -> Facts | None:
        """Return the facts of the thing at `path` if it was made of these inputs; None if not, or if it is lost.

        `lost` is called for what cannot be read.
        """
        try:
            facts = self.facts(path)
            return facts if all(facts.get(key) == value for key, value in inputs.items()) else None
        except self.lost:
            lost()
            return None

    def kept(self, path: Path, inputs: Facts, make: Callable[[], T], more: Facts = NONE) -> T:
        """Return the thing at `path` if it was made of these inputs; else make it, and write it with `more` facts."""
        if self.current(path, inputs) is not None:
            with suppress(*self.lost):
                return self.read(path)
        thing = make()
        self.write(path, thing, {**more, **inputs})
        return thing
