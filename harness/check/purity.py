"""The names that a system's file may use: no clock, randomness, threads, I/O or view of the future.

This is an allow-list of names as they are written in the source. The interpreter that runs a policy also contains the
lengths of future outputs. So a policy may not use names by which Python code inspects Python: private attributes of
other objects, frames, unusual dunders, or attribute names that are computed. Members of modules must be listed here.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from string import Formatter
from types import ModuleType

HARNESS = Path(__file__).resolve().parents[1]
OURS = "harness.policy"
PUBLIC = "*"  # all public names there, and no module
MEMBERS = {
    "__future__": "annotations",
    "abc": "ABC abstractmethod",
    "bisect": PUBLIC,
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "collections.abc": PUBLIC,
    "dataclasses": "KW_ONLY InitVar asdict astuple dataclass field replace",
    "enum": "Enum Flag IntEnum IntFlag StrEnum auto unique",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "hashlib": "blake2b blake2s md5 sha1 sha224 sha256 sha384 sha512 sha3_224 sha3_256 sha3_384 sha3_512",
    "heapq": PUBLIC,
    "itertools": PUBLIC,
    "math": PUBLIC,
    "operator": "abs add and_ concat contains countOf eq floordiv ge getitem gt index indexOf inv invert is_ is_not "
    "itemgetter le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor",
    "statistics": "fmean geometric_mean harmonic_mean linear_regression mean median median_high median_low mode "
    "multimode pstdev pvariance quantiles stdev variance",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits punctuation",
    "types": "MappingProxyType NoneType SimpleNamespace",
    "typing": "TYPE_CHECKING Annotated Any Callable ClassVar Final Generic Iterable Iterator Literal Mapping "
    "NamedTuple NewType Optional Protocol Self Sequence TypeAlias TypeGuard TypeVar TypedDict Union assert_never cast "
    "final overload runtime_checkable",
    **dict.fromkeys(("numpy", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.typing"), PUBLIC),
    **{
        f"scipy.{name}": PUBLIC
        for name in ("integrate", "interpolate", "linalg", "optimize", "sparse", "spatial", "special", "stats")
    },
}
IMPURE = {  # public members that read, write or draw
    *("DataSource", "fromfile", "fromregex", "genfromtxt", "load", "load_npz", "loadtxt", "memmap", "rand", "random"),
    *("random_array", "save", "save_npz", "savetxt", "savez", "savez_compressed"),
}
# methods that read, write or draw, or that look at memory
METHODS = {"ctypes", "dump", "dumps", "format", "format_map", "random_state", "rvs", "tofile"}
BUILTINS = {
    *("Ellipsis", "NotImplemented", "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable"),
    *("chr", "classmethod", "complex", "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hex"),
    *("int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "memoryview", "min", "next", "object"),
    *("oct", "ord", "pow", "property", "range", "repr", "reversed", "round", "set", "slice", "sorted", "staticmethod"),
    *("str", "sum", "super", "tuple", "zip"),
}
BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}  # only called, and with a literal
FRAMES = {  # how Python's objects name their frames, code and cells
    *("ag_await", "ag_code", "ag_frame", "cell_contents", "cr_await", "cr_code", "cr_frame", "cr_origin", "f_back"),
    *("f_builtins", "f_code", "f_globals", "f_locals", "gi_code", "gi_frame", "gi_yieldfrom", "tb_frame", "tb_next"),
}
TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # the public interface of named tuples
READ = {"__contains__", "__doc__", "__getitem__", "__init__", "__len__", "__name__", "__post_init__"}
COMPARED = {f"__{name}__" for name in ("eq", "ge", "gt", "hash", "le", "lt", "ne")}
COUNTED = {
    f"__{side}{name}__"
    for name in ("add", "and", "divmod", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
    for side in ("", "r", "i")
}
DEFINED = {
    *READ, *COMPARED, *COUNTED, "__abs__", "__all__", "__bool__", "__call__", "__delitem__", "__float__", "__index__",
    "__int__", "__iter__", "__missing__", "__neg__", "__new__", "__next__", "__repr__", "__reversed__", "__setitem__",
    "__slots__", "__str__",
}  # fmt: skip


def impure(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for each breach of a rule in a system's source. Raises SyntaxError."""
    tree = ast.parse(source)
    reader = Reader(tree)
    reader.visit(tree)
    yield from sorted(reader.breaches)


