"""Scores of policies on the suite: each entry runs in a process of its own, which reports rows.

    share of the best    highest rate that meets the level, divided by a frozen rate: the best of the shipped systems
    total                mean of these shares; a share is 0 if a model was not served, or no rate meets the level

Finished rows, and the runs of an interrupted entry, stay stored under digests of version, entry, code and beacon.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from harness.loop import system as systems
from harness.policy.types import UserError
from harness.rows import crossings, record, vetted
from harness.run.slo import SloTarget
from harness.run.sources import code, scoring
from harness.run.spec import Spec, asked, from_dict
from harness.study import bound, grid
from harness.study.bases import slo_target
from harness.study.study import Study
from harness.suite.suite import Scenario, Suite, study

CPU_S = 900  # s that one process of an entry may compute
ANSWER_S = 120.0  # s on the wall that one answer of a policy may take
WALL_S = 1800  # s until a process that tells nothing is ended
PASSED = ("NUMBA_CPU_NAME",)  # environment variables that an entry inherits: they decide which code is compiled
ANY = "static"  # a shipped system, for facts of a scenario that are the same for all
WINDOW = " (knows the window)"  # ending of the name of a row whose forecasts know the window
Row = dict[str, Any]


class Entry(NamedTuple):
    """An entry of the table: a policy in the form that --systems takes.

    It also says whether the policy's forecasts are computed from the window itself.
    """

    text: str
    window: bool = False  # its forecasts know the window

    @property
    def system(self) -> str:
        """The name of the entry's system, or the path of its policy's file."""
        return from_dict(asked(self.text)).system

    @property
    def label(self) -> str:
        """The entry's name in tables."""
        label = from_dict(asked(self.text)).label
        return f"{label}{WINDOW}" if self.window else label

    @property
    def file(self) -> Path:
        """The policy's file. Raises UserError if there is none."""
        return systems.path(self.system)


class Card(NamedTuple):
    """The scores of an entry."""

    label: str
    version: str
    beacon: str
    content: str  # SHA-256 of its file
    code: str  # identity of the bench's sources
    rows: Sequence[Row]  # a scenario each
    refused: Sequence[str]  # why it may not enter
    total: float | None
    low: float | None
    high: float | None


def score(
    entry: Entry, suite: Suite, beacon: str, out: Path, workers: int = 1, tell: Callable[[str], None] = lambda _: None
) -> Card:
    """Score an entry on the scenarios of a suite; finished rows in `out` are kept."""
    file, content, made = entry.file, vetted.content(entry.system), identity(suite)
    name = _digest(suite.asked, beacon, entry, content, made)
    folder = (out / "entries" / f"{file.stem}-{name}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "rows.json"
    rows: dict[str, Row] = {row["scenario"]: row for row in _read(kept)}
    left = [s.name for s in suite.scenario if s.name not in rows]
    passed = vetted.vetted(entry.system)
    refused: list[str] = []
    if left:
        lock = threading.Lock()
        targets = {s.name: target(suite, s, beacon, out) for s in suite.scenario}
        apart = partial(_process, entry, suite, beacon, folder, targets)

        def take(row: Row) -> None:
            with lock:
                rows[row["scenario"]] = row
                record.write_bytes(kept, json.dumps(list(rows.values())).encode())
                tell(f"{len(rows)} of {len(suite.scenario)}: {row['scenario']}: {told(row)}")

        if not passed:
            tell("checking the policy (bench check)")
            refused = _checked(apart)
            if not refused:
                with suppress(OSError, UserError):
                    vetted.keep(content)
        if not refused:
            shares = [left[k::workers] for k in range(min(workers, len(left)))]
            with ThreadPoolExecutor(len(shares)) as pool:
                done = [pool.submit(_run, apart, share, take) for share in shares]
                for each in done:
                    each.result()
    ordered = [{**rows[s.name], **standing(rows[s.name], s)} for s in suite.scenario if s.name in rows]
    return Card(entry.label, suite.version, beacon, content, made, ordered, refused, *total(ordered))


def identity(suite: Suite) -> str:
    """Return the digest of all sources that a run uses except its policy, and of the sources that score it.

    No entry is imported to find these sources, as this process has no resource limits.
    """
    (panel,) = grid.panels(study(suite, suite.scenario[0], ANY), full=False)
    return _digest(code(panel.first), scoring(crossings.__file__))


def _digest(*facts: object) -> str:
    return sha256(" ".join(map(str, facts)).encode()).hexdigest()[:16]


def _located(entry: Entry) -> str:
    """Return an entry in the form that --systems takes, with the absolute path of a policy's file."""
    name = entry.system
    return entry.text.replace(name, str(entry.file), 1) if name.endswith(".py") else entry.text


def _read(path: Path) -> list[Row]:
    try:
        return list(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return []


def target(suite: Suite, scenario: Scenario, beacon: str, out: Path) -> dict[str, Any]:
    """Return the SLO of a scenario: its rule, its seconds by model, and the drain time after the window in seconds."""
    return _under(suite, scenario, beacon, out)[2]._asdict()


def _under(suite: Suite, scenario: Scenario, beacon: str, out: Path) -> tuple[Study, grid.Panel, SloTarget]:
    """Return the study of a scenario, its panel and its SLO, which are the same for all policies."""
    asked_ = study(suite, scenario, ANY, beacon)
    (panel,) = grid.panels(asked_, full=False)
    return asked_, panel, slo_target(panel.first, asked_.slo, out / "bases", workers=1)


# ------------------------------------------------------------------ processes


def _checked(apart: Callable[..., str]) -> list[str]:
    """Return the reasons to refuse an entry, as its process (run by `apart`) reports them; empty if there are none."""
    reasons: list[str] = ["the check ended without a word"]

    def take(facts: Mapping[str, Any]) -> None:
        reasons[:] = facts.get("refused", reasons)

    ended = apart((), take, checked=False)
    return [*reasons, *([ended] if reasons and ended else [])]


def _run(apart: Callable[..., str], names: Sequence[str], take: Callable[[Row], None]) -> None:
    """Run scenarios one after the other in the entry's process.

    If the process ends early, the scenario that it was running has failed, and a new process runs the others.
    """
    left = list(names)
    while left:
        at = left[0]

        def hear(facts: Mapping[str, Any]) -> None:
            nonlocal at
            at = facts.get("begun", at)
            if row := facts.get("row"):
                left.remove(row["scenario"])
                take(row)

        ended = apart(left, hear)
        if left and at in left:
            left.remove(at)
            take({"scenario": at, "failed": ended or "its process ended early"})


def _process(
    entry: Entry,
    suite: Suite,
    beacon: str,
    folder: Path,
    targets: Mapping[str, Any],
    names: Sequence[str],
    take: Callable[[Mapping[str, Any]], None],
    *,
    checked: bool = True,
) -> str:
    """Start a process for an entry, pass each of its lines to `take`, and return how it failed; "" if it ended well."""
    cache = systems.user_cache().resolve()
    job = {
        "system": _located(entry),
        "file": str(entry.file) if entry.system.endswith(".py") else entry.system,
        "suite": asdict(suite),
        "beacon": beacon,
        "folder": str(folder),
        "cache": str(cache),
        "targets": targets,
        "checked": checked,
        "window": entry.window,
        "names": list(names),
        "cpu_s": CPU_S,
        "answer_s": ANSWER_S,
    }
    env = {name: os.environ[name] for name in PASSED if name in os.environ}
    env |= {"XDG_CACHE_HOME": str(cache.parent), "TMPDIR": str(folder)}
    printed = folder / "printed.txt"
    start = f"import sys; sys.path[:0] = [{str(systems.ROOT)!r}]; from harness.suite.entry import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", start, str(printed)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=env, cwd=folder, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(WALL_S, process.kill)
    late.start()
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job))
            process.stdin.close()
        for line in process.stdout:
            take(json.loads(line))
        rc = process.wait()
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    return _ended(rc, printed)


