"""The interface of engines. An engine lets time pass: a simulator jumps to the next event, a GPU or a server waits.

An engine is a module or package in harness/engines that defines `make`. Its settings are `engines/machine.Config`. An
engine may also define a dataclass `Fields`, whose fields users set. They are declared and written in the same way as
the fields of a system.
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
    """The methods that `replay` calls on an engine: a simulator, a GPU or a server.

    Each object has its own attributes, which depend on its settings.

    Calls come in this order: `make`, `ready`, `take`, the actions that answer "start" (`do`), `begin`. Then `poll`,
    `do`, `view` and `idle` repeat until the run ends; `rows`, `stats` and `close` come last. An engine may also be
    closed right after `make`.
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
        """Do what takes time or needs a device, before the first action: import, allocate memory, launch servers.

        It is called once. Before this call the engine starts nothing and touches no device, because some callers make
        an engine only to list its abilities. Raises UserError if something is missing.
        """
        ...

    def take(self, jobs: Jobs) -> None:
        """Take over the workload; from now on only the engine knows it. Report each request only when it is due."""
        ...

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the clock at `Config.start_s`; let no time pass beyond `end_s`.

        All actions before this call are from the policy's answer to "start". Loads among them take no time and send no
        event. `hears` contains the types of events that the policy wants. It also contains the types of actions whose
        successful end the policy wants reported. `oracle` permits `View.oracle_tokens`.
        """
        ...

    def poll(self, until_s: float) -> Event | None:
        """Return the next event that is due by `until_s` and by the run's end, or None.

        After None, the clock is at `until_s` or at the run's end, whichever is earlier.

        After a refusal "not now", return `Freed` as soon as any resource that the refused action may have lacked is
        free again. `Freed` comes once, before the other events of that instant, even if the policy does not want this
        event.

        On a wall clock, the time may exceed `until_s` by the rest of the step that is being executed. If `until_s` is
        infinite, the caller issues no action before the next event. If nothing else can happen in this case, the first
        load or move that waits for memory fails, at the time of the last event.
        """
        ...

    def do(self, action: Action) -> Done | None:
        """Start an action. A later event reports that it ended, or was refused for good ("never", "gone").

        A refusal "not now" is returned at once, and the caller issues the action again after `Freed`. A refused action
        changes nothing.
        """
        ...

    def view(self) -> View:
        """Return the view that policies read: queries on the state at the last `poll`."""
        ...

    def idle(self) -> bool:
        """Tell whether nothing more will happen without a new action."""
        ...

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the result of each request, in order of id (schema: harness/rows/schema.py)."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return counters of the run for its metadata; called after `rows`.

        Sums of seconds and bytes cover the window alone, without warm-up and drain. `span_s` is the length of the
        window.
        """
        ...

    def close(self) -> None:
        """Release everything: processes, devices, files. Always called, also after errors, Ctrl-C and SIGTERM.

        May be called before `ready`, and twice.
        """
        ...


@runtime_checkable
class Observed(Protocol):
    """An engine of real servers, whose requests a client observed. These methods are called after `rows`."""

    def about(self) -> Mapping[str, Any]:
        """Return facts for the run's metadata, as JSON values.

        `verdict` tells whether the run is a valid measurement of its servers. It contains `valid`, `reasons`, numbers,
        and a one-line `text`. `served` gives, for each model, the server and the model's name on that server.
        """
        ...

    def side(self) -> Mapping[str, Any]:
        """Return facts that are not results: faults, the seconds that servers took to start, the client's load."""
        ...

    def files(self) -> Mapping[str, Iterable[bytes]]:
        """Return further files of the run, by name.

        The call may come before `rows`; the bytes are read only after `rows`.
        """
        ...


class Make(Protocol):
    """The function `make` of an engine's file; it starts nothing. A fourth argument is the file's `Fields`, if any."""

    def __call__(self, config: Any, options: Mapping[str, Option], machine: Any) -> Engine:
        """Return an engine for a `Config`, the `options` that a system asks for, and the `Machine` of its costs.

        Options that the engine does not offer are ignored here; `replay` refuses the pair.
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
    """Return the names of the engines in harness/engines. Their files are read, but not imported."""
    files = (*FOLDER.glob("*.py"), *FOLDER.glob("*/__init__.py"))
    return tuple(sorted(_stem(file) for file in files if MAKES.search(file.read_text("utf-8", "replace"))))


def _stem(file: Path) -> str:
    return file.parent.name if file.stem == "__init__" else file.stem


def path(text: str) -> Path:
    """Return the file of an engine, by name (`sim`) or path (`./mine.py`). Raises UserError if there is none."""
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
    """Import an engine's module, by name or path. Raises UserError if there is none or the import fails."""
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
    """Return the function that makes the engine that `text` names.

    `text` is NAME[:PRESET][+FIELD=VALUE...], where NAME may also be the path of a .py file. Raises UserError if no such
    engine exists, if the engine does not have these fields, or if its file fails. The returned function raises
    UserError if the engine lacks a required member.
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
    """Return the fields that are set for an engine, by a preset or one by one, checked by its dataclass `Fields`."""
    return fields.values(given, _takes(declared), getattr(declared, "presets", {}))


def canonical(text: str) -> str:
    """Return the canonical text for an engine: a path becomes absolute, and fields at their defaults are left out."""
    given = fields.asked(text)
    name = str(path(text)) if given.name.endswith(".py") else given.name
    if not given.fields:
        return str(given._replace(name=name))
    declared = getattr(module(text), "Fields", None)
    chosen, bare = _chosen(given, declared), _chosen(given._replace(fields={}), declared)
    stated = {field: domain.default for field, domain in _takes(declared).items()} | bare
    return str(given._replace(name=name, fields={f: chosen[f] for f in given.fields if chosen[f] != stated[f]}))


def _blamed(file: Path, error: BaseException) -> UserError:
    """Return an error that says in one line what went wrong in an engine's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = next(iter(str(error).splitlines()), "")
    at = f":{line}" if line else ""
    return UserError(f"{_near(file)}{at}: {type(error).__name__}{f' ({what})' if what else ''}")


def _near(file: Path) -> Path:
    """Return a file's path relative to the repository if the file is in it; else return the path unchanged."""
    root = FOLDER.parents[1]
    return file.relative_to(root) if file.is_relative_to(root) else file
