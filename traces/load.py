"""Loading of traces, by name or by path, as arrays. A generator's trace is drawn when it is loaded.

The file of a trace in `manifest.toml` is looked for in the folder TRACES_DIR, in `traces/data/`, and among the samples
that come with the bench. If the file is missing and a generator is fitted to the trace, the generator's trace is loaded
instead, and `notice` says so. A name with a slash is a member of a family, such as `aegaeon-synth/40-0.1-1.0-1.0`. A
name such as `azure-conv+models=8` splits a log of one stream among models (deal.py).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import spilled
from harness.policy.fields import meant
from harness.policy.types import Prefix, UserError
from traces import checks, deal, drawing, prefix, readers, schema, synthetic

HERE = Path(__file__).parent
SAMPLED = ("greedy", "checkpoint")  # words of the column `sampling`
FACTS = ("tier", "note", "licence", "models", "requests", "span_s")
I4 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as arrays of one element per request, sorted by arrival; time begins at 0."""

    name: str
    models: tuple[str, ...]  # its streams, in natural order
    arrival_s: NDArray[np.float64]
    model: I4  # index into `models`
    prompt_tokens: I4
    output_tokens: I4
    src_row: NDArray[np.int64]  # line of the source
    source: str  # file, for messages
    span_s: float  # the period of circular replay
    tier: str = "replayed"  # replayed, composed or synthetic
    licence: str = "not stated"
    note: str = ""
    sha256: str = ""  # hash of the rows, whatever file held them
    tenant: I4 | None = None  # the client, where known
    prefix: Prefix | None = None  # what prompts have in common, where known; an id is of one stream
    maker: str | None = None  # generator that draws it again for each seed
    ordered: bool = False  # its k-th stream belongs to a set's k-th model
    fit: str | None = None  # of a synthetic one: "within", or where it is off its targets (traces/realism.py)
    resolution_s: float | None = None  # resolution of its stamps; None: fine
    length_origin: str = "measured"  # measured, sampled or uniform
    notice: str | None = None  # a line to print first
    greedy: bool = False  # every request asks for temperature 0 (column `sampling`)
    left_out: str = ""  # says how many requests its name leaves out, of how many
    kept_share: float = 1.0  # share of a log's requests that is left once streams were dropped

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def longest_tokens(self) -> int:
        """The greatest prompt + output tokens of a request; for a generator, an upper bound for every seed."""
        if self.maker is not None:
            return synthetic.preset(self.maker).longest_tokens
        columns = self.prompt_tokens, self.output_tokens
        return max(int((columns[0][z] + columns[1][z]).max()) for z in spilled.pieces(len(self), *columns))

    @property
    def longest_output_tokens(self) -> int:
        """The greatest number of output tokens of a request in this trace."""
        return max(int(self.output_tokens[z].max()) for z in spilled.pieces(len(self), self.output_tokens))

    def where(self, row: int) -> str:
        """Return `file:row` of a request, for messages."""
        return f"{self.source}:{self.src_row[row]}"

    def first(self, n: int) -> Trace:
        """Return the first n requests as a trace whose period ends at the arrival of request n + 1.

        Valid only for a trace with more than n requests and without shared prefixes.
        """
        columns = ("arrival_s", "model", "prompt_tokens", "output_tokens", "src_row")
        tenant = None if self.tenant is None else self.tenant[:n]
        cut = {name: getattr(self, name)[:n] for name in columns}
        return replace(self, **cut, tenant=tenant, span_s=float(self.arrival_s[n]))


@cache
def manifest() -> Mapping[str, Mapping[str, Any]]:
    """Read the manifest of named traces: tier, note, licence, models, requests, span_s, and where to get each."""
    return tomllib.loads((HERE / "manifest.toml").read_text("utf-8"))


