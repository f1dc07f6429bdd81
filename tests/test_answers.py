"""Answers: the five scores against slow loops and hand values, gold passages of an episode, answer
files, FlashRAG's."""

import json
import random
import unicodedata
from types import SimpleNamespace

import pytest

import evaluate
from config import ConfigError
from config import run as run_entry
from data import DataError, Question, read_questions
from episodes.episode import Episode, Round, trajectory_row
from episodes.tools import Call
from evaluate import EvaluateConfig
from reward import (
    ANSWER_METRICS,
    all_gold,
    answer_metrics,
    exact_match,
    f1_score,
    gold_recall,
    normalize_answer,
)
from scoring.answers import (
    Prediction,
    read_predictions,
    score_predictions,
    write_flashrag,
)
from scoring.ranking import bootstrap_interval
from search.passages import RetrieverConfig


def put(path, rows):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return str(path)


# ----------------------------------------------------------------------------------------- formulas


def plain(text, dropped=("a", "an", "the")):
    """Normalisation character by character and word by word: no regular expression, no table."""
    text = unicodedata.normalize("NFKC", text).lower()
    text = "".join(c for c in text if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    words, word = [], ""
    for c in text + " ":  # an article is a run of word characters between others
        if c.isalnum():
            word += c
        else:
            words += ["" if word in dropped else word, c]
            word = ""
    return " ".join("".join(w if w or i % 2 else " " for i, w in enumerate(words)).split())


def slow(prediction, golds):
    best = dict.fromkeys(ANSWER_METRICS, 0.0)
    p = plain(prediction) or plain(prediction, ())
    for gold in golds:
        g = plain(gold) or plain(gold, ())
        if not g:
            continue
        best["em"] = max(best["em"], 1.0 if p == g else 0.0)
        inside = p == g or plain(gold) and any(p[i : i + len(g)] == g for i in range(len(p)))
        best["acc"] = max(best["acc"], 1.0 if inside else 0.0)
        if p != g and {p, g} & {"yes", "no", "noanswer"}:
            continue
        left, same = g.split(), 0
        for word in p.split():
            if word in left:
                left.remove(word)
                same += 1
        if same:
            pr, re = same / len(p.split()), same / len(g.split())
            for name, value in (("precision", pr), ("recall", re), ("f1", 2 * pr * re / (pr + re))):
                best[name] = max(best[name], value)
    return best


WORDS = [
    "the",
    "a",
    "An",
    "yes",
    "No",
    "noanswer",
    "Lima",
    "lima.",
    "New",
    "York,",
    "U.S.A.",
    "-",
    "x-y",
    "Café",
    "Cafe\u0301",
    "Hawai’i",
    "東京",
    "1,000",
    "???",
    "«the»",
    "É",
    "ß",
    "İ",
    "the’s",
]


def test_scores_equal_slow_loops():
    g = random.Random(3)
    for _ in range(3000):
        prediction, *golds = (
            " ".join(g.choices(WORDS, k=g.randrange(5))) for _ in range(g.randrange(1, 5))
        )
        found = answer_metrics(prediction, golds)
        assert list(found) == list(ANSWER_METRICS) and found == slow(prediction, golds), (
            prediction,
            golds,
        )
        assert normalize_answer(prediction) == plain(prediction)
        assert found["em"] <= found["acc"] and found["em"] <= found["f1"] <= max(
            found["precision"], found["recall"]
        )
        assert exact_match(prediction, golds) == found["em"]
        assert f1_score(prediction, golds) == found["f1"]


@pytest.mark.parametrize(
    "prediction, golds, em, f1, acc, precision, recall",
    [  # by hand
        ("Paris", ["Paris"], 1, 1, 1, 1, 1),
        ("city of Paris", ["Paris"], 0, 0.5, 1, 1 / 3, 1),
        ("New York City", ["NYC", "New York"], 0, 0.8, 1, 2 / 3, 1),
        ("New York", ["New York City"], 0, 0.8, 0, 1, 2 / 3),
        (
            "x y",
            ["x", "x y z w"],
            0,
            2 / 3,
            1,
            1,
            1,
        ),  # P from one gold, R from the other: their F1 would be 1
        ("know nothing", ["no"], 0, 0, 1, 0, 0),  # a substring, not a word; F1 under the guard
        ("no", ["no", "yes"], 1, 1, 1, 1, 1),
        ("yes", ["no answer"], 0, 0, 0, 0, 0),
        ("noanswer", ["yes"], 0, 0, 0, 0, 0),
        ("yes it is", ["yes"], 0, 0, 1, 0, 0),
        ("a b b", ["b b b"], 0, 0.8, 0, 1, 2 / 3),  # multisets; the article is gone
        ("", ["Paris"], 0, 0, 0, 0, 0),
        (None, ["Paris"], 0, 0, 0, 0, 0),
        (
            "???",
            ["The"],
            0,
            0,
            0,
            0,
            0,
        ),  # FlashRAG gives EM and acc 1 here: both normalise to nothing
        ("a", ["A the"], 0, 2 / 3, 0, 1, 0.5),  # articles alone are words
        ("Paris", ["the", "Rome"], 0, 0, 0, 0, 0),  # FlashRAG gives acc 1: "" is in everything
        ("Paris", [], 0, 0, 0, 0, 0),
        ("3.5", "35", 1, 1, 1, 1, 1),
    ],
)
def test_hand_values(prediction, golds, em, f1, acc, precision, recall):
    assert list(answer_metrics(prediction, golds).values()) == pytest.approx(
        [em, f1, acc, precision, recall]
    )


def test_many_aliases_take_the_best_one():
    golds = [f"alias {i} of it" for i in range(193)] + [
        "Mask of Fu Manchu"
    ]  # 2WikiMultihopQA has up to 194
    assert answer_metrics("The Mask of Fu Manchu", golds)["em"] == 1.0


def test_gold_passages_of_an_episode():
    g = random.Random(0)
    for _ in range(300):
        golds, found = ([f"p{g.randrange(8)}" for _ in range(g.randrange(1, 6))] for _ in range(2))
        hits = sum(1 for gold in set(golds) if any(gold == f for f in found))
        assert gold_recall(found, golds) == hits / len(set(golds))
        assert all_gold(found, golds) == (1.0 if hits == len(set(golds)) else 0.0)
    assert gold_recall([], ["a", "b"]) == 0.0 and gold_recall(iter(["b", "b"]), ("a", "b")) == 0.5
    for wrong in ((["a"], []), ("abc", ["a"]), (["a"], "abc")):
        with pytest.raises(ValueError, match="give lists of ids, with a gold one"):
            gold_recall(*wrong)


# -------------------------------------------------------------------------------------------- files

QUESTIONS = [
    {"id": f"q{i}", "question": f"question {i}?", "golden_answers": golds}
    for i, golds in enumerate(
        [["Lima"], ["yes"], ["New York City", "NYC"], ["Frank Herbert"], ["7"]]
    )
]
TRAJECTORIES = [  # as infer.py writes them, as far as this file reads
    {
        "rollout_id": "q0#0",
        "id": "q0",
        "pred": "Lima",
        "answer": "<answer>Lima</answer>",
        "error": None,
        "well_formed": True,
        "searches": 2,
        "retrieved": ["a", "x", "b"],
    },
    {
        "rollout_id": "q0#1",
        "id": "q0",
        "pred": "Rome",
        "error": None,
        "well_formed": False,
        "searches": 9,
        "retrieved": [],
    },
    {
        "rollout_id": "q1#0",
        "id": "q1",
        "pred": "",
        "answer": "",
        "error": None,
        "well_formed": False,
        "searches": 0,
        "retrieved": [],
    },
    {
        "rollout_id": "q2#0",
        "id": "q2",
        "pred": "New York",
        "error": "tool_error: time-out",
        "well_formed": False,
        "searches": 1,
        "retrieved": ["c"],
    },
    {
        "rollout_id": "zz#0",
        "id": "zz",
        "pred": "x",
        "error": None,
        "well_formed": True,
        "searches": 50,
        "retrieved": [],
    },
    {
        "rollout_id": "q3#0",
        "id": "q3",
        "pred": "Herbert",
        "answer": "so: Herbert",
        "error": None,
        "well_formed": True,
        "searches": 3,
        "retrieved": ["d", "d"],
    },
]
GOLDS = {"q0": ["a", "b"], "q2": ["c", "e"], "q3": ["d"], "q4": ["f"], "other": ["g"]}


def test_every_form_of_an_answer_file(tmp_path):
    rows = [
        {"id": "a", "prediction": "Lima", "more": 1},
        {"id": "b", "prediction": None},
        {"id": "c", "output": {"pred": "x", "final_response": "it is x", "metric_score": {}}},
    ]
    expected = {"a": Prediction("Lima"), "b": Prediction(""), "c": Prediction("x", "it is x")}
    assert read_predictions(put(tmp_path / "p.jsonl", rows)) == expected
    (tmp_path / "intermediate_data.json").write_text(json.dumps(rows, indent=4))
    assert read_predictions(str(tmp_path / "intermediate_data.json")) == expected
    path = put(tmp_path / "t.jsonl", TRAJECTORIES)
    assert read_predictions(path)["q0"] == Prediction(
        "Lima", "<answer>Lima</answer>", True, 2, ["a", "x", "b"]
    )
    assert read_predictions(path, sample=1) == {"q0": Prediction("Rome", None, False, 9, [])}
    numbered = [
        {"id": "a", "prediction": "x", "sample": 0},
        {"id": "a", "prediction": "y", "sample": 1},
    ]
    assert read_predictions(put(tmp_path / "s.jsonl", numbered), 1) == {"a": Prediction("y")}
    loose = [
        {"id": 7, "prediction": "x", "output": "raw text"},
        {"id": "b", "prediction": "y", "output": [1]},
    ]
    assert read_predictions(put(tmp_path / "l.jsonl", loose)) == {
        "7": Prediction("x"),
        "b": Prediction("y"),
    }


@pytest.mark.parametrize("behind", ["[{}]", "oops", "\n]"])
def test_what_stands_behind_the_array_is_not_lost_in_silence(tmp_path, behind):
    path = tmp_path / "intermediate_data.json"
    path.write_text('[{"id": "a", "prediction": "x"}] \n')
    assert read_predictions(str(path)) == {"a": Prediction("x")}
    path.write_text('[{"id": "a", "prediction": "x"}]\n' + behind)
    with pytest.raises(DataError, match="after 1 objects of a JSON array stands .* not the end"):
        read_predictions(str(path))
    with pytest.raises(DataError, match="none.json: No such file"):
        read_predictions(str(tmp_path / "none.json"))


@pytest.mark.parametrize("golds", [["???", ""], "-", ["\u200b"], ["？！"], ["!", " . "]])
def test_questions_whose_golden_answers_are_nothing_are_refused(tmp_path, golds):
    rows = [
        {"id": "a", "question": "?", "golden_answers": ["Lima", "..."]},
        {"id": "b", "question": "?", "golden_answers": golds},
    ]
    with pytest.raises(
        DataError, match="q.jsonl:2: 'golden_answers' is .*not blank or punctuation alone"
    ):
        read_questions(put(tmp_path / "q.jsonl", rows))
    assert read_questions(put(tmp_path / "q.jsonl", rows[:1]))[0].golden_answers == ["Lima"]


def test_what_reading_keeps_of_golden_answers_can_be_scored(tmp_path):
    """The reader's rule (data.py) and the scorer's (reward.py) are the same."""
    generator = random.Random(4)
    signs = [
        *"?!.-'\"$ ",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "？",
        "。",
        "the",
        "a",
        "7",
        "é",
        "ﬁ",
        "日",
    ]
    for _ in range(500):
        gold = "".join(generator.choices(signs, k=generator.randrange(1, 4)))
        path = put(
            tmp_path / "q.jsonl", [{"id": "a", "question": "?", "golden_answers": ["Lima", gold]}]
        )
        kept = gold in read_questions(path)[0].golden_answers
        assert kept == (exact_match(gold, [gold]) == 1.0), ascii(gold)


def test_numeric_ids_and_failed_episodes_are_written_for_flashrag(tmp_path):
    rows = [{"id": i, "question": "?", "golden_answers": ["x"]} for i in (1, 2)]
    found = {"1": Prediction("x"), "2": Prediction("x", "so: x", error="time-out")}
    write_flashrag(str(tmp_path), put(tmp_path / "q.jsonl", rows), found)
    ok, failed = json.loads((tmp_path / "intermediate_data.json").read_text())
    right, wrong = dict.fromkeys(ANSWER_METRICS, 1.0), dict.fromkeys(ANSWER_METRICS, 0)
    assert ok["output"] == {"pred": "x", "metric_score": right}
    assert failed["output"] == {"final_response": "so: x", "pred": "x", "metric_score": wrong}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"id": "a"}, "p.jsonl:2: prediction is 'absent'"),
        ({"id": "a", "pred": [7]}, r"p.jsonl:2.*prediction is \[7\]"),
        ({"pred": "x"}, "p.jsonl:2: id is None"),
        ({"id": "first", "pred": "x"}, "p.jsonl:2: id 'first' occurs a second time"),
        (
            {"id": "a", "pred": "x", "well_formed": 1},
            "p.jsonl:2: well_formed is '1'; it must be bool or null",
        ),
        ({"id": "a", "pred": "x", "searches": 1.5}, "p.jsonl:2: searches is '1.5'"),
        (
            {"id": "a", "pred": "x", "retrieved": [["p"]]},
            "p.jsonl:2: retrieved.*list of passage ids",
        ),
        ({"id": "a", "pred": "x", "sample": "one"}, "p.jsonl:2: sample 'one'"),
        ({"id": "a", "pred": "x", "sample": "²"}, "p.jsonl:2: sample '²'"),
        ({"id": True, "pred": "x"}, "p.jsonl:2: id is True"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    path = put(tmp_path / "p.jsonl", [{"id": "first", "prediction": "x"}, row])
    with pytest.raises(DataError, match=message):
        read_predictions(path)


def test_no_such_sample_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no row with sample 3"):
        read_predictions(put(tmp_path / "p.jsonl", [{"id": "a", "prediction": "x"}]), 3)


def test_each_group_has_its_own_denominator(tmp_path):
    """Missing and failed questions stay in the mean of the answers; searches are over episodes,
    golds over judged."""
    predictions = read_predictions(put(tmp_path / "t.jsonl", TRAJECTORIES))
    questions = read_questions(put(tmp_path / "q.jsonl", QUESTIONS))
    scores = score_predictions(predictions, questions, GOLDS)
    assert list(scores) == ["q0", "q1", "q2", "q3", "q4"]
    assert [row["em"] for row in scores.values()] == [1, 0, 0, 0, 0]  # q2 failed: no credit
    assert [row["f1"] for row in scores.values()] == [1, 0, 0, pytest.approx(2 / 3), 0]
    assert [row["well_formed"] for row in scores.values()] == [1, 0, 0, 1, 0]
    searches = {q: row["searches"] for q, row in scores.items() if "searches" in row}
    assert searches == {"q0": 2, "q1": 0, "q2": 1, "q3": 3}
    for name, values in (("gold_recall", [1, 0.5, 1, 0]), ("all_gold", [1, 0, 1, 0])):
        found = {q: row[name] for q, row in scores.items() if name in row}
        assert found == dict(zip(("q0", "q2", "q3", "q4"), values))
    bare = score_predictions({"q0": Prediction("Lima")}, questions, GOLDS)
    assert {*bare["q0"], *bare["q1"]} == set(ANSWER_METRICS)


FLASHRAG_ROWS = [
    {
        "id": "dev_0",
        "question": "Who wrote “Dune”?",
        "golden_answers": ["Frank Herbert", "Herbert"],
        "metadata": {"type": "bridge"},
    },
    {"id": "dev_1", "question": "Is Lima a city?", "golden_answers": ["yes"]},
    {
        "id": "dev_2",
        "question": "Where?",
        "golden_answers": ["New York City"],
        "metadata": {"hops": [1, 2]},
    },
]
FLASHRAG_ANSWERS = {
    "dev_0": Prediction("Herbert, Frank P.", r"<answer>\boxed{Herbert, Frank P.}</answer>"),
    "dev_1": Prediction("no", "no idea"),
    "dev_2": Prediction("", ""),
}
METRIC_SCORE = """em: 0.0
f1: 0.26666666666666666
acc: 0.3333333333333333
precision: 0.2222222222222222
recall: 0.3333333333333333
"""
INTERMEDIATE_DATA = r"""[
    {
        "id": "dev_0",
        "question": "Who wrote “Dune”?",
        "golden_answers": [
            "Frank Herbert",
            "Herbert"
        ],
        "metadata": {
            "type": "bridge"
        },
        "output": {
            "final_response": "<answer>\\boxed{Herbert, Frank P.}</answer>",
            "pred": "Herbert, Frank P.",
            "metric_score": {
                "em": 0.0,
                "f1": 0.8,
                "acc": 1.0,
                "precision": 0.6666666666666666,
                "recall": 1.0
            }
        }
    },
    {
        "id": "dev_1",
        "question": "Is Lima a city?",
        "golden_answers": [
            "yes"
        ],
        "output": {
            "final_response": "no idea",
            "pred": "no",
            "metric_score": {
                "em": 0.0,
                "f1": 0,
                "acc": 0.0,
                "precision": 0,
                "recall": 0
            }
        }
    },
    {
        "id": "dev_2",
        "question": "Where?",
        "golden_answers": [
            "New York City"
        ],
        "metadata": {
            "hops": [
                1,
                2
            ]
        },
        "output": {
            "final_response": "",
            "pred": "",
            "metric_score": {
                "em": 0.0,
                "f1": 0,
                "acc": 0.0,
                "precision": 0,
                "recall": 0
            }
        }
    }
]"""


def test_flashrag_files_are_those_that_flashrag_writes(tmp_path):
    """Both texts came out of FlashRAG's own Evaluator and Dataset.save (commit 1ee5249) for these
    rows and outputs."""
    path = put(tmp_path / "q.jsonl", FLASHRAG_ROWS)
    write_flashrag(str(tmp_path), path, FLASHRAG_ANSWERS)
    assert (tmp_path / "metric_score.txt").read_bytes() == METRIC_SCORE.encode()
    assert (tmp_path / "intermediate_data.json").read_bytes() == INTERMEDIATE_DATA.encode()
    assert (
        read_predictions(str(tmp_path / "intermediate_data.json")) == FLASHRAG_ANSWERS
    )  # and it can be scored again


# ------------------------------------------------------------------------------------------ command


@pytest.fixture
def files(tmp_path):
    put(tmp_path / "q.jsonl", QUESTIONS)
    put(tmp_path / "after.jsonl", TRAJECTORIES)
    put(
        tmp_path / "before.jsonl",
        [{"id": f"q{i}", "prediction": "Lima", "searches": i} for i in range(5)],
    )
    (tmp_path / "g.qrels").write_text(
        "".join(f"{q} 0 {p} 1\n" for q, ps in GOLDS.items() for p in ps) + "q1 0 z 0\n"
    )
    return tmp_path


def test_command_scores_and_compares(files, capsys):
    words = [
        f"answers={files}/after.jsonl",
        f"baseline={files}/before.jsonl",
        f"questions={files}/q.jsonl",
        f"qrels={files}/g.qrels",
        f"out={files}/out",
        "samples=500",
    ]
    run_entry(EvaluateConfig, evaluate.main, words)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["system"] == "after" and line["baseline"] == "before" and line["judged"] == 4
    assert line["em"] == pytest.approx(0.2) and line["f1"] == pytest.approx((1 + 2 / 3) / 5)
    assert (
        line["searches"] == pytest.approx(1.5)
        and line["all_gold"] == 0.5
        and line["gold_recall"] == 2.5 / 4
    )
    assert (line["missing"], line["errors"], line["extra"], line["well_formed"]) == (
        1,
        1,
        1,
        pytest.approx(0.4),
    )
    assert (
        line["systems"]["before"]["em"] == pytest.approx(0.2)
        and "all_gold" not in line["systems"]["before"]
    )
    whole = json.loads((files / "out/metrics.json").read_text())["systems"]["after"]
    assert whole["paired"]["em"]["difference"] == 0 and whole["paired"]["em"]["p"] == 1
    # the four questions that both searched: 2, 0, 1, 3 against 0, 1, 2, 3
    assert whole["paired"]["searches"]["difference"] == pytest.approx(0.0)
    assert (
        "all_gold" not in whole["paired"]
        and whole["ci"]["all_gold"][0] <= 0.5 <= whole["ci"]["all_gold"][1]
    )
    assert (
        json.loads((files / "out/after/intermediate_data.json").read_text())[2]["output"]["pred"]
        == "New York"
    )
    assert (files / "out/before/metric_score.txt").read_text().startswith("em: 0.2\n")
    assert (
        "| minus before |" in (files / "out/table.md").read_text()
        and (files / "out/config.yaml").exists()
    )


def test_intervals_and_tests_are_those_of_the_scores(files, capsys):
    cfg = EvaluateConfig(
        answers=[f"{files}/after.jsonl"],
        questions=f"{files}/q.jsonl",
        qrels=f"{files}/g.qrels",
        out=f"{files}/one",
        samples=300,
    )
    line = evaluate.main(cfg)
    scores = score_predictions(
        read_predictions(f"{files}/after.jsonl"),
        read_questions(f"{files}/q.jsonl"),
        {q: g for q, g in GOLDS.items()},
    )
    whole = json.loads((files / "one/metrics.json").read_text())
    assert bootstrap_interval(scores, None, 300, 0) == whole["ci"]
    assert (
        (files / "one/metric_score.txt").exists() and "systems" not in line and "paired" not in line
    )
    assert "Gold" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"questions": ""}, ConfigError, "answers need questions=FILE"),
        ({"answers": "after.jsonl"}, ConfigError, "answers='after.jsonl' must be list of str"),
        ({"run": ["x.trec"]}, ConfigError, "run.* do not go with answers"),
        ({"retrievers": {"x": RetrieverConfig()}}, ConfigError, "retrievers.* do not go with"),
        ({"retriever": RetrieverConfig(k1=2.0), "k": 5}, ConfigError, "'retriever', 'k'.* do not"),
        ({"qrels": "other.qrels"}, DataError, "q.jsonl and .*other.qrels have no query in common"),
        ({"answers": ["others.jsonl"]}, DataError, "no query in common"),
    ],
)
def test_what_cannot_be_scored(files, change, error, message, monkeypatch):
    (files / "other.qrels").write_text("nobody 0 p 1\n")
    put(files / "others.jsonl", [{"id": "nobody", "prediction": "x"}])
    monkeypatch.chdir(files)
    settings = {"answers": ["after.jsonl"], "questions": "q.jsonl"}
    with pytest.raises(error, match=message):
        evaluate.main(EvaluateConfig(**settings | change))


