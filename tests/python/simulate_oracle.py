# SPDX-License-Identifier: Apache-2.0
"""A store over a trace, as docs/cli-simulate.md and src/store/index.h say it: plain lists, nothing fast."""

from __future__ import annotations

from dataclasses import dataclass, field

PAGE = 4096
DAY = 86_400 * 10**9
COUNTS = (
    "hits", "writes", "promotions", "demotions", "evictions", "evicted_unread", "expired", "refused_seldom",
    "refused_budget", "refused_large", "entries", "peak_entries",
)  # fmt: skip


@dataclass
class Entry:
    """A chunk in a tier."""

    key: int
    written: int  # nanoseconds
    uses: int = 0
    read: bool = False
    only_here: bool = False


@dataclass
class Tier:
    """One tier: the newest entry of a queue comes first."""

    name: str
    capacity: int
    lru: bool = False
    ttl: int = 0
    min_reuse: int = 1
    budget: int = 0
    window: int = 1 << 20
    small: list[Entry] = field(default_factory=list)
    main: list[Entry] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    asks_now: dict[int, int] = field(default_factory=dict)
    asks_before: dict[int, int] = field(default_factory=dict)
    num_asks: int = 0
    level: int = 0  # of the budget, in bytes × DAY
    last: int | None = None

    def __post_init__(self):
        self.level = self.full = max(self.budget // 24, 1) * DAY
        self.counts = dict.fromkeys(COUNTS, 0)

    def ask(self, key: int):
        self.asks_now[key] = min(self.asks_now.get(key, 0) + 1, 15)
        self.num_asks += 1
        if self.num_asks == self.window:
            self.asks_before, self.asks_now, self.num_asks = self.asks_now, {}, 0

    def admits(self, key: int, size: int, now: int) -> bool:
        if size > self.capacity:
            self.counts["refused_large"] += 1
            return False
        if self.min_reuse > 1 and self.asks_now.get(key, 0) + self.asks_before.get(key, 0) < self.min_reuse:
            self.counts["refused_seldom"] += 1
            return False
        if self.budget == 0:
            return True
        if self.last is not None:
            self.level = min(self.level + (now - self.last) * self.budget, self.full)
        self.last = now
        if self.level < DAY:
            self.counts["refused_budget"] += 1
            return False
        self.level -= size * DAY
        return True

    def find(self, key: int, now: int) -> Entry | None:
        for queue in (self.small, self.main):
            for entry in queue:
                if entry.key == key:
                    if self.ttl and now - entry.written >= self.ttl:
                        queue.remove(entry)
                        self.counts["expired"] += 1
                        return None
                    return entry
        return None

    def touch(self, entry: Entry):
        entry.read = True
        if self.lru:
            self.main.remove(entry)
            self.main.insert(0, entry)
        else:
            entry.uses = min(entry.uses + 1, 3)

    def size(self) -> int:
        return len(self.small) + len(self.main)

    def insert(self, key: int, now: int):
        remembered = key in self.ghosts
        if remembered:
            self.ghosts.remove(key)
        (self.main if self.lru or remembered else self.small).insert(0, Entry(key, now))
        self.counts["peak_entries"] = max(self.counts["peak_entries"], self.size())

    def _from_small(self) -> Entry | None:
        while self.small:
            entry = self.small[-1]
            if entry.uses < 2:
                return entry
            entry.uses = 0
            self.main.insert(0, self.small.pop())
        return None

    def _from_main(self) -> Entry | None:
        while self.main:
            entry = self.main[-1]
            if entry.uses == 0:
                return entry
            entry.uses -= 1
            self.main.insert(0, self.main.pop())
        return None

    def evict(self, pages: int) -> Entry:
        small_first = len(self.small) * 10 >= self.size()
        order = (self._from_small, self._from_main) if small_first else (self._from_main, self._from_small)
        entry = order[0]() or order[1]()
        assert entry is not None
        most_ghosts = self.size() * pages * 9 // 10 // pages
        if entry in self.small:
            self.small.remove(entry)
            self.ghosts.insert(0, entry.key)
            del self.ghosts[most_ghosts:]
        else:
            self.main.remove(entry)
        self.counts["evictions"] += 1
        self.counts["evicted_unread"] += not entry.read
        return entry


class Simulation:
    """All tiers, fastest first."""

    def __init__(self, tiers: list[Tier], block_tokens: int, chunk_tokens: int, bytes_per_token: int):
        self.tiers = tiers
        self.ids_of_chunk = chunk_tokens // block_tokens
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = PAGE + -(-chunk_tokens * bytes_per_token // PAGE) * PAGE
        self.chunks = self.hits = self.full_hits = 0

    def offer(self, i: int, key: int, now: int, count: str | None) -> bool:
        tier = self.tiers[i]
        if not tier.admits(key, self.chunk_bytes, now):
            return False
        while (tier.size() + 1) * self.chunk_bytes > tier.capacity:
            gone = tier.evict(self.chunk_bytes // PAGE)
            fresh = not (tier.ttl and now - gone.written >= tier.ttl)
            if gone.only_here and fresh and i + 1 < len(self.tiers) and not self.tiers[i + 1].find(gone.key, now):
                self.offer(i + 1, gone.key, now, "demotions")
        tier.insert(key, now)
        tier.counts["writes"] += 1
        if count:
            tier.counts[count] += 1
        return True

    def read(self, key: int, now: int) -> bool:
        for i, tier in enumerate(self.tiers):
            if entry := tier.find(key, now):
                tier.touch(entry)
                tier.counts["hits"] += 1
                for above in range(i):
                    self.offer(above, key, now, "promotions")
                return True
        return False

    def put(self, key: int, now: int):
        has = [bool(tier.find(key, now)) or self.offer(i, key, now, None) for i, tier in enumerate(self.tiers)]
        host = self.tiers[0]
        if any(has) and not all(has) and host.name == "host":
            for entry in host.small + host.main:
                if entry.key == key:
                    entry.only_here = True

    def request(self, row: dict):
        now = row["timestamp"] * 10**6
        whole = min(row["input_length"] // self.chunk_tokens, len(row["hash_ids"]) // self.ids_of_chunk)
        keys = [row["hash_ids"][(i + 1) * self.ids_of_chunk - 1] for i in range(whole)]
        for tier in self.tiers:
            for key in keys:
                tier.ask(key)
        hits = 0
        while hits < whole and self.read(keys[hits], now):
            hits += 1
        for key in keys[hits:]:
            self.put(key, now)
        self.chunks += whole
        self.hits += hits
        self.full_hits += 0 < whole == hits

    def result(self) -> dict:
        """The numbers of a run in the program's JSON."""
        tiers = []
        for tier in self.tiers:
            tier.counts["entries"] = tier.size()
            counts = dict(tier.counts)
            for name, of in (("read_bytes", "hits"), ("written_bytes", "writes"), ("evicted_bytes", "evictions")):
                counts[name] = counts[of] * self.chunk_bytes
            tiers.append({"tier": tier.name, **counts})
        return {
            "chunk_bytes": self.chunk_bytes,
            "chunks": self.chunks,
            "hits": self.hits,
            "full_hits": self.full_hits,
            "saved_tokens": self.hits * self.chunk_tokens,
            "tiers": tiers,
        }
