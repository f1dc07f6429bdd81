"""A test of encoders: questions, answers, and the answers' ranks."""

from __future__ import annotations

import sys

from torch import Tensor

PROBES = (  # question, answer, and a passage that only shares the question's words
    (
        "how do I fix a flat bicycle tire",
        "Take off the wheel, pull out the inner tube and glue a patch over the puncture.",
        "How do I fix the price of a flat in a city where rents rise every year?",
    ),
    (
        "what is the capital of France",
        "Paris, on the Seine, has been the seat of the country's government for centuries.",
        "What is working capital? What a company in France owns less what it owes.",
    ),
    (
        "why do cats purr",
        "Felines make the low, vibrating sound when content, and to calm themselves when hurt.",
        "Why do people keep cats in films about witches? They look mysterious.",
    ),
    (
        "how long does it take to boil an egg",
        "Leave it in simmering water for six minutes if the yolk should stay soft, ten if hard.",
        "How long does it take an egg of the sea turtle to hatch? Two months on the beach.",
    ),
    (
        "symptoms of the flu",
        "Fever, chills, aching muscles and a cough begin suddenly after infection with influenza.",
        "Symptoms of a failing battery: the engine turns slowly and the lights are dim.",
    ),
    (
        "who wrote romeo and juliet",
        "Shakespeare finished the tragedy about two young lovers in Verona around 1595.",
        "Romeo and Juliet are two moons in a novel, and nobody knows who wrote it.",
    ),
    (
        "when was the first moon landing",
        "Armstrong and Aldrin stepped onto the lunar surface from Apollo 11 in July 1969.",
        "The first landing of the stairs was painted when the moon was full.",
    ),
    (
        "how to save money on electricity bills",
        "Switch off unused appliances, insulate the house and replace bulbs with LEDs.",
        "How to pay bills for a wedding with money that guests leave in a box.",
    ),
)


def rank_probes(queries: Tensor, passages: Tensor) -> dict:
    """Print the rank of every answer among all passages, and return the figures.

    queries: (n, D) questions; passages: (2 n, D) answers, then the others
    A trained encoder puts nearly every answer above all passages of other questions, random weights
    or a wrong pooling about one in fifteen.
    """
    scores, n = queries @ passages.T, len(queries)  # (n, 2 n)
    print("\n| question | rank of its answer | score | best of other questions |")
    print("|---|---|---|---|")
    ranks, first = [], 0
    for i, (question, *_) in enumerate(PROBES):
        own, strangers = scores[i, i], max(scores[i, j] for j in range(2 * n) if j % n != i)
        ranks.append(int((scores[i] >= own).sum()))
        first += bool(own > strangers)
        print(f"| {question} | {ranks[-1]} of {2 * n} | {own:.4f} | {strangers:.4f} |")
    print(f"\n{first} of {n} answers stand above all passages of other questions (two of each)")
    if first < 5:
        print(
            f"warning: this ranking looks random ({first} of {n}); look at the encoder's weights, "
            "pooling, prefixes and tokenizer",
            file=sys.stderr,
        )
    mrr = round(sum(1 / rank for rank in ranks) / n, 4)
    return {"above_strangers": first, "questions": n, "mrr": mrr, "random_looking": first < 5}
