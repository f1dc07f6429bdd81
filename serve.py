"""An index over HTTP and MCP, in the dialects that existing clients speak.

    python serve.py retriever.corpus=corpus.jsonl qrels=train.qrels          # BM25 in memory, over HTTP and MCP
    python serve.py retriever.kind=dense retriever.index=INDEX retriever.encoder=E corpus=corpus.jsonl mcp=stdio

| client | request | answer |
|---|---|---|
| ConvSearch-R1 | POST /retrieve: queries, query_ids, topk | {"result": ranks}, -1: not found; or [ranks, scores] |
| Search-R1 | POST /retrieve: queries, topk (no query_ids) | {"result": [[document or {"document", "score"}]]} |
| ReSearch | GET /health, POST /search, /batch_search: query, top_n | documents {id, contents}, or [documents, scores] |
| an agent | MCP tool `retrieve`: query; /mcp, or stdin and stdout | plain text; tool error: bad query; MCP error: failure |
| RemoteRetriever | POST /hits, /gold_ranks, /has_ids | (id, score) lists; ranks, "failed" for a NaN; booleans |

Unlike theirs: ranks follow retriever.py's rule of order and every query has its own, under BM25 too; an unknown query
id, a limit, a wrong field are a 4xx and a failed search a 5xx, with the reason as {"detail": text}, never an empty
list.  A passage with a title goes out as the title in quotes, a newline, the text (the form of wiki-18).

One thread calls the retriever: requests that arrive while it works, or within `window_ms`, share the next call.
SIGTERM and Ctrl-C are how a server ends: it takes no more requests, answers those it has, and leaves with status 0
(143 and 130 while it still loads).  The last line of stdout is JSON; with mcp=stdio, where stdout is MCP's, of stderr.
"""  # no `from __future__ import annotations`: FastAPI reads the types of handlers that are defined inside functions

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Callable, Literal, NoReturn

from config import ConfigError, run
from data import DataError
from retriever import open_retriever, RetrieverConfig, same_corpus
from search.exact import FAILED
from search.passages import PassageIds, Texts

MAX_BODY, MAX_IDS = 64 * 2**20, 100_000  # bytes of a request, ids in one


@dataclass
class ServeConfig:
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """what is served: any kind but remote"""
    corpus: str = ""
    """corpus file the index was built from, for passage texts (documents, MCP); empty: retriever.corpus"""
    qrels: str = ""
    """TREC qrels with the gold passages of query_ids, for ConvSearch-R1's clients"""
    host: str = "127.0.0.1"
    """address to listen on; whoever can reach it can use it: there is no password"""
    port: int = 8000
    """0 takes a free one; the line that names the address says which"""
    mcp: Literal["http", "stdio", "off"] = "http"
    """MCP at /mcp beside the other dialects (http), over stdin and stdout and nothing else (stdio), or not at all"""
    topk: int = 3
    """passages of a Search-R1 request without topk, and of every MCP call"""
    window_ms: float = 2.0
    """how long the first waiting request waits for others to share its call; 0: only those already there"""
    max_batch: int = 4096
    """queries of one request, and about that many of one call"""
    max_query_chars: int = 65536
    """characters of one query"""
    max_k: int = 1000
    """results of one query, and the largest cut-off of a rank"""
    timeout: float = 300.0
    """seconds after which a waiting request gets a 504, and a stopping server drops what it has not answered"""


def check_config(cfg: ServeConfig) -> None:
    """ConfigError: a limit that lets nothing through, a file or a package that is missing."""
    for key in ("topk", "max_batch", "max_query_chars", "max_k", "timeout"):
        if not 0 < getattr(cfg, key) < math.inf:
            raise ConfigError(f"{key} is {getattr(cfg, key)}; it must be above 0")
    if cfg.topk > cfg.max_k:
        raise ConfigError(f"topk is {cfg.topk}, max_k {cfg.max_k}; topk may not be the larger one")
    if cfg.retriever.kind == "remote":
        raise ConfigError("retriever.kind is remote; serve an index of your own, or let clients ask that server")
    if cfg.mcp == "stdio" and not (cfg.corpus or cfg.retriever.corpus):
        raise ConfigError("mcp=stdio answers with passage texts: give corpus=FILE")
    try:
        import fastapi, uvicorn  # noqa: E401, F401
        if cfg.mcp != "off":
            import mcp.server.mcpserver  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"a package is missing ({e}): pip install -r requirements-serve.txt (mcp=off: no mcp)") from e