class Reader(ast.NodeVisitor):
    """A visitor of a system's source that notes all names that are not allowed."""

    def __init__(self, tree: ast.AST) -> None:
        self.breaches: list[tuple[int, str]] = []
        self.modules: dict[str, str] = {}  # imported modules by the name that they have in the file
        self.private = {name for node in ast.walk(tree) for name in bound(node) if name.startswith("_")}
        self.annotates = False
        for node in ast.walk(tree):
            self._imports(node)

    def note(self, node: ast.AST, what: str) -> None:
        """Note that a node breaks a rule, with the message `what`."""
        self.breaches.append((getattr(node, "lineno", 1), what))

    # ------------------------------------------------------------ modules

    def _imports(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name not in MEMBERS and not _within(alias.name):
                        self.note(node, f"imports {alias.name}")
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.modules[alias.asname or top] = top
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    whole = "." * level + f"{module or ''}.{alias.name}"
                    if whole in MEMBERS or _within(whole):
                        self.modules[alias.asname or alias.name] = whole
                    elif level or alias.name not in members(module or ""):
                        self.note(node, f"imports {whole}")

    def _of_module(self, node: ast.Attribute, path: Sequence[str]) -> None:
        """Check a dotted name that begins with a module.

        The module and its member must be listed. Names after the member must be attributes that any object may have.
        """
        module = self.modules[path[0]]
        for k, name in enumerate(path[1:], 2):
            inner = f"{module}.{name}"
            if inner in MEMBERS or inner == OURS or _within(inner):
                module = inner
                continue
            if name not in members(module):
                self.note(node, f"uses {inner}")
            elif not isinstance(node.ctx, ast.Load) and k == len(path):
                self.note(node, f"changes {inner}")
            for rest in path[k:]:
                self._attribute(node, rest, READ)
            return
        self.note(node, f"passes the module {module} on")

    # ------------------------------------------------------------ names

    def visit_Name(self, node: ast.Name) -> None:
        """Check a name that is bound or read."""
        name = node.id
        if name in self.modules and isinstance(node.ctx, ast.Load):
            self.note(node, f"passes the module {self.modules[name]} on")
        elif name == "type" and self.annotates:
            return
        elif isinstance(node.ctx, ast.Load) and name in dir(builtins) and not _plain(name):
            self.note(node, f"uses {name}")
        elif name.startswith("_"):
            self._hidden(node, name, DEFINED if isinstance(node.ctx, ast.Store) else set())

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check an attribute that is set or read."""
        path = dotted(node)
        if path is not None and path[0] in self.modules:
            self._of_module(node, path)
            return
        self._attribute(node, node.attr, READ if isinstance(node.ctx, ast.Load) else set())
        self.visit(node.value)

    def _attribute(self, node: ast.AST, name: str, dunders: set[str]) -> None:
        if name in FRAMES | METHODS:
            self.note(node, f"uses .{name}")
        elif name.startswith("_") and name not in TUPLES:
            self._hidden(node, name, dunders)

    def _hidden(self, node: ast.AST, name: str, dunders: set[str]) -> None:
        """Check a name with a leading underscore.

        It may be one of `dunders`, or a name that the file itself defines and that no object of the harness has.
        """
        if name.startswith("__") and name.endswith("__"):
            if name not in dunders:
                self.note(node, f"uses {name}")
        elif name in ours_hidden():
            self.note(node, f"uses {name}, a name inside of the bench; call it otherwise")
        elif name not in self.private:
            self.note(node, f"uses {name}, which is not its own")

    def visit_Call(self, node: ast.Call) -> None:
        """Check a call. Some names, such as `getattr` and `type`, are allowed only where they are called."""
        match node:
            case ast.Call(func=ast.Name(id=call)) if call in BY_NAME:
                match node.args[1:2]:
                    case [ast.Constant(value=str(name))] if not node.keywords:
                        self._attribute(node, name, READ if call in {"getattr", "hasattr"} else set())
                    case _:
                        self.note(node, f"{call} with a name that is no literal")
                self._arguments(node)
            case ast.Call(func=ast.Name(id="type"), args=[only], keywords=[]) if not isinstance(only, ast.Starred):
                self._arguments(node)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="object"), attr="__setattr__"),
                args=[ast.Name(id="self"), ast.Constant(value=str(name)), _],
                keywords=[],
            ):
                self._attribute(node, name, set())  # a field of a frozen dataclass
                self._arguments(node)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
                if not flat(text):
                    self.note(node, "format with the attribute of an argument")
                self._arguments(node)
            case _:
                self.generic_visit(node)

    def _arguments(self, node: ast.Call) -> None:
        for part in (*node.args, *node.keywords):
            self.visit(part)

    # ------------------------------------------------------------ definitions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Check a class, which may have no metaclass or other keyword."""
        self._defined(node, node.name)
        for keyword in node.keywords:
            self.note(node, f"a class with {keyword.arg or '**'}=")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Check a function or method."""
        self._defined(node, node.name)
        self._annotation(node.returns)
        node.returns = None
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Refuse an async function: a policy never waits."""
        self.note(node, "uses async")

    def visit_arg(self, node: ast.arg) -> None:
        """Check an argument."""
        self._defined(node, node.arg)
        self._annotation(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Check an assignment with a type."""
        self._annotation(node.annotation)
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        """Check a class pattern, which reads attributes by keyword."""
        for name in node.kwd_attrs:
            self._attribute(node, name, set())
        self.generic_visit(node)

    def _defined(self, node: ast.AST, name: str) -> None:
        if name.startswith("_"):
            self._hidden(node, name, DEFINED)

    def _annotation(self, node: ast.expr | None) -> None:
        """Check an annotation, which may contain `type`. Strings in it are parsed and checked as types."""
        if node is None:
            return
        before, self.annotates = self.annotates, True
        for part in ast.walk(node):
            if isinstance(part, ast.NamedExpr | ast.Call | ast.Lambda):
                self.note(node, "a type that is computed")
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                self._annotation(_typed(part.value, part.lineno))
        self.visit(node)
        self.annotates = before


def dotted(node: ast.expr) -> Sequence[str] | None:
    """Return the names of `a.b.c`; None for any other expression."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=value, attr=name):
            return None if (before := dotted(value)) is None else (*before, name)
    return None


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, attributes included."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value=str(name)), _]):
            yield name
        case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=elements)):
            yield from (e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str))


