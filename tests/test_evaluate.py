"""evaluate.py: pytrec_eval and slow loops as oracles, files, intervals, the command, the cases of area `evaluate`.

python -m pytest tests/test_evaluate.py
"""

import itertools
import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import pytrec_eval
from scoring import breakdown
import evaluate
from config import ConfigError, load_config
from data import DataError, Turn
from evaluate import EvaluateConfig, read_rewrites
from retriever import RetrieverConfig
from scoring.ranking import (best_passages, bootstrap_interval, evaluate_run, METRICS, paired_test,
                             paper_protocol, rank_results, read_qrels, read_run, score_run,
                             write_qrels, write_run)

# Evaluate cases that other test files answer.
ELSEWHERE = {"evl-23": "tests/test_answers.py: means of EM and F1"}

ROOT = os.path.dirname(os.path.abspath(evaluate.__file__))


def random_data(seed, queries=60, ids=300):
    """Runs with ties, empty lists, missing and extra queries; qrels with gains 0 to 3, some with none above 0."""
    generator = random.Random(seed)
    passages = [f"p{i}" for i in range(ids)] + ["é", "ß1", "Ω", "日本", "10", "9", "P1"]
    run, qrels = {}, {}
    for i in range(queries):
        query = f"q{i}"
        if generator.random() < 0.9:
            judged = generator.sample(passages, generator.randrange(1, 8))
            qrels[query] = {passage: generator.choice([0, 0, 1, 1, 2, 3]) for passage in judged}
        if generator.random() < 0.85:
            pool = list(
                dict.fromkeys([*qrels.get(query, {}), *generator.sample(passages, generator.randrange(0, 160))])
            )
            found = generator.sample(pool, generator.randrange(0, len(pool) + 1))
            levels = generator.choice([3, 20, 10_000])  # few levels: many ties
            run[query] = [(passage, generator.randrange(levels) / 8) for passage in found]
    return run, qrels


def slow_scores(run, qrels):
    """The definitions, by hand: per query a list in the order of METRICS."""
    out = {}
    for query, gains in qrels.items():
        ranked = sorted(run.get(query, []), key=lambda r: r[0].encode(), reverse=True)
        ranked = [passage for passage, _ in sorted(ranked, key=lambda r: r[1], reverse=True)][:100]  # stable
        relevant = {passage for passage, gain in gains.items() if gain > 0}
        ranks = [i for i, passage in enumerate(ranked, 1) if passage in relevant]
        mrr = 1 / ranks[0] if ranks else 0.0
        dcg = sum(gains.get(passage, 0) / math.log2(i + 1) for i, passage in enumerate(ranked[:3], 1))
        ideal = sum(g / math.log2(i + 1) for i, g in enumerate(sorted(gains.values(), reverse=True)[:3], 1))
        recalls = [
            len(relevant.intersection(ranked[:k])) / len(relevant) if relevant else 0.0 for k in (5, 10, 20, 100)
        ]
        out[query] = [mrr, mrr if ranks and ranks[0] <= 3 else 0.0, dcg / ideal if ideal else 0.0, *recalls]
    return out


# ---------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_slow_loops(seed):
    run, qrels = random_data(seed)
    slow, fast = slow_scores(run, qrels), score_run(run, qrels)
    assert list(fast) == list(qrels) == list(slow)
    for query in qrels:
        assert list(fast[query]) == list(METRICS)
        assert list(fast[query].values()) == pytest.approx(slow[query], abs=1e-12)
    metrics = evaluate_run(run, qrels)
    assert [metrics[m] for m in METRICS] == pytest.approx(np.mean(list(slow.values()), axis=0), abs=1e-12)
    assert metrics["queries"] == len(qrels)
    assert metrics["missing"] == sum(1 for q in qrels if q not in run or not run[q]) > 0
    assert list(metrics) == [*METRICS, "queries", "missing"]


@pytest.mark.parametrize("seed", range(8))
def test_means_equal_pytrec_eval(seed):
    """pytrec_eval itself on the raw scores (they are exact in single precision), zeros added for what it leaves out."""
    run, qrels = random_data(seed + 100)
    cut = {q: dict(sorted(r, key=lambda x: (x[1], x[0]), reverse=True)[:100]) for q, r in run.items() if r}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"}).evaluate(cut)
    names = {"mrr": "recip_rank", "ndcg@3": "ndcg_cut_3", **{f"recall@{k}": f"recall_{k}" for k in (5, 10, 20, 100)}}
    metrics = evaluate_run(run, qrels)
    for ours, name in names.items():
        total = sum(theirs[q][name] for q in theirs)
        assert metrics[ours] == pytest.approx(total / len(qrels), abs=1e-9)
    top3 = {q: dict(list(r.items())[:3]) for q, r in cut.items()}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(top3)
    assert metrics["mrr@3"] == pytest.approx(sum(row["recip_rank"] for row in theirs.values()) / len(qrels), abs=1e-9)


def test_order_of_lists_and_of_dicts_does_not_matter():
    run, qrels = random_data(7)
    generator = random.Random(0)
    shuffled = {q: generator.sample(r, len(r)) for q, r in generator.sample(list(run.items()), len(run))}
    assert score_run(run, qrels) == score_run(shuffled, qrels)


def test_results_beyond_100_never_count():
    results = [(f"d{i:03d}", 200.0 - i) for i in range(150)]
    assert evaluate_run({"q": results}, {"q": {"d099": 1}})["mrr"] == pytest.approx(0.01)
    assert all(evaluate_run({"q": results}, {"q": {"d100": 1}})[m] == 0.0 for m in METRICS)


def test_differences_below_single_precision_keep_their_order():
    run = {"q": [("a", 1.0), ("b", 1.0 + 1e-12)]}
    assert evaluate_run(run, {"q": {"b": 1}})["mrr"] == 1.0
    assert evaluate_run(run, {"q": {"a": 1}})["mrr"] == 0.5


def test_inputs_are_not_changed():
    run, qrels = random_data(3)
    before = json.dumps([run, qrels])
    evaluate_run(run, qrels)
    assert json.dumps([run, qrels]) == before


@pytest.mark.parametrize(
    "run, qrels, message",
    [
        ({"q": [("d", float("nan"))]}, {"q": {"d": 1}}, "'q'.*NaN"),
        ({"q": [("d", 1.0), ("d", 2.0)]}, {"q": {"d": 1}}, "'d' occurs 2 times.*'q'"),
        ({"q": [("d", 1.0)]}, {"q": {"d": 0.5}}, "'q'.*whole number"),
        ({}, {}, "no queries"),
    ],
)
def test_what_cannot_be_scored(run, qrels, message):
    with pytest.raises(DataError, match=message):
        evaluate_run(run, qrels)


# ---------------------------------------------------------------------------------------------- files


