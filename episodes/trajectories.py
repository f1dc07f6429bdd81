"""Trajectories on disk: reading, encoding as training rows, choosing, exporting.

A trajectory is a JSONL row with `messages` and `tools` in OpenAI's form, beside infer.py's fields;
ms-swift's form is read too (role `tool_call`, tools as text). Assistant turns are trained with
their calls and EOS, except those with `weight` 0 (OpenAI) or `loss` false (ms-swift).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import data
import prompts
from data import DataError

RESULT = re.compile(  # a search result in an assistant's text
    r"((?<=</search>)\s*(?:<result>.*?</result>|<information>.*?</information>))", re.DOTALL
)


def holds_trajectories(path: str) -> bool:
    """Whether the first row of a JSONL file has `messages`."""
    return next(("messages" in row for _, row in data.read_jsonl(path)), False)


def read_trajectories(path: str) -> list[dict]:
    """A file's rows in OpenAI's form, arguments as mappings; untrained turns have weight 0."""
    rows: dict[str | int, dict] = {}
    for number, row in data.read_jsonl(path):
        id_ = row.setdefault("rollout_id", f"line {number}")
        try:
            if not isinstance(id_, str | int) or id_ in rows:
                raise DataError(f"rollout_id {str(id_)[:60]} must be a text that no other row has")
            row["tools"] = _listed(_json(row.get("tools")) or [])
            for tool in row["tools"]:
                _function("tool", tool)
            row["messages"] = _chat(_listed(row.get("messages")))
        except (DataError, RecursionError) as e:
            raise DataError(f"{path}:{number}: {e}") from e
        rows[id_] = row
    if not rows:
        raise DataError(f"{path}: no trajectories; give a file with one a line")
    return list(rows.values())


def read_conversations(path: str) -> list[list[dict]]:
    """Few-shot examples: chats from a user's question to the answer. In `search` one assistant
    message holds everything."""
    chats = []
    for row in read_trajectories(path):
        first, *_, last = row["messages"]
        if first["role"] != "user" or last["role"] != "assistant" or is_blank(last):
            where = f"{path}: {row['rollout_id']}"
            raise DataError(f"{where}: an example must run from a question to its answer")
        chats.append(row["messages"])
    return chats


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _json(value: Any) -> Any:
    try:
        return data._scrub(json.loads(value)) if isinstance(value, str) else value
    except ValueError as e:
        raise DataError(f"not valid JSON ({e}): {value[:80]!r}") from e


def _function(what: str, value: Any) -> dict:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": …}}'
        raise DataError(f"a {what} must be {form}, not {str(value)[:80]}")
    return function


def _call(value: Any) -> dict:
    """A call with its arguments as a mapping, as chat templates need them."""
    function = _function("tool call", value)
    arguments = _json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise DataError(f"arguments must be a mapping or its JSON text, not {arguments!r}")
    function = {"name": function["name"], "arguments": arguments}
    return value | {"type": "function", "function": function}


TEXTS = ("role", "content", "thinking", "reasoning", "reasoning_content")


def _chat(messages: list) -> list[dict]:
    chat: list[dict] = []
    for m in messages:
        if not isinstance(m, dict) or not all(isinstance(m.get(k), str | None) for k in TEXTS):
            raise DataError(
                f"messages must be a list of messages with role and content, not {str(m)[:80]}"
            )
        _add_message(chat, m)
    roles = [m["role"] for m in chat]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise DataError(f"messages must run from a question to an answer; the roles are {roles}")
    if any(m["role"] == "assistant" and is_blank(m) for m in chat[:-1]):
        raise DataError("an assistant's message in the middle is empty; take it out")
    return chat


def _add_message(chat: list[dict], message: dict) -> None:
    """Add a message; ms-swift's `tool_call` joins the assistant message before it."""
    role, content = message.get("role"), message.get("content") or ""
    marks = [message.get("weight"), message.get("loss")]
    if any(mark not in (None, 0, 1) for mark in marks):
        raise DataError(f"weight and loss of a message are 1 or 0, true or false, not {marks}")
    weight = {"weight": 0} if 0 in marks else {}
    if role == "tool_call":
        if not chat or chat[-1]["role"] != "assistant":
            chat.append({"role": "assistant", "content": ""} | weight)
        if chat[-1].get("weight") != weight.get("weight"):
            raise DataError(
                "an assistant's message and its tool_call differ in loss; give both the same"
            )
        calls = chat[-1].setdefault("tool_calls", [])
        id_ = f"call_{len(chat)}_{len(calls)}"
        calls.append(_call({"id": id_, "function": _json(content)}))
        return
    role = "tool" if role == "tool_response" else role
    if role not in ("system", "user", "assistant", "tool") or message.get("function_call"):
        raise DataError(
            f"a message of role {role!r}: roles are system, user, assistant and tool; calls are "
            "tool_calls, not function_call"
        )
    kept = {k: v for k, v in message.items() if k not in ("weight", "loss", "tool_calls")}
    for key in TEXTS[2:]:
        kept |= {"reasoning_content": message[key]} if message.get(key) else {}
    if message.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in _listed(message["tool_calls"])]
    chat.append(kept | weight | {"role": role, "content": content})


