"""analysis.py and bm25.py against oracles written apart from it: Lucene's formula by hand, full sorts, brute force, PyStemmer."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from search import bm25 as B
from data import Passage
from search import analysis as A
from search.analysis import LuceneEnglish, SnowballEnglish, porter, standard_words
from search.bm25 import BM25Retriever, build_postings
from search.passages import in_processes, RetrieverError

ROOT = Path(__file__).resolve().parent.parent
WORDS = "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter".split()


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


def sorted_rank(scores: np.ndarray, golds: list[int], cutoff: int) -> int | None:
    """The rule of order, said again: sort all passages, the gold behind every other passage that ties with it."""
    best = None
    for gold in golds:
        others = [i for i in range(len(scores)) if i not in golds]
        line = sorted(others + [gold], key=lambda i: (-scores[i], i == gold))
        best = min(best or len(scores) + 1, line.index(gold) + 1)
    return best if best <= cutoff else None


# ------------------------------------------------------------------------------------------------------------- analysis


@pytest.mark.parametrize(
    "text,words",
    [  # right-hand sides: Lucene 9.9's StandardTokenizer, asked in Anserini 1.7.1
        (
            "The dog's bone isn't 3.14 or 1,000,000 foo_bar",
            "The dog's bone isn't 3.14 or 1,000,000 foo_bar",
        ),
        (
            "O'Neil's e.g. U.S.A. wi-fi can’t women’s x'y'z",
            "O'Neil's e.g U.S.A wi fi can’t women’s x'y'z",
        ),
        (
            "12a3 3a.4 a3.4 3,a 3..4 #1 5'10 1'2 1:2 1;2",
            "12a3 3a 4 a3.4 3 a 3 4 1 5'10 1'2 1 2 1;2",
        ),
        ("_a_ __ a:b a·b @x a_.b a__b 1_a _", "_a_ a:b a·b x a_ b a__b 1_a"),
        ("naïve Ünïcode ﬁne ß ＡＢＣ １２３", "naïve Ünïcode ﬁne ß ＡＢＣ １２３"),
        ("日本語 カタカナ ひらがな 한국어 ภาษาไทย", "日 本 語 カタカナ ひ ら が な 한국어 ภาษาไทย"),
        ("I ❤️ 👍🏽 A♭ x★y ①②", "I ❤️ 👍🏽 A ♭ x ★ y"),
        ("ראב\"י ג'ירפה e\u0301té a\u200bb", "ראב\"י ג'ירפה e\u0301té a b"),
        ("mail@example.com https://a.b/c?d=e", "mail example.com https a.b c d e"),
        ("", ""),
        (" \n\t- … !", ""),
    ],
)
def test_words_are_those_of_lucenes_standard_tokenizer(text, words):
    assert standard_words(text) == words.split()


def test_a_word_stands_alone_whatever_is_around_it():
    """The two forms of the grammar agree: ASCII text by itself and beside a letter that makes it go by classes."""
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab1.2,;:'_-\" \n", k=rng.randint(1, 12)))
        assert standard_words(f"é{text}" if text[0] in " \n" else f"é {text}") == [
            "é",
            *standard_words(text),
        ], text
        assert standard_words(text.replace(" ", "\u3000")) == standard_words(text), text


def test_long_tokens_are_cut():
    assert [len(w) for w in standard_words("x" * 600 + " y")] == [255, 255, 90, 1]
    assert [len(w) for w in standard_words("é" * 300)] == [255, 45]


def plain_words(text: str) -> list[str]:
    """`standard_words` as the rules read, quadratic in a word's length: the oracle of the windows and the marks."""
    ascii_word = re.compile(A.ASCII_WORD.pattern.removeprefix("(?<!_)"), re.ASCII)
    class_word = (
        A.CLASS_WORD.pattern.replace("_-", "_")
        .replace(r"|(?:_[EVZcs]*)+\Z", "")
        .replace(r"|Z+\Z", "")
    )
    pattern, classes, words, at = re.compile(class_word), text.translate(A._CLASSES), [], 0
    if text.isascii() and max(map(len, found := ascii_word.findall(text)), default=0) <= A.LONGEST:
        return found
    while match := pattern.search(classes, at):
        at = min(match.end(), match.start() + A.LONGEST)
        words.append(text[match.start() : at])
    return words


