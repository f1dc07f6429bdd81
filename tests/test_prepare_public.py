"""prepare.py on public data sets: fixtures of ours in the official formats, with the parts that break readers.

Each test names the trap it guards against.  Run: python -m pytest tests/test_prepare_public.py
"""

import base64
import csv
import hashlib
import http.server
import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from sources import conversations
from sources import files as official
import prepare
from data import DataError, read_corpus, read_questions, read_turns
from prepare import ParquetConfig
from sources.conversations import (CanardConfig, Cast19Config, Cast20Config, Cast21Config,
                                   MtragConfig, QreccConfig, TopiocqaConfig)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
parquet_only = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


def put(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(content if isinstance(content, bytes) else content.encode("utf-8"))


def lines(path):
    with open(path, encoding="utf-8") as f:
        return f.read().split("\n")[:-1]


def turns_by_id(out, split):
    return {t.query_id: t for t in read_turns(f"{out}/{split}.jsonl")}


# ------------------------------------------------------------------------------------------------------------ topiocqa

PASSAGES = [  # id, text, title as the official TSV has them: csv quoting, Wikipedia's own quotes, tabs inside a text
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
            question, answer = f"{split} q{number}.{turn} \ud83d", "UNANSWERABLE" if turn == 2 else f"a{number}.{turn}"
            turns.append({"Conversation_no": number, "Turn_no": turn, "Question": question, "Answer": answer,
                          "Topic": f"topic {turn > 5}", "Topic_section": "section", "Context": list(context),
                          "Rationale": "r", "is_nq": False})
            golds.append({"conv_id": number, "turn_id": turn, "question": " [SEP] ".join([*context, question]),
                          "answers": [answer], "negative_ctxs": [], "hard_negative_ctxs": [],
                          "positive_ctxs": [{"title": "t", "text": "x", "passage_id": str(turn % 6 + 1)},
                                            {"title": "second", "text": "never gold", "passage_id": "10"}]})
            context += [question, answer]
    return turns, golds


def topiocqa_source(folder, bom=b"", end="\n"):
    for split in ("train", "dev"):
        turns, golds = topiocqa_rows(split)
        put(f"{folder}/topiocqa_{split}.json", bom + json.dumps(turns).encode())
        put(f"{folder}/retriever/all_history/{split}.json", bom + json.dumps(golds, indent=1).replace("\n", end).encode())
    put(f"{folder}/full_wiki_segments.tsv", bom + topiocqa_tsv(PASSAGES, end).encode())
    return str(folder)


@pytest.fixture
def topiocqa_counts(monkeypatch):
    monkeypatch.setattr(conversations, "TOPIOCQA_COUNTS", {"passages": 7, "train_turns": 13, "train_conversations": 2,
                                                     "test_turns": 13, "test_conversations": 2})


@pytest.mark.parametrize("bom, end", [(b"", "\n"), (b"\xef\xbb\xbf", "\r\n")])
def test_topiocqa_every_rule(tmp_path, topiocqa_counts, bom, end):
    out = f"{tmp_path}/out"
    result = conversations.topiocqa(TopiocqaConfig(source=topiocqa_source(f"{tmp_path}/raw", bom, end), out=out))
    assert result["passages"] == 7 and "differs_from_published" not in result
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert list(corpus) == [i for i, _, _ in PASSAGES]
    assert corpus["1"].contents == 'Article Introduction He said "no", twice.\tThen he left.'
    assert corpus["2"].contents == 'The "Big" One History "Quoted from the first sign" on'
    assert corpus["3"].title == "Unicode A B" and "\u2028" in corpus["3"].text and corpus["4"].text == ""
    assert corpus["5"].contents == "no title here" and corpus["6"].text == "two\nlines"
    for split, official in (("train", "train"), ("test", "dev")):
        turns = read_turns(f"{out}/{split}.jsonl")
        assert [t.query_id for t in turns] == [f"topiocqa-{official}_1_{n}" for n in range(1, 12)] + [
            f"topiocqa-{official}_2_{n}" for n in (1, 2)]
        assert [t.turn for t in turns] == [*range(1, 12), 1, 2]
        assert all(len(t.context) == t.turn - 1 and len(t.gold_ids) == 1 for t in turns)
        assert turns[10].context[9][0] == turns[9].question and turns[2].context[1][1] == "UNANSWERABLE"
        assert all(t.gold_ids == [str(t.turn % 6 + 1)] for t in turns)  # the first positive alone, never the second
        assert turns[0].question.endswith("\ufffd") and turns[0].extra == {"topic": "topic False", "topic_section": "section"}
        assert lines(f"{out}/{split}.qrels") == [f"{t.query_id} 0 {t.gold_ids[0]} 1" for t in turns]
        assert all(t.rewrite is None for t in turns)
    with open(f"{out}/made.json") as f:
        made = json.load(f)
    assert made["inputs"]["passages"]["bytes"] > 0 and set(made["files"]) == {
        "config.yaml", "corpus.jsonl", "test.jsonl", "test.qrels", "train.jsonl", "train.qrels"}


def test_topiocqa_from_the_folders_of_its_own_downloader(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    for old, new in (("topiocqa_train.json", "topiocqa_dataset/train.json"), ("topiocqa_dev.json", "topiocqa_dataset/dev.json"),
                     ("retriever", "retriever"), ("full_wiki_segments.tsv", "wikipedia_split/full_wiki_segments.tsv")):
        os.renames(f"{raw}/{old}", f"{raw}/downloads/data/{new}")
    assert conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out"))["test_turns"] == 13


def test_topiocqa_keeps_the_published_t5_rewrites_where_they_lie_there(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    for split in ("train", "dev"):
        golds = [g | {"question": f"T5 {g['conv_id']}.{g['turn_id']}"} for g in topiocqa_rows(split)[1]]
        put(f"{raw}/retriever/rewrites_t5_qrecc/{split}.json", json.dumps(golds))
    conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out"))
    turns = turns_by_id(f"{tmp_path}/out", "test")
    assert turns["topiocqa-dev_1_10"].extra["t5_rewrite"] == "T5 1.10" and turns["topiocqa-dev_1_10"].rewrite is None


def test_topiocqa_dev_is_whole_conversations_of_train(tmp_path, topiocqa_counts, monkeypatch):
    monkeypatch.setattr(conversations, "held_out", lambda conversation, percent: conversation.endswith("_2") and percent == 5)
    out = f"{tmp_path}/out"
    conversations.topiocqa(TopiocqaConfig(source=topiocqa_source(tmp_path / "raw"), out=out, dev_percent=5))
    assert {t.conversation_id for t in read_turns(f"{out}/dev.jsonl")} == {"topiocqa-train_2"}
    assert {t.conversation_id for t in read_turns(f"{out}/train.jsonl")} == {"topiocqa-train_1"}
    assert len(read_turns(f"{out}/test.jsonl")) == 13  # the papers' test set stays whole


def test_the_share_held_out_is_about_what_was_asked_for():
    held = sum(official.held_out(f"topiocqa-train_{i}", 5) for i in range(3509))
    assert 120 < held < 230 and not any(official.held_out(str(i), 0) for i in range(100))


def test_counts_are_asserted_and_a_difference_is_kept_when_told_to_go_on(tmp_path, capsys):
    raw = topiocqa_source(tmp_path / "raw")
    with pytest.raises(DataError, match=r"train_turns: 13 found but 45,450 published.*strict=false"):
        conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out"))
    assert os.listdir(tmp_path) == ["raw"]  # nothing half-made
    result = conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out", strict=False))
    assert result["differs_from_published"]["passages"] == {"found": 7, "published": 25_700_592}
    assert "passages: 7 found" in capsys.readouterr().err
    with open(f"{tmp_path}/out/made.json") as f:
        assert json.load(f)["result"]["differs_from_published"]["test_turns"] == {"found": 13, "published": 2514}


def test_published_counts_are_the_references():
    assert conversations.TOPIOCQA_COUNTS == {"passages": 25_700_592, "train_turns": 45_450, "train_conversations": 3509,
                                       "test_turns": 2514, "test_conversations": 205}
    assert {k: conversations.QRECC_COUNTS[k] for k in ("passages", "train_turns", "test_turns")} == {
        "passages": 54_573_064, "train_turns": 29_596, "test_turns": 8209}


def test_missing_files_are_listed_with_their_addresses(tmp_path):
    raw = topiocqa_source(tmp_path / "raw")
    os.remove(f"{raw}/full_wiki_segments.tsv")
    os.remove(f"{raw}/retriever/all_history/dev.json")
    with pytest.raises(DataError) as e:
        conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out"))
    assert "zenodo.org/records/6149599/files/data/wikipedia_split/full_wiki_segments.tsv" in str(e.value)
    assert "zenodo.org/records/6151011/files/data/retriever/all_history/dev.json" in str(e.value)
    assert f"{raw}/full_wiki_segments.tsv" in str(e.value) and "topiocqa_train.json" not in str(e.value)
    for main, config in ((conversations.qrecc, QreccConfig), (conversations.canard, CanardConfig), (conversations.mtrag, MtragConfig),
                         (conversations.cast19, Cast19Config), (conversations.cast20, Cast20Config), (conversations.cast21, Cast21Config)):
        with pytest.raises(DataError, match="(?s)files are missing.*https?://"):
            main(config(source=f"{tmp_path}/nowhere", out=f"{tmp_path}/out"))


def broken(tmp_path, file, change):
    """A TopiOCQA source where `file` went through `change`."""
    raw = topiocqa_source(tmp_path / "raw")
    with open(f"{raw}/{file}", "rb") as f:
        content = f.read()
    put(f"{raw}/{file}", change(content))
    return TopiocqaConfig(source=raw, out=f"{tmp_path}/out")


@pytest.mark.parametrize("file, change, said", [
    ("topiocqa_dev.json", lambda b: b[:len(b) // 2], "topiocqa_dev.json: object .* cut off"),
    ("topiocqa_dev.json", lambda b: b.replace(b"}, {", b"} {", 1), "followed by '{'"),
    ("topiocqa_dev.json", lambda b: b'{"a": 1}', "a JSON array of objects is expected"),
    ("topiocqa_dev.json", lambda b: b"[1]", "object 1: a JSON object is expected"),
    ("topiocqa_dev.json", lambda b: b.replace(b'"Turn_no": 3', b'"Turn_no": 4', 1), "row by row"),
    ("topiocqa_dev.json", lambda b: json.dumps(json.loads(b)[:-1]).encode(), "more rows than"),
    ("topiocqa_dev.json", lambda b: b.replace(b'"Topic_section"', b'"Section"', 1), "'Topic_section' is 'None'.*fields found"),
    ("retriever/all_history/dev.json", lambda b: json.dumps(json.loads(b)[:-1]).encode(), "row by row"),
    ("retriever/all_history/train.json", lambda b: json.dumps(
        [r | {"positive_ctxs": []} for r in json.loads(b)]).encode(), "no positive passage"),
    ("full_wiki_segments.tsv", lambda b: b + b"11\tonly two\n", r"full_wiki_segments.tsv:\d+: 2 columns"),
    ("full_wiki_segments.tsv", lambda b: b + b"11\t\xff\xfe\tx\n", "not UTF-8"),
    ("full_wiki_segments.tsv", lambda b: b.replace(b"\n2\t", b"\n22\t"), "gold passages not in the corpus: 1 found.*example 2"),
])
def test_broken_files_are_named_with_the_place(tmp_path, topiocqa_counts, file, change, said):
    with pytest.raises(DataError, match=said):
        conversations.topiocqa(broken(tmp_path, file, change))
    assert os.listdir(tmp_path) == ["raw"]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_arrays_are_read_in_pieces_wherever_they_are_cut(tmp_path, block):
    rows = [{"a": 'x "quoted" [1, {2}]', "ä": "東" * 20}, {}, {"n": [1, {"b": None}], "s": "\\\n"}]
    put(f"{tmp_path}/a.json", "\ufeff \n" + json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
    assert [row for _, row in official.read_array(f"{tmp_path}/a.json", block)] == rows
    put(f"{tmp_path}/empty.json", " [ ] ")
    assert list(official.read_array(f"{tmp_path}/empty.json", block)) == []


def test_tsv_blank_lines_count_inside_quotes_alone(tmp_path):
    put(f"{tmp_path}/a.tsv", 'id\ttext\ttitle\r\n1\t"a\r\n\r\nb \x85"\tT\r\n2\ta "lone quote\t\r\n\r\n')
    assert [(where.rpartition(":")[2], row) for where, row in official.read_tsv(f"{tmp_path}/a.tsv")] == [
        ("1", ["id", "text", "title"]), ("4", ["1", "a\n\nb \x85", "T"]), ("5", ["2", 'a "lone quote', ""])]


def test_topiocqa_reaches_a_metric(tmp_path, topiocqa_counts):
    """From the official files to BM25's MRR: ids of corpus, turns and qrels meet (TSV ids, never row numbers)."""
    import evaluate
    from retriever import RetrieverConfig
    out = f"{tmp_path}/out"
    conversations.topiocqa(TopiocqaConfig(source=topiocqa_source(tmp_path / "raw"), out=out))
    put(f"{tmp_path}/r.jsonl", "".join(json.dumps({"query_id": t.query_id, "rewrite": {
        "2": "quoted first sign", "3": "unicode naïve", "6": "lines inside"}.get(t.gold_ids[0], "nothing")}) + "\n"
        for t in read_turns(f"{out}/test.jsonl")))
    result = evaluate.main(evaluate.EvaluateConfig(
        turns=f"{out}/test.jsonl", qrels=f"{out}/test.qrels", rewrites=f"{tmp_path}/r.jsonl", samples=100,
        retriever=RetrieverConfig(corpus=f"{out}/corpus.jsonl")))
    golds = [t.gold_ids[0] for t in read_turns(f"{out}/test.jsonl")]
    assert result["queries"] == 13 and result["mrr"] == pytest.approx(sum(g in "236" for g in golds) / 13)


# --------------------------------------------------------------------------------------------------------------- qrecc

def qrecc_row(conversation, turn, question, answer, golds, source="quac"):
    return {"Conversation_no": conversation, "Turn_no": turn, "Conversation_source": source, "Context": [],
            "Question": question, "Truth_rewrite": f"rewritten {question}", "Transformer_rewrite": f"T5 {question}",
            "Truth_answer": answer, "Truth_passages": golds}


def qrecc_source(folder):
    train = [qrecc_row(1, 1, "first", "one", ["http://a.com/x_p0"]),
             qrecc_row(1, 2, "no gold", "", []),
             qrecc_row(1, 3, "third", "three", ["http://b.com/y_p1", "http://a.com/x_p1", "http://b.com/y_p1"]),
             *(qrecc_row(1, n, f"turn {n}", f"answer {n}", ["backfill_p0"] if n == 10 else []) for n in range(4, 12)),
             qrecc_row(2, 1, "new conversation", "x", [], "trec")]
    test = [qrecc_row(1, 1, "test question", "t", ["http://b.com/y_p0"], "nq")]
    put(f"{folder}/scai-qrecc21-training-turns.json", json.dumps(train))
    put(f"{folder}/scai-qrecc21-test-turns.json", json.dumps(test))
    root = "collection-paragraph"
    members = [  # the archive's own order: wayback first, backfill before wayback's second file
        (f"{root}/wayback/w1.jsonl", [("http://b.com/y_p0", "way one"), ("http://b.com/y_p1", "half \ud83d emoji")]),
        (f"{root}/wayback-backfill/z.jsonl", [("backfill_p0", "filled")]),
        (f"{root}/commoncrawl/c2.jsonl", [("http://a.com/x_p0", "tab\there \"q\""), ("http://a.com/x_p1", "   ")]),
        (f"{root}/wayback/w0.jsonl", [("other_p0", "")]),
        (f"{root}/commoncrawl/c1.jsonl", [("http://a.com/z_p0", "line\u2028sep")]),
    ]
    os.makedirs(folder, exist_ok=True)
    with zipfile.ZipFile(f"{folder}/passages.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{root}/README.txt", "not a passage file")
        for name, rows in members:
            bom, end = ("\ufeff", "\r\n") if name.endswith("c2.jsonl") else ("", "\n")
            archive.writestr(name, bom + "".join(json.dumps({"id": i, "contents": t}) + end for i, t in rows))
    return str(folder)


QRECC_TRUE = {"passages": 7, "train_rows": 12, "test_rows": 1, "train_turns": 3, "test_turns": 1}


@pytest.fixture
def qrecc_out(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "QRECC_COUNTS", QRECC_TRUE)
    result = conversations.qrecc(QreccConfig(source=qrecc_source(tmp_path / "raw"), out=f"{tmp_path}/out"))
    assert (result["passages"], result["blank_passages"]) == (7, 2) and "differs_from_published" not in result
    return f"{tmp_path}/out"


def test_qrecc_numbers_commoncrawl_first_and_backfill_with_wayback(qrecc_out):
    """wayback-backfill counts as wayback, in the archive's order: the published numbering (reference, 1.4)."""
    assert lines(f"{qrecc_out}/raw_ids.txt") == [
        "http://a.com/x_p0", "http://a.com/x_p1", "http://a.com/z_p0", "http://b.com/y_p0", "http://b.com/y_p1",
        "backfill_p0", "other_p0"]
    corpus = list(read_corpus(f"{qrecc_out}/corpus.jsonl"))
    assert [p.id for p in corpus] == [str(n) for n in range(7)]
    assert [p.contents for p in corpus] == ['tab\there "q"', "   ", "line\u2028sep", "way one", "half \ufffd emoji", "filled", ""]


def test_qrecc_turns_without_gold_stay_in_later_contexts(qrecc_out):
    train = turns_by_id(qrecc_out, "train")
    assert list(train) == ["QReCC-Train_1_1", "QReCC-Train_1_3", "QReCC-Train_1_10"]
    third = train["QReCC-Train_1_3"]
    assert third.context == [("first", "one"), ("no gold", "UNANSWERABLE")] and third.turn == 3
    assert third.gold_ids == ["4", "1"]  # several golds, in the file's order, each once
    assert third.rewrite == "rewritten third" and third.extra == {"source": "quac", "transformer_rewrite": "T5 third"}
    tenth = train["QReCC-Train_1_10"]
    assert len(tenth.context) == 9 and tenth.context[8] == ("turn 9", "answer 9") and tenth.gold_ids == ["5"]
    assert lines(f"{qrecc_out}/train.qrels") == ["QReCC-Train_1_1 0 0 1", "QReCC-Train_1_3 0 4 1", "QReCC-Train_1_3 0 1 1",
                                                 "QReCC-Train_1_10 0 5 1"]
    assert list(turns_by_id(qrecc_out, "test")) == ["QReCC-Test_1_1"]


def test_qrecc_explains_the_papers_8124(tmp_path):
    with pytest.raises(DataError, match="train_rows: 12 found but 63,501 published"):
        conversations.qrecc(QreccConfig(source=qrecc_source(tmp_path / "raw"), out=f"{tmp_path}/out"))
    result = conversations.qrecc(QreccConfig(source=f"{tmp_path}/raw", out=f"{tmp_path}/out", strict=False))
    assert result["differs_from_published"]["test_turns"] == {"found": 1, "published": 8209}


def test_qrecc_test_count_difference_names_table_7(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "QRECC_COUNTS", QRECC_TRUE | {"test_turns": 8209})
    with pytest.raises(DataError, match="test_turns: 1 found but 8,209 published.*Table 7 says 8,124"):
        conversations.qrecc(QreccConfig(source=qrecc_source(tmp_path / "raw"), out=f"{tmp_path}/out"))


def rewrite_rows(path, change):
    with open(path, encoding="utf-8") as f:
        rows = json.load(f)
    put(path, json.dumps(change(rows)))


def test_qrecc_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "QRECC_COUNTS", QRECC_TRUE)
    raw = qrecc_source(tmp_path / "raw")
    config = QreccConfig(source=raw, out=f"{tmp_path}/out")
    rewrite_rows(f"{raw}/scai-qrecc21-test-turns.json", lambda rows: [r | {"Truth_passages": ["gone_p0"]} for r in rows])
    with pytest.raises(DataError, match="gold passages not in the archive: 1 found.*gone_p0"):
        conversations.qrecc(config)
    rewrite_rows(f"{raw}/scai-qrecc21-training-turns.json", lambda rows: rows[:1] + rows[2:])
    with pytest.raises(DataError, match="turn 3 of conversation 1 follows turn 1"):
        conversations.qrecc(config)
    row = qrecc_row(1, 1, "q", "a", ["http://b.com/y_p0"])  # either would silently get a context that lacks turns
    put(f"{raw}/scai-qrecc21-training-turns.json", json.dumps([row | {"Turn_no": 4}]))
    with pytest.raises(DataError, match="turn 4 of conversation 1 follows turn 0"):
        conversations.qrecc(config)
    put(f"{raw}/scai-qrecc21-training-turns.json", json.dumps([row, row | {"Conversation_no": 2}, row | {"Turn_no": 2}]))
    with pytest.raises(DataError, match="object 3: conversation 1 goes on after another one"):
        conversations.qrecc(config)
    raw = qrecc_source(tmp_path / "raw")
    with open(f"{raw}/passages.zip", "rb") as f:
        content = f.read()
    put(f"{raw}/passages.zip", content[:-30])
    with pytest.raises(DataError, match="passages.zip.*incomplete, fetch it again"):
        conversations.qrecc(config)
    with zipfile.ZipFile(f"{raw}/passages.zip", "w") as archive:
        archive.writestr("collection-paragraph/commoncrawl/c.jsonl", "{}")
    with pytest.raises(DataError, match="1 under commoncrawl and 0 under wayback"):
        conversations.qrecc(config)
    assert os.listdir(tmp_path) == ["raw"]


# -------------------------------------------------------------------------------------------------------------- canard

def canard_rows():
    """One dialogue with everything the rules speak of, and a second that repeats one of its answers."""
    said = [("What  happened?", "It began in late  1969."), ("Why?", "CANNOTANSWER"), ("And then?", "I don't know."),
            ("When?", "He died in the spring."), ("Really?", "yes"), ("How?", "too short here"), ("Who?", "The band's own label did."),
            ("Last?", "never seen")]
    rows = []
    for dialogue, article, pairs in (("C_x_0", "Frank Zappa", said), ("C_y_1", "Frank Zappa", [said[0], said[3], ("End?", "")])):
        for n in range(1, len(pairs) + 1):
            history = [article, "Disbandment", *(text for pair in pairs[:n - 1] for text in pair)]
            rows.append({"History": history, "QuAC_dialog_id": dialogue, "Question": pairs[n - 1][0], "Question_no": n,
                         "Rewrite": f"{pairs[n - 1][0]} (of {article})"})
    return rows


def test_a_conversion_without_a_single_turn_is_refused(tmp_path):
    put(f"{tmp_path}/raw/dev.json", "[]")
    with pytest.raises(DataError, match="result would be empty.*cut off"):
        conversations.canard(CanardConfig(source=f"{tmp_path}/raw", out=f"{tmp_path}/out", strict=False))
    assert os.listdir(tmp_path) == ["raw"]


def test_canard_rules(tmp_path):
    put(f"{tmp_path}/raw/dev.json", b"\xef\xbb\xbf" + json.dumps(canard_rows(), indent=4).replace("\n", "\r\n").encode())
    out = f"{tmp_path}/out"
    result = conversations.canard(CanardConfig(source=f"{tmp_path}/raw", out=out, strict=False))
    assert any(key.startswith("sha256 of") for key in result["differs_from_published"])
    corpus = list(read_corpus(f"{out}/corpus.jsonl"))
    assert [(p.id, p.title, p.text) for p in corpus] == [  # in order of first appearance, each distinct answer once
        ("canard-00000", "Frank Zappa, Disbandment", "It began in late 1969."),
        ("canard-00001", "Frank Zappa, Disbandment", "He died in the spring."),
        ("canard-00002", "Frank Zappa, Disbandment", "The band's own label did.")]
    split = ("train",) * 6 + ("dev",) + ("test",) * 3
    name = split[int(hashlib.md5(b"Frank Zappa").hexdigest(), 16) % 10]
    turns = turns_by_id(out, name)
    assert list(turns) == ["C_x_0_q1", "C_x_0_q4", "C_x_0_q7", "C_y_1_q1", "C_y_1_q2"]
    assert turns["C_x_0_q1"].question == "What happened? (of Frank Zappa)"  # question 1 gives way to its rewrite,
    assert turns["C_x_0_q4"].context[0] == ("What happened? (of Frank Zappa)", "It began in late 1969.")  # later too
    assert turns["C_x_0_q4"].context[1:] == [("Why?", "CANNOTANSWER"), ("And then?", "I don't know.")]
    assert turns["C_x_0_q4"].rewrite == "When? (of Frank Zappa)" and turns["C_y_1_q2"].gold_ids == ["canard-00001"]
    with pytest.raises(DataError, match="sha256 of .*dev.json"):
        conversations.canard(CanardConfig(source=f"{tmp_path}/raw", out=f"{tmp_path}/strict"))


# --------------------------------------------------------------------------------------------------------------- mtrag

def mtrag_source(folder):
    dialogues = [("aaa", "govt", [("q1", "a1"), ("q2  x", " a2\n"), ("q3", "a3")]), ("bbb", "clapnq", [("Q1", "A1")])]
    tasks, qrels, rewrites = [], {d: [] for d in conversations.DOMAINS}, {d: [] for d in conversations.DOMAINS}
    for key, domain, pairs in dialogues:
        for n, (question, answer) in enumerate(pairs, 1):
            said = [{"speaker": s, "text": t} for pair in pairs[:n - 1] for s, t in zip(("user", "agent"), pair)]
            tasks.append({"conversation_id": key, "task_id": f"{key}<::>{n}", "turn": str(n), "contexts": [],
                          "input": [*said, {"speaker": "user", "text": question}],
                          "targets": [{"speaker": "agent", "text": answer}], "Collection": f"mt-rag-{domain}-elser"})
            if (key, n) != ("aaa", 1):  # an unanswerable turn has no qrels and stays in the contexts
                qrels[domain].append(f"{key}<::>{n}\t{domain}-{n}\t1")
                rewrites[domain].append({"_id": f"{key}<::>{n}", "text": f"|user|:  rewritten {question} "})
    put(f"{folder}/mtrag-human/generation_tasks/reference.jsonl", "".join(json.dumps(t) + "\n" for t in tasks))
    for domain in conversations.DOMAINS:
        base = f"{folder}/mtrag-human/retrieval_tasks/{domain}"
        put(f"{base}/qrels/dev.tsv", "\r\n".join(["query-id\tcorpus-id\tscore", *qrels[domain], ""]))
        put(f"{base}/{domain}_rewrite.jsonl", "".join(json.dumps(r) + "\n" for r in rewrites[domain]))
        rows = [{"_id": f"{domain}-{n}", "title": "" if n == 1 else "The  Title", "url": "u",
                 "text": "\nno title \ud83d" if n == 1 else f"The Title\ntext {n}\twith tab"} for n in (1, 2, 3)]
        text = "".join(json.dumps(r) + "\n" for r in rows)
        if domain == "fiqa":  # unpacked by hand
            put(f"{folder}/corpora/passage_level/{domain}.jsonl", text)
            continue
        os.makedirs(f"{folder}/corpora/passage_level", exist_ok=True)
        with zipfile.ZipFile(f"{folder}/corpora/passage_level/{domain}.jsonl.zip", "w") as archive:
            archive.writestr(f"__MACOSX/._{domain}.jsonl", "junk")
            archive.writestr(f"{domain}.jsonl", text)
    return str(folder)


def test_mtrag_rules(tmp_path, monkeypatch):
    out = f"{tmp_path}/out"
    result = conversations.mtrag(MtragConfig(source=mtrag_source(tmp_path / "raw"), out=out, strict=False))
    assert result["passages"] == 12 and result["differs_from_published"]["govt passages"]["published"] == 72_422
    assert "gold passages not in the corpora" not in result["differs_from_published"]
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert corpus["govt-1"].contents == "no title \ufffd" and corpus["fiqa-2"].contents == "The Title text 2 with tab"
    split = ("train",) * 6 + ("dev",) + ("test",) * 3
    found = {t.query_id: (name, t) for name in ("train", "dev", "test") if os.path.getsize(f"{out}/{name}.jsonl")
             for t in read_turns(f"{out}/{name}.jsonl")}
    assert set(found) == {"aaa_2", "aaa_3", "bbb_1"}
    for key, number in (("aaa_2", "1"), ("bbb_1", "2")):  # numbered in the order of the file, split by that number
        assert found[key][1].conversation_id == number
        assert found[key][0] == split[int(hashlib.md5(number.encode()).hexdigest(), 16) % 10]
    turn = found["aaa_3"][1]
    assert turn.context == [("q1", "a1"), ("q2 x", "a2")] and turn.answer == "a3" and turn.turn == 3
    assert turn.rewrite == "rewritten q3" and turn.extra == {"domain": "govt"} and turn.gold_ids == ["govt-3"]
    put(f"{tmp_path}/raw/mtrag-human/retrieval_tasks/cloud/qrels/dev.tsv", "query-id\tcorpus-id\tscore\nx\tgone\t1\n")
    result = conversations.mtrag(MtragConfig(source=f"{tmp_path}/raw", out=f"{tmp_path}/out2", strict=False))
    assert result["differs_from_published"]["gold passages not in the corpora"] == {"found": 1, "published": 0}


SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data", "conv")


@pytest.mark.skipif(not os.path.isdir(f"{SHARED}/mtrag"), reason="no shared/data beside the project")
def test_splits_are_those_of_the_shared_data():
    for name in ("train", "dev", "test"):
        assert {conversations.ten_split(t.conversation_id) for t in read_turns(f"{SHARED}/mtrag/{name}.jsonl")} == {name}
        corpus = {p.id: p.title for p in read_corpus(f"{SHARED}/canard/corpus.jsonl")}
        titles = [corpus[t.gold_ids[0]] for t in read_turns(f"{SHARED}/canard/{name}.jsonl")]
        assert all(any(conversations.ten_split(title[:i]) == name for i in range(len(title)) if title[i] == ",") for title in titles)


# ---------------------------------------------------------------------------------------------------------------- cast

@pytest.fixture
def cast_source(tmp_path, monkeypatch):
    """Both years; trec_car is a stand-in with the names that its documentation gives."""
    raw = tmp_path / "raw"
    utterances = ["What is throat cancer?", "Is it treatable? ", "Tell me more.", *(f"Turn {n}?" for n in range(4, 11))]
    topic = {"number": 31, "title": "t", "turn": [{"number": n, "raw_utterance": u} for n, u in enumerate(utterances, 1)]}
    put(f"{raw}/2019/data/evaluation/evaluation_topics_v1.0.json", json.dumps([topic, {"number": 32, "turn": [
        {"number": 1, "raw_utterance": "Other?"}]}]))
    put(f"{raw}/2019/data/evaluation/evaluation_topics_annotated_resolved_v1.0.tsv",
        "".join(f"31_{n}\tresolved {u}\r\n" for n, u in enumerate(utterances, 1)))
    put(f"{raw}/2019/data/2019qrels.txt", "31_1 Q0 MARCO_0 2\n31_1 Q0 CAR_ab 1\n31_1 Q0 MARCO_2 0\n31_10 Q0 CAR_cd 4\n")
    automatic = {"number": 81, "turn": [
        {"number": n, "raw_utterance": f"raw {n}", "automatic_rewritten_utterance": f"auto {n}",
         "automatic_canonical_result_id": "CAR_ab"} for n in (1, 2)]}
    manual = {"number": 81, "turn": [
        {"number": n, "raw_utterance": f"raw {n}", "manual_rewritten_utterance": f"manual {n}",
         "automatic_rewritten_utterance": "x", "manual_canonical_result_id": "MARCO_1"} for n in (1, 2)]}
    put(f"{raw}/2020_automatic_evaluation_topics_v1.0.json", json.dumps([automatic]))  # flat: beside the collections
    put(f"{raw}/2020_manual_evaluation_topics_v1.0.json", json.dumps([manual]))
    put(f"{raw}/2020qrels.txt", "81_2 0 MARCO_1 2\n81_2 0 CAR_cd 1\n")
    put(f"{raw}/collection.tsv", '0\tfirst "passage"\n1\tsecond\twith a tab\n2\tduplicate of 0\n')
    put(f"{raw}/dedup.articles-paragraphs.cbor", "stand-in")
    put(f"{tmp_path}/site/trec_car/__init__.py", "")
    put(f"{tmp_path}/site/trec_car/read_data.py", """
class Paragraph:
    def __init__(self, key, text): self.para_id, self.text = key, text
    def get_text(self): return self.text
def iter_paragraphs(f):
    assert f.read() == b"stand-in"
    yield Paragraph("ab", "a paragraph\\nof CAR")
    yield Paragraph("cd", "")
""")
    monkeypatch.syspath_prepend(f"{tmp_path}/site")
    monkeypatch.setattr(conversations, "MARCO_PASSAGES", 3)
    for year in (conversations.CAST19, conversations.CAST20):
        for key, file in year.items():
            monkeypatch.setitem(year, key, official.Official(file.names, file.url, "", file.note))
    yield str(raw)
    for name in [n for n in sys.modules if n.startswith("trec_car")]:
        del sys.modules[name]


def test_cast19(tmp_path, cast_source):
    put(f"{tmp_path}/dup.txt", "0:MARCO_2\n5:\n")
    out = f"{tmp_path}/out"
    result = conversations.cast19(Cast19Config(source=cast_source, out=out, duplicates=f"{tmp_path}/dup.txt", relevant_from=2))
    assert result["passages"] == 4 and result["duplicates_left_out"] == 1 and result["turns"] == 11
    corpus = {p.id: p.contents for p in read_corpus(f"{out}/corpus.jsonl")}
    assert corpus == {"MARCO_0": 'first "passage"', "MARCO_1": "second\twith a tab", "CAR_ab": "a paragraph\nof CAR", "CAR_cd": ""}
    turns = turns_by_id(out, "test")
    assert list(turns) == ["31_1", "31_10"] and turns["31_1"].gold_ids == ["MARCO_0"]
    assert turns["31_10"].context[1] == ("Is it treatable?", "") and len(turns["31_10"].context) == 9
    assert turns["31_10"].rewrite == "resolved Turn 10?"
    assert lines(f"{out}/test.qrels") == ["31_1 0 MARCO_0 2", "31_1 0 CAR_ab 1", "31_1 0 MARCO_2 0", "31_10 0 CAR_cd 4"]


@pytest.mark.parametrize("responses, answer", [("automatic", "a paragraph of CAR"), ("manual", "second with a tab")])
def test_cast20(tmp_path, cast_source, responses, answer):
    out = f"{tmp_path}/out"
    conversations.cast20(Cast20Config(source=cast_source, out=out, responses=responses))
    turn = turns_by_id(out, "test")["81_2"]
    assert turn.context == [("raw 1", answer)] and turn.rewrite == "manual 2" and turn.extra == {"automatic_rewrite": "auto 2"}
    assert turn.gold_ids == ["MARCO_1", "CAR_cd"]


def test_cast_says_which_package_reads_car(tmp_path, cast_source, monkeypatch):
    monkeypatch.setitem(sys.modules, "trec_car.read_data", None)
    with pytest.raises(DataError, match="pip install trec-car-tools"):
        conversations.cast19(Cast19Config(source=cast_source, out=f"{tmp_path}/out"))


# -------------------------------------------------------------------------------------------------------------- cast21

WEB_2021 = """<DOC>
<DOCNO>KILT_7</DOCNO>
<DOCHDR>
</DOCHDR>
<HTML>
<TITLE>Worlingworth "the village"</TITLE>
<URL>http://x</URL>
<BODY>
<passage id=0>
A village.\tIn Suffolk.

Section::::History.
</passage>
<passage id=1>

</passage>
</BODY>
</HTML>
</DOC>

"""
WEB_2022 = """<DOC>
<DOCNO>WAPO_1fbc-11e3</DOCNO>
<TITLE></TITLE>
<BODY>
<PASSAGE id=1>
Biopsies and cancer news.
</PASSAGE>
</BODY>
</DOC>
"""


@pytest.fixture
def cast21_source(tmp_path, monkeypatch):
    raw = tmp_path / "raw"
    turns = [{"number": n, "raw_utterance": f"raw {n} \ud83d", "passage": f"the  response\n{n}", "canonical_result_id": "MARCO_D1",
              "passage_id": n, "manual_rewritten_utterance": f"breast biopsy {n}", "automatic_rewritten_utterance": f"auto {n}"}
             for n in range(1, 11)]
    put(f"{raw}/2021/2021_manual_evaluation_topics_v1.0.json", b"\xef\xbb\xbf" + json.dumps([{"number": 106, "turn": turns}]).encode())
    put(f"{raw}/2021/trec-cast-qrels-docs.2021.qrel",
        "106_1 0 MARCO_D1 4\r\n106_1 0 KILT_7 0\r\n106_10 0 WAPO_1fbc-11e3 1\r\n106_10 0 MARCO_D1 2\r\n")
    put(f"{raw}/2021/duplicate_files/marco_duplicates.txt", "D1:D2,D3\nD9:D10\n")
    document = {"url": "u", "title": "Breast  biopsy", "contents": [
        {"body": "What a biopsy is. ", "id": 1}, {"body": "Common \"types\" of breast cancer.", "id": 2}]}
    put(f"{raw}/passages/MARCO_v1_10.jsonl", "".join(json.dumps(document | {"id": i}) + "\r\n" for i in ("MARCO_D3", "MARCO_D4")))
    put(f"{raw}/passages/MARCO_v1_9.jsonl", json.dumps(document | {"id": "MARCO_D1"}) + "\n")
    put(f"{raw}/passages/kilt_knowledgesource.json.trecweb", WEB_2021.replace("\n", "\r\n"))
    put(f"{raw}/passages/WaPo_0.trecweb", WEB_2022 + WEB_2022)
    monkeypatch.setattr(conversations, "CAST21_COUNTS", {"turns": 10, "test_turns": 2, "MARCO documents": 3, "KILT documents": 1})
    for key, file in conversations.CAST21.items():
        monkeypatch.setitem(conversations.CAST21, key, official.Official(file.names, file.url))
    return str(raw)


def test_cast21_reads_both_forms_of_the_tracks_tool_and_leaves_copies_out(tmp_path, cast21_source):
    out = f"{tmp_path}/out"
    result = conversations.cast21(Cast21Config(source=cast21_source, out=out, relevant_from=2))
    assert result["duplicates_left_out"] == 2 and result["passages"] == 7 and result["WAPO documents"] == 2
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert list(corpus) == ["MARCO_D1-1", "MARCO_D1-2", "MARCO_D4-1", "MARCO_D4-2", "WAPO_1fbc-11e3-1", "KILT_7-0", "KILT_7-1"]
    assert corpus["MARCO_D1-2"].contents == 'Breast biopsy Common "types" of breast cancer.'  # file 9 before file 10
    assert corpus["KILT_7-0"].contents == 'Worlingworth "the village" A village. In Suffolk. Section::::History.'
    assert corpus["KILT_7-1"].text == "" and corpus["WAPO_1fbc-11e3-1"].contents == "Biopsies and cancer news."
    turns = turns_by_id(out, "test")
    assert list(turns) == ["106_1", "106_10"] and turns["106_10"].gold_ids == ["MARCO_D1"]
    assert turns["106_10"].context[8] == ("raw 9 \ufffd", "the response 9") and len(turns["106_10"].context) == 9
    assert turns["106_1"].rewrite == "breast biopsy 1" and turns["106_1"].extra == {"automatic_rewrite": "auto 1"}
    assert lines(f"{out}/test.qrels") == ["106_1 0 MARCO_D1 4", "106_1 0 KILT_7 0", "106_10 0 WAPO_1fbc-11e3 1", "106_10 0 MARCO_D1 2"]


def test_cast21_says_how_its_passages_are_made(tmp_path, cast21_source):
    os.rename(f"{cast21_source}/passages", f"{tmp_path}/elsewhere")
    with pytest.raises(DataError, match="(?s)passages are missing.*git clone https://github.com/grill-lab/trec-cast-tools"):
        conversations.cast21(Cast21Config(source=cast21_source, out=f"{tmp_path}/out"))


@pytest.mark.parametrize("file, content, said", [
    ("WaPo_0.trecweb", WEB_2022[:-8], "ends inside document 'WAPO_1fbc-11e3'"),
    ("WaPo_0.trecweb", WEB_2022.replace("<DOCNO>WAPO_1fbc-11e3</DOCNO>\n", ""), "had no <DOCNO>"),
    ("WaPo_0.trecweb", WEB_2022.replace("WAPO_", "CAR_"), "'CAR_1fbc-11e3'; ids begin with"),
    ("MARCO_v1_9.jsonl", "{}\n", "'id' is 'None'"),
    ("notes.txt", "x", "take other files out of passages"),
    ("MARCO_v1_9.jsonl", "\n", "MARCO documents: 2 found but 3 published"),
    ("kilt_knowledgesource.json.trecweb", "", "KILT documents: 0 found"),
])
def test_cast21_bad_passages_are_named(tmp_path, cast21_source, file, content, said):
    put(f"{cast21_source}/passages/{file}", content)
    with pytest.raises(DataError, match=said):
        conversations.cast21(Cast21Config(source=cast21_source, out=f"{tmp_path}/out"))


# ------------------------------------------------------------------------------------------- restarts, folders, network

def test_a_second_run_does_nothing_even_without_the_sources(tmp_path, topiocqa_counts):
    config = TopiocqaConfig(source=topiocqa_source(tmp_path / "raw"), out=f"{tmp_path}/out")
    assert not conversations.topiocqa(config)["already_there"]
    os.remove(f"{tmp_path}/raw/full_wiki_segments.tsv")
    before = os.stat(f"{tmp_path}/out/corpus.jsonl").st_mtime_ns
    assert conversations.topiocqa(config)["already_there"]
    assert os.stat(f"{tmp_path}/out/corpus.jsonl").st_mtime_ns == before


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import conversations, official, prepare
def passages(path, passages, total, what):
    with atomic_write(path) as f:
        f.write("half")
        f.flush()
        print("writing", flush=True)
        signal.pause()
write_corpus = passages
prepare.command_line(["topiocqa", "source={raw}", "out={out}", "strict=false"])
"""


@pytest.mark.parametrize("number", [15, 9])
def test_a_killed_run_starts_over_cleanly(tmp_path, topiocqa_counts, number):
    raw, out = topiocqa_source(tmp_path / "raw"), f"{tmp_path}/out"
    child = subprocess.Popen([sys.executable, "-c", KILLED.format(root=ROOT, raw=raw, out=out)], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(number)
    assert child.wait(10) == (143 if number == 15 else -9)
    child.stdout.close()
    left = [n for n in os.listdir(tmp_path) if n.endswith(".tmp")]
    assert bool(left) == (number == 9) and not os.path.exists(out)  # kill -9 leaves its folder; nothing looks finished
    for folder in left:
        for path in (f"{tmp_path}/{folder}/{n}" for n in os.listdir(f"{tmp_path}/{folder}")):
            os.utime(path, (1, 1))
        os.utime(f"{tmp_path}/{folder}", (1, 1))
    conversations.topiocqa(TopiocqaConfig(source=raw, out=out))
    assert sorted(os.listdir(tmp_path)) == ["out", "raw"] and len(lines(f"{out}/corpus.jsonl")) == 7


def test_leftovers_of_a_living_or_recent_run_stay(tmp_path):
    for name, age in ((f"out.{os.getpid()}.tmp", 1000), ("out.999999999.tmp", 0), ("out.notes.tmp", 1000)):
        os.mkdir(f"{tmp_path}/{name}")
        os.utime(f"{tmp_path}/{name}", (time.time() - age,) * 2)
    official.remove_leftovers(f"{tmp_path}/out")
    assert len(os.listdir(tmp_path)) == 3
    os.utime(f"{tmp_path}/out.999999999.tmp", (1, 1))
    official.remove_leftovers(f"{tmp_path}/out/")
    assert sorted(os.listdir(tmp_path)) == [f"out.{os.getpid()}.tmp", "out.notes.tmp"]


class Server(http.server.BaseHTTPRequestHandler):
    """Serves bytes with ranges; breaks off the first answer in the middle."""

    content, broken, ranges, md5 = b"0123456789" * 1000, False, [], ""

    def do_GET(self):
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        type(self).ranges.append(begin)
        if self.path == "/gone":
            return self.send_error(404)
        if begin >= len(self.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.content)}")
            return self.end_headers()
        part = self.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(part)))
        if self.md5:
            self.send_header("Content-MD5", self.md5)
        self.end_headers()
        self.wfile.write(part[:3000] if not type(self).broken else part)
        type(self).broken = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Server.broken, Server.ranges, Server.md5 = False, [], ""
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_a_broken_download_is_continued(tmp_path, server):
    path = f"{tmp_path}/deep/file.bin"
    with pytest.raises(DataError, match="broke off at 3,000 of 10,000|run the same command again"):
        official.fetch(f"{server}/file.bin", path)
    assert not os.path.exists(path) and os.path.getsize(f"{path}.part") == 3000
    official.fetch(f"{server}/file.bin", path)
    assert Server.ranges == [0, 3000]
    with open(path, "rb") as f:
        assert f.read() == Server.content
    os.rename(path, f"{path}.part")  # killed between the last byte and the renaming
    official.fetch(f"{server}/file.bin", path)
    assert os.path.getsize(path) == 10_000


def test_a_checksum_that_the_server_sends_is_kept_to(tmp_path, server):
    digest = hashlib.md5(Server.content)
    Server.broken = True  # whole answers
    for stated in (digest.hexdigest(), f"md5:{digest.hexdigest()}", base64.b64encode(digest.digest()).decode()):
        Server.md5 = stated
        official.fetch(f"{server}/file.bin", f"{tmp_path}/good")
    Server.md5 = "0" * 32
    with pytest.raises(DataError, match="its MD5 is .* the server says 000"):
        official.fetch(f"{server}/file.bin", f"{tmp_path}/bad")
    assert os.listdir(tmp_path) == ["good"]  # not even a part that would be continued


def test_a_refused_download_says_where_to_put_the_file(tmp_path, server):
    with pytest.raises(DataError, match="download of .*/gone failed .*fetch it by hand to"):
        official.fetch(f"{server}/gone", f"{tmp_path}/x")
    assert not os.path.exists(f"{tmp_path}/x")


def test_download_fills_only_what_is_missing(tmp_path, topiocqa_counts, monkeypatch):
    raw, asked = topiocqa_source(tmp_path / "raw"), []
    with open(f"{raw}/topiocqa_dev.json", "rb") as f:
        content = f.read()
    os.remove(f"{raw}/topiocqa_dev.json")
    monkeypatch.setattr(official, "fetch", lambda url, path: (asked.append(url), put(path, content)))
    conversations.topiocqa(TopiocqaConfig(source=raw, out=f"{tmp_path}/out", download=True))
    assert asked == ["https://zenodo.org/records/7709644/files/topiocqa_dev.json?download=1"]
    with pytest.raises(DataError, match="unpack it there"):  # an archive is fetched and unpacked by hand
        conversations.cast19(Cast19Config(source=f"{tmp_path}/cast", out=f"{tmp_path}/c", download=True, strict=False))


def test_memory_does_not_grow_with_the_passages(tmp_path):
    """25,000 passages, 6.5 MB of TSV: what Python holds at its peak stays below 2.5 MB (bench/prepare_scale.py: 2 M)."""
    import tracemalloc

    import retriever  # noqa: F401  what it imports is not to be counted
    path = f"{tmp_path}/big.tsv"
    words = " ".join(f"word{i}" for i in range(30))
    with open(path, "w", encoding="utf-8") as f:
        f.write("id\ttext\ttitle\n")
        f.writelines(f"{i}\t{words} {i}\tTitle [SEP] {i}\n" for i in range(25_000))
    tracemalloc.start()
    count = official.write_corpus(f"{tmp_path}/corpus.jsonl", ({"id": r[0], "text": r[1]} for _, r in official.read_tsv(path)),
                                 25_000, "test")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 25_001 and peak < 2.5e6, peak


# ------------------------------------------------------------------------------------------------------------- parquet

@parquet_only
def test_turns_to_verl_rows_and_back_without_loss(tmp_path, topiocqa_counts):
    import pyarrow.parquet as pq
    out = f"{tmp_path}/out"
    conversations.topiocqa(TopiocqaConfig(source=topiocqa_source(tmp_path / "raw"), out=out))
    result = prepare.parquet(ParquetConfig(source=f"{out}/train.jsonl", out=f"{tmp_path}/t.parquet", data_source="topiocqa"))
    assert result["rows"] == 13
    rows = pq.read_table(f"{tmp_path}/t.parquet").to_pylist()
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert rows[2]["prompt"][0]["role"] == "user" and "A2: UNANSWERABLE" in rows[2]["prompt"][0]["content"]
    assert rows[2]["reward_model"] == {"style": "rule", "ground_truth": ["4"]} and rows[2]["ability"] == "rewrite"
    assert rows[2]["extra_info"]["query_id"] == "topiocqa-train_1_3" and rows[2]["extra_info"]["index"] == 2
    prepare.parquet(ParquetConfig(source=f"{tmp_path}/t.parquet", out=f"{tmp_path}/back.jsonl"))
    assert lines(f"{tmp_path}/back.jsonl") == lines(f"{out}/train.jsonl")
    with pytest.raises(DataError, match="exists; nothing is overwritten"):
        prepare.parquet(ParquetConfig(source=f"{tmp_path}/t.parquet", out=f"{tmp_path}/back.jsonl"))


@parquet_only
def test_rows_of_convsearch_r1_search_r1_and_research_come_in(tmp_path):
    import pyarrow
    import pyarrow.parquet as pq

    def convert(name, rows):
        pq.write_table(pyarrow.Table.from_pylist(rows), f"{tmp_path}/{name}.parquet")
        prepare.parquet(ParquetConfig(source=f"{tmp_path}/{name}.parquet", out=f"{tmp_path}/{name}.jsonl"))
        return [json.loads(line) for line in lines(f"{tmp_path}/{name}.jsonl")]

    def conv(history, query, turn, truth):
        return {"data_source": "qrecc", "ability": "rewrite", "reward_model": {"style": "rule", "ground_truth": truth},
                "prompt": [{"role": "user", "content": "Instruction.\n\n### Context Begin ###\n" + history
                            + f"\n### Context End ###\n\nQuery: {query}\nRewrite:"}],
                "extra_info": {"split": "train", "index": 0, "answer": "p", "question": query,
                               "query_id": f"QReCC-Train_7_{turn}"}}

    history = "\n".join(f"Q{i}: q{i}\nA{i}: a{i}" + ("\nsecond line" if i == 1 else "") for i in range(1, 11))
    first, last = convert("conv", [conv("", "start?", 1, ["5"]), conv(history, "now?", 11, ["5", "9"])])
    assert first["context"] == [] and first["turn"] == 1
    assert last["context"][0] == ["q1", "a1\nsecond line"] and last["context"][9] == ["q10", "a10"]
    assert last["conversation_id"] == "QReCC-Train_7" and last["gold_ids"] == ["5", "9"] and last["question"] == "now?"
    assert len(read_turns(f"{tmp_path}/conv.jsonl")) == 2
    with pytest.raises(DataError, match="turn 12 has no Q11 and A11"):
        convert("short", [conv(history, "now?", 12, "5")])
    search = convert("search", [{"data_source": "nq", "ability": "fact-reasoning", "extra_info": {"split": "train", "index": 3},
                                 "prompt": [{"role": "user", "content": "Answer … Question: who wrote Emma?\n"}],
                                 "reward_model": {"style": "rule", "ground_truth": {"target": ["Jane Austen"]}}}])
    assert search == [{"id": "train_3", "question": "who wrote Emma?", "golden_answers": ["Jane Austen"]}]
    research = convert("research", [{"data_source": "musique", "question": "Who?", "ability": "qa", "extra_info": {"id": "2hop_1"},
                                     "reward_model": {"style": "rule", "ground_truth": ["A", "B"]}}])
    assert research == [{"id": "2hop_1", "question": "Who?", "golden_answers": ["A", "B"]}]
    # rows of several sets in one file: a key that a row lacks comes back as null
    rows = [{"question": f"{n}?", "reward_model": {"ground_truth": ["A"]}, "extra_info": {"split": "train", "index": index},
             "metadata": metadata} for n, (index, metadata) in enumerate([(5, '{"hops": 2}'), (None, None), (None, "")])]
    assert [(r["id"], r.get("metadata")) for r in convert("mixed", rows)] == [
        ("train_5", {"hops": 2}), ("train_2", None), ("train_3", None)]
    assert len(read_questions(f"{tmp_path}/mixed.jsonl")) == 3


@parquet_only
@pytest.mark.parametrize("answers", ["target", "list"])
def test_questions_go_out_for_both_readers(tmp_path, answers):
    import pyarrow.parquet as pq
    record = {"id": "q1", "question": "Who?", "golden_answers": ["A", "B"], "metadata": {"hops": 2}}
    put(f"{tmp_path}/q.jsonl", json.dumps(record) + "\n")
    prepare.parquet(ParquetConfig(source=f"{tmp_path}/q.jsonl", out=f"{tmp_path}/q.parquet", answers=answers))
    row = pq.read_table(f"{tmp_path}/q.parquet").to_pylist()[0]
    assert row["reward_model"]["ground_truth"] == ({"target": ["A", "B"]} if answers == "target" else ["A", "B"])
    prepare.parquet(ParquetConfig(source=f"{tmp_path}/q.parquet", out=f"{tmp_path}/back.jsonl"))
    assert json.loads(lines(f"{tmp_path}/back.jsonl")[0]) == record


def test_parquet_without_pyarrow_or_with_odd_names(tmp_path, monkeypatch):
    if importlib.util.find_spec("pyarrow"):
        with pytest.raises(DataError, match="one must end in .jsonl"):
            prepare.parquet(ParquetConfig(source="a.jsonl", out="b.jsonl"))
        with pytest.raises(DataError, match="no such file"):
            prepare.parquet(ParquetConfig(source=f"{tmp_path}/a.parquet", out="b.jsonl"))
        put(f"{tmp_path}/a.parquet", "no parquet")
        with pytest.raises(DataError, match="no parquet file"):
            prepare.parquet(ParquetConfig(source=f"{tmp_path}/a.parquet", out=f"{tmp_path}/b.jsonl"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        prepare.parquet(ParquetConfig(source="a.jsonl", out="b.parquet"))


def test_command_line(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    done = subprocess.run([sys.executable, "prepare.py", "topiocqa", f"source={raw}", f"out={tmp_path}/out", "strict=false"],
                          cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["passages"] == 7, done.stderr
    done = subprocess.run([sys.executable, "prepare.py", "qrecc", f"source={raw}", f"out={tmp_path}/q"],
                          cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "zenodo.org/records/5115890" in done.stderr and "Traceback" not in done.stderr