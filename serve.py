"""A retriever as a service over HTTP and MCP, in the formats that existing clients speak.

    python serve.py retriever.corpus=corpus.jsonl qrels=train.qrels              # BM25 in memory
    python serve.py retriever.kind=dense retriever.index=INDEX retriever.encoder=E corpus=FILE

| client | request | answer |
|---|---|---|
| ConvSearch-R1 | POST /retrieve: queries, query_ids, topk | ranks, -1: not found |
| Search-R1 | POST /retrieve: queries, topk | lists of documents |
| FlashRAG, ReSearch | POST /search, /batch_search: query, top_n; GET /health | documents |
| MCP | tool `retrieve`: query; at /mcp, or on stdin and stdout | text |
| RemoteRetriever | POST /hits, /gold_ranks, /has_ids | (id, score) lists, ranks, booleans |

docs/serving.md has examples, limits and what differs from the original servers. A refused request
gets a 4xx and a failed search a 5xx, with the reason as {"detail": text}, never an empty list.

SIGTERM and Ctrl-C end a server with status 0, after what it was asked is answered (143 and 130
while it still loads). The last line of stdout is JSON; with mcp=stdio, that of stderr.
"""

# no `from __future__ import annotations`: FastAPI reads the types of functions inside functions

import asyncio
import contextlib
import json
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, Callable, Literal, NoReturn

from config import ConfigError, above, at_least, run
from data import DataError
from episodes.tools import NOTHING_FOUND, numbered, single
from retriever import RetrieverConfig, open_retriever, same_corpus
from scoring.ranking import read_qrels
from search.passages import FAILED, PassageIds, Texts

MAX_BODY, MAX_IDS = 64 * 2**20, 100_000  # bytes of a request, ids of a /has_ids request
PATIENCE = 15.0  # seconds between two looks at a connection; see `make_server`
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class ServeConfig:
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """what is served: any kind but remote"""
    corpus: str = ""
    """corpus file the index was built from, for passage texts; empty: retriever.corpus"""
    qrels: str = ""
    """TREC qrels with the gold passages of query_ids, for ConvSearch-R1's clients"""
    host: str = "127.0.0.1"
    """address to listen on; whoever can reach it can use it: there is no password"""
    port: int = 8000
    """0 takes a free one, which is printed"""
    mcp: Literal["http", "stdio", "off"] = "http"
    """MCP at /mcp beside the other formats, on stdin and stdout alone, or not at all"""
    topk: Annotated[int, at_least(1)] = 3
    """passages of a Search-R1 request without topk, and of every MCP call"""
    window_ms: Annotated[float, at_least(0)] = 2.0
    """how long the first waiting request waits for others to share its call of the retriever"""
    max_batch: Annotated[int, at_least(1)] = 4096
    """queries of one request, and about that many of one call"""
    max_query_chars: Annotated[int, at_least(1)] = 65536
    """characters of one query"""
    max_k: Annotated[int, at_least(1)] = 1000
    """results of one query, and the largest cut-off of a rank"""
    timeout: Annotated[float, above(0)] = 300.0
    """seconds until a waiting request gets a 504, and a stopping server drops what is unanswered"""


def check_config(cfg: ServeConfig) -> None:
    """ConfigError for settings that contradict each other and for missing packages."""
    if cfg.topk > cfg.max_k:
        raise ConfigError(f"topk={cfg.topk} must not be above max_k={cfg.max_k}")
    if cfg.retriever.kind == "remote":
        raise ConfigError("retriever.kind=remote: serve an index, or let clients ask that server")
    if cfg.mcp == "stdio" and not (cfg.corpus or cfg.retriever.corpus):
        raise ConfigError("mcp=stdio answers with passage texts: give corpus=FILE")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401

        if cfg.mcp != "off":
            import mcp.server.mcpserver  # noqa: F401
    except ImportError as e:
        way_out = "pip install -r requirements-serve.txt (mcp=off: no mcp)"
        raise ConfigError(f"a package is missing ({e}): {way_out}") from e