def write(path, text):
    with open(path, "wb") as f:
        f.write(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "reader, text, message",
    [
        (read_qrels, "", "bad.txt: the file is empty"),
        (read_qrels, "\n \t\n", "bad.txt: the file is empty"),
        (read_qrels, "q1 0 d1 1\nq2 0 d2\n", "bad.txt:2: 3 columns.*query-id 0 passage-id gain"),
        (read_qrels, "q1 Q0 d1 1 2.0 t\n", "bad.txt:1: 6 columns"),
        (read_qrels, "q1 0 d1 yes\n", "bad.txt:1: gain 'yes'"),
        (read_qrels, "q1 0 d1 1.0\n", "bad.txt:1: gain '1.0'"),
        (read_qrels, "q1 0 d1 10000\n", "bad.txt:1: gain '10000'"),
        (read_qrels, "q1 0 d1 1\nq1 0 d\0a 1\n", "bad.txt:2: a NUL"),
        (
            read_qrels,
            "q1 0 d1 1\nq2 0 d1 1\nq1 0 d1 1\n",
            "bad.txt:3: passage 'd1' is judged a second time for query 'q1'",
        ),
        (read_qrels, b"q1 0 d\xe9 1\n", "bad.txt:1: not UTF-8"),
        (read_run, "", "bad.txt: the file is empty"),
        (read_run, "q1 0 d1 1\n", "bad.txt:1: 4 columns.*there must be 6"),
        (read_run, "q1 Q0 d1 1 2.0 2.0 t\n", "bad.txt:1: 7 columns"),
        (read_run, "q1 Q0 d1 1 high t\n", "bad.txt:1: score 'high'"),
        (read_run, "q1 Q0 d1 1 1.0 t\n\nq1 Q0 d2 2 nan t\n", "bad.txt:3: score 'nan'"),
        (read_run, "q1 Q0 d1 1 1.0 t\nq1 Q0 d1 2 0.5 t\n", "bad.txt:2: passage 'd1' is listed a second time"),
    ],
)
def test_bad_lines_name_file_line_and_reason(tmp_path, reader, text, message):
    with pytest.raises(DataError, match=message):
        reader(write(tmp_path / "bad.txt", text))


@pytest.mark.parametrize("reader", [read_qrels, read_run])
def test_missing_file(tmp_path, reader):
    with pytest.raises(DataError, match="nowhere.txt"):
        reader(str(tmp_path / "nowhere.txt"))


def test_bom_tabs_and_ids_with_odd_characters(tmp_path):
    path = write(tmp_path / "q", b"\xef\xbb\xbfq1 0 d1 1\r\nq\xc2\xa02\t0\t d\xe2\x80\xa82 -1\r\n")
    assert read_qrels(path) == {"q1": {"d1": 1}, "q\u00a02": {"d\u20282": -1}}


def test_run_is_read_in_the_order_it_is_scored(tmp_path):
    path = write(tmp_path / "r", "q Q0 a 1 1 t\nq Q0 c 2 2.5 t\nq Q0 b 3 1.0 t\nq Q0 d 4 1e1 t\n")
    assert read_run(path) == {"q": [("d", 10.0), ("c", 2.5), ("b", 1.0), ("a", 1.0)]}


@pytest.mark.parametrize("seed", range(4))
def test_runs_and_qrels_round_trip(tmp_path, seed):
    run, qrels = random_data(seed)
    generator = random.Random(seed)
    run = {
        q: [(p, generator.choice([s, s + 1e-13, -s * 1e-300, np.float32(s / 3)])) for p, s in r] for q, r in run.items()
    }
    write_run(tmp_path / "run", run)
    write_qrels(tmp_path / "qrels", qrels)
    assert read_qrels(tmp_path / "qrels") == qrels
    back = read_run(tmp_path / "run")
    expected = {
        q: sorted(((p, float(s)) for p, s in r), key=lambda x: (x[1], x[0]), reverse=True) for q, r in run.items() if r
    }
    assert back == expected  # same scores to the last bit, so the same order
    assert evaluate_run(back, qrels) == evaluate_run(run, qrels)
    with open(tmp_path / "run", encoding="utf-8") as f:
        rows = [line.split(" ") for line in f.read().splitlines()]
    assert all(len(row) == 6 and row[1] == "Q0" and row[5] == "nanosearch-r1" for row in rows)
    ranks = [[int(row[3]) for row in rows if row[0] == query] for query in back]
    assert all(r == list(range(1, len(r) + 1)) for r in ranks)


@pytest.mark.parametrize(
    "run, tag",
    [
        ({"a b": [("d", 1.0)]}, "t"),
        ({"q": [("d 1", 1.0)]}, "t"),
        ({"q": [("", 1.0)]}, "t"),
        ({"q": [("d", 1.0)]}, "my tag"),
        ({"q": [("d", 1.0)], "r": [("d\u00a01", 1.0)]}, "t"),
        ({"q": [("d", 1.0)], "r": [("d", float("nan"))]}, "t"),
    ],
)
def test_a_run_that_cannot_be_written_leaves_the_old_file(tmp_path, run, tag):
    path = tmp_path / "run"
    path.write_text("old")
    with pytest.raises(DataError):
        write_run(path, run, tag=tag)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run"]


def test_read_rewrites(tmp_path):
    rows = [
        {"query_id": "a", "rewrite": "x", "status": "ok", "sample": 0},
        {"query_id": "a", "rewrite": "y", "sample": 1},
        {"query_id": "b", "rewrite": "z", "status": "malformed"},
    ]
    path = write(tmp_path / "w.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_rewrites(path) == ({"a": "x", "b": "z"}, {"a": "ok", "b": "malformed"})
    assert read_rewrites(path, sample=1) == ({"a": "y"}, {"a": "unknown"})
    with pytest.raises(DataError, match="no rewrites with sample 2"):
        read_rewrites(path, sample=2)
    for bad, message in [
        ('{"query_id": "a", "rewrite": "x"}\n' * 2, ":2: query_id 'a' occurs a second time"),
        ('{"query_id": 1, "rewrite": "x"}', ":1: query_id is 1"),
        ('{"query_id": "a"}', "rewrite is None"),
        ("", "no rewrites"),
        ('{"query_id": "a", "rewr', ":1: not valid JSON"),
    ]:
        with pytest.raises(DataError, match=message):
            read_rewrites(write(tmp_path / "bad.jsonl", bad))


# ---------------------------------------------------------------------------------------------- intervals and tests


def as_scores(*columns):
    return {f"q{i}": {f"m{j}": float(v) for j, v in enumerate(row)} for i, row in enumerate(zip(*columns))}


def test_interval_has_the_width_of_the_normal_approximation_and_covers():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        values = generator.random(150) < 0.3
        low, high = bootstrap_interval(as_scores(values), samples=500, seed=trial)["m0"]
        covered += low <= 0.3 <= high
        assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(150), rel=0.2)
    assert covered >= 180  # 95 % of 200 is 190; standard deviation 3


