"""Supervised fine-tuning, and the warm-up that makes its targets (arXiv 2505.15776 §3.3).

`stage=sample`: the model answers the training turns (targets.py). `stage=train`: these records, or
trajectories of the tasks search and agent, are trained with the zero-shot prompt; the epoch with
the lowest held-out loss is exported. `stage=all`: both. `stage=merge`: a LoRA adapter becomes a
whole model. Shapes: B sequences, T predicted positions.
"""

from __future__ import annotations

import gc
import math
import os
import random
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

import config
import data
import distributed
import report
import runs
import targets
import training
from batching import MicroBatch, assign_groups, plan_updates, training_batch
from config import ConfigError, Only, Positive, at_least, between
from data import DataError
from distributed import Dist, print0
from engines.base import EngineConfig, Rollout
from episodes import trajectories
from lora import ModelError, adapter_base, adapter_dropout
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer
from packing import packed_logprobs
from prompts import INSTRUCTION, eos_token_ids, pad_token_id
from retriever import RetrieverConfig
from rollout import check_engine
from scoring.trackers import check_trackers
from targets import Example
from training import Clock, Stopped, TrainConfig, load_policy


@dataclass
class SFTConfig(TrainConfig):
    stage: Literal["all", "sample", "train", "merge"] = "all"
    """sample: write records; train: on records; all: both; merge: an adapter and its base →
    `out`"""
    overwrite: bool = False
    """remove what an earlier run of the same stage left in `out`"""
    turns: str = ""
    """sample: turns file with gold passages"""
    instruction: str = ""
    """a text file with the prompt's instruction; empty: prompts.INSTRUCTION"""
    examples: str = ""
    """sample: few-shot examples (JSONL with context, question, think, rewrite)"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """sample: what ranks the gold passages"""
    max_turns: Annotated[int | None, at_least(1)] = None
    """sample: use so many turns, drawn with the seed; unset: all"""
    samples_per_turn: Positive = 1
    """sample: responses a turn"""
    temperature: Annotated[float, at_least(0)] = 0.7
    """sample: logits are divided by it"""
    max_response_tokens: Positive = 1024
    """sample: new tokens of a response at most"""
    max_prompt_tokens: Positive = 4096
    """sample: turns with a longer few-shot prompt are not sampled, and counted"""
    max_rank: Positive = 1
    """sample: keep responses whose gold passage is at this rank or a better one"""
    keep_per_turn: Positive = 1
    """sample: different responses of a turn that are kept; all but the first as <id>#<sample>"""
    chunk: Positive = 64
    """sample: turns between two writes"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """sample: what samples"""

    records: Annotated[str, Only("stage", ("train",))] = ""
    """turns with `response`, or trajectories; empty: what stage=sample wrote to `out`"""
    target: Literal["response", "rewrite"] = "response"
    """train: on `response`, or on the human `rewrite` behind the words that it adds"""
    max_length: Positive = 3072
    """train: longer rows (prompt and response, in tokens) are dropped and counted"""
    heldout_fraction: Annotated[float, between(0, 0.999)] = 0.1
    """train: share of the conversations that is held out, above 0 at least one of them"""
    epochs: Positive = 2
    """train: passes over the records"""
    sequences_per_step: Positive = 64
    """train: sequences of a step, over all processes; an epoch's last takes what is left"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """train: what follows the warm-up"""
    warmup_fraction: Annotated[float, between(0, 1)] = 0.1
    """train: share of the steps with a rising learning rate"""


TRAIN_KEYS = (  # what changes the result
    "seed target max_length heldout_fraction epochs sequences_per_step lr schedule "
    "warmup_fraction betas weight_decay max_grad_norm lora"
).split()


@dataclass(kw_only=True)
class Run(training.Run):
    """The state of a fine-tuning run, validated after every epoch; final/ is the best epoch's."""

    kept: ClassVar[str] = "final"
    cfg: SFTConfig
    rows: list[Example]
    heldout: list[MicroBatch]  # this process's share
    pad_id: int


# ---- one step


def steps_per_epoch(rows: int, cfg: SFTConfig) -> int:
    return math.ceil(rows / cfg.sequences_per_step)


def step_examples(rows: list[Example], step: int, cfg: SFTConfig) -> list[Example]:
    """The rows of optimizer step `step` (from 0), a function of seed and step alone."""
    epoch, position = divmod(step, steps_per_epoch(len(rows), cfg))
    order, size = list(rows), cfg.sequences_per_step
    random.Random(f"{cfg.seed} {epoch}").shuffle(order)
    return order[position * size : (position + 1) * size]


