# SPDX-License-Identifier: Apache-2.0
"""Objects with `__cuda_array_interface__`, version 3 or older: where their memory lies, and views of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _core
from .errors import ArgumentError, DeviceError, DTypeError, LayoutError


def is_cuda_array(thing: Any) -> bool:
    """Whether `thing` has the interface; ask only what is neither a numpy array nor a torch tensor."""
    return hasattr(thing, "__cuda_array_interface__")


class CudaArray:
    """An object that has the interface, asked anew each time: its memory may move, and its stream change."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def interface(self, what: str = "tensor") -> dict[str, Any]:
        """The interface as a dict. Raises ArgumentError for what is none."""
        out = self.array.__cuda_array_interface__
        if not isinstance(out, dict) or not {"shape", "typestr", "data"} <= set(out):
            raise ArgumentError(f"{what}: the __cuda_array_interface__ of {type(self.array).__name__} is not one")
        return out

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.interface()["data"][0])

    def stream(self) -> int | None:
        """The stream after whose work the memory may be used, None where there is nothing to wait for."""
        stream = self.interface().get("stream")
        return None if stream is None else int(stream)


def describe(owner: CudaArray, what: str) -> tuple[int, tuple[int, ...], tuple[int, ...], int, str, bool]:
    """(address, shape, strides in elements, item size, dtype's name, read-only) of an array.

    A type of plain bytes, such as '<V2' for bf16, counts as an unsigned number of its size.
    """
    found = owner.interface(what)
    if found.get("mask") is not None:
        raise ArgumentError(f"{what}: a masked array, whose mask would be ignored")
    dtype = np.dtype(found["typestr"])
    if dtype.kind == "V" and dtype.itemsize in (1, 2, 4):
        dtype = np.dtype(f"u{dtype.itemsize}")
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        raise DTypeError(f"{what}: dtype {dtype} is no plain number")
    if not dtype.isnative:
        raise DTypeError(f"{what}: dtype {dtype} is not in native byte order")
    address, read_only = found["data"]
    shape = tuple(int(n) for n in found["shape"])
    item = dtype.itemsize
    strides = found.get("strides")
    if strides is None:
        steps = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            steps[i - 1] = steps[i] * shape[i]
    else:
        for stride in strides:
            if stride % item:
                raise LayoutError(f"{what}: a stride of {stride} bytes is no multiple of the item size {item}")
        steps = [int(stride) // item for stride in strides]
    return int(address), shape, tuple(steps), item, dtype.name, bool(read_only)


def device_of(address: int, what: str) -> str:
    """Where memory lies: the interface does not say it, the driver knows."""
    try:
        number = _core.device_of(address)
    except DeviceError as error:
        raise DeviceError(f"{what}: {error}") from None
    if number is None:
        raise ArgumentError(f"{what}: address {address:#x} of a __cuda_array_interface__ is no memory of CUDA's")
    return "cpu" if number < 0 else f"cuda:{number}"


class CudaView:
    """A view of device memory for any library that reads `__cuda_array_interface__`: `cupy.asarray(view)` …

    Keeps the memory's owner alive. bf16 is uint16, f8 is uint8, as in numpy.
    """

    def __init__(self, owner: CudaArray, interface: dict[str, Any]) -> None:
        self._owner = owner
        self._interface = interface

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """With the stream that the owner names now."""
        return {**self._interface, "stream": self._owner.stream()}

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return tuple(self._interface["shape"])

    def __repr__(self) -> str:
        return f"CudaView({list(self.shape)}, '{self._interface['typestr']}')"
