"""Trajectories and prompts of episodes: what a row holds, that it is encoded as it was sampled, few-shot examples."""

from __future__ import annotations

import json

import pytest
import tiny
from scripted import (
    ANSWER,
    HERMES,
    LIMA,
    ROOT,
    THINK,
    Script,
    agent_task,
    call,
    measured,
    play,
    search_task,
    tokenizer,
)
from tokenizers import processors
from transformers import AddedToken

import reward
from data import DataError, Question
from engines.base import Sampling
from episodes import episode, tools, trajectories
from episodes.episode import run_episodes
from episodes.tasks import EpisodeConfig
from episodes.trajectories import read_conversations
from runs import write_jsonl


def test_what_an_mcp_server_returned_is_unknown_not_nothing():
    task = agent_task()
    (e,), _ = play(task, [call(query="Ann"), "<answer>Lima</answer>"])
    assert episode.trajectory_row(e, LIMA, task, {})["retrieved"] == ["p0"]
    assert measured(e, LIMA, task, ["p0"])["gold_recall"] == 1.0
    task.cfg = EpisodeConfig(mcp="http://localhost/mcp")  # its texts have no ids
    assert episode.trajectory_row(e, LIMA, task, {})["retrieved"] is None
    assert measured(e, LIMA, task, ["p0"])["gold_recall"] is None


def test_a_call_that_is_only_thought_of_stays_in_the_content():
    task = agent_task()
    (e,), _ = play(task, ["<think>A <tool_call>?</think>I know. <answer>Lima</answer>"])
    row = episode.trajectory_row(e, LIMA, task, {})
    assert (
        row["messages"][-1]["content"]
        == "<think>A <tool_call>?</think>I know. <answer>Lima</answer>"
    )


def test_a_trajectory_row_has_the_fields_of_the_schema():
    task = agent_task()
    (e,), _ = play(task, ["<think>hm</think>" + call(query="Ann"), "<answer>in Lima</answer>"])
    row = json.loads(
        json.dumps(episode.trajectory_row(e, LIMA, task, {"model": "m", "temperature": 0.7}))
    )
    assert set(row) >= {
        "rollout_id",
        "id",
        "question",
        "golden_answers",
        "messages",
        "tools",
        "request_meta",
        "response_meta",
        "rounds",
        "all_turns_tokens",
        "answer",
        "pred",
        "error",
        "metric_score",
    }
    assert (
        row["rollout_id"] == "q0#0"
        and row["rounds"] == 2
        and row["error"] is None
        and row["pred"] == "in Lima"
    )
    assert row["metric_score"] == {
        "em": 0.0,
        "f1": pytest.approx(2 / 3),
        "acc": 1.0,
        "precision": 0.5,
        "recall": 1.0,
    }
    system, user, first, tool, last = row["messages"]
    assert (system["role"], user["content"]) == ("system", "Where?") and last[
        "content"
    ] == "<answer>in Lima</answer>"
    assert first["reasoning_content"] == "hm" and first["tool_calls"][0]["function"] == {
        "name": "retrieve",
        "arguments": '{"query": "Ann"}',
    }
    assert (
        tool["tool_call_id"] == first["tool_calls"][0]["id"]
        and tool["content"] == "[1] Ann\nAnn wrote Dune in Lima."
    )
    prompt, response = len(e.prompt_ids), len(e.response_ids)
    last_turn = row["response_meta"]["usage"]
    assert (
        last_turn["prompt_tokens"] + last_turn["completion_tokens"]
        == prompt + response
        == last_turn["total_tokens"]
    )
    every = row["all_turns_tokens"]  # prompts are counted again each round
    assert every["prompt_tokens"] == prompt + last_turn["prompt_tokens"]
    assert every["completion_tokens"] == sum(e.loss_mask)
    assert (
        row["tools"] == [tools.SEARCH_TOOL] and row["retrieved"] == ["p0"] and row["searches"] == 1
    )


@pytest.mark.parametrize(
    "make, turns",
    [
        (search_task, [THINK, "<search></search>", ANSWER]),
        (search_task, [ANSWER]),
        (
            agent_task,
            [call(query="Ann") + "\n" + call(query="Lima"), call(), "<answer>Lima</answer>"],
        ),
    ],
)
@pytest.mark.parametrize("template", [HERMES, tiny.CHATML])
def test_a_trajectory_is_encoded_as_it_was_sampled(make, turns, template):
    """What SFT trains on is token for token the rollout: prompt, turns, results; masks too."""
    task = make(tok=tokenizer(template))
    engine = Script(turns)
    (e,) = run_episodes(
        engine, [task.prompt(Question("q", "Where?", []))], Sampling(max_tokens=3000), task, 4096
    )
    row = json.loads(json.dumps(episode.trajectory_row(e, LIMA, task, {})))
    ids, mask = trajectories.encode(task.tokenizer, row)
    assert (
        ids == e.prompt_ids + e.response_ids and mask == [0] * (len(e.prompt_ids) - 1) + e.loss_mask
    )


