"""The architecture as one table of allowed imports, from the bottom to the top.

The checker reads the sources, so lazy imports and imports for types count too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from harness.check.purity import impure
from harness.loop import engine
from tests import ROOT
from tests.cases import cases

PACKAGES = ("harness", "probe", "systems", "workloads", "traces", "plots")
GPU = "cuda cupy pycuda pynvml torch triton"


class Box(NamedTuple):
    """Allowed imports of a folder's modules: of ours the boxes named, of others the top-level names."""

    ours: str = ""
    others: str = ""


# A box imports boxes above its own line here, and itself. The names of `harness` are cut short.
ARCHITECTURE = {
    # what is said: values without behaviour, and all that a strategy may import
    "policy": Box(others="numpy"),
    "systems": Box("policy", "numpy scipy"),
    # arrays that need not fit into memory
    "spilled": Box("policy", "numpy"),
    # what is set before all else
    "target": Box(),
    # how things are kept
    "store": Box(),
    # what is read from files
    "toml": Box("policy", "annotated_types pydantic pydantic_core"),
    # what happens: one loop, and engines in which time passes
    "loop": Box("policy", "pyarrow"),
    "rows": Box("policy spilled store loop", "numpy pandas pyarrow scipy"),
    "client": Box("policy", "httptools numpy psutil uvloop"),  # what talks to real servers
    "probe": Box(others=f"numpy {GPU}"),
    "engines.costs": Box("policy toml", "annotated_types numpy"),
    "engines": Box("policy spilled rows engines.costs probe", f"numpy pyarrow {GPU}"),
    "engines.sim": Box("policy spilled target engines engines.costs", "llvmlite numba numpy pyarrow"),
    "engines.servers": Box("policy rows client engines engines.costs", "gguf numpy psutil pyarrow xllamacpp"),
    # tables of what is measured
    "calibrate": Box("policy probe engines engines.costs", "numpy pandas scipy"),
    # what is asked of it
    "traces": Box("policy spilled store", "numpy pandas pyarrow scipy"),
    "workloads": Box("policy spilled toml traces", "annotated_types numpy scipy"),
    # many runs, and what they say
    "run": Box(
        "policy target toml loop rows engines engines.costs engines.sim traces workloads",
        "annotated_types numpy pandas pyarrow scipy",  # Ray by name, in an environment of their own
    ),
    "study": Box(
        "policy toml loop rows engines engines.costs traces workloads run", "numpy pandas pyarrow scipy tomli_w"
    ),
    "answers": Box("policy rows run study", "numpy pandas pyarrow"),
    "validate": Box(
        "policy loop rows engines engines.costs calibrate workloads run study", "numpy pandas pyarrow scipy"
    ),
    "check": Box("policy loop rows engines engines.costs workloads", "numpy pyarrow"),
    "suite": Box("policy toml loop rows engines.sim run study answers check", "numpy pyarrow"),
    "plots": Box("policy rows", "PIL matplotlib numpy pandas pyarrow seaborn"),
    "cli": Box(
        "policy loop rows engines.costs calibrate traces workloads run study answers validate check suite plots",
        "click numpy pandas pyarrow tqdm",
    ),
}
MOST_ARROWS = 100  # ten of them are the suite's
# between folders of harness/ and packages; engines are one folder, single files count as none; nine are the suite's
MOST_FOLDER_ARROWS = 69
FILES = {"spilled", "target", "store", "toml"}
# These call what was found by name; nobody else in the harness says the name of a system.
NAMING = {"run", "study", "validate", "check", "suite", "cli"}
# Modules that run on a GPU import its libraries at their start, and are themselves imported where they are used.
DEVICE = {f"probe.{name}" for name in ("driver", "kernels", "rig", "llama", "card", "compute", "memory", "sharing")}
DEVICE |= {
    f"harness.engines.torch.{name}" for name in ("cpu", "cuda", "cuda_links", "device", "fused", "model", "worker")
}


def modules() -> dict[str, Path]:
    """Return every module of ours by dotted name."""
    paths = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()
# Engines in front of servers lie where engines are found by their names: those that import harness/engines/servers.
OF_SERVERS = {
    f"engines.{name}"
    for name in engine.names()
    if re.search(r"^from harness\.engines\.servers\b", engine.path(name).read_text("utf-8"), re.MULTILINE)
}


