"""The tools of an episode: calls parsed from text, the retriever as a tool, and MCP servers.

A call ends with documents, with a note for the model if the call is wrong, or with a technical
failure, which must not become a reward.
"""

from __future__ import annotations

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

TIMEOUTS = (TimeoutError, concurrent.futures.TimeoutError)  # the same from Python 3.11 on
AT_ONCE = 64  # calls that an MCP server has to answer at a time
NOTHING_FOUND = "No passage was found."


class ToolsAway(RuntimeError):
    """The tools failed in every episode."""

    exit_status = 1


@dataclass
class Call:
    """One search or tool call that the model wrote, and its outcome."""

    name: str
    arguments: dict
    note: str = ""  # for the model: why it is not carried out
    documents: list[tuple[str | None, str]] = field(default_factory=list)  # (id or None, text)
    failure: str = ""  # technical, ends the episode
    done: bool = False  # carried out
    shown: str = ""  # what the model reads: cut documents, or the note


# ---- calls in text


def parse_tool_calls(text: str, schemas: list[dict], bare: bool = False) -> list[Call]:
    """The calls in a turn outside think blocks; an invalid call carries a note.

    A <tool_call> block holds JSON objects {"name", "arguments"}; its end tag may be missing. bare:
    in a text without these tags a brace begins a call, and its last brace may be missing.
    """
    bare = bare and "<tool_call>" not in text
    begins = re.compile(r"</?think>|(?=\{)" if bare else r"</?think>|<tool_call>")
    calls, at, thought = [], 0, False
    while match := begins.search(text, at):
        at = match.end()
        if match[0] == "<think>":
            thought, end = True, text.find("</think>", at)
            at = len(text) if end < 0 else end
        elif match[0] == "</think>":  # all text before the first one was thought
            calls, thought = calls if thought else [], True
        else:
            found, at = _read_block(text, at, schemas, "}" if bare else "")
            calls += found
    return calls


_BETWEEN = re.compile(r"[\s,]*")
_BLOCK_END = re.compile(r"</?think>|</?tool_call>|\Z")


def _read_block(text: str, at: int, schemas: list[dict], more: str) -> tuple[list[Call], int]:
    """The calls of the block that begins at `at`, and its end. `more` may be missing there."""
    decode, calls = json.JSONDecoder().raw_decode, []
    # cut, because the decoder's error counts all lines before it
    text, begin, at = text[at:], at, 0
    while True:
        at = _BETWEEN.match(text, at).end()
        if calls and (end := _BLOCK_END.match(text, at)):
            break
        try:
            try:
                value, at = decode(text, at)
            except ValueError:
                value, at = decode(text + more, at)
            value = _scrub(value)
        except (ValueError, RecursionError) as e:
            reason = getattr(e, "msg", "nested too deeply")
            note = f"error: the call is not valid JSON ({reason}); close every quote and brace"
            calls.append(Call("", {}, note))
            end = _BLOCK_END.search(text, at)
            break
        calls.append(_check_call(value, schemas))
    return calls, begin + (end.end() if end[0] == "</tool_call>" else end.start())


def _check_call(value: Any, schemas: list[dict]) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, 'error: a call is a JSON object {"name": "…", "arguments": {…}}')
    name, arguments = value["name"], value.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # reported below
            arguments = _scrub(json.loads(arguments or "null"))
    arguments = {} if arguments is None else arguments
    schema = next((s["function"] for s in schemas if s["function"]["name"] == name), None)
    if schema is None:
        known = ", ".join(s["function"]["name"] for s in schemas)
        return Call(name, {}, f"error: there is no tool {name[:80]!r}; the tools are: {known}")
    if not isinstance(arguments, dict):
        return Call(name, {}, f"error: the arguments of {name} must be a JSON object")
    problem = _problem(arguments, name, schema.get("parameters") or {})
    if not problem and not str(arguments.get("query", "-")).strip():
        problem = "the query is empty; say in a few words what to look for"
    return Call(name, arguments, problem and f"error: {problem}")


