"""Conversational-search data sets → corpus, turns, qrels: TopiOCQA, QReCC, CANARD, MTRAG, CAsT.

Each function reads the official files of one set (`build.paths`, listed in published.yaml) and
writes what `prepare.py` is asked for. A turn's human rewrite goes to `rewrite`, other published
rewrites beside it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Iterable, Iterator, Literal

from data import DataError, Turn, read_lines
from runs import atomic_write
from sources.files import (
    SPLITS,
    Build,
    DevConfig,
    PublicConfig,
    Row,
    array_rows,
    bucket,
    csv_rows,
    jsonl_rows,
    squeeze,
    zip_rows,
)


def with_history(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Each turn with the turns before it in its conversation as its context."""
    context: list[tuple[str, str]] = []
    conversation = None
    for turn in turns:
        if turn.conversation_id != conversation:
            conversation, context = turn.conversation_id, []
        yield replace(turn, context=list(context))
        context.append((turn.question, turn.answer or ""))


# ------------------------------------------------------------------------------------- topiocqa


def topiocqa(cfg: DevConfig, build: Build) -> None:
    """TopiOCQA from the five official files; its dev set, which the papers test on, becomes test.

    The gold is the first positive passage alone; ` [SEP] ` in a title becomes a space; ids are the
    TSV's. There are no human rewrites; where retriever/rewrites_t5_qrecc/ lies there too, its
    rewrites go to `t5_rewrite`.
    """
    build.write_splits(cfg.splits(), topiocqa_turns(cfg, build.paths))

    def passages() -> Iterator[dict]:
        for location, row in csv_rows(build.paths["passages"]):
            if len(row) != 3:
                raise DataError(f"{location}: {len(row)} columns; the file has id, text and title")
            if [column.strip().lower() for column in row] != ["id", "text", "title"]:
                yield {"id": row[0], "title": row[2].replace(" [SEP] ", " "), "text": row[1]}

    build.write_corpus(passages())


def topiocqa_turns(cfg: DevConfig, paths: dict[str, str]) -> Iterator[tuple[str, Turn]]:
    """(split, turn) of both official splits; the files of a split go row by row."""
    for split in ("train", "dev"):
        files = [
            paths[key]
            for what in ("turns", "golds", "rewrites")
            if (key := f"{split}_{what}") in paths
        ]
        for rows in zip_longest(*map(array_rows, files)):
            row, *beside = rows
            if None in rows or any(
                (str(other.get("conv_id")), str(other.get("turn_id")))
                != (row.text("Conversation_no"), row.text("Turn_no"))
                for other in beside
            ):
                raise next(r for r in rows if r is not None).error(
                    "another conversation or turn than in this row of the other files; they go row "
                    f"by row: fetch them again ({', '.join(files)})"
                )
            number, turn = row.text("Conversation_no"), row.number("Turn_no")
            context = row.texts("Context")
            if len(context) != 2 * (turn - 1):
                raise row.error(
                    f"turn {turn} has {len(context)} texts of context, not {2 * (turn - 1)}"
                )
            positives = beside[0].rows("positive_ctxs")
            if not positives:
                raise beside[0].error("no positive passage; every published turn has one")
            conversation = f"topiocqa-{split}_{number}"
            extra = {"topic": row.text("Topic"), "topic_section": row.text("Topic_section")}
            if len(beside) == 2:
                extra["t5_rewrite"] = beside[1].text("question")
            yield (
                cfg.split(split, conversation),
                Turn(
                    f"{conversation}_{turn}",
                    conversation,
                    turn,
                    list(zip(context[::2], context[1::2])),
                    row.text("Question"),
                    [positives[0].text("passage_id")],
                    answer=row.text("Answer"),
                    extra=extra,
                ),
            )


# ---------------------------------------------------------------------------------------- qrecc


