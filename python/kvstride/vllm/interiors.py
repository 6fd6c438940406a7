# SPDX-License-Identifier: Apache-2.0
"""Per interior: the shapes it is declared with, and its notation around the tensor's own strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from kvstride import LayoutError, UnknownLayout

from ._compose import KV, Body, Term, nest, single
from .families import Interior

if TYPE_CHECKING:
    from .naming import _View as View

#: Bytes of an element.
ITEM_BYTES: Mapping[str, int] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8_e4m3": 1,
    "f8_e5m2": 1,
    "f8_e4m3fnuz": 1,
    "f8_e5m2fnuz": 1,
    "i8": 1,
    "u8": 1,
}

_TORCH = {
    "float32": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "int8": "i8",
    "uint8": "u8",
}
#: What the bytes of a uint8 cache are under a cache dtype.
_BYTES = {
    "fp8": "f8_e4m3",
    "fp8_e4m3": "f8_e4m3",
    "fp8_inc": "f8_e4m3",
    "fp8_e5m2": "f8_e5m2",
    "fp8_per_token_head": "f8_e4m3",
}


@dataclass(frozen=True)
class Described:
    """Notation without and with strides, and the geometry it needs."""

    order: str
    text: str
    geometry: Mapping[str, Any]


def dtypes(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The cache dtype in vLLM's words and the element type in kvstride's.

    A record may list several cache dtypes that one shape answers; "auto" stands for them. Without `dtype` the elements
    are 16-bit, as in the facts files, except where the cache dtype is made of bytes.
    """
    told = facts.get("cache_dtype", "auto")
    listed = [told] if isinstance(told, str) else list(told)
    listed = [str(name).split("(")[0] for name in listed]
    if "auto" in listed:
        cache = "auto"
    elif len(listed) == 1:
        cache = listed[0]
    else:
        raise UnknownLayout(f"one shape for the cache dtypes {listed}: name one")
    name = facts.get("dtype")
    if name is None:
        dtype = "u8" if cache.endswith(("ds_mla", "per_token_head")) or cache in ("nvfp4", "mamba") else "bf16"
    else:
        name = str(name).removeprefix("torch.")
        dtype = _TORCH.get(name, name)
    if dtype in ("u8", "i8"):
        dtype = _BYTES.get(cache, dtype)
    if cache == "int8_per_token_head":
        dtype = "i8"
    if dtype not in ITEM_BYTES:
        raise UnknownLayout(f"dtype {name!r} is not one of {', '.join(ITEM_BYTES)}")
    return cache, dtype


_PACKED = ("B", "H", "N", "KV*D")
_FIVE = ("KV", "B", "N", "H", "D")
_SLOTS = ("B", "KV", "N", "H*D")
_FLAT = ("KV", "B", "N*H*D")
_ROWS = (("B", "N", "C"), ("B", "1", "N", "C"))

_FORMS: Mapping[Interior, Sequence[Sequence[str]]] = {
    Interior.STRIDED: (_FIVE, _PACKED),
    Interior.SLOTS: (_SLOTS,),
    Interior.X_SPLIT: (_FLAT, _FIVE, _SLOTS),
    Interior.SHUFFLE: (_FIVE, _SLOTS),
    Interior.FLAT_HND: (_FLAT,),
    Interior.CPU_TILE: (_FIVE, _PACKED),
    Interior.PALLAS: (("B", "N", "2*H", "C"), ("H", "B", "N", "D")),
    Interior.PAIR: (("B", "N", "H", "D"),),
    Interior.MLA: _ROWS,
    Interior.MLA_PAGE: _ROWS,
    Interior.INDEXER: _ROWS,
    Interior.STATE: (("B", "1", "1", "C"),),
}
_QUANTIZED = (("B", "KV", "N", "H", "C"), ("B", "2*H", "N", "C"), ("B", "H", "N", "C"))