def test_retrieved_passages_of_another_corpus_are_told(files, capsys):
    (files / "x.qrels").write_text("".join(f"q{i} 0 elsewhere{i} 1\n" for i in range(5)))
    evaluate.main(
        EvaluateConfig(
            answers=[f"{files}/after.jsonl"],
            questions=f"{files}/q.jsonl",
            qrels=f"{files}/x.qrels",
            samples=5,
        )
    )
    assert "after.jsonl retrieved no passage that" in capsys.readouterr().err


def test_flashrag_files_hold_flashrags_scores(files):
    """Where ours differ (an accent in two marks), the tables have ours and FlashRAG's files have
    theirs."""
    put(files / "q.jsonl", [{"id": "q0", "question": "?", "golden_answers": ["Caf\u00e9"]}])
    put(files / "p.jsonl", [{"id": "q0", "prediction": "Cafe\u0301"}])
    line = evaluate.main(
        EvaluateConfig(
            answers=[f"{files}/p.jsonl"], questions=f"{files}/q.jsonl", out=f"{files}/f", samples=5
        )
    )
    assert line["em"] == 1.0 and (files / "f/metric_score.txt").read_text().startswith("em: 0.0\n")
    assert (
        json.loads((files / "f/intermediate_data.json").read_text())[0]["output"]["metric_score"][
            "em"
        ]
        == 0.0
    )


