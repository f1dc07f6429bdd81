"""The search-in-the-loop episode of the tasks `search` and `agent`: sample, read what is asked, search, append, go on.

A file of its own beside rollout.py because the two know different things: rollout.py's engines see token ids and no
text, this file knows tags, tools and templates, and of an engine only `generate(prompts, samplings)`.  The same
`run_episodes` serves training, validation and inference.

Token in, token out.  An episode is one growing list of ids with a mask and log-probabilities beside it: what the model
sampled is appended as sampled (mask 1, never encoded again), what is shown to it is encoded alone and appended with
mask 0 and log-probability 0.  So injected tokens take part in no loss, KL, entropy or denominator:

    prompt, chat glue                                             0
    sampled text, `</search>` and what shares its last token, the sampled EOS    1
    results, notes, error messages, a forced turn end or EOS      0

How it goes:
 1. All active episodes are sampled together, each with its own remaining budget; a turn ends at EOS or a stop string,
    which is looked for in decoded text (a tag has a dozen tokenisations; the token that completes it is kept whole).
 2. Every search of the round goes to the search engine in one call; it has a time-out.  A failed search ends its
    episode as `tool_error`: it is left out and counted, never scored.
 3. What comes back is made harmless (tags and special tokens in it are broken by a blank), cut (the longest documents
    first, never the closing tag), and appended only if a token of room is left behind it.
A query that is malformed or empty, a call that is no JSON or lacks an argument, and a call beyond `max_calls` are
answered with a note that the model can read.

End states (`Episode.end`): answered, no_answer (it ended without an answer), length (no room), rounds (no turn left),
engine_error and tool_error (technical).  In `search` an answer ends an episode, whatever follows it in the turn, and a
query counts wherever it stands (inside an open think block the form is then wrong).  In `agent` a call outside of the
thinking goes on, an answer beside it or not, as in the original, and a turn without one is the last.

Every round gives the engine the whole conversation again: an engine with a prefix cache (vLLM) computes only what is
new, the embedded one computes it again.

Sources: ReSearch (arXiv 2503.19470) and its code for `search`; DeepSearch-RL and the hermes format of Qwen for `agent`.
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
from typing import Literal

import data
from config import ConfigError
from data import DataError, Question, read_corpus
from engines.base import Rollout, RolloutError, Sampling
from episodes.tools import Call, MCPTools, parse_tool_calls, RetrieverTools, SEARCH_TOOL, spoken
from prompts import (agent_messages, defuse, encode_chat, encode_text, eos_token_ids, read_conversations, render_chat, SEARCH_DIALOGUE,
                     search_messages, search_text, special_strings,
                     spell_tools, tool_call_text)
from retriever import open_retriever, RetrieverConfig
from reward import (all_gold, answer_metrics, extract_answer, extract_boxed, gold_recall,
                    score_answer, search_well_formed)
from runs import atomic_write
from search.passages import PassageIds, Texts

ANSWERED, NO_ANSWER, LENGTH, ROUNDS = "answered", "no_answer", "length", "rounds"
ENDED = (ANSWERED, NO_ANSWER)  # end states of episodes that the model itself brought to an end
FAILED = ("engine_error", "tool_error")  # end states of episodes that are left out, not scored
END_STATES = (ANSWERED, NO_ANSWER, LENGTH, ROUNDS, *FAILED)
TAGS = tuple(f"<{slash}{name}>" for slash in ("", "/") for name in (
    "think", "search", "result", "answer", "tools", "tool_call", "tool_response"))


@dataclass
class EpisodeConfig:
    top_k: int = 5
    """passages a search shows"""
    max_rounds: int = 10
    """turns of the model; an episode that asks for another search in its last one ends as `rounds`"""
    max_calls: int = 10
    """searches (tool calls) of an episode that are carried out; the ones after it get a note"""
    calls_per_round: int = 4
    """agent: calls of one turn that are carried out; the others get a note"""
    result_tokens: int = 1024
    """tokens of one result at most, tags included; documents are cut to fit, the longest first"""
    turn_tokens: int | None = None
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
    """text file with rules to use in place of SEARCH_INSTRUCTION (SEARCH_DIALOGUE) or AGENT_INSTRUCTION"""
    mcp: str = ""
    """agent: MCP server that has the tools, a URL or the command that starts one; empty: the retriever, in process"""
    timeout: float = 60.0
    """seconds for the searches of a round; those that take longer have failed"""
    answer_reward: Literal["auto", "research", "em", "f1"] = "auto"
    """what an answer earns (reward.score_answer); auto: research for `search`, f1 for `agent`"""
    gold_reward: Literal["none", "recall", "all"] = "none"
    """what retrieving gold passages adds: nothing, their share, or 1 for all of them (needs qrels)"""
    gold_weight: float = 0.5
    """weight of gold_reward beside the answer's"""


