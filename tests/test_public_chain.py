"""Every public data set from its official files to a metric: prepare → index → evaluate; and where each known trap is tested.

The fixtures hold the nasty parts: tabs and quotes in TSV texts, ` [SEP] ` titles, blank passages, wayback-backfill,
several golds, turn 10 after turn 9, BOM and CRLF, lone surrogates, zip members in an odd order.
Run: python -m pytest tests/test_public_chain.py
"""

import ast
import json
import os
from pathlib import Path

import pytest
import evaluate
import prepare
import retriever
from config import load_config
from data import Passage, read_corpus, read_turns
from retriever import RetrieverConfig
from scoring.ranking import evaluate_run, read_qrels, read_run, write_run
from search.bm25 import BM25Retriever
from test_prepare_public import (canard_rows, cast21_source, cast_source, mtrag_source, put, qrecc_source,  # noqa: F401
                                 topiocqa_source)
from tiny import tiny_encoder

ROOT = Path(__file__).resolve().parent.parent


def source_of(name, tmp_path, request):
    """The fixture's folder of official files; BOM and CRLF where the format may have them."""
    if name == "topiocqa":
        return topiocqa_source(f"{tmp_path}/raw", b"\xef\xbb\xbf", "\r\n")
    if name == "canard":
        put(f"{tmp_path}/raw/dev.json", b"\xef\xbb\xbf" + json.dumps(canard_rows(), indent=1).replace("\n", "\r\n").encode())
        return f"{tmp_path}/raw"
    if name in ("qrecc", "mtrag"):
        return {"qrecc": qrecc_source, "mtrag": mtrag_source}[name](f"{tmp_path}/raw")
    return request.getfixturevalue("cast21_source" if name == "cast21" else "cast_source")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("encoder"))
    tiny_encoder(folder)
    return folder


@pytest.mark.parametrize("name, kind", [("topiocqa", "hybrid"), ("qrecc", "dense"), ("canard", "bm25"), ("mtrag", "bm25"),
                                        ("cast19", "bm25"), ("cast20", "dense"), ("cast21", "hybrid")])
def test_from_the_official_files_to_a_metric(tmp_path, request, capsys, encoder, name, kind):
    """The three commands as a user calls them; a rewrite that is a gold passage's own text finds that passage."""
    out, index = f"{tmp_path}/out", f"{tmp_path}/index"
    cls, command = prepare.COMMANDS[name]
    made = command(load_config(cls, [f"source={source_of(name, tmp_path, request)}", f"out={out}", "strict=false"]))
    corpus = {p.id: p for p in read_corpus(f"{out}/corpus.jsonl")}
    assert len(corpus) == made["passages"]
    splits = [s for s in ("train", "dev", "test") if os.path.exists(f"{out}/{s}.jsonl") and os.path.getsize(f"{out}/{s}.jsonl")]
    built = retriever.main(RetrieverConfig(kind=kind, corpus=f"{out}/corpus.jsonl", index=index, encoder=encoder))
    assert built["count"] == len(corpus)
    for split in splits:
        turns = read_turns(f"{out}/{split}.jsonl")
        texts = {}
        for turn in turns:
            golds = [p for p in corpus.values() if p.id in turn.gold_ids or p.id.rpartition("-")[0] in turn.gold_ids]
            text = next((p.contents for p in golds if p.text.strip()), None)
            if text:
                texts[turn.query_id] = text
        put(f"{tmp_path}/{split}.jsonl", "".join(json.dumps({"query_id": q, "rewrite": t, "status": "ok"}) + "\n"
                                                 for q, t in texts.items()))
        words = [f"turns={out}/{split}.jsonl", f"qrels={out}/{split}.qrels", f"rewrites={tmp_path}/{split}.jsonl",
                 "query=question,context" + (",rewrite" if any(t.rewrite for t in turns) else ""), "samples=20",
                 f"retriever.kind={kind}", f"retriever.index={index}", f"retriever.encoder={encoder}", f"corpus={out}/corpus.jsonl",
                 f"documents={str(name == 'cast21').lower()}", f"out={tmp_path}/evaluation/{split}"]
        line = evaluate.main(load_config(evaluate.EvaluateConfig, words))
        oracle = line["systems"][split]
        assert oracle["queries"] == len(turns) == len(read_qrels(f"{out}/{split}.qrels"))
        found = len(texts) / len(turns)
        # the words of the passage rank it first, but where a twin or a shorter passage of the same words stands beside it
        assert oracle["recall@10"] > 0 and oracle["mrr"] <= found + 1e-9
        assert oracle["mrr"] >= 0.5 * found if kind != "hybrid" else oracle["mrr"] > 0, (oracle, found)
        assert oracle["missing"] == len(turns) - len(texts)  # a blank gold has no text to search with, and counts as zero
        written = json.loads(Path(f"{tmp_path}/evaluation/{split}/metrics.json").read_text())
        paper = written["systems"][split]["paper"]
        assert paper["queries"] == len(texts) and paper["MRR@3"] == pytest.approx(oracle["mrr"] / found, abs=6e-4)
    capsys.readouterr()