def box(module: str) -> str | None:
    """Return the box that a dotted name lies in; None for what is not ours, and for the face of the package."""
    name = module.removeprefix("harness.")
    if name in OF_SERVERS:
        return "engines.servers"
    parts = name.split(".")
    return next((key for k in (2, 1) if (key := ".".join(parts[:k])) in ARCHITECTURE), None)


class Import(NamedTuple):
    """One imported name, where, and whether `import` of the module alone runs it."""

    name: str
    line: int
    eager: bool


def imports(module: str, source: str) -> Iterator[Import]:
    """Yield imported names in full; `from harness.rows import record` is `harness.rows.record`."""

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = module.split(".")[: -child.level] if child.level else []
                stem = ".".join([*base, *([child.module] if child.module else [])])
                yield from (Import(f"{stem}.{alias.name}", child.lineno, eager) for alias in child.names)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from walk(child, eager and not lazy)

    return walk(ast.parse(source), True)


def breaches(module: str, source: str) -> list[str]:
    """Return every breach of the table in one module, as `line: what`."""
    home = box(module)
    if home is None:
        return [] if module in {"harness", "harness.__main__"} else [f"{module} is in no box of the architecture"]
    rule, lines = ARCHITECTURE[home], []
    for arrow in imports(module, source):
        top = arrow.name.split(".", 1)[0]
        if top in PACKAGES or not top:
            to = box(arrow.name)
            if to is None or (to != home and to not in rule.ours.split()):
                lines.append(f"{arrow.line}: {home} cannot import {arrow.name}")
            elif arrow.eager and module not in DEVICE and any(f"{arrow.name}.".startswith(f"{d}.") for d in DEVICE):
                lines.append(f"{arrow.line}: {arrow.name} must be imported where it is used")
        elif top not in sys.stdlib_module_names and top not in rule.others.split():
            lines.append(f"{arrow.line}: {home} cannot import {arrow.name}")
        elif arrow.eager and module not in DEVICE and top in GPU.split():
            lines.append(f"{arrow.line}: {arrow.name} must be imported where it is used")
        elif arrow.eager and home == "cli" and top not in {"click", *sys.stdlib_module_names}:
            lines.append(f"{arrow.line}: {module} imports {arrow.name} at its start")
    if home == "systems":
        lines += [f"{line}: {what}" for line, what in impure(source)]
    elif module.startswith("harness.") and home not in NAMING:
        lines += named(source)
    return lines


def named(source: str) -> list[str]:
    """Yield strings that are a system's name and nothing else: "elastic" is also KV memory, "swap" a preemption."""
    names = {path.stem for path in (ROOT / "systems").glob("*.py")} - {"__init__", "elastic", "swap"}
    return [
        f'{node.lineno}: names the system "{node.value}"'
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in names
    ]


def test_every_module_keeps_to_the_architecture() -> None:
    assert {name: wrong for name, path in MODULES.items() if (wrong := breaches(name, path.read_text("utf-8")))} == {}


def test_arrows_point_down_and_are_few() -> None:
    above: set[str] = set()
    for name, rule in ARCHITECTURE.items():
        assert set(rule.ours.split()) <= above, name
        above.add(name)
    arrows = {(home, to) for home, rule in ARCHITECTURE.items() for to in rule.ours.split()}
    assert len(arrows) <= MOST_ARROWS
    folders = {(home.split(".")[0], to.split(".")[0]) for home, to in arrows if not {home, to} & FILES}
    assert len({(home, to) for home, to in folders if home != to}) <= MOST_FOLDER_ARROWS


