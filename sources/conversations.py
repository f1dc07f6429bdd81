"""Conversational-search data sets: TopiOCQA, QReCC, CANARD, MTRAG and TREC CAsT.

A turn's `rewrite` is the human one unless a function says otherwise.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator

from data import DataError, Row, Turn, as_text, one_line, read_lines
from runs import atomic_write
from sources.files import (
    CUT_OFF,
    SPLITS,
    Build,
    DevConfig,
    PublicConfig,
    bucket,
    json_rows,
    tab_pairs,
    table_rows,
)


# ---- topiocqa


def topiocqa(build: Build) -> None:
    """TopiOCQA from its five official files; the dev set becomes test, as in the papers.

    Only the first positive passage is gold; ids are those of the TSV. `t5_rewrite` is filled where
    the file of T5 rewrites is present.
    """
    turns = [(name, t) for name in ("train", "dev") for t in topiocqa_turns(build.paths, name)]
    build.write_splits(build.cfg.splits(), turns)

    def passages() -> Iterator[dict]:
        for row in table_rows(build.paths["passages"]):
            title = row.text("title").replace(" [SEP] ", " ")
            yield {"id": row.text("id"), "title": title, "text": row.text("text")}

    build.write_corpus(passages())


def topiocqa_turns(paths: dict[str, str], split: str) -> Iterator[Turn]:
    """Turns of an official split; its files are aligned by row."""
    keys = (f"{split}_{what}" for what in ("turns", "golds", "rewrites"))
    files = [paths[key] for key in keys if key in paths]
    for row, *beside in itertools.zip_longest(*map(json_rows, files), fillvalue=Row({}, files[0])):
        place = [as_text(row.get(key)) for key in ("Conversation_no", "Turn_no")]
        for other in beside:
            if [as_text(other.get(key)) for key in ("conv_id", "turn_id")] != place:
                raise row.error(
                    f"conversation and turn {place} are not those of this row in the other files, "
                    f"which go row by row: {', '.join(files)}"
                )
        turn, context = row.number("Turn_no"), row.texts("Context")
        if len(context) != 2 * (turn - 1):
            raise row.error(f"turn {turn} has {len(context)} texts of context, not {2 * turn - 2}")
        positives = beside[0].rows("positive_ctxs")
        if not positives:
            raise beside[0].error("no positive passage; every published turn has one")
        key = f"topiocqa-{split}_{row.text('Conversation_no')}"
        pairs, golds = list(zip(context[::2], context[1::2])), [positives[0].text("passage_id")]
        record = Turn(f"{key}_{turn}", key, turn, pairs, row.text("Question"), golds)
        record.answer = row.text("Answer")
        record.extra = {"topic": row.text("Topic"), "topic_section": row.text("Topic_section")}
        record.extra |= {"t5_rewrite": rewritten.text("question") for rewritten in beside[1:]}
        yield record


# ---- qrecc


def qrecc(build: Build) -> None:
    """QReCC from SCAI's turn files and the passage archive.

    Passage ids count from 0; line n + 1 of raw_ids.txt is the raw id of passage n. Turns without
    gold serve only as context; blank passages are kept.
    """
    turns, counts, numbers = [], build.counts, {}  # numbers: gold raw id → passage id
    for split in ("train", "test"):
        for turn in qrecc_turns(build.paths[f"{split}_turns"], split):
            turns.append((split, turn))
            counts[f"{split}_rows"] += 1
            counts[f"{split}_turns"] += bool(turn.gold_ids)
            build.golds.update(turn.gold_ids)
    build.check_counts(counts)
    golds = set(build.golds)

    def passages(raw_ids) -> Iterator[dict]:
        for number, row in enumerate(json_rows(build.paths["passages"], qrecc_members)):
            raw, text = row.text("id"), row.text("contents")
            if raw in golds:
                counts["gold raw ids that occur twice"] += raw in numbers
                numbers[raw] = str(number)  # the last duplicate, as published
                build.golds.discard(raw)
            raw_ids.write(raw.replace("\n", " ") + "\n")
            counts["blank_passages"] += not text.strip()
            yield {"id": str(number), "contents": text}

    with atomic_write(f"{build.folder}/raw_ids.txt") as raw_ids:
        build.write_corpus(passages(raw_ids))
    for _, turn in turns:
        turn.gold_ids = [numbers[raw] for raw in turn.gold_ids if raw in numbers]
    build.write_splits(build.cfg.splits(), (pair for pair in turns if pair[1].gold_ids))


def qrecc_members(names: list[str]) -> list[str]:
    """The archive's files in ConvSearch-R1's order: commoncrawl, then wayback and its backfill."""
    wayback = [name for name in names if "wayback" in name]
    commoncrawl = [name for name in names if "commoncrawl" in name and "wayback" not in name]
    if not wayback or not commoncrawl or len(wayback) + len(commoncrawl) != len(names):
        raise DataError(
            f"passages.zip: of {len(names)} JSONL members {len(commoncrawl)} under commoncrawl and "
            f"{len(wayback)} under wayback; it holds both and nothing else: fetch it again"
        )
    return commoncrawl + wayback


def qrecc_turns(path: str, split: str) -> Iterator[Turn]:
    """Turns of a file with context; `gold_ids` are raw ids."""
    contexts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in json_rows(path):
        number, turn = row.text("Conversation_no"), row.number("Turn_no")
        context = contexts[number]
        if turn != len(context) + 1:
            raise row.error(
                f"turn {turn} of conversation {number} follows turn {len(context)}; {CUT_OFF}"
            )
        key, golds = f"QReCC-{split.capitalize()}_{number}", row.texts("Truth_passages")
        record = Turn(f"{key}_{turn}", key, turn, list(context), row.text("Question"), golds)
        record.gold_ids = list(dict.fromkeys(golds))
        record.answer = row.text("Truth_answer") or "UNANSWERABLE"
        record.rewrite = row.text("Truth_rewrite")
        record.extra["source"] = row.text("Conversation_source")
        if row.get("Transformer_rewrite"):
            record.extra["transformer_rewrite"] = row.text("Transformer_rewrite")
        context.append((record.question, record.answer))
        yield record


# ---- canard


def ten_split(key: str) -> str:
    """60 % train, 10 % dev, 30 % test, by the md5 of `key`."""
    number = bucket(key, 10)
    return "train" if number < 6 else "dev" if number == 6 else "test"


def canard(build: Build) -> None:
    """CANARD's dev.json, whose answers become the passages; split by article.

    A dialogue's longest history gives all answers but the last. Turns without an answer, or with
    one of fewer than four words, are left out. Question 1 is replaced by its rewrite everywhere.
    """
    dialogues: dict[str, list[Row]] = defaultdict(list)
    for row in json_rows(build.paths["turns"]):
        row["History"] = history = list(map(one_line, row.texts("History")))
        if len(history) < 2 or len(history) % 2:
            raise row.error(f"a History of {len(history)} texts; it is article, section and pairs")
        dialogues[row.text("QuAC_dialog_id")].append(row)
    passages: dict[tuple[str, str], str] = {}
    turns: list[tuple[str, Turn]] = []
    for dialogue, rows in dialogues.items():
        article, section, *said = max((row["History"] for row in rows), key=len)
        said[:1] = [r.line("Rewrite") for r in rows if r.number("Question_no") == 1] or said[:1]
        pairs, golds = list(zip(said[::2], said[1::2])), {}
        for number, (_, answer) in enumerate(pairs, 1):
            if len(answer.split()) >= 4:
                passage = (f"{article}, {section}", answer)
                golds[number] = passages.setdefault(passage, f"canard-{len(passages):05d}")
        for row in rows:
            number = row.number("Question_no")
            if number in golds:
                context, (_, answer) = pairs[: number - 1], pairs[number - 1]
                question = said[0] if number == 1 else row.line("Question")
                key, gold, rewrite = f"{dialogue}_q{number}", golds[number], row.line("Rewrite")
                turn = Turn(key, dialogue, number, context, question, [gold], answer, rewrite)
                turns.append((ten_split(article), turn))
    build.write_splits(SPLITS, turns)
    build.write_corpus(
        {"id": key, "title": title, "text": text} for (title, text), key in passages.items()
    )


# ---- mtrag

DOMAINS = ("clapnq", "cloud", "fiqa", "govt")


def mtrag(build: Build) -> None:
    """MTRAG's human conversations and four corpora, split by conversation.

    `source` is a copy of github.com/IBM/mt-rag-benchmark. Conversations are numbered from 1 in the
    order of reference.jsonl. The rewrites are by Mixtral.
    """
    golds: dict[str, list[str]] = defaultdict(list)
    domain_of: dict[str, str] = {}
    rewrites: dict[str, str] = {}
    for domain in DOMAINS:
        for row in table_rows(build.paths[f"{domain}_qrels"]):
            if row.number("score"):
                golds[row.text("query-id")].append(row.text("corpus-id"))
                domain_of[row.text("query-id")] = domain
                build.golds.add(row.text("corpus-id"))
        for row in json_rows(build.paths[f"{domain}_rewrites"]):
            rewrites[row.text("_id")] = one_line(row.text("text").removeprefix("|user|:"))
    numbers: dict[str, int] = {}
    turns: list[Turn] = []
    for row in json_rows(build.paths["tasks"]):
        build.counts["tasks"] += 1
        number = numbers.setdefault(row.text("conversation_id"), len(numbers) + 1)
        task, turn, said = row.text("task_id"), row.number("turn"), row.rows("input")
        speakers, texts = [m.text("speaker") for m in said], [m.line("text") for m in said]
        if speakers != ["user", "agent"] * (turn - 1) + ["user"]:
            raise row.error(f"the speakers of turn {turn} do not alternate: {speakers}")
        if task in golds:
            key, context = task.replace("<::>", "_"), list(zip(texts[::2], texts[1::2]))
            record = Turn(key, str(number), turn, context, texts[-1], golds[task])
            record.answer = next((target.line("text") for target in row.rows("targets")), None)
            record.rewrite = rewrites.get(task)
            record.extra["domain"] = domain_of[task]
            turns.append(record)
    build.counts["conversations"] = len(numbers)
    turns.sort(key=lambda turn: (turn.extra["domain"], int(turn.conversation_id)))
    build.write_splits(SPLITS, ((ten_split(turn.conversation_id), turn) for turn in turns))
    build.write_corpus(mtrag_passages(build), 366_459)


def mtrag_passages(build: Build) -> Iterator[dict]:
    for domain in DOMAINS:
        for row in json_rows(build.paths[f"{domain}_passages"]):
            title, text = row.line("title", required=False), row.text("text")
            head, _, rest = text.partition("\n")  # indexed texts repeat the title here
            text = one_line(rest if one_line(head) == title else text)
            build.counts[f"{domain} passages"] += 1
            yield {"id": row.text("_id"), "title": title, "text": text, "domain": domain}


# ---- TREC CAsT


@dataclass
class CastConfig(PublicConfig):
    """TREC CAsT"""

    relevant_from: int = 1
    """lowest grade of a gold passage or document; the qrels keep all grades"""


def cast(build: Build) -> None:
    """TREC CAsT: the judged turns become test, with manual rewrites and the official grades.

    2019 and 2020 use MS MARCO and TREC CAR; turns have no answer in 2019 and the automatic
    canonical passage in 2020. 2021 judges documents of MS MARCO, KILT and the Washington Post:
    `gold_ids` are documents, passage ids DOCUMENT-N (`evaluate.py documents=true`).
    """
    paths, judged = build.paths, defaultdict(dict)
    path = paths["qrels"]
    for number, line in read_lines(path):
        found = re.fullmatch(r"(\S+)\s+\S+\s+(\S+)\s+(-?\d+)\s*", line)
        if not found:
            raise DataError(f"{path}:{number}: {line[:80]!r} must be query, 0, passage, grade")
        judged[found[1]][found[2]] = int(found[3])
    golds = {
        key: [passage for passage, grade in grades.items() if grade >= build.cfg.relevant_from]
        for key, grades in judged.items()
    }
    build.golds.update(*golds.values())
    turns = [turn for turn, _ in cast_turns(paths["topics"])]
    build.counts["turns"] = len(turns)
    if "rewrites" in paths:
        rewrites = {key: one_line(text) for key, text in tab_pairs(paths["rewrites"])}
        for turn in turns:
            turn.rewrite = rewrites.get(turn.query_id)
    if "canonical" in paths:
        canonical = {
            turn.query_id: row.text("automatic_canonical_result_id")
            for turn, row in cast_turns(paths["canonical"])
        }
        texts = dict.fromkeys(canonical.values(), "")  # filled in as the corpus is written
        build.golds |= texts.keys()
        build.write_corpus(cast_passages(build, texts), 38_600_000)
        for turn in turns:
            turn.answer = texts.get(canonical.get(turn.query_id)) or None
    else:
        passages = cast_passages(build, {}) if "car" in paths else cast_documents(build)
        build.write_corpus(passages, 40_000_000)
    contexts = defaultdict(list)
    for turn in turns:
        context = contexts[turn.conversation_id]
        turn.context, turn.gold_ids = list(context), golds.get(turn.query_id, [])
        context.append((turn.question, turn.answer or ""))
    kept = [("test", turn) for turn in turns if turn.query_id in judged]
    build.write_splits(("test",), kept, judged)
    build.check("judged turns that are in the topics", len(kept), len(judged))


def cast_turns(path: str) -> Iterator[tuple[Turn, Row]]:
    """(turn without context and golds, its row), by turn number within a topic."""
    for topic in json_rows(path):
        number, rows = topic.text("number"), topic.rows("turn")
        by_turn = {row.number("number"): row for row in rows}
        if len(by_turn) < len(rows):
            raise topic.error(f"topic {number} has two turns of one number; fetch the file again")
        for turn, row in sorted(by_turn.items()):
            record = Turn(f"{number}_{turn}", number, turn, [], row.line("raw_utterance"), [])
            keys = ("passage", "manual_rewritten_utterance", "automatic_rewritten_utterance")
            record.answer, record.rewrite, automatic = (
                row.line(key) if key in row else None for key in keys
            )
            record.extra = {"automatic_rewrite": automatic} if automatic else {}
            yield record, row


def cast_passages(build: Build, texts: dict[str, str]) -> Iterator[dict]:
    """MS MARCO and TREC CAR without duplicates; fills in the values of `texts` by id."""
    try:
        from trec_car.read_data import iter_paragraphs
    except ImportError as e:
        raise DataError("TREC CAR's files need a package: pip install trec-car-tools") from e

    def both() -> Iterator[tuple[str, str]]:
        for key, text in tab_pairs(build.paths["marco"]):
            build.counts["marco_passages"] += 1
            yield f"MARCO_{key}", text
        with open(build.paths["car"], "rb") as f:
            for paragraph in iter_paragraphs(f):
                build.counts["car_passages"] += 1
                yield f"CAR_{paragraph.para_id}", paragraph.get_text()

    left_out = duplicates(build)
    for key, text in both():
        if key in left_out:
            build.counts["duplicates_left_out"] += 1
            continue
        if key in texts:
            texts[key] = one_line(text)
        yield {"id": key, "contents": text}


def cast_documents(build: Build) -> Iterator[dict]:
    """Passages from the track's own tool, one document per line, without duplicates."""
    source = build.cfg.source
    files = sorted(glob.glob(os.path.join(glob.escape(source), "passages", "*.jsonl")))
    if not files:
        raise DataError(f"source={source}: the passages are missing:\n{build.known['passages']}")
    left_out = {f"MARCO_{key}" for key in duplicates(build)}
    for row in itertools.chain.from_iterable(map(json_rows, files)):
        document, title = row.text("id"), row.line("title")
        collection = document.partition("_")[0]
        if collection not in ("MARCO", "KILT", "WAPO"):
            raise row.error(f"document {document!r}; ids begin with MARCO_, KILT_ or WAPO_")
        build.counts[f"{collection} documents"] += 1
        if document in left_out:
            build.counts["duplicates_left_out"] += 1
            continue
        if collection == "WAPO":  # only WAPO repeats ids
            left_out.add(document)
        build.golds.discard(document)
        for part in row.rows("contents"):
            key = f"{document}-{part.number('id')}"
            yield {"id": key, "title": title, "text": part.line("body")}


def duplicates(build: Build) -> set[str]:
    """Ids to leave out, from the track's list of lines `kept:id,id,…`."""
    path = build.paths.get("duplicates")
    lines = (line for _, line in read_lines(path)) if path else ()
    return {key.strip() for line in lines for key in line.partition(":")[2].split(",")}


SETS = {
    "topiocqa": (DevConfig, topiocqa),
    "qrecc": (DevConfig, qrecc),
    "canard": (PublicConfig, canard),
    "mtrag": (PublicConfig, mtrag),
    "cast19": (CastConfig, cast),
    "cast20": (CastConfig, cast),
    "cast21": (CastConfig, cast),
}
