"""What an index of 1, 25.7 and 54.6 million passages needs, from the rates in bench/results: the README's table.

    python bench/sizing.py

Bytes follow from the format, times from measured rates (encode.json, gold_ranks.json): encoding takes its start and then
scales with passages and with cards, a rank with passages.  A card of 80 GB gives an index what `retriever.place` takes,
half of what is free beside a policy in training; served alone, 90 %.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import run  # noqa: E402
from data import DataError  # noqa: E402

CORPORA = {"1 M": 1_000_000, "25.7 M (TopiOCQA)": 25_700_592, "54.6 M (QReCC)": 54_573_064}


@dataclass
class SizingConfig:
    results: str = os.path.join(ROOT, "bench", "results")
    """folder of encode.json and gold_ranks.json"""
    dim: int = 768
    """numbers of a vector"""
    id_bytes: int = 12
    """bytes of a passage id, on average"""
    card_gb: int = 80
    """memory of a card"""


def read(folder: str, name: str) -> dict:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise DataError(
            f"{path} is missing; make it with bench/retrieval.py (its docstring has the commands)"
        )
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def main(cfg: SizingConfig) -> dict:
    encode, ranks = read(cfg.results, "encode.json"), read(cfg.results, "gold_ranks.json")
    rank = next(row for row in ranks["sizes"] if row["queries"] == 2048)
    per_passage_ms = rank["kernel_ms"] / ranks["passages"] * cfg.dim / ranks["dim"]
    rate, start = encode["steady_passages_s"], encode["seconds_to_first_window"]
    print(
        f"{rate:,} passages/s encoded on one {encode['card']} ({encode['mean_tokens']} tokens each) after {start} s, "
        f"{rank['kernel_ms']} ms for the gold ranks of 2,048 queries among {ranks['passages']:,} on one "
        f"{ranks['card']}\n"
    )
    print(
        f"| corpus | vectors, fp16 × {cfg.dim} | ids | cards of {cfg.card_gb} GB beside a policy / alone | hours to "
        "encode, 1 card / 8 cards | gold ranks of 2,048 queries, on so many cards |\n|---|---|---|---|---|---|"
    )
    rows = []
    for name, count in CORPORA.items():
        vectors, ids = count * cfg.dim * 2, count * (cfg.id_bytes + 1 + 16)
        beside, alone = (-(-vectors // int(cfg.card_gb * 1e9 * share)) for share in (0.5, 0.9))
        hours, hours_8 = ((count / rate / cards + start) / 3600 for cards in (1, 8))
        ms = per_passage_ms * count / beside
        rows.append(
            {
                "corpus": name,
                "vector_bytes": vectors,
                "id_bytes": ids,
                "cards_beside": beside,
                "cards_alone": alone,
                "hours_one_card": round(hours, 2),
                "gold_ranks_ms": round(ms, 1),
            }
        )
        print(
            f"| {name} | {vectors / 1e9:,.1f} GB | {ids / 1e9:,.2f} GB | {beside} / {alone} | {hours:.2f} / "
            f"{hours_8:.2f} | {ms:,.0f} ms |"
        )
    return {"sizing": rows}


if __name__ == "__main__":
    run(SizingConfig, main)
