"""Model shapes and named sets of models, as data: `shapes.toml`, `sets/*.toml`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from harness.policy.types import Shape, UserError

HERE = Path(__file__).parent
MOST_MODELS = 1000
SIZES = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "ffn", "vocab", "context")


@dataclass(frozen=True, slots=True)
class Served:
    """One model of a set, and the trace's stream that was released for it (none: by order, or by popularity)."""

    name: str  # unique in its set
    shape: Shape
    tp: int = 1
    stream: str | None = None
    shift_s: float = 0.0  # the stream comes so much later, as where a released set uses it again
    released_s: tuple[float, float] | None = None  # TTFT, TPOT: the authors' SLO base, before the scale


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The models that share the GPUs, hottest streams not necessarily first."""

    name: str
    members: tuple[Served, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order; a job's `model` indexes them."""
        return tuple(member.name for member in self.members)

    @property
    def streams(self) -> tuple[tuple[str | None, float], ...]:
        """The trace's stream that was released for each model, and its shift in seconds."""
        return tuple((member.stream, member.shift_s) for member in self.members)

    def serving(self, most: int) -> ModelSet:
        """The same models, none of which serves more than `most` tokens of prompt and output."""
        cut = (m.shape._replace(max_tokens=min(m.shape.max_tokens, most)) for m in self.members)
        return replace(self, members=tuple(replace(m, shape=one) for m, one in zip(self.members, cut, strict=True)))


@cache
def shapes() -> dict[str, Shape]:
    """Every shape of `shapes.toml` by name."""
    path = HERE / "shapes.toml"
    data = _toml(path)
    _known(path.name, "", data, {"shapes"})
    return {name: _shape(path.name, name, row) for name, row in data["shapes"].items()}


def shape(name: str) -> Shape:
    """One shape; UserError with a suggestion where there is none of that name."""
    if name not in shapes():
        raise UserError(f'no model "{name}"{_meant(name, shapes())} (workloads/shapes.toml lists them)')
    return shapes()[name]


def sets() -> tuple[str, ...]:
    """Names of the sets that come with the bench."""
    return tuple(sorted(path.stem for path in (HERE / "sets").glob("*.toml")))


def model_set(name: str) -> ModelSet:
    """Load a set by name, by the path of its TOML, or as shapes ("llama-3.1-8b,llama-3.2-1b*3").

    SET+models=N is N models of a set by name, its list begun again as often as it takes. UserError names the file and
    key of a mistake.
    """
    head, plus, count = name.partition("+models=")
    if plus and head in sets():
        return _sized(name, model_set(head), _times(name, count))
    if name in sets():
        return _set(HERE / "sets" / f"{name}.toml")
    if name.endswith(".toml"):
        return _set(Path(name))
    parts = [part.strip().partition("*") for part in name.split(",")]
    if len(parts) == 1 and not parts[0][1] and parts[0][0] not in shapes():
        raise UserError(f'no model set "{name}"{_meant(name, (*sets(), *shapes()))} (bench list)')
    names = [one for one, star, times in parts for _ in range(_times(name, times) if star else 1)]
    return ModelSet(name, tuple(Served(f"{one}/{names[:i].count(one) + 1}", shape(one)) for i, one in enumerate(names)))


def _sized(name: str, base: ModelSet, count: int) -> ModelSet:
    if count > MOST_MODELS:
        raise UserError(f'model set "{name}": models is {count}, above {MOST_MODELS}')
    if any(one.stream is not None for one in base.members):
        raise UserError(f'model set "{name}": {base.name} names a stream for each model, so it has no other size')
    every = [base.members[i % len(base.members)] for i in range(count)]
    shapes = [one.shape.name for one in every]
    names = (f"{one}/{shapes[:i].count(one) + 1}" for i, one in enumerate(shapes))
    return ModelSet(name, tuple(replace(one, name=new) for one, new in zip(every, names, strict=True)))


def _set(path: Path) -> ModelSet:
    data = _toml(path)
    _known(path.name, "", data, {"source", "model"})
    rows = data.get("model")
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: no [[model]] in it")
    members = tuple(_served(path.name, i, row) for i, row in enumerate(rows, 1))
    names = [member.name for member in members]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'{path.name}: name "{twice}" is used twice')
    streams = [(member.stream, member.shift_s) for member in members if member.stream is not None]
    if same := next((pair for pair in streams if streams.count(pair) > 1), None):
        raise UserError(f'{path.name}: stream "{same[0]}" is used twice with shift_s = {same[1]:g}')
    return ModelSet(path.stem, members)


def _served(file: str, i: int, row: Mapping[str, Any]) -> Served:
    where = f"model {i}: "
    _known(file, where, row, {"name", "shape", "tp", "stream", "shift_s", "released"})
    for key in ("name", "shape"):
        if not isinstance(row.get(key), str):
            raise UserError(f'{file}: {where}"{key}" is missing or not a string')
    released = row.get("released")
    if released is not None:
        _known(file, where, released, {"ttft_s", "tpot_s"})
        released = (float(released["ttft_s"]), float(released["tpot_s"]))
    shift_s = row.get("shift_s", 0.0)
    if not isinstance(shift_s, int | float) or isinstance(shift_s, bool) or not math.isfinite(shift_s):
        raise UserError(f"{file}: {where}shift_s is {shift_s!r}, not seconds")
    tp = _count(file, f"{where}tp", row.get("tp", 1))
    return Served(row["name"], shape(row["shape"]), tp, row.get("stream"), float(shift_s), released)


def _shape(file: str, name: str, row: Mapping[str, Any]) -> Shape:
    _known(file, f"{name}: ", row, {*SIZES, "gated", "tied", "sampled"})
    *sizes, context = (_count(file, f"{name}.{key}", row.get(key)) for key in SIZES)
    sampled = row.get("sampled", False)
    if not all(isinstance(x, bool) for x in (row.get("gated"), row.get("tied"), sampled)):
        raise UserError(f"{file}: {name}: gated, tied and sampled are true or false")
    return Shape._make((name, *sizes, row["gated"], row["tied"], context, sampled))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _known(file: str, where: str, row: Mapping[str, Any], keys: set[str]) -> None:
    if unknown := next((key for key in row if key not in keys), None):
        raise UserError(f'{file}: {where}unknown key "{unknown}"{_meant(unknown, keys)}')


def _count(file: str, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{file}: {key} is {value!r}, not a positive integer")
    return value


def _times(name: str, text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise UserError(f'model set "{name}": "{text}" is not a count of models')
    return int(text)


def _meant(name: str, names: Mapping[str, object] | set[str] | tuple[str, ...]) -> str:
    close = get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""
