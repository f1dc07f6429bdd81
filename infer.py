"""Rewrites for a file of turns, or episodes for a file of questions: a JSONL line for every (item,
sample).

A rewrite's line has query_id, sample, status (ok, malformed, engine_error, too_long), rewrite,
think, response, tokens, end; for all but `ok` the rewrite is the raw question, so that every turn
can be searched and is counted. An episode's is a trajectory (episode.trajectory_row), whose status
is its end, or too_long. Under torchrun each process samples its share. The same command continues
after a kill: lines that are there are not sampled again. Draws depend on seed, prompt and sample
alone.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import torch
from transformers import AutoConfig, GenerationConfig

import data
import distributed
import rollout
import runs
from config import ConfigError, above, at_least, check_given, check_ranges, run, save_config
from data import DataError, Question, Turn, item_id
from distributed import Dist, print0
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


@dataclass
class InferConfig:
    task: Literal["rewrite", "search", "agent"] = "rewrite"
    """rewrite the turns of conversations, or answer questions in episodes"""
    model: str = ""
    """Hugging Face folder or hub name of an instruct model, or a LoRA adapter's folder"""
    turns: str = ""
    """rewrite: turns file (JSONL) to write rewrites for"""
    questions: str = ""
    """search, agent: questions file (JSONL) to answer"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """search, agent: what searches; its `corpus` has the texts that are shown"""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """search, agent: budgets and form of an episode"""
    instruction: str = ""
    """rewrite: a text file with the instruction it was trained with; empty: prompts.INSTRUCTION"""
    out: str = ""
    """JSONL file to write; its settings stand beside it in <out>.meta.json"""
    prompt: Literal["zero-shot", "few-shot"] = "zero-shot"
    """few-shot shows `examples` first: for a model that was never trained for the task"""
    examples: str = ""
    """JSONL with context, question, think, rewrite; for search and agent with messages"""
    samples: Annotated[int, at_least(1)] = 1
    """responses a turn"""
    temperature: Annotated[float, at_least(0)] = 0.0
    """logits are divided by it; 0 is greedy"""
    top_p: Annotated[float, above(0, 1)] = 1.0
    """sample among the most probable tokens of this mass"""
    max_response_tokens: Annotated[int, at_least(1)] = 1024
    """new tokens of a response at most; of an episode, with what is shown to the model"""
    max_prompt_tokens: Annotated[int, at_least(1)] = 1536
    """longer prompts are not sampled: status too_long"""
    seed: int = 0
    """of the draws; without effect at temperature 0"""
    parser: Literal["strict", "paper"] = "strict"
    """what is well formed; `paper`: as the original's inference (reward.parse_paper_inference)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights; auto: bfloat16 on a GPU, float32 elsewhere"""
    chunk: Annotated[int, at_least(1)] = 64
    """turns between two writes: what a kill can lose"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """what samples"""
    overwrite: bool = False
    """remove an earlier output of this name first"""


SETTINGS = (  # what decides the lines
    "prompt samples temperature top_p max_response_tokens max_prompt_tokens seed parser dtype"
).split()


def end_and_pad_ids(model: str, tokenizer) -> tuple[list[int], int]:
    """The ids that end a response of a model (folder or hub name), and what fills unused places."""
    model = adapter_base(model) or model
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0]
        raise ModelError(
            f"no model at {model!r}: {reason}; give a Hugging Face folder or a reachable hub name"
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
            f"{cfg.model}'s {engine.max_length} positions; lower it"
        )
    return engine


def prompt_encoder(cfg, task, tokenizer, examples: Sequence[Turn] = ()) -> Callable:
    """turn, or question of a task → token ids of its prompt."""
    if task is not None:
        return lambda question: task.prompt(question.question)
    instruction = read_instruction(cfg.instruction)

    def encode(turn: Turn) -> list[int]:
        if examples:
            return encode_chat(tokenizer, few_shot_prompt(turn, examples, instruction))
        return encode_chat(tokenizer, rewrite_prompt(turn, instruction))

    return encode


def open_prompts(cfg: InferConfig, items: list, tokenizer) -> tuple:
    """(task of the episodes, None for rewrites; id → token ids of its prompt)."""
    if trained := other_task(cfg.model, cfg.task, cfg.episode.template):
        print0(f"warning: {cfg.model} was trained with another prompt ({trained})")
    shown, task, examples = cfg.examples if cfg.prompt == "few-shot" else "", None, []
    if cfg.task == "rewrite":
        examples = read_examples(shown) if shown else []
    else:
        task = open_task(cfg.task, cfg.episode, tokenizer, cfg.retriever, shown)
    encode = prompt_encoder(cfg, task, tokenizer, examples)
    return task, {item_id(item): encode(item) for item in items}


def prompt_digest(prompt_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:12]


def sample_items(
    engine, task, tokenizer, items: list, prompts: dict, cfg: InferConfig, progress=None
) -> list[dict]:
    """Lines of turns or questions, `cfg.samples` each, from one call of the engine."""
    limit = min(cfg.max_prompt_tokens, engine.max_length - cfg.max_response_tokens)
    sampling = Sampling(
        cfg.samples, cfg.temperature, cfg.top_p, cfg.max_response_tokens, seed=cfg.seed
    )
    fitting = [ids for ids in (prompts[item_id(item)] for item in items) if len(ids) <= limit]
    if task is None:
        done = engine.generate(fitting, sampling, progress)
    else:
        done = run_episodes(engine, fitting, sampling, task, engine.max_length, progress)
        if done and all(e.end == "tool_error" for e in done):
            raise ToolsAway(
                f"all {len(done)} episodes of this chunk failed in their tools "
                f"({done[0].failure}); mend that and run again: what was written before is kept"
            )
    results, kind, rows = iter(done), Rollout if task is None else Episode, []
    for item in items:
        ids = prompts[item_id(item)]
        for i in range(cfg.samples):
            result = next(results) if len(ids) <= limit else kind(ids, [], [], [], 0, "too_long")
            row = {"query_id": item_id(item), "sample": i, "status": result.end}
            if task is None:
                row |= rewrite_row(item, result, tokenizer, cfg.parser)
            else:
                result.sample = i
                row |= episode_row(item, result, task, cfg)
            tokens = len(result.response_ids)
            rows.append(row | {"tokens": tokens, "end": result.end, "prompt": prompt_digest(ids)})
    return rows


def rewrite_row(turn: Turn, rollout: Rollout, tokenizer, parser: str) -> dict:
    """What the line of a rewrite says beside its keys."""
    text = decode_response(tokenizer, rollout.response_ids)
    parsed = parse_paper_inference(text) if parser == "paper" else parse_response(text)
    rewrite = data.one_line(parsed.rewrite or "")
    status = rollout.end
    if status in ("eos", "stop", "length"):
        status = "ok" if parsed.well_formed and rewrite else "malformed"
    ok = status == "ok"
    return {
        "status": status,
        "rewrite": rewrite if ok else data.one_line(turn.question),
        "think": parsed.think if ok else None,
        "response": text,
    }


def episode_row(question: Question, episode: Episode, task, cfg: InferConfig) -> dict:
    """What the line of an episode says beside its keys: its trajectory, and what it earned."""
    request = {
        "model": cfg.model,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_tokens": cfg.max_response_tokens,
        "stream": False,
        "prompt": cfg.prompt,
    }
    row = trajectory_row(episode, question, task, request)
    return row | {"reward": episode_reward(episode, question, task)}


def sample_left(cfg: InferConfig, left: list, task, tokenizer, prompts: dict, dist: Dist) -> int:
    """Append this process's share of `left` to its file, a chunk at a time; its tokens.

    Every process makes as many calls: an engine over several of them needs that.
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
            rows = sample_items(engine, task, tokenizer, chunk, prompts, cfg, show)
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
    """What an unfinished run left beside its output (`.done`: one of an earlier version)."""
    beside = glob.escape(output)
    return sorted(glob.glob(f"{beside}.rank*") + glob.glob(f"{beside}.done"))