def check_episode(cfg: EpisodeConfig, task: str) -> None:
    """ConfigError for settings that cannot work; loads nothing."""
    for key in ("top_k", "max_rounds", "max_calls", "calls_per_round", "timeout", "gold_weight"):
        if not getattr(cfg, key) > 0:
            raise ConfigError(f"episode.{key}={getattr(cfg, key)} must be above 0")
    if cfg.result_tokens < 32:
        raise ConfigError(f"episode.result_tokens={cfg.result_tokens}: tags and notes alone take about 30; set >= 32")
    if cfg.turn_tokens is not None and cfg.turn_tokens < 1:
        raise ConfigError(f"episode.turn_tokens={cfg.turn_tokens} must be at least 1, or null")
    if cfg.instruction and not os.path.isfile(cfg.instruction):
        raise ConfigError(f"episode.instruction={cfg.instruction} is no file; give a text file, or leave it empty")
    if task != "agent" and cfg.mcp:
        raise ConfigError("episode.mcp is for task=agent; task=search asks the retriever")
    if task == "agent" and cfg.template == "base":
        raise ConfigError("episode.template=base is for task=search; task=agent needs a chat template")
    if cfg.mcp and cfg.gold_reward != "none":
        raise ConfigError("episode.gold_reward needs the ids of what was found, which an MCP server does not tell; use "
                          "the retriever in process (mcp empty), or gold_reward=none")


# ---------------------------------------------------------------------------------------------------------- the episode


@dataclass
class Round:
    """One turn of the model and what was appended behind it."""

    text: str  # as sampled, decoded, EOS left out
    calls: list[Call] = field(default_factory=list)
    injected: str = ""
    prompt_tokens: int = 0  # of the engine's request: everything so far
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
        """Ids of the passages that the episode was shown, each once, in order.

        Not of results that no longer fitted, nor where `fit` left nothing of a call's documents (of each or of none).
        """
        calls = [call for r in self.rounds if r.injected for call in r.calls if call.shown]
        return list(dict.fromkeys(id_ for call in calls for id_, _ in call.documents if id_ is not None))

    def append(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        """The only place where an episode grows: ids, mask and log-probabilities together."""
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask] * len(ids)


