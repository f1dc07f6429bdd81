"""distributed.py on two processes: the step of one, checkpoints of any world size, faults of one rank.

One process imports torch and forks the two ranks, once for all tests; the reference is computed
here by a plain model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import MASK, TOKENS, loss_of, same, trained, weights
from transformers import AutoModelForCausalLM

import distributed
from model import load_causal_lm, make_optimizer
from packing import token_logprobs
from runs import write_jsonl

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [("qwen2", True), ("llama", False)]

pytestmark = pytest.mark.usefixtures("dist")

RANKS = """
import json, os, signal, socket, sys, time, traceback
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
import distributed, grpo, prompts, sft
from engines.torch_engine import TorchEngine
from model import load_causal_lm, make_optimizer, token_logprobs
from retriever import RetrieverConfig
from tiny_training import MASK, TOKENS, loss_of, weights


def check(dist, lm, out):
    rank = dist.rank
    facts = {"rank": rank, "world": dist.world, "sum": distributed.all_reduce_sum([rank + 1, 0.5]), "gathered": distributed.gather_objects(chr(97 + rank)),
             "broadcast": distributed.broadcast_object({"from": rank})}
    distributed.print0(f"printed by {rank}")

    # one step: each rank has half of the rows; FSDP averages gradients, so the loss is multiplied by the world size
    model = distributed.shard_model(load_causal_lm(lm), dist)
    optimizer = make_optimizer(model, 0.01)
    mine = slice(2 * rank, 2 * rank + 2)
    (loss_of(model, mine) * dist.world).backward()
    grads = {distributed.clean_name(n): distributed.full_tensor(p.grad) for n, p in model.named_parameters()}
    facts["norm"] = distributed.clip_grad_norm(model, 0.5)
    optimizer.step()
    stepped = weights(model)
    with torch.no_grad():
        logprobs = token_logprobs(model, TOKENS[mine], MASK[mine])
    if rank == 0:
        torch.save({"grads": grads, "stepped": stepped}, out + "/step.pt")
    facts["logprobs"] = distributed.gather_objects(logprobs.tolist())

    # the constant is added once, not once a rank
    model.reshard()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grad = torch.zeros(32)
    grad[0] = 1e-6
    p = model.model.norm.weight
    p.grad = torch.distributed.tensor.distribute_tensor(grad, p.device_mesh, p.placements)
    facts["tiny norm"] = distributed.clip_grad_norm(model, 1e-6)
    facts["tiny grad"] = float(distributed.full_tensor(p.grad)[0])

    # a rank with nothing to train; gradients of every micro-batch reduced at once: the same gradients
    whole = MASK[:, 1:].bool().clone()
    whole[2:] = False
    for facts_name, each in (("idle", False), ("idle, reduced each", True)):
        model.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last or each)
            rows = token_logprobs(model, TOKENS[mine], MASK[mine], positions=whole[mine])
            (-rows.sum() * dist.world).backward()
        facts[facts_name] = distributed.clip_grad_norm(model, 1e9)
    facts["grads"] = sorted(n for n, p in model.named_parameters() if p.grad is None)
    model.zero_grad()

    # a model is loaded and sharded in turn: no two at a time
    with distributed.in_turn():
        began = time.time()
        again = distributed.shard_model(load_causal_lm(lm), dist)
        ended = time.time()
    facts["turn"], facts["in turn"] = [began, ended], all(torch.equal(a, b) for a, b in zip(weights(again).values(), load_causal_lm(lm).parameters()))

    # on nodes of unequal size too: as many turns for the only process of one as for the second of another
    local = dict(os.environ)
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(rank + 1))
    with distributed.in_turn():
        pass
    os.environ |= local
    facts["uneven"] = distributed.all_reduce_sum([1.0])

    # what rank 0 alone runs, or fails at, is known to all
    facts["rank 0"] = distributed.on_rank_0(lambda: f"done by {distributed._rank()}")
    try:
        distributed.on_rank_0(lambda: 1 / 0)
    except ZeroDivisionError as e:
        facts["rank 0 fails"] = str(e)

    # checkpoints: written by two; written by one, loaded by two; bit-equal on the same number
    torch.manual_seed(100 + rank)
    distributed.save_checkpoint(out + "/run2", 1, model, optimizer, {"mark": "two"})
    draws = torch.rand(2).tolist()
    def further():
        optimizer.zero_grad()
        (loss_of(model, mine) * dist.world).backward()
        optimizer.step()
        return weights(model)
    once = further()
    found = distributed.latest_checkpoint(out + "/run2")
    distributed.load_checkpoint(found[0], model, optimizer)
    facts["rng"] = draws == torch.rand(2).tolist()
    twice = further()
    facts["bit equal"] = all(torch.equal(once[n], twice[n]) for n in once)
    found = distributed.latest_checkpoint(out + "/run1")
    distributed.load_checkpoint(found[0], model, optimizer)
    facts["from one"] = found[1]
    from_one = weights(model)
    after = further()
    if rank == 0:
        torch.save({"from_one": from_one, "after": after}, out + "/from_one.pt")

    # many weights in a collective, or one; rows that do not divide by the ranks, or are fewer
    whole, many = weights(model), distributed.GATHER_BYTES
    distributed.GATHER_BYTES = 2000
    facts["few at a time"] = [list(whole) == list(few := weights(model)), all(torch.equal(whole[n], few[n]) for n in whole)]
    distributed.GATHER_BYTES = many
    shapes = [(3, 5), (1, 4), (7,), (4, 2, 3)]
    odd = [torch.distributed.tensor.distribute_tensor(torch.randn(s), p.device_mesh, p.placements) for s in shapes]
    facts["odd rows"] = [torch.equal(x.to(dtype), y) and y.dtype == dtype for dtype in (torch.float32, torch.bfloat16)
                         for x, y in zip([s.full_tensor() for s in odd], distributed.gather(odd, dtype))]

    # ranks that see different folders; a full disk on one rank alone
    own = out + f"/own{rank}"
    for n in [10, 20] if rank == 0 else [10]:
        os.makedirs(own + f"/checkpoint_{n:06d}")
        json.dump({"step": n}, open(own + f"/checkpoint_{n:06d}/state.json", "w"))
    facts["agreed"] = distributed.latest_checkpoint(own)[1]["step"]
    try:
        distributed.latest_checkpoint(own if rank == 0 else out + "/nothing")
        facts["disagreed"] = "no error"
    except distributed.CheckpointError as e:
        facts["disagreed"] = str(e)
    real = torch.save
    if rank == 1:
        def full(*a, **k):
            raise OSError(28, "No space left on device")
        torch.save = full
    try:
        distributed.save_checkpoint(out + "/run2", 2, model, optimizer, {})
        facts["full"] = "no error"
    except distributed.CheckpointError as e:
        facts["full"] = str(e)
    torch.save = real
    facts["left"] = sorted(os.listdir(out + "/run2"))

    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(lm)
    distributed.export_hf(model, tokenizer, out + "/export")
    if rank == 0:
        def full(*a, **k):
            raise OSError(28, "No space left on device")
        tokenizer.save_pretrained = full
    try:
        distributed.export_hf(model, tokenizer, out + "/export")
        facts["export fails"] = "no error"
    except distributed.CheckpointError as e:
        facts["export fails"] = str(e)
    facts["exported"] = os.path.exists(out + "/export/model.safetensors")  # on every rank: it returns when the folder is there
    json.dump(facts, open(out + f"/facts{rank}.json", "w"))


