"""Sampling alone: tokens a second of the engines, on random weights of a named shape, beside the
floor.

    python bench/sampling.py --shape 3b --engines torch,vllm --prompts 16 --n 8
    python bench/sampling.py --shape 0.5b --engines torch --eager --top-p 0.9
    python bench/sampling.py --shape 3b --rounds 4 --new 150 --shown 600   # and with --anew

No response ends early, as no id ends one; with --mean every id has one chance in `mean` to be one
that does, so that lengths are spread up to --new. The first call of an engine makes its graphs and is
reported apart; the median of the others counts. The engines are compared with each other on what
they sampled: a pass of the model over it in the engine's dtype gives the mean and the largest
difference of log-probabilities.

Floor, by the card's data sheet: one pass over each prompt (2 N FLOPs a token), then a decode step
reads the weights and each row's keys and values so far (2 N + rows × kv bytes), or computes 2 N
FLOPs a row where that takes longer.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time

import shapes
import torch
from engines.base import EngineConfig, GenerateStats, Rollout, Sampling
from engines.torch_engine import TorchEngine
from model import prepare_causal_lm
from packing import token_logprobs
from rollout import collate_rollouts, open_engine


def floor_seconds(args) -> dict[str, float] | None:
    """The least seconds of prompts and decode steps; None for a card without known bandwidth."""
    config, size = shapes.model_config(args.shape), shapes.parameters(args.shape)
    rate = shapes.bandwidth()
    if rate is None or args.rounds > 1:
        return None
    rows = min(args.batch, args.prompts * args.n)
    waves = -(-args.prompts * args.n // rows)
    head = config.hidden_size // config.num_attention_heads
    # bytes of a token's keys and values in bfloat16
    token = 4 * config.num_hidden_layers * config.num_key_value_heads * head
    step = max(
        (2 * size + rows * token * (args.prompt_len + args.new / 2)) / rate,
        2 * size * rows / shapes.BF16_FLOPS,
    )
    return {
        "prompts": 2 * size * args.prompts * args.prompt_len / shapes.BF16_FLOPS,
        "decode_step": step,
        "total": 2 * size * args.prompts * args.prompt_len / shapes.BF16_FLOPS
        + waves * args.new * step,
    }


def sample(engine, args, rng: random.Random, seed: int) -> list[Rollout]:
    """One call, or `args.rounds` of conversations; the last rollouts. Counts: engine.total."""
    engine.total, n = GenerateStats(), args.n
    prompts = [rng.choices(range(shapes.WORDS), k=args.prompt_len) for _ in range(args.prompts)]
    for _ in range(args.rounds):
        if args.anew and isinstance(engine, TorchEngine) and engine._cache:
            engine._cache.forget()
        sampling = Sampling(n, args.temperature, args.top_p, args.new, seed=seed)
        rollouts, n = engine.generate(prompts, sampling), 1
        shown = [rng.choices(range(shapes.WORDS), k=args.shown) for _ in rollouts]
        prompts = [r.prompt_ids + r.response_ids + ids for r, ids in zip(rollouts, shown)]
    return rollouts


def measure(engine, args, model) -> dict:
    """Seconds and rates of `args.calls` timed calls after a first one, and the gap to `model`."""
    cuda = torch.cuda.is_available()
    rng = random.Random(0)
    seconds, rollouts = [], []
    for call in range(args.calls + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        rollouts = sample(engine, args, rng, call)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    total, median = engine.total, statistics.median(seconds[1:])
    result = {
        "seconds": round(median, 3),
        "calls": [round(s, 3) for s in seconds],  # the first is left out
        "tokens_per_second": round(total.sampled_tokens / median),
        "prompt_tokens": total.prompt_tokens,
        "held_tokens": total.held_tokens,
        "decode_steps": total.steps,
        "ms_a_step": round(1000 * median / max(1, total.steps), 3),  # prompts included
        "response_tokens": sum(len(r.response_ids) for r in rollouts) / len(rollouts),
    }
    if cuda:
        free, total = torch.cuda.mem_get_info()
        result |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "card_used_gib": round((total - free) / 2**30, 2),
        }  # vLLM's pool is not torch's
    if args.temperature > 0 and args.top_p == 1:
        batch = collate_rollouts(rollouts[:16], [0.0] * len(rollouts[:16]), shapes.WORDS).to(
            model.device
        )
        with torch.no_grad():
            logprobs = token_logprobs(
                model, batch.tokens, batch.attention_mask, args.temperature, batch.loss_mask
            )
        gap = (logprobs - batch.logprobs).abs()[batch.loss_mask.bool()]
        result |= {"gap_mean": round(float(gap.mean()), 5), "gap_max": round(float(gap.max()), 4)}
    return result


def profile(engine, args, out: str) -> None:
    """Write what the kernels of one more call take to a file, the longest first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        sample(engine, args, random.Random(0), 0)
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    with open(out, "w", encoding="utf-8") as f:
        print(f"{shapes.card()}, {args.shape}, {engine.total.steps} decode steps", file=f)
        print("ms in all, launches, us each", file=f)
        for e in events[:40]:
            ms, each = e.self_device_time_total / 1000, e.self_device_time_total / e.count
            print(f"{ms:9.2f} {e.count:7} {each:8.1f}  {e.key[:100]}", file=f)


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("--engines", default="torch", help="torch and vllm, with a comma")
    p.add_argument("--prompts", type=int, default=16)
    p.add_argument("--n", type=int, default=8, help="responses a prompt")
    p.add_argument("--prompt-len", type=int, default=512, help="tokens")
    p.add_argument("--new", type=int, default=256, help="tokens of a response")
    p.add_argument("--mean", type=int, default=0, help="tokens of a response where lengths differ")
    p.add_argument("--rounds", type=int, default=1, help="of conversations; no floor is known")
    p.add_argument("--shown", type=int, default=600, help="tokens between two rounds")
    p.add_argument("--anew", action="store_true", help="torch: hold no conversations")
    p.add_argument("--batch", type=int, default=256, help="rows decoded together")
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--calls", type=int, default=3, help="timed calls")
    p.add_argument("--eager", action="store_true", help="torch: also without CUDA graphs")
    p.add_argument("--profile", default="", help="torch: write the kernels' times to this file")
    p.add_argument("--gpu-memory", type=float, default=0.4, help="vllm: share of the card")
    args = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = prepare_causal_lm(shapes.random_lm(args.shape, dtype, device))
    results: dict[str, dict] = {}
    ends = list(range(shapes.WORDS + 1, model.config.vocab_size, args.mean)) if args.mean else []
    longest = args.prompt_len + args.rounds * (args.new + args.shown) - args.shown
    kinds = args.engines.split(",")
    variants = {"torch": {}}
    if args.eager:
        variants["torch_eager"] = {"graphs": False}
    floor = floor_seconds(args)
    given = "shape prompts n prompt_len new mean batch temperature top_p rounds shown anew".split()
    head = {k: getattr(args, k) for k in given}
    head |= {
        "parameters": shapes.parameters(args.shape),
        "floor_seconds": floor and {k: round(v, 5) for k, v in floor.items()},
    }

    def note(name: str, row: dict) -> None:
        results[name] = row | (
            {"times_floor": round(row["seconds"] / floor["total"], 2)} if floor else {}
        )
        print(name, results[name], flush=True)
        shapes.report(head | {"engines": results}, args.out, final=False)

    for name, options in variants.items() if "torch" in kinds else ():
        started = time.perf_counter()
        own = prepare_causal_lm(shapes.random_lm(args.shape, dtype, device))
        engine = TorchEngine(own, ends, shapes.WORDS, None, args.batch, longest, **options)
        note(
            name,
            {
                "start_seconds": round(time.perf_counter() - started, 2),
                **measure(engine, args, model),
            },
        )
        if args.profile and name == "torch":
            profile(engine, args, args.profile)
        del engine, own
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if "vllm" in kinds:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            engine = open_engine(
                EngineConfig("vllm", args.batch, args.gpu_memory),
                shapes.write_config_folder(args.shape, folder),
                None,
                ends,
                shapes.WORDS,
                device,
                longest,
                dtype=dtype,
                weights=False,
            )
            made = time.perf_counter() - started
            engine.sync_weights(model.named_parameters())
            note("vllm", {"start_seconds": round(made, 2), **measure(engine, args, model)})
    shapes.report(head | {"engines": results}, args.out)


if __name__ == "__main__":
    main()
