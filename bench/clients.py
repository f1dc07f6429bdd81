"""What published clients send, sent to serve.py, and each answer held against the retriever's own.

    python bench/clients.py out=bench/results/clients.json                 # BM25 over the demo
    python bench/clients.py kind=dense index=INDEX encoder=E tolerance=1e-3 out=FILE

The requests are written anew from SOURCES; MCP is the official SDK's client. Every HTTP client asks
with a new connection each time (as requests.post does) and with keep-alive, alone and in parallel.
"""

from __future__ import annotations

import asyncio
import json
import math
import platform
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import requests  # noqa: E402

from config import run  # noqa: E402
from data import Turn, read_turns  # noqa: E402
from retriever import RetrieverConfig, open_retriever  # noqa: E402
from search.passages import Texts  # noqa: E402

SOURCES = {
    "search_r1": "PeterGriffinJin/Search-R1@a14dc3a: infer.py, search_r1/llm_agent/generation.py",
    "convsearch_r1": "BeastyZ/ConvSearch-R1@e7854c8: verl/verl/utils/reward_score/rewrite_r1.py",
    "research": "Agent-RL/ReSearch@4bdb872: src/verl/workers/rollout/vllm_rollout/vllm_rollout.py",
    "flashrag": "Agent-RL/ReSearch@3d976d2: src/flashrag/retriever/retriever.py, RemoteRetriever "
    "(RUC-NLPIR/FlashRAG@1ee5249 itself has no client of a server)",
    "mcp": "mcp.Client of the official SDK, legacy: with the initialize handshake; the calls of "
    "ninehills/deepsearch-rl@78d7101, opik_gepa.py, too; its own transport, SSE, is not served",
}
PARALLEL = 8  # clients at the same time, where they are several
COLUMNS = ("client", "connection", "parallel", "calls", "compared", "equal")  # of the result's rows


@dataclass
class ClientsConfig:
    out: str = ""
    """JSON file for the result; empty: it is only printed"""
    kind: str = "bm25"
    """retriever.kind of the server"""
    index: str = ""
    """retriever.index of the server"""
    encoder: str = ""
    """retriever.encoder of the server"""
    corpus: str = str(ROOT / "demo" / "corpus.jsonl")
    """corpus file"""
    turns: str = str(ROOT / "demo" / "test.jsonl")
    """turns with the queries and their ids; the file beside it that ends in .qrels has the golds"""
    tolerance: float = 0.0
    """largest difference of two equal scores"""


class Truth:
    """What the retriever gives in this process."""

    def __init__(self, cfg: RetrieverConfig, corpus: str):
        self.retriever = open_retriever(cfg)
        self.texts = Texts(corpus, self.retriever.passage_ids)

    def scored(self, queries: list[str], k: int) -> list:
        """(contents, score) of the best k passages of every query."""
        hits = self.retriever.search(queries, k)
        return [[(self.texts.document(id_)["contents"], score) for id_, score in h] for h in hits]

    def contents(self, queries: list[str], k: int) -> list:
        return [[text for text, _ in one] for one in self.scored(queries, k)]

    def ranks(self, turns: list[Turn]) -> list[int]:
        golds = [turn.gold_ids for turn in turns]
        ranks = self.retriever.gold_ranks([turn.question for turn in turns], golds, 100)
        return [-1 if rank is None else rank for rank in ranks]

    def shown(self, query: str, k: int) -> str:
        """The answer of the MCP tool."""
        texts = []
        for place, text in enumerate(self.contents([query], k)[0], 1):
            title, _, body = text.partition("\n")
            texts.append(f"[{place}] {title[1:-1]}\n{body}")
        return "\n\n".join(texts) or "No passage was found."


def search_r1(post: Callable, turns: list[Turn], truth: Truth) -> tuple[list, list]:
    queries = [turn.question for turn in turns]
    result = post("retrieve", {"queries": queries, "topk": 3, "return_scores": True})["result"]
    got = [[(hit["document"]["contents"], hit["score"]) for hit in one] for one in result]
    return got, truth.scored(queries, 3)


def convsearch_r1(post: Callable, turns: list[Turn], truth: Truth) -> tuple[list, list]:
    queries, ids = [turn.question for turn in turns], [turn.query_id for turn in turns]
    body = {"queries": queries, "query_ids": ids, "topk": 100, "return_scores": False}
    return post("retrieve", body)["result"], truth.ranks(turns)


def research(post: Callable, turns: list[Turn], truth: Truth) -> tuple[list, list]:
    """In training all queries at once; in its agent (`search`) one by one. Both read contents."""
    queries = [turn.question for turn in turns]
    lists = post("batch_search", {"query": queries, "top_n": 5})
    lists += [post("search", {"query": query, "top_n": 5}) for query in queries]
    return [[hit["contents"] for hit in one] for one in lists], truth.contents(queries * 2, 5)


def flashrag(post: Callable, turns: list[Turn], truth: Truth) -> tuple[list, list]:
    queries = [turn.question for turn in turns]
    passages, scores = post("batch_search", {"query": queries, "top_n": 5, "return_score": True})
    for query in queries:
        one, its = post("search", {"query": query, "top_n": 5, "return_score": True})
        passages, scores = [*passages, one], [*scores, its]
    got = [[(p["contents"], s) for p, s in zip(*both)] for both in zip(passages, scores)]
    return got, truth.scored(queries * 2, 5)


