"""Passages, tiny encoders and oracles that the tests of retrieval share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from data import Passage
from retriever import (
    DenseRetriever,
    Encoder,
    Index,
)
from search.passages import PassageIds

WORDS = "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter"
WORDS = WORDS.split()


def passages(n: int, seed: int = 0, most: int = 12) -> list[Passage]:
    rng = random.Random(seed)
    return [
        Passage(
            f"p{i:04d}",
            rng.choice(["", "A title"]),
            " ".join(rng.choices(WORDS, k=rng.randint(1, most))) + f" number{i}",
        )
        for i in range(n)
    ]


def plain(texts: list[str]) -> list[Passage]:
    return [Passage(str(i), "", text) for i, text in enumerate(texts)]


def tiny_ance(
    folder: Path,
    seed: int = 0,
    file: str = "model.safetensors",
    extra: dict | None = None,
    drop: str = "",
) -> dict:
    """A random 2-layer ANCE checkpoint in the public naming, with tokenizer; its state dict."""
    torch.manual_seed(seed)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=62,
    ).save_pretrained(folder)
    config = RobertaConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
        type_vocab_size=1,
    )
    config.save_pretrained(folder)
    roberta = RobertaModel(config, add_pooling_layer=False)
    state = {f"roberta.{k}": v for k, v in roberta.state_dict().items()}
    state |= {
        "embeddingHead.weight": torch.randn(32, 32) / 5,
        "embeddingHead.bias": torch.randn(32),
        "norm.weight": torch.rand(32) + 0.5,
        "norm.bias": torch.randn(32),
    } | (extra or {})
    state.pop(drop, None)
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        from safetensors.torch import save_file

        save_file(state, folder / file)
    return state


class WordVectors(nn.Module):
    """A stand-in for an encoder: a token's state is its row of a table, so vectors are known."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = nn.Parameter(table)
        self.config = SimpleNamespace(
            hidden_size=table.shape[1], model_type="table", max_position_embeddings=64
        )

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


class NumberTokenizer:
    """The text "7 3" becomes [7, 3]; no special tokens."""

    pad_token_id, all_special_ids = 0, []

    def __call__(self, texts, verbose=True):
        if isinstance(texts, str):
            return {"input_ids": [ord(c) for c in texts]}
        return {"input_ids": [[int(w) for w in t.split()] for t in texts]}


def table_retriever(vectors: list[list[float]], ids: list[str], shards: int = 1) -> DenseRetriever:
    """Passage i and the query "i" both have vectors[i] as their vector."""
    table = torch.tensor(vectors)
    parts = [np.array(p, dtype=np.float16) for p in np.array_split(np.array(vectors), shards)]
    return DenseRetriever(
        Index(PassageIds(ids), parts),
        WordVectors(table),
        NumberTokenizer(),
        Encoder("mean", normalise=False),
    )


def sorted_rank(scores: np.ndarray, golds: list[int], cutoff: int) -> int | None:
    """The rule of order, said again: sort all passages, the gold behind all that tie with it."""
    best = None
    for gold in golds:
        others = [i for i in range(len(scores)) if i not in golds]
        line = sorted(others + [gold], key=lambda i: (-scores[i], i == gold))
        best = min(best or len(scores) + 1, line.index(gold) + 1)
    return best if best <= cutoff else None


def write_corpus(path: Path, corpus: list[Passage]) -> str:
    path.write_text(
        "".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in corpus)
    )
    return str(path)