def begin(cfg: InferConfig) -> None:
    """Check the settings of what is there, or remove it (rank 0)."""
    settings = runs.settings(cfg, SETTINGS, ["model"])
    if cfg.task != "rewrite":
        settings |= {"task": cfg.task} | retriever_settings(cfg.retriever)
        episode = asdict(cfg.episode).items()
        settings |= {f"episode.{key}": value for key, value in episode if key != "timeout"}
    there = map(glob.escape, [cfg.out, *parts_of(cfg.out)])
    runs.begin_output(f"{cfg.out}.meta.json", settings, there, cfg.overwrite)
    save_config(cfg, f"{cfg.out}.config.yaml")


def read_rows(output: str, prompts: dict[str, list[int]]) -> dict[tuple[str, int], dict]:
    """(id, sample) → its line in the output's files, rather one that did not fail.

    What a kill cut off is passed over; DataError for a line of another input.
    """
    rows: dict[tuple[str, int], dict] = {}
    for path in [output] * os.path.isfile(output) + parts_of(output):
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    row = json.loads(line)
                    key, failed = (row["query_id"], row["sample"]), row["status"] in FAILED
                    digest = row["prompt"]
                except (ValueError, KeyError, TypeError):
                    continue
                if key[0] not in prompts or digest != prompt_digest(prompts[key[0]]):
                    raise DataError(
                        f"{path}:{number}: turn {key[0]} is not among these turns, or had "
                        "another prompt; choose another output, or overwrite=true to begin anew"
                    )
                if not failed or key not in rows:
                    rows[key] = row
    return rows


