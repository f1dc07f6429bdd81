"""Files of predicted answers (tasks search and agent), their scores, FlashRAG's two result files.

1. Means are over ALL questions of the questions file. One without a prediction (`missing`) and one
   whose episode failed for a technical reason (`errors`) score zero.
2. `well_formed` is the share of all questions whose response kept the form; `searches` is the mean
   over the episodes that there are. Both come from files of infer.py only.
3. `gold_recall` and `all_gold` are means over the questions that have a relevant passage in the
   qrels. An episode without searches has retrieved nothing.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from data import DataError, Question, as_text, as_texts, read_array, read_jsonl
from reward import ANSWER_METRICS, all_gold, answer_metrics, gold_recall
from runs import atomic_write
from scoring.ranking import Scores

FORMS = '{"id", "prediction"}, a line of infer.py, or FlashRAG\'s {"id", "output": {"pred"}}'


@dataclass
class Prediction:
    """What a system answered to one question; None where its file does not tell."""

    answer: str  # "" where nothing could be extracted
    response: str | None = None  # the text that the answer was taken from
    well_formed: bool | None = None
    searches: int | None = None
    retrieved: list[str] | None = None  # ids of the passages that the episode was shown
    error: str | None = None  # a technical failure


def read_predictions(path: str, sample: int = 0) -> dict[str, Prediction]:
    """Question id → prediction, from JSONL, or from FlashRAG's intermediate_data.json.

    sample: which rollout of a question, by `sample` or the number behind `#` in `rollout_id`.
    DataError: no prediction, a wrong type, a question answered twice.
    """
    if path.endswith(".json"):
        rows = read_array(path)
    else:
        rows = ((f"{path}:{number}", row) for number, row in read_jsonl(path))
    predictions: dict[str, Prediction] = {}
    for location, row in rows:
        output = row["output"] if isinstance(row.get("output"), dict) else {}
        question = as_text(row.get("id"))
        places = (("pred", row), ("prediction", row), ("pred", output))
        key, holder = next((place for place in places if place[0] in place[1]), ("", {}))
        answer = holder.get(key)
        if question is None or not key or (answer is not None and as_text(answer) is None):
            raise DataError(
                f"{location}: id is {row.get('id')!r} and the prediction "
                f"{f'is {answer!r}' if key else 'is absent'}; a line is {FORMS}, with strings"
            )
        if _sample(row, location) != sample:
            continue
        if question in predictions:
            raise DataError(
                f"{location}: question {question!r} is answered a second time; number the rollouts "
                "(`sample`)"
            )
        holder, key = (row, "answer") if "answer" in row else (output, "final_response")
        retrieved = _typed(row, "retrieved", list, location)
        retrieved = None if retrieved is None else as_texts(retrieved)
        if retrieved is None and row.get("retrieved") is not None:
            raise DataError(f"{location}: retrieved must be a list of passage ids, or null")
        predictions[question] = Prediction(
            as_text(answer) or "",
            _typed(holder, key, str, location),
            _typed(row, "well_formed", bool, location),
            _typed(row, "searches", int, location),
            retrieved,
            _typed(row, "error", str, location),
        )
    if not predictions:
        raise DataError(f"{path}: no predictions with sample {sample}; there must be at least one")
    return predictions


def _sample(row: dict, location: str) -> int:
    number = row.get("sample", str(row.get("rollout_id", "")).partition("#")[2] or 0)
    if not re.fullmatch("[0-9]{1,9}", str(number)):
        raise DataError(f"{location}: sample {str(number)[:40]!r} is no number from 0")
    return int(number)


def _typed(row: dict, key: str, kind: type, location: str) -> Any:
    value = row.get(key)
    if value is not None and type(value) is not kind:
        raise DataError(
            f"{location}: {key} is {str(value)[:60]!r}; it must be a {kind.__name__} or null"
        )
    return value


def score_predictions(
    predictions: dict[str, Prediction], questions: list[Question], golds: dict[str, list[str]]
) -> dict[str, Scores]:
    """Per-question scores in three groups, each with its own denominator; empty where unknown.

    answers   all questions: ANSWER_METRICS, and `well_formed` where the file tells it
    searches  questions with an episode: `searches`
    golds     judged questions (`golds`: id → relevant passage ids): `gold_recall`, `all_gold`
    """
    formed = any(p.well_formed is not None for p in predictions.values())
    retrieved = any(p.retrieved is not None for p in predictions.values())
    groups: dict[str, Scores] = {"answers": {}, "searches": {}, "golds": {}}
    for question in questions:
        found = predictions.get(question.id, Prediction(""))
        row = answer_metrics("" if found.error else found.answer, question.golden_answers)
        if formed:
            row["well_formed"] = float(bool(found.well_formed))
        groups["answers"][question.id] = row
        if found.searches is not None:
            groups["searches"][question.id] = {"searches": float(found.searches)}
        if retrieved and golds.get(question.id):
            pair = (found.retrieved or [], golds[question.id])
            row = {"gold_recall": gold_recall(*pair), "all_gold": all_gold(*pair)}
            groups["golds"][question.id] = row
    return groups


def by_type(questions: list[Question]) -> dict[str, list[str]]:
    """Type of question (`metadata.type`, "2hop", …) → ids; empty for fewer than two types."""
    types: dict[str, list[str]] = {}
    for question in questions:
        types.setdefault(str(question.metadata.get("type", "unknown")), []).append(question.id)
    return dict(sorted(types.items())) if len(types) > 1 else {}


def count_predictions(
    predictions: dict[str, Prediction], questions: list[Question]
) -> dict[str, int]:
    """`questions`, `missing`, `errors`, and `extra`: predictions for other questions."""
    known = {question.id for question in questions}
    return {
        "questions": len(known),
        "missing": len(known - predictions.keys()),
        "errors": sum(bool(p.error) for key, p in predictions.items() if key in known),
        "extra": len(predictions.keys() - known),
    }


def write_flashrag(folder: str, path: str, predictions: dict[str, Prediction]) -> None:
    """`metric_score.txt` and `intermediate_data.json` as FlashRAG writes them, to the byte.

    path: the questions file, whose rows are carried over whole. The scores are FlashRAG's own
    (`answer_metrics(published=True)`); an episode that failed scores as an empty answer.
    """
    items, totals = [], dict.fromkeys(ANSWER_METRICS, 0.0)
    for _, row in read_jsonl(path):
        found = predictions.get(str(row["id"]), Prediction(""))
        golds = row["golden_answers"]
        golds = list(map(str, golds)) if isinstance(golds, list) else str(golds)
        score = answer_metrics("" if found.error else found.answer, golds, published=True)
        totals = {name: totals[name] + score[name] for name in totals}
        # FlashRAG starts f1, precision and recall from a whole 0
        values = {
            name: score[name] if name in ("em", "acc") else score[name] or 0 for name in totals
        }
        response = {"final_response": found.response} if found.response is not None else {}
        items.append(row | {"output": response | {"pred": found.answer, "metric_score": values}})
    with atomic_write(os.path.join(folder, "metric_score.txt")) as f:
        for name, total in totals.items():
            f.write(f"{name}: {total / len(items)}\n")
    with atomic_write(os.path.join(folder, "intermediate_data.json")) as f:
        json.dump(items, f, indent=4, ensure_ascii=False)
