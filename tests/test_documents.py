"""sources/documents.py: cutting against slow loops, and MultiHop-RAG's questions."""

import json
import random
import re

import pytest
from official import make, put
from test_questions import by_id, golds, jsonl
from tiny import tiny_tokenizer

from data import DataError, one_line, read_corpus, read_jsonl
from sources import documents


def slow_spans(text, starts, size, overlap):
    """Every window's best cut by looking at each place in turn; breaks told by regular expressions
    on both sides.
    """
    bounds = starts[:] if starts else [0]
    bounds[0] = 0
    bounds.append(len(text))

    def strength(at):
        left, right = text[:at], text[at:]
        gap = re.search(r"\s*\Z", left)[0] + re.match(r"\s*", right)[0]
        before = left.rstrip()
        told = re.sub(r"[\"'”’)\]»]+\Z", "", before) or before[:1]
        if "\n" in gap:
            return 4
        if re.search(r"[。！？]\Z", told) or gap and re.search(r"[.!?…]\Z", told):
            return 3
        return 2 if gap and re.search(r"[,;:—–]\Z", told) else 1 if gap else 0

    spans, first = [], 0
    while len(bounds) - 1 - first > size:
        best = None
        for k in range(first + size // 2 + 1, first + size + 1):
            if best is None or strength(bounds[k]) >= strength(bounds[best]):
                best = k
        spans.append((bounds[first], bounds[best]))
        first = best - overlap
    return [*spans, (bounds[first], bounds[-1])]


def random_text(g):
    words = [
        "word",
        "Ünïcode",
        "e.g.",
        "end.",
        "end!” ",
        "pause,",
        "x" * 30,
        "東京都。",
        "\n",
        "\n\n",
        " ",
        "\u2028",
        "3.5",
        "(a)",
    ]
    return "".join(g.choice(words) + g.choice([" ", "", " "]) for _ in range(g.randrange(120)))


def test_chunks_equal_slow_ones_and_keep_their_promises():
    g = random.Random(8)
    bytewise = tiny_tokenizer()
    for n in range(250):
        text, size = random_text(g), g.randrange(2, 40)
        overlap = g.randrange(size // 2 + 1)
        starts = documents.token_starts(text, bytewise if n % 3 == 0 else None)
        spans = documents.chunk_spans(text, starts, size, overlap)
        assert spans == slow_spans(text, starts, size, overlap), (text, size, overlap)
        begin = {b: k for k, b in reversed(list(enumerate([0, *starts[1:]])))} | {
            len(text): max(1, len(starts))
        }
        for i, (start, end) in enumerate(spans):
            assert len([s for s in [0, *starts[1:]] if start <= s < end]) <= size or n % 3 == 0
            if i:  # `overlap` tokens back; byte tokens of one character begin at one place
                assert n % 3 == 0 or begin[spans[i - 1][1]] - begin[start] == overlap
        if not overlap:
            assert (
                "".join(text[a:b] for a, b in spans) == text
            )  # in order, nothing lost, nothing twice
        assert spans[0][0] == 0 and spans[-1][1] == len(text)


def test_cuts_prefer_lines_then_sentences_then_pauses():
    text = (
        "one two three. four five, six seven\n"
        "eight nine ten. eleven twelve thirteen, fourteen fifteen sixteen"
    )

    def cut(size):
        return [
            text[a:b] for a, b in documents.chunk_spans(text, documents.token_starts(text), size)
        ]

    assert cut(12) == ["one two three. four five, six seven\n", text.partition("\n")[2]]
    assert cut(10)[1:] == ["eight nine ten. eleven twelve thirteen, ", "fourteen fifteen sixteen"]
    assert cut(6)[:2] == ["one two three. ", "four five, six seven\n"]
    assert cut(100) == [text]


@pytest.mark.parametrize("size, overlap", [(1, 0), (10, 6), (10, -1)])
def test_sizes_that_cannot_be(size, overlap):
    with pytest.raises(DataError, match=f"chunk_size={size} and overlap={overlap}"):
        documents.chunk_spans("text", [0], size, overlap)


def test_chunk_command(tmp_path):
    put(
        f"{tmp_path}/in.jsonl",
        jsonl(
            [
                {
                    "id": "d0",
                    "title": "Title",
                    "text": "a b c d. e f g h. i j",
                    "metadata": {"source": "The Verge", "n": [1]},
                },
                {
                    "id": 1,
                    "contents": '"Quoted "inner" title"\nshort',
                    "published_at": "2023-09-26",
                    "source": "",
                },
                {"id": "d2", "contents": "no line end here"},
            ]
        ),
    )
    source = f"{tmp_path}/in.jsonl"
    result = make("chunk", source, f"{tmp_path}/out", chunk_size=5)
    with open(tmp_path / "out/corpus.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    assert [(r["id"], r["title"], r["text"]) for r in rows] == [
        ("c0", "Title", "source: The Verge\n\na b c d."),
        ("c1", "Title", "source: The Verge\n\ne f g h."),
        ("c2", "Title", "source: The Verge\n\ni j"),
        ("c3", 'Quoted "inner" title', "published_at: 2023-09-26\n\nshort"),
        ("c4", "", "no line end here"),
    ]
    assert [r["metadata"]["doc_chunk_id"] for r in rows] == [
        0,
        1,
        2,
        0,
        0,
    ]  # each its own: the original's bug
    assert rows[1]["metadata"] == {
        "source": "The Verge",
        "n": [1],
        "doc_id": "d0",
        "doc_chunks": 3,
        "doc_chunk_id": 1,
    }
    assert (result["documents"], result["passages"]) == (3, 5) and make(
        "chunk", source, f"{tmp_path}/out", chunk_size=5
    )["already_there"]
    make("chunk", source, f"{tmp_path}/plain", chunk_size=0, context_fields="", prefix="p")
    assert next(read_corpus(f"{tmp_path}/plain/corpus.jsonl")).contents == "a b c d. e f g h. i j"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"title": ["t"]}, "in.jsonl:1: 'title' is"),
        ({"metadata": [1]}, "in.jsonl:1: 'metadata' is"),
    ],
)
def test_chunk_names_a_wrong_type(tmp_path, row, message):
    put(f"{tmp_path}/in.jsonl", jsonl([{"id": "d", "title": 1984, "text": "a b"} | row]))
    with pytest.raises(DataError, match=message):
        make("chunk", source=f"{tmp_path}/in.jsonl", out=f"{tmp_path}/out", chunk_size=0)


