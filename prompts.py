"""Instructions, chats, chat encoding and loss masks.

Prompts are ours, not the paper's (arXiv 2505.15776, Fig. 6 and 7): what never changes stands first,
so that an engine computes it once for all prompts; the history is numbered question/answer pairs,
oldest first, answers included.
"""

from __future__ import annotations

import json
import re
from typing import Iterable

import jinja2

from data import DataError, Turn, _context, _question, _text, one_line, read_jsonl, read_lines

INSTRUCTION = """\
Rewrite the last question of a conversation so that a search engine understands it without the \
conversation.
First think: say in a few words what every pronoun and every left-out part of the question stands \
for.
Then write one complete question that means the same and names everything it asks about.
Answer in exactly this form:
<think>what the question refers to</think>
<rewrite>the complete question</rewrite>"""


def _conversation(context: list[tuple[str, str]], question: str) -> str:
    """The history as numbered pairs (`Q1: …`, `A1: …`), then the question."""
    lines = ["Conversation:"] + ["(nothing yet)"] * (not context)
    for i, pair in enumerate(context, 1):
        lines += [f"{label}{i}: {one_line(text)}" for label, text in zip("QA", pair)]
    return "\n".join([*lines, f"Question: {one_line(question)}"])


def read_instruction(path: str) -> str:
    """The instruction in a text file; of the rewrite task by default."""
    if not path:
        return INSTRUCTION
    text = "\n".join(line for _, line in read_lines(path)).strip()
    if not text:
        raise DataError(f"{path}: the instruction is empty; say what the model is to do")
    return text


def rewrite_prompt(turn: Turn, instruction: str = "") -> str:
    """The zero-shot user message of the task `rewrite` (the paper's Fig. 7)."""
    return f"{instruction or INSTRUCTION}\n\n{_conversation(turn.context, turn.question)}"


def response_text(think: str, rewrite: str) -> str:
    """The canonical response: a think block, a newline, a rewrite block."""
    return f"<think>{think.strip()}</think>\n<rewrite>{rewrite.strip()}</rewrite>"


def few_shot_prompt(turn: Turn, examples: list[Turn], instruction: str = "") -> list[dict]:
    """The self-distillation chat (Fig. 6): the instruction once, then each example as a turn.

    An example is a Turn with a `response`. The paper shows its example inside one message; as turns
    of the chat a small model keeps the form far more often (SmolLM2-135M copies them otherwise).
    """
    messages = []
    for example in examples:
        messages += [
            {"role": "user", "content": _conversation(example.context, example.question)},
            {"role": "assistant", "content": example.response},
        ]
    messages.append({"role": "user", "content": _conversation(turn.context, turn.question)})
    messages[0]["content"] = f"{instruction or INSTRUCTION}\n\n{messages[0]['content']}"
    return messages


def read_examples(path: str) -> list[Turn]:
    """Few-shot examples: JSONL with context, question, think and rewrite."""
    examples = []
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        think, rewrite = _text(row, "think", location), _text(row, "rewrite", location)
        if not rewrite.strip() or re.search("</?(think|rewrite)>", think + rewrite):
            raise DataError(
                f"{location}: think is {think[:60]!r}, rewrite {rewrite[:60]!r}: the rewrite must "
                "not be empty, and neither may hold the tags that are put around them"
            )
        context, question = _context(row, location), _question(row, location)
        response = response_text(think, rewrite)
        name = f"example-{number}"
        examples.append(Turn(name, name, number, context, question, [], response=response))
    if not examples:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return examples


# `search` (arXiv 2503.19470) and `agent`: what those systems tell their models, in our own words.

SEARCH_RULES = """
Thoughts stand between <think> and </think>: what is known, and what has to be found next.
A search query stands between <search> and </search>: a few words, one thing at a time.
What the search finds is then shown between <result> and </result>, which only the search engine \
writes.
Thinking and searching go on until the answer is known; it stands between <answer> and </answer>.
Inside it the exact answer alone, a name, a date, a number, yes or no, is put into \\boxed{} with \
latex format.
The form is: <think>…</think> <search>…</search> <result>…</result> <think>…</think>
<answer>The answer is \\[ \\boxed{exact answer} \\]</answer>"""
SEARCH_START = "You answer a question by thinking and by searching an encyclopedia."
DIALOGUE_START = (
    "A user asks an assistant, who answers by thinking and by searching an encyclopedia."
)
SEARCH_INSTRUCTION, SEARCH_DIALOGUE = SEARCH_START + SEARCH_RULES, DIALOGUE_START + SEARCH_RULES

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


def question_messages(
    question: str, examples: Iterable[list[dict]], instruction: str
) -> list[dict]:
    """A chat: the instruction as the system message, few-shot conversations, the bare question."""
    shown = [message for example in examples for message in example]
    system = {"role": "system", "content": instruction}
    return [system, *shown, {"role": "user", "content": one_line(question)}]


