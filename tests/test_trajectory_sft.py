"""trajectories.py and SFT on trajectories: what is trained, whatever form the records have; packing; balance; exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_lm, tiny_tokenizer

import data
import distributed
import sft
import targets
from config import ConfigError
from episodes import trajectories
from model import prepare_causal_lm
from prompts import encode_example
from runs import write_jsonl

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "finds passages",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]
# A template with tools in Qwen's hermes form: results are a user turn, neighbouring results share it.
HERMES = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n' if messages[0].role == 'system' else '' }}# Tools
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
REASONING{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As the hybrid Qwen3's: thoughts of turns before the last user message are dropped, the last turn shows an empty block.
FORGETS = HERMES.replace(
    "REASONING",
    "{% set ns = namespace(last=0) %}{% for x in messages %}{% if x.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% if loop.index0 > ns.last and (loop.last "
    "or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}",
)


def hermes(template=HERMES.replace("REASONING", "")):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def call(query, name="search"):
    return {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": {"query": query}},
    }


def conversation(*between):
    return [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "where is Ann?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("Ann"), call("Ann home")]},
        {"role": "tool", "tool_call_id": "c", "content": "Ann lives in Oslo."},
        {"role": "tool", "tool_call_id": "c", "content": "nothing<|im_end|>"},
        *between,
        {"role": "assistant", "content": "<answer>Oslo</answer>"},
    ]


def trained(tokenizer, ids, mask):
    """Texts of the stretches that are trained."""
    out, open_ = [], False
    for token, m in zip(ids[1:], mask):
        if m:
            out = out if open_ else [*out, []]
            out[-1].append(token)
        open_ = bool(m)
    return [tokenizer.decode(part) for part in out]


FIRST = (
    'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "Ann"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "search", "arguments": {"query": "Ann home"}}\n</tool_call><|im_end|>'
)


def test_assistant_turns_calls_and_turn_ends_are_trained_and_nothing_else():
    tokenizer = hermes()
    ids, mask = trajectories.encode_messages(tokenizer, conversation(), TOOLS, "row")
    assert trained(tokenizer, ids, mask) == [FIRST, "<answer>Oslo</answer><|im_end|>"]
    assert len(mask) == len(ids) - 1
    text = tokenizer.apply_chat_template(
        json.loads(json.dumps(conversation()).replace("<|im_end|>", "< |im_end|>")),
        tools=TOOLS,
        tokenize=False,
    )
    assert tokenizer.decode(ids) == text.removesuffix(
        "\n"
    )  # an independent rendering of the whole; the results' text ends no turn


def test_a_template_without_tools_spells_them():
    tokenizer = tiny_tokenizer()  # plain ChatML
    ids, mask = trajectories.encode_messages(tokenizer, conversation(), TOOLS, "row")
    assert trained(tokenizer, ids, mask) == [FIRST, "<answer>Oslo</answer><|im_end|>"]
    assert "finds passages" in tokenizer.decode(
        ids
    ) and "<tool_response>\nAnn lives in Oslo.\n</tool_response>" in tokenizer.decode(ids)
    without = trajectories.encode_messages(tokenizer, conversation()[1:], TOOLS, "row")
    assert "finds passages" in tokenizer.decode(without[0])


def test_reasoning_is_in_the_target_whatever_the_template_does_with_it():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "r7", "content": "a7"},
    ]
    turn = "<think>\nr7\n</think>\n\na7<|im_end|>"
    for tokenizer in (hermes(FORGETS), tiny_tokenizer(), hermes()):
        ids, mask = trajectories.encode_messages(tokenizer, messages, [], "row")
        assert trained(tokenizer, ids, mask) == [turn]
        assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n" + turn)


def test_a_template_that_rewrites_earlier_turns():
    """Thoughts stay where they are, as in a rollout, although such a template drops them once a new question follows."""
    tokenizer = hermes(FORGETS)
    think = conversation()
    think[2] |= {"reasoning_content": "who?"}
    first, empty = "<think>\nwho?\n</think>\n\n" + FIRST, "<think>\n\n</think>\n\n"
    last = "<answer>Oslo</answer><|im_end|>"
    ids, mask = trajectories.encode_messages(tokenizer, think, TOOLS, "row")
    assert trained(tokenizer, ids, mask) == [first, empty + last]
    more = [*think, {"role": "user", "content": "and Bob?"}, {"role": "assistant", "content": "no"}]
    ids, mask = trajectories.encode_messages(tokenizer, more, TOOLS, "row")
    assert trained(tokenizer, ids, mask) == [first, last, empty + "no<|im_end|>"]
    prompt = "<|im_start|>assistant\n" + empty  # that an answer's prompt has it, as Qwen3's: shown
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    ids, mask = trajectories.encode_messages(tokenizer, more, TOOLS, "row")
    assert trained(tokenizer, ids, mask) == [first, last, "no<|im_end|>"]
    assert tokenizer.decode(ids).endswith(prompt + "no<|im_end|>")


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}", "no header"),
        (HERMES.replace("REASONING", "").replace("<|im_end|>", "</s>"), "does not end it"),
        (
            HERMES.replace("REASONING{{ m.content }}", ""),
            "leaves out the message of role assistant",
        ),
    ],
)
def test_templates_whose_turns_cannot_be_told_are_refused(template, said):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(data.DataError, match=said):
        trajectories.encode_messages(hermes(template), messages, [], "row")


def test_results_inside_a_search_turn_are_not_trained():
    tokenizer = tiny_tokenizer()
    text = "<think>a</think> <search>b</search> <result>\nc\n</result> <think>d</think> <answer>\\boxed{e}</answer>"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    ids, mask = trajectories.encode_messages(tokenizer, messages, [], "row")
    assert trained(tokenizer, ids, mask) == [
        "<think>a</think> <search>b</search>",
        " <think>d</think> <answer>\\boxed{e}</answer><|im_end|>",
    ]


def agent_row(i=0, question="where is Ann?", **changes):
    """A row as infer.py writes it."""
    messages = conversation()
    messages[1]["content"] = question
    messages[2]["text"], messages[-1]["text"] = (
        FIRST.removesuffix("<|im_end|>"),
        "<answer>Oslo</answer>",
    )
    messages[4]["content"] = "nothing"
    for made in messages[2]["tool_calls"]:
        made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return {
        "rollout_id": f"q{i}#0",
        "id": f"q{i}",
        "question": question,
        "golden_answers": ["Oslo"],
        "task": "agent",
        "messages": messages,
        "tools": TOOLS,
        "template": "instruct",
        "rounds": 2,
        "error": None,
        "pred": "Oslo",
        "response_meta": {
            "usage": {"prompt_tokens": 10 + i, "completion_tokens": 5, "total_tokens": 15 + i}
        },
        "all_turns_tokens": {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29},
        "metric_score": dict(em=1.0, f1=1.0, acc=1.0, precision=1.0, recall=1.0),
    } | changes


@pytest.mark.parametrize("tokenizer", [hermes(), tiny_tokenizer()], ids=["tools", "spelled"])
def test_both_ways_of_encoding_agree(tmp_path, tokenizer):
    """By the sampled texts (infer.py's rows) and by the template: the same ids and masks where the model wrote what the
    template would."""
    (row,) = trajectories.read_trajectories(write(tmp_path / "t.jsonl", [agent_row()]))
    assert (
        trajectories.encode(tokenizer, row)
        == trajectories.encode_sampled(tokenizer, row)
        == trajectories.encode_messages(tokenizer, row["messages"], row["tools"], "row")
    )


def write(path, rows):
    write_jsonl(str(path), rows)
    return str(path)


def test_three_forms_of_one_record_train_the_same(tmp_path):
    tokenizer = hermes()
    row = trajectories.read_trajectories(write(tmp_path / "a.jsonl", [agent_row()]))[0]
    forms = {"openai": trajectories.to_openai(row), "swift": trajectories.to_swift(row)}
    assert set(forms["openai"]["messages"][2]) == {"role", "content", "tool_calls"}
    assert [m["role"] for m in forms["swift"]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool_call",
        "tool_call",
        "tool",
        "tool",
        "assistant",
    ]
    assert json.loads(forms["swift"]["messages"][3]["content"]) == {
        "name": "search",
        "arguments": {"query": "Ann"},
    }
    assert json.loads(forms["swift"]["tools"]) == TOOLS
    for name, form in forms.items():
        again = trajectories.read_trajectories(write(tmp_path / f"{name}.jsonl", [form]))[0]
        assert trajectories.encode(tokenizer, again) == trajectories.encode(tokenizer, row), name
    thinking = agent_row()
    thinking["messages"][2] |= {"content": "<think>who</think> I look.", "reasoning_content": "who"}
    assert (
        trajectories.to_openai(thinking)["messages"][2]["content"] == "<think>who</think> I look."
    )
    thinking["messages"][2]["content"] = ""
    assert trajectories.to_swift(thinking)["messages"][2]["content"] == "<think>\nwho\n</think>"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must run from a question"),
        ({"messages": [{"role": "user", "content": "a"}]}, "must run from a question"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "judge", "content": "b"}]},
            "role 'judge'",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "tool_call", "content": "{"}]},
            "not valid JSON",
        ),
        ({"messages": conversation(), "tools": [{"name": "x"}]}, "a tool must be"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, row, message):
    with pytest.raises(data.DataError, match=rf"t\.jsonl:2: .*{message}"):
        trajectories.read_trajectories(write(tmp_path / "t.jsonl", [agent_row(), row]))
    with pytest.raises(data.DataError, match="that no other row has"):
        trajectories.read_trajectories(write(tmp_path / "t.jsonl", [agent_row(), agent_row()]))


# ------------------------------------------------------------------------------------------------------------ choosing


def test_success_balance_and_firsts():
    rows = [
        agent_row(0),
        agent_row(1, metric_score=dict(em=0.0, f1=0.8)),
        agent_row(2, metric_score=dict(em=0.0, f1=0.79)),
        agent_row(3, error="tool_error: x"),
        {"messages": conversation()},
    ]
    assert [trajectories.succeeded(r, "em") for r in rows] == [True, False, False, False, False]
    assert [trajectories.succeeded(r, "f1") for r in rows] == [True, True, False, False, False]
    many = [
        agent_row(i, rounds=1 + (i % 10 == 0), metadata={"type": "ab"[i % 2]}) for i in range(40)
    ]
    for by, counts in (("rounds", [5, 4]), ("type", [5, 5]), ("tool_calls", [5])):
        kept = trajectories.balance(many, by, 5, seed=1)
        values = [trajectories.CLASSES[by](r) for r in kept]
        assert sorted((values.count(v) for v in set(values)), reverse=True) == counts, by
        assert (
            kept
            == trajectories.balance(many, by, 5, seed=1)
            != trajectories.balance(many, by, 5, seed=2)
        )
        assert [many.index(r) for r in kept] == sorted(many.index(r) for r in kept)
    assert trajectories.first_of_each(
        [agent_row(0, rollout_id=f"q0#{k}") for k in range(4)] + [agent_row(1)], 2
    ) == [agent_row(0, rollout_id="q0#0"), agent_row(0, rollout_id="q0#1"), agent_row(1)]


# ------------------------------------------------------------------------------------------------------------ training


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """These are CPU tests, on a machine with a GPU too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    tiny_lm(folder)
    hermes().save_pretrained(folder)
    return str(folder)


def config(lm, records, output, **changes):
    values = dict(
        stage="train",
        model=lm,
        records=records,
        out=str(output),
        epochs=2,
        lr=3e-3,
        sequences_per_step=3,
        micro_batch_tokens=1500,
        heldout_fraction=0.25,
        save_every=10,
    )
    return sft.SFTConfig(**values | changes)


def test_over_long_failed_and_unfinished_rows_are_dropped_and_counted(lm, tmp_path):
    long, failed, cut = agent_row(1), agent_row(2, error="engine_error: x"), agent_row(3)
    halfway = agent_row(4, end="length")
    long["messages"][3]["content"] = "x" * 500
    cut["messages"] = cut["messages"][:-1]
    path = write(tmp_path / "t.jsonl", [agent_row(0, end="answered"), long, failed, cut, halfway])
    cfg = config(lm, path, "unused", max_length=len(trajectories.encode(hermes(), agent_row(0))[0]))
    examples, dropped = targets.make_examples(
        trajectories.read_trajectories(path), hermes(), cfg, path, agentic=True
    )
    assert len(examples) == 1 and dropped == {
        f"longer than {cfg.max_length} tokens": 1,
        "failed for a technical reason": 1,
        "without a last answer": 1,
        "ended as length": 1,
    }
    with pytest.raises(data.DataError, match="none of its 5 records"):
        sft.main(config(lm, path, tmp_path / "o", max_length=10))


def examples_of(count=5):
    rows = [agent_row(i, "where is " + "Ann" * (i + 1) + "?") for i in range(count)]
    return [targets.Example(*trajectories.encode(hermes(), r), f"c{i}") for i, r in enumerate(rows)]


@pytest.mark.parametrize("budget", [1, 1200, 100000])
def test_loss_and_gradient_of_packed_rows_are_those_of_each_row_alone(dist, budget):
    """Rows of several trained turns: no row sees another, and the mask never reaches over a border."""
    examples, oracle = examples_of(), tiny_lm().double()
    count, total = sum(sum(e.loss_mask) for e in examples), 0.0
    for e in examples:
        logits = oracle(torch.tensor([e.tokens[:-1]])).logits[0]
        labels = torch.tensor(e.tokens[1:]).masked_fill(~torch.tensor(e.loss_mask).bool(), -100)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count
        loss.backward()
        total += loss.item()
    model = distributed.shard_model(prepare_causal_lm(tiny_lm().double()), dist)
    optimizer = torch.optim.SGD(model.parameters())
    batches = sft.step_batches(model, examples, budget, 0, dist)
    assert len(batches) == {1: 5, 1200: 2, 100000: 1}[budget]
    assert sft.heldout_loss(model, batches)["heldout_loss"] == pytest.approx(total, rel=1e-5)
    loss, _ = sft.train_step(model, optimizer, batches, count, 1.0, 1e9)
    assert loss == pytest.approx(total, rel=1e-5)
    after = {name: distributed.full_tensor(p) for name, p in model.state_dict().items()}
    for name, p in oracle.named_parameters():
        assert (after[name] - (p.detach() - p.grad)).abs().max() < 1e-6, name


def test_a_run_on_trajectories(lm, tmp_path):
    rows = [agent_row(i, f"where is Ann{i}?") for i in range(6)]
    path = write(
        tmp_path / "t.jsonl", [r | {"rollout_id": f"{r['id']}#{k}"} for r in rows for k in range(2)]
    )
    result = sft.main(config(lm, path, tmp_path / "o", micro_batch_tokens=1500))["train"]
    lines = [row for _, row in data.read_jsonl(str(tmp_path / "o/metrics.jsonl"))]
    assert (
        result["heldout"] == 4 and result["records"] == 8
    )  # both rollouts of a question are held out together
    assert (
        lines[-1]["heldout_loss"] < lines[0]["heldout_loss"]
        and Path(result["model"], "config.json").exists()
    )
    for key, value in (("target", "rewrite"), ("instruction", "i.txt")):
        (tmp_path / "i.txt").write_text("Rewrite.")
        value = str(tmp_path / value) if key == "instruction" else value
        with pytest.raises(ConfigError, match=f"{key}={value} is for turns"):
            sft.main(config(lm, path, tmp_path / "p", **{key: value}))


def test_ids_of_any_kind(tmp_path):
    path = write(tmp_path / "t.jsonl", [agent_row(0, rollout_id=[1])])
    with pytest.raises(data.DataError, match="t.jsonl:1: rollout_id .1. must"):
        trajectories.read_trajectories(path)
    assert trajectories.question_key(agent_row(0) | {"id": 0}) == "0"


def chat_rows(tmp_path, *turns, **keys):
    """The rows of a file with one chat, whose assistant's message has these keys."""
    return trajectories.read_trajectories(
        write(
            tmp_path / "t.jsonl",
            [
                {
                    "messages": [
                        {"role": "user", "content": "q"},
                        *turns,
                        {"role": "assistant", "content": "a"} | keys,
                    ]
                }
            ],
        )
    )


def texts(tmp_path, *turns, tokenizer=None, **keys):
    tokenizer, (row,) = tokenizer or tiny_tokenizer(), chat_rows(tmp_path, *turns, **keys)
    return trained(tokenizer, *trajectories.encode(tokenizer, row))


def test_turns_that_are_not_to_be_trained_are_not(tmp_path):
    """OpenAI's weight and ms-swift's loss."""
    more = {"role": "user", "content": "more"}
    for untrained in ({"weight": 0}, {"loss": False}):
        assert texts(tmp_path, {"role": "assistant", "content": "b"} | untrained, more) == [
            "a<|im_end|>"
        ]
    assert texts(
        tmp_path, {"role": "assistant", "content": "b", "weight": 1, "loss": None}, more, loss=True
    ) == ["b<|im_end|>", "a<|im_end|>"]
    with pytest.raises(data.DataError, match=r"t.jsonl:1: weight and loss .* not \[0.5, None\]"):
        chat_rows(tmp_path, weight=0.5)


def test_marks_of_untrained_turns_hold_in_every_form(tmp_path):
    """On a sampled turn, on a call of its own message, and in exports."""
    tokenizer, last = hermes(), ["<answer>Oslo</answer><|im_end|>"]
    for mark in ({"weight": 0}, {"loss": False}):
        row = agent_row()
        row["messages"][2] |= mark
        (row,) = trajectories.read_trajectories(write(tmp_path / "a.jsonl", [row]))
        ids, mask = trajectories.encode(tokenizer, row)
        assert (
            trained(tokenizer, ids, mask) == last
            and ids == trajectories.encode(tokenizer, agent_row())[0]
        )
        openai, swift = trajectories.to_openai(row), trajectories.to_swift(row)
        assert [m.get("weight") for m in openai["messages"]] == [None, None, 0, None, None, None]
        assert [m.get("loss") for m in swift["messages"]] == [
            None,
            None,
            False,
            False,
            False,
            None,
            None,
            None,
        ]
        for form in (openai, swift):
            (again,) = trajectories.read_trajectories(write(tmp_path / "b.jsonl", [form]))
            assert trajectories.encode(tokenizer, again) == (ids, mask)


def test_a_call_that_is_not_trained(tmp_path):
    made = {
        "role": "tool_call",
        "content": '{"name": "search", "arguments": {"query": "x"}}',
        "loss": False,
    }
    found = {"role": "tool", "content": "r"}
    assert texts(tmp_path, made, found, tokenizer=hermes()) == ["a<|im_end|>"]
    assert texts(
        tmp_path,
        {"role": "assistant", "content": "b", "loss": False},
        made,
        found,
        tokenizer=hermes(),
    ) == ["a<|im_end|>"]
    with pytest.raises(
        data.DataError, match="t.jsonl:1: an assistant's message and its tool_call differ in loss"
    ):
        chat_rows(tmp_path, {"role": "assistant", "content": "b"}, made, found)


def test_thoughts_under_other_names_are_thoughts_and_old_calls_are_refused(tmp_path):
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert texts(tmp_path, tokenizer=hermes(FORGETS), **{key: "r7"}) == [
            "<think>\nr7\n</think>\n\na<|im_end|>"
        ]
    with pytest.raises(data.DataError, match="t.jsonl:1: .* not function_call"):
        chat_rows(tmp_path, content=None, function_call={"name": "search"})


def test_an_eos_that_is_spelled_out_is_the_turns_end_and_not_text(tmp_path):
    assert texts(tmp_path, content="a b<|im_end|>\n") == ["a b<|im_end|>"]
    assert texts(tmp_path, content="a <|im_end|> b") == ["a < |im_end|> b<|im_end|>"]
    tokenizer = tiny_tokenizer()
    for target, shown in (
        ("<rewrite>x</rewrite><|im_end|>", "<rewrite>x</rewrite>"),
        ("a <|im_end|> x", "a < |im_end|> x"),
    ):
        ids, mask = encode_example(tokenizer, [7, 8], target, 2)
        assert trained(tokenizer, ids, mask) == [shown + "<|im_end|>"] and ids.count(2) == 1


def test_the_models_own_text_keeps_added_tokens_that_are_not_special(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    assert texts(tmp_path, tokenizer=tokenizer, content="<think>t</think>a") == [
        "<think>t</think>a<|im_end|>"
    ]


@pytest.mark.parametrize(
    "result", ["<result>\nR\n</result>", "<result>R</result>", "<information>R\nS</information>"]
)
def test_results_inside_a_turn_are_not_trained_whatever_their_form(tmp_path, result):
    assert texts(tmp_path, content=f"<search>s</search> {result} <answer>a</answer>") == [
        "<search>s</search>",
        " <answer>a</answer><|im_end|>",
    ]


def test_empty_turns_are_dropped_or_refused(tmp_path):
    from test_sft import config

    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": c}]}
        for c in ("a", "", " \n", None)
    ]
    rows += [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "weight": 0},
            ]
        }
    ]
    path = write(tmp_path / "t.jsonl", rows)
    rows, cfg = trajectories.read_trajectories(path), config("lm", path, "out")
    examples, dropped = targets.make_examples(rows, tiny_tokenizer(), cfg, path, agentic=True)
    assert len(examples) == 1 and dict(dropped) == {
        "without a last answer": 3,
        "without a turn to train": 1,
    }
    with pytest.raises(
        data.DataError, match="t.jsonl:1: an assistant's message in the middle is empty"
    ):
        chat_rows(
            tmp_path, {"role": "assistant", "content": " "}, {"role": "user", "content": "more"}
        )