def test_interval_equals_a_slow_bootstrap():
    values = np.random.default_rng(1).random((40, 3))
    intervals = bootstrap_interval(as_scores(*values.T), samples=6_000)
    generator = random.Random(0)
    means = [np.mean(values[generator.choices(range(40), k=40)], axis=0) for _ in range(6_000)]
    for j, (low, high) in enumerate(intervals.values()):
        assert [low, high] == pytest.approx(np.quantile(np.array(means)[:, j], [0.025, 0.975]), abs=0.007)


def test_intervals_are_seeded_and_do_not_depend_on_the_other_metrics():
    values = np.random.default_rng(2).random((30, 2))
    both = bootstrap_interval(as_scores(*values.T), samples=300, seed=5)
    assert both == bootstrap_interval(as_scores(*values.T), samples=300, seed=5)
    assert both != bootstrap_interval(as_scores(*values.T), samples=300, seed=6)
    assert both["m1"] == pytest.approx(
        bootstrap_interval(as_scores(values[:, 1]), samples=300, seed=5)["m0"], abs=1e-12
    )


def test_conversations_are_drawn_whole():
    """Turns that copy each other carry no more information than one: the interval is that of 30 values, not of 240."""
    values = np.random.default_rng(3).random(30)
    one = bootstrap_interval(as_scores(values), samples=4000)["m0"]
    copied = as_scores(np.repeat(values, 8))
    clusters = {query: f"c{i // 8}" for i, query in enumerate(copied)}
    assert bootstrap_interval(copied, clusters, samples=4000)["m0"] == pytest.approx(one, abs=1e-12)
    low, high = bootstrap_interval(copied, samples=4000)["m0"]
    assert high - low == pytest.approx((one[1] - one[0]) / math.sqrt(8), rel=0.1)


def test_clusters_of_unequal_size_weigh_by_turns():
    """Against a slow bootstrap over lists of turns: the mean is over the turns drawn, not over conversation means."""
    generator = random.Random(1)
    conversations = [[generator.random() + 0.1 * size for _ in range(size)] for size in [1, 1, 2, 2, 3, 5, 8, 13] * 2]
    labels = [f"c{i}" for i, turns in enumerate(conversations) for _ in turns]
    scores = as_scores(sum(conversations, []))
    clusters = dict(zip(scores, labels))
    for query in list(clusters)[:2]:  # two conversations of one turn: the same with or without a known cluster
        del clusters[query]
    means = [np.mean(sum(generator.choices(conversations, k=16), [])) for _ in range(20_000)]
    ours = bootstrap_interval(scores, clusters, samples=20_000)["m0"]
    assert ours == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.02)


def test_one_unit_gives_no_interval():
    assert bootstrap_interval(as_scores([0.5])) == {"m0": None}
    assert bootstrap_interval(as_scores([0.5, 1.0]), {"q0": "c", "q1": "c"}) == {"m0": None}
    result = paired_test(as_scores([1.0]), as_scores([0.0]), samples=99)["m0"]
    assert result == {"difference": 1.0, "ci": None, "p": 1.0}


def test_sign_flip_p_equals_the_full_enumeration():
    generator = np.random.default_rng(4)
    a, b = generator.random(10), generator.random(10) + 0.2
    differences = a - b
    flips = [
        abs(np.dot(signs, differences)) >= abs(differences.sum()) - 1e-12
        for signs in itertools.product([1, -1], repeat=10)
    ]
    result = paired_test(as_scores(a), as_scores(b), samples=40_000)["m0"]
    assert result["p"] == pytest.approx(np.mean(flips), abs=0.01)
    assert result["difference"] == pytest.approx(differences.mean())
    assert result["ci"][0] < result["difference"] < result["ci"][1]
    mirrored = paired_test(as_scores(b), as_scores(a), samples=40_000)["m0"]
    assert mirrored["difference"] == pytest.approx(-result["difference"]) and mirrored["p"] == result["p"]


def test_p_of_equal_systems_is_one_and_never_zero():
    scores = as_scores(np.random.default_rng(5).random(50))
    same = paired_test(scores, scores, samples=200)["m0"]
    assert same == {"difference": 0.0, "ci": [0.0, 0.0], "p": 1.0}
    assert paired_test(as_scores(np.ones(50)), as_scores(np.zeros(50)), samples=200)["m0"]["p"] == 1 / 201


def test_p_is_calibrated_and_clusters_matter():
    """No real difference, turns of a conversation equal: by conversation 5 % of tests reject, by query far more."""
    generator = np.random.default_rng(6)
    rejected = {"query": 0, "conversation": 0}
    for trial in range(200):
        a, b = (np.repeat(generator.random(20), 5) for _ in range(2))
        clusters = {f"q{i}": f"c{i // 5}" for i in range(100)}
        rejected["query"] += paired_test(as_scores(a), as_scores(b), None, 400, trial)["m0"]["p"] <= 0.05
        rejected["conversation"] += paired_test(as_scores(a), as_scores(b), clusters, 400, trial)["m0"]["p"] <= 0.05
    assert rejected["conversation"] <= 20 < 50 < rejected["query"]


def test_paired_test_needs_the_same_queries():
    with pytest.raises(DataError, match="'q2' is scored for one system only"):
        paired_test(as_scores([1, 0]), as_scores([1, 0, 1]))


# ---------------------------------------------------------------------------------------------- rewrites, searched


class WordRetriever:
    """Passages by the number of words they share with the query; counts its calls."""

    def __init__(self, passages):
        self.passage_ids, self.passages, self.asked = passages.keys(), passages, []

    def search(self, queries, k):
        self.asked += queries
        out = []
        for query in queries:
            hits = [(p, float(len(set(query.split()) & set(t.split())))) for p, t in self.passages.items()]
            out.append(sorted((h for h in hits if h[1] > 0), key=lambda h: (-h[1], h[0]))[:k])
        return out


def turn(query_id, question, golds, rewrite=None, conversation="c", context=()):
    return Turn(query_id, conversation, 1, list(context), question, golds, rewrite=rewrite)


def test_search_is_positional_and_does_not_search_blanks():
    retriever = WordRetriever({"p1": "marie curie born warsaw", "p2": "born in lima", "p3": "other"})
    turns = [turn("b", "?", ["p1"]), turn("a", "?", ["p2"]), turn("d", "?", ["p3"]), turn("e", "?", ["p3"])]
    run = evaluate._search(retriever, turns, ["marie curie born", "born marie curie lima", "  ", None], 100)
    metrics = evaluate_run(run, evaluate._gold(turns))
    assert list(run) == ["b", "a", "d", "e"] and run["d"] == run["e"] == []
    assert retriever.asked == ["marie curie born", "born marie curie lima"]
    assert metrics["mrr"] == pytest.approx((1 + 0.5) / 4) and (metrics["queries"], metrics["missing"]) == (4, 2)
    assert evaluate._search(retriever, turns[:1], ["born born born"], 1) == {"b": [("p1", 1.0)]}
    with pytest.raises(ValueError, match="1 queries for 4 turns"):
        evaluate._search(retriever, turns, ["x"], 100)
    with pytest.raises(DataError, match="repeat a query_id"):
        evaluate._search(retriever, turns[:1] * 2, ["x", "y"], 100)


