"""The matrix of systems and engines. A cell is "yes", or lists what the engine lacks for the system.

Systems and engines declare names: a system what it `uses` and `hears` and its `options`, an engine what it `can`,
`tells` and `offers`. A cell lists the names of the system that the engine does not declare. For these,
`loop.replay.missing` refuses the pair. A pair without such names may still be impossible to run, because there is no
cost table for a policy that asks for one, or too few GPUs. Its cell then has that reason. Names that no engine in real
time has are in a column of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeVar

from harness.loop import engine, system
from harness.loop.guard import error_text
from harness.loop.replay import missing
from harness.policy.types import UserError
from harness.run.resolve import ROOMY, gaps, traits
from harness.run.setup import Setup, blamed
from harness.run.spec import Spec

# A word for several names, by the first beginning that fits; other names stand as they are.
WORDS = {
    "Run.phase": "turns", "Run.for_s": "turns", "Run.steps": "turns", "event TurnEnded": "turns",
    "Run.sms": "SM shares", "Run.op_s": "cut kernels", "Run.slice_layers": "cut prefills",
    "Run.seqs": "batch sizes", "Run.chunk_tokens": "chunk sizes",
    "Move.attend": "attention elsewhere", "Move": "KV moves", "event Move": "KV moves",
    "Evict.drain": "eviction at once", "Evict": "eviction", "event Evict": "eviction",
    "view.oracle_tokens": "true lengths", "Load.way:": "load by ", "option kv=": "KV ", "option memory=": "memory ",
    "option sharing=": "sharing ", "option process=": "process ",
}  # fmt: skip

PAGE = """\
# Which system runs on which engine

Each row is a system with the presets that run on the same engines. `yes`: it runs; `no ...`: features that the engine
lacks; `-`: it needs features that only the simulator has, named in the last column. `make docs` writes this page from
the declarations of systems and engines, for a host without a GPU; `bench list --matrix` prints that of your machine.
"""


T = TypeVar("T")


class Lack(NamedTuple):
    """The reason why a system with a preset does not run on an engine.

    `names` lists what the engine lacks. If nothing is lacking but the pair does not run, `why` has the reason. Both are
    empty if the pair runs.
    """

    names: tuple[str, ...] = ()
    why: str = ""


class Coverage(NamedTuple):
    """A system with a preset (None: its defaults), and what each engine lacks for it."""

    system: str
    preset: str | None
    lacks: Mapping[str, Lack]  # keyed by engine


@cache
def cell(name: str, preset: str | None, where: str) -> Lack:
    """Return what an engine lacks for a system with a preset.

    Each combination is tried once per process.
    """
    spec = Spec(name, preset=preset, **ROOMY)
    with blamed(spec):
        policy = Setup(replace(spec, gpus=traits(spec).gpus)).policy  # the simulator has room for any
        names = missing(policy, Setup(replace(spec, engine=where)).make_engine(policy.options))
    return Lack(tuple(names), "" if names else ", ".join(gaps(name, preset, where)))


def usable_engines() -> tuple[dict[str, engine.Engine], list[str]]:
    """Make the engines without starting them; return them by name, and a line for each whose file is broken."""
    return tried(engine.names(), _made)


def _made(where: str) -> engine.Engine:
    return Setup(Spec("static", engine=where, trace="sample")).bare_engine


def presets_of(name: str) -> tuple[str | None, ...]:
    """Return a system's presets, with None for its defaults first."""
    with blamed(Spec(name)):
        return (None, *system.find(name).presets)


def tried(names: Iterable[str], look: Callable[[str], T]) -> tuple[dict[str, T], list[str]]:
    """Apply `look` to each name: return its results by name, and a line for each name whose file is broken."""
    seen, broken = dict[str, T](), list[str]()
    for name in names:
        try:
            seen[name] = look(name)
        except UserError as error:
            broken.append(f"broken: {error}")
        except Exception as error:  # whatever somebody's file may raise
            broken.append(f"broken: {name}: {error_text(error)}")
    return seen, broken


def rows(systems: Iterable[str] | None = None, engines: Sequence[str] | None = None) -> Iterator[Coverage]:
    """Yield systems (default: all) with every preset, on engines (default: all); skip those with a broken file."""
    every = list(usable_engines()[0]) if engines is None else engines

    def look(name: str) -> list[Coverage]:
        return [Coverage(name, p, {where: cell(name, p, where) for where in every}) for p in presets_of(name)]

    for presets in tried(system.names() if systems is None else systems, look)[0].values():
        yield from presets


def parts(table: Sequence[Coverage]) -> tuple[list[list[str]], str]:
    """Return the rows of the matrix as lists of cells, and a text that explains its short names.

    The first row is the head. Presets of a system share a row if their cells are equal.
    """
    engines = list(table[0].lacks)
    real = [where for where in engines if _made(where).wall_clock]
    names = {where: {name for row in table for name in row.lacks[where].names} for where in engines}
    simulated = set.intersection(*(names[where] for where in real))
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in table:
        only = _words(name for where in real for name in row.lacks[where].names if name in simulated)
        cells = ("-" if only and where in real else _cell(row.lacks[where]) for where in engines)
        alike.setdefault((row.system, *cells, only), []).append(row.preset or "defaults")
    shown = ([name, ", ".join(presets), *cells] for (name, *cells), presets in alike.items())
    folded = dict[str, list[str]]()
    for name in sorted(set().union(*names.values())):
        folded.setdefault(_word(name), []).append(name)
    legend = (f"{word}: {', '.join(of)}" for word, of in sorted(folded.items()) if word in WORDS.values())
    meant = f"simulated only: features of no engine in real time. {'; '.join(legend)}."
    return [["system", "presets", *engines, "simulated only"], *shown], meant


def _word(name: str) -> str:
    """Shorten a name that an engine lacks, by `WORDS`."""
    start = next((start for start in WORDS if name.startswith(start)), None)
    if start is None:
        return name
    return WORDS[start] + (name[len(start) :] if WORDS[start].endswith(" ") else "")


def _words(names: Iterable[str]) -> str:
    """Shorten names, each once."""
    return ", ".join(dict.fromkeys(map(_word, names)))


def _cell(lack: Lack) -> str:
    """Return a cell's text: "yes", or "no" and the reason or what is lacking."""
    if lack == Lack():
        return "yes"
    return "no " + (lack.why.partition(":")[0] or _words(lack.names))
