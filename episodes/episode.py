"""Episodes of the tasks `search` and `agent`: sample, carry out what is asked for, show it, go on.

Training, validation and inference share `run_episodes`. Of an engine it uses only
`generate(prompts, samplings)`; what the texts mean is told by a task (episodes/tasks.py).

An episode is one growing list of token ids with a mask and log-probabilities beside it. What the
model sampled is appended as sampled and never encoded again; what is shown to it is encoded alone,
and takes part in no loss, KL, entropy or denominator:

    mask 0   prompt; results, notes and the template's text around them; a forced end
    mask 1   sampled text with its stop string and what shares its last token; a sampled EOS

One round:
1. All active episodes are sampled together, each with its remaining budget. A turn ends at EOS or
   at a stop string, which is matched on decoded text because a tag has many tokenisations.
2. All searches of the round are one call of the tools, with a time-out. A failed search ends its
   episode as `tool_error`: it is left out and counted, never scored.
3. Results are cut to the room that is left and appended.
A malformed query, an invalid call, a call beyond a limit and a search whose result would find no
room are answered with a note that the model reads.

An answer inside a think block is no answer and ends nothing. In `search` an answer ends the
episode, and a query counts wherever it stands, as in ReSearch (in a think block the form is then
wrong). In `agent` a turn without a call is the last, and a call counts even beside an answer.

End states (`Episode.end`): answered; no_answer (it ended without one); length (no room); rounds (no
turn left); engine_error and tool_error (technical).
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import data
from config import ConfigError, above, at_least, between
from data import Question, read_corpus
from engines.base import Rollout, RolloutError, Sampling
from episodes.tasks import AgentTask, SearchTask, Task
from episodes.tools import Call, MCPTools, RetrieverTools
from prompts import before_calls, read_conversations
from retriever import RetrieverConfig, open_retriever
from reward import all_gold, answer_metrics, gold_recall, score_answer
from runs import atomic_write
from search.passages import PassageIds, Texts

ANSWERED, NO_ANSWER, LENGTH, ROUNDS = "answered", "no_answer", "length", "rounds"
ENDED = (ANSWERED, NO_ANSWER)  # the model itself brought the episode to an end
FAILED = ("engine_error", "tool_error")  # left out, not scored
END_STATES = (ANSWERED, NO_ANSWER, LENGTH, ROUNDS, *FAILED)
LEAST_ROOM = 64  # tokens; a search whose result has less room is not made: tags and notes need 60


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
    at_cap: Literal["note", "stop"] = "note"
    """a call beyond max_calls gets a note, or it ends the episode as `rounds`"""
    stop_at_answer: bool = False
    """end an episode at </answer>, with an untrained EOS: for models that never learnt to stop"""
    bare_calls: bool = False
    """agent: calls are bare JSON, ended by `}}`, for a model that was never taught the tool_call
    tags; its trajectories are written with them"""
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


def check_episode(cfg: EpisodeConfig, task: str, budget: int) -> None:
    """ConfigError for settings that cannot work; loads nothing. budget: max_response_tokens."""
    room = budget - int(cfg.answer_share * budget)
    if room < 2 * LEAST_ROOM:
        raise ConfigError(
            f"max_response_tokens={budget} leaves {room} tokens beside the answer's part "
            f"(episode.answer_share={cfg.answer_share:g}); a query and its result need "
            f"{2 * LEAST_ROOM}: raise max_response_tokens, or lower the share"
        )
    if cfg.instruction and not os.path.isfile(cfg.instruction):
        raise ConfigError(f"episode.instruction={cfg.instruction} is no file; give a text file")
    if task != "agent" and cfg.mcp:
        raise ConfigError("episode.mcp is for task=agent; task=search asks the retriever")
    if task == "agent" and cfg.template == "base":
        raise ConfigError("episode.template=base is for task=search; agent needs a chat template")
    if cfg.mcp and cfg.gold_reward != "none":
        raise ConfigError(
            "episode.gold_reward needs the ids of what was found, which an MCP server does not "
            "tell; use the retriever in process (mcp empty), or gold_reward=none"
        )


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
    """One sampled conversation: a rollout (`end` is empty while it runs) and what it says."""

    sample: int = 0  # which of its prompt's
    budget: int = 0  # tokens of the response, without a forced EOS
    rounds: list[Round] = field(default_factory=list)
    prediction: str | None = None  # the extracted answer
    ended: bool = False  # by the tokenizer's own EOS, or a forced one
    failure: str = ""  # why it is one of FAILED

    @property
    def left(self) -> int:
        """Tokens of the budget that are left."""
        return self.budget - len(self.response_ids)

    @property
    def turns(self) -> list[str]:
        """What the model wrote."""
        return [r.text for r in self.rounds]

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """(text, written by the model) in order."""
        parts = [part for r in self.rounds for part in ((r.text, True), (r.injected, False))]
        return [part for part in parts if part[0]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def calls(self) -> list[Call]:
        return [call for r in self.rounds for call in r.calls]

    @property
    def retrieved(self) -> list[str]:
        """Ids of the passages that the episode was shown, each once, in order."""
        shown = [call for r in self.rounds if r.injected for call in r.calls if call.shown]
        ids = [id_ for call in shown for id_, _ in call.documents if id_ is not None]
        return list(dict.fromkeys(ids))

    def append(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        """The only place where an episode grows."""
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask] * len(ids)


def run_episodes(
    engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sampling | Sequence[Sampling],
    task: Task,
    context: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[Episode]:
    """Episodes of every prompt (token ids), a prompt's samples side by side, group_id its index.

    `max_tokens` of a sampling is the episode's whole budget, injected tokens included. context:
    positions of the model, prompt included. `progress(finished, total, 0.0)` is called after every
    round. Raises RolloutError for a prompt that leaves no room, and what the engine raises.
    """
    samplings = [samplings] * len(prompts) if isinstance(samplings, Sampling) else samplings
    episodes = []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        budget = min(sampling.max_tokens, (context or sys.maxsize) - len(prompt))
        budget -= task.cfg.stop_at_answer  # the EOS that is then put behind an answer
        if budget < 1:
            raise RolloutError(
                f"prompt {i} has {len(prompt)} tokens, the model {context} positions; leave long "
                "questions out, or give fewer examples"
            )
        for sample in range(sampling.n):
            episodes.append(Episode(list(prompt), [], [], [], i, "", sample, budget))
    task.tools.seconds = 0.0
    active = episodes
    for number in range(task.cfg.max_rounds):
        if not active:
            break
        final = number + 1 == task.cfg.max_rounds
        sampled = _sample(engine, active, samplings, number, task)
        pairs = zip(active, sampled, strict=True)
        asking = [e for e, rollout in pairs if _read_turn(e, rollout, final, task)]
        task.tools.run([call for e in asking for call in e.rounds[-1].calls if not call.note])
        for episode in asking:
            _append_results(episode, task)
        active = [e for e in active if not e.end]
        if progress is not None:
            progress(len(episodes) - len(active), len(episodes), 0.0)
    return episodes


def _sample(
    engine, active: list[Episode], samplings: Sequence[Sampling], number: int, task: Task
) -> list[Rollout]:
    """The next turn of every active episode, in their order.

    In the first round the samples of a prompt are one request. After it each has a conversation of
    its own, and a seed made of the prompt and its seed: draws depend neither on what else is
    sampled nor on the process.
    """
    active = active if number else [e for e in active if e.sample == 0]
    requests = []
    for e in active:
        s, most = samplings[e.group_id], min(e.left, task.cfg.turn_tokens or e.left)
        if number:
            key = f"round {s.seed} {e.sample} {number} {e.prompt_ids}"
            seed = None if s.seed is None else random.Random(key).getrandbits(62)
            s = dataclasses.replace(s, n=1, seed=seed)
        requests.append(dataclasses.replace(s, stop=task.stop, max_tokens=most))
    return engine.generate([e.prompt_ids + e.response_ids for e in active], requests)


def _read_turn(episode: Episode, sampled: Rollout, final: bool, task: Task) -> bool:
    """Append a sampled turn and read it: does it ask for something?

    Otherwise the episode has ended, or the turn goes on in the next round, because it was stopped
    at an `</answer>` that ends nothing. final: no round is left.
    """
    if not episode.rounds or episode.rounds[-1].injected:
        before = len(episode.prompt_ids) + len(episode.response_ids)
        episode.rounds.append(Round("", prompt_tokens=before))
    turn, failed, eos = episode.rounds[-1], sampled.end == "engine_error", sampled.end == "eos"
    episode.append(sampled.response_ids, sampled.logprobs, int(not failed))
    turn.text += task.decode(sampled.response_ids[:-1] if eos else sampled.response_ids)
    turn.completion_tokens += len(sampled.response_ids)
    if failed:
        episode.end, episode.failure = "engine_error", "the engine's logits were no numbers"
    elif sampled.end == "length":
        episode.end = LENGTH
    elif sampled.end == "stop" and task.unfinished(episode.turns):
        episode.end = ROUNDS if final else ""
    elif calls := task.read(episode.turns):
        _limit_calls(episode, calls, task)
        episode.end = ROUNDS if final else episode.end
        return not episode.end
    else:
        if not eos and task.cfg.stop_at_answer:  # a forced EOS: the model did not write it
            episode.append([task.eos_id], [0.0], 0)
        episode.ended = episode.response_ids[-1] == task.eos_id
        episode.prediction = task.answer(episode.turns)
        episode.end = NO_ANSWER if episode.prediction is None else ANSWERED
    return False


def _limit_calls(episode: Episode, calls: list[Call], task: Task) -> None:
    """Give the last turn its calls, those beyond a limit with a note in place of a search."""
    cfg, used = task.cfg, sum(call.done for call in episode.calls)
    good = [call for call in calls if not call.note]
    episode.rounds[-1].calls = calls
    if cfg.at_cap == "stop" and used + min(len(good), cfg.calls_per_round) > cfg.max_calls:
        episode.end = ROUNDS
    for i, call in enumerate(good):
        if used + i >= cfg.max_calls or _room(episode, task) < LEAST_ROOM:
            call.note = task.cap_note
        elif i >= cfg.calls_per_round:
            call.note = f"Not carried out: one turn may hold {cfg.calls_per_round} calls."


def _room(episode: Episode, task: Task) -> int:
    """Tokens that results may take."""
    return episode.left - int(task.cfg.answer_share * episode.budget)


def _append_results(episode: Episode, task: Task) -> None:
    """Append what a turn asked for, unless not even one token would be left behind it."""
    turn = episode.rounds[-1]
    if failure := next((call.failure for call in turn.calls if call.failure), ""):
        episode.end, episode.failure = "tool_error", failure
        return
    room = max(_room(episode, task), LEAST_ROOM)  # a note may take from the answer's part
    ids, text = task.show(turn.calls, episode.response_ids[-1], room)
    if len(ids) >= episode.left:
        episode.end = LENGTH
        return
    episode.append(ids, [0.0] * len(ids), 0)
    turn.injected = text


# --------------------------------------------------------------------------------- opening a task


def open_task(
    name: str, cfg: EpisodeConfig, tokenizer, retriever: RetrieverConfig, examples: str = ""
) -> Task:
    """The task `search` or `agent` with its tools; `examples`: a file of few-shot conversations.

    ConfigError or DataError: no passage texts (retriever.corpus), another corpus than the index was
    built from, an MCP server that does not answer, a chat template that tool results cannot be cut
    out of.
    """
    if retriever.across_ranks and not cfg.mcp:
        raise ConfigError(
            "retriever.across_ranks=true needs every rank to search at the same time, and in "
            f"task={name} ranks have different numbers of rounds; serve the index (serve.py, "
            "retriever.kind=remote), or set it to false"
        )
    if not retriever.corpus and not cfg.mcp:
        raise ConfigError(
            f"task={name} shows passages to the model: give retriever.corpus=FILE, which the "
            "index was built from"
        )
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


def episode_reward(
    episode: Episode, question: Question, task: Task, gold_ids: Sequence[str] = ()
) -> float | None:
    """What an episode earns for its answer (score_answer) and for retrieved gold passages.

    The second part is for well-formed episodes (`research`), or those with an answer, alone. None
    for an episode that failed for a technical reason: it is left out and counted.
    """
    cfg = task.cfg
    if episode.end in FAILED:
        return None
    kind = cfg.answer_reward
    if kind == "auto":
        kind = {"search": "research", "agent": "f1"}[task.name]
    well_formed = task.well_formed(episode)
    reward = score_answer(episode.prediction, question.golden_answers, well_formed, kind)
    counts = well_formed if kind == "research" else episode.prediction is not None
    if cfg.gold_reward != "none" and counts and gold_ids:
        share = {"recall": gold_recall, "all": all_gold}[cfg.gold_reward]
        reward += cfg.gold_weight * share(episode.retrieved, gold_ids)
    return reward


def episode_figures(
    episode: Episode, question: Question, task: Task, gold_ids: Sequence[str] = ()
) -> dict:
    """What is measured of one episode; the gold figures are None where nothing is judged."""
    scores = answer_metrics(episode.prediction, question.golden_answers)
    # An MCP server's texts have no ids.
    judged = bool(gold_ids) and episode.end not in FAILED and not task.cfg.mcp
    return {
        "em": scores["em"],
        "f1": scores["f1"],
        "prediction": episode.prediction,
        "well_formed": episode.end not in FAILED and task.well_formed(episode),
        "rounds": len(episode.rounds),
        "searches": sum(call.done for call in episode.calls),
        "notes": sum(bool(call.note) for call in episode.calls),
        "gold_recall": gold_recall(episode.retrieved, gold_ids) if judged else None,
        "all_gold": all_gold(episode.retrieved, gold_ids) if judged else None,
        "model_tokens": sum(episode.loss_mask),
        "end": episode.end,
    }


def note_task(folder: str, task: str, template: str) -> None:
    """Write into a model's folder what prompt it was trained with: `task.json`."""
    with atomic_write(os.path.join(folder, "task.json")) as f:
        json.dump({"task": task, "template": template}, f)


