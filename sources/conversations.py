"""Public conversational-search data sets → corpus, turns and qrels: TopiOCQA, QReCC, CANARD, MTRAG, TREC CAsT.

A file of its own because each data set is a set of rules about one publisher's files; what they share stands in
`official.py`, and `prepare.py` only lists them as commands.  Counts and checksums are compared with the published ones,
and a missing file is named with its address.  A turn's human rewrite goes to `rewrite`, other published ones beside it.

`COMMANDS`, at the end: name → (configuration, function).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Iterator, Literal

from data import DataError, read_jsonl, read_lines, Turn
from runs import atomic_write, write_jsonl
from sources.files import (get, held_out, make_public, Official, open_zip, PublicConfig, Published,
                           read_array, read_tsv, read_zip, squeeze, write_corpus, write_splits)

ZENODO = "https://zenodo.org/records/{}/files/{}?download=1"


# ----------------------------------------------------------------------------------------------------------- topiocqa

TOPIOCQA = {
    **{f"{split}_turns": Official((f"topiocqa_{split}.json", f"downloads/data/topiocqa_dataset/{split}.json"),
                                  ZENODO.format(7709644, f"topiocqa_{split}.json")) for split in ("train", "dev")},
    **{f"{split}_{what}": Official((f"retriever/{folder}/{split}.json",
                                    f"downloads/data/retriever/{folder}/{split}.json"),
                                   ZENODO.format(6151011, f"data/retriever/{folder}/{split}.json"),
                                   optional=what == "rewrites")
       for split in ("train", "dev") for what, folder in (("golds", "all_history"), ("rewrites", "rewrites_t5_qrecc"))},
    "passages": Official(("full_wiki_segments.tsv", "downloads/data/wikipedia_split/full_wiki_segments.tsv"),
                         ZENODO.format(6149599, "data/wikipedia_split/full_wiki_segments.tsv")),
}
TOPIOCQA_COUNTS = {"passages": 25_700_592, "train_turns": 45_450, "train_conversations": 3509, "test_turns": 2514,
                   "test_conversations": 205}


@dataclass
class TopiocqaConfig(PublicConfig):
    """`prepare.py topiocqa`"""

    dev_percent: int = 0
    """share of the training conversations put aside as dev, to validate on; the official dev set is the papers' test"""


def topiocqa(cfg: TopiocqaConfig) -> dict:
    """TopiOCQA from the five official files; its dev set, which the papers test on, becomes test.

    The gold is the first positive passage alone; ` [SEP] ` in a title becomes a space; ids are the TSV's.  There are no
    human rewrites; where retriever/rewrites_t5_qrecc/ lies there too, its rewrites go to `t5_rewrite`.
    """
    golds: set[str] = set()

    def turns(paths: dict[str, str], official: str, split: str) -> Iterator[tuple[str, Turn]]:
        beside = {what: read_array(paths[f"{official}_{what}"]) for what in ("golds", "rewrites")
                  if f"{official}_{what}" in paths}
        for where, row in read_array(paths[f"{official}_turns"]):
            number, turn = get(row, "Conversation_no", where), get(row, "Turn_no", where, int)
            for what, other in beside.items():
                other_where, found = next(other, (paths[f"{official}_{what}"], {}))
                key = (str(found.get("conv_id")), str(found.get("turn_id")))
                if key != (number, str(turn)):
                    raise DataError(f"{other_where}: conversation and turn are {key} where {where} has "
                                    f"{(number, str(turn))}; the two files go row by row: fetch both again")
                if what == "golds":
                    gold, gold_where = found, other_where
                else:
                    rewrite = {"t5_rewrite": get(found, "question", other_where)}
            context = get(row, "Context", where, list)
            if len(context) != 2 * (turn - 1) or not all(isinstance(s, str) for s in context):
                raise DataError(f"{where}: turn {turn} has {len(context)} texts of context, not {2 * (turn - 1)}")
            positives = get(gold, "positive_ctxs", gold_where, list)
            if not positives:
                raise DataError(f"{gold_where}: no positive passage; every published turn has one")
            golds.add(gold_id := get(positives[0], "passage_id", gold_where))
            conversation = f"topiocqa-{official}_{number}"
            yield "dev" if split == "train" and held_out(conversation, cfg.dev_percent) else split, Turn(
                f"{conversation}_{turn}", conversation, turn, list(zip(context[::2], context[1::2])),
                get(row, "Question", where), [gold_id], answer=get(row, "Answer", where),
                extra={"topic": get(row, "Topic", where), "topic_section": get(row, "Topic_section", where)}
                | (rewrite if "rewrites" in beside else {}))
        for rest in (next(other, None) for other in beside.values()):
            if rest is not None:
                raise DataError(f"{rest[0]}: more rows than {paths[f'{official}_turns']}; fetch both again")

    def passages(path: str) -> Iterator[dict]:
        for i, (where, row) in enumerate(read_tsv(path)):
            if i == 0 and [c.strip().lower() for c in row] == ["id", "text", "title"]:
                continue
            if len(row) != 3:
                raise DataError(f"{where}: {len(row)} columns; the file has id, text and title: fetch it again")
            golds.discard(row[0])
            yield {"id": row[0], "title": row[2].replace(" [SEP] ", " "), "text": row[1]}

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        why = "a file is cut off or of another version"
        names = ("train", "dev") if cfg.dev_percent else ("train",)
        counts = write_splits(folder, names, turns(paths, "train", "train"))
        counts |= write_splits(folder, ("test",), turns(paths, "dev", "test"))
        for what in ("turns", "conversations"):
            for key, found in ((f"train_{what}", sum(counts[f"{n}_{what}"] for n in names)),
                               (f"test_{what}", counts[f"test_{what}"])):
                published.check(key, found, TOPIOCQA_COUNTS[key], why)
        counts["passages"] = write_corpus(f"{folder}/corpus.jsonl", passages(paths["passages"]),
                                          TOPIOCQA_COUNTS["passages"], "topiocqa passages")
        published.check("passages", counts["passages"], TOPIOCQA_COUNTS["passages"], why)
        published.check("gold passages not in the corpus", len(golds), 0,
                        f"for example {min(golds, default='')}; {why}")
        return counts

    return make_public(cfg, "topiocqa", TOPIOCQA, write)