class Refused(Exception):
    """A request that gets no answer: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Job:
    """The queries of one request (with their golds, for ranks). Jobs of equal keys share a call."""

    key: tuple[str, int]  # method of the retriever; k or cutoff
    items: list[tuple]
    future: Future = field(default_factory=Future)


class Service:
    """What all formats share: one thread that calls the retriever, and what it is asked.

    Requests that arrive while it works, or within `window_ms`, share its next call.
    """

    def __init__(self, cfg: ServeConfig, retriever: Any, texts=None, qrels=None):
        """texts: the passages (`Texts`); qrels: query id → ids of its gold passages."""
        self.cfg, self.retriever, self.texts, self.qrels = cfg, retriever, texts, qrels
        self.counts = dict.fromkeys(("requests", "queries", "calls", "refused", "failed"), 0)
        self.waiting, self.jobs, self.started = 0, queue.Queue(), time.monotonic()
        self.thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self.thread.start()

    def _gather(self) -> list[Job | None]:
        """Wait for a job, then `window_ms` for more, up to max_batch queries. None is the last."""
        jobs = [self.jobs.get()]
        size, deadline = 0, time.monotonic() + self.cfg.window_ms / 1000
        while jobs[-1] is not None and (size := size + len(jobs[-1].items)) < self.cfg.max_batch:
            try:
                jobs.append(self.jobs.get(timeout=max(deadline - time.monotonic(), 0)))
            except queue.Empty:
                break
        return jobs

    def _work(self) -> None:
        while True:
            jobs = self._gather()  # those that had their 504 are cancelled, and not searched
            ready = [job for job in jobs if job and job.future.set_running_or_notify_cancel()]
            for key in dict.fromkeys(job.key for job in ready):
                self._call([job for job in ready if job.key == key])
            if jobs[-1] is None:
                return

    def _call(self, jobs: list[Job]) -> None:
        """Answer jobs of one key by one call; if it fails, by one each, so that one alone fails."""
        (method, number), items = jobs[0].key, [item for job in jobs for item in job.items]
        self.counts["calls"] += 1
        try:
            answers = list(getattr(self.retriever, method)(*map(list, zip(*items)), number))
            if len(answers) != len(items):
                raise RuntimeError(f"{len(answers)} answers to {len(items)} queries")
        except Exception as e:
            if len(jobs) > 1:
                for job in jobs:
                    self._call([job])
                return
            traceback.print_exc()
            self.counts["failed"] += 1
            reason = f"the retriever failed: {type(e).__name__}: {e}"
            jobs[0].future.set_exception(Refused(500, reason))
            return
        for job in jobs:
            job.future.set_result(answers[: len(job.items)])
            del answers[: len(job.items)]

    async def _ask(self, method: str, items: list[tuple], number: int) -> list:
        """Put a job into the queue and wait for its answer."""
        self.counts["requests"] += 1
        self.counts["queries"] += len(items)
        if not items:
            return []
        job, seconds = Job((method, number), items), self.cfg.timeout
        self.waiting += len(items)
        self.jobs.put(job)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.future), seconds)
        except asyncio.TimeoutError:
            reason = f"no answer within {seconds:g} s (timeout); send less at once"
            raise Refused(504, reason) from None
        finally:
            self.waiting -= len(items)

    async def search(self, queries: list[str], k: int) -> list:
        """A list of (id, score) for every query."""
        return await self._ask("search", [(query,) for query in queries], k)

    async def gold_ranks(self, queries: list[str], golds: list[list[str]], cutoff: int) -> list:
        """The rank of every query: a number, None, or FAILED."""
        if len(golds) != len(queries):
            reason = f"{len(queries)} queries but {len(golds)} golds or query ids"
            raise Refused(422, f"{reason}: give one a query")
        ids = self.retriever.passage_ids
        for i, gold in enumerate(golds):
            if unknown := [g for g in gold if g not in ids] or ([] if gold else ["(none)"]):
                reason = f"gold passage {unknown[0]!r} of query {i} is not among the {len(ids):,}"
                raise Refused(422, f"{reason} passages of this index; every query needs one")
        return await self._ask("gold_ranks", list(zip(queries, golds)), cutoff)

    async def ranks_by_query_id(self, queries: list[str], ids: list[str], topk: int) -> list[int]:
        """As ConvSearch-R1's clients ask: golds from the qrels, -1 for a gold that is not found."""
        if self.qrels is None:
            reason = "this server has no gold passages of query_ids: start it with qrels=FILE"
            raise Refused(501, reason)
        if unknown := [i for i in ids if i not in self.qrels]:
            reason = f"query id {unknown[0]!r} has no gold passage in the qrels of this server"
            raise Refused(422, reason)
        ranks = await self.gold_ranks(queries, [self.qrels[i] for i in ids], topk)
        if any(rank is FAILED for rank in ranks):
            raise Refused(500, "a query has a NaN score, so no rank")
        return [-1 if rank is None else rank for rank in ranks]

    async def documents(self, hits: list) -> list[list[dict]]:
        """The passages of ranked lists: {"id", "contents"}."""
        if self.texts is None:
            raise Refused(501, "this server has no passage texts: start it with corpus=FILE")
        read = self.texts.document
        return await asyncio.to_thread(lambda: [[read(id_) for id_, _ in one] for one in hits])

    def status(self) -> dict:
        """What is served, and the numbers of requests, queries, calls, refusals and failures."""
        return {
            "kind": self.cfg.retriever.kind,
            "count": len(self.retriever.passage_ids),
            "cut_queries": getattr(self.retriever, "cut_queries", 0),
            **self.counts,
            "seconds": round(time.monotonic() - self.started, 1),
        }

    def close(self) -> dict:
        """Let the thread finish what waits."""
        self.jobs.put(None)
        self.thread.join(self.cfg.timeout)
        return self.status()


