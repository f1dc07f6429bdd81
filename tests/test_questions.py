"""sources/questions.py: fixtures in the official forms, with slow loops as oracles.

Each test names the trap it guards against.  Run: python -m pytest tests/test_questions.py
"""

import gzip
import html
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc

import pytest
from official import make, put

import evaluate
import retriever
from config import ConfigError
from data import DataError, read_corpus, read_questions
from evaluate import EvaluateConfig
from retriever import RetrieverConfig
from scoring.ranking import read_qrels
from sources import questions

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def jsonl(rows, ascii=False):
    return "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows)


def texts(out):
    return {p.id: (p.title, p.text) for p in read_corpus(f"{out}/corpus.jsonl")}


def golds(out, split):
    """Question id → gold (title, text) in the order of the qrels."""
    corpus = texts(out)
    return {
        q: [corpus[p] for p in gains] for q, gains in read_qrels(f"{out}/{split}.qrels").items()
    }


def by_id(out, split):
    return {q.id: q for q in read_questions(f"{out}/{split}.jsonl")}


# ------------------------------------------------------------------------------------------ musique


def musique_row(key, paragraphs, hops, **changes):
    """paragraphs: (title, text, supporting); hops: positions of their supporting paragraphs."""
    return {
        "id": key,
        "paragraphs": [
            {"idx": i, "title": t, "paragraph_text": x, "is_supporting": s}
            for i, (t, x, s) in enumerate(paragraphs)
        ],
        "question": f"What of {key}? ",
        "question_decomposition": [
            {
                "id": 100 + n,
                "question": f"#{n} >> spouse",
                "answer": "x",
                "paragraph_support_idx": p,
            }
            for n, p in enumerate(hops)
        ],
        "answer": "Miquette Giraudy",
        "answer_aliases": ["M. Giraudy", "Miquette Giraudy", " "],
        "answerable": True,
    } | changes


GREEN = ("Green (album)", "Green is the  fourth album, by Steve\u2028Hillage. “1977”", True)
GREEN_AGAIN = (
    "Green (album)",
    "Green is the fourth album by Steve Hillage — 1977.",
    False,
)  # but for spacing, signs
MIQUETTE = ("Miquette &amp; Co", "Miquette Giraudy (born 1953,\u00a0Nice) plays.\n", True)
NOISE = ("東京", "東京は日本の首都。 \ud83d half an emoji", False)
HINDI = [
    ("हिन्दी", "कि", False),
    ("हिन्दी", "की", False),
]  # vowel signs are no punctuation: two passages
MUSIQUE_ROWS = {
    "train": [
        musique_row("2hop__1_2", [NOISE, MIQUETTE, GREEN, *HINDI], [2, 1]),
        musique_row(
            "3hop1__1_2_3",
            [
                GREEN_AGAIN,
                ("Other", "Green is the fourth album, by Steve Hillage. 1977", True),
                ("Third", "", True),
            ],
            [1, 2],
            answer=7,
        ),
        musique_row("2hop__9_9", [NOISE], [], answerable=False),
    ],
    "dev": [
        musique_row(
            "2hop__5_6",
            [MIQUETTE, GREEN_AGAIN, ("Dup", "same", True), ("Dup", "same", True)],
            [2, 3],
        ),
        musique_row(
            "2hop__7_8",
            [("Green (album)", GREEN[1], True), NOISE],
            [0],
            answer="",
            answer_aliases=[],
        ),
    ],
}


def musique_files(source, rows=MUSIQUE_ROWS):
    for split, found in rows.items():
        put(
            f"{source}/data/musique_ans_v1.0_{split}.jsonl",
            b"\xef\xbb\xbf" + jsonl(found, True).replace("\n", "\r\n").encode(),
        )