def test_types_of_questions(files):
    """Each type's mean is over its own questions, and together they are the mean of all."""
    put(
        files / "typed.jsonl",
        [
            row | {"metadata": {"type": "bridge" if i < 3 else "comparison"}}
            for i, row in enumerate(QUESTIONS)
        ],
    )
    evaluate.main(
        EvaluateConfig(
            answers=[f"{files}/after.jsonl"],
            questions=f"{files}/typed.jsonl",
            out=f"{files}/typed",
            samples=100,
        )
    )
    whole = json.loads((files / "typed/metrics.json").read_text())
    assert {t: (row["f1"], row["queries"]) for t, row in whole["groups"]["type"].items()} == {
        "bridge": (pytest.approx(1 / 3), 3),
        "comparison": (pytest.approx(1 / 3), 2),
    }
    assert sum(
        row["f1"] * row["queries"] for row in whole["groups"]["type"].values()
    ) / 5 == pytest.approx(whole["f1"])
    assert (
        "| F1 by type of question | bridge (3) | comparison (2) |"
        in (files / "typed/table.md").read_text()
    )


def test_rows_of_episodes_are_read(tmp_path):
    """What infer.py writes of an episode, an answered and a failed one, is what this file reads."""
    task = SimpleNamespace(
        name="agent",
        messages=lambda q: [{"role": "user", "content": q}],
        tools=SimpleNamespace(schemas=[]),
        cfg=SimpleNamespace(template="instruct", mcp="", bare_calls=False),
    )
    call = Call(
        "retrieve",
        {"query": "lima"},
        documents=[("p1", "x"), ("p2", "y")],
        done=True,
        shown="x\n\ny",
    )
    rounds = [Round("ask", [call], "shown"), Round("<answer>Lima</answer>")]
    answered = Episode(
        [1], [2], [0.0], [1], 0, "answered", 0, 1, rounds, "Lima", True, well_formed=True
    )
    failed = Episode(
        [1], [2], [0.0], [1], 0, "tool_error", 1, 1, rounds[:1], None, False, "time-out"
    )
    rows = [
        trajectory_row(e, Question("q0", "where?", ["Lima"]), task, {}) for e in (answered, failed)
    ]
    path = put(tmp_path / "t.jsonl", rows)
    assert read_predictions(path) == {
        "q0": Prediction("Lima", "<answer>Lima</answer>", True, 1, ["p1", "p2"])
    }
    assert read_predictions(path, 1) == {
        "q0": Prediction("", "", False, 1, ["p1", "p2"], "tool_error: time-out")
    }


def test_means_are_weighted_by_items():
    """Two shards of a data set, 3 items with sum 3 and 1 item with sum 0: 0.75, not the mean of the
    shards' means."""
    questions = [Question(f"q{i}", "?", ["Lima"]) for i in range(4)]
    predictions = {f"q{i}": Prediction("Lima" if i < 3 else "Rome") for i in range(4)}
    scores = score_predictions(predictions, questions, {})
    assert sum(row["em"] for row in scores.values()) / len(scores) == 0.75
