"""bm25.py against oracles written apart from it: Lucene's formula by hand, full sorts, brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from bm25 import BM25Retriever, EnglishTokenizer, RetrieverError
from data import Passage

WORDS = "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter".split()


def passages(n: int, seed: int = 0, most: int = 12) -> list[Passage]:
    rng = random.Random(seed)
    return [Passage(f"p{i:04d}", rng.choice(["", "A title"]),
                    " ".join(rng.choices(WORDS, k=rng.randint(1, most))) + f" number{i}") for i in range(n)]


def plain(texts: list[str]) -> list[Passage]:
    return [Passage(str(i), "", text) for i, text in enumerate(texts)]


def sorted_rank(scores: np.ndarray, golds: list[int], cutoff: int) -> int | None:
    """The rule of order, said again: sort all passages, the gold behind every other passage that ties with it."""
    best = None
    for gold in golds:
        others = [i for i in range(len(scores)) if i not in golds]
        line = sorted(others + [gold], key=lambda i: (-scores[i], i == gold))
        best = min(best or len(scores) + 1, line.index(gold) + 1)
    return best if best <= cutoff else None


def lucene(passages_: list[str], query: str, k1: float, b: float) -> np.ndarray:
    """BM25 of Lucene by its formula, float64, one query word after the other, repeated words repeated."""
    analyse = EnglishTokenizer()
    documents = [analyse(p) for p in passages_]
    mean = sum(map(len, documents)) / len(documents)
    scores = np.zeros(len(documents))
    for word in analyse(query):
        df = sum(word in d for d in documents)
        if df:
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            for i, d in enumerate(documents):
                if tf := d.count(word):
                    scores[i] += idf * tf / (tf + k1 * (1 - b + b * len(d) / mean))
    return scores


@pytest.mark.parametrize("k1,b", [(0.9, 0.4), (0.82, 0.68), (1.2, 0.0), (0.0, 1.0)])
def test_bm25_equals_the_formula(k1, b):
    corpus = passages(80)
    bm25 = BM25Retriever(corpus, k1, b)
    rng = random.Random(3)
    queries = ["red", "red red red fox", "The foxes of the rivers", "titles", "unknownword number5 number5"]
    queries += [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(20)]
    for query in queries:
        truth = lucene([p.contents for p in corpus], query, k1, b)
        scores = bm25.scores(query)
        assert np.allclose(scores if scores is not None else 0, truth, rtol=1e-5, atol=1e-6), query
    assert np.allclose(bm25.scores("fox fox fox"), 3 * bm25.scores("fox"), rtol=1e-6)  # counted as often as it stands


def test_bm25_rank_agrees_with_its_own_list_and_a_full_sort():
    corpus = passages(300, most=3)
    bm25 = BM25Retriever(corpus)
    rng = random.Random(4)
    for _ in range(60):
        query = " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
        rows = rng.sample(range(300), rng.randint(1, 3))
        golds = [corpus[i].id for i in rows]
        scores = bm25.scores(query)
        hits = bm25.search([query], 300)[0]
        assert [i for i, _ in hits] == [corpus[i].id for i in np.lexsort((np.arange(300), -scores)) if scores[i] > 0]
        for cutoff in (5, 100, 300):
            rank = sorted_rank(scores, rows, cutoff) if scores[rows].max() > 0 else None
            assert bm25.gold_ranks([query], [golds], cutoff) == [rank]
        ranks = dict.fromkeys(golds)  # by the list: others at least as good, the golds left out
        best = max((s for i, s in hits if i in ranks), default=None)
        assert bm25.gold_ranks([query], [golds], 300) == [
            None if best is None else 1 + sum(s >= best for i, s in hits if i not in ranks)]


def test_k_above_the_corpus_ret_04():
    hits = BM25Retriever(plain(["red fox", "blue fox"])).search(["fox"], 10)[0]
    assert [i for i, _ in hits] == ["0", "1"]


def test_k1_and_b_take_effect_after_a_query_ret_06():
    bm25 = BM25Retriever(plain(["red fox jumps", "red dog", "blue bird sings in a tree", "red red wine"]), 0.9, 0.4)
    bm25.search(["red"], 4)
    bm25.b = 0.0
    assert np.allclose(bm25.scores("red"), [0.187724, 0.187724, 0.0, 0.245983], atol=1e-4)
    assert [i for i, _ in bm25.search(["red"], 4)[0]] == ["3", "0", "1"]
    bm25.k1 = -1
    with pytest.raises(RetrieverError, match="k1 is -1"):
        bm25.search(["red"], 1)


def test_unknown_words_find_nothing_ret_08():
    bm25 = BM25Retriever(plain(["red fox jumps", "red dog", "blue bird sings in a tree", "red red wine"]))
    first, second = bm25.search(["zyzzy qwrt", "red"], 2)
    assert first == [] and len(second) == 2
    assert bm25.search(["", "the of", " \n "], 2) == [[], [], []]
    assert bm25.gold_ranks(["zyzzy", "", "fox", "red"], [["0"], ["0"], ["2"], ["2"]]) == [None] * 4  # score 0


def test_different_queries_different_lists_ret_10():
    hits = BM25Retriever(plain(["apple pie", "banana split", "cherry tart"])).search(["apple", "banana", "cherry"], 1)
    assert [h[0][0] for h in hits] == ["0", "1", "2"]


def test_very_long_query_ret_12():
    bm25 = BM25Retriever(plain(["w7 w8", "x", "w1400"]))
    query = " ".join(f"w{i}" for i in range(1500))
    assert [i for i, _ in bm25.search([query], 3)[0]] == ["0"]  # cut after 1,024 words, and counted
    assert bm25.counts == {"truncated": 1}


def test_bm25_saved_and_opened(tmp_path):
    corpus = passages(60)
    fresh = BM25Retriever(corpus, 0.82, 0.68)
    fresh.save(tmp_path / "bm25")
    saved = BM25Retriever.open(tmp_path / "bm25", 0.82, 0.68)
    queries = ["red fox", "number3 the garden garden", "nothingatall", ""]
    assert saved.search(queries, 20) == fresh.search(queries, 20)
    golds = [[corpus[i].id] for i in (1, 3, 5, 7)]
    assert saved.gold_ranks(queries, golds) == fresh.gold_ranks(queries, golds)
    assert isinstance(saved._scorer.scores["data"], np.memmap)
    with pytest.raises(RetrieverError, match="k1 0.82"):
        BM25Retriever.open(tmp_path / "bm25")
    saved.k1 = 0.9
    with pytest.raises(RetrieverError, match="saved"):
        saved.search(queries, 1)
    with pytest.raises(RetrieverError, match="python retriever.py"):
        BM25Retriever.open(tmp_path / "nowhere")
    with pytest.raises(RetrieverError, match="no.*word"):
        BM25Retriever(plain(["the", "a of", ""]))