def forms(interior: Interior, plain: bool) -> Sequence[Sequence[str]]:
    """The sets of atoms that a tensor of this interior is declared with. `plain`: no scales among the elements."""
    if not plain and interior in (Interior.STRIDED, Interior.SLOTS):
        return _QUANTIZED
    return _FORMS[interior]


def describe_strided(view: View) -> Described:
    """K and V vectors where shape and strides say; `[K|V]` content is K first."""
    item, d, dv = view.item, *_head_sizes(view)
    if "KV*D" in view.axes:
        _innermost(view, "KV*D")
        terms = _terms(view, "KV*D") + [Term(KV, 2, d * item)]
    else:
        _innermost(view, "D")
        terms = _terms(view, "D")
    return _nested(view, terms, Body("D", "D", d * item, dv * item))


def describe_slots(view: View) -> Described:
    """`[B, 2, N, H*D]`: K and V where others have heads, heads inside the content."""
    d, _ = _head_sizes(view)
    _innermost(view, "H*D")
    terms = _terms(view, "H*D") + [Term("H", view.args["num_kv_heads"], d * view.item)]
    return _nested(view, terms, Body("D", "D", d * view.item, d * view.item))


def describe_x_split(view: View) -> Described:
    """PagedAttention.split_kv_cache: K `[H, D/x, N, x]`, V `[H, D, N]` in every block, x = 16 bytes."""
    _divides(view, "head_size")
    return _blocks(view, "H D/x N D%x", "H D N")


def describe_shuffle(view: View) -> Described:
    """reshape_and_cache_shuffle_kernel: K `[H, D/x, N, x]`, V `[H, N/x, D, x]` in every block."""
    _divides(view, "head_size")
    _divides(view, "block_size")
    return _blocks(view, "H D/x N D%x", "H N/x D N%x")


def describe_flat_hnd(view: View) -> Described:
    """IPEX paged attention: `[H, N, D]` in every block of a flat tensor."""
    return _blocks(view, "H N D", "H N D")


def describe_cpu(view: View) -> Described:
    """cpu_attn_reshape_and_cache: a K tile, then a V tile, in every (block, head)."""
    d, dv = _head_sizes(view)
    n, item = view.size("N"), view.item
    if d != dv:
        raise UnknownLayout(f"a CPU tile with K of {d} and V of {dv} elements")
    key, value = _tiles(view)
    content = "KV*D" if "KV*D" in view.axes else "D"
    _dense(view, ("N", content))
    terms = _terms(view, "N", content)
    if content == "KV*D":
        terms.append(Term(KV, 2, n * d * item))
    return _nested(view, terms, Body(key, value, n * d * item, n * d * item))


def _tiles(view: View) -> tuple[str, str]:
    n, d = view.size("N"), view.args["head_size"]
    if view.isa in ("vec", "vec16"):
        return "D N", "N D"
    if view.isa != "amx":
        raise UnknownLayout(f"CPU ISA {view.isa!r} is not one whose bytes are known (vec, vec16, amx)")
    if n % 16 or d % 16:
        raise UnknownLayout(f"AMX tiles of 16 do not cut {n} tokens of {d} elements")
    if view.dtype == "f32":
        return "N/16 D N%16", "D/16 N D%16"
    return "N/16 D/2 N%16 D%2", "D/16 N/2 D%16 N%2"


