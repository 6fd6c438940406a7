# SPDX-License-Identifier: Apache-2.0
"""Which CUDA stream a verb's work goes onto, and who keeps the memory until it is done. Rules: docs/cuda.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from . import _core
from ._args import to_int
from ._cuda_array import CudaArray
from ._ids import DeviceIds
from ._tensor import TensorInfo, is_torch
from .errors import ArgumentError

T = TypeVar("T")


def put(verb: str, stream: Any, memory: Sequence[Any], ids: Any, call: Callable[..., T], *args: Any) -> T:
    """`call(*args, handle)` with the stream for a verb.

    `memory` is what it reads and writes, the destination last: anything with `cuda` (-1 on the host) and `tensors`;
    `ids` are a DeviceIds or anything else.
    """
    for part in memory:
        if part.cuda >= 0:
            break
    else:
        if stream is not None:
            _handle(stream, verb)
        return call(*args, None)
    device = next(part.cuda for part in reversed(memory) if part.cuda >= 0)
    tensors = [t for part in memory if part.cuda >= 0 for t in part.tensors]
    if isinstance(ids, DeviceIds):
        tensors.append(ids.info)
    if stream is None:
        return call(*args, _usual_stream(device, tensors))
    handle = to_handle(stream, verb, device)
    _record(tensors, handle, device)
    return call(*args, handle)


def to_handle(stream: Any, verb: str, device: int) -> int:
    """The cudaStream_t of a stream of `device`. 1, CUDA's other name of the default stream, is 0."""
    handle = _handle(stream, verb)
    of = getattr(getattr(stream, "device", None), "index", getattr(stream, "device_id", None))
    if isinstance(of, int) and of not in (-1, device):
        raise ArgumentError(f"{verb}: stream is of cuda:{of}, the work is cuda:{device}'s")
    return 0 if handle == 1 else handle


def _handle(stream: Any, verb: str) -> int:
    number = stream
    for name in ("cuda_stream", "ptr"):  # torch's, cupy's
        if hasattr(stream, name):
            number = getattr(stream, name)
            break
    else:
        if hasattr(stream, "__cuda_stream__"):
            number = stream.__cuda_stream__()[1]
        elif not hasattr(stream, "__index__"):
            raise ArgumentError(
                f"{verb}: stream is {type(stream).__name__}, expected a torch.cuda.Stream, a cudaStream_t as a number, "
                "or an object with ptr or __cuda_stream__"
            )
    handle = to_int(number, f"{verb}: stream")
    if handle < 0:
        raise ArgumentError(f"{verb}: stream is {handle}, below 0")
    return handle


def _usual_stream(device: int, tensors: Iterable[TensorInfo]) -> int | None:
    """The one stream on which the owners of the memory work; None, after waiting for all, where that is not one."""
    named = set()
    torch_devices = set()
    for tensor in tensors:
        if isinstance(tensor.owner, CudaArray):
            if (handle := tensor.owner.stream()) is not None:
                named.add((tensor.cuda, 0 if handle == 1 else handle))
        elif tensor.cuda not in torch_devices:
            torch_devices.add(tensor.cuda)
            named.add((tensor.cuda, _torch_current(tensor.cuda)))
    if len(named) == 1 and next(iter(named))[0] == device:
        return next(iter(named))[1]
    for of, handle in named:
        _core.wait_for(of, handle)
    return None


def _torch_current(device: int) -> int:
    import torch

    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def _record(tensors: Iterable[TensorInfo], handle: int, device: int) -> None:
    """Tells torch's allocator that a stream uses these tensors: freed meanwhile, their memory waits for it."""
    on = None
    for tensor in tensors:
        if is_torch(tensor.owner):
            on = on or torch_stream(handle, device)
            tensor.owner.record_stream(on)


def torch_stream(handle: int, device: int) -> Any:
    """torch's object for a stream of anybody's."""
    import torch

    return torch.cuda.default_stream(device) if handle == 0 else torch.cuda.ExternalStream(handle, device=device)


def allocating(stream: Any, verb: str, info: TensorInfo) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch makes tensors like `info`, one of its own on a device, for work on `stream`."""
    if stream is None or info.cuda < 0:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch_stream(to_handle(stream, verb, info.cuda), info.cuda))
