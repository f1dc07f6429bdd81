"""The tasks `search` and `agent`: prompts, calls in a turn, results as shown, answer and reward.

Sources: ReSearch (arXiv 2503.19470) and its code for `search`; DeepSearch-RL and Qwen's hermes
format of tool calls for `agent`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import data
import prompts
from config import ConfigError, Only, above, at_least, between
from data import DataError, Question, one_line
from distributed import gather_rows
from episodes.episode import (
    END_STATES,
    LEAST_ROOM,
    Episode,
    answer_block,
    run_episodes,
    trajectory_row,
)
from episodes.tools import NOTHING_FOUND, SEARCH_TOOL, Call, parse_tool_calls
from retriever import retriever_settings
from reward import (
    ANSWER_METRICS,
    all_gold,
    answer_metrics,
    extract_boxed,
    gold_recall,
    score_answer,
    search_well_formed,
)
from scoring.health import answer_means

TAG_NAMES = ("think", "search", "result", "answer", "tools", "tool_call", "tool_response")
TAGS = tuple(f"<{slash}{name}>" for slash in ("", "/") for name in TAG_NAMES)
AGENT, SEARCH = Only("task", ("agent",)), Only("task", ("search",))


@dataclass
class EpisodeConfig:
    top_k: Annotated[int, at_least(1)] = 5
    """passages that a search shows"""
    max_rounds: Annotated[int, at_least(1)] = 10
    """turns of the model; an episode that asks for a search in its last ends as `rounds`"""
    max_calls: Annotated[int, at_least(1)] = 10
    """searches (tool calls) of an episode that are carried out; later ones get a note"""
    calls_per_round: Annotated[int, at_least(1), AGENT] = 4
    """calls of one turn that are carried out; the others get a note"""
    result_tokens: Annotated[int, at_least(32)] = 512
    """tokens of one result at most, tags included; documents are cut to fit, the longest first"""
    answer_share: Annotated[float, between(0, 0.9)] = 0.125
    """part of max_response_tokens that results leave for the answer"""
    turn_tokens: Annotated[int | None, at_least(1)] = None
    """new tokens of one turn at most; null: whatever max_response_tokens leaves"""
    stop_at_answer: bool = False
    """end an episode at </answer>, with an untrained EOS: for models that never learnt to stop"""
    bare_calls: Annotated[bool, AGENT] = False
    """calls are JSON ended by `}}`, for a model that was never taught the tool_call tags"""
    template: Annotated[Literal["instruct", "base"], SEARCH] = "instruct"
    """a chat (instruct), or one string for a model without a chat template (base)"""
    instruction: str = ""
    """text file with rules to use in place of those of prompts.py"""
    mcp: Annotated[str, AGENT] = ""
    """MCP server with the tools, a URL or a command; empty: the retriever"""
    timeout: Annotated[float, above(0)] = 60.0
    """seconds for the searches of a round; those that take longer have failed"""
    answer_reward: Literal["auto", "research", "em", "f1"] = "auto"
    """what an answer earns (reward.score_answer); auto: research for `search`, f1 for `agent`"""
    gold_reward: Literal["none", "recall", "all"] = "none"
    """what retrieved gold passages add: nothing, their share, or 1 for all of them (needs qrels)"""
    gold_weight: Annotated[float, above(0), Only("gold_reward", ("recall", "all"))] = 0.5
    """weight of gold_reward beside the answer's"""
    penalty: Annotated[float, at_least(0)] = 0.0
    """taken from the reward for no or an empty answer, and again for no search: F1 alone can drift
    into not answering (arXiv 2602.19526)"""


def check_episode(cfg: EpisodeConfig, budget: int) -> None:
    """ConfigError for settings that cannot work; loads nothing. budget: max_response_tokens."""
    room = budget - int(cfg.answer_share * budget)
    if cfg.instruction:
        prompts.read_instruction(cfg.instruction)
    if room < 2 * LEAST_ROOM:
        raise ConfigError(
            f"max_response_tokens={budget} leaves {room} tokens beside episode.answer_share="
            f"{cfg.answer_share:g}, a query and its result need {2 * LEAST_ROOM}: raise the one or "
            "lower the other"
        )
    if cfg.mcp and cfg.gold_reward != "none":
        raise ConfigError(
            "episode.gold_reward needs the ids of passages, which episode.mcp lacks: leave one out"
        )


