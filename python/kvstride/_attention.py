# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache of any layout, dense or sparse. Formulae and comparisons: docs/attention.md.

Everything is checked before the first output is written. The interpreter lock is released while it runs; calls may
run at once as long as nobody writes the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from ._args import to_flag, to_floats, to_int, to_numbers, to_scale, to_size
from ._ids import to_ids, to_vector
from ._tensor import TensorInfo, empty_like, inspect, is_torch, refuse_masked
from .blocks import host_core_of
from .cache import Cache
from .errors import ArgumentError, DTypeError

_COMPUTE = ("f32", "f16", "bf16")
#: ModelOpt's default.
_TILE = (128, 128)
_BASES = {"e": False, "2": True, 2: True}


def attention(
    q: Any,
    cache: Cache,
    layer: int,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    *,
    scale: float | None = None,
    causal: Any = True,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Any = None,
    key_scale: Any = 1.0,
    value_scale: Any = 1.0,
    skip_lambda: Any = None,
    tile: tuple[int, int] = _TILE,
    nm: tuple[int, int] | None = None,
    recent: int = 64,
    sink_tokens: int = 0,
    return_lse: bool = False,
    lse_base: str = "e",
    counters: bool | str = False,
    out: Any = None,
) -> Any:
    """Softmax(q kᵀ · scale) v over the paged keys and values of one layer: decode, prefill, chunks, mixed batches.

    `q` is `[token, query head, head_size]` in f32, f16 or bf16 (numpy: uint16); rows `query_start_loc[s]` up to
    `query_start_loc[s + 1]` belong to sequence s, whose `seq_lens[s]` tokens, those of its queries included, lie in
    the blocks `block_table[s]` (int32 or int64, `[sequence, block]`; entries that no query needs may be anything, such
    as -1). Query row i is at position i + seq_len - (number of its query rows). Query heads are a multiple of the
    cache's KV heads; keys and values may have different head sizes. Slots past seq_len are never read.

    - `scale`: of scores, 1 / sqrt(head_size) by default; `soft_cap` > 0: cap · tanh(score / cap).
    - `causal`: True, False, or one of them for each sequence. `window`: a row at position p sees keys from
      p - window + 1 on.
    - `sinks`: for each query head a logit that takes part in the softmax without a value.
    - `key_scale`, `value_scale`: of a cache of an f8 dtype: a number or one for each KV head.
    - `skip_lambda`: skip-softmax (ModelOpt): tiles of `tile` = (query rows, keys) whose rows all have
      exp(maximum - running maximum) < λ are skipped; a number or one for each sequence; None or <= 0 is off.
    - `nm`: (n, m), N:M sparse softmax of sequences with more than one query row: of each m = 4 or 8 keys n are kept,
      the `recent` ones and the first `sink_tokens` always.
    - `out`: a tensor of q's dtype, `[token, query head, value head size]`, for the result. Rows behind the last
      `query_start_loc` are left alone there, and 0 (LSE -inf) in a new one.

    Returns out; with `return_lse` also the logarithm of the softmax's denominators, float32 `[token, query head]`,
    natural or, with `lse_base="2"`, of base 2 (sinks count); with `counters=True` also an int64 `[2]` array: tiles
    looked at and tiles skipped; with `counters="each"` one such row for each sequence; with `counters="map"` one row
    (sequence, head, query tile, key tile, skipped) for each tile. A row that sees no key is 0 with LSE -inf.

    Raises ArgumentError (shapes, lengths, scales, λ >= 1, overlapping memory), BlockIndexError (an id that a query
    needs is outside the cache), DTypeError, LayoutError (a cache without keys and values, or with other planes).
    """
    kind = counters if isinstance(counters, str) and counters in ("map", "each") else None
    counted = kind is not None or to_flag(counters, "attention: counters")
    maps = kind == "map"
    call = _Call(
        "attention", q, cache, block_table, seq_lens, query_start_loc, out, to_flag(return_lse, "attention: return_lse")
    )
    each, _, rows = call.run(
        layer,
        _options(call, scale, causal, window, soft_cap, sinks, key_scale, value_scale),
        _floats(skip_lambda, "attention: skip_lambda"),
        _tile(tile, "attention"),
        _nm(nm),
        to_size(recent, "attention: recent"),
        to_size(sink_tokens, "attention: sink_tokens"),
        _base(lse_base, "attention"),
        counted and not maps,
        maps,
        [],
    )
    results = [call.out]
    if return_lse:
        results.append(call.lse)
    if maps:
        results.append(np.array(rows, np.int64).reshape(-1, 5))
    elif counted:
        by_sequence = np.array(each, np.int64).reshape(-1, 2)
        results.append(by_sequence if kind == "each" else by_sequence.sum(0))
    return results[0] if len(results) == 1 else tuple(results)


