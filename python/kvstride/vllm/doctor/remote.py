# SPDX-License-Identifier: Apache-2.0
"""The remote engine as configured: it answers, takes chunks, and gives back what it was given."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import kvstride as kv
from kvstride import Error

from .finding import Finding, Setup, fail, ok, size_text, warn

_CHUNKS = 8
_CHUNK_BYTES = (1 << 20) - 4096
_DEADLINE = 10.0
#: A question that takes longer is felt in the time to a first token.
_SLOW = 0.1


def check_remote(setup: Setup) -> Finding | None:
    """A round trip, a trial written, read back by another connection, verified and removed."""
    options = setup.options
    if options is None or options.remote is None:
        return None
    try:
        trial = options.taking_everything()
        tier, reader = trial.shared(), trial.shared()
    except Error as error:
        return fail(str(error))
    assert tier is not None and reader is not None
    with tier, reader:
        space = kv.Namespace(
            model="kvstride doctor", revision="1", planes={"state": "u8"}, num_layers=1, num_kv_heads=1, head_size=1,
            block_size=1, raw="trial",
        )  # fmt: skip
        keys = [kv.Key(os.urandom(16)) for _ in range(_CHUNKS)]
        source = np.random.default_rng().integers(0, 256, (_CHUNKS, _CHUNK_BYTES), dtype=np.uint8)
        target = np.zeros_like(source)
        stores = [kv.Store(one, namespace=space, deadline=_DEADLINE) for one in (tier, reader)]
        try:
            return _trial(stores, keys, source, target)
        finally:
            stores[0].remove(keys)
            time.sleep(0.2)  # the removal goes on behind our backs
            for store in stores:
                store.close()


def _trial(stores: list[kv.Store], keys: list[kv.Key], source: np.ndarray, target: np.ndarray) -> Finding:
    writer, reader = stores
    writer.lookup(keys)  # connects
    begin = time.perf_counter()
    writer.lookup([kv.Key(os.urandom(16))])
    trip = time.perf_counter() - begin
    speeds = []
    for verb, store, rows in (("written", writer, source), ("read back", reader, target)):
        begin = time.perf_counter()
        call = store.put_bytes if verb == "written" else store.get_bytes
        outcomes = call(keys, list(rows)).wait()
        speeds.append(source.nbytes / (time.perf_counter() - begin))
        if set(outcomes) != {"ok"}:
            return _stopped(store, verb, outcomes)
    if not np.array_equal(source, target):
        return fail("other bytes came back than were written, with right checksums: tell the authors")
    detail = writer.metrics()["tiers"][0]["detail"]
    facts = {
        "engine": detail,
        "round_trip_seconds": round(trip, 6),
        "write_bytes_per_second": int(speeds[0]),
        "read_bytes_per_second": int(speeds[1]),
    }
    text = f"{detail}: {trip * 1000:.1f} ms a question, {size_text(speeds[0])}/s written, "
    text += f"{size_text(speeds[1])}/s read and verified ({_CHUNKS} chunks of 1 MiB)"
    if trip > _SLOW:
        return warn(text, "every new prompt waits for such a question", facts=facts)
    return ok(text, facts=facts)


def _stopped(store: kv.Store, verb: str, outcomes: list[str]) -> Finding:
    tier = store.metrics()["tiers"][0]
    counters: dict[str, Any] = {name: number for name, number in tier["counters"].items() if number}
    why = [n for n in counters if n.startswith(("refused", "no_space", "io_err", "timeout", "corrupt", "denied"))]
    worst = next(one for one in outcomes if one != "ok")
    return fail(
        f"{tier['detail']}: a chunk could not be {verb}: {worst} ({', '.join(why) or 'no reason counted'})",
        "docs/remote.md, what each failure looks like",
        facts={"counters": counters},
    )
