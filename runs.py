"""Run folders: atomic writes, locks, metrics, and settings that must not change."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from typing import Any, Iterable

import data
from config import ConfigError, to_dict
from data import DataError


@contextlib.contextmanager
def naming(path: str):
    """Name `path` in an OSError that names no file (full disk)."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or path
        raise


@contextlib.contextmanager
def atomic_write(path: str, mode: str = "w"):
    """Open a file that replaces `path` only if the block succeeds."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with naming(path), open(temporary, mode, **text) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(path: str):
    """Make a folder that replaces `path` only if the block succeeds."""
    path = path.rstrip("/")
    temporary, retired = f"{path}.{os.getpid()}.tmp", f"{path}.{os.getpid()}.old.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        yield temporary
        if os.path.isdir(path):
            shutil.rmtree(retired, ignore_errors=True)
            os.rename(path, retired)
        os.rename(temporary, path)
    except BaseException:
        if os.path.isdir(retired) and not os.path.exists(path):
            os.rename(retired, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def write_jsonl(path: str, rows: Iterable[dict]) -> int:
    """Write JSONL atomically; returns the row count. ValueError for NaN and infinity."""
    count = 0
    with atomic_write(path) as f:
        for count, row in enumerate(rows, 1):
            f.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    return count


def write_json(path: str, value: dict) -> None:
    with atomic_write(path) as f:
        json.dump(value, f, indent=1, ensure_ascii=False)


def read_json(path: str) -> data.Row | None:
    """A JSON file's object; None if the file is missing."""
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as f:
        return data.parse_object(f.read(), path)


class FolderInUse(DataError):
    """Another process writes here; its folder is left as it is."""

    leaves_note = False  # config.run


