"""Peak memory of a step, phase by phase, on every card, beside the arithmetic of docs/memory.md.

    torchrun --nproc-per-node 2 bench/memory.py --shape 7b --settings lean,gathered,offload --out one.json

Random weights of the shape, real steps of grpo.train_step with the PyTorch engine and a reference, a reward that is
a hash of the response.  Settings: `lean` has gather_once off and reduce_each on, `gathered` the opposite of both,
`offload` is `lean` with the reference in host memory.  The first step compiles; peaks and seconds are of the second.

Arithmetic, P parameters on W cards: resident 12 P / W of float32 weights and moments, 2 P / W of the reference, 2 P of
the engine; in the update besides, 4 P / W of gradients in shards, or 4 P of whole ones where they are reduced once,
and 2 P of gathered weights with gather_once.  Activations, logits and the engine's keys and values are the rest.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import time
import zlib

import shapes
import torch

import data
import distributed
import grpo
import tasks
import training
from engines.base import EngineConfig
from model import make_optimizer, prepare_causal_lm
from prompts import decode_response
from rollout import open_engine

SETTINGS = {
    "lean": dict(gather_once=False, reduce_each=True, cpu_offload="none"),
    "gathered": dict(gather_once=True, reduce_each=False, cpu_offload="none"),
    "offload": dict(gather_once=False, reduce_each=True, cpu_offload="reference"),
}
PEAKS: dict[str, float] = {}  # phase → GB, of the last step


class PeakClock(training.Clock):
    """A clock of phases that also notes what each of them had allocated at most."""

    @contextlib.contextmanager
    def __call__(self, phase: str):
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with super().__call__(phase):
            yield
        PEAKS[phase] = allocated(peak=True)


def allocated(peak: bool = False) -> float:
    """GB on this process's card, now or at most since the last reset; 0 without a card."""
    if not torch.cuda.is_available():
        return 0.0
    size = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    return round(size / 1e9, 2)


def hashed_scores(run: grpo.Run, rollouts: list, items: list) -> list[grpo.Score]:
    """A reward between 0 and 1 for each response that depends on nothing but its ids."""
    figures = {"rewrite": "", "well_formed": False, "rank": None}
    return [
        grpo.Score(
            decode_response(run.tokenizer, r.response_ids),
            zlib.crc32(str(r.response_ids).encode()) % 100 / 100,
            figures,
        )
        for r in rollouts
    ]


def host_model(args, dist: distributed.Dist, dtype: torch.dtype) -> torch.nn.Module:
    """Random weights in host memory, as a model that was read from files."""
    model = shapes.random_lm(args.shape, dtype, dist.device).cpu()
    if dist.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def make_run(
    args, cfg: grpo.GRPOConfig, folder: str, dist: distributed.Dist
) -> tuple[grpo.Run, dict]:
    """What training.load_models builds, from random weights, and what it left and took on the card."""
    cuda = dist.device.type == "cuda"
    dtype, compiled = torch.bfloat16 if cuda else torch.float32, cuda
    marks = {}
    tokenizer = shapes.word_tokenizer()
    longest = args.prompt_len + args.new
    engine = open_engine(
        cfg.engine, folder, None, [], shapes.WORDS, dist.device, longest, 0, dtype, weights=False
    )
    with distributed.in_turn():
        policy = host_model(args, dist, torch.float32)
        policy = prepare_causal_lm(policy, "", cfg.gradient_checkpointing, compiled)
        distributed.shard_model(policy, dist, cuda, cfg.gather_once)
    marks["policy sharded"], marks["sharding the policy, peak"] = allocated(), allocated(peak=True)
    with distributed.in_turn():
        reference = host_model(args, dist, dtype).requires_grad_(False)
        reference = prepare_causal_lm(reference, compiled=compiled)
        distributed.shard_model(
            reference, dist, gather_once=cfg.gather_once, cpu_offload=cfg.cpu_offload != "none"
        )
    marks["with the reference"] = allocated()
    rng = random.Random(0)
    count = args.prompts * args.steps
    prompts = [rng.choices(range(shapes.WORDS), k=args.prompt_len) for _ in range(count)]
    run = grpo.Run(
        cfg=cfg,
        dist=dist,
        tokenizer=tokenizer,
        policy=policy,
        reference=reference,
        optimizer=make_optimizer(policy, cfg.lr),
        engine=engine,
        task=tasks.Rewrite(cfg, tokenizer),
        items=[data.Turn(f"q{i}", f"c{i}", 1, [], "", []) for i in range(count)],
        prompts=prompts,
        dev=[],
        dev_prompts=[],
        steps=cfg.steps,
        settings={},
    )
    grpo.sync_engine(run)
    marks["with the engine's weights"] = allocated()
    return run, marks


