"""The common parts of emulated cards: streams on which all is done already, and the driver's calls on partitions."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

SMS = 132


class Stream:
    """A stream on which all is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = id(self)

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


def resource(count: int) -> Any:
    """Return a part of the card with so many SMs."""
    return SimpleNamespace(sm=SimpleNamespace(smCount=count, minSmPartitionSize=8, smCoscheduledAlignment=8))


def copy(dst: int, src: int, size: int, stream: int) -> None:
    """Copy within the host's memory."""
    ctypes.memmove(dst, src, size)


CALLS: dict[str, Any] = {
    "device": lambda ordinal=0: 0,
    "bind": lambda ordinal=0: None,
    "all_sms": lambda dev: resource(SMS),
    "split": lambda whole, n: (resource(n), resource(whole.sm.smCount - n)),
    "groups": lambda whole, count, n: [resource(n)] * count,
    "describe": lambda resource: resource,
    "green": lambda desc, dev: desc,
    "green_sms": lambda context: context,
    "stream": lambda: 7,
    "green_stream": lambda context, priority=0: 7,
    "pin": lambda at, size: None,
    **dict.fromkeys(("to_device", "to_host", "between"), copy),
}