def qrecc(cfg: DevConfig, build: Build) -> None:
    """QReCC from SCAI's turn files and the passage archive.

    Passage ids are running numbers from 0 (`qrecc_members`); line n + 1 of raw_ids.txt is the raw
    id of passage n, through which other numberings can be mapped. A turn without gold is not
    written but stays in later contexts, where an empty answer reads UNANSWERABLE. Blank passages
    are kept (331,474 were counted before us).
    """
    numbers: dict[str, str] = {}  # raw id → passage id, of gold passages alone
    counts = build.counts
    for split in ("train", "test"):
        for turn in qrecc_turns(build.paths[f"{split}_turns"], split):
            counts[f"{split}_rows"] += 1
            counts[f"{split}_turns"] += bool(turn.gold_ids)
            numbers.update(dict.fromkeys(turn.gold_ids, ""))
    build.check_counts(counts)

    def passages(raw_ids) -> Iterator[dict]:
        for number, row in enumerate(zip_rows(build.paths["passages"], qrecc_members)):
            raw, text = row.text("id"), row.text("contents")
            if raw in numbers:
                counts["gold raw ids that occur twice"] += bool(numbers[raw])
                numbers[raw] = str(number)  # the last one, as published
            raw_ids.write(raw.replace("\n", " ") + "\n")
            counts["blank_passages"] += not text.strip()
            yield {"id": str(number), "contents": text}

    with atomic_write(f"{build.folder}/raw_ids.txt") as raw_ids:
        build.write_corpus(passages(raw_ids))
    build.check_golds(raw for raw, number in numbers.items() if not number)

    def turns() -> Iterator[tuple[str, Turn]]:
        for split in ("train", "test"):
            for turn in qrecc_turns(build.paths[f"{split}_turns"], split):
                golds = [numbers[raw] for raw in turn.gold_ids if numbers[raw]]
                if golds:
                    yield cfg.split(split, turn.conversation_id), replace(turn, gold_ids=golds)

    build.write_splits(cfg.splits(), turns())


def qrecc_members(names: list[str]) -> list[str]:
    """The archive's JSONL members in the order that numbers the passages.

    First commoncrawl, then all of wayback, as stored. wayback-backfill is not put last:
    ConvSearch-R1's published numbering takes it for a part of wayback.
    """
    files = [name for name in names if name.endswith(".jsonl")]
    wayback = [name for name in files if "wayback" in name]
    commoncrawl = [name for name in files if "commoncrawl" in name and "wayback" not in name]
    if not wayback or not commoncrawl or len(wayback) + len(commoncrawl) != len(files):
        raise DataError(
            f"passages.zip: {len(files)} JSONL members, {len(commoncrawl)} under commoncrawl and "
            f"{len(wayback)} under wayback; both are expected and nothing else: fetch it again"
        )
    return commoncrawl + wayback


def qrecc_turns(path: str, split: str) -> Iterator[Turn]:
    """The turns of a file with their history; `gold_ids` are raw ids."""

    def turns() -> Iterator[Turn]:
        before, seen = ("", 0), set()
        for row in array_rows(path):
            number, turn = row.text("Conversation_no"), row.number("Turn_no")
            if number != before[0]:
                before = (number, 0)
                if number in seen:  # its context would be lost
                    raise row.error(
                        f"conversation {number} goes on after another one; fetch the file again"
                    )
                seen.add(number)
            if turn != before[1] + 1:
                raise row.error(
                    f"turn {turn} of conversation {number} follows turn {before[1]}; the published "
                    "file numbers them one by one: fetch it again"
                )
            before = (number, turn)
            extra = {"source": row.text("Conversation_source")}
            if row.get("Transformer_rewrite"):
                extra["transformer_rewrite"] = row.text("Transformer_rewrite")
            yield Turn(
                f"QReCC-{split.capitalize()}_{number}_{turn}",
                f"QReCC-{split.capitalize()}_{number}",
                turn,
                [],
                row.text("Question"),
                list(dict.fromkeys(row.texts("Truth_passages"))),
                answer=row.text("Truth_answer") or "UNANSWERABLE",
                rewrite=row.text("Truth_rewrite"),
                extra=extra,
            )

    return with_history(turns())


# --------------------------------------------------------------------------------------- canard

NO_PASSAGE = re.compile(r"i don'?t know\.?|cannotanswer|yes|no", re.IGNORECASE)


def ten_split(key: str) -> str:
    """train, dev and test 6 : 1 : 3, by the md5 of `key`."""
    number = bucket(key, 10)
    return "train" if number < 6 else "dev" if number == 6 else "test"


