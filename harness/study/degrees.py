"""The smallest degrees of tensor parallelism with which the models of a set fit on a kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

from harness.policy import mix
from harness.policy.types import GIB, UserError
from harness.rows import record
from harness.run.resolve import alone
from harness.run.setup import Setup, load_models
from harness.run.spec import Spec, from_dict
from traces.load import sized
from workloads.models import as_asked

FULL = 0.92  # share of a GPU that weights and one request may take where a degree is chosen


class NoRoom(UserError):
    """The error that a model does not fit on a kind of GPU at any degree."""


def fitting(setting: Mapping[str, Any], kind: str, most: int, out: Path) -> tuple[str, dict[str, int]]:
    """Return the model set with the smallest degree of parallelism at which each model fits on a kind of GPU.

    A model that fits at its degree in the set keeps this degree. If no degree changes, the set itself is returned. The
    changed degrees are returned too, by model. Raises NoRoom for a model that fits at no degree.
    """
    models = str(setting["models"])
    gpus = max(1, most // mix.size(kind)) * mix.size(kind)
    fields = {"system": "unshared", "gpu": kind, "gpus": gpus, "models": models}
    trace = sized(str(setting.get("trace", Spec("").trace)), len(load_models(models).members))
    spec = from_dict({**setting, **fields, "trace": trace})
    setup = Setup(replace(spec, slo=""))  # not resolved, as resolve() refuses a model too large for its GPUs
    cluster, members = setup.cluster, {member.name: member for member in setup.models.members}
    have = max(gpu.mem_bytes for gpu in cluster.gpus)
    room_bytes = FULL * have
    chosen: dict[str, int] = {}
    for name, model in cluster.models.items():
        need = {tp: _bytes(model.at(tp)) for tp in model.degrees if tp >= model.tp}
        fits = [tp for tp, taken in need.items() if taken <= room_bytes and le(*alone(setup, members[name], tp))]
        if not fits:
            raise NoRoom(
                f"{name} needs {min(need.values()) / GIB:.1f} GiB on each of {max(need)} {kind}, which has "
                f"{have / GIB:.1f}"
            )
        if fits[0] != model.tp:
            chosen[name] = fits[0]
    return (with_degrees(models, chosen, out, kind), chosen) if chosen else (models, {})


def with_degrees(models: str, degrees: Mapping[str, int], out: Path, suffix: str) -> str:
    """Write a model set with other degrees of parallelism for some of its models, and return its path."""
    text = ""
    for member, shape in zip(load_models(models).members, as_asked(models), strict=True):
        text += f"[[model]]\nname = {record.dumps(member.name)}\nshape = {record.dumps(shape)}\n"
        text += f"tp = {degrees.get(member.name, member.tp)}\n"
        text += "" if member.stream is None else f"stream = {record.dumps(member.stream)}\n"
        text += f"shift_s = {member.shift_s!r}\n" if member.shift_s else ""
    stem = Path(models).stem.replace("*", "x").replace(",", "_").replace(":", "_")[:60]
    path = out / "sets" / f"{stem}-{suffix.replace('*', 'x').replace('+', '-')}.toml"
    record.write_bytes(path, text.encode())
    return str(path)


def _bytes(model: Any) -> int:
    """Return the bytes on each GPU for a model's weights and for the KV cache of one request of the greatest length."""
    return int(model.weight_bytes + model.kv_token_bytes * model.max_tokens)


def widened(setting: Mapping[str, Any], out: Path) -> tuple[dict[str, Any], str]:
    """Return a setting with degrees raised so that each model fits its GPUs, and a line that names these models.

    The setting is unchanged if all models fit. It is also unchanged if a model fits at no degree, as its run then
    reports why. Degrees are not raised for engines other than the simulator, for cost tables, or for mixes of kinds of
    GPU.
    """
    kind, given = str(setting["gpu"]), {key: value for key, value in setting.items() if value is not None}
    if given.get("engine", "sim") != "sim" or given.get("table") or mix.mixed(kind):
        return dict(setting), ""
    setup = Setup(from_dict({**given, "system": "unshared"}))
    if all(le(*alone(setup, member, member.tp)) for member in setup.models.members):
        return dict(setting), ""
    try:
        models, chosen = fitting(given, kind, int(given["gpus"]), out)
    except NoRoom:
        return dict(setting), ""
    text = ", ".join(f"{name} on {tp} GPUs" for name, tp in chosen.items())
    return {**setting, "models": models}, f"{kind}: {text}, the fewest on which it fits"
