#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The S3 engine beside `curl --parallel` of the same objects, in turns, on OpenStack Swift.

    python3 benchmarks/remote/s3.py build/bench/benchmarks/kvstride_engine [--rounds N] [--sizes COUNTxBYTES...]

Both start with no connection and have 64 side by side; curl has signed URLs, reads to /dev/null, and the start of its
process is taken off. Prints a line a verb and size: both medians in MB/s and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import hmac
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests" / "python"))
from servers.swift import KEY_ID, SECRET, Swift, missing, swift

CONNECTIONS = 64
PREFIX = "speed"


def signed_url(server: Swift, method: str, name: str) -> str:
    """A URL that may be used for an hour by whoever has it."""
    now = datetime.datetime.now(datetime.UTC)
    day, stamp = f"{now:%Y%m%d}", f"{now:%Y%m%dT%H%M%SZ}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    query = urllib.parse.urlencode(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{KEY_ID}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": 3600,
            "X-Amz-SignedHeaders": "host",
        }
    )
    host, path = server.endpoint.removeprefix("http://"), f"/{server.bucket}/{name}"
    canonical = f"{method}\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4" + SECRET.encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return f"{server.endpoint}{path}?{query}&X-Amz-Signature={signature}"


def seconds_of(command: list[str]) -> float:
    """How long it runs."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def curl(server: Swift, verb: str, count: int, data: pathlib.Path, start: float) -> float:
    """Seconds of curl for all objects."""
    method = "PUT" if verb == "write" else "GET"
    what = f'upload-file = "{data}"\n' if verb == "write" else ""
    urls = (signed_url(server, method, f"{PREFIX}/bench/{i}") for i in range(count))
    # An entry of its own for each object, as on a command line with --next.
    entries = [f'url = "{url}"\n{what}output = "/dev/null"\n' for url in urls]
    with tempfile.NamedTemporaryFile("w", suffix=".curl") as file:
        file.write("next\n".join(f"fail\n{entry}" for entry in entries))
        file.flush()
        command = [
            "curl",
            "--no-progress-meter",
            "--parallel",
            "--parallel-max",
            str(CONNECTIONS),
            "--config",
            file.name,
        ]
        return seconds_of(command) - start


def ours(program: str, server: Swift, verb: str, count: int, size: int) -> float:
    """Seconds of the engine for all objects."""
    url = server.url(PREFIX, connections=CONNECTIONS // 2)  # two threads
    run = subprocess.run(
        [program, url, verb, str(count), str(size)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, **server.environment},
    )
    return float(run.stdout)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["64x1048576", "16x8388608", "4x33554432"])
    options = parser.parse_args()
    if lacking := missing():
        print(f"not installed: {', '.join(lacking)} (apt-packages-servers.txt)", file=sys.stderr)
        return 77
    with swift(options.workers) as server, tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        start = statistics.median(seconds_of(["curl", "--version"]) for _ in range(5))
        for shape in options.sizes:
            count, size = (int(part) for part in shape.split("x"))
            file.seek(0)
            file.truncate()
            file.write(b"Z" * size)
            file.flush()
            for verb in ("write", "read"):
                pairs = []
                for turn in range(options.rounds):
                    both = {}
                    for who in ("ours", "curl") if turn % 2 == 0 else ("curl", "ours"):
                        if who == "ours":
                            both[who] = ours(options.program, server, verb, count, size)
                        else:
                            both[who] = curl(server, verb, count, pathlib.Path(file.name), start)
                    pairs.append((both["ours"], both["curl"]))
                mb = count * size / 1e6
                mine, theirs = (mb / statistics.median(pair[i] for pair in pairs) for i in (0, 1))
                ratio = statistics.median(their / my for my, their in pairs)
                print(
                    f"{verb:5} {count:3} x {size:9}: {mine:7.1f} MB/s, curl {theirs:7.1f} MB/s, ratio {ratio:.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
