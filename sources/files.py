"""What every public data set needs: the files as their authors publish them, found or downloaded, checked and streamed.

A file of its own because `conversations.py`, `questions.py` and `prepare.py` all stand on it.

A data set is a table of `Official` files and a `write(paths, folder, published)` that `make_public` calls.  No list of
passages is ever held.  Every output folder appears whole or not at all, with the resolved config and `made.json` (what
made it) inside; a run that was killed starts over, and what it left behind is removed.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import glob
import hashlib
import http.client
import io
import json
import os
import shutil
import sys
import time
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

from config import save_config
from data import DataError, read_lines, _scrub, Turn
from runs import atomic_folder, atomic_write


# --------------------------------------------------------------------------------------------------- output folders

def sha256(*paths: str) -> str:
    """The sha256 of the files' bytes one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def already_made(out: str, made: dict) -> dict | None:
    """The earlier result where folder `out` holds exactly what `made` describes; None where it is to be (re)made.

    DataError: `out` holds files that are not this command's.
    """
    if not out:
        raise DataError("out is empty; give out=FOLDER")
    if not os.path.exists(out):
        return None
    held = set(os.listdir(out)) if os.path.isdir(out) else {"a file of that name"}
    stamp: dict = {}
    if "made.json" in held:
        with contextlib.suppress(ValueError), open(os.path.join(out, "made.json"), encoding="utf-8") as f:
            stamp = json.load(f)
    files = stamp.get("files", {})
    foreign = held - set(files) - {"made.json"} if stamp.get("command") == made["command"] else held
    if foreign:
        raise DataError(f"out={out} holds {min(foreign)!r}, which `prepare.py {made['command']}` did not write; "
                        "nothing is overwritten: give a new folder or remove this one")
    whole = all(name in held and os.path.getsize(os.path.join(out, name)) == size for name, size in files.items())
    return {"out": out, **stamp["result"], "already_there": True} if whole and made.items() <= stamp.items() else None


def remove_leftovers(out: str) -> None:
    """Delete the temporary folders of runs that were killed before they could do it themselves (kill -9, power cut)."""
    for path in glob.glob(glob.escape(out.rstrip("/")) + ".*.tmp"):
        pid, files = path.split(".")[-2], [path, *glob.glob(glob.escape(path) + "/*")]
        if pid.isdigit() and os.path.isdir(path) and time.time() - max(map(os.path.getmtime, files)) > 60:
            try:
                os.kill(int(pid), 0)  # asks only whether there is such a process
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass


@contextlib.contextmanager
def finished_folder(cfg, made: dict):
    """A temporary folder that becomes `cfg.out` at the end, with the config and `made` (the caller adds "result").

    DataError: not one turn or question in it (of a corpus alone: not one passage).
    """
    remove_leftovers(cfg.out)
    with atomic_folder(cfg.out) as folder:
        yield folder
        rows = {name: os.path.getsize(f"{folder}/{name}") for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")}
        asked = {name: size for name, size in rows.items() if name != "corpus.jsonl"} or rows
        if asked and not any(asked.values()):
            raise DataError(f"out={cfg.out}: the result would be empty: no input gave a row for {', '.join(asked)}; are the "
                            "files cut off?")
        save_config(cfg, f"{folder}/config.yaml")
        made["files"] = {name: os.path.getsize(f"{folder}/{name}") for name in sorted(os.listdir(folder))}
        with atomic_write(f"{folder}/made.json") as f:
            json.dump(made, f, indent=1)


def write_splits(folder: str, names: Iterable[str], turns: Iterable[tuple[str, Turn]]) -> dict[str, int]:
    """`{name}.jsonl` and `{name}.qrels` of (name, turn) pairs, streamed; the numbers of turns and conversations."""
    counts: dict[str, int] = {}
    conversations: dict[str, set[str]] = {name: set() for name in names}
    with contextlib.ExitStack() as stack:
        files = {key: stack.enter_context(atomic_write(f"{folder}/{key}"))
                 for name in names for key in (f"{name}.jsonl", f"{name}.qrels")}
        for name in names:
            counts[f"{name}_turns"] = 0
        for name, turn in turns:
            files[f"{name}.jsonl"].write(ENCODE(turn.record()) + "\n")
            files[f"{name}.qrels"].writelines(f"{turn.query_id} 0 {g} 1\n" for g in turn.gold_ids)
            counts[f"{name}_turns"] += 1
            conversations[name].add(turn.conversation_id)
    return {key: n for name in names for key, n in ((f"{name}_turns", counts[f"{name}_turns"]),
                                                    (f"{name}_conversations", len(conversations[name])))}


def write_corpus(path: str, passages: Iterable[dict], total: int, what: str) -> int:
    """`passages` as JSONL, streamed with a progress bar; their number."""
    from runs import Progress  # here, because it brings torch along
    bar, count = Progress(total, what), 0
    with atomic_write(path) as f:
        for passage in passages:
            f.write(ENCODE(passage) + "\n")
            count += 1
            if count % 5000 == 0:
                bar.update(5000)
    bar.update(count % 5000)
    bar.close()
    return count


ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# ------------------------------------------------------------------------------------------- files

@dataclass(frozen=True)
class Official:
    """A file as the authors of a data set publish it."""

    names: tuple[str, ...]  # where it may lie under `source`; a download goes to the first
    url: str  # of the file, or of the archive that holds it
    sha256: str = ""  # where known
    note: str = ""  # what to do by hand; such a file is not downloaded
    optional: bool = False  # used where it lies there, neither asked for nor downloaded


@dataclass
class PublicConfig:
    """What all public data sets share."""

    source: str
    """folder with the official files, as published or as the data set's own downloader lays them"""
    out: str
    """folder to write: corpus.jsonl, and .jsonl and .qrels of each split"""
    strict: bool = True
    """stop where a count or checksum is not the published one; false: go on, say it and record it in made.json"""
    download: bool = False
    """fetch missing files into `source` first; a broken download is continued"""


class Published:
    """What is found against what was published: a difference stops a strict run and is recorded in another."""

    def __init__(self, strict: bool):
        self.strict, self.differences = strict, {}

    def check(self, what: str, found: int | str, published: int | str, why: str) -> None:
        if found == published:
            return
        text = " but ".join(f"{n:,} {w}" if isinstance(n, int) else f"{n} {w}"
                            for n, w in ((found, "found"), (published, "published")))
        if self.strict:
            raise DataError(f"{what}: {text}; {why}. strict=false goes on and records the difference in made.json")
        print(f"{what}: {text}; {why}", file=sys.stderr)
        self.differences[what] = {"found": found, "published": published}


def fetch(url: str, path: str) -> None:
    """Download `url` to `path`, whole or not at all; `path`.part of a broken download is continued.

    DataError: no connection, a refusal, fewer bytes than announced, or other bytes than the server's own checksum
    (`Content-MD5`, where it sends one with a whole file) says.
    """
    from runs import Progress
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part"
    done = os.path.getsize(part) if os.path.exists(part) else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            done = done if answer.status == 206 else 0  # 200: the server starts over, so do we
            stated, digest = "" if done else answer.headers.get("Content-MD5") or "", hashlib.md5()
            left = int(answer.headers.get("Content-Length") or 0)
            bar, total = Progress(left, f"download {os.path.basename(path)}", "bytes"), done + left
            with open(part, "ab" if done else "wb") as f:
                while block := answer.read(1 << 20):
                    f.write(block)
                    digest.update(block)
                    done += len(block)
                    bar.update(len(block))
            bar.close()
    except (OSError, http.client.HTTPException) as e:
        if getattr(e, "code", 0) == 416 and e.headers.get("Content-Range") == f"bytes */{done}":
            os.replace(part, path)  # the break came after the last byte
            return
        raise DataError(f"download of {url} failed ({getattr(e, 'reason', e)}); run the same command again to "
                        f"continue, or fetch it by hand to {path}") from e
    if left and done != total:
        raise DataError(f"download of {url} broke off at {done:,} of {total:,} bytes; "
                        "run the same command again to continue")
    right = (digest.hexdigest(), base64.b64encode(digest.digest()).decode())  # both forms are in use
    if stated and stated.removeprefix("md5:") not in right:
        os.remove(part)
        raise DataError(f"download of {url}: its MD5 is {right[0]}, the server says {stated}; the bytes were damaged "
                        "on the way: run the same command again")
    os.replace(part, path)


def official_files(cfg: PublicConfig, files: dict[str, Official], published: Published) -> dict[str, str]:
    """Where each official file lies.  DataError that lists all missing ones with their addresses."""
    paths, missing = {}, []
    for key, file in files.items():
        places = [os.path.join(cfg.source, *name.split("/")) for name in file.names]
        found = next((p for p in places if os.path.isfile(p)), None)
        if found is None and file.optional:
            continue
        if found is None and cfg.download and not file.note:
            fetch(file.url, places[0])
            found = places[0]
        if found is None:
            missing.append(f"  {places[0]}  from  {file.url}{file.note and f'  ({file.note})'}")
            continue
        paths[key] = found
    if missing:
        hint = "by hand" if cfg.download else "by hand, or try download=true"
        raise DataError(f"source={cfg.source}: files are missing; fetch them {hint}:\n" + "\n".join(missing))
    for key, path in paths.items():
        if files[key].sha256:
            published.check(f"sha256 of {path}", sha256(path), files[key].sha256,
                            "another version, changed line ends or a broken copy")
    return paths


def make_public(cfg: PublicConfig, command: str, files: dict[str, Official],
                write: Callable[[dict[str, str], str, Published], dict]) -> dict:
    """The course that all public data sets take: done already? files, `write(paths, folder, published)`, made.json."""
    made = {"command": command, "config": dataclasses.asdict(cfg) | {"out": "", "download": False}, "rules": 1}
    done = already_made(cfg.out, made)
    if done:
        return done
    published = Published(cfg.strict)
    paths = official_files(cfg, files, published)
    with finished_folder(cfg, made) as folder:
        made["result"] = write(paths, folder, published)
        made["inputs"] = {key: {"path": path, "bytes": os.path.getsize(path)} for key, path in paths.items()}
        if published.differences:
            made["result"]["differs_from_published"] = published.differences
    return {"out": cfg.out, **made["result"], "already_there": False}


# ----------------------------------------------------------------------------------------- reading

def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def parse_object(text: str, where: str) -> dict:
    """The JSON object that `text` is."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not valid JSON ({e}): {text[:80]!r}; the file is broken, fetch it again") from e
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON object is expected, not {text[:40]!r}")
    return _scrub(value) if "\\ud" in text.lower() else value


def read_array(path: str, block: int = 1 << 20) -> Iterator[tuple[str, dict]]:
    """(where, object) of a file that is one JSON array of objects; `block` characters at a time, not the whole file."""
    try:
        f = open(path, encoding="utf-8-sig")
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}; give the path of an existing file") from e
    with f:
        text, at, number = "", 0, 0

        def more() -> bool:
            nonlocal text, at
            try:
                new = f.read(block)
            except UnicodeDecodeError as e:
                raise DataError(f"{path}: not UTF-8 after object {number} ({e.reason}); fetch the file again") from e
            text, at = text[at:] + new, 0
            return bool(new)

        def next_sign() -> str:
            nonlocal at
            while True:
                while at < len(text) and text[at] in " \t\r\n":
                    at += 1
                if at < len(text):
                    return text[at]
                if not more():
                    return ""

        if next_sign() != "[":
            raise DataError(f"{path}: a JSON array of objects is expected, but it begins with {text[:40]!r}")
        at += 1
        empty = next_sign() == "]"
        while not empty:
            where = f"{path}: object {number + 1}"
            if next_sign() != "{":
                raise DataError(f"{where}: a JSON object is expected, not {text[at:at + 40]!r}; fetch the file again")
            while True:
                try:
                    value, end = DECODER.raw_decode(text, at)
                    break
                except (ValueError, RecursionError) as e:
                    if len(text) - at > 1 << 26 or not more():
                        raise DataError(f"{where}: broken or cut off ({e}); fetch the file again") from e
            number += 1
            yield where, _scrub(value) if "\\ud" in text[at:end].lower() else value
            at = end
            sign = next_sign()
            if sign == "]":
                break
            at += 1
            if sign != ",":
                raise DataError(f"{where}: followed by {sign!r} instead of a comma or the end; fetch the file again")
        at += 1
        if next_sign():
            raise DataError(f"{path}: the array of {number} objects is followed by {text[at:at + 40]!r}; a file is one "
                            "array")


def read_tsv(path: str) -> Iterator[tuple[str, list[str]]]:
    """(where, columns) of a tab-separated file whose fields are quoted where they hold a tab, a quote or a line end."""
    csv.field_size_limit(1 << 26)
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), delimiter="\t")
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            raise DataError(f"{path}:{reader.line_num}: {e}; fetch the file again") from e
        if row:  # not a blank line, as one may stand at the end
            yield f"{path}:{reader.line_num}", row


def read_zip(archive: zipfile.ZipFile, member: str) -> Iterator[tuple[str, dict]]:
    """(where, object) of a JSONL member of a zip archive, unpacked as it is read."""
    try:
        with archive.open(member) as packed:
            for number, raw in enumerate(io.BufferedReader(packed, 1 << 20), 1):
                where = f"{archive.filename}:{member}:{number}"
                raw = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if raw:
                    yield where, parse_object(_utf8(raw, where), where)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error) as e:
        raise DataError(f"{archive.filename}: {member}: {e}; the archive is broken, fetch it again") from e


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: not UTF-8 at byte {e.start} ({e.reason}); fetch the file again") from e


def open_zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as e:
        raise DataError(f"{path}: {e}; the download is broken or incomplete, fetch it again") from e


def get(row: dict, key: str, where: str, kind: type = str) -> Any:
    """`row[key]`, which must be there and a `kind`; a number counts as a string."""
    value = row.get(key)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DataError(f"{where}: {key!r} is {str(value)[:60]!r}; the published format has a {kind.__name__} there "
                        f"(fields found: {', '.join(map(str, row))[:200]})")
    return value


def optional(row: dict, key: str, where: str) -> dict:
    """`row[key]`, an object or its JSON text; {} where it is absent or null."""
    value = row.get(key)
    if value is None or value == "":
        return {}
    return parse_object(value, f"{where}: {key}") if isinstance(value, str) else get(row, key, where, dict)


def squeeze(text: str) -> str:
    """White space collapsed."""
    return " ".join(text.split())


def held_out(conversation: str, percent: int) -> bool:
    """Whether a training conversation goes to dev: by the md5 of its id, the same in every run."""
    return int(hashlib.md5(conversation.encode()).hexdigest(), 16) % 100 < percent