def run_episodes(engine, prompts: Sequence[Sequence[int]], samplings: Sampling | Sequence[Sampling],
                 task: SearchTask | AgentTask, context: int | None = None,
                 progress: Callable[[int, int, float], None] | None = None) -> list[Episode]:
    """Episodes of every prompt (token ids), the n samples of a prompt side by side, with group_id its place.

    `max_tokens` of a sampling is the episode's whole budget, injected tokens included; `context`: positions of the
    model, prompt included.  `progress(finished, total, 0.0)` is called after every round.
    Raises RolloutError for a prompt that leaves no room, and what the engine raises.
    """
    samplings = [samplings] * len(prompts) if isinstance(samplings, Sampling) else list(samplings)
    if len(samplings) != len(prompts):
        raise RolloutError(f"{len(prompts)} prompts and {len(samplings)} samplings: give one, or one for each prompt")
    ending = int(task.cfg.stop_at_answer)  # room for the EOS that is then put behind an answer
    budgets = [min(s.max_tokens, (context or 1 << 60) - len(p)) - ending for p, s in zip(prompts, samplings)]
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
        asking = [e for e, rollout in zip(active, sampled, strict=True) if _advance(e, rollout, number, task)]
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

    In the first round the samples of a prompt are one request; after it each has a conversation of its own, and a seed
    made of the prompt and the prompt's seed, so that draws depend neither on what else is sampled nor on the process.
    """
    def request(e: Episode, n: int) -> Sampling:
        s, left = samplings[e.group_id], budgets[e.group_id] - len(e.response_ids)
        seed = s.seed
        if number and seed is not None:
            seed = random.Random(f"round {seed} {e.sample} {number} {e.prompt_ids}").getrandbits(62)
        most = min(left, task.cfg.turn_tokens or left)
        return dataclasses.replace(s, n=n, seed=seed, stop=task.stop, max_tokens=most)

    if number == 0:
        firsts = [e for e in active if e.sample == 0]
        return engine.generate([e.prompt_ids for e in firsts],
                               [request(e, samplings[e.group_id].n) for e in firsts])
    return engine.generate([e.prompt_ids + e.response_ids for e in active],
                           [request(e, 1) for e in active])


def _advance(episode: Episode, sampled: Rollout, number: int, task: SearchTask | AgentTask) -> bool:
    """Append a sampled turn and read it: True where it asks for something, else the episode has ended."""
    before = len(episode.prompt_ids) + len(episode.response_ids)
    episode.append(sampled.response_ids, sampled.logprobs, int(sampled.end != "engine_error"))
    ended = sampled.end == "eos"
    text = task.decode(sampled.response_ids[:-1] if ended else sampled.response_ids)
    episode.rounds.append(Round(text, [], "", before, len(sampled.response_ids)))
    if sampled.end == "engine_error":
        episode.end, episode.failure = "engine_error", "the engine's logits were no numbers"
        return False
    if sampled.end == "length":
        episode.end = LENGTH
        return False
    calls = task.read(text)
    if not calls:
        if ended:
            episode.ended = sampled.response_ids[-1] == task.eos_id
        elif task.cfg.stop_at_answer:  # forced: the model did not write it
            episode.append([task.eos_id], [0.0], 0)
            episode.ended = True
        episode.prediction = task.answer(text)
        episode.end = NO_ANSWER if episode.prediction is None else ANSWERED
        return False
    episode.rounds[-1].calls = calls
    used, good = sum(call.done for call in episode.calls), [call for call in calls if not call.note]
    after = used + min(len(good), task.cfg.calls_per_round)
    if number + 1 == task.cfg.max_rounds or task.cfg.at_cap == "stop" and after > task.cfg.max_calls:
        episode.end = ROUNDS
        return False
    for place, call in enumerate(good):
        if used + place >= task.cfg.max_calls:
            call.note = task.cap_note
        elif place >= task.cfg.calls_per_round:
            call.note = f"Not carried out: one turn may hold {task.cfg.calls_per_round} calls."
    return True


def _append_results(episode: Episode, budget: int, task: SearchTask | AgentTask) -> None:
    """Show the results of the last turn's calls, if they fit with at least one token of room behind them."""
    turn = episode.rounds[-1]
    if failure := next((call.failure for call in turn.calls if call.failure), ""):
        episode.end, episode.failure = "tool_error", failure
        return
    ids, text = task.show(turn.calls, episode.response_ids[-1])
    if len(episode.response_ids) + len(ids) >= budget:
        episode.end = LENGTH
        return
    episode.append(ids, [0.0] * len(ids), 0)
    turn.injected = text


# -------------------------------------------------------------------------------------------------------- the two tasks


