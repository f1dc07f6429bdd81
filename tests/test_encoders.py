"""Encoders against modules put together by hand; what is no encoder is refused by name."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_encoder, tiny_lm
from tiny_retrieval import (
    NumberTokenizer,
    WordVectors,
    passages,
    tiny_ance,
    write_corpus,
)
from transformers import (
    BertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)

import retriever as R
from retriever import (
    ANCE,
    Encoder,
    build_index,
    encode,
    load_encoder,
    mean_pool,
    truncate,
)
from search.exact import exact_search
from search.passages import RetrieverError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_ance_forward_is_roberta_linear_norm(tmp_path, dtype, tolerance):
    state = tiny_ance(tmp_path)
    model = ANCE.from_pretrained(str(tmp_path)).to(dtype)
    roberta = (
        RobertaModel(RobertaConfig.from_pretrained(tmp_path), add_pooling_layer=False)
        .eval()
        .to(dtype)
    )
    roberta.load_state_dict(
        {k.removeprefix("roberta."): v for k, v in state.items() if k.startswith("roberta.")}
    )
    ids = torch.tensor([[0, 10, 11, 12, 2], [0, 99, 2, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        first = roberta(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].double()
        linear = (
            first @ state["embeddingHead.weight"].double().T + state["embeddingHead.bias"].double()
        )
        centred = linear - linear.mean(1, keepdim=True)
        by_hand = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
        by_hand = by_hand * state["norm.weight"].double() + state["norm.bias"].double()
        assert (model(ids, mask).double() - by_hand).abs().max() < tolerance


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_ance_is_recognised_and_unused_tensors_allowed(tmp_path, file):
    extra = {
        "classifier.dense.weight": torch.ones(2, 2),
        "roberta.pooler.dense.bias": torch.ones(3),
        "roberta.embeddings.position_ids": torch.arange(64)[None],
    }
    tiny_ance(tmp_path, file=file, extra=extra)
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu")
    assert isinstance(model, ANCE) and encoder.pooling == "ance" and not encoder.normalise
    assert (encoder.query_length, encoder.passage_length) == (
        62,
        62,
    )  # 64 positions, two of them for padding
    long = encode(model, tokenizer, ["x" * 500, "x" * 60])
    assert torch.allclose(
        long[0], long[1], atol=1e-5
    )  # 62 tokens: <s>, 60 bytes, </s>; both ends are kept


@pytest.mark.parametrize(
    "change,names",
    [
        ({"drop": "norm.bias"}, 'Missing key.*"norm.bias"'),
        (
            {"drop": "roberta.encoder.layer.1.output.dense.weight"},
            "Missing key.*roberta.encoder.layer.1.output.dense.weight",
        ),
        ({"extra": {"head.weight": torch.ones(1)}}, "Unexpected key.*head.weight"),
        ({"extra": {"norm.bias": torch.ones(7)}}, "size mismatch for norm.bias"),
    ],
)
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
    vectors = encode(
        WordVectors(torch.eye(3)), NumberTokenizer(), ["", "1"]
    )  # a text without any token
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
    model, tokenizer, encoder = load_encoder(
        str(tmp_path), device="cpu", passage_length=8, query_length=10
    )
    cut = []
    encode(model, tokenizer, ["abcdef", "abcdefg", "abcdefg", "a"], encoder, cut=cut)
    assert cut == [False, True, True, False]
    encode(model, tokenizer, ["abcdefg"], encoder, query=True, cut=cut)
    assert cut[4:] == [False]


def test_mpnet_counts_positions_as_roberta_does(tmp_path):
    tiny_ance(tmp_path)  # its tokenizer
    config = MPNetConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=1,
    )
    (tmp_path / "model.safetensors").unlink()
    MPNetModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), "cpu")
    assert (encoder.query_length, encoder.passage_length) == (62, 62)
    assert torch.isfinite(encode(model, tokenizer, ["x" * n for n in (60, 61, 200)], encoder)).all()


def test_cosine_model_normalises_both_sides():
    table = torch.tensor([[1.0, 0], [10.0, 10.0], [0.9, 0.1]])
    vectors = encode(
        WordVectors(table), NumberTokenizer(), ["0", "1", "2"], Encoder("mean", normalise=True)
    )
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
    """Texts in one row, each seeing itself alone, have the vectors of padded ones.

    The kernel exists on GPUs alone; here stands what it computes, text by text.
    """

    def attend(query, key, value, ends, _, longest, __, scale):
        out, ends = torch.zeros_like(query), ends.tolist()  # (T, H, d)
        assert max(np.diff(ends)) <= longest
        for first, last in zip(ends, ends[1:]):
            q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
            out[first:last] = ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1)
        return out

    monkeypatch.setattr("search.packed.varlen_attn", attend)
    (tiny_ance if kind == "ance" else tiny_encoder)(tmp_path)
    model, tokenizer, encoder = load_encoder(
        str(tmp_path), device="cpu", pooling=None if kind == "ance" else kind
    )
    texts = [p.contents[:50] for p in passages(40)] + ["x", "x", "y" * 50]
    expected = encode(model, tokenizer, texts, encoder)
    tokens = [np.array(ids, dtype=np.int32) for ids in tokenizer(texts)["input_ids"]]
    before = model.config._attn_implementation
    for budget in (1, 200, 10_000):
        packed = R.PackedModel(model, budget, 64)
        assert torch.allclose(
            R.encode_tokens(model, tokens, encoder, 0, budget, packed), expected, atol=1e-5
        )
        packed.compiled = True  # the one shape that compilation needs, here without compiling
        assert torch.allclose(
            R.encode_tokens(model, tokens, encoder, 0, budget, packed), expected, atol=1e-5
        )
    assert model.config._attn_implementation == before
    runs = R.PackedModel(model, 200, 64).batches([len(t) for t in tokens])
    assert [i for r in runs for i in range(r.start, r.stop)] == list(range(43))


def test_a_text_without_a_token_has_a_vector(tmp_path):
    tiny_encoder(tmp_path)
    model, _, encoder = load_encoder(str(tmp_path), device="cpu", pooling="mean")
    none = [np.array([], dtype=np.int32)]
    assert torch.isfinite(R.encode_tokens(model, none, encoder, 0)).all()


@pytest.mark.gpu
def test_encoding_on_a_gpu_is_near_float32_on_a_cpu(tmp_path):
    for make in (tiny_ance, tiny_encoder):
        make(tmp_path / make.__name__)
        model, tokenizer, encoder = load_encoder(str(tmp_path / make.__name__), device="cpu")
        corpus = passages(300)
        expected = F.normalize(
            encode(model, tokenizer, [p.contents for p in corpus], encoder), dim=1
        )
        queries = F.normalize(
            encode(model.cuda(), tokenizer, [p.contents for p in corpus], encoder), dim=1
        )
        assert (queries * expected).sum(1).min() > 0.99
        path = write_corpus(tmp_path / "corpus.jsonl", corpus)
        index = build_index(
            tmp_path / f"i-{make.__name__}",
            path,
            model,
            tokenizer,
            encoder,
            shard_size=128,
            batch_tokens=2048,
            workers=2,
        )
        vectors = F.normalize(torch.from_numpy(np.concatenate(index.shards)).float(), dim=1)
        assert (vectors * expected).sum(1).min() > 0.99
        again = build_index(
            tmp_path / f"j-{make.__name__}",
            path,
            model,
            tokenizer,
            encoder,
            shard_size=128,
            batch_tokens=2048,
            workers=2,
        )
        assert all(
            np.array_equal(a, b) for a, b in zip(index.shards, again.shards)
        )  # what a resumed build rests on


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
    assert (e5.query_prefix, e5.passage_prefix, e5.pooling, e5.normalise) == (
        "query: ",
        "passage: ",
        "mean",
        True,
    )
    assert load_encoder(files("some5e5x"))[2].query_prefix == ""
    assert load_encoder(files("e5/mini"))[2].query_prefix == ""  # the name of a folder above it
    cached = files("models--intfloat--e5-small/snapshots/0a1b")
    assert (
        load_encoder(cached)[2].query_prefix
        == load_encoder(files("upper/E5-x") + "/")[2].query_prefix
        == "query: "
    )
    mini = load_encoder(files("mini", ["Transformer", "Pooling", "Normalize"], "mean_tokens", 256))[
        2
    ]
    assert (mini.pooling, mini.normalise, mini.query_length, mini.passage_length) == (
        "mean",
        True,
        256,
        256,
    )
    cls = load_encoder(files("cls", ["Transformer", "Pooling"], "cls_token"))[2]
    assert (cls.pooling, cls.normalise) == ("first", False)
    for mode, pooling in (
        ("mean", "mean"),
        ("cls", "first"),
        ("lasttoken", None),
        (["mean", "max"], None),
    ):
        modern = files(
            f"modern-{pooling}-{len(mode)}", ["Transformer", "Pooling"], "unused"
        )  # as since 5.4
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


def test_encoders_block_copies_out(tmp_path):
    """With the third-party imports of its file and a RetrieverError it runs in a bare folder."""
    text = (ROOT / "retriever.py").read_text("utf-8")
    start, end = (
        text.index(f"# {'-' * n} {name}\n") for n, name in ((84, "encoders"), (81, "dense index"))
    )
    own = {p.stem for p in ROOT.iterdir()}
    imports = [
        node
        for node in ast.parse(text[:start]).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    foreign = [
        node
        for node in imports
        if getattr(node, "module", node.names[0].name).split(".")[0] not in own
    ]
    head = (
        "".join(f"{ast.unparse(node)}\n" for node in foreign)
        + "class RetrieverError(ValueError): pass\n"
    )
    (tmp_path / "copied.py").write_text(head + text[start:end], "utf-8")
    tiny_ance(tmp_path / "ance")
    tiny_encoder(tmp_path / "bert")
    code = (
        "import copied\nfor name in ('ance', 'bert'):\n"
        "    m, t, e = copied.load_encoder(name, 'cpu')\n"
        "    print(e.pooling, *copied.encode(m, t, ['a', 'b', 'a'], e).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert done.stdout == "ance 3 32\nmean 3 32\n", done.stderr


@pytest.mark.parametrize(
    "make, missing",
    [
        (tiny_ance, "tokenizer.json and no merges.txt and no vocab.json"),
        (tiny_encoder, "tokenizer.json and no vocab.txt"),
    ],
)
def test_an_encoder_without_tokenizer_files_is_refused(tmp_path, make, missing):
    """The library would invent a vocabulary of five tokens, and the index would rank nothing."""
    make(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(RetrieverError, match=f"{tmp_path}.*"):
            load_encoder(str(tmp_path), "cpu")
    with pytest.raises(
        RetrieverError, match=f"{tmp_path} has no {missing}: its tokenizer is missing"
    ):
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
    for part, config in (
        (
            "config.json",
            {"auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}, "model_type": "own"},
        ),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"},
        ),
    ):
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
        (tmp_path / "e/pytorch_model.bin").write_bytes(
            pickle.dumps({"x": Command(tmp_path / "ran")}, 2)
        )
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        (tmp_path / "e/config.json").write_text("{")
    with pytest.raises(RetrieverError, match=f"encoder '{tmp_path}/e' can't be loaded") as caught:
        load_encoder(str(tmp_path / "e"), "cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_minilm_tells_paraphrases():
    """all-MiniLM-L6-v2, where it is at hand: a paraphrase is far nearer than a stranger."""
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
