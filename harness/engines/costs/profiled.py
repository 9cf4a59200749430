"""Measured seconds of steps; if a spec's `profile` names a file of them, policies see these seconds.

Otherwise policies see the cost table's seconds.

The file has the form of MuxServe's own profile (hao-ai-lab/MuxServe 2231480, examples/placement/llama.json and its
README.md). It states milliseconds of a prefill ("prefill") and of a decode step ("decoding"). The keys are model, GPUs
of a tensor-parallel group, per cent of the SMs, batch and sequence length. A value of 0 or less stands for no
measurement.

Between measured points, seconds are interpolated linearly. The seconds of a prefill depend on its tokens, batch x
length. Measurements with equal batch x length are averaged. The seconds of a decode step depend on the number of
sequences and on their mean context. Below the least point, seconds are constant. MuxServe's estimator adds seconds of
scheduling for each sequence (muxserve/muxsched/placement.py, get_latency); a decode step here includes them. MuxServe's
code does not interpolate: it takes the next larger batch, and means over lengths.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.costs.shapes import beyond_dense
from harness.policy.types import Gpus, Host, Inst, Profile, Shape, UserError

SCHEDULING_S = {"llama-7b": 1e-4, "llama-13b": 8e-5}  # placement.py, get_latency: of a sequence in a decode step
OTHER_SCHEDULING_S = 7e-5  # the same, of larger models
FORM = "model, GPUs, per cent of SMs, batch, length, then prefill and decoding in ms, as MuxServe's llama.json has it"


class Curve(NamedTuple):
    """A function given by points (x, y), in ascending order of x."""

    x: Sequence[float]
    y: Sequence[float]

    def at(self, x: float) -> float:
        """Return y at `x`, interpolated linearly between the points.

        Before the first point, y is constant. Beyond the last point, the curve continues the line through the last two,
        but never falls.
        """
        i = min(max(bisect_left(self.x, x), 1), len(self.x) - 1)
        if i < 1 or x <= self.x[0]:
            return self.y[0]
        slope = (self.y[i] - self.y[i - 1]) / (self.x[i] - self.x[i - 1])
        if x > self.x[-1]:
            return self.y[-1] + max(slope, 0.0) * (x - self.x[-1])
        return self.y[i - 1] + slope * (x - self.x[i - 1])


class Steps(NamedTuple):
    """The measured seconds of a model's steps on a number of GPUs, on a share of each GPU's SMs."""

    prefill: Curve  # over tokens
    decode: Sequence[tuple[int, Curve]]  # (sequences, seconds over the context of one)


Measured = Mapping[str, Mapping[int, Mapping[int, Steps]]]  # by model, GPUs and per cent of SMs, ascending


def read(path: str) -> Measured:
    """Read a file of measured steps. Raises UserError, which names the file and the key of a mistake."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise UserError(f"profile {path}: not a file")
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from None


@lru_cache(4)
def _read(path: str, stamp: int) -> Measured:  # noqa: ARG001 - the stamp is part of the key
    try:
        values = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"profile {path}: not JSON: {error}") from None
    measured: dict[str, dict[int, dict[int, Steps]]] = {}
    for model, gpus, share, points in _levels(path, values):
        where = f"profile {path}: {model}, {gpus} GPU(s), {share} % of the SMs"
        measured.setdefault(model, {}).setdefault(gpus, {})[share] = _steps(points, where)
    return {m: {n: dict(sorted(by.items())) for n, by in sorted(of.items())} for m, of in measured.items()}


def _levels(path: str, values: Any) -> list[tuple[str, int, int, Any]]:
    try:
        return [
            (m, int(n), int(share), at) for m, of in values.items() for n, by in of.items() for share, at in by.items()
        ]
    except (AttributeError, ValueError):
        raise UserError(f"profile {path}: not a file of {FORM}") from None


