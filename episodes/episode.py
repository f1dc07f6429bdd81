"""Episodes of the tasks `search` and `agent`: sample a turn, carry out what it asks for, append the results, go on.

Training, validation and inference share `run_episodes`. Engines see token ids only; this file knows tags, tools and
chat templates, and of an engine only `generate(prompts, samplings)`.

An episode is one growing list of token ids with a mask and log-probabilities beside it. What the model sampled is
appended as sampled and never encoded again; what is shown to it is encoded alone, and takes part in no loss, KL,
entropy or denominator:

    mask 0   prompt; results, notes and the chat template's text around them; a forced end of a turn or episode
    mask 1   sampled text with its stop string and what shares the last token of that; a sampled EOS

One round:
1. All active episodes are sampled together, each with its remaining budget. A turn ends at EOS or at a stop string,
   which is matched on decoded text because a tag has many tokenisations.
2. All searches of the round are one call of the tools, with a time-out. A failed search ends its episode as
   `tool_error`: the episode is left out and counted, never scored.
3. Results are made harmless (tags and special tokens in them are broken by a space), cut to `result_tokens` and to the
   room that is left (the longest documents first, never the tags), and appended.
A malformed or empty query, an invalid call, a call beyond a limit and a search whose result would find no room are
answered with a note that the model reads.

An answer inside a think block is no answer and ends nothing. In `search` an answer ends the episode, and a query counts
wherever it stands, as in ReSearch (inside a think block the form is then wrong). In `agent` a turn without a call is
the last one, and a call counts even beside an answer.

End states (`Episode.end`): answered; no_answer (it ended without one); length (no room); rounds (no turn left);
engine_error and tool_error (technical).

Sources: ReSearch (arXiv 2503.19470) and its code for `search`; DeepSearch-RL and Qwen's hermes format for `agent`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

import data
from config import above, at_least, between, ConfigError
from data import DataError, Question, read_corpus
from engines.base import Rollout, RolloutError, Sampling
from episodes.tools import Call, MCPTools, parse_tool_calls, RetrieverTools, SEARCH_TOOL
from prompts import (agent_messages, before_calls, defuse, encode_chat, encode_text, eos_token_ids,
                     outside_thoughts, read_conversations, render_chat, SEARCH_DIALOGUE, search_messages, search_text,
                     special_strings, spell_tools, tool_call_text, without_opened_think)
from retriever import open_retriever, RetrieverConfig
from reward import (all_gold, answer_metrics, extract_answer, extract_boxed, gold_recall, score_answer,
                    search_well_formed)
from runs import atomic_write
from search.passages import PassageIds, Texts

ANSWERED, NO_ANSWER, LENGTH, ROUNDS = "answered", "no_answer", "length", "rounds"
ENDED = (ANSWERED, NO_ANSWER)  # the model itself brought the episode to an end
FAILED = ("engine_error", "tool_error")  # left out, not scored
END_STATES = (ANSWERED, NO_ANSWER, LENGTH, ROUNDS, *FAILED)
TAGS = tuple(f"<{slash}{name}>" for slash in ("", "/") for name in (
    "think", "search", "result", "answer", "tools", "tool_call", "tool_response"))
LEAST_ROOM = 64  # tokens: with less room for its result a search is not made; tags and a note need about 60


@dataclass
class EpisodeConfig:
    top_k: Annotated[int, at_least(1)] = 5
    """passages a search shows"""
    max_rounds: Annotated[int, at_least(1)] = 10
    """turns of the model; an episode that asks for another search in its last one ends as `rounds`"""
    max_calls: Annotated[int, at_least(1)] = 10
    """searches (tool calls) of an episode that are carried out; the ones after it get a note"""
    calls_per_round: Annotated[int, at_least(1)] = 4
    """agent: calls of one turn that are carried out; the others get a note"""
    result_tokens: Annotated[int, at_least(32)] = 512
    """tokens of one result at most, tags included; documents are cut to fit, the longest first"""
    answer_share: Annotated[float, between(0, 0.9)] = 0.125
    """part of an episode's budget (max_response_tokens) that results never take: it is left for the answer"""
    turn_tokens: Annotated[int | None, at_least(1)] = None
    """new tokens of one turn at most; null: whatever max_response_tokens leaves"""
    at_cap: Literal["note", "stop"] = "note"
    """a call beyond max_calls: a note says so and the model may answer, or the episode ends as `rounds`"""
    stop_at_answer: bool = False
    """end an episode at </answer>, with an EOS that is not trained: for models that never learnt to end there"""
    bare_calls: bool = False
    """agent: calls are bare JSON, ended by `}}`, without tool_call tags: to sample from a model that was never taught
    the tags; its trajectories are written with them"""
    template: Literal["instruct", "base"] = "instruct"
    """search: prompt through the chat template (instruct), or as one string for a model without one (base)"""
    instruction: str = ""
    """text file with rules to use in place of those of prompts.py"""
    mcp: str = ""
    """agent: MCP server that has the tools, a URL or the command that starts one; empty: the retriever, in process"""
    timeout: Annotated[float, above(0)] = 60.0
    """seconds for the searches of a round; those that take longer have failed"""
    answer_reward: Literal["auto", "research", "em", "f1"] = "auto"
    """what an answer earns (reward.score_answer); auto: research for `search`, f1 for `agent`"""
    gold_reward: Literal["none", "recall", "all"] = "none"
    """what retrieving gold passages adds: nothing, their share, or 1 for all of them (needs qrels)"""
    gold_weight: Annotated[float, above(0)] = 0.5
    """weight of gold_reward beside the answer's"""


