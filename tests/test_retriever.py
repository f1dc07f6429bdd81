"""retriever.py against oracles written apart from it: hand-assembled modules, numpy brute force, hand formulas."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertModel, MPNetConfig, MPNetModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel
from search import dense_index, exact
from config import ConfigError
import retriever as R
from data import DataError, Passage
from retriever import (ANCE, build_index, DenseRetriever, encode, Encoder, Index, load_encoder,
                       mean_pool, open_index, open_retriever, retriever_settings,
                       RetrieverConfig, truncate)
from runs import claim_folder, only_writer
from search.bm25 import BM25Retriever
from search.exact import exact_gold_ranks, exact_search, FAILED
from search.fusion import HybridRetriever, rrf
from search.passages import PassageIds, read_ids, RetrieverError, write_ids
from tiny import tiny_encoder, tiny_lm

ROOT = Path(__file__).resolve().parent.parent
WORDS = "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter".split()


def passages(n: int, seed: int = 0, most: int = 12) -> list[Passage]:
    rng = random.Random(seed)
    return [Passage(f"p{i:04d}", rng.choice(["", "A title"]),
                    " ".join(rng.choices(WORDS, k=rng.randint(1, most))) + f" number{i}") for i in range(n)]


def plain(texts: list[str]) -> list[Passage]:
    return [Passage(str(i), "", text) for i, text in enumerate(texts)]


def tiny_ance(folder: Path, seed: int = 0, file: str = "model.safetensors", extra: dict | None = None,
              drop: str = "") -> dict:
    """A random 2-layer ANCE checkpoint in the public naming, with tokenizer; returns its state dict."""
    torch.manual_seed(seed)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>",
                            pad_token="<pad>", unk_token="<unk>", model_max_length=62).save_pretrained(folder)
    config = RobertaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=48, max_position_embeddings=64, pad_token_id=1, bos_token_id=0,
                           eos_token_id=2, initializer_range=0.3, type_vocab_size=1)
    config.save_pretrained(folder)
    roberta = RobertaModel(config, add_pooling_layer=False)
    state = {f"roberta.{k}": v for k, v in roberta.state_dict().items()}
    state |= {"embeddingHead.weight": torch.randn(32, 32) / 5, "embeddingHead.bias": torch.randn(32),
              "norm.weight": torch.rand(32) + 0.5, "norm.bias": torch.randn(32)} | (extra or {})
    state.pop(drop, None)
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        from safetensors.torch import save_file
        save_file(state, folder / file)
    return state


class WordVectors(nn.Module):
    """A stand-in for an encoder: hidden state = a table's row for each token id, so vectors are known exactly."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = nn.Parameter(table)
        self.config = SimpleNamespace(hidden_size=table.shape[1], model_type="table", max_position_embeddings=64)

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
    return DenseRetriever(Index(PassageIds(ids), parts), WordVectors(table), NumberTokenizer(),
                          Encoder("mean", normalise=False))


def sorted_rank(scores: np.ndarray, golds: list[int], cutoff: int) -> int | None:
    """The rule of order, said again: sort all passages, the gold behind every other passage that ties with it."""
    best = None
    for gold in golds:
        others = [i for i in range(len(scores)) if i not in golds]
        line = sorted(others + [gold], key=lambda i: (-scores[i], i == gold))
        best = min(best or len(scores) + 1, line.index(gold) + 1)
    return best if best <= cutoff else None


# ------------------------------------------------------------------------------------------------------------- encoders

