"""The pages on scaling and cost hold what their scripts make of the committed JSON; the tables' arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cost, scaling_tables

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_on_scaling_has_the_tables_of_the_committed_results():
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert scaling_tables.page(ROOT / "bench/results/scaling") in text


def test_the_page_on_cost_has_the_tables_of_the_committed_results():
    assert cost.page() in (ROOT / "docs/cost.md").read_text(encoding="utf-8")


def test_a_step_of_the_papers_run_by_hand():
    """128 × 16 responses of 386 tokens at 28,947 a second (128 × 256 in 1.132 s) are 27.3 s, on eight cards an eighth."""
    size = cost.run_sizes("topiocqa")
    assert size["steps"] == 2130 and size["sampled"] == 128 * 16 * 386
    one, eight = (cost.step_seconds(size, cost.rates("H200"), n) for n in (1, 8))
    assert one["sample"] == pytest.approx(27.3, abs=0.1)
    assert eight["sample"] == pytest.approx(one["sample"] / 8)
    assert one["sync"] == eight["sync"] and eight["update"] > one["update"] / 8


def test_a_whole_step_that_was_measured_has_a_row(tmp_path):
    phases = {"sample": 4.0, "reward": 1.0, "reference": 1.0, "update": 3.0, "sync": 1.0}
    f = {"card": "X", "processes": 8, "ours": {"vllm": {"phases": phases}}}
    (tmp_path / "paper_8.json").write_text(json.dumps(f))
    row = next(line for line in cost.page(tmp_path).splitlines() if "`paper_8`" in line)
    assert row.endswith("| 10.0 s | 2,130 | 5.9 | 47 |")  # 21,300 s on eight cards


def step_file(cards: int, **seconds: float) -> dict:
    phases = dict.fromkeys(scaling_tables.PHASES, 0.1)
    ours = {
        name.replace("_", ", ") + " prompts": {
            "prompts": int(name.split("_")[1]),
            "step_seconds": s,
            "phases": phases,
        }
        for name, s in seconds.items()
    }
    sizes = {"shape": "3b", "responses": 8, "prompt_len": 512, "new": 256, "prompts": 16}
    return sizes | {"processes": cards, "ours": ours}


def test_efficiencies_and_what_is_missing(tmp_path):
    files = {
        "step_torch_1": step_file(1, torch_16=4.0, torch_64=18.0),
        "step_torch_4": step_file(4, torch_64=5.0),
        "across_1": {"processes": 1, "ms": 120.0, "digest_of_ranks": "a"},
        "across_8": {"processes": 8, "ms": 30.0, "digest_of_ranks": "b"},
    }
    for name, content in files.items():
        sizes = {"queries": 2048, "passages": 1000, "dim": 768} if "across" in name else {}
        (tmp_path / f"{name}.json").write_text(json.dumps(sizes | content))
    page = scaling_tables.page(tmp_path)
    rows = [[c.strip() for c in line.split("|")] for line in page.splitlines() if "|" in line]
    found = {(r[2], r[3]): r[10] for r in rows if r[1] == "torch"}
    assert found["weak, 16 a card", "4"] == "0.80" and found["strong, 64", "4"] == "0.90"
    assert found["strong, 64", "1"] == ""
    eight = next(r for r in rows if "`across_8`" in r)
    assert eight[3:5] == ["0.50", "differ"]
    assert "`step_torch` on 2, 8;" in page and "`across` on 2, 4;" in page