def trace(name: str) -> Trace:
    """Load a trace: one of the manifest by name, or any canonical Parquet or log by the path of its file.

    The name of a generator or of a log may be followed by fields, as in NAME+FIELD=VALUE. Raises UserError if there is
    no such trace.
    """
    head, plus, _ = name.partition("+")
    if (member := family(name)) is not None:
        return _of_family(name, member)
    if head not in manifest():
        if (path := Path(name)).is_file():
            return _of_file(path)
        raise UserError(f'no trace "{name}"{meant(head, manifest())} (bench list traces, or the path of a log)')
    entry = manifest()[head]
    _nameable(name, entry)
    if "drawn" in entry or (plus and drawn(head)):
        return replace(of_table(drawing.table(name), name), note=entry["note"])
    asked = deal.parsed(name)
    if (file := present(head)) is None:
        if "fallback" not in entry:
            raise UserError(f"trace {head} is not here, and nothing stands in for it: {entry['fetch']}")
        fit = trace(entry["fallback"])
        notice = f"{name} is not here: using {fit.name}, synthetic, {fit.note}; for the real one {entry['fetch']}"
        return replace(fit, notice=notice)
    if "sample" in entry:
        return replace(of_table(schema.read(file), file.name), note=entry["note"])
    sums = {source["sha256"] for source in entry["from"] if Path(source["path"]).name == file.name}
    if schema.file_sha256(file) not in sums:
        raise UserError(f"{file}: not the file that traces/manifest.toml names for {name} (its sha256 differs)")
    if plus:
        return _dealt(file, asked, entry)
    return replace(of_table(readers.read(entry["reader"], file), str(file)), note=entry["note"])


def _nameable(name: str, entry: Mapping[str, Any]) -> None:
    """Raise UserError for the name of a family without a member, and for fields after a name that takes none."""
    head, plus, _ = name.partition("+")
    if "family" in entry:
        raise UserError(f'trace "{name}" is a family: name one of it, as {head}/40-0.1-1.0-1.0')
    if plus and not (drawn(head) or log(head)):
        raise UserError(f'trace "{name}": {head} is no generator, its rows are what they are')


def _of_file(path: Path) -> Trace:
    """Load a canonical Parquet, or convert any other log; the notice of a converted trace says how."""
    if path.suffix == ".parquet":
        try:
            if (long := schema.long(path)) is not None:
                return _of_pieces(*long, schema.pieces(path), str(path))
            return of_table(schema.read(path), str(path))
        except UserError:
            if not schema.foreign(path):
                raise
    try:
        rows, report = readers.converted(path)
    except UserError as error:
        raise UserError(f"{error}; bench trace convert has options for it") from None
    return replace(of_table(rows, str(path)), notice=f"{report} (bench trace convert keeps it as Parquet)")


def _dealt(path: Path, asked: deal.Asked, entry: Mapping[str, Any]) -> Trace:
    """Read a log, leave out its long requests and split it among models, as `asked` says.

    The trace's note says how it was split, and how many requests were left out.
    """
    rows = readers.read(entry["reader"], path, **({"max_tokens": asked.max_tokens} if asked.max_tokens else {}))
    notes = [str(entry["note"])]
    if asked.models is not None:
        rows, note = deal.dealt(rows, asked)
        notes.append(note)
    left_out = ""
    if asked.max_tokens is not None:
        long = schema.metadata(rows)["dropped"].get(schema.longer(asked.max_tokens), 0)
        left_out = f"{long:,} of {long + rows.num_rows:,} requests beyond {asked.max_tokens:,} tokens"
        notes.append(f"{left_out} left out")
    return replace(of_table(rows, str(path)), name=str(asked), note="; ".join(notes), left_out=left_out)


class Family(NamedTuple):
    """A member of a family of trace files, with the numbers that its name states."""

    label: str  # its name without fields
    entry: Mapping[str, Any]  # the family's
    models: int
    rate_rps: float
    prompt_x: float  # times the lengths of ShareGPT
    output_x: float
    max_tokens: int | None  # longer requests are cut

    @property
    def generator(self) -> str:
        """The name of the generator that draws traces of this member's kind. Raises UserError if there is none."""
        scales = {(1.0, 1.0): "", (2.0, 1.0): "+lengths=sharegpt-ix2", (1.0, 2.0): "+lengths=sharegpt-ox2"}
        if (lengths := scales.get((self.prompt_x, self.output_x))) is None:
            raise UserError(f"{self.label} is not here, and no generator draws its lengths")
        cut = "" if self.max_tokens is None else f"+max_tokens={self.max_tokens}"
        return f"{self.entry['fallback']}+models={self.models}+rate_rps={self.rate_rps:g}{lengths}{cut}"


