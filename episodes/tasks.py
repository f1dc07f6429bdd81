"""The two forms of an episode: prompts, calls in a turn, results as shown, the answer.

Sources: ReSearch (arXiv 2503.19470) and its code for `search`; DeepSearch-RL and Qwen's hermes
format of tool calls for `agent`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import prompts
from config import above, at_least, between
from data import DataError, one_line
from episodes.tools import NOTHING_FOUND, SEARCH_TOOL, Call, parse_tool_calls
from reward import extract_answer, extract_boxed, search_well_formed

TAG_NAMES = ("think", "search", "result", "answer", "tools", "tool_call", "tool_response")
TAGS = tuple(f"<{slash}{name}>" for slash in ("", "/") for name in TAG_NAMES)


@dataclass
class EpisodeConfig:
    top_k: Annotated[int, at_least(1)] = 5
    """passages a search shows"""
    max_rounds: Annotated[int, at_least(1)] = 10
    """turns of the model; an episode that still asks for a search in its last ends as `rounds`"""
    max_calls: Annotated[int, at_least(1)] = 10
    """searches (tool calls) of an episode that are carried out; the ones after it get a note"""
    calls_per_round: Annotated[int, at_least(1)] = 4
    """agent: calls of one turn that are carried out; the others get a note"""
    result_tokens: Annotated[int, at_least(32)] = 512
    """tokens of one result at most, tags included; documents are cut to fit, the longest first"""
    answer_share: Annotated[float, between(0, 0.9)] = 0.125
    """part of max_response_tokens that results never take: it is left for the answer"""
    turn_tokens: Annotated[int | None, at_least(1)] = None
    """new tokens of one turn at most; null: whatever max_response_tokens leaves"""
    stop_at_answer: bool = False
    """end an episode at </answer>, with an untrained EOS: for models that never learnt to stop"""
    bare_calls: bool = False
    """agent: calls are JSON ended by `}}`, for a model that was never taught the tool_call tags"""
    template: Literal["instruct", "base"] = "instruct"
    """search: a chat (instruct), or one string for a model without a chat template (base)"""
    instruction: str = ""
    """text file with rules to use in place of those of prompts.py"""
    mcp: str = ""
    """agent: MCP server with the tools, a URL or a command; empty: the retriever"""
    timeout: Annotated[float, above(0)] = 60.0
    """seconds for the searches of a round; those that take longer have failed"""
    answer_reward: Literal["auto", "research", "em", "f1"] = "auto"
    """what an answer earns (reward.score_answer); auto: research for `search`, f1 for `agent`"""
    gold_reward: Literal["none", "recall", "all"] = "none"
    """what retrieved gold passages add: nothing, their share, or 1 for all of them (needs qrels)"""
    gold_weight: Annotated[float, above(0)] = 0.5
    """weight of gold_reward beside the answer's"""


class Task:
    """What `search` and `agent` share.

    said: the text in which a call or an answer counts, `turn` its last part that the model wrote at
    a stretch: of `search` all turns are one message, of `agent` each is its own.
    """

    name: str
    one_message: bool
    cap_note: str  # what a call beyond a limit is answered
    stop: tuple[str, ...] = ()
    rules: dict[str, str]  # by EpisodeConfig.template

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        """tools: RetrieverTools or MCPTools; examples: few-shot conversations."""
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.instruction = prompts.read_instruction(cfg.instruction, self.rules[cfg.template])
        self.stop += ("</answer>",) * cfg.stop_at_answer
        self.eos_id = prompts.eos_token_ids(tokenizer)[0]
        self.unsafe = [*TAGS, *prompts.special_strings(tokenizer)]

    def messages(self, question: str, examples: Sequence[list[dict]] = ()) -> list[dict]:
        """The beginning of a conversation: instruction, examples, question."""
        shown = [message for example in examples for message in example]
        user = {"role": "user", "content": one_line(question)}
        return [{"role": "system", "content": self.instruction}, *shown, user]

    def prompt(self, question: str) -> list[int]:
        return self.encode(self.messages(question, self.examples))

    def show(self, calls: list[Call], last_id: int, room: int) -> tuple[list[int], str]:
        """(ids, text) of a turn's results in `room` tokens; sets what each call has `shown`.

        last_id: the turn's last token. Tags and special tokens inside texts are broken by a space.
        A result has `result_tokens` at most, and its part of the room that earlier ones left.
        """
        shown = [[c.note] if c.note else [text for _, text in c.documents] for c in calls]
        pairs = [(call, texts or [NOTHING_FOUND]) for call, texts in zip(calls, shown)]
        pairs.sort(key=lambda pair: sum(map(len, pair[1])))  # what short ones leave, long ones use
        for i, (call, texts) in enumerate(pairs):
            texts = [prompts.defuse(text, self.unsafe) for text in texts]
            limit = min(self.cfg.result_tokens, room // (len(calls) - i))
            call.shown, used = fit(self.tokenizer, texts, lambda t: self.wrap([t], last_id), limit)
            room -= used
        text = self.wrap([call.shown for call in calls], last_id)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], text


