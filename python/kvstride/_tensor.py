# SPDX-License-Identifier: Apache-2.0
"""Memory, shape and dtype of numpy arrays, torch tensors and DLPack exporters; views of the same memory."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from .errors import ArgumentError, DTypeError, LayoutError

#: numpy and ml_dtypes names of the dtypes of a cache.
_NUMPY = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "float8_e8m0fnu": "f8_e8m0",
    "float4_e2m1fn_x2": "f4x2",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
}
#: What a plane without ml_dtypes is in numpy: bf16 as uint16, f8 as uint8.
_NUMPY_VIEW = {"f32": "float32", "f16": "float16", "bf16": "uint16", "i8": "int8", "u8": "uint8", "i32": "int32"}
_TORCH_VIEW = {short: long for long, short in _NUMPY.items()}
#: dtypes that carry any bytes of their size; int8 is what vLLM's raw pages are.
CARRIERS = {"uint8", "int8", "uint16", "uint32"}


class TensorInfo(NamedTuple):
    """One tensor: address of its first element, shape, strides in elements, and who owns the memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    dtype: str | None  #: kvstride's name, None where the type only carries bytes (uint16 …)
    dtype_name: str  #: the framework's name
    read_only: bool
    owner: Any

    @property
    def carrier(self) -> bool:
        """Whether the dtype says nothing of the elements."""
        # numpy's int16 are numbers; older torch has no uint16.
        return self.dtype_name in CARRIERS or (self.dtype_name == "int16" and is_torch(self.owner))

    @property
    def part(self) -> tuple[list[int], list[int], int]:
        """(shape, strides, item size) as the library takes them."""
        return list(self.shape), list(self.strides), self.item_size


def is_torch(tensor: Any) -> bool:
    """Whether `tensor` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def refuse_masked(thing: Any, what: str) -> None:
    """Raises ArgumentError for a numpy masked array: nothing here would leave out what its mask hides."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(thing, masked.MaskedArray):
        raise ArgumentError(f"{what}: a masked array, whose mask would be ignored; give .compressed() or .data")


def is_tensor(thing: Any) -> bool:
    """Whether `thing` is one tensor, not a list of them."""
    return isinstance(thing, np.ndarray) or is_torch(thing) or hasattr(thing, "__dlpack__")


def inspect(tensor: Any, what: str = "tensor", *, allow_empty: bool = False, any_device: bool = False) -> TensorInfo:
    """Describe `tensor` without copying; with `any_device` also memory that only its own framework can touch.

    Raises ArgumentError, DTypeError or LayoutError for what cannot be used.
    """
    if is_torch(tensor):
        info = _inspect_torch(tensor, what, any_device)
    elif isinstance(tensor, np.ndarray):
        info = _inspect_numpy(tensor, what)
    elif hasattr(tensor, "__dlpack__"):
        info = _inspect_dlpack(tensor, what)
    else:
        raise ArgumentError(f"{what}: {type(tensor).__name__} is no numpy array, torch tensor or DLPack exporter")
    if 0 in info.shape and not allow_empty:
        raise LayoutError(f"{what}: shape {list(info.shape)} has a dimension of length 0")
    return info


def _inspect_torch(tensor: Any, what: str, any_device: bool = False) -> TensorInfo:
    import torch

    if tensor.is_nested:
        raise ArgumentError(f"{what}: a nested tensor has no strides")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{what}: a {tensor.layout} tensor has no strides")
    if tensor.is_meta:
        raise ArgumentError(f"{what}: a meta tensor has no memory")
    if tensor.device.type != "cpu" and not any_device:
        raise ArgumentError(f"{what}: on {tensor.device}; this build of kvstride handles CPU memory")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{what}: a conjugate or negative view does not hold the values that it shows")
    name = str(tensor.dtype).removeprefix("torch.")
    return _info(
        tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), name, False, tensor, what
    )


