"""What grpo.py and sft.py share: run folder, steps, checkpoints, loading, exports, logs."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from tqdm import tqdm

import config
import data
import distributed
import runs
from config import Range, above, at_least, between
from distributed import print0
from lora import LoRAConfig, adapter_base
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer
from retriever import retriever_settings
from rollout import check_engine_gap, end_and_pad_ids, open_engine
from scoring.health import PHASES, collapse_reason, step_line
from scoring.trackers import Trackers
from tasks import Task, open_task

BETAS = Range(
    "two numbers from 0 to below 1",
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
)


@dataclass
class TrainConfig:
    """Settings shared by grpo.py and sft.py."""

    model: str = ""
    """Hugging Face folder or hub name to start from, and GRPO's KL reference; an adapter is trained
    further (`lora` must be the same) or, without `lora`, merged"""
    out: str = ""
    """run folder (docs/operation.md lists its files)"""
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    """random seed"""
    micro_batch_tokens: Annotated[int, at_least(1)] = 8192
    """tokens per forward pass and process (a shared prompt counts once); results do not change"""
    lr: Annotated[float, above(0)] = 1e-5
    """peak learning rate of AdamW"""
    betas: Annotated[list[float], BETAS] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW betas"""
    weight_decay: Annotated[float, at_least(0)] = 0.01
    """of AdamW, on all parameters"""
    max_grad_norm: Annotated[float, above(0)] = 1.0
    """clip gradients to this global L2 norm"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """train an adapter"""
    gradient_checkpointing: Annotated[float, between(0, 1)] = 0.0
    """share of layers that recompute activations to save memory"""
    compile: bool = True
    """torch.compile layers and head on a GPU (a minute or two at first)"""
    save_every: Annotated[int, at_least(1)] = 50
    """steps between resumable checkpoints"""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """newest checkpoints kept"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of exported weights; adapters are float32"""
    log_to: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """trackers that also get metrics.jsonl (docs/operation.md)"""


class Stopped(RuntimeError):
    """The run stopped itself; its checkpoints are intact."""

    exit_status = 3


@dataclass(kw_only=True)
class Run:
    """State of a training run."""

    kept: ClassVar[str] = "best"  # folder of the best policy
    cfg: Any
    dist: distributed.Dist
    tokenizer: Any
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int  # total
    settings: dict  # fixed on resume
    validate_every: int = 0  # steps; 0: never
    metric: str = ""  # validation metric to choose the best policy
    notes: dict[str, dict] = field(default_factory=dict)  # JSON files to export
    best: dict = field(default_factory=lambda: {"value": -math.inf, "step": -1})
    history: list[dict] = field(default_factory=list)  # log rows so far


# ==================== steps


def steps(run: Run, row: dict, take: Callable, validate: Callable, noted: list[int]) -> None:
    """Take the steps after `row`'s: `take(run, 0-based step)` returns a row, kept in `history`.

    After each: checkpoint if due, exit if a signal was noted, validate, log, guard. A failing
    validation thus loses no checkpoint. A collective.
    """
    tracked = Trackers(run.cfg.log_to if run.dist.rank == 0 else [], run.cfg, row["step"])
    before = len(run.history)
    while True:
        if run.validate_every and due(run, row, run.validate_every):
            row |= validate(run, row["step"])
        if run.dist.rank == 0 and len(row) > 1:
            runs.append_metrics(os.path.join(run.cfg.out, "metrics.jsonl"), row)
            tracked.log(row)
        guard(run, run.history[before:])
        if row["step"] == run.steps:
            return tracked.close()
        row = take(run, row["step"])
        run.history.append(row)
        signalled = distributed.signal_of_any(noted)
        if signalled or due(run, row, run.cfg.save_every):
            checkpoint(run, row)
        if signalled and row["step"] < run.steps:
            print0(
                f"stopped by signal {signalled} after step {row['step']} of {run.steps}; the same "
                "command continues"
            )
            raise SystemExit(128 + signalled)


def due(run: Run, row: dict, every: int) -> bool:
    """Is the row's step the last or a multiple of `every`?"""
    return row["step"] % every == 0 or row["step"] == run.steps


def checkpoint(run: Run, row: dict) -> None:
    extra = {"row": row, "config": config.to_dict(run.cfg), "settings": run.settings}
    keep = run.cfg.keep_checkpoints
    folder = distributed.save_checkpoint(
        run.cfg.out, row["step"], run.policy, run.optimizer, extra, keep
    )
    print0(f"checkpoint {folder}")