class SearchTask:
    """ReSearch's form: think, search, result and answer blocks in one assistant turn, the answer in a box.

    A round ends at `</search>`.  The query is what stands between the last `<search>` before it and the tag; with
    another tag in between it is malformed.  ` <result>\n…\n</result>` is what follows, leading blank included: so its
    tokens are the same whether the text before it is encoded with it or not.
    """

    name = "search"
    cap_note = "No further search is possible. Give the answer with what is known."
    empty_note = "Nothing was searched: the query is empty."
    malformed_note = "Nothing was searched: a query stands between an opening and a closing search tag, without others."

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: list[list[dict]] = ()):
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.stop = ("</search>", "</answer>") if cfg.stop_at_answer else ("</search>",)
        self.eos_id = eos_token_ids(tokenizer)[0]
        self.instruction = read_instruction(cfg)
        self.unsafe = [*TAGS, *special_strings(tokenizer)]

    def messages(self, question: str) -> list[dict]:
        """The conversation's beginning, without examples."""
        base = self.cfg.template == "base"
        return search_messages(question, (), self.instruction or (SEARCH_DIALOGUE if base else ""))

    def prompt(self, question: str) -> list[int]:
        if self.cfg.template == "base":
            text = search_text(question, self.examples, self.instruction)
            return encode_text(self.tokenizer, text)
        return encode_chat(self.tokenizer, search_messages(question, self.examples, self.instruction))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def read(self, text: str) -> list[Call]:
        """The search of a turn; none where it holds an answer or no closing tag: then it is the last turn."""
        end = text.find("</search>")
        if end < 0 or 0 <= text.find("</answer>") < end:
            return []
        start = text.rfind("<search>", 0, end)
        query = text[start + len("<search>"):end] if start >= 0 else ""
        if start < 0 or any(tag in query for tag in TAGS):
            return [Call("search", {"query": query}, self.malformed_note)]
        query = " ".join(query.split())
        return [Call("search", {"query": query}, "" if query else self.empty_note)]

    def show(self, calls: list[Call], last_id: int) -> tuple[list[int], str]:
        """(ids, text) of the result block of the one call of a turn."""
        (call,) = calls
        def wrap(texts: list[str]) -> str:
            call.shown = "\n\n".join(texts).strip()
            return f" <result>\n{call.shown}\n</result>"
        return fit(self.tokenizer, harmless(call, self.unsafe), wrap, self.cfg.result_tokens)

    def turn_text(self, turn: Round) -> str:
        """A turn as a trajectory holds it: as sampled."""
        return turn.text

    def answer(self, text: str) -> str | None:
        """The box in the last answer block; for Search-R1's reward, which knows no box, else the block itself."""
        block = extract_answer(text)
        boxed = None if block is None else extract_boxed(block)
        return block if boxed is None and self.cfg.answer_reward == "em" else boxed

    def well_formed(self, episode: Episode) -> bool:
        """Its own text keeps ReSearch's form, and it ended with EOS."""
        return episode.ended and search_well_formed(episode.segments)


class AgentTask:
    """Hermes tool calls (Qwen2.5, Qwen3): the model's turn ends with EOS, results come as the next user turn.

    The prompt is the tokenizer's own chat template with the tools in it.  After that the template is never rendered
    over sampled turns: what it writes between a turn and the next is cut out of a dummy conversation once (`glue`).
    A template that knows no tools gets them in the system message, and results as user messages (spell_tools).
    """

    name = "agent"
    cap_note = "error: no further calls are possible. Give the answer with what is known."

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, examples: list[list[dict]] = ()):
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.stop = ("</answer>",) * cfg.stop_at_answer + ("}}",) * cfg.bare_calls
        self.eos_id = eos_token_ids(tokenizer)[0]
        self.instruction = read_instruction(cfg)
        self.native = not cfg.bare_calls and template_knows_tools(tokenizer, tools.schemas)
        self.glue = derive_glue(tokenizer, self.native)
        self.unsafe = [*TAGS, *special_strings(tokenizer)]

    def messages(self, question: str) -> list[dict]:
        """The conversation's beginning, without examples."""
        return agent_messages(question, (), self.instruction)

    def prompt(self, question: str) -> list[int]:
        messages = agent_messages(question, self.examples, self.instruction)
        if self.native:
            return encode_chat(self.tokenizer, messages, self.tools.schemas)
        return encode_chat(self.tokenizer, spell_tools(messages, self.tools.schemas, self.cfg.bare_calls))

    decode = SearchTask.decode

    def read(self, text: str) -> list[Call]:
        """The calls of a turn; none: it is the last turn."""
        return parse_tool_calls(text, self.tools.schemas, self.cfg.bare_calls)

    def turn_text(self, turn: Round) -> str:
        """A turn as a trajectory holds it: as sampled, bare calls in the tags they lack."""
        if not (self.cfg.bare_calls and turn.calls and all(call.done for call in turn.calls)):
            return turn.text
        return "\n".join(tool_call_text({"name": c.name, "arguments": c.arguments}) for c in turn.calls)

    def show(self, calls: list[Call], last_id: int) -> tuple[list[int], str]:
        """(ids, text) of the turn with the results of all calls, in their order, up to where the model goes on."""
        end, head, between, tail = self.glue
        shown = []
        for call in calls:
            def wrap(texts: list[str], call=call) -> str:
                call.shown = "\n\n".join(texts).strip()
                return call.shown
            shown.append(fit(self.tokenizer, harmless(call, self.unsafe), wrap, self.cfg.result_tokens)[1])
        text = head + between.join(shown) + tail
        if last_id != self.eos_id:  # the turn ended at another of the model's EOS ids: its end is put there, untrained
            text = end + text
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], text

    def answer(self, text: str) -> str | None:
        """The last answer block outside of the thinking."""
        return extract_answer(spoken(text))

    def well_formed(self, episode: Episode) -> bool:
        """It ended with EOS and an answer, and every call it wrote could be carried out."""
        return episode.ended and episode.prediction is not None and all(call.done for call in episode.calls)


