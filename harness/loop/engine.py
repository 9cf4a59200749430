"""The interface of engines, in which time passes: a simulator jumps, a GPU or a server waits. Found by name.

A module or package of harness/engines that defines `make` is an engine; its settings are `engines/machine.Config`. A
user may set the fields of its own dataclass `Fields`, which are declared and asked for as those of a system.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from harness.loop import strangers
from harness.policy import fields
from harness.policy.actions import Action
from harness.policy.events import Done, Event
from harness.policy.types import Cluster, Fidelity, Infeasible, Jobs, Option, Unsupported, UserError
from harness.policy.view import View

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = Path(__file__).resolve().parents[1] / "engines"
MAKES = re.compile(r"^def make\(", re.MULTILINE)


class Engine(Protocol):
    """The methods that `replay` calls on a simulator, a GPU or a server. Fields belong to the configured object.

    The life of an engine: `make`, `ready`, `take`, the actions that answer "start" (`do`), `begin`, then `poll`, `do`,
    `view` and `idle` until the run ends, `rows`, `stats`, `close`. An engine that was made may also be closed at once.
    """

    can: frozenset[str]  # the actions and fields that it carries out, as in `System.uses`; others it refuses
    tells: frozenset[type]  # events, and actions whose successful `Done` it tells
    offers: Mapping[str, tuple[Option, ...]]  # values of `System.options`
    cluster: Cluster  # what policies may know: its GPUs and models as they are here, with these options
    fidelity: Fidelity
    wall_clock: bool  # its seconds are real: decisions take the time that they take, and nothing is added for them
    exclusive: bool  # two runs at once would disturb each other: a sweep does its runs one by one, beside nothing else
    measured_on: Mapping[str, str]  # the machine behind a `real` or `emulated` row: host, processor, libraries
    lacks: str  # what it needs and is not here, with the way to get it, as `ready` would say; "" where it can start

    def ready(self) -> None:
        """Start what takes time or a device: import, allocate, launch servers. Once, before the first action.

        Until then nothing is started and no device is touched: engines are also made to list what they can do.
        Raises UserError where something is missing.
        """
        ...

    def take(self, jobs: Jobs) -> None:
        """Keep the workload: from here on the engine alone has it, and reports no request before it is due."""
        ...

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the clock at `Config.start_s`; pass no time beyond `end_s`.

        Actions done before are the answers to "start": their Loads are free and silent. `hears` holds the kinds of
        events, and of actions whose successful end, the policy wants to be told. `oracle` opens `View.oracle_tokens`.
        """
        ...

    def poll(self, until_s: float) -> Event | None:
        """Return the next event that is due by `until_s` and by the run's end, or None.

        If it is None, the clock stands at the earlier of these two times.

        After a refusal "not now", return `Freed` as soon as anything came free that the action may have lacked: once,
        before the other events of that instant, and whether or not the policy hears it.

        A wall clock may have passed `until_s` by the rest of the step under way. If `until_s` is infinite, no action
        comes before the next event: so where nothing else can happen, the first load or move that waits for memory
        fails, at the time of the last event.
        """
        ...

    def do(self, action: Action) -> Done | None:
        """Start an action; its end comes back as an event, and so does a refusal for good ("never", "gone").

        A refusal "not now" is returned at once: the caller issues the action again after `Freed`. A refused action
        changes nothing.
        """
        ...

    def view(self) -> View:
        """Return read-only queries on the state at the last `poll`."""
        ...

    def idle(self) -> bool:
        """Tell whether nothing will ever happen again without a new action."""
        ...

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield what happened to each request, in order of id (schema: harness/rows/schema.py)."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return counters of the run for its metadata; asked for after `rows`.

        Sums of seconds and bytes are over `span_s`, which is the window: neither warm-up nor drain.
        """
        ...

    def close(self) -> None:
        """Give everything back: processes, devices, files. Always called, also on errors, Ctrl-C and SIGTERM.

        May come before `ready`, and twice.
        """
        ...


@runtime_checkable
class Observed(Protocol):
    """An engine whose requests were seen by a client of real servers. Its methods are called after `rows`."""

    def about(self) -> Mapping[str, Any]:
        """Return facts for the run's metadata, as JSON values.

        `verdict`: whether the run measured its servers (`valid`, `reasons`, numbers, and all in a line as `text`);
        `served`: by model, the server and the name under which it is served.
        """
        ...

    def side(self) -> Mapping[str, Any]:
        """Return facts beside the results: faults, how long starts took, what the client itself took."""
        ...

    def files(self) -> Mapping[str, Iterable[bytes]]:
        """Return further files of the run by name; it may be called before `rows`, but bytes are read after `rows`."""
        ...


class Make(Protocol):
    """`make` of an engine's file: quick, starts nothing. Where the file has `Fields`, they are its fourth argument."""

    def __call__(self, config: Any, options: Mapping[str, Option], machine: Any) -> Engine:
        """Configure the engine: a `Config`, what a system's `options` ask of it, and the `Machine` it is priced with.

        Options that it does not offer are ignored here; `replay` refuses the pair.
        """
        ...