def train_with_an_idle_rank(out):
    prompts.INSTRUCTION = "Rewrite."
    sft.main(sft.SFTConfig(stage="train", model=out + "/lm", records=out + "/train.jsonl", out=out + "/sft", epochs=1,
                           sequences_per_step=2, heldout_fraction=0, save_every=100))
    generate = TorchEngine.generate

    def failing(self, *args, **kwargs):  # rank 1's rollouts fail for a technical reason: it has no group to train
        rollouts = generate(self, *args, **kwargs)
        for r in rollouts:
            r.end = "engine_error" if int(os.environ["RANK"]) else r.end
        return rollouts

    TorchEngine.generate = failing
    grpo.main(grpo.GRPOConfig(model=out + "/lm", train=out + "/train.jsonl", out=out + "/grpo", prompts_per_step=2, group_size=4,
                              max_response_tokens=8, steps=2, validate_every=100, warmup_steps=0, lr=1e-3,
                              retriever=RetrieverConfig(kind="bm25", corpus=out + "/corpus.jsonl")))


def work(folders):
    dist = distributed.setup()
    for folder in folders:
        check(dist, folder + "/lm", folder)
    leave, distributed.cleanup = distributed.cleanup, lambda: None  # both trainings in this group
    train_with_an_idle_rank(os.path.dirname(folders[0]))
    leave()


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
children = []
for rank in (0, 1):
    if not (child := os.fork()):
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            work(sys.argv[3:])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
for _ in children:
    child, status = os.wait()
    if status:
        for other in set(children) - {child}:
            os.kill(other, signal.SIGKILL)
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def ranks(dist, tmp_path_factory):
    """(folder, what was printed) of one start of two processes for all families and both trainings."""
    out = tmp_path_factory.mktemp("two")
    for i, family in enumerate(PAIRS):
        lm = str(out / str(i) / "lm")
        tiny.tiny_lm(lm, *family, seed=3)
        checkpoint = trained(lm, 2, dist)
        distributed.save_checkpoint(str(out / str(i) / "run1"), 2, *checkpoint, {"mark": "one"})
    tiny.tiny_lm(out / "lm", "llama", tied=False)
    write_jsonl(out / "corpus.jsonl", [{"id": f"p{i}", "text": f"alpha{i}"} for i in range(9)])
    turn = {"question": "and this?", "context": [["what?", "alpha1"]], "gold_ids": ["p1"]}
    ids = ({"query_id": f"q{i}", "conversation_id": f"c{i}", "response": "yes"} for i in range(3))
    write_jsonl(out / "train.jsonl", [turn | row for row in ids])
    (out / "ranks.py").write_text(RANKS)
    folders = (str(out / str(i)) for i in range(len(PAIRS)))
    done = subprocess.run(
        [sys.executable, str(out / "ranks.py"), str(ROOT), str(ROOT / "tests"), *folders],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out, done.stdout


@pytest.fixture(scope="module", params=[0, 1], ids=["qwen2-tied", "llama-untied"])
def two(request, ranks):
    """(facts of both ranks, the folder they wrote to)."""
    out = ranks[0] / str(request.param)
    return [json.loads((out / f"facts{r}.json").read_text()) for r in (0, 1)], out


def test_two_processes_talk(two, ranks):
    for rank, facts in enumerate(two[0]):
        assert (facts["rank"], facts["world"], facts["sum"], facts["gathered"]) == (
            rank,
            2,
            [3.0, 1.0],
            ["a", "b"],
        )
        assert facts["broadcast"] == {"from": 0}
    assert ranks[1].count("printed by 0") == len(PAIRS) and "printed by 1" not in ranks[1]


def test_two_processes_take_the_step_of_one(two):
    plain = load_causal_lm(str(two[1] / "lm"))
    optimizer = make_optimizer(plain, 0.01)
    loss_of(plain).backward()
    theirs = torch.load(two[1] / "step.pt")
    same(theirs["grads"], {n: p.grad for n, p in plain.named_parameters()}, atol=1e-6)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert norm > 0.5  # clipping was at work
    optimizer.step()
    same(theirs["stepped"], {n: p.detach() for n, p in plain.named_parameters()}, atol=2e-5)
    with torch.no_grad():
        logprobs = token_logprobs(plain, TOKENS, MASK)
    for facts in two[0]:
        assert facts["norm"] == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(facts["logprobs"]).reshape(4, 11), logprobs, atol=1e-3, rtol=0
        )