def search_text(
    question: str, examples: Iterable[list[dict]] = (), instruction: str = SEARCH_DIALOGUE
) -> str:
    """The `search` prompt of a model without a chat template: it ends in `Assistant:`."""
    shown = [" ".join(f"{m['role'].capitalize()}: {m['content']}" for m in e) for e in examples]
    return "\n".join([instruction, *shown, f"User: {one_line(question)} Assistant:"])


def spell_tools(messages: list[dict], tools: list[dict], bare: bool = False) -> list[dict]:
    """A chat for a template without tools: schemas in the system message, calls in texts.

    Results become user messages. bare: calls are the JSON alone, without tool_call tags.
    """
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = "nothing but this, on one line" if bare else "its name and its arguments as JSON"
    form = CALL_FORM if bare else f"<tool_call>\n{CALL_FORM}\n</tool_call>"
    out: list[dict] = []
    for m in messages:
        content = m["content"]
        if m["role"] == "system":
            content += "\n\n" + TOOLS_INSTRUCTION.format(schemas=schemas, how=how, form=form)
        for call in m.get("tool_calls", []):
            text = call_json(call["function"]) if bare else tool_call_text(call["function"])
            content = (content + "\n" if content else "") + text
        if m["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if out[-1]["role"] == "user":  # parallel calls: their results share a turn
                out[-1]["content"] += "\n" + content
                continue
        out.append({"role": "user" if m["role"] == "tool" else m["role"], "content": content})
    return out


def call_json(function: dict) -> str:
    """A call as JSON, {"name", "arguments"}."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(call, ensure_ascii=False)


def tool_call_text(function: dict) -> str:
    """A call in the hermes form: its JSON between tool_call tags."""
    return f"<tool_call>\n{call_json(function)}\n</tool_call>"


def read_conversations(path: str) -> list[list[dict]]:
    """Few-shot examples of `search` and `agent`: JSONL {"messages"}, from a question to its answer.

    `search`: one user and one assistant message, results included. `agent`: assistant messages
    with `tool_calls` (name, and arguments as a mapping or its JSON), messages of role `tool`, and a
    last answer.
    """
    conversations = []
    for number, row in read_jsonl(path):
        location, messages = f"{path}:{number}", row.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            messages = []
        conversation = []
        for m in messages:
            calls = {"tool_calls": mapped_calls(m, location)} if m.get("tool_calls") else {}
            conversation.append(m | calls | ({"content": m.get("content") or ""} if calls else {}))
        roles = [m.get("role") for m in messages]
        texts = all(isinstance(m.get("content"), str) for m in conversation)
        if roles[:1] != ["user"] or roles[-1] != "assistant" or not texts:
            raise DataError(
                f"{location}: messages must run from a user's question to the assistant's answer, "
                f"each with role and content; the roles are {roles}"
            )
        conversations.append(conversation)
    if not conversations:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return conversations


def mapped_calls(message: dict, location: str) -> list[dict]:
    """A message's `tool_calls` as templates take them: OpenAI's form has arguments as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        try:
            name, arguments = call["function"]["name"], call["function"].get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise DataError(
                f"{location}: a tool call needs a function with a name and arguments, a mapping or "
                f"its JSON text, not {str(call)[:80]}"
            )
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def outside_thoughts(text: str) -> str:
    """A turn without its think blocks: closed, unclosed, or opened by the prompt."""
    opened, closing, rest = text.partition("</think>")
    text = rest if closing and "<think>" not in opened else text
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)


def before_calls(text: str) -> str:
    """A turn up to its first tool call outside of the thinking."""
    return re.match(r"(?:<think>.*?(?:</think>|\Z)|(?!<tool_call>).)*", text, re.DOTALL).group()


TEMPLATE_DATE = "01 Jan 2025"  # pinned: some templates (Llama 3) print today's date


def defuse(text: str, special: Iterable[str]) -> str:
    """`text` with special-token strings broken by a space: data never ends a turn."""
    for token in special:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def defuse_message(message: dict, special: Iterable[str]) -> dict:
    """`defuse` of a message's texts and of the arguments of its calls."""
    out = dict(message)
    for key in ("content", "reasoning_content"):
        if isinstance(out.get(key), str):
            out[key] = defuse(out[key], special)
    if out.get("tool_calls"):
        calls = json.dumps(out["tool_calls"], ensure_ascii=False)
        out["tool_calls"] = json.loads(defuse(calls, special))
    return out


def special_strings(tokenizer) -> list[str]:
    """Every string that the tokenizer makes one added token of, special or not."""
    # Llama 3's header tokens are special without a role, so all_special_tokens lacks them.
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return sorted({*tokenizer.all_special_tokens, *added})


FORM = ("think", "rewrite", "search", "result", "answer")
FORM_TAGS = {f"<{slash}{name}>" for name in FORM for slash in ("", "/")}


def control_strings(tokenizer) -> list[str]:
    """The added tokens that the tokenizer calls special, without the tags of responses."""
    added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return sorted({*tokenizer.all_special_tokens, *added} - FORM_TAGS)


