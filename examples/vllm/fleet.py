# SPDX-License-Identifier: Apache-2.0
"""A fleet on one machine: vLLM engines in network namespaces of their own share prompts through others' engines.

For each remote (Redis Cluster, an S3 server, Mooncake) an engine with one rank serves prompts on host `alpha`; one with
two ranks on host `beta`, whose directory is empty, finds all of them in the remote, where every restored byte must be
the writer's head slice; then, while `beta` serves once more, a node of the remote is killed with signal 9: what it held
is computed again, and tokens are the same. Last, `alpha` serves with the node still down. A prompt that is computed in
other parts, and two ranks, round differently: a token may only be another one where both were as likely (a tie). Exit
code 0: everything was as it must be. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))

from engines import compare, quick_dtype, run

from demo import BLOCK, LENGTHS, prompts

HUB, HOSTS = "10.77.0.1", {"alpha": "10.77.0.2", "beta": "10.77.0.3"}
NOISE = 0.1


class Network:
    """Three namespaces: the servers' with a bridge, and one for each engine's host. This process moves into the
    servers' one by starting itself again there."""

    def __init__(self, tag: str) -> None:
        self._tag = tag

    def name(self, host: str) -> str:
        """Of a namespace."""
        return f"kv{self._tag}{host}"

    def make(self) -> None:
        """All of it. Raises CalledProcessError where that may not be."""
        hub = self.name("hub")
        for host in ("hub", *HOSTS):
            _ip("netns", "add", self.name(host))
            _ip("-n", self.name(host), "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{HUB}/24", "dev", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for host, address in HOSTS.items():
            _ip("-n", hub, "link", "add", host, "type", "veth", "peer", "name", "wire", "netns", self.name(host))
            _ip("-n", hub, "link", "set", host, "master", "bridge", "up")
            _ip("-n", self.name(host), "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", self.name(host), "link", "set", "wire", "up")

    def remove(self) -> None:
        """All of it, as far as it is there."""
        for host in ("hub", *HOSTS):
            subprocess.run(["ip", "netns", "del", self.name(host)], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def remote(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str], list[int]]]:
    """Servers: their URL, what engines need in their environment, and the processes of one node."""
    folder.mkdir()
    if kind == "redis":
        from servers.redis import Redis

        with Redis(folder, nodes=3, host=HUB) as redis:
            yield redis.url(), {}, [redis.processes[1].pid]
    elif kind == "s3":
        from servers.swift import Swift

        with Swift(host=HUB) as swift:
            yield swift.url(), swift.environment, swift.node()
    else:
        from servers.mooncake import Mooncake

        with Mooncake(folder, nodes=2, host=HUB) as mooncake:
            yield mooncake.url(replicas=2), {}, [mooncake.nodes[0].pid]


