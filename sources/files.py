"""Official files of public data sets: find, check and read them; write corpus, splits and qrels.

`published.yaml` lists each set's files and counts.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import os
import sys
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Collection, Iterable, Iterator

import yaml

from config import between, check_given, save_config
from data import (
    DataError,
    Question,
    Row,
    Turn,
    item_id,
    one_line,
    open_input,
    parse_object,
    read_array,
    read_jsonl,
    read_lines,
)
from runs import Progress, atomic_folder, atomic_write, only_writer, read_json, write_json
from runs import write_jsonl

SPLITS = ("train", "dev", "test")
CUT_OFF = "the file is cut off or of another version"


# ---- output folders


def sha256(*paths: str) -> str:
    """Hexadecimal sha256 of the concatenated files."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def make_once(cfg: Any, made: dict, write: Callable[[str], dict]) -> dict:
    """Create folder `cfg.out` atomically with `write(folder)`, and return the dict of that.

    made.json stores `made`; a folder made with the same `made` is kept. DataError: the folder
    holds other files, or the result is empty.
    """
    check_given(cfg, "out")
    if earlier := already_made(cfg.out, made):
        return {"out": cfg.out, **earlier, "already_there": True}
    parent, name = os.path.split(cfg.out.rstrip("/"))
    with only_writer(parent or ".", name), atomic_folder(cfg.out) as folder:
        result = write(folder)
        save_config(cfg, f"{folder}/config.yaml")
        sizes = {name: os.path.getsize(f"{folder}/{name}") for name in sorted(os.listdir(folder))}
        rows = [name for name in sizes if name.endswith(".jsonl")]
        rows = [name for name in rows if name != "corpus.jsonl"] or rows
        if rows and not any(sizes[name] for name in rows):
            raise DataError(f"out={cfg.out}: the result would be empty; are the files cut off?")
        write_json(f"{folder}/made.json", made | {"result": result, "files": sizes})
    return {"out": cfg.out, **result, "already_there": False}


def already_made(out: str, made: dict) -> dict | None:
    """The stored result if `out` was made with the same `made`, else None."""
    if not os.path.exists(out):
        return None
    held = set(os.listdir(out)) if os.path.isdir(out) else {os.path.basename(out)}
    stamp = Row()
    with contextlib.suppress(DataError):  # damaged
        stamp = read_json(f"{out}/made.json") or stamp
    files = stamp.object("files") if stamp.get("command") == made["command"] else {}
    if foreign := held - files.keys() - {"made.json"}:
        raise DataError(
            f"out={out} holds {min(foreign)!r}, not written by `prepare.py {made['command']}`; "
            "nothing is overwritten: give a new folder or remove this one"
        )
    sizes = {name: os.path.getsize(f"{out}/{name}") for name in held - {"made.json"}}
    return stamp.object("result") if sizes == files and made.items() <= stamp.items() else None


# ---- public sets


@dataclass
class PublicConfig:
    """Options of all public sets."""

    source: str
    """folder with the official files, as published or as the set's own downloader saves them"""
    out: str
    """folder to write: corpus.jsonl, and .jsonl and .qrels of each split"""
    strict: bool = True
    """stop if a count or checksum is not the published one; false: record it in made.json"""
    download: bool = False
    """download missing files into `source`; an interrupted download is resumed"""

    def split(self, official: str, key: str) -> str:
        """The split of a conversation or question."""
        return official


@dataclass
class DevConfig(PublicConfig):
    """Options of sets without a dev split of their own: the official dev set becomes test."""

    dev_percent: Annotated[int, between(0, 99)] = 0
    """percentage of the training conversations or questions that become dev"""

    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.dev_percent else ("train", "test")

    def split(self, official: str, key: str) -> str:
        if official != "train":
            return "test"
        return "dev" if bucket(key, 100) < self.dev_percent else "train"


@functools.cache
def published() -> dict[str, dict]:
    """published.yaml: data set → counts and files."""
    with open(os.path.join(os.path.dirname(__file__), "published.yaml"), encoding="utf-8") as f:
        return yaml.safe_load(f)