def is_blank(message: dict) -> bool:
    """Whether an assistant message has nothing to train on."""
    return not (
        message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    )


# ---- encode


def encode(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)), from sampled texts or the chat template."""
    own = [m for m in row["messages"] if m["role"] == "assistant"]
    if row.get("task") in ("search", "agent") and all("text" in m for m in own):
        return encode_sampled(tokenizer, row)
    return encode_messages(tokenizer, row["messages"], row["tools"], str(row.get("rollout_id")))


def _join(tokenizer, parts: list[tuple[str | list[int], int]]) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of (part, label): no token spans two parts."""
    ids, labels = [], []
    for part, label in parts:
        if isinstance(part, str):
            part = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += part
        labels += [label] * len(part)
    return ids, labels[1:]


def encode_sampled(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a row of infer.py, as in its rollout."""
    from episodes.tasks import AgentTask, EpisodeConfig, SearchTask  # they need torch

    kind = {"search": SearchTask, "agent": AgentTask}[row["task"]]
    cfg = EpisodeConfig(template=row.get("template") or "instruct")
    if cfg.template not in kind.rules:
        raise DataError(
            f"{row['rollout_id']}: template {cfg.template!r} is none of {', '.join(kind.rules)}"
        )
    task = kind(cfg, tokenizer, SimpleNamespace(schemas=row["tools"]))
    messages = row["messages"]
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    parts = [(task.encode(messages[: turns[0]]), 0)]
    for i, following in zip(turns, [*turns[1:], len(messages)]):
        own, last = int(messages[i].get("weight") != 0), i == turns[-1]
        parts.append((messages[i]["text"], own))
        if last or not task.one_message:
            parts.append(([task.eos_id], own))
        results = [m["content"] for m in messages[i + 1 : following]]
        if results:
            parts.append((task.wrap(results, task.eos_id), 0))
        elif not last:
            raise DataError(
                f"{row['rollout_id']}: message {i} is followed by no result; end the chat there"
            )
    return _join(tokenizer, parts)


def encode_messages(
    tokenizer, messages: list[dict], tools: list[dict], location: str
) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a chat in the tokenizer's template. DataError if it does
    not end assistant turns with EOS."""
    # the model's own text keeps added tokens that are not special, like <think>
    control, added = prompts.control_strings(tokenizer), prompts.special_strings(tokenizer)
    chat = [m | {"content": prompts.defuse(m["content"], added)} for m in messages]
    if tools and not prompts.template_knows_tools(tokenizer, tools):
        start = [] if chat[0]["role"] == "system" else [{"role": "system", "content": ""}]
        chat, tools = prompts.spell_tools(start + chat, tools), []
    before, *pieces = prompts.render_around(tokenizer, chat, tools or None, answer_next=False)
    header = prompts.answer_header(tokenizer)
    opened = header.partition("<think>")[0]
    ends = tokenizer.convert_ids_to_tokens(prompts.eos_token_ids(tokenizer))
    parts = []
    for message, behind in zip((m for m in messages if m["role"] == "assistant"), pieces):
        content = prompts.without_eos(tokenizer, message["content"])
        text = prompts.defuse(prompts.turn_text(message | {"content": content}), control)
        end = re.match(rf"\s*({'|'.join(map(re.escape, ends))})", behind)
        if not opened.strip() or opened not in before or not end:
            raise DataError(
                f"{location}: the chat template of {tokenizer.name_or_path} gives an assistant's "
                f"turn no header, or does not end it with {' or '.join(ends)}; use a ChatML model"
            )
        shown, _, block = before.rpartition(opened)  # some templates add an empty think block
        if "<think>" in block and "<think>" in text:
            block = ""  # the text has its own
        known = block if "</think>" in header else ""  # a prompt has it, too
        parts.append((shown + opened + known, 0))
        own, before = int(message.get("weight") != 0), behind[end.end() :]
        turn = block.removeprefix(known) + text + end[0]
        for k, piece in enumerate(RESULT.split(turn)):  # odd ones are results
            parts.append((piece, 0 if k % 2 else own))
    return _join(tokenizer, parts)


# ---- choose


def succeeded(row: dict, rule: str) -> bool:
    """Whether EM = 1 or F1 >= 0.8 (as in DeepSearch-RL); False after a technical failure."""
    score = (row.get("metric_score") or {}).get(rule) or 0
    return score >= {"em": 1, "f1": 0.8}[rule] and not row.get("error")


def tool_calls(row: dict) -> int:
    """Number of calls in all messages."""
    return sum(len(m.get("tool_calls") or ()) for m in row["messages"])


def rounds(row: dict) -> int:
    """Number of model turns."""
    return row.get("rounds") or sum(m["role"] == "assistant" for m in row["messages"])


def question_type(row: dict) -> str:
    """The type in the question's metadata, or ""."""
    metadata = row.get("metadata") or {}
    return str(metadata.get("question_type") or metadata.get("type") or "")


CLASSES = {"rounds": rounds, "tool_calls": tool_calls, "type": question_type}


def balance(rows: list[dict], by: str, cap: int, seed: int = 0) -> list[dict]:
    """At most `cap` random rows of each class of CLASSES[by], in order."""
    draw = random.Random(seed)
    return _of_each(rows, CLASSES[by], lambda group: draw.sample(group, min(cap, len(group))))


def first_of_each(rows: list[dict], count: int) -> list[dict]:
    """The first `count` rows of each question."""
    return _of_each(rows, question_key, lambda group: group[:count])


def _of_each(rows: list[dict], key: Callable, choose: Callable) -> list[dict]:
    """What `choose` takes of the rows with equal keys, in order."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(key(row), []).append(i)
    return [rows[i] for i in sorted(i for _, g in sorted(groups.items()) for i in choose(g))]


def question_key(row: dict) -> str:
    """The question's id, or else the first user message."""
    if row.get("id") not in (None, ""):
        return str(row["id"])
    asked = (m["content"] for m in row["messages"] if m["role"] == "user")
    return str(next(asked, row["rollout_id"]))


# ---- export


def to_openai(row: dict) -> dict:
    """{"messages", "tools"} in OpenAI's fine-tuning form, thoughts in the content."""
    messages = []
    for m in row["messages"]:
        out = {"role": m["role"], "content": prompts.thoughts_and_content(m)}
        out |= {key: m[key] for key in ("tool_call_id", "weight") if m.get(key) is not None}
        for call in m.get("tool_calls", []):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            function = call["function"] | {"arguments": arguments}
            out.setdefault("tool_calls", []).append(call | {"function": function})
        messages.append(out)
    return {"messages": messages} | ({"tools": row["tools"]} if row["tools"] else {})


def to_swift(row: dict) -> dict:
    """{"messages", "tools"} in ms-swift's form: a `tool_call` message per call, tools as text."""
    messages = []
    for m in row["messages"]:
        loss = {"loss": False} if m.get("weight") == 0 else {}
        content, calls = prompts.thoughts_and_content(m), m.get("tool_calls", [])
        if content or not calls:
            messages.append({"role": m["role"], "content": content} | loss)
        for call in calls:
            text = json.dumps(call["function"], ensure_ascii=False)
            messages.append({"role": "tool_call", "content": text} | loss)
    tools = {"tools": json.dumps(row["tools"], ensure_ascii=False)} if row["tools"] else {}
    return {"messages": messages} | tools