def test_base_models_get_one_string(tmp_path):
    task = search_task(template="base", tok=tiny.tiny_tokenizer(chat=False))
    text = task.tokenizer.decode(task.prompt(Question("q", "Where is {it} <|im_end|>?", [])))
    assert (
        text.endswith("User: Where is {it} < |im_end|>? Assistant:") and "<|im_start|>" not in text
    )
    (e,) = run_episodes(
        Script([THINK, ANSWER]),
        [task.prompt(Question("q", "Where?", []))],
        Sampling(max_tokens=3000),
        task,
        4096,
    )
    ids, mask = trajectories.encode(task.tokenizer, episode.trajectory_row(e, LIMA, task, {}))
    assert ids == e.prompt_ids + e.response_ids
    task.examples = [[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A."}]]
    shown = task.tokenizer.decode(task.prompt(Question("q", "Where?", [])))
    assert shown.endswith("\nUser: Who? Assistant: A.\nUser: Where? Assistant:")
    (tmp_path / "rules.txt").write_text("My rules.\n")
    assert search_task(instruction=str(tmp_path / "rules.txt")).messages("a")[0] == {
        "role": "system",
        "content": "My rules.",
    }


def test_an_instruction_may_name_a_token_that_is_not_special():
    """Reasoning models have `<think>` as one token; what the tokenizer calls special stays broken in a question."""
    tok = tiny.tiny_tokenizer(chat=False)
    tok.add_tokens([AddedToken("<think>", special=False)])
    text = tok.decode(
        search_task(template="base", tok=tok).prompt(Question("q", "Where <|im_end|>?", []))
    )
    assert "<think>" in text and "< think>" not in text and "< |im_end|>" in text


def test_a_prompt_without_a_template_never_ends_with_eos():
    """Some tokenizers put BOS before a text and EOS behind it: the first stays, the other would end the prompt."""
    tok = tiny.tiny_tokenizer(chat=False)
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 3), ("<|im_end|>", 2)]
    )
    ids = search_task(template="base", tok=tok).prompt(Question("q", "Where?", []))
    assert ids[0] == 3 and tok.decode(ids).endswith(" Assistant:")


def test_a_sampled_turn_without_its_result_is_refused():
    task = search_task()
    (e,), _ = play(task, [THINK, ANSWER])
    row = episode.trajectory_row(e, LIMA, task, {})
    row["messages"] = [m for m in row["messages"] if m["role"] != "tool"]
    with pytest.raises(DataError, match="q0#0: message 2 is followed by no result"):
        trajectories.encode(task.tokenizer, row)


def test_the_demo_examples_keep_the_form():
    for conversation in read_conversations(str(ROOT / "demo/search_examples.jsonl")):
        assert [m["role"] for m in conversation] == ["user", "assistant"]
        assert reward.check_search_format(conversation[1]["content"])
    for conversation in read_conversations(str(ROOT / "demo/agent_examples.jsonl")):
        for m in conversation:
            for made in m.get("tool_calls", []):
                assert not tools._check_call(made["function"], [tools.SEARCH_TOOL]).note
        assert reward.extract_answer(conversation[-1]["content"])


def test_examples_in_either_form_of_calls_make_the_same_prompt(tmp_path):
    """OpenAI's form has a call's arguments as JSON text; templates take a mapping."""

    def prompt(arguments, template):
        write_jsonl(
            tmp_path / "x.jsonl",
            [
                {
                    "messages": [
                        {"role": "user", "content": "Who?"},
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [
                                {"function": {"name": "retrieve", "arguments": arguments}}
                            ],
                        },
                        {"role": "tool", "content": "Ann."},
                        {"role": "assistant", "content": "<answer>Ann</answer>"},
                    ]
                }
            ],
        )
        task = agent_task(tok=tokenizer(template))
        task.examples = read_conversations(str(tmp_path / "x.jsonl"))
        return task.tokenizer.decode(task.prompt(Question("q", "Where?", [])))

    for template in (HERMES, tiny.CHATML):
        assert prompt('{"query": "who"}', template) == prompt({"query": "who"}, template)
        assert '"arguments": {"query": "who"}' in prompt('{"query": "who"}', template)
    for bad, said in (
        ('{"query"', "not valid JSON"),
        ('["who"]', "arguments must"),
        (3, "arguments"),
    ):
        with pytest.raises(DataError, match=f"x.jsonl:1: {said}"):
            prompt(bad, HERMES)


def test_no_text_can_hold_a_placeholder():
    """The texts of examples are put in for placeholders of private characters, which a question may hold too."""
    shown = [
        [
            {"role": "user", "content": "\ue0002\ue001 \ue000\ue0002\ue001"},
            {"role": "assistant", "content": "A\ue0002\ue001."},
        ]
    ]
    task = search_task()
    task.examples = shown
    text = task.tokenizer.decode(task.prompt(Question("q", "Where \ue0002\ue001?", [])))
    assert text.count("\ue0002\ue001") == 4 and "A\ue0002\ue001.<|im_end|>" in text


def test_examples_that_cannot_be_shown_are_refused(tmp_path):
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for messages, said in (
        ([], "x.jsonl:1: messages must run from a question"),
        (answered[:1], "x.jsonl:1: messages must run from a question"),
        (None, "x.jsonl:1: messages must be a list"),
        ([answered[0], answered[1] | {"content": None}], "x.jsonl: line 1: an example must run"),
        ([*answered, answered[0]], "x.jsonl: line 1: an example must run"),
        ([{"role": "system", "content": "s"}, *answered], "x.jsonl: line 1: an example must run"),
    ):
        write_jsonl(tmp_path / "x.jsonl", [{"messages": messages}])
        with pytest.raises(DataError, match=said):
            read_conversations(str(tmp_path / "x.jsonl"))
