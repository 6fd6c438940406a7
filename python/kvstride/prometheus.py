# SPDX-License-Identifier: Apache-2.0
"""A store's metrics for Prometheus, by `prometheus_client` (not installed with kvstride).

from prometheus_client import REGISTRY
REGISTRY.register(StoreCollector(store))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import ArgumentError, EngineError
from .store import Store

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ImportError as error:  # pragma: no cover
    raise EngineError("kvstride.prometheus: prometheus_client is not installed") from error

#: Upper edges of the buckets of `metrics()["seconds"]`, in seconds; the last one is open.
EDGES = [2.0**i * 1e-6 for i in range(27)]


class StoreCollector:
    """Collects one or several stores, told apart by the label `store`.

    kvstride_store_requests_total{store, verb, outcome}, kvstride_store_misses_total{store, reason},
    kvstride_store_request_seconds{store, verb}, and of each tier kvstride_tier_<counter>_total,
    kvstride_tier_seconds{operation}, kvstride_tier_capacity_bytes, kvstride_tier_used_bytes and kvstride_tier_chunks
    with the labels store and tier.
    """

    def __init__(self, stores: Store | Mapping[str, Store]) -> None:
        self._stores = {"": stores} if isinstance(stores, Store) else dict(stores)
        for store in self._stores.values():
            if not isinstance(store, Store):
                raise ArgumentError(f"StoreCollector: {type(store).__name__} is no Store")

    def collect(self) -> Iterator[Any]:
        """Families of samples, read now."""
        requests = CounterMetricFamily(
            "kvstride_store_requests", "Chunks by outcome", labels=["store", "verb", "outcome"]
        )
        misses = CounterMetricFamily("kvstride_store_misses", "Missed chunks by reason", labels=["store", "reason"])
        others = CounterMetricFamily("kvstride_store_events", "Other events", labels=["store", "event"])
        seconds = HistogramMetricFamily(
            "kvstride_store_request_seconds", "Time of a chunk's request", labels=["store", "verb"]
        )
        tiers: dict[str, Any] = {}
        tier_seconds = HistogramMetricFamily(
            "kvstride_tier_seconds", "Time of a tier's reads and writes", labels=["store", "tier", "operation"]
        )
        gauges = {
            name: GaugeMetricFamily(f"kvstride_tier_{name}", f"A tier's {name}", labels=["store", "tier"])
            for name in ("capacity_bytes", "used_bytes", "chunks")
        }
        for label, store in self._stores.items():
            metrics = store.metrics()
            for name, value in metrics["counters"].items():
                verb, _, rest = name.partition("_")
                if verb in ("put", "get"):
                    requests.add_metric([label, verb, rest], value)
                elif verb == "miss":
                    misses.add_metric([label, rest], value)
                else:
                    others.add_metric([label, name], value)
            for verb, histogram in metrics["seconds"].items():
                _add(seconds, [label, verb], histogram)
            for tier in metrics["tiers"]:
                labels = [label, tier["tier"]]
                for name, gauge in gauges.items():
                    gauge.add_metric(labels, tier[name])
                for name, value in tier["counters"].items():
                    if name not in tiers:
                        tiers[name] = CounterMetricFamily(
                            f"kvstride_tier_{name}", f"A tier's {name}", labels=["store", "tier"]
                        )
                    tiers[name].add_metric(labels, value)
                for operation, histogram in tier["seconds"].items():
                    _add(tier_seconds, [*labels, operation], histogram)
        yield from (requests, misses, others, seconds, tier_seconds, *gauges.values(), *tiers.values())


def _add(family: HistogramMetricFamily, labels: list[str], histogram: dict[str, Any]) -> None:
    total = 0
    buckets = []
    for edge, count in zip([*map(str, EDGES), "+Inf"], histogram["buckets"], strict=True):
        total += count
        buckets.append((edge, total))
    family.add_metric(labels, buckets, histogram["sum"])
