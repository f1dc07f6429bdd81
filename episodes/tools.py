"""What an episode may call: tool calls in a model's text, the retriever as a tool, MCP's tools.

A call ends in one of three ways, which are kept apart: documents; a note, in words for the model,
where the call itself is wrong; or a technical failure, of which no score may be made.
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
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from config import ConfigError
from data import DataError, _scrub

TIMEOUTS = (TimeoutError, concurrent.futures.TimeoutError, asyncio.TimeoutError)  # one from 3.11 on
NOTHING_FOUND = "No passage was found."


class ToolsAway(RuntimeError):
    """The tools failed for everything that was asked of them: a technical failure, no bad input."""

    exit_status = 1


@dataclass
class Call:
    """One search or tool call that the model wrote, and what came of it."""

    name: str
    arguments: dict
    note: str = ""  # why it is not carried out, in words for the model
    documents: list[tuple[str | None, str]] = field(default_factory=list)  # (id if known, text)
    failure: str = ""  # technical: the episode ends
    done: bool = False  # carried out
    shown: str = ""  # what the model reads: documents, cut, or the note


# --------------------------------------------------------------------------------- calls in text


_TAGS, _TAGS_AND_BRACE = r"</?think>|<tool_call>", r"</?think>|\{"
_BLOCK_END = re.compile(r"</?think>|</?tool_call>|\Z")
_BETWEEN = re.compile(r"[\s,]*")


def parse_tool_calls(text: str, schemas: list[dict], bare: bool = False) -> list[Call]:
    """The calls in a model's turn, those in its thinking left out; a wrong one carries a note.

    Each block between tool_call tags holds one JSON object {"name", "arguments"}; several in one
    block are several calls, and a block may lack its closing tag. Tags inside the JSON are text.
    `arguments` may be a JSON text, null or empty. `bare`: in a text without the tags, what begins
    at a brace is a call, and its last brace may be missing: small models often forget it.
    """
    bare = bare and "<tool_call>" not in text
    values = _call_values(text, bare)
    if bare and values and isinstance(values[-1], Call):
        closed = _call_values(text + "}", bare)
        values = values if isinstance(closed[-1], Call) else closed
    return [v if isinstance(v, Call) else _check_call(v, schemas) for v in values]


def _call_values(text: str, bare: bool) -> list[Any]:
    """The JSON value of every call outside of the thinking; a Call with a note where it is none."""
    values, at, thought = [], 0, False
    begins = re.compile(_TAGS_AND_BRACE if bare else _TAGS)
    while match := begins.search(text, at):
        tag, at = match[0], match.end()
        if tag == "<think>":
            thought, end = True, text.find("</think>", at)
            at = len(text) if end < 0 else end
        elif tag == "</think>":  # what stands before the first one was thought, too
            values, thought = values if thought else [], True
        else:
            found, at = _read_block(text, match.start() if tag == "{" else at)
            values += found
    return values


def _read_block(text: str, at: int) -> tuple[list[Any], int]:
    """The JSON values of the block of calls that begins at `at`, and where it ends."""
    values: list[Any] = []
    while True:
        at = _BETWEEN.match(text, at).end()
        if values and (end := _BLOCK_END.match(text, at)):
            break
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
            values.append(_scrub(value))
        except (ValueError, RecursionError) as e:
            reason = getattr(e, "msg", "nested too deeply")
            note = f"error: the call is not valid JSON ({reason}); close every quote and brace"
            values.append(Call("", {}, note))
            end = _BLOCK_END.search(text, at)
            break
    return values, end.end() if end[0] == "</tool_call>" else end.start()


def _check_call(value: Any, schemas: list[dict]) -> Call:
    """A call as read, with a note where the schema of its tool does not allow it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, 'error: a call is a JSON object {"name": "…", "arguments": {…}}')
    name, arguments = value["name"], value.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _scrub(json.loads(arguments or "null"))
        except (ValueError, RecursionError):
            pass  # no object: said below
    arguments = {} if arguments is None else arguments
    schema = next((s for s in schemas if s["function"]["name"] == name), None)
    if schema is None:
        known = ", ".join(s["function"]["name"] for s in schemas)
        return Call(name, {}, f"error: there is no tool {name[:80]!r}; the tools are: {known}")
    if not isinstance(arguments, dict):
        return Call(name, {}, f"error: the arguments of {name} must be a JSON object")
    note, query = _schema_note(arguments, schema), arguments.get("query")
    if not note and isinstance(query, str) and not query.strip():
        note = "error: the query is empty; say in a few words what to look for"
    return Call(name, arguments, note)


