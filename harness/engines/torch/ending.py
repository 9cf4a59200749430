"""The end of a process or thread of the engine: silent if the engine ended, else one line with the reason."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def ended_with(serve: Callable[[], None]) -> bool:
    """Run `serve` until the engine ends, then return True; on any other error, print it and return False."""
    try:
        serve()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip() or repr(error)).splitlines()[0]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"  # noqa: PTH119 - of a path that may be none
        print(f"torch: process {os.getpid()}: {type(error).__name__}: {text} ({place})", file=sys.stderr, flush=True)
        return False
    return True


def bound(bind: Callable[[], None], serve: Callable[[], None]) -> None:
    """Bind this thread to the cards, and run `serve` until the engine ends.

    Any other error ends the whole process, because it may have broken state that the other threads share.
    """
    bind()
    if not ended_with(serve):
        os._exit(1)
