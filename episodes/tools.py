"""What an episode may call: tool calls in a model's text, the retriever as a tool, and the tools of an MCP server.

A file of its own because it is the border between what a model wrote and code that runs: here a call is read, checked
against its tool's schema and carried out, with a time-out; episode.py decides when, and shows what came back.

Three outcomes of a call are kept apart: documents; a note, in words for the model, where the call itself is wrong; and
a technical failure, which no score may be made of.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from config import ConfigError
from data import DataError, _scrub


class ToolsAway(RuntimeError):
    """The tools failed for everything that was asked of them: a technical failure, not bad input."""

    exit_status = 1


TIMEOUTS = (TimeoutError, concurrent.futures.TimeoutError, asyncio.TimeoutError)  # one class from Python 3.11 on


@dataclass
class Call:
    """One search or tool call that the model wrote, and what came of it."""

    name: str
    arguments: dict
    note: str = ""  # why it is not carried out, in words for the model
    documents: list[tuple[str | None, str]] = field(default_factory=list)  # (passage id where known, text), best first
    failure: str = ""  # technical: the episode ends
    done: bool = False  # carried out
    shown: str = ""  # what the model reads: documents, cut, or the note


# ------------------------------------------------------------------------------------------------------- calls in text


def spoken(text: str) -> str:
    """A turn without its thinking: no think block, closed or not, nor what stands before the end of one that the prompt
    opened."""
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).rpartition("</think>")[2]


def parse_tool_calls(text: str, schemas: list[dict], bare: bool = False) -> list[Call]:
    """The calls in a model's turn, those in its thinking left out; what cannot be called carries a note.

    Each block between tool_call tags holds one JSON object {"name", "arguments"}; several in one block are several
    calls, and the last block may lack its closing tag.  `arguments` may be a JSON text.  `bare`: without tags, what
    begins at the first brace is a call, and its last brace may be missing: small models often forget it.
    """
    text = spoken(text)
    if bare and "<tool_call>" not in text:
        if "{" not in text:
            return []
        block = text[text.index("{"):].strip()
        calls = _read_block(block, schemas)
        closed = calls if calls[-1].name else _read_block(block + "}", schemas)
        return closed if closed[-1].name else calls
    calls = []
    for block in text.split("<tool_call>")[1:]:
        calls += _read_block(block.partition("</tool_call>")[0].strip(), schemas)
    return calls


def _read_block(block: str, schemas: list[dict]) -> list[Call]:
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(block) or not calls:
        try:
            value, end = decoder.raw_decode(block, at)
        except (ValueError, RecursionError) as e:
            reason = getattr(e, "msg", "nested too deeply")
            note = f"error: the call is not valid JSON ({reason}); close every quote and brace"
            return [*calls, Call("", {}, note)]
        calls.append(_check_call(_scrub(value), schemas))
        at = end + len(block[end:]) - len(block[end:].lstrip(" \t\r\n,"))
    return calls


_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def _check_call(value: Any, schemas: list[dict]) -> Call:
    """A call as read, with a note where the schema of its tool does not allow it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, 'error: a call is a JSON object {"name": "…", "arguments": {…}}')
    name, arguments = value["name"], value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _scrub(json.loads(arguments))
        except (ValueError, RecursionError):
            pass
    schema = next((s["function"] for s in schemas if s["function"]["name"] == name), None)
    if schema is None:
        known = ", ".join(s["function"]["name"] for s in schemas)
        return Call(name, {}, f"error: there is no tool {name[:80]!r}; the tools are: {known}")
    if not isinstance(arguments, dict):
        return Call(name, {}, f"error: the arguments of {name} must be a JSON object")
    parameters = schema.get("parameters") or {}
    known = parameters.get("properties") or {}
    for key in parameters.get("required") or []:
        if key not in arguments:
            return Call(name, arguments, f"error: {name} needs the argument {key!r}")
    for key, given in arguments.items():
        if known and key not in known:
            return Call(name, arguments, f"error: {name} has no argument {key[:80]!r}; it has: {', '.join(known)}")
        kind = known.get(key, {}).get("type")
        wanted = _TYPES.get(kind) if isinstance(kind, str) else None
        wrong_bool = isinstance(given, bool) and wanted in (int, (int, float))
        if wanted and (not isinstance(given, wanted) or wrong_bool):
            return Call(name, arguments, f"error: the argument {key!r} of {name} must be of type {kind}")
        if key == "query" and isinstance(given, str) and not given.strip():
            return Call(name, arguments, "error: the query is empty; say in a few words what to look for")
    return Call(name, arguments)