def done_keys(output: str, prompts: dict[str, list[int]]) -> set[tuple[str, int]]:
    """(id, sample) of the output's lines that need not be sampled again."""
    rows = read_rows(output, prompts)
    return {key for key, row in rows.items() if row["status"] not in FAILED}


def finish(cfg: InferConfig, prompts: dict[str, list[int]], dist: Dist) -> list[dict]:
    """Merge the parts into `cfg.out`, whole or not at all; its lines (every rank)."""
    found = read_rows(cfg.out, prompts)
    keys = [(query_id, i) for query_id in prompts for i in range(cfg.samples)]
    rows = [found[key] for key in keys if key in found]
    if len(rows) < len(keys):
        raise DataError(
            f"{cfg.out}: {len(rows)} of {len(keys)} lines are there; all processes must see the "
            "same folder: run again, what is there is kept"
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
    """All lines of turns or questions, and the summary; `cfg.out` is complete afterwards. Every
    rank calls it."""
    folder, name = os.path.split(os.path.abspath(cfg.out))
    with runs.only_writer(folder, name, dist.rank):
        tokenizer = load_tokenizer(cfg.model)
        task, prompts = open_prompts(cfg, items, tokenizer)
        distributed.on_rank_0(begin, cfg)
        done = distributed.on_rank_0(done_keys, cfg.out, prompts)
        samples = range(cfg.samples)
        left = [q for q in items if not all((item_id(q), i) in done for i in samples)]
        print0(
            f"infer: {len(items)} {'questions' if task else 'turns'} × {cfg.samples} samples, "
            f"{len(items) - len(left)} of them already done, {dist.world} processes, temperature "
            f"{cfg.temperature:g}, {cfg.prompt} prompts of "
            f"{sum(map(len, prompts.values())) / len(prompts):.0f} tokens on average"
        )
        started = time.monotonic()
        own = sample_left(cfg, left, task, tokenizer, prompts, dist) if left else 0
        tokens = int(distributed.all_reduce_sum([own])[0])  # and every rank has written its part
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
    check_given(cfg, "model", source, "out")
    if cfg.task != "rewrite":
        check_episode(cfg.episode, cfg.task, cfg.max_response_tokens)
    check_engine(cfg.engine, equal_calls=cfg.task == "rewrite")
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
    """Write `cfg.out`; returns counts per status, tokens/s and seconds (rank 0)."""
    check(cfg)
    rewrites = cfg.task == "rewrite"
    items = data.read_turns(cfg.turns) if rewrites else data.read_questions(cfg.questions)
    dist = distributed.setup()
    try:
        summary = respond(cfg, items, dist)[1]
        return summary if dist.rank == 0 else None
    finally:
        distributed.cleanup()


if __name__ == "__main__":
    run(InferConfig, main)
