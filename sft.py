"""Supervised fine-tuning, and the self-driven warm-up that makes its targets (arXiv 2505.15776,
section 3.3).

`stage=sample`: the model answers the train turns with the few-shot prompt (through infer.py:
sharded, restartable) and well-formed rewrites are searched; a response whose gold passage is at
rank <= max_rank becomes the `response` of a record in `<out>/records.jsonl`, at most keep_per_turn
a turn, best rank first, then first sampled. `stage=train`: records are trained with the zero-shot
prompt, so what the examples showed moves into the weights. `stage=all`: both. Records may be
trajectories of the tasks search and agent too: every turn of the assistant is trained, results are
not. With `lora.r` an adapter is trained instead of all weights; `stage=merge` turns one into a
whole model.

Differs from the original's trainer in: the loss of a step is a sum over trained tokens divided by
one count over all micro-batches and processes; the last incomplete batch of an epoch is trained,
with its own count; rows are packed, none sees another; over-long rows are dropped and counted, not
cut; the held-out set shares no conversation with the training set, and the epoch with its lowest
loss is exported; a killed run resumes exactly.

Written to `out`: records.jsonl, sample_stats.json; metrics.jsonl, checkpoint_*/, final/ (Hugging
Face folder, or an adapter's in PEFT's format), result.json, report.html, config.yaml. Shapes: B
sequences, T predicted positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import random
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import nn

import data
import distributed
import report
import targets
from batching import MicroBatch, assign_groups, plan_updates, training_batch
from config import ConfigError, above, at_least, between, check_ranges, run
from data import DataError
from distributed import Dist, print0
from engines.base import EngineConfig, Rollout
from episodes import trajectories
from lora import LoRAConfig, ModelError, adapter_base, adapter_dropout
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer
from packing import packed_logprobs
from prompts import (
    INSTRUCTION,
    eos_token_ids,
    pad_token_id,
)
from retriever import RetrieverConfig
from rollout import check_engine
from runs import (
    append_metrics,
    begin_metrics,
    claim_folder,
    only_writer,
    path_with_digest,
    read_json,
)
from targets import Example
from training import export, load_policy, set_lr


@dataclass
class SFTConfig:
    stage: Literal["all", "sample", "train", "merge"] = "all"
    """sample: write records; train: fine-tune on records; all: one after the other; merge: write
    the LoRA adapter in `model` and the model it was trained on as one Hugging Face folder, `out`"""
    model: str = ""
    """Hugging Face folder or hub name of an instruct model, or an adapter's folder: it is sampled
    from and fine-tuned"""
    out: str = ""
    """folder of this run"""
    overwrite: bool = False
    """remove what an earlier run of the same stage left in `out`"""
    seed: int = 0
    """of the draws, the choice of turns, the held-out split and the order of training"""

    turns: str = ""
    """sample: turns file with gold passages"""
    instruction: str = ""
    """a text file with the instruction of the prompt; empty: prompts.INSTRUCTION"""
    examples: str = ""
    """sample: few-shot examples (JSONL with context, question, think, rewrite)"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """sample: what ranks the gold passages"""
    max_turns: Annotated[int | None, at_least(1)] = None
    """sample: use so many turns, drawn with the seed; unset: all"""
    samples_per_turn: Annotated[int, at_least(1)] = 1
    """sample: responses a turn"""
    temperature: Annotated[float, at_least(0)] = 0.7
    """sample: logits are divided by it"""
    max_response_tokens: Annotated[int, at_least(1)] = 1024
    """sample: new tokens of a response at most"""
    max_prompt_tokens: Annotated[int, at_least(1)] = 4096
    """sample: turns with a longer few-shot prompt are not sampled, and counted"""
    max_rank: Annotated[int, at_least(1)] = 1
    """sample: keep responses whose gold passage is at this rank or a better one"""
    keep_per_turn: Annotated[int, at_least(1)] = 1
    """sample: keep so many different responses of a turn; all but the first get query ids
    <id>#<sample>"""
    chunk: Annotated[int, at_least(1)] = 64
    """sample: turns between two writes"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """sample: what samples"""

    records: str = ""
    """train: turns file with `response`, or trajectories (rows with `messages`: infer.py's,
    OpenAI's or ms-swift's); empty: what stage=sample wrote to `out`"""
    target: Literal["response", "rewrite"] = "response"
    """train: on `response`, or on the human `rewrite`, its think block made of the words it adds to
    the question"""
    max_length: Annotated[int, at_least(1)] = 3072
    """train: longer rows (prompt and response, in tokens) are dropped and counted"""
    heldout_fraction: Annotated[float, between(0, 0.999)] = 0.1
    """train: share of the conversations that is held out: above 0 at least one, of two or more"""
    epochs: Annotated[int, at_least(1)] = 2
    """train: passes over the records"""
    sequences_per_step: Annotated[int, at_least(1)] = 64
    """train: sequences of an optimizer step, over all processes; the last step of an epoch takes
    what is left"""
    micro_batch_tokens: Annotated[int, at_least(1)] = 8192
    """train: tokens of one forward and backward pass and process: sequences are packed up to so
    many (a longer one has a pass of its own), none sees another, positions begin anew in each;
    changes speed and memory, not the result"""
    lr: Annotated[float, above(0)] = 1e-5
    """train: peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """train: what follows the warm-up"""
    warmup_fraction: Annotated[float, between(0, 1)] = 0.1
    """train: share of the steps with a rising learning rate"""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """train: AdamW's"""
    weight_decay: Annotated[float, at_least(0)] = 0.01
    """train: AdamW's"""
    max_grad_norm: Annotated[float, above(0)] = 1.0
    """train: gradients are scaled down to this norm"""
    max_bad_steps: Annotated[int, at_least(1)] = 3
    """train: a step with a gradient that is not finite is skipped; so many in a row end the run"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """train: an adapter instead of all weights; `model` may be an adapter's folder, which is then
    trained further"""
    gradient_checkpointing: Annotated[float, between(0, 1)] = 0.0
    """train: share of the decoder layers that recompute their activations in the backward pass:
    less memory, up to a third more time"""
    compile: bool = True
    """train, on a GPU: decoder layers and head through torch.compile (a minute or two in the first
    step)"""
    save_every: Annotated[int, at_least(1)] = 50
    """train: steps between checkpoints; there is one after every epoch too"""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """train: how many of the newest stay"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """train, merge: dtype of the weights that are written (an adapter's own are float32 always)"""


TRAIN_KEYS = (  # what changes the result
    "seed target max_length heldout_fraction epochs sequences_per_step lr schedule "
    "warmup_fraction betas weight_decay max_grad_norm lora"
).split()


class Diverged(RuntimeError):
    """The gradient was not finite several times in a row, or the held-out loss is not; checkpoints
    are intact."""

    exit_status = 3


def steps_per_epoch(rows: int, cfg: SFTConfig) -> int:
    return math.ceil(rows / cfg.sequences_per_step)


def step_examples(rows: list[Example], step: int, cfg: SFTConfig) -> list[Example]:
    """The rows of optimizer step `step` (from 0): a function of seed and step, so a resumed run is
    in its place."""
    epoch, position = divmod(step, steps_per_epoch(len(rows), cfg))
    order = list(range(len(rows)))
    random.Random(f"{cfg.seed} {epoch}").shuffle(order)
    return [
        rows[i]
        for i in order[position * cfg.sequences_per_step : (position + 1) * cfg.sequences_per_step]
    ]


def step_batches(
    model: nn.Module, rows: list[Example], budget: int, pad_id: int, dist: Dist
) -> list[MicroBatch]:
    """This process's share of `rows` in micro-batches of at most `budget` tokens (or one row), as
    many on every process.

    The longest first, each row goes to the process with the fewest tokens.
    """
    owners = assign_groups(
        [{i: len(row.tokens) for i, row in enumerate(rows)}] + [{}] * (dist.world - 1)
    )
    mine = [rows[i] for (_, i), owner in sorted(owners.items()) if owner == dist.rank]
    batch = training_batch(
        [as_rollout(row, i) for i, row in enumerate(mine)], [0.0] * len(mine), pad_id
    )
    (update,) = plan_updates(model, batch, dist.device, budget)
    return update.micro_batches


def as_rollout(row: Example, number: int) -> Rollout:
    """The row as a response to what stands before its first trained token; a group of its own."""
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
    """One update on this process's `batches`; `tokens`: trained tokens over all processes.

    Loss: -sum of log-probabilities / tokens. Returns (this process's part of it, gradient norm
    before clipping); where the norm is not finite nothing was updated.
    """
    set_lr(optimizer, lr)
    total = 0.0
    for i, micro in enumerate(batches):
        last = i == len(batches) - 1  # one reduction a step, weights gathered once
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss = -packed_logprobs(model, micro.packed).sum() / tokens  # zero where nothing is trained
        (loss * world).backward()  # FSDP averages over processes; a sum is meant
        total = total + loss.detach()
    norm = distributed.clip_grad_norm(model, max_grad_norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total), norm


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: list[MicroBatch]) -> dict[str, float]:
    """{"heldout_loss" (nats a token), "heldout_accuracy"} over all processes; padding and prompts
    count nowhere."""
    sums = [0.0, 0.0, 0.0]
    for micro in batches:
        logprobs, top = packed_logprobs(
            model, micro.packed, extra="top"
        )  # zero where nothing is trained
        sums = [
            sums[0] - float(logprobs.sum()),
            sums[1] + float(top.sum()),
            sums[2] + float(micro.part.loss_mask.sum()),
        ]
    nll, correct, tokens = distributed.all_reduce_sum(sums)
    if not math.isfinite(nll):
        raise Diverged(
            f"the held-out loss is {nll}: the weights are damaged; lower lr or take another model"
        )
    return {"heldout_loss": nll / tokens, "heldout_accuracy": correct / tokens}