# ------------------------------------------------------------------------------------------------------------ the tools

SEARCH_TOOL = {"type": "function", "function": {
    "name": "retrieve", "description": "Search the collection and return the passages that fit the query best.",
    "parameters": {"type": "object", "required": ["query"], "properties": {
        "query": {"type": "string", "description": "what to look for, in a few words"}}}}}


def begin(work: Callable[[], Any]) -> Future:
    """work() in a thread of its own, which does not keep the process alive: what hangs cannot be stopped."""
    future: Future = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:  # a thread starts on card 0, whatever its maker uses
                torch.cuda.set_device(device)
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True, name="search").start()
    return future


class RetrieverTools:
    """A retriever of this process as the tool `retrieve`: one `search` for all queries of a round, equal ones once."""

    schemas = [SEARCH_TOOL]

    def __init__(self, retriever, document: Callable[[str], dict], top_k: int, timeout: float, numbered: bool):
        """document: passage id → {"contents"} (serve.Texts.document); numbered: documents begin with their place."""
        self.retriever, self.document, self.top_k, self.timeout = retriever, document, top_k, timeout
        self.numbered, self.seconds = numbered, 0.0  # spent in `run` since somebody set it to 0
        self.search: Future | None = None  # under way, or the last one: a retriever is not asked by two threads at once

    def run(self, calls: list[Call]) -> None:
        """Carry out calls: each gets its documents, or the reason of a technical failure."""
        queries, began = list(dict.fromkeys(call.arguments["query"] for call in calls)), time.perf_counter()
        if not queries:
            return
        try:
            if self.search is not None and not self.search.done():
                raise RuntimeError("an earlier search, given up after its time-out, has not come back")
            self.search = begin(lambda: self.retriever.search(queries, self.top_k))
            hits = list(self.search.result(self.timeout))
            if len(hits) != len(queries):
                raise RuntimeError(f"{len(hits)} results for {len(queries)} queries")
        except Exception as e:  # not turned into a score: these episodes are left out and counted
            late = isinstance(e, TIMEOUTS)
            reason = f"no answer within {self.timeout:g} s" if late else f"{type(e).__name__}: {e}"
            print(f"{len(calls)} searches failed: {reason}", file=sys.stderr, flush=True)
            hits = [reason] * len(queries)
        found = dict(zip(queries, hits))
        shown: dict[str, list | str] = {}
        for call in calls:
            query = call.arguments["query"]
            if query not in shown:
                shown[query] = self._documents(found[query])
            if isinstance(shown[query], str):
                call.failure = shown[query]
            else:
                call.documents, call.done = list(shown[query]), True
        self.seconds += time.perf_counter() - began

    def _documents(self, hits: list | str) -> list[tuple[str, str]] | str:
        """(id, text) of one query's hits; the reason where they are no (id, score) pairs of this corpus."""
        if isinstance(hits, str):
            return hits
        try:
            ids = [id_ for id_, _ in hits]
            texts = [self.document(id_)["contents"] for id_ in ids]
        except DataError:  # another corpus than the index was made of: no fault of this query
            raise
        except (TypeError, ValueError, KeyError, IndexError) as e:
            return f"the retriever gave {str(hits)[:80]!r}, which are no hits of this corpus ({e})"
        if self.numbered:
            texts = [f"[{place}] {_untitled(text)}" for place, text in enumerate(texts, 1)]
        return list(zip(ids, texts))

    def close(self) -> None:
        """Nothing to end."""