def canard(cfg: PublicConfig, build: Build) -> None:
    """CANARD's dev.json: the answers of its dialogues are the passages; split by article.

    Answers come from a dialogue's longest history, so its last turn has none and is left out; so
    are "I don't know", "CANNOTANSWER", "yes", "no" and answers of fewer than four words. Question 1
    is replaced by its rewrite everywhere.
    """
    dialogues: dict[str, list[Row]] = {}
    for row in array_rows(build.paths["turns"]):
        history = [squeeze(str(text)) for text in row.field("History", list)]
        if len(history) < 2 or len(history) % 2:
            raise row.error(
                f"a History of {len(history)} texts; article, section and pairs are expected"
            )
        row["History"] = history
        dialogues.setdefault(row.text("QuAC_dialog_id"), []).append(row)
    passages: dict[tuple[str, str], str] = {}
    turns: list[tuple[str, Turn]] = []
    for dialogue, rows in dialogues.items():
        article, section, *said = max((row["History"] for row in rows), key=len)
        rewritten = [row.squeezed("Rewrite") for row in rows if row.number("Question_no") == 1]
        opening = (rewritten or said)[:1]
        pairs = list(zip([*opening, *said[2::2]], said[1::2]))
        title, golds = f"{article}, {section}", {}
        for number, (_, answer) in enumerate(pairs, 1):
            if not NO_PASSAGE.fullmatch(answer) and len(answer.split()) >= 4:
                golds[number] = passages.setdefault((title, answer), f"canard-{len(passages):05d}")
        for row in rows:
            number = row.number("Question_no")
            if number in golds:
                turn = Turn(
                    f"{dialogue}_q{number}",
                    dialogue,
                    number,
                    pairs[: number - 1],
                    opening[0] if number == 1 else row.squeezed("Question"),
                    [golds[number]],
                    answer=pairs[number - 1][1],
                    rewrite=row.squeezed("Rewrite"),
                )
                turns.append((ten_split(article), turn))
    build.write_splits(SPLITS, turns)
    build.write_corpus(
        {"id": key, "title": title, "text": text} for (title, text), key in passages.items()
    )


# ---------------------------------------------------------------------------------------- mtrag

DOMAINS = ("clapnq", "cloud", "fiqa", "govt")


def mtrag(cfg: PublicConfig, build: Build) -> None:
    """MTRAG's human conversations with the passages of its four domains; split by conversation.

    `source` is a copy of github.com/IBM/mt-rag-benchmark. Conversations are numbered from 1 in the
    order of reference.jsonl; the md5 of that number splits them. The rewrites are Mixtral's, not a
    human's.
    """
    golds: dict[str, dict[str, list[str]]] = {domain: {} for domain in DOMAINS}
    rewrites: dict[str, str] = {}
    for domain in DOMAINS:
        for location, columns in csv_rows(build.paths[f"{domain}_qrels"]):
            if columns[2:] == ["score"]:
                continue
            if len(columns) != 3 or not columns[2].strip().isdigit():
                raise DataError(
                    f"{location}: {columns}; query-id, corpus-id and score are expected"
                )
            if int(columns[2]):
                golds[domain].setdefault(columns[0], []).append(columns[1])
                build.golds.add(columns[1])
        for row in jsonl_rows(build.paths[f"{domain}_rewrites"]):
            rewrites[row.text("_id")] = squeeze(row.text("text").removeprefix("|user|:"))
    numbers: dict[str, int] = {}
    turns: dict[str, list[Turn]] = {domain: [] for domain in DOMAINS}
    for row in jsonl_rows(build.paths["tasks"]):
        build.counts["tasks"] += 1
        number = numbers.setdefault(row.text("conversation_id"), len(numbers) + 1)
        task, turn = row.text("task_id"), row.text("turn")
        if not turn.isdigit() or not int(turn):
            raise row.error(f"turn {turn!r} is no number from 1")
        said = row.rows("input")
        speakers, texts = [m.text("speaker") for m in said], [m.squeezed("text") for m in said]
        if speakers != ["user", "agent"] * (int(turn) - 1) + ["user"]:
            raise row.error(f"the speakers of turn {turn} do not alternate: {speakers}")
        targets = row.rows("targets")
        for domain in DOMAINS:
            if task in golds[domain]:
                turns[domain].append(
                    Turn(
                        task.replace("<::>", "_"),
                        str(number),
                        int(turn),
                        list(zip(texts[::2], texts[1::2])),
                        texts[-1],
                        golds[domain][task],
                        answer=targets[0].squeezed("text") if targets else None,
                        rewrite=rewrites.get(task),
                        extra={"domain": domain},
                    )
                )
    build.counts["conversations"] = len(numbers)
    ordered = (
        (ten_split(turn.conversation_id), turn)
        for domain in DOMAINS
        for turn in sorted(turns[domain], key=lambda turn: int(turn.conversation_id))
    )
    build.write_splits(SPLITS, ordered)
    build.write_corpus(mtrag_passages(build), 366_459)