class SearchTask(Task):
    """ReSearch's form: think, search, result and answer blocks in one assistant turn.

    A round ends at `</search>`; the query is what stands between the last `<search>` and it. A
    result begins with a space, so that its tokens are the same whether the text before it is
    encoded with it or not.
    """

    name, one_message, stop = "search", True, ("</search>",)
    rules = {"instruct": prompts.SEARCH_INSTRUCTION, "base": prompts.SEARCH_DIALOGUE}
    cap_note = "No further search is possible. Give the answer with what is known."
    malformed_note = (
        "Nothing was searched: a query stands between an opening and a closing search tag, in "
        "words alone."
    )

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of the beginning of a conversation."""
        if self.cfg.template == "base":
            return prompts.encode_text(self.tokenizer, prompts.search_text(messages))
        return prompts.encode_chat(self.tokenizer, messages)

    def read(self, said: str, turn: str, stopped: bool) -> list[Call]:
        """The search of a turn; none behind an answer, or without a closing tag."""
        text, closing, rest = turn.partition("</search>")
        if not closing or answer_block(said.removesuffix(closing + rest)) is not None:
            return []
        _, opening, query = text.rpartition("<search>")
        query = one_line(query)
        malformed = not opening or not query or any(tag in query for tag in TAGS)
        return [Call("search", {"query": query}, self.malformed_note if malformed else "")]

    def answer(self, block: str) -> str | None:
        """The box in an answer block; Search-R1's `em` takes the block where no box is."""
        boxed = extract_boxed(block)
        return block if boxed is None and self.cfg.answer_reward == "em" else boxed

    def wrap(self, results: list[str], last_id: int) -> str:
        return f" <result>\n{results[0]}\n</result>"

    def well_formed(self, episode) -> bool:
        """Its own text keeps ReSearch's form, and it ended with EOS."""
        return episode.ended and search_well_formed(episode.segments)


