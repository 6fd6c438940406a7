# SPDX-License-Identifier: Apache-2.0
"""What a tensor's shape and strides can mean: never a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _core
from ._core import Reading
from ._tensor import inspect, is_tensor
from .errors import ArgumentError


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
    `num_layers` the tensor is one layer. Every hint that is given must agree.
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
    AmbiguousLayout with each reading and an element whose address differs, UnknownLayout with the full shape and what
    came closest.
    """
    return _core.detect(*_question(locals()))


def _question(given: dict[str, Any]) -> tuple[Any, dict[str, int], str | None, list[str]]:
    thing = given["tensor_or_shape"]
    strides = given["strides"]
    dtype = given["dtype"]
    names = ("num_layers", "num_kv_heads", "head_size", "block_size", "num_blocks")
    sizes = {name: int(given[name]) for name in names if given[name] is not None}
    if is_tensor(thing) or (isinstance(thing, (list, tuple)) and thing and all(is_tensor(t) for t in thing)):
        if strides is not None:
            raise ArgumentError("detect: a tensor has its own strides; give strides only with a shape")
        infos = [inspect(t, "detect: tensor") for t in ([thing] if is_tensor(thing) else thing)]
        parts = [info.part for info in infos]
        dtype = dtype or next((info.dtype for info in infos if info.dtype is not None), None)
    else:
        pair = isinstance(thing, (list, tuple)) and thing and all(isinstance(t, (list, tuple)) for t in thing)
        shapes = [list(s) for s in thing] if pair else [list(thing)]
        steps = [[] for _ in shapes] if strides is None else [list(s) for s in strides] if pair else [list(strides)]
        if len(steps) != len(shapes):
            raise ArgumentError(f"detect: {len(steps)} strides for {len(shapes)} shapes")
        parts = [([int(n) for n in s], [int(n) for n in t], 0) for s, t in zip(shapes, steps, strict=True)]
    return parts, sizes, dtype, list(given["among"] or [])


def probe(
    backend_class: Any, *, num_kv_heads: int | None = None, head_size: int | None = None, dtype: str = "bf16"
) -> Any:
    """Ask an engine's attention backend class for its layout, with sizes that cannot be confused.

    Returns what `kvstride.vllm.layout_of_backend` returns. Raises UnknownLayout for a class whose interior is not
    known, EngineError where the engine cannot be asked.
    """
    from .vllm import layout_of_backend

    return layout_of_backend(backend_class, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
