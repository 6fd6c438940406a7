# SPDX-License-Identifier: Apache-2.0
"""What a tensor's shape and strides can mean: never a guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import _core
from ._args import to_size
from ._core import Reading
from ._tensor import inspect, is_tensor
from .errors import AmbiguousLayout, ArgumentError, DTypeError


def candidates(
    tensor_or_shape: Any,
    *,
    strides: Sequence[int] | None = None,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    dtype: str | None = None,
    among: Sequence[str] | None = None,
) -> list[Reading]:
    """All readings of a tensor (or of its shape), or of a (key, value) pair of tensors.

    Considered are the rows of the registry that are not opaque, by the shape that the engine declares and by their
    natural shape; `among` narrows them to names or engines. `strides` are in elements, None means C-contiguous; without
    `num_layers` the tensor is one layer. Every hint that is given must agree. Memory is not read: a tensor may lie on
    any device.
    """
    return list(_core.candidates(*_question(locals())))


def detect(
    tensor_or_shape: Any,
    *,
    strides: Sequence[int] | None = None,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    dtype: str | None = None,
    among: Sequence[str] | None = None,
) -> Reading:
    """The one reading of a tensor. Arguments as for `candidates`.

    The answer has the layout with the tensor's own strides, the geometry, all names that read so, and what it assumes
    (`assumes="strided"`: opaque layouts of the same shape, such as the CPU's, are only ever named). Raises
    AmbiguousLayout with each reading (`.readings`) and an element whose address differs, UnknownLayout with the full
    shape and what came closest.
    """
    question = _question(locals())
    try:
        return _core.detect(*question)
    except AmbiguousLayout as error:
        error.readings = list(_core.candidates(*question))
        raise


def _question(given: dict[str, Any]) -> tuple[Any, dict[str, int], str | None, list[str]]:
    """Parts (shape, strides, item size), hints, dtype and names, as the library takes them."""
    thing, strides, dtype = (given[n] for n in ("tensor_or_shape", "strides", "dtype"))
    among = _names(given["among"])
    names = ("num_layers", "num_kv_heads", "head_size", "block_size", "num_blocks")
    sizes = {name: to_size(given[name], f"detect: {name}") for name in names if given[name] is not None}
    if dtype is not None and not isinstance(dtype, str):
        raise DTypeError(f"detect: dtype is {dtype!r}, expected a name such as 'bf16'")
    if is_tensor(thing) or (isinstance(thing, (list, tuple)) and thing and all(is_tensor(t) for t in thing)):
        if strides is not None:
            raise ArgumentError("detect: a tensor has its own strides; give strides only with a shape")
        infos = [inspect(t, "detect: tensor", where="any") for t in ([thing] if is_tensor(thing) else thing)]
        dtype = dtype or next((info.dtype for info in infos if info.dtype is not None), None)
        return [info.part for info in infos], sizes, dtype, among
    if not isinstance(thing, (list, tuple)):
        raise ArgumentError(f"detect: {thing!r} of type {type(thing).__name__} is no tensor and no shape")
    pair = len(thing) > 0 and all(isinstance(t, (list, tuple)) for t in thing)
    shapes = list(thing) if pair else [thing]
    steps: list[Any] = [()] * len(shapes) if strides is None else _items(strides, "strides") if pair else [strides]
    if len(steps) != len(shapes):
        raise ArgumentError(f"detect: {len(steps)} strides for {len(shapes)} shapes")
    parts = [
        ([to_size(n, "detect: shape") for n in shape], [to_size(n, "detect: strides") for n in step], 0)
        for shape, step in zip(shapes, (_items(step, "strides") for step in steps), strict=True)
    ]
    return parts, sizes, dtype, among


def _items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, Iterable):
        raise ArgumentError(f"detect: {what} is {value!r}, expected a list")
    return list(value)


def _names(among: Any) -> list[str]:
    names = [] if among is None else _items(among, "among")
    if isinstance(among, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"detect: among is {among!r}, expected a list of names")
    return names


def probe(
    backend_class: Any, *, num_kv_heads: int | None = None, head_size: int | None = None, dtype: str = "bf16"
) -> Any:
    """Ask an engine's attention backend class for its layout, with sizes that cannot be confused.

    Returns what `kvstride.vllm.layout_of_backend` returns. Raises UnknownLayout for a class whose interior is not
    known, EngineError where the engine cannot be asked.
    """
    from .vllm import layout_of_backend

    return layout_of_backend(backend_class, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
