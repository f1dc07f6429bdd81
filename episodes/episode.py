"""Episodes of the tasks `search` and `agent`: sample a turn, run its calls, append results, repeat.

An episode is one growing list of token ids. Sampled tokens stay as sampled (mask 1); results and
notes are encoded alone and not trained (mask 0). `search` ends at an answer, and a query counts
anywhere, as in ReSearch; `agent` ends at a turn without a call. Answers in think blocks do not
count.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from data import Question
from engines.base import Rollout, RolloutError, Sampling
from episodes.tools import Call
from prompts import before_calls, call_text, outside_thoughts
from reward import answer_metrics, extract_answer

ENDED = ("answered", "no_answer")  # the model itself ended the episode
FAILED = ("engine_error", "tool_error")  # technical failures get no reward
END_STATES = (*ENDED, "length", "rounds", *FAILED)  # length: no tokens left; rounds: no turns left
LEAST_ROOM = 64  # tokens that a search needs for its result: tags and notes take 60


@dataclass
class Round:
    """One turn of the model and what was appended to it."""

    text: str  # as sampled, decoded, without EOS
    calls: list[Call] = field(default_factory=list)
    injected: str = ""
    prompt_tokens: int = 0  # everything before the turn
    completion_tokens: int = 0


@dataclass
class Episode(Rollout):
    """One sampled conversation; `end` is empty while it runs."""

    sample: int = 0  # index among those of its prompt
    budget: int = 0  # response tokens, without a forced EOS
    rounds: list[Round] = field(default_factory=list)
    prediction: str | None = None  # the extracted answer
    ended: bool = False  # with the tokenizer's own EOS, sampled or forced
    failure: str = ""  # the reason, if FAILED
    well_formed: bool = False  # in its task's form

    @property
    def failed(self) -> bool:
        """Whether it failed for a technical reason."""
        return self.end in FAILED

    @property
    def left(self) -> int:
        """Tokens left in the budget."""
        return self.budget - len(self.response_ids)

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """(text, whether the model wrote it) in order."""
        parts = [part for r in self.rounds for part in ((r.text, True), (r.injected, False))]
        return [part for part in parts if part[0]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def calls(self) -> list[Call]:
        return [call for r in self.rounds for call in r.calls]

    @property
    def searches(self) -> int:
        """Number of calls carried out."""
        return sum(call.done for call in self.calls)

    @property
    def retrieved(self) -> list[str]:
        """Ids of the passages shown, each once, in order."""
        shown = [call for r in self.rounds if r.injected for call in r.calls if call.shown]
        ids = [id_ for call in shown for id_, _ in call.documents if id_ is not None]
        return list(dict.fromkeys(ids))

    def append(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask] * len(ids)


def run_episodes(
    engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sampling | Sequence[Sampling],
    task,
    context: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[Episode]:
    """Sample the episodes of every prompt, its samples side by side; group_id is the prompt's
    index.

    `max_tokens` is an episode's whole budget, results included. context: the model's positions;
    RolloutError if a prompt fills them. `progress(finished, total, 0.0)` is called every round.
    """
    samplings = [samplings] * len(prompts) if isinstance(samplings, Sampling) else samplings
    episodes = []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        budget = min(sampling.max_tokens, (context or sys.maxsize) - len(prompt))
        budget -= task.cfg.stop_at_answer  # room for a forced EOS
        if budget < 1:
            raise RolloutError(
                f"prompt {i} has {len(prompt)} tokens, the model {context} positions; shorten it"
            )
        for sample in range(sampling.n):
            episodes.append(Episode(list(prompt), [], [], [], i, "", sample, budget))
    task.tools.seconds = 0.0
    active = episodes
    for number in range(task.cfg.max_rounds):
        if not active:
            break
        final = number + 1 == task.cfg.max_rounds
        turns = _sample(engine, active, samplings, number, task)
        for episode, turn in zip(active, turns, strict=True):
            trained = int(turn.end != "engine_error")
            episode.append(turn.response_ids, turn.logprobs, mask=trained)
            _read_turn(episode, turn, final, task)
        asking = [e for e in active if e.rounds[-1].calls and not e.end]
        task.tools.run([call for e in asking for call in e.rounds[-1].calls if not call.note])
        for episode in asking:
            ids = _show_results(episode, task)
            episode.append(ids, [0.0] * len(ids), mask=0)
        active = [e for e in active if not e.end]
        if progress is not None:
            progress(len(episodes) - len(active), len(episodes), 0.0)
    return episodes


def _sample(
    engine, active: list[Episode], samplings: Sequence[Sampling], number: int, task
) -> list[Rollout]:
    """The next turn of every active episode.

    In round 0 a prompt's samples are one request. Later each has its own seed, so that draws do
    not depend on the other episodes.
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


