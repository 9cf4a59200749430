"""Model shapes and named sets of models, as data: `shapes.toml`, `checkpoints.toml`, `sets/*.toml`.

A model is written NAME[:dtype=FORMAT][:kv_dtype=FORMAT][:dp=N][:ep=N]. NAME is the name of a shape, its id on
huggingface.co, or the path of a checkpoint (`checkpoint.py`). In a list of models it may also have [:tp=N].
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le, MinLen

from harness import toml
from harness.policy.fields import meant
from harness.policy.types import Shape, UserError
from harness.toml import MOST_S, Count, Positive
from workloads import checkpoint, quantised

HERE = Path(__file__).parent
MOST_MODELS = 1000
COUNT = re.compile(r"[0-9]{1,18}")
COUNTS = ("tp", "dp", "ep")  # counts of GPUs, of groups of them for attention, of parts of the experts
QUALIFIERS = ("tp", "dtype", "kv_dtype", "dp", "ep")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An entry of `shapes.toml`: the fields of a Shape in the same order, and the repository."""

    layers: Count  # number of layers
    hidden: Count  # hidden size
    q_heads: Count  # query heads
    kv_heads: Count  # KV heads
    head_dim: Count  # dimension of a head
    ffn: Count  # hidden size of the feed-forward part
    vocab: Count  # size of the vocabulary
    gated: bool  # whether the feed-forward part is gated (three matrices)
    tied: bool  # whether input and output embeddings are one
    context: Count  # longest prompt + output
    sampled: bool = False  # whether its defaults set top-p or top-k
    repo: str = ""  # id on huggingface.co, a second name

    def shape(self, name: str) -> Shape:
        """Return the shape from which the simulator computes the times of steps and the memory."""
        return Shape(name, *astuple(self)[:-1])


@dataclass(frozen=True, slots=True)
class Shapes:
    """The contents of `shapes.toml`: shapes by name."""

    shapes: Mapping[str, Checkpoint]


@dataclass(frozen=True, slots=True)
class Published:
    """The published size of a checkpoint's weights: bytes of its files, or parameters."""

    source: str
    bytes: Count | None = None
    params: Count | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """An entry of `checkpoints.toml`: the config and the published size of a checkpoint."""

    repo: str
    config: Mapping[str, Any]
    published: Published
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The contents of `checkpoints.toml`: checkpoints by name."""

    checkpoints: Mapping[str, Named]


class Asked(NamedTuple):
    """A model as the user writes it: NAME[:tp=N][:dtype=FORMAT][:kv_dtype=FORMAT][:dp=N][:ep=N]."""

    name: str
    tp: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    dp: int | None = None
    ep: int | None = None


@dataclass(frozen=True, slots=True)
class Seconds:
    """An SLO in seconds."""

    ttft_s: Positive  # time to first token
    tpot_s: Positive  # time per output token after it


@dataclass(frozen=True, slots=True)
class Member:
    """A model in the file of a set."""

    name: str  # unique in the set
    shape: str  # a shape by name or id (bench list models)
    tp: Count = 1  # GPUs over which it is cut
    stream: str | None = None  # the trace's stream that it gets
    shift_s: Annotated[float, Ge(-MOST_S), Le(MOST_S)] = 0.0  # seconds by which that stream comes later
    released: Seconds | None = None  # SLO base that the set's authors released

    def __post_init__(self) -> None:
        for key in ("name", "stream"):
            text = getattr(self, key)
            if text is not None and not (text and text.isprintable()):
                raise ValueError(f"{key} is {toml.shown(text)}, not a name")
        if parsed(self.shape).tp is not None:
            raise ValueError(f'shape "{self.shape}" states a degree; that of a member of a set is its tp')
        try:
            _cut(self.shape, shape(self.shape), self.tp)
        except UserError as error:
            raise ValueError(str(error)) from None

    @property
    def served(self) -> Served:
        """The model with the shape that its field `shape` names."""
        base = None if self.released is None else (self.released.ttft_s, self.released.tpot_s)
        return Served(self.name, shape(self.shape), self.tp, self.stream, self.shift_s, base)


@dataclass(frozen=True, slots=True)
class SetFile:
    """The contents of a file of a set, `sets/*.toml`."""

    model: Annotated[tuple[Member, ...], MinLen(1)]  # the models
    source: str = ""  # origin of the set
    trace: str = ""  # names the traffic that the set is compared on unless another is asked for

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
    """A model of a set, with its shape and with the stream that the set's authors assigned to it.

    If `stream` is None, the model gets a stream by name, order or popularity (`picking.assigned`).
    """

    name: str  # unique in its set
    shape: Shape
    tp: int = 1
    stream: str | None = None
    shift_s: float = 0.0  # by which the stream comes later, as where a released set uses it again
    released_s: tuple[float, float] | None = None  # TTFT, TPOT: the authors' SLO base, before the scale


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The models that share the GPUs; they need not be in order of their traffic."""

    name: str
    members: tuple[Served, ...]
    trace: str = ""  # name of the set's own trace

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names; the field `model` of the jobs is an index into them."""
        return tuple(member.name for member in self.members)

    @property
    def streams(self) -> tuple[tuple[str | None, float], ...]:
        """The released stream of each model (None if there is none), and the stream's shift in seconds."""
        return tuple((member.stream, member.shift_s) for member in self.members)

    def serving(self, most: int) -> ModelSet:
        """Return the same set, where no model serves requests of more than `most` tokens (prompt + output)."""
        cut = (m.shape._replace(max_tokens=min(m.shape.max_tokens, most)) for m in self.members)
        return replace(
            self, members=tuple(replace(m, shape=shorter) for m, shorter in zip(self.members, cut, strict=True))
        )


