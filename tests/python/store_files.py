# SPDX-License-Identifier: Apache-2.0
"""A store's directory written by hand, from docs/formats, with nothing of kvstride."""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct

import xxhash

PAGE = 4096
GRANULE = 256 << 10
FIXED = struct.Struct("<8sIIQQ32sIIQQIIIII20x")
LAYERS, HEADS, TOKENS, DIM = 2, 4, 6, 10
ORDER = "H[{}] L[2] {{key: N[6] D[10] bf16, value: N[6] D[10] bf16}}"
HEAD_BYTES = 2 * LAYERS * TOKENS * DIM * 2


def pages(number: int) -> int:
    return -(-number // PAGE) * PAGE


def namespace_text(model: str = "acme/chat-8b", revision: str = "5f0b02c75b57") -> bytes:
    lines = [
        "kvstride-namespace 1", f"model={model}", f"revision={revision}", f"plane.key=bf16[{DIM}]",
        f"plane.value=bf16[{DIM}]", f"num_layers={LAYERS}", "first_layer=0", f"num_kv_heads={HEADS}",
        f"head_size={DIM}", f"block_size={TOKENS}", "group=0", "salt_policy=none",
    ]  # fmt: skip
    return "".join(line + "\n" for line in lines).encode()


def image(space: bytes, key: bytes, heads: tuple[int, int], payload: bytes, order: str, head_bytes: int) -> bytes:
    """Header and payload; what is in no head's section is shared."""
    shared = len(payload) - heads[1] * head_bytes
    padded = payload + bytes(pages(len(payload)) - len(payload))
    sections = [size for size in [shared] + [head_bytes] * heads[1] if size]
    cuts, at = [], 0
    for size in sections:
        cuts += range(at, at + size, GRANULE)
        at += size
    ends = [*cuts[1:], len(padded)]
    sums = [xxhash.xxh3_64_intdigest(padded[a:b]) for a, b in zip(cuts, ends, strict=True)]
    texts = order.encode() + space
    length = pages(192 + 8 * len(sums) + len(texts))

    def header(checksum: int) -> bytes:
        fixed = FIXED.pack(
            b"KVSTRIDE", 1, length, checksum, len(payload), hashlib.sha256(space).digest(), *heads, shared, head_bytes,
            len(sums), GRANULE, len(order), len(space), len(key),
        )  # fmt: skip
        return (fixed + key.ljust(64, b"\0") + struct.pack(f"<{len(sums)}Q", *sums) + texts).ljust(length, b"\0")

    return header(xxhash.xxh3_64_intdigest(header(0))) + padded


class StoreFiles:
    """The directory at `path`, as a process with this limit left it."""

    def __init__(self, path: pathlib.Path, max_bytes: int = 1 << 30):
        self.path = path
        for folder in (path, path / "tmp", path / "quarantine"):
            folder.mkdir(mode=0o700)
        record = struct.pack("<8sIIqq", b"kvsledgr", 1, 1, max_bytes, 0).ljust(4088, b"\0")
        (path / "ledger").write_bytes(record + struct.pack("<Q", xxhash.xxh3_64_intdigest(record)))
        (path / "ledger").chmod(0o600)

    def account(self) -> dict:
        """What the ledger says."""
        record = (self.path / "ledger").read_bytes()
        assert len(record) == 4096
        assert struct.unpack_from("<Q", record, 4088)[0] == xxhash.xxh3_64_intdigest(record[:4088])
        _, _, known, max_bytes, used = struct.unpack_from("<8sIIqq", record)
        reserved = sum(struct.unpack_from("<Qq", record, 72 + 24 * i)[1] for i in range(60))
        return {"known": known, "max_bytes": max_bytes, "used": used, "reserved": reserved}

    def file(self, space: bytes, key: bytes, heads: tuple[int, int]) -> pathlib.Path:
        name = f"{key.hex()}{heads[0]:04x}{heads[1]:04x}"
        return self.path / hashlib.sha256(space).hexdigest() / name[0] / name

    def put(
        self, space: bytes, key: bytes, heads: tuple[int, int] = (0, HEADS), payload: bytes | None = None,
        used: float | None = None, read: bool = False,
    ) -> pathlib.Path:  # fmt: skip
        """A chunk with the stored order, or raw bytes; `used`: seconds since 1970."""
        if payload is None:
            payload = random_payload(key, heads)
        raw = len(payload) != heads[1] * HEAD_BYTES
        data = (
            image(space, key, (0, 0), payload, "", 0)
            if raw
            else image(space, key, heads, payload, ORDER.format(heads[1]), HEAD_BYTES)
        )
        target = self.file(space, key, (0, 0) if raw else heads)
        for folder in (target.parents[1], target.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        (target.parents[1] / target.name[-8:]).touch(0o600)
        draft = self.path / "tmp" / f"{'ab' * 8}{os.getpid():08x}{hash(key) & 0xFFFFFFFF:08x}"
        draft.write_bytes(data)
        draft.chmod(0o600)
        if used is not None:
            os.utime(draft, (used, used - 100 if read else used))
        os.rename(draft, target)
        return target

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.path.glob("*/?/*") if path.is_file())

    def bytes(self) -> int:
        """What the account should have."""
        aside = (self.path / "quarantine").iterdir()
        return sum(max(path.stat().st_blocks * 512, pages(path.stat().st_size)) for path in [*self.files(), *aside])


def read_file(path: pathlib.Path) -> bytes:
    """Leaves the access time alone."""
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    with open(fd, "rb") as file:
        return file.read()


def random_payload(key: bytes, heads: tuple[int, int]) -> bytes:
    """Of each head its own, the same whoever writes it."""
    return b"".join(hashlib.shake_256(key + bytes([h])).digest(HEAD_BYTES) for h in range(heads[0], sum(heads)))
