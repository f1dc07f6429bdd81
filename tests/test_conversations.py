"""sources/conversations.py: every rule of every set; each test names what it guards against."""

import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from official import (
    PASSAGES,
    QRECC_TRUE,
    WAPO,
    canard_rows,
    known,
    lines,
    make,
    mtrag_source,
    put,
    qrecc_row,
    qrecc_source,
    rewrite_rows,
    topiocqa_rows,
    topiocqa_source,
    turns_by_id,
)

from data import DataError, read_corpus, read_turns
from sources import conversations, files


@pytest.mark.parametrize("bom, end", [(b"", "\n"), (b"\xef\xbb\xbf", "\r\n")])
def test_topiocqa_every_rule(tmp_path, topiocqa_counts, bom, end):
    out = f"{tmp_path}/out"
    result = make("topiocqa", source=topiocqa_source(f"{tmp_path}/raw", bom, end), out=out)
    assert result["passages"] == 7 and "differs_from_published" not in result
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert list(corpus) == [i for i, _, _ in PASSAGES]
    assert corpus["1"].contents == 'Article Introduction He said "no", twice.\tThen he left.'
    assert corpus["2"].contents == 'The "Big" One History "Quoted from the first sign" on'
    assert (
        corpus["3"].title == "Unicode A B"
        and "\u2028" in corpus["3"].text
        and corpus["4"].text == ""
    )
    assert corpus["5"].contents == "no title here" and corpus["6"].text == "two\nlines"
    for split, official in (("train", "train"), ("test", "dev")):
        turns = read_turns(f"{out}/{split}.jsonl")
        assert [t.query_id for t in turns] == [
            f"topiocqa-{official}_1_{n}" for n in range(1, 12)
        ] + [f"topiocqa-{official}_2_{n}" for n in (1, 2)]
        assert [t.turn for t in turns] == [*range(1, 12), 1, 2]
        assert all(len(t.context) == t.turn - 1 and len(t.gold_ids) == 1 for t in turns)
        assert (
            turns[10].context[9][0] == turns[9].question
            and turns[2].context[1][1] == "UNANSWERABLE"
        )
        assert all(
            t.gold_ids == [str(t.turn % 6 + 1)] for t in turns
        )  # the first positive alone, never the second
        assert turns[0].question.endswith("\ufffd") and turns[0].extra == {
            "topic": "topic False",
            "topic_section": "section",
        }
        assert lines(f"{out}/{split}.qrels") == [f"{t.query_id} 0 {t.gold_ids[0]} 1" for t in turns]
        assert all(t.rewrite is None for t in turns)
    with open(f"{out}/made.json") as f:
        made = json.load(f)
    assert made["inputs"]["passages"]["bytes"] > 0 and set(made["files"]) == {
        "config.yaml",
        "corpus.jsonl",
        "test.jsonl",
        "test.qrels",
        "train.jsonl",
        "train.qrels",
    }