def step_batches(
    model: nn.Module, rows: list[Example], budget: int, pad_id: int, dist: Dist
) -> list[MicroBatch]:
    """This process's share of `rows`, in micro-batches."""
    sizes = {i: len(row.tokens) for i, row in enumerate(rows)}
    owners = assign_groups([sizes] + [{}] * (dist.world - 1))
    mine = [i for (_, i), owner in sorted(owners.items()) if owner == dist.rank]
    rollouts = [as_rollout(rows[i], number) for number, i in enumerate(mine)]
    batch = training_batch(rollouts, [0.0] * len(mine), pad_id)
    (update,) = plan_updates(model, batch, dist.device, budget)
    return update.micro_batches


def as_rollout(row: Example, number: int) -> Rollout:
    """The row as a group of one: the tokens before the first trained one are the prompt."""
    start = row.loss_mask.index(1) + 1 if any(row.loss_mask) else len(row.loss_mask)
    response, mask = row.tokens[start:], row.loss_mask[start - 1 :]
    return Rollout(row.tokens[:start], response, [0.0] * len(response), mask, number, "eos")


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[MicroBatch],
    tokens: int,
    lr: float,
    max_grad_norm: float,
    world: int = 1,
) -> tuple[float, float]:
    """One update by the loss -Σ log p / tokens; `tokens`: trained ones over all processes.

    Returns (this process's part of the loss, gradient norm before clipping); with a norm that is
    not finite nothing is updated.
    """

    def loss(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        own = -packed_logprobs(model, micro.packed).sum() / tokens  # zero where nothing is trained
        return own, own.detach()

    training.set_lr(optimizer, lr)
    parts = training.backward(model, batches, loss, world)
    norm = distributed.clip_grad_norm(model, max_grad_norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return float(sum(part for (part,) in parts)), norm


def fit(run: Run, step: int) -> dict:
    """Take optimizer step `step`, from 0, and print its line; returns its log row."""
    cfg, clock, batch = run.cfg, Clock(run.dist.device), step_examples(run.rows, step, run.cfg)
    tokens = sum(sum(row.loss_mask) for row in batch)
    lr = lr_at(step, cfg.lr, math.ceil(run.steps * cfg.warmup_fraction), run.steps, cfg.schedule)
    with clock("update"):
        adapter_dropout(run.policy, True)
        parts = step_batches(run.policy, batch, cfg.micro_batch_tokens, run.pad_id, run.dist)
        loss, norm = train_step(
            run.policy, run.optimizer, parts, tokens, lr, cfg.max_grad_norm, run.dist.world
        )
        adapter_dropout(run.policy, False)
    row = {
        "step": step + 1,
        "epoch": step // run.validate_every + 1,
        "loss": sum(distributed.gather_objects(loss)),
        "lr": lr,
        "grad_norm": norm,
        "skipped": int(not math.isfinite(norm)),
        "tokens": tokens,
        "sequences": len(batch),
        **clock.seconds,
    }
    print0(
        f"step {row['step']:05d}/{run.steps:05d} | epoch {row['epoch']} | loss {row['loss']:.4f} | "
        f"norm {norm:.3f} | lr {lr:.2e} | left {training.time_left(run, row)}"
    )
    return row


# ---- the loop


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: list[MicroBatch]) -> dict[str, float]:
    """Loss in nats a token, and accuracy, over all processes' trained tokens."""
    sums = [0.0, 0.0, 0.0]
    for micro in batches:
        logprobs, top = packed_logprobs(model, micro.packed, extra="top")  # zero where not trained
        found = -logprobs, top, micro.part.loss_mask
        sums = [total + float(values.sum()) for total, values in zip(sums, found)]
    nll, correct, tokens = distributed.all_reduce_sum(sums)
    if not math.isfinite(nll):
        raise Stopped(f"the held-out loss is {nll}: damaged weights; lower lr or change the model")
    return {"heldout_loss": nll / tokens, "heldout_accuracy": correct / tokens}


def validate(run: Run, step: int) -> dict[str, float]:
    """Figures of the held-out rows; keeps the best epoch, or the last if nothing is held out."""
    figures = heldout_loss(run.policy, run.heldout) if run.heldout else {}
    if step:
        value = -figures["heldout_loss"] if figures else step
        training.keep_best(run, step, value, best_epoch=step // run.validate_every, **figures)
    if figures:
        shown = (f"{key.replace('_', ' ')} {value:.4f}" for key, value in figures.items())
        print0(" | ".join([f"validation {step:05d}/{run.steps:05d}", *shown]))
    return figures


def records_path(cfg: SFTConfig) -> str:
    return cfg.records or os.path.join(cfg.out, "records.jsonl")


def train(cfg: SFTConfig, dist: Dist) -> dict:
    """Train on the records, into `<out>/final`; returns the content of result.json."""
    path = records_path(cfg)
    agentic = trajectories.holds_trajectories(path)
    for key in ("target", "instruction") if agentic else ():
        if (value := getattr(cfg, key)) != getattr(SFTConfig, key):
            raise ConfigError(f"{key}={value} is for turns, but {path} holds trajectories")
    records = trajectories.read_trajectories(path) if agentic else data.read_turns(path)
    settings = runs.settings(cfg, TRAIN_KEYS, ("model", "instruction"))
    settings["records"] = runs.path_with_digest(path)
    outputs = "metrics.jsonl", "checkpoint_[0-9]*", "report.html", "final", "result.json"
    if result := targets.begin_stage(cfg, dist, "train", settings, *outputs):
        return result
    tokenizer = load_tokenizer(cfg.model)
    examples, dropped = targets.make_examples(records, tokenizer, cfg, path, agentic)
    print0(
        f"train: {len(records)} records"
        + "".join(f" - {count} {reason}" for reason, count in dropped.items())
        + f" = {len(examples)} rows of {sum(len(e.tokens) for e in examples)} tokens, "
        f"{sum(sum(e.loss_mask) for e in examples)} of them trained"
    )
    rows, heldout = targets.split_heldout(examples, cfg.heldout_fraction, cfg.seed)
    run = start(cfg, dist, settings, tokenizer, rows, heldout)
    with distributed.noted_signals() as noted:
        row = training.resume(run)
        training.steps(run, row, fit, validate, noted)
    result = {
        "model": os.path.join(cfg.out, "final"),
        "records": len(rows),
        "heldout": len(heldout),
        "dropped": sum(dropped.values()),
        "steps": run.steps,
        "skipped": sum(row["skipped"] for row in run.history),
        **{key: value for key, value in run.best.items() if key not in ("value", "step")},
    }
    if dist.rank == 0:
        runs.write_json(os.path.join(cfg.out, "result.json"), result)
        report.run_page(cfg.out)
    return result


def start(cfg: SFTConfig, dist: Dist, settings: dict, tokenizer, rows: list, heldout: list) -> Run:
    """Load and shard the model, with an adapter if `lora` asks for one."""
    cuda = dist.device.type == "cuda"
    with distributed.in_turn():
        model = load_policy(cfg, cuda)
        distributed.shard_model(model, dist, bf16=cuda, gather_once=True)
    vocabulary = check_fit(model, tokenizer, rows + heldout, cfg)
    pad_id = pad_token_id(tokenizer, eos_token_ids(tokenizer), vocabulary)
    per_epoch = steps_per_epoch(len(rows), cfg)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print0(
        f"train: {trained} of {sum(p.numel() for p in model.parameters())} parameters; "
        f"{len(rows)} rows and {len(heldout)} held out; {cfg.epochs} epochs × {per_epoch} steps of "
        f"up to {cfg.sequences_per_step} sequences / {dist.world} processes"
    )
    torch.manual_seed(cfg.seed + dist.rank)  # dropout's draws; a checkpoint brings its own state
    return Run(
        cfg=cfg,
        dist=dist,
        tokenizer=tokenizer,
        policy=model,
        optimizer=make_optimizer(model, cfg.lr, tuple(cfg.betas), cfg.weight_decay),
        steps=per_epoch * cfg.epochs,
        settings=settings,
        validate_every=per_epoch,
        rows=rows,
        heldout=heldout and step_batches(model, heldout, cfg.micro_batch_tokens, pad_id, dist),
        pad_id=pad_id,
    )


def check_fit(model: nn.Module, tokenizer, examples: list[Example], cfg: SFTConfig) -> int:
    """The size of the model's vocabulary; an error if a row does not fit the model."""
    vocabulary = model.get_input_embeddings().num_embeddings
    largest, longest = max(max(e.tokens) for e in examples), max(len(e.tokens) for e in examples)
    if largest >= vocabulary:
        raise DataError(
            f"{records_path(cfg)}: token {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}) is outside the vocabulary of "
            f"{vocabulary} of {cfg.model}; use the model's own tokenizer"
        )
    settings = model.config.get_text_config()
    limits = [getattr(settings, k, None) for k in ("max_position_embeddings", "sliding_window")]
    positions = min([limit for limit in limits if limit], default=longest)
    if longest > positions:  # packed attention has no sliding window
        raise ConfigError(
            f"a row of {records_path(cfg)} has {longest} tokens, but {cfg.model} {positions} "
            f"positions (or so wide a sliding window); drop such rows: max_length={positions}"
        )
    return vocabulary


MERGE_LIMIT = {"float32": 0.02, "bfloat16": 0.3}  # mean nats a token; rounding gives less


@torch.no_grad()
def merge(cfg: SFTConfig, dist: Dist) -> dict:
    """Merge an adapter into its base in float32 and write a Hugging Face folder.

    Returns how far its log-probabilities of a text are from the unmerged model's.
    """
    base, wrong = adapter_base(cfg.model), ""
    if base is None:
        final = os.path.join(cfg.model, "final")
        hint = f"; the run's adapter is model={final}" if adapter_base(final) else ""
        wrong = f"model={cfg.model} is no adapter's folder: nothing to merge{hint}"
    elif dist.world > 1:
        wrong = f"stage=merge is work for one process, not {dist.world}; start it without torchrun"
    elif os.path.exists(cfg.out) and os.listdir(cfg.out) and not cfg.overwrite:
        wrong = f"out={cfg.out} is there already; choose another folder, or overwrite=true"
    if wrong:
        raise ConfigError(wrong)
    tokenizer, dtype = load_tokenizer(cfg.model), getattr(torch, cfg.export_dtype)
    distributed.export_hf(load_causal_lm(cfg.model), tokenizer, cfg.out, dtype)
    ids = tokenizer(INSTRUCTION, add_special_tokens=False, return_tensors="pt")["input_ids"]
    unmerged, merged = (
        load_causal_lm(path, dtype, dist.device, merge=False)(ids.to(dist.device)).logits[0].float()
        for path in (cfg.model, cfg.out)
    )  # (T, V) each
    top = unmerged.argmax(-1, keepdim=True)  # (T, 1)
    differences = unmerged.log_softmax(-1) - merged.log_softmax(-1)
    gap = differences.gather(-1, top).abs().mean().item()
    same = (top[:, 0] == merged.argmax(-1)).double().mean().item()
    if not gap <= MERGE_LIMIT[cfg.export_dtype]:
        raise ModelError(
            f"{cfg.out} is {gap:.4g} nats a token from the unmerged model; write it in float32, or "
            "mend base_model_name_or_path in the adapter_config.json"
        )
    figures = {"gap": round(gap, 6), "same": round(same, 4)}
    return {"model": cfg.out, "base": base, "dtype": cfg.export_dtype, **figures}


def check(cfg: SFTConfig) -> None:
    """ConfigError for settings that cannot work; loads nothing."""
    config.check_fields(cfg)
    sampled = ("turns", "examples") if cfg.stage in ("all", "sample") else ()
    config.check_given(cfg, "model", "out", *sampled)
    if cfg.samples_per_turn > 1 and cfg.temperature == 0:
        raise ConfigError(
            f"samples_per_turn={cfg.samples_per_turn} at temperature 0 are all equal; raise "
            "temperature"
        )
    check_engine(cfg.engine)
    check_trackers(cfg.log_to)
    runs.claim_folder(cfg.out, "sft.py")


def main(cfg: SFTConfig) -> dict | None:
    """Carry out the stages; returns the figures of each (rank 0)."""
    check(cfg)
    dist = distributed.setup()
    try:
        if cfg.stage == "merge":
            return merge(cfg, dist)
        result: dict = {}
        with distributed.held_by_rank_0(runs.only_writer(cfg.out)):
            if cfg.stage != "train":
                result["sample"] = targets.sample_records(cfg, dist)
            gc.collect()  # the engine's model
            if dist.device.type == "cuda":
                torch.cuda.empty_cache()
            if cfg.stage != "sample":
                result["train"] = train(cfg, dist)
        return result if dist.rank == 0 else None
    finally:
        distributed.cleanup()


if __name__ == "__main__":
    config.run(SFTConfig, main, status_file="exit.json")
