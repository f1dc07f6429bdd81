"""evaluate.py: search, the command, both protocols, groups, cross evaluation, folders, pipes."""

import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import pytrec_eval
from test_ranking import random_data, write, write_qrels

import evaluate
import retriever as retrievers
from config import ConfigError, load_config
from data import DataError, Turn, read_jsonl
from evaluate import EvaluateConfig, read_rewrites
from runs import write_jsonl
from scoring import breakdown
from scoring.ranking import (
    METRICS,
    best_passages,
    evaluate_run,
    paired_test,
    paper_protocol,
    rank_results,
    read_run,
    score_run,
    write_run,
)
from search.passages import RetrieverConfig

ROOT = os.path.dirname(os.path.abspath(evaluate.__file__))

# ------------------------------------------------------------------------------- rewrites, searched


def test_read_rewrites(tmp_path):
    rows = [
        {"query_id": "a", "rewrite": "x", "status": "ok", "sample": 0},
        {"query_id": "a", "rewrite": "y", "sample": 1},
        {"query_id": "b", "rewrite": "z", "status": "malformed"},
    ]
    path = write(tmp_path / "w.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_rewrites(path) == ({"a": "x", "b": "z"}, {"a": "ok", "b": "malformed"})
    assert read_rewrites(path, sample=1) == ({"a": "y"}, {"a": "unknown"})
    with pytest.raises(DataError, match="w.jsonl: no row with sample 2"):
        read_rewrites(path, sample=2)
    for bad, message in [
        ('{"query_id": "a", "rewrite": "x"}\n' * 2, ":2: query_id 'a' occurs a second time"),
        ('{"query_id": true, "rewrite": "x"}', ":1: query_id is True"),
        ('{"query_id": "a"}', ":1: rewrite is None"),
        ("", "no row with sample 0"),
        ('{"query_id": "a", "rewr', ":1: not valid JSON"),
    ]:
        with pytest.raises(DataError, match=message):
            read_rewrites(write(tmp_path / "bad.jsonl", bad))


class WordRetriever:
    """Passages by the number of words they share with the query; counts its calls."""

    def __init__(self, passages):
        self.passage_ids, self.passages, self.asked = passages.keys(), passages, []

    def search(self, queries, k):
        self.asked += queries
        out = []
        for query in queries:
            hits = [
                (p, float(len(set(query.split()) & set(t.split()))))
                for p, t in self.passages.items()
            ]
            out.append(sorted((h for h in hits if h[1] > 0), key=lambda h: (-h[1], h[0]))[:k])
        return out


def turn(query_id, question, golds, rewrite=None, conversation="c", context=()):
    return Turn(query_id, conversation, 1, list(context), question, golds, rewrite=rewrite)


def test_search_is_positional_and_does_not_search_blanks():
    retriever = WordRetriever(
        {"p1": "marie curie born warsaw", "p2": "born in lima", "p3": "other"}
    )
    turns = [
        turn("b", "?", ["p1"]),
        turn("a", "?", ["p2"]),
        turn("d", "?", ["p3"]),
        turn("e", "?", ["p3"]),
    ]
    queries = {"b": "marie curie born", "a": "born marie curie lima", "d": "  ", "e": None}
    run = evaluate.search(retriever, queries, 100)
    metrics = evaluate_run(run, {t.query_id: dict.fromkeys(t.gold_ids, 1) for t in turns})
    assert list(run) == ["b", "a", "d", "e"] and run["d"] == run["e"] == []
    assert retriever.asked == ["marie curie born", "born marie curie lima"]
    assert metrics["mrr"] == pytest.approx((1 + 0.5) / 4) and (
        metrics["queries"],
        metrics["missing"],
    ) == (4, 2)
    assert evaluate.search(retriever, {"b": "born born born"}, 1) == {"b": [("p1", 1.0)]}


def test_a_retriever_that_loses_answers_is_a_fault():
    class Lossy:
        def search(self, queries, k):
            return []

    with pytest.raises(ValueError, match="shorter"):
        evaluate.search(Lossy(), {"a": "x"}, 100)


# -------------------------------------------------------------------------------------- the command


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
        "| system | MRR | MRR@3 | NDCG@3 | Recall@5 | Recall@10 | Recall@20 | Recall@100 "
        "| queries | missing |"
    )
    assert f"| mine | {100 * last['mrr']:.1f} [" in out
    assert sorted(os.listdir(folder)) == ["mine.trec", "qrels", "raw.trec"]