def _dialect(schema: dict) -> type:
    """The validator of the JSON Schema version that a tool's parameters are written in."""
    return validator_for(schema["function"].get("parameters") or {}, Draft202012Validator)


def _check_parameters(schema: dict) -> None:
    function = schema["function"]
    try:
        _dialect(schema).check_schema(function["parameters"], format_checker=None)
    except SchemaError as e:
        problem = f"the parameters of tool {function['name']!r} are no JSON Schema: {e.message}"
        raise ValueError(problem) from e


def _schema_note(arguments: dict, schema: dict) -> str:
    """How arguments break the JSON Schema of a tool, in words for the model; "" if they do not.

    An argument that no property names is an error, unless the schema has additionalProperties.
    """
    name, parameters = schema["function"]["name"], schema["function"].get("parameters") or {}
    known, dialect = parameters.get("properties") or {}, _dialect(schema)
    # unevaluatedProperties, new in 2019-09, sees what allOf and $ref name, too
    closed = [f"{word}Properties" for word in ("unevaluated", "additional")]
    if known:
        parameters = {next(key for key in closed if key in dialect.VALIDATORS): False} | parameters
    try:
        error = best_match(dialect(parameters, registry=Registry()).iter_errors(arguments))
    except (Unresolvable, RecursionError, re.error):
        return ""  # a reference or a pattern that the server alone can check
    if error is None:
        return ""
    if error.path:
        place = f"the argument {'.'.join(map(str, error.path))!r} of {name}"
        kinds = error.validator_value
        if error.validator == "type":
            kinds = kinds if isinstance(kinds, str) else " or ".join(kinds)
            return f"error: {place} must be of type {kinds}"
        return f"error: {place}: {error.message[:300]}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in arguments)
        return f"error: {name} needs the argument {missing!r}"
    if error.validator in closed:
        unknown = next(key for key in arguments if key not in known)
        names = ", ".join(known) or "none"
        return f"error: {name} has no argument {unknown[:80]!r}; it has: {names}"
    return f"error: the arguments of {name}: {error.message[:300]}"


# ------------------------------------------------------------------------------------- the tools


