"""scoring/ranking.py: pytrec_eval and slow loops as oracles; files; intervals and tests."""

import itertools
import json
import math
import os
import random

import numpy as np
import pytest
import pytrec_eval

from data import DataError
from scoring.ranking import (
    METRICS,
    add_all_gold,
    bootstrap_interval,
    evaluate_run,
    paired_test,
    read_golds,
    read_qrels,
    read_run,
    score_run,
    write_run,
)


def write(path, text):
    with open(path, "wb") as f:
        f.write(text if isinstance(text, bytes) else text.encode())
    return str(path)


def write_qrels(path, qrels):
    rows = ((q, p, gain) for q, gains in qrels.items() for p, gain in gains.items())
    return write(path, "".join(f"{q} 0 {p} {gain}\n" for q, p, gain in rows))


def random_data(seed, queries=60, ids=300):
    """Runs with ties, empty lists, missing and extra queries; qrels with gains 0 to 3, some with
    none above 0."""
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
                dict.fromkeys(
                    [
                        *qrels.get(query, {}),
                        *generator.sample(passages, generator.randrange(0, 160)),
                    ]
                )
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
        ranked = [passage for passage, _ in sorted(ranked, key=lambda r: r[1], reverse=True)][
            :100
        ]  # stable
        relevant = {passage for passage, gain in gains.items() if gain > 0}
        ranks = [i for i, passage in enumerate(ranked, 1) if passage in relevant]
        mrr = 1 / ranks[0] if ranks else 0.0
        dcg = sum(
            gains.get(passage, 0) / math.log2(i + 1) for i, passage in enumerate(ranked[:3], 1)
        )
        ideal = sum(
            g / math.log2(i + 1) for i, g in enumerate(sorted(gains.values(), reverse=True)[:3], 1)
        )
        recalls = [
            len(relevant.intersection(ranked[:k])) / len(relevant) if relevant else 0.0
            for k in (5, 10, 20, 100)
        ]
        out[query] = [
            mrr,
            mrr if ranks and ranks[0] <= 3 else 0.0,
            dcg / ideal if ideal else 0.0,
            *recalls,
        ]
    return out


# ------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_slow_loops(seed):
    run, qrels = random_data(seed)
    slow, fast = slow_scores(run, qrels), score_run(run, qrels)
    assert list(fast) == list(qrels) == list(slow)
    for query in qrels:
        assert list(fast[query]) == list(METRICS)
        assert list(fast[query].values()) == pytest.approx(slow[query], abs=1e-12)
    metrics = evaluate_run(run, qrels)
    assert [metrics[m] for m in METRICS] == pytest.approx(
        np.mean(list(slow.values()), axis=0), abs=1e-12
    )
    assert metrics["queries"] == len(qrels)
    assert metrics["missing"] == sum(1 for q in qrels if q not in run or not run[q]) > 0
    assert list(metrics) == [*METRICS, "queries", "missing"]


@pytest.mark.parametrize("seed", range(8))
def test_means_equal_pytrec_eval(seed):
    """pytrec_eval itself on the raw scores (they are exact in single precision), zeros added for
    what it leaves out."""
    run, qrels = random_data(seed + 100)
    cut = {
        q: dict(sorted(r, key=lambda x: (x[1], x[0]), reverse=True)[:100])
        for q, r in run.items()
        if r
    }
    theirs = pytrec_eval.RelevanceEvaluator(
        qrels, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"}
    ).evaluate(cut)
    names = {
        "mrr": "recip_rank",
        "ndcg@3": "ndcg_cut_3",
        **{f"recall@{k}": f"recall_{k}" for k in (5, 10, 20, 100)},
    }
    metrics = evaluate_run(run, qrels)
    for ours, name in names.items():
        total = sum(theirs[q][name] for q in theirs)
        assert metrics[ours] == pytest.approx(total / len(qrels), abs=1e-9)
    top3 = {q: dict(list(r.items())[:3]) for q, r in cut.items()}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(top3)
    assert metrics["mrr@3"] == pytest.approx(
        sum(row["recip_rank"] for row in theirs.values()) / len(qrels), abs=1e-9
    )


def test_order_of_lists_and_of_dicts_does_not_matter():
    run, qrels = random_data(7)
    generator = random.Random(0)
    shuffled = {
        q: generator.sample(r, len(r)) for q, r in generator.sample(list(run.items()), len(run))
    }
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


