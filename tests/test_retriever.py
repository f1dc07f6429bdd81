"""Search, gold ranks and fusion against brute force; the retriever of a configuration."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_encoder
from tiny_retrieval import (
    WORDS,
    passages,
    plain,
    sorted_rank,
    table_retriever,
    write_corpus,
)

import retriever as R
from config import ConfigError
from data import DataError, Passage
from retriever import (
    DenseRetriever,
    Index,
    RetrieverConfig,
    build_index,
    encode,
    load_encoder,
    open_retriever,
    retriever_settings,
)
from runs import claim_folder
from search import exact
from search.bm25 import BM25Retriever
from search.exact import FAILED, exact_gold_ranks, exact_search
from search.fusion import HybridRetriever, best_rank, rrf
from search.passages import PassageIds, RetrieverError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("shards", [1, 3])
def test_search_equals_brute_force(monkeypatch, shards):
    monkeypatch.setattr(exact, "CPU_BLOCK", 128 * 24)
    rng = np.random.default_rng(shards)
    vectors = (rng.integers(-60, 61, (700, 24)) / 16).astype(
        np.float16
    )  # sums that float32 holds exactly
    queries = (rng.integers(-60, 61, (37, 24)) / 16).astype(np.float32)
    truth = queries.astype(np.float64) @ vectors.astype(np.float64).T
    order = torch.from_numpy(rng.permutation(700))
    for k in (1, 10, 700, 5000):
        scores, rows, failed = exact_search(
            torch.from_numpy(queries), np.array_split(vectors, shards), k, order
        )
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
        _, rows, _ = exact_search(
            torch.from_numpy(queries), [vectors[:333], vectors[333:]], k, torch.from_numpy(order)
        )
        for q in range(9):
            truth = queries[q].astype(int) @ vectors.astype(int).T
            assert rows[q].tolist() == sorted(range(500), key=lambda i: (-truth[i], order[i]))[:k]


def test_gold_ranks_equal_full_sort(monkeypatch):
    monkeypatch.setattr(exact, "CPU_BLOCK", 64 * 4)
    passes, count = [], exact._count
    monkeypatch.setattr(exact, "_count", lambda *a: passes.append(1) or count(*a))
    rng = np.random.default_rng(7)
    vectors = rng.integers(-3, 4, (400, 4)).astype(np.float16)
    queries = rng.integers(-3, 4, (60, 4)).astype(np.float32)
    golds = [
        rng.integers(0, 400, rng.integers(1, 5)).tolist() for _ in range(60)
    ]  # may repeat an id
    truth = queries.astype(int) @ vectors.astype(int).T
    worst = max(sorted_rank(truth[q], golds[q], 400) for q in range(60))
    for shards in (1, 2, 5):
        for cutoff in (1, 20, worst - 1, worst, 400):
            got = exact_gold_ranks(
                torch.from_numpy(queries), np.array_split(vectors, shards), golds, cutoff
            )
            assert got == [sorted_rank(truth[q], golds[q], cutoff) for q in range(60)]
    assert len(passes) == 3 * 5  # where nothing is rounded, the golds' own scores spare a second
    part = torch.from_numpy(queries), [vectors[100:200]]  # of one rank; others hold 99 and 200
    for held, other in ((100, 200), (199, 99)):
        got = exact_gold_ranks(*part, [[held, other]] * 60, 100, first=100)
        assert got == [sorted_rank(truth[q][100:200], [held - 100], 100) for q in range(60)]


def test_gold_ranks_with_real_numbers_and_twins(monkeypatch):
    """Twins of the gold in other blocks and shards tie with it bit for bit."""
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
            got = exact_gold_ranks(
                torch.from_numpy(queries), np.array_split(vectors, shards), golds, 900
            )
            assert got == [sorted_rank(np.round(truth[q], 9), golds[q], 900) for q in range(n)]


def test_gold_score_is_confirmed_by_the_pass(monkeypatch):
    """A first guess that is off by rounding (here: by far) is corrected by the pass."""
    vectors = np.array([[1, 0], [0, 1], [1, 1], [2, 2]], dtype=np.float16)
    monkeypatch.setattr(exact, "_take", lambda shards, rows: torch.zeros(len(rows), 2))
    queries, golds = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), [[2], [0]]  # the zeros are right
    assert exact_gold_ranks(queries, [vectors], golds) == [2, 4]
    count, fall = exact._count, iter((1, 2))

    def unsteady(*arguments):
        others, failed, seen = count(*arguments)
        return others, failed, seen - next(fall)

    monkeypatch.setattr(exact, "_count", unsteady)
    with pytest.raises(RuntimeError, match="can't rank"):
        exact_gold_ranks(queries, [vectors], golds)


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
    with pytest.raises(RuntimeError, match="1024.*768"):
        exact_search(torch.zeros(1, 1024), [np.zeros((2, 768), np.float16)], 1, torch.arange(2))
    with pytest.raises(RuntimeError, match="1024.*768"):
        exact_gold_ranks(torch.zeros(1, 1024), [np.zeros((2, 768), np.float16)], [[0]])


def test_equal_scores_keep_one_order():
    for shards in (1, 2, 4):
        dense = table_retriever([[1.0, 0]] * 4, ["c", "a", "d", "b"], shards)
        for batch in (["0"], ["0", "1"], ["0"] * 3):
            assert [[i for i, _ in hits] for hits in dense.search(batch, 2)] == [["a", "b"]] * len(
                batch
            )
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
        for call, arguments, message in (
            (r.gold_ranks, (["0"], [["z"]]), "'z'"),
            (r.gold_ranks, (["0"], []), "1 queries"),
            (r.gold_ranks, (["0"], [[]]), "no gold"),
            (r.search, (["0"], 0), "k is 0"),
        ):
            with pytest.raises(RetrieverError, match=message) as caught:
                call(*arguments)
            assert caught.value.exit_status == 2
        for wrong in ("0 1", [None], ["0", 5]):
            for call in (
                lambda: r.search(wrong, 1),
                lambda: r.gold_ranks(wrong, [["0"]] * len(wrong)),
            ):
                with pytest.raises(
                    RetrieverError, match="queries is the text|query 0 is None|query 1 is 5"
                ):
                    call()
    with pytest.raises(RetrieverError, match="'x' occurs more than once"):
        PassageIds(["x", "y", "x"])


def test_queries_and_golds_may_be_generators():
    dense, bm25 = (
        table_retriever([[3.0, 0], [2.0, 0]], list("01")),
        BM25Retriever(plain(["0 fox", "1 fox"])),
    )
    for r in (dense, bm25, HybridRetriever(dense, bm25)):
        queries, golds = ["0", "1", "0"], [["0"], ["1"], ["1"]]
        assert len(r.search(queries, 2)) == 3 and r.search((q for q in queries), 2) == r.search(
            queries, 2
        )
        assert r.gold_ranks((q for q in queries), (g for g in golds)) == r.gold_ranks(
            queries, golds
        )


def test_half_an_emoji_in_a_query_is_a_sign_like_any_other(tmp_path):
    tiny_encoder(tmp_path)
    model, tokenizer, encoder = load_encoder(str(tmp_path), "cpu")
    vectors = encode(model, tokenizer, ["red \ufffd", "red"], encoder)
    dense = DenseRetriever(
        Index(PassageIds(["a", "b"]), [vectors.numpy()]), model, tokenizer, encoder
    )
    assert dense.search(["red \ud83d"], 2) == dense.search(["red \ufffd"], 2)
    assert dense.gold_ranks(["red \ud83d"], [["a"]]) == [1]


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
            return [r.search(queries[i : i + step], 10) for i in range(0, 50, step)]

        serial, together = [job(queries) for queries in work], [None] * 8

        def run(i):
            together[i] = job(work[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert together == serial


def test_rrf_by_hand():
    fused = rrf([[("a", 9.0), ("b", 8.0), ("c", 7.0)], [("c", 1.0), ("a", 0.5)]])
    assert fused == [("a", 1 / 61 + 1 / 62), ("c", 1 / 63 + 1 / 61), ("b", 1 / 62)]
    a, b = ("a", 2.0), ("b", 1.0)
    assert rrf([[b], [a]]) == [("a", 1 / 61), ("b", 1 / 61)]  # ties by id
    assert rrf([[b, a], [a, b]], k=1) == [("a", 1 / 2 + 1 / 3), ("b", 1 / 2 + 1 / 3)]
    assert rrf([[a, b], [b]], k=0, weights=[2, 0.5]) == [("a", 2.0), ("b", 1.5)]
    assert rrf([[], []]) == []
    with pytest.raises(ValueError, match="shorter"):
        rrf([[a], [b]], weights=[1])


def test_the_best_gold_of_a_list_by_hand():
    hits = [("x", 3.0), ("g1", 2.0), ("y", 2.0), ("w", 1.5), ("g2", 1.0)]
    assert best_rank(hits, {"g1", "g2"}, 3) == 3  # "y" ties with it
    assert best_rank(hits, {"g1", "g2"}, 2) is None and best_rank(hits, {"z"}, 3) is None
    assert math.isnan(best_rank(None, {"g1"}, 3))  # a failed search


def test_a_nan_in_any_block_is_told():
    spoilt, sound = np.array([[1.0, np.nan]], np.float16), np.ones((1, 2), np.float16)
    for shards in ([spoilt, sound], [sound, spoilt]):
        assert exact_search(torch.ones(2, 2), shards, 1, torch.arange(2))[2].all()
        ranks = exact_gold_ranks(torch.ones(2, 2), shards, [[0], [1]])
        assert all(rank is FAILED for rank in ranks)


def test_hybrid_fuses_both_and_ranks_by_the_fused_order():
    texts = ["red fox", "blue fox", "green dog", "wine"]
    dense = table_retriever([[1.0, 0], [2.0, 0], [3.0, 0], [3.0, 0]], list("0123"))
    bm25 = BM25Retriever(plain(texts))

    hybrid = HybridRetriever(dense, bm25)
    assert hybrid.search(["3"], 10)[0] == [
        ("2", 1 / 61),
        ("3", 1 / 62),
        ("1", 1 / 63),
        ("0", 1 / 64),
    ]
    assert hybrid.search(["3"], 1)[0] == [("2", 1 / 61)]
    assert hybrid.gold_ranks(["3", "3", "3"], [["2"], ["1"], ["0", "3"]]) == [
        2,
        3,
        2,
    ]  # "2" ties with "3"
    # three golds in front in one list, x in the other: the third gold has 1/1 + 1/2, x 1/4 + 1/1
    fused = HybridRetriever(dense, bm25, k=0)
    lists = [("0", 9.0), ("1", 8.0), ("2", 7.0), ("x", 6.0)], [("x", 2.0), ("2", 1.0)]
    assert fused._rank(lists, {"0", "1", "2"}, 100) == 1
    assert fused._rank(lists, {"2"}, 2) is None
    assert fused._rank(lists, {"2"}, 3) == 3  # 1/3 + 1/2, behind 1/4 + 1/1 and 1/1
    weighted = HybridRetriever(dense, bm25, k=0, weights=(1.0, 0.0))
    assert weighted._rank(lists, {"2"}, 100) == 3  # 1/3, behind 1/1 and 1/2
    dense.prepare = lambda queries: (queries, [False] * len(queries))
    dense.hits = lambda queries, k: [[("0", 2.0), ("1", 1.0)]] * len(queries)
    assert [i for i, _ in hybrid.search(["blue fox"], 10)[0]] == [
        "0",
        "1",
    ]  # 1/61+1/62 twice: the id decides
    assert hybrid.gold_ranks(["blue fox"] * 3, [["0"], ["1"], ["2"]]) == [
        2,
        2,
        None,
    ]  # the tie counts against
    dense.hits = lambda queries, k: [None] * len(queries)
    assert hybrid.gold_ranks(["fox"], [["0"]])[0] is FAILED
    with pytest.raises(RetrieverError, match="query 0 .'fox'. has a NaN score"):
        hybrid.search(["fox"], 1)
    for change, message in (
        ({"depth": 0}, "depth is 0"),
        ({"weights": [1.0]}, "weights"),
        ({"weights": [1.0, -1.0]}, "weights"),
        ({"weights": [math.nan, 1.0]}, "weights"),
        ({"weights": [1.0, math.inf]}, "weights"),
        ({"weights": [0.0, 0.0]}, "weights"),
        ({"k": -1}, "rrf_k is -1"),
        ({"k": math.nan}, "rrf_k is nan"),
    ):
        with pytest.raises(RetrieverError, match=message):
            HybridRetriever(dense, bm25, **change)
    with pytest.raises(RetrieverError, match="one corpus"):
        HybridRetriever(dense, BM25Retriever(plain(texts[:3])))
    other = [Passage(f"{p.id}x", p.title, p.text) for p in plain(texts)]
    with pytest.raises(RetrieverError, match="their ids differ"):
        HybridRetriever(dense, BM25Retriever(other))


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_an_index_of_another_corpus_is_not_opened(tmp_path, kind):
    tiny_encoder(tmp_path / "e")
    path, corpus = tmp_path / "c.jsonl", passages(20)
    cfg = RetrieverConfig(
        kind=kind,
        corpus=write_corpus(path, corpus),
        index=str(tmp_path / "i"),
        encoder=str(tmp_path / "e"),
        device="cpu",
    )
    R.main(cfg)
    open_retriever(replace(cfg, verify=True))
    folder = tmp_path / "i" / ("bm25" if kind == "bm25" else "dense")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["corpus_bytes"] == path.stat().st_size
    longer = [
        *corpus[:-1],
        Passage(corpus[-1].id, "", "another text, and longer than all others by a good deal"),
    ]
    write_corpus(path, longer)
    with pytest.raises(
        RetrieverError, match=f"{folder} was not built from {path}.*again from this corpus"
    ):
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
    assert (
        R.main(cfg)["indexed"] == 0
        and retriever_settings(cfg)["retriever.index dense"] == before["retriever.index dense"]
    )
    for name in ("bm25", "dense"):
        if (tmp_path / "i" / name).is_dir():  # as an index without the size
            (tmp_path / "i" / name / "meta.json").write_text(
                json.dumps(
                    {
                        k: v
                        for k, v in json.loads(
                            (tmp_path / "i" / name / "meta.json").read_text()
                        ).items()
                        if k != "corpus_bytes"
                    }
                )
            )
    write_corpus(path, longer)
    open_retriever(cfg)
    with pytest.raises(DataError, match="nowhere: No such file"):
        open_retriever(replace(cfg, corpus=str(tmp_path / "nowhere")))


def test_main_builds_and_open_retriever_opens(tmp_path):
    tiny_encoder(tmp_path / "e")
    corpus = passages(30)
    cfg = RetrieverConfig(
        kind="hybrid",
        corpus=write_corpus(tmp_path / "c.jsonl", corpus),
        index=str(tmp_path / "i"),
        encoder=str(tmp_path / "e"),
        shard_size=16,
        device="cpu",
    )
    result = R.main(cfg)
    assert (result["count"], result["dim"], result["indexed"]) == (30, 32, 30) and result[
        "bytes"
    ] > 30 * 32 * 2
    assert R.main(cfg)["indexed"] == 0
    in_memory = open_retriever(RetrieverConfig(corpus=cfg.corpus))
    queries, golds = ["red fox", "number3"], [["p0001"], ["p0003"]]
    for kind in ("bm25", "dense", "hybrid"):
        cfg.kind = kind
        r = open_retriever(cfg)
        assert (
            len(r.search(queries, 5)) == 2
            and len(r.gold_ranks(queries, golds)) == 2
            and "p0003" in r.passage_ids
        )
        if kind == "bm25":
            assert r.gold_ranks(queries, golds) == in_memory.gold_ranks(queries, golds)
    cfg.kind, cfg.query_prefix = "dense", "query: "
    with pytest.raises(RetrieverError, match="query_prefix"):
        open_retriever(cfg)
    for bad, message in (
        (RetrieverConfig(), "kind=bm25 needs an index"),
        (RetrieverConfig(kind="dense"), "needs an index"),
        (RetrieverConfig(kind="dense", index=str(tmp_path / "x")), "python retriever.py"),
        (RetrieverConfig(index=str(tmp_path / "x")), "python retriever.py"),
    ):
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
    command = [
        sys.executable,
        str(ROOT / "retriever.py"),
        "kind=bm25",
        f"corpus={corpus}",
        f"index={tmp_path / 'i'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["count"] == 9


@pytest.mark.parametrize(
    "words, said",
    [
        ({"encoder": "models/e5"}, "encoder=models/e5 has no effect with kind=bm25"),
        ({"url": "http://x"}, "url=http://x has no effect with kind=bm25"),
        ({"kind": "bm25"}, ""),
    ],
)
def test_a_setting_of_another_kind_of_search_is_named(tmp_path, capsys, words, said):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "p", "title": "", "text": "a passage"}\n', encoding="utf-8")
    open_retriever(RetrieverConfig(corpus=str(corpus), **words))
    err = capsys.readouterr().err
    assert said in err and ("warning" in err) == bool(said)