@pytest.mark.parametrize(
    "longest", [3, 7, 255]
)  # short pieces have short windows, so their edges are everywhere
def test_words_of_any_length_are_those_of_the_plain_rules(monkeypatch, longest):
    monkeypatch.setattr(A, "LONGEST", longest)
    rng, most = random.Random(longest), longest + 1 if longest < 255 else 400
    signs = (
        "ab1_.,:'\"-# \néα٣ß\u0e2a\u0e31\u30b9\u0301\u200d\ufe0f\u20e3\U0001f3fb\U0001f600\u05d0\u6f22\u3072"
        "\U0001f1e9"
    )
    for _ in range(6000 if longest < 255 else 1000):
        chosen = rng.sample(signs, rng.choice([2, 3, 4, 8, len(signs)]))
        text = "".join(
            rng.choice(chosen) * rng.choice([1, 1, 2, longest, rng.randint(1, most)])
            for _ in range(rng.randint(1, 20))
        )
        assert standard_words(text) == plain_words(text), ascii(text)


def test_a_word_of_a_megabyte_and_signs_that_begin_no_word_take_no_quadratic_time():
    """By the plain rules these take minutes."""
    assert [len(w) for w in standard_words("x" * 1_000_000)] == [255] * 3921 + [145]
    assert {len(w) for w in standard_words("é_" * 127_500)} == {255}
    assert standard_words("_" * 400_000) == standard_words("é\n" + "_\u0301" * 200_000)[1:] == []
    assert standard_words("\u3000" + "\u200d" * 400_000) == []


@pytest.mark.parametrize(
    "word,stem",
    [
        pair.split(">")
        for pair in (  # by hand from Porter's rules
            "caresses>caress ponies>poni ties>ti caress>caress cats>cat feed>feed agreed>agre plastered>plaster bled>bled "
            "motoring>motor sing>sing conflated>conflat troubled>troubl sized>size hopping>hop tanned>tan falling>fall "
            "hissing>hiss fizzed>fizz failing>fail filing>file happy>happi sky>sky relational>relat conditional>condit "
            "rational>ration valenci>valenc hesitanci>hesit digitizer>digit conformabli>conform radicalli>radic "
            "differentli>differ vileli>vile analogousli>analog vietnamization>vietnam predication>predic operator>oper "
            "feudalism>feudal decisiveness>decis hopefulness>hope callousness>callous formaliti>formal sensitiviti>sensit "
            "sensibiliti>sensibl triplicate>triplic formative>form formalize>formal electriciti>electr electrical>electr "
            "hopeful>hope goodness>good revival>reviv allowance>allow inference>infer airliner>airlin gyroscopic>gyroscop "
            "adjustable>adjust defensible>defens irritant>irrit replacement>replac adjustment>adjust dependent>depend "
            "adoption>adopt homologou>homolog communism>commun activate>activ angulariti>angular homologous>homolog "
            "effective>effect bowdlerize>bowdler probate>probat rate>rate cease>ceas controll>control roll>roll "
            "possibly>possibl apologies>apolog archaeology>archaeolog is>is as>as"
        ).split()
    ],
)
def test_porter_by_hand(word, stem):
    assert porter(word) == stem


def endings(text: str) -> dict[str, str]:
    return {old: new for old, _, new in (pair.partition(">") for pair in text.split())}


STEP_2 = endings(
    "ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e ousli>ous "
    "ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive "
    "biliti>ble logi>log"
)
STEP_3 = endings("icate>ic ative> alize>al iciti>ic ical>ic ful> ness>")
STEP_4 = ("al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize").split()


