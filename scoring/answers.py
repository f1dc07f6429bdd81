"""Answers of the search and agent tasks: files of predictions, their scores, FlashRAG's two result files.

A file of its own because it knows questions and episodes, while `evaluate.py`, which calls it and adds intervals and
paired tests, knows runs and turns.  The formulas are `reward.answer_metrics`.  What is decided here:

1. Means are over ALL questions of the questions file.  One without a prediction scores zero and is counted as
   `missing`, one whose episode failed technically (`error`) scores zero and is counted as `errors`; predictions for
   other questions are ignored and counted as `extra`.  Several rollouts of a question: the one of number `sample`.
2. `well_formed` is the share of all questions whose response kept its task's format.  `searches` is the mean over the
   episodes that there are.  Both come from trajectory files (infer.py) only.
3. `gold_recall` and `all_gold` are means over the judged questions: those with a relevant passage in the qrels.  They
   need the ids that an episode retrieved; an episode without searches has retrieved nothing.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, Iterator

from data import DataError, Question, read_array, read_jsonl
from reward import all_gold, ANSWER_METRICS, answer_metrics, gold_recall
from runs import atomic_write

Scores = dict[str, dict[str, float]]  # question id → metric → value
FORMS = '{"id", "prediction"}, a line of infer.py\'s trajectory.jsonl, or FlashRAG\'s {"id", "output": {"pred"}}'


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

    sample: which rollout of a question, by `sample` or the number behind `#` in `rollout_id`; lines without are 0.
    DataError names file, line and reason: no prediction in it, a wrong type, a question answered twice.
    """
    rows: Iterator[tuple[str, dict]] = read_array(path) if path.endswith(".json") else (
        (f"{path}:{number}", row) for number, row in read_jsonl(path))
    predictions: dict[str, Prediction] = {}
    for where, row in rows:
        output = row["output"] if isinstance(row.get("output"), dict) else {}
        question = row.get("id")
        question = str(question) if isinstance(question, int) and not isinstance(question, bool) else question
        places = (("pred", row), ("prediction", row), ("pred", output))
        key, holder = next(((key, holder) for key, holder in places if key in holder), ("", {}))
        answer = holder.get(key)
        if not isinstance(question, str) or not key or not isinstance(answer, str | None):
            raise DataError(f"{where}: id is {question!r} and the prediction "
                            f"{f'is {answer!r}' if key else 'is absent'}; a line is one of {FORMS}, with strings")
        if _sample(row, where) != sample:
            continue
        if question in predictions:
            raise DataError(f"{where}: question {question!r} is answered a second time; number the rollouts: sample")
        response = _typed(*((row, "answer") if "answer" in row else (output, "final_response")), str, where)
        predictions[question] = Prediction(
            answer or "", response, _typed(row, "well_formed", bool, where), _typed(row, "searches", int, where),
            _ids(row, where), _typed(row, "error", str, where))
    if not predictions:
        raise DataError(f"{path}: no predictions with sample {sample}; the file must hold at least one")
    return predictions


def _sample(row: dict, where: str) -> int:
    number = row.get("sample", str(row.get("rollout_id", "")).partition("#")[2] or 0)
    if not re.fullmatch("[0-9]{1,9}", str(number)):
        raise DataError(f"{where}: sample {str(number)[:40]!r} is no number from 0")
    return int(number)


def _typed(row: dict, key: str, kind: type, where: str) -> Any:
    value = row.get(key)
    if value is not None and type(value) is not kind:
        raise DataError(f"{where}: {key} is {str(value)[:60]!r}; it must be a {kind.__name__} or null")
    return value


def _ids(row: dict, where: str) -> list[str] | None:
    ids = row.get("retrieved")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, str) for i in ids)):
        raise DataError(f"{where}: retrieved is {str(ids)[:60]!r}; it must be a list of passage ids")
    return ids


def score_predictions(predictions: dict[str, Prediction], questions: list[Question],
                      golds: dict[str, list[str]]) -> dict[str, Scores]:
    """Per-question scores in three groups, each with its own denominator (rules 1 to 3); empty where nothing is known.

    answers   all questions: ANSWER_METRICS, and `well_formed` where the file tells it
    searches  questions with an episode: `searches`
    golds     judged questions (`golds`: question id → relevant passage ids): `gold_recall` and `all_gold`
    """
    told = {name: any(getattr(p, name) is not None for p in predictions.values())
            for name in ("well_formed", "retrieved")}
    groups: dict[str, Scores] = {"answers": {}, "searches": {}, "golds": {}}
    for question in questions:
        found = predictions.get(question.id, Prediction(""))
        row = answer_metrics("" if found.error else found.answer, question.golden_answers)
        row |= {"well_formed": float(bool(found.well_formed))} if told["well_formed"] else {}
        groups["answers"][question.id] = row
        if found.searches is not None:
            groups["searches"][question.id] = {"searches": float(found.searches)}
        if told["retrieved"] and golds.get(question.id):
            pair = (found.retrieved or [], golds[question.id])
            groups["golds"][question.id] = {"gold_recall": gold_recall(*pair), "all_gold": all_gold(*pair)}
    return groups


def by_type(questions: list[Question]) -> dict[str, list[str]]:
    """Type of question (`metadata.type`, "2hop", "bridge", …) → ids; empty where there are less than two types."""
    types: dict[str, list[str]] = {}
    for question in questions:
        types.setdefault(str(question.metadata.get("type", "unknown")), []).append(question.id)
    return dict(sorted(types.items())) if len(types) > 1 else {}


def count_predictions(predictions: dict[str, Prediction], questions: list[Question]) -> dict[str, int]:
    """questions, missing, errors and extra of rule 1."""
    known = {question.id for question in questions}
    return {"questions": len(known), "missing": len(known - predictions.keys()),
            "errors": sum(bool(p.error) for key, p in predictions.items() if key in known),
            "extra": len(predictions.keys() - known)}


def write_flashrag(folder: str, path: str, predictions: dict[str, Prediction], scores: Scores) -> None:
    """`metric_score.txt` and `intermediate_data.json` as FlashRAG's Evaluator and Dataset.save write them.

    path: the questions file, whose rows are carried over whole; scores: the group "answers" of `score_predictions`.
    Equal to FlashRAG's to the byte, whole zeros of f1, precision and recall included, where golds are not empty after
    normalisation and need no NFC (reward.py).
    """
    items = []
    for _, row in read_jsonl(path):
        found, score = predictions.get(str(row["id"]), Prediction("")), scores[str(row["id"])]
        values = {name: score[name] if name in ("em", "acc") else score[name] or 0 for name in ANSWER_METRICS}
        response = {"final_response": found.response} if found.response is not None else {}
        items.append(row | {"output": response | {"pred": found.answer, "metric_score": values}})
    with atomic_write(os.path.join(folder, "metric_score.txt")) as f:
        for name in ANSWER_METRICS:
            f.write(f"{name}: {sum(row[name] for row in scores.values()) / len(scores)}\n")
    with atomic_write(os.path.join(folder, "intermediate_data.json")) as f:
        json.dump(items, f, indent=4, ensure_ascii=False)