def mtrag_passages(build: Build) -> Iterator[dict]:
    def members(names: list[str]) -> list[str]:
        return [n for n in names if n.endswith(".jsonl") and not n.startswith("__MACOSX")]

    for domain in DOMAINS:
        path = build.paths[f"{domain}_passages"]
        for row in zip_rows(path, members) if path.endswith(".zip") else jsonl_rows(path):
            title, text = squeeze(row.get("title") or ""), row.text("text")
            head, _, rest = text.partition("\n")  # indexed texts begin with their title's line
            text = squeeze(rest if squeeze(head) == title else text)
            build.counts[f"{domain} passages"] += 1
            yield {"id": row.text("_id"), "title": title, "text": text, "domain": domain}


# ----------------------------------------------------------------------------------- TREC CAsT


@dataclass
class CastConfig(PublicConfig):
    """TREC CAsT"""

    relevant_from: int = 1
    """lowest grade of a gold passage or document; the qrels keep the official grades"""


@dataclass
class Cast19Config(CastConfig):
    """`prepare.py cast19`"""

    duplicates: str = ""
    """the track's duplicate_list_v1.0.txt: leave out what it lists; empty: keep all"""


@dataclass
class Cast20Config(Cast19Config):
    """`prepare.py cast20`"""

    responses: Literal["automatic", "manual"] = "automatic"
    """whose canonical passages are the answers in the contexts"""


def cast19(cfg: Cast19Config, build: Build) -> None:
    """TREC CAsT 2019: manual rewrites, graded qrels, MS MARCO and TREC CAR; no answers."""
    rewrites = {key: squeeze(text) for key, text in tab_pairs(build.paths["rewrites"])}
    turns = [turn for turn, _ in cast_turns(build.paths["topics"])]
    for turn in turns:
        turn.rewrite = rewrites.get(turn.query_id)
    write_cast_passages(cfg, build, {})
    write_judged(cfg, build, turns)


def cast20(cfg: Cast20Config, build: Build) -> None:
    """TREC CAsT 2020: as cast19, with the canonical passage of each turn as its answer."""
    manual = {turn.query_id: row for turn, row in cast_turns(build.paths["manual"])}
    turns, answer_of = [], {}
    for turn, row in cast_turns(build.paths["topics"]):
        if turn.query_id not in manual:
            raise row.error(f"turn {turn.turn} is not in {build.paths['manual']}; fetch both again")
        other = manual[turn.query_id]
        turn.rewrite = other.squeezed("manual_rewritten_utterance")
        turn.extra = {"automatic_rewrite": row.squeezed("automatic_rewritten_utterance")}
        canonical = row if cfg.responses == "automatic" else other
        answer_of[turn.query_id] = canonical.text(f"{cfg.responses}_canonical_result_id")
        turns.append(turn)
    texts = write_cast_passages(cfg, build, dict.fromkeys(answer_of.values(), ""))
    for turn in turns:
        turn.answer = texts[answer_of[turn.query_id]] or None
    write_judged(cfg, build, turns)


def cast_turns(path: str) -> Iterator[tuple[Turn, Row]]:
    """(turn without history and golds, its row); a topic's turns in the order of their numbers."""
    for topic in array_rows(path):
        number, rows = topic.text("number"), topic.rows("turn")
        by_turn = {row.number("number"): row for row in rows}
        if len(by_turn) < len(rows):
            raise topic.error(f"topic {number} has two turns of one number; fetch the file again")
        for turn, row in sorted(by_turn.items()):
            question = row.squeezed("raw_utterance")
            yield Turn(f"{number}_{turn}", number, turn, [], question, []), row