HTTP = [search_r1, convsearch_r1, research, flashrag]  # each: (what it got, what is right)
WRONG = [  # what these clients may send by mistake, and the status they must be told
    ("retrieve", {"queries": ["a"], "query_ids": ["nowhere"], "topk": 100}, 422),
    ("retrieve", {"queries": ["a"], "topk": 0}, 422),
    ("batch_search", {"query": "one text", "top_n": 5}, 422),
    ("search", {"query": " ", "top_n": 5}, 400),
]


def equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0, abs_tol=tolerance)
    return a == b


def http_rows(url: str, turns: list[Turn], truth: Truth, cfg: ClientsConfig) -> list[tuple]:
    """Every HTTP client over both kinds of connection, one at a time and several in parallel."""
    rows, local = [], threading.local()
    parts = [turns[i : i + 8] for i in range(0, len(turns), 8)]  # of a request each
    for client in HTTP:
        for connection in ("new", "keep-alive"):
            for at_once in (1, PARALLEL):
                calls: list[str] = []

                def post(path: str, body: dict) -> Any:
                    if connection == "keep-alive" and not hasattr(local, "session"):
                        local.session = requests.Session()
                    send = local.session.post if connection == "keep-alive" else requests.post
                    calls.append(path)
                    answer = send(f"{url}/{path}", json=body, timeout=60)
                    answer.raise_for_status()
                    return answer.json()

                def one(part: list[Turn]) -> bool:
                    return equal(*client(post, part, truth), cfg.tolerance)

                with ThreadPoolExecutor(at_once) as pool:
                    right = sum(pool.map(one, parts))
                rows.append((client.__name__, connection, at_once, len(calls), len(parts), right))
    answers = [requests.post(f"{url}/{path}", json=body, timeout=60) for path, body, _ in WRONG]
    told = [bool(answer.json()["detail"]) and answer.status_code for answer in answers]
    right = sum(status == wanted for status, (_, _, wanted) in zip(told, WRONG))
    return [*rows, ("refused requests", "new", 1, len(WRONG), len(WRONG), right)]


async def mcp_session(target: Any, mode: str, queries: list[str], truth: Truth) -> tuple[int, int]:
    """(calls, right answers) of one session: every tool, DeepSearch-RL's words, two wrong calls."""
    from mcp import Client
    from mcp.shared.exceptions import MCPError

    async with Client(target, mode=mode, read_timeout_seconds=60) as client:
        tools = (await client.list_tools()).tools
        right = [tool.name for tool in tools] == ["retrieve"]
        words = [{"query": query} for query in queries]
        words += [{"query": query, "with_meta": False} for query in queries]
        answers = [await client.call_tool(tool.name, w) for tool in tools for w in words]
        answers += await asyncio.gather(*(client.call_tool("retrieve", w) for w in words))
        for answer, w in zip(answers, words * 2, strict=True):
            good = not answer.is_error and len(answer.content) == 1
            right += good and answer.content[0].text == truth.shown(w["query"], 3)
        right += (await client.call_tool("retrieve", {"query": " "})).is_error
        try:
            right += (await client.call_tool("nothing", {})).is_error
        except MCPError:
            right += 1
    return len(answers) + 3, right


async def mcp_rows(targets: dict, queries: list[str], truth: Truth) -> list[tuple]:
    """Sessions of the SDK's client; each is a new connection with many calls."""
    rows = []
    for name, target in targets.items():
        for mode in ("auto", "legacy"):
            for count in (1, PARALLEL if name == "http" else 2):  # over stdio each is a process
                sessions = [mcp_session(target, mode, queries, truth) for _ in range(count)]
                done = await asyncio.gather(*sessions)
                calls, right = (sum(column) for column in zip(*done))
                rows.append((f"mcp ({mode})", name, count, calls, calls, right))
    return rows


def main(cfg: ClientsConfig) -> dict:
    from mcp.client.stdio import StdioServerParameters

    settings = {"kind": cfg.kind, "corpus": cfg.corpus, "index": cfg.index, "encoder": cfg.encoder}
    truth = Truth(RetrieverConfig(**settings), cfg.corpus)
    turns = read_turns(cfg.turns)
    words = [str(ROOT / "serve.py"), f"qrels={Path(cfg.turns).with_suffix('.qrels')}"]
    words += [f"corpus={cfg.corpus}"] + [
        f"retriever.{key}={value}" for key, value in settings.items() if value
    ]
    server = subprocess.Popen([sys.executable, *words, "port=0"], stdout=subprocess.PIPE, text=True)
    try:
        url = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
        rows = http_rows(url, turns, truth, cfg)
        stdio = StdioServerParameters(command=sys.executable, args=[*words, "mcp=stdio"])
        targets, some = {"http": f"{url}/mcp", "stdio": stdio}, [t.question for t in turns[:10]]
        rows += asyncio.run(mcp_rows(targets, some, truth))
    finally:
        server.send_signal(signal.SIGTERM)
        last = server.communicate(timeout=60)[0].splitlines()[-1]
    packages = ("requests", "mcp", "starlette", "uvicorn", "pydantic", "httpx2")
    result = {
        "command": " ".join(["python bench/clients.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "retriever": cfg.kind,
        "passages": len(truth.retriever.passage_ids),
        "queries": len(turns),
        "sources": SOURCES,
        "clients": [dict(zip(COLUMNS, row)) for row in rows],
        "server": json.loads(last),
        "all_equal": all(right == compared for *_, compared, right in rows),
    }
    if cfg.out:
        Path(cfg.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    run(ClientsConfig, main)