def _schema(name: str, description: str, parameters: dict) -> dict:
    """A tool as chat templates show it; parameters: its JSON Schema."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_QUERY = {"query": {"type": "string", "description": "what to look for, in a few words"}}
SEARCH_TOOL = _schema(
    "retrieve",
    "Search the collection and return the passages that fit the query best.",
    {"type": "object", "required": ["query"], "properties": _QUERY},
)


def numbered(contents: Iterable[str]) -> list[str]:
    """Passages as an agent reads them: their place, and the title without its quotes."""
    shown = []
    for place, passage in enumerate(contents, 1):
        title, newline, text = passage.partition("\n")
        title = title.removeprefix('"').removesuffix('"') if newline else title
        shown.append(f"[{place}] {title}{newline}{text}")
    return shown


def begin(work: Callable[[], Any]) -> Future:
    """work() in a daemon thread: what hangs cannot be stopped, and must not keep the process."""
    import torch

    future: Future = Future()
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

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
    """A retriever of this process as the tool `retrieve`: one search for all queries of a round."""

    schemas = [SEARCH_TOOL]

    def __init__(self, retriever, document: Callable, top_k: int, timeout: float, numbered: bool):
        """document: passage id → {"contents"}; numbered: documents begin with their place."""
        self.retriever, self.document = retriever, document
        self.top_k, self.timeout = top_k, timeout
        self.numbered, self.seconds = numbered, 0.0  # seconds in `run` since somebody set it to 0
        self.search: Future | None = None  # the last one: two threads must not ask at once

    def run(self, calls: list[Call]) -> None:
        """Carry out calls: each gets its documents, or the reason of a technical failure."""
        queries = list(dict.fromkeys(call.arguments["query"] for call in calls))
        began = time.perf_counter()
        if not queries:
            return
        try:
            if self.search is not None and not self.search.done():
                problem = "an earlier search, given up after its time-out, has not come back"
                raise RuntimeError(problem)
            self.search = begin(lambda: self.retriever.search(queries, self.top_k))
            hits = list(self.search.result(self.timeout))
            if len(hits) != len(queries):
                raise RuntimeError(f"{len(hits)} results for {len(queries)} queries")
        except Exception as e:  # not turned into a score: these episodes are left out and counted
            reason = _reason(e, self.timeout)
            print(f"{len(calls)} searches failed: {reason}", file=sys.stderr, flush=True)
            hits = [reason] * len(queries)
        shown = {query: self._documents(one) for query, one in zip(queries, hits)}
        for call in calls:
            documents = shown[call.arguments["query"]]
            if isinstance(documents, str):
                call.failure = documents
            else:
                call.documents, call.done = list(documents), True
        self.seconds += time.perf_counter() - began

    def _documents(self, hits: list | str) -> list[tuple[str, str]] | str:
        """(id, text) of one query's hits; a text, the reason, where they are no hits."""
        if isinstance(hits, str):
            return hits
        try:
            ids = [id_ for id_, _ in hits]
            texts = [self.document(id_)["contents"] for id_ in ids]
        except DataError:  # another corpus than the index was made of: no fault of this query
            raise
        except (TypeError, ValueError, KeyError, IndexError) as e:
            return f"the retriever gave {str(hits)[:80]!r}, which are no hits of this corpus ({e})"
        return list(zip(ids, numbered(texts) if self.numbered else texts))

    def close(self) -> None:
        """Nothing to end."""