def test_a_rank_with_nothing_to_train_takes_part_in_every_collective(two):
    """The head too, which is a parameter of its own where it is not tied."""
    model = load_causal_lm(str(two[1] / "lm"))
    model.load_state_dict(torch.load(two[1] / "step.pt")["stepped"], strict=False)
    keep = MASK[:2, 1:].bool()
    (
        -2 * token_logprobs(model, TOKENS[:2], MASK[:2], positions=keep).sum()
    ).backward()  # two micro-batches
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for facts in two[0]:
        assert facts["grads"] == [] and norm > 0.1
        assert facts["idle"] == pytest.approx(norm, rel=1e-4) == facts["idle, reduced each"]


def test_models_are_loaded_and_sharded_in_turn(two):
    (_, first_ends), (second_begins, _) = sorted(facts["turn"] for facts in two[0])
    assert first_ends <= second_begins and all(facts["in turn"] for facts in two[0])
    assert [facts["uneven"] for facts in two[0]] == [[2.0], [2.0]]


def test_what_fails_on_rank_0_alone_fails_on_all(two):
    for facts in two[0]:
        assert facts["rank 0"] == "done by 0" and facts["rank 0 fails"] == "division by zero"
        assert "export could not be written: [Errno 28] No space left" in facts["export fails"]


