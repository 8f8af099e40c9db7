"""Harm a server under load and see whether it heals: writes results/serve_faults.json.

    python benchmarks/serve_faults.py            # about three minutes

- kills: every process below the main one is killed in turn while four clients send images. How long until the next
  answer with status 200, and which other answers came?
- slow: 1,100 connections that send half a head, after a whole request each, and then nothing. Is a normal client
  answered?
- load: 32 clients for one minute without harm, beside one client alone (as benchmarks/serve.py).

All connections are to this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from cclnet.data.parallel import available_cores
from cclnet.files import write_whole
from cclnet.runs.provenance import origin
from serve import alone, percentiles, photographs, processes_of, send, serving, together, write_run

CLIENTS_DURING_KILLS = 4
SECONDS_TO_HEAL = 5.0
SLOW_CONNECTIONS = 1100
REQUESTS_BESIDE_SLOW = 50


def command_of(pid: int) -> str:
    """What a process of the server is, from its command line and its place in the tree."""
    line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    if "resource_tracker" in line:
        return "resource tracker"
    return "fork server" if len(processes_of(pid)) > 1 else "decoding process"


async def kill_in_turn(address: str, images: list[bytes], pid: int) -> list[dict[str, Any]]:
    """Kill each process below the main one; return how long it took until an answer came, and the other answers."""
    answers: list[tuple[float, str]] = []  # time of the answer, "" or what was wrong
    stop = asyncio.Event()

    async def client_loop(index: int) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            turn = index
            while not stop.is_set():
                _, wrong = await send(client, images[turn % len(images)])
                answers.append((time.monotonic(), wrong))
                turn += 1
                await asyncio.sleep(0.05 if wrong else 0)

    loops = [asyncio.create_task(client_loop(index)) for index in range(CLIENTS_DURING_KILLS)]
    found = []
    await asyncio.sleep(2)
    for victim in reversed(processes_of(pid)[1:]):  # the fork server after its processes, which it would take along
        if victim not in processes_of(pid):
            continue  # it ended with another one
        what, at = command_of(victim), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(SECONDS_TO_HEAL + 3)
        after = [(when - at, wrong) for when, wrong in answers if when > at + 0.05]
        healed = next((when for when, wrong in after if not wrong), None)
        unlike = Counter(wrong[:3] for _, wrong in after if wrong)
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            ready = (await client.get("/readyz")).status_code
            healthy = (await client.get("/healthz")).status_code
        seconds = None if healed is None else round(healed, 3)
        found.append({"killed": what, "seconds_until_200": seconds, "answers": len(after),
                      "other_answers": dict(unlike), "readyz": ready, "healthz": healthy})  # fmt: skip
        print(found[-1], flush=True)
    stop.set()
    await asyncio.gather(*loops)
    return found


def beside_slow_connections(address: str, images: list[bytes]) -> dict[str, Any]:
    """Open slow connections from another address of this machine and from the client's own; ask beside them."""
    host, port = address.removeprefix("http://").split(":")
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    found: dict[str, Any] = {"connections": SLOW_CONNECTIONS}
    for source, name in (("127.0.0.2", "from_another_address"), ("127.0.0.1", "from_the_same_address")):
        with ExitStack() as stack:
            for _ in range(SLOW_CONNECTIONS):
                line = socket.create_connection((host, int(port)), timeout=30, source_address=(source, 0))
                stack.enter_context(line)
                line.sendall(head + b"\r\n")
                line.recv(4096)
                line.sendall(head)
            statuses: Counter[str] = Counter()
            seconds = []
            for i in range(REQUESTS_BESIDE_SLOW):
                begin = time.perf_counter()
                headers = {"content-type": "image/jpeg", "connection": "close"}
                answer = httpx.post(f"{address}/predict", content=images[i % len(images)], headers=headers, timeout=60)
                statuses[str(answer.status_code)] += 1
                seconds.append(time.perf_counter() - begin)
        found[name] = {"statuses": dict(statuses), "latency_ms": percentiles(seconds)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("results/serve_faults.json"))
    given = parser.parse_args()
    images = photographs()
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / given.backbone, given.backbone, given.size)
        with serving(run) as (address, pid, engine):
            single = percentiles(asyncio.run(alone(address, images, 50)))
            load = asyncio.run(together(address, images, 32, given.seconds, pid))
            latency = percentiles(load.pop("latencies"))
            load.pop("memory_mb")
            kills = asyncio.run(kill_in_turn(address, images, pid))
            slow = beside_slow_connections(address, images)
    healed = [kill["seconds_until_200"] for kill in kills]
    content = {
        **origin(f"{engine}, {available_cores()} cores, clients included"), "seed": 0,
        "backbone": given.backbone, "size": given.size, "kills": kills, "slow": slow, "single_ms": single,
        "load": load | {"latency_ms": latency, "p99_over_single": round(latency["p99"] / single["p50"], 2)},
        "holds": {
            "200 within 5 s after each kill": all(s is not None and s < SECONDS_TO_HEAL for s in healed),
            "ready and healthy after each kill": all((k["readyz"], k["healthz"]) == (200, 200) for k in kills),
            "only 200 and 503 during kills": all(set(kill["other_answers"]) <= {"503"} for kill in kills),
            "slow connections stop nobody": all(
                slow[name]["statuses"] == {"200": REQUESTS_BESIDE_SLOW}
                for name in ("from_another_address", "from_the_same_address")
            ),
            "no error under load": load["failed"] == 0,
        },
    }  # fmt: skip
    write_whole(given.out, json.dumps(content, indent=1) + "\n")
    print(json.dumps({name: content[name] for name in ("slow", "single_ms", "load", "holds")}, indent=1))
    if not all(content["holds"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