class Refused(Exception):
    """A request that gets no answer: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Job:
    """One request: queries, for ranks with their golds, and the place for its answer.  Equal keys share a call."""

    key: tuple[str, int]  # method; k or cutoff
    items: list[tuple]
    future: Future = field(default_factory=Future)


class Service:
    """What the dialects share: limits, and the one thread that calls the retriever."""

    def __init__(self, cfg: ServeConfig, retriever: Any, texts: Texts | None = None, qrels: dict | None = None):
        """qrels: query id → ids of its gold passages."""
        self.cfg, self.retriever, self.texts, self.qrels = cfg, retriever, texts, qrels
        self.counts = dict.fromkeys(("requests", "queries", "calls", "refused", "failed"), 0)
        self.waiting, self.jobs, self.started = 0, queue.Queue(), time.monotonic()
        self.thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self.thread.start()

    def _gather(self) -> list[Job | None]:
        """Wait for a job, then for more within the window and up to max_batch queries.  None is the last of all."""
        jobs = [self.jobs.get()]
        size, deadline = 0, time.monotonic() + self.cfg.window_ms / 1000
        while jobs[-1] is not None and (size := size + len(jobs[-1].items)) < self.cfg.max_batch:
            try:
                jobs.append(self.jobs.get(timeout=max(deadline - time.monotonic(), 0)))
            except queue.Empty:
                break
        return jobs

    def _work(self) -> None:
        jobs: list = [...]
        while jobs[-1] is not None:
            jobs = self._gather()
            ready = [job for job in jobs if job and job.future.set_running_or_notify_cancel()]  # others had their 504
            for key in dict.fromkeys(job.key for job in ready):
                self._call([job for job in ready if job.key == key])

    def _call(self, jobs: list[Job]) -> None:
        """Answer jobs of one key by one call; where it fails, by a call each: one's fault is not the others'."""
        (method, number), items, problem = jobs[0].key, [item for job in jobs for item in job.items], None
        self.counts["calls"] += 1
        try:
            answers = list(getattr(self.retriever, method)(*map(list, zip(*items)), number))
            if len(answers) != len(items):
                raise RuntimeError(f"{len(answers)} answers to {len(items)} queries")
        except Exception as e:
            problem = e
        if problem is None:
            for job in jobs:
                job.future.set_result(answers[:len(job.items)])
                del answers[:len(job.items)]
        elif len(jobs) > 1:
            for job in jobs:
                self._call([job])
        else:
            traceback.print_exception(problem)
            self.counts["failed"] += 1
            jobs[0].future.set_exception(Refused(500, f"the retriever failed: {type(problem).__name__}: {problem}"))

    async def _ask(self, method: str, items: list[tuple], number: int, name: str) -> list:
        """Check against the limits, put into the queue, wait.  Runs in the event loop, as everything below."""
        cfg = self.cfg
        if len(items) > cfg.max_batch:
            raise Refused(413, f"{len(items)} queries; a request may have {cfg.max_batch} (max_batch). Split it.")
        for i, (query, *_) in enumerate(items):
            if len(query) > cfg.max_query_chars:
                raise Refused(413, f"query {i} has {len(query)} characters; it may have {cfg.max_query_chars} "
                                   "(max_query_chars)")
        if not 1 <= number <= cfg.max_k:
            raise Refused(422, f"{name} is {number}; it must be 1 to {cfg.max_k} (max_k)")
        self.counts["requests"] += 1
        self.counts["queries"] += len(items)
        if not items:
            return []
        job = Job((method, number), items)
        self.waiting += len(items)
        self.jobs.put(job)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.future), cfg.timeout)
        except asyncio.TimeoutError:
            raise Refused(504, f"no answer within {cfg.timeout:g} s (timeout); send less at once") from None
        finally:
            self.waiting -= len(items)

    async def search(self, queries: list[str], k: int, name: str = "k") -> list:
        """Lists of (id, score), one a query."""
        return await self._ask("search", [(query,) for query in queries], k, name)

    async def gold_ranks(self, queries: list[str], golds: list[list[str]], cutoff: int, name: str = "cutoff") -> list:
        """Ranks, one a query: a number, None, or FAILED."""
        if len(golds) != len(queries):
            raise Refused(422, f"{len(queries)} queries but {len(golds)} golds or query ids: give one a query")
        for i, gold in enumerate(golds):
            if unknown := [g for g in gold if g not in self.retriever.passage_ids] or ([] if gold else ["(none)"]):
                raise Refused(422, f"gold passage {unknown[0]!r} of query {i} is not among the "
                                   f"{len(self.retriever.passage_ids):,} passages of this index; every query needs one")
        return await self._ask("gold_ranks", list(zip(queries, golds)), cutoff, name)

    async def documents(self, hits: list) -> list[list[dict]]:
        """The passages of ranked lists: {"id", "contents"}."""
        if self.texts is None:
            raise Refused(501, "this server has no passage texts: start it with corpus=FILE")
        return await asyncio.to_thread(lambda: [[self.texts.document(id_) for id_, _ in one] for one in hits])

    def status(self) -> dict:
        """What is served, and how many requests, queries, calls of the retriever, refused and failed requests."""
        return {"kind": self.cfg.retriever.kind, "count": len(self.retriever.passage_ids), **self.counts,
                "seconds": round(time.monotonic() - self.started, 1)}

    def close(self) -> dict:
        """Let the thread finish what waits."""
        self.jobs.put(None)
        self.thread.join(self.cfg.timeout)
        return self.status()


def add_dialects(app: Any, service: Service) -> None:
    """The paths of the table above; every parameter is a field of the request's JSON object."""
    from fastapi import Body
    cfg, key = service.cfg, Body(embed=True)
    Text, Strings, Lists = Annotated[str, key], Annotated[list[str], key], Annotated[list[list[str]], key]
    Flag, Number, NumberOrNull = Annotated[bool, key], Annotated[int, key], Annotated[int | None, key]

    @app.post("/retrieve")
    async def retrieve(queries: Strings, query_ids: Annotated[list[str] | None, key] = None, topk: NumberOrNull = None,
                       return_scores: Flag = False, max_length: NumberOrNull = 1024) -> dict:
        if query_ids is not None:  # ConvSearch-R1; max_length is in words and BM25's
            topk, golds = 100 if topk is None else topk, service.qrels
            if golds is None:
                raise Refused(501, "this server has no gold passages of query_ids: start it with qrels=FILE")
            if unknown := [i for i in query_ids if i not in golds]:
                raise Refused(422, f"query id {unknown[0]!r} has no gold passage in the qrels of this server")
            if cfg.retriever.kind == "bm25" and max_length is not None:
                queries = [" ".join(query.split(" ")[:max_length]) for query in queries]
            ranks = await service.gold_ranks(queries, [golds[i] for i in query_ids], topk, "topk")
            if any(rank is FAILED for rank in ranks):
                raise Refused(500, "a query has a NaN score, so no rank")
            ranks = [-1 if rank is None else rank for rank in ranks]
            hits = await service.search(queries, topk) if return_scores else []
            return {"result": [ranks, [[score for _, score in one] for one in hits]] if return_scores else ranks}
        hits = await service.search(queries, cfg.topk if topk is None else topk, "topk")
        documents = await service.documents(hits)
        if return_scores:
            documents = [[{"document": document, "score": score} for document, (_, score) in zip(*both)]
                         for both in zip(documents, hits)]
        return {"result": documents}

    @app.get("/health")
    async def health() -> dict:
        alive = int(service.thread.is_alive())
        limits = {name: getattr(cfg, name) for name in ("max_batch", "max_query_chars", "max_k")}
        return {"status": "healthy" if alive else "failed", "retrievers": {"total": 1, "available": alive},
                "waiting": service.waiting, **limits, **service.status()}

    @app.post("/batch_search")
    async def batch_search(query: Strings, top_n: Number = 10, return_score: Flag = False) -> list:
        hits = await service.search(query, top_n, "top_n")
        documents = await service.documents(hits)
        return [documents, [[score for _, score in one] for one in hits]] if return_score else documents

    @app.post("/search")
    async def search(query: Text, top_n: Number = 10, return_score: Flag = False) -> list:
        if not query.strip():
            raise Refused(400, "Query content cannot be empty")
        (documents,), (scores,) = await batch_search([query], top_n, True)
        return [documents, scores] if return_score else documents

    @app.post("/hits")
    async def hits(queries: Strings, k: Number) -> dict:
        return {"hits": await service.search(queries, k)}

    @app.post("/gold_ranks")
    async def gold_ranks(queries: Strings, gold_ids: Lists, cutoff: Number = 100) -> dict:
        ranks = await service.gold_ranks(queries, gold_ids, cutoff)
        return {"ranks": ["failed" if rank is FAILED else rank for rank in ranks]}

    @app.post("/has_ids")
    async def has_ids(ids: Strings) -> dict:
        if len(ids) > MAX_IDS:
            raise Refused(413, f"{len(ids)} ids; a request may have {MAX_IDS}. Split it.")
        return {"has": [id_ in service.retriever.passage_ids for id_ in ids]}


