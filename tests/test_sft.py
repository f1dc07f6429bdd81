"""sft.py: masks, one loss whatever the cut, exact resumption, the warm-up's records, bad input."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from test_infer import CPU, Scripted, exit_status, read, response, write_turns
from tiny import tiny_lm, tiny_tokenizer
from transformers import AutoModelForCausalLM
import data
import distributed
import infer
import runs
import sft
import targets
from distributed import Dist
from batching import training_batch
from model import prepare_causal_lm
from packing import packed_logprobs
from prompts import encode_chat, rewrite_prompt
from runs import write_jsonl

ROOT = Path(__file__).resolve().parent.parent

FACTS = [
    ("who is Ann?", "A painter.", "she", "Ann"),
    ("who is Bob?", "A poet.", "he", "Bob"),
    ("what is Oslo?", "A city.", "it", "Oslo"),
    ("who is Cleo?", "A queen.", "she", "Cleo"),
    ("who is Dag?", "A cook.", "he", "Dag"),
]


def record(i, **changes):
    question, answer, pronoun, name = FACTS[i % len(FACTS)]
    rewrite = f"is {name} {i}?"
    return (
        dict(
            query_id=f"q{i}",
            conversation_id=f"c{i // 2}",
            turn=2,
            context=[[question, answer]],
            question=f"is {pronoun} {i}?",
            gold_ids=[f"p{i}"],
            rewrite=rewrite,
            response=response(rewrite, f"{pronoun} = {name}"),
        )
        | changes
    )


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    tiny_lm(folder)
    return str(folder)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("records") / "records.jsonl")
    write_jsonl(path, [record(i) for i in range(7)])
    return path


@pytest.fixture(autouse=True)
def short_prompt(monkeypatch):
    """The instruction costs 500 tokens of the byte tokenizer; the tests in this process do without."""
    monkeypatch.setattr("prompts.INSTRUCTION", "Rewrite.")
    torch.set_num_threads(1)


def config(lm, records, output, **changes):
    values = dict(
        stage="train",
        model=lm,
        records=records,
        out=str(output),
        epochs=2,
        lr=3e-3,
        sequences_per_step=3,
        micro_batch_tokens=600,
        heldout_fraction=0.25,
        save_every=1,
    )
    return sft.SFTConfig(**values | changes)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def metrics(output):
    return [
        {k: v for k, v in row.items() if k != "seconds_update"}
        for row in read(Path(output) / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(lm, records, tmp_path_factory):
    """The undisturbed run that others are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prompts.INSTRUCTION", "Rewrite.")
        torch.set_num_threads(1)
        output = tmp_path_factory.mktemp("whole") / "run"
        return output, sft.main(config(lm, records, output))["train"]


def same_run(a, b):
    """Both runs wrote the same numbers and weights, bit for bit."""
    assert metrics(a) == metrics(b)
    one, two = weights(a / "final"), weights(b / "final")
    assert not [k for k in one if not torch.equal(one[k], two[k])]


# ------------------------------------------------------------------------------------------------------- rows and masks


def rows_of(lm, records, **changes):
    cfg = config(lm, records, "unused", **changes)
    return targets.make_examples(data.read_turns(records), tiny_tokenizer(), cfg, records)


def test_target_is_think_and_rewrite_behind_the_prompt_of_rollouts(lm, records):
    """reasoning is in the target.  prompt and answer are encoded apart and joined."""
    turn = data.read_turns(records)[0]
    example = rows_of(lm, records)[0][0]
    tokenizer = tiny_tokenizer()
    prompt = encode_chat(tokenizer, rewrite_prompt(turn))
    assert example.tokens[: len(prompt)] == prompt
    target = [t for t, m in zip(example.tokens[1:], example.loss_mask) if m]
    assert (
        target == tokenizer(turn.response)["input_ids"] + [2]
        and len(example.loss_mask) == len(example.tokens) - 1
    )
    assert (
        tokenizer.decode(target)
        == "<think>she = Ann</think>\n<rewrite>is Ann 0?</rewrite><|im_end|>"
    )
    assert targets.human_response("Is she 0?", "IS Ann 0?") == response("IS Ann 0?", "missing: Ann")
    assert targets.human_response("who?", "Who?") == response("Who?", "missing: nothing")
    assert tokenizer.decode(rows_of(lm, records, target="rewrite")[0][1].tokens).endswith(
        "<think>missing: Bob</think>\n<rewrite>is Bob 1?</rewrite><|im_end|>"
    )


