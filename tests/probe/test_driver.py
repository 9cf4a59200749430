"""Every driver call against the real bindings without a driver: its arguments are taken before the driver is missed."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch
drv = pytest.importorskip("cuda.bindings.driver")

from probe import driver  # noqa: E402

PAGE, AT = 1 << 21, 1 << 30
GIVEN: dict[str, Any] = {  # an argument for each parameter, by its name
    **dict.fromkeys(("at", "dst", "src"), AT),
    **dict.fromkeys(("size", "align", "offset"), PAGE),
    "dsts": [AT, AT + PAGE],
    "srcs": [AT, AT + PAGE],
    **dict.fromkeys(("value", "priority", "count"), 1),
    "sizes": [PAGE, PAGE],
    "sms": 64,
    "stream": 7,
    "ordinal": 0,
    "name": "MULTIPROCESSOR_COUNT",
    "dev": drv.CUdevice(0),
    "handle": drv.CUmemGenericAllocationHandle(),
    "resource": drv.CUdevResource(),
    "context": drv.CUgreenCtx(),
    "description": drv.CUdevResourceDesc(),
}
FUNCTIONS = [f for f in vars(driver).values() if inspect.isfunction(f) and f.__module__ == driver.__name__]
CALLS = [function for function in FUNCTIONS if function is not driver.ok]


def no_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


@pytest.mark.skipif(not no_driver(), reason="there is a driver here, which these made-up addresses may harm")
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_a_call_misses_nothing_but_the_driver(call: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(*(GIVEN[name] for name in inspect.signature(call).parameters))
    # by bindings 13.0, and by later ones
    assert (type(caught.value), "libcuda.so.1" in str(caught.value)) == (RuntimeError, True) or (
        type(caught.value).__name__ == "DynamicLibNotFoundError"
    )


def test_a_status_becomes_an_error_by_name() -> None:
    assert driver.ok((drv.CUresult.CUDA_SUCCESS,)) == ()
    assert driver.ok((drv.CUresult.CUDA_SUCCESS, 3)) == 3
    assert driver.ok((drv.CUresult.CUDA_SUCCESS, 3, 4)) == (3, 4)
    with pytest.raises(driver.DriverError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        driver.ok((drv.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None), "cuMemCreate")
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_split_that_the_driver_did_not_make_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings return as many groups as were asked for, whatever the driver made."""
    made = (drv.CUresult.CUDA_SUCCESS, [GIVEN["resource"]], 0, GIVEN["resource"])
    monkeypatch.setattr(drv, "cuDevSmResourceSplitByCount", lambda *_: made)
    with pytest.raises(driver.DriverError, match="no group of 64 SMs"):
        driver.split(GIVEN["resource"], 64)
