# SPDX-License-Identifier: Apache-2.0
"""The rule that names a KV layout from an engine's own facts.

The facts are what vLLM says of one tensor: its backend class, the sizes, the shape, the stride order (to 0.28) or the
byte strides (from 0.29), the dtype, the run-time switches and, on the CPU, the ISA. Records of the facts files
(`tests/data/vllm_layouts.json`), probes of a backend class and tensors of a running engine all pass through
`name_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kvstride
from kvstride import LayoutError, UnknownLayout

from . import interiors
from ._natural import natural_view
from ._rows import registry_name
from .axes import byte_strides, check_words, match_axes
from .families import FAMILIES, OPAQUE, UNDESCRIBED, Family, Interior

#: K/V cache dtypes whose content is plain elements.
_PLAIN = {"auto", "float16", "half", "bfloat16", "float", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"}

#: Releases of a class whose interior hangs on a switch that the class cannot be asked for; a variant settles it.
_SWITCHED = {("RocmAttentionBackend", "0.11.0"): "0.11.0 is x-split only where prefill-decode attention is forced"}

#: What to add where no declared shape of an interior fits.
_HINTS = {Interior.SHUFFLE: "; packed content, as in 0.26 to 0.28, cannot be shuffled: K and V overlap (vLLM PR 54717)"}


@dataclass(frozen=True)
class Named:
    """A layout with the name that the engine's facts give it.

    `order` is the notation without strides, `text` the same with every byte stride that is not natural, `geometry` the
    keyword arguments of `kvstride.Geometry`; `axes`, `shape` and `strides` (bytes, by axis) are the tensor's own
    dimensions. `letters` is vLLM's layout name, such as `BLHNC` or `NHD`, where the facts have one.
    """

    backend: str
    interior: Interior
    order: str
    text: str
    geometry: Mapping[str, Any]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: Mapping[str, int]
    release: str | None = None
    letters: str | None = None

    @property
    def opaque(self) -> bool:
        """Shape and strides alone would not tell the bytes."""
        return self.interior in OPAQUE

    @property
    def name(self) -> str | None:
        """The registry's name for it, None where the registry has no row or several."""
        return registry_name(self)

    def layout(self) -> kvstride.Layout:
        """The layout, strides included. Raises LayoutError where the sizes do not suit the order."""
        return kvstride.Layout(self.text, kvstride.Geometry(**self.geometry))

    def cache(self, tensors: Any) -> kvstride.Cache:
        """Tensors of this layout as a cache, without a copy: one tensor or a list of one a layer, in the shape that the
        engine declares (a tuple of two where K and V are apart). Raises as `kvstride.Cache`, and LayoutError where a
        tensor's shape or strides are not those that were named."""
        listed = tensors if isinstance(tensors, list) else [tensors]
        layers = len(listed) if len(listed) > 1 else self.geometry["num_layers"]
        layout = kvstride.Layout(self.text, kvstride.Geometry(**{**self.geometry, "num_layers": layers}))
        for tensor in listed:
            self._check(tensor)
        natural = [natural_view(tensor, layout) for tensor in listed]
        cache = kvstride.Cache(natural if len(natural) > 1 else natural[0], layout)
        if cache.layout != layout:
            raise LayoutError(f"{self.backend}: the memory reads as '{cache.layout}', not as '{layout}'")
        return cache

    def _check(self, tensor: Any) -> None:
        for part in tensor if isinstance(tensor, tuple) else (tensor,):
            item = part.element_size() if hasattr(part, "element_size") else part.itemsize
            steps = part.stride() if callable(getattr(part, "stride", None)) else [s // item for s in part.strides]
            have = {a: (n, s * item) for a, n, s in zip(self.axes, part.shape, steps, strict=False) if n > 1}
            want = {a: (n, self.strides[a]) for a, n in zip(self.axes, self.shape, strict=True) if n > 1}
            if have != want or len(part.shape) != len(self.shape):
                raise LayoutError(
                    f"{self.backend}: a tensor of (length, byte stride) {have}, not the {want} that was named"
                )

    def __str__(self) -> str:
        return self.text


def name_layout(facts: Mapping[str, Any]) -> Named:
    """Name the layout of one tensor (of one layer, or of all layers where `include_num_layers` is true).

    `facts` follows the schema of vLLM facts files. Read are: `backend` (class name); `args` (num_blocks, block_size,
    num_kv_heads, head_size, value_head_size); `logical_shape`; `stride_order` and `physical_shape` (to 0.28), or
    `view_stride_bytes` (from 0.29, and of any live tensor); `include_num_layers`; `variant`; `isa`; `cache_dtype`;
    `dtype` (absent: 16-bit elements); `logical_axes` (cross-check only); `from` (a release, for switches that cannot
    be asked). A live engine adds `probe`: the same class's answer for sizes that cannot be confused, as `args` and
    `logical_shape`; then that answer says which dimension is which, and the tensor's own sizes may coincide.

    Raises UnknownLayout with the reason where the class, its variant, its ISA, its dtype or its shape is not one whose
    bytes are known, AmbiguousLayout where equal sizes allow two readings, LayoutError where the facts contradict
    themselves. Never guesses. Source of the rules: vLLM 0.8.5 to 0.32.0.
    """
    backend = str(facts["backend"])
    try:
        return _name(backend, facts)
    except LayoutError as error:
        raise type(error)(f"{backend}: {error}") from None


def _name(backend: str, facts: Mapping[str, Any]) -> Named:
    interior = _interior(backend, facts)
    view = _View(backend, facts, interior)
    describe: Callable[[_View], interiors.Described] = interiors.DESCRIBE[interior]
    if view.cache_dtype not in _PLAIN and interior in (Interior.STRIDED, Interior.SLOTS):
        describe = interiors.describe_quantized
    described = describe(view)
    return Named(
        backend=backend,
        interior=interior,
        order=described.order,
        text=described.text,
        geometry=described.geometry,
        axes=view.axes,
        shape=view.shape,
        strides=dict(zip(view.axes, view.strides, strict=True)),
        release=facts.get("from"),
        letters=facts.get("layout"),
    )


def _interior(backend: str, facts: Mapping[str, Any]) -> Interior:
    """The interior of a class under its variant."""
    family: Family | None = FAMILIES.get(backend)
    if family is None:
        reason = UNDESCRIBED.get(backend)
        raise UnknownLayout(reason if reason else "this backend class is not in kvstride's table")
    variant = facts.get("variant")
    if variant is None:
        switched = _SWITCHED.get((backend, str(facts.get("from"))))
        if switched:
            raise UnknownLayout(f"{switched}; a variant (x_split or flash) settles it")
        return family.interior
    interior = family.variants.get(variant, f"variant {variant!r} is not one whose bytes are known")
    if isinstance(interior, str):
        raise UnknownLayout(interior)
    return interior


class _View:
    """The facts of one tensor, checked and with its axes matched: what `interiors` works on."""

    def __init__(self, backend: str, facts: Mapping[str, Any], interior: Interior) -> None:
        self.backend = backend
        self.args: Mapping[str, int] = facts["args"]
        self.isa: str | None = facts.get("isa")
        self.variant: str | None = facts.get("variant")
        self.platform: str | None = facts.get("platform")
        self.shape = tuple(int(s) for s in facts["logical_shape"])
        self.layered = bool(facts.get("include_num_layers"))
        self.told_strides = facts.get("view_stride_bytes") is not None
        self.by_contract = "stride_order_LBHNC" in facts or bool(facts.get("by_contract"))
        self.cache_dtype, self.dtype = interiors.dtypes(facts)
        self.item = interiors.ITEM_BYTES[self.dtype]

        forms = interiors.forms(interior, self.cache_dtype in _PLAIN)
        probe = facts.get("probe")
        asked = probe or facts
        try:
            self.axes = self._match(asked["logical_shape"], asked["args"], forms)
        except UnknownLayout as error:
            raise UnknownLayout(f"{error}{_HINTS.get(interior, '')}") from None
        if probe:
            self._match(self.shape, self.args, [self.axes[self.layered :]], in_order=True)
        check_words(self.axes, facts.get("logical_axes"))
        self._check_kv_first(backend)
        self.strides = self._strides(facts)

    def _match(
        self, shape: Sequence[int], args: Mapping[str, int], forms: Sequence[Sequence[str]], *, in_order: bool = False
    ) -> tuple[str, ...]:
        layers = ("L",) if self.layered else ()
        axes = match_axes(shape[len(layers) :], args, forms, in_order=in_order or self.by_contract)
        return layers + axes

    def _check_kv_first(self, backend: str) -> None:
        reason = FAMILIES[backend].kv_first
        if reason and self.variant is None and self.axes[self.layered :][0] == "KV":
            raise UnknownLayout(f"{reason}; a variant (x_split or flash) settles it")

    def _strides(self, facts: Mapping[str, Any]) -> tuple[int, ...]:
        told = facts.get("view_stride_bytes")
        if told is None:
            return byte_strides(self.shape, facts.get("stride_order"), self.item, facts.get("physical_shape"))
        strides = tuple(int(s) for s in told)
        if len(strides) != len(self.shape):
            raise LayoutError(f"{len(strides)} strides for the {len(self.shape)} dimensions of shape {self.shape}")
        return strides

    def size(self, atom: str) -> int:
        """Length of the dimension `atom`."""
        return self.shape[self.axes.index(atom)]

    def stride(self, atom: str) -> int:
        """Byte stride of the dimension `atom`."""
        return self.strides[self.axes.index(atom)]
