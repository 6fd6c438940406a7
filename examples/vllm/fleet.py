# SPDX-License-Identifier: Apache-2.0
"""A fleet on one machine: vLLM engines in network namespaces of their own share prompts through others' engines.

For each remote an engine with one rank serves prompts on host `alpha`. One with two ranks on host `beta`, whose
directory is empty, finds the first half of them in the remote, where every restored byte must be the writer's head
slice; while it serves the second half a node of the remote is killed with signal 9: what that takes along is computed
again, and tokens are the same. Then `alpha` starts anew, with an empty directory, and serves with the node still down.

The nodes: of three Redis masters without replicas one, and a third of the chunks with it; of OpenStack Swift one of two
object servers, each of which has all objects (account, container and proxy servers live on); of Mooncake one of two
stores that have a copy of each chunk. A prompt that is computed in other parts, and two ranks, round differently: a
token may only be another one where both were as likely (a tie). Exit code 0: everything was as it must be. Needs root,
for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))

from engines import compare, quick_dtype, run

from demo import BLOCK, LENGTHS, prompts
from servers import mooncake, redis, swift

HUB, HOSTS = "10.77.0.1", {"alpha": "10.77.0.2", "beta": "10.77.0.3"}
KINDS = ["redis", "s3", "mooncake"]
NOISE = 0.1
#: Tokens of all prompts in whole blocks.
WHOLE = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
#: Seconds that an engine may wait for the remote: for one question, and for one load with all its attempts.
LOOKUP_TIMEOUT, DEADLINE = 1.0, 5.0
#: From when on the node dies, seconds after a prompt came: it is being read then, or soon.
AFTER = 0.02


class Network:
    """Three namespaces: the servers' with a bridge, and one for each engine's host."""

    def __init__(self, tag: str) -> None:
        self._names = {host: f"kv{tag}{host}" for host in ("hub", *HOSTS)}

    def inside(self, host: str) -> list[str]:
        """The beginning of a command line that runs there."""
        return ["ip", "netns", "exec", self._names[host]]

    def make(self) -> None:
        """All of it. Raises CalledProcessError where that may not be."""
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        hub = self._names["hub"]
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{HUB}/24", "dev", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for host, address in HOSTS.items():
            name = self._names[host]
            _ip("-n", hub, "link", "add", host, "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("-n", hub, "link", "set", host, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")

    def remove(self) -> None:
        """All of it, as far as it is there, with every process that lives in it."""
        for name in self._names.values():
            end = time.monotonic() + 10
            while (left := _processes(name)) and time.monotonic() < end:
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _processes(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


class Remote(NamedTuple):
    """Servers that run."""

    url: str
    environment: dict[str, str]  #: what engines need in theirs
    node: subprocess.Popen[bytes]  #: that is to die
    signal: int  #: its number for kill, below 0 where it has children
    copies: bool  #: another node has all that this one has


@contextlib.contextmanager
def remote(kind: str, folder: Path) -> Iterator[Remote]:
    """Servers of one kind, as long as the context lasts."""
    folder.mkdir()
    if kind == "redis":
        # Or a cluster that lacks a node would serve nothing.
        with redis.Redis(cluster=True, host=HUB, cluster_require_full_coverage="no") as servers:
            node = servers.processes[1]
            yield Remote(servers.url(), {}, node, node.pid, False)
    elif kind == "s3":
        with swift.Swift(host=HUB, copies=2) as servers:
            node = servers.processes["object"]
            yield Remote(servers.url(), servers.environment, node, -node.pid, True)
    else:
        with mooncake.Mooncake(folder, nodes=2, host=HUB) as servers:
            node = servers.nodes[0]
            yield Remote(servers.url(replicas=2), {}, node, node.pid, True)


class Fleet:
    """Engines on one model."""

    def __init__(self, work: Path, network: Network) -> None:
        self._work = work
        self._network = network
        self._halves: list[list[Any]] = [
            [{"prompt": ids, "tokens": 8, "digest": True} for ids in prompts(seed)] for seed in (1, 2)
        ]
        self._warm: list[Any] = [{"prompt": list(range(900, 920)), "tokens": 2}] * 2
        self._count = 0
        self.ok = True
        #: Seconds that a first token came later than one that is computed, at most, while a node was down.
        self.latest = 0.0

    def engine(self, host: str, tp: int, there: Remote | None, steps: list[Any]) -> list[dict[str, Any]]:
        """Answers of an engine on a host, with a directory of its own."""
        self._count += 1
        job: dict[str, Any] = {
            "model": str(self._work / "llama-92m"),
            "kind": "llama-92m",
            "tp": tp,
            "llm": {"max_model_len": 1600, "block_size": BLOCK, "num_gpu_blocks_override": 128, "dtype": quick_dtype()},
            "steps": [*self._warm, *steps, "settle"],
        }
        if there:
            job["extra"] = {
                "spec_name": "kvstride",
                "cpu_bytes_to_use": 5e8,
                "root_dir": str(self._work / f"cache{self._count}"),
                "max_bytes": 1e9,
                "deadline": DEADLINE,
                "remote": there.url,
                "remote_timeout": 2,
                "remote_lookup_timeout": LOOKUP_TIMEOUT,
            }
        status, log, told = run(self._work, job, self._network.inside(host), there.environment if there else {})
        if status != 0 or told is None:
            raise SystemExit(f"the engine on {host} ended with {status}:\n{log[-3000:]}")
        return told["answers"][len(self._warm) :]

    def row(self, name: str, answers: list[dict[str, Any]], like: list[dict[str, Any]], **must: Any) -> None:
        """Compare and print. `must`: `from_store`, the least and the most tokens that were not computed; `also`;
        `down`: a node was, and nobody may have waited for it longer than for a question and a load."""
        pairs = list(zip(answers, like, strict=True))
        compared = [compare(a, b, 2 * NOISE) for a, b in pairs]
        stored = sum(a["cached"] for a in answers)
        least, most = must["from_store"]
        ok = all(far <= NOISE and fair for far, fair in compared) and least <= stored <= most and must.get("also", True)
        if must.get("down"):
            self.latest = max([self.latest, *(a["seconds"] - b["seconds"] for a, b in pairs)])
            # Where it is computed in the end: up to four times as slowly, on a busy machine.
            ok = ok and all(a["seconds"] <= LOOKUP_TIMEOUT + DEADLINE + 4 * b["seconds"] for a, b in pairs)
        tokens = "equal" if all(a["tokens"] == b["tokens"] for a, b in pairs) else "tie"
        line = f"{name:40} {tokens:>7} {stored:>5} of {sum(LENGTHS)}"
        line += "".join(f" {a['seconds'] * 1e3:>8.1f}" for a in answers)
        print(line + ("" if ok else "   NOT as it must be"), flush=True)
        self.ok = self.ok and ok

    def tell(self, kinds: list[str]) -> None:
        """All of it."""
        head = f"{'engine':40} {'tokens':>7} {'from store':>13}" + "".join(f" {length:>8}" for length in LENGTHS)
        print(head + "   ms to the first token, by prompt length")
        first, second = self._halves
        num = len(first)
        plain = self.engine("alpha", 1, None, [*first, *second])
        self.row("no connector", plain[:num], plain[:num], from_store=(0, 0))
        for kind in kinds:
            with remote(kind, self._work / kind) as there:
                cold = self.engine("alpha", 1, there, [*first, *second])
                self.row(f"{kind}: alpha writes", cold[:num], plain[:num], from_store=(0, 0))
                self.row(f"{kind}: alpha writes more", cold[num:], plain[num:], from_store=(0, 0))
                killing = {"signal": [there.signal], "after": AFTER}
                two = self.engine("beta", 2, there, [*first, killing, *second])
                right = are_of(two[:num], cold[:num])
                self.row(f"{kind}: beta, two ranks", two[:num], plain[:num], from_store=(WHOLE, WHOLE), also=right)
                right = are_of(two[num:], cold[num:]) and there.node.wait(timeout=10) == -signal.SIGKILL
                name = f"{kind}: beta, a node is killed"
                self.row(name, two[num:], plain[num:], from_store=(0, WHOLE), also=right, down=True)
                after = self.engine("alpha", 1, there, first)
                right = are_of(after, cold[:num])
                # What a single node had is gone, and a share of 86 chunks is some.
                kept = (WHOLE, WHOLE) if there.copies else (0, WHOLE - BLOCK)
                name = f"{kind}: alpha, the node is down"
                self.row(name, after, plain[:num], from_store=kept, also=right, down=True)


def are_of(answers: list[dict[str, Any]], writer: list[dict[str, Any]]) -> bool:
    """Whether all bytes of blocks that were not computed are the writer's, whatever the number of ranks here."""

    def heads(answer: dict[str, Any], block: int) -> list[str]:
        layers = range(len(answer["digests"][0]))
        return [head for layer in layers for rank in answer["digests"] for head in rank[layer][block]]

    return all(
        heads(one, block) == heads(other, block)
        for one, other in zip(answers, writer, strict=True)
        for block in range(one["cached"] // BLOCK)
    )


def missing(kinds: list[str]) -> list[str]:
    """What this machine lacks."""
    programs = [] if shutil.which("ip") else ["ip"]
    programs += ["redis-server"] if "redis" in kinds and redis.program() is None else []
    programs += swift.missing() if "s3" in kinds else []
    out = [] if os.geteuid() == 0 else ["root, for network namespaces"]
    out += [f"{', '.join(programs)} (apt-packages-servers.txt)"] if programs else []
    no_package = "mooncake" in kinds and mooncake.package() is None
    return out + (["the Python package mooncake-transfer-engine-non-cuda"] if no_package else [])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--remote", action="append", choices=KINDS, help="only this one")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.remote or KINDS
    if options.inside is None:
        return outside(kinds)
    start = time.perf_counter()
    fleet = Fleet(Path(tempfile.gettempdir()), Network(options.inside))
    try:
        fleet.tell(kinds)
    except KeyboardInterrupt:  # whoever made the network takes all of it away
        return 128 + signal.SIGINT
    print(f"\nwith a node down a first token came at most {fleet.latest:.1f} s later than computed ones")
    print(f"{'all as it must be' if fleet.ok else 'NOT as it must be'}, {time.perf_counter() - start:.0f} s")
    return 0 if fleet.ok else 1


def outside(kinds: list[str]) -> int:
    """Makes the network, starts this program again among the servers, and leaves nothing behind, however that ends."""
    if lacking := missing(kinds):
        print(f"fleet: missing: {'; '.join(lacking)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    tag = str(os.getpid())
    network = Network(tag)
    chosen = [word for kind in kinds for word in ("--remote", kind)]
    again = [*network.inside("hub"), sys.executable, "-W", "ignore", __file__, "--inside", tag, *chosen]
    with tempfile.TemporaryDirectory(prefix="kvfleet-", ignore_cleanup_errors=True) as directory:
        try:
            network.make()
            return subprocess.run(again, env={**os.environ, "TMPDIR": directory}, check=False).returncode
        except subprocess.CalledProcessError as error:
            print(f"fleet: no network namespaces here: {' '.join(error.cmd)} failed", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            network.remove()


if __name__ == "__main__":
    sys.exit(main())