def other_task(folder: str, task: str, template: str) -> str:
    """What a model's folder says it was trained with where that is another prompt, else ""."""
    path = os.path.join(folder, "task.json")
    if not os.path.isfile(path):
        return ""
    trained = json.loads("\n".join(line for _, line in data.read_lines(path)))
    own = {"task": task} | ({"template": template} if task == "search" else {})
    same = all(trained.get(key) == value for key, value in own.items())
    return "" if same else json.dumps(trained)


# ---------------------------------------------------------------------------------- trajectories


def trajectory_row(episode: Episode, question: Question, task: Task, request: dict) -> dict:
    """An episode as a line of trajectory.jsonl: DeepSearch-RL's fields, and more.

    Few-shot examples are left out of `messages`: a row is a training row for the prompt without
    them. An assistant message's `text` is its turn (`turn_text`). request: model and sampling.
    """
    messages = task.messages(question.question)
    for number, turn in enumerate(episode.rounds):
        messages += turn_messages(turn, number, task.turn_text(turn))
    failed, last = episode.end in FAILED, episode.rounds[-1] if episode.rounds else Round("")
    scores = answer_metrics(episode.prediction, question.golden_answers)
    return {
        "rollout_id": f"{question.id}#{episode.sample}",
        "id": question.id,
        "question": question.question,
        "golden_answers": question.golden_answers,
        "task": task.name,
        "messages": messages,
        "tools": task.tools.schemas if task.name == "agent" else [],
        "template": task.cfg.template,
        "request_meta": request,
        "response_meta": {"usage": _usage([last])},
        "rounds": len(episode.rounds),
        "all_turns_tokens": _usage(episode.rounds),
        "answer": last.text if episode.end in ENDED else "",
        "pred": episode.prediction or "",
        "end": episode.end,
        "error": f"{episode.end}: {episode.failure}" if failed else None,
        "metric_score": scores,
        "well_formed": not failed and task.well_formed(episode),
        "searches": sum(call.done for call in episode.calls),
        "retrieved": None if task.cfg.mcp else episode.retrieved,  # its texts have no ids
    }


def turn_messages(turn: Round, number: int, text: str) -> list[dict]:
    """The assistant's message of a turn, whose `text` is trained, and one for each result."""
    content = before_calls(text) if turn.calls else text
    message = {"role": "assistant", "content": content.strip(), "text": text}
    if thoughts := re.findall(r"<think>(.*?)</think>", turn.text, re.DOTALL):
        message["reasoning_content"] = "\n".join(t.strip() for t in thoughts)
    calls, results = [], []
    for i, call in enumerate(turn.calls):
        id_, arguments = f"call_{number}_{i}", json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": id_, "type": "function", "function": function})
        result = {"role": "tool", "tool_call_id": id_, "name": call.name, "content": call.shown}
        results += [result] if turn.injected else []
    return [message | ({"tool_calls": calls} if calls else {}), *results]


def _usage(rounds: list[Round]) -> dict:
    """Tokens in OpenAI's words; a prompt counts again in every round."""
    prompt = sum(r.prompt_tokens for r in rounds)
    completion = sum(r.completion_tokens for r in rounds)
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
