"""SLO targets: an SLO rule with its seconds, and the limits that it sets for the requests of a run.

Seconds are given by model, or follow from each request's latency alone. The tables of a sweep record the targets that
judged each run, and `bench explain` uses those.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.rows import record, requests, whole
from harness.rows.sealed import WAY_OUT, Damaged, Facts
from harness.rows.stored import SOLO
from harness.run.setup import Setup
from harness.run.spec import Spec, by_content, stored

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Pair = tuple[float, float]  # TTFT, TPOT in seconds


class SloTarget(NamedTuple):
    """An SLO rule, with the seconds and the drain time that it sets for every run of a sweep."""

    rule: str
    seconds: Mapping[str, Pair] | None  # keyed by model; None if each request's own latency sets them
    drain_s: float = math.nan  # seconds for which runs go on after the window

    def spec(self, spec: Spec) -> Spec:
        """Return the spec under this rule. The target's seconds and `drain_s` set what the spec leaves open."""
        rows = tuple((model, *pair) for model, pair in (self.seconds or {}).items())
        drain_s = self.drain_s if spec.drain_s is None else spec.drain_s
        return replace(spec, slo=self.rule, slo_s=spec.slo_s or rows, drain_s=drain_s)

    @property
    def identity(self) -> str:
        """The rule as text; a file of classes in the rule is named by the hash of its content."""
        return str(by_content({"slo": self.rule})["slo"])

    @property
    def definition(self) -> str:
        """The definition of attainment that goes with this rule."""
        return "both" if self.seconds is not None else "e2e"


def located(rule: str) -> str:
    """Make the path of a rule's file absolute, so that it is valid from any working directory."""
    return f"classes:{Path(rule[8:]).resolve()}" if rule.startswith("classes:") else rule


# ------------------------------------------------------------------ limits of a stored run


def limits(run: Path, under: SloTarget) -> requests.Slo:
    """Return the SLO seconds of a run under a target: by model, or by request from stored solo latencies."""
    from workloads import slo

    if under.seconds is not None:
        return under.seconds
    rule = slo.parse(under.rule)
    assert isinstance(rule, slo.Scaled)  # only multiples of a request's own latency have no seconds by model
    alone = stored_solo(run, rule.gpu)
    return requests.Limits(rule.ttft_x * alone.ttft_s, rule.tpot_x * alone.tpot_s)


_SOLO = threading.Lock()  # one thread derives and writes, the others read


def stored_solo(run: Path, gpu: str) -> requests.Limits:
    """Return the seconds that each request of a run takes alone (`Setup.solo_s`), in order of id.

    They are stored in the run's folder (`record.SOLO`). If that file is missing, damaged, or made for other rows or
    another kind of GPU, they are computed and stored. The computation uses the rows and the present cost table. It is
    not repeated when the cost table changes. A run in a part has no folder to store them in, so they are computed at
    each call.
    """
    import pyarrow as pa

    about = record.meta(run)
    of = {key: about[key] for key in ("spec_hash", "code_hash")} | ({"gpu": gpu} if gpu else {})

    def make() -> pa.Table:
        rows = record.read(run, ["model", "prompt_tokens", "output_tokens"])
        setup = Setup(stored(about["spec"]))
        lengths = (rows[name].to_numpy() for name in ("prompt_tokens", "output_tokens"))
        seconds = setup.solo_s(_members(run, rows, setup), *lengths, gpu=gpu)
        return pa.table(dict(zip(("ttft_s", "tpot_s"), seconds, strict=True)))

    with _SOLO:
        whole.clean(run, record.SOLO)
        inputs = {"of": of, "rows": sum(about["counts"].values())}
        solo = SOLO.kept(run / record.SOLO, inputs, make) if run.is_dir() else make()  # a part has no place for it
    return requests.Limits(solo["ttft_s"].to_numpy(), solo["tpot_s"].to_numpy())


def _members(run: Path, rows: pa.Table, setup: Setup) -> NDArray[np.int32]:
    """Return each request's model, as an index into the model set of the run's spec.

    Raises Damaged if a request's model is not in that set.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    words = rows["model"].cast(pa.string())
    index = pc.index_in(words, pa.array(setup.models.names))
    if (row := pc.index(index.is_null(), value=True).as_py()) >= 0:
        lacks = f'model "{words[row]}" is not in {setup.spec.models}, the set of its spec'
        raise Damaged(f"{run / record.ROWS}: row {row}: {lacks}; {WAY_OUT}")
    members: NDArray[np.int32] = index.to_numpy().astype(np.int32)
    return members


# ------------------------------------------------------------------ targets of stored runs


def judgements(pairs: Iterable[tuple[SloTarget, str]]) -> list[dict[str, Any]]:
    """List the distinct targets of pairs (target, run), each with its rule, its seconds and the runs that it judged."""
    targets: dict[str, dict[str, Any]] = {}
    for under, run in pairs:
        about = {"rule": under.rule, "seconds": under.seconds}
        targets.setdefault(record.dumps(about), {**about, "runs": set()})["runs"].add(run)
    return [{**targets[key], "runs": sorted(targets[key]["runs"])} for key in sorted(targets)]


def target_of(judge: Facts) -> SloTarget:
    """Rebuild a target from an entry of `judgements`. Raises Damaged if the entry is incomplete."""
    seconds = judge["seconds"]
    return stored_target(
        judge.where, judge["rule"], seconds and {model: (pair[0], pair[1]) for model, pair in seconds.items()}
    )


def stored_target(where: str, rule: str, seconds: Mapping[str, Pair] | None) -> SloTarget:
    """Rebuild a target from its rule and seconds in part `where` of a file. Raises Damaged if seconds are missing."""
    from workloads import slo

    if seconds is None and not slo.by_request(rule):
        raise Damaged(f'{where}: the seconds of SLO "{rule}" are missing; {WAY_OUT}')
    return SloTarget(rule, seconds)


class Ruling(NamedTuple):
    """A target that judged a run, and the folder whose table records this."""

    under: SloTarget
    table: Path  # its folder


def rulings(run: Path) -> tuple[list[Ruling], list[str]]:
    """Return the targets that judged a run, newest first, and a line for each table that cannot be read.

    The tables are those of comparisons in the run's parent folder. Targets with the same rule and seconds are listed
    once.
    """
    tables = [path for path in run.parent.glob(f"*/{record.SWEEP}") if path.is_file()]
    by_target, lost = dict[str, Ruling](), list[str]()
    for path in sorted(tables, key=lambda path: -path.stat().st_mtime_ns):
        try:
            for judge in record.footer(path).get("judges", []):
                if run.name in judge["runs"]:
                    by_target.setdefault(
                        record.dumps([judge["rule"], judge["seconds"]]), Ruling(target_of(judge), path.parent)
                    )
        except Damaged as error:
            lost.append(f"not read, whatever it judged: {error}")
    return list(by_target.values()), lost