# -------------------------------------------------------------------------------------------------------------- qrecc

QRECC = {
    **{f"{split}_turns": Official((f"scai-qrecc21-{name}-turns.json",),
                                  ZENODO.format(5543685, f"scai-qrecc21-{name}-turns.json"))
       for split, name in (("train", "training"), ("test", "test"))},
    "passages": Official(("passages.zip",), ZENODO.format(5115890, "passages.zip")),
}
QRECC_COUNTS = {"passages": 54_573_064, "train_rows": 63_501, "test_rows": 16_451,
                "train_turns": 29_596, "test_turns": 8209}


@dataclass
class QreccConfig(PublicConfig):
    """`prepare.py qrecc`"""

    dev_percent: int = 0
    """share of the training conversations put aside as dev, to validate on"""


def qrecc_members(archive: zipfile.ZipFile) -> list[str]:
    """The archive's JSONL members in the order that numbers the passages: commoncrawl, then all of wayback, as stored.

    wayback-backfill is not put last: ConvSearch-R1's published numbering takes it for a part of wayback.
    """
    files = [n for n in archive.namelist() if n.endswith(".jsonl")]
    wayback = [n for n in files if "wayback" in n]
    commoncrawl = [n for n in files if "commoncrawl" in n and "wayback" not in n]
    if not wayback or not commoncrawl or len(wayback) + len(commoncrawl) != len(files):
        raise DataError(f"{archive.filename}: {len(files)} JSONL members, {len(commoncrawl)} under commoncrawl and "
                        f"{len(wayback)} under wayback; both are expected and nothing else: fetch passages.zip again")
    return commoncrawl + wayback


def qrecc(cfg: QreccConfig) -> dict:
    """QReCC from SCAI's turn files and the passage archive.

    Passage ids are running numbers from 0 (`qrecc_members`); line n + 1 of raw_ids.txt is the raw id of passage n,
    through which other numberings can be mapped.  A turn without gold is not written but stays in later contexts, where
    an empty answer reads UNANSWERABLE.  Blank passages are kept (331,474 were counted before us).
    """
    numbers: dict[str, str] = {}  # raw id → passage id, of gold passages alone
    tally: Counter = Counter()

    def rows(paths: dict[str, str], split: str) -> Iterator[tuple[str, list[str], Turn]]:
        """(split, raw gold ids, turn without gold_ids) of every row of a turn file."""
        context: list[tuple[str, str]] = []
        before, seen = (None, 0), set()
        for where, row in read_array(paths[f"{split}_turns"]):
            number, turn = get(row, "Conversation_no", where), get(row, "Turn_no", where, int)
            if number != before[0]:
                if number in seen:  # its context would be lost
                    raise DataError(f"{where}: conversation {number} goes on after another one; the published file "
                                    "keeps its turns together: fetch it again")
                seen.add(number)
                context, before = [], (number, 0)
            if turn != before[1] + 1:
                raise DataError(f"{where}: turn {turn} of conversation {number} follows turn {before[1]}; "
                                "the published file numbers them one by one: fetch it again")
            before = (number, turn)
            question, answer = get(row, "Question", where), get(row, "Truth_answer", where)
            raw = get(row, "Truth_passages", where, list)
            conversation = f"QReCC-{split.capitalize()}_{number}"
            name = "dev" if split == "train" and held_out(conversation, cfg.dev_percent) else split
            extra = {"source": get(row, "Conversation_source", where)}
            if row.get("Transformer_rewrite"):
                extra["transformer_rewrite"] = row["Transformer_rewrite"]
            yield name, list(dict.fromkeys(raw)), Turn(
                f"{conversation}_{turn}", conversation, turn, list(context), question, [],
                answer=answer or "UNANSWERABLE", rewrite=get(row, "Truth_rewrite", where), extra=extra)
            context.append((question, answer or "UNANSWERABLE"))

    def turns(paths: dict[str, str], split: str) -> Iterator[tuple[str, Turn]]:
        for name, raw, turn in rows(paths, split):
            golds = [numbers[r] for r in raw if numbers[r]]
            if golds:
                yield name, dataclasses.replace(turn, gold_ids=golds)

    def passages(path: str, raw_ids) -> Iterator[dict]:
        with open_zip(path) as archive:
            number = 0
            for member in qrecc_members(archive):
                for where, row in read_zip(archive, member):
                    raw, text = get(row, "id", where), get(row, "contents", where)
                    if raw in numbers:
                        tally["gold raw ids that occur twice"] += bool(numbers[raw])
                        numbers[raw] = str(number)  # the last one, as published
                    raw_ids.write(raw.replace("\n", " ") + "\n")
                    tally["blank_passages"] += not text.strip()
                    yield {"id": str(number), "contents": text}
                    number += 1

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        why = "a file is cut off or of another version"
        table7 = "; the paper's Table 7 says 8,124, its latency table 8,209"
        for split in ("train", "test"):
            for _, raw, _ in rows(paths, split):
                tally[f"{split}_rows"] += 1
                tally[f"{split}_turns"] += bool(raw)
                numbers.update(dict.fromkeys(raw, ""))
            for key in (f"{split}_rows", f"{split}_turns"):
                published.check(key, tally[key], QRECC_COUNTS[key], why + table7 * (key == "test_turns"))
        with atomic_write(f"{folder}/raw_ids.txt") as raw_ids:
            counts = {"passages": write_corpus(f"{folder}/corpus.jsonl", passages(paths["passages"], raw_ids),
                                               QRECC_COUNTS["passages"], "qrecc passages")}
        published.check("passages", counts["passages"], QRECC_COUNTS["passages"], "the archive is of another version")
        counts["blank_passages"] = tally["blank_passages"]
        lost = [raw for raw, number in numbers.items() if not number]
        published.check("gold passages not in the archive", len(lost), 0,
                        f"for example {min(lost, default='')}: the archive is of another version")
        names = ("train", "dev") if cfg.dev_percent else ("train",)
        counts |= write_splits(folder, names, turns(paths, "train"))
        counts |= write_splits(folder, ("test",), turns(paths, "test"))
        return counts | {key: tally[key] for key in ("train_rows", "test_rows", "gold raw ids that occur twice")}

    return make_public(cfg, "qrecc", QRECC, write)