def guard(run: Run, own: list[dict]) -> None:
    """Raise Stopped on non-finite gradients, collapse, or dead tools; warn of flat groups.

    own: the rows of the steps that this process took; tools that were mended do not stop it again
    """
    recent = run.history[-3:]
    if len(recent) == 3 and all(row["skipped"] for row in recent):
        raise Stopped(
            f"step {recent[-1]['step']}: the gradient was not finite in three steps in a row; "
            f"begin anew in another out folder, with a lower lr (now {run.cfg.lr:g})"
        )
    if not recent or "flat_groups" not in recent[-1]:  # SFT samples nothing
        return
    if len(own) >= 3 and all(row.get("failed") and row.get("searches") == 0 for row in own[-3:]):
        raise Stopped(
            f"step {own[-1]['step']}: in three steps in a row episodes failed and no tool call of "
            "the others succeeded, so only those without a call were trained on; mend the search "
            "engine or the tools and run the same command again"
        )
    if len(run.history) == 3 and all(row["flat_groups"] == 1.0 for row in recent):
        print0(
            "warning: in the first three steps every group was flat (format rate "
            f"{recent[-1]['format_rate']:.2f}): equal rewards teach nothing; warm the policy up, "
            "or raise group_size or temperature"
        )
    reason = collapse_reason(run.history) if run.cfg.stop_on_collapse else None
    if reason:
        best = f"best/ holds the policy of step {run.best['step']}; " * (run.best["step"] > 0)
        raise Stopped(
            f"the policy has collapsed: {reason}; {best}try a higher kl_coef or a lower lr in "
            "another out folder, or stop_on_collapse=false to go on in this one"
        )


def keep_best(run: Run, step: int, value: float, **figures: float) -> None:
    """Export the policy together with best.json if `value` is the best so far."""
    if value > run.best["value"]:
        run.best = {"value": value, "step": step, **figures}
        if step:  # the start exists already
            export(run, run.kept, {"best.json": run.best})


def export(run: Run, name: str, notes: dict[str, dict] | None = None) -> None:
    """Export the policy or its adapter to the run's folder `name`. A collective."""
    folder, notes = os.path.join(run.cfg.out, name), run.notes | (notes or {})
    if run.cfg.lora.r:
        distributed.export_adapter(run.policy, run.tokenizer, folder, notes)
    else:
        dtype = getattr(torch, run.cfg.export_dtype)
        distributed.export_hf(run.policy, run.tokenizer, folder, dtype, notes)


def resume(run: Run) -> dict:
    """Load the newest checkpoint; return its log row, {"step": 0} if none. A collective."""
    cfg, dtype = run.cfg, getattr(torch, run.cfg.export_dtype)
    final, kept, metrics, rollouts = (
        os.path.join(cfg.out, name) for name in ("final", run.kept, "metrics.jsonl", "rollouts")
    )
    distributed.on_rank_0(distributed.clear_temporaries, cfg.out)
    exports = 1 + (kept != final and run.validate_every > 0)
    needed = distributed.run_bytes(run.policy, cfg.keep_checkpoints, exports, dtype)
    distributed.on_rank_0(distributed.check_free_space, cfg.out, needed)
    found = distributed.latest_checkpoint(cfg.out)
    row = load_state(run, *found) if found else {"step": 0}
    if not found and kept != final and os.path.isdir(final):
        raise config.ConfigError(
            f"{cfg.out} holds a finished run without a checkpoint; use another out folder"
        )
    log, best = [], None
    if not found:
        distributed.on_rank_0(begin_anew, run, kept)
    if run.dist.rank == 0:
        config.save_config(cfg, os.path.join(cfg.out, "config.yaml"))
        log = runs.begin_metrics(metrics, row["step"] if found else None)
        runs.keep_steps(rollouts, row["step"])
        best = runs.read_json(os.path.join(kept, "best.json"))
    log, best = distributed.broadcast_object((log, best))
    if found:  # with its validation's figures, which are logged after the checkpoint
        row = next((r for r in log if r["step"] == row["step"]), {}) | row
    done = [r for r in log if 0 < r["step"] < row["step"]] + [row] * bool(found)
    run.history = [{key: math.nan if v is None else v for key, v in r.items()} for r in done]
    if missing := row["step"] - len(done):
        print0(
            f"warning: {metrics} lacks {missing} of {row['step']} steps: summary and guards do not "
            "know them"
        )
    start = next((r for r in log if r["step"] == 0 and run.metric in r), None)
    run.best = best or (start and {"value": start[run.metric], "step": 0}) or run.best
    return row