def test_blank_targets_are_dropped_and_malformed_ones_are_told(lm, tmp_path, capsys):
    rows = [
        {"query_id": f"q{i}", "question": "who?", "response": text, "rewrite": rewrite}
        for i, (text, rewrite) in enumerate(
            [
                ("<think>a</think><rewrite>who?</rewrite>", "who?"),
                ("just text", "who <rewrite>?"),
                ("<think>b</think><rewrite>when?</rewrite>", "when?"),
                (" ", "  "),
                ("", ""),
            ]
        )
    ]
    path = str(tmp_path / "turns.jsonl")
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for target in ("response", "rewrite"):
        examples, dropped = rows_of(lm, path, target=target)
        assert len(examples) == 3 and dict(dropped) == {f"without {target}": 2}
        assert "note: 1 of the 3 targets" in capsys.readouterr().out


def test_mask_goes_by_position_when_pad_is_eos():
    """The one EOS of the response is trained, the equal ids behind it are not."""
    rows = [targets.Example([9, 7, 8, 2], [1, 1, 1], ""), targets.Example([9] * 6, [0] * 5, "")]
    batch = training_batch([sft.as_rollout(row, i) for i, row in enumerate(rows)], [0.0] * 2, 2)
    assert batch.tokens[0].tolist() == [9, 7, 8, 2, 2, 2]
    labels = torch.where(batch.loss_mask.bool(), batch.tokens[:, 1:], -100)
    assert labels.tolist() == [[7, 8, 2, -100, -100], [-100] * 5]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 0, 0]


def test_long_rows_are_dropped_and_counted(lm, records, tmp_path):
    """a row whose target would be cut is no row."""
    path = str(tmp_path / "r.jsonl")
    write_jsonl(
        path, [record(0), record(1, response=response("x" * 300)), record(2, response=None)]
    )
    limit = len(rows_of(lm, records)[0][0].tokens)
    examples, dropped = rows_of(lm, path, max_length=limit)
    assert len(examples) == 1 and dropped == {
        f"longer than {limit} tokens": 1,
        "without response": 1,
    }


def test_no_row_left_is_an_error_before_the_model_is_loaded(lm, records, tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "load_policy", lambda *a: pytest.fail("the model was loaded"))
    with pytest.raises(data.DataError, match="7 longer than 20 tokens.*raise max_length"):
        sft.main(config(lm, records, tmp_path / "o", max_length=20))


def test_token_accuracy_counts_masked_positions_only(dist):
    model = tiny_lm()
    logits = model(torch.tensor([[7, 9, 2, 2]])).logits[0]
    best, other = int(logits[0].argmax()), int(logits[1].argmin())
    logits = model(torch.tensor([[7, best, other, 2]])).logits[0]
    batches = sft.step_batches(
        model, [targets.Example([7, best, other, 2, 3], [1, 1, 0, 0], "")], 99, 0, dist
    )
    assert (
        sft.heldout_loss(model, batches)["heldout_accuracy"]
        == (1 + (int(logits[1].argmax()) == other)) / 2
    )


def test_heldout_loss_is_the_mean_over_trained_tokens(lm, records, dist):
    examples = rows_of(lm, records)[0]
    model = tiny_lm()
    found = sft.heldout_loss(model, sft.step_batches(model, examples, 600, 0, dist))
    sums = torch.zeros(3)
    for e in examples:
        with torch.no_grad():
            logits = model(torch.tensor([e.tokens[:-1]])).logits[0].log_softmax(-1)
        after, mask = torch.tensor(e.tokens[1:]), torch.tensor(e.loss_mask).bool()
        correct = (logits.argmax(-1) == after)[mask].sum()
        sums += torch.stack([-logits[mask, after[mask]].sum(), correct, mask.sum()])
    assert found["heldout_loss"] == pytest.approx(float(sums[0] / sums[2]), rel=1e-5)
    assert found["heldout_accuracy"] == pytest.approx(float(sums[1] / sums[2]), abs=1e-9)


