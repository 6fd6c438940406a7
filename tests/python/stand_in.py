# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CUDA (`-DKVSTRIDE_CUDA_STAND_IN=ON`): device memory that is the host's, streams that run late."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np

from kvstride import _core


def load() -> Any:
    """Its functions, None in a build that does not have it."""
    library = ctypes.CDLL(_core.__file__)
    if not hasattr(library, "kvstride_stand_in_stream"):
        return None
    library.kvstride_stand_in_stream.restype = ctypes.c_void_p
    library.kvstride_stand_in_calls.restype = ctypes.c_int64
    return library


LIBRARY = load()
#: Where oracle.Memory's caches lie, as in the C++ tests: KVSTRIDE_TEST_CUDA=device, or mixed with the host.
PLACES = {"device": (0,), "mixed": (0, -1, 0, 1, -1)}.get(os.environ.get("KVSTRIDE_TEST_CUDA", ""), ())


class FakeArray:
    """A numpy array as an array on a device: nothing but `__cuda_array_interface__`."""

    def __init__(self, array: np.ndarray, device: int = 0, *, stream: int | None = None, contiguous: bool = False):
        self.array = array
        self.stream = stream
        self.contiguous = contiguous  #: say strides=None
        if LIBRARY is not None:
            whole = array
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            place = LIBRARY.kvstride_stand_in_place
            first = ctypes.c_void_p(whole.ctypes.data)
            place(first, ctypes.c_size_t(whole.nbytes), device)
            weakref.finalize(whole, place, first, ctypes.c_size_t(0), device)  # freed memory is nobody's

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.array.ctypes.data, not self.array.flags.writeable),
            "strides": None if self.contiguous else self.array.strides,
            "stream": self.stream,
        }


class Stream:
    """A stream of the stand-in, as torch's: with `cuda_stream`."""

    def __init__(self) -> None:
        self.cuda_stream: int = LIBRARY.kvstride_stand_in_stream()

    def write(self, to: np.ndarray, value: np.ndarray) -> None:
        """What a producer does on the stream: `to` becomes `value` when it gets there."""
        assert to.nbytes == value.nbytes and to.flags.c_contiguous and value.flags.c_contiguous
        LIBRARY.kvstride_stand_in_copy(
            ctypes.c_void_p(self.cuda_stream), ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(value.ctypes.data),
            ctypes.c_size_t(to.nbytes),
        )  # fmt: skip

    def capture(self, on: bool) -> None:
        """Begin or end a capture."""
        LIBRARY.kvstride_stand_in_capture(ctypes.c_void_p(self.cuda_stream), ctypes.c_bool(on))


def forget(array: np.ndarray) -> None:
    """Memory of a FakeArray that CUDA does not know any more."""
    LIBRARY.kvstride_stand_in_place(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(0), 0)


def drain() -> None:
    """All streams do what is on them."""
    LIBRARY.kvstride_stand_in_drain()


def calls(name: str) -> int:
    """How often the stand-in was called by this name since forget_calls()."""
    return LIBRARY.kvstride_stand_in_calls(name.encode())


def forget_calls() -> None:
    LIBRARY.kvstride_stand_in_forget_calls()