def _untitled(contents: str) -> str:
    """Contents with the quotes of its title line left out."""
    title, newline, text = contents.partition("\n")
    return title.removeprefix('"').removesuffix('"') + newline + text if newline else contents


class MCPTools:
    """The tools of an MCP server, named by URL (streamable HTTP; SSE where it ends in /sse) or started by a command.

    One connection for the whole run, in a thread with its event loop; schemas come from the server.  The calls of a
    round are sent together, `at_once` at a time.  What the server answers, errors of the tool (isError) included, is
    for the model to read; a protocol error, a lost connection or a time-out is a technical failure.
    """

    def __init__(self, target: str, timeout: float, at_once: int = 64):
        try:
            import mcp  # noqa: F401
        except ImportError as e:
            raise ConfigError(f"episode.mcp={target} needs the MCP SDK ({e}): pip install -r requirements-serve.txt"
                              ) from e
        self.target, self.timeout, self.at_once, self.seconds = target, timeout, at_once, 0.0
        self.loop = asyncio.new_event_loop()
        self.ready: Future = Future()
        threading.Thread(target=self._run, daemon=True, name="mcp").start()
        try:
            self.schemas = self.ready.result(timeout)
        except Exception as e:
            reason = _inner(e)
            reason = f"no answer within {timeout:g} s" if isinstance(reason, TIMEOUTS) else reason
            raise ConfigError(f"episode.mcp={target}: {reason}; start that server, or give its URL (serve.py's ends in "
                              "/mcp) or command") from e
        if not self.schemas:
            raise ConfigError(f"episode.mcp={target}: this server has no tools")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._connect())
        except BaseException as e:
            if not self.ready.done():
                self.ready.set_exception(e)

    async def _connect(self) -> None:
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters
        target: Any = self.target
        if not re.match(r"https?://", target):
            words = shlex.split(target)
            target = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
        elif target.rstrip("/").endswith("/sse"):
            from mcp.client.sse import sse_client
            target = sse_client(target)
        self.closing = asyncio.Event()
        async with Client(target, read_timeout_seconds=self.timeout) as client:
            self.client, tools, cursor = client, [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    break
            self.ready.set_result([{"type": "function", "function": {
                "name": t.name, "description": t.description or "", "parameters": t.input_schema}} for t in tools])
            await self.closing.wait()

    def run(self, calls: list[Call]) -> None:
        """Carry out calls: each gets what the server answered, or the reason of a technical failure."""
        if not calls:
            return
        began = time.perf_counter()
        future = asyncio.run_coroutine_threadsafe(self._call_all(calls), self.loop)
        try:
            future.result(self.timeout * (2 + len(calls) / self.at_once))
        except TIMEOUTS:
            future.cancel()
            for call in calls:
                if not call.done:
                    call.failure = call.failure or "the MCP client gave no answer"
        self.seconds += time.perf_counter() - began
        failed = [call.failure for call in calls if call.failure]
        if failed:
            print(f"{len(failed)} of {len(calls)} tool calls failed: {failed[0]}", file=sys.stderr, flush=True)

    async def _call_all(self, calls: list[Call]) -> None:
        gate = asyncio.Semaphore(self.at_once)

        async def one(call: Call) -> None:
            async with gate:
                try:
                    answer = await asyncio.wait_for(self.client.call_tool(call.name, call.arguments), self.timeout)
                except Exception as e:
                    reason = f"no answer within {self.timeout:g} s" if isinstance(e, TIMEOUTS) else str(_inner(e))
                    call.failure = f"{call.name}: {reason or type(e).__name__}"
                    return
            texts = [part.text for part in answer.content if getattr(part, "text", None) is not None]
            call.documents, call.done = [(None, text) for text in texts], True

        await asyncio.gather(*map(one, calls))

    def close(self) -> None:
        """End the connection, and the server that a command started."""
        if self.ready.done() and not self.ready.exception():
            self.loop.call_soon_threadsafe(self.closing.set)


def _inner(e: BaseException) -> BaseException:
    """The first single exception inside groups of them."""
    while getattr(e, "exceptions", None):
        e = e.exceptions[0]
    return e