def write_cast_passages(cfg: Cast19Config, build: Build, texts: dict[str, str]) -> dict[str, str]:
    """MS MARCO and TREC CAR as the corpus; fills in `texts`, whose keys are passage ids."""
    build.golds |= texts.keys() | relevant(cfg, build)
    left_out = copies(cfg.duplicates) if cfg.duplicates else set()

    def passages() -> Iterator[dict]:
        for key, text in chain(marco_passages(build), car_passages(build)):
            if key in left_out:
                build.counts["duplicates_left_out"] += 1
                continue
            if key in texts:
                texts[key] = squeeze(text)
            yield {"id": key, "contents": text}

    build.write_corpus(passages(), 38_600_000)
    return texts


def tab_pairs(path: str) -> Iterator[tuple[str, str]]:
    """(first column, rest) of the lines of a file that have a tab between them."""
    for number, line in read_lines(path):
        key, tab, text = line.partition("\t")
        if not tab or not key.strip():
            raise DataError(f"{path}:{number}: id, tab and text are expected, not {line[:60]!r}")
        yield key.strip(), text.strip()


def marco_passages(build: Build) -> Iterator[tuple[str, str]]:
    for key, text in tab_pairs(build.paths["marco"]):
        build.counts["marco_passages"] += 1
        yield f"MARCO_{key}", text


def car_passages(build: Build) -> Iterator[tuple[str, str]]:
    """TREC CAR's paragraphs, read by the package that its authors publish for the format."""
    try:
        from trec_car.read_data import iter_paragraphs
    except ImportError as e:
        raise DataError(
            f"{build.paths['car']}: TREC CAR's format is read by its authors' package; pip install "
            "trec-car-tools"
        ) from e
    with open(build.paths["car"], "rb") as f:
        for paragraph in iter_paragraphs(f):
            build.counts["car_passages"] += 1
            yield f"CAR_{paragraph.para_id}", paragraph.get_text()


def copies(path: str) -> set[str]:
    """What a duplicates file of the track lists behind the passage or document that is kept."""
    return {c.strip() for _, line in read_lines(path) for c in line.partition(":")[2].split(",")}


def read_grades(path: str) -> dict[str, dict[str, int]]:
    """Query id → passage or document id → grade, of the track's qrels."""
    grades: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path):
        columns = line.split()
        if len(columns) != 4 or not re.fullmatch(r"-?\d+", columns[3]):
            raise DataError(
                f"{path}:{number}: {line[:80]!r}; query, 0, passage and grade are expected"
            )
        grades.setdefault(columns[0], {})[columns[2]] = int(columns[3])
    return grades


def relevant(cfg: CastConfig, build: Build) -> set[str]:
    """All passages or documents judged relevant."""
    grades = read_grades(build.paths["qrels"]).values()
    return {key for gains in grades for key, grade in gains.items() if grade >= cfg.relevant_from}


def write_judged(cfg: CastConfig, build: Build, turns: list[Turn]) -> None:
    """The judged turns with their history as test.jsonl; test.qrels has the official grades."""
    grades = read_grades(build.paths["qrels"])
    build.counts["turns"] = len(turns)

    def judged() -> Iterator[tuple[str, Turn]]:
        for turn in with_history(turns):
            if gains := grades.get(turn.query_id):
                golds = [key for key, grade in gains.items() if grade >= cfg.relevant_from]
                yield "test", replace(turn, gold_ids=golds)

    build.write_splits(("test",), judged())
    build.check("judged turns that are in the topics", build.counts["test_turns"], len(grades))
    with atomic_write(f"{build.folder}/test.qrels") as f:
        for query, gains in grades.items():
            f.writelines(f"{query} 0 {key} {grade}\n" for key, grade in gains.items())


