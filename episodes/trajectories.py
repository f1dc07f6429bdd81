"""Trajectories on disk: read them, turn them into training rows, choose among them, export them.

A trajectory is a JSONL row with `messages` in OpenAI's form: roles system, user, assistant
(`content`, and `tool_calls` whose `arguments` are JSON text) and tool; `tools` are the functions'
JSON schemas. Beside them stand the fields that infer.py writes (episode.trajectory_row). ms-swift's
form is read too: messages of role `tool_call` (content {"name", "arguments"}), `tools` as JSON.

Trained are the assistant's texts, its calls and the end of each of its turns, but not turns with
`weight` 0 (OpenAI) or `loss` false (ms-swift); headers, prompts and results of tools never are.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from typing import Any, Literal

import data
from data import DataError
from episodes.tasks import derive_glue, template_knows_tools
from prompts import (
    before_calls,
    control_strings,
    defuse_message,
    encode_chat,
    encode_text,
    eos_token_ids,
    mapped_calls,
    render_chat,
    search_text,
    special_strings,
    spell_tools,
    without_eos,
)

Rule = Literal["em", "f1"]
F1_SUCCESS = 0.8  # DeepSearch-RL's
RESULT = re.compile(
    r"(?<=</search>)\s*<(result|information)>.*?</\1>", re.DOTALL
)  # inside an assistant's text


def holds_trajectories(path: str) -> bool:
    """Does the first row of a JSONL file have `messages`?"""
    return next(("messages" in row for _, row in data.read_jsonl(path)), False)


def read_trajectories(path: str) -> list[dict]:
    """The rows of a file in OpenAI's form; DataError names file, line and reason."""
    rows, seen = [], set()
    for number, row in data.read_jsonl(path):
        location = f"{path}:{number}"
        id_ = row.setdefault("rollout_id", f"line {number}")
        if not isinstance(id_, str | int):
            raise DataError(f"{location}: rollout_id {str(id_)[:60]} must be a string")
        if id_ in seen:
            raise DataError(f"{location}: rollout_id {id_!r} occurs a second time; give another")
        seen.add(id_)
        row["tools"] = _tools(row.get("tools"), location)
        row["messages"] = _messages(row.get("messages"), location)
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no trajectories; give a file with one a line")
    return rows