def test_heldout_shares_no_conversation_and_order_covers_every_row():
    rows = [targets.Example([i], [], f"c{i // 2}") for i in range(11)]
    train, held = targets.split_heldout(rows, 0.3, seed=1)
    assert len(train) + len(held) == 11 and not {e.conversation_id for e in train} & {
        e.conversation_id for e in held
    }
    assert (
        targets.split_heldout(rows[:2], 0.3, seed=1) == (rows[:2], [])
        and targets.split_heldout(rows, 0.0, 1)[1] == []
    )
    for fraction, count in ((0.01, 1), (0.3, 2), (0.99, 5)):  # of six conversations
        held = targets.split_heldout(rows, fraction, seed=2)[1]
        assert len({e.conversation_id for e in held}) == count
    drawn = {repr(targets.split_heldout(rows, 0.3, seed)[1]) for seed in range(5)}
    assert len(drawn) > 1  # by the seed
    cfg = sft.SFTConfig(sequences_per_step=4)
    epochs = [[sft.step_examples(rows, 3 * epoch + i, cfg) for i in range(3)] for epoch in range(2)]
    assert [len(step) for step in epochs[0]] == [4, 4, 3]  # the incomplete batch is kept
    order = [[e.tokens[0] for step in steps for e in step] for steps in epochs]
    assert sorted(order[0]) == sorted(order[1]) == list(range(11)) and order[0] != order[1]


# ------------------------------------------------------------------------------------------------------------- the loss


def one_update(examples, size, dist):
    """Weights after one step of plain gradient descent: start - gradient."""
    model = distributed.shard_model(prepare_causal_lm(tiny_lm().double()), dist)
    batches = sft.step_batches(model, examples, size, 0, dist)
    tokens = sum(sum(e.loss_mask) for e in examples)
    loss, norm = sft.train_step(
        model, torch.optim.SGD(model.parameters()), batches, tokens, 1.0, 1e9
    )
    return loss, norm, {name: distributed.full_tensor(p) for name, p in model.state_dict().items()}


def test_gradient_does_not_depend_on_the_micro_batch_size(lm, records, dist):
    examples = rows_of(lm, records)[0]
    model = tiny_lm().double()
    for e in examples:  # the oracle: row by row, nothing padded
        logits = model(torch.tensor([e.tokens[:-1]])).logits[0]
        labels = torch.tensor(e.tokens[1:]).masked_fill(~torch.tensor(e.loss_mask).bool(), -100)
        part = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (part / sum(sum(e.loss_mask) for e in examples)).backward()
    for size in (1, 400, 900, 9000):
        after = one_update(examples, size, dist)[2]
        for name, p in model.named_parameters():
            assert (after[name] - (p.detach() - p.grad)).abs().max() < 1e-6, (
                size,
                name,
            )  # logits are taken in float32


def test_processes_share_a_batch_without_loss(lm, records, dist):
    """Together they have every row once; one without rows still has a backward pass."""
    examples, model = rows_of(lm, records)[0], tiny_lm()
    for world in (1, 2, 3, 8, 9):
        parts = [
            sft.step_batches(model, examples, 600, 0, Dist(rank, world, CPU.device))
            for rank in range(world)
        ]
        trained = [sum(int(m.part.loss_mask.sum()) for m in part) for part in parts]
        assert all(parts) and sum(trained) == sum(sum(e.loss_mask) for e in examples)
        assert sum(map(bool, trained)) == min(world, len(examples))
    (idle,) = parts[-1]  # nine processes, seven rows
    out = packed_logprobs(model, idle.packed)
    out.sum().backward()
    assert not out.any() and all(p.grad is None or not p.grad.any() for p in model.parameters())


# --------------------------------------------------------------------------------------------------------- whole runs


def test_overfits_and_greedy_output_equals_the_target(records, tmp_path):
    tiny_lm(tmp_path / "lm", hidden_size=64, intermediate_size=128)
    path = str(tmp_path / "r.jsonl")
    write_jsonl(path, [record(i) for i in range(4)])
    result = sft.main(
        config(
            str(tmp_path / "lm"),
            path,
            tmp_path / "o",
            epochs=45,
            lr=1e-2,
            sequences_per_step=4,
            micro_batch_tokens=4096,
            heldout_fraction=0.0,
            save_every=1000,
            keep_checkpoints=1,
        )
    )["train"]
    steps = metrics(tmp_path / "o")
    assert steps[0]["loss"] > 4 and steps[-1]["loss"] < 0.05 and result["best_epoch"] == 45
    infer.main(
        infer.InferConfig(
            model=str(tmp_path / "o/final"),
            turns=path,
            out=str(tmp_path / "i.jsonl"),
            max_response_tokens=100,
        )
    )
    assert [r["response"] for r in read(tmp_path / "i.jsonl")] == [
        record(i)["response"] for i in range(4)
    ]


