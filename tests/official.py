"""Small public data sets in their official formats, with the parts that break readers."""

import csv
import io
import json
import os
import sys
import zipfile

import pytest

import prepare
from config import check_fields
from data import read_turns
from sources import conversations, files


def put(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(content if isinstance(content, bytes) else content.encode("utf-8"))


def make(command, source, out, **settings):
    """`prepare.py COMMAND source=… out=… …` without a process."""
    config, function, _ = prepare.COMMANDS[command]
    cfg = config(source=str(source), out=str(out), **settings)
    check_fields(cfg)
    return function(cfg)


def known(monkeypatch, name, counts):
    """The published counts of a data set become those of a fixture."""
    monkeypatch.setitem(files.published()[name], "counts", counts)


def unchecked(monkeypatch, name):
    """Any bytes will do for the files of a data set."""
    for file in files.published()[name]["files"].values():
        monkeypatch.delitem(file, "sha256", raising=False)


def lines(path):
    with open(path, encoding="utf-8") as f:
        return f.read().split("\n")[:-1]


def turns_by_id(out, split):
    return {t.query_id: t for t in read_turns(f"{out}/{split}.jsonl")}


PASSAGES = [  # id, text, title: csv quoting, Wikipedia's own quotes, tabs inside a text
    ("1", 'He said "no", twice.\tThen he left.', "Article [SEP] Introduction"),
    ("2", '"Quoted from the first sign" on', 'The "Big" One [SEP] History'),
    ("3", "Zoë — naïve, 東京\u2028second line?", "Unicode [SEP] A [SEP] B"),
    ("4", "", "Blank [SEP] text"),
    ("5", "no title here", ""),
    ("6", "two\nlines", "Line ends [SEP] inside"),
    ("10", "ten", "Ten"),
]


def topiocqa_tsv(rows, end="\n"):
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator=end)
    writer.writerow(["id", "text", "title"])
    writer.writerows(rows)
    return text.getvalue()


def topiocqa_rows(split):
    """Two conversations of 11 and 2 turns: turn 10 comes after turn 9, whatever the strings say."""
    turns, golds = [], []
    for number, length in ((1, 11), (2, 2)):
        context = []
        for turn in range(1, length + 1):
            question, answer = (
                f"{split} q{number}.{turn} \ud83d",
                "UNANSWERABLE" if turn == 2 else f"a{number}.{turn}",
            )
            turns.append(
                {
                    "Conversation_no": number,
                    "Turn_no": turn,
                    "Question": question,
                    "Answer": answer,
                    "Topic": f"topic {turn > 5}",
                    "Topic_section": "section",
                    "Context": list(context),
                    "Rationale": "r",
                    "is_nq": False,
                }
            )
            golds.append(
                {
                    "conv_id": number,
                    "turn_id": turn,
                    "question": " [SEP] ".join([*context, question]),
                    "answers": [answer],
                    "negative_ctxs": [],
                    "hard_negative_ctxs": [],
                    "positive_ctxs": [
                        {"title": "t", "text": "x", "passage_id": str(turn % 6 + 1)},
                        {"title": "second", "text": "never gold", "passage_id": "10"},
                    ],
                }
            )
            context += [question, answer]
    return turns, golds


def topiocqa_source(folder, bom=b"", end="\n"):
    for split in ("train", "dev"):
        turns, golds = topiocqa_rows(split)
        put(f"{folder}/topiocqa_{split}.json", bom + json.dumps(turns).encode())
        put(
            f"{folder}/retriever/all_history/{split}.json",
            bom + json.dumps(golds, indent=1).replace("\n", end).encode(),
        )
    put(f"{folder}/full_wiki_segments.tsv", bom + topiocqa_tsv(PASSAGES, end).encode())
    return str(folder)


@pytest.fixture
def topiocqa_counts(monkeypatch):
    known(
        monkeypatch,
        "topiocqa",
        {
            "passages": 7,
            "train_turns": 13,
            "train_conversations": 2,
            "test_turns": 13,
            "test_conversations": 2,
        },
    )