def make_mcp(service: Service) -> Any:
    """The MCP server, with the tool `retrieve`."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.shared.exceptions import MCPError
    from mcp_types import INTERNAL_ERROR
    server = MCPServer("retriever", log_level="WARNING", subscriptions=False)

    @server.tool(structured_output=False)
    async def retrieve(query: str) -> str:
        """Search the corpus and return the passages that fit the query best, as text."""
        try:
            if not query.strip():
                raise Refused(422, "the query is empty; say in a few words what to look for")
            documents = (await service.documents(await service.search([query], service.cfg.topk)))[0]
        except Refused as e:
            service.counts["refused"] += e.status != 500
            if e.status >= 500:  # not the caller's doing: a protocol error, so that nobody scores a rollout by it
                raise MCPError(INTERNAL_ERROR, e.reason) from e
            raise ToolError(e.reason) from e
        shown = []
        for place, document in enumerate(documents, 1):
            title, newline, text = document["contents"].partition("\n")
            shown.append(f"[{place}] " + (title.strip('"') + newline + text if newline else title))
        return "\n\n".join(shown) or "No passage was found."

    return server


def make_app(service: Service, ready: Callable[[], None] = lambda: None) -> Callable:
    """The ASGI application, which reads no request beyond MAX_BODY; `ready` is called when it can answer."""
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    mcp = make_mcp(service) if service.cfg.mcp == "http" else None

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with mcp.session_manager.run() if mcp else nullcontext():
            ready()
            yield

    app = FastAPI(title="nanosearch-r1 retriever", lifespan=lifespan)
    if mcp:
        at = {"stateless_http": True, "json_response": True, "host": service.cfg.host}
        app.router.routes.extend(mcp.streamable_http_app(**at).routes)
    add_dialects(app, service)

    @app.exception_handler(Refused)
    async def refused(request: Request, e: Refused) -> JSONResponse:
        service.counts["refused"] += e.status != 500
        return JSONResponse({"detail": e.reason}, e.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, e: RequestValidationError) -> JSONResponse:
        reasons = [f"{'.'.join(map(str, error['loc'][1:])) or 'body'}: {error['msg']}" for error in e.errors()[:5]]
        return await refused(request, Refused(422, "; ".join(reasons)))

    async def limited(scope: dict, receive: Callable, send: Callable) -> None:
        async def counted() -> dict:
            nonlocal size
            size += len((message := await receive()).get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the request is larger than {MAX_BODY} bytes. Split it.")
            return message

        size = 0
        await app(scope, counted, send)

    return limited


def serve_http(service: Service, listener: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish what is being answered."""
    import uvicorn
    host, port = listener.getsockname()[:2]
    address, count = f"{f'[{host}]' if ':' in host else host}:{port}", len(service.retriever.passage_ids)
    mcp = " (MCP: /mcp)" if service.cfg.mcp == "http" else ""
    app = make_app(service, lambda: print(f"serving {count:,} passages{mcp} at http://{address}", flush=True))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, limit_concurrency=4096,
                                           timeout_graceful_shutdown=math.ceil(service.cfg.timeout)))
    server.capture_signals = nullcontext  # uvicorn's own would raise the signal again after the clean end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    listener.listen(2048)  # before the address is printed: who reads it may connect at once
    server.run(sockets=[listener])