class Build:
    """The making of one data set: its input paths, output folder and counts."""

    def __init__(self, name: str, cfg: PublicConfig, folder: str):
        self.name, self.cfg, self.folder, self.known = name, cfg, folder, published()[name]
        self.counts: Counter = Counter()
        self.unchecked = dict(self.known.get("counts", {}))
        self.golds: set[str] = set()  # gold ids not yet seen in the corpus
        self.differences: dict[str, dict] = {}
        files = dict(self.known["files"])
        if not getattr(cfg, "train", True):
            del files["train"], self.unchecked["train questions"]
        self.paths = self.find_files(files)

    def find_files(self, files: dict[str, dict]) -> dict[str, str]:
        """Path of each official file. DataError lists all missing ones."""
        paths, missing = {}, []
        for key, file in files.items():
            places = [os.path.join(self.cfg.source, name) for name in file["names"]]
            url = file.get("url", file["names"][0])
            url = url if "://" in url else self.known["base"] + url
            found = next(filter(os.path.isfile, places), None)
            if found is None and self.cfg.download and not file.keys() & {"note", "optional"}:
                found = places[0]
                fetch(url, found)
            if found:
                paths[key] = found
                if known := file.get("sha256"):
                    self.check(f"sha256 of {found}", sha256(found), known)
            elif not file.get("optional"):
                note = f"  ({file['note']})" if "note" in file else ""
                missing.append(f"\n  {places[0]}  from  {url}{note}")
        if missing:
            raise DataError(
                f"source={self.cfg.source}: files are missing; fetch them by hand, or try "
                f"download=true:{''.join(missing)}"
            )
        return paths

    def check(self, what: str, found: int | str, expected: int | str, why: str = CUT_OFF) -> None:
        """Where the values differ, raise DataError if strict, else record it."""
        if found == expected:
            return
        shown = [f"{n:,}" if isinstance(n, int) else n for n in (found, expected)]
        text = f"{what}: {shown[0]} found but {shown[1]} published; {why}"
        if self.cfg.strict:
            raise DataError(f"{text}. strict=false goes on and records the difference in made.json")
        print(text, file=sys.stderr)
        self.differences[what] = {"found": found, "published": expected}

    def check_counts(self, keys: Collection[str]) -> None:
        """Check these counts once; a dev split taken from train counts as train."""
        for key in [key for key in self.unchecked if key in keys]:
            dev = key.replace("train", "dev")
            found = self.counts[key] + (0 if dev in self.known["counts"] else self.counts[dev])
            self.check(key, found, self.unchecked.pop(key))

    def write_corpus(self, passages: Iterable[dict], total: int = 0) -> None:
        """Stream corpus.jsonl, then check counts and that no gold is missing."""

        def watched() -> Iterator[dict]:
            for passage in with_progress(passages, total or self.unchecked.get("passages", 0)):
                self.golds.discard(passage["id"])
                yield passage

        self.counts["passages"] = write_jsonl(f"{self.folder}/corpus.jsonl", watched())
        self.check_counts(self.counts)
        why = f"for example {min(self.golds)}: {CUT_OFF}" if self.golds else ""
        self.check("gold passages not in the corpus", len(self.golds), 0, why)

    def write_splits(
        self,
        names: Collection[str],
        rows: Iterable[tuple[str, Turn | Question]],
        judged: dict[str, dict[str, int]] | None = None,
    ) -> None:
        """Write `{split}.jsonl` from (official split, record) rows, and qrels if any is judged.

        `judged`: record id → passage id → grade; None: the turns' golds with grade 1.
        """
        every = list(rows)
        rows = [(s, r) for s, r in every if isinstance(r, Turn) or r.golden_answers and r.question]
        if len(rows) < len(every):  # nothing could be asked or scored
            self.counts["without_question_or_answer"] += len(every) - len(rows)
        ids = Counter(item_id(record) for _, record in rows)
        if twice := [key for key, count in ids.items() if count > 1]:
            raise DataError(f"id {twice[0]!r} occurs a second time; {CUT_OFF}")
        turns = isinstance(next((record for _, record in rows), None), Turn)
        if judged is None:
            judged = {turn.query_id: dict.fromkeys(turn.gold_ids, 1) for _, turn in rows}
        for name in names:
            records = {
                item_id(record): record
                for split, record in rows
                if self.cfg.split(split, record.conversation_id if turns else record.id) == name
            }
            write_jsonl(f"{self.folder}/{name}.jsonl", (r.record() for r in records.values()))
            grades = {key: judged[key] for key in records if judged.get(key)}
            if grades:
                with atomic_write(f"{self.folder}/{name}.qrels") as f:
                    for key, passages in grades.items():
                        f.writelines(f"{key} 0 {p} {grade}\n" for p, grade in passages.items())
            self.counts[f"{name}_turns" if turns else f"{name}_questions"] = len(records)
            if turns:
                conversations = {turn.conversation_id for turn in records.values()}
                self.counts[f"{name}_conversations"] = len(conversations)
                self.golds.update(*(turn.gold_ids for turn in records.values()))
            else:
                self.counts[f"{name}_judged"] = len(grades)
        self.check_counts(self.counts)