def _problem(arguments: dict, name: str, parameters: dict) -> str:
    """How arguments break a tool's JSON Schema, for the model, or "". Those it does not name are
    errors, unless it allows them explicitly."""
    dialect = validator_for(parameters, Draft202012Validator)
    known = parameters.get("properties") or {}
    if known:
        # unevaluatedProperties (from 2019-09 on) also sees names in allOf and $ref
        new = "unevaluatedProperties" in dialect.VALIDATORS
        parameters = {f"{'unevaluated' if new else 'additional'}Properties": False} | parameters
    try:
        error = best_match(dialect(parameters, registry=Registry()).iter_errors(arguments))
    except (Unresolvable, RecursionError, re.error):
        return ""  # only the server can check it
    if error is None:
        return ""
    rule, value, path = error.validator, error.validator_value, ".".join(map(str, error.path))
    place = f"the argument {path!r} of {name}" if path else f"the arguments of {name}"
    if rule == "type":
        return f"{place} must be of type {value if isinstance(value, str) else ' or '.join(value)}"
    if rule == "required" and not path:
        return f"{name} needs the argument {next(key for key in value if key not in arguments)!r}"
    if rule in ("unevaluatedProperties", "additionalProperties") and not path:
        unknown, names = next(key for key in arguments if key not in known), ", ".join(known)
        return f"{name} has no argument {unknown[:80]!r}; it has: {names or 'none'}"
    return f"{place}: {error.message[:300]}"


# ---- the tools


def _schema(name: str, description: str, parameters: dict) -> dict:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_QUERY = {"query": {"type": "string", "description": "what to look for, in a few words"}}
SEARCH_TOOL = _schema(
    "retrieve",
    "Search the collection and return the passages that fit the query best.",
    {"type": "object", "required": ["query"], "properties": _QUERY},
)


def numbered(contents: Iterable[str]) -> list[str]:
    """Passages as an agent reads them: numbered, the title (a first line) without quotes."""
    plain = (re.sub(r'\A"?(.*?)"?\n', r"\1\n", passage) for passage in contents)
    return [f"[{place}] {passage}" for place, passage in enumerate(plain, 1)]


def begin(work: Callable[[], Any]) -> Future:
    """Run work() in a daemon thread: if it hangs, the process can still end."""
    import torch

    future: Future = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def run() -> None:
        try:
            torch.cuda.set_device(device)  # threads start on GPU 0; -1 does nothing
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True, name="search").start()
    return future


class _Tools:
    seconds = 0.0  # in `run`, since it was last reset
    timeout: float  # seconds for the calls of a round

    def run(self, calls: list[Call]) -> None:
        """Carry out calls: each gets documents or a failure."""
        began = time.perf_counter()
        self.carry_out(calls)
        self.seconds += time.perf_counter() - began
        if failed := [call.failure for call in calls if call.failure]:
            count = f"{len(failed)} of {len(calls)} tool calls failed"
            print(f"{count}: {failed[0]}", file=sys.stderr, flush=True)

    def fail(self, calls: list[Call], e: BaseException) -> None:
        for call in calls:
            call.failure = f"{call.name}: {_reason(e, self.timeout)}"

    def close(self) -> None:
        pass


class RetrieverTools(_Tools):
    """A retriever in this process as the tool `retrieve`, with one search per round."""

    schemas = [SEARCH_TOOL]

    def __init__(self, retriever, document: Callable, top_k: int, timeout: float, numbered: bool):
        """document: passage id → {"contents"}."""
        self.retriever, self.document = retriever, document
        self.top_k, self.timeout, self.numbered = top_k, timeout, numbered
        self.search: Future | None = None  # the last one; never two at once

    def carry_out(self, calls: list[Call]) -> None:
        """DataError: the corpus is not the one indexed."""
        queries = list(dict.fromkeys(call.arguments["query"] for call in calls))
        if not queries:
            return
        try:
            if self.search is not None and not self.search.done():
                raise RuntimeError("a search, given up after its time-out, has not come back")
            self.search = begin(lambda: self.retriever.search(queries, self.top_k))
            hits = list(self.search.result(self.timeout))
            if len(hits) != len(queries):
                raise RuntimeError(f"{len(hits)} results for {len(queries)} queries")
        except Exception as e:
            return self.fail(calls, e)
        found = dict(zip(queries, hits))
        for call in calls:
            self._show(call, found[call.arguments["query"]])

    def _show(self, call: Call, hits: Any) -> None:
        try:
            ids = [id_ for id_, _ in hits]
            texts = [self.document(id_)["contents"] for id_ in ids]
            call.documents = list(zip(ids, numbered(texts) if self.numbered else texts))
            call.done = True
        except DataError:  # the corpus is not the one indexed
            raise
        except (TypeError, ValueError, KeyError, IndexError) as e:
            call.failure = f"the retriever gave {hits!r:.80}, no hits of this corpus ({e})"