MEMBER = re.compile(r"([0-9]{1,6})-([0-9]+\.[0-9]+)-([0-9]+\.[0-9]+)-([0-9]+\.[0-9]+)")
COUNT = re.compile(r"[0-9]{1,18}")


def family(name: str) -> Family | None:
    """Parse FAMILY/M-RATE-IN-OUT[+max_tokens=N], the name of a member of a family; UserError for a malformed one.

    None for a name that has no slash, or whose part before the slash is not a family.
    """
    label, *pairs = name.split("+")
    head, slash, member = label.partition("/")
    if not slash or "family" not in (entry := manifest().get(head, {})):
        return None
    if not (numbers := MEMBER.fullmatch(member)):
        raise UserError(f'trace "{name}": "{member}" is not M-RATE-IN-OUT, as in {head}/40-0.1-1.0-1.0')
    most = None
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key != "max_tokens" or not COUNT.fullmatch(value) or int(value) < 2:
            raise UserError(f'trace "{name}": "+{pair}" is not +max_tokens=N, all that its rows take')
        most = int(value)
    return Family(label, entry, int(numbers[1]), float(numbers[2]), float(numbers[3]), float(numbers[4]), most)


def _of_family(name: str, member: Family) -> Trace:
    if (path := present(name)) is None:
        fit = trace(member.generator)
        return replace(
            fit,
            notice=f"{member.label} is not here: using {member.generator}; for the real one {member.entry['fetch']}",
        )
    rows = readers.read(member.entry["reader"], path, models=member.models, cut_tokens=member.max_tokens)
    cut = schema.metadata(rows)["cut"]
    note = f"{member.entry['note']}, {cut} prompts cut" if cut else str(member.entry["note"])
    return replace(of_table(rows, str(path)), name=name, note=note)


def sized(name: str, models: int) -> str:
    """Return the full name of the trace that a run of `models` models uses.

    A generator that draws one stream for each model gets the field `models`, unless `name` states it. If the file of a
    trace is not on this machine, the name of the generator that stands in for it is returned.
    """
    if (member := family(name)) is not None:
        return name if present(name) else member.generator
    if log(name.partition("+")[0]):
        return str(deal.parsed(name))
    if name in manifest() and "drawn" in manifest().get(fallback := manifest()[name].get("fallback", ""), {}):
        name = name if present(name) else fallback
    if name.partition("+")[0] not in synthetic.PRESETS:
        return name
    p = synthetic.preset(name)
    return str(replace(p, models=models) if p.name in synthetic.SIZED and "+models=" not in name else p)


def log(name: str) -> bool:
    """Tell whether a named trace is a file of one stream, which can be split among models."""
    return name in manifest() and "reader" in manifest()[name] and manifest()[name]["models"] == 1


def drawn(name: str) -> bool:
    """Tell whether a named trace comes from a generator."""
    return name in manifest() and bool({"drawn", "sample"} & manifest()[name].keys())


def present(name: str) -> Path | None:
    """Return the file of a named trace on this machine; None if it is not here, or if a generator draws the trace."""
    if (member := family(name)) is not None:
        path = member.entry["family"].replace("{}", member.label.partition("/")[2])
        return _first(path, f"{path}.gz", Path(path).name, f"{Path(path).name}.gz")
    entry = manifest()[name]
    if "sample" in entry:
        return HERE / "sample" / str(entry["sample"])
    if "family" in entry:  # any member
        return next(
            (file for folder in folders() for file in sorted(folder.glob(entry["family"].replace("{}", "*") + "*"))),
            None,
        )
    return _first(*(source["path"] for source in entry.get("from", ())))


def folders() -> list[Path]:
    """Return the folders in which the files of traces are looked for."""
    return [Path(folder) for folder in (os.environ.get("TRACES_DIR"),) if folder] + [HERE / "data"]