# ------------------------------------------------------------------------------------------------------------- canard

CANARD = {"turns": Official(
    ("dev.json", "CANARD_Release/dev.json", "data/release/dev.json"),
    "https://github.com/aagohary/canard/raw/da8639cee97a50b3c62dc4d7e800c93675731186/data/release/dev.json",
    "fafd9f53be0684fd33f85f6bf12a63e61b835ecb9e987c9bd2186149366ce2e5")}
CANARD_COUNTS = {"passages": 2257, "train_turns": 1357, "dev_turns": 264, "test_turns": 656}
NO_PASSAGE = re.compile(r"i don'?t know\.?|cannotanswer|yes|no", re.IGNORECASE)


@dataclass
class CanardConfig(PublicConfig):
    """`prepare.py canard`"""


def ten_split(key: str) -> str:
    """train for 0 to 5, dev for 6, test for 7 to 9: the md5 of `key` as a number, modulo 10."""
    splits = ("train",) * 6 + ("dev",) + ("test",) * 3
    return splits[int(hashlib.md5(key.encode()).hexdigest(), 16) % 10]


def canard(cfg: CanardConfig) -> dict:
    """CANARD's dev.json: the answers of its dialogues are the passages; split by article.

    Answers come from a dialogue's longest history, so its last turn has none and is left out; so are "I don't know",
    "CANNOTANSWER", "yes", "no" and answers of fewer than four words.  Question 1 is replaced by its rewrite everywhere.
    """
    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        dialogues: dict[str, list[dict]] = {}
        for where, row in read_array(paths["turns"]):
            history = [squeeze(str(s)) for s in get(row, "History", where, list)]
            if len(history) < 2 or len(history) % 2:
                raise DataError(f"{where}: a History of {len(history)} texts; article, section and pairs are expected")
            dialogues.setdefault(get(row, "QuAC_dialog_id", where), []).append(
                {"history": history, "turn": get(row, "Question_no", where, int),
                 "question": squeeze(get(row, "Question", where)), "rewrite": squeeze(get(row, "Rewrite", where))})
        passages: dict[tuple[str, str], str] = {}
        splits: list[tuple[str, Turn]] = []
        for dialogue, rows in dialogues.items():
            article, section, *said = max((r["history"] for r in rows), key=len)
            first = next((r["rewrite"] for r in rows if r["turn"] == 1), said[0] if said else "")
            pairs = list(zip([first, *said[2::2]], said[1::2]))
            title, golds = f"{article}, {section}", {}
            for n, (_, answer) in enumerate(pairs, 1):
                if not NO_PASSAGE.fullmatch(answer) and len(answer.split()) >= 4:
                    golds[n] = passages.setdefault((title, answer), f"canard-{len(passages):05d}")
            for row in rows:
                n = row["turn"]
                if n in golds:
                    splits.append((ten_split(article), Turn(
                        f"{dialogue}_q{n}", dialogue, n, pairs[:n - 1], first if n == 1 else row["question"],
                        [golds[n]], answer=pairs[n - 1][1], rewrite=row["rewrite"])))
        counts = {"passages": write_jsonl(f"{folder}/corpus.jsonl", (
            {"id": key, "title": title, "text": text} for (title, text), key in passages.items()))}
        counts |= write_splits(folder, ("train", "dev", "test"), splits)
        for key, number in CANARD_COUNTS.items():
            published.check(key, counts[key], number, "dev.json is of another version")
        return counts

    return make_public(cfg, "canard", CANARD, write)


