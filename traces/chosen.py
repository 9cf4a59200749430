"""The user's changes to a log's streams before models serve them: `--rename`, `--shift` and `--drop-streams`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import schema

EVERY = "*"  # stands for all streams for which a set has no model
SHOWN = 8  # streams that a line lists


@dataclass(frozen=True, slots=True)
class Chosen:
    """The user's changes to a log's streams: new names, streams to leave out, and shifts in time.

    `rename` maps old names to new ones. `drop` lists the streams to leave out, by their new names. `shift_s` maps a
    stream's old name to the seconds by which its requests are delayed. A key of `shift_s` may also be a gateway, named
    as in the log's column `src`.
    """

    rename: Mapping[str, str]
    drop: tuple[str, ...] = ()
    shift_s: Mapping[str, float] = field(default_factory=dict)
    served: tuple[str, ...] = ()  # the streams that stay where `drop` has EVERY

    def __str__(self) -> str:
        renamed = "".join(f"+{old!r}={new!r}" for old, new in sorted(self.rename.items()))
        renamed += "".join(f"@{name!r}={seconds!r}" for name, seconds in sorted(self.shift_s.items()))
        return renamed + "".join(f"-{name!r}" for name in self.drop) + (str(self.served) if EVERY in self.drop else "")


def chosen(
    rename: Mapping[str, str],
    drop: Iterable[str],
    served: Iterable[str] = (),
    shift_s: Mapping[str, float] = MappingProxyType({}),
) -> Chosen | None:
    """Return the changes to a log's streams, or None if there are none.

    `served` has the names of the streams that a model set serves. If `drop` has "*", all streams except these are left
    out.
    """
    names = tuple(dict.fromkeys(drop))
    return Chosen(dict(rename), names, dict(shift_s), tuple(served)) if rename or names or shift_s else None


def of(rows: pa.Table, how: Chosen) -> tuple[pa.Table, str]:
    """Return a canonical table with its streams renamed, dropped and shifted, and a note that describes the changes.

    If streams are dropped, the metadata's `kept_share` is multiplied by the share of the requests that remain. Raises
    UserError for an unknown stream or gateway, or if no request remains.
    """
    rows, notes = _shifted(rows, how.shift_s)
    names = rows["model"].combine_chunks()
    streams = names.dictionary.to_pylist()
    for old in how.rename:
        _there(f"--rename {old}={how.rename[old]}", old, streams)
    renamed = [how.rename.get(name, name) for name in streams]
    model = pa.array(renamed).take(names.indices)
    counts = {str(pair["values"]): int(pair["counts"]) for pair in model.value_counts().to_pylist()}
    gone = {name for name in counts if name not in how.served} if EVERY in how.drop else set[str]()
    for name in how.drop:
        if name != EVERY:
            _there(f"--drop-streams {name}", name, counts)
            gone.add(name)
    if not counts.keys() - gone:
        raise UserError(
            f"--drop-streams {','.join(how.drop)} leaves no request of {rows.num_rows:,}: the log has "
            f"{listed(counts)} (--rename OLD=NEW gives a stream its model's name, --spread N splits all requests)"
        )
    at = rows.schema.get_field_index("model")
    rows = rows.set_column(at, rows.schema.field(at), model.dictionary_encode().cast(schema.NAMES))
    notes += [f"renamed {', '.join(f'{old} to {new}' for old, new in how.rename.items())}"] if how.rename else []
    meta = schema.metadata(rows)
    more = {"streams": [name for name in dict.fromkeys(renamed) if name not in gone]} if "streams" in meta else {}
    if gone:
        left = sum(counts[name] for name in gone)
        out = {name: counts[name] for name in counts if name in gone}
        notes.append(f"{left:,} of {rows.num_rows:,} requests left out, of {listed(out)}")
        more["kept_share"] = float(meta.get("kept_share", 1.0)) * (1 - left / rows.num_rows)
        rows = rows.filter(pa.array([name not in gone for name in renamed]).take(names.indices))
    note = "; ".join(notes)
    return schema.noted(rows, note, **more), note


def _shifted(rows: pa.Table, shift_s: Mapping[str, float]) -> tuple[pa.Table, list[str]]:
    """Shift the requests of some streams or gateways in time; return the table sorted by arrival, and notes to show.

    If a request would arrive before 0, all requests are moved later so that the first one arrives at 0.
    """
    if not shift_s:
        return rows, []
    when, mean_gap_s = rows["arrival_s"].to_numpy().copy(), schema.metadata(rows)["span_s"] / rows.num_rows
    columns = [rows[key].combine_chunks() for key in ("src", "model") if key in rows.column_names]
    for name, seconds in shift_s.items():
        of_name = next((column for column in columns if name in column.dictionary.to_pylist()), None)
        if of_name is None:
            _there(f"--shift {name}={seconds:g}", name, columns[-1].dictionary.to_pylist())
        else:
            when[of_name.cast(pa.string()).to_numpy(zero_copy_only=False) == name] += seconds
    when -= min(0.0, when.min())
    order = np.argsort(when, kind="stable")
    at = rows.schema.get_field_index("arrival_s")
    rows = rows.take(pa.array(order)).set_column(at, rows.schema.field(at), pa.array(when[order]))
    span_s = max(float(schema.metadata(rows)["span_s"]), float(when.max() + mean_gap_s))
    moved = ", ".join(f"{name} {seconds:+g} s" for name, seconds in shift_s.items())
    return schema.noted(rows, "", span_s=span_s), [f"shifted {moved}"]


def _there(option: str, name: str, streams: Collection[str]) -> None:
    if name not in streams:
        known = ", ".join(sorted(streams)[:SHOWN]) + ", ..." * (len(streams) > SHOWN)
        raise UserError(f'{option}: the log has no stream "{name}"{meant(name, streams)} (it has {known})')


def listed(counts: Mapping[str, int]) -> str:
    """Return the busiest streams with their numbers of requests, as text for a message."""
    order = sorted(counts, key=lambda name: (-counts[name], name))
    more = f" and {len(order) - SHOWN} more" if len(order) > SHOWN else ""
    return ", ".join(f"{name} {counts[name]:,}" for name in order[:SHOWN]) + more
