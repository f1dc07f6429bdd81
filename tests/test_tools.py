"""episodes/tools.py: how calls are read and checked; MCP servers that stop and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import ConfigError
from episodes import tools

ROOT = Path(__file__).resolve().parent.parent


def made(arguments: str, schema: dict | None = None) -> tools.Call:
    """The one call of a turn, to a tool `f` with these parameters."""
    schemas = [{"type": "function", "function": {"name": "f", "parameters": schema or {}}}]
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    (call,) = tools.parse_tool_calls(text, schemas)
    return call


# -------------------------------------------------------------------------------- calls in a text


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        "what does </tool_call> mean",
        "what does <tool_call> mean",
        "is </think> a tag",
        "<think>",
        "<think> a </think> b",
        "}} {",
    ],
)
def test_tags_inside_an_argument_are_text(query, bare):
    body = json.dumps({"name": "retrieve", "arguments": {"query": query}})
    call = body if bare else f"<tool_call>\n{body}\n</tool_call>"
    if bare and "<tool_call>" in query:
        return  # a text with the tag is read by its tags
    for before in ("", "I look. ", "<think>hm {</think>", "hm { <tool_call> {</think> so "):
        if bare and "<tool_call>" in before:
            continue
        turn = f"{before}{call}"
        (one,) = tools.parse_tool_calls(turn, [tools.SEARCH_TOOL], bare)
        assert one.arguments == {"query": query} and not one.note


def test_a_turn_of_many_calls_or_of_tags_alone_is_read():
    """In steps that grow with the text: with its square, these two would take minutes."""
    schemas = [{"type": "function", "function": {"name": "f"}}]
    one = json.dumps({"name": "f", "arguments": {"q": "x" * 60}})
    assert len(tools.parse_tool_calls("<tool_call>" + one * 50_000, schemas)) == 50_000
    tags = tools.parse_tool_calls("<tool_call>{" * 20_000, schemas)
    assert len(tags) == 20_000 and all("not valid JSON" in call.note for call in tags)


# ------------------------------------------------------------------------------------ their schemas


@pytest.mark.parametrize("empty", ["null", '""', "{}", '"{}"', '"null"'])
def test_no_arguments_are_an_empty_object(empty):
    call = made(empty)
    assert call.arguments == {} and not call.note
    assert (
        made(empty, {"properties": {"q": {}}, "required": ["q"]}).note
        == "error: f needs the argument 'q'"
    )
    assert (
        "must be a JSON object" in made('"{"').note and "must be a JSON object" in made("[]").note
    )


@pytest.mark.parametrize(
    "properties, arguments, note",
    [
        ({"refresh": True}, '{"refresh": 1}', ""),
        ({"refresh": False}, '{"refresh": 1}', "the arguments of f: False schema does not allow 1"),
        ({"n": {"type": "integer"}}, '{"n": 5.0}', ""),
        ({"n": {"type": "integer"}}, '{"n": 5.5}', "'n' of f must be of type integer"),
        ({"n": {"type": "integer"}}, '{"n": true}', "'n' of f must be of type integer"),
        (
            {"n": {"type": ["integer", "null"]}},
            '{"n": "5"}',
            "'n' of f must be of type integer or null",
        ),
        ({"n": {"enum": ["a", "b"]}}, '{"n": "c"}', "'n' of f: 'c' is not one of ['a', 'b']"),
        ({"n": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, '{"n": null}', ""),
        ({"n": {"maximum": 3}}, '{"n": 4}', "'n' of f: 4 is greater than the maximum of 3"),
        (
            {"n": {"items": {"type": "string"}}},
            '{"n": ["a", 1]}',
            "'n.1' of f must be of type string",
        ),
        (
            {"n": {"properties": {"m": {"type": "string"}}}},
            '{"n": {"m": 1}}',
            "'n.m' of f must be of type string",
        ),
        ({"n": {"$ref": "#/$defs/d"}}, '{"n": 1}', "'n' of f must be of type string"),
        ({"n": {"$ref": "https://nowhere.invalid/s"}}, '{"n": 1}', ""),  # never fetched
        (
            {"n": {"type": "string", "pattern": r"^\p{L}+$"}},
            '{"n": "a"}',
            "",
        ),  # not Python's syntax
        ({"n": {}}, '{"m": 1}', "f has no argument 'm'; it has: n"),
    ],
)
def test_arguments_are_checked_as_json_schema_says(properties, arguments, note):
    call = made(
        arguments, {"type": "object", "properties": properties, "$defs": {"d": {"type": "string"}}}
    )
    assert call.note == (
        f"error: {'the argument ' * note.startswith(chr(39))}{note}" if note else ""
    )


@pytest.mark.parametrize(
    "more, allowed",
    [
        ({}, False),
        ({"additionalProperties": False}, False),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": {"type": "integer"}}, True),
        ({"patternProperties": {"^x": {}}}, True),
        ({"allOf": [{"properties": {"xy": {}}}]}, True),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, False),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": True},
            True,
        ),
    ],
)
def test_an_argument_that_no_property_names(more, allowed):
    note = made('{"q": "a", "xy": 1}', {"type": "object", "properties": {"q": {}}} | more).note
    assert note == ("" if allowed else "error: f has no argument 'xy'; it has: q")


# ---------------------------------------------------------------------------------- results of MCP


def test_every_part_of_a_result_is_shown_or_named():
    types = pytest.importorskip("mcp_types")
    link = types.ResourceLink(name="report", uri="file:///r.pdf", description="the report")
    text = types.EmbeddedResource(resource=types.TextResourceContents(uri="a:b", text="inside"))
    blob = types.EmbeddedResource(
        resource=types.BlobResourceContents(uri="a:c", blob="aGk=", mime_type="application/pdf")
    )
    image = types.ImageContent(data="aGk=", mime_type="image/png")
    word = types.TextContent(text="word")

    def texts(*content, **more):
        return tools._texts(types.CallToolResult(content=list(content), **more))

    assert texts(word, link, text, blob, image) == [
        "word",
        "[link: report, file:///r.pdf] the report",
        "inside",
        "[resource, application/pdf: not shown]",
        "[image, image/png: not shown]",
    ]
    assert texts(structured_content={"n": ["ü"]}) == ['{"n": ["ü"]}']
    assert texts(image, structured_content={"n": 1})[0] == '{"n": 1}'
    assert texts(word, structured_content={"n": 1}) == ["word"]  # the same again, by MCP's rule
    assert texts() == [] and texts(is_error=True) == ["error: the tool failed and gave no reason"]


# ------------------------------------------------------------------------- servers that come and go

SERVER = '''
import json, os, sys, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("t", log_level="ERROR")
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")

@server.tool(structured_output=False)
def say(word: str) -> str:
    """Say a word."""
    if word == "crash" or word == "crash once" and not os.path.exists(sys.argv[1] + ".crashed"):
        open(sys.argv[1] + ".crashed", "w")
        os._exit(3)
    if word == "hang":
        time.sleep(60)
    return word

server.run("stdio")
'''


def say(backend: tools.MCPTools, *words: str) -> list[tools.Call]:
    calls = [tools.Call("say", {"word": word}) for word in words]
    backend.run(calls)
    return calls


@pytest.fixture
def stdio(tmp_path):
    """(tools of a server that a command started, its process ids so far)."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    backend = tools.MCPTools(
        f"{sys.executable} {tmp_path / 'server.py'} {tmp_path / 'pids'}", timeout=20.0
    )
    yield backend, lambda: [int(line) for line in (tmp_path / "pids").read_text().split()]
    backend.close()
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_server_of_a_command_is_started_again(stdio):
    backend, pids = stdio
    assert [c.documents for c in say(backend, "a", "b")] == [[(None, "a")], [(None, "b")]]
    os.kill(pids()[0], signal.SIGKILL)
    (call,) = say(backend, "c")
    assert call.done and not call.failure and call.documents == [(None, "c")] and len(pids()) == 2
    calls = say(backend, "d", "crash once")  # what was lost with the process is asked again
    assert all(c.done and not c.failure for c in calls) and len(pids()) == 3
    (call,) = say(backend, "crash")  # a call that always ends the server is not asked for ever
    assert not call.done and call.failure and len(pids()) == 5
    (call,) = say(backend, "e")
    assert call.done and len(pids()) == 6
    backend.timeout = 0.5
    (call,) = say(backend, "hang")
    assert call.failure == "say: no answer within 0.5 s" and not call.done
    backend.timeout = 20.0
    (call,) = say(backend, "f")
    assert call.done


