"""The committed adapter: infer.py reads it, and its card and the results page say what was measured."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_lm, tiny_tokenizer

import infer
from bench import study_tables

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "adapters" / "smollm2-rewrite"
ARM = "lora-fast"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with models/smollm2: SmolLM2's layers at random, a vocabulary of bytes."""
    folder = tmp_path_factory.mktemp("base")
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    model = tiny_lm(None, "llama", num_attention_heads=9, num_key_value_heads=3, **shape)
    model.bfloat16().save_pretrained(folder / "models" / "smollm2")
    tiny_tokenizer().save_pretrained(folder / "models" / "smollm2")
    return folder


def test_infer_merges_the_adapter_into_the_base_that_it_names(base, tmp_path, monkeypatch):
    engines, opened = [], infer.open_engine
    monkeypatch.setattr(infer, "open_engine", lambda *a: engines.append(opened(*a)) or engines[0])
    monkeypatch.chdir(base)
    turn = {
        "query_id": "q",
        "question": "Who wrote it?",
        "context": [["What is Dune?", "A novel."]],
    }
    (tmp_path / "turns.jsonl").write_text(json.dumps(turn))
    out = tmp_path / "rewrites.jsonl"
    files = {"turns": str(tmp_path / "turns.jsonl"), "out": str(out)}
    infer.main(infer.InferConfig(model=str(ADAPTER), max_response_tokens=2, **files))
    assert json.loads(out.read_text())["query_id"] == "q"

    weights = load_file(ADAPTER / "adapter_model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    place = "model.layers.7.mlp.down_proj"
    a, b = (weights[f"base_model.model.{place}.lora_{x}.weight"].float() for x in "AB")
    plain = load_file("models/smollm2/model.safetensors")[f"{place}.weight"].float()
    step = engines[0].model.get_submodule(place).weight - plain
    assert step.abs().max() > 0 and torch.allclose(step, 2 * b @ a, atol=1e-6)  # alpha / r = 2


def test_the_adapter_is_small_and_its_card_is_that_of_the_figures():
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size <= 5_000_000
    card = study_tables.card(study_tables.read_figures(), "adapters/smollm2-rewrite", ARM)
    assert (ADAPTER / "README.md").read_text(encoding="utf-8") == card


@pytest.mark.parametrize("study", ["study", "study_qwen"])
def test_the_results_page_has_the_tables_of_the_figures(study):
    figures = study_tables.read_figures(ROOT / "bench" / "results" / study / "figures.json")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert study_tables.arms_table(figures) in page
    for engine in study_tables.engines(figures):
        assert study_tables.table(figures, engine, study_tables.labels(figures, engine)) in page


@pytest.mark.parametrize("study, table", [("ablations", "ablation"), ("second_search", "searches")])
def test_the_results_page_has_the_tables_of_the_other_studies(study, table):
    figures = study_tables.read_figures(ROOT / "bench" / "results" / study / "figures.json")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert getattr(study_tables, f"{table}_table")(figures) in page


def test_the_adapter_is_above_the_raw_question_on_every_test_set():
    for name, systems in study_tables.read_figures()["cells"].items():
        assert systems[f"{ARM}-grpo"]["mrr"][0] > systems["question"]["mrr"][0], name