def arithmetic(args, setting: dict, world: int) -> dict[str, float]:
    """GB a card, by docs/memory.md."""
    p = shapes.parameters(args.shape) / 1e9
    reference = 0.0 if setting["cpu_offload"] != "none" else 2 * p / world
    resident = 12 * p / world + reference + 2 * p
    whole = 2 * p if setting["gather_once"] else 0.0
    gradients = 4 * p / world if setting["reduce_each"] else 4 * p
    return {
        "policy sharded": round(4 * p / world, 1),
        "resident between steps": round(resident, 1),
        "update, without activations": round(resident + whole + gradients, 1),
    }


def measure(args, name: str, dist: distributed.Dist) -> dict:
    """One setting, with fresh models."""
    setting = SETTINGS[name]
    torch._dynamo.reset()
    cfg = grpo.GRPOConfig(
        model="random",
        train="none",
        prompts_per_step=args.prompts,
        group_size=args.responses,
        max_prompt_tokens=args.prompt_len,
        max_response_tokens=args.new,
        micro_batch_tokens=args.budget,
        gradient_checkpointing=args.recompute,
        steps=args.steps,
        engine=EngineConfig(kind="torch"),
        **setting,
    )
    with tempfile.TemporaryDirectory() as folder:
        run, marks = make_run(args, cfg, shapes.write_config_folder(args.shape, folder), dist)
        for step in range(args.steps):
            began = time.perf_counter()
            row, _ = grpo.train_step(run, step)
            took = time.perf_counter() - began
            distributed.print0(f"{name} step {step}: {took:.1f} s, peaks {PEAKS}")
    ranks = distributed.gather_objects(dict(PEAKS))
    seconds = {k: round(v, 3) for k, v in row.items() if k.startswith("seconds_")}
    return {
        "setting": name,
        **setting,
        "arithmetic_gb": arithmetic(args, setting, dist.world),
        "loaded_gb": marks,
        "resident_gb": allocated(),
        "peak_gb": {phase: max(other[phase] for other in ranks) for phase in PEAKS},
        "seconds": seconds,
        "step_seconds": round(took, 2),
        "loss": row["loss"],
        "grad_norm": row["grad_norm"],
    }


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("--settings", default="lean,gathered,offload")
    p.add_argument("--prompts", type=int, default=16, help="of a step, over all cards")
    p.add_argument("--responses", type=int, default=8)
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--new", type=int, default=256)
    p.add_argument("--budget", type=int, default=8192)
    p.add_argument("--recompute", type=float, default=1.0)
    p.add_argument("--steps", type=int, default=2)
    args = p.parse_args()
    dist = distributed.setup()
    grpo.score, grpo.Clock = hashed_scores, PeakClock
    sizes = {
        k: getattr(args, k)
        for k in ("shape", "prompts", "responses", "prompt_len", "new", "budget", "recompute")
    }
    results = sizes | {
        "parameters": shapes.parameters(args.shape),
        "processes": dist.world,
        "settings": [],
    }
    names = args.settings.split(",")
    for i, name in enumerate(names):
        row = measure(args, name, dist)
        gc.collect()
        if dist.device.type == "cuda":
            torch.cuda.empty_cache()
        if dist.rank == 0:
            results["settings"].append(row)
            shapes.report(results, args.out, i == len(names) - 1)
    distributed.cleanup()


if __name__ == "__main__":
    main()