def _json(text: Any, what: str, location: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as e:
        raise DataError(f"{location}: {what} is not valid JSON ({e}): {text[:80]!r}") from e


def _tools(tools: Any, location: str) -> list[dict]:
    tools = _json(tools, "tools", location) or []
    try:
        named = isinstance(tools, list) and all(tool["function"]["name"] for tool in tools)
    except (TypeError, KeyError):
        named = False
    if not named:
        raise DataError(
            f'{location}: tools must be a list of {{"type": "function", "function": {{…}}}}, '
            f"each with a name, or its JSON text, not {str(tools)[:80]}"
        )
    return tools


def _messages(messages: Any, location: str) -> list[dict]:
    """Messages in OpenAI's form; a turn that is not trained has `weight` 0."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str | None)
        for m in messages
    ):
        raise DataError(
            f"{location}: messages must be a list of messages with role and content (text), not "
            f"{str(messages)[:80]}"
        )
    out: list[dict] = []
    for m in messages:
        _add_message(out, m, location)
    if any(m["role"] == "assistant" and is_blank(m) for m in out[:-1]):
        raise DataError(
            f"{location}: an assistant's message in the middle is empty; take it out, or cut the "
            "chat there"
        )
    roles = [m["role"] for m in out]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise DataError(
            f"{location}: messages must run from a question to an assistant's answer; the roles "
            f"are {roles}"
        )
    return out


def _add_message(out: list[dict], message: dict, location: str) -> None:
    """Add a message to a chat in OpenAI's form; a `tool_call` joins the assistant's before it."""
    for key in ("weight", "loss"):
        if message.get(key) not in (None, 0, 1):
            raise DataError(
                f"{location}: {key} of a message is {str(message[key])[:40]!r}; it is 1 or 0, true "
                "or false"
            )
    weight = {"weight": 0} if 0 in (message.get("weight"), message.get("loss")) else {}
    role = {"tool_response": "tool"}.get(message["role"], message["role"])
    if role == "tool_call":
        function = _json(message["content"], "a tool_call", location)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{location}: a tool_call must hold a name and arguments, not "
                f"{str(message['content'])[:80]}"
            )
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""} | weight)
        if out[-1].get("weight") != weight.get("weight"):
            raise DataError(
                f"{location}: an assistant's message and its tool_call differ in loss; a turn is "
                "trained as a whole or not at all: give both the same"
            )
        calls = out[-1].setdefault("tool_calls", [])
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        id_ = f"call_{len(out)}_{len(calls)}"
        calls.append({"id": id_, "type": "function", "function": function})
    elif role not in ("system", "user", "assistant", "tool"):
        raise DataError(
            f"{location}: a message of role {role!r}; roles are system, user, assistant and tool"
        )
    elif message.get("function_call"):
        raise DataError(
            f"{location}: a message has function_call, a form that is no longer used; write "
            "tool_calls"
        )
    else:
        kept = {key: value for key, value in message.items() if key not in ("weight", "loss")}
        for key in ("thinking", "reasoning", "reasoning_content"):
            kept |= {"reasoning_content": message[key]} if message.get(key) else {}
        out.append(kept | weight | {"role": role, "content": message.get("content") or ""})


def is_blank(message: dict) -> bool:
    """Has an assistant's message nothing that could be trained?"""
    return not (
        message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    )


# ---------------------------------------------------------------------------------------- encode


def encode(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a trajectory.

    Rows of infer.py by their sampled texts, others by the template. Every stretch is encoded alone,
    as rollouts are, so that no token spans a border. DataError: a template that leaves out what
    would be trained, or writes earlier turns anew.
    """
    own = [m for m in row["messages"] if m["role"] == "assistant"]
    if row.get("task") in ("search", "agent") and all("text" in m for m in own):
        return encode_sampled(tokenizer, row)
    return encode_messages(tokenizer, row["messages"], row["tools"], str(row.get("rollout_id")))


class _Encoded:
    """Token ids and their labels, grown together."""

    def __init__(self, tokenizer, ids: list[int] = ()):
        self.tokenizer, self.ids, self.labels = tokenizer, list(ids), [0] * len(ids)

    def append(self, text: str, label: int) -> None:
        self.append_ids(
            self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else [], label
        )

    def append_ids(self, ids: list[int], label: int) -> None:
        self.ids += ids
        self.labels += [label] * len(ids)


def encode_sampled(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a row of infer.py: those of the rollout that it shows."""
    messages, tools, agent = row["messages"], row["tools"], row["task"] == "agent"
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    start = messages[: turns[0]]
    if agent:
        native = template_knows_tools(tokenizer, tools)
        _, head, between, tail = derive_glue(tokenizer, native)
        start = start if native else spell_tools(start, tools)
        prompt = encode_chat(tokenizer, start, tools if native else None)
    else:
        head, between, tail = " <result>\n", "", "\n</result>"
        if row.get("template") == "base":
            text = search_text(start[-1]["content"], (), start[0]["content"])
            prompt = encode_text(tokenizer, text)
        else:
            prompt = encode_chat(tokenizer, start)
    encoded, eos = _Encoded(tokenizer, prompt), eos_token_ids(tokenizer)[:1]
    for i, following in zip(turns, [*turns[1:], len(messages)]):
        own, last = int(messages[i].get("weight") != 0), i == turns[-1]
        encoded.append(messages[i]["text"], own)
        encoded.append_ids(eos if last or agent else [], own)
        results = [m["content"] for m in messages[i + 1 : following]]
        if not last and not results:
            raise DataError(
                f"{row['rollout_id']}: message {i} is followed by no result; a sampled turn is "
                "kept with what was shown behind it, or the chat ends there"
            )
        encoded.append(head + between.join(results) + tail if results else "", 0)
    return encoded.ids, encoded.labels[1:]


def encode_messages(
    tokenizer, messages: list[dict], tools: list[dict], location: str
) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a chat in the tokenizer's template.

    Where an assistant's turn begins is found by rendering what comes before it, where it ends by
    the EOS behind it. It is checked that the whole chat begins with every shorter one and that
    every text, call and thought is in its turn.
    """
    template = f"{location}: the chat template of {tokenizer.name_or_path}"
    chat = _template_form(messages, tokenizer, location)
    sources = iter([pair for pair in zip(chat, messages) if pair[1]["role"] == "assistant"])
    native = not tools or template_knows_tools(tokenizer, tools)
    if not native:
        start = [] if chat[0]["role"] == "system" else [{"role": "system", "content": ""}]
        chat = spell_tools(start + chat, tools)
    shown = tools if tools and native else None
    full = render_chat(tokenizer, chat, shown, answer_next=False)
    encoded, at = _Encoded(tokenizer), 0
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        begin, end = _find_turn(tokenizer, full, chat[:i], shown, template)
        source, marked = next(sources)
        own, turn = int(marked.get("weight") != 0), full[begin:end]
        _check_turn(turn, source, template)
        encoded.append(full[at:begin], 0)
        inner, at = 0, end
        for result in RESULT.finditer(turn):  # of `search`, shown to the model inside its one turn
            encoded.append(turn[inner : result.start()], own)
            encoded.append(result.group(), 0)
            inner = result.end()
        encoded.append(turn[inner:], own)
    return encoded.ids, encoded.labels[1:]


def _find_turn(
    tokenizer, full: str, before: list[dict], tools: list[dict] | None, template: str
) -> tuple[int, int]:
    """Where in the rendered chat the assistant's turn behind `before` begins and ends."""
    shorter = render_chat(tokenizer, before, tools, answer_next=False)
    if not full.startswith(shorter):
        raise DataError(
            f"{template} writes earlier turns anew once message {len(before)} follows; keep the "
            "last question's turns alone, or use another model"
        )
    opened = render_chat(tokenizer, before, tools, answer_next=True)[len(shorter) :]
    header = os.path.commonprefix([full[len(shorter) :], opened])
    if "</think>" not in header:  # a block that the template opens is left to the model
        header = header.partition("<think>")[0]
    begin = len(shorter) + len(header)
    ends = tokenizer.convert_ids_to_tokens(eos_token_ids(tokenizer))
    found = [place + len(end) for end in ends if (place := full.find(end, begin)) >= 0]
    if not header.strip() or not found:
        raise DataError(
            f"{template} gives an assistant's turn no header, or does not end it with "
            f"{' or '.join(ends)}; use a ChatML model"
        )
    return begin, min(found)


def _template_form(messages: list[dict], tokenizer, location: str) -> list[dict]:
    """Messages as templates take them: arguments as mappings, nothing that would end a turn.

    The model's own text keeps added tokens that are not special, like `<think>`: it can write them.
    """
    control, added, chat = control_strings(tokenizer), special_strings(tokenizer), []
    for message in messages:
        own = message["role"] == "assistant"
        keys = ("role", "content", "reasoning_content")
        out = {key: message[key] for key in keys if key in message}
        if own:
            out["content"] = without_eos(tokenizer, message["content"])
        if message.get("tool_calls"):
            out["tool_calls"] = mapped_calls(message, location)
        chat.append(defuse_message(out, control if own else added))
    return chat


def _check_turn(turn: str, message: dict, template: str) -> None:
    """DataError where a rendered turn lacks what its message holds: it would not be trained."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    thoughts = message.get("reasoning_content", "")
    wanted = {"content": [message["content"]], "reasoning_content": [thoughts], "tool_calls": calls}
    shown = "".join(turn.split())
    for key, texts in wanted.items():
        if not all("".join(text.split()) in shown for text in texts):
            way = "use a model whose template writes it"
            if key == "reasoning_content":
                way = "put it in front of content, between <think> and </think>"
            raise DataError(f"{template} leaves out the {key} of an assistant's turn; {way}")


# ---------------------------------------------------------------------------------------- choose


def succeeded(row: dict, rule: Rule) -> bool:
    """EM = 1, or F1 >= 0.8; not of a row that failed technically or has no scores."""
    score = (row.get("metric_score") or {}).get(rule) or 0
    return score >= (1 if rule == "em" else F1_SUCCESS) and not row.get("error")


def tool_calls(row: dict) -> int:
    """Calls over all of a trajectory's assistant messages."""
    return sum(len(m.get("tool_calls") or ()) for m in row["messages"])


def rounds(row: dict) -> int:
    """Turns of the model."""
    return row.get("rounds") or sum(m["role"] == "assistant" for m in row["messages"])


def question_type(row: dict) -> str:
    """`metadata.question_type` or `metadata.type` of the question; "" where it is not known."""
    metadata = row.get("metadata") or {}
    return str(metadata.get("question_type") or metadata.get("type") or "")


CLASSES = {"rounds": rounds, "tool_calls": tool_calls, "type": question_type}


def balance(rows: list[dict], by: str, cap: int, seed: int = 0) -> list[dict]:
    """At most `cap` rows of each class (CLASSES), drawn with the seed; the order is kept."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(CLASSES[by](row), []).append(i)
    draw = random.Random(seed)
    kept: set[int] = set()
    for _, members in sorted(groups.items()):
        kept.update(draw.sample(members, min(cap, len(members))))
    return [row for i, row in enumerate(rows) if i in kept]


def first_of_each(rows: list[dict], count: int) -> list[dict]:
    """At most `count` rows of a question, the first ones."""
    taken: Counter[str] = Counter()
    out = []
    for row in rows:
        key = question_key(row)
        taken[key] += 1
        if taken[key] <= count:
            out.append(row)
    return out


def question_key(row: dict) -> str:
    """What tells questions apart: the question's id, else what the first user message asks."""
    if row.get("id") not in (None, ""):
        return str(row["id"])
    return str(
        next((m["content"] for m in row["messages"] if m["role"] == "user"), row["rollout_id"])
    )


# ---------------------------------------------------------------------------------------- export


KEYS = ("role", "tool_call_id", "content", "tool_calls", "weight")


def to_openai(row: dict) -> dict:
    """{"messages", "tools"} of OpenAI's fine-tuning form; thoughts stay in the content."""
    messages = []
    for m in row["messages"]:
        m = m | {"content": _content(m)}
        messages.append({key: m[key] for key in KEYS if m.get(key) is not None})
    return {"messages": messages} | ({"tools": row["tools"]} if row["tools"] else {})


def to_swift(row: dict) -> dict:
    """{"messages", "tools"} as ms-swift reads them: a `tool_call` message a call, tools as text."""
    messages = []
    for m in row["messages"]:
        loss = {"loss": False} if m.get("weight") == 0 else {}
        calls = mapped_calls(m, str(row.get("rollout_id"))) if m.get("tool_calls") else []
        content = _content(m)
        if content or not calls:
            messages.append({"role": m["role"], "content": content} | loss)
        for call in calls:
            text = json.dumps(call["function"], ensure_ascii=False)
            messages.append({"role": "tool_call", "content": text} | loss)
    tools = {"tools": json.dumps(row["tools"], ensure_ascii=False)} if row["tools"] else {}
    return {"messages": messages} | tools


def _content(message: dict) -> str:
    """A message's content with its thoughts, without the call that `tool_calls` holds as well."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if message.get("tool_calls"):
        query = content.rfind("<search>", 0, max(content.rfind("</search>"), 0))
        content = (content[:query] if query >= 0 else before_calls(content)).rstrip()
    if not thoughts or "<think>" in content:
        return content
    return f"<think>\n{thoughts}\n</think>\n\n{content}".rstrip()