def read_instruction(cfg: EpisodeConfig) -> str:
    """The rules in `cfg.instruction`'s file; "" where none is named."""
    return "\n".join(line for _, line in data.read_lines(cfg.instruction)).strip() if cfg.instruction else ""


def template_knows_tools(tokenizer, schemas: list[dict]) -> bool:
    """Does the chat template write tool schemas, and results of tools, into its text?"""
    chat = [{"role": "user", "content": "u"}]
    try:
        plain = render_chat(tokenizer, chat)
        text = render_chat(tokenizer, chat, schemas)
        after = render_chat(tokenizer, [*chat, {"role": "assistant", "content": "a"},
                                             {"role": "tool", "content": "t7t"}], schemas)
    except DataError as e:
        if not tokenizer.chat_template:
            raise
        print(f"tools go into the system message: {e}", file=sys.stderr)
        return False
    return text != plain and all(s["function"]["name"] in text for s in schemas) and "t7t" in after


def derive_glue(tokenizer, native: bool) -> tuple[str, str, str, str]:
    """What the template writes around results: (end of the model's turn, head, between two results, tail).

    `tail` runs up to where the model goes on.  Cut out of a dummy conversation and checked on others: with one to three
    results, in a first and in a second round.  DataError for a template whose glue depends on the history.
    """
    def render(*turns: list[str]) -> str:
        messages = [{"role": "user", "content": "u0u"}]
        for i, results in enumerate(turns):
            messages += [{"role": "assistant", "content": f"a{i}a"}, *({"role": "tool", "content": r} for r in results)]
        messages = messages if native else spell_tools(messages, [])
        text = render_chat(tokenizer, messages, [SEARCH_TOOL] if native else None)
        return text.rstrip().removesuffix("<think>") if text.rstrip().endswith("<think>") else text

    def pieces(*turns: list[str]) -> tuple[str, list[str], str]:
        """Behind the last of the model's turns: (up to the first result, between results, behind the last)."""
        text = render(*turns).rpartition(f"a{len(turns) - 1}a")[2]
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


# ---------------------------------------------------------------------------------------------------- what is injected


def harmless(call: Call, unsafe: Sequence[str]) -> list[str]:
    """What a call shows, as texts whose tags and special-token strings are broken by a blank."""
    if call.note:
        return [defuse(call.note, unsafe)]
    return [defuse(text, unsafe) for _, text in call.documents] or ["No passage was found."]


def fit(tokenizer, texts: list[str], wrap: Callable[[list[str]], str], limit: int) -> tuple[list[int], str]:
    """(ids, text) of `wrap(texts)` in at most `limit` tokens: the texts are cut at their ends, the longest first.

    What `wrap` adds is never cut; where it alone is longer than `limit`, it stands with empty texts.
    """
    def encode(some: list[str]) -> list[int]:
        return tokenizer(wrap(some), add_special_tokens=False)["input_ids"]

    ids = encode(texts)
    if len(ids) <= limit:
        return ids, wrap(texts)
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    lengths = [len(row) for row in encoded["input_ids"]]
    room = limit - len(encode([""] * len(texts)))
    while True:
        cap = bisect_right(range(max(lengths) + 1), room, key=lambda c: sum(min(n, c) for n in lengths)) - 1
        cut = [text if n <= cap else text[:offsets[cap - 1][1] if cap > 0 else 0].rstrip()
               for text, n, offsets in zip(texts, lengths, encoded["offset_mapping"])]
        ids = encode(cut)
        if len(ids) <= limit or cap <= 0:
            return ids, wrap(cut)
        room -= len(ids) - limit


