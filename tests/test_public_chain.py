"""Every public data set from its official files to a metric: prepare → index → evaluate.

The fixtures hold the nasty parts: tabs and quotes in TSV texts, ` [SEP] ` titles, blank passages,
wayback-backfill, several golds, turn 10 after turn 9, BOM and CRLF, lone surrogates, zip members in
an odd order. Run: python -m pytest tests/test_public_chain.py
"""

import json
import os
from pathlib import Path

import pytest
from official import canard_rows, make, mtrag_source, put, qrecc_source, topiocqa_source
from tiny import tiny_encoder

import evaluate
import prepare
import retriever
from config import load_config
from data import Passage, read_corpus, read_turns
from retriever import RetrieverConfig
from scoring.ranking import evaluate_run, read_qrels, read_run, write_run
from search.bm25 import BM25Retriever

ROOT = Path(__file__).resolve().parent.parent


def source_of(name, tmp_path, request):
    """The fixture's folder of official files; BOM and CRLF where the format may have them."""
    if name == "topiocqa":
        return topiocqa_source(f"{tmp_path}/raw", b"\xef\xbb\xbf", "\r\n")
    if name == "canard":
        put(
            f"{tmp_path}/raw/dev.json",
            b"\xef\xbb\xbf" + json.dumps(canard_rows(), indent=1).replace("\n", "\r\n").encode(),
        )
        return f"{tmp_path}/raw"
    if name in ("qrecc", "mtrag"):
        return {"qrecc": qrecc_source, "mtrag": mtrag_source}[name](f"{tmp_path}/raw")
    return request.getfixturevalue("cast21_source" if name == "cast21" else "cast_source")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("encoder"))
    tiny_encoder(folder)
    return folder


@pytest.mark.parametrize(
    "name, kind",
    [
        ("topiocqa", "hybrid"),
        ("qrecc", "dense"),
        ("canard", "bm25"),
        ("mtrag", "bm25"),
        ("cast19", "bm25"),
        ("cast20", "dense"),
        ("cast21", "hybrid"),
    ],
)
def test_from_the_official_files_to_a_metric(tmp_path, request, capsys, encoder, name, kind):
    """The three commands as a user calls them; a rewrite that is a gold passage's own text finds
    that passage.
    """
    out, index = f"{tmp_path}/out", f"{tmp_path}/index"
    cls, command, _ = prepare.COMMANDS[name]
    made = command(
        load_config(
            cls, [f"source={source_of(name, tmp_path, request)}", f"out={out}", "strict=false"]
        )
    )
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert len(corpus) == made["passages"]
    splits = [
        s
        for s in ("train", "dev", "test")
        if os.path.exists(f"{out}/{s}.jsonl") and os.path.getsize(f"{out}/{s}.jsonl")
    ]
    built = retriever.main(
        RetrieverConfig(kind=kind, corpus=f"{out}/corpus.jsonl", index=index, encoder=encoder)
    )
    assert built["count"] == len(corpus)
    for split in splits:
        turns = read_turns(f"{out}/{split}.jsonl")
        texts = {}
        for turn in turns:
            golds = [
                p
                for p in corpus.values()
                if p.id in turn.gold_ids or p.id.rpartition("-")[0] in turn.gold_ids
            ]
            text = next((p.contents for p in golds if p.text.strip()), None)
            if text:
                texts[turn.query_id] = text
        put(
            f"{tmp_path}/{split}.jsonl",
            "".join(
                json.dumps({"query_id": q, "rewrite": t, "status": "ok"}) + "\n"
                for q, t in texts.items()
            ),
        )
        words = [
            f"turns={out}/{split}.jsonl",
            f"qrels={out}/{split}.qrels",
            f"rewrites={tmp_path}/{split}.jsonl",
            "query=question,context" + (",rewrite" if any(t.rewrite for t in turns) else ""),
            "samples=20",
            f"retriever.kind={kind}",
            f"retriever.index={index}",
            f"retriever.encoder={encoder}",
            f"corpus={out}/corpus.jsonl",
            f"documents={str(name == 'cast21').lower()}",
            f"out={tmp_path}/evaluation/{split}",
        ]
        line = evaluate.main(load_config(evaluate.EvaluateConfig, words))
        oracle = line["systems"][split]
        assert oracle["queries"] == len(turns) == len(read_qrels(f"{out}/{split}.qrels"))
        found = len(texts) / len(turns)
        # a passage's words rank it first, but for a twin or a shorter passage of the same words
        assert oracle["recall@10"] > 0 and oracle["mrr"] <= found + 1e-9
        assert oracle["mrr"] >= 0.5 * found if kind != "hybrid" else oracle["mrr"] > 0, (
            oracle,
            found,
        )
        assert oracle["missing"] == len(turns) - len(
            texts
        )  # a blank gold has no text to search with, and counts as zero
        written = json.loads(Path(f"{tmp_path}/evaluation/{split}/metrics.json").read_text())
        paper = written["systems"][split]["paper"]
        assert paper["queries"] == len(texts) and paper["MRR@3"] == pytest.approx(
            oracle["mrr"] / found, abs=6e-4
        )
    capsys.readouterr()


