# SPDX-License-Identifier: Apache-2.0
"""Cache: tensors and the layout of their bytes, with zero-copy views of its planes."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from . import _core
from ._core import Geometry, Layout
from ._tensor import TensorInfo, inspect, is_tensor, view
from .errors import ArgumentError, DTypeError, LayoutError


class Cache:
    """Memory with a layout. Nothing is copied; the tensors are kept alive. Safe to share between threads.

    `tensors` is one tensor, a list of one tensor a layer, or, for orders of several tensors (`key: … | value: …`), a
    tuple of (key, value) where each is a tensor or a list of one a layer. `layout` is a registry name, an order or a
    `Layout`. Tensors may have the shape that the engine declares, the layout's natural shape (neighbours may be fused
    where the geometry is given) or be flat buffers of at least `layout.num_bytes` bytes. Outer strides are the tensors'
    own. bf16 and f8 in numpy are uint16 and uint8; then the dtype comes from `geometry` (or from the order).

    Tensors lie in host memory (torch's pinned one included) or, all of a cache, on one CUDA device: torch tensors,
    objects with `__cuda_array_interface__` (cupy, numba …), DLPack exporters where torch is imported to read them.
    Whether that device can be used is asked by the first verb; views need nothing. Views of `__cuda_array_interface__`
    memory are objects that have it, too. An array that is made read-only later is not written any more.

    Raises LayoutError where the tensors contradict the layout, AmbiguousLayout where two readings of them fit and
    differ, DTypeError where dtypes differ, ArgumentError for tensors that share memory, are on several devices or one
    of another kind, sparse, meta, conjugate or negative; DeviceError for `__cuda_array_interface__` without CUDA.
    """

    def __init__(self, tensors: Any, layout: Layout | str, *, geometry: Geometry | None = None) -> None:
        if not isinstance(layout, (Layout, str)):
            raise ArgumentError(f"Cache: layout is {type(layout).__name__}, expected a name, an order or a Layout")
        if geometry is not None and not isinstance(geometry, Geometry):
            raise ArgumentError(f"Cache: geometry is {type(geometry).__name__}, expected a Geometry")
        if isinstance(layout, Layout) and geometry is not None:
            raise ArgumentError("Cache: a Layout has its geometry; give geometry only with a name or an order")
        num_parts = layout.num_parts if isinstance(layout, Layout) else _core.num_parts(layout)
        columns = _columns(tensors, num_parts)
        infos = [[inspect(t, f"Cache: tensor {i}", where="cuda") for i, t in enumerate(column)] for column in columns]
        known = layout.geometry if isinstance(layout, Layout) else geometry
        sizes, dtype = _hints(known, infos)
        for column in infos:
            _check_alike(column)
        name = layout.order if isinstance(layout, Layout) else layout
        bound = _core.bind_layout(name, [column[0].part for column in infos], sizes, dtype, len(infos[0]))
        _check_dtypes(bound, infos, known is not None)
        #: One for each (layer, part), in the layout's order.
        self.tensors: list[TensorInfo] = [column[i] for i in range(len(infos[0])) for column in infos]
        _check_one_device(self.tensors)
        #: Where the tensors lie, as torch writes it: 'cpu', 'cuda:0' …
        self.device: str = self.tensors[0].device
        #: The number of the CUDA device, -1 on the host.
        self.cuda: int = self.tensors[0].cuda
        read_only = any(t.read_only for t in self.tensors)
        self._core = _core.Cache([t.address for t in self.tensors], bound, read_only, self.cuda)
        self._layout = bound
        self._owners = [t.owner for t in self.tensors]
        #: Whether each is a numpy array, not a torch tensor.
        self._arrays = [isinstance(owner, np.ndarray) for owner in self._owners]

    def core(self) -> _core.Cache:
        """The library's cache. Raises ArgumentError where a tensor's memory was moved or freed since."""
        changed = self._core.changed(self._owners, self._arrays)
        if changed >= 0:
            raise ArgumentError(f"Cache: the memory of tensor {changed} was moved or freed after the Cache was made")
        if changed == _READ_ONLY:
            self.tensors = [
                t._replace(read_only=t.read_only or (array and not t.owner.flags.writeable))
                for t, array in zip(self.tensors, self._arrays, strict=True)
            ]
            self._core = _core.Cache([t.address for t in self.tensors], self._layout, True, self.cuda)
        return self._core

    @property
    def layout(self) -> Layout:
        """The layout, with the tensors' own strides."""
        return self._layout

    @property
    def read_only(self) -> bool:
        """Whether one of the tensors is read-only, or was made so since; verbs refuse to write to it."""
        return bool(self.core().read_only)

    def key(self, layer: int = 0) -> Any:
        """Keys of `layer` as `[block, token, head, dim]`, a view. Raises NotStrided where there is none."""
        return self._view("key", layer, False)

    def value(self, layer: int = 0) -> Any:
        """Values of `layer` as `[block, token, head, dim]`, a view. Raises NotStrided where there is none."""
        return self._view("value", layer, False)

    def plane(self, layer: int, name: str) -> Any:
        """A plane of `layer` as a view; split axes are several dimensions, outermost first, in place of their axis."""
        if not isinstance(name, str):
            raise ArgumentError(f"plane: name is {type(name).__name__}, expected plane(layer, name)")
        return self._view(name, layer, True)

    def _view(self, name: str, layer: int, allow_split: bool) -> Any:
        self.core()
        dtype, tensor, offset, shape, strides = _core.plane_view(self._layout, name, layer, allow_split)
        return view(self.tensors[tensor], offset, dtype, shape, strides)

    def __reduce__(self) -> NoReturn:
        raise TypeError("Cache: it is memory of this process and cannot be pickled or copied; pickle its layout")

    def __repr__(self) -> str:
        return f"Cache('{self._layout}', {len(self.tensors)} tensor(s))"


def _columns(tensors: Any, num_parts: int) -> list[list[Any]]:
    """One list of tensors (one a layer) for each part."""
    if is_tensor(tensors):
        tensors = [tensors] if num_parts == 1 else _wrong(num_parts, 1)
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError(f"Cache: {type(tensors).__name__} is no tensor and no list of tensors")
    if not tensors:
        raise ArgumentError("Cache: an empty list of tensors")
    if num_parts == 1:
        if not all(is_tensor(t) for t in tensors):
            raise ArgumentError("Cache: this layout has one tensor a layer; expected a tensor or a list of tensors")
        return [list(tensors)]
    if len(tensors) != num_parts:
        _wrong(num_parts, len(tensors))
    for column in tensors:
        if not is_tensor(column) and not isinstance(column, (list, tuple)):
            raise ArgumentError(f"Cache: {type(column).__name__} is no tensor and no list of tensors")
    columns = [[column] if is_tensor(column) else list(column) for column in tensors]
    if not all(columns):
        raise ArgumentError("Cache: an empty list of tensors")
    if len({len(column) for column in columns}) != 1:
        raise ArgumentError(f"Cache: lists of {', '.join(str(len(c)) for c in columns)} tensors must be equally long")
    return columns


def _wrong(expected: int, given: int) -> Any:
    raise ArgumentError(f"Cache: this layout has {expected} tensors a layer, {given} given: pass (keys, values)")


def _check_alike(column: list[TensorInfo]) -> None:
    first = column[0]
    for i, other in enumerate(column):
        if (other.shape, other.strides, other.dtype_name) != (first.shape, first.strides, first.dtype_name):
            raise LayoutError(
                f"Cache: tensor {i} has shape {list(other.shape)} strides {list(other.strides)} {other.dtype_name}, "
                f"tensor 0 shape {list(first.shape)} strides {list(first.strides)} {first.dtype_name}; "
                "layers of different sizes are different caches"
            )


def _check_one_device(tensors: list[TensorInfo]) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            raise ArgumentError(
                f"Cache: tensor 0 lies on {tensors[0].device}, tensor {i} on {tensor.device}; a cache has one device"
            )


def geometry_sizes(geometry: Geometry) -> dict[str, int]:
    """The sizes of a geometry by name, symbols included."""
    out = {name: getattr(geometry, name) for name in _SIZES}
    if geometry.value_head_size is not None:
        out["value_head_size"] = geometry.value_head_size
    return out | geometry.symbols


#: What `_core.Cache.changed` says of an array that is read-only now.
_READ_ONLY = -2
_SIZES = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size")


def _hints(geometry: Geometry | None, infos: list[list[TensorInfo]]) -> tuple[dict[str, int], str | None]:
    """Sizes and dtype that are known before the tensors are looked at."""
    layers = len(infos[0])
    if geometry is None:
        definite = next((column[0].dtype for column in infos if column[0].dtype is not None), None)
        return {}, definite
    sizes = geometry_sizes(geometry)
    if layers > 1 and geometry.num_layers not in (1, layers):
        raise LayoutError(f"Cache: {layers} tensors, one a layer, but num_layers is {geometry.num_layers}")
    if layers > 1:
        sizes["num_layers"] = layers
    return sizes, geometry.dtype


def _check_dtypes(layout: Layout, infos: list[list[TensorInfo]], given: bool) -> None:
    """`given`: the caller gave a geometry, so carriers such as uint16 are what it says."""
    for part, column in enumerate(infos):
        info = column[0]
        dtypes = {dtype for plane, dtype in layout.planes.items() if layout.part(plane) == part}
        if info.dtype is None and not given and _depends_on_default(layout):
            raise DTypeError(
                f"Cache: a {info.dtype_name} tensor does not say its dtype; give geometry=Geometry(dtype=…)"
            )
        if not info.carrier and dtypes != {info.dtype}:
            raise DTypeError(
                f"Cache: the tensor is {info.dtype_name}, the layout '{layout}' holds {', '.join(sorted(dtypes))}"
            )


def _depends_on_default(layout: Layout) -> bool:
    """Whether the geometry's dtype, not the order, gives a plane its dtype."""
    sizes = geometry_sizes(layout.geometry)
    other = "f16" if layout.geometry.dtype == "bf16" else "bf16"
    try:
        return Layout(layout.order, Geometry(dtype=other, **sizes)).planes != layout.planes
    except LayoutError:
        return True
