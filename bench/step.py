"""A whole GRPO step by phase, on random weights of a named shape, beside the peer's in the same run on the same card.

    python bench/step.py --shape 3b --engine torch vllm --peer hf vllm --peer-script trl_grpo.py
    torchrun --nproc-per-node 2 bench/step.py --shape 3b            the same global batch over two cards
    python bench/step.py --cards 2 --no-kl --peer vllm async --peer-script trl_grpo.py   all on two
    torchrun --nproc-per-node 8 bench/step.py --prompts 64 128      two batches, one after the other
    torchrun --nproc-per-node 8 bench/step.py --index 25700592      the reward asks an index shared out over the cards

It calls grpo.train_step itself: sampling, reward, the reference's pass, update, weight sync.  The reward is a
hash of the response, as the peer's is.  No response ends early: no id ends one.  The first step compiles and is left
out; the medians of the others count.  With --peer, or several engines, this process holds no memory of the card: each
of our engines runs in a process of its own, then the peer (TRL's GRPOTrainer, a script of its own: see --peer-script)
with each of its engines, all with the same sizes; the peer's first step is left out too.  --out has what is measured
so far after each of them (one engine alone: after each step).  With --cards N each of them is N
processes, one a card, for the same --prompts; the peer's asynchronous trainer has one card to train
on and one that samples meanwhile (trl_async.py).

Floors, with N parameters, by the card's data sheet: sampling reads 2 N bytes and the keys and values so far a decode
step, or computes 2 N FLOPs a row where that takes longer, after one pass over the prompts; the reference computes 2 N
and the update 6 N per unique token (each prompt once); AdamW moves 28 N bytes; the sync reads 4 N and writes 2 N.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import retrieval
import shapes
import torch
import data
import distributed
import grpo
from engines.base import EngineConfig
import packing
from lora import LoRAConfig, add_adapter
from model import make_optimizer, prepare_causal_lm
from prompts import decode_response
import tasks
import training
from rollout import open_engine


def hashed_scores(
    index, flat: float, run: grpo.Run, rollouts: list, items: list
) -> list[grpo.Score]:
    """A reward between 0 and 1 for each response that depends on nothing but its ids, and is hardly
    ever its group's mean; 0 in the groups of the first `flat` of the prompts. An index, where there
    is one, is only asked."""
    if index is not None:
        index.gold_ranks(*index.questions(range(len(rollouts))))
    figures = {"rewrite": "", "well_formed": False, "rank": None}
    scores = []
    for r in rollouts:
        reward = zlib.crc32(str(r.response_ids).encode()) / 2**32
        text = decode_response(run.tokenizer, r.response_ids)
        scores.append(grpo.Score(text, reward * (r.group_id >= flat * len(items)), figures))
    return scores


def make_run(args, kind: str, where: distributed.Dist, folder: str) -> grpo.Run:
    """grpo.start without files: random weights, random prompts."""
    cuda = where.device.type == "cuda"
    packing.ACTIVATIONS = args.activations
    dtype, compiled = torch.bfloat16 if cuda else torch.float32, cuda and not args.eager
    cfg = grpo.GRPOConfig(
        model=folder,
        train="none",
        prompts_per_step=args.prompts[0],
        group_size=args.responses,
        max_prompt_tokens=args.prompt_len,
        max_response_tokens=args.new,
        kl_coef=0.0 if args.no_kl else 0.001,
        lora=LoRAConfig(r=args.lora or None),
        micro_batch_tokens=args.budget,
        gradient_checkpointing=args.recompute,
        compile=compiled,
        steps=args.steps + 1,
        warmup_steps=0,
        engine=EngineConfig(
            kind=kind,
            batch=args.engine_batch,
            gpu_memory=args.gpu_memory,
            tensor_parallel=args.tensor_parallel,
        ),
    )
    grpo.check_config(cfg, where.world)
    tokenizer = shapes.word_tokenizer()
    engine = open_engine(
        cfg.engine,
        folder,
        None,
        [],
        shapes.WORDS,
        where.device,
        args.prompt_len + args.new,
        0,
        dtype,
        weights=False,
    )
    policy = shapes.random_lm(args.shape, dtype if args.lora else torch.float32, where.device)
    policy = prepare_causal_lm(policy, "", args.recompute, compiled)
    reference = policy if cfg.kl_coef else None
    if args.lora:
        add_adapter(policy, cfg.lora, keep_start=cfg.kl_coef > 0)
    elif cfg.kl_coef:
        reference = (
            shapes.random_lm(args.shape, torch.float32, where.device)
            .to(dtype)
            .requires_grad_(False)
        )
        reference = distributed.shard_model(
            prepare_causal_lm(reference, compiled=compiled), where, gather_once=True
        )
    distributed.shard_model(policy, where, cuda, gather_once=True)
    rng = random.Random(0)
    count = max(args.prompts) * (args.steps + 1)
    prompts = [rng.choices(range(shapes.WORDS), k=args.prompt_len) for _ in range(count)]
    turns = [data.Turn(f"q{i}", f"c{i}", 1, [], "", []) for i in range(count)]
    return grpo.Run(
        cfg=cfg,
        dist=where,
        tokenizer=tokenizer,
        policy=policy,
        reference=reference,
        optimizer=make_optimizer(policy, cfg.lr),
        engine=engine,
        task=tasks.Rewrite(cfg, tokenizer),
        items=turns,
        prompts=prompts,
        dev=[],
        dev_prompts=[],
        steps=cfg.steps,
        settings={},
    )


def floors(args, prompts: int, world: int) -> dict[str, float]:
    """The least seconds of every phase of a step of `prompts` on `world` cards."""
    config, size, rate = (
        shapes.model_config(args.shape),
        shapes.parameters(args.shape),
        shapes.bandwidth(),
    )
    rows, flops = prompts * args.responses / world, shapes.BF16_FLOPS
    unique = prompts / world * (args.prompt_len + args.responses * (args.new - 1))
    head = config.hidden_size // config.num_attention_heads
    token = (
        4 * config.num_hidden_layers * config.num_key_value_heads * head
    )  # bytes of keys and values, bf16
    cached = rows * token * (args.prompt_len + args.new / 2)
    decode = max((2 * size + cached) / rate, 2 * size * rows / flops)
    return {
        "sample": 2 * size * prompts / world * args.prompt_len / flops + args.new * decode,
        "reference": 0.0 if args.no_kl else 2 * size * unique / flops,
        "update": 6 * size * unique / flops + 28 * size / world / rate,
        "sync": 6 * size / rate,
    }


def summary(args, prompts: int, rows: list[dict], walls: list[float], world: int) -> dict:
    """Phases and rates of the steps so far; medians without the first one, where there are others.

    A collective: memory is that of the card that has most of it in use."""
    timed = rows[1:] or rows
    phases = {
        name: statistics.median(row[f"seconds_{name}"] for row in timed)
        for name in ("sample", "reward", "reference", "update", "sync")
    }
    size = shapes.parameters(args.shape)
    unique = prompts * (args.prompt_len + args.responses * (args.new - 1))
    tokens = prompts * args.responses * args.new
    result = {
        "prompts": prompts,
        "step_seconds": round(statistics.median(walls[1:] or walls), 3),
        "steps": [round(w, 3) for w in walls],
        "phases": {k: round(v, 3) for k, v in phases.items()},
        "sampled_tokens_per_second": round(tokens / phases["sample"]),
        "update_unique_tokens_per_second": round(unique / phases["update"]),
        "update_mfu": round(6 * size * unique / phases["update"] / world / shapes.BF16_FLOPS, 4),
        "engine_gap": rows[-1]["engine_gap"],
        "engine_gap_max": rows[-1]["engine_gap_max"],
        "loss": [row["loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "response_tokens": rows[-1]["response_tokens"],
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        own = {
            "peak_gib": torch.cuda.max_memory_allocated(),
            "peak_reserved_gib": torch.cuda.max_memory_reserved(),
            "card_used_gib_at_end": total - free,
        }  # vLLM's pool is not torch's
        cards = distributed.gather_objects(own)
        result |= {key: round(max(c[key] for c in cards) / 2**30, 2) for key in own}
    if shapes.bandwidth():
        result["floors"] = {k: round(v, 4) for k, v in floors(args, prompts, world).items()}
    return result


def timed_steps(run: grpo.Run, steps: int, where: distributed.Dist):
    """Take a step that compiles and `steps` more; after each of them (step, rows so far, seconds so far)."""
    rows, walls = [], []
    for step in range(steps + 1):
        if step == 1 and where.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock = training.Clock(where.device)
        with clock("step"):
            row, _ = grpo.train_step(run, step)
        walls.append(clock.seconds["seconds_step"])
        rows.append(row)
        phases = {k: round(v, 3) for k, v in row.items() if k.startswith("seconds_")}
        distributed.print0(f"step {step}: {walls[-1]:.2f}s", phases)
        yield step, rows, walls


def ours(args, kind: str) -> None:
    """Our steps with one kind of engine, reported after each of them."""
    where = distributed.setup()
    if args.card_gib:
        shapes.shrink_card(args.card_gib)
    sizes = {
        k: getattr(args, k)
        for k in (
            "shape",
            "responses",
            "prompt_len",
            "new",
            "budget",
            "recompute",
            "activations",
            "tensor_parallel",
            "card_gib",
            "lora",
            "flat",
        )
    }
    sizes |= {
        "prompts": args.prompts[0],
        "index": args.index,
        "kl": not args.no_kl,
        "parameters": shapes.parameters(args.shape),
        "processes": where.world,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(args, kind, where, shapes.write_config_folder(args.shape, folder))
        index = retrieval.synthetic_retriever(args.index, 768, where) if args.index else None
        grpo.score = partial(hashed_scores, index, args.flat)
        grpo.sync_engine(run)
        measured = {}
        for prompts in args.prompts:
            run.cfg.prompts_per_step = prompts
            name = kind if len(args.prompts) == 1 else f"{kind}, {prompts} prompts"
            for step, rows, walls in timed_steps(run, args.steps, where):
                measured[name] = summary(args, prompts, rows, walls, where.world)
                if where.rank == 0:
                    final = prompts == args.prompts[-1] and step == args.steps
                    shapes.report(sizes | {"ours": measured}, args.out, final)
    distributed.cleanup()


def python(cards: int, *words: str) -> list[str]:
    """The command `python words…`, one process a card."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cards))
    several = [sys.executable, *launch, "--no-python", "--"] if cards > 1 else []
    return [*several, sys.executable, *words]