def test_musique(tmp_path):
    musique_files(tmp_path / "in")
    result = make("musique", str(tmp_path / "in"), str(tmp_path / "out"), strict=False)
    out = tmp_path / "out"
    assert golds(out, "train") == {  # hop by hop, not in the order of the paragraphs
        "2hop__1_2": [
            ("Green (album)", "Green is the fourth album, by Steve Hillage. “1977”"),
            ("Miquette & Co", "Miquette Giraudy (born 1953, Nice) plays."),
        ],
        "3hop1__1_2_3": [
            ("Other", "Green is the fourth album, by Steve Hillage. 1977"),
            ("Third", ""),
        ],
    }
    assert golds(out, "test") == {
        "2hop__5_6": [
            ("Dup", "same"),
            ("Miquette & Co", "Miquette Giraudy (born 1953, Nice) plays."),
        ]
    }
    train = by_id(out, "train")
    assert train["2hop__1_2"].golden_answers == [
        "Miquette Giraudy",
        "M. Giraudy",
    ]  # once each, none blank
    assert (
        train["3hop1__1_2_3"].golden_answers[0] == "7"
        and train["3hop1__1_2_3"].metadata["type"] == "3hop1"
    )
    assert train["2hop__1_2"].question == "What of 2hop__1_2?"
    assert train["2hop__1_2"].metadata["question_decomposition"][1] == {
        "id": 101,
        "question": "#1 >> spouse",
        "answer": "x",
    }
    passages = sorted(texts(out).values())
    assert passages == sorted(
        [
            ("Green (album)", "Green is the fourth album, by Steve Hillage. “1977”"),
            ("Dup", "same"),
            ("Third", ""),
            ("Other", "Green is the fourth album, by Steve Hillage. 1977"),
            ("हिन्दी", "कि"),
            ("हिन्दी", "की"),
            ("Miquette & Co", "Miquette Giraudy (born 1953, Nice) plays."),
            ("東京", "東京は日本の首都。 \ufffd half an emoji"),
        ]
    )
    assert (result["unanswerable"], result["without_question_or_answer"], result["passages"]) == (
        1,
        1,
        8,
    )
    assert (result["train_questions"], result["train_judged"], result["test_judged"]) == (2, 2, 1)
    assert result["differs_from_published"]["train questions"] == {"found": 2, "published": 19_938}


def test_counts_are_checked(tmp_path):
    musique_files(tmp_path / "in")
    with pytest.raises(
        DataError, match=r"train questions: 2 found but 19,938 published.*strict=false"
    ):
        make("musique", str(tmp_path / "in"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()  # whole or not at all


def test_missing_files_are_named_with_their_address(tmp_path):
    with pytest.raises(
        DataError, match=r"musique_ans_v1.0_train.jsonl  from  https://drive.google.com/.*unpacked"
    ):
        make("musique", str(tmp_path), str(tmp_path / "out"), download=True)
    with pytest.raises(
        DataError, match=r"hotpot_train_v1.1.json  from  http://curtis.ml.cmu.edu/datasets/hotpot/"
    ):
        make("hotpotqa", str(tmp_path), str(tmp_path / "out"))


def test_ids_say_nothing_about_order_and_stay_the_same(tmp_path):
    """The same paragraphs in any order of rows give the same ids; those do not follow the order of
    the file.
    """
    g = random.Random(1)
    paragraphs = [(f"T{i}", f"text number {i}", i % 7 == 0) for i in range(70)]
    ids = []
    for n in range(2):
        g.shuffle(paragraphs)
        rows = {
            "dev": [
                musique_row(f"2hop__{n}_{i}", paragraphs[i : i + 10], []) for i in range(0, 70, 10)
            ]
        }
        musique_files(tmp_path / f"in{n}", rows)
        make(
            "musique",
            str(tmp_path / f"in{n}"),
            str(tmp_path / f"out{n}"),
            strict=False,
            train=False,
        )
        ids.append({text: key for key, text in texts(tmp_path / f"out{n}").items()})
    assert ids[0] == ids[1] and sorted(ids[0].values()) == [f"musique-p{i:05d}" for i in range(70)]
    order = [int(ids[0][f"T{i}", f"text number {i}"][-5:]) for i in range(70)]
    relevant = [n for i, n in enumerate(order) if i % 7 == 0]
    assert order != sorted(order) and 20 < sum(relevant) / len(relevant) < 50


def test_train_questions_put_aside_for_validation(tmp_path):
    rows = {
        "train": [musique_row(f"2hop__{i}_0", [GREEN], [0]) for i in range(60)],
        "dev": [musique_row("2hop__d_d", [GREEN], [0])],
    }
    musique_files(tmp_path / "in", rows)
    result = make(
        "musique", str(tmp_path / "in"), str(tmp_path / "out"), strict=False, dev_percent=30
    )
    train, dev, test = (set(by_id(tmp_path / "out", split)) for split in ("train", "dev", "test"))
    assert (
        not train & dev and len(train | dev) == 60 and 8 < len(dev) < 30 and test == {"2hop__d_d"}
    )
    assert result["dev_questions"] == len(dev) and result["dev_judged"] == len(
        golds(tmp_path / "out", "dev")
    )
    again = make(
        "musique", str(tmp_path / "in"), str(tmp_path / "out"), strict=False, dev_percent=30
    )
    assert again["already_there"]
    with pytest.raises(ConfigError, match="dev_percent=100"):
        make("musique", str(tmp_path / "in"), str(tmp_path / "o"), dev_percent=100)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"id": "2hop 1"}, "'2hop 1' must be non-empty, free of blanks"),
        ({"paragraphs": None}, "'paragraphs' is None; it must be a list"),
        ({"answer": ["x"]}, "'answer' is"),
        ({"answer_aliases": [["x"]]}, "'answer_aliases' is"),
        (
            {"paragraphs": [{"idx": 0, "title": "t", "paragraph_text": "x", "is_supporting": 1}]},
            "'is_supporting' is 1",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, message):
    musique_files(
        tmp_path / "in",
        {
            "dev": [
                musique_row("2hop__0_0", [GREEN], [0]),
                musique_row("2hop__1_1", [GREEN], [0]) | change,
            ]
        },
    )
    with pytest.raises(
        DataError, match=f"dev.jsonl:2: .*{re.escape(message)}|dev.jsonl:2: {re.escape(message)}"
    ):
        make("musique", str(tmp_path / "in"), str(tmp_path / "out"), strict=False, train=False)