def plain_porter(word: str) -> str:
    """Porter's algorithm as his own programs have it, rule by rule: the oracle of what PyStemmer makes of a word."""
    w = word
    if len(w) <= 2:
        return w

    def shape(stem: str) -> str:  # one letter a character, c or v
        out = ""
        for ch in stem:
            out += "v" if ch in "aeiou" or ch == "y" and out[-1:] == "c" else "c"
        return out

    def measure(stem: str) -> int:  # m of [C](VC)^m[V]
        return shape(stem).count("vc")

    def double(stem: str) -> bool:
        return len(stem) > 1 and stem[-1] == stem[-2] and shape(stem)[-1] == "c"

    def short(stem: str) -> bool:  # *o: ends consonant, vowel, consonant, the last not w, x or y
        return shape(stem).endswith("cvc") and stem[-1] not in "wxy"

    def swap(
        w: str, endings: dict[str, str], least: int
    ) -> str:  # of the ending that fits, where m exceeds `least`
        for ending, new in endings.items():
            if w.endswith(ending):
                stem = w[: -len(ending)]
                return stem + new if measure(stem) > least else w
        return w

    if w.endswith("s"):  # step 1a
        if w.endswith(("sses", "ies")):
            w = w[:-2]
        elif w[-2] != "s":
            w = w[:-1]
    if w.endswith("eed"):  # step 1b
        w = w[:-1] if measure(w[:-3]) > 0 else w
    else:
        stem = w[:-2] if w.endswith("ed") else w[:-3] if w.endswith("ing") else ""
        if "v" in shape(stem):
            w = stem
            if w.endswith(("at", "bl", "iz")):
                w += "e"
            elif double(w):
                w = w if w[-1] in "lsz" else w[:-1]
            elif measure(w) == 1 and short(w):
                w += "e"
    if w.endswith("y") and "v" in shape(w[:-1]):  # step 1c
        w = w[:-1] + "i"
    w = swap(w, STEP_2, 0)
    w = swap(w, STEP_3, 0)
    for ending in STEP_4:
        if w.endswith(ending):
            stem = w[: -len(ending)]
            if measure(stem) > 1 and (ending != "ion" or stem[-1:] in ("s", "t")):
                w = stem
            break
    if w.endswith("e"):  # step 5
        m = measure(w)
        if m > 1 or m == 1 and not short(w[:-1]):
            w = w[:-1]
    return w[:-1] if w.endswith("ll") and measure(w) > 1 else w


def test_porter_is_the_plain_rules():
    rng = random.Random(1)
    parts = (
        "a b c d e f g h i j k l m n o p q r s t u v w x y z yy th ch qu ll ss tt kk cc vv ed ing s es ies eed ational "
        "tional enci izer alli entli eli ousli ization ation ator alism iveness fulness ousness aliti iviti biliti "
        "bli bly blies bled bling able ably logi logy logies logied logying icate ative alize iciti ical ful ness ance "
        "ence ible ant ement ment ent ion ism ate iti ous ive ize iness iful yed ying 1 55 . .. ' é 東 東東"
    ).split()
    words = {"".join(rng.choices(parts, k=rng.randint(1, 5))) for _ in range(60000)}
    words |= {"trekking", "revved", "heyyying", "ugliness", "nobly", "assemblies", "apologised"}
    assert [(w, porter(w)) for w in words if porter(w) != plain_porter(w)] == []


def test_analysis_end_to_end():
    english = LuceneEnglish()
    assert english("The Dogs' bones: it's the dog’s, IT'S Σας İstanbul's") == [
        "dog",
        "bone",
        "dog",
        "σας",
        "istanbul",
    ]  # it's, less 's, is a stop word
    assert english("running RUNS ran U.S.A. 3.5 of and") == ["run", "run", "ran", "u.s.a", "3.5"]
    assert SnowballEnglish()("The dog's bones possibly") == ["dog", "bone", "possibl"]
    with pytest.raises(RetrieverError, match="'porter'.*lucene"):
        BM25Retriever(plain(["a fox"]), analyzer="porter")