def attention_calibrate(
    q: Any,
    cache: Cache,
    layer: int,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    thresholds: Sequence[float],
    *,
    scale: float | None = None,
    causal: Any = True,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Any = None,
    key_scale: Any = 1.0,
    value_scale: Any = 1.0,
    tile: tuple[int, int] = _TILE,
    out: Any = None,
) -> tuple[Any, np.ndarray]:
    """Dense attention that counts what skip-softmax would skip.

    Arguments as of `attention`. Returns (out, int64 `[len(thresholds), 2]`): for each λ of `thresholds`, all of them
    between 0 and 1, how many tiles there are and how many of them it would skip. The map of a λ does not depend on
    skipping, since a skipped tile never raises the running maximum.
    """
    call = _Call("attention_calibrate", q, cache, block_table, seq_lens, query_start_loc, out, False)
    trials = _floats(thresholds, "attention_calibrate: thresholds")
    if not trials:
        raise ArgumentError("attention_calibrate: no thresholds")
    each, skipped, _ = call.run(
        layer,
        _options(call, scale, causal, window, soft_cap, sinks, key_scale, value_scale),
        [],
        _tile(tile, "attention_calibrate"),
        None,
        0,
        0,
        False,
        True,
        False,
        trials,
    )
    return call.out, np.array([[sum(tiles for tiles, _ in each), count] for count in skipped], np.int64)


def merge_states(out1: Any, lse1: Any, out2: Any, lse2: Any, *, lse_base: str = "e") -> tuple[Any, Any]:
    """What attention over the keys of both states had given: (out, lse).

    `out1`, `out2` are `[row, head, dim]` of one dtype (f32, f16 or bf16), `lse1`, `lse2` float32 `[row, head]` of the
    base `lse_base`. A state of LSE -inf adds nothing, whatever its values are; two of them give 0 and -inf. Give sinks
    to one of the two attentions only.
    """
    states: list[Any] = []
    for number, (out, lse) in enumerate(((out1, lse1), (out2, lse2)), 1):
        info = _rows(out, f"merge_states: out{number}")
        logs = inspect(lse, f"merge_states: lse{number}", allow_empty=True)
        if logs.dtype != "f32":
            raise DTypeError(f"merge_states: lse{number} is {logs.dtype_name}, expected float32")
        if logs.shape != info.shape[:2]:
            raise ArgumentError(
                f"merge_states: lse{number} has shape {list(logs.shape)}, out{number} {list(info.shape)}"
            )
        states += [_tensor(info, _compute_dtype(info, f"merge_states: out{number}")), _contiguous(lse, logs)]
    dtype = states[0][1]
    out, lse = empty_like(_rows(out1, "merge_states: out1"), dtype, states[0][2]), _empty_lse(out1, states[0][2][:2])
    _core.merge_states(
        states[0],
        states[1].address,
        states[2],
        states[3].address,
        _tensor(inspect(out, "merge_states: out", allow_empty=True), dtype),
        inspect(lse, "merge_states: lse", allow_empty=True).address,
        _base(lse_base, "merge_states"),
    )
    return out, lse


class _Call:
    """A call's tensors, checked; the results."""

    def __init__(
        self,
        verb: str,
        q: Any,
        cache: Cache,
        block_table: Any,
        seq_lens: Any,
        query_start_loc: Any,
        out: Any,
        return_lse: bool,
    ) -> None:
        self.verb = verb
        self.core = host_core_of(cache, verb)
        self.query = _rows(q, f"{verb}: q")
        self.dtype = _compute_dtype(self.query, f"{verb}: q")
        self.seq_lens = to_vector(seq_lens, f"{verb}: seq_lens")
        self.query_start_loc = to_vector(query_start_loc, f"{verb}: query_start_loc")
        self.table = _table(block_table, f"{verb}: block_table")
        tokens, heads = self.query.shape[:2]
        shape = (tokens, heads, _value_head_size(cache))
        self.out = out
        if out is None:
            self.out = empty_like(self.query, self.dtype, shape)
        self.to = _rows(self.out, f"{verb}: out")
        if out is not None:
            self._check_out(shape)
        self.lse = _empty_lse(q, (tokens, heads)) if return_lse else None
        self.used = int(self.query_start_loc[-1]) if len(self.query_start_loc) else 0
        self.fresh = out is None

    def _check_out(self, shape: tuple[int, ...]) -> None:
        if self.to.shape != shape:
            raise ArgumentError(f"{self.verb}: out has shape {list(self.to.shape)}, expected {list(shape)}")
        if _compute_dtype(self.to, f"{self.verb}: out") != self.dtype:
            raise DTypeError(f"{self.verb}: out is {self.to.dtype_name}, q {self.query.dtype_name}")
        if self.to.read_only:
            raise ArgumentError(f"{self.verb}: out is read-only")

    def run(self, layer: Any, options: tuple[Any, ...], *more: Any) -> Any:
        """The library's answer."""
        lse = 0 if self.lse is None else inspect(self.lse, "lse", allow_empty=True).address
        found = _core.attention(
            self.core,
            to_int(layer, f"{self.verb}: layer"),
            _tensor(self.query, self.dtype),
            _tensor(self.to, self.dtype),
            lse,
            self.table[0],
            self.seq_lens,
            self.query_start_loc,
            *options,
            *more,
        )
        if self.fresh:
            self.out[self.used :] = 0
        if self.lse is not None:
            self.lse[self.used :] = -float("inf")
        return found