def test_a_question_id_twice_is_an_error(tmp_path):
    musique_files(tmp_path / "in", {"dev": [musique_row("2hop__0_0", [GREEN], [0])] * 2})
    with pytest.raises(DataError, match="'2hop__0_0' occurs a second time"):
        make("musique", str(tmp_path / "in"), str(tmp_path / "out"), strict=False, train=False)


def test_pool_equals_a_slow_one(tmp_path):
    """De-duplication against pairwise comparison of letters alone."""
    g = random.Random(4)

    def letters(text):  # keeps letters, digits, marks and symbols
        return [
            c for c in html.unescape(text) if not c.isspace() and c not in ".,–-“”\"'()!&\u200b"
        ]

    pieces = [
        "a",
        "A",
        "b",
        " ",
        "  ",
        ".",
        ",",
        "–",
        "“b”",
        "é",
        "$",
        "5",
        "\u200b",
        "&amp;",
        "&",
        "(",
        "'",
    ]
    pool, kept = questions.Pool(), []
    for _ in range(1500):
        title, text = (g.choice("XY"), "".join(g.choices(pieces, k=g.randrange(6))))
        key = pool.add(title, text)
        same = next((k for k in kept if k[0] == title and letters(k[1]) == letters(text)), None)
        if same is None:
            kept.append((title, text, key))
        else:
            assert same[2] == key
    ids = pool.ids("x")
    passages = [{"id": i, "title": pool[key][0], "text": pool[key][1]} for key, i in ids.items()]
    assert len(kept) == len(ids) == len(passages)
    assert {(p["title"], p["text"]) for p in passages} == {
        (t, questions.clean(x)) for t, x, _ in kept
    }
    assert [p["id"] for p in passages] == [f"x-p{i:05d}" for i in range(len(kept))]
    assert {ids[key]: questions.clean(x) for _, x, key in kept} == {
        p["id"]: p["text"] for p in passages
    }


# ---------------------------------------------------------------------------------- hotpotqa, 2wiki