def answer_block(text: str) -> str | None:
    """The last answer outside think blocks, or None."""
    return extract_answer(outside_thoughts(text))


def _read_turn(episode: Episode, sampled: Rollout, final: bool, task) -> None:
    """Read an appended turn: it has calls, ends the episode, or goes on in the next round. final:
    no round is left."""
    ids, eos = sampled.response_ids, sampled.end == "eos"
    if not episode.rounds or episode.rounds[-1].injected:
        before = len(episode.prompt_ids) + len(episode.response_ids) - len(ids)
        episode.rounds.append(Round("", prompt_tokens=before))
    turn = episode.rounds[-1]
    turn.text += task.tokenizer.decode(
        ids[:-1] if eos else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    turn.completion_tokens += len(ids)
    if sampled.end in ("length", "engine_error"):
        episode.end = sampled.end
        episode.failure = "the engine's logits were no numbers" if episode.failed else ""
        return
    stopped = sampled.end == "stop"
    said = "".join(r.text for r in episode.rounds) if task.one_message else turn.text
    calls, block = task.find_calls(said, turn.text, stopped), answer_block(said)
    if calls or calls is None or (stopped and block is None):
        turn.calls, episode.end = calls or [], "rounds" if final else ""
        _limit_calls(episode, turn.calls, task)
        return
    if stopped and task.cfg.stop_at_answer:  # a forced EOS
        episode.append([task.eos_id], [0.0], mask=0)
    episode.ended = episode.response_ids[-1] == task.eos_id
    episode.prediction = None if block is None else task.answer(block)
    episode.end = "no_answer" if episode.prediction is None else "answered"
    episode.well_formed = task.well_formed(episode)


def _limit_calls(episode: Episode, calls: list[Call], task) -> None:
    """Give calls beyond a limit a note."""
    left = task.cfg.max_calls - episode.searches if _room(episode, task) >= LEAST_ROOM else 0
    for i, call in enumerate(call for call in calls if not call.note):
        if i >= left:
            call.note = task.cap_note
        elif i >= task.cfg.calls_per_round:
            call.note = f"Not carried out: one turn may hold {task.cfg.calls_per_round} calls."


def _room(episode: Episode, task) -> int:
    return episode.left - int(task.cfg.answer_share * episode.budget)


def _show_results(episode: Episode, task) -> list[int]:
    """Token ids of the last turn's results. Empty if the episode ends here: a call failed, or no
    token would be left."""
    turn = episode.rounds[-1]
    if failure := next((call.failure for call in turn.calls if call.failure), ""):
        episode.end, episode.failure = "tool_error", failure
        return []
    room = max(_room(episode, task), LEAST_ROOM)  # a note may use the answer's share
    ids, text = task.show(turn.calls, episode.response_ids[-1], room)
    if len(ids) >= episode.left:
        episode.end = "length"
        return []
    turn.injected = text
    return ids


# ---- trajectories


def trajectory_row(episode: Episode, question: Question, task, request: dict) -> dict:
    """An episode as a row of trajectory.jsonl: DeepSearch-RL's fields and more, without few-shot
    examples."""
    messages = task.messages(question.question)
    for number, turn in enumerate(episode.rounds):
        messages += turn_messages(turn, number, task.cfg.bare_calls)
    last = episode.rounds[-1] if episode.rounds else Round("")
    error = f"{episode.end}: {episode.failure}" if episode.failed else None
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
        "error": error,
        "metric_score": answer_metrics(episode.prediction, question.golden_answers),
        "well_formed": episode.well_formed,
        "searches": episode.searches,
        "retrieved": None if task.cfg.mcp else episode.retrieved,  # MCP gives no ids
    }


def turn_messages(turn: Round, number: int, bare: bool) -> list[dict]:
    """The assistant message of a turn and one per result. Its `text` is trained: as sampled, or
    `bare` calls with their tags added."""
    text = turn.text
    if bare and turn.calls and all(call.done for call in turn.calls):
        text = "\n".join(call_text(call.name, call.arguments) for call in turn.calls)
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
    """A prompt counts again in every round."""
    prompt = sum(r.prompt_tokens for r in rounds)
    completion = sum(r.completion_tokens for r in rounds)
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