def flat(text: str) -> bool:
    """Tell whether a format string contains only names of arguments, without their attributes or items."""
    try:
        fields = [(name or "", spec or "") for _, name, spec, _ in Formatter().parse(text)]
    except ValueError:
        return False
    return all(re.fullmatch(r"\w*", name) and flat(spec) for name, spec in fields)


def _plain(name: str) -> bool:
    """Tell whether the name of a builtin may stand anywhere; any other builtin may at most be called."""
    value = getattr(builtins, name)
    return name in BUILTINS or (isinstance(value, type) and issubclass(value, BaseException))


def _typed(text: str, line: int) -> ast.expr | None:
    """Parse a type that is written as text; None if it is no expression."""
    with suppress(SyntaxError, ValueError):
        return ast.increment_lineno(ast.parse(text.strip(), mode="eval"), line - 1).body
    return None


def _within(name: str) -> bool:
    """Tell whether a name is a module of harness.policy, which all systems share."""
    top, _, rest = name.rpartition(".")
    return top == OURS and (HARNESS / "policy" / f"{rest}.py").is_file()


@cache
def members(module: str) -> frozenset[str]:
    """Return the names that may be used from a module; empty for a module that is not listed."""
    if _within(module):
        tree = ast.parse((HARNESS / "policy" / f"{module.rpartition('.')[2]}.py").read_bytes())
        parts = (
            part
            for node in tree.body
            for part in (ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else (node,))
        )
        return frozenset(name for part in parts for name in bound(part) if not name.startswith("_"))
    listed = MEMBERS.get(module, "")
    if listed != PUBLIC:
        return frozenset(listed.split())
    loaded = import_module(module)
    public = getattr(loaded, "__all__", None) or [name for name in dir(loaded) if not name.startswith("_")]
    return frozenset(name for name in public if not isinstance(getattr(loaded, name), ModuleType)) - IMPURE


@cache
def ours_hidden() -> frozenset[str]:
    """Return the names of the private attributes that objects of loops, engines and checks have."""
    folders = (HARNESS / name for name in ("loop", "engines", "check"))
    texts = (file.read_text("utf-8") for folder in folders for file in folder.rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"\.(_[a-z]\w*)", text)) - TUPLES