def qrecc_row(conversation, turn, question, answer, golds, source="quac"):
    return {
        "Conversation_no": conversation,
        "Turn_no": turn,
        "Conversation_source": source,
        "Context": [],
        "Question": question,
        "Truth_rewrite": f"rewritten {question}",
        "Transformer_rewrite": f"T5 {question}",
        "Truth_answer": answer,
        "Truth_passages": golds,
    }


def qrecc_source(folder):
    train = [
        qrecc_row(1, 1, "first", "one", ["http://a.com/x_p0"]),
        qrecc_row(1, 2, "no gold", "", []),
        qrecc_row(
            1, 3, "third", "three", ["http://b.com/y_p1", "http://a.com/x_p1", "http://b.com/y_p1"]
        ),
        *(
            qrecc_row(1, n, f"turn {n}", f"answer {n}", ["backfill_p0"] if n == 10 else [])
            for n in range(4, 12)
        ),
        qrecc_row(2, 1, "new conversation", "x", [], "trec"),
    ]
    test = [qrecc_row(1, 1, "test question", "t", ["http://b.com/y_p0"], "nq")]
    put(f"{folder}/scai-qrecc21-training-turns.json", json.dumps(train))
    put(f"{folder}/scai-qrecc21-test-turns.json", json.dumps(test))
    root = "collection-paragraph"
    members = [  # the archive's own order: wayback first, backfill before wayback's second file
        (
            f"{root}/wayback/w1.jsonl",
            [("http://b.com/y_p0", "way one"), ("http://b.com/y_p1", "half \ud83d emoji")],
        ),
        (f"{root}/wayback-backfill/z.jsonl", [("backfill_p0", "filled")]),
        (
            f"{root}/commoncrawl/c2.jsonl",
            [("http://a.com/x_p0", 'tab\there "q"'), ("http://a.com/x_p1", "   ")],
        ),
        (f"{root}/wayback/w0.jsonl", [("other_p0", "")]),
        (f"{root}/commoncrawl/c1.jsonl", [("http://a.com/z_p0", "line\u2028sep")]),
    ]
    os.makedirs(folder, exist_ok=True)
    with zipfile.ZipFile(f"{folder}/passages.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{root}/README.txt", "not a passage file")
        for name, rows in members:
            bom, end = ("\ufeff", "\r\n") if name.endswith("c2.jsonl") else ("", "\n")
            archive.writestr(
                name, bom + "".join(json.dumps({"id": i, "contents": t}) + end for i, t in rows)
            )
    return str(folder)


QRECC_TRUE = {"passages": 7, "train_rows": 12, "test_rows": 1, "train_turns": 3, "test_turns": 1}


def rewrite_rows(path, change):
    with open(path, encoding="utf-8") as f:
        rows = json.load(f)
    put(path, json.dumps(change(rows)))


def canard_rows():
    """One dialogue with everything the rules speak of, and a second that repeats one of its
    answers.
    """
    said = [
        ("What  happened?", "It began in late  1969."),
        ("Why?", "CANNOTANSWER"),
        ("And then?", "I don't know."),
        ("When?", "He died in the spring."),
        ("Really?", "yes"),
        ("How?", "too short here"),
        ("Who?", "The band's own label did."),
        ("Last?", "never seen"),
    ]
    rows = []
    for dialogue, article, pairs in (
        ("C_x_0", "Frank Zappa", said),
        ("C_y_1", "Frank Zappa", [said[0], said[3], ("End?", "")]),
    ):
        for n in range(1, len(pairs) + 1):
            history = [article, "Disbandment", *(text for pair in pairs[: n - 1] for text in pair)]
            rows.append(
                {
                    "History": history,
                    "QuAC_dialog_id": dialogue,
                    "Question": pairs[n - 1][0],
                    "Question_no": n,
                    "Rewrite": f"{pairs[n - 1][0]} (of {article})",
                }
            )
    return rows


