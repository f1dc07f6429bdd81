"""Trajectories on disk: read three forms, turn them into training rows, choose among them, export them.

A file of its own because two entry points need it: report.py counts, filters and exports what sft.py trains on.

A trajectory is a JSONL row with `messages` in OpenAI's form: roles system, user, assistant (`content`, and
`tool_calls` whose `arguments` are JSON text) and tool; `tools` are the functions' JSON schemas.  Beside them stand the
fields that infer.py writes (rollout_id, id, question, golden_answers, pred, rounds, metric_score, …: episode.py).
ms-swift's form is read too: messages of role `tool_call` (content {"name", "arguments"}), `tools` as JSON text.

What is trained of one: the assistant's texts, its calls and the end of each of its turns.  Not: headers, the newline
behind a turn, prompts, results of tools, turns with `weight` 0 (OpenAI) or `loss` false (ms-swift).
"""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any, Literal

import data
from data import DataError
from prompts import (control_strings, defuse, eos_token_ids, render_chat, special_strings,
                     spell_tools, without_eos)

Rule = Literal["em", "f1"]
F1_SUCCESS = 0.8  # DeepSearch-RL's
RESULT = re.compile(r"(?<=</search>)\s*<(result|information)>.*?</\1>", re.DOTALL)  # inside an assistant's text


# ---------------------------------------------------------------------------------------------------------------- read

def holds_trajectories(path: str) -> bool:
    """Does the first row of a JSONL file have `messages`?"""
    return next(("messages" in row for _, row in data.read_jsonl(path)), False)


def read_trajectories(path: str) -> list[dict]:
    """The rows of a trajectory file, messages and tools in OpenAI's form; DataError names file, line and reason."""
    rows, seen = [], set()
    for number, row in data.read_jsonl(path):
        where = f"{path}:{number}"
        row = {"rollout_id": f"line {number}"} | row
        if not isinstance(row["rollout_id"], str | int):
            raise DataError(f"{where}: rollout_id is {str(row['rollout_id'])[:60]}; it must be a string")
        row |= {"tools": _tools(row.get("tools"), where), "messages": _messages(row.get("messages"), where)}
        if row["rollout_id"] in seen:
            raise DataError(f"{where}: rollout_id {row['rollout_id']!r} occurs a second time; every rollout needs its "
                            "own")
        seen.add(row["rollout_id"])
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no trajectories; the file is empty: give one with a trajectory a line (of a report's "
                        "successes: none succeeded)")
    return rows


def _json(text: Any, what: str, where: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as e:
        raise DataError(f"{where}: {what} is not valid JSON ({e}): {text[:80]!r}") from e


def _tools(tools: Any, where: str) -> list[dict]:
    tools = _json(tools, "tools", where) or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and isinstance(t.get("function"), dict)
                                              and t["function"].get("name") for t in tools):
        raise DataError(f'{where}: tools must be a list of {{"type": "function", "function": {{"name", …}}}}, or its '
                        f"JSON text, not {str(tools)[:80]}")
    return tools


def _messages(messages: Any, where: str) -> list[dict]:
    """Messages in OpenAI's form; ms-swift's `tool_call` messages join the assistant's message before them."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str)
                                                 and isinstance(m.get("content"), str | None) for m in messages):
        raise DataError(f"{where}: messages must be a list of messages with role and content (text), not "
                        f"{str(messages)[:80]}")
    out: list[dict] = []
    for m in messages:
        role = {"tool_response": "tool"}.get(m["role"], m["role"])
        if role == "tool_call":
            call = _json(m["content"], "a tool_call", where)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise DataError(f"{where}: a tool_call must hold a name and arguments, not {str(m['content'])[:80]}")
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": ""})
            calls = out[-1].setdefault("tool_calls", [])
            calls.append({"id": f"call_{len(out)}_{len(calls)}", "type": "function", "function": {
                "name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}})
        elif role in ("system", "user", "assistant", "tool"):
            if m.get("function_call"):
                raise DataError(f"{where}: a message has function_call, a form that is no longer used; write tool_calls")
            thought = next((m[key] for key in ("reasoning_content", "reasoning", "thinking") if m.get(key)), None)
            out.append(m | {"role": role, "content": m.get("content") or ""}
                       | ({"reasoning_content": thought} if thought else {}))
        else:
            raise DataError(f"{where}: a message of role {m['role']!r}; roles are system, user, assistant and tool")
    for m in out[:-1]:
        if m["role"] == "assistant" and is_blank(m):
            raise DataError(f"{where}: an assistant's message in the middle is empty; take it out, or cut the chat there")
    for m in out:
        for key in ("weight", "loss"):  # OpenAI's and ms-swift's word for a turn that is not trained
            if m.get(key) not in (None, 0, 1):
                raise DataError(f"{where}: {key} of a message is {str(m[key])[:40]!r}; it is 1 or 0, true or false")
    first = next((i for i, m in enumerate(out) if m["role"] == "assistant"), None)
    if not first:
        raise DataError(f"{where}: messages must run from a question to an assistant's answer; the roles are "
                        f"{[m['role'] for m in out]}")
    return out


def is_blank(message: dict) -> bool:
    """Has an assistant's message nothing that could be trained?"""
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


