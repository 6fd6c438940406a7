# SPDX-License-Identifier: Apache-2.0
"""The interpreter ends while daemon threads are inside verbs: they must not end the process in another way."""

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
    import threading, time
    import numpy as np
    import kvstride as kv

    sizes = {"num_layers": 1, "block_size": 16, "num_kv_heads": 8, "head_size": 64}
    layout = kv.layout("B N H KV D", kv.Geometry(num_blocks=64, **sizes))
    cache = kv.Cache([np.zeros(layout.num_bytes, np.uint8)], layout)
    other = kv.Cache([np.zeros(layout.num_bytes, np.uint8)], layout)
    space = kv.Namespace(model="m", revision="1", planes={"key": "bf16", "value": "bf16"}, **sizes)
    store = kv.Store(kv.HostTier(16 << 20), namespace=space)
    keys = [kv.Key.chain(None, [i]) for i in range(64)]
    blocks = list(range(64))
    assert store.put(keys, cache, blocks).wait() == ["ok"] * 64
    never = store.get(keys[:1], other, [0], after=threading.Event())
    pairs = [(i, i) for i in blocks]
"""

VERBS = {
    "swap_blocks": "kv.swap_blocks(cache, other, pairs)",
    "get": "store.get(keys, other, blocks).wait()",
    "wait": "never._core.wait_for(0.0005)",
    "lookup": "store.lookup(keys * 100)",
    "error": "store.get(keys, other, [99] * 64)",
    "tier": "kv.HostTier(1 << 20).close()",
}

END = """
    def work():
        while True:
            try:
                {verb}
            except kv.Error:
                pass

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.02)
    print("the end", flush=True)
"""


@pytest.mark.parametrize("verb", VERBS)
def test_daemon_threads_inside_verbs_at_exit(verb):
    script = textwrap.dedent(BEGIN) + textwrap.dedent(END).format(verb=VERBS[verb])
    for _ in range(5):
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (child.returncode, child.stdout, child.stderr) == (0, "the end\n", "")
