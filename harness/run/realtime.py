"""The duration of runs on an engine in real time, known before they begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.loop.replay import missing
from harness.policy.types import Infeasible, Unsupported
from harness.run.setup import Setup, blamed
from harness.run.spec import Spec

MINUTE_S, HOUR_S = 60.0, 3600.0


class Span(NamedTuple):
    """The seconds of a run in real time, without the time that its servers take to start."""

    warmup_s: float
    window_s: float  # inf: a closed loop, until its last request has ended
    drain_s: float  # the most seconds after the window; inf: until its last request has ended

    @property
    def least_s(self) -> float:
        """The seconds of the run if all requests have ended by the end of the window."""
        return self.warmup_s + (self.window_s if math.isfinite(self.window_s) else 0.0)

    @property
    def most_s(self) -> float:
        """The seconds of the run if some request never ends."""
        return self.warmup_s + self.window_s + self.drain_s

    @property
    def text(self) -> str:
        """The warm-up, window and drain in words, with their seconds."""
        warmup = f"{self.warmup_s:g} s of warm-up + " if self.warmup_s else ""
        window = f"{self.window_s:g} s" if math.isfinite(self.window_s) else "its requests"
        drain = f" + up to {self.drain_s:g} s of drain" if math.isfinite(self.drain_s) else " + drain"
        return warmup + window + drain * (self.drain_s > 0)


def span(spec: Spec, drain_s: float | None = None) -> Span | None:
    """Return the span of a resolved spec's run; None if time is simulated.

    `drain_s` is used if the spec sets no drain time.
    """
    if not spec.measured_on:
        return None
    drain_s = spec.drain_s if spec.drain_s is not None else drain_s
    closed = spec.window_s is None
    return Span(
        spec.warmup_s or 0.0,
        math.inf if closed else spec.window_s or 0.0,
        math.inf if drain_s is None or closed else drain_s,
    )


def lacking(spec: Spec, *, here: bool = False) -> str:
    """Say why a resolved spec cannot run: what the engine lacks, or why there is no room; "" if it can run.

    With `here`, also name anything that this machine lacks to start the engine. Raises Failed if the policy fails.
    """
    with blamed(spec):
        try:
            setup = Setup(spec)
            lacks = ", ".join(missing(setup.policy, setup.engine)) or (setup.engine.lacks if here else "")
        except Unsupported as why:
            lacks = str(why)
        except Infeasible as why:
            return str(why)
    return f"no {lacks}" if lacks else ""


def duration(spans: Iterable[Span]) -> str:
    """Say how long the runs take together: `4 runs x (60 s of warm-up + 60 s + up to 60 s of drain): 8 to 12 min`."""
    every = list(spans)
    kinds = list(dict.fromkeys(every))
    parts = f" x ({kinds[0].text})" if len(kinds) == 1 else ""
    return f"{len(every)} {'run' if len(every) == 1 else 'runs'}{parts}: {range_of(every)}"


def range_of(spans: Sequence[Span]) -> str:
    """Say how long the runs take together, as a range: `8 to 12 min`, `at least 8 min`."""
    least, most = sum(span.least_s for span in spans), sum(span.most_s for span in spans)
    if math.isinf(most):
        return f"at least {_time(least, math.floor)}"
    low, high = _time(least, math.floor), _time(most, math.ceil)
    unit = high[high.index(" ") :]
    return high if low == high else f"{low.removesuffix(unit)} to {high}"


def _time(seconds: float, whole: Callable[[float], int]) -> str:
    """Render a time: in seconds below two minutes, in minutes below two hours, else in hours to a tenth."""
    if seconds < 2 * MINUTE_S:
        return f"{whole(seconds)} s"
    if seconds < 2 * HOUR_S:
        return f"{whole(seconds / MINUTE_S)} min"
    return f"{whole(10 * seconds / HOUR_S) / 10:g} h"