@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_ance_forward_is_roberta_linear_norm(tmp_path, dtype, tolerance):
    state = tiny_ance(tmp_path)
    model = ANCE.from_pretrained(str(tmp_path)).to(dtype)
    roberta = RobertaModel(RobertaConfig.from_pretrained(tmp_path), add_pooling_layer=False).eval().to(dtype)
    roberta.load_state_dict({k.removeprefix("roberta."): v for k, v in state.items() if k.startswith("roberta.")})
    ids = torch.tensor([[0, 10, 11, 12, 2], [0, 99, 2, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        first = roberta(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].double()
        linear = first @ state["embeddingHead.weight"].double().T + state["embeddingHead.bias"].double()
        centred = linear - linear.mean(1, keepdim=True)
        by_hand = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
        by_hand = by_hand * state["norm.weight"].double() + state["norm.bias"].double()
        assert (model(ids, mask).double() - by_hand).abs().max() < tolerance


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_ance_is_recognised_and_unused_tensors_allowed(tmp_path, file):
    extra = {"classifier.dense.weight": torch.ones(2, 2), "roberta.pooler.dense.bias": torch.ones(3),
             "roberta.embeddings.position_ids": torch.arange(64)[None]}
    tiny_ance(tmp_path, file=file, extra=extra)
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu")
    assert isinstance(model, ANCE) and encoder.pooling == "ance" and not encoder.normalise
    assert (encoder.query_length, encoder.passage_length) == (62, 62)  # 64 positions, two of them for padding
    long = encode(model, tokenizer, ["x" * 500, "x" * 60])
    assert torch.allclose(long[0], long[1], atol=1e-5)  # 62 tokens: <s>, 60 bytes, </s>; both ends are kept


@pytest.mark.parametrize("change,names", [
    ({"drop": "norm.bias"}, "Missing key.*\"norm.bias\""),
    ({"drop": "roberta.encoder.layer.1.output.dense.weight"}, "Missing key.*roberta.encoder.layer.1.output.dense.weight"),
    ({"extra": {"head.weight": torch.ones(1)}}, "Unexpected key.*head.weight"),
    ({"extra": {"norm.bias": torch.ones(7)}}, "size mismatch for norm.bias")])
def test_ance_loads_strictly(tmp_path, change, names):
    tiny_ance(tmp_path, **change)
    with pytest.raises(RetrieverError, match=names):
        load_encoder(str(tmp_path))


def test_ance_without_a_head_is_refused_when_asked_for(tmp_path):
    state = tiny_ance(tmp_path, drop="embeddingHead.weight")
    assert "embeddingHead.weight" not in state
    with pytest.raises(RetrieverError, match="is no ANCE checkpoint .RoBERTa with embeddingHead"):
        load_encoder(str(tmp_path), pooling="ance")


def test_mean_pooling_skips_padding():
    hidden = torch.tensor([[[1.0, 0], [1, 0], [0, 2], [0, 2]]])
    assert mean_pool(hidden, torch.tensor([[1, 1, 0, 0]])).tolist() == [[1.0, 0.0]]
    hidden[0, 3] = math.nan  # what stands under the mask never matters
    assert mean_pool(hidden, torch.tensor([[1, 1, 0, 0]])).tolist() == [[1.0, 0.0]]


def test_fully_masked_row_is_finite():
    hidden = torch.tensor([[[1.0, 0], [1, 0], [0, 2], [0, 2]]])
    assert torch.isfinite(mean_pool(hidden, torch.zeros(1, 4, dtype=torch.long))).all()
    vectors = encode(WordVectors(torch.eye(3)), NumberTokenizer(), ["", "1"])  # a text without any token
    assert torch.isfinite(vectors).all() and vectors[0].tolist() == [0, 0, 0]


def test_truncation_keeps_both_ends():
    ids, bare = np.array([0, *range(11, 20), 2], np.int32), np.array([5, 6, 7, 8], np.int32)
    cut = truncate([ids, bare], 8, {0, 2})
    assert [t.tolist() for t in cut] == [[0, 11, 12, 13, 14, 15, 16, 2], [5, 6, 7, 8]]
    assert {t.dtype for t in cut} == {np.dtype(np.int32)}
    assert truncate([ids], 11, {0, 2})[0].tolist() == ids.tolist()
    assert truncate([bare], 2, {0, 2})[0].tolist() == [5, 6]  # no special end, none invented


def test_truncation_is_counted(tmp_path):
    tiny_encoder(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu", passage_length=8, query_length=10)
    counts = {}
    encode(model, tokenizer, ["abcdef", "abcdefg", "abcdefg", "a"], encoder, counts=counts)
    assert counts == {"truncated": 2}
    encode(model, tokenizer, ["abcdefg"], encoder, query=True, counts=counts)
    assert counts == {"truncated": 2}


def test_mpnet_counts_positions_as_roberta_does(tmp_path):
    tiny_ance(tmp_path)  # its tokenizer
    config = MPNetConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                         intermediate_size=48, max_position_embeddings=64, pad_token_id=1)
    (tmp_path / "model.safetensors").unlink()
    MPNetModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), "cpu")
    assert (encoder.query_length, encoder.passage_length) == (62, 62)
    assert torch.isfinite(encode(model, tokenizer, ["x" * n for n in (60, 61, 200)], encoder)).all()


def test_cosine_model_normalises_both_sides():
    table = torch.tensor([[1.0, 0], [10.0, 10.0], [0.9, 0.1]])
    vectors = encode(WordVectors(table), NumberTokenizer(), ["0", "1", "2"], Encoder("mean", normalise=True))
    scores, rows, _ = exact_search(vectors[:1], [vectors[1:].numpy()], 2, torch.arange(2))
    assert rows.tolist() == [[1, 0]] and np.allclose(scores, [[0.993884, 0.707107]], atol=1e-5)


def test_encode_order_batches_prefixes(tmp_path):
    tiny_encoder(tmp_path)
    model, tokenizer, _ = load_encoder(str(tmp_path), device="cpu")
    texts = [p.contents for p in passages(40)] + ["", "red fox", "red fox"]
    bert = BertModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    settings = Encoder("mean", query_prefix="query: ", passage_prefix="passage: ")
    for query, prefix in ((True, "query: "), (False, "passage: ")):
        expected = []
        for text in texts:  # one by one, nothing padded
            ids = torch.tensor([tokenizer(prefix + text)["input_ids"]])
            with torch.no_grad():
                mean = bert(ids).last_hidden_state[0].double().mean(0)
            expected.append(mean / mean.norm())
        for budget in (1, 64, 100_000):
            got = encode(model, tokenizer, texts, settings, query=query, batch_tokens=budget)
            assert got.dtype == torch.float32 and got.shape == (43, 32)
            assert (got.double() - torch.stack(expected)).abs().max() < 1e-5
            assert torch.equal(got[-1], got[-2])
    assert encode(model, tokenizer, []).shape == (0, 32)
    first = encode(model, tokenizer, ["red fox"], Encoder("first", normalise=False))
    with torch.no_grad():
        hidden = bert(torch.tensor([tokenizer("red fox")["input_ids"]])).last_hidden_state
    assert torch.allclose(first, hidden[:, 0], atol=1e-5)


@pytest.mark.parametrize("kind", ["ance", "mean", "first"])
def test_packed_texts_have_the_vectors_of_padded_ones(tmp_path, kind, monkeypatch):
    """Texts in one row, each seeing itself alone, filled up or not, have the vectors of padded ones.

    The kernel exists on GPUs alone; here stands what it computes, text by text.
    """

    def attend(query, key, value, ends, _, longest, __, scale):
        out, ends = torch.zeros_like(query), ends.tolist()  # (T, H, d)
        assert max(np.diff(ends)) <= longest
        for first, last in zip(ends, ends[1:]):
            q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
            out[first:last] = ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1)
        return out

    monkeypatch.setattr(dense_index, "varlen_attn", attend)
    (tiny_ance if kind == "ance" else tiny_encoder)(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu", pooling=None if kind == "ance" else kind)
    texts = [p.contents[:50] for p in passages(40)] + ["x", "x", "y" * 50]
    expected = encode(model, tokenizer, texts, encoder)
    tokens = [np.array(ids, dtype=np.int32) for ids in tokenizer(texts)["input_ids"]]
    before = model.config._attn_implementation
    for budget in (1, 200, 10_000):
        packed = R.PackedModel(model, budget, 64)
        assert torch.allclose(R.encode_tokens(model, tokens, encoder, 0, budget, packed), expected, atol=1e-5)
        packed.compiled = True  # the one shape that compilation needs, here without compiling
        assert torch.allclose(R.encode_tokens(model, tokens, encoder, 0, budget, packed), expected, atol=1e-5)
    assert model.config._attn_implementation == before
    runs = R.PackedModel(model, 200, 64).batches([len(t) for t in tokens])
    assert [i for r in runs for i in range(r.start, r.stop)] == list(range(43))


@pytest.mark.gpu
def test_encoding_on_a_gpu_is_near_float32_on_a_cpu(tmp_path):
    for make in (tiny_ance, tiny_encoder):
        make(tmp_path / make.__name__)
        model, tokenizer, encoder = load_encoder(str(tmp_path / make.__name__), device="cpu")
        corpus = passages(300)
        expected = F.normalize(encode(model, tokenizer, [p.contents for p in corpus], encoder), dim=1)
        queries = F.normalize(encode(model.cuda(), tokenizer, [p.contents for p in corpus], encoder), dim=1)
        assert (queries * expected).sum(1).min() > 0.99
        path = write_corpus(tmp_path / "corpus.jsonl", corpus)
        index = build_index(tmp_path / f"i-{make.__name__}", path, model, tokenizer, encoder, shard_size=128,
                            batch_tokens=2048, workers=2)
        vectors = F.normalize(torch.from_numpy(np.concatenate(index.shards)).float(), dim=1)
        assert (vectors * expected).sum(1).min() > 0.99
        again = build_index(tmp_path / f"j-{make.__name__}", path, model, tokenizer, encoder, shard_size=128,
                            batch_tokens=2048, workers=2)
        assert all(np.array_equal(a, b) for a, b in zip(index.shards, again.shards))  # what a resumed build rests on


def test_settings_are_detected_and_overruled(tmp_path):
    def files(name, modules=None, pooling=None, limit=None):
        folder = tmp_path / name
        tiny_encoder(folder)
        if modules:
            types = [{"type": f"sentence_transformers.models.{m}"} for m in modules]
            (folder / "modules.json").write_text(json.dumps(types))
        if pooling:
            (folder / "1_Pooling").mkdir()
            modes = {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True}
            (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
        if limit:
            (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
        return str(folder)

    e5 = load_encoder(files("e5-tiny-v2"))[2]
    assert (e5.query_prefix, e5.passage_prefix, e5.pooling, e5.normalise) == ("query: ", "passage: ", "mean", True)
    assert load_encoder(files("some5e5x"))[2].query_prefix == ""
    assert load_encoder(files("e5/mini"))[2].query_prefix == ""  # the name of a folder above it
    cached = files("models--intfloat--e5-small/snapshots/0a1b")
    assert load_encoder(cached)[2].query_prefix == load_encoder(files("upper/E5-x") + "/")[2].query_prefix == "query: "
    mini = load_encoder(files("mini", ["Transformer", "Pooling", "Normalize"], "mean_tokens", 256))[2]
    assert (mini.pooling, mini.normalise, mini.query_length, mini.passage_length) == ("mean", True, 256, 256)
    cls = load_encoder(files("cls", ["Transformer", "Pooling"], "cls_token"))[2]
    assert (cls.pooling, cls.normalise) == ("first", False)
    for mode, pooling in (("mean", "mean"), ("cls", "first"), ("lasttoken", None), (["mean", "max"], None)):
        modern = files(f"modern-{pooling}-{len(mode)}", ["Transformer", "Pooling"], "unused")  # as since 5.4
        settings = {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": True}
        Path(modern, "1_Pooling/config.json").write_text(json.dumps(settings))
        if pooling:
            assert load_encoder(modern)[2].pooling == pooling
        else:
            with pytest.raises(RetrieverError, match="pools by .*(lasttoken|'mean', 'max')"):
                load_encoder(modern)
    last = files("last", ["Transformer", "Pooling"], "lasttoken")
    with pytest.raises(RetrieverError, match="lasttoken"):
        load_encoder(last)
    assert load_encoder(last, pooling="mean", query_prefix="Q ")[2].query_prefix == "Q "
    with pytest.raises(RetrieverError, match="Dense"):
        load_encoder(files("dense", ["Transformer", "Pooling", "Dense"], "mean_tokens"))
    with pytest.raises(RetrieverError, match="no/such"):
        load_encoder(str(tmp_path / "no/such"))


def test_incomplete_plain_encoder_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file
    tiny_encoder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state.pop("encoder.layer.1.output.dense.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RetrieverError, match="encoder.layer.1.output.dense.weight"):
        load_encoder(str(tmp_path))


def test_nan_is_refused_at_index_time(tmp_path):
    corpus = [Passage("a", "", "0"), Passage("b", "", "1")]
    for i, number in enumerate((math.nan, math.inf, 1e6)):  # the last is infinite in fp16
        model, settings = WordVectors(torch.tensor([[1.0, 0], [number, 0]])), Encoder("mean", False)
        with pytest.raises(RetrieverError, match="passage 'b' is not finite in fp16"):
            build_index(tmp_path / str(i), corpus, model, NumberTokenizer(), settings)
    assert not list(tmp_path.rglob("shard-*.npy")) and not list(tmp_path.rglob("*.tmp"))


def test_encoders_block_copies_out(tmp_path):
    """The block runs with the third-party imports of its file and a RetrieverError, in a bare folder."""
    text = (ROOT / "retriever.py").read_text("utf-8")
    start, end = (text.index(f"# {'-' * n} {name}\n") for n, name in ((84, "encoders"), (81, "dense index")))
    own = {p.stem for p in ROOT.iterdir()}
    imports = [node for node in ast.parse(text[:start]).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    foreign = [node for node in imports if getattr(node, "module", node.names[0].name).split(".")[0] not in own]
    head = "".join(f"{ast.unparse(node)}\n" for node in foreign) + "class RetrieverError(ValueError): pass\n"
    (tmp_path / "copied.py").write_text(head + text[start:end], "utf-8")
    tiny_ance(tmp_path / "ance")
    tiny_encoder(tmp_path / "bert")
    code = ("import copied\nfor name in ('ance', 'bert'):\n    m, t, e = copied.load_encoder(name, 'cpu')\n"
            "    print(e.pooling, *copied.encode(m, t, ['a', 'b', 'a'], e).shape)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": ""})
    assert done.stdout == "ance 3 32\nmean 3 32\n", done.stderr


# ------------------------------------------------------------------------- folders that are no encoders


@pytest.mark.parametrize("make, missing", [
    (tiny_ance, "tokenizer.json and no merges.txt and no vocab.json"), (tiny_encoder, "tokenizer.json and no vocab.txt")])
def test_an_encoder_without_tokenizer_files_is_refused(tmp_path, make, missing):
    """The library would invent a vocabulary of five tokens, and the index would rank nothing."""
    make(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(RetrieverError, match=f"{tmp_path}.*"):
            load_encoder(str(tmp_path), "cpu")
    with pytest.raises(RetrieverError, match=f"{tmp_path} has no {missing}: its tokenizer is missing"):
        load_encoder(str(tmp_path), "cpu")


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tmp_path):
    tiny_encoder(tmp_path)
    model = BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    model.resize_token_embeddings(260)
    model.save_pretrained(tmp_path)
    with pytest.raises(RetrieverError, match="ids up to 260, its model 260 embeddings"):
        load_encoder(str(tmp_path), "cpu")
    model.resize_token_embeddings(300)  # a padded table is in order
    model.save_pretrained(tmp_path)
    load_encoder(str(tmp_path), "cpu")


def test_a_language_model_is_no_encoder_unless_pooling_is_given(tmp_path):
    tiny_lm(tmp_path, vocab=300)
    with pytest.raises(RetrieverError, match="is a language model .Qwen2ForCausalLM.*pooling=mean"):
        load_encoder(str(tmp_path), "cpu")
    assert load_encoder(str(tmp_path), "cpu", pooling="mean")[2].pooling == "mean"


def test_code_in_an_encoders_folder_never_runs(tmp_path, monkeypatch):
    tiny_encoder(tmp_path / "e")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the library asks on a terminal
    for part, config in (("config.json", {"auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}, "model_type": "own"}),
                         ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"})):
        folder = tmp_path / part.split("_")[0]
        shutil.copytree(tmp_path / "e", folder)
        settings = json.loads((folder / part).read_text())
        (folder / part).write_text(json.dumps(settings | config))
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with contextlib.suppress(RetrieverError):
            load_encoder(str(folder), "cpu")
        assert not (tmp_path / "ran").exists()


class Command:
    """What a pickle may carry: it runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("make", [tiny_ance, tiny_encoder])
@pytest.mark.parametrize("damage", ["pickle", "cut", "config"])
def test_damaged_and_malicious_files_are_one_error(tmp_path, make, damage):
    make(tmp_path / "e")
    weights = tmp_path / "e/model.safetensors"
    if damage == "pickle":
        weights.unlink()
        (tmp_path / "e/pytorch_model.bin").write_bytes(pickle.dumps({"x": Command(tmp_path / "ran")}, 2))
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        (tmp_path / "e/config.json").write_text("{")
    with pytest.raises(RetrieverError, match=f"encoder '{tmp_path}/e' can't be loaded") as caught:
        load_encoder(str(tmp_path / "e"), "cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_what_is_cut_is_counted(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"), "cpu", query_length=8, passage_length=20)
    corpus = [Passage("a", "", "short"), Passage("b", "", "longer than twenty bytes"), Passage("c", "", "red fox")]
    dense = DenseRetriever(build_index(tmp_path / "i", corpus, *parts), *parts)
    bm25 = BM25Retriever(corpus)
    bm25.cut_queries = 1
    hybrid = HybridRetriever(dense, bm25)
    assert (dense.cut_queries, dense.cut_passages) == (0, 1)
    dense.search(["123456", "1234567", "12345678"], 1)  # two special tokens beside the bytes
    dense.gold_ranks(["1234567"], [["a"]])
    assert (dense.cut_queries, hybrid.cut_queries, hybrid.cut_passages) == (3, 4, 1)


# ----------------------------------------------------------------------------------------------- exact search and ranks

@pytest.mark.parametrize("shards", [1, 3])
def test_search_equals_brute_force(monkeypatch, shards):
    monkeypatch.setattr(exact, "CPU_BLOCK", 128 * 24)
    rng = np.random.default_rng(shards)
    vectors = (rng.integers(-60, 61, (700, 24)) / 16).astype(np.float16)  # sums that float32 holds exactly
    queries = (rng.integers(-60, 61, (37, 24)) / 16).astype(np.float32)
    truth = queries.astype(np.float64) @ vectors.astype(np.float64).T
    order = torch.from_numpy(rng.permutation(700))
    for k in (1, 10, 700, 5000):
        scores, rows, failed = exact_search(torch.from_numpy(queries), np.array_split(vectors, shards), k, order)
        assert scores.shape == (37, min(k, 700)) and not failed.any()
        assert np.array_equal(rows, [np.lexsort((order, -t))[:k] for t in truth])
        assert np.array_equal(scores, -np.sort(-truth, axis=1)[:, :k])


def test_search_ties_go_by_id(monkeypatch):
    monkeypatch.setattr(exact, "CPU_BLOCK", 64 * 3)
    rng = np.random.default_rng(5)
    vectors = rng.integers(-2, 3, (500, 3)).astype(np.float16)  # few distinct scores, no rounding
    queries = rng.integers(-2, 3, (9, 3)).astype(np.float32)
    order = rng.permutation(500)
    for k in (1, 7, 64, 100):
        _, rows, _ = exact_search(torch.from_numpy(queries), [vectors[:333], vectors[333:]], k, torch.from_numpy(order))
        for q in range(9):
            truth = queries[q].astype(int) @ vectors.astype(int).T
            assert rows[q].tolist() == sorted(range(500), key=lambda i: (-truth[i], order[i]))[:k]


def test_gold_ranks_equal_full_sort(monkeypatch):
    monkeypatch.setattr(exact, "CPU_BLOCK", 64 * 4)
    rng = np.random.default_rng(7)
    vectors = rng.integers(-3, 4, (400, 4)).astype(np.float16)
    queries = rng.integers(-3, 4, (60, 4)).astype(np.float32)
    golds = [rng.integers(0, 400, rng.integers(1, 5)).tolist() for _ in range(60)]  # may repeat an id
    truth = queries.astype(int) @ vectors.astype(int).T
    for shards in (1, 2, 5):
        for cutoff in (1, 20, 100, 400):
            got = exact_gold_ranks(torch.from_numpy(queries), np.array_split(vectors, shards), golds, cutoff)
            assert got == [sorted_rank(truth[q], golds[q], cutoff) for q in range(60)]


def test_gold_ranks_with_real_numbers_and_twins(monkeypatch):
    """Twins of the gold in other blocks and shards tie with it bit for bit (this is why tiles are kept whole)."""
    monkeypatch.setattr(exact, "CPU_BLOCK", 128 * 48)
    rng = np.random.default_rng(11)
    vectors = rng.standard_normal((900, 48)).astype(np.float16)
    twins = {3: [130, 700, 899], 500: [501]}
    for gold, rows in twins.items():
        vectors[rows] = vectors[gold]
    for n in (1, 5, 33):
        queries = rng.standard_normal((n, 48)).astype(np.float32)
        truth = queries.astype(np.float64) @ vectors.astype(np.float64).T
        golds = [[(3, 500)[q % 2]] for q in range(n)]
        for shards in (1, 4):
            got = exact_gold_ranks(torch.from_numpy(queries), np.array_split(vectors, shards), golds, 900)
            assert got == [sorted_rank(np.round(truth[q], 9), golds[q], 900) for q in range(n)]


def test_gold_score_is_confirmed_by_the_pass(monkeypatch):
    """A first guess that is off by rounding (here: by far) must not place the gold: the pass corrects it."""
    vectors = np.array([[1, 0], [0, 1], [1, 1], [2, 2]], dtype=np.float16)
    monkeypatch.setattr(exact, "_take", lambda shards, rows: torch.zeros(len(rows), 2))
    assert exact_gold_ranks(torch.tensor([[1.0, 1.0]]), [vectors], [[2]]) == [2]


def test_nan_score_is_failed_never_a_rank():
    vectors = np.array([[1, 0], [0, 1]], dtype=np.float16)
    got = exact_gold_ranks(torch.tensor([[math.nan, 0], [1.0, 0]]), [vectors], [[0], [0]])
    assert got[0] is FAILED and got[1] == 1
    vectors[1, 0] = math.nan  # a passage that can't be compared
    assert exact_gold_ranks(torch.tensor([[1.0, 0]]), [vectors], [[0]])[0] is FAILED
    dense = table_retriever([[1.0, 0], [math.nan, 0]], ["a", "b"])
    assert dense.gold_ranks(["1"], [["a"]])[0] is FAILED
    with pytest.raises(RetrieverError, match="NaN"):
        dense.search(["1"], 1)


def test_width_mismatch_names_both():
    with pytest.raises(RetrieverError, match="1024.*768"):
        exact_search(torch.zeros(1, 1024), [np.zeros((2, 768), np.float16)], 1, torch.arange(2))
    with pytest.raises(RetrieverError, match="1024.*768"):
        exact_gold_ranks(torch.zeros(1, 1024), [np.zeros((2, 768), np.float16)], [[0]])


def test_equal_scores_keep_one_order():
    for shards in (1, 2, 4):
        dense = table_retriever([[1.0, 0]] * 4, ["c", "a", "d", "b"], shards)
        for batch in (["0"], ["0", "1"], ["0"] * 3):
            assert [[i for i, _ in hits] for hits in dense.search(batch, 2)] == [["a", "b"]] * len(batch)
        assert [i for i, _ in dense.search(["0"], 9)[0]] == ["a", "b", "c", "d"]
        assert dense.gold_ranks(["0"], [["c"]]) == [4]  # ties count against the gold
        assert dense.gold_ranks(["0"], [["c", "d"]]) == [3]


def test_positional_with_duplicate_queries():
    dense = table_retriever([[3.0, 0], [2.0, 0], [1.0, 0], [0, 5.0]], list("abcd"))
    assert dense.gold_ranks(["0", "0", "3", "0"], [["a"], ["c"], ["d"], ["b"]]) == [1, 3, 1, 2]
    assert [hits[0][0] for hits in dense.search(["3", "0", "3"], 1)] == ["d", "a", "d"]
    assert dense.gold_ranks(["0"], ["b"]) == [2]  # a bare id is a list of one
    assert dense.search([], 3) == [] and dense.gold_ranks([], []) == []


def test_bad_calls_are_told():
    dense = table_retriever([[3.0, 0], [2.0, 0]], list("ab"))
    bm25 = BM25Retriever(plain(["red fox", "blue fox"]))
    for r in (dense, bm25):
        for call, arguments, message in ((r.gold_ranks, (["0"], [["z"]]), "'z'"),
                                         (r.gold_ranks, (["0"], []), "1 queries"),
                                         (r.gold_ranks, (["0"], [[]]), "no gold"), (r.search, (["0"], 0), "k is 0")):
            with pytest.raises(RetrieverError, match=message) as caught:
                call(*arguments)
            assert caught.value.exit_status == 2
        for wrong in ("0 1", [None], ["0", 5]):
            for call in (lambda: r.search(wrong, 1), lambda: r.gold_ranks(wrong, [["0"]] * len(wrong))):
                with pytest.raises(RetrieverError, match="queries is the text|query 0 is None|query 1 is 5"):
                    call()
    with pytest.raises(RetrieverError, match="'x' occurs more than once"):
        PassageIds(["x", "y", "x"])


def test_queries_and_golds_may_be_generators():
    dense, bm25 = table_retriever([[3.0, 0], [2.0, 0]], list("01")), BM25Retriever(plain(["0 fox", "1 fox"]))
    for r in (dense, bm25, HybridRetriever(dense, bm25)):
        queries, golds = ["0", "1", "0"], [["0"], ["1"], ["1"]]
        assert len(r.search(queries, 2)) == 3 and r.search((q for q in queries), 2) == r.search(queries, 2)
        assert r.gold_ranks((q for q in queries), (g for g in golds)) == r.gold_ranks(queries, golds)


def test_half_an_emoji_in_a_query_is_a_sign_like_any_other(tmp_path):
    tiny_encoder(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), "cpu")
    vectors = encode(model, tokenizer, ["red \ufffd", "red"], encoder)
    dense = DenseRetriever(Index(PassageIds(["a", "b"]), [vectors.numpy()]), model, tokenizer, encoder)
    assert dense.search(["red \ud83d"], 2) == dense.search(["red \ufffd"], 2)
    assert dense.gold_ranks(["red \ud83d"], [["a"]]) == [1]


# ---------------------------------------------------------------------------------------------------------- dense index

def test_empty_corpus_is_an_error(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"))
    for build in (lambda: BM25Retriever([]), lambda: build_index(tmp_path / "i", [], *parts)):
        with pytest.raises(RetrieverError, match="no passages"):
            build()


def test_index_roundtrip_and_refusals(tmp_path):
    tiny_encoder(tmp_path / "e")
    tiny_encoder(tmp_path / "other", seed=1)
    model, tokenizer, encoder = load_encoder(str(tmp_path / "e"), device="cpu", passage_length=16)
    corpus = passages(50)
    index = build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20)
    assert [len(s) for s in index.shards] == [20, 20, 10] and index.encoded == 50
    assert index.shards[0].dtype == np.float16
    assert sum(s["truncated"] for s in index.meta["shards"]) == sum(len(p.contents) + 2 > 16 for p in corpus)
    expected = encode(model, tokenizer, [p.contents for p in corpus], encoder)
    assert np.abs(np.concatenate(index.shards) - expected.numpy()).max() < 2e-3
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "i").iterdir()}
    again = build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20)
    assert again.encoded == 0 and before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "i").iterdir()}

    one = build_index(tmp_path / "one", corpus, model, tokenizer, encoder)  # one shard = three shards
    queries, golds = ["red fox", "number7 tree", "wine"], [["p0003"], ["p0007", "p0001"], ["p0049"]]
    a, b = (DenseRetriever(i, model, tokenizer, encoder) for i in (index, one))
    assert a.gold_ranks(queries, golds) == b.gold_ranks(queries, golds)
    assert [[i for i, _ in h] for h in a.search(queries, 50)] == [[i for i, _ in h] for h in b.search(queries, 50)]
    assert "p0003" in a.passage_ids and "p9999" not in a.passage_ids

    from dataclasses import replace
    wrong = [(load_encoder(str(tmp_path / "other"), device="cpu", passage_length=16), "fingerprint"),
             ((model, tokenizer, replace(encoder, pooling="first")), "pooling"),
             ((model, tokenizer, replace(encoder, query_prefix="query: ")), "query_prefix"),
             ((model, tokenizer, replace(encoder, passage_prefix="x")), "passage_prefix"),
             ((model, tokenizer, replace(encoder, normalise=False)), "normalise"),
             ((model, tokenizer, replace(encoder, passage_length=17)), "passage_length")]
    for parts, message in wrong:
        for call in (lambda: open_index(tmp_path / "i", *parts), lambda: DenseRetriever(index, *parts),
                     lambda: build_index(tmp_path / "i", corpus, *parts, shard_size=20)):
            with pytest.raises(RetrieverError, match=message):
                call()
    with pytest.raises(RetrieverError, match="corpus"):
        build_index(tmp_path / "i", corpus[:-1] + passages(51)[-1:], model, tokenizer, encoder, shard_size=20)
    with pytest.raises(RetrieverError, match="python retriever.py"):
        open_index(tmp_path / "nowhere")

    (tmp_path / "i/shard-00001.npy").write_bytes(b"damaged")  # noticed, and only that is built again
    with pytest.raises(RetrieverError, match="damaged"):
        open_index(tmp_path / "i")
    assert build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20).encoded == 20
    meta = json.loads((tmp_path / "i/meta.json").read_text())
    (tmp_path / "i/meta.json").write_text(json.dumps(meta | {"complete": False}))
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(tmp_path / "i")


SLOW_BUILD = """
import sys, time, torch
torch.set_num_threads(1)
sys.path[:0] = [{root!r}]
import retriever
fast = retriever.encode_tokens
def slow(*args, **kwargs):
    time.sleep(0.05)
    return fast(*args, **kwargs)
retriever.encode_tokens = slow
parts = retriever.load_encoder({encoder!r}, device="cpu")
retriever.build_index({out!r}, {corpus!r}, *parts, shard_size=5)
"""


def test_killed_build_goes_on_byte_identical(tmp_path):
    tiny_encoder(tmp_path / "e")
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "killed"
    corpus.write_text("".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in passages(200)))
    code = SLOW_BUILD.format(root=str(ROOT), encoder=str(tmp_path / "e"), out=str(out), corpus=str(corpus))
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(out.glob("shard-*.npy"))) < 3 and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(out)
    (out / "shard-00009.npy.12345.tmp").write_bytes(b"half a shard")  # what a kill in the middle of a write leaves

    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed = build_index(out, str(corpus), *parts, shard_size=5)
        whole = build_index(tmp_path / "whole", str(corpus), *parts, shard_size=5)
    finally:
        torch.set_num_threads(threads)
    assert 0 < resumed.encoded <= 200 - 2 * 5 and whole.encoded == 200
    names = sorted(p.name for p in out.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert all((out / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


RANKS = """
import json, sys, torch
sys.path[:0] = [{root!r}]
torch.set_num_threads(1)
import distributed, retriever as R
cfg = R.RetrieverConfig(kind="dense", corpus={corpus!r}, index={index!r}, encoder={encoder!r}, shard_size=30,
                        device="cpu")
where = distributed.setup()
built = R._build(cfg)  # main without its own process group: a group can't be joined twice
cfg.across_ranks = True
r = R.open_retriever(cfg)
queries = (["red fox", "number7 tree", "wine"], ["green garden"])[where.rank]
golds = [["p0003"], ["p0129", "p0050"], ["p0077"]][:len(queries)]
hits = r.search(queries, 40)
few = [] if where.rank else queries
out = dict(built=built, ranks=r.gold_ranks(queries, golds, 130), hits=hits,
           none=[r.search(few, 40), r.gold_ranks(few, golds[:len(few)])])
assert len(r.shards) in (2, 3)
json.dump(out, open(f"{index}/{{where.rank}}.json", "w"))
distributed.cleanup()
"""


def test_workers_and_ranks_make_the_same_bytes(tmp_path):
    """Tokenised by processes, built and searched by two ranks: as by a single process that does all of it."""
    tiny_encoder(tmp_path / "e")
    corpus = write_corpus(tmp_path / "c.jsonl", passages(130))
    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        build_index(tmp_path / "one/dense", corpus, *parts, shard_size=30)
        build_index(tmp_path / "workers/dense", corpus, *parts, shard_size=30, workers=2)
    finally:
        torch.set_num_threads(threads)
    code = RANKS.format(root=str(ROOT), corpus=corpus, index=str(tmp_path / "ranks"), encoder=str(tmp_path / "e"))
    (tmp_path / "ranks.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           str(tmp_path / "ranks.py")], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads((tmp_path / f"ranks/{rank}.json").read_text()) for rank in (0, 1)]
    assert (said[0]["built"]["count"], said[0]["built"]["indexed"]) == (130, 130) and said[1]["built"] is None
    single = DenseRetriever(tmp_path / "one/dense", *parts)
    for rank, queries in enumerate((["red fox", "number7 tree", "wine"], ["green garden"])):
        golds = [["p0003"], ["p0129", "p0050"], ["p0077"]][:len(queries)]
        assert said[rank]["ranks"] == single.gold_ranks(queries, golds, 130)
        expected = [[i for i, _ in hits] for hits in single.search(queries, 40)]
        assert [[i for i, _ in hits] for hits in said[rank]["hits"]] == expected
        assert said[rank]["none"] == [[], []] if rank else said[rank]["none"][0] == said[rank]["hits"]
    for other in ("workers", "ranks"):
        names = sorted(p.name for p in (tmp_path / "one/dense").iterdir())
        assert names == sorted(p.name for p in (tmp_path / other / "dense").iterdir())
        for name in names:
            one, same = (tmp_path / folder / "dense" / name for folder in ("one", other))
            assert one.read_bytes() == same.read_bytes(), name


def test_full_disk_and_damage_are_told(tmp_path, monkeypatch):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    with monkeypatch.context() as m:
        m.setattr(dense_index.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        with pytest.raises(RetrieverError, match="disk has 0.0 GB free"):
            build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
    with monkeypatch.context() as m:
        save, saved = np.save, []

        def full(f, array):
            if len(saved) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            saved.append(len(array))
            save(f, array)
        m.setattr(dense_index.np, "save", full)
        with pytest.raises(OSError, match="No space left") as caught:
            build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
        assert caught.value.filename.endswith("shard-00001.npy")
    index = build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
    assert index.encoded == 30  # the shard that was whole stays
    path = tmp_path / "i/shard-00001.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    open_index(tmp_path / "i")  # sizes and shapes alone
    with pytest.raises(RetrieverError, match="shard-00001.npy has another checksum"):
        open_index(tmp_path / "i", verify=True)


def test_stored_ids_are_those_in_memory(tmp_path):
    rng = random.Random(0)
    ids = list(dict.fromkeys("".join(rng.choices("ab1é東_", k=rng.randint(1, 5))) for _ in range(700)))
    for run in (1, 7, 1000):  # sorted in runs that are merged
        assert write_ids(tmp_path, iter(ids), run) == len(ids)
        stored, plain_ids = read_ids(tmp_path), PassageIds(ids)
        assert list(stored) == ids and len(stored) == len(ids) and stored[-1] == ids[-1]
        assert stored.order.tolist() == plain_ids.order.tolist()
        assert all(stored.position(id_) == i for i, id_ in enumerate(ids))
        for missing in ("", "zz", "\ud83d", 5, "a" * 50):
            assert missing not in stored
    with pytest.raises(RetrieverError, match="'東' occurs more than once"):
        write_ids(tmp_path, ["b", "東", "a", "東"], 2)
    with pytest.raises(RetrieverError, match="no passages"):
        write_ids(tmp_path, [])


def test_faiss_indexes_beside_the_exact_one(tmp_path):
    """Flat finds what exact search finds; lists and codes find most of it; each opens with its own settings."""
    pytest.importorskip("faiss")
    tiny_encoder(tmp_path / "e")
    corpus = passages(400)
    cfg = RetrieverConfig(kind="dense", corpus=write_corpus(tmp_path / "c.jsonl", corpus), index=str(tmp_path / "i"),
                          encoder=str(tmp_path / "e"), device="cpu")
    queries, golds = [p.contents[:20] for p in corpus[:30]], [[p.id] for p in corpus[:30]]
    R.main(cfg)
    exact_retriever = open_retriever(cfg)
    truth, ranks = exact_retriever.search(queries, 10), exact_retriever.gold_ranks(queries, golds)
    for factory, least in (("Flat", 1.0), ("SQfp16", 0.95), ("IVF8,Flat", 0.9), ("HNSW16", 0.9),
                           ("OPQ8,IVF8,PQ8", 0.3)):
        cfg.faiss, cfg.nprobe = factory, 7
        with pytest.raises(RetrieverError, match="no FAISS index"):
            open_retriever(cfg)
        assert R.main(cfg)["indexed"] == 0  # the vectors are there
        r = open_retriever(cfg)
        assert r.faiss.meta["nprobe"] == 7
        if factory == "IVF8,Flat":
            assert r.faiss._index.nprobe == 7
            cfg.nprobe = 3
            assert open_retriever(cfg).faiss._index.nprobe == 3  # of this opening
            cfg.nprobe = None
            assert open_retriever(cfg).faiss._index.nprobe == 7  # as saved
        if factory == "HNSW16":
            cfg.ef_search = 33
            assert open_retriever(cfg).faiss._index.hnsw.efSearch == 33
            cfg.ef_search = None
            assert open_retriever(cfg).faiss._index.hnsw.efSearch == 128
        found = r.search(queries, 10)
        overlap = sum(len({i for i, _ in a} & {i for i, _ in b}) for a, b in zip(found, truth)) / 300
        assert overlap >= least, (factory, overlap)
        if factory == "Flat":
            assert sum(a != b for a, b in zip(r.gold_ranks(queries, golds), ranks)) <= 1  # another order of sums
            assert len(r.search(queries[:1], 5000)[0]) == 400 and r.search([], 3) == [] and r.gold_ranks([], []) == []
            assert r.gold_ranks(queries[:1], [["p0001", "p0000"]], cutoff=1) in ([1], [None])
    for name in ("nprobe", "ef_search"):
        with pytest.raises(RetrieverError, match=f"{name} is 0"):
            R.main(replace(cfg, **{name: 0}))
        with pytest.raises(RetrieverError, match=f"{name} is 0"):
            open_retriever(replace(cfg, faiss="Flat", **{name: 0}))
    file = tmp_path / "i/faiss-Flat/index.faiss"
    whole, cfg.faiss = file.read_bytes(), "Flat"
    for damage in (b"", whole[:100], b"x" * len(whole), None):
        file.write_bytes(damage) if damage is not None else file.unlink()
        with pytest.raises(RetrieverError, match="faiss-Flat/index.faiss is damaged.*build it again"):
            open_retriever(cfg)
    R.main(cfg)  # the build sees that the file is gone
    assert file.read_bytes() == whole
    cfg.faiss = "IVF9999,Flat"
    with pytest.raises(RetrieverError, match="9999 lists"):
        R.main(cfg)
    cfg.faiss = "Nonsense7"
    with pytest.raises(RetrieverError, match="factory string"):
        R.main(cfg)
    cfg.faiss = "Flat"
    meta = json.loads((tmp_path / "i/faiss-Flat/meta.json").read_text())
    (tmp_path / "i/faiss-Flat/meta.json").write_text(json.dumps(meta | {"corpus": "another"}))
    with pytest.raises(RetrieverError, match="corpus"):
        open_retriever(cfg)


def test_faiss_misses_are_no_passages():
    """FAISS fills up a short list with -1, which is not the last passage; a gold that it misses has no rank."""
    dense = table_retriever([[3.0, 0], [2.0, 0], [1.0, 0], [0, 5.0]], list("abcd"))
    dense.faiss = SimpleNamespace(search=lambda q, k: (np.array([[6.0, 6.0, -9.0]] * len(q), dtype=np.float32),
                                                       np.array([[1, 0, -1]] * len(q))))
    assert dense.search(["0"], 3) == [[("a", 6.0), ("b", 6.0)]]
    assert dense.gold_ranks(["0", "0", "0"], [["a"], ["d"], ["b", "a"]]) == [2, None, 1]


def test_two_builders_do_not_share_a_folder(tmp_path):
    tiny_encoder(tmp_path / "e")
    with only_writer(str(tmp_path / "i")), pytest.raises(DataError, match="another process"):
        build_index(tmp_path / "i", passages(3), *load_encoder(str(tmp_path / "e")))


def test_dense_ranks_do_not_depend_on_the_batch(tmp_path):
    """Batches change the last bits of a query's vector, so ranks may differ only where scores are that close."""
    tiny_ance(tmp_path / "e")
    model, tokenizer, encoder = load_encoder(str(tmp_path / "e"), device="cpu")
    corpus = passages(120, most=6)
    index = build_index(tmp_path / "i", corpus, model, tokenizer, encoder)
    rng = random.Random(1)
    queries = [" ".join(rng.choices(WORDS, k=rng.randint(1, 8))) for _ in range(25)]
    golds = [[rng.choice(corpus).id] for _ in queries]
    whole = DenseRetriever(index, model, tokenizer, encoder).gold_ranks(queries, golds, cutoff=120)
    single = DenseRetriever(index, model, tokenizer, encoder, batch_tokens=1)
    vectors = encode(model.double(), tokenizer, queries, encoder).double().numpy()
    truth = vectors @ np.concatenate(index.shards).astype(float).T
    model.float()
    compared = 0
    for query, gold, rank, scores in zip(queries, golds, whole, truth):
        row = index.ids.position(gold[0])
        if (np.abs(np.delete(scores, row) - scores[row]) > 1e-4).all():
            compared += 1
            assert single.gold_ranks([query], [gold], cutoff=120) == [rank] == [sorted_rank(scores, [row], 120)]
    assert compared > 20


def test_k_above_the_corpus_of_vectors():
    assert len(table_retriever([[1.0, 0], [0, 1.0]], ["a", "b"]).search(["0"], 10)[0]) == 2


# ------------------------------------------------------------------------------------------------------------- threads

def test_threads_equal_serial(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    corpus = passages(100)
    dense = DenseRetriever(build_index(tmp_path / "i", corpus, *parts), *parts)
    bm25 = BM25Retriever(corpus)
    rng = random.Random(9)
    work = [[" ".join(rng.choices(WORDS, k=3)) for _ in range(50)] for _ in range(8)]
    for r, step in ((bm25, 1), (dense, 10), (HybridRetriever(dense, bm25, depth=50), 25)):
        def job(queries):
            return [r.search(queries[i:i + step], 10) for i in range(0, 50, step)]
        serial, together = [job(queries) for queries in work], [None] * 8

        def run(i):
            together[i] = job(work[i])
        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert together == serial


# --------------------------------------------------------------------------------------------------------------- fusion

def test_rrf_by_hand():
    fused = rrf([[("a", 9.0), ("b", 8.0), ("c", 7.0)], [("c", 1.0), ("a", 0.5)]])
    assert fused == [("a", 1 / 61 + 1 / 62), ("c", 1 / 63 + 1 / 61), ("b", 1 / 62)]
    assert rrf([["x"], ["y"]]) == [("x", 1 / 61), ("y", 1 / 61)]  # ties by id
    assert rrf([["b", "a"], ["a", "b"]], k=1) == [("a", 1 / 2 + 1 / 3), ("b", 1 / 2 + 1 / 3)]
    assert rrf([["a", "b"], ["b"]], weights=[2, 0.5], k=0) == [("a", 2.0), ("b", 1.5)]
    assert rrf([["a", "b", "c"]], depth=1) == [("a", 1 / 61)]
    assert rrf([["a", "a", "b"]]) == [("a", 1 / 61), ("b", 1 / 62)] and rrf([[], []]) == []
    with pytest.raises(RetrieverError, match="weights"):
        rrf([["a"]], weights=[1, 2])


def test_hybrid_fuses_both_and_ranks_by_the_fused_order():
    texts = ["red fox", "blue fox", "green dog", "wine"]
    dense = table_retriever([[1.0, 0], [2.0, 0], [3.0, 0], [3.0, 0]], list("0123"))
    bm25 = BM25Retriever(plain(texts))

    hybrid = HybridRetriever(dense, bm25)
    assert hybrid.search(["3"], 10)[0] == [("2", 1 / 61), ("3", 1 / 62), ("1", 1 / 63), ("0", 1 / 64)]
    assert hybrid.gold_ranks(["3", "3", "3"], [["2"], ["1"], ["0", "3"]]) == [2, 3, 2]  # "2" ties with "3"
    dense.hits = lambda queries, k: [[("0", 2.0), ("1", 1.0)]] * len(queries)
    dense.search = dense.hits
    assert [i for i, _ in hybrid.search(["blue fox"], 10)[0]] == ["0", "1"]  # 1/61+1/62 twice: the id decides
    assert hybrid.gold_ranks(["blue fox"] * 3, [["0"], ["1"], ["2"]]) == [2, 2, None]  # the tie counts against
    dense.hits = lambda queries, k: [None] * len(queries)
    assert hybrid.gold_ranks(["fox"], [["0"]])[0] is FAILED
    for change, message in (({"depth": 0}, "depth is 0"), ({"weights": [1.0]}, "weights"),
                            ({"weights": [1.0, -1.0]}, "weights"), ({"k": -1}, "rrf_k is -1"),
                            ({"k": math.nan}, "rrf_k is nan")):
        with pytest.raises(RetrieverError, match=message):
            HybridRetriever(dense, bm25, **change)
    with pytest.raises(RetrieverError, match="one corpus"):
        HybridRetriever(dense, BM25Retriever(plain(texts[:3])))
    other = [Passage(f"{p.id}x", p.title, p.text) for p in plain(texts)]
    with pytest.raises(RetrieverError, match="their ids differ"):
        HybridRetriever(dense, BM25Retriever(other))


# ---------------------------------------------------------------------------------------------------------- entry point

def write_corpus(path: Path, corpus: list[Passage]) -> str:
    path.write_text("".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in corpus))
    return str(path)


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_an_index_of_another_corpus_is_not_opened(tmp_path, kind):
    tiny_encoder(tmp_path / "e")
    path, corpus = tmp_path / "c.jsonl", passages(20)
    cfg = RetrieverConfig(kind=kind, corpus=write_corpus(path, corpus), index=str(tmp_path / "i"),
                          encoder=str(tmp_path / "e"), device="cpu")
    R.main(cfg)
    open_retriever(replace(cfg, verify=True))
    folder = tmp_path / "i" / ("bm25" if kind == "bm25" else "dense")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["corpus_bytes"] == path.stat().st_size
    longer = [*corpus[:-1], Passage(corpus[-1].id, "", "another text, and longer than all others by a good deal")]
    write_corpus(path, longer)
    with pytest.raises(RetrieverError, match=f"{folder} was not built from {path}.*again from this corpus"):
        open_retriever(cfg)
    open_retriever(replace(cfg, corpus="")) if kind == "bm25" else None
    write_corpus(path, [Passage(p.id, p.title, p.text.replace("red", "eed")) for p in corpus])
    open_retriever(cfg)  # as long, and nobody asked to read it
    with pytest.raises(RetrieverError, match="was not built from.*again from this corpus"):
        open_retriever(replace(cfg, verify=True))
    write_corpus(path, corpus)
    path.write_text(path.read_text().replace("\n", "\n\n"))  # another file of the same passages
    before = retriever_settings(cfg)
    open_retriever(cfg)
    assert R.main(cfg)["indexed"] == 0 and retriever_settings(cfg)["retriever.index dense"] == before["retriever.index dense"]
    for name in ("bm25", "dense"):
        if (tmp_path / "i" / name).is_dir():  # as an index without the size
            (tmp_path / "i" / name / "meta.json").write_text(json.dumps(
                {k: v for k, v in json.loads((tmp_path / "i" / name / "meta.json").read_text()).items()
                 if k != "corpus_bytes"}))
    write_corpus(path, longer)
    open_retriever(cfg)
    with pytest.raises(RetrieverError, match="nowhere: No such file"):
        open_retriever(replace(cfg, corpus=str(tmp_path / "nowhere")))


def test_empty_and_damaged_files_are_named_and_made_again(tmp_path):
    tiny_encoder(tmp_path / "e")
    cfg = RetrieverConfig(kind="hybrid", corpus=write_corpus(tmp_path / "c.jsonl", passages(20)),
                          index=str(tmp_path / "i"), encoder=str(tmp_path / "e"), device="cpu")
    R.main(cfg)
    for folder, opened in ((tmp_path / "i/dense", open_index), (tmp_path / "i/bm25", BM25Retriever.open)):
        for path in sorted([*folder.glob("*.npy"), *folder.glob("*.txt")]):
            whole = path.read_bytes()
            for damage in (b"", b"rubbish", whole[:-1], whole[:40]):
                path.write_bytes(damage)
                with pytest.raises(RetrieverError, match=f"{folder} is damaged.*{path.name}.*build"):
                    opened(folder)
            if path.name.startswith(("ids.", "shard-")):
                R.main(cfg)  # begins anew with that file
                assert path.read_bytes() == whole
            path.write_bytes(whole)
    meta = json.loads((tmp_path / "i/dense/meta.json").read_text())
    (tmp_path / "i/dense/meta.json").write_text(json.dumps(meta | {"complete": False, "shards": []}))
    (tmp_path / "i/dense/shard-00000.json").write_text("")
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(tmp_path / "i/dense")
    assert R.main(cfg)["indexed"] == 20


def test_main_builds_and_open_retriever_opens(tmp_path):
    tiny_encoder(tmp_path / "e")
    corpus = passages(30)
    cfg = RetrieverConfig(kind="hybrid", corpus=write_corpus(tmp_path / "c.jsonl", corpus), index=str(tmp_path / "i"),
                          encoder=str(tmp_path / "e"), shard_size=16, device="cpu")
    result = R.main(cfg)
    assert (result["count"], result["dim"], result["indexed"]) == (30, 32, 30) and result["bytes"] > 30 * 32 * 2
    assert R.main(cfg)["indexed"] == 0
    in_memory = open_retriever(RetrieverConfig(corpus=cfg.corpus))
    queries, golds = ["red fox", "number3"], [["p0001"], ["p0003"]]
    for kind in ("bm25", "dense", "hybrid"):
        cfg.kind = kind
        r = open_retriever(cfg)
        assert len(r.search(queries, 5)) == 2 and len(r.gold_ranks(queries, golds)) == 2 and "p0003" in r.passage_ids
        if kind == "bm25":
            assert r.gold_ranks(queries, golds) == in_memory.gold_ranks(queries, golds)
    cfg.kind, cfg.query_prefix = "dense", "query: "
    with pytest.raises(RetrieverError, match="query_prefix"):
        open_retriever(cfg)
    for bad, message in ((RetrieverConfig(), "kind=bm25 needs an index"),
                         (RetrieverConfig(kind="dense"), "needs an index"),
                         (RetrieverConfig(kind="dense", index=str(tmp_path / "x")), "python retriever.py"),
                         (RetrieverConfig(index=str(tmp_path / "x")), "python retriever.py")):
        with pytest.raises(RetrieverError, match=message):
            open_retriever(bad)
    with pytest.raises(RetrieverError, match="corpus"):
        R.main(RetrieverConfig(kind="bm25", index=str(tmp_path / "i2")))


def test_an_index_is_not_built_into_a_training_run(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", passages(3))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("group_size: 8\n")
    with pytest.raises(ConfigError, match="made by grpo.py"):
        R.main(RetrieverConfig(corpus=corpus, index=str(tmp_path / "run")))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]
    R.main(RetrieverConfig(corpus=corpus, index=str(tmp_path / "index")))
    with pytest.raises(ConfigError, match="made by retriever.py"):
        claim_folder(str(tmp_path / "index"), "grpo.py")
    assert R.main(RetrieverConfig(corpus=corpus, index=str(tmp_path / "index")))["indexed"] == 0


def test_command_line(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", passages(9))
    command = [sys.executable, str(ROOT / "retriever.py"), "kind=bm25", f"corpus={corpus}", f"index={tmp_path / 'i'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["count"] == 9


def test_minilm_tells_paraphrases():
    """all-MiniLM-L6-v2, where it is at hand: the cosine of a paraphrase is far above that of a stranger."""
    folder = os.environ.get("NANO_MINILM", "")
    if not folder:
        pytest.skip("set NANO_MINILM to the folder of all-MiniLM-L6-v2")
    parts = load_encoder(folder, device="cpu")
    assert parts[2].passage_length == 256
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The cheetah runs."]
    a, b, c = encode(*parts[:2], texts, parts[2])
    assert a @ b > 0.6 > 0.3 > a @ c and abs(float(a.norm()) - 1) < 1e-5


def test_an_encoders_missing_folder_is_called_one(tmp_path):
    with pytest.raises(RetrieverError, match="no' can't be loaded .there is no such folder"):
        load_encoder(f"{tmp_path}/no")