def test_a_retriever_that_loses_answers_is_a_fault():
    class Lossy:
        def search(self, queries, k):
            return []

    with pytest.raises(RuntimeError, match="0 of 1"):
        evaluate._search(Lossy(), [turn("a", "?", ["p"])], ["x"], 100)


# ---------------------------------------------------------------------------------------------- the command


def command(*words):
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, "evaluate.py"), *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def files(tmp_path):
    run, qrels = random_data(11)
    better = {q: [(p, s + 20 * qrels.get(q, {}).get(p, 0)) for p, s in r] for q, r in run.items()}
    write_run(tmp_path / "raw.trec", run)
    write_run(tmp_path / "mine.trec", better)
    write_qrels(tmp_path / "qrels", qrels)
    return tmp_path, run, better, qrels


def test_command_scores_a_run_and_ends_with_json(files):
    folder, _, better, qrels = files
    status, out, err = command(f"run={folder}/mine.trec", f"qrels={folder}/qrels", "samples=200")
    assert status == 0, err
    last = json.loads(out.splitlines()[-1])
    assert {m: last[m] for m in [*METRICS, "queries", "missing"]} == evaluate_run(better, qrels)
    assert last["ci_unit"] == "query" and "ci" not in last and len(out.splitlines()[-1]) < 500
    assert last["extra"] == sum(bool(r) and q not in qrels for q, r in better.items()) > 0
    header = out.splitlines()[0]
    assert header == (
        "| system | MRR | MRR@3 | NDCG@3 | Recall@5 | Recall@10 | Recall@20 | Recall@100 | queries | missing |"
    )
    assert f"| mine | {100 * last['mrr']:.1f} [" in out
    assert sorted(os.listdir(folder)) == ["mine.trec", "qrels", "raw.trec"]


@pytest.mark.parametrize("form", ["run={0}/raw.trec,{0}/mine.trec", "run={0}/mine.trec baseline={0}/raw.trec"])
def test_two_runs_are_compared(files, form, capsys):
    folder, run, better, qrels = files
    words = form.format(folder).split() + [f"qrels={folder}/qrels", "samples=500", f"out={folder}/out"]
    result = evaluate.score(load_config(EvaluateConfig, words))
    assert (result["system"], result["baseline"]) == ("mine", "raw") and list(result["systems"]) == ["raw", "mine"]
    expected = paired_test(score_run(better, qrels), score_run(run, qrels), samples=500)
    written = json.loads((folder / "out/metrics.json").read_text())
    assert json.loads(json.dumps(result["paired"])) == written["systems"]["mine"]["paired"] == json.loads(json.dumps(expected))
    assert result["paired"]["mrr"]["difference"] > 0.1 and result["paired"]["mrr"]["p"] < 0.01
    printed = capsys.readouterr().out
    assert "| minus raw |" in printed and "p=0.00" in printed
    assert written == json.loads(json.dumps(result))
    assert all(row["ci"][m][0] <= row[m] <= row["ci"][m][1] for row in written["systems"].values() for m in METRICS)
    line = evaluate.main(load_config(EvaluateConfig, words))
    capsys.readouterr()
    assert line["systems"]["raw"] == {k: result["systems"]["raw"][k] for k in (*METRICS, "queries", "missing", "extra")}
    assert line["mrr"] == result["mrr"] and "ci" not in line and line["out"] == f"{folder}/out"
    assert (folder / "out/table.md").read_text() == printed
    assert load_config(EvaluateConfig, ["--config", f"{folder}/out/config.yaml"]).qrels == f"{folder}/qrels"


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """A turns file, two rewrites files and a retriever that stands in for an index."""
    turns = [
        turn("c1_1", "who was marie curie", ["p1"], "who was marie curie", "c1"),
        turn("c1_2", "where was she born", ["p2"], "curie born warsaw", "c1", [("who was marie curie", "a chemist")]),
        turn("c2_1", "the capital of peru", ["p3"], None, "c2"),
        turn("c2_2", "and its river", [], "what river is in lima", "c2"),
    ]
    write(tmp_path / "turns.jsonl", "".join(json.dumps(t.record()) + "\n" for t in turns))
    write(
        tmp_path / "mine.jsonl",
        "".join(
            json.dumps(row) + "\n"
            for row in [
                {"query_id": "c1_1", "rewrite": "marie curie", "status": "ok"},
                {"query_id": "c1_2", "rewrite": "curie born", "status": "ok"},
                {"query_id": "c2_1", "rewrite": "the capital of peru", "status": "malformed"},
                {"query_id": "c2_2", "rewrite": "lima river", "status": "ok"},
            ]
        ),
    )
    write(tmp_path / "part.jsonl", json.dumps({"query_id": "c1_1", "rewrite": "marie curie"}) + "\n")
    retriever = WordRetriever(
        {
            "p0": "she was where",
            "p1": "marie curie was a chemist",
            "p2": "curie born in warsaw",
            "p3": "lima the capital of peru",
        }
    )
    monkeypatch.setattr(evaluate, "open_retriever", lambda cfg: retriever)
    return tmp_path, retriever


def test_rewrites_and_baselines_are_searched(searched, capsys):
    folder, retriever = searched
    result = evaluate.main(
        load_config(
            EvaluateConfig,
            [
                f"turns={folder}/turns.jsonl",
                f"rewrites={folder}/mine.jsonl,{folder}/part.jsonl",
                "query=question,rewrite,context",
                "samples=50",
                f"out={folder}/out",
            ],
        )
    )
    assert list(result["systems"]) == ["turns: question", "turns: rewrite", "turns: context", "mine", "part"]
    assert (
        result["system"] == "part" and result["baseline"] == "turns: question" and result["ci_unit"] == "conversation"
    )
    mine, part = result["systems"]["mine"], result["systems"]["part"]
    assert (mine["queries"], mine["missing"], mine["mrr"]) == (3, 0, 1.0)  # the turn without gold is not judged
    assert mine["status"] == {"ok": 2, "malformed": 1} and mine["extra"] == 1  # of what is judged; the rest is counted
    printed = capsys.readouterr()
    assert "1 of 4 turns have no gold passage" in printed.err
    assert (part["queries"], part["missing"]) == (3, 2) and part["mrr"] == pytest.approx(1 / 3)
    assert result["systems"]["turns: rewrite"]["missing"] == 1  # one turn has no human rewrite
    assert "where was she born who was marie curie a chemist" in retriever.asked
    assert "lima river" not in retriever.asked
    assert sorted(os.listdir(folder / "out")) == [
        "config.yaml",
        "metrics.json",
        "mine.trec",
        "part.trec",
        "table.md",
        "turns_context.trec",
        "turns_question.trec",
        "turns_rewrite.trec",
    ]
    assert evaluate_run(read_run(folder / "out/mine.trec"), {"c1_1": {"p1": 1}})["mrr"] == 1.0
    assert "mine: rewrites by status: 1 malformed, 2 ok." in printed.out


