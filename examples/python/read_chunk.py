# SPDX-License-Identifier: Apache-2.0
"""Reads and verifies chunk files with nothing of kvstride: docs/formats/chunk.md as a program (numpy, xxhash)."""

import hashlib
import re
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash

FIXED = struct.Struct("<8sIIQQ32sIIQQIIIII20x")
DTYPES = {"bf16": "<u2", "f16": "<f2", "f32": "<f4", "i32": "<i4", "i8": "i1"}  # the others are bytes


def planes_of(section, text):
    """Arrays by plane name, axes as the order has them."""
    whole = re.fullmatch(r"([^{]*)\{(.*)\}", text.strip())
    if not whole or re.search(r"[|/%@]", text):  # orders of `kvstride store convert` may be any
        raise ValueError(f"an order that this example does not read: {text}")
    terms, members = whole.groups()
    outer = [int(n) for n in re.findall(r"\[(\d+)\]", terms)]
    rows, out, at = section.reshape(*outer, len(section) // int(np.prod(outer, dtype=int))), {}, 0
    for member in members.split(","):
        name, terms, dtype = re.fullmatch(r"\s*(\w+):((?:\s*\w\[\d+\])+) (\w+)\s*", member).groups()
        shape, item = [int(n) for n in re.findall(r"\[(\d+)\]", terms)], np.dtype(DTYPES.get(dtype, "u1"))
        size = int(np.prod(shape)) * item.itemsize
        out[name] = rows[..., at : at + size].copy().view(item).reshape(*outer, *shape)
        at += size
    return out


def read_chunk(path):
    """(namespace text, key, first head, number of heads, planes). Raises ValueError for anything damaged."""
    data = Path(path).read_bytes()
    if len(data) < 4096 or data[:8] != b"KVSTRIDE":
        raise ValueError("not a chunk file")
    (_, version, header, checksum, payload, digest, first, heads, shared, head_bytes, granules, granule,
     order_bytes, space_bytes, key_bytes) = FIXED.unpack_from(data)  # fmt: skip
    if version != 1 or header % 4096 or len(data) != header + -(-payload // 4096) * 4096:
        raise ValueError("another version or length")
    if xxhash.xxh3_64_intdigest(data[:16] + bytes(8) + data[24:header]) != checksum:
        raise ValueError("the header is damaged")
    texts, key = data[192 + 8 * granules :], data[128 : 128 + key_bytes]
    order, space = texts[:order_bytes].decode(), texts[order_bytes : order_bytes + space_bytes].decode()
    name = f"{key.hex()}{first:04x}{heads:04x}"
    if hashlib.sha256(space.encode()).digest() != digest or Path(path).name not in (name, digest.hex() + name):
        raise ValueError("the file has another chunk's name")
    sections = [size for size in [shared] + [head_bytes] * heads if size]
    starts = header + np.cumsum([0, *sections])
    sums = struct.unpack_from(f"<{granules}Q", data, 192)
    cuts = [
        int(at) for start, size in zip(starts[:-1], sections, strict=True) for at in range(start, start + size, granule)
    ]
    for begin, end, stored in zip(cuts, [*cuts[1:], len(data)], sums, strict=True):
        if xxhash.xxh3_64_intdigest(data[begin:end]) != stored:
            raise ValueError(f"bytes {begin} to {end} are damaged")
    body, parts = np.frombuffer(data, np.uint8, payload, header), order.split("|") if order else []
    bodies = [body[:shared], body[shared:]] if len(parts) == 2 else [body]
    planes = {}
    for section, part in zip(bodies, parts):
        planes |= planes_of(section, part)
    return space, key, first, heads, planes or {"raw": body}


if __name__ == "__main__":
    for file in sys.argv[1:]:
        space, key, first, heads, planes = read_chunk(file)
        print(f"{key.hex()} heads {first}+{heads}:", {name: (a.shape, str(a.dtype)) for name, a in planes.items()})
