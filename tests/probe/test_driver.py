"""Every driver call against the real bindings without a driver: its arguments are taken before the driver is missed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch
drv = pytest.importorskip("cuda.bindings.driver")

from probe import driver  # noqa: E402

PAGE, AT, STREAM = 1 << 21, 1 << 30, 7
DEVICE, HANDLE, RESOURCE = drv.CUdevice(0), drv.CUmemGenericAllocationHandle(), drv.CUdevResource()
GREEN, DESCRIPTION = drv.CUgreenCtx(), drv.CUdevResourceDesc()
CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    driver.version: (),
    driver.device: (0,),
    driver.attribute: (DEVICE, "MULTIPROCESSOR_COUNT"),
    driver.bind: (),
    driver.memory: (),
    driver.granularity: (),
    driver.reserve: (64 * PAGE, PAGE),
    driver.unreserve: (AT, 64 * PAGE),
    driver.create: (PAGE,),
    driver.release: (HANDLE,),
    driver.map_at: (AT, PAGE, HANDLE, PAGE),
    driver.allow: (AT, PAGE),
    driver.unmap: (AT, PAGE),
    driver.pin: (AT, PAGE),
    driver.to_device: (AT, AT, PAGE, STREAM),
    driver.to_host: (AT, AT, PAGE, STREAM),
    driver.between: (AT, AT, PAGE, STREAM),
    driver.copy_batch: ([AT, AT + PAGE], [AT, AT + PAGE], [PAGE, PAGE], STREAM),
    driver.all_sms: (DEVICE,),
    driver.split: (RESOURCE, 64),
    driver.groups: (RESOURCE, 2, 64),
    driver.describe: (RESOURCE,),
    driver.green: (DESCRIPTION, DEVICE),
    driver.green_sms: (GREEN,),
    driver.green_stream: (GREEN,),
    driver.destroy_stream: (STREAM,),
    driver.destroy_green: (GREEN,),
    driver.write_word: (STREAM, AT, 1),
    driver.wait_word: (STREAM, AT, 1),
}


def no_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def test_every_call_is_tried() -> None:
    defined = {f for f in vars(driver).values() if callable(f) and getattr(f, "__module__", "") == driver.__name__}
    assert defined - set(CALLS) == {driver.ok, driver._property, driver.DriverError}


@pytest.mark.skipif(not no_driver(), reason="there is a driver here, which these made-up addresses may harm")
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_a_call_misses_nothing_but_the_driver(call: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(*CALLS[call])
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
    made = (drv.CUresult.CUDA_SUCCESS, [RESOURCE], 0, RESOURCE)
    monkeypatch.setattr(drv, "cuDevSmResourceSplitByCount", lambda *_: made)
    with pytest.raises(driver.DriverError, match="no group of 64 SMs"):
        driver.split(RESOURCE, 64)
