"""Stored results that are damaged: bits flipped, files cut or swapped, facts and columns changed one at a time."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz import pools
from tests.fuzz.case import Case

COMPARE = ("compare", "--systems", "static,prism", "--trace", "sample", "--models", "llama-3.2-1b*2", "--rate-scale",
           "1", "--seeds", "1", "--slo", "absolute:ttft=1,tpot=1", "--workers", "1", "--no-plot")  # fmt: skip
SIZE = ("size", "--trace", "sample", "--models", "llama-3.2-1b*8", "--systems", "static", "--gpus", "1-1", "--slo",
        "absolute:ttft=1,tpot=1", "--windows", "1", "--no-plot", "--grow", "1", "--workers", "1")  # fmt: skip
ROWS, SCORED, SIZED = "requests.parquet", "attainment.parquet", "size.parquet"
FLIPS = 40  # of each file
SEAL = b"benchSHA"  # begins the digests of a file; a flip in it leaves rows and facts as they were
OTHERS: tuple[Any, ...] = (None, 0, -1, 1.5, "x", "", True, [], {}, [None], {"x": None}, 1e300)


class Store(NamedTuple):
    """Results that are whole: a comparison's folder with those of its runs, all below `top`."""

    top: Path
    sweep: str
    run: str

    def copy(self, to: Path) -> Store:
        """Copy it to another folder."""
        shutil.copytree(self.top, to)
        return self._replace(top=to)

    @property
    def rows(self) -> Path:
        """The rows of the run."""
        return self.top / self.run / ROWS

    @property
    def scored(self) -> Path:
        """The scored table."""
        return self.top / self.sweep / SCORED

    def of_run(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield commands that read the run."""
        run = str(self.top / self.run)
        yield "misses", ("explain", run, "--misses")
        yield "request", ("explain", run, "--request", "3")
        yield "timeline", ("timeline", run, "-o", str(self.top / "t.json"))

    def of_sweep(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield commands that read the comparison's table."""
        sweep = str(self.top / self.sweep)
        yield "plot", ("plot", sweep, "--figure", "compare", "-o", str(self.top / "figure"))
        yield "misses", ("explain", sweep, "--misses")
        yield "report", ("report", sweep, "-o", str(self.top / "page.html"))

    def of_all(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield commands that read or write whatever stands there."""
        yield "compare", (*COMPARE, "-o", str(self.top))


def made(here: Path) -> Store:
    """Make a comparison of two systems below `here`."""
    top = here / "whole"
    bench = [sys.executable, "-m", "harness"]
    subprocess.run([*bench, *COMPARE, "-o", str(top)], check=True, capture_output=True)
    sweep = next(top.glob(f"sample-*/{SCORED}")).parent.name
    return Store(top, sweep, next(top.glob("static-*")).name)


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield several hundred damages, each in a copy of its own below `here`."""
    whole, numbers = made(here), count()

    def anew() -> Store:
        return whole.copy(here / f"{next(numbers):04d}")

    def each(store: Store, what: str, culprit: str = "", accept: bool = True, kinds: str = "rsa") -> Iterator[Case]:
        """Yield the commands that read what was damaged; what writes has a copy of its own."""
        for letter, commands in zip("rsa", (store.of_run(), store.of_sweep(), store.of_all()), strict=True):
            for name, argv in commands if letter in kinds else ():
                yield Case(f"results/{what}/{name}", argv, culprit, accept or letter == "a")

    yield from _formed(whole)
    yield from _sizes(here, draw)
    yield from _bits(anew, each, draw)
    yield from _cuts(anew, each)
    yield from _facts(anew, each, draw)
    yield from _columns(anew, each)
    yield from _rows(anew, each)
    yield from _files(anew, each)


FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of `bench plot`: wrong and odd values
    "--width": (("0", "-1", "nan", "inf", "1e300", "0.1", "x", "", "41"), ("2.5", "30")),
    "--only": (("", ",", "nope", "prism,nope", "PRISM", "\udcff"), ("prism,prism", " static ")),
    "--rename": (("", "prism", "=x", "prism=", "nope=x", "\udcff=x"), ("prism=$x$", "prism=$x")),
    "--panel": (("z", "ab", "A", "\udcff"), ("", "e")),
    "--format": (("", "nope", "pdf,nope", "PDF", "pgf"), ("svg,svg", "png")),
    "--style": (("", "nope.mplstyle", "/dev/zero", "{here}", "{here}/bad.mplstyle", "{here}/binary.mplstyle"), ()),
}


def _formed(store: Store) -> Iterator[Case]:
    """Yield odd forms of a figure, and folders of which there is no page."""
    (store.top / "bad.mplstyle").write_text("font.sizee: 3\n")
    (store.top / "binary.mplstyle").write_bytes(bytes(range(256)))
    base = ("plot", str(store.top / store.sweep), "--figure", "compare", "-o", "figure")
    for option, (wrong, odd) in FORMS.items():
        for value in (*wrong, *odd):
            word = value.replace("{here}", str(store.top))
            yield Case(f"results/plot {option} {value[:40]!r}", (*base, option, word), accept=value in odd)
    for name in (*pools.NO_RUNS, "fig77", str(store.top), str(store.top / store.run)):
        yield Case(f"results/report {name[-40:]!r}", ("report", name, "-o", "page.html"), accept=False)
    for path in ("/proc/x.html", "/", str(store.top)):
        yield Case(
            f"results/report -o {path[-40:]!r}", ("report", str(store.top / store.sweep), "-o", path), accept=False
        )


def _sizes(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield damages of an answer of `bench size`: bits, ends, facts, columns."""
    top = here / "size"
    subprocess.run([sys.executable, "-m", "harness", *SIZE, "-o", str(top)], check=True, capture_output=True)
    whole = next(top.glob(f"*/{SIZED}"))
    data, about, table = whole.read_bytes(), facts(whole), pq.read_table(whole)
    numbers = count()

    def each(what: str, write: Callable[[Path], object], *, accept: bool) -> Iterator[Case]:
        folder = here / f"size-{next(numbers):03d}"
        folder.mkdir()
        write(folder / SIZED)
        read = {"plot": ("-o", "f"), "report": ("-o", "p.html"), "explain": ()}
        for name, options in read.items():
            argv = (name, str(folder), *options)
            yield Case(f"results/size {what}/{name}", argv, accept=accept and name != "explain")

    for _ in range(FLIPS // 2):
        damaged, at = flipped(data, draw)
        yield draw.choice(list(each(f"bit {at}", partial(_put, damaged), accept=False)))
    for keep in (0, 8, len(data) // 2, len(data) - 4):
        yield from each(f"cut at {keep}", partial(_put, data[:keep]), accept=False)
    paths = [
        *((key,) for key in about),
        *(("asked", key) for key in about["asked"]),
        ("best", "gpus"),
        ("cells", 0),
        ("views", 0),
    ]
    for steps in paths:
        value: Any = about
        for step in steps:
            value = value[step]
        for other in _others(value, draw, 1):
            stated = changed(about, steps, other)
            what = f"{'.'.join(map(str, steps))} {'gone' if other is GONE else json.dumps(other)}"
            yield from each(what, partial(_rewritten, table, stated), accept=True)
    for name in table.column_names:
        left = table.drop_columns([name])
        yield from each(f"column {name} gone", partial(_rewritten, left, about), accept=False)
        typed = _typed(table, name, pa.bool_())
        yield from each(f"column {name} bool", partial(_rewritten, typed, about), accept=name == "answer")


def _put(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _rewritten(table: pa.Table, about: Mapping[str, Any], path: Path) -> None:
    rewrite(path, table, about)


Each = Callable[..., Iterator[Case]]
Anew = Callable[[], Store]


def flipped(data: bytes, draw: random.Random) -> tuple[bytes, int]:
    """Return the bytes with one bit turned over, but none of the seal's mark; and which byte it is in."""
    mark = data.rfind(SEAL)
    while True:
        at = draw.randrange(len(data))
        if mark < 0 or not mark <= at < mark + len(SEAL):
            damaged = bytearray(data)
            damaged[at] ^= 1 << draw.randrange(8)
            return bytes(damaged), at


def _bits(anew: Anew, each: Each, draw: random.Random) -> Iterator[Case]:
    """Yield cases of one flipped bit."""
    for which, kinds, files in (("rows", "r", 2 * FLIPS), ("scored", "s", FLIPS)):
        for _ in range(files):
            store = anew()
            path: Path = getattr(store, which)
            data, at = flipped(path.read_bytes(), draw)
            path.write_bytes(data)
            chosen = list(each(store, f"bit {at} of {path.name}", path.name, accept=False, kinds=kinds))
            yield draw.choice(chosen)
    for which in ("rows", "scored"):
        for _ in range(8):
            store = anew()
            path = getattr(store, which)
            data, at = flipped(path.read_bytes(), draw)
            path.write_bytes(data)
            yield draw.choice(list(each(store, f"bit {at} of {path.name}", kinds="a")))


def _cuts(anew: Anew, each: Each) -> Iterator[Case]:
    """Yield files that end early, or are not what they were."""
    for which, kinds in (("rows", "r"), ("scored", "s")):
        for keep in (0, 1, 4, 8, 12, 0.5, -1, -4, -8, -9, -100):
            store = anew()
            path: Path = getattr(store, which)
            data = path.read_bytes()
            path.write_bytes(data[: keep if isinstance(keep, int) else round(keep * len(data))])
            yield from each(store, f"{path.name} cut at {keep}", path.name, accept=False, kinds=kinds)
            if keep in {0, 0.5, -9}:
                yield from each(anew_like(store, anew), f"{path.name} cut at {keep}", kinds="a")
        for name, data in (("text", b"hello\n"), ("magic", b"PAR1 torn PAR1"), ("zeros", bytes(4096))):
            store = anew()
            path = getattr(store, which)
            path.write_bytes(data)
            yield from each(store, f"{path.name} is {name}", path.name, accept=False, kinds=kinds)


def anew_like(store: Store, anew: Anew) -> Store:
    """Return another copy with the same damage, for commands that mend it."""
    other = anew()
    for path in (store.rows, store.scored):
        (other.top / path.relative_to(store.top)).write_bytes(path.read_bytes())
    return other


def facts(path: Path) -> dict[str, Any]:
    """Return the facts of a file's footer."""
    known = pq.read_metadata(path).metadata
    return {key.decode(): json.loads(known[key]) for key in known if not key.startswith((b"ARROW", b"pandas"))}


def rewrite(path: Path, table: pa.Table, about: Mapping[str, Any]) -> None:
    """Write a file as a release without digests did, or another program does."""
    stated = {key: json.dumps(value) for key, value in about.items()}
    pq.write_table(table.replace_schema_metadata(stated), path, compression="zstd")


GONE = object()


def _others(value: Any, draw: random.Random, most: int) -> list[Any]:
    """Return values of other types in place of one, and its absence."""
    kinds = [kind for kind in OTHERS if type(kind) is not type(value) or isinstance(kind, str | float)]
    return [GONE, None, *draw.sample(kinds, most)]


def changed(about: Mapping[str, Any], steps: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the facts with one of them, or a part of it, changed."""
    facts: Any = json.loads(json.dumps(about))
    inner = facts
    for step in steps[:-1]:
        inner = inner[step]
    if value is GONE:
        del inner[steps[-1]]
    else:
        inner[steps[-1]] = value
    return dict(facts)


def _facts(anew: Anew, each: Each, draw: random.Random) -> Iterator[Case]:
    """Yield facts one at a time, and parts of the deep ones."""
    store = anew()
    about, scored = facts(store.rows), facts(store.scored)
    paths: list[tuple[str, tuple[Any, ...]]] = [("rows", (key,)) for key in about]
    paths += [("rows", ("spec", key)) for key in about["spec"]]
    paths += [("rows", ("counts", "done")), ("rows", ("stats", "gpus"))]
    paths += [("scored", (key,)) for key in scored]
    paths += [("scored", ("judges", 0)), *(("scored", ("judges", 0, key)) for key in scored["judges"][0])]
    paths += [("scored", ("judges", 0, "seconds", next(iter(scored["judges"][0]["seconds"]))))]
    paths += [("scored", ("runs", store.run)), ("scored", ("panels", 0))]
    paths += [("scored", ("panels", 0, key)) for key in scored["panels"][0]]
    for which, steps in paths:
        known: Any = about if which == "rows" else scored
        value = known
        for step in steps:
            value = value[step]
        for other in _others(value, draw, 2 if len(steps) == 1 else 1):
            store = anew()
            path: Path = getattr(store, which)
            rewrite(path, pq.read_table(path), changed(known, steps, other))
            what = f"{'.'.join(map(str, steps))} of {path.name} {'gone' if other is GONE else json.dumps(other)}"
            vital = steps == ("spec",) or (which, steps) in {("rows", ("skipped",)), ("scored", ("judges",))}
            bad = vital and other is not None
            chosen = list(each(store, what, accept=not bad, kinds="r" if which == "rows" else "s"))
            if bad and which == "scored":  # figures of a comparison are drawn from its table, and read no judges
                chosen = [case for case in chosen if not case.name.endswith("/plot")]
            yield draw.choice(chosen)
            if draw.random() < 0.2:
                yield draw.choice(list(each(store, what, kinds="a")))
            if which == "rows" and draw.random() < 0.2:
                yield Case(
                    f"results/{what}/plot",
                    ("plot", str(store.top / store.sweep), "--figure", "compare", "-o", str(store.top / "figure")),
                )
    for which in ("rows", "scored"):
        store = anew()
        path = getattr(store, which)
        path_facts = {key: json.dumps(value) for key, value in facts(path).items()}
        key = next(iter(path_facts))
        for name, text in (("not JSON", "{"), ("NaN", "NaN"), ("deep", "[" * 50_000), ("not UTF-8", b"\xff\xfe")):
            store = anew()
            path = getattr(store, which)
            table = pq.read_table(path).replace_schema_metadata({**path_facts, key: text})
            pq.write_table(table, path)
            yield from each(store, f"{key} of {path.name} {name}", kinds="r" if which == "rows" else "s")


def _typed(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    """Return the table with a column of another type, of nulls where its values do not become that."""
    at = table.schema.get_field_index(name)
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    try:
        column = column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        column = pa.nulls(len(table), kind)
    return table.set_column(at, pa.field(name, kind), column)


def _columns(anew: Anew, each: Each) -> Iterator[Case]:
    """Yield columns one at a time: gone, null, of another type, twice."""
    store = anew()
    for which, kinds in (("rows", "r"), ("scored", "s")):
        path: Path = getattr(store, which)
        table, about = pq.read_table(path), facts(path)
        for i, name in enumerate(table.column_names):
            field = table.schema.field(i)
            null = table.set_column(i, pa.field(name, field.type), pa.nulls(len(table), field.type))
            word = pa.types.is_dictionary(field.type)
            kind = (pa.int64(), pa.float64(), pa.list_(pa.int64()))[i % 3] if word else (pa.string(), pa.bool_())[i % 2]
            damaged = {
                "gone": table.drop_columns([name]),
                "null": null,
                f"of type {kind}": _typed(table, name, kind),
                "twice": table.append_column(pa.field(name, field.type), table[name]),
                "renamed": table.rename_columns([*table.column_names[:i], "other", *table.column_names[i + 1 :]]),
            }
            for k, (what, other) in enumerate(damaged.items()):
                store = anew()
                rewrite(getattr(store, which), other, about)
                cases = list(each(store, f"column {name} of {path.name} {what}", kinds=kinds))
                vital = name in {"arrival_ns", "id", "model", "state"}
                yield cases[(i + k) % len(cases)]._replace(accept=not vital)
                if not (i + k) % 10:
                    yield from each(store, f"column {name} of {path.name} {what}", kinds="a")


def _rows(anew: Anew, each: Each) -> Iterator[Case]:
    """Yield rows too few, too many, in another order, or with values that cannot be."""
    store = anew()
    table, about = pq.read_table(store.rows), facts(store.rows)
    of = table.column_names

    def put(name: str, value: Any) -> pa.Table:
        column = [value, *table[name].to_pylist()[1:]]
        kind = pa.string() if pa.types.is_dictionary(table.schema.field(name).type) else table.schema.field(name).type
        return table.set_column(of.index(name), name, pa.array(column, kind))

    for what, other in {
        "none": table.slice(0, 0),
        "half": table.slice(0, len(table) // 2),
        "twice": pa.concat_tables([table, table]),
        "turned": table.take(list(range(len(table)))[::-1]),
        "state nope": put("state", "nope"),
        "model nope": put("model", "nope"),
        "a model without a name": put("model", ""),
        "id -5": put("id", -5),
        "id 2^60": put("id", 1 << 60),
        "prompt_tokens -1": put("prompt_tokens", -1),
        "output_tokens 0": put("output_tokens", 0),
        "arrival_ns 2^62": put("arrival_ns", 1 << 62),
        "queue_ns -1": put("queue_ns", -(10**15)),
        "gpus nope": put("gpus", "nope"),
    }.items():
        store = anew()
        rewrite(store.rows, other, about)
        yield from each(store, f"rows {what}", kinds="r")
    store = anew()
    table, about = pq.read_table(store.scored), facts(store.scored)
    of = table.column_names
    for what, other in {
        "none": table.slice(0, 0),
        "one": table.slice(0, 1),
        "half": table.slice(0, len(table) // 2),
        "twice": pa.concat_tables([table, table]),
        "turned": table.take(list(range(len(table)))[::-1]),
        **{f"{name} {value}": put(name, value)
           for name, value in (("rate_scale", -1.0), ("rate_scale", float("nan")), ("rate_scale", 1e300),
                               ("rate_scale", 0.0), ("value", float("nan")), ("value", 1e300), ("value", -5.0),
                               ("run", "nope"), ("run", "../.."), ("run", ""), ("label", ""), ("label", "x" * 5000),
                               ("slo", "nope"), ("slo", None), ("label", None), ("gpu", "nope"), ("gpus", -1),
                               ("definition", "nope"), ("over", "nope"), ("n", -1), ("seed", -1),
                               ("condition", "nope"), ("x", float("nan")))},
    }.items():  # fmt: skip
        store = anew()
        rewrite(store.scored, other, about)
        yield from each(store, f"scored {what}", kinds="s")


def _files(anew: Anew, each: Each) -> Iterator[Case]:
    """Yield files swapped, and other things in their places."""
    store = anew()
    shutil.copy(store.scored, store.rows)
    yield from each(store, "scored table as rows", ROWS, accept=False, kinds="r")
    yield from each(store, "scored table as rows", kinds="a")
    store = anew()
    shutil.copy(store.rows, store.scored)
    yield from each(store, "rows as scored table", SCORED, accept=False, kinds="s")
    yield from each(store, "rows as scored table", kinds="a")
    store = anew()
    shutil.copy(next(store.top.glob("prism-*")) / ROWS, store.rows)
    yield from each(store, "another run's rows", kinds="ra")
    for which, kinds in (("rows", "r"), ("scored", "s")):
        for what, put in _ways().items():
            store = anew()
            path: Path = getattr(store, which)
            path.unlink()
            put(path)
            yield from each(store, f"{what} as {path.name}", accept=False, kinds=kinds)
            other = anew()
            path = getattr(other, which)
            path.unlink()
            put(path)
            yield from each(other, f"{what} as {path.name}", kinds="a")
            store = anew()
            folder = getattr(store, which).parent
            shutil.rmtree(folder)
            put(folder)
            yield from each(store, f"{what} as the folder of {path.name}", accept=False, kinds=kinds)
            yield from each(store, f"{what} as the folder of {path.name}", kinds="a")
    for what, put in _ways().items():
        store = anew()
        shutil.rmtree(store.top)
        put(store.top)
        # a command that writes makes what a lost link points to, and then it is a folder as any
        yield from each(store, f"{what} as the results", accept=what == "a lost link")
    for name, data in (
        ("side.json", b"{"),
        ("side.json", b"[]"),
        ("side.json", b'{"cpu_s": "x", "requests": null}'),
        ("side.json", b'{"cpu_s": 1e999, "requests": 0}'),
        ("solo.parquet", b"PAR1"),
        ("turns.parquet", b"PAR1"),
        ("turns.parquet", b""),
    ):
        store = anew()
        (store.top / store.run / name).write_bytes(data)
        shutil.rmtree(next(store.top.glob("prism-*")))
        yield from each(store, f"{name} {data!r}", kinds="ra")
        yield Case(f"results/{name} {data!r}/plot", ("plot", str(store.top / store.run)))
        run = str(store.top / store.run)
        yield Case(f"results/{name} {data!r}/solo", ("explain", run, "--misses", "--slo", "solo"))
    for name in ("solo.parquet", "turns.parquet", "sensitivity.parquet"):
        for what, put in _ways().items():
            store = anew()
            folder = store.top / (store.sweep if name.startswith("sens") else store.run)
            put(folder / name)
            yield Case(f"results/{what} as {name}/plot", ("plot", str(folder), "-o", str(store.top / "figure")))
            run = str(store.top / store.run)
            yield Case(f"results/{what} as {name}/solo", ("explain", run, "--misses", "--slo", "solo"))
        store = anew()
        folder = store.top / (store.sweep if name.startswith("sens") else store.run)
        shutil.copy(store.rows, folder / name)
        yield Case(f"results/rows as {name}/plot", ("plot", str(folder), "-o", str(store.top / "figure")))
        yield Case(f"results/rows as {name}/solo", ("explain", str(store.top / store.run), "--misses", "--slo", "solo"))


def _ways() -> dict[str, Callable[[Path], object]]:
    """Return other things that may stand at a path."""
    return {
        "a folder": lambda path: path.mkdir(),
        "a file": lambda path: path.write_bytes(b"x"),
        "a loop": lambda path: path.symlink_to(path.name),
        "a lost link": lambda path: path.symlink_to(f"nowhere-{path.parent.name}-{path.name}"),
        "a pipe": os.mkfifo,
    }
