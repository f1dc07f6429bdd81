"""Serve a retriever over HTTP and MCP, in the request formats of existing clients.

    python serve.py retriever.corpus=corpus.jsonl qrels=train.qrels  # BM25 in memory
    python serve.py retriever.kind=dense retriever.index=INDEX retriever.encoder=E corpus=FILE

docs/serving.md lists requests, answers and limits. A refused or failed request gets a 4xx or 5xx
with the reason as {"detail": text}, never an empty list.
"""

# no `from __future__ import annotations`: pydantic reads the types of nested functions

import asyncio
import contextlib
import inspect
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
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Callable, Literal, NoReturn

from config import ConfigError, above, at_least, run
from data import DataError
from episodes.tools import NOTHING_FOUND, numbered, single
from scoring.ranking import read_golds
from search.client import IDS
from search.passages import FAILED, RetrieverConfig, RetrieverError, Texts, same_corpus

MAX_BODY = 64 * 2**20  # bytes of a request
PATIENCE = 15.0  # seconds between checks of a connection


@dataclass
class ServeConfig:
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """retriever to serve, of any kind but remote"""
    corpus: str = ""
    """corpus file with the passage texts; empty: retriever.corpus"""
    qrels: str = ""
    """TREC qrels with the gold passages of query_ids (ConvSearch-R1)"""
    host: str = "127.0.0.1"
    """address to listen on; there is no password"""
    port: int = 8000
    """0 takes a free port, which is printed"""
    mcp: Literal["http", "stdio", "off"] = "http"
    """http: MCP at /mcp beside the other formats; stdio: only MCP"""
    topk: Annotated[int, at_least(1)] = 3
    """passages per MCP call or Search-R1 request without topk"""
    max_batch: Annotated[int, at_least(1)] = 4096
    """most queries per request; a call takes requests until it has as many"""
    max_k: Annotated[int, at_least(1)] = 1000
    """most results per query, and largest rank cut-off"""
    timeout: Annotated[float, above(0)] = 300.0
    """seconds until a request gets a 504, or a stopping server drops it"""


def check_config(cfg: ServeConfig) -> None:
    """Raises ConfigError if a setting is invalid or a package is missing."""
    if cfg.retriever.kind == "remote":
        raise ConfigError("retriever.kind=remote: serve an index, or let clients ask that server")
    if cfg.topk > cfg.max_k:
        raise ConfigError(f"topk={cfg.topk} is above max_k={cfg.max_k}; lower it, or raise max_k")
    if cfg.mcp == "stdio" and not (cfg.corpus or cfg.retriever.corpus):
        raise ConfigError("mcp=stdio answers with passage texts: give corpus=FILE")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

        if cfg.mcp != "off":
            import mcp.server.mcpserver  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"{e}: pip install -r requirements-serve.txt (mcp=off: no mcp)") from e


class Refused(Exception):
    """A refused request; args: HTTP status, reason."""


@dataclass
class Job:
    """The queries of one request. Jobs with equal keys share a call."""

    key: tuple[Callable, int]  # (function to call, k or cutoff)
    items: list[tuple]  # call arguments per query
    answer: Future = field(default_factory=Future)


