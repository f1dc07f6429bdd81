"""episode.py on task `agent`: tool calls, chat templates, MCP servers."""

from __future__ import annotations

import socket
import sys
import time

import pytest
import tiny
from scripted import (
    EOS,
    HERMES,
    LIMA,
    Search,
    agent_task,
    call,
    check_lists,
    injected,
    play,
    tokenizer,
)

import config
from data import DataError, Question
from episodes import episode, tools
from episodes.tasks import AgentTask, EpisodeConfig
from prompts import AGENT_INSTRUCTION, render_chat


def test_parallel_calls_share_one_turn_and_keep_their_order():
    """The newline that the template puts behind a turn's end is there, and not trained."""
    retriever = Search()
    task = agent_task(retriever)
    (e,), _ = play(
        task, ["both:\n" + call(query="Lima") + "\n" + call(query="Ann"), "<answer>Lima</answer>"]
    )
    (shown,), own = check_lists(e)
    assert shown == (
        "\n<|im_start|>user\n<tool_response>\n[1] Lima\nLima is the capital of Peru.\n</tool_response>\n"
        "<tool_response>\n[1] Ann\nAnn wrote Dune in Lima.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert retriever.calls == [["Lima", "Ann"]] and e.end == "answered" and task.well_formed(e)
    assert own.count("<|im_end|>") == 2  # both of the model's own turn ends were sampled
    # what the template would have written for the same messages, calls re-serialised, is the same text here
    calls = [{"function": {"name": "retrieve", "arguments": {"query": q}}} for q in ("Lima", "Ann")]
    tok = tokenizer()
    whole = render_chat(
        tok,
        [
            *task.messages("question 0?"),
            {"role": "assistant", "content": "both:", "tool_calls": calls},
            {"role": "tool", "content": "[1] Lima\nLima is the capital of Peru."},
            {"role": "tool", "content": "[1] Ann\nAnn wrote Dune in Lima."},
        ],
        task.tools.schemas,
    )
    assert whole + "<answer>Lima</answer><|im_end|>" == tok.decode(e.prompt_ids + e.response_ids)


@pytest.mark.parametrize(
    "text, note",
    [
        (
            '<tool_call>\n{"name": "retrieve", "arguments": {"query": "Ann"}\n</tool_call>',
            "is not valid JSON",
        ),  # a lost brace
        ("<tool_call>\nretrieve(Ann)\n</tool_call>", "is not valid JSON"),
        ("<tool_call></tool_call>", "is not valid JSON"),
        (call("lookup", query="Ann"), "there is no tool 'lookup'; the tools are: retrieve"),
        (call(), "needs the argument 'query'"),
        (call(q="Ann", query="Ann"), "has no argument 'q'"),
        (call(query=3), "must be of type string"),
        (call(query=True), "must be of type string"),
        (call(query="  "), "the query is empty"),
        ("<tool_call>[1, 2]</tool_call>", "a call is a JSON object"),
        ('<tool_call>{"name": "retrieve", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ],
)
def test_calls_that_cannot_be_made_are_answered(text, note):
    retriever = Search()
    task = agent_task(retriever)
    (e,), _ = (
        play(task, [text, call(query="Ann"), "<answer>Lima</answer>"], budget=900_000)
        if len(text) < 9999
        else ([[]], None)
    )
    if len(text) >= 9999:
        (made,) = tools.parse_tool_calls(text, task.tools.schemas)
        assert note in made.note
        return
    assert note in injected(e)[0][0] and "error: " in injected(e)[0][0] and len(e.rounds) == 3
    assert retriever.calls == [["Ann"]] and e.end == "answered" and not task.well_formed(e)


@pytest.mark.parametrize(
    "arguments", [r'{"query": "half \ud83d emoji"}', r'"{\"query\": \"half \\ud83d emoji\"}"']
)
def test_half_a_character_in_a_call_reaches_nobody(arguments):
    """JSON escapes can spell half a surrogate pair: a tokenizer, a socket and a file all refuse it."""
    (made,) = tools.parse_tool_calls(
        f'<tool_call>{{"name": "retrieve", "arguments": {arguments}}}</tool_call>',
        [tools.SEARCH_TOOL],
    )
    assert (
        made.arguments == {"query": "half \ufffd emoji"}
        and not made.note
        and made.arguments["query"].encode()
    )


def test_calls_that_other_parsers_lose():
    schemas = [tools.SEARCH_TOOL]
    one, two = (
        '{"name": "retrieve", "arguments": {"query": "a"}}',
        '{"name": "retrieve", "arguments": {"query": "b"}}',
    )

    def queries(text):
        return [c.note or c.arguments["query"] for c in tools.parse_tool_calls(text, schemas)]

    assert queries(f"<tool_call>\n{one}\n{two}\n</tool_call>") == [
        "a",
        "b",
    ]  # two objects in one block
    assert queries(f"<tool_call>{one}</tool_call><tool_call>{two}") == [
        "a",
        "b",
    ]  # the last one unclosed
    assert queries(f"<think><tool_call>{one}</tool_call></think>hm") == []  # inside a think block
    assert queries(f"so <tool_call>{one}</tool_call></think><tool_call>{two}</tool_call>") == [
        "b"
    ]  # prompt opened it
    assert queries(
        '<tool_call>{"name": "retrieve", "arguments": "{\\"query\\": \\"a\\"}"}</tool_call>'
    ) == ["a"]
    assert queries("<answer>a</answer>") == []
    assert [
        bool(c.note) for c in tools.parse_tool_calls(f"<tool_call>{one} or so</tool_call>", schemas)
    ] == [False, True]


def test_a_turn_with_calls_is_not_the_last_one_even_with_an_answer_in_it():
    (e,), _ = play(
        agent_task(), ["<answer>Rome</answer>" + call(query="Ann"), "<answer>Lima</answer>"]
    )
    assert e.prediction == "Lima" and len(e.rounds) == 2 and e.calls[0].done


def test_the_answer_is_the_last_one_behind_the_thinking():
    (e,), _ = play(
        agent_task(),
        ["<think><answer>no</answer></think><answer>a</answer> <answer> Lima </answer>"],
    )
    assert e.prediction == "Lima"
    (e,), _ = play(
        agent_task(), ["<think>I could answer <answer>no</answer> or ask " + call(query="Ann")]
    )
    assert (
        e.end == "no_answer" and e.prediction is None and not e.calls
    )  # a block that was never closed is thought too


def test_caps_of_the_agent():
    many = "\n".join(call(query=q) for q in ("Ann", "Bob", "Lima"))
    retriever = Search()
    (e,), _ = play(
        agent_task(retriever, calls_per_round=2, max_calls=3), [many, many, "<answer>x</answer>"]
    )
    assert retriever.calls == [["Ann", "Bob"], ["Ann"]]
    first, second = injected(e)[0]
    assert (
        first.count("one turn may hold 2 calls") == 1
        and second.count("no further calls are possible") == 2
    )


def test_a_turn_that_ended_at_another_eos_gets_its_end_untrained():
    (e,), _ = play(agent_task(), [call(query="Ann"), "<answer>Lima</answer>"], eos=4)
    (shown,), _ = check_lists(e)
    assert (
        shown.startswith("<|im_end|>\n<|im_start|>user")
        and e.loss_mask[e.response_ids.index(EOS)] == 0
    )


def test_templates_without_tools_get_them_in_words(capsys):
    plain = tokenizer(tiny.CHATML)
    task = agent_task(tok=plain)
    assert not task.native
    text = plain.decode(task.prompt(Question("q", "Who?", [])))
    assert '"name": "retrieve"' in text and "<tool_call>" in text and AGENT_INSTRUCTION[:40] in text
    (e,), _ = play(task, [call(query="Ann") + call(query="Bob"), "<answer>Lima</answer>"])
    assert injected(e)[0] == [
        "\n<|im_start|>user\n<tool_response>\n[1] Ann\nAnn wrote Dune in Lima.\n</tool_response>\n"
        "<tool_response>\n[1] Bob\nBob paints red foxes.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ]
    refusing = tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    assert not agent_task(tok=refusing).native and "no tools" in capsys.readouterr().err


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}: {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"  # fine: see below
        "{{ messages | length }}",  # what follows a result counts the messages
        "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}",  # turns end in something else than EOS
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)  # the history is dropped
def test_templates_whose_glue_cannot_be_cut_out_are_refused(template):
    with pytest.raises(DataError, match="cannot be appended token by token|leaves out the message"):
        agent_task(tok=tokenizer(template))


@pytest.mark.parametrize(
    "opened, tail", [("<think>\\n\\n</think>\\n\\n", "<think>\n\n</think>\n\n"), ("<think>\\n", "")]
)
def test_templates_of_reasoning_models(opened, tail):
    """Qwen3 in small: an empty think block in front of the answer is shown, not trained; one that is opened is left
    to the model; earlier thoughts that the template drops stay as they were sampled, for it is never rendered again."""
    template = HERMES.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{{ '<|im_start|>assistant\n" + opened + "' }}{% endif %}",
    )
    template = template.replace(
        "'\n' + m.content + '<|im_end|>\n'",
        "'\n' + m.content.split('</think>')[-1] + '<|im_end|>\n'",
    )
    task = agent_task(tok=tokenizer(template))
    assert task.native and task.glue[3].endswith("<|im_start|>assistant\n" + tail)
    (e,), engine = play(
        task, ["<think>a</think>" + call(query="Ann"), "<think>b</think><answer>Lima</answer>"]
    )
    text = task.tokenizer.decode(e.prompt_ids + e.response_ids)
    assert (
        "<think>a</think><tool_call>" in text and text.count("<|im_start|>assistant\n" + tail) == 2
    )
    assert injected(e)[0][0].endswith("<|im_start|>assistant\n" + tail) and e.prediction == "Lima"


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match="no chat template"):
        agent_task(tok=tiny.tiny_tokenizer(chat=False))


def test_bare_calls_are_written_with_their_tags():
    task = agent_task(bare_calls=True, stop_at_answer=True)
    assert "<tool_call>" not in tokenizer().decode(task.prompt(Question("q", "Who?", [])))
    (e,), _ = play(
        task,
        [
            'I ask {"name": "retrieve", "arguments": {"query": "Ann"}} and then',
            "<answer>Lima</answer> x",
        ],
    )
    assert e.calls[0].done and e.prediction == "Lima" and e.loss_mask[-1] == 0
    row = episode.trajectory_row(e, LIMA, task, {})
    texts = [m["text"] for m in row["messages"] if m["role"] == "assistant"]
    assert texts == [
        '<tool_call>\n{"name": "retrieve", "arguments": {"query": "Ann"}}\n</tool_call>',
        "<answer>Lima</answer>",
    ]
    ask = '{"name": "retrieve", "arguments": {"query": "Ann"'
    lost_brace, lost_two = (task.find_calls("", ask + end, False)[0] for end in ("}\n", "\n"))
    assert lost_brace.arguments == {"query": "Ann"} and not lost_brace.note
    assert "is not valid JSON" in lost_two.note


@pytest.mark.parametrize(
    "parts, made",
    [
        (['{"name": "retrieve", "arguments": {"query": "Ann {{x}}', " of {y}}", '"}}'], True),
        (['{"name": "retrieve", "arguments": {"query": "Ann \\"}}', '"}}'], True),
        (['{"name": "retrieve", "arguments": {"query": "Ann </answer>', ' tag"}}'], True),
        (['{"name": "retrieve", "arguments": {"query": {"a": {"b": 1}}', "}}"], False),
    ],
)
def test_a_bare_call_ends_at_its_own_braces(parts, made):
    """Not at those inside a query or of a nested object, nor at a tag in it: the turn goes on."""
    task = agent_task(bare_calls=True, stop_at_answer=True)
    (e,), engine = play(task, [*parts, "<answer>Lima</answer>"])
    assert len(engine.requests) == len(parts) + 1 and len(e.rounds) == 2
    assert e.rounds[0].text == "".join(parts) and e.prediction == "Lima"
    assert [c.done for c in e.calls] == [made] and ("must be of type" in e.calls[0].note) != made


def test_a_tag_inside_an_argument_is_text():
    """It ends neither the thinking nor the episode, and the call stands beside the content."""
    task = agent_task()
    ask = "<think>t</think>so " + call(query="Ann: what does </think> mean")
    (e,), _ = play(task, [ask, "<answer>Lima</answer>"])
    assert e.end == "answered" and e.calls[0].done and e.retrieved == ["p0"]
    message = episode.trajectory_row(e, LIMA, task, {})["messages"][2]
    assert message["content"] == "<think>t</think>so" and message["reasoning_content"] == "t"


def test_an_answer_inside_an_argument_ends_nothing():
    task = agent_task(stop_at_answer=True)
    ask = call(query="Ann: what is <answer>x</answer> tag")
    begin, end = ask.partition("</answer>")[::2]
    (e,), _ = play(task, [begin + "</answer>", end, "<answer>Lima</answer>"])
    assert e.prediction == "Lima" and [c.done for c in e.calls] == [True]


@pytest.mark.parametrize(
    "text",
    [
        'I use {"set} here. {"name": "retrieve", "arguments": {"query": "Ann"}}',
        '{"name": "retrieve", {"arguments": {"query": "x"}}',
    ],
)
def test_a_broken_bare_call_is_told_at_once(text):
    task = agent_task(bare_calls=True)
    assert any("is not valid JSON" in c.note for c in task.find_calls("", text, True))


SERVER = '''
import time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
server = MCPServer("t", log_level="ERROR")

@server.tool(structured_output=False)
def lookup(word: str, times: int = 1) -> str:
    """Say a word."""
    if word == "bad":
        raise ToolError("no such word")
    if word == "away":
        raise MCPError(-32603, "the index is away")
    if word == "slow":
        time.sleep(20)
    return word * times

server.run("stdio")
'''


def test_an_mcp_server_started_by_a_command(tmp_path):
    """Schemas from the server; tool errors are for the model to read, protocol errors and time-outs are failures."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    backend = tools.MCPTools(f"{sys.executable} {tmp_path / 'server.py'}", timeout=30.0)
    try:
        (schema,) = backend.schemas
        assert schema["function"]["name"] == "lookup" and schema["function"]["parameters"][
            "required"
        ] == ["word"]
        cfg = EpisodeConfig(mcp="x", result_tokens=200)
        task = AgentTask(cfg, tokenizer(), backend)
        done, _ = play(
            task,
            [
                call("lookup", word="ab", times=2) + call("lookup", word="bad"),
                "<answer>abab</answer>",
            ],
            [call("lookup", word="x", times="two"), call("lookup", word="away"), "never"],
        )
        assert [e.end for e in done] == ["answered", "tool_error"] and "the index is away" in done[
            1
        ].failure
        shown = injected(done[0])[0][0]
        assert (
            "<tool_response>\nabab\n</tool_response>\n<tool_response>\n" in shown
            and "no such word" in shown
        )
        assert "'times' of lookup must be of type integer" in injected(done[1])[0][0]
        backend.timeout = 0.5
        slow = tools.Call("lookup", {"word": "slow"})
        began = time.monotonic()
        backend.run([slow])
        assert (
            not slow.done
            and "no answer within 0.5 s" in slow.failure
            and time.monotonic() - began < 5
        )
    finally:
        backend.close()


def test_mcp_servers_that_are_not_there_are_named():
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
    with pytest.raises(config.ConfigError, match="start that server"):
        tools.MCPTools(target, timeout=10.0)
    with pytest.raises(config.ConfigError, match="nowhere-to-be-found"):
        tools.MCPTools("nowhere-to-be-found", timeout=10.0)