def mtrag_source(folder):
    dialogues = [
        ("aaa", "govt", [("q1", "a1"), ("q2  x", " a2\n"), ("q3", "a3")]),
        ("bbb", "clapnq", [("Q1", "A1")]),
    ]
    tasks, qrels, rewrites = (
        [],
        {d: [] for d in conversations.DOMAINS},
        {d: [] for d in conversations.DOMAINS},
    )
    for key, domain, pairs in dialogues:
        for n, (question, answer) in enumerate(pairs, 1):
            said = [
                {"speaker": s, "text": t}
                for pair in pairs[: n - 1]
                for s, t in zip(("user", "agent"), pair)
            ]
            tasks.append(
                {
                    "conversation_id": key,
                    "task_id": f"{key}<::>{n}",
                    "turn": str(n),
                    "contexts": [],
                    "input": [*said, {"speaker": "user", "text": question}],
                    "targets": [{"speaker": "agent", "text": answer}],
                    "Collection": f"mt-rag-{domain}-elser",
                }
            )
            if (key, n) != (
                "aaa",
                1,
            ):  # an unanswerable turn has no qrels and stays in the contexts
                qrels[domain].append(f"{key}<::>{n}\t{domain}-{n}\t1")
                rewrites[domain].append(
                    {"_id": f"{key}<::>{n}", "text": f"|user|:  rewritten {question} "}
                )
    put(
        f"{folder}/mtrag-human/generation_tasks/reference.jsonl",
        "".join(json.dumps(t) + "\n" for t in tasks),
    )
    for domain in conversations.DOMAINS:
        base = f"{folder}/mtrag-human/retrieval_tasks/{domain}"
        put(
            f"{base}/qrels/dev.tsv", "\r\n".join(["query-id\tcorpus-id\tscore", *qrels[domain], ""])
        )
        put(
            f"{base}/{domain}_rewrite.jsonl",
            "".join(json.dumps(r) + "\n" for r in rewrites[domain]),
        )
        rows = [
            {
                "_id": f"{domain}-{n}",
                "title": "" if n == 1 else "The  Title",
                "url": "u",
                "text": "\nno title \ud83d" if n == 1 else f"The Title\ntext {n}\twith tab",
            }
            for n in (1, 2, 3)
        ]
        text = "".join(json.dumps(r) + "\n" for r in rows)
        if domain == "fiqa":  # unpacked by hand
            put(f"{folder}/corpora/passage_level/{domain}.jsonl", text)
            continue
        os.makedirs(f"{folder}/corpora/passage_level", exist_ok=True)
        with zipfile.ZipFile(f"{folder}/corpora/passage_level/{domain}.jsonl.zip", "w") as archive:
            archive.writestr(f"__MACOSX/._{domain}.jsonl", "junk")
            archive.writestr(f"{domain}.jsonl", text)
    return str(folder)


@pytest.fixture
def cast_source(tmp_path, monkeypatch):
    """Both years; trec_car is a stand-in with the names that its documentation gives."""
    raw = tmp_path / "raw"
    utterances = [
        "What is throat cancer?",
        "Is it treatable? ",
        "Tell me more.",
        *(f"Turn {n}?" for n in range(4, 11)),
    ]
    topic = {
        "number": 31,
        "title": "t",
        "turn": [{"number": n, "raw_utterance": u} for n, u in enumerate(utterances, 1)],
    }
    put(
        f"{raw}/2019/data/evaluation/evaluation_topics_v1.0.json",
        json.dumps([topic, {"number": 32, "turn": [{"number": 1, "raw_utterance": "Other?"}]}]),
    )
    put(
        f"{raw}/2019/data/evaluation/evaluation_topics_annotated_resolved_v1.0.tsv",
        "".join(f"31_{n}\tresolved {u}\r\n" for n, u in enumerate(utterances, 1)),
    )
    put(
        f"{raw}/2019/data/2019qrels.txt",
        "31_1 Q0 MARCO_0 2\n31_1 Q0 CAR_ab 1\n31_1 Q0 MARCO_2 0\n31_10 Q0 CAR_cd 4\n",
    )
    automatic = {
        "number": 81,
        "turn": [
            {
                "number": n,
                "raw_utterance": f"raw {n}",
                "automatic_rewritten_utterance": f"auto {n}",
                "automatic_canonical_result_id": "CAR_ab",
            }
            for n in (1, 2)
        ],
    }
    manual = {
        "number": 81,
        "turn": [
            {
                "number": n,
                "raw_utterance": f"raw {n}",
                "manual_rewritten_utterance": f"manual {n}",
                "automatic_rewritten_utterance": f"auto {n}",
                "manual_canonical_result_id": "MARCO_1",
            }
            for n in (1, 2)
        ],
    }
    put(
        f"{raw}/2020_automatic_evaluation_topics_v1.0.json", json.dumps([automatic])
    )  # flat: beside the collections
    put(f"{raw}/2020_manual_evaluation_topics_v1.0.json", json.dumps([manual]))
    put(f"{raw}/2020qrels.txt", "81_2 0 MARCO_1 2\n81_2 0 CAR_cd 1\n")
    put(f"{raw}/collection.tsv", '0\tfirst "passage"\n1\tsecond\twith a tab\n2\tduplicate of 0\n')
    put(f"{raw}/dedup.articles-paragraphs.cbor", "stand-in")
    put(f"{tmp_path}/site/trec_car/__init__.py", "")
    put(
        f"{tmp_path}/site/trec_car/read_data.py",
        """
class Paragraph:
    def __init__(self, key, text): self.para_id, self.text = key, text
    def get_text(self): return self.text
def iter_paragraphs(f):
    assert f.read() == b"stand-in"
    yield Paragraph("ab", "a paragraph\\nof CAR")
    yield Paragraph("cd", "")
""",
    )
    monkeypatch.syspath_prepend(f"{tmp_path}/site")
    for name in ("cast19", "cast20"):
        known(monkeypatch, name, {"marco_passages": 3})
        unchecked(monkeypatch, name)
    yield str(raw)
    for name in [n for n in sys.modules if n.startswith("trec_car")]:
        del sys.modules[name]