def hotpot_row(key, context, facts, **changes):
    return {
        "_id": key,
        "question": f"{key}?",
        "answer": "yes",
        "supporting_facts": facts,
        "context": context,
        "type": "bridge",
        "level": "hard",
    } | changes


ED = ["Ed Wood &amp; film", ["Ed Wood is a 1994 film.", " It stars Johnny Depp.", ""]]
SCOTT = ["Scott Derrickson", ["Scott  Derrickson is a director."]]
HOTPOT_ROWS = [
    hotpot_row("a1", [ED, SCOTT, ["Noise", []]], [["Scott Derrickson", 0], [ED[0], 0], [ED[0], 1]]),
    hotpot_row(
        "a2", [ED, ["Other", ["x"]]], [["Gone", 0], [ED[0], 0]]
    ),  # a gold is not in the context
    hotpot_row("a3", [SCOTT, SCOTT], [["Scott Derrickson", 5]]),
]  # a sentence number that is not there


def test_hotpotqa(tmp_path):
    put(f"{tmp_path}/in/hotpot_dev_distractor_v1.json", json.dumps(HOTPOT_ROWS))
    result = make("hotpotqa", f"{tmp_path}/in", f"{tmp_path}/out", strict=False, train=False)
    assert golds(tmp_path / "out", "test") == {
        "a1": [
            ("Scott Derrickson", "Scott Derrickson is a director."),
            ("Ed Wood & film", "Ed Wood is a 1994 film. It stars Johnny Depp."),
        ],
        "a3": [("Scott Derrickson", "Scott Derrickson is a director.")],
    }
    assert (
        result["questions_without_all_gold"] == 1
        and result["test_questions"] == 3
        and result["test_judged"] == 2
    )
    assert by_id(tmp_path / "out", "test")["a2"].metadata == {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Gone", 0], [ED[0], 0]],
    }
    assert not (tmp_path / "out/train.jsonl").exists()


@pytest.mark.parametrize(
    "row, message",
    [
        (hotpot_row("a", [["T", "text"]], []), r"object 1: a paragraph is \['T', 'text'\]"),
        (hotpot_row("a", [ED], ["T"]), "object 1: supporting_facts is"),
        (
            {
                "_id": "a",
                "question": "test sets have no answer",
                "context": [],
                "supporting_facts": [],
            },
            "object 1: 'answer'",
        ),
    ],
)
def test_wrong_hotpot_rows_are_named(tmp_path, row, message):
    put(f"{tmp_path}/in/hotpot_dev_distractor_v1.json", json.dumps([row]))
    with pytest.raises(DataError, match=message):
        make("hotpotqa", f"{tmp_path}/in", f"{tmp_path}/out", strict=False, train=False)


def test_2wiki_takes_aliases_and_demonyms_of_the_answers_entity(tmp_path):
    rows = [
        hotpot_row(
            "w1",
            [["A", ["First", "sentence .", "Second"]], ["B", ["b"]]],
            [["A", 0], ["B", 0]],
            answer="The Mask",
            answer_id="Q1",
            evidences=[["s", "r", "o"]],
            type="compositional",
        ),
        hotpot_row("w2", [["B", ["b"]]], [["B", 0]], answer="no", answer_id=None),
        hotpot_row("w3", [["B", ["b"]]], [["B", 0]], answer="x"),
    ]  # the first release has no answer_id
    put(f"{tmp_path}/in/data_ids/dev.json", json.dumps(rows))
    put(
        f"{tmp_path}/in/id_aliases.json",
        jsonl(
            [
                {
                    "Q_id": "Q1",
                    "aliases": [f"alias {i}" for i in range(190)] + ["The Mask"],
                    "demonyms": ["Maskian"],
                },
                {"Q_id": "Q2", "aliases": [], "demonyms": []},
            ]
        ),
    )
    make("2wiki", f"{tmp_path}/in", f"{tmp_path}/out", strict=False, train=False)
    found = by_id(tmp_path / "out", "test")
    assert found["w1"].golden_answers == ["The Mask"] + [f"alias {i}" for i in range(190)] + [
        "Maskian"
    ]
    assert found["w2"].golden_answers == ["no"] and found["w3"].golden_answers == ["x"]
    assert golds(tmp_path / "out", "test")["w1"] == [("A", "First sentence . Second"), ("B", "b")]
    assert found["w1"].metadata["evidences"] == [["s", "r", "o"]]