# -------------------------------------------------------------------------------------------------------------- mtrag

DOMAINS = {"clapnq": 183_408, "cloud": 61_022, "fiqa": 49_607, "govt": 72_422}  # passages of each corpus
MTRAG_COUNTS = {"tasks": 842, "conversations": 110, "train_turns": 484, "dev_turns": 73, "test_turns": 220}
MTRAG_URL = "https://github.com/IBM/mt-rag-benchmark/raw/cc5b1d481b391181b89f7ced860308482e785463/"
MTRAG_SHA256 = {
    "clapnq/qrels/dev.tsv": "0766bc3e8fb6f515c34b33a97e568394303214915a2f835533705979b2303d97",
    "clapnq/clapnq_rewrite.jsonl": "7e510ceae50c1897797c79c51c6002b56d11c252843282b5c62ccfe88baab44e",
    "cloud/qrels/dev.tsv": "925635635bf0e60b20d8ea0b18160cff878897acf8e0bf54e7096cc0ade8bd3b",
    "cloud/cloud_rewrite.jsonl": "f999821b4179bd900a8c06fcf849a895f2a1eb56adb6ae10b5bc95bb468c6a4c",
    "fiqa/qrels/dev.tsv": "a10ec0b5cba634d6c4ad02dd86de715a258ebd313dbcf5fa2d0a77bb0e121abc",
    "fiqa/fiqa_rewrite.jsonl": "88706f60953539e3927b05e3e6c20b39e4d9211df9247cd7de4035ae50ac5f15",
    "govt/qrels/dev.tsv": "46acb9b882297b6ff68978a56fd4ec57ea1c340cd604c62787a9ad69ac880d34",
    "govt/govt_rewrite.jsonl": "d84cf9f1598875a5cd28616a6648155948072c27363a31c85a51050cf4078835",
}


def _mtrag_files() -> dict[str, Official]:
    def file(path: str, digest: str = "") -> Official:  # the repository once called its folder `human`
        return Official((f"mtrag-human/{path}", f"human/{path}"), f"{MTRAG_URL}mtrag-human/{path}", digest)

    files = {"tasks": file("generation_tasks/reference.jsonl")}
    for domain in DOMAINS:
        for what, name in (("qrels", f"{domain}/qrels/dev.tsv"), ("rewrites", f"{domain}/{domain}_rewrite.jsonl")):
            files[f"{domain}_{what}"] = file(f"retrieval_tasks/{name}", MTRAG_SHA256[name])
        path = f"corpora/passage_level/{domain}.jsonl"
        files[f"{domain}_passages"] = Official((f"{path}.zip", path), f"{MTRAG_URL}{path}.zip")
    return files


MTRAG = _mtrag_files()


@dataclass
class MtragConfig(PublicConfig):
    """`prepare.py mtrag`"""


