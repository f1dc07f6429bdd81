"""The update alone, on random rollouts of a stated shape: seconds, unique tokens a second, MFU, peak memory, floor.

    python bench/update.py --shape 3b --groups 8 --responses 16 --prompt 330 --response 386
    python bench/update.py … --budget 6656,8192,16384 --recompute 0,0.5,1 --lengths equal,spread --layout auto,varlen
    python bench/update.py … --activations 1,0.99 --key-heads 1,16 --chunk 2048,8192
    python bench/update.py … --out one.json              the same global batch in one process and in two:
    torchrun --nproc-per-node 2 bench/update.py … --against one.json       losses, gradient norms, how much faster

Every combination of the comma-separated settings is measured with a fresh model: one update to compile and warm up,
then `--updates` timed ones, optimizer step included; the median counts.  A setting that does not fit is reported as
such (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer gaps in a card's memory).  Unique tokens: the
prompt of a group once, the last token of a response (it is nobody's input) never, however they were computed.  MFU:
6 N per unique token, of 989 TFLOP/s, whatever was recomputed.  Floor: 6 N per unique token at 989 TFLOP/s + AdamW's
28 bytes a parameter at the card's bandwidth.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import statistics
import time
from functools import partial
from pathlib import Path

import shapes
import torch
import distributed
import grpo
import training
from batching import MicroBatch, deal_out, plan_updates, training_batch
from engines.base import Rollout
import model
import packing
from model import make_optimizer, prepare_causal_lm
from packing import unique_tokens


def lengths_of(kind: str, count: int, mean: int, cap: int, rng: random.Random) -> list[int]:
    """Response lengths: all `mean`, or log-normal ones (sigma 0.6 before the cut at `cap`) with that mean."""
    if kind == "equal":
        return [mean] * count
    drawn = [rng.lognormvariate(0, 0.6) for _ in range(count)]
    scale = mean * count / sum(drawn)
    for _ in range(20):  # cutting lowers the mean: scale until it is met
        out = [max(4, min(cap, round(x * scale))) for x in drawn]
        scale *= mean * count / sum(out)
    return out


def make_rollouts(args, kind: str, vocabulary: int) -> list[Rollout]:
    """The whole batch of all processes, the same on each."""
    rng = random.Random(0)
    lengths = iter(lengths_of(kind, args.groups * args.responses, args.response, args.cap, rng))
    out = []
    for group in range(args.groups):
        prompt = rng.choices(range(vocabulary), k=args.prompt)
        for _ in range(args.responses):
            n = next(lengths)
            out.append(
                Rollout(
                    prompt,
                    rng.choices(range(vocabulary), k=n),
                    [-12.0] * n,
                    [1] * n,
                    group,
                    "length",
                )
            )
    return out


def measure(args, where: distributed.Dist, setting: dict) -> dict:
    """One setting."""
    kind, layout, budget, recompute = (
        setting[key] for key in ("lengths", "layout", "budget", "recompute")
    )
    cuda = where.device.type == "cuda"
    torch._dynamo.reset()
    packing.ROW_MULTIPLE, model.DYNAMIC = args.row_multiple, False if args.static else None
    packing.CHUNK_TOKENS, packing.KEY_HEADS = setting["chunk"], setting["key_heads"]
    packing.ACTIVATIONS = setting["activations"]
    packing.FLEX_OPTIONS |= {
        name: int(value)
        for name, value in (word.split("=") for word in args.flex.split(",") if word)
    }
    policy = prepare_causal_lm(
        shapes.random_lm(args.shape, torch.float32, where.device),
        "",
        recompute,
        cuda and not args.eager,
    )
    distributed.shard_model(policy, where, cuda, not args.gather_each, args.offload)
    reference = None
    if args.reference:
        reference = shapes.random_lm(
            args.shape, torch.bfloat16 if cuda else torch.float32, where.device
        )
        reference = prepare_causal_lm(reference, compiled=cuda and not args.eager).requires_grad_(
            False
        )
        distributed.shard_model(reference, where, gather_once=not args.gather_each)
    cfg = grpo.GRPOConfig(
        micro_batch_tokens=budget, gather_once=not args.gather_each, temperature=1.0
    )
    rollouts = make_rollouts(args, kind, shapes.SHAPES[args.shape]["vocab_size"])
    mine = [r for r in rollouts if r.group_id % where.world == where.rank]
    advantages = grpo.group_advantages(
        [float(sum(r.response_ids) % 97) for r in mine], [r.group_id for r in mine]
    ).tolist()
    optimizer = make_optimizer(policy, 1e-6)
    seconds, reference_seconds, plan_seconds, first = [], [], [], {}
    clock = training.Clock(where.device)
    for i in range(args.updates + 1):
        if i == 1 and cuda:
            torch.cuda.reset_peak_memory_stats()
        with layout_of(layout), clock("plan"):
            batch = training_batch(*deal_out(mine, advantages, where), 0)
            updates = plan_updates(policy, batch, where.device, budget)
        plan_seconds.append(clock.seconds["seconds_plan"])
        if reference is not None:
            with clock("reference"):
                grpo.add_reference(reference, updates, 1.0)
            reference_seconds.append(clock.seconds["seconds_reference"])
        with clock("update"):
            stats = grpo.update(policy, optimizer, updates, cfg, where)
        took = clock.seconds["seconds_update"]
        seconds.append(took)
        distributed.print0(" ", *setting.values(), f"update {i} took {took:.3f}s")
        first = first or stats
    if args.profile:  # every process takes part
        work = partial(grpo.update, policy, optimizer, updates, cfg, where)
        if reference is not None:
            work = partial(grpo.add_reference, reference, updates, 1.0)
        profile(args.profile if where.rank == 0 else os.devnull, work)
    own = [
        unique_tokens(batch.attention_mask, batch.prompt_lengths, batch.group_ids),
        sum(m.packed.computed for u in updates for m in u.micro_batches if m.part.loss_mask.any()),
    ]
    unique, computed = map(int, distributed.all_reduce_sum(own))
    size, took = shapes.parameters(args.shape), statistics.median(seconds[1:])
    cards = where.world
    floor = 6 * size * unique / shapes.BF16_FLOPS / cards
    moved = 28 * size / cards / shapes.bandwidth() if shapes.bandwidth() else None
    return {
        "micro_batches": len(updates[0].micro_batches),
        "unique_tokens": unique,
        "computed_tokens": computed,
        "trained_tokens": first["tokens"],
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "seconds": round(took, 4),
        "seconds_all": [round(s, 4) for s in seconds],
        "plan_seconds": round(statistics.median(plan_seconds[1:]), 4),
        "tokens_per_second": round(unique / took),
        "mfu": round(floor / took, 4),
        "floor_seconds": round(floor + (moved or 0.0), 4),
        "layouts": sorted({kind_of(m) for u in updates for m in u.micro_batches}),
        **(
            {
                "reference_seconds": round(statistics.median(reference_seconds[1:]), 4),
                "reference_floor_seconds": round(floor / 3, 4),
            }
            if reference is not None
            else {}
        ),
        **(
            {
                "peak_gib": largest(torch.cuda.max_memory_allocated()),
                "reserved_gib": largest(torch.cuda.max_memory_reserved()),
            }
            if cuda
            else {}
        ),
    }


def largest(size: int) -> float:
    """GiB of the process that has most (a collective)."""
    return round(max(distributed.gather_objects(size)) / 2**30, 2)


def kind_of(micro: MicroBatch) -> str:
    """Which layout a micro-batch has."""
    if "cu_seq_lens_q" in micro.packed.inputs:
        return "varlen"
    return "segments" if "segments" in micro.packed.inputs else "prefix_shared"


def compare(row: dict, others: list[dict], keys: tuple[str, ...]) -> dict:
    """What a run with another number of processes found at the same setting, and how much faster this one is."""
    same = [o for o in others if all(o[key] == row[key] for key in keys) and "seconds" in o]
    if not same or "seconds" not in row:
        return {}
    other = same[0]
    return {
        "against": {
            "loss": other["loss"],
            "grad_norm": other["grad_norm"],
            "seconds": other["seconds"],
            "loss_difference": abs(row["loss"] - other["loss"]),
            "grad_norm_ratio": round(row["grad_norm"] / other["grad_norm"], 6),
            "throughput_ratio": round(other["seconds"] / row["seconds"], 3),
        }
    }


class layout_of:
    """Within the block sequences are laid out in this way, whatever packing.choose_layout would say; auto: as it says."""

    def __init__(self, layout: str):
        self.layout, self.rule = layout, packing.choose_layout

    def __enter__(self):
        if self.layout != "auto":
            packing.choose_layout = lambda *_: self.layout

    def __exit__(self, *_):
        packing.choose_layout = self.rule


def profile(path: str, work) -> None:
    """Write what the device spends its time on during `work`."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [
        torch.profiler.ProfilerActivity.CUDA
    ] * torch.cuda.is_available()
    with torch.profiler.profile(activities=kinds) as found:
        work()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    with open(path, "w", encoding="utf-8") as f:
        f.write(found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("--groups", type=int, default=8, help="of all processes")
    p.add_argument("--responses", type=int, default=16, help="a group")
    p.add_argument("--prompt", type=int, default=330, help="tokens")
    p.add_argument(
        "--response", type=int, default=386, help="tokens, the mean where lengths differ"
    )
    p.add_argument("--cap", type=int, default=1024, help="longest response where lengths differ")
    p.add_argument("--lengths", default="equal", help="equal, spread, or both with a comma")
    p.add_argument("--layout", default="auto", help="auto, prefix_shared, varlen, padded")
    p.add_argument("--budget", default="8192", help="micro_batch_tokens")
    p.add_argument("--recompute", default="0", help="gradient_checkpointing, a share of the layers")
    p.add_argument(
        "--activations",
        default=str(packing.ACTIVATIONS),
        help="of compiled layers, see packing.ACTIVATIONS; 0.99: "
        "what costs no matrix product is computed again",
    )
    p.add_argument(
        "--key-heads",
        default=str(packing.KEY_HEADS),
        help="of flex attention, see packing.KEY_HEADS; 1: as it is",
    )
    p.add_argument(
        "--chunk",
        default=str(packing.CHUNK_TOKENS),
        help="tokens whose logits exist at the same time",
    )
    p.add_argument(
        "--flex",
        default="",
        help="flex attention's kernel options: bwd_BLOCK_M1=32,bwd_num_stages=2,…",
    )
    p.add_argument("--updates", type=int, default=3, help="timed updates a setting")
    p.add_argument(
        "--reference", action="store_true", help="hold a bf16 reference and time its pass too"
    )
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    p.add_argument("--static", action="store_true", help="compile every length by itself")
    p.add_argument(
        "--row-multiple",
        type=int,
        default=packing.ROW_MULTIPLE,
        help="rows are padded to a multiple of it",
    )
    p.add_argument(
        "--gather-each", action="store_true", help="cast and gather weights for every pass"
    )
    p.add_argument("--offload", action="store_true", help="weights and optimizer in host memory")
    p.add_argument(
        "--against",
        default="",
        help="JSON of a run with another number of processes: compare with it",
    )
    p.add_argument(
        "--profile",
        default="",
        help="write a profile of one more update, or pass of the reference, to this file",
    )
    args = p.parse_args()
    where = distributed.setup()
    if args.card_gib:
        shapes.shrink_card(args.card_gib)
    rows = []
    kinds = {
        "lengths": str,
        "layout": str,
        "budget": int,
        "recompute": float,
        "activations": float,
        "key_heads": int,
        "chunk": int,
    }
    others = json.loads(Path(args.against).read_text())["settings"] if args.against else []
    head = {
        "shape": args.shape,
        "parameters": shapes.parameters(args.shape),
        "processes": where.world,
        "groups": args.groups,
        "responses": args.responses,
        "prompt_tokens": args.prompt,
        "response_tokens": args.response,
        "compiled": not args.eager,
    }
    settings = list(
        itertools.product(
            *([kind(x) for x in getattr(args, key).split(",")] for key, kind in kinds.items())
        )
    )
    for values in settings:
        setting, began = dict(zip(kinds, values)), time.perf_counter()
        try:
            row = setting | measure(args, where, setting)
        except torch.cuda.OutOfMemoryError:
            row = setting | {"oom": True}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        row |= compare(row, others, tuple(kinds)) | {
            "wall_seconds": round(time.perf_counter() - began, 1)
        }
        rows.append(row)
        distributed.print0(*(f"{k}={v}" for k, v in row.items()))
        if where.rank == 0:
            shapes.report(head | {"settings": rows}, args.out, len(rows) == len(settings))
    distributed.cleanup()


if __name__ == "__main__":
    main()
