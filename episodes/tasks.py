"""The two forms of an episode: prompts, calls in a turn, results as shown, the answer.

Sources: ReSearch (arXiv 2503.19470) and its code for `search`; DeepSearch-RL and Qwen's hermes
format of tool calls for `agent`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence

from data import DataError
from episodes.tools import NOTHING_FOUND, SEARCH_TOOL, Call, parse_tool_calls
from prompts import (
    AGENT_INSTRUCTION,
    SEARCH_DIALOGUE,
    SEARCH_INSTRUCTION,
    defuse,
    encode_chat,
    encode_text,
    eos_token_ids,
    outside_thoughts,
    question_messages,
    read_instruction,
    render_chat,
    search_text,
    special_strings,
    spell_tools,
    tool_call_text,
    without_opened_think,
)
from reward import extract_answer, extract_boxed, search_well_formed

TAG_NAMES = ("think", "search", "result", "answer", "tools", "tool_call", "tool_response")
TAGS = tuple(f"<{slash}{name}>" for slash in ("", "/") for name in TAG_NAMES)


class Task:
    """What `search` and `agent` share. turns: the texts of the model's turns; a turn is a Round."""

    name: str
    cap_note: str  # what a call beyond a limit is answered
    stop: tuple[str, ...]

    def __init__(self, cfg, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        """cfg: EpisodeConfig; tools: RetrieverTools or MCPTools; examples: conversations."""
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.eos_id = eos_token_ids(tokenizer)[0]
        self.unsafe = [*TAGS, *special_strings(tokenizer)]
        base = cfg.template == "base"
        rules = {
            "agent": AGENT_INSTRUCTION,
            "search": SEARCH_DIALOGUE if base else SEARCH_INSTRUCTION,
        }
        self.instruction = rules[self.name]
        if cfg.instruction:
            self.instruction = read_instruction(cfg.instruction)

    def messages(self, question: str) -> list[dict]:
        """The conversation's beginning, without examples."""
        return question_messages(question, (), self.instruction)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def show(self, calls: list[Call], last_id: int, room: int) -> tuple[list[int], str]:
        """(ids, text) of a turn's results in `room` tokens; sets what each call has `shown`.

        last_id: the turn's last token. Tags and special tokens inside documents and notes are
        broken by a space. Documents are cut to `result_tokens` a result, then to the room.
        """

        def wrap(results: list[list[str]]) -> str:
            return self.wrap(["\n\n".join(texts).strip() for texts in results], last_id)

        results = []
        for call in calls:
            texts = [call.note] if call.note else [text for _, text in call.documents]
            texts = [defuse(text, self.unsafe) for text in texts or [NOTHING_FOUND]]
            results += fit(self.tokenizer, [texts], wrap, self.cfg.result_tokens)[1]
        ids, results = fit(self.tokenizer, results, wrap, room)
        for call, texts in zip(calls, results):
            call.shown = "\n\n".join(texts).strip()
        return ids, wrap(results)


class SearchTask(Task):
    """ReSearch's form: think, search, result and answer blocks in one assistant turn.

    A round ends at `</search>`; the query is what stands between the last `<search>` and it. A
    result begins with a space, so that its tokens are the same whether the text before it is
    encoded with it or not. All turns are one message: a think block may span a result.
    """

    name = "search"
    cap_note = "No further search is possible. Give the answer with what is known."
    empty_note = "Nothing was searched: the query is empty."
    malformed_note = (
        "Nothing was searched: a query stands between an opening and a closing search tag, "
        "without others."
    )

    def __init__(self, cfg, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        super().__init__(cfg, tokenizer, tools, examples)
        self.stop = ("</search>", "</answer>") if cfg.stop_at_answer else ("</search>",)

    def prompt(self, question: str) -> list[int]:
        shown = question, self.examples, self.instruction
        if self.cfg.template == "base":
            return encode_text(self.tokenizer, search_text(*shown))
        return encode_chat(self.tokenizer, question_messages(*shown))

    def unfinished(self, turns: list[str]) -> bool:
        """Was the last turn stopped at an `</answer>` that ends nothing?"""
        at_answer = turns[-1].rfind("</answer>") > turns[-1].rfind("</search>")
        return at_answer and answer_block("".join(turns)) is None

    def read(self, turns: list[str]) -> list[Call]:
        """The search of the last turn; none where it holds an answer or no closing tag."""
        text, closing, _ = turns[-1].partition("</search>")
        if not closing or answer_block("".join([*turns[:-1], text])) is not None:
            return []
        _, opening, query = text.rpartition("<search>")
        if not opening or any(tag in query for tag in TAGS):
            return [Call("search", {"query": query}, self.malformed_note)]
        query = " ".join(query.split())
        return [Call("search", {"query": query}, "" if query else self.empty_note)]

    def wrap(self, results: list[str], last_id: int) -> str:
        return f" <result>\n{results[0]}\n</result>"

    def turn_text(self, turn) -> str:
        """A turn as a trajectory holds it: as sampled."""
        return turn.text

    def answer(self, turns: list[str]) -> str | None:
        """The box in the last answer block; Search-R1's `em` takes the block where no box is."""
        block = answer_block("".join(turns))
        boxed = None if block is None else extract_boxed(block)
        return block if boxed is None and self.cfg.answer_reward == "em" else boxed

    def well_formed(self, episode) -> bool:
        """Its own text keeps ReSearch's form, and it ended with EOS."""
        return episode.ended and search_well_formed(episode.segments)


class AgentTask(Task):
    """Hermes tool calls (Qwen2.5, Qwen3): a turn ends with EOS, results are the next user turn.

    The prompt is the tokenizer's own chat template with the tools in it. Sampled turns are never
    rendered again: what the template writes between a turn and the next is cut out of a dummy
    conversation once (`glue`). A template that knows no tools gets them in the system message, and
    results as user messages (prompts.spell_tools).
    """

    name = "agent"
    cap_note = "error: no further calls are possible. Give the answer with what is known."

    def __init__(self, cfg, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        super().__init__(cfg, tokenizer, tools, examples)
        self.stop = ("</answer>",) * cfg.stop_at_answer + ("}}",) * cfg.bare_calls
        self.native = not cfg.bare_calls and template_knows_tools(tokenizer, tools.schemas)
        self.glue = derive_glue(tokenizer, self.native)

    def prompt(self, question: str) -> list[int]:
        messages = question_messages(question, self.examples, self.instruction)
        if self.native:
            return encode_chat(self.tokenizer, messages, self.tools.schemas)
        spelled = spell_tools(messages, self.tools.schemas, self.cfg.bare_calls)
        return encode_chat(self.tokenizer, spelled)

    def unfinished(self, turns: list[str]) -> bool:
        """Was the last turn stopped in a think block, or at an `</answer>` that ends nothing?"""
        text = turns[-1]
        if text.rfind("<think>") > text.rfind("</think>"):
            return True
        in_call = text.rfind("<tool_call>") > text.rfind("</tool_call>")
        at_answer = text.rfind("</answer>") > text.rfind("}}")
        return at_answer and (in_call or answer_block(text) is None)

    def read(self, turns: list[str]) -> list[Call]:
        """The calls of the last turn; none: it is the last of the episode."""
        return parse_tool_calls(turns[-1], self.tools.schemas, self.cfg.bare_calls)

    def wrap(self, results: list[str], last_id: int) -> str:
        end, head, between, tail = self.glue
        # A turn that ended at another of the model's EOS ids gets the template's end, untrained.
        return end * (last_id != self.eos_id) + head + between.join(results) + tail

    def turn_text(self, turn) -> str:
        """A turn as a trajectory holds it: as sampled, bare calls in the tags they lack."""
        if not (self.cfg.bare_calls and turn.calls and all(call.done for call in turn.calls)):
            return turn.text
        functions = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        return "\n".join(map(tool_call_text, functions))

    def answer(self, turns: list[str]) -> str | None:
        """The last answer block outside of the thinking."""
        return answer_block(turns[-1])

    def well_formed(self, episode) -> bool:
        """It ended with EOS and an answer, and every call it wrote could be carried out."""
        answered = episode.ended and episode.prediction is not None
        return answered and all(call.done for call in episode.calls)


def answer_block(text: str) -> str | None:
    return extract_answer(outside_thoughts(text))


def fit(
    tokenizer,
    results: list[list[str]],
    wrap: Callable[[list[list[str]]], str],
    limit: int,
) -> tuple[list[int], list[list[str]]]:
    """(ids of `wrap(results)`, results) in at most `limit` tokens.

    The texts of the results are cut at their ends, the longest first; what `wrap` adds never is,
    and where it alone is too long it stands with empty texts. Of a long text no more is read than
    `limit` tokens of 16 characters.
    """

    def encode(some: list[list[str]]) -> list[int]:
        return tokenizer(wrap(some), add_special_tokens=False)["input_ids"]

    def cut(most: int) -> list[list[str]]:
        """Every text at its first `most` tokens."""
        ends = iter(offsets)
        return [[_head(text, next(ends), most) for text in texts] for texts in results]

    results = [[text[: 16 * limit] for text in texts] for texts in results]
    ids = encode(results)
    if len(ids) <= limit:
        return ids, results
    flat = [text for texts in results for text in texts]
    encoded = tokenizer(flat, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    room = limit - len(encode(cut(0)))
    while True:
        sizes = range(max(map(len, offsets)) + 1)
        most = bisect_right(sizes, room, key=lambda n: sum(min(len(o), n) for o in offsets)) - 1
        ids = encode(cut(most))
        if len(ids) <= limit or most <= 0:
            return ids, cut(most)
        room -= len(ids) - limit


def _head(text: str, offsets: list[tuple[int, int]], most: int) -> str:
    """The first `most` tokens of a text, given the characters where each begins and ends."""
    if len(offsets) <= most:
        return text
    return text[: offsets[most - 1][1]].rstrip() if most > 0 else ""


def template_knows_tools(tokenizer, schemas: list[dict]) -> bool:
    """Does the chat template write tool schemas, and results of tools, into its text?"""
    chat = [{"role": "user", "content": "u"}]
    used = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t7t"}]
    try:
        plain, text = render_chat(tokenizer, chat), render_chat(tokenizer, chat, schemas)
        after = render_chat(tokenizer, chat + used, schemas)
    except DataError as e:
        if not tokenizer.chat_template:
            raise
        print(f"tools go into the system message: {e}", file=sys.stderr)
        return False
    named = all(schema["function"]["name"] in text for schema in schemas)
    return text != plain and named and "t7t" in after


def derive_glue(tokenizer, native: bool) -> tuple[str, str, str, str]:
    """What the template writes around results: (end of the turn, head, between two, tail).

    `tail` runs up to where the model goes on. Cut out of a dummy conversation and checked on
    others: one to three results, in a first and in a second round. DataError for a template whose
    text depends on the history.
    """

    def pieces(*turns: list[str]) -> tuple[str, list[str], str]:
        """Behind the model's last turn: (before the first result, between results, tail)."""
        messages = [{"role": "user", "content": "u0u"}]
        for i, results in enumerate(turns):
            messages.append({"role": "assistant", "content": f"a{i}a"})
            messages += [{"role": "tool", "content": result} for result in results]
        messages = messages if native else spell_tools(messages, [])
        text = render_chat(tokenizer, messages, [SEARCH_TOOL] if native else None)
        text = without_opened_think(text).rpartition(f"a{len(turns) - 1}a")[2]
        parts = []
        for result in turns[-1]:
            before, found, text = text.partition(result)
            if not found:
                raise ValueError
            parts.append(before)
        return parts[0], parts[1:], text

    try:
        head, (between,), tail = pieces(["r1r", "r2r"])
        same = (
            (head, [], tail) == pieces(["r1r"])
            and (head, [between] * 2, tail) == pieces(["r1r", "r2r", "r3r"])
            and (head, [between], tail) == pieces(["r0r"], ["r1r", "r2r"])
        )
    except ValueError:
        same = False
    eos = tokenizer.eos_token
    if not same or not head.startswith(eos):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} writes tool results in a way that "
            f"depends on the conversation, or does not end a turn with {eos!r}: results cannot be "
            "appended token by token. Use a Qwen2.5, Qwen3 or other ChatML model"
        )
    return eos, head.removeprefix(eos), between, tail