def begin_anew(run: Run, kept: str) -> None:
    """Remove the best policy of a run that was killed before its first checkpoint; ConfigError if
    that run had other settings."""
    out = run.cfg.out
    path = os.path.join(out, "config.yaml")
    if run.kept == "best" and os.path.isdir(kept) and os.path.isfile(path):
        earlier = config.load_config(type(run.cfg), ["--config", path])
        if change := runs.changed_setting(settings(earlier), run.settings):
            raise config.ConfigError(
                f"{kept} is of a run with other settings: {change}; use these, or another out "
                "folder"
            )
    print0(f"{out} holds no checkpoint: the run begins at step 0")
    shutil.rmtree(kept, ignore_errors=True)


def check_state(cfg, settings: dict, folder: str, state: dict) -> None:
    """ConfigError for a checkpoint of another version or with other settings."""
    if not {"settings", "row"} <= state.keys():
        raise config.ConfigError(
            f"{folder} is no checkpoint of this version; finish the run with that which began it, "
            "or use another out folder"
        )
    defaults = config.to_dict(type(cfg)())
    if change := runs.changed_setting(state["settings"], settings, defaults):
        raise config.ConfigError(
            f"{folder} was made with other settings: {change}; use these, or another out folder"
        )


def load_state(run: Run, folder: str, state: dict) -> dict:
    """Load a checkpoint; return its log row."""
    check_state(run.cfg, run.settings, folder, state)
    if state["step"] > run.steps:
        raise config.ConfigError(
            f"steps={run.steps}, but {folder} has {state['step']} steps done; raise steps"
        )
    distributed.load_checkpoint(folder, run.policy, run.optimizer)
    print0(f"resumed from {folder}: {state['step']} steps done")
    return state["row"]


# ==================== one step


class Clock:
    """Times phases, including queued GPU work: `with clock("sample"): …`."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[f"seconds_{phase}"] = time.perf_counter() - began


def step_items(count: int, step: int, prompts_per_step: int, seed: int) -> list[int]:
    """Return the item indices of 0-based `step`, the same in a resumed run.

    Each epoch is a new permutation; batches may span epochs.
    """
    out: list[int] = []
    for position in range(step * prompts_per_step, (step + 1) * prompts_per_step):
        epoch, offset = divmod(position, count)
        if not out or offset == 0:
            order = list(range(count))
            random.Random(f"order {seed} {epoch}").shuffle(order)
        out.append(order[offset])
    return out


def time_left(run: Run, row: dict) -> str:
    """Estimate the time left after `row` from the last 20 steps but the first, which compiles."""
    phases = [f"seconds_{phase}" for phase in PHASES]
    took = [sum(r.get(phase, 0.0) for phase in phases) for r in [*run.history, row][1:][-20:]]
    if not took:
        return "?"
    return tqdm.format_interval(sum(took) / len(took) * (run.steps - row["step"]))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def backward(
    policy: nn.Module,
    micro_batches: list,
    loss: Callable,
    world: int,
    gather_once: bool = True,
    reduce_each: bool = False,
) -> list[tuple]:
    """Sum gradients of `loss(micro)` = (loss, *figures) over micro-batches and ranks; return the
    figures. A collective."""
    measured = []
    for i, micro in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        policy.set_requires_gradient_sync(last or reduce_each)
        policy.set_reshard_after_backward(last or not gather_once)
        value, *figures = loss(micro)
        (value * world).backward()  # FSDP averages over ranks; the loss is a sum
        measured.append(figures)
    return measured


def check_weights(engine, stats: dict) -> None:
    """Raise if the engine does not sample from the trained weights."""
    if stats["tokens"] and not stats["skipped"]:  # a step of flat groups may compute nothing
        check_engine_gap(stats["engine_gap"], stats["engine_gap_max"], engine.gap_limit)
        check_engine_follows(stats["engine_gap"], stats["start_gap"], engine.gap_limit)


def check_engine_follows(engine_gap: float, start_gap: float, limit: float) -> None:
    """Raise Stopped if the engine still samples from the starting policy.

    engine_gap, start_gap: mean |log-probability difference| of the engine to the trained and to
    the starting policy. With slow adapters, the gap may stay below `limit`.
    """
    if engine_gap > limit / 6 and engine_gap > 2 * start_gap:
        raise Stopped(
            f"the engine is {engine_gap:.4g} nats from the trained policy and {start_gap:.4g} from "
            "the starting one: the weights that are sent do not reach it; mend the weight sync"
        )


def sampling_figures(run, before) -> dict[str, float]:
    """Sum all engines' prompt tokens since `before`; add search seconds. A collective."""
    names = ("prompt_tokens", "held_tokens")
    own = [getattr(run.engine.total, name) - getattr(before, name) for name in names]
    figures = dict(zip(names, map(int, distributed.all_reduce_sum(own))))
    return figures | run.task.seconds()