# ------------------------------------------------------------------------------------------- wiki18

WIKI = [
    '{"id": "0", "contents": "\\"Evan Morris\\"\\nEvan Morris was \\"a\\" lobbyist.\\nNew line"}',
    '{"id": 1, "contents": "\\"\\"\\"Heroes\\"\\" (album)\\"\\n\\"Heroes\\" is a song"}',
    '{"id": "2", "contents": "\\"\\"\\nno title"}',
    "",
    '{"id": "3", "contents": "no quotes\\ntext\\u2028more \\ud83d"}',
    '{"id": "7", "contents": "one line alone"}',
    '{"id": "9", "title": "\\"Kept apart\\"", "text": " body "}',
]
WIKI_PASSAGES = [
    ("0", "Evan Morris", 'Evan Morris was "a" lobbyist.\nNew line'),
    ("1", '""Heroes"" (album)', '"Heroes" is a song'),
    ("2", "", "no title"),
    ("3", "no quotes", "text\u2028more \ufffd"),
    ("7", "", "one line alone"),
    ("9", "Kept apart", "body"),
]


@pytest.mark.parametrize(
    "name", ["wiki-18.jsonl.gz", "wiki-18.jsonl", "retrieval-corpus/wiki18_100w.jsonl"]
)
def test_wiki18(tmp_path, name):
    raw = b"\xef\xbb\xbf" + "\n".join(WIKI).encode()
    put(f"{tmp_path}/in/{name}", gzip.compress(raw) if name.endswith(".gz") else raw)
    result = make("wiki18", f"{tmp_path}/in", f"{tmp_path}/out", strict=False)
    assert [
        (p.id, p.title, p.text) for p in read_corpus(f"{tmp_path}/out/corpus.jsonl")
    ] == WIKI_PASSAGES
    assert (result["passages"], result["without_title"], result["without_text"]) == (6, 2, 0)
    assert result["differs_from_published"] == {"passages": {"found": 6, "published": 21_015_324}}