def in_own_process(args, engine: str) -> dict:
    """What `ours` reports of one engine, run in a process of its own: the card is empty when it has ended."""
    environ = {
        k: v for k, v in os.environ.items() if k != "PYTORCH_CUDA_ALLOC_CONF"
    }  # not for vLLM's pool
    if engine == "torch":
        environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ours.json")
        alone = ("--engine", engine, "--cards", "1", "--peer", "--out", str(out))
        command = python(args.cards, __file__, *sys.argv[1:], *alone)
        status = subprocess.run(command, env=environ, stdout=sys.stderr).returncode
        row = json.loads(out.read_text()) if out.exists() else {}
    return {k: v for k, v in row.items() if k != "command"} | (
        {f"{engine}_failed": status} if status else {}
    )


# The peer's script with the adapter of --lora and the card of --card-gib, neither of which it knows.
# Of several processes each stays on a card of its own, and the first one prints.
ADAPTED = """
import importlib, os, sys, torch, trl
from peft import LoraConfig
from bench import shapes
rank, gib, *sys.argv = sys.argv[1:]
class Adapted(trl.GRPOTrainer):
    def __init__(self, **settings):
        lora = LoraConfig(r=int(rank), lora_alpha=2 * int(rank), target_modules="all-linear")
        super().__init__(peft_config=lora, **settings)
trl.GRPOTrainer = Adapted if int(rank) else trl.GRPOTrainer
if int(os.environ.get("LOCAL_RANK", 0)):
    sys.stdout = open(os.devnull, "w")
if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if float(gib):
    shapes.shrink_card(float(gib))
folder, script = os.path.split(os.path.abspath(sys.argv[0]))
sys.path.insert(0, folder)
importlib.import_module(script.removesuffix(".py")).main()
"""