def render_chat(
    tokenizer, chat: str | list[dict], tools: list[dict] | None = None, answer_next: bool = True
) -> str:
    """The text of a chat (a user's text, or messages) in the tokenizer's template.

    Special-token strings inside the texts are made harmless; the date is pinned. tools: JSON
    schemas of functions; assistant messages may then carry `tool_calls`, and messages of role
    `tool` hold results. DataError: a tokenizer without a chat template, or one that refuses such
    messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; use an instruct "
            "model, or add a chat_template.jinja to its folder"
        )
    special = control_strings(tokenizer)
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    # A macro, because transformers hands no function of ours on to a template.
    pinned = f"{{% macro strftime_now(form) %}}{TEMPLATE_DATE}{{% endmacro %}}\n"
    try:
        return tokenizer.apply_chat_template(
            [defuse_message(m, special) for m in chat],
            tools=tools,
            chat_template=pinned + tokenizer.get_chat_template(tools=tools),
            tokenize=False,
            add_generation_prompt=answer_next,
            date_string=TEMPLATE_DATE,
            enable_thinking=False,
        )
    except jinja2.TemplateError as e:
        roles = ", ".join(m["role"] for m in chat)
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} refuses these messages ({roles}): {e}; "
            "use a model whose template takes them"
        ) from e


def encode_chat(tokenizer, chat: str | list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of `render_chat`; the template writes BOS itself where the model wants one.

    What examples answered stands there as it is, although some templates cut the thoughts off
    earlier turns. DataError for a template that leaves out another message (the system's, say).
    """
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    special = control_strings(tokenizer)
    contents = [defuse(m["content"], special) for m in chat]
    mark = "\ue000"
    while any(mark in content for content in contents):  # a placeholder is in none of the texts
        mark += "\ue000"
    marks = [f"{mark}{i}\ue001" if m["role"] == "assistant" else None for i, m in enumerate(chat)]
    marked = [m | {"content": own} if own else m for m, own in zip(chat, marks)]
    text = render_chat(tokenizer, marked, tools)
    for own, content in zip(marks, contents):
        text = text.replace(own, content) if own else text
    if len(chat) > 1:
        shown = "".join(text.split())
        lost = [m for m, content in zip(chat, contents) if "".join(content.split()) not in shown]
        if 0 < len(lost) < len(chat):  # all: a template that is a constant, on purpose
            raise DataError(
                f"the chat template of {tokenizer.name_or_path} leaves out the message of role "
                f"{lost[0]['role']} ({lost[0]['content'][:40]!r}…); use a model whose template "
                "writes it"
            )
    return tokenizer(without_opened_think(text), add_special_tokens=False)["input_ids"]


def without_opened_think(text: str) -> str:
    """A prompt without the `<think>` at its end: a reasoning model then writes both tags."""
    stripped = text.rstrip()
    return stripped.removesuffix("<think>") if stripped.endswith("<think>") else text


def encode_text(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt without a template: BOS where the tokenizer puts one, never EOS."""
    ids = tokenizer(defuse(text, control_strings(tokenizer)))["input_ids"]
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def eos_token_ids(tokenizer, generation_config=None) -> list[int]:
    """Ids that end a response: the tokenizer's own, then the generation config's (int or list)."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    ids = ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) + listed
    if not ids:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no EOS token; responses would never "
            "end: set eos_token"
        )
    return list(dict.fromkeys(ids))


def pad_token_id(tokenizer, eos_ids: list[int], vocabulary: int | None = None) -> int:
    """What fills the unused part of a row: the pad token, or EOS where there is none.

    vocabulary: number of embeddings; a pad token beyond them, which some tokenizers have, is none.
    """
    pad = tokenizer.pad_token_id
    return eos_ids[0] if pad is None or (vocabulary is not None and pad >= vocabulary) else pad


def decode_response(tokenizer, response_ids: list[int]) -> str:
    """The text of a sampled response without special tokens, but for tags of the form."""
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    if FORM_TAGS & set(special.values()):
        kept = [i for i in response_ids if special.get(i, "<think>") in FORM_TAGS]
        return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return tokenizer.decode(
        response_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def without_eos(tokenizer, text: str) -> str:
    """`text` without the EOS strings at its end that data made for other trainers has."""
    while tokenizer.eos_token and text.rstrip().endswith(tokenizer.eos_token):
        text = text.rstrip().removesuffix(tokenizer.eos_token)
    return text


def encode_example(
    tokenizer, prompt_ids: list[int], response: str, eos_id: int
) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a prompt and the response to train on, EOS added.

    Prompt and response are encoded apart and joined, as a rollout is, so that no token spans the
    border. An EOS spelled out behind the response goes; other special tokens in it are broken.
    """
    response = defuse(without_eos(tokenizer, response), control_strings(tokenizer))
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [eos_id]
    return prompt_ids + response_ids, [0] * (len(prompt_ids) - 1) + [1] * len(response_ids)