class MCPTools:
    """The tools of an MCP server: a URL (streamable HTTP; SSE if it ends in /sse) or a command.

    One connection, in an event loop of its own thread; schemas come from the server. The calls of a
    round are sent together, `at_once` at a time. What the server answers, errors of the tool
    included, is for the model to read; a protocol error or a time-out is a technical failure.

    A lost connection is opened again (a command is started again), at growing intervals for at most
    `timeout` seconds, and the calls that were lost with it are sent again, at most twice. After a
    round that found no server, the next ones try once.
    """

    def __init__(self, target: str, timeout: float, at_once: int = 64):
        try:
            import mcp  # noqa: F401
            from anyio.from_thread import start_blocking_portal
        except ImportError as e:
            way_out = "pip install -r requirements-serve.txt"
            raise ConfigError(f"episode.mcp={target} needs the MCP SDK ({e}): {way_out}") from e
        self.target, self.timeout, self.at_once, self.seconds = target, timeout, at_once, 0.0
        self.client: Any = None
        self.sound = self.away = False  # the connection worked at last; no server was found at last
        self.connection, self.thread = ExitStack(), ExitStack()
        self.portal = self.thread.enter_context(start_blocking_portal(name="mcp"))
        try:
            self.schemas = self._open()
            if not self.schemas:
                raise ValueError("this server has no tools")
            for schema in self.schemas:
                _check_parameters(schema)
        except Exception as e:
            self.close()
            way_out = "start that server, or give its URL (serve.py's ends in /mcp) or command"
            raise ConfigError(f"episode.mcp={target}: {_reason(e, timeout)}; {way_out}") from e

    def _open(self) -> list[dict]:
        """Connect; the schemas of the server's tools."""
        from mcp import Client
        from mcp.client.sse import sse_client
        from mcp.client.stdio import StdioServerParameters

        target: Any = self.target
        if not re.match(r"https?://", target):
            command, *words = shlex.split(target)
            target = StdioServerParameters(command=command, args=words, env=dict(os.environ))
        elif target.rstrip("/").endswith("/sse"):
            target = sse_client(target)
        client = Client(target, read_timeout_seconds=self.timeout)
        held = self.portal.wrap_async_context_manager(client)
        self.client = self.connection.enter_context(held)
        page = self.portal.call(self.client.list_tools)
        tools = [*page.tools]
        while page.next_cursor:
            page = self.portal.call(partial(self.client.list_tools, cursor=page.next_cursor))
            tools += page.tools
        self.sound, self.away = True, False
        return [_schema(t.name, t.description or "", t.input_schema) for t in tools]

    def _close(self) -> None:
        self.client = None
        with suppress(Exception):  # what ended a lost connection
            self.connection.close()

    def _connect(self) -> None:
        """See that there is a connection that works, or raise why there is none."""
        if self.client and not self.sound:
            try:
                ask = partial(self.client.list_tools, cache_mode="bypass")
                self.portal.start_task_soon(ask).result(5)
                self.sound = True
            except Exception:
                self._close()
        wait, end = 0.5, time.monotonic() + (0 if self.away else self.timeout)
        while not self.client:
            print(f"warning: connecting to {self.target} again", file=sys.stderr, flush=True)
            try:
                self._open()
            except Exception:
                self._close()
                if time.monotonic() + wait > end:
                    self.away = True
                    raise
                time.sleep(wait)
                wait *= 2

    def run(self, calls: list[Call]) -> None:
        """Carry out calls: each gets what the server answered, or why it failed technically."""
        began, left = time.perf_counter(), calls
        for _ in range(3):
            try:
                if left:
                    self._connect()
            except Exception as e:
                for call in left:
                    call.failure = f"{call.name}: {_reason(e, self.timeout)}"
                break
            parts = [left[i : i + self.at_once] for i in range(0, len(left), self.at_once)]
            left = [call for part in parts for call in self._send(part)]
        self.seconds += time.perf_counter() - began
        if failed := [call.failure for call in calls if call.failure]:
            count = f"{len(failed)} of {len(calls)} tool calls failed"
            print(f"{count}: {failed[0]}", file=sys.stderr, flush=True)

    def _send(self, calls: list[Call]) -> list[Call]:
        """Carry out calls at the same time; those that were lost with the connection."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        start, lost, end = self.portal.start_task_soon, [], time.monotonic() + self.timeout
        answers = [start(self.client.call_tool, call.name, call.arguments) for call in calls]
        for call, future in zip(calls, answers):
            try:
                answer = future.result(max(end - time.monotonic(), 0))
                call.documents = [(None, text) for text in _texts(answer)]
                call.failure, call.done = "", True
            except (Exception, concurrent.futures.CancelledError) as e:
                future.cancel()
                code = e.code if isinstance(e, MCPError) else None
                self.sound &= code not in (None, CONNECTION_CLOSED, REQUEST_TIMEOUT)
                call.failure = f"{call.name}: {_reason(e, self.timeout)}"
                if code == CONNECTION_CLOSED or code is None and not isinstance(e, TIMEOUTS):
                    lost.append(call)
        return lost

    def close(self) -> None:
        """End the connection, and the server that a command started."""
        self._close()
        self.thread.close()


def _texts(answer: Any) -> list[str]:
    """The parts of an MCP result as texts; images and the like are named in brackets."""
    texts = []
    for part in answer.content:
        inner = getattr(part, "resource", part)  # of a resource that is sent along
        if part.type == "resource_link":
            texts.append(f"[link: {part.name}, {part.uri}] {part.description or ''}".rstrip())
        elif hasattr(inner, "text"):
            texts.append(inner.text)
        else:
            texts.append(f"[{part.type}, {inner.mime_type}: not shown]")
    structured = answer.structured_content
    if structured is not None and all(part.type != "text" for part in answer.content):
        texts.insert(0, json.dumps(structured, ensure_ascii=False))
    if answer.is_error and not texts:
        texts = ["error: the tool failed and gave no reason"]
    return texts


def single(e: BaseException) -> BaseException:
    """The first single exception inside groups of them."""
    while getattr(e, "exceptions", None):
        e = e.exceptions[0]
    return e


def _reason(e: BaseException, timeout: float) -> str:
    e = single(e)
    late = isinstance(e, TIMEOUTS)
    return f"no answer within {timeout:g} s" if late else f"{type(e).__name__}: {e}"