def make_public(name: str, write: Callable[[Build], None], cfg: PublicConfig) -> dict:
    """Make data set `name` in `cfg.out` unless it is there; returns its counts."""
    config = dataclasses.asdict(cfg) | {"out": "", "download": False}
    made = {"command": name, "config": config, "rules": 1}

    def fill(folder: str) -> dict:
        build = Build(name, cfg, folder)
        write(build)
        build.check_counts(build.unchecked)
        made["inputs"] = {
            key: {"path": path, "bytes": os.path.getsize(path)} for key, path in build.paths.items()
        }
        found = {"differs_from_published": build.differences} if build.differences else {}
        return dict(build.counts) | found

    return make_once(cfg, made, fill)


def with_progress(passages: Iterable[dict], total: int = 0) -> Iterator[dict]:
    progress = Progress(total, "corpus")
    for passage in passages:
        yield passage
        progress.update(1)
    progress.close()


def fetch(url: str, path: str) -> None:
    """Download `url` to `path` atomically, resuming from `path`.part."""
    import httpx2

    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part"
    done = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        with httpx2.stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=60
        ) as answer:
            if answer.status_code == 416:  # the part is complete or of another file
                os.remove(part)
            answer.raise_for_status()
            left = int(answer.headers.get("Content-Length", 0))
            progress = Progress(left, f"download {os.path.basename(path)}", "bytes")
            with open(part, "ab" if answer.status_code == 206 else "wb") as f:
                for block in answer.iter_raw():
                    f.write(block)
                    progress.update(len(block))
            progress.close()
    except (OSError, httpx2.HTTPError) as e:
        raise DataError(
            f"download of {url} failed ({str(e).splitlines()[0]}); run the same command again to "
            f"continue, or fetch it by hand to {path}"
        ) from e
    os.replace(part, path)


# ---- reading


def json_rows(path: str, members: Callable[[list[str]], list[str]] = list) -> Iterator[Row]:
    """Objects of a JSONL file, a JSON array or a zip of JSONL files.

    `members(names)` selects and orders the files of the zip.
    """
    if path.endswith(".zip"):
        yield from zip_rows(path, members)
        return
    with open_input(path) as f:
        array = f.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    for _, row in read_array(path) if array else read_jsonl(path):
        yield row


def zip_rows(path: str, members: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".jsonl")]
            for member in members([name for name in names if not name.startswith("__MACOSX")]):
                text = io.TextIOWrapper(archive.open(member), "utf-8-sig", newline="\n")
                for number, line in enumerate(text, 1):
                    location = f"{path}:{member}:{number}"
                    if line.strip():
                        yield parse_object(line, location)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error, UnicodeDecodeError) as e:
        raise DataError(f"{path}: {e}; the archive is broken or incomplete, fetch it again") from e


def table_rows(path: str) -> Iterator[Row]:
    """Rows of a TSV file with a header; fields may be quoted."""
    csv.field_size_limit(1 << 26)
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), delimiter="\t")
    try:
        header = [one_line(name) for name in next(reader, [])]
        for cells in filter(any, reader):
            row = Row(zip(header, cells), f"{path}:{reader.line_num}")
            if len(cells) != len(header):
                raise row.error(f"{len(cells)} columns where the first line has {len(header)}")
            yield row
    except csv.Error as e:
        raise DataError(f"{path}:{reader.line_num}: {e}; fetch the file again") from e


def tab_pairs(path: str) -> Iterator[tuple[str, str]]:
    """(first column, rest) of each line of a TSV file without header or quotes."""
    for number, line in read_lines(path):
        key, tab, text = line.partition("\t")
        if not tab or not key.strip():
            raise DataError(f"{path}:{number}: id, tab and text are expected, not {line[:60]!r}")
        yield key.strip(), text.strip()


def bucket(key: str, count: int) -> int:
    """md5 of `key`, modulo `count`."""
    return int(hashlib.md5(key.encode()).hexdigest(), 16) % count