def request_fields(cfg: ServeConfig) -> SimpleNamespace:
    """The types of the fields of a request's JSON object, with this server's limits in them."""
    from fastapi import Body
    from pydantic import StringConstraints

    query = Annotated[str, StringConstraints(max_length=cfg.max_query_chars)]
    return SimpleNamespace(
        query=Annotated[query, Body(embed=True)],
        queries=Annotated[list[query], Body(embed=True, max_length=cfg.max_batch)],
        ids=Annotated[list[str], Body(embed=True, max_length=MAX_IDS)],
        ids_or_null=Annotated[list[str] | None, Body(embed=True)],
        golds=Annotated[list[list[str]], Body(embed=True)],
        number=Annotated[int, Body(embed=True, ge=1, le=cfg.max_k)],
        number_or_null=Annotated[int | None, Body(embed=True, ge=1, le=cfg.max_k)],
        words=Annotated[int | None, Body(embed=True)],
        flag=Annotated[bool, Body(embed=True)],
    )


def scores(hits: list) -> list[list[float]]:
    return [[score for _, score in one] for one in hits]


def add_retrieve(app: Any, service: Service, of: SimpleNamespace) -> None:
    """/retrieve of ConvSearch-R1 (with query_ids) and of Search-R1."""

    @app.post("/retrieve")
    async def retrieve(
        queries: of.queries,
        query_ids: of.ids_or_null = None,
        topk: of.number_or_null = None,
        return_scores: of.flag = False,
        max_length: of.words = 1024,
    ) -> dict:
        if query_ids is not None:  # ConvSearch-R1, whose max_length is in words, and for BM25 alone
            if service.cfg.retriever.kind == "bm25" and max_length is not None:
                queries = [" ".join(query.split(" ")[:max_length]) for query in queries]
            topk = topk or 100
            ranks = await service.ranks_by_query_id(queries, query_ids, topk)
            if return_scores:
                return {"result": [ranks, scores(await service.search(queries, topk))]}
            return {"result": ranks}
        hits = await service.search(queries, topk or service.cfg.topk)
        documents = await service.documents(hits)
        if return_scores:
            documents = [
                [{"document": d, "score": score} for d, (_, score) in zip(*both)]
                for both in zip(documents, hits)
            ]
        return {"result": documents}


def add_flashrag(app: Any, service: Service, of: SimpleNamespace) -> None:
    """FlashRAG's paths, which ReSearch asks."""

    @app.get("/health")
    async def health() -> dict:
        alive = int(service.thread.is_alive())
        cfg = service.cfg
        return {
            "status": "healthy" if alive else "failed",
            "retrievers": {"total": 1, "available": alive},
            "waiting": service.waiting,
            "max_batch": cfg.max_batch,
            "max_query_chars": cfg.max_query_chars,
            "max_k": cfg.max_k,
            **service.status(),
        }

    @app.post("/batch_search")
    async def batch_search(
        query: of.queries, top_n: of.number = 10, return_score: of.flag = False
    ) -> list:
        hits = await service.search(query, top_n)
        documents = await service.documents(hits)
        return [documents, scores(hits)] if return_score else documents

    @app.post("/search")
    async def search(query: of.query, top_n: of.number = 10, return_score: of.flag = False) -> list:
        if not query.strip():
            raise Refused(400, "Query content cannot be empty")
        (documents,), (found,) = await batch_search([query], top_n, True)
        return [documents, found] if return_score else documents


