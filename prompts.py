"""Instructions, chats, chat encoding and loss masks.

Prompts are ours, not the paper's (arXiv 2505.15776, Fig. 6 and 7): what never changes stands first, so that an engine
computes it once for all prompts; the history is numbered question/answer pairs, oldest first, answers included.
"""

from __future__ import annotations

import json
import re
from typing import Iterable

import jinja2

from data import _context, DataError, _question, read_jsonl, read_lines, _text, Turn


INSTRUCTION = """\
Rewrite the last question of a conversation so that a search engine understands it without the conversation.
First think: say in a few words what every pronoun and every left-out part of the question stands for.
Then write one complete question that means the same and names everything it asks about.
Answer in exactly this form:
<think>what the question refers to</think>
<rewrite>the complete question</rewrite>"""


def _conversation(context: list[tuple[str, str]], question: str) -> str:
    """The history as numbered pairs (`Q1: …`, `A1: …`), then the question; a first turn says there was nothing."""
    lines = [
        f"{label}{i}: {' '.join(text.split())}"
        for i, pair in enumerate(context, 1)
        for label, text in zip("QA", pair)
    ]
    return "\n".join(
        ["Conversation:", *(lines or ["(nothing yet)"]), f"Question: {' '.join(question.split())}"]
    )


def read_instruction(path: str) -> str:
    """The instruction in a text file; of the rewrite task by default."""
    if not path:
        return INSTRUCTION
    text = "\n".join(line for _, line in read_lines(path)).strip()
    if not text:
        raise DataError(f"{path}: the instruction is empty; say what the model is to do")
    return text


def rewrite_prompt(turn: Turn, instruction: str = "") -> str:
    """The zero-shot user message of the `rewrite` task (arXiv 2505.15776, Fig. 7, in our own words)."""
    return f"{instruction or INSTRUCTION}\n\n{_conversation(turn.context, turn.question)}"


def response_text(think: str, rewrite: str) -> str:
    """The canonical response: a think block, a newline, a rewrite block."""
    return f"<think>{think.strip()}</think>\n<rewrite>{rewrite.strip()}</rewrite>"


def few_shot_prompt(turn: Turn, examples: list[Turn], instruction: str = "") -> list[dict]:
    """The self-distillation chat (Fig. 6): the instruction once, then each example as a turn that was answered well.

    An example is a Turn with a `response`.  The paper shows its example inside one message; as turns of the chat a
    small model keeps the form far more often (SmolLM2-135M copies the examples otherwise).
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
        where = f"{path}:{number}"
        think, rewrite = _text(row, "think", where), _text(row, "rewrite", where)
        if not rewrite.strip() or re.search("</?(think|rewrite)>", think + rewrite):
            raise DataError(
                f"{where}: think is {think[:60]!r}, rewrite {rewrite[:60]!r}: the rewrite must not be empty, "
                "and neither may hold the tags that are put around them"
            )
        examples.append(
            Turn(
                f"example-{number}",
                "examples",
                number,
                _context(row, where),
                _question(row, where),
                [],
                response=response_text(think, rewrite),
            )
        )
    if not examples:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return examples


# Tasks `search` (arXiv 2503.19470) and `agent`: what those systems tell their models, in our own words.

SEARCH_RULES = r"""
Thoughts stand between <think> and </think>: what is known, and what has to be found next.
A search query stands between <search> and </search>: a few words, one thing at a time.
What the search finds is then shown between <result> and </result>, which only the search engine writes.
Thinking and searching go on until the answer is known; it stands between <answer> and </answer>.
Inside it the exact answer alone, a name, a date, a number, yes or no, is put into \boxed{} with latex format.
The form is: <think>…</think> <search>…</search> <result>…</result> <think>…</think>
<answer>The answer is \[ \boxed{exact answer} \]</answer>"""
SEARCH_INSTRUCTION = (
    "You answer a question by thinking and by searching an encyclopedia." + SEARCH_RULES
)
SEARCH_DIALOGUE = (
    "A user asks an assistant, who answers by thinking and by searching an encyclopedia."
    + SEARCH_RULES
)

AGENT_INSTRUCTION = """\
You answer questions with the help of a tool that searches a collection of passages; rely on what the passages say.
Ask it for one thing at a time, in a few words.  A question often takes several steps: find the first thing, then use \
what you found to ask for the next.  If a search does not help, ask in other words.
When you know the answer, write it between <answer> and </answer>: only a name, a date, a number, yes or no."""

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


def search_messages(
    question: str, examples: list[list[dict]] = (), instruction: str = ""
) -> list[dict]:
    """The chat of the `search` task's instruct form: rules as the system message, the bare question as the user's."""
    return [
        {"role": "system", "content": instruction or SEARCH_INSTRUCTION},
        *(m for e in examples for m in e),
        {"role": "user", "content": " ".join(question.split())},
    ]


def search_text(question: str, examples: list[list[dict]] = (), instruction: str = "") -> str:
    """The `search` prompt of a model without a chat template (a base model): one string that ends in `Assistant:`."""
    shown = [" ".join(f"{m['role'].capitalize()}: {m['content']}" for m in e) for e in examples]
    return "\n".join(
        [instruction or SEARCH_DIALOGUE, *shown, f"User: {' '.join(question.split())} Assistant:"]
    )


def agent_messages(
    question: str, examples: list[list[dict]] = (), instruction: str = ""
) -> list[dict]:
    """The chat of the `agent` task; its tools go to the chat template, or into the system message (`spell_tools`)."""
    return [
        {"role": "system", "content": instruction or AGENT_INSTRUCTION},
        *(m for e in examples for m in e),
        {"role": "user", "content": " ".join(question.split())},
    ]


def spell_tools(messages: list[dict], tools: list[dict], bare: bool = False) -> list[dict]:
    """The same chat for a template without tools: schemas stand in the system message, calls and results in texts.

    `bare`: calls are the JSON alone, without tool_call tags.
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
    """A call as JSON: {"name", "arguments" (a mapping, or its JSON)}."""
    arguments = function["arguments"]
    arguments = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'


