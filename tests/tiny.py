"""Tiny random models and a byte tokenizer for the tests: no network, no download, real transformers classes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, five special tokens; EOS is `<|im_end|>` (id 2), pad `<|pad|>` (id 0)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    if chat:
        tokenizer.chat_template = CHATML
    return tokenizer


def tiny_config(kind: str = "qwen2", tied: bool = True, vocab: int = len(SPECIAL) + 256, **changes):
    """The config of a 2-layer grouped-query model of family `kind`."""
    shape = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    if kind == "qwen3":
        shape["head_dim"] = 8
    return {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        **(shape | changes)
    )


def tiny_lm(folder=None, kind: str = "qwen2", tied: bool = True, seed: int = 0, **changes):
    """A random 2-layer causal LM in eval mode, float32; saved with its tokenizer where a folder is given."""
    torch.manual_seed(seed)
    config = tiny_config(kind, tied, **changes)
    model = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[kind](
        config
    ).eval()
    if folder is not None:
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return model


def tiny_encoder(folder, seed: int = 0):
    """A random 2-layer BERT encoder with the byte tokenizer in BERT's manner (`<s> text </s>`), saved to `folder`."""
    torch.manual_seed(seed)
    core = Tokenizer(
        models.BPE(
            vocab={
                t: i for i, t in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))
            },
            merges=[],
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=512,
    )
    model = BertModel(
        BertConfig(
            vocab_size=len(SPECIAL) + 256,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=512,
            initializer_range=0.2,
        ),
        add_pooling_layer=False,
    ).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def run_copied(name: str, folder, code: str) -> str:
    """What `code` prints beside a copy of the project's file `name`, and nothing else of the project."""
    root = Path(__file__).resolve().parent.parent
    shutil.copy(root / name, folder)
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