@contextlib.contextmanager
def only_writer(folder: str, name: str = ""):
    """Lock `folder`, or output `name` in it, and remove temporary files of killed processes.

    It takes an flock on the folder or `<name>.lock`; FolderInUse if another process has it. A
    folder created here is removed if it stays empty.
    """
    made = not os.path.isdir(folder)
    if made and os.path.exists(folder):
        raise DataError(f"{folder} is a file; name a folder")
    os.makedirs(folder, exist_ok=True)
    lock = os.path.join(folder, f"{name}.lock") if name else folder
    temporary = (rf"{re.escape(name)}(\.\w+)*" if name else ".*") + r"\.\d+(\.old)?\.tmp"
    handle = os.open(lock, os.O_CREAT if name else os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise FolderInUse(
                f"another process is writing {os.path.join(folder, name).rstrip('/')}; wait for "
                "it, or choose another name"
            ) from e
        for left in os.listdir(folder):
            if re.fullmatch(temporary, left):
                path = os.path.join(folder, left)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        try:
            yield
        finally:
            if name:
                os.remove(lock)
    finally:
        os.close(handle)
        if made and not os.listdir(folder):
            os.rmdir(folder)


# A config.yaml key that only this tool has, in every version.
OWN_KEYS = {
    "grpo.py": "group_size",
    "sft.py": "keep_per_turn",
    "retriever.py": "shard_size",
    "evaluate.py": "relevant_from",
}


def folder_owner(folder: str) -> str:
    """The tool that made a folder; "" if unknown."""
    if os.path.exists(os.path.join(folder, "made.json")):
        return "prepare.py"
    if any(os.path.exists(os.path.join(folder, kind, "meta.json")) for kind in ("dense", "bm25")):
        return "retriever.py"  # an index, maybe unfinished
    try:
        with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as f:
            keys = set(re.findall(r"^(\w+):", f.read(), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return ""
    return next((tool for tool, key in OWN_KEYS.items() if key in keys), "")


def claim_folder(out: str, tool: str) -> None:
    """ConfigError if `out` is a file or another tool's folder."""
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f"out={out} is a file; name a folder")
    if (owner := folder_owner(out)) not in ("", tool):
        raise ConfigError(
            f"out={out} was made by {owner}, and a folder belongs to the tool that made it; give "
            f"{tool} another one"
        )


def whole_rows(path: str) -> list[data.Row]:
    """The rows of a JSONL log, without a cut-off last line."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as f:
        lines = [line.decode("utf-8", "replace") for line in f if line.endswith(b"\n")]
    return [data.parse_object(line, f"{path}:{i}") for i, line in enumerate(lines, 1)]


def read_metrics(path: str) -> list[data.Row]:
    """The rows of a log; DataError if one lacks `step`."""
    rows = whole_rows(path)
    for row in rows:
        if not isinstance(row.get("step"), int):
            raise row.error("the row has no step; mend the line or move the file away")
    return rows


def begin_metrics(path: str, step: int | None) -> list[dict]:
    """Truncate a log before `step` (None: entirely); returns the rows with that of `step`."""
    rows = [row for row in read_metrics(path) if row["step"] <= step] if step is not None else []
    write_jsonl(path, (row for row in rows if row["step"] != step))
    return rows


def append_metrics(path: str, row: dict) -> None:
    """Append a row to a log; NaN and infinity become null."""
    lost = [key for key, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    finite = row | dict.fromkeys(lost)
    with naming(path), open(path, "a", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps(finite) + "\n")


def keep_steps(folder: str, done: int) -> None:
    """Remove all rollout files but the complete ones of steps 1 to `done`."""
    kept = {f"step_{step:06d}.jsonl" for step in range(1, done + 1)}
    for path in glob.glob(os.path.join(glob.escape(folder), "step_[0-9]*")):
        if os.path.basename(path) not in kept:
            os.remove(path)


BESIDE = r".*\.(jsonl(\..*)?|md|html|yaml|log|lock|tmp)"  # files that change no model or index


def fingerprint(path: str) -> str:
    """Digest of a file, or of a folder's files (no subfolders) and an adapter's base model.

    It reads size and evenly spaced blocks of 64 KiB: a file whole up to 256 MiB, 64 blocks of each
    file of a folder (training changes all weights), and its name. A path without files, such as a
    hub name, is returned.
    """
    inside = glob.glob(os.path.join(glob.escape(path), "*")) if path else []
    names = [p for p in sorted(inside) if os.path.isfile(p) and not re.fullmatch(BESIDE, p)]
    digest, block, most = hashlib.sha256(), 1 << 16, 64
    if os.path.isfile(path):
        names, most = [path], 4096
    if not names:
        return path
    for name in names:
        size = os.path.getsize(name)
        digest.update(f"{os.path.basename(name) if inside else ''} {size}\n".encode())
        with open(name, "rb") as f:
            for start in range(0, size, max(block, size // most)):
                f.seek(start)
                digest.update(f.read(block))
    if adapter := read_json(os.path.join(path, "adapter_config.json")):
        digest.update(fingerprint(adapter.get("base_model_name_or_path", "")).encode())
    return digest.hexdigest()[:16]


def path_with_digest(path: str | list[str]) -> dict:
    """A file or folder, or several, as a setting."""
    if isinstance(path, str):
        return {"path": path, "digest": fingerprint(path)}
    return {"path": ",".join(path), "digest": " ".join(map(fingerprint, path))}


def settings(cfg, keys: Iterable[str], files: Iterable[str]) -> dict:
    """A configuration's values of `keys`, by their dotted names; of `files` path and digest."""
    values = flat(to_dict(cfg))
    kept = {key: value for key, value in values.items() if key.partition(".")[0] in keys}
    return kept | {key: path_with_digest(values[key]) for key in files}


def flat(values: dict) -> dict:
    """{"a": {"b": 1}} → {"a.b": 1}; a file with its digest stays together."""
    out = {}
    for key, value in values.items():
        whole = not isinstance(value, dict) or not value or "digest" in value
        out |= {key: value} if whole else {f"{key}.{k}": v for k, v in flat(value).items()}
    return out


def changed_setting(before: dict, now: dict, defaults: dict | None = None) -> str:
    """Describe the first setting that changed, else ""; files are compared by digest.

    defaults: what a setting was that `before`, of an older version, does not have. Older versions
    stored files as [path, another digest]: the path is compared.
    """
    before = flat(defaults or {}) | flat(before)
    for key, new in flat(now).items():
        old = before.get(key)
        same = old == new
        if isinstance(new, dict) and "digest" in new:
            digest, new = new["digest"], new["path"]
            if isinstance(old, dict):
                same, old = old["digest"] == digest, old["path"]
            else:
                names = [*old[:1], ",".join(old)] if isinstance(old, list) else [old or ""]
                same = new in names
        if not same and old == new:
            return f"{key}={new!r} has other content"
        if not same:
            return f"{key} was {old!r} and is {new!r}"
    return ""


def begin_output(meta: str, now: dict, outputs: Iterable[str], cfg: Any) -> None:
    """Begin or continue an output: `outputs` are globs of its files, `meta` stores its settings.

    `cfg.overwrite` removes the files. DataError if there is output of other settings than `now`; a
    setting that an older version lacks was at its default in `cfg`.
    """
    there = [path for pattern in outputs for path in glob.glob(pattern)]
    for path in there if cfg.overwrite else []:
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    if cfg.overwrite or not any(map(os.path.getsize, there)):
        return write_json(meta, now)
    try:
        before = read_json(meta)
    except DataError as e:
        raise DataError(f"{e}; overwrite=true begins anew") from e
    if before is None:
        raise DataError(
            f"there is output, but no {meta}: it is another tool's; choose another output"
        )
    if change := changed_setting(before, now, to_dict(type(cfg)())):
        raise DataError(
            f"{meta}: this output was begun with other settings: {change}; choose another "
            "output, or overwrite=true to begin anew"
        )


class Progress:
    """A tqdm bar on a terminal; else a line every 30 s.

    Rate and time left are hidden before the share `enough` is done: a batch's responses end late.
    """

    EARLY = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<?]"

    def __init__(self, total: int, what: str, unit: str = "passages", enough: float = 0.0):
        from tqdm import tqdm

        self.enough, self.done = enough * total, 0
        self.started = self.said = time.monotonic()
        meter = {"total": total or None, "unit": f" {unit}"}  # 0: unknown
        self.line = functools.partial(tqdm.format_meter, prefix=what, **meter)
        self.bar = tqdm(desc=what, delay=2, smoothing=0, **meter) if sys.stderr.isatty() else None

    def update(self, n: int) -> None:
        self.done += n
        form, now = self.EARLY if self.done < self.enough else None, time.monotonic()
        if self.bar is not None:
            self.bar.bar_format = form
            self.bar.update(n)
        elif now - self.said >= 30:
            self.said = now
            shown = {"bar_format": form} if form else {"ncols": 0}
            line = self.line(self.done, elapsed=now - self.started, **shown)
            print(line, file=sys.stderr, flush=True)

    def reach(self, done: int, *_) -> None:
        """Advance to `done` in all (an engine's callback)."""
        self.update(max(0, done - self.done))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