def check_episode(cfg: EpisodeConfig, task: str, budget: int) -> None:
    """ConfigError for settings that cannot work; loads nothing. budget: max_response_tokens."""
    room = budget - int(cfg.answer_share * budget)
    if room < 2 * LEAST_ROOM:
        raise ConfigError(f"max_response_tokens={budget} leaves {room} tokens beside the answer's part "
                          f"(episode.answer_share={cfg.answer_share:g}); a query and its result need {2 * LEAST_ROOM}: "
                          "raise max_response_tokens, or lower the share")
    if cfg.instruction and not os.path.isfile(cfg.instruction):
        raise ConfigError(f"episode.instruction={cfg.instruction} is no file; give a text file, or leave it empty")
    if task != "agent" and cfg.mcp:
        raise ConfigError("episode.mcp is for task=agent; task=search asks the retriever")
    if task == "agent" and cfg.template == "base":
        raise ConfigError("episode.template=base is for task=search; task=agent needs a chat template")
    if cfg.mcp and cfg.gold_reward != "none":
        raise ConfigError("episode.gold_reward needs the ids of what was found, which an MCP server does not tell; use "
                          "the retriever in process (mcp empty), or gold_reward=none")


# ------------------------------------------------------------------------------------ the episode


@dataclass
class Round:
    """One turn of the model and what was appended behind it."""

    text: str  # as sampled, decoded, without EOS
    calls: list[Call] = field(default_factory=list)
    injected: str = ""
    prompt_tokens: int = 0  # everything before the turn
    completion_tokens: int = 0