@cache
def shapes() -> dict[str, Shape]:
    """Return every shape of `shapes.toml` and `checkpoints.toml` by name."""
    named = {
        name: checkpoint.of_config(name, entry.config, name).shape._replace(sampled=entry.sampled)
        for name, entry in checkpoints().items()
    }
    return read_shapes(HERE / "shapes.toml") | named


@cache
def repos() -> Mapping[str, str]:
    """Return the names of shapes, keyed by their ids on huggingface.co, such as `Qwen/Qwen3-14B`."""
    listed: dict[str, Checkpoint | Named] = {**toml.read(HERE / "shapes.toml", Shapes).shapes, **checkpoints()}
    return {entry.repo: name for name, entry in listed.items() if entry.repo}


def repo(text: str) -> str:
    """Return a model's id on huggingface.co; its name or path if it has none."""
    name = parsed(text).name
    return next((repo for repo, shape in repos().items() if shape == name), name)


def named(name: str) -> str:
    """Return the name of the shape that has this id on huggingface.co.

    Any other name, or a path that exists, is returned as it is.
    """
    return name if "/" not in name or Path(name).exists() else repos().get(name, name)


@cache
def checkpoints() -> Mapping[str, Named]:
    """Return every checkpoint of `checkpoints.toml` by name."""
    return toml.read(HERE / "checkpoints.toml", Checkpoints).checkpoints


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes, by name, of a file in the format of `shapes.toml`."""
    return {name: entry.shape(name) for name, entry in toml.read(path, Shapes).shapes.items()}


def shape(text: str) -> Shape:
    """Return the shape of a model in the number formats that `text` states; `text` has the form of `Asked`.

    UserError suggests a similar name if there is no such model.
    """
    name, _, dtype, kv_dtype, dp, ep = parsed(text)
    if "/" in name and not Path(name).exists():
        longer = [repo for repo in repos() if repo.startswith(name)]  # "-Instruct" forgotten
        if hint := meant(name, longer or repos()):
            raise UserError(f'no model "{name}"{hint} (bench list models)')
    if checkpoint.is_checkpoint(name):
        made = checkpoint.read(name, dtype, kv_dtype)
    elif name in shapes():
        made = quantised.loaded(shapes()[name], name, dtype, kv_dtype)
    else:
        raise UserError(f'no model "{name}"{meant(name, shapes())} (bench list models)')
    if (ep or 1) > 1 and made.experts is None:
        raise UserError(f'model "{text}": ep={ep} divides experts among GPUs, and {made.name} has none')
    if made.experts is not None and made.experts.routed % (ep or 1):
        raise UserError(f'model "{text}": {made.experts.routed} experts do not divide by ep={ep}')
    return made._replace(dp=dp or 1, ep=ep or 1)


def _cut(text: str, shape: Shape, tp: int) -> None:
    """Raise UserError unless `tp`, the model's number of GPUs, is a multiple of its `dp` and of its `ep`."""
    for name, parts in (("dp", shape.dp), ("ep", shape.ep)):
        if tp % parts:
            raise UserError(f'model "{text}": {name}={parts} does not divide its {tp} GPU{"s" * (tp > 1)} (tp={tp})')


def parsed(text: str) -> Asked:
    """Parse a model in the form of `Asked`.

    Raises UserError for a qualifier that is unknown, malformed or stated twice.
    """
    name, *qualifiers = text.split(":")
    entry: dict[str, Any] = {}
    for part in qualifiers:
        key, equals, value = part.partition("=")
        if key not in QUALIFIERS or not equals or not value or key in entry:
            known = ", ".join(f"{key}=" for key in QUALIFIERS)
            raise UserError(f'model "{text}": "{part}" is no qualifier{meant(key, QUALIFIERS)} ({known}; each once)')
        entry[key] = value
    for key in COUNTS:
        if key in entry:
            if not COUNT.fullmatch(entry[key]) or int(entry[key]) < 1:
                raise UserError(f'model "{text}": {key} is "{entry[key]}", not a count of GPUs')
            entry[key] = int(entry[key])
    return Asked(named(name), **entry)


