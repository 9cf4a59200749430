"""Policies that serve the shortest request first, by its true length: each reaches for it in another way.

No policy may know the length of an answer to come. `bench check` must name every one of these, by what stands in its
file. test_cheats.py tells the gain of each in an unguarded run, and those that no law about decisions would see.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

SYSTEM = '''\
"""Shortest first."""
%s
from harness.policy.actions import Admit, Load, Run
from harness.policy.events import Arrived, Finished, Woke
from harness.policy.types import Batch, Inst


class Cheat:
    """One request a model at a time."""

    presets = {}
    hears = frozenset({Woke, Arrived, Finished})
    uses = frozenset({"Load", "Run", "Admit"%s})
    options = {"kv": "paged"}

    def __init__(self, cluster):
        n = len(cluster.gpus)
        self.batches = {m: Batch(Inst(m, tuple((k + j) %% n for j in range(model.tp))))
                        for k, (m, model) in enumerate(cluster.models.items())}
        self.waiting = {m: [] for m in self.batches}
        self.busy = {}

    def on(self, event, view):
        if event == Woke("start"):
            for batch in self.batches.values():
                yield Load(batch.inst)
                yield Run(batch)
            return
        if isinstance(event, Arrived):
            model = event.request.model
            self.waiting[model].append(event.request.id)
        elif event.batch is not None:
            model = event.batch.inst.model
            self.busy.pop(model, None)
        else:
            return
        if self.waiting[model] and model not in self.busy:
            try:
                first = min(self.waiting[model], key=lambda rid: (self.length(view, rid), rid))
            except Exception:
                first = self.waiting[model][0]
            self.waiting[model].remove(first)
            self.busy[model] = first
            yield Admit(first, self.batches[model])

    def length(self, view, rid):
%s
'''
DIG = '''

def dig(frame):
    """The true lengths, from whatever a frame or a caller of it holds."""
    while frame is not None:
        for name in list(frame.f_locals):
            held = frame.f_locals[name]
            for owner in (held, getattr(held, "engine", None), getattr(held, "_engine", None)):
                jobs = getattr(owner, "_jobs", None) or owner
                if hasattr(jobs, "output_tokens"):
                    return jobs.output_tokens
        frame = frame.f_back
'''
TRUTH = "._jobs.output_tokens[rid]"
FRAME = "return dig({})[rid]"
CHEATS: dict[str, tuple[str, str]] = {  # imports, and how the length of request `rid` is got
    "getframe": ("import sys", FRAME.format("sys._getframe()")),
    "getframe through dataclasses": ("import dataclasses", FRAME.format("dataclasses.sys._getframe()")),
    "getframe through a name": ("from dataclasses import sys as s", FRAME.format("s._getframe()")),
    "getframe through collections": ("from collections import _sys", FRAME.format("_sys._getframe()")),
    "jobs of a frame": (
        "import dataclasses",
        (
            "frame = dataclasses.sys._getframe()\nwhile 'jobs' not in frame.f_locals:\n    frame = frame.f_back\n"
            "return frame.f_locals['jobs'].output_tokens[rid]"
        ),
    ),
    "inspect": ("from dataclasses import inspect", FRAME.format("inspect.currentframe()")),
    "frame of an exception": (
        "",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    " + FRAME.format("error.__traceback__.tb_frame"),
    ),
    "frame of a generator": ("", "def me():\n    yield dig(it.gi_frame)\nit = me()\nreturn next(it)[rid]"),
    "current frames": (
        "from typing import sys",
        "return dig(next(x for x in sys._current_frames().values() if x.f_code.co_filename == __file__))[rid]",
    ),
    "gc": (
        "from statistics import sys",
        (
            "if 'true' not in self.busy:\n    self.busy['true'] = next(\n"
            "        (x for x in sys.modules['gc'].get_objects()\n"
            "         if type(x).__name__ == 'Sim' and x.view() is view), None)\n"
            f"return self.busy['true']{TRUTH}"
        ),
    ),
    "view": ("", f"return view._sim{TRUTH}"),
    "attrgetter": ("from operator import attrgetter", "return attrgetter('_sim._jobs.output_tokens')(view)[rid]"),
    "methodcaller": (
        "from operator import methodcaller",
        f"return methodcaller('__getattribute__', '_sim')(view){TRUTH}",
    ),
    "getattr": ("", f"return getattr(view, '_' + 'sim'){TRUTH}"),
    "getattr by a literal": ("", f"return getattr(view, '_sim'){TRUTH}"),
    "getattr passed on": (
        "from functools import reduce",
        "return reduce(getattr, ('_sim', '_jobs', 'output_tokens'), view)[rid]",
    ),
    "format": ("", "return int(('{0._sim._jobs.output_tokens[' + str(rid) + ']}').format(view))"),
    "format_map": ("", "return int(('{v._sim._jobs.output_tokens[' + str(rid) + ']}').format_map({'v': view}))"),
    "str.format": ("", "return int(str.format('{0._sim._jobs.output_tokens[' + str(rid) + ']}', view))"),
    "Formatter": (
        "import string",
        "return string.Formatter().get_field('0._sim._jobs.output_tokens', (view,), {})[0][rid]",
    ),
    "vars": ("", f"return vars(view)['_sim']{TRUTH}"),
    "dict": ("", f"return view.__dict__['_sim']{TRUTH}"),
    "object.__getattribute__": ("", f"return object.__getattribute__(view, '_sim'){TRUTH}"),
    "bound method": ("", f"return view.batch.__self__._sim{TRUTH}"),
    "globals of a method": (
        "",
        FRAME.format("type(view).batch.__globals__['__builtins__']['__import__']('sys')._getframe()"),
    ),
    "mro": (
        "",
        "every = type(view).__mro__[-1].__subclasses__()\nsim = next(x for x in every if x.__name__ == 'SimView')\n"
        + FRAME.format("sim.batch.__globals__['__builtins__']['__import__']('sys')._getframe()"),
    ),
    "builtins": ("", FRAME.format("__builtins__['__import__']('sys')._getframe()")),
    "loader": ("", FRAME.format("__loader__.get_source.__globals__['sys']._getframe()")),
    "eval": ("", f"return eval('view._sim{TRUTH}')"),
    "eval by another name": ("", f"run = eval\nreturn run('view._sim{TRUTH}', {{'view': view, 'rid': rid}})"),
    "type hints": (
        "import typing",
        (
            "found = []\nclass Text:\n    x: 'found.append(dig(__import__(\"sys\")._getframe())) or int'\n"
            "typing.get_type_hints(Text, {'found': found, 'dig': dig})\nreturn found[0][rid]"
        ),
    ),
    "match by a keyword": ("", "match view:\n    case object(_sim=sim):\n        return sim" + TRUTH),
    "match by position": (
        "from abc import ABC\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Like(ABC):\n    _sim: object\n",
        f"Like.register(type(view))\nmatch view:\n    case Like(sim):\n        return sim{TRUTH}",
    ),
    "match by names made up": (
        "from abc import ABC, ABCMeta",
        (
            "like = ABCMeta('Like', (ABC,), {'__match_args__': ('_s' + 'im',)})\nlike.register(type(view))\n"
            f"match view:\n    case like(sim):\n        return sim{TRUTH}"
        ),
    ),
    "a field of its own name": ("", f"self._sim = None\nreturn view._sim{TRUTH}"),
    "a method of its own": (
        "class Like:\n    def sim(self):\n        return self._sim\n",
        f"return Like.sim(view){TRUTH}",
    ),
    "ctypes": (
        "import numpy as np",
        f"return np.ctypeslib.ctypes.cast(id(view), np.ctypeslib.ctypes.py_object).value._sim{TRUTH}",
    ),
    "modules of numpy": ("import numpy as np", FRAME.format("np.f2py.sys._getframe()")),
    "a module of ours": ("from harness.policy import fields", FRAME.format("fields.inspect.currentframe()")),
    "an import of ours": ("from harness.policy.fields import inspect", FRAME.format("inspect.currentframe()")),
    "setattr": (
        "",
        "object.__setattr__(view, 'now_s', view.now_s)\nsetattr(self, 'sim', getattr(view, '_s' 'im'))\nreturn self.sim"
        + TRUTH,
    ),
    "the oracle's door": (
        "",
        (
            "view.__init__.__func__(view, view._sim, view.now_s)\nview._sim.oracle = True\n"
            "return view.oracle_tokens(rid)"
        ),
    ),
}


def cheat(name: str, folder: Path) -> Path:
    """Write a cheat into a folder; `fifo` knows nothing, `oracle` asks for the lengths as one may, and says so."""
    more, uses = "", ""
    match name:
        case "fifo":
            how = "return 0"
        case "oracle":
            how, uses = "return view.oracle_tokens(rid)", ', "view.oracle_tokens"'
        case _:
            more, how = CHEATS[name]
    path = folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.py"
    text = SYSTEM % (f"{more}\n", uses, indent(how, " " * 8))
    path.write_text(text + (DIG if "dig(" in text else ""), "utf-8")
    return path