def test_lengths_are_lucenes_byte():
    """SmallFloat.intToByte4 and back, by its own arithmetic; some values as Lucene 9.9 gives them."""

    def long_to_int4(i):
        bits = i.bit_length()
        return i if bits < 4 else i >> bits - 4 & 7 | bits - 3 << 3

    def int4_to_long(i):
        return i & 7 if i >> 3 == 0 else (i & 7 | 8) << (i >> 3) - 1

    free = 255 - long_to_int4(2**31 - 1)
    assert free == 24
    values = [*range(5000), 10**5, 12345678, 2**31 - 1]
    slow = [i if i < free else free + int4_to_long(long_to_int4(i - free)) for i in values]
    assert LuceneEnglish.lengths(np.array(values)).tolist() == slow
    assert [slow[i] for i in (23, 39, 40, 41, 42, 100, 101, 4999)] == [
        23,
        39,
        40,
        40,
        42,
        96,
        96,
        4632,
    ]


# ----------------------------------------------------------------------------------------------------------------- BM25


def lucene(passages_: list[str], query: str, k1: float, b: float, analyse) -> np.ndarray:
    """BM25 of Lucene by its formula, float64, one query word after the other, repeated words repeated."""
    documents = [analyse(p) for p in passages_]
    lengths = analyse.lengths(np.array([len(d) for d in documents]))
    filled = sum(map(bool, documents))
    mean = sum(map(len, documents)) / filled
    scores = np.zeros(len(documents))
    for word in analyse(query):
        df = sum(word in d for d in documents)
        if df:
            idf = math.log(1 + (filled - df + 0.5) / (df + 0.5))
            for i, d in enumerate(documents):
                if tf := d.count(word):
                    scores[i] += idf * tf / (tf + k1 * (1 - b + b * lengths[i] / mean))
    return scores


def all_scores(bm25: BM25Retriever, query: str) -> np.ndarray:
    """(M,) float32 scores of all passages, by reading every list of the index to its end."""
    totals = np.zeros(len(bm25.passage_ids))
    for _, rows, codes, gains in bm25._lists(query, bm25._divisors()):
        totals[rows] += gains[codes]
    return totals.astype(np.float32)


@pytest.mark.parametrize("analyzer", [LuceneEnglish, SnowballEnglish])
@pytest.mark.parametrize("k1,b", [(0.9, 0.4), (0.82, 0.68), (1.2, 0.0), (0.0, 1.0)])
def test_bm25_equals_the_formula(k1, b, analyzer):
    corpus = passages(80, most=60) + [Passage("empty", "", "the of")]
    bm25 = BM25Retriever(corpus, k1, b, analyzer=analyzer.name)
    rng = random.Random(3)
    queries = [
        "red",
        "red red red fox",
        "The foxes of the rivers",
        "titles",
        "unknownword number5 number5",
    ]
    queries += [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(20)]
    for query in queries:
        truth = lucene([p.contents for p in corpus], query, k1, b, analyzer())
        assert np.allclose(all_scores(bm25, query), truth, rtol=1e-5, atol=1e-6), query
    assert np.allclose(
        all_scores(bm25, "fox fox fox"), 3 * all_scores(bm25, "fox"), rtol=1e-6
    )  # counted as often as it stands


def test_scores_are_lucenes_float32():
    """BM25Similarity's operations one after the other in float32, for one word; then a sum in float64."""
    corpus = plain(["red fox " * 5, "red " + "w x y z " * 12, "blue fox", "red red"])
    bm25, f = BM25Retriever(corpus, 0.9, 0.4), np.float32
    lengths, mean, parts = [10, 48, 2, 2], f(63 / 4), []  # 49 words become 48 in a byte
    assert LuceneEnglish.lengths(np.array([10, 49, 2, 2])).tolist() == lengths
    for times, df, tf in ((2, 3, [5, 1, 0, 2]), (1, 2, [5, 0, 1, 0])):  # "red red fox"
        weight = f(times) * f(math.log(1 + (4 - df + 0.5) / (df + 0.5)))
        inverse = [f(1) / (f(0.9) * ((f(1) - f(0.4)) + f(0.4) * f(n) / mean)) for n in lengths]
        parts.append([weight - weight / (f(1) + f(t) * i) for t, i in zip(tf, inverse)])
    expected = np.array(parts, dtype=np.float64).sum(axis=0).astype(np.float32)
    assert all_scores(bm25, "red fox red").tolist() == expected.tolist()
    assert [s for _, s in bm25.search(["red fox red"], 9)[0]] == sorted(
        expected.tolist(), reverse=True
    )