def test_run_folder(whole, lm, records):
    """One line a step, the best epoch exported, figures kept, nothing half-written."""
    output, result = whole
    lines = metrics(output)
    assert [(row["step"], row.get("epoch")) for row in lines] == [
        (0, None),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    assert [("heldout_loss" in row) for row in lines] == [True, False, True, False, True]
    assert (
        result["heldout_loss"]
        == min(lines[2]["heldout_loss"], lines[4]["heldout_loss"])
        < lines[0]["heldout_loss"]
    )
    assert (
        result["records"] + result["heldout"] == 7
        and lines[1]["lr"] == 3e-3
        and lines[4]["lr"] < lines[2]["lr"]
    )
    assert sorted(os.listdir(output)) == [
        "checkpoint_000003",
        "checkpoint_000004",
        "config.yaml",
        "final",
        "metrics.jsonl",
        "report.html",
        "result.json",
        "train.settings.json",
    ]
    assert sft.main(config(lm, records, output))["train"] == result  # nothing to do
    shutil.rmtree(output / "final")
    assert sft.main(config(lm, records, output))["train"] == result and (output / "final").is_dir()
    with pytest.raises(data.DataError, match="lr was 0.003 and is 0.001.*overwrite=true"):
        sft.main(config(lm, records, output, lr=1e-3))


class Crash(Exception):
    pass


def crash_at(monkeypatch, step):
    """The process dies when it has written the line of `step`."""
    append = runs.append_metrics

    def dying(path, row):
        append(path, row)
        if row["step"] == step:
            raise Crash

    monkeypatch.setattr(runs, "append_metrics", dying)


def test_resumed_twice_equals_undisturbed(lm, records, whole, tmp_path, monkeypatch):
    """every resumption is in its place.  what a kill left of a save is ignored.  a damaged
    state.json is passed over for the checkpoint before it."""
    output = tmp_path / "run"
    for step in (2, 4):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, step)
            sft.main(config(lm, records, output))
    assert sorted(p.name for p in output.glob("checkpoint*")) == [
        "checkpoint_000003",
        "checkpoint_000004",
    ]
    (output / "checkpoint_000005.tmp").mkdir()
    (output / "checkpoint_000004/state.json").write_text('{"step": 12')
    with open(output / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "lo')
    sft.main(config(lm, records, output))
    same_run(output, whole[0])


def test_sigterm_finishes_the_step_saves_and_leaves_with_143(
    lm, records, whole, tmp_path, monkeypatch
):
    fit = sft.fit

    def interrupted(run, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return fit(run, step)

    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as e:
        patch.setattr(sft, "fit", interrupted)
        sft.main(config(lm, records, output, save_every=100))
    assert (
        e.value.code == 143
        and (output / "checkpoint_000003").is_dir()
        and not (output / "result.json").exists()
    )
    sft.main(config(lm, records, output))
    same_run(output, whole[0])


DRIVER = """
import os, signal, sys
sys.path[:0] = [{root!r}]
import torch, config, prompts, sft
torch.set_num_threads(1)
prompts.INSTRUCTION = "Rewrite."
fit = sft.fit
def dying(run, step):
    row = fit(run, step)
    if row["step"] == {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
    return row
sft.fit = dying
config.run(sft.SFTConfig, sft.main)
"""


def drive(tmp_path, cfg, processes=1, kill=-1):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(root=str(ROOT), kill=kill))
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ] * (processes > 1)
    arguments = [f"{k}={json.dumps(v)}" for k, v in vars(cfg).items() if not is_dataclass(v)]
    return subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_sigkill_then_two_processes(lm, records, whole, tmp_path):
    """A killed run goes on bit for bit in one process, and within rounding in two (same global order)."""
    output = tmp_path / "run"
    killed = drive(tmp_path, config(lm, records, output), kill=3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(output), str(copy)], check=True)
    sft.main(config(lm, records, output))
    same_run(output, whole[0])
    two = drive(tmp_path, config(lm, records, copy), processes=2)
    assert two.returncode == 0, two.stderr
    summary = json.loads(two.stdout.strip().splitlines()[-1])["train"]
    assert summary["heldout_loss"] == pytest.approx(whole[1]["heldout_loss"], rel=1e-5)
    rows, expected = metrics(copy), metrics(whole[0])
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    for row, other in zip(rows[3:], expected[3:]):
        assert (
            row["loss"] == pytest.approx(other["loss"], rel=1e-5)
            and row["tokens"] == other["tokens"]
        )
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    one, other = weights(copy / "final"), weights(whole[0] / "final")
    assert all(
        (one[k] - other[k]).abs().max() < 2e-4 for k in one
    )  # Adam turns rounding of tiny gradients into ~lr