# -------------------------------------------------------------------------------------------- files


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
            "bad.txt:3: passage 'd1' stands a second time for query 'q1'",
        ),
        (read_qrels, b"q1 0 d\xe9 1\n", "bad.txt:1: not UTF-8"),
        (read_run, "", "bad.txt: the file is empty"),
        (read_run, "q1 0 d1 1\n", "bad.txt:1: 4 columns.*there must be 6"),
        (read_run, "q1 Q0 d1 1 2.0 2.0 t\n", "bad.txt:1: 7 columns"),
        (read_run, "q1 Q0 d1 1 high t\n", "bad.txt:1: score 'high'"),
        (read_run, "q1 Q0 d1 1 1.0 t\n\nq1 Q0 d2 2 nan t\n", "bad.txt:3: score 'nan'"),
        (
            read_run,
            "q1 Q0 d1 1 1.0 t\nq1 Q0 d1 2 0.5 t\n",
            "bad.txt:2: passage 'd1' stands a second time",
        ),
    ],
)
def test_bad_lines_name_file_line_and_reason(tmp_path, reader, text, message):
    with pytest.raises(DataError, match=message):
        reader(write(tmp_path / "bad.txt", text))


def test_golds_are_passages_with_a_gain_above_0_and_the_last_files_judgments_hold(tmp_path):
    a = write(tmp_path / "a", "q1 0 d1 1\nq1 0 d2 0\nq1 0 d3 2\nq2 0 d1 0\nq3 0 d2 -1\nq4 0 d5 1\n")
    b = write(tmp_path / "b", "q4 0 d6 1\nq5 0 d1 1\n")
    assert read_golds([a, b]) == {"q1": ["d1", "d3"], "q4": ["d6"], "q5": ["d1"]}
    assert read_golds([b], {"d1", "d6", "d9"}) == {"q4": ["d6"], "q5": ["d1"]}
    with pytest.raises(DataError, match="'d6' is not in the index"):
        read_golds([b], {"d1"})
    nothing = write(tmp_path / "c", "q1 0 d1 0\n")
    with pytest.raises(DataError, match="no passage has a gain above 0"):
        read_golds([b, nothing])


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
        q: [(p, generator.choice([s, s + 1e-13, -s * 1e-300, np.float32(s / 3)])) for p, s in r]
        for q, r in run.items()
    }
    write_run(tmp_path / "run", run)
    write_qrels(tmp_path / "qrels", qrels)
    assert read_qrels(tmp_path / "qrels") == qrels
    back = read_run(tmp_path / "run")
    expected = {
        q: sorted(((p, float(s)) for p, s in r), key=lambda x: (x[1], x[0]), reverse=True)
        for q, r in run.items()
        if r
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


# ------------------------------------------------------------------------------ intervals and tests


def as_scores(*columns):
    return {
        f"q{i}": {f"m{j}": float(v) for j, v in enumerate(row)}
        for i, row in enumerate(zip(*columns))
    }


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
        assert [low, high] == pytest.approx(
            np.quantile(np.array(means)[:, j], [0.025, 0.975]), abs=0.007
        )


def test_intervals_are_seeded_and_do_not_depend_on_the_other_metrics():
    values = np.random.default_rng(2).random((30, 2))
    both = bootstrap_interval(as_scores(*values.T), samples=300, seed=5)
    assert both == bootstrap_interval(as_scores(*values.T), samples=300, seed=5)
    assert both != bootstrap_interval(as_scores(*values.T), samples=300, seed=6)
    assert both["m1"] == pytest.approx(
        bootstrap_interval(as_scores(values[:, 1]), samples=300, seed=5)["m0"], abs=1e-12
    )


def test_conversations_are_drawn_whole():
    """Turns that copy each other carry no more information than one: the interval is that of 30
    values, not of 240."""
    values = np.random.default_rng(3).random(30)
    one = bootstrap_interval(as_scores(values), samples=4000)["m0"]
    copied = as_scores(np.repeat(values, 8))
    clusters = {query: f"c{i // 8}" for i, query in enumerate(copied)}
    assert bootstrap_interval(copied, clusters, samples=4000)["m0"] == pytest.approx(one, abs=1e-12)
    low, high = bootstrap_interval(copied, samples=4000)["m0"]
    assert high - low == pytest.approx((one[1] - one[0]) / math.sqrt(8), rel=0.1)


def test_a_query_that_is_named_like_a_conversation_is_none_of_its_turns():
    scores = {q: {"m": v} for q, v in (("q1", 0.0), ("q2", 0.0), ("c", 1.0))}
    alone = bootstrap_interval(scores, {"q1": "c", "q2": "c"}, samples=500)
    assert alone["m"] == [0.0, 1.0] and bootstrap_interval(scores, dict.fromkeys(scores, "c")) == {
        "m": None
    }


def test_clusters_of_unequal_size_weigh_by_turns():
    """Against a slow bootstrap over lists of turns: the mean is over the turns drawn, not over
    conversation means."""
    generator = random.Random(1)
    conversations = [
        [generator.random() + 0.1 * size for _ in range(size)]
        for size in [1, 1, 2, 2, 3, 5, 8, 13] * 2
    ]
    labels = [f"c{i}" for i, turns in enumerate(conversations) for _ in turns]
    scores = as_scores(sum(conversations, []))
    clusters = dict(zip(scores, labels))
    for query in list(clusters)[
        :2
    ]:  # two conversations of one turn: the same with or without a known cluster
        del clusters[query]
    means = [np.mean(sum(generator.choices(conversations, k=16), [])) for _ in range(20_000)]
    ours = bootstrap_interval(scores, clusters, samples=20_000)["m0"]
    assert ours == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.02)