@dataclass
class Episode(Rollout):
    """One sampled conversation: a rollout (`end` is empty while it runs) and what its tokens say."""

    sample: int = 0  # which of its prompt's
    rounds: list[Round] = field(default_factory=list)
    prediction: str | None = None  # the extracted answer
    ended: bool = False  # by the tokenizer's own EOS, or a forced one
    failure: str = ""  # why it is one of FAILED

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """(text, written by the model) in order."""
        return [part for r in self.rounds for part in ((r.text, True), (r.injected, False)) if part[0]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def calls(self) -> list[Call]:
        return [call for r in self.rounds for call in r.calls]

    @property
    def retrieved(self) -> list[str]:
        """Ids of the passages that the episode was shown, each once, in order."""
        calls = [call for r in self.rounds if r.injected for call in r.calls if call.shown]
        return list(dict.fromkeys(id_ for call in calls for id_, _ in call.documents if id_ is not None))

    def append(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        """The only place where an episode grows."""
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask] * len(ids)


def run_episodes(engine, prompts: Sequence[Sequence[int]], samplings: Sampling | Sequence[Sampling],
                 task: SearchTask | AgentTask, context: int | None = None,
                 progress: Callable[[int, int, float], None] | None = None) -> list[Episode]:
    """Episodes of every prompt (token ids), the n samples of a prompt side by side, with group_id its index.

    `max_tokens` of a sampling is the episode's whole budget, injected tokens included; `context`: positions of the
    model, prompt included. `progress(finished, total, 0.0)` is called after every round.
    Raises RolloutError for a prompt that leaves no room, and what the engine raises.
    """
    samplings = [samplings] * len(prompts) if isinstance(samplings, Sampling) else list(samplings)
    ending = int(task.cfg.stop_at_answer)  # room for the EOS that is then put behind an answer
    budgets = [min(s.max_tokens, (context or sys.maxsize) - len(p)) - ending
               for p, s in zip(prompts, samplings, strict=True)]
    for i, (prompt, budget) in enumerate(zip(prompts, budgets)):
        if budget < 1:
            raise RolloutError(f"prompt {i} has {len(prompt)} tokens, the model {context} positions; leave long "
                               "questions out, or give fewer examples")
    task.tools.seconds = 0.0
    episodes = [Episode(list(prompt), [], [], [], group, "", sample)
                for group, (prompt, s) in enumerate(zip(prompts, samplings)) for sample in range(s.n)]
    active = episodes
    for number in range(task.cfg.max_rounds):
        if not active:
            break
        sampled = _sample(engine, active, samplings, budgets, number, task)
        asking = []
        for episode, rollout in zip(active, sampled, strict=True):
            if _read_turn(episode, rollout, number, budgets[episode.group_id], task):
                asking.append(episode)
        task.tools.run([call for e in asking for call in e.rounds[-1].calls if not call.note])
        for episode in asking:
            _append_results(episode, budgets[episode.group_id], task)
        active = [e for e in active if not e.end]
        if progress is not None:
            progress(len(episodes) - len(active), len(episodes), 0.0)
    return episodes


def _sample(engine, active: list[Episode], samplings: list[Sampling], budgets: list[int], number: int,
            task: SearchTask | AgentTask) -> list[Rollout]:
    """The next turn of every active episode, in their order.

    In the first round the samples of a prompt are one request. After it each has a conversation of its own, and a seed
    made of the prompt and its seed: draws depend neither on what else is sampled nor on the process.
    """
    def request(e: Episode, n: int) -> Sampling:
        s, left = samplings[e.group_id], budgets[e.group_id] - len(e.response_ids)
        seed = s.seed
        if number and seed is not None:
            seed = random.Random(f"round {seed} {e.sample} {number} {e.prompt_ids}").getrandbits(62)
        return dataclasses.replace(s, n=n, seed=seed, stop=task.stop, max_tokens=min(left, task.cfg.turn_tokens or left))

    if number == 0:
        active = [e for e in active if e.sample == 0]
    requests = [request(e, 1 if number else samplings[e.group_id].n) for e in active]
    return engine.generate([e.prompt_ids + e.response_ids for e in active], requests)


def _read_turn(episode: Episode, sampled: Rollout, number: int, budget: int, task: SearchTask | AgentTask) -> bool:
    """Append a sampled turn and read it: True where it asks for something; otherwise the episode has ended, or the turn
    goes on in the next round because it was stopped at an `</answer>` that ends nothing."""
    failed, ended, final = sampled.end == "engine_error", sampled.end == "eos", number + 1 == task.cfg.max_rounds
    if not episode.rounds or episode.rounds[-1].injected:
        episode.rounds.append(Round("", prompt_tokens=len(episode.prompt_ids) + len(episode.response_ids)))
    turn = episode.rounds[-1]
    episode.append(sampled.response_ids, sampled.logprobs, int(not failed))
    turn.text += task.decode(sampled.response_ids[:-1] if ended else sampled.response_ids)
    turn.completion_tokens += len(sampled.response_ids)
    if failed:
        episode.end, episode.failure = "engine_error", "the engine's logits were no numbers"
    elif sampled.end == "length":
        episode.end = LENGTH
    elif sampled.end == "stop" and task.unfinished(episode):
        episode.end = ROUNDS if final else ""
    elif calls := task.read(episode):
        turn.calls = calls
        used, good = sum(call.done for call in episode.calls), [call for call in calls if not call.note]
        after = used + min(len(good), task.cfg.calls_per_round)
        if final or task.cfg.at_cap == "stop" and after > task.cfg.max_calls:
            episode.end = ROUNDS
        for i, call in enumerate(good):
            if used + i >= task.cfg.max_calls or _room(episode, budget, task) < LEAST_ROOM:
                call.note = task.cap_note
            elif i >= task.cfg.calls_per_round:
                call.note = f"Not carried out: one turn may hold {task.cfg.calls_per_round} calls."
        return not episode.end
    else:
        if not ended and task.cfg.stop_at_answer:  # a forced EOS: the model did not write it
            episode.append([task.eos_id], [0.0], 0)
        episode.ended = episode.response_ids[-1] == task.eos_id
        episode.prediction = task.answer(episode)
        episode.end = NO_ANSWER if episode.prediction is None else ANSWERED
    return False


def _room(episode: Episode, budget: int, task: SearchTask | AgentTask) -> int:
    """Tokens that results may take."""
    return budget - int(task.cfg.answer_share * budget) - len(episode.response_ids)


def _append_results(episode: Episode, budget: int, task: SearchTask | AgentTask) -> None:
    """Append what a turn asked for, cut to the room that is left, unless not even one token is left behind it."""
    turn = episode.rounds[-1]
    if failure := next((call.failure for call in turn.calls if call.failure), ""):
        episode.end, episode.failure = "tool_error", failure
        return
    room = max(_room(episode, budget, task), LEAST_ROOM)  # a note may take from the answer's part
    ids, text = task.show(turn.calls, episode.response_ids[-1], room)
    if len(episode.response_ids) + len(ids) >= budget:
        episode.end = LENGTH
        return
    episode.append(ids, [0.0] * len(ids), 0)
    turn.injected = text


# ---------------------------------------------------------------------------------- the two tasks


class Task:
    """What `search` and `agent` share. tools: RetrieverTools or MCPTools; examples: few-shot conversations."""

    name: str
    cap_note: str
    stop: tuple[str, ...]

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.eos_id = eos_token_ids(tokenizer)[0]
        self.unsafe = [*TAGS, *special_strings(tokenizer)]
        self.instruction = ""
        if cfg.instruction:
            self.instruction = "\n".join(line for _, line in data.read_lines(cfg.instruction)).strip()

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def wrap(self, results: list[str], last_id: int) -> str:
        """The text that is appended for the results of a turn whose last token is `last_id`."""
        raise NotImplementedError

    def show(self, calls: list[Call], last_id: int, room: int) -> tuple[list[int], str]:
        """(ids, text) of the results of a turn in at most `room` tokens; sets what each call has `shown`."""
        documents = [fit(self.tokenizer, harmless(call, self.unsafe), lambda texts: self.wrap([_joined(texts)], last_id),
                         self.cfg.result_tokens)[1] for call in calls]
        ends = list(accumulate(map(len, documents)))

        def results(texts: list[str]) -> list[str]:
            return [_joined(texts[end - len(own):end]) for end, own in zip(ends, documents)]

        ids, texts = fit(self.tokenizer, [text for own in documents for text in own],
                         lambda texts: self.wrap(results(texts), last_id), room)
        for call, shown in zip(calls, results(texts)):
            call.shown = shown
        return ids, self.wrap(results(texts), last_id)


class SearchTask(Task):
    """ReSearch's form: think, search, result and answer blocks in one assistant turn, the answer in a box.

    A round ends at `</search>`. The query is what stands between the last `<search>` before it and the tag. The result
    begins with a space, so that its tokens are the same whether the text before it is encoded with it or not.
    """

    name = "search"
    cap_note = "No further search is possible. Give the answer with what is known."
    empty_note = "Nothing was searched: the query is empty."
    malformed_note = "Nothing was searched: a query stands between an opening and a closing search tag, without others."

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        super().__init__(cfg, tokenizer, tools, examples)
        self.stop = ("</search>", "</answer>") if cfg.stop_at_answer else ("</search>",)

    def messages(self, question: str) -> list[dict]:
        """The conversation's beginning, without examples."""
        base = SEARCH_DIALOGUE if self.cfg.template == "base" else ""
        return search_messages(question, (), self.instruction or base)

    def prompt(self, question: str) -> list[int]:
        if self.cfg.template == "base":
            return encode_text(self.tokenizer, search_text(question, self.examples, self.instruction))
        return encode_chat(self.tokenizer, search_messages(question, self.examples, self.instruction))

    def unfinished(self, episode: Episode) -> bool:
        """Was the last turn stopped at an `</answer>` that ends nothing?"""
        text = episode.rounds[-1].text
        return text.rfind("</answer>") > text.rfind("</search>") and _answer_block(_own_text(episode)) is None

    def read(self, episode: Episode) -> list[Call]:
        """The search of the last turn; none where an answer or no closing tag is in it: then the episode ends."""
        text = episode.rounds[-1].text
        end = text.find("</search>")
        if end < 0 or _answer_block(_own_text(episode).removesuffix(text[end:])) is not None:
            return []
        start = text.rfind("<search>", 0, end)
        query = text[start + len("<search>"):end] if start >= 0 else ""
        if start < 0 or any(tag in query for tag in TAGS):
            return [Call("search", {"query": query}, self.malformed_note)]
        query = " ".join(query.split())
        return [Call("search", {"query": query}, "" if query else self.empty_note)]

    def wrap(self, results: list[str], last_id: int) -> str:
        return f" <result>\n{results[0]}\n</result>"

    def turn_text(self, turn: Round) -> str:
        """A turn as a trajectory holds it: as sampled."""
        return turn.text

    def answer(self, episode: Episode) -> str | None:
        """The box in the last answer block; for Search-R1's reward, which knows no box, else the block itself."""
        block = _answer_block(_own_text(episode))
        boxed = None if block is None else extract_boxed(block)
        return block if boxed is None and self.cfg.answer_reward == "em" else boxed

    def well_formed(self, episode: Episode) -> bool:
        """Its own text keeps ReSearch's form, and it ended with EOS."""
        return episode.ended and search_well_formed(episode.segments)


class AgentTask(Task):
    """Hermes tool calls (Qwen2.5, Qwen3): the model's turn ends with EOS, results come as the next user turn.

    The prompt is the tokenizer's own chat template with the tools in it. Sampled turns are never rendered again: what
    the template writes between a turn and the next is cut out of a dummy conversation once (`glue`). A template that
    knows no tools gets them in the system message, and results as user messages (prompts.spell_tools).
    """

    name = "agent"
    cap_note = "error: no further calls are possible. Give the answer with what is known."

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: Sequence[list[dict]] = ()):
        super().__init__(cfg, tokenizer, tools, examples)
        self.stop = ("</answer>",) * cfg.stop_at_answer + ("}}",) * cfg.bare_calls
        self.native = not cfg.bare_calls and template_knows_tools(tokenizer, tools.schemas)
        self.glue = derive_glue(tokenizer, self.native)

    def messages(self, question: str) -> list[dict]:
        """The conversation's beginning, without examples."""
        return agent_messages(question, (), self.instruction)

    def prompt(self, question: str) -> list[int]:
        messages, schemas = agent_messages(question, self.examples, self.instruction), self.tools.schemas
        if self.native:
            return encode_chat(self.tokenizer, messages, schemas)
        return encode_chat(self.tokenizer, spell_tools(messages, schemas, self.cfg.bare_calls))

    def unfinished(self, episode: Episode) -> bool:
        """Was the last turn stopped inside a think block, or at an `</answer>` that ends nothing?"""
        text = episode.rounds[-1].text
        if text.rfind("<think>") > text.rfind("</think>"):
            return True
        return text.rfind("</answer>") > text.rfind("}}") and (
            text.rfind("<tool_call>") > text.rfind("</tool_call>") or _answer_block(text) is None)

    def read(self, episode: Episode) -> list[Call]:
        """The calls of the last turn; none: the episode ends."""
        return parse_tool_calls(episode.rounds[-1].text, self.tools.schemas, self.cfg.bare_calls)

    def turn_text(self, turn: Round) -> str:
        """A turn as a trajectory holds it: as sampled, bare calls in the tags they lack."""
        if not (self.cfg.bare_calls and turn.calls and all(call.done for call in turn.calls)):
            return turn.text
        return "\n".join(tool_call_text({"name": c.name, "arguments": c.arguments}) for c in turn.calls)

    def wrap(self, results: list[str], last_id: int) -> str:
        end, head, between, tail = self.glue
        # A turn that ended at another of the model's EOS ids gets the template's end, untrained.
        return (end if last_id != self.eos_id else "") + head + between.join(results) + tail

    def answer(self, episode: Episode) -> str | None:
        """The last answer block outside of the thinking."""
        return _answer_block(episode.rounds[-1].text)

    def well_formed(self, episode: Episode) -> bool:
        """It ended with EOS and an answer, and every call it wrote could be carried out."""
        return episode.ended and episode.prediction is not None and all(call.done for call in episode.calls)