def log_step(path: str, row: dict, total: int, rest: str, dist: Dist) -> None:
    """A line of metrics.jsonl and one of the terminal."""
    if dist.rank == 0:
        append_metrics(path, row)
    forms = dict.fromkeys(("epoch", "tokens", "skipped"), "d")
    forms |= {"loss": ".4f", "heldout_loss": ".4f", "heldout_accuracy": ".3f"}
    forms |= {"grad_norm": ".3f", "lr": ".2e", "seconds": ".1f"}
    shown = (f"{k} {row[k]:{form}}" for k, form in forms.items() if k in row)
    print0(" | ".join([f"step {row['step']:05d}/{total:05d}", *shown, rest]))


def train_on(
    model: nn.Module,
    tokenizer,
    rows: list[Example],
    heldout: list[Example],
    cfg: SFTConfig,
    dist: Dist,
    pad_id: int,
) -> dict:
    """Fine-tune a sharded model, from the newest checkpoint in `cfg.out` if there is one; every
    process calls it.

    The epoch with the lowest held-out loss (without held-out rows: the last) is exported to
    `<out>/final`; returns its figures. SystemExit 143 after SIGTERM, 130 after Ctrl-C, with a
    checkpoint saved; Diverged after `max_bad_steps` bad steps in a row.
    """
    per_epoch = steps_per_epoch(len(rows), cfg)
    total, metrics = per_epoch * cfg.epochs, os.path.join(cfg.out, "metrics.jsonl")
    optimizer = make_optimizer(model, cfg.lr, tuple(cfg.betas), cfg.weight_decay)
    held_batches = (
        step_batches(model, heldout, cfg.micro_batch_tokens, pad_id, dist) if heldout else []
    )
    start, bad, skipped, best = resume(model, optimizer, cfg, dist)
    if start == 0 and heldout:
        row = {"step": 0} | heldout_loss(model, held_batches)
        log_step(metrics, row, total, "before training", dist)
    began = time.monotonic()
    with distributed.noted_signals() as noted:
        for step in range(start, total):
            clock = time.monotonic()
            row = fit(model, optimizer, rows, step, cfg, dist, pad_id)
            finite, epoch_ends = math.isfinite(row["grad_norm"]), (step + 1) % per_epoch == 0
            bad, skipped = 0 if finite else bad + 1, skipped + (not finite)
            row["skipped"] = skipped
            if epoch_ends:
                held = heldout_loss(model, held_batches) if heldout else {}
                row |= held
                if not best or not held or held["heldout_loss"] < best["heldout_loss"]:
                    best = {"best_epoch": row["epoch"], **held}
                    export(model, tokenizer, cfg, "final", {"best.json": best})
            left = (time.monotonic() - began) / (step + 1 - start) * (total - step - 1)
            row["seconds"] = round(time.monotonic() - clock, 3)
            log_step(metrics, row, total, f"{left:.0f} s left", dist)
            if bad >= cfg.max_bad_steps:
                raise Diverged(
                    f"step {step + 1}: the gradient was not finite {bad} times in a row; lower lr "
                    f"(now {cfg.lr:g}) and begin anew with overwrite=true"
                )
            stop = distributed.signal_of_any(noted)
            if epoch_ends or stop or (step + 1) % cfg.save_every == 0:
                counts, keep = {"bad": bad, "skipped": skipped}, cfg.keep_checkpoints
                distributed.save_checkpoint(cfg.out, step + 1, model, optimizer, counts, keep)
            if stop and step + 1 < total:
                print0(
                    f"stopped by signal {stop} after step {step + 1} of {total}; the same command "
                    "continues"
                )
                raise SystemExit(128 + stop)
    return {"steps": total, "skipped": skipped, **best}