def test_one_unit_gives_no_interval():
    assert bootstrap_interval(as_scores([0.5], [0.2])) == {"m0": None, "m1": None}
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
    tests = paired_test(as_scores(a, b), as_scores(b, a), samples=40_000)
    result, mirrored = tests["m0"], tests["m1"]
    assert result["p"] == pytest.approx(np.mean(flips), abs=0.01)
    assert result["difference"] == pytest.approx(differences.mean())
    assert result["ci"][0] < result["difference"] < result["ci"][1]
    assert (
        mirrored["difference"] == pytest.approx(-result["difference"])
        and mirrored["p"] == result["p"]
    )


def test_p_of_equal_systems_is_one_and_never_zero():
    scores = as_scores(np.random.default_rng(5).random(50))
    same = paired_test(scores, scores, samples=25_000)["m0"]  # in several pieces
    assert same == {"difference": 0.0, "ci": [0.0, 0.0], "p": 1.0}
    assert (
        paired_test(as_scores(np.ones(50)), as_scores(np.zeros(50)), samples=200)["m0"]["p"]
        == 1 / 201
    )


def test_p_is_calibrated_and_clusters_matter():
    """No real difference, turns of a conversation equal: by conversation 5 % of tests reject, by
    query far more."""
    generator = np.random.default_rng(6)
    rejected = {"query": 0, "conversation": 0}
    for trial in range(200):
        a, b = (np.repeat(generator.random(20), 5) for _ in range(2))
        clusters = {f"q{i}": f"c{i // 5}" for i in range(100)}
        rejected["query"] += (
            paired_test(as_scores(a), as_scores(b), None, 400, trial)["m0"]["p"] <= 0.05
        )
        rejected["conversation"] += (
            paired_test(as_scores(a), as_scores(b), clusters, 400, trial)["m0"]["p"] <= 0.05
        )
    assert rejected["conversation"] <= 20 < 50 < rejected["query"]


def test_paired_test_needs_the_same_queries():
    with pytest.raises(DataError, match="'q2' is scored for one system only"):
        paired_test(as_scores([1, 0]), as_scores([1, 0, 1]))


# ------------------------------------------------------------------------------------- known values

THREE = {"d1": 3.0, "d2": 2.0, "d3": 1.0}


def per_query(run, qrels, query="q1"):
    return score_run({q: list(r.items()) for q, r in run.items()}, qrels)[query]


def test_equal_scores_go_by_passage_id_descending():
    row = per_query({"q1": {"d1": 1.0, "d2": 1.0, "d3": 1.0}}, {"q1": {"d1": 1}})
    assert [row["mrr"], row["recall@10"], row["ndcg@3"]] == pytest.approx(
        [1 / 3, 1.0, 0.5], abs=1e-6
    )
    qrels = {"q1": {"a": 0, "b": 1, "c": 0}}
    assert per_query({"q1": {"b": 1.0, "a": 1.0}}, qrels)["ndcg@3"] == pytest.approx(1.0)
    assert per_query({"q1": {"b": 1.0, "c": 1.0}}, qrels)["ndcg@3"] == pytest.approx(
        0.63093, abs=1e-5
    )