def mtrag(cfg: MtragConfig) -> dict:
    """MTRAG's human conversations with the full passage corpora of its four domains; split by conversation.

    `source` is a copy of github.com/IBM/mt-rag-benchmark.  Conversations are numbered from 1 in the order of
    reference.jsonl; the md5 of that number splits them.  The rewrites are Mixtral's, not a human's.
    """
    golds: dict[str, dict[str, int]] = {}
    domains: dict[str, str] = {}  # by task

    def passages(paths: dict[str, str], tally: Counter) -> Iterator[dict]:
        for domain in DOMAINS:
            path = paths[f"{domain}_passages"]
            if path.endswith(".zip"):
                with open_zip(path) as archive:
                    members = [n for n in archive.namelist() if n.endswith(".jsonl") and not n.startswith("__MACOSX")]
                    if len(members) != 1:
                        raise DataError(f"{path}: {len(members)} JSONL members; one is expected: fetch it again")
                    yield from mtrag_passages(read_zip(archive, members[0]), domain, tally)
            else:
                yield from mtrag_passages(((f"{path}:{n}", row) for n, row in read_jsonl(path)), domain, tally)

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        rewrites: dict[str, str] = {}
        for domain in DOMAINS:
            for i, (where, row) in enumerate(read_tsv(paths[f"{domain}_qrels"])):
                if i and (len(row) != 3 or not row[2].strip().isdigit()):
                    raise DataError(f"{where}: {row}; query-id, corpus-id and score are expected")
                if i and int(row[2]):
                    golds.setdefault(row[0], {})[row[1]] = int(row[2])
                    domains[row[0]] = domain
            for number, row in read_jsonl(paths[f"{domain}_rewrites"]):
                where = f"{paths[f'{domain}_rewrites']}:{number}"
                rewrites[get(row, "_id", where)] = squeeze(get(row, "text", where).removeprefix("|user|:"))
        numbers: dict[str, int] = {}
        turns: list[tuple[int, int, str, Turn]] = []
        tasks = 0
        for line, row in read_jsonl(paths["tasks"]):
            where, tasks = f"{paths['tasks']}:{line}", tasks + 1
            number = numbers.setdefault(get(row, "conversation_id", where), len(numbers) + 1)
            task, turn = get(row, "task_id", where), get(row, "turn", where)
            if not turn.isdigit() or not int(turn):
                raise DataError(f"{where}: turn {turn!r} is no number from 1")
            turn = int(turn)
            said = [(get(m, "speaker", where), squeeze(get(m, "text", where))) for m in get(row, "input", where, list)]
            if [s for s, _ in said] != ["user", "agent"] * (turn - 1) + ["user"]:
                raise DataError(f"{where}: the speakers of turn {turn} do not alternate: {[s for s, _ in said]}")
            if task not in golds:
                continue
            domain, texts = domains[task], [t for _, t in said]
            targets = get(row, "targets", where, list)
            turns.append((list(DOMAINS).index(domain), number, ten_split(str(number)), Turn(
                task.replace("<::>", "_"), str(number), turn, list(zip(texts[::2], texts[1::2])), texts[-1],
                list(golds[task]), answer=squeeze(get(targets[0], "text", where)) if targets else None,
                rewrite=rewrites.get(task), extra={"domain": domain})))
        turns.sort(key=lambda t: t[:2])  # stable: the turns of a conversation stay in order
        counts = {"tasks": tasks, "conversations": len(numbers)}
        counts |= write_splits(folder, ("train", "dev", "test"), ((name, turn) for _, _, name, turn in turns))
        for key, expected in MTRAG_COUNTS.items():
            published.check(key, counts[key], expected, "a file is of another version")
        tally: Counter = Counter()
        missing = {g for gains in golds.values() for g in gains}

        def checked() -> Iterator[dict]:
            for passage in passages(paths, tally):
                missing.discard(passage["id"])
                yield passage

        counts["passages"] = write_corpus(f"{folder}/corpus.jsonl", checked(), sum(DOMAINS.values()), "mtrag passages")
        for domain, expected in DOMAINS.items():
            published.check(f"{domain} passages", tally[domain], expected, "the corpus is of another version")
        published.check("gold passages not in the corpora", len(missing), 0,
                        f"for example {min(missing, default='')}: the corpora must be those of passage_level")
        return counts

    return make_public(cfg, "mtrag", MTRAG, write)


def mtrag_passages(rows: Iterable[tuple[str, dict]], domain: str, tally: Counter) -> Iterator[dict]:
    for where, row in rows:
        title, text = squeeze(row.get("title") or ""), get(row, "text", where)
        head, _, rest = text.partition("\n")  # the texts that were indexed begin with their title's line
        tally[domain] += 1
        text = squeeze(rest if squeeze(head) == title else text)
        yield {"id": get(row, "_id", where), "title": title, "text": text, "domain": domain}


# ------------------------------------------------------------------------------------------------------ TREC CAsT

CAST_URL = "https://github.com/daltonj/treccastweb/raw/33846610b736da392efeab00e4c6f4519e0dacf1/"
MARCO_PASSAGES = 8_841_823


def _cast_file(path: str, digest: str) -> Official:
    return Official((path, os.path.basename(path)), CAST_URL + path, digest)


CAST_CORPORA = {
    "marco": Official(("collection.tsv",), "https://msmarco.blob.core.windows.net/msmarcoranking/collection.tar.gz",
                      note="unpack it there"),
    "car": Official(("dedup.articles-paragraphs.cbor", "paragraphCorpus/dedup.articles-paragraphs.cbor"),
                    "http://trec-car.cs.unh.edu/datareleases/v2.0/paragraphCorpus.v2.0.tar.xz", note="unpack it there"),
}
CAST19 = {
    "topics": _cast_file("2019/data/evaluation/evaluation_topics_v1.0.json",
                         "7cd4ba25e56dd3cde21ddb2c34143b57612fba0ac85c670bc7ba73b901ede48a"),
    "rewrites": _cast_file("2019/data/evaluation/evaluation_topics_annotated_resolved_v1.0.tsv",
                           "d137a656a4644b38b573ae613f69420b5512d71cf0efc00a6d66fd773a4d4589"),
    "qrels": _cast_file("2019/data/2019qrels.txt", "c23b1e00d09e10382e7f7712ff59adb2a1831f1fa0db2f944d2dda5ad890d625"),
    **CAST_CORPORA,
}
CAST20 = {
    "topics": _cast_file("2020/2020_automatic_evaluation_topics_v1.0.json",
                         "0b88ea0a1d81214cadea7fd29d0a1b0342d2c5c756e9123511752ba276f94bf8"),
    "manual": _cast_file("2020/2020_manual_evaluation_topics_v1.0.json",
                         "d75c85bc316c4f8ffa9faff7ee8920450e4c22b5d5a969db42d647e6fd8ef29c"),
    "qrels": _cast_file("2020/2020qrels.txt", "184255be120bfd1dc8d99ebf833e59d9b28531a91659f8d35df0607dcae6db84"),
    **CAST_CORPORA,
}