def test_chunk_counts_with_a_tokenizer(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tok")
    text = " ".join(f"wörd{i}" for i in range(40))
    put(f"{tmp_path}/in.jsonl", jsonl([{"id": "d", "title": "", "text": text}]))
    make(
        "chunk",
        source=f"{tmp_path}/in.jsonl",
        out=f"{tmp_path}/out",
        chunk_size=30,
        overlap=5,
        tokenizer=str(tmp_path / "tok"),
    )
    parts = [p.text for p in read_corpus(f"{tmp_path}/out/corpus.jsonl")]
    assert (
        all(len(part.encode()) <= 30 for part in parts) and len(parts) >= len(text.encode()) // 30
    )
    with pytest.raises(DataError, match="tokenizer=.*tokenizer.json"):
        make(
            "chunk",
            source=f"{tmp_path}/in.jsonl",
            out=f"{tmp_path}/o2",
            tokenizer=f"{tmp_path}/none",
        )
    with pytest.raises(DataError, match="no such file"):
        make("chunk", source=f"{tmp_path}/none.jsonl", out=f"{tmp_path}/o3")


def article(n, body, **changes):
    return {
        "title": f"Title  {n}",
        "author": None,
        "source": f"Outlet {n}",
        "published_at": f"2023-09-2{n}T17:00:00+00:00",
        "category": "technology",
        "url": f"https://news.example/{n}",
        "body": body,
    } | changes


BODY = (
    "First sentence here now. Second  one is\n\nlonger than it. A third sentence ends this. "
    "Fourth comes, fifth follows it. Last words."
)


ARTICLES = [
    article(0, BODY),
    article(1, "Only one sentence in it."),
    article(2, "Ünïcode 東京 text.", url=None),
]


def mhr_question(n, facts, **changes):
    return {
        "query": f"Question {n}?",
        "answer": "Yes",
        "question_type": "comparison_query" if facts else "null_query",
        "evidence_list": [
            {"title": ARTICLES[a]["title"], "url": ARTICLES[a]["url"], "fact": fact, "source": "s"}
            for a, fact in facts
        ],
    } | changes


MHR = [
    mhr_question(0, [(0, "First sentence here now."), (1, "Only one sentence in it.")]),
    mhr_question(
        1, [(0, "Second one is longer  than it.")]
    ),  # white space differs; a cut may divide it
    mhr_question(2, [], answer="Insufficient information."),
    mhr_question(
        3, [(2, "東京 text."), (0, "this was never written")]
    ),  # half of it is not there: not judged
    mhr_question(4, [(2, "Ünïcode 東京")]),  # no url: found by title
    *(mhr_question(n, [(1, "one sentence")]) for n in range(5, 12)),
]


def test_multihoprag(tmp_path):
    put(f"{tmp_path}/in/corpus.json", json.dumps(ARTICLES))
    put(f"{tmp_path}/in/dataset/MultiHopRAG.json", json.dumps(MHR))
    result = make(
        "multihoprag",
        f"{tmp_path}/in",
        f"{tmp_path}/out",
        strict=False,
        chunk_size=6,
        test_questions=4,
    )
    rows = [f"multihoprag-{i}" for i in range(12)]
    random.seed(42)  # as convert_dataset.py of deepsearch-rl does it
    random.shuffle(rows)
    test, train = by_id(tmp_path / "out", "test"), by_id(tmp_path / "out", "train")
    assert list(test) == rows[:4] and list(train) == rows[4:]
    found = golds(tmp_path / "out", "test") | golds(tmp_path / "out", "train")
    before = "source: Outlet 0\npublished_at: 2023-09-20T17:00:00+00:00\n\n"
    assert found["multihoprag-0"] == [
        ("Title 0", before + "First sentence here now."),
        (
            "Title 1",
            "source: Outlet 1\npublished_at: 2023-09-21T17:00:00+00:00\n\nOnly one sentence in it.",
        ),
    ]
    assert found["multihoprag-1"] == [
        ("Title 0", before + "Second  one is\n\nlonger than"),
        ("Title 0", before + "it. A third sentence ends"),
    ]
    assert [title for title, _ in found["multihoprag-4"]] == ["Title 2"]
    assert not {"multihoprag-2", "multihoprag-3"} & found.keys()
    questions_ = test | train
    assert questions_["multihoprag-2"].golden_answers == ["Insufficient information."]
    assert questions_["multihoprag-0"].metadata["type"] == "comparison_query"
    assert (
        questions_["multihoprag-0"].metadata["evidence_list"][0]["fact"]
        == "First sentence here now."
    )
    assert (
        result["articles"],
        result["facts"],
        result["facts_not_in_their_article"],
        result["null_questions"],
        result["questions_without_all_gold"],
    ) == (3, 13, 1, 1, 1)
    assert "sha256 of" in " ".join(result["differs_from_published"])
    with open(tmp_path / "out/corpus.jsonl", encoding="utf-8") as f:
        chunks = [json.loads(line) for line in f]
    assert [c["id"] for c in chunks] == [f"multihoprag-c{i:05d}" for i in range(len(chunks))]
    first = [c for c in chunks if c["metadata"]["doc_id"] == "0"]
    assert [c["metadata"]["doc_chunk_id"] for c in first] == list(range(len(first)))
    assert " ".join(c["text"].removeprefix(before) for c in first).split() == BODY.split()
    assert (
        first[0]["metadata"]["url"] == "https://news.example/0"
        and "body" not in first[0]["metadata"]
    )


def test_with_overlap_a_fact_is_one_passage(tmp_path):
    """Two passages that both hold a fact whole must not both be needed for "all gold passages
    found".
    """
    text = documents.Article("abcdef", [(0, 4, "p0"), (2, 6, "p1")])
    assert text.holding("c  d") == ["p0"] and text.holding("c d e") == ["p1"]
    assert text.holding("b c d e") == ["p0", "p1"]
    assert text.holding("x") == text.holding(" ") == text.holding("") == []


@pytest.mark.parametrize("key", ["title", "url"])
def test_multihoprag_names_a_wrong_type(tmp_path, key):
    put(f"{tmp_path}/in/corpus.json", json.dumps(ARTICLES))
    question = mhr_question(0, [(0, "x")])
    question["evidence_list"][0][key] = ["T"]
    put(f"{tmp_path}/in/MultiHopRAG.json", json.dumps([question]))
    with pytest.raises(
        DataError, match=rf"HopRAG.json: object 1: '{key}' is \['T'\]; it must be a"
    ):
        make("multihoprag", f"{tmp_path}/in", f"{tmp_path}/out", strict=False)


def test_multihoprag_without_context_and_whole_documents(tmp_path):
    put(f"{tmp_path}/in/corpus.json", json.dumps(ARTICLES))
    put(f"{tmp_path}/in/MultiHopRAG.json", json.dumps(MHR))
    result = make(
        "multihoprag",
        f"{tmp_path}/in",
        f"{tmp_path}/out",
        strict=False,
        chunk_size=0,
        context_fields="title",
        test_questions=4,
        dev_percent=40,
    )
    assert [(p.title, p.text) for p in read_corpus(f"{tmp_path}/out/corpus.jsonl")] == [
        (one_line(a["title"]), a["body"]) for a in ARTICLES
    ]
    assert (
        result["train_questions"] + result["dev_questions"] == 8 and result["test_questions"] == 4
    )


def jsonl_rows(path):
    return [row for _, row in read_jsonl(str(path))]


NOVELS = [
    {"corpus_name": "Novel-1", "context": "Anna went home. " * 40},
    {"corpus_name": "Novel-2", "context": "Ben sang at night. " * 3},
]


def graphrag_question(n, **changes):
    return {
        "id": f"Novel-{n}",
        "source": "Novel-1",
        "question": f"Who  is number {n}?",
        "answer": f" Anna {n} ",
        "question_type": "Fact Retrieval",
        "evidence": "Anna is at home.",
    } | changes


@pytest.mark.parametrize("folder", ["Datasets", "Datas", ""])
def test_graphrag_bench(tmp_path, folder):
    rows = [graphrag_question(0), graphrag_question(1), graphrag_question(0, answer="Ben")]
    rows[1] |= {"question_type": "Complex Reasoning", "evidence_triple": ["(a, b, c)"], "type": "x"}
    rows.append(graphrag_question(2, answer="?!"))  # nothing could be scored
    corpus, questions_ = ("Corpus", "Questions") if folder else ("", "")
    put(tmp_path / "files" / folder / corpus / "novel.json", json.dumps(NOVELS))
    put(tmp_path / "files" / folder / questions_ / "novel_questions.json", json.dumps(rows))
    result = make(
        "graphrag-novel", tmp_path / "files", tmp_path / "out", strict=False, chunk_size=50
    )
    assert (result["documents"], result["questions"], result["test_judged"]) == (2, 4, 0)
    assert (result["test_questions"], result["without_question_or_answer"]) == (3, 1)
    passages = jsonl_rows(tmp_path / "out/corpus.jsonl")
    assert [p["id"] for p in passages] == [f"graphrag-novel-c{i:05d}" for i in range(len(passages))]
    for novel in NOVELS:  # the passages of a document partition it, in order
        own = [p for p in passages if p["metadata"]["doc_id"] == novel["corpus_name"]]
        assert " ".join(p["text"] for p in own) == novel["context"].strip()
        assert all(p["title"] == "" and len(p["text"].split()) <= 50 for p in own)
    found = jsonl_rows(tmp_path / "out/test.jsonl")
    assert [(q["id"], q["question"], q["golden_answers"]) for q in found] == [
        ("Novel-0", "Who is number 0?", ["Anna 0"]),
        ("Novel-1", "Who is number 1?", ["Anna 1"]),
        ("Novel-0-2", "Who is number 0?", ["Ben"]),  # the published file has such a pair
    ]
    assert found[1]["metadata"] == {
        "type": "Complex Reasoning",
        "source": "Novel-1",
        "evidence": "Anna is at home.",
        "evidence_triple": ["(a, b, c)"],
    }
    assert not (tmp_path / "out/test.qrels").exists()


def test_graphrag_bench_counts_are_the_published_ones(tmp_path):
    put(tmp_path / "files/novel.json", json.dumps(NOVELS))
    put(tmp_path / "files/novel_questions.json", json.dumps([graphrag_question(0)]))
    with pytest.raises(DataError, match="documents: 2 found but 20 published"):
        make("graphrag-novel", tmp_path / "files", tmp_path / "out")