def _own_text(episode: Episode) -> str:
    """What the model wrote, over all turns: in `search` they are one message, and a think block may span a result."""
    return "".join(turn.text for turn in episode.rounds)


def _answer_block(text: str) -> str | None:
    return extract_answer(outside_thoughts(text))


def _joined(texts: list[str]) -> str:
    return "\n\n".join(texts).strip()


def template_knows_tools(tokenizer, schemas: list[dict]) -> bool:
    """Does the chat template write tool schemas, and results of tools, into its text?"""
    chat = [{"role": "user", "content": "u"}]
    used = [*chat, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t7t"}]
    try:
        plain, text, after = (render_chat(tokenizer, chat), render_chat(tokenizer, chat, schemas),
                              render_chat(tokenizer, used, schemas))
    except DataError as e:
        if not tokenizer.chat_template:
            raise
        print(f"tools go into the system message: {e}", file=sys.stderr)
        return False
    return text != plain and all(s["function"]["name"] in text for s in schemas) and "t7t" in after


def derive_glue(tokenizer, native: bool) -> tuple[str, str, str, str]:
    """What the template writes around results: (end of the model's turn, head, between two results, tail).

    `tail` runs up to where the model goes on. Cut out of a dummy conversation and checked on others: with one to three
    results, in a first and in a second round. DataError for a template whose text depends on the history.
    """
    def pieces(*turns: list[str]) -> tuple[str, list[str], str]:
        """Behind the last of the model's turns: (up to the first result, between results, behind the last)."""
        messages = [{"role": "user", "content": "u0u"}]
        for i, results in enumerate(turns):
            messages += [{"role": "assistant", "content": f"a{i}a"}, *({"role": "tool", "content": r} for r in results)]
        messages = messages if native else spell_tools(messages, [])
        text = without_opened_think(render_chat(tokenizer, messages, [SEARCH_TOOL] if native else None))
        text = text.rpartition(f"a{len(turns) - 1}a")[2]
        places = [text.index(r) for r in turns[-1]]
        between = [text[a + len(r):b] for a, b, r in zip(places, places[1:], turns[-1])]
        return text[:places[0]], between, text[places[-1] + len(turns[-1][-1]):]

    try:
        head, (between,), tail = pieces(["r1r", "r2r"])
        same = [(head, [], tail) == pieces(["r1r"]), (head, [between] * 2, tail) == pieces(["r1r", "r2r", "r3r"]),
                (head, [between], tail) == pieces(["r0r"], ["r1r", "r2r"])]
    except ValueError:
        same = [False]
    eos = tokenizer.eos_token
    if not all(same) or not head.startswith(eos):
        raise DataError(f"the chat template of {tokenizer.name_or_path} writes tool results in a way that depends on "
                        f"the conversation, or does not end a turn with {eos!r}: results cannot be appended token by "
                        "token. Use a Qwen2.5, Qwen3 or other ChatML model")
    return eos, head.removeprefix(eos), between, tail


def harmless(call: Call, unsafe: Sequence[str]) -> list[str]:
    """What a call shows, as texts whose tags and special-token strings are broken by a space."""
    texts = [call.note] if call.note else [text for _, text in call.documents] or ["No passage was found."]
    return [defuse(text, unsafe) for text in texts]


def fit(tokenizer, texts: list[str], wrap: Callable[[list[str]], str], limit: int) -> tuple[list[int], list[str]]:
    """(ids of `wrap(texts)`, texts) in at most `limit` tokens: the texts are cut at their ends, the longest first.

    Of a long text no more is read than `limit` tokens of 16 characters. What `wrap` adds is never cut; where it alone is
    longer than `limit`, it stands with empty texts.
    """
    def encode(some: list[str]) -> list[int]:
        return tokenizer(wrap(some), add_special_tokens=False)["input_ids"]

    texts = [text[:16 * limit] for text in texts]
    ids = encode(texts)
    if len(ids) <= limit:
        return ids, texts
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    lengths = [len(row) for row in encoded["input_ids"]]
    room = limit - len(encode([""] * len(texts)))
    while True:
        cap = bisect_right(range(max(lengths) + 1), room, key=lambda c: sum(min(n, c) for n in lengths)) - 1
        cut = [text if n <= cap else text[:offsets[cap - 1][1] if cap > 0 else 0].rstrip()
               for text, n, offsets in zip(texts, lengths, encoded["offset_mapping"])]
        ids = encode(cut)
        if len(ids) <= limit or cap <= 0:
            return ids, cut
        room -= len(ids) - limit


# --------------------------------------------------------------------------------- opening a task


def open_task(name: str, cfg: EpisodeConfig, tokenizer, retriever: RetrieverConfig,
              examples: str = "") -> SearchTask | AgentTask:
    """The task `search` or `agent` with its tools; `examples`: a file of few-shot conversations.

    ConfigError or DataError: no passage texts (retriever.corpus), another corpus than the index was built from, an MCP
    server that does not answer, a chat template that tool results cannot be cut out of.
    """
    if retriever.across_ranks and not cfg.mcp:
        raise ConfigError("retriever.across_ranks=true needs every rank to search at the same time, and in "
                          f"task={name} ranks have different numbers of rounds; serve the index (serve.py, "
                          "retriever.kind=remote), or set it to false")
    if not retriever.corpus and not cfg.mcp:
        raise ConfigError(f"task={name} shows passages to the model: give retriever.corpus=FILE, which the index was "
                          "built from")
    shown = read_conversations(examples) if examples else []
    kind = {"search": SearchTask, "agent": AgentTask}[name]
    if cfg.mcp:
        return kind(cfg, tokenizer, MCPTools(cfg.mcp, cfg.timeout), shown)
    opened = open_retriever(retriever)
    ids = opened.passage_ids
    if not hasattr(ids, "position"):  # a served index: the order is the corpus file's
        ids = PassageIds([p.id for p in read_corpus(retriever.corpus)])
    texts = Texts(retriever.corpus, ids)
    tools = RetrieverTools(opened, texts.document, cfg.top_k, cfg.timeout, numbered=name == "agent")
    return kind(cfg, tokenizer, tools, shown)


# --------------------------------------------------------------------------------------- rewards


def episode_reward(episode: Episode, question: Question, task: SearchTask | AgentTask,
                   gold_ids: Sequence[str] = ()) -> float | None:
    """What an episode earns: its answer (reward.score_answer) and, where asked for, the gold passages it retrieved.

    The second part is for well-formed episodes (`research`), or those with an answer, alone: searching does not pay for
    leaving the form. None for an episode that failed for a technical reason: to be left out and counted.
    """
    cfg = task.cfg
    if episode.end in FAILED:
        return None
    kind = {"search": "research", "agent": "f1"}[task.name] if cfg.answer_reward == "auto" else cfg.answer_reward
    well_formed = task.well_formed(episode)
    reward = score_answer(episode.prediction, question.golden_answers, well_formed, kind)
    counts = well_formed if kind == "research" else episode.prediction is not None
    if cfg.gold_reward != "none" and counts and gold_ids:
        found = {"recall": gold_recall, "all": all_gold}[cfg.gold_reward](episode.retrieved, gold_ids)
        reward += cfg.gold_weight * found
    return reward


def episode_figures(episode: Episode, question: Question, task: SearchTask | AgentTask,
                    gold_ids: Sequence[str] = ()) -> dict:
    """What is measured of one episode; gold_recall and all_gold are None where no gold passage is known."""
    scores = answer_metrics(episode.prediction, question.golden_answers)
    judged = bool(gold_ids) and episode.end not in FAILED and not task.cfg.mcp  # whose texts have no ids
    return {"em": scores["em"], "f1": scores["f1"], "prediction": episode.prediction,
            "well_formed": episode.end not in FAILED and task.well_formed(episode), "rounds": len(episode.rounds),
            "searches": sum(call.done for call in episode.calls),
            "notes": sum(bool(call.note) for call in episode.calls),
            "gold_recall": gold_recall(episode.retrieved, gold_ids) if judged else None,
            "all_gold": all_gold(episode.retrieved, gold_ids) if judged else None,
            "model_tokens": sum(episode.loss_mask), "end": episode.end}


def answer_means(rows: Sequence[dict]) -> dict[str, float]:
    """Means of `episode_figures`, and the share of the rows that ended in each way (`end_length`, …).

    gold_recall and all_gold: over the judged rows, NaN where there is none.
    """
    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    keys = ("em", "f1", "gold_recall", "all_gold", "searches", "notes", "rounds", "model_tokens")
    return {key: mean([row[key] for row in rows if row[key] is not None]) for key in keys} | {
        f"end_{state}": mean([row["end"] == state for row in rows]) for state in END_STATES if state not in FAILED}


def note_task(folder: str, task: str, template: str) -> None:
    """Write into a model's folder what prompt it was trained with: `task.json`."""
    with atomic_write(os.path.join(folder, "task.json")) as f:
        json.dump({"task": task, "template": template}, f)


def other_task(folder: str, task: str, template: str) -> str:
    """What a model's folder says it was trained with, where that is another prompt than this one; else ""."""
    path = os.path.join(folder, "task.json")
    if not os.path.isfile(path):
        return ""
    trained = json.loads("\n".join(line for _, line in data.read_lines(path)))
    own = {"task": task} | ({"template": template} if task == "search" else {})
    return "" if all(trained.get(key) == value for key, value in own.items()) else json.dumps(trained)


# ---------------------------------------------------------------------------------- trajectories


def trajectory_row(episode: Episode, question: Question, task: SearchTask | AgentTask, request: dict) -> dict:
    """An episode as a line of trajectory.jsonl (the fields of DeepSearch-RL's, and `rollout_id`, `text` and more).

    Few-shot examples are left out of `messages`: a row is a training row for the prompt without them. An assistant
    message's `text` is its turn (`turn_text`). request: model and sampling.
    """
    messages = task.messages(question.question)
    for number, turn in enumerate(episode.rounds):
        messages += turn_messages(turn, number, task.turn_text(turn))
    failed, last = episode.end in FAILED, episode.rounds[-1] if episode.rounds else Round("")
    scores = answer_metrics(episode.prediction, question.golden_answers)
    return {"rollout_id": f"{question.id}#{episode.sample}", "id": question.id, "question": question.question,
            "golden_answers": question.golden_answers, "task": task.name, "messages": messages,
            "tools": task.tools.schemas if task.name == "agent" else [], "template": task.cfg.template,
            "request_meta": request, "response_meta": {"usage": _usage([last])}, "rounds": len(episode.rounds),
            "all_turns_tokens": _usage(episode.rounds), "answer": last.text if episode.end in ENDED else "",
            "pred": episode.prediction or "", "end": episode.end,
            "error": f"{episode.end}: {episode.failure}" if failed else None, "metric_score": scores,
            "well_formed": not failed and task.well_formed(episode),
            "searches": sum(call.done for call in episode.calls),
            "retrieved": None if task.cfg.mcp else episode.retrieved}  # an MCP server's texts have no ids


def turn_messages(turn: Round, number: int, text: str) -> list[dict]:
    """The assistant's message of a turn, and a tool message for each result; `text`: the turn to train on."""
    message = {"role": "assistant", "content": before_calls(text).strip() if turn.calls else text.strip(), "text": text}
    if thoughts := re.findall(r"<think>(.*?)</think>", turn.text, re.DOTALL):
        message["reasoning_content"] = "\n".join(t.strip() for t in thoughts)
    ids = [f"call_{number}_{i}" for i in range(len(turn.calls))]
    if turn.calls:
        message["tool_calls"] = [{"id": id_, "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
            for id_, call in zip(ids, turn.calls)]
    return [message, *({"role": "tool", "tool_call_id": id_, "name": call.name, "content": call.shown}
                       for id_, call in zip(ids, turn.calls) if turn.injected)]


def _usage(rounds: list[Round]) -> dict:
    """Tokens in OpenAI's words; a prompt counts again in every round."""
    prompt, completion = sum(r.prompt_tokens for r in rounds), sum(r.completion_tokens for r in rounds)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
