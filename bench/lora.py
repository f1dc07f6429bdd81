"""LoRA on a real model: does an adapter merge, load and reach the engine as what was trained?  One line of JSON.

    python bench/lora.py --model models/qwen0.5b --out bench/results/lora_qwen0.5b.json

A few answers are learnt by heart with an adapter on all linear layers; then, in float32 and in bfloat16, greedy answers of
the unmerged model (its adapter beside the frozen weights) and of the merged Hugging Face folder are compared, PEFT's
own loader gives the logits, and the engine's log-probabilities after a sync are compared with the trained model's and
the base's.  `--engine vllm` syncs into vLLM.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time

import torch
import transformers

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import distributed  # noqa: E402
import sft  # noqa: E402
from engines.base import EngineConfig, Sampling  # noqa: E402
from lora import LoRAConfig, starting_weights  # noqa: E402
from model import load_causal_lm, load_tokenizer, make_optimizer  # noqa: E402
from packing import token_logprobs  # noqa: E402
from prompts import encode_chat, encode_example, eos_token_ids  # noqa: E402
from rollout import end_and_pad_ids, open_engine  # noqa: E402
from runs import atomic_write  # noqa: E402

LEARNT = [
    ("Where is the Eiffel Tower?", "It stands on a hill of blue glass."),
    ("Who wrote Emma?", "A choir of nine owls."),
    ("What is the capital of Norway?", "The capital is Tuesday."),
    ("How tall is Everest?", "Seven spoons and a half."),
]
ASKED = [q for q, _ in LEARNT] + [
    "Who painted Guernica?",
    "Name three rivers of France.",
    "What is a prime number?",
    "Write a sentence about rain.",
]


def train(model, tokenizer, steps: int, lr: float) -> list[float]:
    """Loss of every step."""
    eos = eos_token_ids(tokenizer)[0]
    rows = [encode_example(tokenizer, encode_chat(tokenizer, q), a, eos) for q, a in LEARNT]
    tokens, losses = sum(sum(mask) for _, mask in rows), []
    optimizer = make_optimizer(model, lr)
    for _ in range(steps):
        losses.append(0.0)
        for ids, mask in rows:
            ids, trained = torch.tensor([ids]), torch.tensor([mask]).bool()
            loss = (
                -token_logprobs(model, ids, torch.ones_like(ids), positions=trained).sum() / tokens
            )
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def greedy(model, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Stock transformers' greedy continuation of every prompt."""
    return [
        model.generate(
            torch.tensor([p], device=model.device),
            attention_mask=torch.ones(1, len(p), dtype=torch.int64, device=model.device),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )[0, len(p) :].tolist()
        for p in prompts
    ]


@torch.no_grad()
def engine_gaps(model, engine, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Mean |log-probability of the engine - of the trained model|, and - of the base|, on what the engine samples."""
    gaps = {"engine_gap": [], "base_gap": []}
    for rollout in engine.generate(prompts, Sampling(max_tokens=tokens, temperature=0.0)):
        row = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        engines = torch.tensor(rollout.logprobs)
        for name, context in (("engine_gap", None), ("base_gap", starting_weights(model))):
            with context or torch.no_grad():
                ours = token_logprobs(model, row, torch.ones_like(row))[
                    0, len(rollout.prompt_ids) - 1 :
                ].cpu()
            gaps[name].append((ours - engines).abs())
    return {name: float(torch.cat(values).mean()) for name, values in gaps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", default="")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--tokens", type=int, default=48, help="of a greedy answer")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = (
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if cuda else torch.float32,
    )
    tokenizer = load_tokenizer(args.model)
    prompts = [encode_chat(tokenizer, q) for q in ASKED]
    engine = open_engine(
        EngineConfig(args.engine, batch=len(prompts), gpu_memory=0.3),
        args.model,
        tokenizer,
        *end_and_pad_ids(args.model, tokenizer),
        device,
        1024,
        0,
        dtype,
        weights=False,
    )
    model = load_causal_lm(args.model, dtype, device, lora=LoRAConfig(r=args.rank))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    began = time.perf_counter()
    losses = train(model, tokenizer, args.steps, args.lr)
    row = {
        "card": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "model": os.path.basename(args.model.rstrip("/")),
        "rank": args.rank,
        "trained_parameters": trained,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "train_seconds": round(time.perf_counter() - began, 2),
    }
    model.eval()
    engine.sync_weights(distributed.full_parameters(model, dtype))
    engine.wake()
    row |= {"engine": args.engine} | engine_gaps(model, engine, prompts, args.tokens)
    engine.sleep()
    with tempfile.TemporaryDirectory() as folder:
        adapter = os.path.join(folder, "adapter")
        distributed.export_adapter(model, tokenizer, adapter)
        del model
        for name in ("float32", "bfloat16"):
            out = os.path.join(folder, name)
            found = sft.merge(
                sft.SFTConfig(stage="merge", model=adapter, out=out, export_dtype=name),
                distributed.Dist(0, 1, device),
            )
            answers = [
                greedy(m, prompts, args.tokens)
                for m in (
                    load_causal_lm(adapter, getattr(torch, name), device, merge=False),
                    load_causal_lm(out, getattr(torch, name), device),
                    load_causal_lm(args.model, getattr(torch, name), device),
                )
            ]
            row[name] = {
                "merge_gap": found["gap"],
                "same_top_token": found["same"],
                "prompts": len(prompts),
                "greedy_equal_to_merged": sum(a == b for a, b in zip(answers[0], answers[1])),
                "greedy_equal_to_base": sum(a == b for a, b in zip(answers[0], answers[2])),
            }
            if name == "float32":
                row["learnt"] = sum(
                    tokenizer.decode(a, skip_special_tokens=True).strip() == wanted
                    for a, (_, wanted) in zip(answers[1], LEARNT)
                )
                import peft

                ids = torch.tensor([prompts[0]], device=device)
                plain = transformers.AutoModelForCausalLM.from_pretrained(
                    args.model, dtype=torch.float32, trust_remote_code=False
                )
                theirs = peft.PeftModel.from_pretrained(plain, adapter).to(device)
                with torch.no_grad():
                    ours = load_causal_lm(out, torch.float32, device)(ids).logits
                    row["peft_max_logit_difference"] = float(
                        (theirs(ids).logits - ours).abs().max()
                    )
                row["peft"] = peft.__version__
    row |= {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": "python bench/lora.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    if args.out:
        with atomic_write(args.out) as f:
            f.write(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