def rollout_rows(run, rollouts: list, scores: list, advantages: list, items: list) -> list[dict]:
    """Return all ranks' rows of rollouts/step_*.jsonl. A collective."""
    first = run.dist.rank * len(items)
    rows = [
        {
            "query_id": data.item_id(items[r.group_id]),
            "group": first + r.group_id,
            "response": s.text,
            **s.figures,
            "reward": s.reward,
            "advantage": advantage,
            "tokens": len(r.response_ids),
            "end": r.end,
        }
        for r, s, advantage in zip(rollouts, scores, advantages)
    ]
    return distributed.gather_rows(rows)


def log_rollouts(run, row: dict, rollouts: list[dict]) -> None:
    """On rank 0, write the rollouts and print the step, at times with samples."""
    if run.dist.rank:
        return
    path = os.path.join(run.cfg.out, "rollouts", f"step_{row['step']:06d}.jsonl")
    runs.write_jsonl(path, rollouts)
    print0(step_line(row, run.steps, time_left(run, row)))
    if row["step"] == 1:
        print0(f"  first prompt: {run.tokenizer.decode(run.prompts[0])!r}")
    if row["step"] == 1 or row["step"] % run.cfg.validate_every == 0:
        for shown in (rollouts[0], rollouts[-1]):
            how = f"rank {shown['rank']}" if "rank" in shown else shown["end"]
            earned = f"{how}, reward {shown['reward']}"
            print0(f"  sample {shown['query_id']}: {earned}: {shown['response']!r}")