class Task:
    """What `search` and `agent` share; the methods that rewriting has as well: tasks.py.

    `said` is the text in which a call or an answer counts, `turn` its last part, sampled in one
    piece: in `search` all turns form one message, in `agent` each is its own.
    """

    name: str
    one_message: bool
    cap_note: str  # what a call beyond a limit is answered
    rules: dict[str, str]  # by EpisodeConfig.template
    answer_reward: str  # what answer_reward=auto means
    stop: tuple[str, ...] = ()
    items, best = "questions", "dev_f1"
    equal_calls = False  # numbers of turns differ
    statuses = (*END_STATES, "too_long")
    read_items = staticmethod(data.read_questions)

    def __init__(
        self,
        cfg: EpisodeConfig,
        tokenizer,
        tools,
        examples: Sequence[list[dict]] = (),
        golds: dict[str, list[str]] | None = None,
    ):
        """tools: RetrieverTools or MCPTools; examples: few-shot conversations; golds: question id →
        gold passages, where they are known."""
        self.cfg, self.tokenizer, self.tools, self.examples = cfg, tokenizer, tools, examples
        self.golds = golds or {}
        self.instruction = prompts.read_instruction(cfg.instruction, self.rules[cfg.template])
        self.stop += ("</answer>",) * cfg.stop_at_answer
        self.eos_id = prompts.eos_token_ids(tokenizer)[0]
        self.unsafe = [*TAGS, *prompts.special_strings(tokenizer)]

    def rewarded_items(self, path: str) -> list[Question]:
        return data.read_questions(path)

    def prompt(self, question: Question) -> list[int]:
        return self.encode(self.messages(question.question, self.examples))

    def rollouts(self, engine, prompts, samplings, progress=None) -> list[Episode]:
        return run_episodes(engine, prompts, samplings, self, engine.max_length, progress)

    def unsampled(self, prompt_ids: list[int], sample: int) -> Episode:
        """A placeholder for the episode of a prompt that is too long."""
        return Episode(prompt_ids, [], [], [], 0, "too_long", sample)

    def read(self, episode: Episode) -> Episode:
        """The episode itself: it is parsed while it is sampled."""
        return episode

    def measure(self, episodes: list[Episode], questions: list[Question]) -> list[dict]:
        """Figures of each episode; those of gold passages are None where there are none."""
        rows = []
        for e, question in zip(episodes, questions):
            scores = answer_metrics(e.prediction, question.golden_answers)
            golds = self.golds.get(question.id, ())
            judged = golds and not e.failed and not self.cfg.mcp  # whose texts have no ids
            rows.append(
                {
                    "em": scores["em"],
                    "f1": scores["f1"],
                    "prediction": e.prediction,
                    "well_formed": e.well_formed,
                    "rounds": len(e.rounds),
                    "searches": e.searches,
                    "notes": sum(bool(call.note) for call in e.calls),
                    "gold_recall": gold_recall(e.retrieved, golds) if judged else None,
                    "all_gold": all_gold(e.retrieved, golds) if judged else None,
                    "model_tokens": sum(e.loss_mask),
                    "end": e.end,
                    "failed": e.failed,
                }
            )
        return rows

    def reward(self, episode: Episode, figures: dict) -> float:
        """The answer's reward (score_answer), that of retrieved gold passages if the episode is
        well formed (`research`) or has an answer (others), less the penalties."""
        cfg, well_formed = self.cfg, episode.well_formed
        kind = self.answer_reward if cfg.answer_reward == "auto" else cfg.answer_reward
        reward = score_answer(figures, well_formed, kind)
        counts = well_formed if kind == "research" else episode.prediction is not None
        share = {"none": None, "recall": figures["gold_recall"], "all": figures["all_gold"]}
        if counts and share[cfg.gold_reward] is not None:
            reward += cfg.gold_weight * share[cfg.gold_reward]
        silent = not (episode.prediction or "").strip()
        return reward - cfg.penalty * (silent + (episode.searches == 0))

    def validate(self, episodes: list[Episode], questions: list, dev: list) -> dict:
        """Means over the episodes of all ranks; a failed one scores 0 and is counted."""
        rows = gather_rows(self.measure(episodes, questions))
        return answer_means(rows) | {
            "failed": sum(row["failed"] for row in rows),
            "format_rate": sum(row["well_formed"] for row in rows) / len(rows),
        }

    def row(self, question: Question, episode: Episode, request: dict) -> dict:
        """Its trajectory with its reward."""
        (figures,) = self.measure([episode], [question])
        sampled = not figures["failed"] and episode.end != "too_long"
        reward = self.reward(episode, figures) if sampled else None
        return trajectory_row(episode, question, self, request) | {"reward": reward}

    def means(self, rows: list[dict]) -> dict[str, float]:
        scores = [row | row["metric_score"] for row in rows]
        names = (*ANSWER_METRICS, "well_formed", "searches")
        return {name: round(sum(s[name] for s in scores) / len(rows), 4) for name in names}

    def settings(self, cfg) -> dict:
        episode = {f"episode.{k}": v for k, v in asdict(self.cfg).items() if k != "timeout"}
        return {"task": self.name} | retriever_settings(cfg.retriever) | episode

    def seconds(self) -> dict[str, float]:
        return {"seconds_search": self.tools.seconds}

    def close(self) -> None:
        self.tools.close()

    def messages(self, question: str, examples: Sequence[list[dict]] = ()) -> list[dict]:
        """The beginning of a conversation: instruction, examples, question."""
        shown = [message for example in examples for message in example]
        user = {"role": "user", "content": one_line(question)}
        return [{"role": "system", "content": self.instruction}, *shown, user]

    def show(self, calls: list[Call], last_id: int, room: int) -> tuple[list[int], str]:
        """(ids, text) of a turn's results, in at most `room` tokens; sets `shown` of each call.

        last_id: the turn's last token. A result has at most `result_tokens` and an equal share of
        the room that is left; tags and special tokens in it are broken by a space.
        """
        shown = [[c.note] if c.note else [text for _, text in c.documents] for c in calls]
        pairs = [(call, texts or [NOTHING_FOUND]) for call, texts in zip(calls, shown)]
        pairs.sort(key=lambda pair: sum(map(len, pair[1])))  # short results leave room to long ones
        for i, (call, texts) in enumerate(pairs):
            texts = [prompts.defuse(text, self.unsafe) for text in texts]
            limit = min(self.cfg.result_tokens, room // (len(calls) - i))
            call.shown, used = fit(self.tokenizer, texts, lambda t: self.wrap([t], last_id), limit)
            room -= used
        text = self.wrap([call.shown for call in calls], last_id)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], text