@pytest.mark.parametrize(
    "lines, message",
    [
        (['{"contents": "a"}'], ":1: 'id' is missing"),
        (['{"id": "1", "contents": "a"}', '{"id": "2", "conte'], ":2: not valid JSON"),
        (['{"id": "1", "content": "a"}'], ":1: 'title' is missing"),
    ],
)
def test_wrong_wiki18_lines_are_named(tmp_path, lines, message):
    put(f"{tmp_path}/in/wiki-18.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    with pytest.raises(DataError, match=f"wiki-18.jsonl.gz{message}"):
        make("wiki18", f"{tmp_path}/in", f"{tmp_path}/out", strict=False)


def test_a_broken_download_is_an_error(tmp_path):
    packed = gzip.compress(
        "\n".join(f'{{"id": "{i}", "contents": "{i} {i}"}}' for i in range(50_000)).encode()
    )
    for content in (
        packed[:-2000],
        packed[:5000] + b"\0" * 100 + packed[5100:],
        b"<html>busy</html>",
    ):
        put(f"{tmp_path}/in/wiki-18.jsonl.gz", content)
        with pytest.raises(DataError, match="fetch it again|not valid JSON|not UTF-8"):
            make("wiki18", f"{tmp_path}/in", f"{tmp_path}/out", strict=False)
        assert not os.path.exists(f"{tmp_path}/out")


def test_wiki18_needs_the_same_memory_for_any_length(tmp_path):
    peaks = []
    for n in (2_000, 20_000):
        with gzip.open(f"{tmp_path}/wiki-18.jsonl.gz", "wt", 1) as f:
            f.writelines(
                f'{{"id": "{i}", "contents": "\\"T{i}\\"\\n{"word " * 100}"}}\n' for i in range(n)
            )
        tracemalloc.start()
        make("wiki18", str(tmp_path), f"{tmp_path}/out{n}", strict=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000  # 18,000 passages more are 10 MB of text


def test_flashrags_files_are_read_as_they_are(tmp_path):
    put(
        f"{tmp_path}/dev.jsonl",
        jsonl(
            [
                {
                    "id": "dev_0",
                    "question": "Same nationality?",
                    "golden_answers": ["yes"],
                    "metadata": {"context": {"title": ["Ed"], "sentences": [["Ed is."]]}},
                },
                {"id": "dev_1", "question": "number?", "golden_answers": [1999, 2.5]},
                {"id": "dev_2", "question": "plain?", "golden_answers": "one"},
            ]
        ),
    )
    found = [q.golden_answers for q in read_questions(f"{tmp_path}/dev.jsonl")]
    assert found == [["yes"], ["1999", "2.5"], ["one"]]


# --------------------------------------------------------------------------------------- end to end


def test_prepare_index_search_and_evaluate(tmp_path):
    """The chain of a multi-hop set; every number is known by hand."""
    facts = [
        ("Green", "Green is an album by Steve Hillage."),
        ("Hillage", "Steve Hillage married Miquette Giraudy."),
        ("Fox", "The quick brown fox jumps."),
        ("Dog", "A lazy dog sleeps."),
    ]
    rows = {
        "dev": [
            musique_row(
                "2hop__1_1",
                [(t, x, t in ("Green", "Hillage")) for t, x in facts],
                [0, 1],
                question="Who married the maker of Green, Steve Hillage?",
            ),
            musique_row(
                "2hop__2_2",
                [(t, x, t in ("Fox", "Dog")) for t, x in facts],
                [2, 3],
                question="Which fox is brown?",
                answer="the fox",
            ),
        ]
    }
    musique_files(tmp_path / "in", rows)
    words = [
        "musique",
        f"source={tmp_path}/in",
        f"out={tmp_path}/set",
        "strict=false",
        "train=false",
    ]
    done = subprocess.run(
        [sys.executable, f"{ROOT}/prepare.py", *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert (made["test_questions"], made["test_judged"], made["passages"]) == (2, 2, 4)
    index = RetrieverConfig(
        kind="bm25", corpus=f"{tmp_path}/set/corpus.jsonl", index=f"{tmp_path}/index"
    )
    retriever.main(index)
    judged = {
        "questions": f"{tmp_path}/set/test.jsonl",
        "qrels": f"{tmp_path}/set/test.qrels",
        "samples": 200,
    }
    searched = evaluate.main(
        EvaluateConfig(**judged, query=["question"], retriever=index, out=f"{tmp_path}/run")
    )
    assert (
        searched["mrr"] == 1.0 and searched["recall@10"] == 0.75 and searched["all_gold@10"] == 0.5
    )
    with open(tmp_path / "run/question.trec", encoding="utf-8") as f:
        found = [line.split()[:3:2] for line in f]
    put(
        f"{tmp_path}/answers.jsonl",
        jsonl(
            [
                {
                    "id": q,
                    "pred": pred,
                    "searches": 1,
                    "well_formed": True,
                    "error": None,
                    "retrieved": [p for query, p in found if query == q],
                }
                for q, pred in (("2hop__1_1", "Miquette Giraudy"), ("2hop__2_2", "a brown fox"))
            ]
        ),
    )
    scored = evaluate.main(
        EvaluateConfig(**judged, answers=[f"{tmp_path}/answers.jsonl"], out=f"{tmp_path}/scores")
    )
    assert (scored["em"], scored["f1"], scored["acc"]) == (0.5, pytest.approx((1 + 2 / 3) / 2), 1.0)
    assert (
        scored["gold_recall"],
        scored["all_gold"],
        scored["searches"],
        scored["well_formed"],
    ) == (0.75, 0.5, 1, 1)
    assert sorted(os.listdir(tmp_path / "scores")) == [
        "config.yaml",
        "intermediate_data.json",
        "metric_score.txt",
        "metrics.json",
        "report.html",
        "table.md",
    ]