def test_the_protocols_evaluation_as_it_is_written_there(tmp_path, monkeypatch, capsys, encoder):
    """bench/protocol.md's `[score NAME]` with the committed config, on both fixtures, the folders
    as it names them.
    """
    monkeypatch.chdir(tmp_path)
    for name, source in (
        ("topiocqa", topiocqa_source("raw/topiocqa")),
        ("qrecc", qrecc_source("raw/qrecc")),
    ):
        make(name, source, f"data/{name}", strict=False)
        retriever.main(
            RetrieverConfig(
                kind="hybrid",
                corpus=f"data/{name}/corpus.jsonl",
                index=f"runs/index/{name}",
                encoder=encoder,
            )
        )
        put(
            f"runs/NAME/{name}.jsonl",
            "".join(
                json.dumps({"query_id": t.query_id, "rewrite": t.question, "status": "malformed"})
                + "\n"
                for t in read_turns(f"data/{name}/test.jsonl")
            ),
        )
    line = evaluate.main(
        load_config(
            evaluate.EvaluateConfig,
            [
                "--config",
                str(ROOT / "configs/protocol-evaluate.yaml"),
                "rewrites=runs/NAME/@set.jsonl",
                "out=runs/NAME/evaluation",
                f"retrievers.ANCE.encoder={encoder}",
                "samples=10",
            ],
        )
    )
    assert list(line["cells"]) == ["topiocqa/BM25", "topiocqa/ANCE", "qrecc/BM25", "qrecc/ANCE"]
    rules = [
        f"turns: {rule}" for rule in ("question", "first", "first+question", "previous+question")
    ]
    assert list(line["cells"]["topiocqa/BM25"]) == [*rules, "topiocqa"]  # it has no human rewrites
    assert list(line["cells"]["qrecc/ANCE"]) == [*rules, "turns: rewrite", "qrecc"]
    written = json.loads(Path("runs/NAME/evaluation/metrics.json").read_text())["cells"]
    assert (
        written["topiocqa/ANCE"]["topiocqa"]["paper"]["queries"] == 0
    )  # not one response that its scripts would have kept
    assert {"depth", "topic"} <= written["topiocqa/ANCE"]["topiocqa"]["groups"].keys()
    with open("runs/NAME/evaluation/qrecc-BM25/config.yaml", encoding="utf-8") as f:
        assert "k1: 0.82" in f.read()
    capsys.readouterr()


# ------------------------------------------- faults of ConvSearch-R1's code that must not come back


def test_reward_and_evaluation_cut_texts_alike():
    """One retriever, opened from one config, ranks for the reward and searches for the evaluation;
    same lengths asked of both.
    """
    from grpo import GRPOConfig
    from infer import InferConfig

    assert (
        type(GRPOConfig().retriever) is type(evaluate.EvaluateConfig().retriever) is RetrieverConfig
    )
    assert GRPOConfig().retriever == evaluate.EvaluateConfig().retriever
    assert GRPOConfig().max_response_tokens == InferConfig().max_response_tokens
    assert GRPOConfig().max_prompt_tokens == InferConfig().max_prompt_tokens
    bm25 = BM25Retriever([Passage("a", "", "needle"), Passage("b", "", "hay")], query_words=3)
    for query, hit in (
        ("x y needle", True),
        ("x y z needle", False),
    ):  # the words that are cut off count nowhere
        assert (
            (bm25.gold_ranks([query], [["a"]]) == [1]) == hit == bool(bm25.search([query], 10)[0])
        )


def test_a_failing_index_build_leaves_the_index_that_was_there(tmp_path, encoder):
    put(f"{tmp_path}/c.jsonl", '{"id": "1", "contents": "one"}\n{"id": "2", "contents": "two"}\n')
    good = RetrieverConfig(
        kind="hybrid", corpus=f"{tmp_path}/c.jsonl", index=f"{tmp_path}/index", encoder=encoder
    )
    retriever.main(good)
    before = {
        p.relative_to(tmp_path): p.read_bytes()
        for p in (tmp_path / "index").rglob("*")
        if p.is_file()
    }
    put(f"{tmp_path}/other.jsonl", '{"id": "1", "contents": "another corpus"}\n')
    put(
        f"{tmp_path}/broken.jsonl",
        '{"id": "1", "contents": "one"}\n{"id": "1", "contents": "again"}\n',
    )
    for corpus in ("other", "broken"):
        with pytest.raises(ValueError):
            retriever.main(
                RetrieverConfig(
                    kind="hybrid",
                    corpus=f"{tmp_path}/{corpus}.jsonl",
                    index=f"{tmp_path}/index",
                    encoder=encoder,
                )
            )
        after = {
            p.relative_to(tmp_path): p.read_bytes()
            for p in (tmp_path / "index").rglob("*")
            if p.is_file()
        }
        assert after == before


def test_a_run_is_never_padded(tmp_path):
    """A query with two hits has two lines; a passage called 0 is one like any other."""
    bm25 = BM25Retriever(
        [Passage(str(i), "", t) for i, t in enumerate(["red", "blue sea", "blue"])]
    )
    run = {"q": bm25.search(["blue"], 100)[0], "none": bm25.search(["green"], 100)[0]}
    write_run(f"{tmp_path}/run", run)
    assert [line.split()[2] for line in Path(f"{tmp_path}/run").read_text().splitlines()] == [
        "2",
        "1",
    ]
    metrics = evaluate_run(read_run(f"{tmp_path}/run"), {"q": {"0": 1}, "none": {"0": 1}})
    assert metrics["recall@100"] == 0.0 and metrics["missing"] == 1


def test_texts_keep_their_case(encoder):
    model, tokenizer, settings = retriever.load_encoder(encoder, "cpu")
    first, second = retriever.encode(model, tokenizer, ["Who is US?", "who is us?"], settings)
    assert not bool((first == second).all())


def test_inference_is_greedy_or_seeded():
    from infer import InferConfig

    assert InferConfig().temperature == 0.0 and isinstance(InferConfig().seed, int)
