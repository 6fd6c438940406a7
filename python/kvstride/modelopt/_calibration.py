# SPDX-License-Identifier: Apache-2.0
"""Skip-softmax calibration: sparsity of tile counters, the exponential fit, and λ from it (ModelOpt 0.47)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstride import ArgumentError, EngineError
from kvstride._args import to_floats

#: ModelOpt 0.47's default trials of λ (`DynamicThresholdCalibrator`).
THRESHOLD_TRIALS = (
    *(1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 2e-2),
    *(5e-2, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
)

#: Fewer points than this are no calibration, and fewer than the second among the reliable ones.
_MIN_POINTS, _MIN_KEPT = 10, 3
#: Sparsities that a fit relies on.
_LOWEST, _HIGHEST = 0.1, 0.9


class Fit(NamedTuple):
    """λ · length = a · exp(b · sparsity): the fit, its R² (where it was made: linear or log space), and the sparsities
    between which it was made; a target outside of them is extrapolated."""

    a: float
    b: float
    r2: float
    min_sparsity: float
    max_sparsity: float


def sparsity(counters: Any) -> float:
    """Share of skipped tiles: the sum of skipped over the sum of all, 0.0 where there are none.

    `counters`: (total, skipped) pairs, `[count, 2]`, as `kv.attention(counters=True)` gives one. A ratio of sums, not a
    mean of ratios: large calls count for more. Raises ArgumentError for counts that cannot be.
    """
    try:
        pairs = np.asarray(counters if isinstance(counters, np.ndarray) else list(counters))
    except (TypeError, ValueError):
        pairs = np.asarray(None)
    if pairs.size == 0 and pairs.ndim:
        return 0.0
    if pairs.ndim == 1 and len(pairs) == 2:
        pairs = pairs[None]
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ArgumentError(
            f"sparsity: counters are {counters!r:.80}, expected (total, skipped) pairs of whole numbers"
        )
    for total, skipped in pairs.tolist():
        if not 0 <= skipped <= total:
            raise ArgumentError(f"sparsity: {skipped} of {total} tiles skipped")
    total, skipped = (sum(column) for column in zip(*pairs.tolist(), strict=True))
    return skipped / total if total else 0.0


def fit(thresholds: Any, lengths: Any, sparsities: Any, *, log_space: bool = False) -> Fit:
    """Fit λ · length = a · exp(b · sparsity) to measured sparsities.

    `thresholds`: the trials of λ, `[trial]`, between 0 and 1 (`THRESHOLD_TRIALS`); `lengths`: KV tokens of each sample,
    `[sample]`; `sparsities`: `[sample, trial]`, each between 0 and 1, averaged over layers
    (`kv.attention_calibrate`, then `sparsity` of each trial).

    As ModelOpt 0.47's `DynamicThresholdCalibrator`: at least 10 points; those of sparsity 0.1 to 0.9 are kept, at least
    3; least squares of λ · length with a ≥ 0 and 0 ≤ b ≤ 20 from (1, 5), or, with `log_space`, of its logarithm,
    unbounded, from (0, 10).

    Raises ArgumentError for fewer points, for values out of range and where no fit is found, EngineError where scipy is
    not installed. (ModelOpt warns and goes on without a calibration.)
    """
    trials = np.array(to_floats(thresholds, "fit: thresholds are"))
    samples = np.array(to_floats(lengths, "fit: lengths are"))
    measured = np.array(to_floats(sparsities, "fit: sparsities are"))
    if measured.size != trials.size * samples.size or np.shape(sparsities) != (samples.size, trials.size):
        raise ArgumentError(
            f"fit: sparsities have shape {list(np.shape(sparsities))}, expected [sample, trial] = "
            f"[{samples.size}, {trials.size}]"
        )
    for name, values, right in (
        ("thresholds", trials, (trials > 0) & (trials < 1)),
        ("lengths", samples, (samples >= 1) & np.isfinite(samples)),
        ("sparsities", measured, (measured >= 0) & (measured <= 1)),
    ):
        if not right.all():
            raise ArgumentError(f"fit: {name} hold {values[~right][0]:g}, out of range")
    factors = np.outer(samples, trials).reshape(-1)
    if factors.size < _MIN_POINTS:
        raise ArgumentError(f"fit: {factors.size} points, at least {_MIN_POINTS} are needed")
    kept = (measured >= _LOWEST) & (measured <= _HIGHEST)
    if kept.sum() < _MIN_KEPT:
        raise ArgumentError(
            f"fit: {kept.sum()} of {factors.size} points have a sparsity of {_LOWEST} to {_HIGHEST}, at least "
            f"{_MIN_KEPT} are needed"
        )
    x, y = measured[kept], factors[kept]
    a, b, r2 = _fit_logarithms(x, np.log(y)) if log_space else _fit_values(x, y)
    return Fit(a, b, r2, float(x.min()), float(x.max()))


def skip_lambda(a: Fit | float, b: float | None = None, target: float = 0.5, length: int = 0) -> float | None:
    """λ = a · exp(b · target) / length, for `kv.attention(skip_lambda=…)`.

    `skip_lambda(fit, target=0.5, length=4096)` or `skip_lambda(a, b, target, length)`.

    `target`: the sparsity aimed at, 0 to 1. `length`: KV tokens; ModelOpt's vLLM plug-in takes the longest sequence of
    the scheduled batch. None, which is off, where the formula gives no valid λ: a ≤ 0, length ≤ 0, or λ ≥ 1 (as that
    plug-in, which then warns). Raises ArgumentError for what is no number and for a target out of range.
    """
    if isinstance(a, Fit):
        if b is not None:
            raise ArgumentError("skip_lambda: a fit has its b; give a and b, or a fit")
        a, b = a[:2]
    elif b is None:
        raise ArgumentError("skip_lambda: b is None, give a and b, or a fit")
    values = [_finite(v, f"skip_lambda: {n}") for n, v in (("a", a), ("b", b), ("target", target), ("length", length))]
    if not 0 <= values[2] <= 1:
        raise ArgumentError(f"skip_lambda: target is {target:g}, must be 0 to 1")
    if values[0] <= 0 or values[3] <= 0:
        return None
    try:
        found = values[0] * math.exp(values[1] * values[2]) / values[3]
    except OverflowError:
        return None
    return found if 0 < found < 1 else None


def _finite(value: Any, what: str) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise ArgumentError(f"{what} is {value!r:.40}, must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{what} is {value!r:.40}, must be a number") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{what} is {number}, must be finite")
    return number


def _fit_values(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    def model(at: np.ndarray, a: float, b: float) -> np.ndarray:
        return a * np.exp(b * at)

    a, b = _least_squares(model, x, y, (1.0, 5.0), ([0.0, 0.0], [np.inf, 20.0]))
    return a, b, _r2(y, model(x, a, b))


def _fit_logarithms(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    def model(at: np.ndarray, log_a: float, b: float) -> np.ndarray:
        return log_a + b * at

    log_a, b = _least_squares(model, x, y, (0.0, 10.0), None)
    return math.exp(log_a), b, _r2(y, model(x, log_a, b))


def _least_squares(
    model: Callable[..., np.ndarray], x: np.ndarray, y: np.ndarray, start: Sequence[float], bounds: Any
) -> tuple[float, float]:
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise EngineError(f"fit: needs scipy (pip install scipy): {error}") from None
    limits = {} if bounds is None else {"bounds": bounds}
    try:
        (first, second), _ = optimize.curve_fit(model, x, y, p0=list(start), maxfev=10000, **limits)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ArgumentError(f"fit: no fit found: {error}".replace("\n", " ")) from None
    return float(first), float(second)


def _r2(values: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance that is explained, 0 where there is none."""
    spread = float(np.sum((values - values.mean()) ** 2))
    return 1.0 - float(np.sum((values - predicted) ** 2)) / spread if spread > 0 else 0.0
