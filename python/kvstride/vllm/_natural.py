# SPDX-License-Identifier: Apache-2.0
"""The memory of a tensor in the shape that a layout has by itself."""

from __future__ import annotations

from typing import Any

import kvstride


def natural_view(tensor: Any, layout: kvstride.Layout) -> Any:
    """A view of `tensor`'s memory (torch or numpy; a tuple for layouts of several tensors) with the natural shape and
    strides of `layout`, which must start at the tensor's first element."""
    shape: Any = layout.shape
    strides: Any = layout.strides
    if isinstance(tensor, tuple):
        return tuple(_view(*part) for part in zip(tensor, shape, strides, strict=True))
    return _view(tensor, shape, strides)


def _view(tensor: Any, shape: Any, strides: Any) -> Any:
    if hasattr(tensor, "as_strided"):
        return tensor.as_strided(tuple(shape), tuple(strides))
    import numpy as np

    writeable = bool(tensor.flags.writeable)
    steps = [s * tensor.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(tensor, tuple(shape), steps, writeable=writeable)