def test_topiocqa_from_the_folders_of_its_own_downloader(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    for old, new in (
        ("topiocqa_train.json", "topiocqa_dataset/train.json"),
        ("topiocqa_dev.json", "topiocqa_dataset/dev.json"),
        ("retriever", "retriever"),
        ("full_wiki_segments.tsv", "wikipedia_split/full_wiki_segments.tsv"),
    ):
        os.renames(f"{raw}/{old}", f"{raw}/downloads/data/{new}")
    assert make("topiocqa", source=raw, out=f"{tmp_path}/out")["test_turns"] == 13


def test_topiocqa_keeps_the_published_t5_rewrites_where_they_lie_there(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    for split in ("train", "dev"):
        golds = [
            g | {"question": f"T5 {g['conv_id']}.{g['turn_id']}"} for g in topiocqa_rows(split)[1]
        ]
        put(f"{raw}/retriever/rewrites_t5_qrecc/{split}.json", json.dumps(golds))
    make("topiocqa", source=raw, out=f"{tmp_path}/out")
    turns = turns_by_id(f"{tmp_path}/out", "test")
    assert (
        turns["topiocqa-dev_1_10"].extra["t5_rewrite"] == "T5 1.10"
        and turns["topiocqa-dev_1_10"].rewrite is None
    )


def test_topiocqa_dev_is_whole_conversations_of_train(tmp_path, topiocqa_counts, monkeypatch):
    monkeypatch.setattr(files, "bucket", lambda key, count: 99 - 95 * key.endswith("_2"))
    out = f"{tmp_path}/out"
    make("topiocqa", source=topiocqa_source(tmp_path / "raw"), out=out, dev_percent=5)
    assert {t.conversation_id for t in read_turns(f"{out}/dev.jsonl")} == {"topiocqa-train_2"}
    assert {t.conversation_id for t in read_turns(f"{out}/train.jsonl")} == {"topiocqa-train_1"}
    assert len(read_turns(f"{out}/test.jsonl")) == 13  # the papers' test set stays whole


def test_topiocqa_reaches_a_metric(tmp_path, topiocqa_counts):
    """From the official files to BM25's MRR: ids of corpus, turns and qrels meet (TSV ids, never
    row numbers).
    """
    import evaluate
    from retriever import RetrieverConfig

    out = f"{tmp_path}/out"
    make("topiocqa", source=topiocqa_source(tmp_path / "raw"), out=out)
    put(
        f"{tmp_path}/r.jsonl",
        "".join(
            json.dumps(
                {
                    "query_id": t.query_id,
                    "rewrite": {
                        "2": "quoted first sign",
                        "3": "unicode naïve",
                        "6": "lines inside",
                    }.get(t.gold_ids[0], "nothing"),
                }
            )
            + "\n"
            for t in read_turns(f"{out}/test.jsonl")
        ),
    )
    result = evaluate.main(
        evaluate.EvaluateConfig(
            turns=f"{out}/test.jsonl",
            qrels=f"{out}/test.qrels",
            rewrites=[f"{tmp_path}/r.jsonl"],
            samples=100,
            retriever=RetrieverConfig(corpus=f"{out}/corpus.jsonl"),
        )
    )
    golds = [t.gold_ids[0] for t in read_turns(f"{out}/test.jsonl")]
    assert result["queries"] == 13 and result["mrr"] == pytest.approx(
        sum(g in "236" for g in golds) / 13
    )


@pytest.fixture
def qrecc_out(tmp_path, monkeypatch):
    known(monkeypatch, "qrecc", QRECC_TRUE)
    result = make("qrecc", source=qrecc_source(tmp_path / "raw"), out=f"{tmp_path}/out")
    turns = [result[f"{split}_turns"] for split in ("train", "test")]
    assert turns == [3, 1] and result["train_conversations"] == 1
    assert (result["passages"], result["blank_passages"]) == (
        7,
        2,
    ) and "differs_from_published" not in result
    return f"{tmp_path}/out"


def test_qrecc_numbers_commoncrawl_first_and_backfill_with_wayback(qrecc_out):
    """wayback-backfill counts as wayback, in the archive's order: the published numbering
    (reference, 1.4).
    """
    assert lines(f"{qrecc_out}/raw_ids.txt") == [
        "http://a.com/x_p0",
        "http://a.com/x_p1",
        "http://a.com/z_p0",
        "http://b.com/y_p0",
        "http://b.com/y_p1",
        "backfill_p0",
        "other_p0",
    ]
    corpus = list(read_corpus(f"{qrecc_out}/corpus.jsonl"))
    assert [p.id for p in corpus] == [str(n) for n in range(7)]
    assert [p.contents for p in corpus] == [
        'tab\there "q"',
        "   ",
        "line\u2028sep",
        "way one",
        "half \ufffd emoji",
        "filled",
        "",
    ]


def test_qrecc_turns_without_gold_stay_in_later_contexts(qrecc_out):
    train = turns_by_id(qrecc_out, "train")
    assert list(train) == ["QReCC-Train_1_1", "QReCC-Train_1_3", "QReCC-Train_1_10"]
    third = train["QReCC-Train_1_3"]
    assert third.context == [("first", "one"), ("no gold", "UNANSWERABLE")] and third.turn == 3
    assert third.gold_ids == ["4", "1"]  # several golds, in the file's order, each once
    assert third.rewrite == "rewritten third" and third.extra == {
        "source": "quac",
        "transformer_rewrite": "T5 third",
    }
    tenth = train["QReCC-Train_1_10"]
    assert (
        len(tenth.context) == 9
        and tenth.context[8] == ("turn 9", "answer 9")
        and tenth.gold_ids == ["5"]
    )
    assert lines(f"{qrecc_out}/train.qrels") == [
        "QReCC-Train_1_1 0 0 1",
        "QReCC-Train_1_3 0 4 1",
        "QReCC-Train_1_3 0 1 1",
        "QReCC-Train_1_10 0 5 1",
    ]
    assert list(turns_by_id(qrecc_out, "test")) == ["QReCC-Test_1_1"]


def test_qrecc_counts_are_checked(tmp_path):
    with pytest.raises(DataError, match="train_rows: 12 found but 63,501 published"):
        make("qrecc", source=qrecc_source(tmp_path / "raw"), out=f"{tmp_path}/out")
    result = make("qrecc", source=f"{tmp_path}/raw", out=f"{tmp_path}/out", strict=False)
    assert result["differs_from_published"]["test_turns"] == {"found": 1, "published": 8209}


def test_qrecc_turns_are_counted_before_the_passages_are_read(tmp_path, monkeypatch):
    known(monkeypatch, "qrecc", QRECC_TRUE | {"test_turns": 8209})
    raw = qrecc_source(tmp_path / "raw")
    put(f"{raw}/passages.zip", "never read")
    with pytest.raises(DataError, match="test_turns: 1 found but 8,209 published"):
        make("qrecc", source=raw, out=f"{tmp_path}/out")


def test_qrecc_bad_input(tmp_path, monkeypatch):
    known(monkeypatch, "qrecc", QRECC_TRUE)
    raw = qrecc_source(tmp_path / "raw")

    def build():
        make("qrecc", raw, f"{tmp_path}/out")

    rewrite_rows(
        f"{raw}/scai-qrecc21-test-turns.json",
        lambda rows: [r | {"Truth_passages": ["gone_p0"]} for r in rows],
    )
    with pytest.raises(DataError, match="gold passages not in the corpus: 1 found.*gone_p0"):
        build()
    rewrite_rows(f"{raw}/scai-qrecc21-training-turns.json", lambda rows: rows[:1] + rows[2:])
    with pytest.raises(DataError, match="turn 3 of conversation 1 follows turn 1"):
        build()
    row = qrecc_row(
        1, 1, "q", "a", ["http://b.com/y_p0"]
    )  # either would silently get a context that lacks turns
    put(f"{raw}/scai-qrecc21-training-turns.json", json.dumps([row | {"Turn_no": 4}]))
    with pytest.raises(DataError, match="turn 4 of conversation 1 follows turn 0"):
        build()
    raw = qrecc_source(tmp_path / "raw")
    with open(f"{raw}/passages.zip", "rb") as f:
        content = f.read()
    put(f"{raw}/passages.zip", content[:-30])
    with pytest.raises(DataError, match="passages.zip.*incomplete, fetch it again"):
        build()
    with zipfile.ZipFile(f"{raw}/passages.zip", "w") as archive:
        archive.writestr("collection-paragraph/commoncrawl/c.jsonl", "{}")
    with pytest.raises(DataError, match="1 under commoncrawl and 0 under wayback"):
        build()
    assert os.listdir(tmp_path) == ["raw"]


def test_qrecc_conversations_may_stand_among_each_other(tmp_path):
    """Each keeps its own history, whatever row stands before."""
    row = qrecc_row(1, 1, "q", "a", ["http://b.com/y_p0"])
    raw = qrecc_source(tmp_path / "raw")
    rows = [row, row | {"Conversation_no": 2}, row | {"Turn_no": 2, "Question": "then?"}]
    put(f"{raw}/scai-qrecc21-training-turns.json", json.dumps(rows))
    make("qrecc", raw, f"{tmp_path}/out", strict=False)
    turns = turns_by_id(f"{tmp_path}/out", "train")
    assert turns["QReCC-Train_1_2"].context == [("q", "a")] and not turns["QReCC-Train_2_1"].context


def test_canard_rules(tmp_path):
    put(
        f"{tmp_path}/raw/dev.json",
        b"\xef\xbb\xbf" + json.dumps(canard_rows(), indent=4).replace("\n", "\r\n").encode(),
    )
    out = f"{tmp_path}/out"
    result = make("canard", source=f"{tmp_path}/raw", out=out, strict=False)
    assert any(key.startswith("sha256 of") for key in result["differs_from_published"])
    corpus = list(read_corpus(f"{out}/corpus.jsonl"))
    assert [
        (p.id, p.title, p.text) for p in corpus
    ] == [  # in order of first appearance, each distinct answer once
        ("canard-00000", "Frank Zappa, Disbandment", "It began in late 1969."),
        ("canard-00001", "Frank Zappa, Disbandment", "He died in the spring."),
        ("canard-00002", "Frank Zappa, Disbandment", "The band's own label did."),
    ]
    split = ("train",) * 6 + ("dev",) + ("test",) * 3
    name = split[int(hashlib.md5(b"Frank Zappa").hexdigest(), 16) % 10]
    turns = turns_by_id(out, name)
    assert list(turns) == ["C_x_0_q1", "C_x_0_q4", "C_x_0_q7", "C_y_1_q1", "C_y_1_q2"]
    assert (
        turns["C_x_0_q1"].question == "What happened? (of Frank Zappa)"
    )  # question 1 gives way to its rewrite,
    assert turns["C_x_0_q4"].context[0] == (
        "What happened? (of Frank Zappa)",
        "It began in late 1969.",
    )  # later too
    assert turns["C_x_0_q4"].context[1:] == [
        ("Why?", "CANNOTANSWER"),
        ("And then?", "I don't know."),
    ]
    assert turns["C_x_0_q4"].rewrite == "When? (of Frank Zappa)" and turns["C_y_1_q2"].gold_ids == [
        "canard-00001"
    ]
    with pytest.raises(DataError, match="sha256 of .*dev.json"):
        make("canard", source=f"{tmp_path}/raw", out=f"{tmp_path}/strict")


def test_mtrag_rules(tmp_path, monkeypatch):
    out = f"{tmp_path}/out"
    result = make("mtrag", source=mtrag_source(tmp_path / "raw"), out=out, strict=False)
    assert (
        result["passages"] == 12
        and result["differs_from_published"]["govt passages"]["published"] == 72_422
    )
    assert "gold passages not in the corpus" not in result["differs_from_published"]
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert (
        corpus["govt-1"].contents == "no title \ufffd"
        and corpus["fiqa-2"].contents == "The Title text 2 with tab"
    )
    split = ("train",) * 6 + ("dev",) + ("test",) * 3
    found = {
        t.query_id: (name, t)
        for name in ("train", "dev", "test")
        if os.path.getsize(f"{out}/{name}.jsonl")
        for t in read_turns(f"{out}/{name}.jsonl")
    }
    assert set(found) == {"aaa_2", "aaa_3", "bbb_1"}
    for key, number in (
        ("aaa_2", "1"),
        ("bbb_1", "2"),
    ):  # numbered in the order of the file, split by that number
        assert found[key][1].conversation_id == number
        assert found[key][0] == split[int(hashlib.md5(number.encode()).hexdigest(), 16) % 10]
    turn = found["aaa_3"][1]
    assert turn.context == [("q1", "a1"), ("q2 x", "a2")] and turn.answer == "a3" and turn.turn == 3
    assert (
        turn.rewrite == "rewritten q3"
        and turn.extra == {"domain": "govt"}
        and turn.gold_ids == ["govt-3"]
    )
    put(
        f"{tmp_path}/raw/mtrag-human/retrieval_tasks/cloud/qrels/dev.tsv",
        "query-id\tcorpus-id\tscore\nx\tgone\t1\n",
    )
    result = make("mtrag", source=f"{tmp_path}/raw", out=f"{tmp_path}/out2", strict=False)
    assert result["differs_from_published"]["gold passages not in the corpus"] == {
        "found": 1,
        "published": 0,
    }


def test_the_split_of_mtrags_conversations():
    split = {str(n): conversations.ten_split(str(n)) for n in range(1, 111)}
    assert [int(n) for n, name in split.items() if name == "dev"] == [
        20,
        35,
        39,
        40,
        41,
        51,
        62,
        63,
        89,
        102,
    ]
    assert sum(name == "test" for name in split.values()) == 30 and split["14"] == "test"


def test_cast19(tmp_path, cast_source):
    put(f"{cast_source}/duplicate_list_v1.0.txt", "0:MARCO_2\n5:\n")
    out = f"{tmp_path}/out"
    result = make("cast19", source=cast_source, out=out, relevant_from=2)
    assert result["passages"] == 4 and result["duplicates_left_out"] == 1 and result["turns"] == 11
    corpus = {p.id: p.contents for p in read_corpus(f"{out}/corpus.jsonl")}
    assert corpus == {
        "MARCO_0": 'first "passage"',
        "MARCO_1": "second\twith a tab",
        "CAR_ab": "a paragraph\nof CAR",
        "CAR_cd": "",
    }
    turns = turns_by_id(out, "test")
    assert list(turns) == ["31_1", "31_10"] and turns["31_1"].gold_ids == ["MARCO_0"]
    assert (
        turns["31_10"].context[1] == ("Is it treatable?", "") and len(turns["31_10"].context) == 9
    )
    assert turns["31_10"].rewrite == "resolved Turn 10?"
    assert lines(f"{out}/test.qrels") == [
        "31_1 0 MARCO_0 2",
        "31_1 0 CAR_ab 1",
        "31_1 0 MARCO_2 0",
        "31_10 0 CAR_cd 4",
    ]


def test_cast20(tmp_path, cast_source):
    out = f"{tmp_path}/out"
    make("cast20", source=cast_source, out=out)
    turn = turns_by_id(out, "test")["81_2"]
    assert (
        turn.context == [("raw 1", "a paragraph of CAR")]
        and turn.rewrite == "manual 2"
        and turn.extra == {"automatic_rewrite": "auto 2"}
    )
    assert turn.gold_ids == ["MARCO_1", "CAR_cd"]


@pytest.mark.parametrize(
    "name, file, key",
    [
        ("cast19", "2019/data/evaluation/evaluation_topics_v1.0.json", "31_10"),
        ("cast20", "2020_manual_evaluation_topics_v1.0.json", "81_2"),
    ],
)
def test_the_history_of_a_cast_turn_follows_the_turns_numbers(
    tmp_path, cast_source, name, file, key
):
    """Whatever order a topic's turns stand in: 4, 1, 2 is read as 1, 2, 4."""
    make(name, cast_source, f"{tmp_path}/in_order")
    rewrite_rows(
        f"{cast_source}/{file}",
        lambda topics: [topics[0] | {"turn": topics[0]["turn"][::-1]}, *topics[1:]],
    )
    make(name, cast_source, f"{tmp_path}/reversed")
    assert turns_by_id(f"{tmp_path}/reversed", "test") == turns_by_id(
        f"{tmp_path}/in_order", "test"
    )
    assert turns_by_id(f"{tmp_path}/reversed", "test")[key].context
    rewrite_rows(
        f"{cast_source}/{file}", lambda topics: [topics[0] | {"turn": topics[0]["turn"] * 2}]
    )
    with pytest.raises(DataError, match="object 1: topic .* two turns of one number"):
        make(name, cast_source, f"{tmp_path}/twice")


def test_cast_says_which_package_reads_car(tmp_path, cast_source, monkeypatch):
    monkeypatch.setitem(sys.modules, "trec_car.read_data", None)
    with pytest.raises(DataError, match="pip install trec-car-tools"):
        make("cast19", source=cast_source, out=f"{tmp_path}/out")


def test_cast21_reads_the_tracks_own_files_and_leaves_copies_out(tmp_path, cast21_source):
    out = f"{tmp_path}/out"
    result = make("cast21", source=cast21_source, out=out, relevant_from=2)
    assert (
        result["duplicates_left_out"] == 2
        and result["passages"] == 7
        and result["WAPO documents"] == 2
    )
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert set(corpus) == {
        "MARCO_D1-1",
        "MARCO_D1-2",
        "MARCO_D4-1",
        "MARCO_D4-2",
        "WAPO_1fbc-11e3-1",
        "KILT_7-0",
        "KILT_7-1",
    }
    assert corpus["MARCO_D1-2"].contents == 'Breast biopsy Common "types" of breast cancer.'
    assert (
        corpus["KILT_7-0"].contents
        == 'Worlingworth "the village" A village. In Suffolk. Section::::History.'
    )
    assert (
        corpus["KILT_7-1"].text == ""
        and corpus["WAPO_1fbc-11e3-1"].contents == "Biopsies and cancer news."
    )
    turns = turns_by_id(out, "test")
    assert list(turns) == ["106_1", "106_10"] and turns["106_10"].gold_ids == ["MARCO_D1"]
    assert (
        turns["106_10"].context[8] == ("raw 9 \ufffd", "the response 9")
        and len(turns["106_10"].context) == 9
    )
    assert turns["106_1"].rewrite == "breast biopsy 1" and turns["106_1"].extra == {
        "automatic_rewrite": "auto 1"
    }
    assert lines(f"{out}/test.qrels") == [
        "106_1 0 MARCO_D1 4",
        "106_1 0 KILT_7 0",
        "106_10 0 WAPO_1fbc-11e3 1",
        "106_10 0 MARCO_D1 2",
    ]


def test_the_history_of_a_cast21_turn_follows_the_turns_numbers(tmp_path, cast21_source):
    path = f"{cast21_source}/2021/2021_manual_evaluation_topics_v1.0.json"
    put(
        path,
        json.dumps(
            [
                {
                    "number": 106,
                    "turn": json.loads(Path(path).read_text("utf-8-sig"))[0]["turn"][::-1],
                }
            ]
        ),
    )
    make("cast21", cast21_source, f"{tmp_path}/out")
    context = turns_by_id(f"{tmp_path}/out", "test")["106_10"].context
    assert [question[:5] for question, _ in context] == [f"raw {n}" for n in range(1, 10)]


def test_cast21_says_how_its_passages_are_made(tmp_path, cast21_source):
    os.rename(f"{cast21_source}/passages", f"{tmp_path}/elsewhere")
    with pytest.raises(
        DataError,
        match="(?s)passages are missing.*git clone https://github.com/grill-lab/trec-cast-tools",
    ):
        make("cast21", source=cast21_source, out=f"{tmp_path}/out")


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("WaPo_0.jsonl", json.dumps(WAPO)[:-8], "not valid JSON"),
        ("WaPo_0.jsonl", json.dumps(WAPO | {"contents": "x"}), "'contents' is 'x'"),
        ("WaPo_0.jsonl", json.dumps(WAPO | {"id": "CAR_1"}), "'CAR_1'; ids begin with"),
        ("MARCO_v1_9.jsonl", "{}\n", "'id' is missing"),
        ("MARCO_v1_9.jsonl", "\n", "MARCO documents: 2 found but 3 published"),
        ("KILT_0.jsonl", "", "KILT documents: 0 found"),
    ],
)
def test_cast21_bad_passages_are_named(tmp_path, cast21_source, file, content, said):
    put(f"{cast21_source}/passages/{file}", content)
    with pytest.raises(DataError, match=said):
        make("cast21", source=cast21_source, out=f"{tmp_path}/out")