class Service:
    """Queues requests for the one thread that calls the retriever."""

    def __init__(
        self,
        cfg: ServeConfig,
        retriever: Any,
        texts: Texts | None = None,
        qrels: dict[str, list[str]] | None = None,  # query id → gold passage ids
    ):
        self.cfg, self.retriever, self.texts, self.qrels = cfg, retriever, texts, qrels
        self.counts = dict.fromkeys(("requests", "queries", "calls", "refused", "failed"), 0)
        self.waiting, self.jobs, self.started = 0, queue.SimpleQueue(), time.monotonic()
        self.thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        """Answer jobs until None arrives; those that wait share a call."""
        jobs = []
        while None not in jobs:
            jobs, size = [self.jobs.get()], 0
            while jobs[-1] and not self.jobs.empty():
                if (size := size + len(jobs[-1].items)) >= self.cfg.max_batch:
                    break
                jobs.append(self.jobs.get())
            # without those that timed out
            ready = [job for job in jobs if job and job.answer.set_running_or_notify_cancel()]
            for key in dict.fromkeys(job.key for job in ready):
                self._call([job for job in ready if job.key == key])

    def _call(self, jobs: list[Job]) -> None:
        """Answer jobs of one key together or, if that fails, one by one."""
        (call, number), items = jobs[0].key, [item for job in jobs for item in job.items]
        self.counts["calls"] += 1
        try:
            answers = list(call(*map(list, zip(*items)), number))
            if len(answers) != len(items):
                raise RuntimeError(f"{len(answers)} answers to {len(items)} queries")
        except Exception as e:
            if len(jobs) == 1:
                jobs[0].answer.set_exception(self._failure(call, e))
            else:
                for job in jobs:
                    self._call([job])
            return
        rest = iter(answers)
        for job in jobs:
            job.answer.set_result(list(islice(rest, len(job.items))))

    def _failure(self, call: Callable, e: Exception) -> Refused:
        if isinstance(e, Refused):
            return e
        if call == self.retriever.gold_ranks and isinstance(e, RetrieverError):  # an unknown gold
            return Refused(422, str(e))
        traceback.print_exception(e)
        return Refused(500, f"the retriever failed: {type(e).__name__}: {e}")

    async def _ask(self, call: Callable, number: int, *arguments: list) -> list:
        items = list(zip(*arguments))
        self.counts["requests"] += 1
        self.counts["queries"] += len(items)
        if not items:
            return []
        job = Job((call, number), items)
        self.waiting += len(items)
        self.jobs.put(job)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.answer), self.cfg.timeout)
        except asyncio.TimeoutError:
            problem = f"no answer within {self.cfg.timeout:g} s (timeout); send less at once"
            raise Refused(504, problem) from None
        finally:
            self.waiting -= len(items)

    def refuse(self, e: Refused) -> tuple[int, str]:
        """Counts a refusal; returns (status, reason)."""
        self.counts["failed" if e.args[0] == 500 else "refused"] += 1
        return e.args

    async def search(self, queries: list[str], k: int) -> list:
        """Returns a list of (id, score) per query."""
        return await self._ask(self.retriever.search, k, queries)

    async def gold_ranks(self, queries: list[str], golds: list[list[str]], cutoff: int) -> list:
        """Returns a rank per query: None beyond `cutoff`, FAILED for a NaN score."""
        if len(golds) != len(queries):
            problem = f"{len(queries)} queries but {len(golds)} golds or query ids"
            raise Refused(422, f"{problem}: give one a query")
        return await self._ask(self.retriever.gold_ranks, cutoff, queries, golds)

    async def ranks_by_query_id(self, queries: list[str], ids: list[str], topk: int) -> list[int]:
        """Returns ranks for golds from the qrels; -1 beyond `topk` (ConvSearch-R1)."""
        if self.qrels is None:
            raise Refused(501, "no gold passages of query_ids: start the server with qrels=FILE")
        if unknown := [id_ for id_ in ids if id_ not in self.qrels]:
            raise Refused(
                422, f"query id {unknown[0]!r} has no gold passage in this server's qrels"
            )
        ranks = await self.gold_ranks(queries, [self.qrels[id_] for id_ in ids], topk)
        if any(rank is FAILED for rank in ranks):
            raise Refused(500, "a query has a NaN score, so no rank")
        return [-1 if rank is None else rank for rank in ranks]

    def _read(self, queries: list[str], k: int) -> list[list[tuple[dict, float]]]:
        hits = self.retriever.search(queries, k)
        try:
            return [[(self.texts.document(id_), score) for id_, score in one] for one in hits]
        except (DataError, OSError) as e:  # the file has changed
            raise Refused(500, f"a passage can't be read: {e}") from e

    async def passages(self, queries: list[str], k: int) -> list:
        """Returns a list of (passage {"id", "contents"}, score) per query."""
        if self.texts is None:
            raise Refused(501, "no passage texts: start the server with corpus=FILE")
        return await self._ask(self._read, k, queries)

    def status(self) -> dict:
        """Returns limits and counters, for /health and the last line."""
        alive = self.thread.is_alive()
        return {
            "status": "healthy" if alive else "ended",
            "retrievers": {"total": 1, "available": int(alive)},
            "kind": self.cfg.retriever.kind,
            "count": len(self.retriever.passage_ids),
            "cut_queries": getattr(self.retriever, "cut_queries", 0),
            "max_batch": self.cfg.max_batch,
            "max_k": self.cfg.max_k,
            **self.counts,
            "waiting": self.waiting,
            "seconds": round(time.monotonic() - self.started, 1),
        }

    def close(self) -> dict:
        self.jobs.put(None)
        self.thread.join(self.cfg.timeout)
        return self.status()