def test_gradients_that_are_not_finite_end_the_run(lm, records, tmp_path):
    model = tiny_lm()
    model.model.norm.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / "lm")
    tiny_tokenizer().save_pretrained(tmp_path / "lm")
    with pytest.raises(sft.Stopped, match="not finite in three steps in a row"):
        sft.main(
            config(
                str(tmp_path / "lm"),
                records,
                tmp_path / "o",
                heldout_fraction=0.0,
                sequences_per_step=4,
            )
        )
    lines = metrics(tmp_path / "o")
    assert [row["skipped"] for row in lines] == [1, 1, 1] and lines[0]["loss"] is None
    before, after = tiny_lm().state_dict(), weights(tmp_path / "o/final")
    assert all(
        torch.equal(before[k], after[k]) for k in before if k != "model.norm.weight"
    )  # nothing was updated
    with pytest.raises(sft.Stopped, match="held-out loss is nan"):
        sft.main(config(str(tmp_path / "lm"), records, tmp_path / "p"))


# ------------------------------------------------------------------------------------------------------------- warm-up


class Ranks:
    """A retriever that knows the ranks of texts; remembers what was searched."""

    passage_ids = {"p0", "p1", "p2", "p3", "p4"}

    def __init__(self, ranks):
        self.ranks, self.searched = ranks, []

    def gold_ranks(self, queries, gold_ids, cutoff=100):
        self.searched += queries
        return [self.ranks[q] for q in queries]


def test_warm_up_keeps_what_retrieves(lm, tmp_path, monkeypatch):
    questions = {f"q{i}": f"question {i}" for i in range(5)}
    turns = write_turns(tmp_path / "t.jsonl", questions)
    rows = read(turns) + [dict(query_id="none", question="no gold")]
    write_jsonl(turns, rows)
    write_jsonl(str(tmp_path / "e.jsonl"), [{"question": "a", "think": "b", "rewrite": "c"}])
    answers = {
        "question 0": [
            response("good"),
            response("good", "again"),
            response("second"),
            "good",
        ],  # two different
        "question 1": [response("second"), response("good"), response("good"), response("bad")],
        "question 2": [
            response("bad"),
            response("broken"),
            "",
            "<think>a</think>\n<rewrite></rewrite>",
        ],
        "question 3": ["good"] * 4,
        "question 4": [response("second")] * 4,
    }
    engine = Scripted(answers)
    retriever = Ranks({"good": 1, "second": 2, "bad": None, "broken": math.nan})
    monkeypatch.setattr(infer, "open_engine", lambda *a: engine)
    monkeypatch.setattr(targets, "open_retriever", lambda cfg: retriever)
    cfg = sft.SFTConfig(
        stage="sample",
        model=lm,
        turns=turns,
        examples=str(tmp_path / "e.jsonl"),
        out=str(tmp_path / "o"),
        samples_per_turn=4,
        max_response_tokens=200,
    )
    stats = sft.main(cfg)["sample"]
    records = read(tmp_path / "o/records.jsonl")
    assert [(r["query_id"], r["response"], r["rank"], r["sample"]) for r in records] == [
        ("q0", response("good"), 1, 0),
        ("q1", response("good"), 1, 1),
    ]
    assert stats | {"mean_tokens": 0} == {
        "turns": 5,
        "turns_without_gold": 1,
        "samples": 20,
        "well_formed": 13,
        "malformed": 7,
        "too_long": 0,
        "engine_error": 0,
        "searches": 8,
        "search_failed": 1,
        "found_in_100": 10,
        "within_max_rank": 4,
        "turns_covered": 2,
        "kept": 2,
        "mean_tokens": 0,
    }
    assert (
        len(retriever.searched) == 8
    )  # equal rewrites of a turn are searched once, malformed ones never
    engine.asked.clear()
    assert sft.main(cfg)["sample"] == stats and not engine.asked  # nothing to do
    with pytest.raises(data.DataError, match="max_rank was 1 and is 2"):
        sft.main(sft.SFTConfig(**{**vars(cfg), "max_rank": 2}))
    more = sft.SFTConfig(
        **{**vars(cfg), "max_rank": 2, "keep_per_turn": 3, "out": str(tmp_path / "o2")}
    )
    sft.main(more)
    assert [(r["query_id"], r["rank"]) for r in read(tmp_path / "o2/records.jsonl")] == [
        ("q0", 1),
        ("q0#1", 1),
        ("q0#2", 2),
        ("q1", 1),
        ("q1#0", 2),
        ("q4", 2),
    ]
    assert data.read_turns(str(tmp_path / "o2/records.jsonl"))[1].conversation_id == "cq0"