def _first(*paths: str) -> Path | None:
    files = (folder / path for folder in folders() for path in paths)
    return next((file for file in files if file.is_file()), None)


def listing() -> list[dict[str, Any]]:
    """List the manifest's traces: their facts, `here` (a path or None), and how to `fetch` one that is not here."""
    return [
        {"name": name, **{key: entry[key] for key in FACTS}, "here": present(name), "fetch": entry.get("fetch")}
        for name, entry in manifest().items()
    ]


def of_table(rows: pa.Table, source: str) -> Trace:
    """Make a trace from a canonical table. The rows are checked again, because the table may come from any file."""
    made = _of_pieces(rows.schema, rows.num_rows, [rows], source)
    tenant = _codes(rows["tenant"]) if "tenant" in rows.column_names and not rows["tenant"].null_count else None
    if tenant is None and "prefix_hashes" not in rows.column_names:
        return made
    arrays, shared = dict[str, NDArray[Any]](), None
    if tenant is not None:
        arrays["tenant"] = tenant
    if "prefix_hashes" in rows.column_names:
        tokens = schema.metadata(rows).get("block_tokens")
        shared = prefix.read(rows["prefix_hashes"], tokens, made.model, made.prompt_tokens, made.where)
        arrays |= {"block_tokens": np.array([shared.block_tokens]), "blocks": shared.offsets, "ids": shared.ids}
    return replace(made, tenant=tenant, prefix=shared, sha256=_sha256(made, arrays))


def _sha256(made: Trace, more: Mapping[str, NDArray[Any]]) -> str:
    columns = {name: getattr(made, name) for name in ("arrival_s", "model", "prompt_tokens", "output_tokens")}
    return schema.content_sha256(made.models, {**columns, "span_s": np.array([made.span_s]), **more})


def _of_pieces(form: pa.Schema, n: int, pieces: Iterable[pa.Table], source: str) -> Trace:
    """Make a trace from the consecutive pieces of a canonical table with the schema `form` and `n` rows.

    The columns of clients and of shared prefixes are not read.
    """
    meta = _facts(form.empty_table(), source)
    if not n:
        raise UserError(f"{source}: no rows")
    arrival_s, ids = spilled.like(n, np.float64), spilled.like(n, np.uint64)
    model, prompt, output = (spilled.like(n, np.int32) for _ in range(3))
    src_row, streams = spilled.like(n, np.int64), dict[str, int]()
    drop = "bench trace convert --drop-bad leaves such rows out"
    begin, last_s, greedy = 0, -np.inf, "sampling" in form.names
    for rows in pieces:
        here = slice(begin, begin + rows.num_rows)
        for column in schema.REQUIRED:
            if rows[column].null_count:
                raise UserError(f'{source}: column "{column}" has empty values')
        lines = rows["src_row"].to_numpy() if "src_row" in rows.column_names else np.arange(here.start, here.stop) + 1
        src_row[here] = lines

        def where(row: int, lines: NDArray[Any] = lines) -> str:
            return f"{source}:{lines[row]}"

        stamps = rows["arrival_s"].to_numpy()
        checks.times(stamps, where, "arrival_s", drop)
        checks.reached(stamps, where, "arrival_s")
        checks.ordered(stamps, where, "arrival_s", "bench trace convert --sort", last_s)
        arrival_s[here], last_s = stamps, stamps[-1]
        for column, lengths in (("prompt_tokens", prompt), ("output_tokens", output)):
            counts = rows[column].to_numpy().astype(np.int64)
            checks.tokens(counts, where, column, drop)
            lengths[here] = counts
        ids[here] = rows["request_id"].to_numpy()
        words, codes = _words(rows["model"])
        checks.names(words, codes, where, "model", drop)
        greedy = greedy and _greedy(rows["sampling"], where)
        model[here] = np.array([streams.setdefault(word, len(streams)) for word in words], np.int32)[codes]
        begin = here.stop
        spilled.release(arrival_s, ids, model, prompt, output, src_row)
    checks.unique(ids, lambda row: f"{source}:{src_row[row]}", "request_id")
    used = np.zeros(len(streams), bool)
    for piece in spilled.pieces(n, model):
        used[model[piece]] = True
    there = {name for name, k in streams.items() if used[k]}
    models = tuple(sorted({*meta.get("streams", ()), *there}, key=_natural))
    place = np.array([models.index(name) if name in there else -1 for name in streams], np.int32)
    for piece in spilled.pieces(n, model):
        model[piece] = place[model[piece]]
    span_s = float(meta["span_s"] if "span_s" in meta else last_s * (1 + 1 / n) or 1.0)
    if not last_s <= span_s <= checks.MOST_S:
        raise UserError(
            f"{source}: metadata span_s {span_s:g} ends before the last request at {last_s:g} s, or after "
            f"{checks.MOST_S:g} s"
        )
    made = Trace(
        name=str(meta.get("name") or Path(source).stem),
        models=models,
        arrival_s=arrival_s,
        model=model,
        prompt_tokens=prompt,
        output_tokens=output,
        src_row=src_row,
        source=source,
        span_s=span_s,
        resolution_s=meta.get("timestamp_resolution_s"),
        greedy=greedy,
        **{key: meta[key] for key in STATED if key in meta},
    )
    return replace(made, sha256=_sha256(made, {}))


