"""Time TRL's asynchronous GRPO on random weights: one card trains while vLLM samples on another.

    python bench/trl_async.py --shape 3b --steps 14     step.py --cards 2 --peer async runs it

It is trl.experimental.async_grpo.AsyncGRPOTrainer of TRL 1.16 with its defaults (no KL, samples up
to four updates old, all weights sent to the server after every update) but for bfloat16 weights,
its quickest setting.  A step trains on prompts x n samples.  Sampling goes on meanwhile, so a step
lasts from the end of the one before to its own; the first two wait for samples and do not count.

The trainer's attention kernel comes from the Hub.  Where that cannot be had, torch's
FlashAttention 2 stands in for it, once it has agreed with a plain loop; on a CPU the loop itself
does, and no weights are sent.  The JSON line is like the other peer's, with that kernel and what
TRL logs of its steps.
"""

from __future__ import annotations

import os

if (
    __name__ == "__main__"
):  # before torch looks for cards: the first one trains, the last one serves
    CARDS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = CARDS[0]
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_SERVER_DEV_MODE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where the server finds the trainer
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import argparse
import inspect
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager

import requests
import shapes
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import TrainerCallback

LOGGED = (
    "perf/fwd_bwd_s",
    "perf/optimizer_s",
    "perf/weight_sync_s",
    "perf/rollout_wait_s",
    "batch/samples_per_step",
    "batch/forwarded_tokens_per_step",
    "sample/staleness_mean",
    "sample/dropped_stale_total",
)


def loop_attention(q, k, v, cu_q, cu_k, scale: float | None) -> torch.Tensor:
    """Attention path by path: its last query sees all its keys, the one before all but one, ...

    q (T, H, D), k and v (K, H or fewer, D); cu_q and cu_k (paths + 1): where each path begins."""
    out, cu_q, cu_k = [], cu_q.tolist(), cu_k.tolist()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril((d - c) - (b - a))
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))  # (H, length, D)
        row = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale)
        out.append(row.transpose(0, 1))
    return torch.cat(out)


class TorchKernel:
    """What TRL asks of the Hub's kernel, by torch's."""

    repeat = False  # whether keys and values are repeated for every query head

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
    ) -> torch.Tensor:
        if not causal or tuple(window_size) != (-1, -1):
            raise ValueError(
                "torch's kernel stands in for causal attention without a window alone, not for "
                f"causal={causal}, window_size={window_size}: use a model without one"
            )
        if not q.is_cuda:
            return loop_attention(q, k, v, cu_q, cu_k, softmax_scale)
        if cls.repeat:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        # (torch 2.11 has no such switch, and asks nothing about heads)
        fewer = "enable_gqa" in inspect.signature(varlen_attn).parameters
        ends = (cu_q.to(torch.int32), cu_k.to(torch.int32), int(max_q), int(max_k))
        options = {"scale": softmax_scale, "window_size": (-1, 0)}
        return varlen_attn(q, k, v, *ends, **options | ({"enable_gqa": True} if fewer else {}))


def same_as_the_loop(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernel and loop agree, gradients too, with more keys than queries and fewer heads."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, weights = (
        torch.randn(length, heads, 128, generator=gen).to(device, dtype).requires_grad_()
        for length, heads in ((90, 16), (270, 2), (270, 2), (90, 16))
    )
    cu_q, cu_k = (torch.tensor(x, device=device) for x in ((0, 40, 41, 90), (0, 40, 70, 270)))
    both = []
    try:
        for attend in (
            lambda *x: TorchKernel.flash_attn_varlen_func(*x, 49, 200),
            lambda *x: loop_attention(*x, None),
        ):
            out = attend(q, k, v, cu_q, cu_k)
            both.append((out, *torch.autograd.grad((out * weights.detach()).sum(), (q, k, v))))
    except RuntimeError as error:
        print(f"torch's kernel: {error}", file=sys.stderr)
        return False
    return all((a - b).abs().max() < 0.02 * b.abs().max() for a, b in zip(*both))


def take_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The name of the attention kernel that TRL runs with: the Hub's, or torch's in its place."""
    from trl.experimental.async_grpo import packing

    try:
        packing._flash_attn()
        return "kernels-community, from the Hub"
    except Exception as missing:
        print(f"no kernel from the Hub: {missing!r}", file=sys.stderr)
    packing._flash_attn = lambda: TorchKernel
    if not same_as_the_loop(device, dtype):
        TorchKernel.repeat = True
        if not same_as_the_loop(device, dtype):
            raise SystemExit("torch's kernel and a plain loop disagree")
    if device.type == "cpu":
        return "a plain loop"
    return "torch's FlashAttention 2" + TorchKernel.repeat * ", keys and values repeated"


def reward(completions: list, **_) -> list[float]:
    """Between 0 and 1, by the text alone."""
    return [zlib.crc32(str(c).encode()) % 100 / 100 for c in completions]


class Ends(TrainerCallback):
    """Seconds from the end of one step to the end of the next."""

    def __init__(self):
        self.seconds, self.last = [], None

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *_, **__):
        self.last = self.last or self.now()

    def on_step_end(self, *_, **__):
        now = self.now()
        self.seconds.append(round(now - self.last, 3))
        self.last = now


class NoTransfer:
    """On a CPU the server keeps its weights."""

    def __getattr__(self, name: str):
        return lambda *_, **__: None


@contextmanager
def server(folder: str, name: str, length: int, dtype: str):
    """Address and process of a vLLM server of the model in `folder`, with weights to come."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = {
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "load-format": "dummy",
        "max-model-len": length,
        "gpu-memory-utilization": 0.85,
        "weight-transfer-config": '{"backend": "nccl"}',
    }
    words = [str(x) for k, v in options.items() for x in (f"--{k}", v)]
    environ = {k: v for k, v in os.environ.items() if k != "PYTORCH_CUDA_ALLOC_CONF"}
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, *words],
            env=environ | {"CUDA_VISIBLE_DEVICES": CARDS[-1]},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}", child
        except BaseException:
            log.seek(0)
            print(f"the server's log ends:\n{log.read()[-6000:]}", file=sys.stderr, flush=True)
            raise
        finally:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, sign)
                    child.wait(15)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass


def wait_for(url: str, child: subprocess.Popen, seconds: float) -> None:
    """Return once the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(1)
    raise SystemExit(f"the server is not there: status {child.poll()}, {seconds:.0f} s allowed")


def train(args, url: str, folder: str, tokenizer, kernel: str) -> dict:
    """Train; what the JSON line says."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    cuda, total, rng = torch.cuda.is_available(), args.prompts * args.n, random.Random(0)
    if not cuda:  # it asks for the card's name
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    texts = (
        " ".join(f"w{rng.randrange(shapes.WORDS)}" for _ in range(args.prompt_len))
        for _ in range(
            args.prompts * (args.steps + 12)
        )  # eight steps' samples may wait, four be on the way
    )
    config = AsyncGRPOConfig(
        output_dir=f"{folder}/out",
        dtype="bfloat16" if cuda else "float32",
        bf16=cuda,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=total // args.micro,
        token_budget=-1,  # micro-batches by number: a step has as many samples as ours
        gradient_checkpointing=bool(args.ckpt),
        num_generations=args.n,
        max_completion_length=args.new,
        max_steps=args.steps,
        vllm_server_base_url=url,
        vllm_server_timeout=30,
        weight_sync_timeout=120,
        save_strategy="no",
        report_to=[],
    )
    ends = Ends()
    trainer = AsyncGRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": t}]} for t in texts]
        ),
        processing_class=tokenizer,
        callbacks=[ends],
        weight_transfer=None if cuda else NoTransfer(),
    )
    began = time.perf_counter()
    trainer.train()
    wall = round(time.perf_counter() - began, 2)
    rows = [row for row in trainer.state.log_history if "batch/samples_per_step" in row]
    lengths = [row["completions/mean_length"] for row in rows if row.get("completions/mean_length")]
    return {
        "peer": "trl",
        "engine": "async",
        "shape": args.shape,
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "cards": 2,
        "attention": kernel,
        "steps": ends.seconds,
        "step_seconds": round(statistics.median(ends.seconds[2:]), 3),
        "micro_batch": args.micro,
        "recompute": bool(args.ckpt),
        "parts": {k: round(statistics.mean(r.get(k) or 0 for r in rows[2:]), 3) for k in LOGGED},
        "wall": wall,
        "mean_len": lengths[-1] if lengths else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "tokens_a_step": total * (args.prompt_len + args.new),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--shape", default="3b", choices=shapes.SHAPES)
    p.add_argument("--prompts", type=int, default=16, help="a step")
    p.add_argument("--n", type=int, default=8, help="samples a prompt")
    p.add_argument("--prompt-len", type=int, default=512, help="tokens")
    p.add_argument("--new", type=int, default=256, help="tokens of a sample")
    p.add_argument("--micro", type=int, default=16, help="samples a micro-batch")
    p.add_argument("--steps", type=int, default=14, help="the first two do not count")
    p.add_argument("--ckpt", type=int, default=0, help="1 recomputes activations")
    p.add_argument("--limit", type=int, default=400, help="seconds")
    args = p.parse_args()
    if args.steps < 3 or args.prompts * args.n % args.micro:
        p.error("at least 3 steps, and a step of whole micro-batches")
    for sign in (signal.SIGTERM, signal.SIGALRM):  # the server ends as well
        signal.signal(sign, lambda number, _: sys.exit(f"ended by signal {number}"))
    signal.alarm(args.limit)
    cuda = torch.cuda.is_available()
    device, dtype = (
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if cuda else torch.float32,
    )
    kernel = take_kernel(device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = shapes.word_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tokenizer.response_template = {  # all text is the answer
            "defaults": {"role": "assistant"},
            "start_anchor_pattern": r"\Z",
            "fields": {"content": {"content": "text"}},
        }
        config = shapes.write_config_folder(args.shape, f"{folder}/config")
        length = args.prompt_len + args.new + 8
        with server(config, folder, length, str(dtype).removeprefix("torch.")) as (url, child):
            shapes.random_lm(args.shape, dtype, device).save_pretrained(folder)
            wait_for(url, child, 240)
            row = train(args, url, folder, tokenizer, kernel)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