def test_a_server_that_is_away_fails_at_once_and_is_used_when_it_is_back(tmp_path):
    pytest.importorskip("mcp")
    pytest.importorskip("uvicorn")
    (tmp_path / "corpus.jsonl").write_text('{"id": "p", "title": "T", "text": "red fox"}\n')

    def start(port: int) -> tuple[subprocess.Popen, int]:
        words = [f"retriever.corpus={tmp_path / 'corpus.jsonl'}", f"port={port}"]
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "serve.py"), *words], stdout=subprocess.PIPE, text=True
        )
        return server, int(server.stdout.readline().split()[-1].rsplit(":", 1)[1])

    def ask(timeout: float) -> tuple[tools.Call, float]:
        call, began, backend.timeout = (
            tools.Call("retrieve", {"query": "fox"}),
            time.monotonic(),
            timeout,
        )
        backend.run([call])
        return call, time.monotonic() - began

    server, port = start(0)
    backend = tools.MCPTools(f"http://127.0.0.1:{port}/mcp", timeout=30.0)
    try:
        assert ask(30)[0].done
        server.terminate()
        server.wait(30)
        call, seconds = ask(3)  # tries for that long
        assert not call.done and "connection" in call.failure.lower() and seconds < 10
        call, seconds = ask(30)  # then once a round
        assert not call.done and "connection" in call.failure.lower() and seconds < 5
        server, _ = start(port)
        call, seconds = ask(30)
        assert call.done and call.documents == [(None, "[1] T\nred fox")]
    finally:
        backend.close()
        server.terminate()
        server.wait(30)


def test_a_tool_whose_parameters_are_no_schema_is_named(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(
        SERVER.replace(
            "server.run(",
            "server._tool_manager._tools['say'].parameters = "
            "{'type': 'object', 'properties': {'word': {'type': 'objekt'}}}\nserver.run(",
        )
    )
    with pytest.raises(ConfigError, match="tool 'say' are no JSON Schema: 'objekt' is not valid"):
        tools.MCPTools(
            f"{sys.executable} {tmp_path / 'server.py'} {tmp_path / 'pids'}", timeout=20.0
        )
