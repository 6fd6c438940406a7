# SPDX-License-Identifier: Apache-2.0
"""Plan: copies between two layouts, built once, bound to blocks, inspected and run many times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from . import _core
from ._args import to_flag, to_layers, to_scales, to_span
from ._ids import to_pairs, to_vector
from ._stream import put
from .blocks import Layers, Span, token_span
from .cache import Cache
from .errors import ArgumentError


class Plan:
    """Copies of blocks from `src` to `dst`, two caches or two layouts (then it can be inspected, not run).

    Arguments as for `convert_blocks`. Building checks all that does not depend on block ids; `bind` checks the ids.
    """

    def __init__(
        self,
        src: Cache | _core.Layout,
        dst: Cache | _core.Layout,
        *,
        heads: Span | None = None,
        tokens: Span | None = None,
        layers: Layers | None = None,
        cast: bool = False,
        scales: Mapping[str, Any] | None = None,
    ) -> None:
        ends = [end._core if isinstance(end, Cache) else end for end in (src, dst)]
        if not any(all(isinstance(e, kind) for e in (src, dst)) for kind in (Cache, _core.Layout)):
            raise ArgumentError("Plan: give two caches or two layouts")
        self._ends = (_Layouts(src), _Layouts(dst))
        self._keep = (src, dst)
        self._tokens = to_span(tokens, "Plan: tokens")
        self._core = _core.Plan(
            *ends,
            to_span(heads, "Plan: heads"),
            to_layers(layers, "Plan"),
            to_flag(cast, "Plan: cast"),
            to_scales(scales, "Plan"),
        )

    def bind(self, pairs: Any = None, *, src_blocks: Any = None, dst_blocks: Any = None) -> Plan:
        """Bind block pairs, or two token sequences (with `tokens` of the plan). Returns the plan.

        The ids are in host memory; those in device memory go to the verbs themselves.
        """
        if pairs is not None:
            if self._tokens is not None or src_blocks is not None or dst_blocks is not None:
                raise ArgumentError("Plan.bind: a plan with tokens is bound with src_blocks= and dst_blocks=")
            self._core.bind(to_pairs(pairs, "Plan.bind: pairs"))
            return self
        if src_blocks is None or dst_blocks is None:
            raise ArgumentError("Plan.bind: give pairs, or src_blocks and dst_blocks")
        sources = to_vector(src_blocks, "Plan.bind: src_blocks")
        destinations = to_vector(dst_blocks, "Plan.bind: dst_blocks")
        span = token_span(*self._ends, sources, destinations, self._tokens, "Plan.bind")
        self._core.bind_tokens(sources, destinations, span)
        return self

    @property
    def num_copies(self) -> int:
        """Copies of what is bound, after coalescing."""
        return int(self._core.num_copies)

    @property
    def num_bytes(self) -> int:
        """Bytes that the copies write."""
        return int(self._core.num_bytes)

    @property
    def sizes(self) -> dict[int, int]:
        """Size of a copy in bytes -> number of copies of that size."""
        return dict(self._core.sizes)

    def check(self) -> None:
        """Raise what `run` would raise, and move nothing."""
        self._check_alive()
        self._core.check()

    def run(self, *, stream: Any = None) -> None:
        """Move the bytes. Raises ArgumentError for a plan of layouts and where read and written bytes meet.

        `stream` as for the verbs: where the work goes if a cache lies on a CUDA device.
        """
        self._check_alive()
        put("Plan.run", stream, [end for end in self._keep if isinstance(end, Cache)], None, self._core.run)

    def __reduce__(self) -> NoReturn:
        raise TypeError("Plan: it cannot be pickled or copied; pickle the layouts and build it again")

    def _check_alive(self) -> None:
        for end in self._keep:
            if isinstance(end, Cache):
                end.core()


class _Layouts:
    """The layout of a cache or of a layout itself."""

    def __init__(self, end: Cache | _core.Layout) -> None:
        self.layout = end.layout if isinstance(end, Cache) else end
