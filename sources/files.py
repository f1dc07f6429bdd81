"""The official files of public data sets: found or downloaded, checked and read.

`published.yaml` lists each set's files and counts. `make_public` finds the files and calls the
set's function, which writes corpus, turns or questions and qrels through a `Build`. Passages are
streamed, never held. An output folder appears whole or not at all, with the resolved config and
`made.json`, which says what made it.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import http.client
import io
import json
import os
import sys
import urllib.request
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Collection, Iterable, Iterator

import yaml

from config import between, save_config
from data import (
    DataError,
    Turn,
    as_text,
    as_texts,
    parse_object,
    read_array,
    read_jsonl,
    read_lines,
)
from runs import Progress, atomic_folder, atomic_write, only_writer

SPLITS = ("train", "dev", "test")
CUT_OFF = "the file is cut off or of another version"
ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# -------------------------------------------------------------------------------- output folders


def sha256(*paths: str) -> str:
    """The sha256 of the files' bytes one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def already_made(out: str, made: dict) -> dict | None:
    """The earlier result where folder `out` holds what `made` describes; None: it is to be made.

    DataError: `out` holds files that this command did not write.
    """
    if not out:
        raise DataError("out is empty; give out=FOLDER")
    if not os.path.exists(out):
        return None
    held = set(os.listdir(out)) if os.path.isdir(out) else {os.path.basename(out)}
    stamp: dict = {}
    with contextlib.suppress(OSError, ValueError), open(f"{out}/made.json", encoding="utf-8") as f:
        stamp = json.load(f)
    files = stamp.get("files", {}) if stamp.get("command") == made["command"] else {}
    if foreign := held - files.keys() - {"made.json"}:
        raise DataError(
            f"out={out} holds {min(foreign)!r}, not written by `prepare.py {made['command']}`; "
            "nothing is overwritten: give a new folder or remove this one"
        )
    whole = all(
        name in held and os.path.getsize(f"{out}/{name}") == size for name, size in files.items()
    )
    if whole and made.items() <= stamp.items():
        return {"out": out, **stamp["result"], "already_there": True}
    return None


@contextlib.contextmanager
def finished_folder(cfg, made: dict) -> Iterator[str]:
    """A temporary folder that becomes `cfg.out` at the end, with the config and `made`.

    The caller adds `made["result"]`. DataError: no turn or question in the folder (of a corpus
    alone: no passage), or another process is writing `cfg.out`.
    """
    parent, name = os.path.split(cfg.out.rstrip("/"))
    with only_writer(parent or ".", name), atomic_folder(cfg.out) as folder:
        yield folder
        sizes = {name: os.path.getsize(f"{folder}/{name}") for name in sorted(os.listdir(folder))}
        rows = [name for name in sizes if name.endswith(".jsonl")]
        asked = [name for name in rows if name != "corpus.jsonl"] or rows
        if asked and not any(sizes[name] for name in asked):
            raise DataError(
                f"out={cfg.out}: the result would be empty: no input gave a row for "
                f"{', '.join(asked)}; are the files cut off?"
            )
        save_config(cfg, f"{folder}/config.yaml")
        made["files"] = sizes | {"config.yaml": os.path.getsize(f"{folder}/config.yaml")}
        with atomic_write(f"{folder}/made.json") as f:
            json.dump(made, f, indent=1)


# --------------------------------------------------------------------------------- public sets


@dataclass
class PublicConfig:
    """What all public data sets share."""

    source: str
    """folder with the official files, as published or as the data set's own downloader lays them"""
    out: str
    """folder to write: corpus.jsonl, and .jsonl and .qrels of each split"""
    strict: bool = True
    """stop where a count or checksum is not the published one; false: record it in made.json"""
    download: bool = False
    """fetch missing files into `source` first; a broken download is continued"""


@dataclass
class DevConfig(PublicConfig):
    """Of sets that publish no dev split to validate on."""

    dev_percent: Annotated[int, between(0, 99)] = 0
    """share of the training conversations or questions put aside as dev, to validate on"""

    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.dev_percent else ("train", "test")

    def split(self, official: str, key: str) -> str:
        """Where a conversation or question goes; the official dev set is the papers' test."""
        if official == "train":
            return "dev" if bucket(key, 100) < self.dev_percent else "train"
        return "test"


@functools.cache
def published() -> dict[str, dict]:
    """Data set → its counts and files, from published.yaml."""
    with open(os.path.join(os.path.dirname(__file__), "published.yaml"), encoding="utf-8") as f:
        return yaml.safe_load(f)


