"""Bounds of a decoder's dimensions, checked before anything is computed from the numbers of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.policy.parameters import alike, parameters
from harness.policy.types import Shape, UserError

LIMITS: Mapping[str, tuple[int, int]] = {  # least and most of a dimension
    "layers": (1, 1000), "hidden": (1, 10**6), "q_heads": (1, 10**4), "kv_heads": (1, 10**4), "head_dim": (1, 10**5),
    "ffn": (1, 10**7), "vocab": (1, 10**8), "context": (1, 10**8), "experts": (0, 10**5), "top": (0, 10**5),
    "expert_ffn": (1, 10**7), "shared": (0, 1000), "shared_ffn": (0, 10**7), "first_dense": (0, 1000),
    "every": (1, 1000), "draft": (0, 100), "rank": (0, 10**6), "window": (1, 10**8), "vision": (0, 10**6),
}  # fmt: skip
MOST_PARAMETERS = 1e14
SHOWN = 60  # characters of a wrong value


def count(value: Any, name: str, key: str, where: str) -> int:
    """Return `value`, a dimension of a model, if it is a whole number within the bounds that LIMITS has for `name`.

    Raises UserError otherwise, with the file (`where`) and the key.
    """
    least, most = LIMITS[name]
    if type(value) is not int:
        raise UserError(f"{where}: {key} is {shown(value)}, not a count")
    if not least <= value <= most:
        raise UserError(f"{where}: {key} is {shown(value)}, not a count from {least} to {most:,}")
    return value


def shown(value: Any) -> str:
    """Return a value from a file as one line of JSON, cut to SHOWN characters."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # thousands of digits, or lists within lists
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def sound(shape: Shape, where: str) -> Shape:
    """Return the shape unchanged if its dimensions fit together. Raises UserError if they do not."""
    for part in alike(shape):
        if shape.q_heads % part.kv_heads:
            raise UserError(f"{where}: {shape.q_heads} attention heads do not divide among {part.kv_heads} KV heads")
    if (experts := shape.experts) is not None and not 1 <= experts.top <= experts.routed:
        raise UserError(f"{where}: {experts.top} experts of each token, of {experts.routed}")
    if (total := sum(parameters(shape))) > MOST_PARAMETERS:
        raise UserError(f"{where}: its keys make {total:.3g} parameters, above {MOST_PARAMETERS:.0e}")
    return shape