def tool_call_text(function: dict) -> str:
    """A call in the hermes form: its JSON between tool_call tags."""
    return f"<tool_call>\n{call_json(function)}\n</tool_call>"


def read_conversations(path: str) -> list[list[dict]]:
    """Few-shot examples of `search` and `agent`: JSONL {"messages": [...]}, each from a user's question to its answer.

    `search`: one user and one assistant message, results included.  `agent`: assistant messages with `tool_calls`
    (function: name, arguments as a mapping), messages of role `tool`, and a last answer.
    """
    conversations = []
    for number, row in read_jsonl(path):
        messages = row.get("messages")
        roles = (
            [m.get("role") if isinstance(m, dict) else None for m in messages]
            if isinstance(messages, list)
            else []
        )
        if (
            len(roles) < 2
            or roles[0] != "user"
            or roles[-1] != "assistant"
            or not all(isinstance(m.get("content"), str) for m in messages)
        ):
            raise DataError(
                f"{path}:{number}: messages must run from a user's question to the assistant's answer, "
                f"each with role and content; the roles are {roles}"
            )
        conversations.append(messages)
    if not conversations:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return conversations


TEMPLATE_DATE = "01 Jan 2025"  # some templates (Llama 3) print today's date: pinned, so that prompts stay the same


def defuse(text: str, special: Iterable[str]) -> str:
    """`text` with special-token strings broken by a space (`<|im_end|>` → `< |im_end|>`): data never ends a turn."""
    for token in special:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def special_strings(tokenizer) -> list[str]:
    """Every string that the tokenizer makes one added token of, whether it calls it special or not."""
    # Llama 3 declares its header tokens special without giving them a role, so all_special_tokens lacks them.
    return sorted(
        {
            *tokenizer.all_special_tokens,
            *(t.content for t in tokenizer.added_tokens_decoder.values()),
        }
    )


FORM_TAGS = {
    f"<{slash}{name}>"
    for name in ("think", "rewrite", "search", "result", "answer")
    for slash in ("", "/")
}


def control_strings(tokenizer) -> list[str]:
    """The added tokens that the tokenizer calls special, but the tags that instructions name and responses consist of."""
    added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return sorted({*tokenizer.all_special_tokens, *added} - FORM_TAGS)