def cast21(cfg: CastConfig, build: Build) -> None:
    """TREC CAsT 2021: MS MARCO documents, KILT, the Washington Post; its qrels judge documents.

    Passage ids are DOCUMENT-N, as in the track's runs; gold_ids are documents. (Passage numbers
    differed between versions of the splitter, so NIST judged documents.) `evaluate.py
    documents=true` scores a document by its best passage. MARCO's duplicates and the repeated ids
    of the Washington Post are left out, as the track says.
    """
    made = os.path.join(cfg.source, "passages")
    if not os.path.isdir(made) or not os.listdir(made):
        raise DataError(
            f"source={cfg.source}: the passages are missing:\n{build.known['passages']}"
        )
    build.golds |= relevant(cfg, build)
    marco_copies = {f"MARCO_{copy}" for copy in copies(build.paths["duplicates"])}
    news: set[str] = (
        set()
    )  # articles of the Washington Post: the one collection that repeats its ids

    def passages() -> Iterator[dict]:
        for file in sorted(os.listdir(made), key=natural):
            for location, document, title, parts in cast_documents(os.path.join(made, file)):
                collection = document.partition("_")[0]
                if collection not in ("MARCO", "KILT", "WAPO"):
                    raise DataError(
                        f"{location}: document {document!r}; ids begin with MARCO_, KILT_ or WAPO_"
                    )
                build.counts[f"{collection} documents"] += 1
                if document in marco_copies or document in news:
                    build.counts["duplicates_left_out"] += 1
                    continue
                if collection == "WAPO":
                    news.add(document)
                build.golds.discard(document)
                for number, text in parts:
                    yield {
                        "id": f"{document}-{number}",
                        "title": squeeze(title),
                        "text": squeeze(text),
                    }

    build.write_corpus(passages(), 40_000_000)
    turns = []
    for turn, row in cast_turns(build.paths["topics"]):
        turn.answer = row.squeezed("passage")
        turn.rewrite = row.squeezed("manual_rewritten_utterance")
        turn.extra = {"automatic_rewrite": row.squeezed("automatic_rewritten_utterance")}
        turns.append(turn)
    write_judged(cfg, build, turns)


def natural(name: str) -> list:
    """Sorts file 9 before file 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


PASSAGE = re.compile(r"<passage id=\"?(\d+)\"?>", re.IGNORECASE)


def cast_documents(path: str) -> Iterator[tuple[str, str, str, list[tuple[int, str]]]]:
    """(location, document id, title, [(passage number, text)]) of a file of the track's tool.

    Its two forms: JSONL with `contents` a list of `{"body", "id"}`, and TREC web (of 2021 and of
    2022, which differ in capitals and in whether passages count from 0 or 1: the numbers are taken
    as they stand).
    """
    if path.endswith(".jsonl"):
        for row in jsonl_rows(path):
            document, title = row.text("id"), row.text("title")
            parts = [(part.number("id"), part.text("body")) for part in row.rows("contents")]
            yield row.location, document, title, parts
        return
    if not path.endswith(".trecweb"):
        raise DataError(
            f"{path}: the track's tool writes .jsonl or .trecweb; take other files out of passages/"
        )
    document, title, parts = "", "", []
    passage: int | None = None
    body: list[str] = []
    for number, line in read_lines(path):
        if passage is not None:
            if line.strip().lower() == "</passage>":
                parts.append((passage, "\n".join(body)))
                passage = None
            else:
                body.append(line)
        elif found := PASSAGE.fullmatch(line.strip()):
            passage, body = int(found[1]), []
        elif line.startswith("<DOCNO>"):
            document, title, parts = (
                line.removeprefix("<DOCNO>").partition("</DOCNO>")[0].strip(),
                "",
                [],
            )
        elif line.startswith("<TITLE>"):
            title = line.removeprefix("<TITLE>").partition("</TITLE>")[0]
        elif line.strip() == "</DOC>":
            if not document:
                raise DataError(
                    f"{path}:{number}: a document ends that had no <DOCNO>; make the file again"
                )
            yield f"{path}:{number}", document, title, parts
            document = ""
    if document or passage is not None:
        raise DataError(f"{path}: the file ends inside document {document!r}; make it again")


SETS = {
    "topiocqa": (DevConfig, topiocqa),
    "qrecc": (DevConfig, qrecc),
    "canard": (PublicConfig, canard),
    "mtrag": (PublicConfig, mtrag),
    "cast19": (Cast19Config, cast19),
    "cast20": (Cast20Config, cast20),
    "cast21": (CastConfig, cast21),
}
