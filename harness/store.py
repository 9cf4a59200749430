"""One way to keep things: what was made of some inputs stands for as long as these stay the same.

A kept thing lies at a path, whole or absent. Its inputs stand among its facts, or as a digest in its name. What is
absent, cut, damaged or made of other inputs is made anew. `harness/rows/stored.py` lists the kinds of files that the
bench keeps beside its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Facts = Mapping[str, Any]


def digest(*inputs: object) -> str:
    """Return the SHA-256 of the text of some inputs, for the name of what is made of them."""
    return sha256(" ".join(map(str, inputs)).encode()).hexdigest()


def named(path: Path) -> Facts:
    """Return no facts: the inputs of the thing are in its name. Raises OSError where there is none."""
    path.stat()
    return {}


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Things of one form on disk.

    `write(path, thing, inputs)` puts a thing in place whole, and its inputs among its facts. `read` and `facts` raise
    an error of `lost` for what is absent, cut or damaged.
    """

    read: Callable[[Path], T]
    write: Callable[[Path, T, Facts], object]
    facts: Callable[[Path], Facts] = named
    lost: tuple[type[Exception], ...] = (OSError,)

    def current(self, path: Path, inputs: Facts, lost: Callable[[], object] = lambda: None) -> Facts | None:
        """Return the facts of the thing at `path` if it was made of these inputs, which JSON can hold; else None.

        `lost` is called for what cannot be read.
        """
        try:
            facts = self.facts(path)
            return facts if _text({key: facts[key] for key in inputs if key in facts}) == _text(inputs) else None
        except self.lost:
            lost()
            return None

    def kept(self, path: Path, inputs: Facts, make: Callable[[], T]) -> T:
        """Return the thing at `path` if it was made of these inputs; else make it, and write it there."""
        if self.current(path, inputs) is not None:
            with suppress(*self.lost):
                return self.read(path)
        thing = make()
        self.write(path, thing, inputs)
        return thing


def _text(facts: Facts) -> str:
    return json.dumps(dict(facts), sort_keys=True)
