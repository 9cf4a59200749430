"""The start of a Ray worker: it copies the sources that Ray sent into a folder of the node, and runs from there.

Ray unpacks the sources again for each set of a user's files, and numba finds compiled code by the path of its source.
So a node keeps one copy of each version of our sources, in a folder of this user, and compiles it once. A worker cannot
import any module of ours before this copy exists. Therefore this module is pickled by value, and imports the standard
library alone.
"""

from __future__ import annotations


def work(payload: bytes, packages: tuple[str, ...], version: str) -> bytes:
    """Execute a pickled `messages.Batch` with the sources of a version; return its pickled answers."""
    import importlib
    import os
    import pickle
    import secrets
    import shutil
    import sys
    import tempfile
    from pathlib import Path

    home = Path(tempfile.gettempdir()) / f"llm-sharing-bench-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    about = home.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{home} is open to others, and code is run from it")
    folder = home / f"sources-{version}"
    if not folder.is_dir():
        part = home / f".{folder.name}.{secrets.token_hex(8)}.part"
        for name in packages:
            shutil.copytree(Path.cwd() / name, part / name)
        try:
            part.rename(folder)
        except OSError:  # another worker was first
            shutil.rmtree(part)
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))
    node = importlib.import_module("harness.run.node")
    answers: bytes = pickle.dumps(node.work(pickle.loads(payload)))
    return answers
