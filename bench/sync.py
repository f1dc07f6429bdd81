"""Weight sync alone: from an FSDP policy (float32 masters) into the engine of the same process,
by phase.

    python bench/sync.py --shape 3b --engine vllm
    torchrun --nproc-per-node 2 bench/sync.py --shape 3b --engine vllm

Phases: `wake` (memory of the weights back), `weights` (stream of full tensors, prefix cache
reset), `cache` (memory of keys and values back), `sleep`; `total` is what a training step waits
for, the first three together. The first round is left out; medians. After the last one the
engine's log-probabilities are compared with the policy's.

Floor: the float32 masters are read and bf16 weights written once, 6 N bytes, at the card's
data-sheet bandwidth.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time

import shapes
import torch
import distributed
from engines.base import EngineConfig, Sampling
from model import prepare_causal_lm
from packing import token_logprobs
from rollout import collate_rollouts, open_engine


def timed(times: dict[str, list[float]], name: str, action) -> None:
    """Note the seconds of `action()`, until the card is done."""
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times.setdefault(name, []).append(time.perf_counter() - started)


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("--engine", default="vllm", choices=["torch", "vllm"])
    p.add_argument("--tensor-parallel", type=int, default=1)
    p.add_argument("--gpu-memory", type=float, default=0.4, help="vLLM's share of the card")
    p.add_argument("--rounds", type=int, default=5, help="timed syncs")
    args = p.parse_args()
    dist = distributed.setup()
    cuda = dist.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(
            EngineConfig(args.engine, 64, args.gpu_memory, args.tensor_parallel),
            shapes.write_config_folder(args.shape, folder),
            None,
            [],
            shapes.WORDS,
            dist.device,
            512,
            dtype=dtype,
            weights=False,
        )
    policy = prepare_causal_lm(shapes.random_lm(args.shape, torch.float32, dist.device))
    distributed.shard_model(policy, dist, bf16=cuda)
    rng = random.Random(0)
    prompts = [rng.choices(range(shapes.WORDS), k=128) for _ in range(8)]
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds + 1):
        timed(
            times, "sync", lambda: engine.sync_weights(distributed.full_parameters(policy, dtype))
        )
        for phase, seconds in engine.sync_seconds.items():
            times.setdefault(phase, []).append(seconds)
        timed(times, "cache", engine.wake)
        times.setdefault("total", []).append(times["sync"][-1] + times["cache"][-1])
        rollouts = engine.generate(prompts, Sampling(2, 0.7, 1.0, 32, seed=1))
        timed(times, "sleep", engine.sleep)
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), shapes.WORDS).to(dist.device)
    with torch.no_grad():
        logprobs = token_logprobs(policy, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask)
    gap = (logprobs - batch.logprobs).abs()[batch.loss_mask.bool()]
    size, rate = shapes.parameters(args.shape), shapes.bandwidth()
    result = {
        "shape": args.shape,
        "engine": args.engine,
        "processes": dist.world,
        "tensor_parallel": args.tensor_parallel,
        "parameters": size,
        "seconds": {k: round(statistics.median(v[1:]), 4) for k, v in times.items()},
        "rounds": {k: [round(s, 4) for s in v] for k, v in times.items()},
        "floor_seconds": rate and round(6 * size / rate, 4),
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
    }
    if cuda:
        free, total = torch.cuda.mem_get_info()
        result |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "card_used_gib_asleep": round((total - free) / 2**30, 2),
        }
    if dist.rank == 0:
        shapes.report(result, args.out)
    distributed.cleanup()


if __name__ == "__main__":
    main()