def peer_command(args, engine: str) -> list[str]:
    """How the peer is started with one of its engines."""
    options = {
        "shape": args.shape,
        "n": args.responses,
        "prompt-len": args.prompt_len,
        "new": args.new,
        "micro": args.peer_micro,
    }
    if engine == "async":
        options |= {"prompts": args.prompts[0], "steps": args.async_steps + 2}
        options["limit"] = max(1, int(args.peer_limit) - 30)
        start = [sys.executable, str(Path(__file__).with_name("trl_async.py"))]
    else:  # the script takes the prompts of a process
        options |= {"prompts": args.prompts[0] // args.cards, "steps": args.peer_steps + 1}
        options |= {"engine": engine, "beta": 0 if args.no_kl else 0.001}
        adapted = ("-c", ADAPTED, str(args.lora), str(args.card_gib or 0), args.peer_script)
        start = python(args.cards, *adapted)
    return [*start, *(str(x) for k, v in options.items() for x in (f"--{k}", v))]


def status_of(command: list[str], limit: float, **where) -> int | str:
    """A command's exit status; after `limit` seconds it is asked to end, which may take another 40."""
    child = subprocess.Popen(command, start_new_session=True, **where)
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        child.terminate()
    try:
        child.wait(40)
    except subprocess.TimeoutExpired:
        pass
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return f"ended after {limit} s"


def peer(args, engine: str) -> dict:
    """The peer's step with one of its engines, in a process of its own, or one a card."""
    command = peer_command(args, engine)
    places = str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, places))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        status = status_of(command, args.peer_limit, stdout=out, stderr=err, env=environ)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    lines = [
        line for line in texts[0].splitlines() if line.startswith('{"peer"')
    ]  # it prints its log as well
    if not lines:
        return {"failed": status, "stdout": texts[0][-2000:], "stderr": texts[1][-3000:]}
    row = json.loads(lines[-1])
    if engine == "async":
        return row
    return row | {
        "step_seconds": round(statistics.median(row["steps"][1:]), 3),
        "micro_batch": args.peer_micro,
        "tokens_a_step": row["tokens_a_step"] * args.cards,
    }


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("--engine", nargs="+", default=["torch"], choices=["torch", "vllm"])
    p.add_argument("--prompts", type=int, nargs="+", default=[16], help="a step, of all processes")
    p.add_argument("--index", type=int, default=0, help="passages of a random index that is asked")
    p.add_argument("--responses", type=int, default=8, help="a prompt")
    p.add_argument("--prompt-len", type=int, default=512, help="tokens")
    p.add_argument("--new", type=int, default=256, help="tokens of a response")
    p.add_argument("--steps", type=int, default=3, help="timed steps")
    p.add_argument("--budget", type=int, default=5200, help="micro_batch_tokens")
    p.add_argument(
        "--recompute", type=float, default=0.5, help="gradient_checkpointing, a share of the layers"
    )
    p.add_argument(
        "--activations",
        type=float,
        default=packing.ACTIVATIONS,
        help="of compiled layers, see packing.ACTIVATIONS",
    )
    p.add_argument("--engine-batch", type=int, default=256, help="rows decoded together")
    p.add_argument("--gpu-memory", type=float, default=0.4, help="vLLM's share of the card")
    p.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        help="processes that hold one copy of vLLM's weights",
    )
    p.add_argument("--no-kl", action="store_true", help="without reference")
    p.add_argument("--lora", type=int, default=0, help="rank of an adapter on all linear layers")
    p.add_argument("--flat", type=float, default=0.0, help="share of groups with equal rewards")
    p.add_argument("--eager", action="store_true", help="without torch.compile in the update")
    p.add_argument(
        "--peer",
        nargs="*",
        default=[],
        choices=["hf", "vllm", "async"],
        help="run the peer as well, with these engines, after ours, the adapter and the card alike",
    )
    p.add_argument("--cards", type=int, default=1, help="processes of ours, and of the peer")
    p.add_argument("--peer-script", default="trl_grpo.py", help="the peer's script")
    p.add_argument("--peer-micro", type=int, default=16, help="the peer's sequences a micro-batch")
    p.add_argument("--peer-steps", type=int, default=3, help="the peer's timed steps")
    p.add_argument("--async-steps", type=int, default=12, help="and its asynchronous trainer's")
    p.add_argument(
        "--peer-limit", type=float, default=420, help="seconds after which the peer is ended"
    )
    args = p.parse_args()
    if not args.peer and len(args.engine) == 1 and args.cards == 1:
        ours(args, args.engine[0])
        return
    if "RANK" in os.environ:
        p.error("--peer, --cards and several engines start processes; start it without torchrun")
    own, left = divmod(args.prompts[0], args.cards)
    if left or (args.peer and args.cards > 1 and own * args.responses % args.peer_micro):
        p.error("a card has whole prompts, and the peer whole micro-batches of their responses")
    if "async" in args.peer and (args.cards != 2 or not args.no_kl or args.lora or args.card_gib):
        p.error("--peer async has two cards, --no-kl, all weights and no smaller card")
    result = {"ours": {}, "peer": {}, "peer_over_ours": {}}
    for engine in args.engine:
        row = in_own_process(args, engine)
        measured = result["ours"] | row.pop("ours", {})
        result |= row | {
            "ours": measured,
            "versions": result.get("versions", {}) | row.get("versions", {}),
        }
        shapes.report(result, args.out, final=False)
    for engine in args.peer:
        result["peer"][engine] = row = peer(args, engine)
        result["peer_over_ours"] |= {
            f"{engine} / {name}": round(row["step_seconds"] / own["step_seconds"], 2)
            for name, own in result["ours"].items()
            if "step_seconds" in row
        }
        shapes.report(result, args.out, final=False)
    shapes.report(result, args.out)


if __name__ == "__main__":
    main()
