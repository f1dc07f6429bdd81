"""Instructions, chat prompts, their encoding, and loss masks.

Our prompts differ from the paper's (arXiv 2505.15776, Fig. 6 and 7) and start with their fixed part
for prefix caching.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from typing import Iterable

import jinja2

from data import DataError, Turn, one_line, read_jsonl, read_lines

INSTRUCTION = """\
Rewrite the last question of a conversation so that a search engine understands it without the \
conversation.
First think: say in a few words what every pronoun and every left-out part of the question stands \
for.
Then write one complete question that means the same and names everything it asks about.
Answer in exactly this form:
<think>what the question refers to</think>
<rewrite>the complete question</rewrite>"""


def read_instruction(path: str, default: str = "") -> str:
    """The text of a file (DataError if empty); without a path, `default` or INSTRUCTION."""
    if not path:
        return default or INSTRUCTION
    text = "\n".join(line for _, line in read_lines(path)).strip()
    if not text:
        raise DataError(f"{path}: the instruction is empty; say what the model is to do")
    return text


def rewrite_prompt(turn: Turn, instruction: str = "") -> str:
    """The zero-shot user message (Fig. 7)."""
    return few_shot_prompt(turn, [], instruction)[0]["content"]


def few_shot_prompt(turn: Turn, examples: list[Turn], instruction: str = "") -> list[dict]:
    """The few-shot chat (Fig. 6). Unlike in the paper, each example is a turn: small models then
    keep to the form."""
    messages = []
    for shown in [*examples, turn]:
        lines = ["Conversation:"] if shown.context else ["Conversation:", "(nothing yet)"]
        for i, (question, answer) in enumerate(shown.context, 1):
            lines += [f"Q{i}: {one_line(question)}", f"A{i}: {one_line(answer)}"]
        lines.append(f"Question: {one_line(shown.question)}")
        messages.append({"role": "user", "content": "\n".join(lines)})
        messages.append({"role": "assistant", "content": shown.response})
    messages[0]["content"] = f"{instruction or INSTRUCTION}\n\n{messages[0]['content']}"
    return messages[:-1]


def response_text(think: str, rewrite: str) -> str:
    """The canonical response: think block, newline, rewrite block."""
    return f"<think>{think.strip()}</think>\n<rewrite>{rewrite.strip()}</rewrite>"


def read_examples(path: str) -> list[Turn]:
    """Few-shot examples from JSONL rows with context, question, think and rewrite."""
    examples = []
    for number, row in read_jsonl(path):
        name, think, rewrite = f"example-{number}", row.text("think"), row.text("rewrite")
        if not rewrite.strip() or re.search("</?(think|rewrite)>", think + rewrite):
            raise row.error(
                f"think is {think[:60]!r}, rewrite {rewrite[:60]!r}: the rewrite must "
                "not be empty, and neither may hold tags"
            )
        asked, response = (row.context(), row.question()), response_text(think, rewrite)
        examples.append(Turn(name, name, number, *asked, [], response=response))
    if not examples:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return examples


# Instructions of `search` (after arXiv 2503.19470) and `agent`

SEARCH_RULES = """by thinking and by searching an encyclopedia.
Thoughts stand between <think> and </think>: what is known, and what has to be found next.
A search query stands between <search> and </search>: a few words, one thing at a time.
What the search finds is then shown between <result> and </result>, which only the search engine \
writes.
Thinking and searching go on until the answer is known; it stands between <answer> and </answer>.
Inside it the exact answer alone, a name, a date, a number, yes or no, is put into \\boxed{} with \
latex format.
The form is: <think>…</think> <search>…</search> <result>…</result> <think>…</think>
<answer>The answer is \\[ \\boxed{exact answer} \\]</answer>"""
SEARCH_INSTRUCTION = "You answer a question " + SEARCH_RULES
SEARCH_DIALOGUE = "A user asks an assistant, who answers " + SEARCH_RULES

AGENT_INSTRUCTION = """\
You answer questions with the help of a tool that searches a collection of passages; rely on what \
the passages say.
Ask it for one thing at a time, in a few words.  A question often takes several steps: find the \
first thing, then use what you found to ask for the next.  If a search does not help, ask in other \
words.
When you know the answer, write it between <answer> and </answer>: only a name, a date, a number, \
yes or no."""

TOOLS_INSTRUCTION = """\
# Tools

Each line between <tools> and </tools> describes a function that you may call:
<tools>
{schemas}
</tools>

