"""Rewrites for a file of turns, or episodes for a file of questions: one JSONL line for every
(item, sample).

`task: rewrite`: a line holds query_id, sample, status, rewrite, think, response, tokens, end and a
digest of the prompt. `status`:

    ok            the response parses; `rewrite` is its rewrite, on one line
    malformed     it does not parse
    engine_error  the engine could not sample it (logits that are no numbers)
    too_long      the prompt exceeds `max_prompt_tokens` or the model's window: not sampled

For all but `ok` the rewrite is the raw question, so that every turn can be searched and is counted.

`task: search` or `agent`: a line is a trajectory (episode.trajectory_row: rollout_id, messages,
tools, rounds, tokens, pred, metric_score, …), whose `status` is the episode's end, or too_long;
`error` names a technical failure. Questions that could not be answered have their line too.

Under torchrun every process takes each world-th turn that is left and appends whole chunks to a
file of its own; at the end these are merged in the order of the input and renamed. Run again after
a kill it continues: lines that are there are not sampled again, a half-written last line is. Other
settings, another model or another prompt of the same turn are an error, so a file never mixes two
runs. Draws depend on seed, prompt and sample alone.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import torch
from transformers import AutoConfig, GenerationConfig

import data
import rollout
from config import ConfigError, above, at_least, check_ranges, run, save_config
from data import DataError, Question, Turn, item_id
from distributed import Dist, all_reduce_sum, broadcast_object, cleanup, print0, setup
from engines.base import EngineConfig, Rollout, Sampling
from episodes.episode import (
    END_STATES,
    FAILED,
    Episode,
    EpisodeConfig,
    check_episode,
    episode_reward,
    open_task,
    other_task,
    run_episodes,
    trajectory_row,
)
from episodes.tools import ToolsAway
from lora import ModelError, adapter_base
from model import load_tokenizer
from prompts import (
    decode_response,
    encode_chat,
    eos_token_ids,
    few_shot_prompt,
    pad_token_id,
    read_examples,
    read_instruction,
    rewrite_prompt,
)
from retriever import RetrieverConfig, retriever_settings
from reward import ANSWER_METRICS, parse_paper_inference, parse_response
from rollout import check_engine
from runs import Progress, check_settings, naming, only_writer, path_with_digest, write_jsonl


@dataclass
class InferConfig:
    task: Literal["rewrite", "search", "agent"] = "rewrite"
    """rewrite the turns of conversations, or answer questions in episodes (episodes/episode.py)"""
    model: str = ""
    """Hugging Face folder or hub name of an instruct model, or the folder of a LoRA adapter (PEFT's
    format)"""
    turns: str = ""
    """rewrite: turns file (JSONL) to write rewrites for"""
    questions: str = ""
    """search, agent: questions file (JSONL) to answer"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """search, agent: what searches; its `corpus` has the texts that are shown"""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """search, agent: budgets and form of an episode"""
    instruction: str = ""
    """rewrite: a text file with the instruction of the prompt, the one it was trained with; empty:
    prompts.INSTRUCTION"""
    out: str = ""
    """JSONL file to write; its settings stand beside it in <out>.meta.json"""
    prompt: Literal["zero-shot", "few-shot"] = "zero-shot"
    """zero-shot for a trained model; few-shot shows `examples` first, for a model never trained for
    the task"""
    examples: str = ""
    """few-shot examples: JSONL with context, question, think, rewrite; for search and agent with
    messages"""
    samples: Annotated[int, at_least(1)] = 1
    """responses a turn"""
    temperature: Annotated[float, at_least(0)] = 0.0
    """logits are divided by it; 0 is greedy"""
    top_p: Annotated[float, above(0, 1)] = 1.0
    """sample among the most probable tokens of this mass"""
    max_response_tokens: Annotated[int, at_least(1)] = 1024
    """new tokens of a response at most; of an episode, what is shown to the model included"""
    max_prompt_tokens: Annotated[int, at_least(1)] = 1536
    """longer prompts are not sampled: status too_long"""
    seed: int = 0
    """of the draws; without effect at temperature 0"""
    parser: Literal["strict", "paper"] = "strict"
    """what counts as well formed (reward.parse_response); `paper`: as the original's inference
    (reward.parse_paper_inference)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights; auto: bfloat16 on a GPU, float32 elsewhere"""
    chunk: Annotated[int, at_least(1)] = 64
    """turns between two writes: what a kill can lose"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """what samples"""
    overwrite: bool = False
    """remove an earlier output of this name first"""


# --------------------------------------------------------------------------------------------------


def end_and_pad_ids(model: str, tokenizer) -> tuple[list[int], int]:
    """The ids that end a response of the model in a Hugging Face folder (or hub name), and what
    fills unused places."""
    model = adapter_base(model) or model
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ModelError(
            f"no model at {model!r}: {str(e).strip().splitlines()[0]}; give a Hugging Face folder "
            "or a reachable hub name"
        ) from e
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # it has none: transformers then reads config.json
        generation = GenerationConfig.from_model_config(config)
    eos = eos_token_ids(tokenizer, generation)
    return eos, pad_token_id(tokenizer, eos, config.get_text_config().vocab_size)


def open_engine(cfg: InferConfig, tokenizer, dist: Dist):
    """The engine of `cfg.engine` over `cfg.model`."""
    half = cfg.dtype == "bfloat16" or cfg.dtype == "auto" and dist.device.type == "cuda"
    engine = rollout.open_engine(
        cfg.engine,
        cfg.model,
        tokenizer,
        *end_and_pad_ids(cfg.model, tokenizer),
        dist.device,
        cfg.max_prompt_tokens + cfg.max_response_tokens,
        cfg.seed,
        torch.bfloat16 if half else torch.float32,
    )
    if engine.max_length <= cfg.max_response_tokens:
        raise ConfigError(
            f"max_response_tokens={cfg.max_response_tokens} leaves no room for a prompt in "
            f"{cfg.model}'s {engine.max_length} positions; lower max_response_tokens"
        )
    return engine


def encode_prompts(cfg: InferConfig, turns: list[Turn], tokenizer) -> dict[str, list[int]]:
    """Query id → token ids of its prompt."""
    examples = read_examples(cfg.examples) if cfg.prompt == "few-shot" else []
    instruction = read_instruction(cfg.instruction)
    texts = (
        few_shot_prompt(t, examples, instruction) if examples else rewrite_prompt(t, instruction)
        for t in turns
    )
    return {t.query_id: encode_chat(tokenizer, text) for t, text in zip(turns, texts)}


def prompt_digest(prompt_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:12]


def output_row(turn: Turn, sample: int, rollout: Rollout, tokenizer, parser: str) -> dict:
    """The line of one sample."""
    text = decode_response(tokenizer, rollout.response_ids)
    parsed = parse_paper_inference(text) if parser == "paper" else parse_response(text)
    rewrite = data.one_line(parsed.rewrite or "")
    status = rollout.end
    if status in ("eos", "stop", "length"):
        status = "ok" if parsed.well_formed and rewrite else "malformed"
    return {
        "query_id": turn.query_id,
        "sample": sample,
        "status": status,
        "rewrite": rewrite if status == "ok" else data.one_line(turn.question),
        "think": parsed.think if status == "ok" else None,
        "response": text,
        "tokens": len(rollout.response_ids),
        "end": rollout.end,
        "prompt": prompt_digest(rollout.prompt_ids),
    }


def sample_items(
    engine,
    task,
    tokenizer,
    items: list,
    prompt_ids: dict[str, list[int]],
    cfg: InferConfig,
    progress=None,
) -> list[dict]:
    """Lines of turns or questions, `cfg.samples` each, in order; all prompts that fit go to the
    engine in one call."""
    limit = min(cfg.max_prompt_tokens, engine.max_length - cfg.max_response_tokens)
    sampling = Sampling(
        cfg.samples, cfg.temperature, cfg.top_p, cfg.max_response_tokens, seed=cfg.seed
    )
    fitting = [ids for ids in (prompt_ids[item_id(item)] for item in items) if len(ids) <= limit]
    if task is None:
        done = engine.generate(fitting, sampling, progress)
    else:
        done = run_episodes(engine, fitting, sampling, task, engine.max_length, progress)
        if done and all(e.end == "tool_error" for e in done):
            raise ToolsAway(
                f"all {len(done)} episodes of this chunk failed in their tools "
                f"({done[0].failure}); mend that and run again: what was written before is kept"
            )
    results, rows = iter(done), []
    for item in items:
        ids = prompt_ids[item_id(item)]
        for i in range(cfg.samples):
            if task is None:
                result = next(results) if len(ids) <= limit else _too_long(Rollout, ids)
                rows.append(output_row(item, i, result, tokenizer, cfg.parser))
            else:
                result = next(results) if len(ids) <= limit else _too_long(Episode, ids, i)
                rows.append(episode_row(item, i, result, task, cfg))
    return rows


def _too_long(kind: type, ids: list[int], *sample: int):
    return kind(ids, [], [], [], 0, "too_long", *sample)


def episode_row(question: Question, sample: int, episode: Episode, task, cfg: InferConfig) -> dict:
    """The line of one sample of a question: its trajectory and what it earned."""
    request = {
        "model": cfg.model,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_tokens": cfg.max_response_tokens,
        "stream": False,
        "prompt": cfg.prompt,
    }
    return (
        {"query_id": question.id, "sample": sample, "status": episode.end}
        | trajectory_row(episode, question, task, request)
        | {
            "reward": episode_reward(episode, question, task),
            "tokens": len(episode.response_ids),
            "prompt": prompt_digest(episode.prompt_ids),
        }
    )


# --------------------------------------------------------------------------------------------------


def part_files(output: str) -> list[str]:
    """What an unfinished run left beside `out`: gathered lines, and the files of its processes."""
    return [
        p
        for p in [f"{output}.done", *sorted(glob.glob(f"{glob.escape(output)}.rank*"))]
        if os.path.isfile(p)
    ]


def collect(
    output: str, prompts: dict[str, list[int]], samples: int, failed: bool = True
) -> list[dict]:
    """Lines of all turns that are complete in `out` and its parts, in the order of `prompts`.

    `failed`: those that failed for a technical reason too. A half-written last line of a file is
    passed over. DataError: a line of another input.
    """
    rows: dict[tuple[str, int], dict] = {}
    for path in [output] * os.path.isfile(output) + part_files(output):
        with open(path, "rb") as f:
            lines = f.read().rstrip(b"\n").split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                query_id, sample, digest = row["query_id"], row["sample"], row["prompt"]
            except (ValueError, KeyError, TypeError) as e:
                if number == len(lines):
                    break
                raise DataError(
                    f"{path}:{number}: not a line of infer.py ({e!r}); overwrite=true begins anew"
                ) from e
            if query_id not in prompts or digest != prompt_digest(prompts[query_id]):
                raise DataError(
                    f"{path}:{number}: turn {query_id} is not among these turns, or had another "
                    "prompt; choose another output, or overwrite=true to begin anew"
                )
            if failed or row.get("status") not in FAILED:
                rows[query_id, sample] = row
    groups = ([(query_id, i) for i in range(samples)] for query_id in prompts)
    return [rows[key] for group in groups if all(key in rows for key in group) for key in group]


def begin(cfg: InferConfig, prompts: dict[str, list[int]]) -> set[str]:
    """Check the settings, gather what an earlier run left into one file; returns the ids that are
    done (rank 0)."""
    meta = f"{cfg.out}.meta.json"
    if cfg.overwrite:
        for path in part_files(cfg.out) + [cfg.out] * os.path.exists(cfg.out):
            os.remove(path)
    keys = (
        "prompt samples temperature top_p max_response_tokens max_prompt_tokens seed parser dtype"
    )
    begun = any(
        os.path.getsize(path) for path in [cfg.out, *part_files(cfg.out)] if os.path.exists(path)
    )
    settings = {
        "model": path_with_digest(cfg.model),
        **{key: getattr(cfg, key) for key in keys.split()},
    }
    if cfg.task != "rewrite":
        settings |= {"task": cfg.task} | retriever_settings(cfg.retriever)
        settings |= {
            f"episode.{key}": value
            for key, value in asdict(cfg.episode).items()
            if key != "timeout"
        }
    check_settings(meta, settings, begun)
    save_config(cfg, f"{cfg.out}.config.yaml")
    done = collect(cfg.out, prompts, cfg.samples, failed=False)
    write_jsonl(f"{cfg.out}.done", done)
    for path in part_files(cfg.out)[1:]:
        os.remove(path)
    return {row["query_id"] for row in done}


def finish(cfg: InferConfig, prompts: dict[str, list[int]], dist: Dist) -> list[dict]:
    """Merge the parts into `cfg.out`, whole or not at all; returns its lines (every rank).

    DataError where a line is missing: another process's part is not seen.
    """
    rows = collect(cfg.out, prompts, cfg.samples)
    if len(rows) < len(prompts) * cfg.samples:
        raise DataError(
            f"{cfg.out}: {len(rows)} of {len(prompts) * cfg.samples} lines are there; all "
            "processes must see the same folder: run again, what is there is kept"
        )
    broadcast_object(None)  # every rank has read the parts
    if dist.rank == 0:
        write_jsonl(cfg.out, rows)
        for path in part_files(cfg.out):
            os.remove(path)
    return rows


def respond(
    cfg: InferConfig, items: list[Turn] | list[Question], dist: Dist
) -> tuple[list[dict], dict]:
    """All lines of turns or questions, and the summary; `cfg.out` is complete afterwards. Every
    rank calls it."""
    folder, name = os.path.split(os.path.abspath(cfg.out))
    with only_writer(folder, name) if dist.rank == 0 else contextlib.nullcontext():
        tokenizer = load_tokenizer(cfg.model)
        task, prompts = open_prompts(cfg, items, tokenizer)
        done = broadcast_object(begin(cfg, prompts) if dist.rank == 0 else None)
        left = [item for item in items if item_id(item) not in done]
        print0(
            f"infer: {len(items)} {'questions' if task else 'turns'} × {cfg.samples} samples = "
            f"{len(items) * cfg.samples} responses, {len(done)} of them already done, "
            f"{dist.world} processes, temperature {cfg.temperature:g}, {cfg.prompt} prompts of "
            f"{sum(map(len, prompts.values())) / len(prompts):.0f} tokens on average"
        )
        started = time.monotonic()
        own = sample_left(cfg, left, task, tokenizer, prompts, dist) if left else 0
        tokens = int(all_reduce_sum([own])[0])  # and every rank has written its part
        seconds = time.monotonic() - started
        rows = finish(cfg, prompts, dist)
        if task:
            task.tools.close()
    return rows, {
        "out": cfg.out,
        "lines": len(rows),
        "generated": len(left) * cfg.samples,
        **count_rows(rows, cfg.task),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 1),
    }


def open_prompts(cfg: InferConfig, items: list, tokenizer) -> tuple:
    """(task of the episodes, None for rewrites; id → token ids of its prompt)."""
    if trained := other_task(cfg.model, cfg.task, cfg.episode.template):
        print0(
            f"warning: {cfg.model} was trained with another prompt ({trained}); scores of this one "
            "say little"
        )
    if cfg.task == "rewrite":
        return None, encode_prompts(cfg, items, tokenizer)
    examples = cfg.examples if cfg.prompt == "few-shot" else ""
    task = open_task(cfg.task, cfg.episode, tokenizer, cfg.retriever, examples)
    return task, {q.id: task.prompt(q.question) for q in items}


def sample_left(cfg: InferConfig, left: list, task, tokenizer, prompts: dict, dist: Dist) -> int:
    """Append this process's share of `left` to its file, a chunk at a time; returns its tokens.

    Every process makes as many calls: an engine over several of them needs that.
    """
    engine = open_engine(cfg, tokenizer, dist)
    bar = Progress(len(left) * cfg.samples, "sampling", "responses") if dist.rank == 0 else None
    mine, tokens, finished = left[dist.rank :: dist.world], 0, 0

    def show(further: int, *_) -> None:
        if bar:  # the other processes are about as far
            bar.update(min((finished + further) * dist.world, bar.total) - bar.done)

    path = f"{cfg.out}.rank{dist.rank:03d}"
    with naming(path), open(path, "w", encoding="utf-8", newline="\n") as part:
        for at in range(0, -(-len(left) // dist.world), cfg.chunk):
            chunk = mine[at : at + cfg.chunk]
            rows = sample_items(engine, task, tokenizer, chunk, prompts, cfg, show)
            tokens += sum(row["tokens"] for row in rows)
            part.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            part.flush()
            os.fsync(part.fileno())
            show(len(rows))
            finished += len(rows)
    if bar:
        bar.close()
    engine.sleep()  # its memory is free for what comes next in this process
    return tokens


def count_rows(rows: list[dict], task: str) -> dict[str, float]:
    """Lines of each status; for questions the means of the answers' scores as well."""
    count = Counter(row["status"] for row in rows)
    if task == "rewrite":
        return {status: count[status] for status in ("ok", "malformed", "engine_error", "too_long")}
    scores = [row | row["metric_score"] for row in rows]
    means = {
        name: round(sum(score[name] for score in scores) / len(rows), 4)
        for name in (*ANSWER_METRICS, "well_formed", "searches")
    }
    return {status: count[status] for status in (*END_STATES, "too_long")} | means


