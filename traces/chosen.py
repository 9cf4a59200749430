"""The streams of a log before models serve them: `--rename` and `--drop-streams`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import schema

EVERY = "*"  # stands for all streams for which a set has no model
SHOWN = 8  # streams that a line lists


@dataclass(frozen=True, slots=True)
class Chosen:
    """The user's changes to a log's streams: new names, and streams to leave out, which `drop` has by new names."""

    rename: Mapping[str, str]
    drop: tuple[str, ...] = ()
    served: tuple[str, ...] = ()  # the streams that stay where `drop` has EVERY

    def __str__(self) -> str:
        renamed = "".join(f"+{old!r}={new!r}" for old, new in sorted(self.rename.items()))
        return renamed + "".join(f"-{name!r}" for name in self.drop) + (str(self.served) if EVERY in self.drop else "")


def chosen(rename: Mapping[str, str], drop: Iterable[str], served: Iterable[str] = ()) -> Chosen | None:
    """Return the changes to a log's streams, or None if there are none.

    `served` are the streams of a model set's models.
    """
    names = tuple(dict.fromkeys(drop))
    return Chosen(dict(rename), names, tuple(served)) if rename or names else None


def of(rows: pa.Table, how: Chosen) -> tuple[pa.Table, str]:
    """Return a canonical table with its streams renamed and dropped, and a note that describes the changes.

    The metadata's `kept_share` is the share of the requests that are kept, times the `kept_share` that the table had.
    Raises UserError for an unknown stream, and where no request is left.
    """
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
    notes = [f"renamed {', '.join(f'{old} to {new}' for old, new in how.rename.items())}"] if how.rename else []
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


def _there(option: str, name: str, streams: Collection[str]) -> None:
    if name not in streams:
        known = ", ".join(sorted(streams)[:SHOWN]) + ", ..." * (len(streams) > SHOWN)
        raise UserError(f'{option}: the log has no stream "{name}"{meant(name, streams)} (it has {known})')


def listed(counts: Mapping[str, int]) -> str:
    """List streams with their numbers of requests, the busiest first."""
    order = sorted(counts, key=lambda name: (-counts[name], name))
    more = f" and {len(order) - SHOWN} more" if len(order) > SHOWN else ""
    return ", ".join(f"{name} {counts[name]:,}" for name in order[:SHOWN]) + more