def summary(run) -> dict:
    """Return the summary of a finished run."""
    rows = [row for _, row in data.read_jsonl(os.path.join(run.cfg.out, "metrics.jsonl"))]
    rewards = [row["reward"] for row in rows if row["step"]]
    tenth = max(1, len(rewards) // 10)
    final = os.path.join(run.cfg.out, "final")
    validations = [row[run.metric] for row in rows if run.metric in row] or [None]
    best = os.path.join(run.cfg.out, "best") if run.best["step"] > 0 else run.cfg.model
    return {
        "steps": run.steps,
        "reward_first_tenth": sum(rewards[:tenth]) / tenth,
        "reward_last_tenth": sum(rewards[-tenth:]) / tenth,
        f"{run.metric}_start": validations[0],
        f"{run.metric}_last": validations[-1],
        f"{run.metric}_best": run.best["value"] if run.dev else None,
        "best_step": run.best["step"],
        "final": final,
        "best": best if run.dev else final,
    }


# ==================== start

FREE = (  # may change when a run is continued
    "steps epochs out validate_every save_every keep_checkpoints micro_batch_tokens "
    "gradient_checkpointing compile gather_once reduce_each cpu_offload stop_on_collapse "
    "export_dtype log_to"
).split()


FILES = ("model", "train", "dev", "qrels", "instruction", "episode.instruction")


def settings(cfg) -> dict:
    """Return what must not change: all but FREE; of engine and retriever what is here."""
    whole = [key for key in config.to_dict(cfg) if key not in (*FREE, "engine", "retriever")]
    return (
        {"engine.kind": cfg.engine.kind}
        | runs.settings(cfg, whole, FILES)
        | retriever_settings(cfg.retriever)
    )


def load(cfg, dist: distributed.Dist) -> dict:
    """Load the other fields of grpo.Run. A collective."""
    tokenizer = load_tokenizer(cfg.model)
    task = open_task(cfg, tokenizer, qrels=cfg.qrels)
    items, item_prompts = load_items(cfg, cfg.train, task)
    dev, dev_prompts = load_items(cfg, cfg.dev, task)
    if cfg.qrels and not any(task.golds.get(item.id) for item in items + dev):
        raise data.DataError(
            f"qrels={cfg.qrels} have no gold passage of a question of {cfg.train}; give its own"
        )
    warn_of_overlap(items, dev)
    longest = max(map(len, item_prompts + dev_prompts)) + cfg.max_response_tokens
    policy, reference, engine = load_models(cfg, dist, tokenizer, longest)
    count = cfg.steps or math.ceil(cfg.epochs * len(items) / cfg.prompts_per_step)
    if cfg.warmup_steps > count:
        print0(
            f"warning: warmup_steps={cfg.warmup_steps} of {count} steps: the learning rate ends at "
            f"{lr_at(count - 1, cfg.lr, cfg.warmup_steps, count):.2g} of {cfg.lr:g}"
        )
    sequences = cfg.prompts_per_step * cfg.group_size // dist.world
    print0(
        f"{cfg.prompts_per_step} prompts × {cfg.group_size} samples / {dist.world} "
        f"process{'es' * (dist.world > 1)} = {sequences} sequences per process in micro-batches of "
        f"{cfg.micro_batch_tokens} tokens; {len(items)} {task.items} = "
        f"{len(items) / cfg.prompts_per_step:.1f} steps an epoch; {count} steps, lr {cfg.lr:g}; "
        f"{len(dev)} validation {task.items} every {cfg.validate_every} steps"
    )
    return {
        "tokenizer": tokenizer,
        "policy": policy,
        "reference": reference,
        "optimizer": make_optimizer(policy, cfg.lr, tuple(cfg.betas), cfg.weight_decay),
        "engine": engine,
        "task": task,
        "items": items,
        "prompts": item_prompts,
        "dev": dev,
        "dev_prompts": dev_prompts,
        "steps": count,
        "validate_every": cfg.validate_every if dev else 0,
        "metric": task.best,
        "notes": {"task.json": {"task": cfg.task, "template": cfg.episode.template}},
    }


def load_items(cfg, path: str, task: Task) -> tuple[list, list[list[int]]]:
    """Read items and their prompts (token ids), without prompts above max_prompt_tokens; DataError
    if none is left."""
    if not path:
        return [], []
    limit, pairs = cfg.max_prompt_tokens, [(i, task.prompt(i)) for i in task.rewarded_items(path)]
    kept = [(item, ids) for item, ids in pairs if len(ids) <= limit]
    if not kept:
        raise data.DataError(f"{path}: every prompt is longer than max_prompt_tokens={limit}")
    if len(kept) < len(pairs):
        left_out = f"{len(pairs) - len(kept)} of {len(pairs)} left out"
        print0(f"{path}: {left_out}: prompt above max_prompt_tokens={limit}")
    return [item for item, _ in kept], [ids for _, ids in kept]


def warn_of_overlap(train: list, dev: list) -> None:
    seen, held = ({getattr(i, "conversation_id", i.question) for i in x} for x in (train, dev))
    if both := seen & held:
        print0(
            f"warning: train and dev share {len(both)} conversations or questions: {min(both)!r}"
        )


def load_policy(cfg, cuda: bool, keep_start: bool = False) -> nn.Module:
    """Load the policy to the CPU, in float32, or bfloat16 for an adapter on a GPU."""
    if adapter_base(cfg.model) and not cfg.lora.r:
        print0(f"{cfg.model} is an adapter: it is merged, all weights are trained")
    return load_causal_lm(
        cfg.model,
        torch.bfloat16 if cuda and cfg.lora.r else torch.float32,
        "cpu",
        cfg.gradient_checkpointing,
        cfg.lora,
        cfg.seed,
        keep_start=keep_start,
        compiled=cuda and cfg.compile,
    )


def load_models(cfg, dist: distributed.Dist, tokenizer, longest: int) -> tuple:
    """Return sharded policy, sharded reference or None, and engine. A collective."""
    cuda = dist.device.type == "cuda"
    dtype, compiled = torch.bfloat16 if cuda else torch.float32, cuda and cfg.compile
    ends = end_and_pad_ids(cfg.model, tokenizer)
    engine = open_engine(  # first, as vLLM measures free memory
        *(cfg.engine, cfg.model, tokenizer, *ends, dist.device, longest, cfg.seed, dtype),
        weights=False,  # the first sync brings them
    )
    if longest > engine.max_length:
        raise config.ConfigError(
            f"longest prompt + max_response_tokens = {longest} tokens, the model has "
            f"{engine.max_length} positions; lower max_response_tokens or max_prompt_tokens"
        )
    with distributed.in_turn():
        policy = load_policy(cfg, cuda, keep_start=cfg.kl_coef > 0)
        distributed.shard_model(policy, dist, cuda, cfg.gather_once, cfg.cpu_offload == "all")
    if not cfg.kl_coef or cfg.lora.r:
        return policy, policy if cfg.kl_coef else None, engine
    with distributed.in_turn():
        reference = load_causal_lm(cfg.model, dtype, compiled=compiled).requires_grad_(False)
        distributed.shard_model(
            reference, dist, gather_once=cfg.gather_once, cpu_offload=cfg.cpu_offload != "none"
        )
    return policy, reference, engine