@pytest.mark.parametrize(
    "form", ["run={0}/raw.trec,{0}/mine.trec", "run={0}/mine.trec baseline={0}/raw.trec"]
)
def test_two_runs_are_compared(files, form, capsys):
    folder, run, better, qrels = files
    words = form.format(folder).split() + [
        f"qrels={folder}/qrels",
        "samples=500",
        f"out={folder}/out",
    ]
    result = evaluate.score(load_config(EvaluateConfig, words))
    assert (result["system"], result["baseline"]) == ("mine", "raw") and list(
        result["systems"]
    ) == ["raw", "mine"]
    expected = paired_test(score_run(better, qrels), score_run(run, qrels), samples=500)
    written = json.loads((folder / "out/metrics.json").read_text())
    assert (
        json.loads(json.dumps(result["paired"]))
        == written["systems"]["mine"]["paired"]
        == json.loads(json.dumps(expected))
    )
    assert result["paired"]["mrr"]["difference"] > 0.1 and result["paired"]["mrr"]["p"] < 0.01
    printed = capsys.readouterr().out
    assert "| minus raw |" in printed and "p=0.00" in printed
    assert written == json.loads(json.dumps(result))
    assert all(
        row["ci"][m][0] <= row[m] <= row["ci"][m][1]
        for row in written["systems"].values()
        for m in METRICS
    )
    line = evaluate.main(load_config(EvaluateConfig, words))
    capsys.readouterr()
    assert line["systems"]["raw"] == {
        k: result["systems"]["raw"][k] for k in (*METRICS, "queries", "missing", "extra")
    }
    assert line["mrr"] == result["mrr"] and "ci" not in line and line["out"] == f"{folder}/out"
    assert (folder / "out/table.md").read_text() == printed
    assert (
        load_config(EvaluateConfig, ["--config", f"{folder}/out/config.yaml"]).qrels
        == f"{folder}/qrels"
    )


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """A turns file, two rewrites files and a retriever that stands in for an index."""
    turns = [
        turn("c1_1", "who was marie curie", ["p1"], "who was marie curie", "c1"),
        turn(
            "c1_2",
            "where was she born",
            ["p2"],
            "curie born warsaw",
            "c1",
            [("who was marie curie", "a chemist")],
        ),
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
    write(
        tmp_path / "part.jsonl", json.dumps({"query_id": "c1_1", "rewrite": "marie curie"}) + "\n"
    )
    retriever = WordRetriever(
        {
            "p0": "she was where",
            "p1": "marie curie was a chemist",
            "p2": "curie born in warsaw",
            "p3": "lima the capital of peru",
        }
    )
    monkeypatch.setattr(retrievers, "open_retriever", lambda cfg: retriever)
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
    assert list(result["systems"]) == [
        "turns: question",
        "turns: rewrite",
        "turns: context",
        "mine",
        "part",
    ]
    assert (
        result["system"] == "part"
        and result["baseline"] == "turns: question"
        and result["ci_unit"] == "conversation"
    )
    mine, part = result["systems"]["mine"], result["systems"]["part"]
    assert (mine["queries"], mine["missing"], mine["mrr"]) == (
        3,
        0,
        1.0,
    )  # the turn without gold is not judged
    assert (
        mine["status"] == {"ok": 2, "malformed": 1} and mine["extra"] == 1
    )  # of what is judged; the rest is counted
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
        "report.html",
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
            [
                f"turns={folder}/turns.jsonl",
                f"rewrites={folder}/mine.jsonl",
                f"run={folder}/mine.trec",
                "samples=20",
            ],
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
            [
                f"turns={folder}/turns.jsonl",
                "query=rewrite",
                f"qrels={folder}/qrels",
                "samples=20",
            ],
        )
    )
    assert (result["queries"], result["missing"], result["mrr"]) == (2, 1, 0.5)
    assert "1 of 2 queries have no results and count 0." in capsys.readouterr().out
    assert retriever.asked == ["curie born warsaw"]


def test_the_wrong_index_is_an_error(searched):
    folder, retriever = searched
    del retriever.passages["p3"]
    with pytest.raises(DataError, match="'p3'.*c2_1.*not in the index"):
        evaluate.main(
            load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", "query=question"])
        )


def test_files_whose_names_would_be_written_alike_keep_their_paths():
    titles = {}
    for path in ("x/a b.trec", "y/a_b.trec", "a.trec", "z/a.trec"):
        titles[evaluate._title(path, titles)] = path
    assert list(titles) == ["a b", "y/a_b.trec", "a", "z/a.trec"]


