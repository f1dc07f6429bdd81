"""Supervised fine-tuning, and the self-driven warm-up that makes its targets (arXiv 2505.15776, section 3.3).

`stage=sample`: the model answers the train turns with the few-shot prompt (through infer.py: sharded, restartable) and
well-formed rewrites are searched; a response whose gold passage is at rank <= max_rank becomes the `response` of a
record in `<out>/records.jsonl`, at most keep_per_turn a turn, best rank first, then first sampled.  `stage=train`:
records are trained with the zero-shot prompt, so what the examples showed moves into the weights.  `stage=all`: both.
Records may be trajectories of the tasks search and agent too: every turn of the assistant is trained, results are not.
With `lora.r` an adapter is trained instead of all weights; `stage=merge` turns one into a whole model.

Differs from the original's trainer in: the loss of a step is a sum over trained tokens divided by one count over all
micro-batches and processes; the last incomplete batch of an epoch is trained, with its own count; rows are packed, none
sees another; over-long rows are dropped and counted, not cut; the held-out set shares no conversation with the training
set, and the epoch with its lowest loss is exported; a killed run resumes exactly.

Written to `out`: records.jsonl, sample_stats.json; metrics.jsonl, checkpoint_*/, final/ (Hugging Face folder, or an
adapter's in PEFT's format), result.json, report.html, config.yaml.  Shapes: B sequences, T predicted positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import glob
import json
import math
import os
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn, Tensor

import data
import distributed
import infer
import report
from config import ConfigError, run, save_config
from data import DataError, Turn
from distributed import Dist, print0
from engines.base import EngineConfig, Sampling
from episodes import trajectories
from episodes.episode import ENDED
from lora import adapter_base, adapter_dropout, adapter_settings, LoRAConfig, ModelError
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer
from packing import one_thread, pack, Packed, packed_logprobs
from prompts import (encode_chat, encode_example, eos_token_ids, INSTRUCTION, pad_token_id,
                     response_text, rewrite_prompt)
from rollout import check_engine
from retriever import open_retriever, retriever_settings, RetrieverConfig
from reward import parse_response
from runs import (append_metrics, atomic_write, begin_metrics, check_settings, path_with_digest, only_writer,
                  write_jsonl)


@dataclass
class SFTConfig:
    stage: Literal["all", "sample", "train", "merge"] = "all"
    """sample: write records; train: fine-tune on records; all: one after the other; merge: write the LoRA adapter in
    `model` and the model it was trained on as one Hugging Face folder, `out`"""
    model: str = ""
    """Hugging Face folder or hub name of an instruct model, or an adapter's folder: it is sampled from and fine-tuned"""
    out: str = ""
    """folder of this run"""
    overwrite: bool = False
    """remove what an earlier run of the same stage left in `out`"""
    seed: int = 0
    """of the draws, the choice of turns, the held-out split and the order of training"""

    turns: str = ""
    """sample: turns file with gold passages"""
    examples: str = ""
    """sample: few-shot examples (JSONL with context, question, think, rewrite)"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """sample: what ranks the gold passages"""
    max_turns: int | None = None
    """sample: use so many turns, drawn with the seed; unset: all"""
    samples_per_turn: int = 1
    """sample: responses a turn"""
    temperature: float = 0.7
    """sample: logits are divided by it"""
    max_response_tokens: int = 1024
    """sample: new tokens of a response at most"""
    max_prompt_tokens: int = 4096
    """sample: turns with a longer few-shot prompt are not sampled, and counted"""
    max_rank: int = 1
    """sample: keep responses whose gold passage is at this rank or a better one"""
    keep_per_turn: int = 1
    """sample: keep so many different responses of a turn; all but the first get query ids <id>#<sample>"""
    chunk: int = 64
    """sample: turns between two writes"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """sample: what samples"""

    records: str = ""
    """train: turns file with `response`, or trajectories (rows with `messages`: infer.py's, OpenAI's or ms-swift's);
    empty: what stage=sample wrote to `out`"""
    target: Literal["response", "rewrite"] = "response"
    """train: on `response`, or on the human `rewrite`, its think block made of the words it adds to the question"""
    max_length: int = 3072
    """train: longer rows (prompt and response, in tokens) are dropped and counted"""
    heldout_fraction: float = 0.1
    """train: share of the conversations that is held out: above 0 at least one, of two or more"""
    epochs: int = 2
    """train: passes over the records"""
    sequences_per_step: int = 64
    """train: sequences of an optimizer step, over all processes; the last step of an epoch takes what is left"""
    micro_batch_tokens: int = 8192
    """train: tokens of one forward and backward pass and process: sequences are packed up to so many (a longer one has
    a pass of its own), none sees another, positions begin anew in each; changes speed and memory, not the result"""
    lr: float = 1e-5
    """train: peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """train: what follows the warm-up"""
    warmup_fraction: float = 0.1
    """train: share of the steps with a rising learning rate"""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """train: AdamW's"""
    weight_decay: float = 0.01
    """train: AdamW's"""
    max_grad_norm: float = 1.0
    """train: gradients are scaled down to this norm"""
    max_bad_steps: int = 3
    """train: a step with a gradient that is not finite is skipped; so many in a row end the run"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """train: an adapter instead of all weights; `model` may be an adapter's folder, which is then trained further"""
    gradient_checkpointing: float = 0.0
    """train: share of the decoder layers that recompute their activations in the backward pass: less memory, up to a
    third more time"""
    compile: bool = True
    """train, on a GPU: decoder layers and head through torch.compile (a minute or two in the first step)"""
    save_every: int = 50
    """train: steps between checkpoints; there is one after every epoch too"""
    keep_checkpoints: int = 2
    """train: how many of the newest stay"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """train, merge: dtype of the weights that are written (an adapter's own are float32 always)"""


SAMPLE_KEYS = ("seed", "max_turns", "samples_per_turn", "temperature", "max_response_tokens", "max_prompt_tokens",
               "max_rank", "keep_per_turn")
TRAIN_KEYS = ("seed", "target", "max_length", "heldout_fraction", "epochs", "sequences_per_step", "lr", "schedule",
              "warmup_fraction", "betas", "weight_decay", "max_grad_norm", "lora")  # what changes the result


class Diverged(RuntimeError):
    """The gradient was not finite several times in a row, or the held-out loss is not; checkpoints are intact."""

    exit_status = 3


def begin_stage(cfg: SFTConfig, where: Dist, stage: str, settings: dict, outputs: tuple[str, ...]) -> None:
    """Make `out` ready: remove `outputs` on overwrite, refuse those that other settings began, save the config."""
    if where.rank == 0:
        there = [path for name in outputs for path in glob.glob(os.path.join(glob.escape(cfg.out), name))]
        if cfg.overwrite:
            for path in there:
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        begun = not cfg.overwrite and any(map(os.path.getsize, there))
        check_settings(os.path.join(cfg.out, f"{stage}.settings.json"), settings, begun)
        save_config(cfg, os.path.join(cfg.out, "config.yaml" if stage == "train" else "sample.config.yaml"))
    distributed.broadcast_object(None)


def read_result(path: str) -> dict | None:
    """The figures of a stage that is complete, None of one that is not."""
    if not os.path.exists(path):
        return None
    print0(f"{path} is there: nothing to do; overwrite=true repeats this stage")
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_result(path: str, result: dict) -> None:
    with atomic_write(path) as f:
        json.dump(result, f, indent=1)


# --------------------------------------------------------------------------------------------------- warm-up: records

def select_records(turns: list[Turn], rows: list[dict], ranks: dict[tuple[str, int], int | None], max_rank: int,
                   keep_per_turn: int) -> list[dict]:
    """Records of the responses whose rank, by (query id, sample), is at most `max_rank`, in the order of `turns`."""
    good: dict[str, list[dict]] = {}
    for row in rows:
        rank = ranks.get((row["query_id"], row["sample"]))
        if rank is not None and rank <= max_rank:
            good.setdefault(row["query_id"], []).append(row | {"rank": rank})
    records = []
    for turn in turns:
        kept: dict[str, dict] = {}  # response → its best row
        for row in sorted(good.get(turn.query_id, []), key=lambda r: (r["rank"], r["sample"])):
            kept.setdefault(row["response"].strip(), row)
        for i, (response, row) in enumerate(list(kept.items())[:keep_per_turn]):
            query_id = f"{turn.query_id}#{row['sample']}" if i else turn.query_id
            record = dataclasses.replace(turn, query_id=query_id, response=response).record()
            records.append(record | {"rank": row["rank"], "sample": row["sample"]})
    return records


def rank_rewrites(retriever, turns: list[Turn], rows: list[dict], where: Dist) -> tuple[dict, int]:
    """((query id, sample) → rank of the well-formed rows, technical failures left out; number of searches).

    Equal rewrites of a turn are searched once, each process searches its share.
    """
    golds = {t.query_id: t.gold_ids for t in turns}
    good = [row for row in rows if row["status"] == "ok"]
    searches = list(dict.fromkeys((row["query_id"], row["rewrite"]) for row in good))
    mine = searches[where.rank::where.world]
    found = retriever.gold_ranks([text for _, text in mine], [golds[q] for q, _ in mine], cutoff=100)
    rank_of = {search: rank for part in distributed.gather_objects(list(zip(mine, found))) for search, rank in part}
    ranks = {(row["query_id"], row["sample"]): rank_of[row["query_id"], row["rewrite"]] for row in good}
    return {key: rank for key, rank in ranks.items() if rank is None or not math.isnan(rank)}, len(searches)


def sample_settings(cfg: SFTConfig) -> dict:
    """What decides the records, files by their content."""
    files = {key: path_with_digest(getattr(cfg, key)) for key in ("model", "turns", "examples")}
    return files | {key: getattr(cfg, key) for key in SAMPLE_KEYS} | retriever_settings(cfg.retriever)


def sample_records(cfg: SFTConfig, where: Dist) -> dict:
    """Write `<out>/records.jsonl` and `sample_stats.json`; returns the statistics.  Nothing to do if they are there.

    DataError if no record is left.
    """
    stats_path, records_path = (os.path.join(cfg.out, name) for name in ("sample_stats.json", "records.jsonl"))
    begin_stage(cfg, where, "sample", sample_settings(cfg),
                ("samples.jsonl", "samples.jsonl.done", "samples.jsonl.rank*", "records.jsonl", "sample_stats.json"))
    stats = read_result(stats_path)
    if stats is None:
        retriever = open_retriever(cfg.retriever)
        turns, without_gold = data.with_gold(data.read_turns(cfg.turns), retriever.passage_ids, cfg.turns)
        if cfg.max_turns is not None and cfg.max_turns < len(turns):
            turns = [turns[i] for i in sorted(random.Random(cfg.seed).sample(range(len(turns)), cfg.max_turns))]
        rows, summary = infer.respond(infer.InferConfig(
            model=cfg.model, turns=cfg.turns, out=os.path.join(cfg.out, "samples.jsonl"), prompt="few-shot",
            examples=cfg.examples, samples=cfg.samples_per_turn, temperature=cfg.temperature,
            max_response_tokens=cfg.max_response_tokens,
            max_prompt_tokens=cfg.max_prompt_tokens, seed=cfg.seed, chunk=cfg.chunk, engine=cfg.engine),
            turns, where)
        ranks, searches = rank_rewrites(retriever, turns, rows, where)
        records = select_records(turns, rows, ranks, cfg.max_rank, cfg.keep_per_turn)
        good = {key for key, rank in ranks.items() if rank is not None and rank <= cfg.max_rank}
        stats = {"turns": len(turns), "turns_without_gold": without_gold, "samples": len(rows),
                 "well_formed": summary["ok"], **{k: summary[k] for k in ("malformed", "too_long", "engine_error")},
                 "searches": searches, "search_failed": summary["ok"] - len(ranks),
                 "found_in_100": sum(rank is not None for rank in ranks.values()), "within_max_rank": len(good),
                 "turns_covered": len({query_id for query_id, _ in good}), "kept": len(records),
                 "mean_tokens": round(sum(row["tokens"] for row in rows) / len(rows), 1)}
        print0("sample: " + " | ".join(f"{key} {value}" for key, value in stats.items()))
        if where.rank == 0:
            write_jsonl(records_path, records)
            write_result(stats_path, stats)
        distributed.broadcast_object(None)
    if not stats["kept"]:
        raise DataError(f"{records_path}: none of {stats['samples']} samples is kept, {stats['well_formed']} are well "
                        "formed; raise samples_per_turn or max_rank, or give examples that this model follows")
    return stats


# ------------------------------------------------------------------------------------------------------ training rows

@dataclass(frozen=True)
class Example:
    """One training row."""

    tokens: list[int]  # T+1
    loss_mask: list[int]  # T
    conversation_id: str


@dataclass
class Batch:
    """Padded rows; the shift by one is done: entry t of the mask belongs to the prediction of tokens[t+1]."""

    tokens: Tensor  # (B, T+1) int64
    attention_mask: Tensor  # (B, T+1) int64
    loss_mask: Tensor  # (B, T) bool
    prompt_lengths: Tensor  # (B,) int64: tokens before the first that is trained


def human_response(question: str, rewrite: str) -> str:
    """A target made of a human rewrite: the think block lists the words that it adds to the question."""
    known = set(question.lower().split())
    added = [word for word in rewrite.split() if word.lower() not in known]
    return response_text("missing: " + (" ".join(added) or "nothing"), rewrite)


def make_examples(turns: list[Turn], tokenizer, cfg: SFTConfig, path: str) -> tuple[list[Example], Counter]:
    """Rows (zero-shot prompt, target, EOS), and how many turns were dropped why.  DataError if none is left."""
    eos_id = eos_token_ids(tokenizer)[0]
    examples, dropped, malformed = [], Counter(), 0
    for turn in turns:
        target = turn.response
        if cfg.target == "rewrite":
            target = human_response(turn.question, turn.rewrite) if (turn.rewrite or "").strip() else None
        if not (target or "").strip():
            dropped[f"without {cfg.target}"] += 1
            continue
        malformed += not parse_response(target).well_formed
        prompt_ids = encode_chat(tokenizer, rewrite_prompt(turn))
        example = Example(*encode_example(tokenizer, prompt_ids, target, eos_id), turn.conversation_id)
        if len(example.tokens) > cfg.max_length:
            dropped[f"longer than {cfg.max_length} tokens"] += 1
        else:
            examples.append(example)
    if not examples:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(f"{path}: none of its {len(turns)} turns can be trained on ({why}); raise max_length, or give "
                        f"turns with a `{cfg.target}`")
    if malformed:
        print0(f"note: {malformed} of the {len(turns)} targets of {path} are not one think block and one rewrite block; "
               "they are trained, but inference and rewards will call such responses malformed")
    return examples, dropped


def make_trajectory_examples(rows: list[dict], tokenizer, cfg: SFTConfig, path: str) -> tuple[list[Example], Counter]:
    """Rows whose assistant's turns are trained, and how many were dropped why.  DataError if none is left."""
    examples, dropped = [], Counter()
    for row in rows:
        if row.get("error"):
            dropped["failed for a technical reason"] += 1
        elif row.get("end", "answered") not in ENDED:
            dropped[f"ended as {row['end']}"] += 1
        elif row["messages"][-1]["role"] != "assistant" or trajectories.is_blank(row["messages"][-1]):
            dropped["without a last answer"] += 1
        else:
            try:
                example = Example(*trajectories.encode(tokenizer, row), trajectories.question_key(row))
            except DataError as e:
                raise DataError(f"{path}: {e}") from e
            if not any(example.loss_mask):
                dropped["without a turn to train"] += 1
            elif len(example.tokens) > cfg.max_length:
                dropped[f"longer than {cfg.max_length} tokens"] += 1
            else:
                examples.append(example)
    if not examples:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(f"{path}: none of its {len(rows)} trajectories can be trained on ({why}); raise max_length, or "
                        "give trajectories that end in an answer")
    return examples, dropped


def split_heldout(examples: list[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(train, held out): whole conversations, drawn with the seed; the only conversation is never held out."""
    conversations = sorted({e.conversation_id for e in examples})
    random.Random(seed).shuffle(conversations)
    count = min(max(1, round(fraction * len(conversations))), len(conversations) - 1) if fraction > 0 else 0
    held = set(conversations[:count])
    return [e for e in examples if e.conversation_id not in held], [e for e in examples if e.conversation_id in held]


def steps_per_epoch(rows: int, cfg: SFTConfig) -> int:
    return math.ceil(rows / cfg.sequences_per_step)


def step_examples(rows: list[Example], step: int, cfg: SFTConfig) -> list[Example]:
    """The rows of optimizer step `step` (from 0): a function of seed and step, so a resumed run is in its place."""
    epoch, position = divmod(step, steps_per_epoch(len(rows), cfg))
    order = list(range(len(rows)))
    random.Random(f"{cfg.seed} {epoch}").shuffle(order)
    return [rows[i] for i in order[position * cfg.sequences_per_step:(position + 1) * cfg.sequences_per_step]]


@one_thread()
def collate(rows: list[Example], pad_id: int) -> Batch:
    """Right-padded tensors on the CPU; masks go by position, so pad may be EOS.  No rows: one that trains nothing."""
    rows = rows or [Example([pad_id, pad_id], [0], "")]
    width = max(len(r.tokens) for r in rows)
    fill = [width - len(r.tokens) for r in rows]
    starts = [r.loss_mask.index(1) + 1 if any(r.loss_mask) else len(r.loss_mask) for r in rows]
    return Batch(torch.tensor([r.tokens + [pad_id] * n for r, n in zip(rows, fill)]),
                 torch.tensor([[1] * len(r.tokens) + [0] * n for r, n in zip(rows, fill)]),
                 torch.tensor([r.loss_mask + [0] * n for r, n in zip(rows, fill)], dtype=torch.bool),
                 torch.tensor(starts))


def micro_batches(rows: list[Example], budget: int, pad_id: int, where: Dist) -> list[Batch]:
    """This process's share of `rows`: batches of at most `budget` tokens (or one row), as many on every process.

    The longest first, each row goes where least is so far, so that batches and processes have about equal work.
    """
    ordered = sorted(rows, key=lambda r: len(r.tokens), reverse=True)
    needed = min(len(rows), math.ceil(sum(len(r.tokens) for r in rows) / budget))
    count = max(1, math.ceil(needed / where.world)) * where.world
    while True:
        parts, filled = [[] for _ in range(count)], [0] * count
        for row in ordered:
            at = filled.index(min(filled))
            parts[at].append(row)
            filled[at] += len(row.tokens)
        if all(size <= budget or len(part) == 1 for size, part in zip(filled, parts)):
            return [collate(part, pad_id) for part in parts[where.rank::where.world]]
        count += where.world


# ----------------------------------------------------------------------------------------------------------- training

def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], tokens: int, lr: float,
               max_grad_norm: float, world: int = 1) -> tuple[float, float]:
    """One update on this process's `batches`; `tokens`: trained tokens over all processes.

    Loss: -sum of log-probabilities / tokens.  Returns (this process's part of it, gradient norm before clipping); where
    the norm is not finite nothing was updated.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for i, batch in enumerate(batches):
        if hasattr(model, "set_requires_gradient_sync"):  # one reduction a step, weights gathered once
            model.set_requires_gradient_sync(i == len(batches) - 1)
            model.set_reshard_after_backward(i == len(batches) - 1)
        packed = packed_batch(model, batch)
        loss = -packed_logprobs(model, packed).sum() / tokens  # zero where nothing is trained
        (loss * world).backward()  # FSDP averages over processes; a sum is meant
        total = total + loss.detach()
    norm = distributed.clip_grad_norm(model, max_grad_norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total), norm


def packed_batch(model: nn.Module, batch: Batch) -> Packed:
    """The batch laid out for the model: what all its prompts begin with, the instruction, is computed once."""
    groups = (batch.prompt_lengths, torch.arange(len(batch.tokens)))  # every row is a group of its own
    return pack(model, batch.tokens, batch.attention_mask, batch.loss_mask, groups)


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """{"heldout_loss" (nats a token), "heldout_accuracy"} over all processes; padding and prompts count nowhere."""
    sums = [0.0, 0.0, 0.0]
    for batch in batches:
        logprobs, top = packed_logprobs(model, packed_batch(model, batch), extra="top")  # zero where nothing is trained
        sums = [sums[0] - float(logprobs.sum()), sums[1] + float(top.sum()), sums[2] + float(batch.loss_mask.sum())]
    nll, correct, tokens = distributed.all_reduce_sum(sums)
    if not math.isfinite(nll):
        raise Diverged(f"the held-out loss is {nll}: the weights are damaged; lower lr or take another model")
    return {"heldout_loss": nll / tokens, "heldout_accuracy": correct / tokens}


def log_step(path: str, row: dict, total: int, rest: str, where: Dist) -> None:
    """A line of metrics.jsonl and one of the terminal."""
    if where.rank == 0:
        append_metrics(path, row)
    forms = {"epoch": "d", "loss": ".4f", "grad_norm": ".3f", "lr": ".2e", "tokens": "d", "skipped": "d",
             "seconds": ".1f", "heldout_loss": ".4f", "heldout_accuracy": ".3f"}
    shown = (f"{k} {row[k]:{form}}" for k, form in forms.items() if k in row)
    print0(" | ".join([f"step {row['step']:05d}/{total:05d}", *shown, rest]))


def export(model: nn.Module, tokenizer, cfg: SFTConfig) -> None:
    """Write `<out>/final`: the adapter where there is one, else the model (a collective)."""
    final = os.path.join(cfg.out, "final")
    if cfg.lora.r is None:
        distributed.export_hf(model, tokenizer, final, getattr(torch, cfg.export_dtype))
    else:
        distributed.export_adapter(model, tokenizer, final)


def train_on(model: nn.Module, tokenizer, rows: list[Example], heldout: list[Example], cfg: SFTConfig, where: Dist,
             pad_id: int) -> dict:
    """Fine-tune a sharded model, from the newest checkpoint in `cfg.out` if there is one; every process calls it.

    The epoch with the lowest held-out loss (without held-out rows: the last) is exported to `<out>/final`; returns
    its figures.  SystemExit 143 after SIGTERM, 130 after Ctrl-C, with a checkpoint saved; Diverged after
    `max_bad_steps` bad steps in a row.
    """
    per_epoch = steps_per_epoch(len(rows), cfg)
    total, metrics = per_epoch * cfg.epochs, os.path.join(cfg.out, "metrics.jsonl")
    optimizer = make_optimizer(model, cfg.lr, tuple(cfg.betas), cfg.weight_decay)
    held_batches = micro_batches(heldout, cfg.micro_batch_tokens, pad_id, where) if heldout else []
    best: dict = {}
    start, bad, skipped = 0, 0, 0
    torch.manual_seed(cfg.seed + where.rank)  # dropout's draws; a checkpoint brings the state that it was saved in
    if found := distributed.latest_checkpoint(cfg.out):
        distributed.load_checkpoint(found[0], model, optimizer)
        start, best, bad, skipped = (found[1][k] for k in ("step", "best", "bad", "skipped"))
        print0(f"train: resumed from {found[0]}, step {start} of {total}")
    if where.rank == 0:
        begin_metrics(metrics, start)
    if start == 0 and heldout:
        log_step(metrics, {"step": 0} | heldout_loss(model, held_batches), total, "before training", where)
    began = time.monotonic()
    with distributed.noted_signals() as noted:
        for step in range(start, total):
            clock = time.monotonic()
            batch = step_examples(rows, step, cfg)
            tokens = sum(sum(r.loss_mask) for r in batch)
            lr = lr_at(step, cfg.lr, math.ceil(total * cfg.warmup_fraction), total, cfg.schedule)
            adapter_dropout(model, True)
            parts = micro_batches(batch, cfg.micro_batch_tokens, pad_id, where)
            loss, norm = train_step(model, optimizer, parts, tokens, lr, cfg.max_grad_norm, where.world)
            adapter_dropout(model, False)
            loss = sum(distributed.gather_objects(loss))
            finite, epoch, epoch_ends = math.isfinite(norm), step // per_epoch + 1, (step + 1) % per_epoch == 0
            bad, skipped = 0 if finite else bad + 1, skipped + (not finite)
            row = {"step": step + 1, "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": tokens,
                   "sequences": len(batch), "skipped": skipped}
            if epoch_ends:
                held = heldout_loss(model, held_batches) if heldout else {}
                row |= held
                if not best or not held or held["heldout_loss"] < best["heldout_loss"]:
                    best = {"best_epoch": epoch, **held}
                    export(model, tokenizer, cfg)
            left = (time.monotonic() - began) / (step + 1 - start) * (total - step - 1)
            log_step(metrics, row | {"seconds": round(time.monotonic() - clock, 3)}, total, f"{left:.0f} s left", where)
            if bad >= cfg.max_bad_steps:
                raise Diverged(f"step {step + 1}: the gradient was not finite {bad} times in a row; lower lr (now "
                               f"{cfg.lr:g}) and begin anew with overwrite=true")
            stop = distributed.signal_of_any(noted)
            if epoch_ends or stop or (step + 1) % cfg.save_every == 0:
                distributed.save_checkpoint(cfg.out, step + 1, model, optimizer,
                                  {"best": best, "bad": bad, "skipped": skipped}, cfg.keep_checkpoints)
            if stop and step + 1 < total:
                print0(f"stopped by signal {stop} after step {step + 1} of {total}; the same command continues")
                raise SystemExit(128 + stop)
    return {"steps": total, "skipped": skipped, **best}


def train(cfg: SFTConfig, where: Dist) -> dict:
    """Train on the records; `<out>/final` is a Hugging Face folder afterwards.  Returns what result.json holds."""
    path, final = cfg.records or os.path.join(cfg.out, "records.jsonl"), os.path.join(cfg.out, "final")
    agentic, result_path = trajectories.holds_trajectories(path), os.path.join(cfg.out, "result.json")
    if agentic and cfg.target != "response":
        raise ConfigError(f"target={cfg.target} is for turns; {path} holds trajectories, whose own texts are trained")
    records = trajectories.read_trajectories(path) if agentic else data.read_turns(path)
    files = {"model": path_with_digest(cfg.model), "records": path_with_digest(path)}
    begin_stage(cfg, where, "train", files | {key: dataclasses.asdict(cfg)[key] for key in TRAIN_KEYS},
                ("metrics.jsonl", "checkpoint_*", "final", "result.json", "report.html"))
    if result := read_result(result_path):
        return result
    tokenizer = load_tokenizer(cfg.model)
    examples, dropped = (make_trajectory_examples if agentic else make_examples)(records, tokenizer, cfg, path)
    rows, heldout = split_heldout(examples, cfg.heldout_fraction, cfg.seed)
    steps = steps_per_epoch(len(rows), cfg)
    print0(f"train: {len(records)} records" + "".join(f" - {count} {reason}" for reason, count in dropped.items())
           + f" - {len(heldout)} held out ({len({e.conversation_id for e in heldout})} conversations) = {len(rows)}; "
           f"{cfg.epochs} epochs × {steps} steps = {cfg.epochs * steps} steps of "
           f"{min(cfg.sequences_per_step, len(rows))} sequences / {where.world} processes, "
           f"packed to {cfg.micro_batch_tokens} tokens; "
           f"{sum(sum(e.loss_mask) for e in rows)} of {sum(len(e.tokens) for e in rows)} tokens are trained")
    cuda = where.device.type == "cuda"
    if adapter_base(cfg.model) and not cfg.lora.r:
        print0(f"{cfg.model} is an adapter: it is merged and all weights are trained; its own lora.r would go on with it")
    model = load_causal_lm(cfg.model, torch.bfloat16 if cuda and cfg.lora.r else torch.float32, where.device,
                           cfg.gradient_checkpointing, cfg.lora, cfg.seed, compiled=cuda and cfg.compile)
    if cfg.lora.r:
        trained, whole = (sum(p.numel() for p in model.parameters() if p.requires_grad >= least) for least in (1, 0))
        print0(f"train: LoRA with rank {cfg.lora.r}: {trained} of {whole} parameters = {100 * trained / whole:.2f} %")
    vocabulary, longest = model.get_input_embeddings().num_embeddings, max(len(e.tokens) for e in examples)
    if (largest := max(max(e.tokens) for e in examples)) >= vocabulary:
        raise DataError(f"{path}: token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is outside the "
                        f"vocabulary of {vocabulary} that {cfg.model} has embeddings for; use the tokenizer that "
                        "belongs to the model")
    limits = [getattr(model.config.get_text_config(), k, None) for k in ("max_position_embeddings", "sliding_window")]
    if longest > (positions := min([limit for limit in limits if limit], default=longest)):
        raise ConfigError(f"a row of {path} has {longest} tokens, but {cfg.model} has {positions} positions (or as wide "
                          "a sliding window, which packed attention has not); set "
                          f"max_length={positions} or less: longer rows are then dropped and counted")
    pad_id = pad_token_id(tokenizer, eos_token_ids(tokenizer), vocabulary)
    distributed.shard_model(model, where, bf16=cuda, gather_once=True)
    result = {"model": final, "records": len(rows), "heldout": len(heldout), "dropped": sum(dropped.values()),
              **train_on(model, tokenizer, rows, heldout, cfg, where, pad_id)}
    if where.rank == 0:
        write_result(result_path, result)
        report.run_page(cfg.out)
    return result


# -------------------------------------------------------------------------------------------------------------- merge

MERGE_LIMIT = {"float32": 0.02, "bfloat16": 0.3}  # mean |difference| in nats a token that rounding explains, and more


@torch.no_grad()
def merge(cfg: SFTConfig, where: Dist) -> dict:
    """Write an adapter and its base as one Hugging Face folder, and compare what is there with the unmerged model.

    W + scaling · B·A is computed in float32 and rounded once.  Both are run in the dtype that is written, on a text of
    the project; returns the mean |difference| of their log-probabilities and the share of equal most probable tokens.
    """
    base = adapter_base(cfg.model)
    if base is None:
        final = os.path.join(cfg.model, "final")
        hint = f"; the run's adapter is model={final}" if adapter_base(final) else ""
        raise ConfigError(f"model={cfg.model} is no adapter's folder (it has no adapter_config.json): nothing to merge{hint}")
    if where.world > 1:
        raise ConfigError(f"stage=merge is work for one process, not {where.world}; start it without torchrun")
    if os.path.exists(cfg.out) and os.listdir(cfg.out) and not cfg.overwrite:
        raise ConfigError(f"out={cfg.out} is there already; choose another folder, or overwrite=true")
    tokenizer, dtype = load_tokenizer(cfg.model), getattr(torch, cfg.export_dtype)
    distributed.export_hf(load_causal_lm(cfg.model), tokenizer, cfg.out, dtype)
    ids = torch.tensor([tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]], device=where.device)
    logprobs = [load_causal_lm(path, dtype, where.device, lora=lora)(ids).logits[0].float().log_softmax(-1)
                for path, lora in ((cfg.model, adapter_settings(cfg.model)), (cfg.out, None))]  # (T, V) each
    gap = (logprobs[0] - logprobs[1]).gather(-1, logprobs[0].argmax(-1, keepdim=True)).abs().mean().item()
    same = (logprobs[0].argmax(-1) == logprobs[1].argmax(-1)).double().mean().item()
    if not gap <= MERGE_LIMIT[cfg.export_dtype]:
        raise ModelError(f"{cfg.out} differs from the unmerged model by {gap:.4g} nats a token; write it in float32, "
                         "or mend base_model_name_or_path in the adapter_config.json")
    return {"model": cfg.out, "base": base, "dtype": cfg.export_dtype, "gap": round(gap, 6), "same": round(same, 4)}


# -------------------------------------------------------------------------------------------------------- entry point

def check(cfg: SFTConfig) -> None:
    """Raise ConfigError for settings that cannot work, before anything is loaded."""
    for name in ["model", "out"] + ["turns", "examples"] * (cfg.stage in ("all", "sample")):
        if not getattr(cfg, name):
            raise ConfigError(f"{name} is empty; stage={cfg.stage} needs {name}=…")
    if cfg.stage == "all" and cfg.records:
        raise ConfigError(f"records={cfg.records} is for stage=train; stage=all trains on the records that it samples")
    for name in ("samples_per_turn", "max_rank", "keep_per_turn", "max_response_tokens", "epochs", "sequences_per_step",
                 "micro_batch_tokens", "save_every", "keep_checkpoints", "max_bad_steps", "chunk", "max_turns"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it must be at least 1")
    if cfg.samples_per_turn > 1 and cfg.temperature == 0:
        raise ConfigError(f"samples_per_turn={cfg.samples_per_turn} at temperature 0 are all equal; raise temperature")
    if not 0 <= cfg.gradient_checkpointing <= 1:
        raise ConfigError(f"gradient_checkpointing={cfg.gradient_checkpointing} is a share of the layers: from 0 "
                          "(none) to 1 (all)")
    if not 0 <= cfg.heldout_fraction < 1 or not 0 <= cfg.warmup_fraction <= 1:
        raise ConfigError(f"heldout_fraction={cfg.heldout_fraction} must be in [0, 1) and warmup_fraction="
                          f"{cfg.warmup_fraction} in [0, 1]")
    for name in ("lr", "max_grad_norm"):
        if not getattr(cfg, name) > 0:
            raise ConfigError(f"{name}={getattr(cfg, name)}; it must be above 0")
    if not 0 <= cfg.weight_decay < math.inf or cfg.lr == math.inf:
        raise ConfigError(f"lr={cfg.lr} and weight_decay={cfg.weight_decay} must be finite, and not below 0")
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f"betas={cfg.betas}; AdamW takes two, in [0, 1)")
    Sampling(temperature=cfg.temperature)  # its errors
    check_engine(cfg.engine)


def main(cfg: SFTConfig) -> dict | None:
    """Sample records, train on them, or both; returns the figures of what was done (rank 0)."""
    check(cfg)
    where = distributed.setup()
    try:
        if cfg.stage == "merge":
            return merge(cfg, where)
        result: dict = {}
        with only_writer(cfg.out) if where.rank == 0 else contextlib.nullcontext():
            if cfg.stage != "train":
                result["sample"] = sample_records(cfg, where)
            gc.collect()  # the engine's model
            if where.device.type == "cuda":
                torch.cuda.empty_cache()
            if cfg.stage != "sample":
                result["train"] = train(cfg, where)
        return result if where.rank == 0 else None
    finally:
        distributed.cleanup()


if __name__ == "__main__":
    run(SFTConfig, main)
