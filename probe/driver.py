"""The CUDA driver's calls that torch lacks, one function each: pages, partitions, stream memory operations, batches.

Sizes are in bytes, and addresses are ints. Arguments are passed by position, because their names differ between
versions of the bindings. Python's other threads run during every call. The first call of a thread must be `bind`. A
failed call raises DriverError with the driver's own name of the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from cuda.bindings import driver as drv

DEVICE_LOCATION = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
SM_RESOURCE = drv.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = NON_BLOCKING = 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING: both are required
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class DriverError(RuntimeError):
    """A failed driver call; `name` is the driver's name for the error, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, name: str, call: str = "") -> None:
        super().__init__(f"{call}: {name}" if call else name)
        self.name = name


def ok(result: tuple[Any, ...], call: str = "") -> Any:
    """Return the result of a driver call without its status. Raises DriverError if the call failed."""
    status = result[0]
    if int(status):
        raise DriverError(getattr(status, "name", str(status)), call)
    return result[1] if len(result) == 2 else result[1:]


# ------------------------------------------------------------------------------------------------------ device


def version() -> int:
    """Return the CUDA version of the driver, such as 13000 for 13.0."""
    return int(ok(drv.cuDriverGetVersion()))


def device(ordinal: int = 0) -> Any:
    """Return the handle of a device."""
    return ok(drv.cuDeviceGet(ordinal))