def add_own(app: Any, service: Service, of: SimpleNamespace) -> None:
    """The paths of RemoteRetriever."""

    @app.post("/hits")
    async def hits(queries: of.queries, k: of.number) -> dict:
        return {"hits": await service.search(queries, k)}

    @app.post("/gold_ranks")
    async def gold_ranks(queries: of.queries, gold_ids: of.golds, cutoff: of.number = 100) -> dict:
        ranks = await service.gold_ranks(queries, gold_ids, cutoff)
        return {"ranks": ["failed" if rank is FAILED else rank for rank in ranks]}

    @app.post("/has_ids")
    async def has_ids(ids: of.ids) -> dict:
        return {"has": [id_ in service.retriever.passage_ids for id_ in ids]}


def make_mcp(service: Service) -> Any:
    """The MCP server, with the tool `retrieve`."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.shared.exceptions import MCPError
    from mcp_types import INTERNAL_ERROR

    cfg = service.cfg
    server = MCPServer("retriever", log_level="WARNING", subscriptions=False)

    @server.tool(structured_output=False)
    async def retrieve(query: str) -> str:
        """Search the corpus and return the passages that fit the query best, as text."""
        try:
            if not query.strip():
                raise Refused(422, "the query is empty; say in a few words what to look for")
            if len(query) > cfg.max_query_chars:
                reason = f"the query has {len(query)} characters; it may have {cfg.max_query_chars}"
                raise Refused(413, reason)
            (documents,) = await service.documents(await service.search([query], cfg.topk))
        except Refused as e:
            service.counts["refused"] += e.status != 500
            if e.status >= 500:  # not the caller's fault: no tool error that a model would read
                raise MCPError(INTERNAL_ERROR, e.reason) from e
            raise ToolError(e.reason) from e
        return "\n\n".join(numbered(d["contents"] for d in documents)) or NOTHING_FOUND

    return server


def wrong_host(scope: dict, host: str) -> str:
    """Why the Host of a request is refused, or "".

    A server on a loopback address answers requests for this machine's own names alone, as MCP's
    part does: a web page whose name resolves to 127.0.0.1 must not read the corpus (DNS rebinding).
    """
    asked = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    name = re.sub(r":\d*$", "", asked).strip("[]").lower()
    if host not in LOOPBACK or name in LOOPBACK:
        return ""
    return f"Host is {asked!r}; host={host} answers to {', '.join(LOOPBACK)} alone"


def make_app(service: Service) -> Callable:
    """The ASGI application; it reads no request beyond MAX_BODY."""
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    host = service.cfg.host
    mcp = make_mcp(service) if service.cfg.mcp == "http" else None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        async with mcp.session_manager.run() if mcp else contextlib.nullcontext():
            yield

    # not strict: a body without a content type is JSON, as it was to the servers of these clients
    closed = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(lifespan=lifespan, strict_content_type=False, **closed)
    if mcp:
        part = mcp.streamable_http_app(stateless_http=True, json_response=True, host=host)
        app.router.routes.extend(part.routes)
    of = request_fields(service.cfg)
    for add in (add_retrieve, add_flashrag, add_own):
        add(app, service, of)

    @app.exception_handler(Refused)
    async def refused(request: Request | None, e: Refused) -> JSONResponse:
        service.counts["refused"] += e.status != 500
        return JSONResponse({"detail": e.reason}, e.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, e: RequestValidationError) -> JSONResponse:
        large, problems = False, []
        for error in e.errors()[:5]:
            large |= error["type"] in ("too_long", "string_too_long")
            place = ".".join(map(str, error["loc"][1:])) or "body"
            value = f", not {error['input']}" if isinstance(error["input"], int) else ""
            problems.append(f"{place}: {error['msg']}{value}")
        return await refused(request, Refused(413 if large else 422, "; ".join(problems)))

    async def guarded(scope: dict, receive: Callable, send: Callable) -> None:
        async def counted() -> dict:
            nonlocal size
            size += len((message := await receive()).get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the request is larger than {MAX_BODY} bytes. Split it.")
            return message

        size = 0
        if scope["type"] == "http" and (reason := wrong_host(scope, host)):
            answer = await refused(None, Refused(421, reason))
            return await answer(scope, receive, send)
        await app(scope, counted, send)

    return guarded


def make_server(service: Service) -> Any:
    """The uvicorn server; `run(sockets=[…])` answers until `should_exit` is set."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes a connection that has waited for the same thing at two looks in a row.

        That is within 2 * PATIENCE seconds: for a request to begin or to be complete, or for the
        peer to read its answer. uvicorn itself has a time limit between two requests alone.
        """

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.look(None)

        def look(self, before: tuple | None) -> None:
            cycle, unsent = self.cycle, self.transport.get_write_buffer_size()
            searching = cycle and not cycle.response_complete and not cycle.more_body
            if (cycle, unsent) == before and not searching:
                self.transport.abort()
            else:
                self.timer = self.loop.call_later(PATIENCE, self.look, (cycle, unsent))

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.timer.cancel()

    config = uvicorn.Config(
        make_app(service),
        http=Protocol,
        log_level="warning",
        access_log=False,
        limit_concurrency=4096,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=math.ceil(service.cfg.timeout),
    )
    return uvicorn.Server(config)


def serve_http(service: Service, listener: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish what is being answered."""
    server = make_server(service)
    server.capture_signals = contextlib.nullcontext  # uvicorn's own raises the signal again
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    host, port = listener.getsockname()[:2]
    address, count = f"[{host}]" if ":" in host else host, len(service.retriever.passage_ids)
    mcp = " (MCP: /mcp)" if service.cfg.mcp == "http" else ""
    listener.listen(2048)  # whoever reads the next line may connect at once
    print(f"serving {count:,} passages{mcp} at http://{address}:{port}", flush=True)
    server.run(sockets=[listener])


