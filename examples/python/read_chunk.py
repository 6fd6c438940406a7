# SPDX-License-Identifier: Apache-2.0
"""Reads and verifies chunk files with nothing of kvstride: docs/formats/chunk.md as a program (numpy, xxhash)."""

import hashlib
import re
import struct
import sys
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

FIXED = struct.Struct("<8sIIQQ32sIIQQIIIII20x64s")
DTYPES = {"bf16": "<u2", "f16": "<f2", "f32": "<f4", "i32": "<i4", "i8": "i1"}  # the others are bytes


def planes_of(section, text):
    """Arrays by plane name, axes as the order has them."""
    whole = re.fullmatch(r"([^{}]*)\{([^{}]*)\}", text.strip())
    if not whole or re.search(r"[|/%@]", text):  # orders of `kvstride store convert` may be any
        raise ValueError(f"an order that this example does not read: {text}")
    outer = [int(n) for n in re.findall(r"\d+", whole[1])]
    members = re.findall(r"(\w+):((?: \w\[\d+\])+) (\w+)", whole[2])
    fields = [(name, DTYPES.get(dtype, "u1"), tuple(map(int, re.findall(r"\d+", at)))) for name, at, dtype in members]
    rows = section.view(fields).reshape(outer)
    return {name: rows[name] for name, *_ in fields}


def read_chunk(path):
    """(namespace text, key, first head, number of heads, planes). Raises ValueError for anything damaged."""
    data = Path(path).read_bytes()
    if len(data) < 4096 or data[:8] != b"KVSTRIDE":
        raise ValueError("not a chunk file")
    (_, version, header, checksum, payload, digest, first, heads, shared, head_bytes, num_granules, granule,
     order_bytes, space_bytes, key_bytes, key) = FIXED.unpack_from(data)  # fmt: skip
    lengths_fit = header % 4096 == 0 and len(data) == header + -(-payload // 4096) * 4096
    if version != 1 or not lengths_fit or xxh3_64_intdigest(data[:16] + bytes(8) + data[24:header]) != checksum:
        raise ValueError("another version, or the header is damaged")
    texts, key = data[192 + 8 * num_granules :], key[:key_bytes]
    order, space = texts[:order_bytes].decode(), texts[order_bytes : order_bytes + space_bytes].decode()
    name = f"{key.hex()}{first:04x}{heads:04x}"
    if hashlib.sha256(space.encode()).digest() != digest or Path(path).name not in (name, digest.hex() + name):
        raise ValueError("the file has another chunk's name")
    sections = [size for size in [shared] + [head_bytes] * heads if size]
    starts = header + np.cumsum([0, *sections])
    cuts = [at for start, size in zip(starts[:-1], sections, strict=True) for at in range(start, start + size, granule)]
    sums = struct.unpack_from(f"<{num_granules}Q", data, 192)
    for begin, end, stored in zip(cuts, [*cuts[1:], len(data)], sums, strict=True):
        if xxh3_64_intdigest(data[begin:end]) != stored:
            raise ValueError(f"bytes {begin} to {end} are damaged")
    body, planes = np.frombuffer(data, np.uint8, payload, header), {}
    parts = order.split("|") if order else []  # planes without heads, then those with heads
    for section, part in zip(np.split(body, [shared] if len(parts) == 2 else []), parts):
        planes |= planes_of(section, part)
    return space, key, first, heads, planes or {"raw": body}


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(file, {name: (array.shape, str(array.dtype)) for name, array in read_chunk(file)[4].items()})