def resume(model: nn.Module, optimizer, cfg: SFTConfig, dist: Dist) -> tuple[int, int, int, dict]:
    """(steps done, bad steps in a row, skipped steps, figures of the exported epoch) of the newest
    checkpoint, which fills model and optimizer; of a new run zeros and {}."""
    start, bad, skipped, best = 0, 0, 0, {}
    # dropout's draws; a checkpoint brings the state that it was saved in
    torch.manual_seed(cfg.seed + dist.rank)
    if found := distributed.latest_checkpoint(cfg.out):
        distributed.load_checkpoint(found[0], model, optimizer)
        start, bad, skipped = (found[1][k] for k in ("step", "bad", "skipped"))
        best = read_json(os.path.join(cfg.out, "final", "best.json")) or {}
        print0(f"train: resumed from {found[0]}, {start} steps done")
    if dist.rank == 0:
        begin_metrics(os.path.join(cfg.out, "metrics.jsonl"), start if found else None)
    return start, bad, skipped, best


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: list[Example],
    step: int,
    cfg: SFTConfig,
    dist: Dist,
    pad_id: int,
) -> dict:
    """Take optimizer step `step` (from 0) on its rows, over all processes; returns its log row."""
    per_epoch, batch = steps_per_epoch(len(rows), cfg), step_examples(rows, step, cfg)
    total, tokens = per_epoch * cfg.epochs, sum(sum(r.loss_mask) for r in batch)
    lr = lr_at(step, cfg.lr, math.ceil(total * cfg.warmup_fraction), total, cfg.schedule)
    adapter_dropout(model, True)
    parts = step_batches(model, batch, cfg.micro_batch_tokens, pad_id, dist)
    loss, norm = train_step(model, optimizer, parts, tokens, lr, cfg.max_grad_norm, dist.world)
    adapter_dropout(model, False)
    return {
        "step": step + 1,
        "epoch": step // per_epoch + 1,
        "loss": sum(distributed.gather_objects(loss)),
        "lr": lr,
        "grad_norm": norm,
        "tokens": tokens,
        "sequences": len(batch),
    }