def documents(found: list) -> list[list[dict]]:
    return [[document for document, _ in one] for one in found]


def scores(found: list) -> list[list[float]]:
    return [[score for _, score in one] for one in found]


def dialects(service: Service) -> dict[str, Callable]:
    """Returns path → function; its arguments are the request's fields.

    ConvSearch-R1 and Search-R1 use /retrieve; FlashRAG and ReSearch use /batch_search and /search;
    RemoteRetriever uses the others.
    """
    from pydantic import Field

    Queries = Annotated[list[str], Field(max_length=service.cfg.max_batch)]
    Number = Annotated[int, Field(ge=1, le=service.cfg.max_k)]
    Ids = Annotated[list[str], Field(max_length=IDS)]
    ten, hundred = (min(number, service.cfg.max_k) for number in (10, 100))  # defaults

    async def retrieve(
        queries: Queries,
        query_ids: list[str] | None = None,
        topk: Number | None = None,
        return_scores: bool = False,
    ) -> dict:
        if query_ids is not None:  # ConvSearch-R1
            ranks = await service.ranks_by_query_id(queries, query_ids, topk or hundred)
            if return_scores:
                return {"result": [ranks, scores(await service.search(queries, topk or hundred))]}
            return {"result": ranks}
        found = await service.passages(queries, topk or service.cfg.topk)
        if not return_scores:
            return {"result": documents(found)}
        return {"result": [[{"document": d, "score": score} for d, score in one] for one in found]}

    async def batch_search(query: Queries, top_n: Number = ten, return_score: bool = False) -> list:
        found = await service.passages(query, top_n)
        return [documents(found), scores(found)] if return_score else documents(found)

    async def search(query: str, top_n: Number = ten, return_score: bool = False) -> list:
        if not query.strip():
            raise Refused(400, "Query content cannot be empty")
        answer = await batch_search([query], top_n, return_score)
        return [part[0] for part in answer] if return_score else answer[0]

    async def hits(queries: Queries, k: Number) -> dict:
        return {"hits": await service.search(queries, k)}

    async def gold_ranks(
        queries: Queries, gold_ids: list[list[str]], cutoff: Number = hundred
    ) -> dict:
        ranks = await service.gold_ranks(queries, gold_ids, cutoff)
        return {"ranks": ["failed" if rank is FAILED else rank for rank in ranks]}

    async def has_ids(ids: Ids) -> dict:
        return {"has": [id_ in service.retriever.passage_ids for id_ in ids]}

    answers = (retrieve, batch_search, search, hits, gold_ranks, has_ids)
    return {f"/{answer.__name__}": answer for answer in answers}


def endpoint(answer: Callable) -> Callable:
    """Wraps a function of `dialects` as a request handler; 422 for invalid bodies."""
    from pydantic import ValidationError, create_model
    from starlette.responses import JSONResponse

    fields = inspect.signature(answer).parameters.values()
    types = {f.name: (f.annotation, ... if f.default is f.empty else f.default) for f in fields}
    model = create_model(answer.__name__, **types)

    async def respond(request: Any) -> JSONResponse:
        try:
            body = model.model_validate(json.loads(await request.body()))
        except ValidationError as e:
            problems = [
                f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']} "
                f"(got {error['input']!r:.60})"
                for error in e.errors()[:5]
            ]
            raise Refused(422, "; ".join(problems)) from e
        except (ValueError, RecursionError) as e:
            raise Refused(422, f"the body is no JSON: {e}") from e
        return JSONResponse(await answer(**vars(body)))

    return respond


def make_mcp(service: Service) -> Any:
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
            (found,) = await service.passages([query], service.cfg.topk)
        except Refused as e:
            status, reason = service.refuse(e)
            if status >= 500:  # a model would read a ToolError
                raise MCPError(INTERNAL_ERROR, reason) from e
            raise ToolError(reason) from e
        return "\n\n".join(numbered(passage["contents"] for passage, _ in found)) or NOTHING_FOUND

    return server