def test_a_searched_system_beside_a_run_of_the_same_name(searched, capsys):
    folder, _ = searched
    write_run(folder / "mine.trec", {"c1_1": [("p1", 1.0)], "c1_2": [("p0", 1.0)]})
    result = evaluate.main(
        load_config(
            EvaluateConfig,
            [f"turns={folder}/turns.jsonl", f"rewrites={folder}/mine.jsonl", f"run={folder}/mine.trec", "samples=20"],
        )
    )
    assert list(result["systems"]) == ["mine", f"{folder}/mine.jsonl"]
    assert [round(s["mrr"], 3) for s in result["systems"].values()] == [0.333, 1.0]


def test_qrels_decide_which_turns_are_judged(searched, capsys):
    folder, retriever = searched
    write_qrels(folder / "qrels", {"c1_2": {"p2": 1}, "zz": {"p1": 1}})
    result = evaluate.main(
        load_config(
            EvaluateConfig,
            [f"turns={folder}/turns.jsonl", "query=rewrite", f"qrels={folder}/qrels", "samples=20", "cluster=query"],
        )
    )
    assert (result["queries"], result["missing"], result["mrr"], result["ci_unit"]) == (2, 1, 0.5, "query")
    assert "1 of 2 queries have no results and count 0." in capsys.readouterr().out
    assert retriever.asked == ["curie born warsaw"]


def test_the_wrong_index_is_an_error(searched):
    folder, retriever = searched
    del retriever.passages["p3"]
    with pytest.raises(DataError, match="'p3'.*c2_1.*not in the index"):
        evaluate.main(load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", "query=question"]))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to score"),
        (["baseline=a.trec", "qrels=q"], "nothing to score"),
        (["run=a.trec"], "no judgments"),
        (["rewrites=a.jsonl", "qrels=q"], "a.jsonl has to be searched, which needs turns"),
        (["query=question"], "question has to be searched"),
        (["query=questions", "turns=t"], "query='questions' is unknown; there are question, rewrite, context"),
        (["run=a.trec", "qrels=q", "cluster=conversation"], "cluster=conversation needs turns"),
        (["run=a.trec", "qrels=q", "samples=0"], "samples is 0"),
        (["run=a.trec", "qrels=q", "k=0"], "k is 0"),
        (["run=a.trec", "qrels=q", f"out={__file__}"], "is a file; name a folder"),
        (["run=a.trec", "qrels=q", "cluster=turn"], "cluster='turn'"),
    ],
)
def test_settings_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.main(load_config(EvaluateConfig, words))


@pytest.mark.parametrize(
    "change, message",
    [
        (("run", "q99999 Q0 d 1 1.0 t\n"), "no query in common.*'q99999'"),
        (("run", "q1 Q0 d 1 1.0\n"), "mine.trec:1: 5 columns"),
        (("qrels", ""), "qrels: the file is empty"),
    ],
)
def test_bad_files_exit_with_2(files, change, message):
    folder = files[0]
    write(folder / {"run": "mine.trec", "qrels": "qrels"}[change[0]], change[1])
    with pytest.raises(DataError, match=message):
        evaluate.main(load_config(EvaluateConfig, [f"run={folder}/mine.trec", f"qrels={folder}/qrels"]))
    if change[0] == "run" and "no query" in message:
        status, out, err = command(f"run={folder}/mine.trec", f"qrels={folder}/qrels")
        assert (status, out) == (2, "") and err.startswith("error: ") and "Traceback" not in err


def test_a_baseline_that_a_data_set_lacks_is_left_out_and_said(searched, capsys):
    """TopiOCQA has no human rewrites: `query=question,rewrite` over several sets must not fail there."""
    folder, retriever = searched
    write(folder / "turns.jsonl", "".join(json.dumps(turn(q, "curie born", ["p2"]).record()) + "\n" for q in ("a", "b")))
    words = [f"turns={folder}/turns.jsonl", "samples=5"]
    result = evaluate.main(load_config(EvaluateConfig, [*words, "query=question,rewrite"]))
    assert result["system"] == "turns: question" and "systems" not in result
    assert "query=rewrite: no turn of" in capsys.readouterr().err
    with pytest.raises(DataError, match="turns: rewrite: no query for any of the 2"):
        evaluate.main(load_config(EvaluateConfig, [*words, "query=rewrite"]))