# -------------------------------------------------------------------------------------------------------------- encode

def encode(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a trajectory: infer.py's rows by their sampled texts, others by the template.

    DataError: a template that leaves out what would be trained, or writes earlier turns anew.
    """
    from episodes.episode import encode_trajectory  # needs torch

    if row.get("task") in ("search", "agent") and all("text" in m for m in row["messages"] if m["role"] == "assistant"):
        return encode_trajectory(tokenizer, row)
    return encode_messages(tokenizer, row["messages"], row["tools"], str(row.get("rollout_id")))


def encode_messages(tokenizer, messages: list[dict], tools: list[dict], where: str) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a chat in the tokenizer's template.

    Where an assistant's turn begins is found by rendering what comes before it, where it ends by the EOS behind it.
    Each stretch is encoded alone, as rollouts are, so no token spans a border.  It is checked that the whole chat
    begins with every shorter one and that every text, call and thought stands in its turn.
    """
    from episodes.episode import template_knows_tools  # needs torch

    chat = _template_form(messages, tokenizer, where)
    written = iter([m for m in chat if m["role"] == "assistant"])
    trained = iter([int(m.get("weight") != 0 and m.get("loss") != 0) for m in messages if m["role"] == "assistant"])
    native = not tools or template_knows_tools(tokenizer, tools)
    if not native:
        chat = chat if chat[0]["role"] == "system" else [{"role": "system", "content": ""}, *chat]
        chat = spell_tools(chat, tools)
    shown = tools if tools and native else None
    full = render_chat(tokenizer, chat, shown, answer_next=False)
    ends = tokenizer.convert_ids_to_tokens(eos_token_ids(tokenizer))
    ids, mask, at = [], [], 0

    def append(text: str, label: int) -> None:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        ids.extend(tokens)
        mask.extend([label] * len(tokens))

    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render_chat(tokenizer, chat[:i], shown, answer_next=False)
        if not full.startswith(before):
            raise DataError(f"{where}: the chat template of {tokenizer.name_or_path} writes earlier turns anew once "
                            f"message {i} follows; keep the last question's turns alone, or use another model")
        opened = render_chat(tokenizer, chat[:i], shown, answer_next=True)[len(before):]
        header = os.path.commonprefix([full[len(before):], opened])
        if "</think>" not in header:  # a block that the template opens is left to the model, as in rollouts
            header = header.partition("<think>")[0]
        begin = len(before) + len(header)
        found = [place + len(end) for end in ends if (place := full.find(end, begin)) >= 0]
        if not header.strip() or not found:
            raise DataError(f"{where}: in the chat template of {tokenizer.name_or_path} an assistant's turn has no "
                            f"header or does not end with {' or '.join(ends)}; use a ChatML model")
        turn = full[begin:min(found)]
        _check_turn(turn, next(written), f"{where}: the chat template of {tokenizer.name_or_path}")
        append(full[at:begin], 0)
        inner, own = 0, next(trained)
        for result in RESULT.finditer(turn):  # of a `search` trajectory, shown to the model inside its one turn
            append(turn[inner:result.start()], own)
            append(result.group(), 0)
            inner = result.end()
        append(turn[inner:], own)
        at = min(found)
    return ids, mask[1:]


def _template_form(messages: list[dict], tokenizer, where: str) -> list[dict]:
    """Messages as chat templates take them: calls with arguments as a mapping, nothing in them that would end a turn.

    The model's own text keeps added tokens that are not special, `<think>` and its like: it can write them.
    """
    control, added, chat = control_strings(tokenizer), special_strings(tokenizer), []
    for message in messages:
        model = message["role"] == "assistant"
        special = control if model else added
        out = {key: defuse(message[key], special) for key in ("role", "reasoning_content")
               if isinstance(message.get(key), str)}
        content = without_eos(tokenizer, message["content"]) if model else message["content"]
        out["content"] = defuse(content, special)
        if calls := message.get("tool_calls"):
            out["tool_calls"] = []
            for call in calls:
                function = call.get("function") or {}
                arguments = _json(function.get("arguments", {}), "the arguments of a call", where)
                if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
                    raise DataError(f"{where}: a tool call needs a name and a mapping of arguments, not {str(call)[:80]}")
                arguments = json.loads(defuse(json.dumps(arguments, ensure_ascii=False), special))
                out["tool_calls"].append({"type": "function",
                                          "function": {"name": function["name"], "arguments": arguments}})
        chat.append(out)
    return chat


def _check_turn(turn: str, message: dict, template: str) -> None:
    """DataError where a turn as rendered lacks what its message holds: it would be trained without it, unnoticed."""
    def squeeze(text: str) -> str:
        return "".join(text.split())

    wanted = {"content": [message["content"]], "reasoning_content": [message.get("reasoning_content", "")],
              "tool_calls": [call["function"]["name"] for call in message.get("tool_calls", [])]}
    for key, texts in wanted.items():
        if not all(squeeze(text) in squeeze(turn) for text in texts):
            way = ("put it in front of content, between <think> and </think>" if key == "reasoning_content"
                   else "use a model whose template writes it")
            raise DataError(f"{template} leaves out the {key} of an assistant's turn; {way}")


# -------------------------------------------------------------------------------------------------------------- choose

def succeeded(row: dict, rule: Rule) -> bool:
    """EM = 1, or F1 >= 0.8; a row that failed for a technical reason, or without scores, has not."""
    score = row.get("metric_score") or {}
    return not row.get("error") and ((score.get(rule) or 0) >= (1 if rule == "em" else F1_SUCCESS))


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
    """At most `cap` rows of each number of rounds, of tool calls, or type: drawn with the seed, the order is kept."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(CLASSES[by](row), []).append(i)
    draw = random.Random(seed)
    kept = {i for _, members in sorted(groups.items()) for i in draw.sample(members, min(cap, len(members)))}
    return [row for i, row in enumerate(rows) if i in kept]


def first_of_each(rows: list[dict], count: int) -> list[dict]:
    """At most `count` rows of a question, the first ones."""
    taken: dict[str, int] = {}
    out = []
    for row in rows:
        key = question_key(row)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= count:
            out.append(row)
    return out


def question_key(row: dict) -> str:
    """What tells questions apart: the question's id, else what the first user message asks."""
    if row.get("id") not in (None, ""):
        return str(row["id"])
    return str(next((m["content"] for m in row["messages"] if m["role"] == "user"), row["rollout_id"]))


# -------------------------------------------------------------------------------------------------------------- export

def to_openai(row: dict) -> dict:
    """{"messages", "tools"} of OpenAI's fine-tuning form: thoughts stay in the content, nothing of ours beside it."""
    keys = {"system": ("role", "content"), "user": ("role", "content"), "tool": ("role", "tool_call_id", "content"),
            "assistant": ("role", "content", "tool_calls")}
    messages = []
    for m in row["messages"]:
        m = m | {"content": _spoken(m)}
        messages.append({key: m[key] for key in keys[m["role"]] if m.get(key) is not None})
    return {"messages": messages} | ({"tools": row["tools"]} if row["tools"] else {})


def to_swift(row: dict) -> dict:
    """{"messages", "tools"} as ms-swift reads them: a `tool_call` message a call, `tools` as JSON text."""
    messages = []
    for m in row["messages"]:
        calls = [json.dumps({"name": c["function"]["name"],
                             "arguments": _json(c["function"]["arguments"], "the arguments of a call",
                                                str(row.get("rollout_id")))}, ensure_ascii=False)
                 for c in m.get("tool_calls") or ()]
        spoken = _spoken(m)
        if spoken or not calls:
            messages.append({"role": m["role"], "content": spoken})
        messages += [{"role": "tool_call", "content": call} for call in calls]
    return {"messages": messages} | ({"tools": json.dumps(row["tools"], ensure_ascii=False)} if row["tools"] else {})


def _spoken(message: dict) -> str:
    """A message's content with its thoughts, without the call that stands beside it as `tool_calls`."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if message.get("tool_calls"):
        content = content.partition("<tool_call>")[0].partition("<search>")[0].rstrip()
    return content if not thoughts or "<think>" in content else f"<think>\n{thoughts}\n</think>\n\n{content}".rstrip()