def check(cfg: InferConfig) -> None:
    """Raise ConfigError for settings that cannot work, before anything is loaded."""
    check_ranges(cfg)
    source = "turns" if cfg.task == "rewrite" else "questions"
    for name in ("model", source, "out"):
        if not getattr(cfg, name):
            raise ConfigError(f"{name} is empty; give {name}=…")
    if cfg.task != "rewrite":
        check_episode(cfg.episode, cfg.task, cfg.max_response_tokens)
    if os.path.isdir(cfg.out):
        raise ConfigError(f"out={cfg.out} is a folder; name a file to write")
    if cfg.prompt == "few-shot" and not cfg.examples:
        raise ConfigError("prompt=few-shot needs examples=FILE")
    if os.path.abspath(cfg.out) == os.path.abspath(getattr(cfg, source)):
        raise ConfigError(f"out={cfg.out} is the {source} file itself; choose another name")
    check_engine(cfg.engine, equal_calls=cfg.task == "rewrite")
    if cfg.samples > 1 and cfg.temperature == 0:
        raise ConfigError(
            f"samples={cfg.samples} at temperature 0 are all the same; set temperature above 0"
        )


def main(cfg: InferConfig) -> dict | None:
    """Write `cfg.out`; returns counts per status, tokens/s and seconds (rank 0)."""
    check(cfg)
    items = (
        data.read_turns(cfg.turns) if cfg.task == "rewrite" else data.read_questions(cfg.questions)
    )
    dist = setup()
    try:
        summary = respond(cfg, items, dist)[1]
        return summary if dist.rank == 0 else None
    finally:
        cleanup()


if __name__ == "__main__":
    run(InferConfig, main)