def attribute(dev: Any, name: str) -> int:
    """Return a device attribute; `name` is the end of its constant, such as `MULTIPROCESSOR_COUNT`."""
    which = getattr(drv.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(ok(drv.cuDeviceGetAttribute(which, dev), name))


def bind(ordinal: int = 0) -> None:
    """Make the context that torch uses (the primary one) current in this thread.

    Every helper thread must call this first.
    """
    ok(drv.cuCtxSetCurrent(ok(drv.cuDevicePrimaryCtxRetain(device(ordinal)))), "cuCtxSetCurrent")


def memory() -> tuple[int, int]:
    """Return the free and total bytes of the device."""
    free, total = ok(drv.cuMemGetInfo())
    return int(free), int(total)


# ------------------------------------------------------------------------------------------------------- pages


@cache
def _property(ordinal: int) -> Any:
    prop = drv.CUmemAllocationProp()
    prop.type = drv.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = DEVICE_LOCATION, ordinal
    return prop


def granularity(ordinal: int = 0) -> int:
    """Return the smallest size of a page, in bytes."""
    least = drv.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(ok(drv.cuMemGetAllocationGranularity(_property(ordinal), least), "cuMemGetAllocationGranularity"))


def reserve(size: int, align: int) -> int:
    """Reserve a range of addresses without memory; `align` is a power of two. Return its first address."""
    return int(ok(drv.cuMemAddressReserve(size, align, 0, 0), "cuMemAddressReserve"))


def unreserve(at: int, size: int) -> None:
    """Release a reserved range of addresses, in which nothing may be mapped."""
    ok(drv.cuMemAddressFree(at, size), "cuMemAddressFree")


def create(size: int, ordinal: int = 0) -> Any:
    """Allocate memory without an address, and return its handle.

    The memory is freed once its handle is released and its last mapping is removed.
    """
    return ok(drv.cuMemCreate(size, _property(ordinal), 0), "cuMemCreate")


def release(handle: Any) -> None:
    """Release a handle of memory."""
    ok(drv.cuMemRelease(handle), "cuMemRelease")


def map_at(at: int, size: int, handle: Any, offset: int = 0) -> None:
    """Map the memory of a handle at an address; no kernel may access it before `allow`."""
    ok(drv.cuMemMap(at, size, offset, handle, 0), "cuMemMap")


def allow(at: int, size: int, ordinal: int = 0) -> None:
    """Let the device read and write a range of addresses, every part of which must be mapped."""
    access = drv.CUmemAccessDesc()
    access.location.type, access.location.id = DEVICE_LOCATION, ordinal
    access.flags = drv.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(drv.cuMemSetAccess(at, size, [access], 1), "cuMemSetAccess")


def unmap(at: int, size: int) -> None:
    """Unmap a range; the handle stays valid.

    The range must be exactly one that `map_at` mapped. No kernel that may access the range may be running.
    """
    ok(drv.cuMemUnmap(at, size), "cuMemUnmap")


# ------------------------------------------------------------------------------------------------- host memory


def pin(at: int, size: int) -> None:
    """Lock host memory, and let the device access it."""
    ok(drv.cuMemHostRegister(at, size, 0), "cuMemHostRegister")


def to_device(dst: int, src: int, size: int, stream: int) -> None:
    """Copy from host memory to device memory, after the earlier work of a stream."""
    ok(drv.cuMemcpyHtoDAsync(dst, src, size, stream), "cuMemcpyHtoDAsync")


def to_host(dst: int, src: int, size: int, stream: int) -> None:
    """Copy from device memory to host memory, after the earlier work of a stream."""
    ok(drv.cuMemcpyDtoHAsync(dst, src, size, stream), "cuMemcpyDtoHAsync")


def between(dst: int, src: int, size: int, stream: int) -> None:
    """Copy from device memory to device memory, after the earlier work of a stream."""
    ok(drv.cuMemcpyDtoDAsync(dst, src, size, stream), "cuMemcpyDtoDAsync")


def copy_batch(dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Do many copies in one call; their sources are read after the earlier work of the stream.

    Otherwise, KV might be read before it is written.
    """
    attr = drv.CUmemcpyAttributes()
    attr.srcAccessOrder = drv.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    to, of = ([drv.CUdeviceptr(a) for a in addresses] for addresses in (dsts, srcs))
    ok(drv.cuMemcpyBatchAsync(to, of, list(sizes), len(sizes), [attr], [0], 1, stream), "cuMemcpyBatchAsync")


# -------------------------------------------------------------------------------------------------- partitions


def all_sms(dev: Any) -> Any:
    """Return the device's SMs as a resource; it has the fields `sm.smCount` and `sm.minSmPartitionSize`."""
    return ok(drv.cuDeviceGetDevResource(dev, SM_RESOURCE), "cuDeviceGetDevResource")


def split(resource: Any, sms: int) -> tuple[Any, Any]:
    """Split a resource into two: a group of at least `sms` SMs, and the rest.

    The driver may give the group more SMs than asked; `sm.smCount` has their number. Raises DriverError if it makes no
    group.
    """
    groups, got, rest = ok(drv.cuDevSmResourceSplitByCount(1, resource, 0, sms), "cuDevSmResourceSplitByCount")
    if got != 1:  # the list is as long as was asked, also where the driver made fewer
        raise DriverError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", f"no group of {sms} SMs")
    return groups[0], rest


def groups(resource: Any, count: int, sms: int) -> list[Any]:
    """Split a resource into `count` groups of at least `sms` SMs each. Raises DriverError if the driver makes fewer."""
    made, got, _ = ok(drv.cuDevSmResourceSplitByCount(count, resource, 0, sms), "cuDevSmResourceSplitByCount")
    if got != count:
        raise DriverError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", f"{got} groups of {sms} SMs, not {count}")
    return list(made[:count])


def describe(resource: Any) -> Any:
    """Return the description of a resource, which `green` takes."""
    return ok(drv.cuDevResourceGenerateDesc([resource], 1), "cuDevResourceGenerateDesc")


def green(description: Any, dev: Any) -> Any:
    """Create a green context on the SMs of a description; the context must outlive its streams."""
    return ok(drv.cuGreenCtxCreate(description, dev, DEFAULT_STREAM), "cuGreenCtxCreate")


def green_sms(context: Any) -> Any:
    """Return the SMs that a green context really has, as a resource that may be split again."""
    return ok(drv.cuGreenCtxGetDevResource(context, SM_RESOURCE), "cuGreenCtxGetDevResource")


def stream() -> int:
    """Create a stream on all SMs of this thread's device."""
    return int(ok(drv.cuStreamCreate(NON_BLOCKING), "cuStreamCreate"))


def green_stream(context: Any, priority: int = 0) -> int:
    """Create a stream on the SMs of a green context; a stream with a lower priority number is more urgent."""
    return int(ok(drv.cuGreenCtxStreamCreate(context, NON_BLOCKING, priority), "cuGreenCtxStreamCreate"))


def destroy_stream(stream: int) -> None:
    """Destroy a stream."""
    ok(drv.cuStreamDestroy(stream), "cuStreamDestroy")


def destroy_green(context: Any) -> None:
    """Destroy a green context, whose streams must already be destroyed."""
    ok(drv.cuGreenCtxDestroy(context), "cuGreenCtxDestroy")


# ------------------------------------------------------------------------------------ stream memory operations


def write_word(stream: int, at: int, value: int) -> None:
    """Write a 32-bit word after the earlier work of a stream, without a kernel."""
    ok(drv.cuStreamWriteValue32(stream, at, value, 0), "cuStreamWriteValue32")


def wait_word(stream: int, at: int, value: int) -> None:
    """Make the stream wait until the 32-bit word at `at` is at least `value`.

    The GPU's scheduler does not know of this dependency.
    """
    ok(drv.cuStreamWaitValue32(stream, at, value, AT_LEAST), "cuStreamWaitValue32")