class Fleet:
    """Engines on one model."""

    def __init__(self, work: Path, network: Network) -> None:
        self._work = work
        self._network = network
        self._asked = [{"prompt": ids, "tokens": 8, "digest": True} for ids in prompts()]
        self._warm: list[Any] = [{"prompt": list(range(900, 920)), "tokens": 2}] * 2
        self._count = 0
        self.ok = True

    def engine(
        self, host: str, tp: int, url: str | None, environment: dict[str, str], kill: list[int] | None = None
    ) -> list[dict[str, Any]]:
        """Answers of an engine on a host, with a directory of its own; `kill`: these processes, after the first."""
        self._count += 1
        steps: list[Any] = [*self._warm, *self._asked]
        if kill:
            steps.insert(len(self._warm) + 1, {"signal": kill})
        job: dict[str, Any] = {
            "model": str(self._work / "llama-92m"),
            "kind": "llama-92m",
            "tp": tp,
            "llm": {"max_model_len": 1600, "block_size": BLOCK, "num_gpu_blocks_override": 128, "dtype": quick_dtype()},
            "steps": [*steps, "settle"],
        }
        if url:
            job["extra"] = {
                "spec_name": "kvstride",
                "cpu_bytes_to_use": 5e8,
                "root_dir": str(self._work / f"cache{self._count}"),
                "max_bytes": 1e9,
                "remote": url,
                "remote_timeout": 2,
            }
        where = ["ip", "netns", "exec", self._network.name(host)]
        status, log, told = run(self._work, job, where, environment)
        if status != 0 or told is None:
            raise SystemExit(f"the engine on {host} ended with {status}:\n{log[-3000:]}")
        return told["answers"][len(self._warm) :]  # type: ignore[no-any-return]

    def row(self, name: str, answers: list[dict[str, Any]], like: list[dict[str, Any]], **must: Any) -> None:
        """Compare and print. `must`: `from_store`, the least and the most tokens that were not computed; `also`."""
        pairs = list(zip(answers, like, strict=True))
        compared = [compare(a, b, 2 * NOISE) for a, b in pairs]
        stored = sum(a["cached"] for a in answers)
        least, most = must["from_store"]
        ok = all(far <= NOISE and fair for far, fair in compared) and least <= stored <= most and must.get("also", True)
        tokens = "equal" if all(a["tokens"] == b["tokens"] for a, b in pairs) else "tie"
        line = f"{name:40} {tokens:>7} {stored:>5} of {sum(LENGTHS)}"
        line += "".join(f" {a['seconds'] * 1e3:>8.1f}" for a in answers)
        print(line + ("" if ok else "   NOT as it must be"), flush=True)
        self.ok = self.ok and ok

    def tell(self, kinds: list[str]) -> None:
        """All of it."""
        whole = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        head = f"{'engine':40} {'tokens':>7} {'from store':>13}" + "".join(f" {length:>8}" for length in LENGTHS)
        print(head + "   ms to the first token, by prompt length")
        plain = self.engine("alpha", 1, None, {})
        self.row("no connector", plain, plain, from_store=(0, 0))
        for kind in kinds:
            with remote(kind, self._work / kind) as (url, environment, node):
                cold = self.engine("alpha", 1, url, environment)
                self.row(f"{kind}: alpha writes", cold, plain, from_store=(0, 0))
                two = self.engine("beta", 2, url, environment)
                right = all(
                    ours == [[heads[r : r + 1] for heads in layer] for layer in one["digests"][0]]
                    for one, other in zip(plain, two, strict=True)
                    for r, ours in enumerate(other["digests"])
                )
                self.row(f"{kind}: beta, two ranks, reads", two, plain, from_store=(whole, whole), also=right)
                killed = self.engine("beta", 2, url, environment, kill=node)
                self.row(f"{kind}: beta, a node is killed", killed, plain, from_store=(BLOCK, whole))
                after = self.engine("alpha", 1, url, environment)
                self.row(f"{kind}: alpha, the node is down", after, plain, from_store=(0, whole))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--remote", action="append", choices=["redis", "s3", "mooncake"], help="only this one")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.remote or ["redis", "s3", "mooncake"]
    if options.inside is None:
        return outside(sys.argv[1:])
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), Network(options.inside))
        fleet.tell(kinds)
    print(f"\n{'all as it must be' if fleet.ok else 'NOT as it must be'}, {time.perf_counter() - start:.0f} s")
    return 0 if fleet.ok else 1


def outside(arguments: list[str]) -> int:
    """Makes the network, and starts itself again among the servers."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("fleet: network namespaces need root and the program ip (Debian: iproute2)", file=sys.stderr)
        return 2
    network = Network(str(os.getpid()))
    try:
        network.make()
        inside = ["ip", "netns", "exec", network.name("hub"), sys.executable, "-W", "ignore", __file__]
        return subprocess.run([*inside, *arguments, "--inside", str(os.getpid())], check=False).returncode
    except subprocess.CalledProcessError as error:
        print(f"fleet: no network namespaces here: {' '.join(error.cmd)} failed", file=sys.stderr)
        return 2
    finally:
        network.remove()


if __name__ == "__main__":
    sys.exit(main())