def _ended(rc: int, printed: Path) -> str:
    """Say how a process failed; "" if it ended well."""
    if rc == 0:
        return ""
    words = {-9: "it was ended: out of time or memory", -24: f"it took more than {CPU_S} s of processor time"}
    lines = printed.read_text("utf-8", "replace").splitlines() if printed.is_file() else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return words.get(rc) or f"its process ended with {rc}" + (f": {last[:160]}" if last else "")


# ------------------------------------------------------------------ scores


def standing(row: Row, scenario: Scenario) -> Row:
    """Return a row's rate as a share of the best known rate, with its interval.

    The share is 0 if a model was not served.
    """
    if row.get("failed") or row.get("unserved") or not row.get("rps"):
        return {"share": 0.0, "share_low": 0.0, "share_high": 0.0}
    best = scenario.best_rps
    if best is None:
        return {"share": None, "share_low": None, "share_high": None}
    low, high = row["low_rps"], row["high_rps"]
    return {"share": row["rps"] / best, "share_low": low and low / best, "share_high": high and high / best}


def total(rows: Sequence[Row]) -> tuple[float | None, float | None, float | None]:
    """Return the mean over scenarios of the share of the best known rate, with the ends of its interval.

    The interval assumes that the errors of scenarios are independent. An end is None if some row has no such end. All
    three are None if some row's share is unknown.
    """
    shares = [row["share"] for row in rows]
    if not shares or any(share is None for share in shares):
        return None, None, None
    mean = math.fsum(shares) / len(shares)

    def half(key: str) -> float | None:
        gaps = [None if row[key] is None else row[key] - row["share"] for row in rows]
        known = [gap for gap in gaps if gap is not None]
        return math.sqrt(math.fsum(gap * gap for gap in known)) / len(rows) if len(known) == len(gaps) else None

    below, above = half("share_low"), half("share_high")
    return mean, None if below is None else mean - below, None if above is None else mean + above


def bounds(suite: Suite, beacon: str, out: Path) -> dict[str, float]:
    """Return for each scenario the rate above which no policy can meet the level; the answers are stored in `out`.

    A scenario is left out if its search ends without a bound, for example because the search would need more requests
    than a window may have.
    """
    most: dict[str, float] = {}
    for scenario in suite.scenario:
        asked_, panel, under = _under(suite, scenario, beacon, out)
        drawn = grid.Grid(asked_, full=False, panels=(replace(panel, targets={panel.scale: under}),))
        at = partial(_at, drawn)
        with suppress(UserError):
            answer = bound.crossing(
                at, panel.specs.values(), panel.seeds, under, scenario.definition, suite.level, out / "bases"
            )
            if answer is not None:
                most[scenario.name] = answer["rate_scale"] * panel.unit_rps
    return most


def _at(drawn: grid.Grid, rate_scale: float, seed: int) -> Spec:
    (panel,) = drawn.panels
    return drawn.point(panel, ANY, seed, rate_scale * panel.unit_rps).spec


def told(row: Row) -> str:
    """Say the result of a scenario in a few words."""
    if row.get("failed"):
        return str(row["failed"])
    if row["unserved"]:
        return f"not all models were served ({row['unserved']})"
    sign = "" if row["sign"] == "=" else row["sign"]
    return f"{sign}{row['tried_rps']:.3g} req/s"