def test_all_samples_then_trains_and_an_empty_yield_is_an_error(lm, tmp_path, monkeypatch):
    turns = write_turns(tmp_path / "t.jsonl", {f"q{i}": f"question {i}" for i in range(5)})
    write_jsonl(str(tmp_path / "e.jsonl"), [{"question": "a", "think": "b", "rewrite": "c"}])
    write_jsonl(
        str(tmp_path / "c.jsonl"),
        [
            {"id": "p1", "title": "", "text": "the capital of Norway is Oslo"},
            {"id": "p2", "title": "", "text": "the river of Rome is the Tiber"},
        ],
    )
    answers = {
        f"question {i}": response("capital of Norway" if i < 4 else "river of Rome")
        for i in range(5)
    }
    monkeypatch.setattr(infer, "open_engine", lambda *a: Scripted(answers))
    cfg = config(
        lm,
        "",
        tmp_path / "o",
        stage="all",
        turns=turns,
        examples=str(tmp_path / "e.jsonl"),
        max_turns=4,
    )
    cfg.retriever.corpus = str(tmp_path / "c.jsonl")
    result = sft.main(cfg)
    assert result["sample"]["turns"] == 4 and result["sample"]["kept"] in (
        3,
        4,
    )  # BM25, by the real retriever
    assert result["train"]["records"] + result["train"]["heldout"] == result["sample"]["kept"]
    answers.update({k: response("river of Rome") for k in answers})
    cfg.overwrite = True
    with pytest.raises(
        data.DataError, match="none of 4 samples is kept, 4 are well formed; raise samples_per_turn"
    ):
        sft.main(cfg)


def test_bad_input_leaves_with_status_2(lm, records, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    tiny_lm(tmp_path / "small", vocab=100)
    tiny_lm(tmp_path / "short", max_position_embeddings=64)
    tiny_lm(tmp_path / "window", use_sliding_window=True, sliding_window=32)
    out = f"out={tmp_path / 'o'}"
    train = ["stage=train", f"model={lm}", out]
    for arguments, text in [
        ([*train, f"records={tmp_path}/none.jsonl"], "none.jsonl"),
        ([*train, f"records={tmp_path}/empty.jsonl"], "no turns"),
        (train, "records.jsonl"),
        (["stage=train", f"model={tmp_path}/no", out, f"records={records}"], "no tokenizer"),
        ([*train, f"records={records}", "epochs=0"], "epochs=0"),
        ([*train, f"records={records}", "lr=fast"], "lr"),
        ([*train, f"records={records}", "lr=-1"], "lr=-1"),
        ([*train, f"records={records}", "weight_decay=-1"], "weight_decay"),
        ([*train, f"records={records}", "max_grad_norm=0"], "max_grad_norm"),
        ([*train, f"records={records}", "betas=[0.9, 2]"], "betas"),
        (
            ["stage=train", f"model={tmp_path}/small", out, f"records={records}"],
            "outside the vocabulary of 100",
        ),
        (
            ["stage=train", f"model={tmp_path}/short", out, f"records={records}"],
            "drop such rows: max_length=64",
        ),
        (
            ["stage=train", f"model={tmp_path}/window", out, f"records={records}"],
            "drop such rows: max_length=32",
        ),
        ([f"model={lm}", out, "turns=t", "examples=e", "temperature=-1"], "temperature"),
        ([*train, f"records={records}", "heldout_fraction=1"], "heldout_fraction"),
        ([f"model={lm}", out], "turns is empty"),
    ]:
        status, err = exit_status(arguments, capsys, sft, sft.SFTConfig)
        assert status == 2 and text in err and "Traceback" not in err, (arguments, err)


def test_every_knob_is_documented():
    import config as configuration

    for cls in (sft.SFTConfig, infer.InferConfig):
        assert set(configuration.field_docs(cls)) >= set(vars(cls())) - {"retriever"}
