"""Are pretrained weights really used? ANCE's, tensor by tensor, and `retriever.py check`.

Run: python -m pytest tests/test_check.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_encoder
from tiny_retrieval import tiny_ance

import retriever
from retriever import ANCE, RetrieverConfig, check, encode, load_encoder
from search.passages import RetrieverError
from search.probes import PROBES

ROOT = Path(__file__).resolve().parent.parent


# What lies in the two public checkpoints beside roberta.*, embeddingHead.* and norm.*: Pyserini's
# has the pooler that its RobertaModel makes, the one of ConvDR's training code a classifier.
CASTORINI = {
    "roberta.pooler.dense.weight": torch.ones(32, 32),
    "roberta.pooler.dense.bias": torch.ones(32),
    "roberta.embeddings.position_ids": torch.arange(64)[None],
}
AD_HOC = {
    "classifier.dense.weight": torch.ones(32, 32),
    "classifier.dense.bias": torch.ones(32),
    "classifier.out_proj.weight": torch.ones(2, 32),
    "classifier.out_proj.bias": torch.ones(2),
    "roberta.embeddings.position_ids": torch.arange(64)[None],
}


@pytest.mark.parametrize("extra", [CASTORINI, AD_HOC, {}], ids=["castorini", "ad-hoc", "bare"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_every_tensor_of_the_file_is_in_the_model(tmp_path, extra, file):
    state = tiny_ance(tmp_path, seed=5, file=file, extra=extra)
    torch.manual_seed(99)  # what a fresh model would draw
    model, _, encoder = load_encoder(str(tmp_path), device="cpu")
    loaded = model.state_dict()
    assert isinstance(model, ANCE) and encoder.pooling == "ance"
    assert set(loaded) == set(state) - set(extra)
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


def test_no_tensor_of_the_file_is_ignored(tmp_path):
    """A change of any single tensor (of the layers that a token passes) changes the vectors."""
    tiny_ance(tmp_path, seed=5)
    state = load_file(tmp_path / "model.safetensors")
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu")
    before = encode(model, tokenizer, ["red fox", "blue"], encoder)
    # a bias of the keys shifts all scores of a query alike: softmax does not see it
    unseen = [name for name in state if name.endswith("attention.self.key.bias")]
    for name in state:
        changed = state | {
            name: state[name] + 0.5 * torch.randn(state[name].shape, generator=torch.manual_seed(1))
        }
        save_file(changed, tmp_path / "model.safetensors")
        model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu")
        after = encode(model, tokenizer, ["red fox", "blue"], encoder)
        assert bool((after - before).abs().max() > 1e-4) != (name in unseen), name


@pytest.mark.parametrize(
    "extra, said",
    [
        ({"lm_head.bias": torch.ones(3)}, "Unexpected key.*lm_head.bias"),
        ({"classifiers.weight": torch.ones(3)}, "Unexpected key.*classifiers.weight"),
        ({"ance_encoder.norm.bias": torch.ones(32)}, "Unexpected key.*ance_encoder.norm.bias"),
    ],
)
def test_beside_a_classifier_nothing_is_allowed(tmp_path, extra, said):
    tiny_ance(tmp_path, extra=extra)
    with pytest.raises(RetrieverError, match=said):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize("query", [True, False])
def test_ance_gets_both_special_tokens_whatever_is_cut(tmp_path, query):
    """<s> first and </s> last, for queries and passages, short or too long; the text cased."""
    tiny_ance(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), device="cpu")
    seen = []
    model.forward = lambda ids, mask: (
        seen.extend(row[m.bool()].tolist() for row, m in zip(ids, mask)),
        torch.zeros(len(ids), 32),
    )[1]
    encode(model, tokenizer, ["", "Ab", "x" * 60, "y" * 500], encoder, query=query)
    assert sorted(len(row) for row in seen) == [2, 4, 62, 62]
    assert all(
        row[0] == tokenizer.bos_token_id == 0 and row[-1] == tokenizer.eos_token_id == 2
        for row in seen
    )
    cased = next(row for row in seen if len(row) == 4)
    assert tokenizer.convert_ids_to_tokens(cased[1:3]) == ["A", "b"]


def test_check_of_an_untrained_encoder_warns(tmp_path, capsys):
    tiny_encoder(tmp_path / "e")
    result = check(RetrieverConfig(encoder=f"{tmp_path}/e", device="cpu"))
    printed = capsys.readouterr()
    assert result["random_looking"] and "looks random" in printed.err
    assert printed.out.count(" of 16 |") == len(PROBES) == result["questions"]


def test_check_of_an_encoder_that_ranks(monkeypatch, capsys):
    """Vectors given by hand: the ranks, the count and the MRR are those of these vectors."""
    model = torch.nn.Linear(1, 1)
    model.config = type("C", (), {"hidden_size": 16})
    monkeypatch.setattr(retriever, "_load", lambda cfg: (model, None, retriever.MEAN_ENCODER, 1))
    vectors = {
        text: torch.eye(16)[i]
        for i, text in enumerate([p[1] for p in PROBES] + [p[2] for p in PROBES])
    }
    vectors |= {
        p[0]: torch.eye(16)[i] + 2 * torch.eye(16)[8 + i] for i, p in enumerate(PROBES)
    }  # own trap above own answer
    vectors[PROBES[0][0]] = torch.eye(16)[
        3
    ]  # one question that finds another's answer: its own ties with all the rest
    monkeypatch.setattr(
        retriever, "encode", lambda m, t, texts, *a, **k: torch.stack([vectors[x] for x in texts])
    )
    result = check(RetrieverConfig(encoder="x"))
    assert (result["above_strangers"], result["mrr"], result["random_looking"]) == (
        7,
        round((7 / 2 + 1 / 16) / 8, 4),
        False,
    )
    assert capsys.readouterr().err == ""


def test_check_knows_whose_index_it_is(tmp_path, capsys):
    tiny_encoder(tmp_path / "a")
    tiny_encoder(tmp_path / "b", seed=1)
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "one"}\n')
    retriever.main(
        RetrieverConfig(
            kind="dense",
            corpus=f"{tmp_path}/c.jsonl",
            index=f"{tmp_path}/i",
            encoder=f"{tmp_path}/a",
        )
    )
    check(RetrieverConfig(encoder=f"{tmp_path}/a", index=f"{tmp_path}/i"))
    with pytest.raises(RetrieverError, match="fingerprint"):
        check(RetrieverConfig(encoder=f"{tmp_path}/b", index=f"{tmp_path}/i"))


def test_check_on_the_command_line(tmp_path):
    tiny_encoder(tmp_path / "e5-tiny")
    done = subprocess.run(
        [sys.executable, str(ROOT / "retriever.py"), "check", f"encoder={tmp_path}/e5-tiny"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout.splitlines()[-1])["questions"] == 8
        and "query_prefix='query: ', passage_prefix='passage: '" in done.stdout
    )
    with pytest.raises(RetrieverError, match="give encoder=FOLDER"):
        check(RetrieverConfig())


def test_check_of_minilm():
    folder = os.environ.get("NANO_MINILM", "")
    if not folder:
        pytest.skip("set NANO_MINILM to the folder of all-MiniLM-L6-v2")
    result = check(RetrieverConfig(encoder=folder, device="cpu"))
    assert result["above_strangers"] == 8 and not result["random_looking"]
