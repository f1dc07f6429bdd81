"""Predicted answers (tasks search and agent): their files, scores, and FlashRAG's result files.

Questions without a prediction, or whose episode failed, score zero.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from data import DataError, Question, as_text, as_texts, read_array, read_jsonl
from reward import ANSWER_METRICS, all_gold, answer_metrics, gold_recall
from runs import atomic_write
from scoring.ranking import Scores


def rows_of_sample(path: str, key: str, sample: int) -> Iterator[tuple[str, str, dict]]:
    """Yield (location, id, row) for the rows numbered `sample` of a JSONL file or `.json` array.

    The number is the row's `sample`, else what follows `#` in its `rollout_id`, else 0.
    DataError: no such row, an invalid id or number, a repeated id.
    """
    rows = ((f"{path}:{number}", row) for number, row in read_jsonl(path))
    seen: set[str] = set()
    for location, row in read_array(path) if path.endswith(".json") else rows:
        id_ = as_text(row.get(key))
        if id_ is None:
            raise DataError(
                f"{location}: {key} is {row.get(key)!r}, not a string; fields found: "
                f"{', '.join(row)}"
            )
        number = str(row.get("sample", str(row.get("rollout_id", "")).partition("#")[2] or 0))
        if not re.fullmatch("[0-9]{1,9}", number):
            raise DataError(f"{location}: sample {number[:40]!r} is no number from 0")
        if int(number) != sample:
            continue
        if id_ in seen:
            raise DataError(f"{location}: {key} {id_!r} occurs a second time; number its rows")
        seen.add(id_)
        yield location, id_, row
    if not seen:
        raise DataError(f"{path}: no row with sample {sample}; there must be at least one")


def check_types(location: str, row: dict, kinds: dict[str, tuple[type, ...]]) -> None:
    """DataError for a field that is neither null nor of its types."""
    for key, kind in kinds.items():
        value = row.get(key)
        if value is not None and type(value) not in kind:
            names = " or ".join(k.__name__ for k in kind)
            raise DataError(f"{location}: {key} is {str(value)[:60]!r}; it must be {names} or null")


@dataclass
class Prediction:
    """A system's answer to a question; fields that its file lacks are None."""

    answer: str  # "" if none was extracted
    response: str | None = None  # text that holds the answer
    well_formed: bool | None = None
    searches: int | None = None
    retrieved: list[str] | None = None  # ids of the passages shown
    error: str | None = None  # a technical failure


KINDS = dict.fromkeys(("response", "error"), (str,))
KINDS |= {"well_formed": (bool,), "searches": (int,), "retrieved": (list,)}


def read_predictions(path: str, sample: int = 0) -> dict[str, Prediction]:
    """Read {question id: prediction} from JSONL or FlashRAG's intermediate_data.json.

    The answer is the first of `pred`, `prediction` and `output.pred` in a row.
    """
    predictions: dict[str, Prediction] = {}
    for location, question, row in rows_of_sample(path, "id", sample):
        output = row["output"] if isinstance(row.get("output"), dict) else {}
        found = {key: row.get(key) for key in KINDS}
        found["response"] = row.get("answer", output.get("final_response"))
        check_types(location, found, KINDS)
        if found["retrieved"] is not None:
            found["retrieved"] = as_texts(found["retrieved"])
            if found["retrieved"] is None:
                raise DataError(f"{location}: retrieved must be a list of passage ids, or null")
        places = (("pred", row), ("prediction", row), ("pred", output))
        answers = [place[key] for key, place in places if key in place]
        if not answers or (answers[0] is not None and as_text(answers[0]) is None):
            raise DataError(
                f"{location}: prediction is {answers[0] if answers else 'absent'!r}; it must be a "
                "string in `prediction`, `pred` or FlashRAG's `output.pred`"
            )
        predictions[question] = Prediction(as_text(answers[0]) or "", **found)
    return predictions


def score_predictions(
    predictions: dict[str, Prediction], questions: list[Question], golds: dict[str, list[str]]
) -> Scores:
    """Return the scores of every question.

    `searches` has a question whose searches are counted; `gold_recall` and `all_gold` one with
    relevant passages in `golds` (id → passage ids), if any prediction has `retrieved`.
    """
    formed = any(p.well_formed is not None for p in predictions.values())
    retrieved = any(p.retrieved is not None for p in predictions.values())
    scores: Scores = {}
    for question in questions:
        found = predictions.get(question.id, Prediction(""))
        row = answer_metrics("" if found.error else found.answer, question.golden_answers)
        if formed:
            row["well_formed"] = float(bool(found.well_formed))
        if found.searches is not None:
            row["searches"] = float(found.searches)
        if retrieved and golds.get(question.id):
            pair = (found.retrieved or [], golds[question.id])
            row |= {"gold_recall": gold_recall(*pair), "all_gold": all_gold(*pair)}
        scores[question.id] = row
    return scores


def write_flashrag(folder: str, path: str, predictions: dict[str, Prediction]) -> None:
    """Write `metric_score.txt` and `intermediate_data.json` byte for byte as FlashRAG does.

    path: questions file, whose rows are copied. Scores: `answer_metrics(published=True)`; a failed
    episode scores as an empty answer.
    """
    items, totals = [], dict.fromkeys(ANSWER_METRICS, 0.0)
    for _, row in read_jsonl(path):
        found = predictions.get(str(row["id"]), Prediction(""))
        golds = as_texts(row["golden_answers"])
        score = answer_metrics("" if found.error else found.answer, golds, published=True)
        totals = {name: totals[name] + score[name] for name in totals}
        # FlashRAG's zero f1, precision and recall are integers
        values = {name: score[name] or (0.0 if name in ("em", "acc") else 0) for name in totals}
        response = {} if found.response is None else {"final_response": found.response}
        items.append(row | {"output": response | {"pred": found.answer, "metric_score": values}})
    with atomic_write(os.path.join(folder, "metric_score.txt")) as f:
        f.writelines(f"{name}: {total / len(items)}\n" for name, total in totals.items())
    with atomic_write(os.path.join(folder, "intermediate_data.json")) as f:
        json.dump(items, f, indent=4, ensure_ascii=False)
