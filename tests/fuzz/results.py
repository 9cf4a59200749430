"""Stored results that are damaged: bits turned over, files cut or swapped, facts and columns changed one at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz import odd
from tests.fuzz.judge import Case
from tests.fuzz.odd import GONE, words

SLO = "--rate-scale 1 --seeds 1 --slo absolute:ttft=1,tpot=1 --workers 1 --no-plot"
COMPARE = tuple(words(f"compare --systems static,prism --trace sample --models llama-3.2-1b*2 {SLO}"))
SIZE = words("size --trace sample --models llama-3.2-1b*8 --systems static --gpus 1-1 --slo absolute:ttft=1,tpot=1")
SIZE += words("--windows 1 --no-plot --grow 1 --workers 1")
ROWS, SCORED, SIZED = "requests.parquet", "attainment.parquet", "size.parquet"
SEAL = b"benchSHA"  # begins the digests of a file; a flip in it leaves rows and facts as they were
OTHERS: list[Any] = [GONE, None, 0, -1, 1.5, "x", "", True, [], {}, [None], {"x": None}, 1e300]
VITAL = {("rows", "spec"), ("rows", "skipped"), ("scored", "judges")}  # facts without which a table is refused
KEYS = {"arrival_ns", "id", "model", "state"}  # columns of rows without which they are refused
CELLS: Mapping[str, dict[str, list[Any]]] = json.loads("""{
"rows": {"state": ["nope"], "model": ["nope", ""], "id": [-5, 1152921504606846976], "prompt_tokens": [-1],
  "output_tokens": [0], "arrival_ns": [4611686018427387904], "queue_ns": [-1000000000000000], "gpus": ["nope"]},
"scored": {"rate_scale": [-1.0, NaN, 1e300, 0.0], "value": [NaN, 1e300, -5.0], "run": ["nope", "../..", ""],
  "label": ["", null], "slo": ["nope", null], "gpu": ["nope"], "gpus": [-1], "x": [NaN], "definition": ["nope"],
  "over": ["nope"], "n": [-1], "seed": [-1], "condition": ["nope"]},
"size": {}}""")  # values of a first row that cannot be
SIDES = """side.json { side.json [] side.json '{"cpu_s": "x", "requests": null}' side.json
'{"cpu_s": 1e999, "requests": 0}' solo.parquet PAR1 turns.parquet PAR1 turns.parquet ''"""
WAYS: Mapping[str, Callable[[Path], object]] = {  # other things that may stand at a path
    "a folder": lambda path: path.mkdir(),
    "a file": lambda path: path.write_bytes(b"x"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a lost link": lambda path: path.symlink_to(f"nowhere-{path.name}"),
    "a pipe": os.mkfifo,
}
FORMED = odd.options("""
--width *: 0 -1 nan inf 1e300 0.1 x '' 41 | 2.5 30
--only *: '' , nope prism,nope PRISM ¤ | prism,prism ' static '
--rename *: '' prism =x prism= nope=x ¤=x | prism=$x$ prism=$x
--panel *: z ab A ¤ | '' e
--format *: '' nope pdf,nope PDF pgf | svg,svg png
--style *: '' nope.mplstyle /dev/zero {here} {here}/bad.mplstyle {here}/binary.mplstyle
""")


Commands = list[tuple[str, tuple[str, ...]]]


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

    @property
    def again(self) -> tuple[str, tuple[str, ...]]:
        """The command that makes what is damaged or missing again."""
        return "compare", (*COMPARE, "-o", str(self.top))


class Table(NamedTuple):
    """A stored table: commands that refuse it where it is damaged, and those that mend it or do not read it."""

    which: str
    path: str  # below {here}
    read: Commands
    others: Commands


def made(here: Path) -> Store:
    """Make a comparison of two systems below `here`."""
    top = here / "whole"
    bench = [sys.executable, "-m", "harness"]
    subprocess.run([*bench, *COMPARE, "-o", str(top)], check=True, capture_output=True)
    return Store(top, next(top.glob(f"sample-*/{SCORED}")).parent.name, next(top.glob("static-*")).name)


def facts(path: Path) -> dict[str, Any]:
    """Return the facts of a file's footer."""
    known = pq.read_metadata(path).metadata
    return {key.decode(): json.loads(known[key]) for key in known if not key.startswith((b"ARROW", b"pandas"))}


def rewrite(path: Path, table: pa.Table, about: Mapping[str, Any]) -> None:
    """Write a file as a release without digests did, or another program does."""
    stated = {key: json.dumps(value) for key, value in about.items()}
    pq.write_table(table.replace_schema_metadata(stated), path, compression="zstd")


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw a damage of a table or of what lies beside it, and a command that reads or mends it."""
    whole = made(here)
    there = whole._replace(top=Path("{here}/whole"))
    subprocess.run([sys.executable, "-m", "harness", *SIZE, "-o", str(here / "size")], check=True, capture_output=True)
    sized = next((here / "size").glob(f"*/{SIZED}"))
    answer = f"{{here}}/size/{sized.parent.name}"
    sizes: Commands = [("plot", ("plot", answer, "-o", "f")), ("report", ("report", answer, "-o", "p.html"))]
    places = (f"whole/{whole.run}/{ROWS}", f"whole/{whole.sweep}/{SCORED}", f"size/{sized.parent.name}/{SIZED}")
    readers: tuple[Commands, ...] = ([*there.of_run()], [*there.of_sweep()], sizes)
    others: tuple[Commands, ...] = ([there.again, next(there.of_sweep())], [there.again], [])
    tables = [Table(*of) for of in zip(("rows", "scored", "size"), places, readers, others, strict=True)]
    top = partial(shutil.copytree, here, dirs_exist_ok=True)
    return st.one_of(
        *(_damaged(top, table, here / table.path) for table in tables),
        _beside(top, there),
        _formed(top, there),
    )


Top = Callable[[Path], object]


def _case(top: Top, table: Table, what: str, put: Top, *, accept: bool = False) -> st.SearchStrategy[Case]:
    def anew(here: Path) -> None:
        top(here)
        put(here / table.path)

    def case(of: tuple[int, tuple[str, tuple[str, ...]]]) -> Case:
        others, (name, argv) = of
        fine = accept or bool(others)
        culprit = "" if fine or table.which == "size" else Path(table.path).name
        return Case(f"results/{table.which} {what}/{name}", argv, culprit, fine, anew)

    read, others = ([(k, each) for each in some] for k, some in enumerate((table.read, table.others)))
    return st.sampled_from([*read, *read, *others]).map(case)


def _damaged(top: Top, table: Table, path: Path) -> st.SearchStrategy[Case]:
    """Draw a damage of a table's bytes, of what stands at its path, of its facts and of its columns."""
    data, content, about = path.read_bytes(), pq.read_table(path), facts(path)
    known = pq.read_metadata(path).metadata
    mark = data.rfind(SEAL)
    sealed = range(mark, mark + len(SEAL)) if mark >= 0 else range(0)
    whole = st.one_of(
        odd.bits(data).filter(lambda damage: int(damage[0].split()[1].split(".")[0]) not in sealed),
        odd.cuts(data),
        st.sampled_from([("is text", b"hello\n"), ("has a magic", b"PAR1 torn PAR1"), ("is zeros", bytes(4096))]),
    ).flatmap(lambda damage: _case(top, table, damage[0], lambda path: path.write_bytes(damage[1])))

    def stands(what: str, above: int) -> st.SearchStrategy[Case]:
        def put(path: Path) -> None:
            place = [path, path.parent, path.parent.parent][above]
            shutil.rmtree(place) if above else place.unlink()
            WAYS[what](place)

        lost = above == 2 and what == "a lost link"  # a command that writes makes the folder that it points to
        return _case(top, table, f"{what} {above} above", put, accept=lost or above > 0)

    def stated(part: tuple[tuple[Any, ...], Any, odd.Changed]) -> st.SearchStrategy[Case]:
        place, other, (what, others) = part
        vital = len(place) == 1 and (table.which, place[0]) in VITAL and other is not None
        case = _case(top, table, what, lambda path: rewrite(path, content, others), accept=not vital)
        # figures of a comparison are drawn from its table, and read no judges
        return case.map(lambda case: case._replace(accept=case.accept or case.name.endswith("/plot"), culprit=""))

    def written(pair: tuple[str, pa.Table | None]) -> st.SearchStrategy[Case]:
        what, other = pair
        vital = table.which == "rows" and what.split()[1] in KEYS and what.startswith("column")
        refused = vital or (table.which == "size" and what.endswith("gone"))
        case = _case(top, table, what, lambda path: rewrite(path, other, about), accept=not refused)
        return case.map(lambda case: case._replace(culprit=""))

    first = next(iter(about))
    raw = {"not JSON": "{", "NaN": "NaN", "deep": "[" * 50_000, "not UTF-8": b"\xff\xfe"}
    texts = [
        (f"{first} {what}", content.replace_schema_metadata({**known, first.encode(): text}))
        for what, text in raw.items()
    ]
    return st.one_of(
        whole,
        whole,
        st.tuples(st.sampled_from([*WAYS]), st.integers(0, 2)).flatmap(lambda pair: stands(*pair)),
        odd.parts(about, OTHERS).flatmap(stated),
        st.sampled_from(texts).flatmap(
            lambda pair: _case(top, table, pair[0], lambda path: pq.write_table(pair[1], path), accept=True)
        ),
        st.sampled_from([*_columns(content), *_rows(table.which, content)]).flatmap(written),
    )


def _columns(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield columns one at a time: gone, null, of another type, twice, renamed."""
    for at, field in enumerate(table.schema):
        name, what = field.name, f"column {field.name}"
        word, others = pa.types.is_dictionary(field.type), [*table.column_names]
        others[at] = "other"
        yield f"{what} gone", table.drop_columns([name])
        yield f"{what} null", table.set_column(at, pa.field(name, field.type), pa.nulls(len(table), field.type))
        yield f"{what} twice", table.append_column(pa.field(name, field.type), table[name])
        yield f"{what} renamed", table.rename_columns(others)
        for kind in (pa.int64(), pa.float64(), pa.list_(pa.int64())) if word else (pa.string(), pa.bool_()):
            column = table[name].cast(pa.string()) if word else table[name]
            try:
                column = column.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                column = pa.nulls(len(table), kind)
            yield f"{what} of type {kind}", table.set_column(at, pa.field(name, kind), column)


def _rows(which: str, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield rows too few, too many, in another order, or with values that cannot be."""
    yield "rows none", table.slice(0, 0)
    yield "rows half", table.slice(0, len(table) // 2)
    yield "rows twice", pa.concat_tables([table, table])
    yield "rows turned", table.take(list(range(len(table)))[::-1])
    for name, value in ((name, value) for name, some in CELLS[which].items() for value in some):
        field = table.schema.field(name)
        kind = pa.string() if pa.types.is_dictionary(field.type) else field.type
        column = pa.array([value, *table[name].to_pylist()[1:]], kind)
        yield f"row {name} {value!r:.20}", table.set_column(table.column_names.index(name), name, column)


def _beside(top: Top, there: Store) -> st.SearchStrategy[Case]:
    """Draw a file beside the tables that is not what its name says, or a table in another's place."""
    pairs = list(zip(*[iter(words(SIDES))] * 2, strict=True))
    texts = [(name, f"{text!r}", written) for name, text in pairs for written in [partial(_text, text)]]
    others = [(name, what, put) for name in ("solo.parquet", "turns.parquet") for what, put in WAYS.items()]
    run = f"whole/{there.run}"

    def beside(name: str, what: str, put: Top) -> st.SearchStrategy[Case]:
        def anew(here: Path) -> None:
            top(here)
            put(here / run / name)

        folder = str(there.top / there.run)
        commands = [("plot", folder, "-o", "figure"), ("explain", folder, "--misses", "--slo", "solo")]
        argvs = [*(argv for _, argv in there.of_run()), there.again[1], *commands]
        return st.sampled_from(argvs).map(
            lambda argv: Case(f"results/{what} as {name}/{argv[0]} {argv[-1]}", argv, put=anew)
        )

    def swapped(of: str, into: str, commands: Commands) -> st.SearchStrategy[Case]:
        def anew(here: Path) -> None:
            top(here)
            shutil.copy(next(here.glob(f"whole/{of}")), here / into)

        return st.sampled_from([*commands, there.again]).map(
            lambda pair: Case(
                f"results/{of} as {into}/{pair[0]}", pair[1], accept="prism" in of or pair[0] == "compare", put=anew
            )
        )

    return st.one_of(
        st.sampled_from([*texts, *others]).flatmap(lambda of: beside(*of)),
        swapped(f"{there.sweep}/{SCORED}", f"{run}/{ROWS}", [*there.of_run()]),
        swapped(f"{there.run}/{ROWS}", f"whole/{there.sweep}/{SCORED}", [*there.of_sweep()]),
        swapped(f"prism-*/{ROWS}", f"{run}/{ROWS}", [*there.of_run()]),
    )


def _text(text: str, path: Path) -> None:
    path.write_text(text)


def _formed(top: Top, there: Store) -> st.SearchStrategy[Case]:
    """Draw odd forms of a figure, and folders of which there is no page."""

    def put(here: Path) -> None:
        top(here)
        (here / "bad.mplstyle").write_text("font.sizee: 3\n")
        (here / "binary.mplstyle").write_bytes(bytes(range(256)))

    sweep = str(there.top / there.sweep)
    base = ("plot", sweep, "--figure", "compare", "-o", "figure")
    every = [
        Case(f"results/plot {name} {value[:40]!r}", (*base, name, value), accept=value in sane, put=put)
        for name, _, wrong, sane in FORMED
        for value in (*wrong, *sane)
    ]
    pages = [(name, "page.html") for name in (*words("!runs"), "fig77", str(there.top), str(there.top / there.run))]
    pages += [(sweep, path) for path in ("/proc/x.html", "/", "{here}")]
    every += [
        Case(f"results/report {name[-40:]!r} {path}", ("report", name, "-o", path), accept=False, put=put)
        for name, path in pages
    ]
    return st.sampled_from(every)