def serve_stdio(service: Service) -> NoReturn:
    """Answer MCP on stdin and stdout until the client closes them, or a signal; ends the process."""
    def end(*_: Any) -> NoReturn:
        print(json.dumps(service.status()), file=sys.stderr, flush=True)
        os._exit(0)  # the thread that reads stdin can't be woken

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    make_mcp(service).run("stdio")
    end()


def load_qrels(path: str, ids: PassageIds) -> dict[str, list[str]]:
    """Query id → its gold passages (gain above 0).  DataError: one that is not in the index."""
    from evaluate import read_qrels
    golds = {query: [p for p, gain in judged.items() if gain > 0] for query, judged in read_qrels(path).items()}
    if unknown := [p for gold in golds.values() for p in gold if p not in ids]:
        raise DataError(f"{path}: gold passage {unknown[0]!r} is not in the index; give the qrels of its corpus")
    return {query: gold for query, gold in golds.items() if gold}


def main(cfg: ServeConfig) -> dict:
    """Check, take the address, load, serve; returns what was done, for the last line."""
    check_config(cfg)
    listener = None
    if cfg.mcp != "stdio":  # taken before anything is loaded, answered when all is
        listener = socket.socket(socket.AF_INET6 if ":" in cfg.host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((cfg.host, cfg.port))
        except (OSError, OverflowError) as e:
            raise ConfigError(f"host {cfg.host}, port {cfg.port}: {e}; choose another port, or stop what has it") from e
    same_corpus(cfg.retriever, cfg.corpus)
    retriever, corpus = open_retriever(cfg.retriever), cfg.corpus or cfg.retriever.corpus
    texts = Texts(corpus, retriever.passage_ids) if corpus else None
    qrels = load_qrels(cfg.qrels, retriever.passage_ids) if cfg.qrels else None
    retriever.search(["a first query, so that no client waits for what is made at the first"], 1)
    service = Service(cfg, retriever, texts, qrels)
    if listener is None:
        serve_stdio(service)
    serve_http(service, listener)
    return service.close()


if __name__ == "__main__":
    run(ServeConfig, main)
