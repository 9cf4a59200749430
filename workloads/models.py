"""Model shapes and named sets of models, as data: `shapes.toml`, `sets/*.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from harness import toml
from harness.policy.fields import meant
from harness.policy.types import Shape, UserError
from harness.toml import MOST_S, Count, Positive

HERE = Path(__file__).parent
MOST_MODELS = 1000
COUNT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A shape as `shapes.toml` has it."""

    layers: Count
    hidden: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    vocab: Count
    context: Count
    gated: bool
    tied: bool
    sampled: bool = False

    def shape(self, name: str) -> Shape:
        """Return the shape by which steps and memory are priced."""
        return Shape(
            name, self.layers, self.hidden, self.q_heads, self.kv_heads, self.head_dim, self.ffn, self.vocab,
            self.gated, self.tied, self.context, self.sampled,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shapes:
    """The form of `shapes.toml`."""

    shapes: Mapping[str, Checkpoint]


@dataclass(frozen=True, slots=True)
class Seconds:
    """An SLO."""

    ttft_s: Positive
    tpot_s: Positive


@dataclass(frozen=True, slots=True)
class Member:
    """A model as the file of a set has it."""

    name: str
    shape: str
    tp: Count = 1
    stream: str | None = None
    shift_s: Annotated[float, Ge(-MOST_S), Le(MOST_S)] = 0.0
    released: Seconds | None = None

    def __post_init__(self) -> None:
        for key in ("name", "stream"):
            text = getattr(self, key)
            if text is not None and not (text and text.isprintable()):
                raise ValueError(f"{key} is {toml.shown(text)}, not a name")
        if self.shape not in shapes():
            raise ValueError(_no_model(self.shape))

    @property
    def served(self) -> Served:
        """The model with its shape."""
        base = None if self.released is None else (self.released.ttft_s, self.released.tpot_s)
        return Served(self.name, shape(self.shape), self.tp, self.stream, self.shift_s, base)


@dataclass(frozen=True, slots=True)
class SetFile:
    """The form of `sets/*.toml`."""

    model: Annotated[tuple[Member, ...], MinLen(1)]
    source: str = ""

    def __post_init__(self) -> None:
        names = [member.name for member in self.model]
        if len(names) > MOST_MODELS:
            raise ValueError(f"{len(names)} models, above {MOST_MODELS}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'name "{twice}" is used twice')
        streams = [(member.stream, member.shift_s) for member in self.model if member.stream is not None]
        if same := next((pair for pair in streams if streams.count(pair) > 1), None):
            raise ValueError(f'stream "{same[0]}" is used twice with shift_s = {same[1]:g}')


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
        """Return the same models, none of which serves more than `most` tokens of prompt and output."""
        cut = (m.shape._replace(max_tokens=min(m.shape.max_tokens, most)) for m in self.members)
        return replace(
            self, members=tuple(replace(m, shape=shorter) for m, shorter in zip(self.members, cut, strict=True))
        )


@cache
def shapes() -> dict[str, Shape]:
    """Every shape of `shapes.toml` by name."""
    return read_shapes(HERE / "shapes.toml")


def read_shapes(path: Path) -> dict[str, Shape]:
    """Read the shapes of a file of the form of `shapes.toml`, by name."""
    return {name: checkpoint.shape(name) for name, checkpoint in toml.read(path, Shapes).shapes.items()}


def shape(name: str) -> Shape:
    """One shape; UserError with a suggestion where there is none of that name."""
    if name not in shapes():
        raise UserError(_no_model(name))
    return shapes()[name]


def _no_model(name: str) -> str:
    return f'no model "{name}"{meant(name, shapes())} (workloads/shapes.toml lists them)'


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
        raise UserError(f'no model set "{name}"{meant(name, (*sets(), *shapes()))} (bench list)')
    times = [_times(name, count) if star else 1 for _, star, count in parts]
    if sum(times) > MOST_MODELS:
        raise UserError(f'model set "{name}" has {sum(times)} models, above {MOST_MODELS}')
    names = [kind for (kind, *_), n in zip(parts, times, strict=True) for _ in range(n)]
    return ModelSet(
        name, tuple(Served(f"{kind}/{names[:i].count(kind) + 1}", shape(kind)) for i, kind in enumerate(names))
    )


def _sized(name: str, base: ModelSet, count: int) -> ModelSet:
    if count > MOST_MODELS:
        raise UserError(f'model set "{name}": models is {count}, above {MOST_MODELS}')
    if any(member.stream is not None for member in base.members):
        raise UserError(f'model set "{name}": {base.name} names a stream for each model, so it has no other size')
    every = [base.members[i % len(base.members)] for i in range(count)]
    shapes = [member.shape.name for member in every]
    names = (f"{kind}/{shapes[:i].count(kind) + 1}" for i, kind in enumerate(shapes))
    return ModelSet(name, tuple(replace(member, name=new) for member, new in zip(every, names, strict=True)))


def _set(path: Path) -> ModelSet:
    return ModelSet(path.stem, tuple(member.served for member in toml.read(path, SetFile).model))


def _times(name: str, text: str) -> int:
    if not COUNT.fullmatch(text.strip()) or int(text) < 1:
        raise UserError(f'model set "{name}": "{text}" is not a count of models')
    return int(text)