@dataclass
class Cast19Config(PublicConfig):
    """`prepare.py cast19`"""

    duplicates: str = ""
    """the track's duplicate_list_v1.0.txt: leave out the MARCO passages it lists; empty: keep all"""
    relevant_from: int = 1
    """lowest grade of a gold passage; the qrels keep the official grades whatever this says"""


@dataclass
class Cast20Config(Cast19Config):
    """`prepare.py cast20`"""

    responses: Literal["automatic", "manual"] = "automatic"
    """whose canonical passages are the answers in the contexts"""


def cast19(cfg: Cast19Config) -> dict:
    """TREC CAsT 2019: topics with manual rewrites, graded qrels, MS MARCO and TREC CAR; no answers in its contexts."""
    def topics(paths: dict[str, str]) -> Iterator[dict]:
        rewrites = {}
        for number, line in read_lines(paths["rewrites"]):
            key, tab, text = line.partition("\t")
            if not tab:
                raise DataError(f"{paths['rewrites']}:{number}: turn id, tab, rewrite are expected, not {line[:60]!r}")
            rewrites[key.strip()] = squeeze(text)
        for where, topic in read_array(paths["topics"]):
            for turn in get(topic, "turn", where, list):
                key = f"{get(topic, 'number', where)}_{get(turn, 'number', where)}"
                yield {"topic": get(topic, "number", where), "key": key, "turn": get(turn, "number", where, int),
                       "question": squeeze(get(turn, "raw_utterance", where)), "rewrite": rewrites.get(key)}

    return make_public(cfg, "cast19", CAST19,
                       lambda paths, *rest: write_cast(cfg, "cast19", topics(paths), paths, *rest))


def cast20(cfg: Cast20Config) -> dict:
    """TREC CAsT 2020: as cast19, with the canonical passage of each turn as its answer."""
    def topics(paths: dict[str, str]) -> Iterator[dict]:
        manual = {(get(topic, "number", where), get(turn, "number", where)): turn
                  for where, topic in read_array(paths["manual"]) for turn in get(topic, "turn", where, list)}
        for where, topic in read_array(paths["topics"]):
            for turn in get(topic, "turn", where, list):
                number, n = get(topic, "number", where), get(turn, "number", where, int)
                other = manual.get((number, str(n)))
                if other is None:
                    raise DataError(f"{where}: turn {n} is not in {paths['manual']}; fetch both again")
                canonical = turn if cfg.responses == "automatic" else other
                yield {
                    "topic": number, "key": f"{number}_{n}", "turn": n,
                    "question": squeeze(get(turn, "raw_utterance", where)),
                    "rewrite": squeeze(get(other, "manual_rewritten_utterance", where)),
                    "automatic_rewrite": squeeze(get(turn, "automatic_rewritten_utterance", where)),
                    "response": get(canonical, f"{cfg.responses}_canonical_result_id", where)}

    return make_public(cfg, "cast20", CAST20,
                       lambda paths, *rest: write_cast(cfg, "cast20", topics(paths), paths, *rest))


def write_cast(cfg: Cast19Config, name: str, topics: Iterable[dict], paths: dict[str, str], folder: str,
               published: Published) -> dict:
    """Corpus (`MARCO_…` and `CAR_…` ids), judged turns as test.jsonl and the official grades as test.qrels."""
    said = list(topics)
    grades = read_grades(paths["qrels"])
    responses = {turn["response"]: "" for turn in said if turn.get("response")}
    golds = {p for gains in grades.values() for p, grade in gains.items() if grade >= cfg.relevant_from}
    tally: Counter = Counter()
    left_out = set()
    if cfg.duplicates:
        left_out = {d.strip() for _, line in read_lines(cfg.duplicates) for d in line.partition(":")[2].split(",")}

    def passages() -> Iterator[dict]:
        for number, line in read_lines(paths["marco"]):
            key, tab, text = line.partition("\t")
            if not tab or not key.strip().isdigit():
                raise DataError(f"{paths['marco']}:{number}: number, tab, passage are expected, not {line[:60]!r}")
            tally["marco_passages"] += 1
            yield {"id": f"MARCO_{key.strip()}", "contents": text.strip()}
        for key, text in car_paragraphs(paths["car"]):
            tally["car_passages"] += 1
            yield {"id": f"CAR_{key}", "contents": text}

    def kept() -> Iterator[dict]:
        for passage in passages():
            if passage["id"] in left_out:
                tally["duplicates_left_out"] += 1
                continue
            if passage["id"] in responses:
                responses[passage["id"]] = squeeze(passage["contents"])
            golds.discard(passage["id"])
            yield passage

    counts = {"passages": write_corpus(f"{folder}/corpus.jsonl", kept(), 38_600_000, f"{name} passages"), **tally}
    published.check("marco_passages", tally["marco_passages"], MARCO_PASSAGES, "collection.tsv is cut off")
    lost = golds | {key for key, text in responses.items() if not text}
    published.check("judged or canonical passages not in the corpus", len(lost), 0,
                    f"for example {min(lost, default='')}: a corpus file is cut off or of another version")

    def turns() -> Iterator[tuple[str, Turn]]:
        context: list[tuple[str, str]] = []
        topic = None
        for turn in said:
            context = context if turn["topic"] == topic else []
            topic, answer = turn["topic"], responses.get(turn.get("response"), "")
            if turn["key"] in grades:
                relevant = [p for p, grade in grades[turn["key"]].items() if grade >= cfg.relevant_from]
                yield "test", Turn(turn["key"], topic, turn["turn"], list(context), turn["question"], relevant,
                                   answer=answer or None, rewrite=turn["rewrite"],
                                   extra={k: turn[k] for k in ("automatic_rewrite",) if k in turn})
            context = [*context, (turn["question"], answer)]

    counts |= write_splits(folder, ("test",), turns())
    published.check("judged turns that are in the topics", counts["test_turns"], len(grades), "topics and qrels differ")
    write_grades(f"{folder}/test.qrels", grades)
    return counts | {"turns": len(said)}