class Build:
    """One data set in the making: where its files lie, where the result goes, what was counted."""

    def __init__(self, name: str, cfg: PublicConfig):
        self.name, self.cfg, self.known = name, cfg, published()[name]
        left_out = () if getattr(cfg, "train", True) else ("train", "train questions")
        self.files = {k: v for k, v in self.known["files"].items() if k not in left_out}
        counts = self.known.get("counts", {})
        self.published = {k: v for k, v in counts.items() if k not in left_out}
        self.counts: Counter = Counter()
        self.golds: set[str] = set()  # passages that the corpus must hold and was not seen to hold
        self.differences: dict[str, dict] = {}
        self.checked: set[str] = set()
        self.folder = ""
        self.paths = self.find_files()

    def find_files(self) -> dict[str, str]:
        """Where each official file lies; DataError that lists all missing ones."""
        paths, missing = {}, []
        for key, file in self.files.items():
            places = [os.path.join(self.cfg.source, name) for name in file["names"]]
            url = file["url"]
            url = url if "://" in url else self.known["base"] + url
            found = next(filter(os.path.isfile, places), None)
            if found is None and self.cfg.download and not file.keys() & {"note", "optional"}:
                fetch(url, places[0])
                found = places[0]
            if found:
                paths[key] = found
            elif not file.get("optional"):
                note = f"  ({file['note']})" if "note" in file else ""
                missing.append(f"  {places[0]}  from  {url}{note}")
        if missing:
            hint = "by hand" if self.cfg.download else "by hand, or try download=true"
            raise DataError(
                f"source={self.cfg.source}: files are missing; fetch them {hint}:\n"
                + "\n".join(missing)
            )
        for key, path in paths.items():
            if known := self.files[key].get("sha256"):
                self.check(f"sha256 of {path}", sha256(path), known)
        return paths

    def check(self, what: str, found: int | str, expected: int | str, why: str = CUT_OFF) -> None:
        """A difference from what was published stops a strict run; another records it."""
        if found == expected:
            return
        shown = [f"{n:,}" if isinstance(n, int) else n for n in (found, expected)]
        text = f"{what}: {shown[0]} found but {shown[1]} published; {why}"
        if self.cfg.strict:
            raise DataError(f"{text}. strict=false goes on and records the difference in made.json")
        print(text, file=sys.stderr)
        self.differences[what] = {"found": found, "published": expected}

    def check_counts(self, keys: Collection[str]) -> None:
        """Compare with the published counts, each once; an unpublished dev is a part of train."""
        counts, remarks = self.published, self.known.get("remarks", {})
        for key in [key for key in counts if key in keys and key not in self.checked]:
            dev = key.replace("train", "dev")
            found = self.counts[key] + (0 if dev in counts else self.counts[dev])
            why = f"{CUT_OFF}; {remarks[key]}" if key in remarks else CUT_OFF
            self.check(key, found, counts[key], why)
            self.checked.add(key)

    def write_corpus(self, passages: Iterable[dict], total: int = 0) -> None:
        """corpus.jsonl, streamed; then compare with the published counts and `golds`."""

        def watched() -> Iterator[dict]:
            for passage in passages:
                self.golds.discard(passage["id"])
                yield passage

        total = total or self.published.get("passages", 0)
        self.counts["passages"] = write_corpus(f"{self.folder}/corpus.jsonl", watched(), total)
        self.check_counts(self.counts)
        self.check_golds(self.golds)

    def check_golds(self, missing: Iterable[str]) -> None:
        lost = sorted(missing)
        why = f"for example {lost[0]}: {CUT_OFF}" if lost else ""
        self.check("gold passages not in the corpus", len(lost), 0, why)

    def write_splits(self, names: Collection[str], turns: Iterable[tuple[str, Turn]]) -> None:
        """`{split}.jsonl` and `.qrels` of (split, turn) pairs; the corpus must hold their golds."""
        conversations: dict[str, set[str]] = {name: set() for name in names}
        with contextlib.ExitStack() as stack:
            files = {
                file: stack.enter_context(atomic_write(f"{self.folder}/{file}"))
                for name in names
                for file in (f"{name}.jsonl", f"{name}.qrels")
            }
            for name in names:
                self.counts[f"{name}_turns"] = 0
            for name, turn in turns:
                files[f"{name}.jsonl"].write(ENCODE(turn.record()) + "\n")
                golds = (f"{turn.query_id} 0 {gold} 1\n" for gold in turn.gold_ids)
                files[f"{name}.qrels"].writelines(golds)
                self.counts[f"{name}_turns"] += 1
                self.golds.update(turn.gold_ids)
                conversations[name].add(turn.conversation_id)
        for name in names:
            self.counts[f"{name}_conversations"] = len(conversations[name])
        self.check_counts(self.counts)


def make_public(name: str, write: Callable[[Any, Build], None], cfg: PublicConfig) -> dict:
    """Make data set `name` in folder `cfg.out`, unless it is there already; the counts."""
    config = dataclasses.asdict(cfg) | {"out": "", "download": False}
    made = {"command": name, "config": config, "rules": 1}
    if done := already_made(cfg.out, made):
        return done
    build = Build(name, cfg)
    with finished_folder(cfg, made) as build.folder:
        write(cfg, build)
        build.check_counts(build.published)
        made["result"] = dict(build.counts)
        made["inputs"] = {
            key: {"path": path, "bytes": os.path.getsize(path)} for key, path in build.paths.items()
        }
        if build.differences:
            made["result"]["differs_from_published"] = build.differences
    return {"out": cfg.out, **made["result"], "already_there": False}