KINDS: Mapping[str, tuple[type, ...]] = {  # types of what the metadata of a trace may say
    "span_s": (int, float),
    "streams": (list,),
    "maker": (str, NoneType),
    "fit": (str, NoneType),
    "ordered": (bool,),
    "timestamp_resolution_s": (int, float, NoneType),
    "name": (str,),
    "tier": (str,),
    "licence": (str,),
    "note": (str,),
    "length_origin": (str,),
    "kept_share": (int, float),
}
STATED = ("tier", "licence", "note", "maker", "ordered", "fit", "length_origin", "kept_share")  # as `Trace` names them


def _facts(rows: pa.Table, source: str) -> dict[str, Any]:
    """Read the metadata of a canonical table; UserError for a value of a wrong kind."""
    meta = schema.metadata(rows)
    for key, kinds in KINDS.items():
        text = (rows.schema.metadata or {}).get(key.encode())
        if text is not None and not (key in meta and type(meta[key]) in kinds):
            raise UserError(f"{source}: metadata {key} is {text.decode(errors='replace')} (bench trace convert)")
    if bad := [stream for stream in meta.get("streams", ()) if not isinstance(stream, str)]:
        raise UserError(f"{source}: metadata streams: {bad[0]!r} is no name")
    if meta.get("maker") is not None:
        try:
            synthetic.preset(meta["maker"])
        except UserError as error:
            raise UserError(f"{source}: metadata maker: {error}") from None
    if meta.get("tier", schema.TIERS[0]) not in schema.TIERS:
        raise UserError(f'{source}: metadata tier is "{meta["tier"]}" ({", ".join(schema.TIERS)})')
    return meta


def _words(column: pa.ChunkedArray) -> tuple[list[str], NDArray[Any]]:
    """Return the distinct names in a column, and each row's index into them."""
    array = column.combine_chunks()
    array = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    return array.dictionary.to_pylist(), array.indices.to_numpy()


def _codes(column: pa.ChunkedArray) -> I4:
    """Return each row's index into the distinct names of a column, in natural order ("rank-9" before "rank-10")."""
    words, codes = _words(column)
    place = {name: i for i, name in enumerate(sorted({words[i] for i in np.unique(codes)}, key=_natural))}
    return np.asarray(np.array([place.get(name, -1) for name in words], np.int32)[codes])


def _greedy(column: pa.ChunkedArray, where: Callable[[int], str]) -> bool:
    """Tell whether all rows ask for temperature 0; a row with an empty value does not.

    Raises UserError for a word that is not in SAMPLED.
    """
    words, codes = _words(column.fill_null("checkpoint"))
    wrong = np.flatnonzero(~np.isin(np.array(words, object), SAMPLED)[codes])
    if len(wrong):
        row = int(wrong[0])
        raise UserError(f'{where(row)}: sampling is "{words[codes[row]]}", not {" or ".join(SAMPLED)}')
    return {words[code] for code in np.unique(codes)} == {"greedy"}


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))