class SearchTask(Task):
    """ReSearch's form: think, search, result and answer blocks in one assistant turn.

    A round ends at `</search>`. A result begins with a space: its tokens are the same whether the
    text before it is encoded with it or not.
    """

    name, one_message, stop, answer_reward = "search", True, ("</search>",), "research"
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

    def find_calls(self, said: str, turn: str, stopped: bool) -> list[Call]:
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
    knows none. Sampled turns are never rendered again: what the template writes between two is cut
    out of a dummy conversation once (`glue`).
    """

    name, one_message, answer_reward = "agent", False, "f1"
    rules = {"instruct": prompts.AGENT_INSTRUCTION}
    cap_note = "error: no further calls are possible. Give the answer with what is known."

    def __init__(self, cfg: EpisodeConfig, tokenizer, tools, *more):
        super().__init__(cfg, tokenizer, tools, *more)
        self.stop += ("}}",) * cfg.bare_calls
        self.native = not cfg.bare_calls and prompts.template_knows_tools(tokenizer, tools.schemas)
        self.glue = derive_glue(tokenizer, self.native)

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of the beginning of a conversation."""
        schemas = self.tools.schemas
        if self.native:
            return prompts.encode_chat(self.tokenizer, messages, schemas)
        spelled = prompts.spell_tools(messages, schemas, self.cfg.bare_calls)
        return prompts.encode_chat(self.tokenizer, spelled)

    def find_calls(self, said: str, turn: str, stopped: bool) -> list[Call] | None:
        """The calls of a turn; None if it was stopped inside a think block or a call."""
        thinks = turn.rfind("<think>") > turn.rfind("</think>")
        if stopped and (thinks or self.ends_in_call(prompts.outside_thoughts(turn))):
            return None
        return parse_tool_calls(turn, self.tools.schemas, self.cfg.bare_calls)

    def ends_in_call(self, text: str) -> bool:
        """Does a text end inside a call? For bare calls: could more text complete its JSON?"""
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


def fit(tokenizer, texts: list[str], wrap: Callable[[str], str], limit: int) -> tuple[str, int]:
    """(texts joined by blank lines, the tokens of `wrap` around them, at most `limit`).

    Texts are cut at their ends, the longest first, and never read beyond 16 · `limit` characters.
    """
    most = 16 * max(limit, 0)  # characters of a text
    while True:
        joined = "\n\n".join(text[:most].rstrip() for text in texts).strip()
        used = len(tokenizer(wrap(joined), add_special_tokens=False)["input_ids"])
        if used <= limit or most == 0:
            return joined, used
        most = min(most, max(map(len, texts))) * limit // used


def derive_glue(tokenizer, native: bool) -> tuple[str, str, str, str]:
    """What the template writes around results, in any number and round: (end of the turn, head,
    separator, tail up to where the model continues)."""

    def behind(*turns: list[str]) -> str:
        """What follows the model's last turn; turns: the results of each."""
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