def _options(
    call: _Call, scale: Any, causal: Any, window: Any, soft_cap: Any, sinks: Any, key_scale: Any, value_scale: Any
) -> tuple[Any, ...]:
    verb = call.verb
    always, each = _causal(causal, verb)
    return (
        None if scale is None else to_scale(scale, f"{verb}: scale"),
        always,
        each,
        None if window is None else to_size(window, f"{verb}: window"),
        to_scale(soft_cap, f"{verb}: soft_cap"),
        _floats(sinks, f"{verb}: sinks"),
        _floats(key_scale, f"{verb}: key_scale"),
        _floats(value_scale, f"{verb}: value_scale"),
    )


def _causal(causal: Any, verb: str) -> tuple[bool, list[int]]:
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal), []
    refuse_masked(causal, f"{verb}: causal")
    try:
        values = causal.detach().cpu().numpy() if is_torch(causal) else np.asarray(causal)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        values = np.asarray(None)
    if values.dtype != np.bool_ or values.ndim > 1:
        text = " ".join(repr(causal).split())
        raise ArgumentError(f"{verb}: causal is {text:.80}, expected True, False or one of them for each sequence")
    if values.ndim == 0:
        return bool(values), []
    return True, [int(v) for v in values.reshape(-1)]


def _floats(value: Any, what: str) -> list[float]:
    """Numbers; none of them for None."""
    if type(value) is float:
        return [value]
    return [] if value is None else to_floats(value, f"{what} is")


def _tile(tile: Any, verb: str) -> tuple[int, int]:
    if tile is _TILE:
        return _TILE
    sizes = to_numbers(tile, ("query rows", "keys"), f"{verb}: tile")
    if sizes is None:
        raise ArgumentError(f"{verb}: tile is None, expected (query rows, keys)")
    return (sizes[0], sizes[1])


def _nm(nm: Any) -> tuple[int, int] | None:
    pair = to_numbers(nm, ("n", "m"), "attention: nm")
    if pair is None:
        return None
    for number in pair:
        if not 0 <= number <= 64:
            raise ArgumentError(f"attention: nm is {pair[0]}:{pair[1]}, M must be 4 or 8 and N less")
    return (pair[0], pair[1])


def _base(base: Any, verb: str) -> bool:
    if not isinstance(base, (str, int)) or base not in _BASES:
        raise ArgumentError(f"{verb}: lse_base is {base!r:.40}, expected 'e' or '2'")
    return _BASES[base]


def _rows(tensor: Any, what: str) -> TensorInfo:
    info = inspect(tensor, what, allow_empty=True)
    if len(info.shape) != 3:
        raise ArgumentError(f"{what} has shape {list(info.shape)}, expected [token, head, dim]")
    return info


def _compute_dtype(info: TensorInfo, what: str) -> str:
    dtype = "bf16" if info.dtype_name == "uint16" else info.dtype
    if dtype not in _COMPUTE:
        raise DTypeError(f"{what} is {info.dtype_name}, expected float32, float16 or bfloat16 (numpy: uint16)")
    return dtype


def _tensor(info: TensorInfo, dtype: str) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    return info.address, dtype, info.shape, info.strides


def _table(block_table: Any, what: str) -> tuple[tuple[int, bool, int, int, int, int], Any]:
    """The block table where it lies, and what keeps it alive."""
    info = inspect(block_table, what, allow_empty=True) if _has_ids(block_table) else None
    if info is None:
        block_table = to_ids(block_table, what)
        if block_table.size == 0:
            block_table = block_table.reshape(len(block_table), 0)
        address, shape, strides, wide = block_table.ctypes.data, block_table.shape, None, True
        strides = tuple(s // 8 for s in block_table.strides)
    else:
        address, shape, strides, wide = info.address, info.shape, info.strides, info.item_size == 8
    if len(shape) != 2:
        raise ArgumentError(f"{what} has shape {list(shape)}, expected [sequence, block]")
    return (address, wide, shape[0], shape[1], strides[0], strides[1]), block_table


def _has_ids(table: Any) -> bool:
    return (isinstance(table, np.ndarray) and table.dtype == np.int32) or (
        is_torch(table) and str(table.dtype) == "torch.int32"
    )


def _value_head_size(cache: Cache) -> int:
    if "value" not in cache.layout.planes:  # which the library says in its own words
        return cache.layout.geometry.head_size
    return cache.layout.extents("value")[4]


def _empty_lse(like: Any, shape: tuple[int, ...]) -> Any:
    if is_torch(like):
        import torch

        return torch.empty(shape, dtype=torch.float32)
    return np.empty(shape, np.float32)


def _contiguous(tensor: Any, info: TensorInfo) -> TensorInfo:
    copied = tensor.contiguous() if is_torch(tensor) else np.ascontiguousarray(info.owner)
    return inspect(copied, "lse", allow_empty=True)