# ------------------------------------------------------------------------------------------------------- opening a task

def open_task(name: str, cfg: EpisodeConfig, tokenizer, retriever: RetrieverConfig,
              examples: str = "") -> SearchTask | AgentTask:
    """The task `search` or `agent` with its tools; `examples`: a file of few-shot conversations.

    ConfigError or DataError: no passage texts (retriever.corpus), another corpus than the index was built from, an MCP
    server that does not answer, a chat template that tool results cannot be cut out of.
    """
    check_episode(cfg, name)
    if retriever.across_ranks and not cfg.mcp:
        raise ConfigError("retriever.across_ranks=true needs every rank to search at the same time, and in "
                          f"task={name} ranks have different numbers of rounds; serve the index (serve.py, "
                          "retriever.kind=remote), or set it to false")
    shown = read_conversations(examples) if examples else []
    kind = {"search": SearchTask, "agent": AgentTask}[name]
    if cfg.mcp:
        return kind(cfg, tokenizer, MCPTools(cfg.mcp, cfg.timeout), shown)
    if not retriever.corpus:
        raise ConfigError(f"task={name} shows passages to the model: give retriever.corpus=FILE, which the index was "
                          "built from")
    opened = open_retriever(retriever)
    ids = opened.passage_ids
    if not hasattr(ids, "position"):  # a served index: the order is the corpus file's
        ids = PassageIds([p.id for p in read_corpus(retriever.corpus)])
    texts = Texts(retriever.corpus, ids)
    tools = RetrieverTools(opened, texts.document, cfg.top_k, cfg.timeout, numbered=name == "agent")
    return kind(cfg, tokenizer, tools, shown)


# ------------------------------------------------------------------------------------------------------------- rewards