def render_chat(
    tokenizer, chat: str | list[dict], tools: list[dict] | None = None, answer_next: bool = True
) -> str:
    """The text of a chat (a user's text, or role/content messages) in the tokenizer's template; the assistant is next.

    Special-token strings inside the texts are made harmless; the date is pinned.  `tools`: JSON schemas of functions;
    assistant messages may then carry `tool_calls`, and messages of role `tool` hold results.  DataError: a tokenizer
    without a chat template, or one that refuses such messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; use an instruct model, "
            "or add a chat_template.jinja to its folder"
        )
    special = control_strings(tokenizer)
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    messages = [m | {"content": defuse(m["content"], special)} for m in chat]
    # A macro, because transformers hands no function of ours on to a template.
    template = (
        f"{{% macro strftime_now(form) %}}{TEMPLATE_DATE}{{% endmacro %}}\n"
        f"{tokenizer.get_chat_template(tools=tools)}"
    )
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=answer_next,
            date_string=TEMPLATE_DATE,
            enable_thinking=False,
        )
    except jinja2.TemplateError as e:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} refuses these messages ({roles}): {e}; use a "
            "model whose template takes them"
        ) from e


def encode_chat(tokenizer, chat: str | list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of `render_chat`.  The template writes BOS itself where the model wants one (once, never twice).

    What examples answered stands there as it is: some templates cut the thoughts off earlier turns.  DataError for a
    template that leaves out another message (of the role system, say): the model would not know what it is to do.
    """
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    marked = [
        m | {"content": f"\ue000{i}\ue001"} if m["role"] == "assistant" else m
        for i, m in enumerate(chat)
    ]
    text = render_chat(tokenizer, marked, tools)
    if len(chat) > 1:
        special = control_strings(tokenizer)
        contents = [defuse(m["content"], special) for m in chat]
        for m, content in zip(marked, contents):
            if m["role"] == "assistant":
                text = text.replace(m["content"], content)
        shown = "".join(text.split())
        lost = [m for m, content in zip(chat, contents) if "".join(content.split()) not in shown]
        if 0 < len(lost) < len(chat):  # all: a template that is a constant, on purpose
            raise DataError(
                f"the chat template of {tokenizer.name_or_path} leaves out the message of role "
                f"{lost[0]['role']} ({lost[0]['content'][:40]!r}…); use a model whose template writes it"
            )
    # Templates of reasoning models open the think block themselves: left to the model, so a response has both tags.
    text = text.rstrip().removesuffix("<think>") if text.rstrip().endswith("<think>") else text
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_text(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt without a template, BOS included where the tokenizer puts one; no EOS, which would end it."""
    ids = tokenizer(defuse(text, control_strings(tokenizer)))["input_ids"]
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def eos_token_ids(tokenizer, generation_config=None) -> list[int]:
    """Ids that end a response: the tokenizer's own first, then the generation config's (an int or a list)."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    ids = ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) + listed
    if not ids:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no EOS token; responses would never end: "
            "set eos_token"
        )
    return list(dict.fromkeys(ids))


def pad_token_id(tokenizer, eos_ids: list[int], vocabulary: int | None = None) -> int:
    """What fills the unused part of a row: the pad token, or EOS where there is none (masks go by position, not by id).

    Some tokenizers have a pad token that the model has no embedding for: given its `vocabulary`, that is EOS as well.
    """
    pad = tokenizer.pad_token_id
    return eos_ids[0] if pad is None or (vocabulary is not None and pad >= vocabulary) else pad


def decode_response(tokenizer, response_ids: list[int]) -> str:
    """The text of a sampled response, without special tokens and with its blanks as they are: what is parsed.

    Tags of the form stay, also where the tokenizer has them as special tokens.
    """
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
    """(token ids (T+1), loss mask (T)) of a prompt and its target: the response's tokens and one EOS are trained.

    Prompt and response are encoded apart and joined, as a rollout is, so that no token spans the border.  An EOS that
    is spelled out behind the response goes; other special tokens in it are broken, as in prompts.
    """
    response = defuse(without_eos(tokenizer, response), control_strings(tokenizer))
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [eos_id]
    return prompt_ids + response_ids, [0] * (len(prompt_ids) - 1) + [1] * len(response_ids)
