# SPDX-License-Identifier: Apache-2.0
"""Memory that verbs take beside the caches, and the interpreter lock while they run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvstride as kv

#: Beyond ids (16 bytes a pair, a few times over) a verb takes stacks of threads and a few MiB of windows.
LIMIT = 24 << 20

VERBS = {
    "swap": "kv.swap_blocks(A, kv.Cache(b, 'B KV N H D'), pairs)",
    "convert": "kv.convert_blocks(A, kv.Cache(b.ravel(), 'B H {key: D N, value: D N}', geometry=G), pairs)",
    "tiles": "kv.convert_blocks(A, kv.Cache(b.ravel(), "
    "'B H {key: N/16 D/2 N%16 D%2, value: D/16 N/2 D%16 N%2}', geometry=G), pairs)",
    "cast": "kv.convert_blocks(A, kv.Cache(b.view(np.uint8).ravel()[: b.nbytes // 2], 'B KV H N D', "
    "geometry=kv.Geometry(num_blocks=n, block_size=16, num_kv_heads=8, head_size=128, dtype='f8_e4m3')), pairs, "
    "cast=True, scales={'key': [0.5] * 8, 'value': 2.0})",
    "cycles": "kv.copy_blocks(A, np.stack([np.arange(n), np.roll(np.arange(n), 1)], axis=1))",
    "zero": "kv.zero_blocks(A, np.arange(n))",
    "one_buffer": "kv.swap_blocks(E, O, np.stack([np.arange(n // 2)] * 2, axis=1))",
    "gather": "kv.gather_tokens(A, np.arange(n * 16)[::-1], out=planes)",
    "scatter": "kv.scatter_tokens(A, np.arange(n * 16)[::-1], planes)",
}

SCRIPT = """
import numpy as np, kvstride as kv
n = 2048
a = np.ones((n, 2, 16, 8, 128), np.float16)  # 128 MiB
b = np.ones_like(a)
G = kv.Geometry(num_blocks=n, block_size=16, num_kv_heads=8, head_size=128, dtype='f16')
A = kv.Cache(a, 'B KV N H D')
E, O = kv.Cache(a[::2], 'B KV N H D'), kv.Cache(a[1::2], 'B KV N H D')  # alternate in one buffer
pairs = np.stack([np.arange(n), (np.arange(n) * 7 + 3) % n], axis=1)
planes = {name: np.ones((1, n * 16, 8, 128), np.float16) for name in ('key', 'value')}
def status(key):
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))
before = status('VmRSS')
with open('/proc/self/clear_refs', 'w') as file:
    file.write('5')  # forget the peak so far
VERB
print(status('VmHWM') - before)
"""


@pytest.mark.parametrize("verb", VERBS)
def test_c87_memory_beside_the_caches_is_bounded(verb: str) -> None:
    """128 MiB and more are moved; the process's peak grows by a constant."""
    script = SCRIPT.replace("VERB", VERBS[verb])
    package = str(Path(kv.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {package!r})\n{script}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT


def test_c88_the_interpreter_lock_is_free_while_bytes_move() -> None:
    """Another thread goes on while a verb runs: it counts between the verb's start and its end."""
    tensor = np.ones((1024, 2, 16, 8, 128), np.float16)  # 64 MiB
    src = kv.Cache(tensor, "B KV N H D")
    order = "B H {key: D N, value: D N}"
    geometry = kv.Geometry(num_blocks=1024, block_size=16, num_kv_heads=8, head_size=128, dtype="f16")
    dst = kv.Cache(np.zeros(tensor.size, np.float16), order, geometry=geometry)
    ids = np.stack([np.arange(1024), np.arange(1024)], axis=1)
    running, done = threading.Event(), threading.Event()

    def move() -> None:
        running.set()
        for _ in range(5):
            kv.convert_blocks(src, dst, ids)
        done.set()

    switch = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # a thread that holds the lock keeps it: only a verb that lets go of it lets others run
    try:
        mover = threading.Thread(target=move)
        mover.start()
        running.wait()
        turns = 0
        while not done.is_set():
            turns += 1
            done.wait(0.001)
        mover.join()
    finally:
        sys.setswitchinterval(switch)
    assert turns >= 5
