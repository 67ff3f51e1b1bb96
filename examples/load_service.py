"""Puts load on the service of ``online_service.py`` and prints requests per second, latency percentiles, versions and torn answers.

    python examples/load_service.py http://127.0.0.1:8080 --seconds 10 --connections 8

Each connection asks for one prediction after the other; one request in ten teaches the service an example instead. Now and then a malformed
request is mixed in, which must be answered with an error and nothing worse. One image, the probe, is asked again and again: two answers of
one version to it that differ are torn, made by the weights of two versions.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import aiohttp
import numpy as np
from sklearn.datasets import load_digits

import aiograd as ag

MALFORMED = (
    b"", b"{", b"[]", b'{"image": 3}', b'{"image": [1, 2, 3]}', b'{"image": ["a"]}', b"\xff\xfe", b"[" * 5000, b'{"image": null, "digit": NaN}',
)  # fmt: skip


async def put_load_on(url: str, *, seconds: float, connections: int) -> dict[str, float]:
    """Run the load and print a table.

    Args:
        url: of the service; requests go there and nowhere else.
        seconds: for how long.
        connections: how many requests are under way at once.

    Returns:
        Requests per second, latencies in milliseconds, versions that answered, and torn answers.
    """
    digits = load_digits()
    latencies: list[float] = []
    versions: set[str] = set()
    right = wrong = refused = torn = 0
    #: the answer to the probe by version
    probes: dict[str, list[float]] = {}

    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=10)) as session:
        before = await (await session.get("/stats")).json()
        stop_at = time.perf_counter() + seconds

        async def connection(number: int) -> None:
            nonlocal right, wrong, refused, torn
            random = np.random.default_rng(number)
            count = 0
            while time.perf_counter() < stop_at:
                count += 1
                chosen = int(random.integers(len(digits.target)))
                image, digit = digits.data[chosen].tolist(), int(digits.target[chosen])
                if count % 50 == 0:
                    body = MALFORMED[int(random.integers(len(MALFORMED)))]
                    async with session.post("/predict", data=body, headers={"Content-Type": "application/json"}) as response:
                        assert response.status == 400, f"a malformed request was answered with {response.status}"
                        refused += 1
                    continue
                if count % 10 == 0:
                    async with session.post("/learn", json={"image": image, "digit": digit}) as response:
                        assert response.status == 202
                        continue
                is_probe = count % 3 == 0
                start = time.perf_counter()
                async with session.post("/predict", json={"image": digits.data[0].tolist() if is_probe else image}) as response:
                    answer = await response.json()
                latencies.append((time.perf_counter() - start) * 1e3)
                versions.add(version := response.headers.get("X-Model-Version", ""))
                if is_probe:
                    torn += not np.allclose(probes.setdefault(version, answer["probabilities"]), answer["probabilities"], atol=1e-5)
                    continue
                if answer["digit"] == digit:
                    right += 1
                else:
                    wrong += 1

        async with asyncio.TaskGroup() as group:
            for number in range(connections):
                group.create_task(connection(number))
        after = await (await session.get("/stats")).json()

    p50, p90, p99, worst = np.percentile(latencies, [50, 90, 99, 100])
    rate = len(latencies) / seconds
    print(f"{'predictions':28} {len(latencies)} ({rate:.0f}/s over {connections} connections)")
    print(f"{'latency p50/p90/p99/max':28} {p50:.1f} / {p90:.1f} / {p99:.1f} / {worst:.1f} ms")
    print(f"{'training steps meanwhile':28} {after['steps'] - before['steps']} ({(after['steps'] - before['steps']) / seconds:.0f}/s)")
    print(f"{'versions that answered':28} {len(versions)} ({len(versions) / seconds:.1f}/s), torn answers: {torn}")
    print(f"{'malformed requests refused':28} {refused}")
    print(f"{'right predictions':28} {right / max(right + wrong, 1):.1%} of those asked for during the run")
    print(f"{'accuracy on held-back images':28} {before['accuracy']:.1%} before, {after['accuracy']:.1%} after")
    return {"rate": rate, "p50": p50, "p90": p90, "p99": p99, "max": worst, "versions": len(versions), "torn": torn}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", help="of a running service; without it there is nothing to do")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    if options.url is None:
        print("give the URL of a running service, such as http://127.0.0.1:8080 (python examples/online_service.py --serve)")
    else:
        ag.run(put_load_on(options.url, seconds=options.seconds, connections=options.connections))