def train(cfg: SFTConfig, dist: Dist) -> dict:
    """Train on the records; `<out>/final` is a Hugging Face folder afterwards. Returns what
    result.json holds."""
    path = cfg.records or os.path.join(cfg.out, "records.jsonl")
    result_path, agentic = (
        os.path.join(cfg.out, "result.json"),
        trajectories.holds_trajectories(path),
    )
    if agentic and cfg.target != "response":
        raise ConfigError(
            f"target={cfg.target} is for turns; {path} holds trajectories, whose own texts are "
            "trained"
        )
    records = trajectories.read_trajectories(path) if agentic else data.read_turns(path)
    values = dataclasses.asdict(cfg)
    files = {"model": cfg.model, "records": path, "instruction": cfg.instruction}
    settings = {key: path_with_digest(file) for key, file in files.items()}
    settings |= {key: values[key] for key in TRAIN_KEYS}
    outputs = ("metrics.jsonl", "checkpoint_*", "final", "result.json", "report.html")
    targets.begin_stage(cfg, dist, "train", settings, outputs)
    if result := targets.read_result(result_path):
        return result
    tokenizer = load_tokenizer(cfg.model)
    examples, dropped = targets.make_examples(records, tokenizer, cfg, path, agentic)
    rows, heldout = targets.split_heldout(examples, cfg.heldout_fraction, cfg.seed)
    steps = steps_per_epoch(len(rows), cfg)
    print0(
        f"train: {len(records)} records"
        + "".join(f" - {count} {reason}" for reason, count in dropped.items())
        + f" - {len(heldout)} held out ({len({e.conversation_id for e in heldout})} conversations) "
        f"= {len(rows)}; {cfg.epochs} epochs × {steps} steps = {cfg.epochs * steps} steps of "
        f"{min(cfg.sequences_per_step, len(rows))} sequences / {dist.world} processes, packed to "
        f"{cfg.micro_batch_tokens} tokens; {sum(sum(e.loss_mask) for e in rows)} of "
        f"{sum(len(e.tokens) for e in rows)} tokens are trained"
    )
    model = load_model(cfg, dist)
    vocabulary = check_fit(model, tokenizer, examples, path, cfg)
    pad_id = pad_token_id(tokenizer, eos_token_ids(tokenizer), vocabulary)
    result = {
        "model": os.path.join(cfg.out, "final"),
        "records": len(rows),
        "heldout": len(heldout),
        "dropped": sum(dropped.values()),
        **train_on(model, tokenizer, rows, heldout, cfg, dist, pad_id),
    }
    if dist.rank == 0:
        targets.write_result(result_path, result)
        report.run_page(cfg.out)
    return result