def write_corpus(path: str, passages: Iterable[dict], total: int = 0) -> int:
    """`passages` as JSONL, streamed with a progress bar; their number."""
    progress, count = Progress(total, "corpus"), 0
    with atomic_write(path) as f:
        for count, passage in enumerate(passages, 1):
            f.write(ENCODE(passage) + "\n")
            if count % 5000 == 0:
                progress.update(5000)
    progress.close()
    return count


def fetch(url: str, path: str) -> None:
    """Download `url` to `path`, whole or not at all; `path`.part of a broken download is continued.

    DataError: no connection, a refusal, or fewer bytes than announced.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part"
    done = os.path.getsize(part) if os.path.exists(part) else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            done = done if answer.status == 206 else 0  # 200: the server starts over, so do we
            left = int(answer.headers.get("Content-Length") or 0)
            total = done + left
            progress = Progress(left, f"download {os.path.basename(path)}", "bytes")
            with open(part, "ab" if done else "wb") as f:
                while block := answer.read(1 << 20):
                    f.write(block)
                    done += len(block)
                    progress.update(len(block))
            progress.close()
    except (OSError, http.client.HTTPException) as e:
        if getattr(e, "code", 0) == 416:  # nothing is left to fetch, or the part is of another file
            os.remove(part)
        raise DataError(
            f"download of {url} failed ({getattr(e, 'reason', e)}); run the same command again to "
            f"continue, or fetch it by hand to {path}"
        ) from e
    if left and done != total:
        raise DataError(
            f"download of {url} broke off at {done:,} of {total:,} bytes; run the same command "
            "again to continue"
        )
    os.replace(part, path)


# --------------------------------------------------------------------------------------- reading


class Row(dict):
    """A JSON object of a published file; a wrong field is a DataError with file and line."""

    def __init__(self, fields: dict, location: str):
        super().__init__(fields)
        self.location = location

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.location}: {problem}")

    def field(self, key: str, kind: type = str) -> Any:
        """`self[key]`, which must be there and a `kind`; a number is taken as its text."""
        value = self.get(key)
        found = as_text(value) if kind is str else value
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise self.error(
                f"{key!r} is {str(value)[:60]!r}; the published format has a {kind.__name__} "
                f"there (fields found: {', '.join(map(str, self))[:200]})"
            )
        return found

    def text(self, key: str) -> str:
        return self.field(key)

    def squeezed(self, key: str) -> str:
        """A text with its white space collapsed."""
        return squeeze(self.field(key))

    def number(self, key: str) -> int:
        return self.field(key, int)

    def texts(self, key: str) -> list[str]:
        """A list of texts, in which a number is taken as its text."""
        texts = as_texts(self.field(key, list))
        if texts is None:
            raise self.error(f"{key!r} is {str(self[key])[:60]!r}; a list of texts is expected")
        return texts

    def rows(self, key: str) -> list[Row]:
        """A list of objects."""
        values = self.field(key, list)
        if not all(isinstance(value, dict) for value in values):
            raise self.error(f"{key!r} is {str(values)[:60]!r}; a list of objects is expected")
        return [Row(value, self.location) for value in values]

    def object(self, key: str) -> Row:
        """An object or its JSON text; an empty one where it is absent or null."""
        value = self.get(key)
        if isinstance(value, str) and value:
            return Row(parse_object(value, f"{self.location}: {key}"), self.location)
        return Row(self.field(key, dict) if value else {}, self.location)


def array_rows(path: str) -> Iterator[Row]:
    """The objects of a file that is one JSON array."""
    return (Row(row, location) for location, row in read_array(path))


def jsonl_rows(path: str) -> Iterator[Row]:
    """The objects of a JSONL file, plain or packed by gzip."""
    return (Row(row, f"{path}:{number}") for number, row in read_jsonl(path))


def csv_rows(path: str, delimiter: str = "\t") -> Iterator[tuple[str, list[str]]]:
    """(location, columns) of a CSV or TSV file, whose fields may be quoted."""
    csv.field_size_limit(1 << 26)
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), delimiter=delimiter)
    try:
        for columns in reader:
            if columns:  # not a blank line
                yield f"{path}:{reader.line_num}", columns
    except csv.Error as e:
        raise DataError(f"{path}:{reader.line_num}: {e}; fetch the file again") from e


def zip_rows(path: str, members: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """The objects of JSONL files in a zip archive, unpacked as they are read.

    `members(names)`: which of the archive's files, and in which order.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in members(archive.namelist()):
                text = io.TextIOWrapper(archive.open(member), "utf-8-sig", newline="\n")
                for number, line in enumerate(text, 1):
                    location = f"{path}:{member}:{number}"
                    if line.strip():
                        yield Row(parse_object(line, location), location)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error, UnicodeDecodeError) as e:
        raise DataError(f"{path}: {e}; the archive is broken or incomplete, fetch it again") from e


def squeeze(text: str) -> str:
    """White space collapsed."""
    return " ".join(text.split())


def bucket(key: str, count: int) -> int:
    """0 to `count` - 1 by the md5 of `key`: the same in every run."""
    return int(hashlib.md5(key.encode()).hexdigest(), 16) % count
