"""The protocol of the three tasks: what tasks.py lists, each has, with the same arguments."""

from __future__ import annotations

import inspect
import re

import pytest
import tiny
from scripted import ANSWER, LIMA, THINK, play, search_task

import grpo
import tasks
from data import DataError, Turn
from engines.base import Rollout
from prompts import response_text
from reward import score_rewrite
from runs import write_jsonl

LISTED = re.findall(r"(\w+)\(([^)]*)\)(?= →|  |,)", tasks.__doc__)


@pytest.mark.parametrize("kind", tasks.TASKS.values(), ids=tasks.TASKS)
def test_every_task_has_the_methods_that_are_listed(kind):
    assert {name for name, _ in LISTED} >= {"prompt", "rollouts", "read", "measure", "reward"}
    for name, given in LISTED:
        signature = inspect.signature(getattr(kind, name))
        signature.bind(None, *filter(None, given.split(", ")))  # self and what the list names
    assert {kind.items, kind.best, kind.equal_calls} and kind.statuses[-1] == "too_long"
    assert callable(kind.read_items) and callable(kind.rewarded_items) and callable(kind.unsampled)


class Ranker:
    def gold_ranks(self, queries, gold_ids):
        return [{"alpha": 3}.get(query) for query in queries]

    def search(self, queries, k):
        return [[("p", 1.0)] if query == "alpha" else [("x", 1.0), ("p", 0.5)] for query in queries]


def test_validation_reads_what_training_and_inference_read(dist):
    """The same response is well formed to all three, and only its own rewrite is searched."""
    tokenizer = tiny.tiny_tokenizer()
    task = tasks.Rewrite(grpo.GRPOConfig(), tokenizer)
    task.retriever = Ranker()
    turns = [Turn(f"q{i}", f"c{i}", 1, [], "raw", ["p"]) for i in range(2)]
    texts = [response_text("a", "alpha"), "alpha without a form"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    rollouts = [Rollout([5], i, [0.0] * len(i), [1] * len(i), n, "eos") for n, i in enumerate(ids)]
    figures = task.measure([task.read(r) for r in rollouts], turns)
    assert [f["rank"] for f in figures] == [3, None]
    expected = [score_rewrite(text, rank) for text, rank in zip(texts, [3, None])]
    assert [task.reward(None, f) for f in figures] == expected
    rows = [task.row(t, r, {}) for t, r in zip(turns, rollouts)]
    assert [row["status"] for row in rows] == ["ok", "malformed"]
    assert [row["rewrite"] for row in rows] == ["alpha", "raw"]
    found = task.validate(rollouts, turns, turns)
    assert found["mrr"] == 0.75 and found["format_rate"] == 0.5 and "queries" not in found
    rollouts[1].end = "engine_error"  # its raw question would find the passage
    found = task.validate(rollouts, turns, turns)
    assert found["mrr"] == 0.5 and found["failed"] == 1


def test_an_episode_is_rewarded_by_its_figures(dist):
    task = search_task(gold_reward="all", gold_weight=0.25)
    (e,), _ = play(task, [THINK, ANSWER])
    task.golds = {LIMA.id: ["p0"]}
    (figures,) = task.measure([e], [LIMA])
    assert task.reward(e, figures) == 1.25 and task.row(LIMA, e, {})["reward"] == 1.25
    assert task.reward(e, figures | {"all_gold": None}) == 1.0
    found = task.validate([e], [LIMA], [LIMA])
    assert found["f1"] == 1.0 and found["failed"] == 0 and found["format_rate"] == 1.0


def test_no_answer_and_no_search_each_cost_the_penalty(dist):
    task = search_task(penalty=0.25, stop_at_answer=True)
    for script, reward in (
        ([THINK, ANSWER], 1.0),  # searched and answered
        ([ANSWER], 0.75),  # answered at once
        ([THINK, "<think>I give up.</think>"], -0.25),
        ([THINK, ANSWER.replace("Lima", " ")], 0.1 - 0.25),  # an empty box
        (["<think>I give up.</think>"], -0.5),
    ):
        (e,), _ = play(task, script)
        (figures,) = task.measure([e], [LIMA])
        assert task.reward(e, figures) == reward, script


@pytest.mark.parametrize("served", [{"p0", "p1", "p2"}, {"p0", "x"}])
def test_a_served_index_of_another_corpus_is_refused(tmp_path, served):
    write_jsonl(str(tmp_path / "c.jsonl"), [{"id": f"p{i}", "contents": "a"} for i in range(2)])
    assert list(tasks.corpus_ids(str(tmp_path / "c.jsonl"), {"p0", "p1"})) == ["p0", "p1"]
    with pytest.raises(
        DataError, match=f"2 passages and is not what the served index of {len(served)}"
    ):
        tasks.corpus_ids(str(tmp_path / "c.jsonl"), served)