class MCPTools(_Tools):
    """The tools of an MCP server: a URL (streamable HTTP; SSE if it ends in /sse) or a command.

    The model reads errors of a tool; a protocol error or a time-out is a technical failure. A lost
    connection is retried for `timeout` seconds; after a round without a server, only once a round.
    Calls lost with it are sent again, at most twice.
    """

    def __init__(self, target: str, timeout: float):
        try:
            import mcp  # noqa: F401
            from anyio.from_thread import start_blocking_portal
        except ImportError as e:
            problem = f"episode.mcp={target} needs the MCP SDK ({e})"
            raise ConfigError(f"{problem}: pip install -r requirements-serve.txt") from e
        self.target, self.timeout = target, timeout
        self.client: Any = None  # None if not connected
        self.sound = False
        self.connection, self.thread = ExitStack(), ExitStack()
        self.portal = self.thread.enter_context(start_blocking_portal(name="mcp"))
        try:
            self.schemas = self._open()
            if not self.schemas:
                raise ValueError("this server has no tools")
        except Exception as e:
            self.close()
            problem = f"episode.mcp={target}: {_reason(e, timeout)}"
            raise ConfigError(f"{problem}; start that server, or give its URL or command") from e

    def _open(self) -> list[dict]:
        """Connect; returns the tools."""
        from mcp import Client
        from mcp.client.sse import sse_client
        from mcp.client.stdio import StdioServerParameters

        target = self.target
        if not re.match(r"https?://", target):
            command, *words = shlex.split(target)
            target = StdioServerParameters(command=command, args=words, env=dict(os.environ))
        elif target.rstrip("/").endswith("/sse"):
            target = sse_client(target)
        client = Client(target, read_timeout_seconds=self.timeout)
        held = self.portal.wrap_async_context_manager(client)
        self.client = self.connection.enter_context(held)
        tools, page = [], None
        while page is None or page.next_cursor:
            page = self.portal.call(partial(client.list_tools, cursor=page and page.next_cursor))
            tools += page.tools
        for tool in tools:
            dialect = validator_for(tool.input_schema, Draft202012Validator)
            try:
                dialect.check_schema(tool.input_schema, format_checker=None)
            except SchemaError as e:
                problem = f"the parameters of tool {tool.name!r} are no JSON Schema: {e.message}"
                raise ValueError(problem) from e
        self.sound = True  # no call has failed on this connection
        return [_schema(tool.name, tool.description or "", tool.input_schema) for tool in tools]

    def _close(self) -> None:
        self.client = None
        with suppress(Exception):  # the error that ended the connection
            self.connection.close()

    def _connect(self) -> None:
        """Make sure that the connection works, or raise the reason."""
        wait, end = 0.5, time.monotonic() + (self.timeout if self.client else 0)
        if self.client and not self.sound:
            try:
                ask = partial(self.client.list_tools, cache_mode="bypass")
                self.portal.start_task_soon(ask).result(5)
                self.sound = True
            except Exception:
                self._close()
        while not self.client:
            print(f"warning: connecting to {self.target} again", file=sys.stderr, flush=True)
            try:
                self._open()
            except Exception:
                self._close()
                if time.monotonic() + wait > end:
                    raise
                time.sleep(wait)
                wait *= 2

    def carry_out(self, calls: list[Call]) -> None:
        for _ in range(3):
            if not calls:
                return
            try:
                self._connect()
            except Exception as e:
                return self.fail(calls, e)
            parts = [calls[i : i + AT_ONCE] for i in range(0, len(calls), AT_ONCE)]
            calls = [call for part in parts for call in self._send(part)]

    def _send(self, calls: list[Call]) -> list[Call]:
        """Carry out calls in parallel; returns those lost with the connection."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        start, lost, end = self.portal.start_task_soon, [], time.monotonic() + self.timeout
        answers = [start(self.client.call_tool, call.name, call.arguments) for call in calls]
        for call, future in zip(calls, answers):
            try:
                answer = future.result(max(end - time.monotonic(), 0))
                call.documents = [(None, text) for text in _texts(answer)]
                call.failure, call.done = "", True
            except (Exception, concurrent.futures.CancelledError) as e:
                future.cancel()
                self.fail([call], e)
                answered = isinstance(e, MCPError) and e.code != CONNECTION_CLOSED
                self.sound &= answered
                if not answered and not isinstance(e, TIMEOUTS):
                    lost.append(call)
        return lost

    def close(self) -> None:
        """End the connection, and a server started by a command."""
        self._close()
        self.thread.close()


def _texts(answer: Any) -> list[str]:
    """The parts of an MCP result; other types than text are named in brackets."""
    texts = []
    for part in answer.content:
        inner = getattr(part, "resource", part)  # an embedded resource
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
        return ["error: the tool failed and gave no reason"]
    return texts


def single(e: BaseException) -> BaseException:
    """The first exception in nested exception groups."""
    while getattr(e, "exceptions", None):
        e = e.exceptions[0]
    return e


def _reason(e: BaseException, timeout: float) -> str:
    e = single(e)
    if isinstance(e, TIMEOUTS):
        return f"no answer within {timeout:g} s"
    return f"{type(e).__name__}: {e}"
