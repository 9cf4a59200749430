"""Fit the constants of the law of rounds (`probe/law.py`) to duels of `make gpu`: the table `co_run` of a card.

A lane is a stream of steps of one model. A duel is a measurement of lanes that run on one GPU at the same time. The fit
takes duels of two lanes. Duels on all SMs determine two kinds of constants. One is the number of layers that a lane
computes per turn. The other is the fraction of a step's time in which its kernels keep the GPU from other lanes. Duels
on disjoint partitions determine how partitions slow each other. The error of each pair of lanes comes from a fit
without that pair.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from harness.calibrate.rows import F8
from harness.engines.costs import quantities
from probe import law, report
from probe.report import Duel

PAIRS = 3  # the fewest pairs of a kind; fewer do not determine the constants
PROMPTS = 512  # tokens of a step that is one of prompts beyond doubt
LEAST, MOST = (1.0, 0.3, 0.3), (10.0, 1.0, 1.0)  # bounds of passes, decode_fill, prompt_fill
GRID = np.round(np.arange(1.0, 2.5, 0.01), 2)  # values tried for apart and crowd


WORKS = {act.work: name for name, act in report.ACTS.items()}  # the probe `interfere` has these names


def duels(folder: Path) -> list[Duel]:
    """Return every measured duel, of two or more lanes, in a folder of `make gpu`."""
    return report.duelled(report.read(folder))


class Fitted(NamedTuple):
    """The fitted constants of the law of rounds, and the relative errors of the lanes of each pair.

    The errors of a pair are those of a fit without that pair.
    """

    rounds: law.Rounds
    whole: F8
    apart: F8

    @property
    def error(self) -> float:
        """The root of the mean square of all errors."""
        return float(np.sqrt(np.mean(np.square(np.concatenate([self.whole, self.apart])))))


def fit(book: report.Book, hbm: float) -> Fitted | None:
    """Fit the constants of the law of rounds to measured pairs of lanes; `hbm` is the bandwidth in bytes/s.

    Return None if fewer than PAIRS pairs on all SMs were measured. If fewer than PAIRS pairs on partitions were
    measured, the constants of partitions stay those of an H200.
    """
    pairs = [duel for duel in report.duelled(book) if _plain(duel)]
    whole = [duel for duel in pairs if not any(work.part for work in duel.works)]
    apart = [duel for duel in pairs if duel.works[0].part and duel.works[0].part != duel.works[1].part]
    if len(whole) < PAIRS:
        return None
    rounds = _apart(apart, _whole(whole), hbm)
    held = [_errors(duel, _whole(_without(duel, whole)), hbm) for duel in whole]
    beside = [_errors(duel, _apart(_without(duel, apart), rounds, hbm), hbm) for duel in apart]
    return Fitted(rounds, np.concatenate(held), np.concatenate([*beside, np.empty(0)]))


def table(
    book: report.Book, hbm: float, origin: str, committed: Mapping[str, Any]
) -> tuple[dict[str, Any], str] | None:
    """Return a card's table `co_run` and a note on it; None if too few pairs were measured.

    `committed` supplies the numbers that duels do not determine.
    """
    if (fitted := fit(book, hbm)) is None:
        return None
    last_s = max(line["t"] for line in book.samples if line["quantity"] in {"lane", "unit"})
    constants = {name: quantities.sig(value, 3) for name, value in fitted.rounds._asdict().items()}
    date = time.strftime("%Y-%m-%d", time.gmtime(last_s))
    error = f"{100 * fitted.error:.1f} % (rms) of pairs left out in turn"
    note = ", ".join(f"{name} {value:g}" for name, value in constants.items())
    n = len(fitted.whole) + len(fitted.apart)
    text = f"co_run: {note}; off by {error}, {n} lanes"
    return {**committed, **constants, "source": f"{origin}: duels, {date}", "error": error}, text


def lanes(duel: Duel, hbm: float) -> list[law.Lane]:
    """Return the lanes of a duel as lanes of the law of rounds; `hbm` is the bandwidth in bytes/s."""
    out = []
    for work, alone_s, layers, moved in zip(duel.works, duel.alone_s, duel.layers, duel.bytes, strict=True):
        duty = alone_s / (alone_s + 1e-3 * work.gap_ms)
        prompts = work.act == "prefill"
        out.append(law.Lane(alone_s / layers, prompts, duty, moved / alone_s / hbm, work.part))
    return out


def _plain(duel: Duel) -> bool:
    """Tell whether a duel has two lanes without gaps or priorities, and steps that are clearly prefill or decode."""
    known = all(work.act == "decode" or (work.act == "prefill" and work.size >= PROMPTS) for work in duel.works)
    return known and len(duel.works) == 2 and not duel.way and not any(w.gap_ms or w.priority for w in duel.works)


def _without(duel: Duel, every: Sequence[Duel]) -> list[Duel]:
    """Return the duels in `every` without those of the same pair of lanes, in either order."""
    pair = sorted(work._replace(part="").text for work in duel.works)
    return [other for other in every if sorted(work._replace(part="").text for work in other.works) != pair]


def _errors(duel: Duel, rounds: law.Rounds, hbm: float) -> F8:
    off: F8 = np.array(law.slowdown(lanes(duel, hbm), rounds)) / np.array(duel.slow) - 1
    return off


def _whole(duels: Sequence[Duel]) -> law.Rounds:
    """Fit two kinds of constants to duels on all SMs: layers per turn, and the time that kernels keep the GPU.

    This time is a fraction of a step's time, one for prefills and one for decode steps.
    """

    def off(x: F8) -> F8:
        rounds = law.Rounds(*x.tolist())
        logs: F8 = np.log(np.concatenate([1 + _errors(duel, rounds, 1.0) for duel in duels]))
        return logs

    start = np.array(law.Rounds()[: len(LEAST)])
    return law.Rounds(*least_squares(off, start, bounds=(LEAST, MOST)).x.tolist())


def _apart(duels: Sequence[Duel], rounds: law.Rounds, hbm: float) -> law.Rounds:
    """Fit how lanes on disjoint partitions slow each other, by trying all pairs of values in steps of 0.01.

    With fewer than PAIRS duels, return `rounds` unchanged.
    """
    if len(duels) < PAIRS:
        return rounds
    asked = np.array([sum(lane.bandwidth for lane in lanes(duel, hbm)) for duel in duels for _ in duel.works])
    slow = np.log(np.array([times for duel in duels for times in duel.slow]))
    ours = np.log(np.maximum(GRID[:, None, None], GRID[None, :, None] * asked))
    off = np.square(ours - slow).sum(-1)
    off += 1e-9 * (abs(GRID[:, None] - rounds.apart) + abs(GRID[None, :] - rounds.crowd))  # ties keep the old
    best = np.unravel_index(int(off.argmin()), off.shape)
    return rounds._replace(apart=float(GRID[best[0]]), crowd=float(GRID[best[1]]))