def serve_stdio(service: Service) -> NoReturn:
    """Answer MCP on stdin and stdout until they close or a signal; ends the process."""

    def end(*_: Any) -> NoReturn:
        with contextlib.suppress(OSError):  # a client that went away reads no last line
            print(json.dumps(service.status()), file=sys.stderr, flush=True)
        os._exit(0)  # the thread that reads stdin can't be woken

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        make_mcp(service).run("stdio")
    except Exception as e:
        if not isinstance(single(e), BrokenPipeError):
            raise
    end()


def load_qrels(path: str, ids: PassageIds) -> dict[str, list[str]]:
    """Query id → its gold passages (gain above 0). DataError: one that is not in the index."""
    golds = {
        query: gold
        for query, judged in read_qrels(path).items()
        if (gold := [id_ for id_, gain in judged.items() if gain > 0])
    }
    if unknown := [id_ for gold in golds.values() for id_ in gold if id_ not in ids]:
        problem = f"{path}: gold passage {unknown[0]!r} is not in the index"
        raise DataError(f"{problem}; give the qrels of its corpus")
    return golds


def listen(cfg: ServeConfig) -> socket.socket:
    """The address, taken before anything is loaded; ConfigError where something else has it."""
    # IPPROTO_TCP: without it asyncio sets no TCP_NODELAY, and an answer to a keep-alive client
    # waits 40 ms for a delayed acknowledgement
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((cfg.host, cfg.port))
    except (OSError, OverflowError) as e:
        problem = f"host {cfg.host}, port {cfg.port}: {e}"
        raise ConfigError(f"{problem}; choose another port, or stop what has it") from e
    return listener


def main(cfg: ServeConfig) -> dict:
    """Check, take the address, load, serve; returns what was done, for the last line."""
    check_config(cfg)
    listener = None if cfg.mcp == "stdio" else listen(cfg)
    same_corpus(cfg.retriever, cfg.corpus)
    retriever, corpus = open_retriever(cfg.retriever), cfg.corpus or cfg.retriever.corpus
    ids = retriever.passage_ids
    texts = Texts(corpus, ids) if corpus else None
    qrels = load_qrels(cfg.qrels, ids) if cfg.qrels else None
    retriever.search(["what is made at the first search is made before a client waits for it"], 1)
    service = Service(cfg, retriever, texts, qrels)
    if listener is None:
        serve_stdio(service)
    serve_http(service, listener)
    return service.close()


if __name__ == "__main__":
    run(ServeConfig, main)