def _steps(points: Any, where: str) -> Steps:
    """Return a model's measured steps on a share of the SMs, without the points that were not measured.

    The points of the longest prompts may be missing. Raises UserError if all prefills are missing, if all decode steps
    are missing, or if the points do not have the form of the file (see the module).
    """
    prefill: dict[int, list[float]] = {}
    decode: dict[int, dict[int, float]] = {}
    try:
        for batch, lengths in points.items():
            for length, ms in lengths.items():
                if ms["prefill"] > 0:
                    prefill.setdefault(int(batch) * int(length), []).append(ms["prefill"] / 1e3)
                if ms["decoding"] > 0:
                    decode.setdefault(int(batch), {})[int(length)] = ms["decoding"] / 1e3
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{where}: not {FORM}") from None
    if not prefill or not decode:
        raise UserError(f"{where}: {'decode steps' if prefill else 'prefills'} were not measured")
    means = [(tokens, sum(each) / len(each)) for tokens, each in sorted(prefill.items())]
    return Steps(_curve(means), [(batch, _curve(sorted(by.items()))) for batch, by in sorted(decode.items())])


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    return Curve(*zip(*points, strict=True))


def degrees(path: str, shape: Shape) -> tuple[int, ...]:
    """Return the tensor-parallel degrees at which a model was measured.

    Raises UserError if there are none, or if the model's shape has data or expert parallelism.
    """
    measured = read(path)
    if shape.name not in measured:
        raise UserError(f"profile {path}: {shape.name} was not measured ({', '.join(sorted(measured))} were)")
    if shape.dp > 1 or shape.ep > 1:
        raise UserError(f"profile {path}: {shape.name} was measured without {beyond_dense(shape)}")
    return tuple(measured[shape.name])


def measured_profile(path: str, models: Mapping[str, tuple[Shape, int]], sms: int, table: Profile) -> MeasuredProfile:
    """Return the profile of measured steps for models, each with its shape and tensor-parallel degree.

    `sms` is the number of SMs of a GPU. `table` is the profile that answers all queries but those of prefills and
    decode steps. Raises UserError if a model was not measured at its degree.
    """
    for shape, tp in models.values():
        if tp not in (known := degrees(path, shape)):
            counts = ", ".join(map(str, known))
            raise UserError(f"profile {path}: {shape.name} was not measured on {tp} GPU(s), but on {counts}")
    return MeasuredProfile(read(path), {name: shape.name for name, (shape, _) in models.items()}, sms, table)


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """`types.Profile` with the measured seconds of prefills and decode steps; all else comes from the cost table.

    The degrees at which a model may be served are those at which it was measured (`degrees`).
    """

    measured: Measured
    shapes: Mapping[str, str]  # the shape of each model, as `measured` names it
    sms: int  # a GPU's
    table: Profile

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a prefill of `tokens` tokens alone on its GPUs."""
        return self._shared(inst, sms, lambda steps: steps.prefill.at(tokens))

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a decode step of `seqs` sequences with `ctx_tokens` tokens of context in all."""
        if seqs == 0:
            return 0.0
        length = ctx_tokens / seqs

        def decode(steps: Steps) -> float:
            i = min(max(bisect_left(steps.decode, seqs, key=lambda by: by[0]), 1), len(steps.decode) - 1)
            near = steps.decode[max(i - 1, 0) : i + 1]
            return Curve([batch for batch, _ in near], [curve.at(length) for _, curve in near]).at(seqs)

        each_s = SCHEDULING_S.get(self.shapes[inst.model], OTHER_SCHEDULING_S)
        return self._shared(inst, sms, decode) + each_s * seqs

    def attend_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """See `Profile`."""
        return self.table.attend_s(inst, seqs, ctx_tokens, sms)

    def kernels_s(self, inst: Inst, seqs: int, ctx_tokens: int) -> tuple[float, ...]:
        """See `Profile`."""
        return self.table.kernels_s(inst, seqs, ctx_tokens)

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        """See `Profile`."""
        return self.table.load_s(inst, way, from_disk=from_disk)

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        """See `Profile`."""
        return self.table.move_s(kv_bytes, src, dst)

    def _shared(self, inst: Inst, sms: int | None, seconds: Callable[[Steps], float]) -> float:
        """Return `seconds` for `sms` SMs (None: all), interpolated between the two nearest measured shares."""
        place: Gpus = inst.place if isinstance(inst.place, tuple) else (0,)
        by_share = self.measured[self.shapes[inst.model]][len(place)]
        shares, share = list(by_share), 100.0 if sms is None else 100.0 * sms / self.sms
        i = min(max(bisect_left(shares, share), 1), len(shares) - 1)
        near = shares[max(i - 1, 0) : i + 1]
        return Curve(near, [seconds(by_share[percent]) for percent in near]).at(share)