def make_app(service: Service) -> Any:
    """Returns the ASGI application, with MCP if mcp=http."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    host, middleware, lifespan = service.cfg.host, [], None
    paths = dialects(service).items()
    routes = [Route(path, endpoint(answer), methods=["POST"]) for path, answer in paths]
    routes.append(Route("/health", lambda request: JSONResponse(service.status())))
    if service.cfg.mcp == "http":
        mcp = make_mcp(service)
        part = mcp.streamable_http_app(stateless_http=True, json_response=True, host=host)
        routes, lifespan = routes + part.routes, lambda app: mcp.session_manager.run()
    local = ["127.0.0.1", "localhost", "[::1]"]
    if host in (*local, "::1"):
        # against DNS rebinding
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=local)]

    async def refused(request: Any, e: Refused) -> JSONResponse:
        status, reason = service.refuse(e)
        return JSONResponse({"detail": reason}, status)

    async def not_served(request: Any, e: HTTPException) -> JSONResponse:
        return JSONResponse({"detail": e.detail}, e.status_code)

    async def left(request: Any, e: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    handlers = {Refused: refused, HTTPException: not_served, ClientDisconnect: left}
    return Starlette(False, routes, middleware, handlers, lifespan, max_body_size=MAX_BODY)


def make_server(service: Service) -> Any:
    """Returns the uvicorn server; set `should_exit` to stop its `run(sockets=[…])`."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Aborts a connection whose request and unsent bytes did not change between two checks,
        unless a search runs. uvicorn only limits the time between requests."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.look(None)

        def look(self, before: tuple | None) -> None:
            cycle, unsent = self.cycle, self.transport.get_write_buffer_size()
            searching = cycle and not cycle.response_complete and not cycle.more_body
            now = None if searching else (cycle, unsent)
            if now and now == before:
                self.transport.abort()
            else:
                self.timer = self.loop.call_later(PATIENCE, self.look, now)

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
    """Serves until SIGTERM or Ctrl-C, then finishes open requests."""
    host, port = listener.getsockname()[:2]
    address, count = f"[{host}]" if ":" in host else host, len(service.retriever.passage_ids)
    mcp = " (MCP: /mcp)" if service.cfg.mcp == "http" else ""
    server = make_server(service)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # uvicorn raises the signal again
        listener.listen(2048)  # clients may connect after the next line
        print(f"serving {count:,} passages{mcp} at http://{address}:{port}", flush=True)
        server.run(sockets=[listener])


def serve_stdio(service: Service) -> NoReturn:
    """Serves MCP on stdin and stdout until they close or a signal, then ends the process."""

    def end(*_: Any) -> NoReturn:
        with contextlib.suppress(OSError):  # stderr may be closed
            print(json.dumps(service.status()), file=sys.stderr, flush=True)
        os._exit(0)  # the thread reading stdin can't be stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        make_mcp(service).run("stdio")
    except Exception as e:
        if not isinstance(single(e), BrokenPipeError):
            raise
    end()


def listen(cfg: ServeConfig) -> socket.socket:
    """Returns a bound socket. ConfigError if it can't be bound."""
    # without IPPROTO_TCP asyncio sets no TCP_NODELAY, and answers wait 40 ms
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((cfg.host, cfg.port))
    except (OSError, OverflowError) as e:
        raise ConfigError(f"host={cfg.host} port={cfg.port}: {e}; choose another port") from e
    return listener


def main(cfg: ServeConfig) -> dict:
    """Serves until stopped; returns the final status."""
    check_config(cfg)
    listener = None if cfg.mcp == "stdio" else listen(cfg)
    from retriever import open_retriever  # imports torch

    same_corpus(cfg.retriever, cfg.corpus)
    retriever, corpus = open_retriever(cfg.retriever), cfg.corpus or cfg.retriever.corpus
    ids = retriever.passage_ids
    texts = Texts(corpus, ids) if corpus else None
    qrels = read_golds([cfg.qrels], ids) if cfg.qrels else None
    retriever.search(["what the first search makes is there before a client waits"], 1)
    service = Service(cfg, retriever, texts, qrels)
    if listener is None:
        serve_stdio(service)
    serve_http(service, listener)
    return service.close()


if __name__ == "__main__":
    run(ServeConfig, main)