def load_model(cfg: SFTConfig, dist: Dist) -> nn.Module:
    """The model to train, sharded, with the adapter that `lora` asks for."""
    cuda = dist.device.type == "cuda"
    with distributed.in_turn():
        model = load_policy(cfg, cuda)
        distributed.shard_model(model, dist, bf16=cuda, gather_once=True)
    if cfg.lora.r:
        trained, whole = (
            sum(p.numel() for p in model.parameters() if p.requires_grad >= least)
            for least in (1, 0)
        )
        print0(
            f"train: LoRA with rank {cfg.lora.r}: {trained} of {whole} parameters = "
            f"{100 * trained / whole:.2f} %"
        )
    return model


def check_fit(
    model: nn.Module, tokenizer, examples: list[Example], path: str, cfg: SFTConfig
) -> int:
    """The size of the model's vocabulary; DataError for a token outside it, ConfigError for a row
    longer than the model's window."""
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = max(len(e.tokens) for e in examples)
    if (largest := max(max(e.tokens) for e in examples)) >= vocabulary:
        raise DataError(
            f"{path}: token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is outside "
            f"the vocabulary of {vocabulary} that {cfg.model} has embeddings for; use the "
            "tokenizer that belongs to the model"
        )
    limits = [
        getattr(model.config.get_text_config(), k, None)
        for k in ("max_position_embeddings", "sliding_window")
    ]
    if longest > (positions := min([limit for limit in limits if limit], default=longest)):
        raise ConfigError(
            f"a row of {path} has {longest} tokens, but {cfg.model} has {positions} positions (or "
            "as wide a sliding window, which packed attention has not); set "
            f"max_length={positions} or less: longer rows are then dropped and counted"
        )
    return vocabulary