KILT = {
    "id": "KILT_7",
    "url": "http://x",
    "title": 'Worlingworth "the village"',
    "contents": [
        {"body": "A village.\tIn Suffolk.\n\nSection::::History.", "id": 0},
        {"body": "", "id": "1"},
    ],
}
WAPO = {
    "id": "WAPO_1fbc-11e3",
    "title": "",
    "contents": [{"body": "Biopsies and cancer news.", "id": 1}],
}


@pytest.fixture
def cast21_source(tmp_path, monkeypatch):
    raw = tmp_path / "raw"
    turns = [
        {
            "number": n,
            "raw_utterance": f"raw {n} \ud83d",
            "passage": f"the  response\n{n}",
            "canonical_result_id": "MARCO_D1",
            "passage_id": n,
            "manual_rewritten_utterance": f"breast biopsy {n}",
            "automatic_rewritten_utterance": f"auto {n}",
        }
        for n in range(1, 11)
    ]
    put(
        f"{raw}/2021/2021_manual_evaluation_topics_v1.0.json",
        b"\xef\xbb\xbf" + json.dumps([{"number": 106, "turn": turns}]).encode(),
    )
    put(
        f"{raw}/2021/trec-cast-qrels-docs.2021.qrel",
        "106_1 0 MARCO_D1 4\r\n106_1 0 KILT_7 0\r\n"
        "106_10 0 WAPO_1fbc-11e3 1\r\n106_10 0 MARCO_D1 2\r\n",
    )
    put(f"{raw}/2021/duplicate_files/marco_duplicates.txt", "D1:D2,D3\nD9:D10\n")
    document = {
        "url": "u",
        "title": "Breast  biopsy",
        "contents": [
            {"body": "What a biopsy is. ", "id": 1},
            {"body": 'Common "types" of breast cancer.', "id": 2},
        ],
    }
    put(
        f"{raw}/passages/MARCO_v1_10.jsonl",
        "".join(json.dumps(document | {"id": i}) + "\r\n" for i in ("MARCO_D3", "MARCO_D4")),
    )
    put(f"{raw}/passages/MARCO_v1_9.jsonl", json.dumps(document | {"id": "MARCO_D1"}) + "\n")
    put(f"{raw}/passages/KILT_0.jsonl", b"\xef\xbb\xbf" + json.dumps(KILT).encode() + b"\r\n")
    put(f"{raw}/passages/WaPo_0.jsonl", (json.dumps(WAPO) + "\n") * 2)
    known(
        monkeypatch,
        "cast21",
        {"turns": 10, "test_turns": 2, "MARCO documents": 3, "KILT documents": 1},
    )
    unchecked(monkeypatch, "cast21")
    return str(raw)
