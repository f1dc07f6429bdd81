"""data.py: records survive the disk, bad input is named, writes are whole or not at all."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import data
from prompts import (
    read_examples,
    rewrite_prompt,
)
from runs import (
    append_metrics,
    atomic_folder,
    atomic_write,
    begin_metrics,
    only_writer,
    write_jsonl,
)

ROOT = Path(__file__).resolve().parent.parent


def put(tmp_path, content, name="file.jsonl") -> str:
    path = tmp_path / name
    if isinstance(content, list):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def turn(**changes) -> dict:
    return {
        "query_id": "c1_2",
        "conversation_id": "c1",
        "turn": 2,
        "context": [["Who wrote Dune?", "Frank Herbert."]],
        "question": "When was he born?",
        "gold_ids": ["p7"],
    } | changes


def make(context=(), question="When was he born?", **changes) -> data.Turn:
    return data.Turn(
        **(
            {
                "query_id": "q",
                "conversation_id": "c",
                "turn": 1,
                "context": list(context),
                "question": question,
                "gold_ids": [],
            }
            | changes
        )
    )


# ------------------------------------------------------------------------------------------------------ lines and JSON


def test_lines_end_at_line_feeds_only(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\r\n\r\nlast"
    assert list(data.read_lines(put(tmp_path, text))) == [
        (1, "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"),
        (2, ""),
        (3, "last"),
    ]
    assert list(data.read_lines(put(tmp_path, b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\n"))) == [
        (1, "one"),
        (2, "\ufefftwo"),
    ]
    assert list(data.read_lines(put(tmp_path, ""))) == []


def test_bom_before_the_first_column(tmp_path):
    path = put(tmp_path, bytes.fromhex("efbbbf7131203020643120310a"), "x.qrels")
    assert list(data.read_lines(path)) == [(1, "q1 0 d1 1")]
    assert list(pytest.importorskip("evaluate").read_qrels(path)) == ["q1"]


def test_line_separators_inside_strings(tmp_path):
    path = put(
        tmp_path,
        bytes.fromhex(
            "7b226964223a2231222c22636f6e74656e7473223a2261e280a862c28563e280a964227d0a"
            "7b226964223a2232222c22636f6e74656e7473223a2265227d0a"
        ),
    )
    assert [p.contents for p in data.read_corpus(path)] == ["a\u2028b\x85c\u2029d", "e"]


def test_bytes_that_are_not_utf8(tmp_path):
    path = put(
        tmp_path,
        b'{"id":"0","contents":"ok"}\n'
        + bytes.fromhex("7b226964223a2231222c22636f6e74656e7473223a22636166e9227d0a"),
    )
    with pytest.raises(data.DataError, match=re.escape(path) + ":2: not UTF-8"):
        list(data.read_corpus(path))


def test_truncated_last_line(tmp_path):
    path = put(tmp_path, '{"id":"1"}\n{"id":"2","con')
    with pytest.raises(data.DataError, match=re.escape(path) + ":2: not valid JSON"):
        list(data.read_jsonl(path))


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "3",
        '"x"',
        "null",
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": [-Infinity]}',
        '{"a": 1} {"b": 2}',
        '{"a": 1,}',
        '{"a": "tab\there"}',
        '{"a": ' + "[" * 100_000,
        "\ufeff{}",
    ],
)
def test_what_is_no_json_object_is_an_error_with_its_line(tmp_path, line):
    path = put(tmp_path, "{}\n\n" + line + "\n")
    with pytest.raises(data.DataError, match=re.escape(path) + ":3: ") as error:
        list(data.read_jsonl(path))
    assert len(str(error.value)) < len(path) + 400


def test_blank_lines_are_passed_over_and_counted_in_line_numbers(tmp_path):
    assert list(data.read_jsonl(put(tmp_path, '\n  \n{"a": 1}\r\n\t\n{"a": 2}'))) == [
        (3, {"a": 1}),
        (5, {"a": 2}),
    ]


def test_lone_surrogates_become_the_replacement_character(tmp_path):
    path = put(
        tmp_path,
        r'{"a": "x\ud83dy", "b": ["\udc00\ud83d"], "\ud800": 1, "c": "\ud83d\ude00", "d": "\\ud83d", "e": "\uD83Dz"}',
    )
    ((_, row),) = data.read_jsonl(path)
    assert row == {
        "a": "x\ufffdy",
        "b": ["\ufffd\ufffd"],
        "\ufffd": 1,
        "c": "😀",
        "d": r"\ud83d",
        "e": "\ufffdz",
    }
    write_jsonl(path, [row])
    assert [r for _, r in data.read_jsonl(path)] == [row]


def test_jsonl_round_trip(tmp_path):
    letters = 'aé村🎬\u2028\x85\r\n\t"\\ \u05d0\ufeff\x00'
    rng = random.Random(0)
    rows = [
        {
            "id": str(i),
            "text": "".join(rng.choices(letters, k=9)),
            "n": i,
            "x": rng.random(),
            "l": [None, True],
        }
        for i in range(200)
    ]
    path = str(tmp_path / "deep" / "er" / "rows.jsonl")
    assert write_jsonl(path, iter(rows)) == 200
    assert [r for _, r in data.read_jsonl(path)] == rows
    raw = Path(path).read_bytes()
    assert (
        raw.count(b"\n") == 200
        and b"\r" not in raw
        and "村".encode() in raw
        and os.listdir(tmp_path / "deep" / "er") == ["rows.jsonl"]
    )


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    path = put(tmp_path, [{"a": 1}])
    for value in (float("nan"), float("inf"), {1, 2}, "\ud83d"):
        with pytest.raises((ValueError, TypeError)):
            write_jsonl(path, [{"a": 2}, {"a": value}])
        assert [r for _, r in data.read_jsonl(path)] == [{"a": 1}] and os.listdir(tmp_path) == [
            "file.jsonl"
        ]


READERS = [
    lambda p: list(data.read_jsonl(p)),
    lambda p: list(data.read_corpus(p)),
    data.read_turns,
    data.read_questions,
    read_examples,
]


@pytest.mark.parametrize(
    "reader", READERS, ids=["jsonl", "corpus", "turns", "questions", "examples"]
)
def test_missing_file_folder_and_unreadable_file(tmp_path, reader):
    with pytest.raises(data.DataError, match="nowhere.jsonl: No such file"):
        reader(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(data.DataError, match="directory"):
        reader(str(tmp_path))
    path = put(tmp_path, [{}])
    os.chmod(path, 0)
    if not os.access(path, os.R_OK):  # root may read everything
        with pytest.raises(data.DataError, match="Permission denied"):
            reader(path)
    assert data.DataError.exit_status == 2


@pytest.mark.parametrize("reader", READERS[1:], ids=["corpus", "turns", "questions", "examples"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_an_error_that_names_it(tmp_path, reader, content):
    path = put(tmp_path, content)
    with pytest.raises(data.DataError, match=re.escape(path) + ": no "):
        reader(path)


# ------------------------------------------------------------------------------------------------------ corpus


def test_quotes_in_a_tsv_are_letters(tmp_path):
    path = put(
        tmp_path,
        '1\t"Heroes" is a song\tHeroes\n2\t"Unclosed quote here\tTwo\n3\tplain text\tThree\n',
        "c.tsv",
    )
    rows = list(data.read_corpus(path))
    assert (
        len(rows) == 3
        and rows[0].text == '"Heroes" is a song'
        and rows[1].text == '"Unclosed quote here'
    )
    assert [r.title for r in rows] == ["Heroes", "Two", "Three"]


@pytest.mark.parametrize("line", ["1\tcol a\tcol b\tTitle", "1\tno title", "1"])
def test_tsv_columns_are_counted(tmp_path, line):
    path = put(tmp_path, f"0\ttext\ttitle\n{line}\n", "c.tsv")
    with pytest.raises(data.DataError, match=re.escape(path) + r":2: \d tab-separated columns"):
        list(data.read_corpus(path))


def test_a_tsv_header_with_other_columns_is_refused(tmp_path):
    path = put(tmp_path, "ID\tTitle\tText\n1\tDune\tA novel.\n", "c.tsv")
    with pytest.raises(data.DataError, match=r":1: columns \['id', 'title', 'text'\]; they must"):
        list(data.read_corpus(path))


def test_tsv_header_and_empty_title(tmp_path):
    path = put(tmp_path, "\ufeffid\ttext\ttitle\r\n7\tBody. \t\r\n\r\n8\tid\ttext\n", "c.tsv")
    assert list(data.read_corpus(path)) == [
        data.Passage("7", "", "Body. "),
        data.Passage("8", "text", "id"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "1", "title": "", "text": "Body."},
        {"id": 1, "title": None, "text": "Body."},
        {"id": "1", "text": "Body."},
        {"id": "1", "title": "  ", "text": "Body."},
        {"id": "1", "contents": "Body."},
    ],
)
def test_empty_title_leaves_the_text_alone(tmp_path, row):
    (passage,) = data.read_corpus(put(tmp_path, [row]))
    assert passage == data.Passage("1", "", "Body.") and passage.contents == "Body."


def test_contents_is_title_blank_text():
    assert data.Passage("1", "Dune", "A novel.").contents == "Dune A novel."


def test_duplicate_passage_id(tmp_path):
    path = put(
        tmp_path,
        [{"id": "7", "contents": "a"}, {"id": "8", "contents": "b"}, {"id": 7, "contents": "c"}],
    )
    with pytest.raises(data.DataError, match=re.escape(path) + ":3: id '7'"):
        list(data.read_corpus(path))


@pytest.mark.parametrize(
    "row, said",
    [
        ({"text": "x"}, "'id'"),
        ({"id": "", "text": "x"}, "non-empty"),
        ({"id": "a b", "text": "x"}, "'a b'"),
        ({"id": "a\n", "text": "x"}, "blanks"),
        ({"id": True, "text": "x"}, "True"),
        ({"id": "1"}, "'text'"),
        ({"id": "1", "text": None}, "None"),
        ({"id": "1", "text": ["x"]}, r"\['x'\]"),
        ({"id": "1", "title": ["x"], "text": "x"}, "'title'"),
    ],
)
def test_bad_passages(tmp_path, row, said):
    path = put(tmp_path, [{"id": "0", "text": "fine"}, row])
    with pytest.raises(data.DataError, match=re.escape(path) + f":2: .*{said}"):
        list(data.read_corpus(path))


def test_corpus_is_streamed(tmp_path):
    path = put(tmp_path, '{"id": "1", "text": "x"}\nbroken\n')
    assert next(data.read_corpus(path)).id == "1"


# ------------------------------------------------------------------------------------------------------ turns, questions


def test_turn_round_trip(tmp_path, capsys):
    rows = [
        turn(),
        turn(
            query_id="c1_1",
            turn=1,
            context=[],
            gold_ids=["b", "a"],
            answer="1920",
            rewrite="When was Frank Herbert born?",
            response="<think>x</think>\n<rewrite>y</rewrite>",
            topic="Dune",
            nested={"a": [1]},
        ),
        turn(query_id="c2", context=[["من كتب الرواية؟", "村上春樹"]], gold_ids=[]),
    ]
    turns = data.read_turns(put(tmp_path, rows))
    assert [t.query_id for t in turns] == ["c1_2", "c1_1", "c2"]  # file order
    assert not capsys.readouterr().err
    data.read_turns(put(tmp_path, rows[1:2], "first.jsonl"))
    assert "first.jsonl has a context ([[question, answer], …]" in capsys.readouterr().err
    assert turns[0].context == [("Who wrote Dune?", "Frank Herbert.")] and turns[1].extra == {
        "topic": "Dune",
        "nested": {"a": [1]},
    }
    again = str(tmp_path / "again.jsonl")
    write_jsonl(again, (t.record() for t in turns))
    assert data.read_turns(again) == turns
    assert [r for _, r in data.read_jsonl(again)] == rows


def test_other_scripts_survive(tmp_path):
    context = [("من كتب الرواية؟", "村上春樹")]
    path = str(tmp_path / "t.jsonl")
    write_jsonl(path, [make(context).record()])
    assert data.read_turns(path)[0].context == context
    prompt = rewrite_prompt(make(context))
    assert "Q1: من كتب الرواية؟\nA1: 村上春樹\n" in prompt


def test_turn_numbers_as_text(tmp_path):
    turns = data.read_turns(
        put(tmp_path, [turn(query_id=f"c_{n}", turn=n) for n in ("10", "9", "1")])
    )
    assert [t.query_id for t in sorted(turns, key=lambda t: t.turn)] == ["c_1", "c_9", "c_10"]
    assert [t.turn for t in turns] == [10, 9, 1]


def test_turn_defaults(tmp_path):
    first, second = data.read_turns(
        put(
            tmp_path,
            [
                {"query_id": 12, "question": " q? ", "context": None, "gold_ids": None},
                {
                    "query_id": "b",
                    "question": "q?",
                    "context": [[None, "a"], ["q", None]],
                    "gold_ids": 0,
                },
            ],
        )
    )
    assert first == make([], "q?", query_id="12", conversation_id="12")
    assert second.context == [("", "a"), ("q", "")] and second.gold_ids == ["0"]


def test_gold_ids_are_texts_once_each(tmp_path):
    rows = [
        turn(query_id="a", gold_ids=[3, "3", "x"]),
        turn(query_id="b", gold_ids="only"),
        turn(query_id="c", gold_ids=0),
    ]
    assert [t.gold_ids for t in data.read_turns(put(tmp_path, rows))] == [
        ["3", "x"],
        ["only"],
        ["0"],
    ]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"query_id": None}, "query_id"),
        ({"query_id": "a b"}, "'a b'"),
        ({"query_id": ""}, "non-empty"),
        ({"question": " "}, "question.*empty"),
        ({"question": None}, "question"),
        ({"question": ["x"]}, "question"),
        ({"turn": "two"}, "'two'"),
        ({"turn": 2.5}, "2.5"),
        ({"turn": True}, "True"),
        ({"turn": None}, "None"),
        ({"context": "x"}, "context"),
        ({"context": [["q"]]}, "context"),
        ({"context": [["q", "a", "x"]]}, "context"),
        ({"context": [["q", True]]}, "context"),
        ({"context": {}}, "context"),
        ({"context": ["qa"]}, "context"),
        ({"gold_ids": [["x"]]}, "gold_ids"),
        ({"gold_ids": {"x": 1}}, "gold_ids"),
        ({"gold_ids": [True]}, "gold_ids"),
        ({"gold_ids": [""]}, "gold_ids '"),
        ({"gold_ids": ["a b"]}, "gold_ids '"),
        ({"answer": ["x"]}, "answer"),
        ({"query_id": "first"}, "'first' occurs a second time"),
    ],
)
def test_bad_turns_name_line_and_field(tmp_path, change, said):
    path = put(tmp_path, [turn(query_id="first"), turn() | change])
    with pytest.raises(data.DataError, match=re.escape(path) + f":2: .*{said}"):
        data.read_turns(path)


@pytest.mark.parametrize(
    "wrong, meant",
    [("contxt", "context"), ("conversationid", "conversation_id"), ("qestion", "question")],
)
def test_a_misspelt_field_of_a_turn_is_not_taken_for_an_absent_one(tmp_path, wrong, meant):
    row = turn()
    row[wrong] = row.pop(meant)
    path = put(tmp_path, [row])
    message = re.escape(f"{path}:1: unknown field {wrong!r}; did you mean {meant!r}?")
    with pytest.raises(data.DataError, match=message):
        data.read_turns(path)


def test_infinite_turn_number(tmp_path):
    path = put(tmp_path, '{"query_id": "a", "question": "q", "turn": 1e999}\n')
    with pytest.raises(data.DataError, match=":1: 'turn' is inf"):
        data.read_turns(path)


def test_with_gold():
    turns = [
        make(query_id="a", gold_ids=["p1"]),
        make(query_id="b"),
        make(query_id="c", gold_ids=["p1", "p2"]),
    ]
    kept, left_out = data.with_gold(turns, {"p1", "p2"}, "t.jsonl")
    assert [t.query_id for t in kept] == ["a", "c"] and left_out == 1
    with pytest.raises(data.DataError, match="t.jsonl: gold passage 'p2' of turn c"):
        data.with_gold(turns, {"p1"}, "t.jsonl")
    with pytest.raises(data.DataError, match="none of its 1 turns"):
        data.with_gold(turns[1:2], {"p1"}, "t.jsonl")


def test_questions(tmp_path):
    rows = [
        {"id": 1, "question": " Who? ", "golden_answers": ["A", "B"], "metadata": {"hops": 2}},
        {"id": "2", "question": "What?", "golden_answers": "C"},
    ]
    assert data.read_questions(put(tmp_path, rows)) == [
        data.Question("1", "Who?", ["A", "B"], {"hops": 2}),
        data.Question("2", "What?", ["C"]),
    ]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"id": "1"}, "second time"),
        ({"id": None}, "'id'"),
        ({"question": ""}, "empty"),
        ({"golden_answers": []}, "golden_answers"),
        ({"golden_answers": None}, "golden_answers"),
        ({"golden_answers": [True]}, "golden_answers"),
        ({"question": 3.5, "golden_answers": {}}, "golden"),
    ],
)
def test_bad_questions(tmp_path, change, said):
    good = {"id": "1", "question": "Who?", "golden_answers": ["A"]}
    path = put(tmp_path, [good, good | {"id": "2"} | change])
    with pytest.raises(data.DataError, match=re.escape(path) + f":2: .*{said}"):
        data.read_questions(path)


def test_numbers_are_taken_as_their_text_by_every_reader(tmp_path):
    row = turn(
        query_id=7,
        conversation_id=3,
        gold_ids=5,
        answer=1920,
        rewrite=1984,
        context=[["Which year?", 1912], [1, "a"]],
    )
    read = data.read_turns(put(tmp_path, [row]))[0]
    assert (read.query_id, read.conversation_id, read.gold_ids) == ("7", "3", ["5"])
    assert (read.answer, read.rewrite, read.context) == (
        "1920",
        "1984",
        [("Which year?", "1912"), ("1", "a")],
    )
    rows = [
        {"id": 1, "question": 42, "golden_answers": [1912, "x", 2.5]},
        {"id": 2, "question": "q", "golden_answers": 0},
    ]
    assert [q.golden_answers for q in data.read_questions(put(tmp_path, rows))] == [
        ["1912", "x", "2.5"],
        ["0"],
    ]
    assert next(
        data.read_corpus(put(tmp_path, [{"id": 9, "title": 1, "text": 2}]))
    ) == data.Passage("9", "1", "2")


def test_gzip_files_are_read_as_they_are(tmp_path):
    plain = "\ufeffid\ttext\ttitle\r\na\tone\tA\r\nb\ttwo\tB\n"
    packed = put(tmp_path, gzip.compress(plain.encode()), "corpus.tsv.gz")
    assert (
        list(data.read_corpus(packed))
        == list(data.read_corpus(put(tmp_path, plain, "corpus.tsv")))
        != []
    )
    renamed = put(
        tmp_path, gzip.compress((json.dumps(turn()) + "\n").encode())
    )  # told by its bytes, not its name
    assert data.read_turns(renamed)[0].query_id == "c1_2"
    places = [(number, byte) for number, byte, _ in data.located_lines(packed)]
    assert [next(data.located_lines(packed, place))[2][:1] for place in places] == ["i", "a", "b"]
    for broken in (
        gzip.compress(b"{}\n" * 9999)[:-9],
        gzip.compress(b"{}\n" * 9999)[:30] + b"\0" * 30,
    ):
        with pytest.raises(data.DataError, match="after line .* fetch it again"):
            list(data.read_jsonl(put(tmp_path, broken)))


@pytest.mark.parametrize(
    "content, said",
    [
        (b"PAR1\x15\x04", r"a parquet file; .*prepare.py parquet source=\S+file.jsonl out="),
        (b"PK\x03\x04\x14", "a zip archive; unpack it"),
        (b"\x28\xb5\x2f\xfd\0", "packed by zstd; unpack it"),
    ],
)
def test_other_packed_files_are_named_with_the_way_out(tmp_path, content, said):
    with pytest.raises(data.DataError, match=said):
        data.read_turns(put(tmp_path, content))


# ------------------------------------------------------------------------------------------------------ whole or not at all


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_atomic_write_under_an_exception(tmp_path, error):
    path = put(tmp_path, "old\n", "f.txt")
    with pytest.raises(error):
        with atomic_write(path) as f:
            f.write("new")
            f.flush()
            raise error()
    assert Path(path).read_text() == "old\n" and os.listdir(tmp_path) == ["f.txt"]
    with atomic_write(path, "wb") as f:
        f.write(b"\x00\xff\r\n")
        assert Path(path).read_text() == "old\n"  # not before the end
    assert Path(path).read_bytes() == b"\x00\xff\r\n" and os.listdir(tmp_path) == ["f.txt"]


def test_atomic_write_onto_a_folder_cleans_up(tmp_path):
    (tmp_path / "f.txt").mkdir()
    with pytest.raises(OSError):
        with atomic_write(str(tmp_path / "f.txt")) as f:
            f.write("x")
    assert os.listdir(tmp_path) == ["f.txt"]


def folder_with(path, text):
    with atomic_folder(str(path) + "/") as inside:
        Path(inside, "a.txt").write_text(text)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_atomic_folder_under_an_exception(tmp_path, error):
    path = tmp_path / "deep" / "index"
    folder_with(path, "old")
    with pytest.raises(error):
        with atomic_folder(str(path)) as inside:
            Path(inside, "a.txt").write_text("new")
            raise error()
    assert (path / "a.txt").read_text() == "old" and os.listdir(tmp_path / "deep") == ["index"]
    folder_with(path, "new")
    assert (path / "a.txt").read_text() == "new" and os.listdir(tmp_path / "deep") == ["index"]


def test_atomic_folder_gives_the_old_folder_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "index"
    folder_with(path, "old")
    rename = os.rename

    def failing(source, target):
        if str(source).endswith(f"{os.getpid()}.tmp"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="No space"):
        folder_with(path, "new")
    assert (path / "a.txt").read_text() == "old" and os.listdir(tmp_path) == ["index"]


def test_atomic_folder_passes_over_the_remains_of_a_killed_process_of_the_same_number(tmp_path):
    path = tmp_path / "index"
    folder_with(path, "old")
    for end in ("tmp", "old.tmp"):
        (tmp_path / f"index.{os.getpid()}.{end}").mkdir()
        (tmp_path / f"index.{os.getpid()}.{end}" / "rest.txt").write_text("x")
    folder_with(path, "new")
    assert os.listdir(path) == ["a.txt"] and os.listdir(tmp_path) == ["index"]


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {root!r})
    import runs
    with runs.{call}({path!r}) as out:
        f = out if hasattr(out, "write") else open(out + "/a.txt", "w")
        f.write("half " * 1000)
        f.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("call", ["atomic_write", "atomic_folder"])
def test_sigkill_in_the_middle_leaves_what_was_there(tmp_path, call):
    path = tmp_path / "thing"
    if call == "atomic_write":
        path.write_text("old")
    else:
        folder_with(path, "old")
    code = textwrap.dedent(KILLED.format(root=str(ROOT), call=call, path=str(path)))
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert (path if call == "atomic_write" else path / "a.txt").read_text() == "old"
    assert all(
        name == "thing" or name.endswith(".tmp") for name in os.listdir(tmp_path)
    )  # the rest bears no name of ours


def test_only_one_process_writes_an_output(tmp_path):
    out, other = tmp_path / "run", tmp_path / "o.jsonl.lock"
    out.mkdir()
    (out / "metrics").touch()
    (out / "metrics.jsonl.123.tmp").write_text("half")  # what a killed writer leaves
    (out / "checkpoint_000001.tmp").mkdir()  # not the name of one
    with only_writer(str(out)):
        assert sorted(p.name for p in out.iterdir()) == ["checkpoint_000001.tmp", "metrics"]
        with (
            pytest.raises(data.DataError, match="another process is writing .*run; wait"),
            only_writer(str(out)),
        ):
            pass
    (tmp_path / "o.jsonl.12.tmp").write_text("")
    (tmp_path / "o.jsonl.meta.json.12.tmp").write_text("")
    (tmp_path / "o.12.old.tmp").mkdir()  # another output's
    with pytest.raises(RuntimeError), only_writer(str(tmp_path), "o.jsonl"):
        with pytest.raises(data.DataError, match="o.jsonl"), only_writer(str(tmp_path), "o.jsonl"):
            pass
        with only_writer(str(tmp_path), "p.jsonl"):  # beside it others may write
            assert other.exists()
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.12.old.tmp", "run"]
    with pytest.raises(KeyboardInterrupt), only_writer(str(tmp_path / "new")):
        raise KeyboardInterrupt
    with (
        pytest.raises(data.DataError, match="metrics is a file"),
        only_writer(str(tmp_path / "run/metrics")),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_metrics("/dev/full", {"step": 1})


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"golden_answers": ["", "  "]},
            "'golden_answers' is .*texts, one of them not blank",
        ),
        ({"golden_answers": []}, "'golden_answers' is"),
        ({"metadata": "x"}, "metadata: not valid JSON"),
        ({"metadata": [1]}, r"'metadata' is \[1\]; it must be a dict"),
        ({"id": "a\0b"}, "free of blanks and NUL"),
    ],
)
def test_questions_that_cannot_be_scored_are_refused(tmp_path, row, message):
    with pytest.raises(data.DataError, match=":1: .*" + message):
        data.read_questions(
            put(tmp_path, [{"id": "a", "question": "q", "golden_answers": ["x"]} | row])
        )


def test_a_blank_golden_answer_is_left_out(tmp_path):
    path = put(
        tmp_path, [{"id": "a", "question": "q", "golden_answers": ["", "x"], "metadata": None}]
    )
    assert data.read_questions(path)[0].golden_answers == ["x"]


def test_a_turn_number_of_any_length_is_refused_by_a_sentence(tmp_path):
    with pytest.raises(data.DataError, match=":1: 'turn' is .*must be a whole number"):
        data.read_turns(put(tmp_path, [{"query_id": "a", "question": "q", "turn": "9" * 5000}]))


def test_a_damaged_line_inside_a_log_is_named(tmp_path):
    path = put(tmp_path, '{"step": 1}\n{"step": \n{"step": 3}\n{"st', "metrics.jsonl")
    with pytest.raises(data.DataError, match="metrics.jsonl:2: not valid JSON"):
        begin_metrics(path, 3)
    path = put(tmp_path, '{"step": 1}\n{"step": 2}\n{"st', "metrics.jsonl")
    assert begin_metrics(path, 2) == [{"step": 1}, {"step": 2}]  # the second is logged anew
    assert Path(path).read_text() == '{"step": 1}\n'


def test_a_row_goes_through_copies_and_other_processes(tmp_path):
    path = put(
        tmp_path, [{"id": "a", "question": "q", "golden_answers": ["x"], "metadata": {"n": 1}}]
    )
    question = data.read_questions(path)[0]
    assert pickle.loads(pickle.dumps(question)) == question
    assert dataclasses.asdict(question)["metadata"] == copy.deepcopy(question).metadata == {"n": 1}