# mean |difference| in nats a token that rounding explains, and more
MERGE_LIMIT = {"float32": 0.02, "bfloat16": 0.3}


@torch.no_grad()
def merge(cfg: SFTConfig, dist: Dist) -> dict:
    """Write an adapter and its base as one Hugging Face folder, and compare what is there with the
    unmerged model.

    W + scaling · B·A is computed in float32 and rounded once. Both are run in the dtype that is
    written, on a text of the project; returns the mean |difference| of their log-probabilities and
    the share of equal most probable tokens.
    """
    base = adapter_base(cfg.model)
    if base is None:
        final = os.path.join(cfg.model, "final")
        hint = f"; the run's adapter is model={final}" if adapter_base(final) else ""
        raise ConfigError(
            f"model={cfg.model} is no adapter's folder (it has no adapter_config.json): nothing to "
            f"merge{hint}"
        )
    if dist.world > 1:
        raise ConfigError(
            f"stage=merge is work for one process, not {dist.world}; start it without torchrun"
        )
    if os.path.exists(cfg.out) and os.listdir(cfg.out) and not cfg.overwrite:
        raise ConfigError(
            f"out={cfg.out} is there already; choose another folder, or overwrite=true"
        )
    tokenizer, dtype = load_tokenizer(cfg.model), getattr(torch, cfg.export_dtype)
    distributed.export_hf(load_causal_lm(cfg.model), tokenizer, cfg.out, dtype)
    ids = torch.tensor(
        [tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]], device=dist.device
    )
    logprobs = [
        load_causal_lm(path, dtype, dist.device, merge=False)(ids).logits[0].float().log_softmax(-1)
        for path in (cfg.model, cfg.out)
    ]  # (T, V) each
    gap = (
        (logprobs[0] - logprobs[1])
        .gather(-1, logprobs[0].argmax(-1, keepdim=True))
        .abs()
        .mean()
        .item()
    )
    same = (logprobs[0].argmax(-1) == logprobs[1].argmax(-1)).double().mean().item()
    if not gap <= MERGE_LIMIT[cfg.export_dtype]:
        raise ModelError(
            f"{cfg.out} differs from the unmerged model by {gap:.4g} nats a token; write it in "
            "float32, or mend base_model_name_or_path in the adapter_config.json"
        )
    return {
        "model": cfg.out,
        "base": base,
        "dtype": cfg.export_dtype,
        "gap": round(gap, 6),
        "same": round(same, 4),
    }


def check(cfg: SFTConfig) -> None:
    """Raise ConfigError for settings that cannot work, before anything is loaded."""
    check_ranges(cfg)
    for name in ["model", "out"] + ["turns", "examples"] * (cfg.stage in ("all", "sample")):
        if not getattr(cfg, name):
            raise ConfigError(f"{name} is empty; stage={cfg.stage} needs {name}=…")
    if cfg.stage == "all" and cfg.records:
        raise ConfigError(
            f"records={cfg.records} is for stage=train; stage=all trains on the records that it "
            "samples"
        )
    if cfg.samples_per_turn > 1 and cfg.temperature == 0:
        raise ConfigError(
            f"samples_per_turn={cfg.samples_per_turn} at temperature 0 are all equal; raise "
            "temperature"
        )
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f"betas={cfg.betas}; AdamW takes two, in [0, 1)")
    check_engine(cfg.engine)
    claim_folder(cfg.out, "sft.py")


def main(cfg: SFTConfig) -> dict | None:
    """Sample records, train on them, or both; returns the figures of what was done (rank 0)."""
    check(cfg)
    dist = distributed.setup()
    try:
        if cfg.stage == "merge":
            return merge(cfg, dist)
        result: dict = {}
        with only_writer(cfg.out) if dist.rank == 0 else contextlib.nullcontext():
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
    run(SFTConfig, main, status_file="exit.json")