def describe_pallas(view: View) -> Described:
    """TPU: V1 interleaves K and V on the head axis, head padded to 128 from 0.9.2; V0 has two tensors."""
    d, _ = _head_sizes(view)
    if "2*H" not in view.axes:
        return describe_pair(view)
    held = view.size("C")
    if held not in (d, -(-d // 128) * 128):
        raise UnknownLayout(f"content {held} is neither the head size {d} nor it padded to 128")
    _innermost(view, "C")
    step = view.stride("2*H")
    terms = _terms(view, "2*H", "C")
    terms += [Term("H", view.args["num_kv_heads"], 2 * step), Term(KV, 2, step)]
    return _nested(view, terms, Body("D", "D", d * view.item, d * view.item))


def describe_pair(view: View) -> Described:
    """A K tensor and a V tensor of the same shape and strides."""
    d, _ = _head_sizes(view)
    _innermost(view, "D")
    order, text = _checked(single, _terms(view, "D"), "D", d * view.item)
    return Described(f"key: {order} | value: {order}", f"key: {text} | value: {text}", _geometry(view))


def describe_mla(view: View) -> Described:
    """One vector a token: latent then rope, or the 656 bytes of fp8_ds_mla (FlashMLA sparse, DeepSeek V3.2)."""
    content = view.size("C")
    if view.dtype == "u8":
        if content != 656:
            raise UnknownLayout(f"an MLA row of {content} bytes is not one whose parts are known (656)")
        body = "{latent: D[512] f8_e4m3, latent_scale: D[4] f32, rope: D[64] bf16}"
    else:
        rope = view.args.get("qk_rope_head_dim", 64)
        latent = view.args.get("kv_lora_rank", 512)
        if latent + rope != content:
            raise UnknownLayout(f"an MLA row of {content} elements is not latent {latent} and rope {rope}")
        body = f"{{latent: D[{latent}], rope: D[{rope}]}}"
    return _rows(view, body)


def describe_mla_page(view: View) -> Described:
    """DeepSeek V4 fp8_ds_mla: 448 fp8 and 64 bf16 a token, then 7 scales and a pad a token behind all rows."""
    n = view.size("N")
    if not view.told_strides:
        raise UnknownLayout("the engine rounds these pages up: only a tensor's own strides tell by how much")
    if view.dtype != "u8" or view.size("C") != 584:
        raise UnknownLayout(f"a row of {view.size('C')} {view.dtype} is not one whose parts are known (584 bytes)")
    body = f"{{latent: N@576 D[448] f8_e4m3, rope@448: N@576 D[64] bf16, latent_scale@{576 * n}: N@8 D[7] f8_e8m0}}"
    return _pages(view, body)


def describe_indexer(view: View) -> Described:
    """indexer_k_quant_and_cache on CUDA: 128 fp8 a token for the whole block, then one f32 scale a token."""
    if view.dtype != "u8" or view.size("C") != 132 or view.platform != "cuda":
        raise UnknownLayout(
            f"an indexer row of {view.size('C')} {view.dtype} on {view.platform or 'an unknown platform'} is not "
            "one whose parts are known (132 bytes on CUDA)"
        )
    return _pages(view, "{index: N D[128] f8_e4m3, index_scale: N D[1] f32}")


def describe_state(view: View) -> Described:
    """Recurrent state from 0.29 on: one page of raw bytes a block, whatever layers put into it."""
    content = view.size("C") * view.item
    _innermost(view, "C")
    terms = [t for t in _terms(view, "C") if t.axis != "1"]
    order, text = _checked(single, terms, f"{{state: D[{content}] u8}}", content)
    geometry = _geometry(view) | {"dtype": "u8", "num_kv_heads": 1, "head_size": content, "block_size": 1}
    return Described(order, text, geometry)


def describe_quantized(view: View) -> Described:
    """Triton's int8 and fp8 caches with a float32 scale behind each head's data (0.20 and newer)."""
    d, dv = _head_sizes(view)
    if view.cache_dtype not in ("int8_per_token_head", "fp8_per_token_head") or d != dv or "2*H" in view.axes:
        raise UnknownLayout(f"cache dtype {view.cache_dtype!r}: scales among the data, in a way that is not described")
    if view.backend != "TritonAttentionBackend":
        raise UnknownLayout(f"cache dtype {view.cache_dtype!r} of a class that is not Triton's")
    side = d + 4
    told = side if KV in view.axes else 2 * side
    if view.size("C") != told:
        raise UnknownLayout(f"content {view.size('C')} is not {told}: {d} bytes and a float32 a head")
    _innermost(view, "C")
    terms = _terms(view, "C")
    if KV not in view.axes:
        terms.append(Term(KV, 2, side))
    inner = f"{{data: D {view.dtype}, scale: D[1] f32}}"
    return _nested(view, terms, Body(inner, inner, side, side))


#: How each interior is written.
DESCRIBE: Mapping[Interior, Callable[[View], Described]] = {
    Interior.STRIDED: describe_strided,
    Interior.SLOTS: describe_slots,
    Interior.X_SPLIT: describe_x_split,
    Interior.SHUFFLE: describe_shuffle,
    Interior.FLAT_HND: describe_flat_hnd,
    Interior.CPU_TILE: describe_cpu,
    Interior.PALLAS: describe_pallas,
    Interior.PAIR: describe_pair,
    Interior.MLA: describe_mla,
    Interior.MLA_PAGE: describe_mla_page,
    Interior.INDEXER: describe_indexer,
    Interior.STATE: describe_state,
}


def _head_sizes(view: View) -> tuple[int, int]:
    d = int(view.args["head_size"])
    return d, int(view.args.get("value_head_size") or d)


def _terms(view: View, *but: str) -> list[Term]:
    """The dimensions of the tensor, `but` some."""
    dims = zip(view.axes, view.shape, view.strides, strict=True)
    return [Term(axis, extent, stride) for axis, extent, stride in dims if axis not in but]


def _innermost(view: View, atom: str) -> None:
    if view.size(atom) > 1 and view.stride(atom) != view.item:
        raise UnknownLayout(f"{atom} steps by {view.stride(atom)} bytes, not by one element of {view.item}")


def _dense(view: View, atoms: Sequence[str]) -> int:
    """Check that `atoms`, outermost first, are one dense run; its bytes."""
    size = view.item
    for atom in reversed(atoms):
        if view.size(atom) > 1 and view.stride(atom) != size:
            raise UnknownLayout(f"{atom} steps by {view.stride(atom)} bytes where the packed interior needs {size}")
        size *= view.size(atom)
    return size


def _divides(view: View, arg: str) -> None:
    x = 16 // view.item
    if view.args[arg] % x:
        raise UnknownLayout(f"{arg} {view.args[arg]} is no multiple of x = {x}")


def _geometry(view: View) -> dict[str, Any]:
    args = view.args
    d, dv = _head_sizes(view)
    geometry: dict[str, Any] = {
        "num_layers": view.shape[0] if view.layered else 1,
        "num_blocks": int(args["num_blocks"]),
        "block_size": int(args["block_size"]),
        "num_kv_heads": int(args["num_kv_heads"]),
        "head_size": d,
        "dtype": view.dtype,
    }
    if d != dv:
        geometry["value_head_size"] = dv
    return geometry


def _checked(make: Callable[..., tuple[str, str]], *parts: Any) -> tuple[str, str]:
    try:
        return make(*parts)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _nested(view: View, terms: Sequence[Term], body: Body) -> Described:
    order, text = _checked(nest, terms, body)
    return Described(order, text, _geometry(view))


def _blocks(view: View, key: str, value: str) -> Described:
    """A packed interior that fills each block of K and of V."""
    inside = [a for a in view.axes if a not in ("L", KV, "B")]
    size = _dense(view, inside)
    return _nested(view, _terms(view, *inside), Body(key, value, size, size))


def _rows(view: View, body: str) -> Described:
    """One row of content a token."""
    _innermost(view, "C")
    size = view.size("C") * view.item
    terms = [t for t in _terms(view, "C") if t.axis != "1"]
    order, text = _checked(single, terms, body, size)
    return Described(order, text, _geometry(view))


def _pages(view: View, body: str) -> Described:
    """A body that fills the rows of a whole block."""
    size = _dense(view, ("N", "C"))
    terms = [t for t in _terms(view, "N", "C") if t.axis != "1"]
    assert size == prod((view.size("N"), view.size("C"), view.item))
    order, text = _checked(single, terms, body, size)
    return Described(order, text, _geometry(view))
