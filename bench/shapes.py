"""What the benchmarks share: model shapes with random weights, a tokenizer, the card's limits, the form of results.

Shapes are Qwen2's (tied embeddings but for the 7B), as the peer's script has them; N counts the embedding once, because the tied head
uses it in every trained token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

SHAPES = {
    "tiny": dict(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=2048,
    ),
    "0.5b": dict(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
    ),
    "1.5b": dict(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
    ),
    "3b": dict(
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        vocab_size=151936,
    ),
    "7b": dict(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
}
BF16_FLOPS = (
    989e12  # dense bf16 of the H100's and H200's data sheets: every MFU here is a share of it
)
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, data sheets
WORDS = 2000  # of the tokenizer; the model's other ids decode to nothing


def model_config(shape: str) -> Qwen2Config:
    """The config of a named shape."""
    ends = dict(eos_token_id=WORDS + 1, pad_token_id=WORDS, bos_token_id=None)
    return Qwen2Config(
        **{"tie_word_embeddings": True} | SHAPES[shape] | ends, max_position_embeddings=4096
    )


def random_lm(shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A causal LM with random weights, made on the device: the same for every process of one kind of device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            model_config(shape), dtype=dtype, attn_implementation="sdpa"
        )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """`w0 w1 …`, one token a word."""
    vocab = {f"w{i}": i for i in range(WORDS)} | {
        "<pad>": WORDS,
        "<eos>": WORDS + 1,
        "<unk>": WORDS + 2,
    }
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def write_config_folder(shape: str, folder: str) -> str:
    """A model folder without weights: what an engine needs whose weights come with the first sync."""
    config = model_config(shape)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def parameters(shape: str) -> int:
    """N, the number of parameters, tied ones once."""
    with torch.device("meta"):
        return sum(
            p.numel() for p in AutoModelForCausalLM.from_config(model_config(shape)).parameters()
        )


def card() -> str:
    """The name of the device that is measured."""
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.processor() or 'cpu'} (CPU)"
    )


def bandwidth() -> float | None:
    """Bytes a second of the card's memory by its data sheet; None for a card that is not listed."""
    return next((rate for name, rate in BANDWIDTH.items() if name in card()), None)


def shrink_card(gib: float) -> None:
    """Hold the card's memory beyond `gib` from a process that ends with this one: all that runs here, libraries with
    allocators of their own too, finds a card of that size."""
    code = (
        f"import sys, torch; torch.cuda.set_device({torch.cuda.current_device()}); "
        f"size = torch.cuda.mem_get_info()[1] - int({gib} * 2**30); "
        "held = torch.empty(size, dtype=torch.uint8, device='cuda'); print(size, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if not holder.stdout.readline().strip().isdigit():
        raise SystemExit(f"--card-gib {gib}: the card's memory beyond that could not be taken")


def report(results: dict, out: str, final: bool = True) -> None:
    """Write results with card, versions, command and date to the file `out`, if one is named, and in the end print them
    as one JSON line.  A benchmark calls it after every part as well: what is measured survives whatever comes next."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    vllm = sys.modules.get("vllm")
    if vllm is not None:
        versions["vllm"] = vllm.__version__
    own = {"--out", "--peer-script"}  # paths of this machine
    words = [w for last, w in zip(sys.argv, sys.argv[1:]) if not own & {last, w}]
    # (asking for the card takes memory on it, so what a process of its own said of it stands)
    row = {
        "bench": Path(sys.argv[0]).stem,
        "card": results.get("card") or card(),
        "versions": versions,
        "command": " ".join(
            ["python", f"bench/{Path(sys.argv[0]).name}", *map(shlex.quote, words)]
        ),
        "date": time.strftime("%Y-%m-%d"),
        **results,
    }
    if final:
        print(json.dumps(row), flush=True)
    if out:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        with open(f"{out}.tmp", "w", encoding="utf-8") as f:
            f.write(json.dumps(row, indent=1) + "\n")
        os.replace(f"{out}.tmp", out)


def parser(doc: str) -> argparse.ArgumentParser:
    """A command line with what every benchmark has."""
    p = argparse.ArgumentParser(description=doc.split("\n")[0])
    p.add_argument("--shape", default="3b", choices=SHAPES)
    p.add_argument("--out", default="", help="also write the JSON to this file")
    p.add_argument(
        "--card-gib",
        type=float,
        default=0.0,
        help="as on a card of that memory: another process holds the rest",
    )
    return p