To call one, write {how}:
{form}
Its result is then shown to you between <tool_response> and </tool_response>."""

CALL_FORM = '{"name": "…", "arguments": {…}}'


def search_text(messages: list[dict]) -> str:
    """A `search` chat as text, for a model without a chat template."""
    labels = {"system": "", "user": "\nUser: "}
    parts = [labels.get(m["role"], f" {m['role'].title()}: ") + m["content"] for m in messages]
    return "".join(parts) + " Assistant:"


def spell_tools(messages: list[dict], tools: list[dict], bare: bool = False) -> list[dict]:
    """A chat for templates without tools: schemas join the system message, calls become text,
    results user messages. bare: calls have no tags."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = "nothing but this, on one line" if bare else "its name and its arguments as JSON"
    form = CALL_FORM if bare else f"<tool_call>\n{CALL_FORM}\n</tool_call>"
    out: list[dict] = []
    for m in messages:
        role, content = m["role"], m["content"]
        if role == "system":
            content += "\n\n" + TOOLS_INSTRUCTION.format(schemas=schemas, how=how, form=form)
        elif role == "assistant":
            content = turn_text(m, bare)
        elif role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if out[-1]["role"] == "user":  # results of parallel calls share a turn
                content = out.pop()["content"] + "\n" + content
        out.append({"role": role, "content": content})
    return out


def call_text(name: str, arguments: dict, bare: bool = False) -> str:
    """A call as JSON in hermes tags; bare: without tags."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return text if bare else f"<tool_call>\n{text}\n</tool_call>"


def thoughts_and_content(message: dict) -> str:
    """An assistant message's thoughts and content, without calls."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if message.get("tool_calls"):
        content = before_calls(content).rstrip()
    if not thoughts or "<think>" in content:
        return content
    return f"<think>\n{thoughts}\n</think>\n\n{content}".rstrip()


def turn_text(message: dict, bare: bool = False) -> str:
    """An assistant message as text: thoughts, content and calls."""
    content = thoughts_and_content(message)
    calls = [call_text(**call["function"], bare=bare) for call in message.get("tool_calls", [])]
    return "\n".join([content, *calls] if content else calls)


def outside_thoughts(text: str) -> str:
    """`text` without think blocks, even unclosed or opened by the prompt."""
    opened, closing, rest = text.partition("</think>")
    text = rest if closing and "<think>" not in opened else text
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)


def before_calls(text: str) -> str:
    """`text` up to the first call outside think blocks."""
    said = r"(?:<think>.*?(?:</think>|\Z)|(?!<tool_call>|<search>).)*"
    return re.match(said, text, re.DOTALL).group()


TEMPLATE_DATE = "01 Jan 2025"  # some templates (Llama 3) print today's date
FORM_TAGS = {
    f"<{slash}{name}>"
    for name in ("think", "rewrite", "search", "result", "answer")
    for slash in ("", "/")
}


def special_strings(tokenizer) -> list[str]:
    """All added tokens, special or not."""
    # all_special_tokens lacks Llama 3's headers
    added = tokenizer.added_tokens_decoder.values()
    return sorted({*tokenizer.all_special_tokens, *(t.content for t in added)})


def control_strings(tokenizer) -> list[str]:
    """All special tokens except FORM_TAGS."""
    added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return sorted({*tokenizer.all_special_tokens, *added} - FORM_TAGS)


def defuse(text: str, special: Iterable[str]) -> str:
    """Puts a space into special tokens, so that data can't end a turn."""
    for token in special:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def render_chat(
    tokenizer, messages: list[dict], tools: list[dict] | None = None, answer_next: bool = True
) -> str:
    """Applies the chat template to defused messages. DataError if it is missing or refuses."""
    model, special = tokenizer.name_or_path, control_strings(tokenizer)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {model} has no chat template; use an instruct model, or add the "
            "file chat_template.jinja"
        )
    # a macro: transformers passes no functions of ours to templates
    pinned = f"{{% macro strftime_now(form) %}}{TEMPLATE_DATE}{{% endmacro %}}\n"
    try:
        return tokenizer.apply_chat_template(
            [m | {"content": defuse(m["content"], special)} for m in messages],
            tools=tools,
            chat_template=pinned + tokenizer.get_chat_template(tools=tools),
            tokenize=False,
            add_generation_prompt=answer_next,
            date_string=TEMPLATE_DATE,
            enable_thinking=False,
        )
    except jinja2.TemplateError as e:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"the chat template of {model} refuses these messages ({roles}): {e}; use another model"
        ) from e