def with_files(models: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the paths of checkpoints in a list of models, and replace ids by the names of shapes.

    The name or the file of a model set is returned as it is.
    """
    if models.endswith(".toml") or not ("/" in models or ".json" in models or ".gguf" in models):
        return models
    return ",".join(_changed(part.strip(), change) for part in models.split(","))


def _changed(part: str, change: Callable[[str], str]) -> str:
    model, star, count = part.partition("*")
    name, colon, qualifiers = model.partition(":")
    name = named(name)
    return (change(name) if checkpoint.is_checkpoint(name) else name) + colon + qualifiers + star + count


def sets() -> tuple[str, ...]:
    """Return the names of the sets that come with the bench."""
    return tuple(sorted(path.stem for path in (HERE / "sets").glob("*.toml")))


def model_set(name: str) -> ModelSet:
    """Load a model set by name, from a TOML file, or from a list as in "llama-3.1-8b,m/config.json:tp=2:dtype=fp8*3".

    SET+models=N gives N models: those of a named set, whose list is cut or repeated to this length. UserError names the
    mistake, and for a file also the key.
    """
    head, plus, count = name.partition("+models=")
    if plus and head in sets():
        return _sized(name, model_set(head), _times(name, count))
    if name in sets():
        return _set(HERE / "sets" / f"{name}.toml")
    if name.endswith(".toml"):
        return _set(Path(name))
    if not ({",", "*"} & {*name} or _is_model(name.strip())):
        raise UserError(f'no model set "{name}"{meant(name, (*sets(), *shapes()))} (bench list models)')
    texts = _listed(name)
    entries = {text: (shape(text), parsed(text).tp or 1) for text in texts}
    for text, (entry, tp) in entries.items():
        _cut(text, entry, tp)
    labels = _numbered(entries[text][0].name for text in texts)
    return ModelSet(name, tuple(Served(label, *entries[text]) for label, text in zip(labels, texts, strict=True)))


def _listed(name: str) -> list[str]:
    """Return the text of each model of a list, in which MODEL*N stands for N models.

    Raises UserError for a bad count or too many models.
    """
    parts = [part.strip().partition("*") for part in name.split(",")]
    times = [_times(name, count) if star else 1 for _, star, count in parts]
    if sum(times) > MOST_MODELS:
        raise UserError(f'model set "{name}" has {sum(times)} models, above {MOST_MODELS}')
    return [text for (text, *_), n in zip(parts, times, strict=True) for _ in range(n)]


def _numbered(names: Iterable[str]) -> Iterator[str]:
    """Yield each name with a number that makes equal names different: phi-2/1, phi-2/2."""
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield f"{name}/{seen[name]}"


def as_asked(name: str) -> tuple[str, ...]:
    """Return the text of each model of a set: the name or path of its shape, with its qualifiers except `tp`.

    A file of a set states its models in this form. Paths of checkpoints are absolute. UserError as for `model_set`.
    """
    every = model_set(name).members
    head = name.partition("+models=")[0]
    path = HERE / "sets" / f"{head}.toml" if head in sets() else Path(name) if name.endswith(".toml") else None
    texts = _listed(name) if path is None else [member.shape for member in toml.read(path, SetFile).model]
    return tuple(_stated(texts[k % len(texts)]) for k in range(len(every)))


def _stated(text: str) -> str:
    """Return a model's text without `tp`, for which a set's file has a separate field; paths become absolute."""
    entry = parsed(text)
    path = os.path.abspath(entry.name) if checkpoint.is_checkpoint(entry.name) else entry.name  # noqa: PTH100
    stated = {key: getattr(entry, key) for key in QUALIFIERS if key != "tp"}
    return path + "".join(f":{key}={value}" for key, value in stated.items() if value is not None)


def _is_model(text: str) -> bool:
    """Tell whether the text given for a model set names a single model."""
    return ":" in text or checkpoint.is_checkpoint(text) or text in shapes()


def _sized(name: str, base: ModelSet, count: int) -> ModelSet:
    if count > MOST_MODELS:
        raise UserError(f'model set "{name}": models is {count}, above {MOST_MODELS}')
    if any(member.stream is not None for member in base.members):
        raise UserError(f'model set "{name}": {base.name} names a stream for each model, so it has no other size')
    every = [base.members[i % len(base.members)] for i in range(count)]
    names = _numbered(member.shape.name for member in every)
    return ModelSet(name, tuple(replace(member, name=new) for member, new in zip(every, names, strict=True)))


def _set(path: Path) -> ModelSet:
    file = toml.read(path, SetFile)
    return ModelSet(path.stem, tuple(member.served for member in file.model), file.trace)


def _times(name: str, text: str) -> int:
    if not COUNT.fullmatch(text.strip()) or int(text) < 1:
        raise UserError(f'model set "{name}": "{text}" is not a count of models')
    return int(text)