@pytest.mark.parametrize("shard,block", [(1 << 17, 1 << 24), (700, 4000)])
def test_bm25_rank_agrees_with_its_own_list_and_a_full_sort(monkeypatch, shard, block):
    """Lists and ranks by bounds and look-ups are those of all scores: long and short lists, rare and frequent words."""
    monkeypatch.setattr(B, "SHARD", shard)
    monkeypatch.setattr(B, "BLOCK", block)
    rng = random.Random(4)
    rare = [f"rare{i}" for i in range(40)]
    corpus = passages(1500, most=3)
    corpus = [Passage(p.id, p.title, p.text + " " + rng.choice(rare + [""] * 60)) for p in corpus]
    bm25 = BM25Retriever(corpus)
    for _ in range(150):
        query = " ".join(
            rng.choices(WORDS, k=rng.randint(1, 3))
            + rng.choices(rare, k=rng.randint(0, 2))
            + ["title"]
        )
        rows = rng.sample(range(1500), rng.randint(1, 3))
        golds = [corpus[i].id for i in rows]
        scores = all_scores(bm25, query)
        order = [i for i in np.lexsort((np.arange(1500), -scores)).tolist() if scores[i] > 0]
        for k in (1, 7, 100, 1500):
            assert bm25.search([query], k)[0] == [
                (corpus[i].id, float(scores[i])) for i in order[:k]
            ], (query, k)
        for cutoff in (5, 100, 1500):
            rank = sorted_rank(scores, rows, cutoff) if scores[rows].max() > 0 else None
            assert bm25.gold_ranks([query], [golds], cutoff) == [rank]
    assert not bm25._local.totals.any()  # whoever used them left them clean


def test_ties_count_against_the_gold():
    bm25 = BM25Retriever(plain(["red fox", "red dog", "red fox", "blue", "red fox"]))
    assert bm25.gold_ranks(["fox"] * 3, [["0"], ["2", "4"], ["0", "2", "4"]]) == [3, 2, 1]
    assert [i for i, _ in bm25.search(["fox"], 2)[0]] == ["0", "2"]  # ties by id
    assert bm25.gold_ranks(["fox"], [["3"]]) == [None] and bm25.gold_ranks(
        ["fox"], [["0"]], cutoff=2
    ) == [None]


def test_ids_decide_ties_not_places():
    corpus = [Passage(id_, "", "red fox") for id_ in ("c", "a", "d", "b")]
    assert [i for i, _ in BM25Retriever(corpus).search(["fox"], 3)[0]] == ["a", "b", "c"]


def test_k_above_the_corpus():
    hits = BM25Retriever(plain(["red fox", "blue fox"])).search(["fox"], 10)[0]
    assert [i for i, _ in hits] == ["0", "1"]


def test_k1_and_b_take_effect_after_a_query():
    bm25 = BM25Retriever(
        plain(["red fox jumps", "red dog", "blue bird sings in a tree", "red red wine"]), 0.9, 0.4
    )
    bm25.search(["red"], 4)
    bm25.b = 0.0
    assert np.allclose(all_scores(bm25, "red"), [0.187724, 0.187724, 0.0, 0.245983], atol=1e-4)
    assert [i for i, _ in bm25.search(["red"], 4)[0]] == ["3", "0", "1"]
    bm25.k1 = -1
    for k1 in (-1, math.inf, math.nan):
        bm25.k1 = k1
        with pytest.raises(RetrieverError, match=f"k1 is {k1}.*finite"):
            bm25.search(["red"], 1)