def read_grades(path: str) -> dict[str, dict[str, int]]:
    """Query id → passage or document id → grade, of the track's qrels."""
    grades: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path):
        columns = line.split()
        if len(columns) != 4 or not re.fullmatch(r"-?\d+", columns[3]):
            raise DataError(f"{path}:{number}: {line[:80]!r}; query, 0, passage and grade are expected")
        grades.setdefault(columns[0], {})[columns[2]] = int(columns[3])
    return grades


def write_grades(path: str, grades: dict[str, dict[str, int]]) -> None:
    with atomic_write(path) as f:
        f.writelines(f"{key} 0 {p} {grade}\n" for key, gains in grades.items() for p, grade in gains.items())


def car_paragraphs(path: str) -> Iterator[tuple[str, str]]:
    """(id, text) of TREC CAR's paragraphs, read by the package that its authors publish for the format."""
    try:
        from trec_car.read_data import iter_paragraphs
    except ImportError as e:
        raise DataError(f"{path}: TREC CAR's format is read by its authors' package; pip install trec-car-tools") from e
    with open(path, "rb") as f:
        for paragraph in iter_paragraphs(f):
            yield str(paragraph.para_id), paragraph.get_text()

# ------------------------------------------------------------------------------------------------------ TREC CAsT 2021

CAST21 = {
    "topics": _cast_file("2021/2021_manual_evaluation_topics_v1.0.json",
                         "928af52d98fa1708c3b1eca5c459bd96b031f41cedf5505c328ecbeba24947a8"),
    "qrels": _cast_file("2021/trec-cast-qrels-docs.2021.qrel",
                        "6bb6b94b3fc2c232e3ecd9bcc91466be87c87dec72d8461c436b90df3b5eaeb1"),
    "duplicates": _cast_file("2021/duplicate_files/marco_duplicates.txt",
                             "1ff527a87bb13af4d2caa612b4dea5ff58920f9ca3cf534b69ea98b08005339e"),
}
CAST21_COUNTS = {"turns": 239, "test_turns": 158, "MARCO documents": 3_213_835, "KILT documents": 5_903_530}
CAST21_PASSAGES = """  passages/*.jsonl or passages/*.trecweb  (made by the track's own tool: nothing else splits as
    it does, and a passage is named by its place in that splitting)
    1. msmarco-docs.tsv.gz from https://msmarco.blob.core.windows.net/msmarcoranking/msmarco-docs.tsv.gz,
       kilt_knowledgesource.json from http://dl.fbaipublicfiles.com/KILT/kilt_knowledgesource.json and
       WashingtonPost.v4.tar.gz from https://trec.nist.gov/data/wapost/ (after an agreement with NIST)
    2. git clone https://github.com/grill-lab/trec-cast-tools && cd trec-cast-tools/corpus_processing
       pip install -r requirements.txt && touch none
       python3 main.py --skip_process_marco_v2 --output_type jsonlines --duplicates_file none \\
         --kilt_collection KILT --wapo_collection WAPO
       python3 -c 'from generators.marco_v1_generator import MARCO_v1_Generator as M; from passage_chunkers import *;
       from utils import *; process_batch("MARCO_v1", M("MSMARCO-DOCS", "none").generate_documents(), PassageChunker(),
       "jsonlines", "files/jsonlines", "files/md5_hashes")'
    3. put files/jsonlines/*.jsonl into passages/"""


@dataclass
class Cast21Config(PublicConfig):
    """`prepare.py cast21`"""

    relevant_from: int = 1
    """lowest grade of a gold document; the qrels keep the official grades whatever this says"""


