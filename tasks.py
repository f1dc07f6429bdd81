"""The three tasks, which grpo.py and infer.py open from their configuration and use alike.

A task says what a prompt is, how responses are sampled and read, and what they are worth:

    prompt(item) → token ids                     items are turns, or questions
    rollouts(engine, prompts, samplings)         one turn of the model, or whole episodes
    read(rollout) → answer                       with its `text`
    measure(answers, items) → figures            what is logged, and `failed`; searches rewrites
    reward(answer, figures)                      of an answer that did not fail
    validate(rollouts, items, dev) → figures     of greedy rollouts; `best` chooses the policy
    row(item, rollout, request)                  a line of infer.py's output
    means(lines), settings(cfg)                  its summary, and what decides it beside prompts
    seconds()                                    of searches while sampling, for the log

`Rewrite` is here, `search` and `agent` are in episodes/tasks.py.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import data
from config import ConfigError, Only, at_least
from data import DataError, Turn, one_line
from distributed import gather_rows, print0
from engines.base import EngineConfig, Rollout
from episodes.tasks import AgentTask, EpisodeConfig, SearchTask, check_episode
from episodes.tools import MCPTools, RetrieverTools
from episodes.trajectories import read_conversations
from prompts import decode_response, encode_chat, few_shot_prompt, read_examples, read_instruction
from retriever import RetrieverConfig, open_retriever
from reward import REWARDS, Parsed, parse_response
from rollout import check_engine
from runs import read_json
from scoring.ranking import evaluate_run, read_golds
from search.client import RemoteIds
from search.passages import PassageIds, Texts

REWRITES, EPISODES = Only("task", ("rewrite",)), Only("task", ("search", "agent"))


@dataclass
class TaskConfig:
    """What the configurations of grpo.py and infer.py share."""

    task: Literal["rewrite", "search", "agent"] = "rewrite"
    """a response is a rewritten question, or an episode that searches and answers"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the search engine that gives ranks; search, agent: what episodes search, whose `corpus` has
    the texts that are shown"""
    episode: Annotated[EpisodeConfig, EPISODES] = field(default_factory=EpisodeConfig)
    """budgets, form and reward of an episode"""
    instruction: Annotated[str, REWRITES] = ""
    """a text file with the prompt's instruction; empty: prompts.INSTRUCTION"""
    max_prompt_tokens: Annotated[int, at_least(1)] = 1536
    """longer prompts are left out and counted"""
    max_response_tokens: Annotated[int, at_least(1)] = 1024
    """sampling stops here; of an episode, with what is shown to the model"""
    parser: Annotated[Literal["strict", "paper"], REWRITES] = "strict"
    """what is well formed; `paper`: the original's expressions, of its training or its inference"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """what samples"""


@dataclass
class Response:
    """A parsed response to a turn."""

    text: str
    parsed: Parsed
    failed: bool  # in the engine, for a technical reason


class Rewrite:
    """Rewrite the questions of conversations; the rank of the gold passage is the reward."""

    items, best = "turns", "dev_mrr"
    equal_calls = True  # all processes call the engine equally often
    statuses = ("ok", "malformed", "engine_error", "too_long")
    read_items = staticmethod(data.read_turns)

    def __init__(self, cfg: TaskConfig, tokenizer, examples=(), parse: Callable | None = None):
        self.cfg, self.tokenizer, self.examples = cfg, tokenizer, examples
        self.parse = parse or functools.partial(parse_response, parser=cfg.parser)
        self.instruction = read_instruction(cfg.instruction)

    @functools.cached_property
    def retriever(self):
        return open_retriever(self.cfg.retriever)

    def rewarded_items(self, path: str) -> list[Turn]:
        """The turns of a file that have a gold passage."""
        turns, dropped = data.with_gold(data.read_turns(path), self.retriever.passage_ids, path)
        if dropped:
            print0(f"{path}: {dropped} turns without a gold passage left out")
        return turns

    def prompt(self, turn: Turn) -> list[int]:
        chat = few_shot_prompt(turn, self.examples, self.instruction)
        return encode_chat(self.tokenizer, chat)

    def rollouts(self, engine, prompts, samplings, progress=None) -> list[Rollout]:
        return engine.generate(prompts, samplings, progress)

    def unsampled(self, prompt_ids: list[int], sample: int) -> Rollout:
        """A placeholder for the response to a prompt that is too long."""
        return Rollout(prompt_ids, [], [], [], 0, "too_long")

    def read(self, rollout: Rollout) -> Response:
        text = decode_response(self.tokenizer, rollout.response_ids)
        return Response(text, self.parse(text), rollout.end == "engine_error")

    def measure(self, answers: list[Response], turns: list[Turn]) -> list[dict]:
        """Rewrite, form, rank of the gold passage, and whether engine or search failed. Malformed
        responses are not searched, equal queries of a turn once."""
        asked, golds, figures = [], {}, []  # golds: (turn, query) → gold passages
        for a, t in zip(answers, turns):
            query = None
            if a.parsed.well_formed and not a.failed:
                query = (t.query_id, one_line(a.parsed.rewrite))
                golds[query] = t.gold_ids
            asked.append(query)
        # every process asks, even without queries: an index across ranks is a collective
        found = self.retriever.gold_ranks([query for _, query in golds], list(golds.values()))
        ranks = dict(zip(golds, found))
        for a, query in zip(answers, asked):
            rank, failed = ranks.get(query), a.failed
            if rank is not None and math.isnan(rank):  # search.passages.FAILED
                rank, failed = None, True
            row = {"rewrite": a.parsed.rewrite, "well_formed": a.parsed.well_formed}
            figures.append(row | {"rank": rank, "failed": failed})
        return figures

    def reward(self, answer: Response, figures: dict) -> float:
        value, well_formed = REWARDS[self.cfg.reward], figures["well_formed"]
        return value(figures["rank"]) if well_formed else self.cfg.malformed_reward

    def validate(self, rollouts: list[Rollout], turns: list[Turn], dev: list[Turn]) -> dict:
        """Metrics over `dev`, the turns of all ranks; for a malformed response the raw question is
        searched, one that failed in the engine finds nothing."""
        answers = [self.read(r) for r in rollouts]
        pairs = [(a.parsed, t) for a, t in zip(answers, turns)]
        queries = [one_line(p.rewrite if p.well_formed else t.question) for p, t in pairs]
        found = self.retriever.search(queries, 100)
        rows = gather_rows(
            [
                (t.query_id, [] if a.failed else hits, a.parsed.well_formed, a.failed)
                for a, t, hits in zip(answers, turns, found)
            ]
        )
        qrels = {t.query_id: dict.fromkeys(t.gold_ids, 1) for t in dev}
        figures = evaluate_run({query_id: hits for query_id, hits, *_ in rows}, qrels)
        del figures["queries"], figures["missing"]
        figures["failed"] = sum(failed for *_, failed in rows)
        return figures | {"format_rate": sum(formed for *_, formed, _ in rows) / len(rows)}

    def row(self, turn: Turn, rollout: Rollout, request: dict) -> dict:
        """Unless the status is `ok`, the rewrite is the raw question."""
        answer, status = self.read(rollout), rollout.end
        think, rewrite, well_formed = answer.parsed
        rewrite = one_line(rewrite or "")
        if status in ("eos", "stop", "length"):
            status = "ok" if well_formed and rewrite else "malformed"
        ok = status == "ok"
        return {
            "status": status,
            "rewrite": rewrite if ok else one_line(turn.question),
            "think": think if ok else None,
            "response": answer.text,
        }

    def means(self, rows: list[dict]) -> dict[str, float]:
        return {}

    def settings(self, cfg) -> dict:
        return {}

    def seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


TASKS = {"rewrite": Rewrite, "search": SearchTask, "agent": AgentTask}
Task = Rewrite | SearchTask | AgentTask


def check_task(cfg: TaskConfig) -> None:
    """ConfigError for settings of engine and task that cannot work; loads nothing."""
    check_engine(cfg.engine, TASKS[cfg.task].equal_calls)
    if cfg.task != "rewrite":
        check_episode(cfg.episode, cfg.max_response_tokens)


def open_task(
    cfg: TaskConfig,
    tokenizer,
    examples: str = "",
    parse: Callable | None = None,
    qrels: list[str] = (),
) -> Task:
    """The task of a configuration.

    examples: file for the few-shot prompt; parse: text of a rewrite → Parsed; qrels: files with the
    gold passages of questions
    """
    if cfg.task == "rewrite":
        return Rewrite(cfg, tokenizer, read_examples(examples) if examples else (), parse)
    kind, episode, retriever = TASKS[cfg.task], cfg.episode, cfg.retriever
    shown = read_conversations(examples) if examples else []
    if episode.mcp:
        tools = MCPTools(episode.mcp, episode.timeout)
        return kind(episode, tokenizer, tools, shown, read_golds(qrels))
    if retriever.across_ranks:
        raise ConfigError(
            "retriever.across_ranks=true needs ranks that search together, and episodes differ in "
            "rounds; serve the index (serve.py, retriever.kind=remote), or set it to false"
        )
    if not retriever.corpus:
        raise ConfigError(f"task={cfg.task} shows passages: give retriever.corpus=FILE")
    opened = open_retriever(retriever)
    ids = opened.passage_ids
    golds = read_golds(qrels, ids)
    if retriever.kind == "remote":
        ids = corpus_ids(retriever.corpus, ids)
    documents = Texts(retriever.corpus, ids).document
    numbered = cfg.task == "agent"
    tools = RetrieverTools(opened, documents, episode.top_k, episode.timeout, numbered)
    return kind(episode, tokenizer, tools, shown, golds)


def corpus_ids(corpus: str, served: RemoteIds) -> PassageIds:
    """The ids of a corpus file in its order; DataError where the served index has others."""
    ids = PassageIds(p.id for p in data.read_corpus(corpus))
    some = {ids[i] for i in range(0, len(ids), max(1, len(ids) // 1000))}
    if len(ids) != len(served) or some - (some & served):
        raise DataError(
            f"{corpus} has {len(ids):,} passages and is not what the served index of "
            f"{len(served):,} was built from; give that file"
        )
    return ids


def other_task(cfg: TaskConfig) -> str:
    """The prompt settings that the model was trained with, if they differ from `cfg`'s; else ""."""
    trained = read_json(os.path.join(cfg.model, "task.json"))
    own = {"task": cfg.task}
    if cfg.task == "search":
        own["template"] = cfg.episode.template
    return "" if trained is None or own.items() <= trained.items() else json.dumps(trained)