def test_unknown_words_find_nothing():
    bm25 = BM25Retriever(
        plain(["red fox jumps", "red dog", "blue bird sings in a tree", "red red wine"])
    )
    first, second = bm25.search(["zyzzy qwrt", "red"], 2)
    assert first == [] and len(second) == 2
    assert bm25.search(["", "the of", " \n "], 2) == [[], [], []]
    assert (
        bm25.gold_ranks(["zyzzy", "", "fox", "red"], [["0"], ["0"], ["2"], ["2"]]) == [None] * 4
    )  # score 0


def test_different_queries_different_lists():
    hits = BM25Retriever(plain(["apple pie", "banana split", "cherry tart"])).search(
        ["apple", "banana", "cherry"], 1
    )
    assert [h[0][0] for h in hits] == ["0", "1", "2"]


def test_a_query_is_cut_only_where_query_words_says_so_and_counted():
    corpus = plain(["w7 w8", "x", "w1400"])
    query = " ".join(f"w{i}" for i in range(1500))
    bm25, cut = BM25Retriever(corpus), BM25Retriever(corpus, query_words=1024)
    assert [i for i, _ in bm25.search([query], 3)[0]] == ["0", "2"] and bm25.cut_queries == 0
    assert bm25.gold_ranks([query], [["2"]]) == [2]
    assert [i for i, _ in cut.search([query, "x"], 3)[0]] == ["0"] and cut.cut_queries == 1
    assert cut.gold_ranks([query] * 2, [["2"]] * 2) == [None, None] and cut.cut_queries == 3
    for name in ("query_words", "workers"):
        with pytest.raises(RetrieverError, match=f"{name} is 0"):
            BM25Retriever(corpus, **{name: 0}).search(["x"], 1)


# ------------------------------------------------------------------------------------------------ on disk, in processes


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "meta.json"}


@pytest.mark.parametrize("analyzer", ["lucene", "snowball"])
def test_bm25_saved_built_and_opened(tmp_path, monkeypatch, analyzer):
    corpus = passages(260, most=30) + plain(["the", "naïve 日本語 red"])
    fresh = BM25Retriever(corpus, 0.82, 0.68, analyzer=analyzer)
    build_postings(tmp_path / "saved", corpus, analyzer)
    monkeypatch.setattr(B, "SHARD", 50)
    monkeypatch.setattr(B, "BLOCK", 300)
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in corpus)
    )
    assert build_postings(tmp_path / "alone", corpus, analyzer) == 262
    build_postings(tmp_path / "three", tmp_path / "c.jsonl", analyzer, workers=3)
    same = contents(tmp_path / "saved")
    assert (
        contents(tmp_path / "alone") == same == contents(tmp_path / "three")
    )  # in pieces, in processes: to the byte
    queries = ["red fox", "number3 the garden garden", "nothingatall", "", "naïve 語"] * 5
    golds = [[corpus[i].id] for i in (1, 3, 5, 7, 261)] * 5
    for workers in (1, 2):
        saved = BM25Retriever.open(
            tmp_path / "three", 0.82, 0.68, analyzer=analyzer, workers=workers
        )
        assert saved.search(queries, 20) == fresh.search(queries, 20)
        assert saved.gold_ranks(queries, golds) == fresh.gold_ranks(queries, golds)
        assert all(
            isinstance(saved.arrays[name].base, np.memmap)
            for name in ("words", "passages", "codes")
        )
    saved.k1, saved.b = 1.2, 0.0  # nothing of them is in the index
    other = BM25Retriever(corpus, 1.2, 0.0, analyzer=analyzer)
    assert saved.search(["red fox"], 300) == other.search(["red fox"], 300)
    with pytest.raises(RetrieverError, match=f"analyzer '{analyzer}'"):
        BM25Retriever.open(
            tmp_path / "saved", analyzer={"lucene": "snowball", "snowball": "lucene"}[analyzer]
        )