def test_the_protocols_evaluation_as_it_is_written_there(tmp_path, monkeypatch, capsys, encoder):
    """bench/protocol.md's `[score NAME]` with the committed config, on both fixtures, the folders as it names them."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("topiocqa", topiocqa_source("raw/topiocqa")), ("qrecc", qrecc_source("raw/qrecc"))):
        cls, command = prepare.COMMANDS[name]
        command(cls(source=source, out=f"data/{name}", strict=False))
        retriever.main(RetrieverConfig(kind="hybrid", corpus=f"data/{name}/corpus.jsonl", index=f"runs/index/{name}", encoder=encoder))
        put(f"runs/NAME/{name}.jsonl", "".join(json.dumps({"query_id": t.query_id, "rewrite": t.question, "status": "malformed"}) + "\n"
                                               for t in read_turns(f"data/{name}/test.jsonl")))
    line = evaluate.main(load_config(evaluate.EvaluateConfig, [
        "--config", str(ROOT / "configs/protocol-evaluate.yaml"), "rewrites=runs/NAME/@set.jsonl", "out=runs/NAME/evaluation",
        f"retrievers.ANCE.encoder={encoder}", "samples=10"]))
    assert list(line["cells"]) == ["topiocqa/BM25", "topiocqa/ANCE", "qrecc/BM25", "qrecc/ANCE"]
    assert list(line["cells"]["topiocqa/BM25"]) == ["turns: question", "topiocqa"]  # it has no human rewrites
    assert list(line["cells"]["qrecc/ANCE"]) == ["turns: question", "turns: rewrite", "qrecc"]
    written = json.loads(Path("runs/NAME/evaluation/metrics.json").read_text())["cells"]
    assert written["topiocqa/ANCE"]["topiocqa"]["paper"]["queries"] == 0  # not one response that its scripts would have kept
    assert {"depth", "topic"} <= written["topiocqa/ANCE"]["topiocqa"]["groups"].keys()
    with open("runs/NAME/evaluation/qrecc-BM25/config.yaml", encoding="utf-8") as f:
        assert "k1: 0.82" in f.read()
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------------- the traps
# The faults of ConvSearch-R1's code (BeastyZ/ConvSearch-R1 at e7854c8) that this project must not repeat, and the tests
# that stand against each.

TRAPS = {
    "1 BM25 gives all rollouts of a query the same ranks": [
        "test_retriever.test_positional_with_duplicate_queries", "test_bm25.test_different_queries_different_lists_ret_10",
        "test_grpo.test_scoring_searches_each_well_formed_query_once_and_never_a_malformed_one"],
    "2 a query without hits is a KeyError": ["test_bm25.test_unknown_words_find_nothing_ret_08"],
    "3 what the reward's parser lets pass": ["test_reward.test_strict_refuses_and_offers_no_rewrite",
                                             "test_reward.test_paper_parser_row_by_row"],
    "4 missing and unparsable queries leave the average": [
        "test_evaluate.test_a_missing_query_inflates_the_papers_mean_and_not_ours",
        "test_evaluate.test_both_protocols_stand_side_by_side", "test_infer.test_every_turn_gets_a_line_with_its_status"],
    "5 training, inference and evaluation cut texts differently": [
        "test_public_chain.test_reward_and_evaluation_cut_texts_alike", "test_retriever.test_truncation_keeps_both_ends_ret_26"],
    "6 the KL estimate loses its pull, then is NaN": ["test_grpo_math.test_grp_23_kl_far_apart_is_finite",
                                                      "test_grpo_math.test_kl_formula_value_and_slope"],
    "7 flat groups are not exactly zero": ["test_grpo_math.test_grp_05_flat_groups_give_exactly_zero",
                                           "test_grpo_math.test_every_reachable_rank_repeated_gives_exactly_zero"],
    "8 division by a tiny deviation": ["test_grpo_math.test_advantages_equal_a_slow_loop_in_any_order",
                                       "test_grpo_math.test_grp_07_lone_advantage_is_bounded"],
    "9 one NaN gradient ends the run": ["test_grpo.test_a_non_finite_gradient_skips_the_step"],
    "10 a run cannot be resumed": ["test_grpo.test_ckp_02_a_killed_run_continues_bit_identically",
                                   "test_distributed.test_resume_is_bit_equal"],
    "11 the index builder crashes after emptying its folder": [
        "test_public_chain.test_a_failing_index_build_leaves_the_index_that_was_there",
        "test_retriever.test_killed_build_goes_on_byte_identical"],
    "12 duplicate passages in the index": ["test_data.test_dat_07_duplicate_passage_id", "test_retriever.test_index_roundtrip_and_refusals"],
    "12 padding rows with passage id 0": ["test_public_chain.test_a_run_is_never_padded"],
    "12 QReCC's order of passage ids": ["test_prepare_public.test_qrecc_numbers_commoncrawl_first_and_backfill_with_wayback"],
    "12 the validation set is the first training rows": ["test_prepare_public.test_topiocqa_dev_is_whole_conversations_of_train",
                                                         "test_sft.test_heldout_shares_no_conversation_and_order_covers_every_row"],
    "12 SFT gradients grow with the number of micro-batches": ["test_sft.test_gradient_does_not_depend_on_the_micro_batch_size"],
    "13 today's date in Llama's template": ["test_data.test_the_date_is_pinned"],
    "13 texts are not lower-cased, whatever the flag says": ["test_public_chain.test_texts_keep_their_case"],
    "13 JSONL in files named .json": ["test_prepare_public.test_arrays_are_read_in_pieces_wherever_they_are_cut",
                                      "test_prepare_public.test_broken_files_are_named_with_the_place"],
    "13 row number or TSV id": ["test_prepare_public.test_topiocqa_reaches_a_metric"],
    "14 the loss depends on the micro-batch": ["test_grpo.test_update_equals_loops_and_does_not_depend_on_the_token_budget",
                                               "test_grpo_math.test_grp_15_and_17_sum_over_one_global_count"],
    "15 no time-out and no retry towards the retriever": ["test_serve.test_a_passing_fault_costs_a_retry_and_a_lasting_one_is_named",
                                                          "test_serve.test_ret_30_a_hanging_service_is_given_up",
                                                          "test_serve.test_answers_of_concurrent_clients_are_not_mixed"],
    "16 evaluation is sampled without a seed": ["test_public_chain.test_inference_is_greedy_or_seeded",
                                                "test_rollout.test_rol_22_seeds"],
}


def test_every_trap_names_tests_that_exist():
    assert {int(trap.split()[0]) for trap in TRAPS} == set(range(1, 17))
    missing = []
    for names in TRAPS.values():
        for name in names:
            file, _, test = name.partition(".")
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
            if test not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                missing.append(name)
    assert missing == []


def test_reward_and_evaluation_cut_texts_alike():
    """One retriever, opened from one config, ranks for the reward and searches for the evaluation; same lengths asked of both."""
    from grpo import GRPOConfig
    from infer import InferConfig
    assert type(GRPOConfig().retriever) is type(evaluate.EvaluateConfig().retriever) is RetrieverConfig
    assert GRPOConfig().retriever == evaluate.EvaluateConfig().retriever
    assert GRPOConfig().max_response_tokens == InferConfig().max_response_tokens
    assert GRPOConfig().max_prompt_tokens == InferConfig().max_prompt_tokens
    bm25 = BM25Retriever([Passage("a", "", "needle"), Passage("b", "", "hay")], query_words=3)
    for query, hit in (("x y needle", True), ("x y z needle", False)):  # the words that are cut off count nowhere
        assert (bm25.gold_ranks([query], [["a"]]) == [1]) == hit == bool(bm25.search([query], 10)[0])


def test_a_failing_index_build_leaves_the_index_that_was_there(tmp_path, encoder):
    put(f"{tmp_path}/c.jsonl", '{"id": "1", "contents": "one"}\n{"id": "2", "contents": "two"}\n')
    good = RetrieverConfig(kind="hybrid", corpus=f"{tmp_path}/c.jsonl", index=f"{tmp_path}/index", encoder=encoder)
    retriever.main(good)
    before = {p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "index").rglob("*") if p.is_file()}
    put(f"{tmp_path}/other.jsonl", '{"id": "1", "contents": "another corpus"}\n')
    put(f"{tmp_path}/broken.jsonl", '{"id": "1", "contents": "one"}\n{"id": "1", "contents": "again"}\n')
    for corpus in ("other", "broken"):
        with pytest.raises(ValueError):
            retriever.main(RetrieverConfig(kind="hybrid", corpus=f"{tmp_path}/{corpus}.jsonl", index=f"{tmp_path}/index",
                                           encoder=encoder))
        after = {p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "index").rglob("*") if p.is_file()}
        assert after == before


def test_a_run_is_never_padded(tmp_path):
    """A query with two hits has two lines; a passage that is called 0 is a passage like any other."""
    bm25 = BM25Retriever([Passage(str(i), "", t) for i, t in enumerate(["red", "blue sea", "blue"])])
    run = {"q": bm25.search(["blue"], 100)[0], "none": bm25.search(["green"], 100)[0]}
    write_run(f"{tmp_path}/run", run)
    assert [line.split()[2] for line in Path(f"{tmp_path}/run").read_text().splitlines()] == ["2", "1"]
    metrics = evaluate_run(read_run(f"{tmp_path}/run"), {"q": {"0": 1}, "none": {"0": 1}})
    assert metrics["recall@100"] == 0.0 and metrics["missing"] == 1


def test_texts_keep_their_case(encoder):
    model, tokenizer, settings = retriever.load_encoder(encoder, "cpu")
    first, second = retriever.encode(model, tokenizer, ["Who is US?", "who is us?"], settings)
    assert not bool((first == second).all())


def test_inference_is_greedy_or_seeded():
    from infer import InferConfig
    assert InferConfig().temperature == 0.0 and isinstance(InferConfig().seed, int)