def template_knows_tools(tokenizer, schemas: list[dict]) -> bool:
    """Whether the chat template writes tool schemas and results."""
    roles = {"user": "u", "assistant": "a", "tool": "t7t"}
    chat = [{"role": role, "content": content} for role, content in roles.items()]
    try:
        plain, text = render_chat(tokenizer, chat[:1]), render_chat(tokenizer, chat, schemas)
    except DataError as e:
        if not tokenizer.chat_template:
            raise
        print(f"tools go into the system message: {e}", file=sys.stderr)
        return False
    names = [schema["function"]["name"] for schema in schemas]
    return all(text.count(name) > plain.count(name) for name in [*names, "t7t"])


def answer_header(tokenizer) -> str:
    """The text that the template puts before an answer."""
    chat = [{"role": "user", "content": "u"}]
    asked = render_chat(tokenizer, chat, answer_next=False)
    return render_chat(tokenizer, chat).removeprefix(asked)


def render_around(
    tokenizer, messages: list[dict], tools: list[dict] | None = None, answer_next: bool = True
) -> list[str]:
    """The rendered text before each assistant turn and after the last. Placeholders stand for the
    turns, as some templates cut thoughts. DataError if one gets lost."""
    chat, marks = [], []
    for m in messages:
        if m["role"] == "assistant":
            marks.append(secrets.token_hex(16))
            m = {"role": "assistant", "content": marks[-1]}
        chat.append(m)
    text = render_chat(tokenizer, chat, tools, answer_next)
    pieces = re.split("|".join(marks), text) if marks else [text]
    if len(pieces) != len(marks) + 1:
        raise _left_out(tokenizer, "assistant")
    return pieces


def _left_out(tokenizer, role: str) -> DataError:
    return DataError(
        f"the chat template of {tokenizer.name_or_path} leaves out the message of role {role}, or "
        "repeats it; use another model"
    )


def encode_chat(tokenizer, chat: str | list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of a text or chat; BOS as in the template. DataError if it drops a message."""
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    special = control_strings(tokenizer)
    turns = [defuse(turn_text(m), special) for m in chat if m["role"] == "assistant"]
    pieces = render_around(tokenizer, chat, tools)
    text = "".join(piece + turn for piece, turn in zip(pieces, [*turns, ""]))
    shown = "".join(text.split())
    others = [m for m in chat if m["role"] != "assistant"]
    lost = [m for m in others if "".join(defuse(m["content"], special).split()) not in shown]
    if 0 < len(lost) < len(others):  # all: a constant template, on purpose
        raise _left_out(tokenizer, lost[0]["role"])
    return tokenizer(without_opened_think(text), add_special_tokens=False)["input_ids"]


def without_opened_think(text: str) -> str:
    """`text` without a final `<think>`: the model then writes both tags."""
    return re.sub(r"<think>\s*\Z", "", text)


def encode_text(tokenizer, text: str) -> list[int]:
    """Token ids without a template; BOS if the tokenizer adds it, no EOS."""
    ids = tokenizer(defuse(text, control_strings(tokenizer)))["input_ids"]
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def eos_token_ids(tokenizer, generation_config=None) -> list[int]:
    """Ids that end a response: the tokenizer's, then the generation config's."""
    listed = getattr(generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    ids = [i for i in dict.fromkeys(ids) if i is not None]
    if not ids:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no EOS token: responses never end; set "
            "eos_token"
        )
    return ids


def pad_token_id(tokenizer, eos_ids: list[int], vocabulary: int | None = None) -> int:
    """The pad id, or EOS if it is missing or not below `vocabulary`."""
    pad = tokenizer.pad_token_id
    return eos_ids[0] if pad is None or (vocabulary is not None and pad >= vocabulary) else pad


def decode_response(tokenizer, response_ids: list[int]) -> str:
    """Decodes without special tokens, except FORM_TAGS."""
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    kept = [i for i in response_ids if special.get(i, "<think>") in FORM_TAGS]
    return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def without_eos(tokenizer, text: str) -> str:
    """`text` without EOS at its end."""
    while tokenizer.eos_token and text.rstrip().endswith(tokenizer.eos_token):
        text = text.rstrip().removesuffix(tokenizer.eos_token)
    return text


def encode_example(
    tokenizer, prompt_ids: list[int], response: str, eos_id: int
) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a prompt and its separately encoded response with EOS."""
    response = defuse(without_eos(tokenizer, response), control_strings(tokenizer))
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [eos_id]
    return prompt_ids + response_ids, [0] * (len(prompt_ids) - 1) + [1] * len(response_ids)