class AgentTask(Task):
    """Hermes tool calls (Qwen2.5, Qwen3): a turn ends with EOS, results are the next user turn.

    The prompt is the tokenizer's own chat template with the tools in it, or spelled out where it
    knows none (prompts.spell_tools). Sampled turns are never rendered again: what the template
    writes between two is cut out of a dummy conversation once (`glue`).
    """

    name, one_message = "agent", False
    rules = {"instruct": prompts.AGENT_INSTRUCTION}
    cap_note = "error: no further calls are possible. Give the answer with what is known."

    def __init__(self, cfg, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        super().__init__(cfg, tokenizer, tools, examples)
        self.stop += ("}}",) * cfg.bare_calls
        self.native = not cfg.bare_calls and template_knows_tools(tokenizer, tools.schemas)
        self.glue = derive_glue(tokenizer, self.native)

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of the beginning of a conversation."""
        schemas = self.tools.schemas
        if self.native:
            return prompts.encode_chat(self.tokenizer, messages, schemas)
        spelled = prompts.spell_tools(messages, schemas, self.cfg.bare_calls)
        return prompts.encode_chat(self.tokenizer, spelled)

    def read(self, said: str, turn: str, stopped: bool) -> list[Call] | None:
        """The calls of a turn; None where it was stopped inside the thinking or a call."""
        thinks = turn.rfind("<think>") > turn.rfind("</think>")
        if stopped and (thinks or self.ends_in_call(prompts.outside_thoughts(turn))):
            return None
        return parse_tool_calls(turn, self.tools.schemas, self.cfg.bare_calls)

    def ends_in_call(self, text: str) -> bool:
        """Was a text stopped inside a call? A bare one: more text could complete its JSON."""
        if not self.cfg.bare_calls:
            return text.rfind("<tool_call>") > text.rfind("</tool_call>")
        call = re.search(r'\{\s*"', text)
        try:
            if call:
                json.JSONDecoder().raw_decode(text, call.start())
        except RecursionError:
            return False
        except json.JSONDecodeError as e:
            return e.msg.startswith("Unterminated string") or e.pos >= len(text.rstrip())
        return False

    def answer(self, block: str) -> str | None:
        return block

    def wrap(self, results: list[str], last_id: int) -> str:
        end, head, between, tail = self.glue
        # A turn that ended at another of the model's EOS ids gets the template's end, untrained.
        return end * (last_id != self.eos_id) + head + between.join(results) + tail

    def well_formed(self, episode) -> bool:
        """It ended with EOS and an answer, and every call it wrote could be carried out."""
        answered = episode.ended and episode.prediction is not None
        return answered and all(call.done for call in episode.calls)


def answer_block(text: str) -> str | None:
    """The last answer outside of the thinking."""
    return extract_answer(prompts.outside_thoughts(text))


def fit(tokenizer, texts: list[str], wrap: Callable[[str], str], limit: int) -> tuple[str, int]:
    """(the texts, joined by blank lines; the tokens of `wrap` around them, at most `limit`).

    Texts are cut at their ends, the longest first; what `wrap` adds never is. No more is read of a
    text than `limit` tokens of 16 characters.
    """
    most = 16 * max(limit, 0)  # characters of a text
    while True:
        joined = "\n\n".join(text[:most].rstrip() for text in texts).strip()
        used = len(tokenizer(wrap(joined), add_special_tokens=False)["input_ids"])
        if used <= limit or most == 0:
            return joined, used
        most = min(most, max(map(len, texts))) * limit // used


def template_knows_tools(tokenizer, schemas: list[dict]) -> bool:
    """Does the chat template write tool schemas, and results of tools, into its text?"""
    roles = {"user": "u", "assistant": "a", "tool": "t7t"}
    chat = [{"role": role, "content": content} for role, content in roles.items()]
    try:
        plain, text = (
            prompts.render_chat(tokenizer, chat[:1]),
            prompts.render_chat(tokenizer, chat, schemas),
        )
    except DataError as e:
        if not tokenizer.chat_template:
            raise
        print(f"tools go into the system message: {e}", file=sys.stderr)
        return False
    names = [schema["function"]["name"] for schema in schemas]
    return all(text.count(name) > plain.count(name) for name in [*names, "t7t"])


def derive_glue(tokenizer, native: bool) -> tuple[str, str, str, str]:
    """What the template writes around results: (end of the turn, head, between two, tail up to
    where the model goes on); the same for one to three results, in a first and a second round."""

    def behind(*turns: list[str]) -> str:
        """What is written behind the model's last turn; turns: the results of each."""
        messages = [{"role": "user", "content": "u"}]
        for results in turns:
            messages.append({"role": "assistant", "content": "a"})
            messages += [{"role": "tool", "content": result} for result in results]
        messages = messages if native else prompts.spell_tools(messages, [])
        pieces = prompts.render_around(tokenizer, messages, [SEARCH_TOOL] if native else None)
        return prompts.without_opened_think(pieces[-1])

    others = [["r1r"]], [["r1r", "r2r", "r3r"]], [["r0r"], ["r1r", "r2r"]]
    eos, pieces = tokenizer.eos_token, re.split("r1r|r2r", behind(["r1r", "r2r"]))
    if len(pieces) == 3 and pieces[0].startswith(eos):
        head, between, tail = pieces
        if all(behind(*turns) == head + between.join(turns[-1]) + tail for turns in others):
            return eos, head.removeprefix(eos), between, tail
    raise DataError(
        f"the chat template of {tokenizer.name_or_path} writes results in a way that depends on "
        f"the conversation, or does not end a turn with {eos!r}: they cannot be appended token by "
        "token; use a Qwen2.5, Qwen3 or other ChatML model"
    )