def test_a_query_without_judgments_is_zero_and_spoils_no_other():
    qrels = {"q1": {"d1": 1, "d2": 0}, "q2": {}, "q3": {"d2": 1, "d3": 1}}
    run = {q: list(THREE.items()) for q in ("q1", "q2", "q3")}
    scores = score_run(run, qrels)
    assert [scores["q1"][m] for m in ("mrr", "recall@10", "ndcg@3")] == [1.0, 1.0, 1.0]
    assert [scores["q3"][m] for m in ("mrr", "recall@10", "ndcg@3")] == pytest.approx(
        [0.5, 1.0, 0.693426], abs=1e-6
    )
    assert set(scores["q2"].values()) == {0.0}
    metrics = evaluate_run(run, qrels)
    assert metrics["mrr"] == pytest.approx(0.5) and (metrics["queries"], metrics["missing"]) == (
        3,
        0,
    )


def test_nothing_relevant_retrieved_is_zero_and_counts():
    assert set(per_query({"q1": {"x": 2.0, "y": 1.0}}, {"q1": {"d1": 2, "d2": 1}}).values()) == {
        0.0
    }
    run = {"q1": [("g", 2.0), ("x", 1.0)], "q2": [("x", 2.0), ("y", 1.0)]}
    metrics = evaluate_run(run, {"q1": {"g": 1}, "q2": {"h": 1}})
    assert (metrics["mrr"], metrics["missing"]) == (0.5, 0)


def test_ideal_gain_comes_from_the_judgments_and_grades_count():
    row = per_query({"q1": {"d1": 2.0, "x": 1.0}}, {"q1": {"d1": 1, "d2": 1, "d3": 1}})
    assert row["ndcg@3"] == pytest.approx(0.469279, abs=1e-6)
    row = per_query({"q1": {"d2": 3.0, "d3": 2.0, "d1": 1.0}}, {"q1": {"d1": 2, "d2": 1, "d3": 1}})
    assert [row["mrr"], row["recall@10"], row["ndcg@3"]] == pytest.approx(
        [1.0, 1.0, 0.840303], abs=1e-6
    )


def test_cuts_of_mrr_recall_and_all_gold():
    run = {"q1": {f"d{i:02d}": 100.0 - i for i in range(14)} | {"g": 50.0}}
    row = per_query(run, {"q1": {"g": 1}})
    assert row["mrr"] == pytest.approx(0.066667, abs=1e-6)
    assert (row["mrr@3"], row["recall@10"], row["recall@20"]) == (0.0, 0.0, 1.0)
    ranked = [(f"d{i}", 20.0 - i) for i in range(1, 13)]
    qrels = {
        "in": {"d1": 1, "d10": 2, "d11": 0},
        "behind": {"d1": 1, "d11": 1},
        "no gold": {"d1": 0},
        "no results": {"d1": 1},
    }
    scores = {query: {} for query in qrels}
    add_all_gold(scores, dict.fromkeys(("in", "behind", "no gold"), ranked), qrels)
    assert [row.get("all_gold@10") for row in scores.values()] == [1.0, 0.0, None, 0.0]


def test_tabs_blanks_line_ends_and_ids_that_look_like_numbers(tmp_path):
    qrels = read_qrels(write(tmp_path / "q", "q1\t0\td1\t1\r\nq2 0  d2 2\r\n"))
    run = read_run(write(tmp_path / "r", "q1\tQ0\td1\t1\t2.5\tt\r\nq2  Q0 d2 1 1.0 t\r\n"))
    metrics = evaluate_run(run, qrels)
    assert (metrics["mrr"], metrics["queries"]) == (1.0, 2) and qrels["q2"] == {"d2": 2}
    qrels = read_qrels(write(tmp_path / "q", "007 0 12 1\n7 0 13 1\n"))
    run = read_run(write(tmp_path / "r", "007 Q0 12 1 1.0 t\n7 Q0 13 1 1.0 t\n"))
    metrics = evaluate_run(run, qrels)
    assert (metrics["mrr"], metrics["queries"]) == (1.0, 2)
    qrels = read_qrels(write(tmp_path / "q", "q1 0 d1 0\nq1 0 d2 1\n"))  # gain 0 is not relevant
    assert evaluate_run({"q1": [("d1", 2.0), ("d2", 1.0)]}, qrels)["mrr"] == 0.5


def test_written_scores_keep_the_order(tmp_path):
    run = {"q": [("d1", 12.3456789), ("d2", 12.3456788), ("d3", 12.3456787)]}
    write_run(tmp_path / "r", run)
    for variant in (run, read_run(tmp_path / "r")):
        assert evaluate_run(variant, {"q": {"d3": 1}})["mrr"] == pytest.approx(1 / 3)
