"""Rewrites for a file of turns, or episodes for a file of questions: a JSONL line a sample.

A rewrite's line has query_id, sample, status (ok, malformed, engine_error, too_long), rewrite,
think, response, tokens, end; for all but `ok` the rewrite is the raw question. An episode's is a
trajectory, whose status is its end, or too_long. Under torchrun each process samples its share. The
same command continues after a kill. Draws depend on seed, prompt and sample alone.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

import distributed
import rollout
import runs
from config import ConfigError, Only, above, at_least, check_given, check_fields, run, save_config
from data import DataError, Question, Turn, item_id
from distributed import Dist, print0
from engines.base import Sampling
from episodes.episode import FAILED
from episodes.tools import ToolsAway
from model import load_tokenizer
from retriever import RetrieverConfig
from reward import parse_paper_inference
from tasks import EPISODES, REWRITES, TASKS, Task, TaskConfig, check_task, open_task, other_task


@dataclass
class InferConfig(TaskConfig):
    model: str = ""
    """Hugging Face folder or hub name of an instruct model, or a LoRA adapter's folder"""
    turns: Annotated[str, REWRITES] = ""
    """turns file (JSONL) to write rewrites for"""
    questions: Annotated[str, EPISODES] = ""
    """questions file (JSONL) to answer"""
    retriever: Annotated[RetrieverConfig, EPISODES] = field(default_factory=RetrieverConfig)
    """what episodes search, whose `corpus` has the texts that are shown"""
    out: str = ""
    """JSONL file to write; its settings stand beside it in <out>.meta.json"""
    prompt: Literal["zero-shot", "few-shot"] = "zero-shot"
    """few-shot shows `examples` first, to a model that was never trained for the task"""
    examples: Annotated[str, Only("prompt", ("few-shot",))] = ""
    """JSONL with context, question, think, rewrite; for search and agent with messages"""
    samples: Annotated[int, at_least(1)] = 1
    """responses a turn"""
    temperature: Annotated[float, at_least(0)] = 0.0
    """logits are divided by it; 0 is greedy"""
    top_p: Annotated[float, above(0, 1)] = 1.0
    """sample among the most probable tokens of this mass; without effect at temperature 0"""
    seed: int = 0
    """of the draws; without effect at temperature 0"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights; auto: bfloat16 on a GPU, float32 elsewhere"""
    chunk: Annotated[int, at_least(1)] = 64
    """turns between two writes, which a kill can lose"""
    overwrite: bool = False
    """remove an earlier output of this name first"""


SETTINGS = (  # what decides the lines
    "prompt samples temperature top_p max_response_tokens max_prompt_tokens seed parser dtype"
).split()


def open_engine(cfg: InferConfig, tokenizer, dist: Dist):
    """The engine of `cfg.engine` over `cfg.model`."""
    half = cfg.dtype == "bfloat16" or cfg.dtype == "auto" and dist.device.type == "cuda"
    engine = rollout.open_engine(
        cfg.engine,
        cfg.model,
        tokenizer,
        *rollout.end_and_pad_ids(cfg.model, tokenizer),
        dist.device,
        cfg.max_prompt_tokens + cfg.max_response_tokens,
        cfg.seed,
        torch.bfloat16 if half else torch.float32,
    )
    if engine.max_length <= cfg.max_response_tokens:
        raise ConfigError(
            f"max_response_tokens={cfg.max_response_tokens} leaves no room for a prompt in "
            f"{cfg.model}'s {engine.max_length} positions; lower it"
        )
    return engine


def open_prompts(cfg: InferConfig, items: list, tokenizer) -> tuple[Task, dict[str, list[int]]]:
    """(the task, id → token ids of its prompt)."""
    if trained := other_task(cfg):
        print0(f"warning: {cfg.model} was trained with another prompt ({trained})")
    parse = parse_paper_inference if cfg.parser == "paper" else None
    task = open_task(cfg, tokenizer, cfg.examples if cfg.prompt == "few-shot" else "", parse)
    return task, {item_id(item): task.prompt(item) for item in items}


def prompt_digest(prompt_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:12]