def episode_reward(episode: Episode, question: Question, task: SearchTask | AgentTask,
                   gold_ids: Sequence[str] = ()) -> float | None:
    """What an episode earns: its answer (reward.score_answer) and, where asked for, the gold passages it retrieved.

    The second part is for well-formed episodes (`research`), or those with an answer, alone: searching does not pay for
    leaving the form.  None for an episode that failed for a technical reason: to be left out and counted.
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
    """What is measured of one episode: em, f1, the form, searches, gold passages retrieved (None without any known)."""
    scores = answer_metrics(episode.prediction, question.golden_answers)
    judged = bool(gold_ids) and episode.end not in FAILED and not task.cfg.mcp  # whose texts have no ids
    calls = episode.calls
    return {"em": scores["em"], "f1": scores["f1"], "prediction": episode.prediction,
            "well_formed": episode.end not in FAILED and task.well_formed(episode), "rounds": len(episode.rounds),
            "searches": sum(call.done for call in calls), "notes": sum(bool(call.note) for call in calls),
            "gold_recall": gold_recall(episode.retrieved, gold_ids) if judged else None,
            "all_gold": all_gold(episode.retrieved, gold_ids) if judged else None,
            "model_tokens": sum(episode.loss_mask)}


def answer_means(rows: Sequence[dict]) -> dict[str, float]:
    """Means of `episode_figures` over rows; of the gold passages over those that are judged, NaN where none is."""
    def mean(key: str) -> float:
        values = [row[key] for row in rows if row[key] is not None]
        return sum(values) / len(values) if values else float("nan")

    return {key: mean(key) for key in ("em", "f1", "gold_recall", "all_gold", "searches", "notes", "rounds",
                                       "model_tokens")}


# ----------------------------------------------------------------------------------------------- a checkpoint's prompt

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


# --------------------------------------------------------------------------------------------------------- trajectories


def trajectory_row(episode: Episode, question: Question, task: SearchTask | AgentTask, request: dict) -> dict:
    """An episode as a line of trajectory.jsonl (the fields of DeepSearch-RL's, and `rollout_id`, `text` and more).

    Few-shot examples are left out of `messages`: a row is a training row for the prompt without them.  An assistant
    message's `text` is its turn (`turn_text`); `request`: model and sampling.
    """
    messages = task.messages(question.question)
    for number, turn in enumerate(episode.rounds):
        text = task.turn_text(turn)
        thought, tag, said = text.rpartition("</think>")
        content = thought + tag + said.partition("<tool_call>")[0]
        message: dict = {"role": "assistant", "content": content.strip(), "text": text}
        if thoughts := re.findall(r"<think>(.*?)</think>", turn.text, re.DOTALL):
            message["reasoning_content"] = "\n".join(t.strip() for t in thoughts)
        if turn.calls:
            message["tool_calls"] = [{"id": f"call_{number}_{i}", "type": "function", "function": {
                "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for i, call in enumerate(turn.calls)]
        messages.append(message)
        if turn.injected:
            messages += [{"role": "tool", "tool_call_id": f"call_{number}_{i}", "name": call.name,
                          "content": call.shown} for i, call in enumerate(turn.calls)]
    end, last = episode.end, episode.rounds[-1] if episode.rounds else Round("")
    usage = {"prompt_tokens": last.prompt_tokens, "completion_tokens": last.completion_tokens,
             "total_tokens": last.prompt_tokens + last.completion_tokens}
    prompts, completions = (sum(getattr(r, k) for r in episode.rounds) for k in ("prompt_tokens", "completion_tokens"))
    return {"rollout_id": f"{question.id}#{episode.sample}", "id": question.id, "question": question.question,
            "golden_answers": question.golden_answers, "task": task.name, "messages": messages,
            "tools": task.tools.schemas if task.name == "agent" else [], "template": task.cfg.template,
            "request_meta": request, "response_meta": {"usage": usage}, "rounds": len(episode.rounds),
            "all_turns_tokens": {"prompt_tokens": prompts, "completion_tokens": completions,
                                 "total_tokens": prompts + completions},
            "answer": last.text if end in (ANSWERED, NO_ANSWER) else "", "pred": episode.prediction or "",
            "end": end, "error": f"{end}: {episode.failure}" if end in FAILED else None,
            "metric_score": answer_metrics(episode.prediction, question.golden_answers),
            "well_formed": end not in FAILED and task.well_formed(episode),
            "searches": sum(call.done for call in episode.calls),
            "retrieved": None if task.cfg.mcp else episode.retrieved}  # an MCP server's texts have no ids


def encode_trajectory(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a trajectory row, token for token what a rollout of the same text would have.

    As encode_example: prompt, turns and results are encoded apart and joined; turns and the EOS behind the model's
    own last word are trained, results and glue are not.  DataError: a row that is no trajectory of `search` or `agent`.
    """
    messages, name = row.get("messages"), row.get("task")
    if name not in ("search", "agent") or not isinstance(messages, list):
        raise DataError(f"{row.get('rollout_id')}: task is {name!r}; a trajectory has messages, and task search or "
                        "agent")
    if row.get("end", ANSWERED) not in ENDED:
        raise DataError(f"{row.get('rollout_id')}: the episode ended as {row['end']}, in the middle of something; train "
                        "on episodes that ended themselves (report.py writes trajectory_success.jsonl)")
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
    if not first or messages[-1]["role"] != "assistant" or not all(
            isinstance(m.get("text"), str) for m in messages if m["role"] == "assistant"):
        raise DataError(f"{row.get('rollout_id')}: messages must run from a question to an assistant's answer, and "
                        "every assistant message needs its `text`; infer.py writes such rows")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    eos_id, start = eos_token_ids(tokenizer)[0], messages[:first]
    if name == "agent":
        native = template_knows_tools(tokenizer, row["tools"])
        _, head, between, tail = derive_glue(tokenizer, native)
        ids = (encode_chat(tokenizer, start, row["tools"]) if native
               else encode_chat(tokenizer, spell_tools(start, row["tools"])))
    elif row.get("template") == "base":
        text = search_text(start[-1]["content"], (), start[0]["content"])
        ids = encode_text(tokenizer, text)
    else:
        ids = encode_chat(tokenizer, start)
    mask, at = [0] * (len(ids) - 1), first
    while at < len(messages):
        turn = encode(messages[at]["text"])
        last = at + 1 == len(messages)
        turn += [eos_id] if last or name == "agent" else []
        results = []
        while (at := at + 1) < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at]["content"])
        shown = [] if last else encode(head + between.join(results) + tail if name == "agent"
                                       else f" <result>\n{results[0]}\n</result>")
        ids, mask = ids + turn + shown, mask + [1] * len(turn) + [0] * len(shown)
    return ids, mask