def test_turns_that_fit_nothing(searched):
    folder, _ = searched
    write_qrels(folder / "qrels", {"zz": {"p1": 1}})
    for words, message in [
        (["query=question", f"qrels={folder}/qrels"], "no query in common"),
        ([f"rewrites={folder}/other.jsonl"], "other: no query for any of the 3 judged turns"),
    ]:
        write(folder / "other.jsonl", '{"query_id": "zz", "rewrite": "x"}')
        with pytest.raises(DataError, match=message):
            evaluate.main(load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", *words]))
    write(folder / "turns.jsonl", json.dumps(turn("a", "b", []).record()))
    with pytest.raises(DataError, match="no turn has a gold passage"):
        evaluate.main(load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", "query=question"]))


def test_with_a_real_bm25_index(tmp_path, capsys):
    write(
        tmp_path / "corpus.jsonl",
        "".join(
            json.dumps({"id": f"p{i}", "title": "", "text": text}) + "\n"
            for i, text in enumerate(
                ["Marie Curie was born in Warsaw", "Lima is the capital of Peru", "Rivers of Europe"]
            )
        ),
    )
    write(tmp_path / "turns.jsonl", json.dumps(turn("a", "where was she born", ["p1"], "capital of Peru").record()))
    result = evaluate.main(
        EvaluateConfig(
            turns=str(tmp_path / "turns.jsonl"),
            query="question,rewrite",
            samples=10,
            retriever=RetrieverConfig(kind="bm25", corpus=str(tmp_path / "corpus.jsonl")),
            out=str(tmp_path / "out"),
        )
    )
    assert [system["mrr"] for system in result["systems"].values()] == [0.0, 1.0]
    written = json.loads((tmp_path / "out/metrics.json").read_text())
    assert written["ci"]["mrr"] is None  # one conversation: nothing to draw from
    json.dumps(result, allow_nan=False)


# ---------------------------------------------------------------------------------------------- the paper's protocol


@pytest.mark.parametrize("seed", range(4))
def test_paper_protocol_equals_its_scripts_steps(seed):
    """The original's course by hand: scores 200 - rank, pytrec_eval over what is in both, plain averages, 3 decimals."""
    run, qrels = random_data(seed + 40)
    unparsed = set(list(run)[::7])
    theirs_run = {
        q: {p: 200 - i for i, (p, _) in enumerate(rank_results(q, r)[:100], 1)}
        for q, r in run.items()
        if r and q not in unparsed
    }
    binary = {q: {p: int(g >= 1) for p, g in gains.items()} for q, gains in qrels.items()}
    rows = pytrec_eval.RelevanceEvaluator(binary, {"recip_rank", "recall.10,100"}).evaluate(theirs_run).values()
    graded = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.3"}).evaluate(theirs_run).values()
    expected = {
        "MRR@3": round(np.mean([r["recip_rank"] for r in rows]), 3),
        "NDCG@3": round(np.mean([r["ndcg_cut_3"] for r in graded]), 3),
        "R@10": round(np.mean([r["recall_10"] for r in rows]), 3),
        "R@100": round(np.mean([r["recall_100"] for r in rows]), 3),
        "queries": len(rows),
    }
    assert paper_protocol(score_run(run, qrels), run, unparsed) == pytest.approx(expected, abs=1e-9)


def test_a_missing_query_inflates_the_papers_mean_and_not_ours():
    """Reference 8.4: of three queries, hits at ranks 1 and 2 and one missing: 0.75 there, 0.5 here."""
    qrels = {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}
    run = {"a": [("x", 2.0)], "b": [("y", 2.0), ("x", 1.0)]}
    assert paper_protocol(score_run(run, qrels), run, set())["MRR@3"] == 0.75
    assert evaluate_run(run, qrels)["mrr"] == 0.5
    deep = {"a": [(f"y{i}", 10.0 - i) for i in range(4)] + [("x", 1.0)]}  # rank 5: no MRR@3, but printed as one
    assert paper_protocol(score_run(deep, qrels), deep, set())["MRR@3"] == 0.2
    assert score_run(deep, qrels)["a"]["mrr@3"] == 0.0
    assert paper_protocol(score_run({}, qrels), {}, set()) == {"MRR@3": 0, "NDCG@3": 0, "R@10": 0, "R@100": 0, "queries": 0}


def test_both_protocols_stand_side_by_side(searched, capsys):
    folder, _ = searched
    words = [f"turns={folder}/turns.jsonl", f"rewrites={folder}/mine.jsonl,{folder}/part.jsonl", "samples=20"]
    result = evaluate.score(load_config(EvaluateConfig, words))
    paper = {title: row["paper"] for title, row in result["systems"].items()}
    assert paper["mine"] == {"MRR@3": 1.0, "NDCG@3": 1.0, "R@10": 1.0, "R@100": 1.0, "queries": 2}  # c2_1 did not parse
    assert paper["part"]["queries"] == 1 and paper["part"]["MRR@3"] == 1.0 and result["mrr"] == pytest.approx(1 / 3)
    printed = capsys.readouterr().out
    assert "| as the paper's scripts count | MRR@3 | NDCG@3 | R@10 | R@100 | queries averaged |" in printed
    assert "| part | 100.0 | 100.0 | 100.0 | 100.0 | 1 |" in printed


@pytest.mark.parametrize("level", [1, 2, 3])
def test_relevance_from_a_grade_on_equals_pytrec_eval(level):
    run, qrels = random_data(77)
    cut = {q: dict(rank_results(q, r)[:100]) for q, r in run.items() if r}
    theirs = pytrec_eval.RelevanceEvaluator(
        qrels, {"recip_rank", "recall.10", "ndcg_cut.3"}, relevance_level=level
    ).evaluate(cut)
    ours = evaluate_run(run, qrels, level)
    for name, measure in (("mrr", "recip_rank"), ("recall@10", "recall_10"), ("ndcg@3", "ndcg_cut_3")):
        assert ours[name] == pytest.approx(sum(r[measure] for r in theirs.values()) / len(qrels), abs=1e-9)


# ---------------------------------------------------------------------------------------------- documents


def test_a_document_stands_where_its_best_passage_stands():
    """Against the track's converter: passages in rank order, the first of each document stays, the rest goes."""
    generator = random.Random(3)
    documents = [f"MARCO_D{i}" for i in range(6)] + ["WAPO_1fbc-11e3-b3e9"]
    run = {}
    for query in ("a", "b"):
        passages = [f"{d}-{n}" for d in documents for n in range(generator.randrange(1, 4))]
        run[query] = [(p, generator.randrange(5) / 2) for p in generator.sample(passages, len(passages))]
    for query, results in best_passages(run).items():
        kept = []
        for passage, _ in rank_results(query, run[query]):
            if passage.rsplit("-", 1)[0] not in kept:
                kept.append(passage.rsplit("-", 1)[0])
        assert [d for d, _ in rank_results(query, results)] == kept
    with pytest.raises(DataError, match="'p1' of query 'a' is not DOCUMENT-N"):
        best_passages({"a": [("p1", 1.0)]})


def test_documents_are_scored_from_a_run_of_passages(tmp_path, capsys):
    write_run(tmp_path / "p.trec", {"q": [("KILT_1-0", 5.0), ("KILT_1-3", 4.0), ("MARCO_D2-7", 3.0), ("WAPO_a-b-1", 2.0)]})
    write_qrels(tmp_path / "qrels", {"q": {"MARCO_D2": 1, "WAPO_a-b": 4}})
    words = [f"run={tmp_path}/p.trec", f"qrels={tmp_path}/qrels", "documents=true", "samples=5"]
    line = evaluate.main(load_config(EvaluateConfig, words))
    assert (line["mrr"], line["recall@5"]) == (0.5, 1.0)
    assert evaluate.main(load_config(EvaluateConfig, [*words, "relevant_from=2"]))["mrr"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------------------------------------- groups of queries


def conversation(name, topics, golds=None):
    return [
        Turn(
            f"{name}_{n}", name, n, [("q", "a")] * (n - 1), f"question {n}", [golds[n - 1]] if golds else ["p"],
            extra={"topic": topic} if topic else {},
        )
        for n, topic in enumerate(topics, 1)
    ]


def test_depth_and_topic_switch():
    turns = conversation("c", ["Lima", "Lima", "Peru", "Lima", "Peru", *["Lima"] * 8])
    random.Random(0).shuffle(turns)  # turn 10 comes after turn 9, whatever the order and the strings say
    depth, topic = breakdown.by_depth(turns), breakdown.by_topic(turns, {})
    assert (depth["c_1"], depth["c_9"], depth["c_10"], depth["c_11"], depth["c_13"]) == ("1", "9", "10", "11+", "11+")
    found = [topic[f"c_{n}"] for n in range(1, 14)]
    assert found == ["first turn", "same topic", *["topic switch"] * 4, *["same topic"] * 7]
    assert sorted(["11+", "10", "2", "1"], key=breakdown.order) == ["1", "2", "10", "11+"]


def test_gold_titles_tell_switches_where_there_is_no_topic(tmp_path):
    write(tmp_path / "c.jsonl", "".join(json.dumps({"id": i, "title": t, "text": "x"}) + "\n" for i, t in [
        ("1", "Lima"), ("2", "Lima"), ("3", "Peru"), ("4", ""), ("5", "other")]))
    turns = conversation("c", [None] * 5, ["1", "2", "3", "4", "3"])
    titles = breakdown.gold_titles(str(tmp_path / "c.jsonl"), turns)
    assert titles == {"1": "Lima", "2": "Lima", "3": "Peru"}
    found = breakdown.by_topic(turns, titles)
    assert list(found.values()) == ["first turn", "same topic", "topic switch", "unknown", "unknown"]
    late = turns[2:3]  # what went before it is not in the file
    assert breakdown.by_topic(late, titles) == {"c_3": "unknown"}


def test_groups_are_means_of_their_queries_with_tables_and_plots(tmp_path, capsys):
    from xml.etree import ElementTree

    turns = [t for c in range(6) for t in conversation(f"c{c}", ["Lima", "Lima", "<Peru>"])]
    write(tmp_path / "t.jsonl", "".join(json.dumps(t.record()) + "\n" for t in turns))
    run = {t.query_id: [("x", 2.0), ("p", 1.0)] if t.turn == 2 else [("p", 1.0)] for t in turns[:-1]}
    write_run(tmp_path / "a.trec", run)
    write_run(tmp_path / "b&c.trec", {q: r[::-1] for q, r in run.items()})
    result = evaluate.score(load_config(EvaluateConfig, [
        f"run={tmp_path}/a.trec,{tmp_path}/b&c.trec", f"turns={tmp_path}/t.jsonl", "samples=50", f"out={tmp_path}/out"]))
    groups = result["systems"]["a"]["groups"]
    assert {k: (v["queries"], v["mrr"]) for k, v in groups["depth"].items()} == {
        "1": (6, 1.0), "2": (6, 0.5), "3": (6, pytest.approx(5 / 6))}  # the query that the run lacks counts as zero
    assert {k: v["queries"] for k, v in groups["topic"].items()} == {"first turn": 6, "same topic": 6, "topic switch": 6}
    assert sum(g["queries"] * g["mrr"] for g in groups["topic"].values()) == pytest.approx(18 * result["systems"]["a"]["mrr"])
    assert groups["depth"]["3"]["ci"]["mrr"][0] < 5 / 6
    table = capsys.readouterr().out
    assert "| MRR by topic, against the turn before | first turn (6) | same topic (6) | topic switch (6) |" in table
    for kind in ("depth", "topic"):
        picture = ElementTree.parse(tmp_path / f"out/{kind}.svg").getroot()  # well-formed, names escaped
        texts = [e.text for e in picture.iter() if e.tag.endswith("text")]
        assert "b&c" in texts and len([e for e in picture.iter() if e.tag.endswith("circle")]) == 6
    assert evaluate.score(load_config(EvaluateConfig, [
        f"run={tmp_path}/a.trec", f"turns={tmp_path}/t.jsonl", "samples=50", "breakdown=false"])).get("groups") is None


def test_a_point_of_the_plot_is_where_its_value_is():
    picture = breakdown.plot("t", ["1", "2"], {"s": [(0.0, None), (0.5, [0.25, 0.55])]})
    import re

    low, high = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', picture)]
    ticks = {int(v): float(y) - 4 for y, v in re.findall(r'y="([\d.]+)" text-anchor="end">(\d+)<', picture)}
    assert ticks[0] == pytest.approx(low, abs=0.11) and ticks[50] == pytest.approx(high, abs=0.11)


# ---------------------------------------------------------------------------------------------- cross evaluation


def test_cross_evaluation_of_sets_and_retrievers(tmp_path, capsys):
    for name, gold in (("one", "p0"), ("two", "p1")):
        write(tmp_path / f"{name}.corpus.jsonl", "".join(json.dumps({"id": f"p{i}", "title": "", "text": text}) + "\n" for i, text in enumerate(
            [f"Marie Curie {name} was born in Warsaw", f"Lima {name} is the capital of Peru", "Rivers of Europe"])))
        os.makedirs(tmp_path / name)
        write(tmp_path / name / "test.jsonl", "".join(json.dumps(t.record()) + "\n" for t in [
            turn("a", "capital of peru", [gold], "Curie Warsaw"), turn("b", "and its rivers", ["p2"], None)]))
        write(tmp_path / name / "rw.jsonl", json.dumps({"query_id": "a", "rewrite": "Lima"}) + "\n")
    write(tmp_path / "cross.yaml", f"""
sets: one, two
turns: {tmp_path}/@set/test.jsonl
rewrites: {tmp_path}/@set/rw.jsonl
query: question,rewrite
samples: 20
out: {tmp_path}/out
retrievers:
  bm25: {{kind: bm25, corpus: "{tmp_path}/@set.corpus.jsonl"}}
  flat: {{kind: bm25, corpus: "{tmp_path}/@set.corpus.jsonl", k1: 0.0}}
  flat/two: {{kind: bm25, corpus: "{tmp_path}/@set.corpus.jsonl", k1: 0.0, query_words: 1}}
""")
    cfg = load_config(EvaluateConfig, ["--config", str(tmp_path / "cross.yaml")])
    line = evaluate.main(cfg)
    assert list(line["cells"]) == ["one/bm25", "one/flat", "two/bm25", "two/flat"] and line["out"] == f"{tmp_path}/out"
    assert list(line["cells"]["one/bm25"]) == ["turns: question", "turns: rewrite", "rw"]
    assert line["cells"]["one/bm25"]["turns: rewrite"]["mrr"] == 0.5 and line["cells"]["two/bm25"]["rw"]["mrr"] == 0.5
    assert line["cells"]["one/flat"]["rw"]["mrr"] == 0.0
    alone = evaluate.main(EvaluateConfig(
        turns=f"{tmp_path}/two/test.jsonl", rewrites=f"{tmp_path}/two/rw.jsonl", query="question,rewrite", samples=20,
        retriever=RetrieverConfig(corpus=f"{tmp_path}/two.corpus.jsonl", k1=0.0, query_words=1)))
    assert {s: {m: round(row[m], 4) for m in ("mrr", "ndcg@3", "recall@10", "recall@100")} | {"queries": 2}
            for s, row in alone["systems"].items()} == line["cells"]["two/flat"]
    table = (tmp_path / "out/table.md").read_text()
    assert table.count("\n| ") == 12 and "| two/flat | turns: rewrite | " in table
    written = json.loads((tmp_path / "out/metrics.json").read_text())["cells"]
    assert written["two/flat"]["rw"]["ci"].keys() == set(METRICS) and os.path.exists(tmp_path / "out/two-flat/metrics.json")
    assert load_config(EvaluateConfig, ["--config", f"{tmp_path}/out/config.yaml"]) == cfg


@pytest.mark.parametrize(
    "words, message",
    [
        (["sets=a,b", "turns=t.jsonl", "query=question"], "2 sets, but @set occurs in none"),
        (["sets=a", "turns=@set", "query=question", "retrievers={x: {}, y/a: {}}"], "retrievers.y/a overrides 'y'"),
        (["sets=a", "turns=@set", "query=question", "retrievers={x: {}, x/b: {}}"], "on data set 'b'"),
        (["sets=a,b", "turns=@set", "query=questions"], "query='questions' is unknown"),
        (["run=a.trec", "documents=true", "turns=t"], "documents=true needs qrels"),
        (["run=a.trec", "qrels=q", "relevant_from=0"], "relevant_from is 0"),
    ],
)
def test_cross_settings_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.main(load_config(EvaluateConfig, words))


# ---------------------------------------------------------------------------------------------- the case list

THREE = {"d1": 3.0, "d2": 2.0, "d3": 1.0}


def per_query(run, qrels, query="q1"):
    return score_run({q: list(r.items()) for q, r in run.items()}, qrels)[query]


def evl_01(tmp_path):
    row = per_query({"q1": {"d1": 1.0, "d2": 1.0, "d3": 1.0}}, {"q1": {"d1": 1}})
    assert [row["mrr"], row["recall@10"], row["ndcg@3"]] == pytest.approx([1 / 3, 1.0, 0.5], abs=1e-6)


def evl_03(tmp_path):
    qrels = {"q1": {"a": 0, "b": 1, "c": 0}}
    assert per_query({"q1": {"b": 1.0, "a": 1.0}}, qrels)["ndcg@3"] == pytest.approx(1.0)
    assert per_query({"q1": {"b": 1.0, "c": 1.0}}, qrels)["ndcg@3"] == pytest.approx(0.63093, abs=1e-5)


def evl_05(tmp_path):  # policy for the query without judgments: zero, and it counts in the mean
    qrels = {"q1": {"d1": 1, "d2": 0}, "q2": {}, "q3": {"d2": 1, "d3": 1}}
    run = {q: list(THREE.items()) for q in ("q1", "q2", "q3")}
    scores = score_run(run, qrels)
    assert [scores["q1"][m] for m in ("mrr", "recall@10", "ndcg@3")] == [1.0, 1.0, 1.0]
    assert [scores["q3"][m] for m in ("mrr", "recall@10", "ndcg@3")] == pytest.approx([0.5, 1.0, 0.693426], abs=1e-6)
    assert set(scores["q2"].values()) == {0.0}
    metrics = evaluate_run(run, qrels)
    assert metrics["mrr"] == pytest.approx(0.5) and (metrics["queries"], metrics["missing"]) == (3, 0)


def evl_07(tmp_path):
    assert set(per_query({"q1": {"x": 2.0, "y": 1.0}}, {"q1": {"d1": 2, "d2": 1}}).values()) == {0.0}


def evl_09(tmp_path):
    row = per_query({"q1": {"d1": 2.0, "x": 1.0}}, {"q1": {"d1": 1, "d2": 1, "d3": 1}})
    assert row["ndcg@3"] == pytest.approx(0.469279, abs=1e-6)


def evl_11(tmp_path):  # relevant is gain > 0, without an option for another threshold
    row = per_query({"q1": {"d2": 3.0, "d3": 2.0, "d1": 1.0}}, {"q1": {"d1": 2, "d2": 1, "d3": 1}})
    assert [row["mrr"], row["recall@10"], row["ndcg@3"]] == pytest.approx([1.0, 1.0, 0.840303], abs=1e-6)


def evl_13(tmp_path):  # MRR@3 is the cut that this project has
    run = {"q1": {f"d{i:02d}": 100.0 - i for i in range(14)} | {"g": 50.0}}
    row = per_query(run, {"q1": {"g": 1}})
    assert row["mrr"] == pytest.approx(0.066667, abs=1e-6)
    assert (row["mrr@3"], row["recall@10"], row["recall@20"]) == (0.0, 0.0, 1.0)


def evl_15(tmp_path):
    qrels = read_qrels(write(tmp_path / "q", "q1\t0\td1\t1\r\nq2 0  d2 2\r\n"))
    run = read_run(write(tmp_path / "r", "q1\tQ0\td1\t1\t2.5\tt\r\nq2  Q0 d2 1 1.0 t\r\n"))
    metrics = evaluate_run(run, qrels)
    assert (metrics["mrr"], metrics["queries"]) == (1.0, 2) and qrels["q2"] == {"d2": 2}


def evl_17(tmp_path):
    with pytest.raises(DataError, match=":2: 3 columns"):
        read_qrels(write(tmp_path / "q", "q1 0 d1 1\nq2 0 d2\n"))


def evl_19(tmp_path):
    qrels = read_qrels(write(tmp_path / "q", "007 0 12 1\n7 0 13 1\n"))
    run = read_run(write(tmp_path / "r", "007 Q0 12 1 1.0 t\n7 Q0 13 1 1.0 t\n"))
    metrics = evaluate_run(run, qrels)
    assert (metrics["mrr"], metrics["queries"]) == (1.0, 2)


def evl_21(tmp_path):
    run = {"q1": [("g", 2.0), ("x", 1.0)], "q2": [("x", 2.0), ("y", 1.0)]}
    metrics = evaluate_run(run, {"q1": {"g": 1}, "q2": {"h": 1}})
    assert (metrics["mrr"], metrics["missing"]) == (0.5, 0)


def evl_25(tmp_path):
    run = {"q": [("d1", 12.3456789), ("d2", 12.3456788), ("d3", 12.3456787)]}
    write_run(tmp_path / "r", run)
    for variant in (run, read_run(tmp_path / "r")):
        assert evaluate_run(variant, {"q": {"d3": 1}})["mrr"] == pytest.approx(1 / 3)


def rew_38(tmp_path):
    qrels = read_qrels(write(tmp_path / "q", "q1 0 d1 0\nq1 0 d2 1\n"))
    assert evaluate_run({"q1": [("d1", 2.0), ("d2", 1.0)]}, qrels)["mrr"] == 0.5  # rank 2


CASES = {f"evl-{number:02d}": globals()[f"evl_{number:02d}"] for number in (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 25)}
CASES["rew-38"] = rew_38


@pytest.mark.parametrize("check", CASES.values(), ids=CASES)
def test_case(check, tmp_path):
    check(tmp_path)