def sample_items(
    engine, task: Task, items: list, prompts: dict, cfg: InferConfig, progress=None
) -> list[dict]:
    """Lines of the items, `cfg.samples` each, from one call of the engine."""
    limit = min(cfg.max_prompt_tokens, engine.max_length - cfg.max_response_tokens)
    sampling = Sampling(
        cfg.samples, cfg.temperature, cfg.top_p, cfg.max_response_tokens, seed=cfg.seed
    )
    asked = [prompts[item_id(item)] for item in items]
    done = task.rollouts(engine, [ids for ids in asked if len(ids) <= limit], sampling, progress)
    if done and all(rollout.end == "tool_error" for rollout in done):
        raise ToolsAway(
            f"all {len(done)} episodes of this chunk failed in their tools ({done[0].failure}); "
            "mend that and run again: what was written before is kept"
        )
    request = {
        "model": cfg.model,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_tokens": cfg.max_response_tokens,
        "stream": False,
        "prompt": cfg.prompt,
    }
    results, rows = iter(done), []
    for item, ids in zip(items, asked):
        for i in range(cfg.samples):
            result = next(results) if len(ids) <= limit else task.unsampled(ids, i)
            row = {"query_id": item_id(item), "sample": i, "status": result.end}
            row |= task.row(item, result, request)
            tokens = len(result.response_ids)
            rows.append(row | {"tokens": tokens, "end": result.end, "prompt": prompt_digest(ids)})
    return rows