MEMBERS = (*Engine.__annotations__, *(name for name in vars(Engine) if name[0] != "_" and callable(vars(Engine)[name])))


KINDS: Mapping[str, type] = {
    "can": frozenset,
    "tells": frozenset,
    "offers": Mapping,
    "cluster": Cluster,
    "measured_on": Mapping,
    "lacks": str,
}


@cache
def names() -> tuple[str, ...]:
    """Return the engines on hand: the directory is the registry. Files are read, not imported."""
    files = (*FOLDER.glob("*.py"), *FOLDER.glob("*/__init__.py"))
    return tuple(sorted(_stem(file) for file in files if MAKES.search(file.read_text("utf-8", "replace"))))


def _stem(file: Path) -> str:
    return file.parent.name if file.stem == "__init__" else file.stem


def path(text: str) -> Path:
    """Return the file of an engine, by name (`sim`) or by path (`./mine.py`). UserError if there is none."""
    name = fields.asked(text).name
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise UserError(f"no file {name}")
        return file
    if name not in (have := names()):
        raise UserError(f'no engine "{name}"{fields.meant(name, have)} (there is: {", ".join(have)})')
    file = FOLDER / f"{name}.py"
    return file if file.is_file() else FOLDER / name / "__init__.py"


def module(text: str) -> ModuleType:
    """Import the module of an engine, by name or by path. UserError if there is none, or its import fails."""
    name, file = fields.asked(text).name, path(text)
    try:
        return _of_file(file) if name.endswith(".py") else importlib.import_module(f"harness.engines.{name}")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _blamed(file, error) from error


def _of_file(file: Path) -> ModuleType:
    strangers.known(file)
    name = f"_engine_{file}"
    return sys.modules.get(name) or strangers.load(name, file)


def find(text: str) -> Make:
    """Find the maker of an engine: NAME[:PRESET][+FIELD=VALUE...], or the path of a .py in place of the name.

    Raises UserError if there is none, it does not take these fields, or its file fails or lacks a required member.
    """
    file, loaded = path(text), module(text)
    if not hasattr(loaded, "make"):
        raise UserError(f"{file}: no function `make`, so it is no engine")
    declared = getattr(loaded, "Fields", None)
    chosen = _chosen(fields.asked(text), declared)
    extra = () if declared is None else (declared(**chosen),)

    def make(config: Any, options: Mapping[str, Option], machine: Any) -> Engine:
        try:
            engine: Engine = loaded.make(config, options, machine, *extra)
        except (UserError, Infeasible, Unsupported):
            raise
        except Exception as error:
            raise _blamed(file, error) from error
        if lacking := [name for name in MEMBERS if not hasattr(engine, name)]:
            raise UserError(f"{_near(file)}: its engine has no `{lacking[0]}` (harness/loop/engine.py)")
        if wrong := [name for name, kind in KINDS.items() if not isinstance(getattr(engine, name), kind)]:
            raise UserError(f"{_near(file)}: its engine's `{wrong[0]}` is no {KINDS[wrong[0]].__name__}")
        return engine

    return make


def _takes(declared: type | None) -> dict[str, fields.Domain]:
    return {} if declared is None else fields.domains(declared)


def _chosen(given: fields.Asked, declared: type | None) -> dict[str, Option]:
    """Return the values of the fields that are set for an engine, checked by its dataclass `Fields`."""
    return fields.values(given, _takes(declared), getattr(declared, "presets", {}))


def canonical(text: str) -> str:
    """Return the canonical text that asks for an engine: a path is absolute, and fields at defaults are left out."""
    given = fields.asked(text)
    name = str(path(text)) if given.name.endswith(".py") else given.name
    if not given.fields:
        return str(given._replace(name=name))
    declared = getattr(module(text), "Fields", None)
    chosen, bare = _chosen(given, declared), _chosen(given._replace(fields={}), declared)
    stated = {field: domain.default for field, domain in _takes(declared).items()} | bare
    return str(given._replace(name=name, fields={f: chosen[f] for f in given.fields if chosen[f] != stated[f]}))


def _blamed(file: Path, error: BaseException) -> UserError:
    """Describe in one line what an engine's file did wrong."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = next(iter(str(error).splitlines()), "")
    at = f":{line}" if line else ""
    return UserError(f"{_near(file)}{at}: {type(error).__name__}{f' ({what})' if what else ''}")


def _near(file: Path) -> Path:
    """Return a file's path relative to the repository if the file lies in it; else the path as it is."""
    root = FOLDER.parents[1]
    return file.relative_to(root) if file.is_relative_to(root) else file
