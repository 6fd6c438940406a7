# SPDX-License-Identifier: Apache-2.0
"""Memory, shape and dtype of arrays and tensors, on the host and on CUDA devices; views of the same memory."""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import numpy as np

from ._cuda_array import CudaArray, CudaView, describe, device_of, is_cuda_array
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
#: Where memory may lie: the host's, that or a CUDA device's, or anywhere (only its own framework can touch it).
Where = Literal["host", "cuda", "any"]
#: DLPack's numbers of devices.
_DLPACK = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi", 10: "rocm", 12: "ext_dev", 14: "oneapi",
           15: "webgpu", 16: "hexagon", 17: "maia"}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor: address of its first element, shape, strides in elements, and who owns the memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    dtype: str | None  #: kvstride's name, None where the type only carries bytes (uint16 …)
    dtype_name: str  #: the framework's name
    read_only: bool
    owner: Any  #: a numpy array, a torch tensor or a CudaArray
    device: str = "cpu"  #: 'cpu', 'cuda:0' …

    @property
    def cuda(self) -> int:
        """The number of the CUDA device, -1 on the host."""
        if self.device == "cpu":
            return -1
        return int(self.device.removeprefix("cuda:")) if self.device.startswith("cuda:") else -1

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Itself, as a cache has several."""
        return (self,)

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
    return isinstance(thing, np.ndarray) or is_torch(thing) or is_cuda_array(thing) or hasattr(thing, "__dlpack__")


def inspect(
    tensor: Any, what: str = "tensor", *, allow_empty: bool = False, where: Where = "host", ids: bool = False
) -> TensorInfo:
    """Describe `tensor`, which may lie at `where`, without copying. With `ids` any type of numbers will do.

    Raises ArgumentError, DTypeError or LayoutError for what cannot be used, DeviceError where CUDA is needed to find
    out and not there.
    """
    if is_torch(tensor):
        info = _inspect_torch(tensor, what, where)
    elif isinstance(tensor, np.ndarray):
        info = _inspect_numpy(tensor, what)
    elif is_cuda_array(tensor):
        info = _inspect_cuda_array(tensor, what, where)
    elif hasattr(tensor, "__dlpack__"):
        info = _inspect_dlpack(tensor, what, where)
    else:
        raise ArgumentError(
            f"{what}: {type(tensor).__name__} is no numpy array, torch tensor, CUDA array or DLPack exporter"
        )
    if info.dtype is None and not info.carrier and not ids:
        raise DTypeError(f"{what}: dtype {info.dtype_name} is none of {', '.join(_NUMPY)}, or uint16 for bf16")
    if 0 in info.shape and not allow_empty:
        raise LayoutError(f"{what}: shape {list(info.shape)} has a dimension of length 0")
    return info


def _check_place(device: str, what: str, where: Where) -> None:
    """Raises ArgumentError for memory that is not where it may be."""
    if where == "any" or device == "cpu":
        return
    if device.startswith("cuda") and "ROCm" not in device:
        if where == "cuda":
            return
        raise ArgumentError(f"{what}: on {device}; this function takes host memory")
    raise ArgumentError(f"{what}: on {device}; kvstride handles host and CUDA memory")


def _inspect_torch(tensor: Any, what: str, where: Where) -> TensorInfo:
    import torch

    if tensor.is_nested:
        raise ArgumentError(f"{what}: a nested tensor has no strides")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{what}: a {tensor.layout} tensor has no strides")
    if tensor.is_meta:
        raise ArgumentError(f"{what}: a meta tensor has no memory")
    device = "cpu"
    if tensor.device.type != "cpu":
        device = str(tensor.device)
        _check_place(f"{device} (ROCm)" if torch.version.hip else device, what, where)
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{what}: a conjugate or negative view does not hold the values that it shows")
    name = str(tensor.dtype).removeprefix("torch.")
    return _info(
        tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), name, False, tensor,
        device,
    )  # fmt: skip


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
    return _info(array.ctypes.data, array.shape, strides, item, array.dtype.name, read_only, array)


def _inspect_cuda_array(array: Any, what: str, where: Where) -> TensorInfo:
    if where == "host":
        raise ArgumentError(f"{what}: {type(array).__name__} lies on a CUDA device; this function takes host memory")
    owner = CudaArray(array)
    address, shape, strides, item, name, read_only = describe(owner, what)
    # Where anything will do, nobody is asked; no elements lie nowhere.
    device = "cuda" if where == "any" else "cpu" if 0 in shape else device_of(address, what)
    return _info(address, shape, strides, item, name, read_only, owner, device)


def _inspect_dlpack(tensor: Any, what: str, where: Where) -> TensorInfo:
    kind, number = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else (1, 0)
    if kind in _DLPACK:
        device = f"{_DLPACK[kind]}:{number}"
        _check_place(device, what, where)
        if "torch" not in sys.modules:
            raise ArgumentError(f"{what}: a DLPack export on {device}; import torch, which reads it")
        try:
            read = sys.modules["torch"].from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{what}: torch cannot read the DLPack export on {device}: {error}") from None
        return _inspect_torch(read, what, where)
    try:
        return _inspect_numpy(np.from_dlpack(tensor), what)
    except (BufferError, TypeError, RuntimeError) as error:
        torch = sys.modules.get("torch")
        if torch is not None:
            try:
                return _inspect_torch(torch.from_dlpack(tensor), what, where)
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
    device: str = "cpu",
) -> TensorInfo:
    return TensorInfo(address, tuple(shape), strides, item, _NUMPY.get(name), name, read_only, owner, device)


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
    if isinstance(info.owner, CudaArray) and info.cuda >= 0:
        return CudaView(info.owner, interface)
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
    return torch.empty(0, dtype=kind, device=owner.device).set_(
        owner.untyped_storage(), start // kind.itemsize, shape, strides
    )


def torch_dtype(dtype: str) -> Any:
    """torch's dtype of a plane; uint8 where this torch has none."""
    import torch

    return getattr(torch, _TORCH_VIEW[dtype], torch.uint8)


def _item_size(dtype: str) -> int:
    return {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}.get(dtype, 1)


def empty_like(info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new contiguous tensor of `dtype` in the framework of `info`, on the host or where a torch tensor lies."""
    if is_torch(info.owner):
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype), device=info.owner.device)
    owner = info.owner
    if isinstance(owner, np.ndarray) and _NUMPY.get(owner.dtype.name) == dtype:
        return np.empty(shape, dtype=owner.dtype)
    return np.empty(shape, dtype=_NUMPY_VIEW.get(dtype, "uint8"))