def sample_left(
    cfg: InferConfig, left: list, task: Task, tokenizer, prompts: dict, dist: Dist
) -> int:
    """Append this process's share of `left` to its file, chunk by chunk; returns its tokens.

    Every process makes as many calls of the engine, which may be shared by several.
    """
    engine = open_engine(cfg, tokenizer, dist)
    total = len(left) * cfg.samples
    bar = runs.Progress(total, "sampling", "responses", 0.1) if dist.rank == 0 else None
    mine, tokens, finished = left[dist.rank :: dist.world], 0, 0

    def show(further: int, *_) -> None:
        if bar:  # the other processes are about as far
            bar.reach(min((finished + further) * dist.world, total))

    path = f"{cfg.out}.rank{dist.rank:03d}"
    with runs.naming(path), open(path, "a", encoding="utf-8", newline="\n") as part:
        for at in range(0, -(-len(left) // dist.world), cfg.chunk):
            chunk = mine[at : at + cfg.chunk]
            rows = sample_items(engine, task, chunk, prompts, cfg, show)
            tokens += sum(row["tokens"] for row in rows)
            # a kill may have cut the line before
            part.write("".join("\n" + json.dumps(row, ensure_ascii=False) for row in rows))
            part.flush()
            os.fsync(part.fileno())
            show(len(rows))
            finished += len(rows)
    if bar:
        bar.close()
    engine.sleep()  # its memory is free for what comes next in this process
    return tokens


def parts_of(output: str) -> list[str]:
    """The files that an unfinished run left beside its output."""
    return sorted(glob.glob(f"{glob.escape(output)}.rank[0-9][0-9][0-9]"))


def begin(cfg: InferConfig, task: Task) -> None:
    """Check the settings of an earlier output, or remove it (rank 0)."""
    settings = runs.settings(cfg, SETTINGS, ["model"]) | task.settings(cfg)
    there = map(glob.escape, [cfg.out, *parts_of(cfg.out)])
    runs.begin_output(f"{cfg.out}.meta.json", settings, there, cfg)
    save_config(cfg, f"{cfg.out}.config.yaml")


def read_rows(output: str, prompts: dict[str, list[int]]) -> dict[tuple[str, int], dict]:
    """(id, sample) → its line in the output's files, if possible one that did not fail; lines that
    a kill cut off are skipped."""
    rows: dict[tuple[str, int], dict] = {}
    for path in [output] * os.path.isfile(output) + parts_of(output):
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    row = json.loads(line)
                    id_, digest, failed = row["query_id"], row["prompt"], row["status"] in FAILED
                    key = id_, row["sample"]
                except (ValueError, KeyError, TypeError):
                    continue
                if id_ not in prompts or digest != prompt_digest(prompts[id_]):
                    raise DataError(
                        f"{path}:{number}: turn {id_} is not among these turns, or had "
                        "another prompt; choose another output, or overwrite=true"
                    )
                if not failed or key not in rows:
                    rows[key] = row
    return rows


def finish(cfg: InferConfig, prompts: dict[str, list[int]], dist: Dist) -> list[dict]:
    """Merge the parts into `cfg.out` atomically; returns its lines on every rank."""
    found = read_rows(cfg.out, prompts)
    keys = [(query_id, i) for query_id in prompts for i in range(cfg.samples)]
    rows = [found[key] for key in keys if key in found]
    if len(rows) < len(keys):
        raise DataError(
            f"{cfg.out}: {len(rows)} of {len(keys)} lines are there; let all processes see the "
            "same folder and run again"
        )
    distributed.broadcast_object(None)  # every rank has read the parts
    if dist.rank == 0:
        runs.write_jsonl(cfg.out, rows)
        for path in parts_of(cfg.out):
            os.remove(path)
    return rows


def respond(
    cfg: InferConfig, items: list[Turn] | list[Question], dist: Dist
) -> tuple[list[dict], dict]:
    """Complete `cfg.out`; returns all lines and the summary (a collective)."""
    folder, name = os.path.split(os.path.abspath(cfg.out))
    with distributed.held_by_rank_0(runs.only_writer(folder, name)):
        tokenizer = load_tokenizer(cfg.model)
        task, prompts = open_prompts(cfg, items, tokenizer)
        distributed.on_rank_0(begin, cfg, task)
        done = distributed.on_rank_0(
            lambda: {k for k, r in read_rows(cfg.out, prompts).items() if r["status"] not in FAILED}
        )
        left = [q for q in items if not all((item_id(q), i) in done for i in range(cfg.samples))]
        print0(
            f"infer: {len(items)} {task.items} × {cfg.samples} samples, "
            f"{len(items) - len(left)} of them already done, {dist.world} processes, temperature "
            f"{cfg.temperature:g}, {cfg.prompt} prompts of "
            f"{sum(map(len, prompts.values())) / len(prompts):.0f} tokens on average"
        )
        started = time.monotonic()
        own = sample_left(cfg, left, task, tokenizer, prompts, dist) if left else 0
        tokens = int(distributed.all_reduce_sum([own])[0])  # and every rank has written its part
        seconds = time.monotonic() - started
        rows = finish(cfg, prompts, dist)
        task.close()
    count = Counter(row["status"] for row in rows)
    if 2 * (good := count[task.statuses[0]]) < len(rows):
        print0(
            f"warning: {good} of {len(rows)} are {task.statuses[0]}; a model that was not trained "
            "for the task needs sft.py, or at least prompt=few-shot examples=FILE"
        )
    return rows, {
        "out": cfg.out,
        "lines": len(rows),
        "generated": len(left) * cfg.samples,
        **{status: count[status] for status in task.statuses},
        **task.means(rows),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 1),
    }


def check(cfg: InferConfig) -> None:
    """ConfigError for settings that cannot work; loads nothing."""
    check_fields(cfg)
    source = TASKS[cfg.task].items
    check_given(cfg, "model", source, "out")
    check_task(cfg)
    wrong = ""
    if os.path.isdir(cfg.out):
        wrong = f"out={cfg.out} is a folder; name a file to write"
    elif os.path.abspath(cfg.out) == os.path.abspath(getattr(cfg, source)):
        wrong = f"out={cfg.out} is the {source} file itself; choose another name"
    elif cfg.prompt == "few-shot" and not cfg.examples:
        wrong = "prompt=few-shot needs examples=FILE"
    elif cfg.samples > 1 and cfg.temperature == 0:
        wrong = f"samples={cfg.samples} at temperature 0 are all the same; set temperature above 0"
    if wrong:
        raise ConfigError(wrong)


def main(cfg: InferConfig) -> dict | None:
    """Write `cfg.out`; returns the summary (rank 0)."""
    check(cfg)
    kind = TASKS[cfg.task]
    items = kind.read_items(getattr(cfg, kind.items))
    dist = distributed.setup()
    try:
        summary = respond(cfg, items, dist)[1]
        return summary if dist.rank == 0 else None
    finally:
        distributed.cleanup()


if __name__ == "__main__":
    run(InferConfig, main)
