"""The service measured: requests a second and latencies of keep-alive clients, HTTP and MCP.

    python bench/serve.py out=bench/results/serve.json
    git worktree add ../before COMMIT
    python bench/serve.py before=../before out=bench/results/serve.json   # both, in turns

The server answers from BM25 over a few made-up passages: what is measured is the service and not
the search. An HTTP client is a thread with one http.client connection (as requests and urllib3 use
it), all in one process; an MCP client is a session of the MCP SDK. Clients and server share the
machine's cores.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from config import run  # noqa: E402

WORDS = "red blue green fox dog bird tree wine river stone cloud music paper engine garden".split()


@dataclass
class BenchConfig:
    out: str = ""
    """JSON file for the figures; empty: they are only printed"""
    before: str = ""
    """another checkout of this project, whose serve.py is measured in turns with this one's"""
    clients: list[int] = field(default_factory=lambda: [1, 64])
    """numbers of clients that ask at the same time"""
    seconds: float = 5.0
    """how long they ask"""
    repeats: int = 3
    """turns; the figures are the medians of all"""
    passages: int = 1000
    """passages of the index"""


def http_client(port: int, number: int, end: float) -> list[float]:
    """Seconds of every request of one keep-alive connection until `end`."""
    rng, took = random.Random(number), []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while (began := time.perf_counter()) < end:
        body = json.dumps({"queries": [" ".join(rng.choices(WORDS, k=3))], "topk": 3})
        connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())["result"]
        took.append(time.perf_counter() - began)
        assert answer.status == 200 and len(found) == 1 and len(found[0]) == 3
    return took


def http_clients(port: int, count: int, seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(count) as pool:
        return [
            t for one in pool.map(lambda i: http_client(port, i, end), range(count)) for t in one
        ]


def mcp_clients(port: int, count: int, seconds: float) -> list[float]:
    from mcp import Client

    async def client(number: int, end: float) -> list[float]:
        rng, took = random.Random(number), []
        async with Client(f"http://127.0.0.1:{port}/mcp") as session:
            while (began := time.perf_counter()) < end:
                answer = await session.call_tool(
                    "retrieve", {"query": " ".join(rng.choices(WORDS, k=3))}
                )
                took.append(time.perf_counter() - began)
                assert not answer.is_error and answer.content[0].text.startswith("[1] ")
        return took

    async def play() -> list[float]:
        end = time.perf_counter() + seconds
        return [
            t for one in await asyncio.gather(*(client(i, end) for i in range(count))) for t in one
        ]

    return asyncio.run(play())


def measure(root: str, corpus: str, cfg: BenchConfig) -> dict[str, dict]:
    """Figures of one server: "http, 64 clients" → requests a second, milliseconds."""
    command = [
        sys.executable,
        os.path.join(root, "serve.py"),
        f"retriever.corpus={corpus}",
        "port=0",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = int(
            next(line for line in server.stdout if line.startswith("serving"))
            .split()[-1]
            .rsplit(":", 1)[1]
        )
        figures = {}
        for name, ask, counts in (
            ("http", http_clients, cfg.clients),
            ("mcp", mcp_clients, cfg.clients[:1]),
        ):
            for count in counts:
                ask(port, count, 0.5)
                began = time.perf_counter()
                took = sorted(ask(port, count, cfg.seconds))
                rate = len(took) / (time.perf_counter() - began)
                figures[f"{name}, {count} client{'s' * (count > 1)}"] = {
                    "requests_per_second": rate,
                    **{f"p{p}_ms": 1000 * took[len(took) * p // 100] for p in (50, 99)},
                }
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    return figures


def main(cfg: BenchConfig) -> dict:
    roots = {"before": cfg.before, "after": ROOT} if cfg.before else {"after": ROOT}
    turns: dict[str, list[dict]] = {name: [] for name in roots}
    with tempfile.TemporaryDirectory() as folder:
        corpus, rng = os.path.join(folder, "corpus.jsonl"), random.Random(0)
        with open(corpus, "w") as f:
            for i in range(cfg.passages):
                row = {
                    "id": f"p{i}",
                    "title": f"Title {i}",
                    "text": " ".join(rng.choices(WORDS, k=60)),
                }
                print(json.dumps(row), file=f)
        for _ in range(cfg.repeats):
            for name, root in roots.items():
                turns[name].append(measure(root, corpus, cfg))
                print(name, json.dumps(turns[name][-1]), flush=True)
    result = {
        "command": " ".join(["python bench/serve.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "seconds": cfg.seconds,
        "repeats": cfg.repeats,
        "passages": cfg.passages,
    }
    for name, runs in turns.items():
        result[name] = {
            case: {
                figure: round(statistics.median(one[case][figure] for one in runs), 2)
                for figure in runs[0][case]
            }
            for case in runs[0]
        }
    if cfg.out:
        with open(cfg.out, "w", encoding="utf-8") as f:
            json.dump(result, f, indent=1)
            f.write("\n")
    return result


if __name__ == "__main__":
    run(BenchConfig, main)
