# SPDX-License-Identifier: Apache-2.0
"""What can be asked about CUDA devices."""

from __future__ import annotations

import re
from typing import Any

from . import _core
from ._args import to_int
from ._core import cuda_status, num_cuda_devices
from .errors import ArgumentError

__all__ = ["cuda_check", "cuda_status", "num_cuda_devices"]


def cuda_check(device: Any = 0) -> None:
    """Wait for verbs with ids in device memory, and raise BlockIndexError for an id of theirs that named nothing.

    `device` is a number, 'cuda:0' or a `torch.device`; 'cpu' has nothing to wait for. Each such id is reported once,
    by this function or by a later verb on the device; what it stood for was left out. Does nothing without CUDA.
    """
    if isinstance(device, str) or hasattr(device, "type"):
        if str(device) == "cpu":
            return
        named = re.fullmatch(r"cuda:(\d+)", str(device))
        if named is None:
            raise ArgumentError(f"cuda_check: device is '{device}', expected a number or such as 'cuda:0'")
        device = int(named[1])
    number = to_int(device, "cuda_check: device")
    if not 0 <= number < 1 << 16:
        raise ArgumentError(f"cuda_check: device is {number}, expected a number from 0 on")
    _core.cuda_check(number)