def cast21(cfg: Cast21Config) -> dict:
    """TREC CAsT 2021: passages of MS MARCO documents, KILT and the Washington Post; its qrels judge documents.

    Passage ids are DOCUMENT-N, as in the track's runs; gold_ids are documents.  (Passage numbers differed between
    versions of the splitter, so NIST judged documents.)  `evaluate.py documents=true` scores a document by its best
    passage.  MARCO's duplicates and the repeated ids of the Washington Post are left out, as the track says.
    """
    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        made = os.path.join(cfg.source, "passages")
        if not os.path.isdir(made) or not os.listdir(made):
            raise DataError(f"source={cfg.source}: the passages are missing:\n{CAST21_PASSAGES}")
        files = sorted(os.listdir(made), key=lambda n: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", n)])
        grades = read_grades(paths["qrels"])
        golds = {d for gains in grades.values() for d, grade in gains.items() if grade >= cfg.relevant_from}
        copies = {f"MARCO_{copy.strip()}" for _, line in read_lines(paths["duplicates"])
                  for copy in line.partition(":")[2].split(",")}
        tally: Counter = Counter()
        news: set[str] = set()  # ids of the Washington Post's articles: the one collection that repeats them

        def passages() -> Iterator[dict]:
            for file in files:
                for where, document, title, parts in cast_documents(os.path.join(made, file)):
                    collection = document.partition("_")[0]
                    if collection not in ("MARCO", "KILT", "WAPO"):
                        raise DataError(f"{where}: document {document!r}; ids begin with MARCO_, KILT_ or WAPO_")
                    tally[f"{collection} documents"] += 1
                    if document in copies or document in news:
                        tally["duplicates_left_out"] += 1
                        continue
                    if collection == "WAPO":
                        news.add(document)
                    golds.discard(document)
                    for number, text in parts:
                        yield {"id": f"{document}-{number}", "title": squeeze(title), "text": squeeze(text)}

        counts = {"passages": write_corpus(f"{folder}/corpus.jsonl", passages(), 40_000_000, "cast21 passages")}
        counts |= tally
        why = "a file of passages/ is missing (the tool numbers them from 0) or the tool left duplicates out itself"
        for key in ("MARCO documents", "KILT documents"):
            published.check(key, tally[key], CAST21_COUNTS[key], why)
        published.check("relevant documents without passages", len(golds), 0,
                        f"for example {min(golds, default='')}: {why}")

        def turns() -> Iterator[tuple[str, Turn]]:
            for where, topic in read_array(paths["topics"]):
                context: list[tuple[str, str]] = []
                for turn in get(topic, "turn", where, list):
                    number, n = get(topic, "number", where), get(turn, "number", where, int)
                    key, question = f"{number}_{n}", squeeze(get(turn, "raw_utterance", where))
                    answer = squeeze(get(turn, "passage", where))
                    tally["turns"] += 1
                    if key in grades:
                        relevant = [d for d, grade in grades[key].items() if grade >= cfg.relevant_from]
                        yield "test", Turn(
                            key, number, n, list(context), question, relevant, answer=answer,
                            rewrite=squeeze(get(turn, "manual_rewritten_utterance", where)),
                            extra={"automatic_rewrite": squeeze(get(turn, "automatic_rewritten_utterance", where))})
                    context.append((question, answer))

        counts |= write_splits(folder, ("test",), turns()) | {"turns": tally["turns"]}
        for key in ("turns", "test_turns"):
            published.check(key, counts[key], CAST21_COUNTS[key], "a file is cut off or of another version")
        write_grades(f"{folder}/test.qrels", grades)
        return counts

    return make_public(cfg, "cast21", CAST21, write)


PASSAGE = re.compile(r"<passage id=\"?(\d+)\"?>", re.IGNORECASE)


def cast_documents(path: str) -> Iterator[tuple[str, str, str, list[tuple[int, str]]]]:
    """(where, document id, title, [(passage number, text)]) of a file of the track's tool, a document at a time.

    Its two forms: JSONL with `contents` a list of `{"body", "id"}`, and TREC web (of 2021 and of 2022, which differ in
    capitals and in whether passages count from 0 or 1: the numbers are taken as they stand).
    """
    if path.endswith(".jsonl"):
        for number, row in read_jsonl(path):
            where = f"{path}:{number}"
            yield where, get(row, "id", where), get(row, "title", where), [
                (get(part, "id", where, int), get(part, "body", where)) for part in get(row, "contents", where, list)]
        return
    if not path.endswith(".trecweb"):
        raise DataError(f"{path}: the track's tool writes .jsonl or .trecweb; take other files out of passages/")
    document = title = passage = None
    parts: list[tuple[int, str]] = []
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if passage is not None:
            if line.strip().lower() == "</passage>":
                parts.append((passage, "\n".join(body)))
                passage = None
            else:
                body.append(line)
        elif found := PASSAGE.fullmatch(line.strip()):
            passage, body = int(found[1]), []
        elif line.startswith("<DOCNO>"):
            document, title, parts = line.removeprefix("<DOCNO>").partition("</DOCNO>")[0].strip(), "", []
        elif line.startswith("<TITLE>"):
            title = line.removeprefix("<TITLE>").partition("</TITLE>")[0]
        elif line.strip() == "</DOC>":
            if not document:
                raise DataError(f"{where}: a document ends that had no <DOCNO>; make the file again")
            yield where, document, title, parts
            document = None
    if document or passage is not None:
        raise DataError(f"{path}: the file ends inside document {document!r}; make it again")


# ------------------------------------------------------------------------------------------------------- sub-commands

COMMANDS = {
    "topiocqa": (TopiocqaConfig, topiocqa),
    "qrecc": (QreccConfig, qrecc),
    "canard": (CanardConfig, canard),
    "mtrag": (MtragConfig, mtrag),
    "cast19": (Cast19Config, cast19),
    "cast20": (Cast20Config, cast20),
    "cast21": (Cast21Config, cast21),
}