def test_bad_indexes_are_refused(tmp_path):
    corpus = tmp_path / "c.jsonl"
    with pytest.raises(RetrieverError, match="python retriever.py"):
        BM25Retriever.open(tmp_path / "nowhere")
    for nothing in (["the", "a of", "", "! … ?"], []):
        with pytest.raises(RetrieverError, match="no.*word|no passages"):
            BM25Retriever(plain(nothing))
        with pytest.raises(RetrieverError, match="no.*word|no passages"):
            build_postings(tmp_path / "b", plain(nothing))
    with pytest.raises(RetrieverError, match="'1' occurs"):
        build_postings(tmp_path / "b", [*plain(["red", "fox"]), Passage("1", "", "dog")])
    with pytest.raises(RetrieverError, match="blanks"):
        build_postings(tmp_path / "b", [Passage("1 2", "", "dog")], workers=2)
    for text, problem in (
        (
            '{"id": "7", "contents": "red"}\n\n{"id": 8, "contents": "x"}\n'
            '{"id": 7, "contents": "blue"}\n',
            "c.jsonl:4: passage id '7' occurs more than once .first in line 1.; ids must be unique",
        ),
        ("\n", "c.jsonl has no passages; an index needs at least one"),
    ):
        corpus.write_text(text)
        for build in (
            lambda: build_postings(tmp_path / "b", corpus),
            lambda: BM25Retriever(str(corpus)),
        ):
            with pytest.raises(RetrieverError, match=problem):
                build()
    corpus.unlink()
    assert list(tmp_path.iterdir()) == []  # whole or not at all
    build_postings(tmp_path / "b", plain(["red fox", "dog"]))
    meta = tmp_path / "b/meta.json"
    meta.write_text(meta.read_text().replace("bm25-3", "bm25-2"))
    with pytest.raises(
        RetrieverError, match="format 'bm25-2', asked for is 'bm25-3'.*build it again"
    ):
        BM25Retriever.open(tmp_path / "b")
    meta.write_text(meta.read_text().replace("bm25-2", "bm25-3"))
    np.save(tmp_path / "b/passages.npy", np.zeros(1, dtype=np.int32))
    with pytest.raises(RetrieverError, match="damaged"):
        BM25Retriever.open(tmp_path / "b")


def test_workers_answer_as_one_process_does():
    corpus, rng = passages(300), random.Random(8)
    queries = [" ".join(rng.choices(WORDS, k=3)) for _ in range(60)]
    golds = [[rng.choice(corpus).id] for _ in queries]
    one, three = BM25Retriever(corpus), BM25Retriever(corpus, workers=3)
    assert three.search(queries, 10) == one.search(queries, 10)
    assert three.gold_ranks(queries, golds) == one.gold_ranks(queries, golds)


def die(number: int) -> int:
    return 1 // number if number < 2 else os.kill(os.getpid(), 9)


def test_a_worker_process_hands_on_its_error_and_its_death():
    assert list(in_processes(die, [(1,), (1,)], 2)) == [1, 1]
    with pytest.raises(ZeroDivisionError):
        list(in_processes(die, [(1,), (0,)], 1))
    with pytest.raises(RuntimeError, match="ended without an answer.*fewer workers"):
        list(in_processes(die, [(2,)], 1))


def test_sparse_search_and_the_client_copy_out_without_torch(tmp_path):
    (tmp_path / "search").mkdir()
    for name in (
        "data.py",
        "config.py",
        "runs.py",
        "search/__init__.py",
        "search/analysis.py",
        "search/bm25.py",
        "search/passages.py",
        "search/client.py",
    ):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    code = (
        "import sys, search.client; from data import Passage; from search.bm25 import BM25Retriever\n"
        "r = BM25Retriever([Passage('a', '', 'red fox'), Passage('b', '', 'blue fox')])\n"
        "print(r.search(['red'], 3)[0][0][0], sorted({'torch', 'transformers', 'bm25s'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert done.stdout.strip() == "a []", done.stderr