def test_one_file_is_one_system(files, monkeypatch):
    folder = files[0]
    monkeypatch.chdir(folder)
    os.rename("raw.trec", "raw")
    words = ["run=raw", "baseline=raw", "qrels=qrels", "samples=10"]
    with pytest.raises(ConfigError, match="raw is named once more"):
        evaluate.score(load_config(EvaluateConfig, words))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "give run=, rewrites=, query= or answers= to score"),
        (["run=a", "qrels=q", "k=10", "sample=1"], r"\['k', 'sample'\] have no effect"),
        (["query=question", "turns=t", "sample=1"], r"\['sample'\] have no effect"),
        (["answers=a", "questions=b", "qrels=q", "documents=true"], "'documents'. do not go"),
        (["baseline=a.trec", "qrels=q"], "give run=, rewrites=, query= or answers= to score"),
        (["run=a.trec"], "no judgments"),
        (["rewrites=a.jsonl", "qrels=q"], "a.jsonl.* has to be searched, which needs turns"),
        (["query=question"], "question.* has to be searched"),
        (
            ["query=questions", "turns=t"],
            "query=.*questions.* is unknown; there are question, first, first.question, prev.*rewrite",
        ),
        (["run=a.trec", "qrels=q", "samples=0"], "samples=0 must be at least 1"),
        (["run=a.trec", "qrels=q", "k=0"], "k=0 must be at least 1"),
        (["run=a.trec", "qrels=q", f"out={__file__}"], "is a file; name a folder"),
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
        evaluate.main(
            load_config(EvaluateConfig, [f"run={folder}/mine.trec", f"qrels={folder}/qrels"])
        )
    if change[0] == "run" and "no query" in message:
        status, out, err = command(f"run={folder}/mine.trec", f"qrels={folder}/qrels")
        assert (status, out) == (2, "") and err.startswith("error: ") and "Traceback" not in err


def test_a_baseline_that_a_data_set_lacks_is_left_out_and_said(searched, capsys):
    """TopiOCQA has no human rewrites: `query=question,rewrite` over several sets must not fail
    there."""
    folder, retriever = searched
    write(
        folder / "turns.jsonl",
        "".join(json.dumps(turn(q, "curie born", ["p2"]).record()) + "\n" for q in ("a", "b")),
    )
    words = [f"turns={folder}/turns.jsonl", "samples=5"]
    result = evaluate.main(load_config(EvaluateConfig, [*words, "query=question,rewrite"]))
    assert result["system"] == "turns: question" and "systems" not in result
    assert "query=rewrite: no turn of" in capsys.readouterr().err
    with pytest.raises(DataError, match="no query is left to search"):
        evaluate.main(load_config(EvaluateConfig, [*words, "query=rewrite"]))