def test_every_arrow_is_there() -> None:
    have = {(box(m), box(arrow.name)) for m, path in MODULES.items() for arrow in imports(m, path.read_text("utf-8"))}
    assert [(a, b) for a, rule in ARCHITECTURE.items() for b in rule.ours.split() if (a, b) not in have] == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other, if some do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def within(name: str) -> str | None:
    """Return the module that a dotted name is, or lies in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def test_no_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        to = {within(arrow.name) for arrow in imports(module, path.read_text("utf-8"))}
        graph[module] = {name for name in to if name not in {None, module}}
    graph["harness"] = set()  # the package's face, which imports lazily
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_engines_do_not_build_on_each_other() -> None:
    packages = {
        "sim": "harness.engines.sim",
        **{name: f"harness.engines.{name}" for name in engine.names() if name != "sim"},
    }
    for module, path in MODULES.items():
        if box(module) in {"engines", "engines.sim", "engines.costs"}:
            for arrow in imports(module, path.read_text("utf-8")):
                into = [name for name, package in packages.items() if f"{arrow.name}.".startswith(f"{package}.")]
                assert not into or module.startswith(packages[into[0]]), f"{module}:{arrow.line} imports {arrow.name}"


PLANTED = [
    ("harness.policy.types", "from harness.loop.system import System", "policy cannot import"),
    ("harness.policy.types", "if TYPE_CHECKING:\n    from harness.loop.system import System", "policy cannot import"),
    ("harness.loop.system", "def f():\n    from harness.run.execute import execute", "loop cannot import"),
    ("harness.loop.replay", "from harness.engines.sim.engine import Sim", "loop cannot import"),
    ("harness.loop.replay", "import torch", "cannot import torch"),
    ("harness.rows.record", "from harness.answers import table", "rows cannot import"),
    ("harness.rows.record", "if x == 'dedicated':\n    pass", 'names the system "dedicated"'),
    ("harness.rows.record", "from matplotlib import pyplot", "cannot import matplotlib"),
    ("harness.run.sweep", "from ..cli import app", "run cannot import"),
    ("harness.engines.machine", "from harness.engines.sim import kernel", "engines cannot import"),
    ("harness.engines.costs.kernels", "from harness.engines.sim.engine import Sim", "engines.costs cannot import"),
    ("harness.engines.sim.engine", "from harness.loop.replay import replay", "engines.sim cannot import"),
    ("harness.engines.sim.engine", "from systems import prism", "engines.sim cannot import"),
    ("harness.engines.local", "import torch", "where it is used"),
    ("harness.engines.local", "try:\n    from cuda.bindings import driver\nfinally:\n    pass", "where it is used"),
    ("harness.engines.local", "from harness.client import pool", "engines cannot import"),
    ("harness.engines.vllm", "def f():\n    import vllm", "cannot import vllm"),
    ("probe.conduct", "from probe import rig", "where it is used"),
    ("probe.rig", "from harness.calibrate import grid", "probe cannot import"),
    ("harness.calibrate.grid", "from harness.rows import record", "calibrate cannot import"),
    ("harness.utils", "", "in no box"),
    ("harness.cli.app", "import numpy as np", "at its start"),
    ("harness.cli.app", "try:\n    import tqdm\nfinally:\n    pass", "at its start"),
    ("harness.cli.app", "def f():\n    import torch", "cannot import torch"),
    ("traces.load", "from workloads.models import ModelSet", "traces cannot import"),
    ("workloads.build", "from harness.engines.costs.coefficients import tables", "workloads cannot import"),
    ("plots.fig_compare", "from harness.run.sweep import sweep", "plots cannot import"),
    ("systems.prism", "from harness.loop.replay import replay", "systems cannot import"),
    ("systems.prism", "def f():\n    from time import monotonic", "imports time.monotonic"),
    ("systems.prism", "import random", "imports random"),
    ("systems.prism", "import numpy as np\nx = np.random.default_rng(0)", "numpy.random"),
    ("systems.prism", "from systems.static import Static", "imports systems.static"),
    ("systems.prism", "from . import static", "imports ."),
    ("systems.prism", "x = open('x')", "uses open"),
]


@cases(("module", "source", "says"), PLANTED)
def test_planted_breach_is_found(module: str, source: str, says: str) -> None:
    assert any(says in breach for breach in breaches(module, source))


ALLOWED = [
    ("harness.policy.events", "from harness.policy.actions import Action"),
    ("harness.engines.local", "def step():\n    import torch"),
    ("probe.rig", "import torch\nfrom probe import driver, kernels"),
    ("harness.run.execute", "import workloads.build\nif x == 'dedicated':\n    pass"),
    ("harness.cli.app", "import click\ndef f():\n    from harness.run.sweep import sweep\n    import pyarrow"),
    ("harness.__main__", "from harness.cli.app import main"),
    ("systems.prism", "import math\nimport numpy as np\nfrom scipy.optimize import milp\nx = np.argsort(request.id)"),
]


@cases(("module", "source"), ALLOWED)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(module, source) == []


def test_the_command_line_starts_light() -> None:
    heavy = "matplotlib numba numpy pandas pyarrow pydantic scipy seaborn tqdm"
    code = f"import sys, harness.cli.app; print(*sorted(set('{heavy}'.split()) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")