def test_two_processes_add_the_constant_once(two):
    for facts in two[0]:
        assert facts["tiny norm"] == pytest.approx(1e-6) and facts["tiny grad"] == pytest.approx(
            0.5e-6, rel=0.02
        )


def test_two_processes_resume_bit_equally(two):
    assert all(facts["rng"] and facts["bit equal"] for facts in two[0])


def test_two_processes_gather_weights_of_any_shape_many_at_a_time(two):
    for facts in two[0]:
        assert facts["few at a time"] == [True, True] and facts["odd rows"] == [True] * 8


def test_written_by_one_loaded_by_two(dist, two):
    out = two[1]
    model, optimizer = trained(str(out / "lm"), 2, dist)
    assert all(
        facts["from one"].items() >= {"step": 2, "world": 1, "mark": "one"}.items()
        for facts in two[0]
    )
    theirs = torch.load(out / "from_one.pt")
    same(theirs["from_one"], weights(model))
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()  # the moments came along: the next step is the same one
    same(theirs["after"], weights(model), atol=2e-5)


def test_written_by_two_loaded_by_one(dist, two):
    model, optimizer = trained(str(two[1] / "lm"), 0, dist)
    path, state = distributed.latest_checkpoint(str(two[1] / "run2"))
    assert (state["step"], state["world"], state["mark"]) == (1, 2, "two")
    distributed.load_checkpoint(path, model, optimizer)
    same(weights(model), torch.load(two[1] / "step.pt")["stepped"])
    assert all(float(s["step"]) == 1 for s in optimizer.state.values())


def test_all_ranks_agree(two):
    for facts in two[0]:
        assert facts["agreed"] == 10 and "seen by every process" in facts["disagreed"]


def test_a_disk_full_on_one_rank_is_an_error_on_all(two):
    for facts in two[0]:
        assert "checkpoint_000002 could not be written: [Errno 28] No space left" in facts[
            "full"
        ] and facts["left"] == ["checkpoint_000001"]


def test_two_processes_export_one_whole_model(two):
    assert all(facts["exported"] for facts in two[0])
    stock, report = AutoModelForCausalLM.from_pretrained(
        two[1] / "export", output_loading_info=True
    )
    assert not any(report.values())
    same(
        {n: p.detach() for n, p in stock.named_parameters()},
        torch.load(two[1] / "from_one.pt")["after"],
    )


def test_sft_and_grpo_go_on_where_a_rank_has_nothing_to_train(ranks):
    """Two processes and an untied head: a last step with one row, a step with one group."""
    sft_rows, grpo_rows = (
        [json.loads(line) for line in (ranks[0] / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("sft", "grpo")
    )
    assert [row["sequences"] for row in sft_rows] == [2, 1] and all(
        row["grad_norm"] > 0 for row in sft_rows
    )
    assert [row["failed"] for row in grpo_rows if row["step"]] == [4, 4] and all(
        r["tokens"] > 0 for r in grpo_rows if r["step"]
    )