def _inspect_numpy(array: np.ndarray, what: str) -> TensorInfo:
    refuse_masked(array, what)
    item = array.dtype.itemsize
    if array.dtype.hasobject or array.dtype.names is not None or item == 0:
        raise DTypeError(f"{what}: dtype {array.dtype} is no plain number")
    if not array.dtype.isnative:
        raise DTypeError(f"{what}: dtype {array.dtype} is not in native byte order")
    for stride in array.strides:
        if stride % item:
            raise LayoutError(f"{what}: a stride of {stride} bytes is no multiple of the item size {item}")
    strides = tuple(s // item for s in array.strides)
    read_only = not array.flags.writeable
    return _info(array.ctypes.data, array.shape, strides, item, array.dtype.name, read_only, array, what)


def _inspect_dlpack(tensor: Any, what: str) -> TensorInfo:
    try:
        return _inspect_numpy(np.from_dlpack(tensor), what)
    except (BufferError, TypeError, RuntimeError) as error:
        torch = sys.modules.get("torch")
        if torch is not None:
            try:
                return _inspect_torch(torch.from_dlpack(tensor), what)
            except (BufferError, TypeError, RuntimeError):
                pass
        raise ArgumentError(f"{what}: DLPack export of {type(tensor).__name__} cannot be read: {error}") from None


def _info(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    name: str,
    read_only: bool,
    owner: Any,
    what: str,
) -> TensorInfo:
    out = TensorInfo(address, tuple(shape), strides, item, _NUMPY.get(name), name, read_only, owner)
    if out.dtype is None and not out.carrier:
        raise DTypeError(f"{what}: dtype {name} is none of {', '.join(_NUMPY)}, or uint16 for bf16")
    return out


class _Memory:
    """Keeps an owner alive under a numpy array made from an address."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def view(info: TensorInfo, byte_offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view of `info`'s memory in its own framework. Strides in elements of `dtype`, offset from its first element."""
    if is_torch(info.owner):
        return _torch_view(info.owner, byte_offset, dtype, shape, strides)
    item = _item_size(dtype)
    kind = _NUMPY_VIEW.get(dtype, "uint8")
    interface = {
        "version": 3,
        "shape": shape,
        "strides": tuple(s * item for s in strides),
        "typestr": np.dtype(kind).str,
        "data": (info.address + byte_offset, info.read_only),
    }
    array = np.asarray(_Memory(info.owner, interface))
    owner_dtype = info.owner.dtype if isinstance(info.owner, np.ndarray) else None
    if owner_dtype is not None and owner_dtype.itemsize == item and _NUMPY.get(owner_dtype.name) == dtype:
        array = array.view(owner_dtype)  # ml_dtypes in, ml_dtypes out
    return array


def _torch_view(owner: Any, byte_offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    import torch

    kind = torch_dtype(dtype)
    start = owner.storage_offset() * owner.element_size() + byte_offset
    if start % kind.itemsize:
        from .errors import NotStrided

        raise NotStrided(f"view: byte {start} of the storage is no multiple of {dtype}'s item size {kind.itemsize}")
    if kind == owner.dtype:
        return owner.as_strided(shape, strides, start // kind.itemsize)
    return torch.empty(0, dtype=kind).set_(owner.untyped_storage(), start // kind.itemsize, shape, strides)


def torch_dtype(dtype: str) -> Any:
    """torch's dtype of a plane; uint8 where this torch has none."""
    import torch

    return getattr(torch, _TORCH_VIEW[dtype], torch.uint8)


def _item_size(dtype: str) -> int:
    return {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}.get(dtype, 1)


def empty_like(info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new contiguous tensor of `dtype` in the framework of `info`."""
    if is_torch(info.owner):
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype))
    owner = info.owner
    if isinstance(owner, np.ndarray) and _NUMPY.get(owner.dtype.name) == dtype:
        return np.empty(shape, dtype=owner.dtype)
    return np.empty(shape, dtype=_NUMPY_VIEW.get(dtype, "uint8"))
