"""Time the choices in the PyTorch engine's decode attention on a card.

    python bench/tuning.py attention --out attention.json     # a layer's attention alone
    python bench/tuning.py conversations --out rounds.json    # four rounds of sampling, 3B

`attention`: programs that share a slot's keys, warps of the merge, and keys, stages and warps of
the part kernel, over the shapes of WORK, with random values; microseconds a layer. Six layers'
caches are used in turn, so that none is in the card's L2 cache. `conversations`: seconds of calls
(the first makes the graphs) and their parts, with and without several programs for long slots, and
with longer passes over prompts.
"""

from __future__ import annotations

import gc
import random
import time
from types import SimpleNamespace

import sampling
import shapes
import torch
from triton.testing import do_bench_cudagraph

from engines import kernels, torch_engine
from engines.kv_cache import KVCache, Prompt
from model import prepare_causal_lm

LAYERS = 6
NEVER = 1 << 40
WORK = {  # heads, key/value heads, head size, rows, rows of a prompt, prompt, capacity, slot lengths
    "3b": (16, 2, 128, 128, 8, 512, 320, (0, 256)),
    "3b, 64 rows": (16, 2, 128, 64, 8, 512, 320, (0, 256)),
    "0.5b": (14, 2, 64, 128, 8, 512, 320, (0, 256)),
    "3b, spread": (16, 2, 128, 256, 16, 600, 1088, (1, 1000)),
    "3b, conversations": (16, 2, 128, 128, 8, 512, 2432, (600, 2400)),
    "0.5b, conversations": (14, 2, 64, 128, 8, 512, 2432, (600, 2400)),
}
TILES = [  # stages, keys, warps
    *((2, 64, 4), (3, 64, 4), (1, 128, 4), (2, 128, 4)),
    *((1, 32, 4), (2, 32, 4), (1, 64, 8), (2, 128, 8)),
]


class Merge:
    """The merge kernel with `warps` warps."""

    def __init__(self, kernel):
        self.kernel, self.warps = kernel, 1

    def __getitem__(self, grid):
        return lambda *a, **k: self.kernel[grid](*a, **k | {"num_warps": self.warps})


def layers(heads, kv, d, rows, group, prompt, capacity, lengths):
    """A function that runs LAYERS layers' attention."""
    cache = KVCache(rows, capacity, rows // group, prompt, 16, torch.device("cuda"))
    qkv = torch.randn(rows, heads + 2 * kv, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split([heads, kv, kv], 1)
    for layer in range(LAYERS):
        cache._allocate(layer, k[None].transpose(1, 2), v[None].transpose(1, 2))
        for x in (*cache.slots[layer], *cache.prompts[layer]):
            x.normal_()
    at = torch.randint(*lengths, (rows,)).tolist()
    prompts = [Prompt(1 + i // group, prompt) for i in range(rows)]
    cache.begin_steps([(1, at[i], i, prompts[i]) for i in range(rows)], rows)

    def run():
        for i in range(LAYERS):
            stored = cache.slots[i], cache.prompts[i]
            kernels.decode_attention(q, k, v, *stored, cache.rows, d**-0.5)

    return run


def attention(args) -> list[dict]:
    """Microseconds a layer of every choice."""
    torch.manual_seed(0)
    merge = kernels._merge_kernel = Merge(kernels._merge_kernel)
    as_built = kernels.PROGRAMS, kernels.SLOT_KEYS, kernels.STAGES, kernels.TILE, kernels.WARPS
    rows = []

    def note(work: str, run, **choice) -> None:
        us = round(1000 * do_bench_cudagraph(run, rep=20) / LAYERS, 2)
        rows.append({"work": work, **choice, "us": us})
        print(rows[-1], flush=True)

    for name, work in WORK.items():
        run, pairs = layers(*work), work[3] * work[1]
        for splits in (1, 2, 4, 8):
            kernels.PROGRAMS, kernels.SLOT_KEYS = splits * pairs, NEVER
            for merge.warps in (4, 1):
                note(name, run, slot_splits=splits, merge_warps=merge.warps)
        kernels.PROGRAMS = pairs * (4 if "conversations" in name else 1)
        for choice in TILES:
            kernels.STAGES, kernels.TILE, kernels.WARPS = choice
            note(name, run, stages=choice[0], tile=choice[1], warps=choice[2])
        for constant, value in zip(("PROGRAMS", "SLOT_KEYS", "STAGES", "TILE", "WARPS"), as_built):
            setattr(kernels, constant, value)
        del run
        torch.cuda.empty_cache()
    return rows


def conversations(args) -> list[dict]:
    """Seconds of two calls after a first one, by SLOT_KEYS and PREFILL_TOKENS."""
    shape = dict(prompts=16, n=8, prompt_len=512, new=150, rounds=4, shown=600)
    work = SimpleNamespace(**shape, anew=False, temperature=0.7, top_p=1.0)
    longest = work.prompt_len + work.rounds * (work.new + work.shown) - work.shown
    spent, rows, engine_class = {}, [], torch_engine.TorchEngine

    def clock(name: str) -> None:
        inner = getattr(engine_class, name)

        def call(*a):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = inner(*a)
            torch.cuda.synchronize()
            spent[name] = spent.get(name, 0) + time.perf_counter() - began
            return out

        setattr(engine_class, name, call)

    clock("_prefill")
    clock("_decode")
    chosen = kernels.SLOT_KEYS
    for choice in ((NEVER, 8192), (chosen, 8192), (chosen, 16384), (NEVER, 8192)):
        kernels.SLOT_KEYS, torch_engine.PREFILL_TOKENS = choice
        model = shapes.random_lm("3b", torch.bfloat16, torch.device("cuda"))
        engine = engine_class(
            prepare_causal_lm(model), [], shapes.WORDS, max_batch=256, max_length=longest
        )
        row = {"slot_keys": choice[0], "prefill_tokens": choice[1], "seconds": [], "parts": []}
        for call in range(3):
            spent.clear()
            began = time.perf_counter()
            sampling.sample(engine, work, random.Random(call), call)
            row["seconds"].append(round(time.perf_counter() - began, 3))
            row["parts"].append({name: round(s, 3) for name, s in spent.items()})
        rows.append(row)
        print(row, flush=True)
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    p = shapes.parser(__doc__)
    p.add_argument("what", choices=["attention", "conversations"])
    args = p.parse_args()
    rows = {"attention": attention, "conversations": conversations}[args.what](args)
    shapes.report({"bench": "tuning", "what": args.what, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