def test_turns_that_fit_nothing(searched):
    folder, _ = searched
    write_qrels(folder / "qrels", {"zz": {"p1": 1}})
    for words, message in [
        (["query=question", f"qrels={folder}/qrels"], "no query in common"),
        (
            [f"rewrites={folder}/other.jsonl"],
            "other.jsonl and .*turns.jsonl have no query in common",
        ),
    ]:
        write(folder / "other.jsonl", '{"query_id": "zz", "rewrite": "x"}')
        with pytest.raises(DataError, match=message):
            evaluate.main(load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", *words]))
    write(folder / "turns.jsonl", json.dumps(turn("a", "b", []).record()))
    with pytest.raises(DataError, match="no turn has a gold passage"):
        evaluate.main(
            load_config(EvaluateConfig, [f"turns={folder}/turns.jsonl", "query=question"])
        )


def test_with_a_real_bm25_index(tmp_path, capsys):
    write(
        tmp_path / "corpus.jsonl",
        "".join(
            json.dumps({"id": f"p{i}", "title": "", "text": text}) + "\n"
            for i, text in enumerate(
                [
                    "Marie Curie was born in Warsaw",
                    "Lima is the capital of Peru",
                    "Rivers of Europe",
                ]
            )
        ),
    )
    write(
        tmp_path / "turns.jsonl",
        json.dumps(turn("a", "where was she born", ["p1"], "capital of Peru").record()),
    )
    result = evaluate.main(
        EvaluateConfig(
            turns=str(tmp_path / "turns.jsonl"),
            query="question,rewrite".split(","),
            samples=10,
            retriever=RetrieverConfig(kind="bm25", corpus=str(tmp_path / "corpus.jsonl")),
            out=str(tmp_path / "out"),
        )
    )
    assert [system["mrr"] for system in result["systems"].values()] == [0.0, 1.0]
    written = json.loads((tmp_path / "out/metrics.json").read_text())
    assert written["ci"]["mrr"] is None  # one conversation: nothing to draw from
    json.dumps(result, allow_nan=False)


# ----------------------------------------------------------------------------- the paper's protocol


@pytest.mark.parametrize("seed", range(4))
def test_paper_protocol_equals_its_scripts_steps(seed):
    """The original's course by hand: scores 200 - rank, pytrec_eval over what is in both, plain
    averages, 3 decimals."""
    run, qrels = random_data(seed + 40)
    unparsed = set(list(run)[::7])
    theirs_run = {
        q: {p: 200 - i for i, (p, _) in enumerate(rank_results(q, r)[:100], 1)}
        for q, r in run.items()
        if r and q not in unparsed
    }
    binary = {q: {p: int(g >= 1) for p, g in gains.items()} for q, gains in qrels.items()}
    rows = (
        pytrec_eval.RelevanceEvaluator(binary, {"recip_rank", "recall.10,100"})
        .evaluate(theirs_run)
        .values()
    )
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
    """Reference 8.4: of three queries, hits at ranks 1 and 2 and one missing: 0.75 there, 0.5
    here."""
    qrels = {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}
    run = {"a": [("x", 2.0)], "b": [("y", 2.0), ("x", 1.0)]}
    assert paper_protocol(score_run(run, qrels), run, set())["MRR@3"] == 0.75
    assert evaluate_run(run, qrels)["mrr"] == 0.5
    deep = {
        "a": [(f"y{i}", 10.0 - i) for i in range(4)] + [("x", 1.0)]
    }  # rank 5: no MRR@3, but printed as one
    assert paper_protocol(score_run(deep, qrels), deep, set())["MRR@3"] == 0.2
    assert score_run(deep, qrels)["a"]["mrr@3"] == 0.0
    assert paper_protocol(score_run({}, qrels), {}, set()) == {
        "MRR@3": 0,
        "NDCG@3": 0,
        "R@10": 0,
        "R@100": 0,
        "queries": 0,
    }


def test_both_protocols_stand_side_by_side(searched, capsys):
    folder, _ = searched
    words = [
        f"turns={folder}/turns.jsonl",
        f"rewrites={folder}/mine.jsonl,{folder}/part.jsonl",
        "samples=20",
    ]
    result = evaluate.score(load_config(EvaluateConfig, words))
    paper = {title: row["paper"] for title, row in result["systems"].items()}
    assert paper["mine"] == {
        "MRR@3": 1.0,
        "NDCG@3": 1.0,
        "R@10": 1.0,
        "R@100": 1.0,
        "queries": 2,
    }  # c2_1 did not parse
    assert (
        paper["part"]["queries"] == 1
        and paper["part"]["MRR@3"] == 1.0
        and result["mrr"] == pytest.approx(1 / 3)
    )
    printed = capsys.readouterr().out
    assert (
        "| as the paper's scripts count | MRR@3 | NDCG@3 | R@10 | R@100 | queries averaged |"
        in printed
    )
    assert "| part | 100.0 | 100.0 | 100.0 | 100.0 | 1 |" in printed


@pytest.mark.parametrize("level", [1, 2, 3])
def test_relevance_from_a_grade_on_equals_pytrec_eval(level):
    run, qrels = random_data(77)
    cut = {q: dict(rank_results(q, r)[:100]) for q, r in run.items() if r}
    theirs = pytrec_eval.RelevanceEvaluator(
        qrels, {"recip_rank", "recall.10", "ndcg_cut.3"}, relevance_level=level
    ).evaluate(cut)
    ours = evaluate_run(run, qrels, level)
    for name, measure in (
        ("mrr", "recip_rank"),
        ("recall@10", "recall_10"),
        ("ndcg@3", "ndcg_cut_3"),
    ):
        assert ours[name] == pytest.approx(
            sum(r[measure] for r in theirs.values()) / len(qrels), abs=1e-9
        )


# ---------------------------------------------------------------------------------------- documents


def test_a_document_stands_where_its_best_passage_stands():
    """Against the track's converter: passages in rank order, the first of each document stays, the
    rest goes."""
    generator = random.Random(3)
    documents = [f"MARCO_D{i}" for i in range(6)] + ["WAPO_1fbc-11e3-b3e9"]
    run = {}
    for query in ("a", "b"):
        passages = [f"{d}-{n}" for d in documents for n in range(generator.randrange(1, 4))]
        run[query] = [
            (p, generator.randrange(5) / 2) for p in generator.sample(passages, len(passages))
        ]
    for query, results in best_passages(run).items():
        kept = []
        for passage, _ in rank_results(query, run[query]):
            if passage.rsplit("-", 1)[0] not in kept:
                kept.append(passage.rsplit("-", 1)[0])
        assert [d for d, _ in rank_results(query, results)] == kept
    for wrong in ("p1", "1", "p-", "p-x"):
        with pytest.raises(DataError, match=f"'{wrong}' of query 'a' is not DOCUMENT-N"):
            best_passages({"a": [(wrong, 1.0)]})


def test_documents_are_scored_from_a_run_of_passages(tmp_path, capsys):
    write_run(
        tmp_path / "p.trec",
        {"q": [("KILT_1-0", 5.0), ("KILT_1-3", 4.0), ("MARCO_D2-7", 3.0), ("WAPO_a-b-1", 2.0)]},
    )
    write_qrels(tmp_path / "qrels", {"q": {"MARCO_D2": 1, "WAPO_a-b": 4}})
    words = [f"run={tmp_path}/p.trec", f"qrels={tmp_path}/qrels", "documents=true", "samples=5"]
    line = evaluate.main(load_config(EvaluateConfig, words))
    assert (line["mrr"], line["recall@5"]) == (0.5, 1.0)
    assert evaluate.main(load_config(EvaluateConfig, [*words, "relevant_from=2"]))[
        "mrr"
    ] == pytest.approx(1 / 3)


# -------------------------------------------------------------------------------- groups of queries


def conversation(name, topics, golds=None):
    return [
        Turn(
            f"{name}_{n}",
            name,
            n,
            [("q", "a")] * (n - 1),
            f"question {n}",
            [golds[n - 1]] if golds else ["p"],
            extra={"topic": topic} if topic else {},
        )
        for n, topic in enumerate(topics, 1)
    ]


def test_depth_and_topic_switch():
    turns = conversation("c", ["Lima", "Lima", "Peru", "Lima", "Peru", *["Lima"] * 8])
    random.Random(0).shuffle(
        turns
    )  # turn 10 comes after turn 9, whatever the order and the strings say
    topic = breakdown.by_topic(turns, {})
    found = [topic[f"c_{n}"] for n in range(1, 14)]
    assert found == ["first turn", "same topic", *["topic switch"] * 4, *["same topic"] * 7]
    depth = breakdown.groups(turns, "", [f"c_{n}" for n in range(1, 14)])["depth"]
    assert list(depth) == [*map(str, range(1, 11)), "11+"]
    assert depth["1"] == ["c_1"] and depth["11+"] == ["c_11", "c_12", "c_13"]


def test_gold_titles_tell_switches_where_there_is_no_topic(tmp_path):
    write(
        tmp_path / "c.jsonl",
        "".join(
            json.dumps({"id": i, "title": t, "text": "x"}) + "\n"
            for i, t in [("1", "Lima"), ("2", "Lima"), ("3", "Peru"), ("4", ""), ("5", "other")]
        ),
    )
    turns = conversation("c", [None] * 5, ["1", "2", "3", "4", "3"])
    queries = [turn.query_id for turn in turns]
    assert breakdown.groups(turns, str(tmp_path / "c.jsonl"), queries)["topic"] == {
        "first turn": ["c_1"],
        "same topic": ["c_2"],
        "topic switch": ["c_3"],
        "unknown": ["c_4", "c_5"],
    }
    late = turns[2:3]  # what went before it is not in the file
    assert breakdown.by_topic(late, {"3": "Peru"}) == {"c_3": "unknown"}


def test_groups_are_means_of_their_queries_with_tables(tmp_path, capsys):
    turns = [t for c in range(6) for t in conversation(f"c{c}", ["Lima", "Lima", "<Peru>"])]
    write(tmp_path / "t.jsonl", "".join(json.dumps(t.record()) + "\n" for t in turns))
    run = {
        t.query_id: [("x", 2.0), ("p", 1.0)] if t.turn == 2 else [("p", 1.0)] for t in turns[:-1]
    }
    write_run(tmp_path / "a.trec", run)
    write_run(tmp_path / "b&c.trec", {q: r[::-1] for q, r in run.items()})
    result = evaluate.score(
        load_config(
            EvaluateConfig,
            [
                f"run={tmp_path}/a.trec,{tmp_path}/b&c.trec",
                f"turns={tmp_path}/t.jsonl",
                "samples=50",
                f"out={tmp_path}/out",
            ],
        )
    )
    groups = result["systems"]["a"]["groups"]
    assert {k: (v["queries"], v["mrr"]) for k, v in groups["depth"].items()} == {
        "1": (6, 1.0),
        "2": (6, 0.5),
        "3": (6, pytest.approx(5 / 6)),
    }  # the query that the run lacks counts as zero
    assert {k: v["queries"] for k, v in groups["topic"].items()} == {
        "first turn": 6,
        "same topic": 6,
        "topic switch": 6,
    }
    assert sum(g["queries"] * g["mrr"] for g in groups["topic"].values()) == pytest.approx(
        18 * result["systems"]["a"]["mrr"]
    )
    assert groups["depth"]["3"]["ci"]["mrr"][0] < 5 / 6
    table = capsys.readouterr().out
    assert (
        "| MRR by topic, against the turn before | first turn (6) | same topic (6) "
        "| topic switch (6) |" in table
    )
    words = [f"run={tmp_path}/a.trec", f"turns={tmp_path}/t.jsonl", "samples=5"]
    assert "groups" not in evaluate.score(load_config(EvaluateConfig, [*words, "breakdown=false"]))


# --------------------------------------------------------------------------------- cross evaluation


def test_cross_evaluation_of_sets_and_retrievers(tmp_path, capsys):
    for name, gold in (("one", "p0"), ("two", "p1")):
        write(
            tmp_path / f"{name}.corpus.jsonl",
            "".join(
                json.dumps({"id": f"p{i}", "title": "", "text": text}) + "\n"
                for i, text in enumerate(
                    [
                        f"Marie Curie {name} was born in Warsaw",
                        f"Lima {name} is the capital of Peru",
                        "Rivers of Europe",
                    ]
                )
            ),
        )
        os.makedirs(tmp_path / name)
        write(
            tmp_path / name / "test.jsonl",
            "".join(
                json.dumps(t.record()) + "\n"
                for t in [
                    turn("a", "capital of peru", [gold], "Curie Warsaw"),
                    turn("b", "and its rivers", ["p2"], None),
                ]
            ),
        )
        write(tmp_path / name / "rw.jsonl", json.dumps({"query_id": "a", "rewrite": "Lima"}) + "\n")
    write(
        tmp_path / "cross.yaml",
        f"""
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
""",
    )
    cfg = load_config(EvaluateConfig, ["--config", str(tmp_path / "cross.yaml")])
    line = evaluate.main(cfg)
    assert (
        list(line["cells"]) == ["one/bm25", "one/flat", "two/bm25", "two/flat"]
        and line["out"] == f"{tmp_path}/out"
    )
    assert list(line["cells"]["one/bm25"]) == ["turns: question", "turns: rewrite", "rw"]
    assert (
        line["cells"]["one/bm25"]["turns: rewrite"]["mrr"] == 0.5
        and line["cells"]["two/bm25"]["rw"]["mrr"] == 0.5
    )
    assert line["cells"]["one/flat"]["rw"]["mrr"] == 0.0
    alone = evaluate.main(
        EvaluateConfig(
            turns=f"{tmp_path}/two/test.jsonl",
            rewrites=[f"{tmp_path}/two/rw.jsonl"],
            query="question,rewrite".split(","),
            samples=20,
            retriever=RetrieverConfig(corpus=f"{tmp_path}/two.corpus.jsonl", k1=0.0, query_words=1),
        )
    )
    assert {
        s: {m: round(row[m], 4) for m in ("mrr", "ndcg@3", "recall@10", "recall@100")}
        | {"queries": 2}
        for s, row in alone["systems"].items()
    } == line["cells"]["two/flat"]
    table = (tmp_path / "out/table.md").read_text()
    assert table.count("\n| ") == 12 and "| two/flat, turns: rewrite | " in table
    written = json.loads((tmp_path / "out/metrics.json").read_text())["cells"]
    assert written["two/flat"]["rw"]["ci"].keys() == set(METRICS) and os.path.exists(
        tmp_path / "out/two-flat/metrics.json"
    )
    assert load_config(EvaluateConfig, ["--config", f"{tmp_path}/out/config.yaml"]) == cfg


@pytest.mark.parametrize(
    "words, message",
    [
        (["sets=a,b", "turns=t.jsonl", "query=question"], "2 sets, but @set occurs in none"),
        (
            ["sets=a", "turns=@set", "query=question", "retrievers={x: {}, y/a: {}}"],
            "retrievers.y/a overrides 'y'",
        ),
        (
            ["sets=a", "turns=@set", "query=question", "retrievers={x: {}, x/b: {}}"],
            "on data set 'b'",
        ),
        (["sets=a,b", "turns=@set", "query=questions"], "query=.*questions.* is unknown"),
        (
            ["run=a.trec", "documents=true", "turns=t"],
            "documents=True: it has an effect with qrels",
        ),
        (["run=a.trec", "qrels=q", "relevant_from=0"], "relevant_from=0 must be at least 1"),
    ],
)
def test_cross_settings_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.main(load_config(EvaluateConfig, words))


# ---------------------------------------------------------------------- judgments of another corpus


def test_judgments_of_another_corpus_are_an_error(searched, capsys):
    folder, _ = searched
    words = [f"turns={folder}/turns.jsonl", "query=question", f"qrels={folder}/qrels", "samples=5"]
    write_qrels(folder / "qrels", {"c1_1": {"x1": 1}, "c2_1": {"x2": 1, "p1": 0}})
    with pytest.raises(
        DataError, match="qrels and the index have no relevant passage in common .*'x1'"
    ):
        evaluate.main(load_config(EvaluateConfig, words))
    write_qrels(
        folder / "qrels", {"c1_1": {"x1": 1, "p1": 1}, "c2_1": {"p3": 1}, "unasked": {"x9": 1}}
    )
    evaluate.main(load_config(EvaluateConfig, words))
    assert "1 of 3 relevant passages, such as 'x1', are not in the index" in capsys.readouterr().err
    write_qrels(folder / "qrels", {"c1_1": {"p1": 1}})
    evaluate.main(load_config(EvaluateConfig, words))
    assert "warning" not in capsys.readouterr().err


def test_a_run_and_qrels_without_a_common_passage(tmp_path):
    write_run(tmp_path / "r.trec", {"q": [("d-1", 1.0)], "other": [("d-2", 1.0)]})
    words = [f"run={tmp_path}/r.trec", f"qrels={tmp_path}/qrels", "samples=5"]
    for more in ([], ["documents=true"]):
        write_qrels(tmp_path / "qrels", {"q": {"x1": 1}})
        with pytest.raises(DataError, match="r.trec and .*qrels have no passage in common"):
            evaluate.main(load_config(EvaluateConfig, words + more))
        judged = "d" if more else "d-1"
        write_qrels(tmp_path / "qrels", {"q": {"x1": 1, judged: 0}})  # judged, though not relevant
        assert evaluate.main(load_config(EvaluateConfig, words + more))["mrr"] == 0.0


# ------------------------------------------------------------------------------- rules, pairs, cuts


def test_rules_as_queries(searched):
    folder, retriever = searched
    context = [("who was she", "a chemist"), ("where born", "in warsaw")]
    rows = [turn("c_1", "tell me", ["p1"]), turn("c_3", "and then", ["p2"], context=context)]
    write(folder / "turns.jsonl", "".join(json.dumps(t.record()) + "\n" for t in rows))
    rules = {
        "first": "who was she",
        "first+question": "who was she and then",
        "previous+question": "where born and then",
        "context": "and then where born in warsaw who was she a chemist",
        "question": "and then",
    }
    for rule, text in rules.items():
        retriever.asked.clear()
        line = evaluate.main(
            load_config(
                EvaluateConfig, [f"turns={folder}/turns.jsonl", f"query={rule}", "samples=5"]
            )
        )
        assert line["system"] == f"turns: {rule}" and retriever.asked == ["tell me", text]


def test_each_system_is_paired_with_the_one_before_too(files, capsys):
    folder, run, better, qrels = files
    write_run(
        folder / "best.trec",
        {q: [(p, float(gain)) for p, gain in gains.items()] for q, gains in qrels.items()},
    )
    paths = ",".join(f"{folder}/{name}.trec" for name in ("raw", "mine", "best"))
    result = evaluate.score(
        load_config(EvaluateConfig, [f"run={paths}", f"qrels={folder}/qrels", "samples=300"])
    )
    best = result["systems"]["best"]
    expected = paired_test(
        score_run(read_run(folder / "best.trec"), qrels), score_run(better, qrels), samples=300
    )
    assert best["paired_before"] == expected and "paired_before" not in result["systems"]["mine"]
    assert best["paired"]["mrr"]["difference"] == pytest.approx(
        best["mrr"] - result["systems"]["raw"]["mrr"]
    )
    below = capsys.readouterr().out.split("| minus raw |")[1]
    assert re.findall(r"^\| ([^|-]+) \|", below, re.MULTILINE) == [
        "mine",
        "best",
        "best, minus mine",
    ]


def test_cut_queries_are_told_in_every_table(searched, capsys, tmp_path):
    folder, retriever = searched
    search, retriever.cut_queries, retriever.cut_passages = retriever.search, 7, 2

    def cutting(queries, k):
        retriever.cut_queries += sum(len(query.split()) > 4 for query in queries)
        return search([" ".join(query.split()[:4]) for query in queries], k)

    retriever.search = cutting
    words = [
        f"turns={folder}/turns.jsonl",
        "query=question,context",
        "samples=5",
        f"out={tmp_path}/out",
    ]
    line = evaluate.main(load_config(EvaluateConfig, words))
    assert [row["cut"] for row in line["systems"].values()] == [0, 1]
    table = (tmp_path / "out/table.md").read_text()
    assert "| queries | missing | cut |" in table and "| 3 | 0 | 1 |" in table
    assert "turns: context: 1 queries were longer than the retriever takes, and cut." in table
    assert "turns: context: 2 passages are longer than the encoder reads, and cut." in table
    assert table == capsys.readouterr().out


def test_intervals_of_few_conversations_are_called_too_narrow(searched, files, tmp_path, capsys):
    evaluate.main(
        load_config(
            EvaluateConfig, [f"turns={searched[0]}/turns.jsonl", "query=question", "samples=5"]
        )
    )
    assert "(2 of them). Percentile intervals of so few are too narrow." in capsys.readouterr().out
    turns = [row for _, row in read_jsonl(f"{searched[0]}/turns.jsonl")]
    alone = [{k: v for k, v in row.items() if k != "conversation_id"} for row in turns]
    write_jsonl(str(tmp_path / "alone.jsonl"), alone)
    words = [f"turns={tmp_path}/alone.jsonl", "query=question", "samples=5"]
    evaluate.main(load_config(EvaluateConfig, words))
    assert "drawn by query (3 of them)" in capsys.readouterr().out
    evaluate.main(
        load_config(
            EvaluateConfig, [f"run={files[0]}/raw.trec", f"qrels={files[0]}/qrels", "samples=5"]
        )
    )
    assert "too narrow" not in capsys.readouterr().out


# ---------------------------------------------------------------------------- folders, pipes, start


def test_a_folder_of_another_tool_is_refused(files):
    folder = files[0]
    os.makedirs(folder / "run")
    write(folder / "run/config.yaml", "model: x\ngroup_size: 8\n")
    words = [f"run={folder}/mine.trec", f"qrels={folder}/qrels", "samples=5"]
    for more in ([], ["sets=a"], ["retrievers={x: {}}"]):
        with pytest.raises(ConfigError, match="was made by grpo.py"):
            evaluate.main(load_config(EvaluateConfig, [*words, *more, f"out={folder}/run"]))
    assert (folder / "run/config.yaml").read_text() == "model: x\ngroup_size: 8\n"
    for _ in range(2):  # its own folder may be written again
        evaluate.main(load_config(EvaluateConfig, [*words, f"out={folder}/own"]))


@pytest.mark.parametrize("reader", ["head -n 1 >{0}/seen", "exec 0<&-"])
def test_a_closed_pipe_ends_quietly(files, reader):
    folder = files[0]
    run = f"{sys.executable} evaluate.py run={folder}/mine.trec qrels={folder}/qrels samples=5"
    for command in (run, f"{sys.executable} evaluate.py --help"):
        left = f"(sleep 0.2; {command}) 2>{folder}/err"
        pipe = f"{left} | ({reader.format(folder)}); echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", pipe], cwd=ROOT, capture_output=True, text=True)
        assert (folder / "err").read_text() == "" and done.stdout.strip() in ("0", "141")


START = """
import runpy, sys, time
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules, time.process_time(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate.py", "--help"],
        ["report.py", "--help"],
        ["evaluate.py", "run={0}/mine.trec", "qrels={0}/qrels", "samples=100", "out={0}/o"],
        ["evaluate.py", "answers={0}/a.jsonl", "questions={0}/q.jsonl", "samples=100"],
        ["report.py", "trajectories={0}/t.jsonl"],
    ],
)
def test_starts_without_torch_within_a_second(files, words):
    folder = files[0]
    write(folder / "q.jsonl", '{"id": "a", "question": "?", "golden_answers": ["x"]}')
    write(folder / "a.jsonl", '{"id": "a", "prediction": "x"}')
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    write(folder / "t.jsonl", json.dumps({"id": "a", "messages": messages}))
    words = [word.format(folder) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", START, *words], cwd=ROOT, capture_output=True, text=True
    )
    loaded, seconds = done.stderr.split()
    assert done.returncode == 0 and loaded == "False" and float(seconds) < 1
