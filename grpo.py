"""GRPO with retrieval rewards: sample, score by rank, compare inside each group, update, sync.

The reinforcement stage of ConvSearch-R1 (arXiv 2505.15776 §3.4; GRPO: arXiv 2402.03300); the README
lists what differs.

    python grpo.py --config configs/demo-grpo.yaml
    torchrun --nproc-per-node 8 grpo.py --config configs/demo-grpo.yaml    # same batch, same loss

From top to bottom: configuration, mathematics, one step, the loop, which stands on training.py.
Shapes: B sequences, T predicted positions.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

import config
import distributed
import report
import runs
import training
from batching import MicroBatch, Update, deal_out, plan_updates, training_batch
from config import FINITE, Only, above, at_least
from distributed import Dist
from engines.base import Rollout, Sampling
from lora import starting_weights
from model import lr_at
from packing import packed_logprobs
from reward import REWARDS
from rollout import TorchEngine
from scoring.health import step_figures, validation_line
from scoring.trackers import check_trackers
from tasks import EPISODES, REWRITES, Task, TaskConfig, check_task
from training import BETAS, Clock, Stopped, TrainConfig

# ==================== configuration


@dataclass
class GRPOConfig(TaskConfig, TrainConfig):
    """Task, prompts and engine: tasks.TaskConfig; the optimizer and the machine: TrainConfig."""

    train: str = ""
    """training turns (JSONL); for search and agent questions"""
    dev: str = ""
    """held-out turns or questions for validation; empty: no validation"""
    qrels: Annotated[list[str], EPISODES] = field(default_factory=list)
    """TREC files with the gold passages, for gold_reward and metrics; turns have their own"""
    out: str = "runs/grpo"
    steps: Annotated[int | None, at_least(1)] = None
    """optimizer steps on fresh rollouts; null: `epochs` passes over the turns"""
    epochs: Annotated[int, at_least(1)] = 6
    """passes over the training turns when `steps` is null"""
    prompts_per_step: Annotated[int, at_least(1)] = 128
    """N, over all processes, whose number must divide it"""
    group_size: Annotated[int, at_least(2)] = 8
    """G, responses per prompt (the paper's text: 8; its TopiOCQA scripts: 16)"""
    temperature: Annotated[float, at_least(0.001)] = 0.7
    """in sampling and in all log-probabilities"""
    reward: Annotated[Literal[tuple(REWARDS)], REWRITES] = "rank_incentive"
    """what a rank is worth (reward.REWARDS); the alternatives are the paper's ablation"""
    malformed_reward: Annotated[float, FINITE, REWRITES] = -0.1
    """reward of a response that does not parse; it is not searched"""
    lr: Annotated[float, above(0)] = 1e-6
    betas: Annotated[list[float], BETAS] = field(default_factory=lambda: [0.9, 0.999])
    warmup_steps: Annotated[int, at_least(0)] = 100
    """linear warm-up, then constant"""
    clip_eps: Annotated[float, above(0, 1)] = 0.2
    """clip range of the ratio; binds only with updates_per_batch above 1"""
    updates_per_batch: Annotated[int, at_least(1)] = 1
    """optimizer steps on one batch of rollouts, each on its share of the sequences"""
    kl_coef: Annotated[float, at_least(0)] = 0.001
    """weight of the KL to the starting policy, in the loss; 0: no reference model"""
    kl_limit: Annotated[float, above(0, 80), Only("kl_coef")] = 5.0
    """where the KL estimator turns into its tangent"""
    entropy_coef: Annotated[float, FINITE] = 0.0
    """entropy bonus (the original's default in force: 0.001)"""
    scale_by_std: bool = True
    """divide advantages by the group's standard deviation"""
    loss_mode: Literal["token_mean", "seq_mean_token_mean", "seq_sum_norm"] = "token_mean"
    """how token losses add up (grpo.aggregate)"""
    importance_cap: Annotated[float | None, at_least(1)] = None
    """correct for the engine's rounding by weights π_trainer / π_engine up to this; null: none"""
    importance_level: Annotated[Literal["token", "sequence"], Only("importance_cap")] = "token"
    """what has a weight (grpo.importance_weights): a token, cut off at the cap, or a response, left
    out beyond it"""
    gather_once: bool = True
    """hold the gathered weights for a whole update (2 bytes a parameter)"""
    reduce_each: bool = False
    """reduce gradients after every micro-batch: less memory between them, more traffic"""
    cpu_offload: Literal["none", "reference", "all"] = "none"
    """what rests in host memory: the reference; with all also weights, gradients and moments"""
    validate_every: Annotated[int, at_least(1)] = 20
    """steps between validations (greedy, whole `dev`); also before step 1 and at the end"""
    save_every: Annotated[int, at_least(1)] = 100
    stop_on_collapse: bool = True
    """stop (status 3) when format rate, reward, entropy or KL show a collapsed policy"""


# ==================== mathematics: this block copies out; it needs `import math`, `import torch`
# and `from torch import Tensor`.


def group_advantages(rewards: Tensor, group_ids: Tensor, scale_by_std: bool = True) -> Tensor:
    """Advantage of each response over the others of its prompt (arXiv 2402.03300 §4.1.2).

    rewards (B,), group_ids (B,) → (B,) float32: (r - mean) / (std + 1e-6), std unbiased; without
    `scale_by_std` r - mean. A group of one, or of rewards equal up to rounding, gives exactly zero.
    ValueError: a reward is not finite.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if not torch.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, not {rewards.tolist()}: leave failed rollouts out"
        )
    _, inverse = torch.unique(torch.as_tensor(group_ids), return_inverse=True)
    advantages = torch.zeros_like(rewards)
    for group in inverse.unique():
        r = rewards[inverse == group]
        if r.max() - r.min() > 1e-6 * r.abs().max():
            centred = r - r.mean()
            advantages[inverse == group] = centred / (r.std() + 1e-6) if scale_by_std else centred
    return advantages.float()


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b of log-probabilities (B, T), finite: 0 for equal infinities, ±10,000 for others; NaN
    stays."""
    equal = torch.isinf(a) & (a == b)
    return torch.nan_to_num(torch.where(equal, 0.0, a - b), nan=math.nan, posinf=1e4, neginf=-1e4)


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, limit: float = 5.0) -> Tensor:
    """The k3 estimator of KL(policy ‖ reference) a token: exp(d) - d - 1 with d = ref_logprob -
    logprob.

    logprobs, ref_logprobs (B, T) → (B, T), never negative. Beyond d = `limit` it goes on as its
    tangent, exp(limit)·(1 + d - limit) - d - 1: nothing overflows, and the gradient pulls back for
    every d > 0.
    """
    d = difference(ref_logprobs, logprobs)
    bent = d.clamp(max=limit)
    # not d - bent: in float32 its gradient would drown the other's for a high limit
    return torch.expm1(bent) - bent + math.expm1(limit) * torch.relu(d - limit)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_eps: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate a token: max(-A·ratio, -A·clip(ratio, 1 - eps, 1 + eps)).

    logprobs, old_logprobs (B, T), advantages (B,) → loss (B, T), finite, and where the clip binds,
    (B, T) bool.
    """
    ratio = torch.exp(difference(logprobs, old_logprobs).clamp(max=20.0))
    a = advantages[:, None]
    free, clipped = -a * ratio, -a * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return torch.maximum(free, clipped), clipped > free


def importance_weights(
    logprobs: Tensor, engine_logprobs: Tensor, loss_mask: Tensor, cap: float, level: str = "token"
) -> Tensor:
    """π_trainer / π_engine, (B, T), without gradient, of log-probabilities (B, T) under loss_mask.

    `token`: min(ratio, cap), truncated importance sampling.
    `sequence`: the product of a response's ratios at each of its tokens, 0 beyond the cap (TRL's
    sequence_mask).
    """
    log_ratio = difference(logprobs, engine_logprobs).detach()
    log_ratio = torch.where(loss_mask.bool(), log_ratio, 0.0)
    if level == "token":
        return torch.exp(log_ratio.clamp(max=20.0)).clamp(max=cap)
    ratio = torch.exp(log_ratio.sum(-1, keepdim=True).clamp(max=20.0))
    return torch.where(ratio > cap, 0.0, ratio).expand_as(log_ratio)


def aggregate(per_token: Tensor, loss_mask: Tensor, mode: str, denominator: float) -> Tensor:
    """This micro-batch's share of the loss: a masked sum over a number global to the optimizer
    step.

    per_token, loss_mask (B, T) → (). Denominators: `token_mean`: trained tokens;
    `seq_mean_token_mean` (each sequence's own mean): sequences with a trained token;
    `seq_sum_norm`: these × the response limit; 0, nothing trained, gives 0. What stands under a
    zero mask never matters, NaN included.
    """
    mask = loss_mask.bool()
    masked = torch.where(mask, per_token, torch.zeros_like(per_token))
    if mode == "seq_mean_token_mean":
        total = (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
    elif mode in ("token_mean", "seq_sum_norm"):
        total = masked.sum()
    else:
        raise ValueError(f"loss_mode {mode!r}: use token_mean, seq_mean_token_mean or seq_sum_norm")
    return total / denominator if denominator else total


def loss_denominator(loss_mask: Tensor, mode: str, max_response_tokens: int) -> float:
    """This rank's part of `aggregate`'s denominator, for loss_mask (B, T)."""
    mask = loss_mask.bool()
    if mode == "token_mean":
        return float(mask.sum())
    return float(mask.any(-1).sum()) * (max_response_tokens if mode == "seq_sum_norm" else 1)


# ==================== one step


@dataclass
class Score:
    """What one response earned."""

    text: str
    reward: float | None  # None: it failed for a technical reason and is left out
    figures: dict  # what is logged of it (`measure` of its task)


@dataclass(kw_only=True)
class Run(training.Run):
    """The state of a run."""

    cfg: GRPOConfig
    reference: nn.Module | None  # with LoRA the policy itself (lora.starting_weights)
    engine: TorchEngine
    task: Task
    items: list  # data.Turn or data.Question
    prompts: list[list[int]]  # of each item, token ids
    dev: list
    dev_prompts: list[list[int]]


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """Take step `step`, from 0; returns its log row and the rollouts of all ranks as rows."""
    cfg, clock, before = run.cfg, Clock(run.dist.device), run.engine.total
    with clock("sample"):
        rollouts, items = sample(run, step)
        run.engine.sleep()
    sampled = training.sampling_figures(run, before)
    with clock("reward"):
        scores = score(run, rollouts, items)
    advantages = rollout_advantages(rollouts, scores, cfg.scale_by_std)
    with clock("reference"):
        updates = build_updates(run, rollouts, advantages)
    lr = lr_at(step, cfg.lr, cfg.warmup_steps, run.steps)
    training.set_lr(run.optimizer, lr)
    with clock("update"):
        stats = update(run.policy, run.optimizer, updates, cfg, run.dist)
    training.check_weights(run.engine, stats)
    with clock("sync"):
        sync_engine(run)
    rows = training.rollout_rows(run, rollouts, scores, advantages, items)
    figures = step_figures(rows) | stats | sampled | {"lr": lr} | clock.seconds
    return {"step": step + 1} | figures, rows


def sample(run: Run, step: int) -> tuple[list[Rollout], list]:
    """This rank's rollouts of a step, and the turns or questions: items[r.group_id] of rollout r.

    A group's seed depends on the run's seed, the step and the prompt's place in it alone.
    """
    cfg, share = run.cfg, run.cfg.prompts_per_step // run.dist.world
    places = range(run.dist.rank * share, (run.dist.rank + 1) * share)
    order = training.step_items(len(run.items), step, cfg.prompts_per_step, cfg.seed)
    how = Sampling(cfg.group_size, cfg.temperature, max_tokens=cfg.max_response_tokens)
    seeds = [random.Random(f"sample {cfg.seed} {step} {place}").getrandbits(62) for place in places]
    samplings = [replace(how, seed=seed) for seed in seeds]
    asked = [run.prompts[order[p]] for p in places]
    return run.task.rollouts(run.engine, asked, samplings), [run.items[order[p]] for p in places]


def score(run: Run, rollouts: list[Rollout], items: list) -> list[Score]:
    """Read the responses, search, and compute rewards; rollout r is of items[r.group_id].

    For rewrites: parse_response, gold_ranks, REWARDS (tasks.Rewrite). A rollout that failed for a
    technical reason, in the engine or in a search, has no reward.
    """
    answers = [run.task.read(r) for r in rollouts]
    figures = run.task.measure(answers, [items[r.group_id] for r in rollouts])
    rewards = [None if f.pop("failed") else run.task.reward(a, f) for a, f in zip(answers, figures)]
    return [Score(a.text, reward, f) for a, reward, f in zip(answers, rewards, figures)]


def rollout_advantages(
    rollouts: list[Rollout], scores: list[Score], scale_by_std: bool = True
) -> list[float | None]:
    """Each rollout's advantage, None if it failed; Stopped if all rollouts of all ranks failed."""
    kept = [i for i, s in enumerate(scores) if s.reward is not None]
    if not any(distributed.gather_objects(bool(kept))):
        engine = sum(r.end == "engine_error" for r in rollouts)
        raise Stopped(
            f"all {len(scores)} rollouts of this step failed, {engine} in the engine (weights "
            "that are not finite; a checkpoint may hold them: remove it), "
            f"{len(scores) - engine} in searches; mend that and resume"
        )
    rewards = torch.tensor([scores[i].reward for i in kept], dtype=torch.float64)
    groups = torch.tensor([rollouts[i].group_id for i in kept])
    found = dict(zip(kept, group_advantages(rewards, groups, scale_by_std).tolist()))
    return [found.get(i) for i in range(len(rollouts))]


def build_updates(
    run: Run, rollouts: list[Rollout], advantages: list[float | None]
) -> list[Update]:
    """Deal groups out to the ranks, pack micro-batches, add the reference's log-probabilities.

    Without KL and entropy bonus flat groups have no gradient and are left out.
    """
    cfg = run.cfg
    batch = training_batch(*deal_out(rollouts, advantages, run.dist), run.engine.pad_id)
    skip_flat = run.reference is None and not cfg.entropy_coef
    updates = plan_updates(
        run.policy, batch, run.dist.device, cfg.micro_batch_tokens, cfg.updates_per_batch, skip_flat
    )
    if run.reference is not None:
        add_reference(run.reference, updates, cfg.temperature)
    return updates


@torch.no_grad()
def add_reference(reference: nn.Module, updates: list[Update], temperature: float) -> None:
    """Fill in the reference's log-probabilities."""
    with starting_weights(reference):  # with LoRA it is the policy itself, as it started
        for micro in (m for u in updates for m in u.micro_batches):
            micro.ref_logprobs = packed_logprobs(reference, micro.packed, temperature)
    distributed.reshard(reference)


MEANS = ("kl", "clipped", "entropy", "engine_gap", "start_gap")
SUMS = ("tokens", *MEANS, "positive", "positive_logprob", "weight", "weight_squared", "loss")


def policy_loss(
    policy: nn.Module, cfg: GRPOConfig, denominator: float, micro: MicroBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch's share of the loss (), SUMS over its trained tokens (11,) for the log, and the
    largest difference to the engine's log-probabilities ()."""
    part, mask = micro.part, micro.part.loss_mask.bool()  # (b, T), as all per-token tensors here
    if cfg.entropy_coef:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature, "entropy")
    else:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature), 0.0
    old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
    per_token, clipped = clipped_policy_loss(logprobs, old, part.advantages, cfg.clip_eps)
    cap = math.inf if cfg.importance_cap is None else cfg.importance_cap
    weights = importance_weights(old, part.logprobs, mask, cap, cfg.importance_level)
    if cfg.importance_cap is not None:
        per_token = per_token * weights
    kl = start_gap = torch.full_like(per_token, math.nan)  # without a reference: unknown, not 0
    if micro.ref_logprobs is not None:
        start_gap = difference(micro.ref_logprobs, part.logprobs).abs()
        kl = low_var_kl(logprobs, micro.ref_logprobs, cfg.kl_limit)
        per_token = per_token + cfg.kl_coef * kl
    loss = aggregate(per_token - cfg.entropy_coef * entropy, mask, cfg.loss_mode, denominator)
    with torch.no_grad():
        gap = torch.where(mask, difference(old, part.logprobs).abs(), 0.0)
        positive = part.advantages[:, None] > 0
        rising = torch.where(positive, logprobs, 0.0)
        weight = weights, weights**2
        values = (mask, kl, clipped, -logprobs, gap, start_gap, positive, rising, *weight)
        sums = [torch.where(mask, x, 0.0).sum(dtype=torch.float64) for x in values]
        return loss, torch.stack([*sums, loss.double()]), gap.max()


def update(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: list[Update],
    cfg: GRPOConfig,
    dist: Dist,
) -> dict[str, float]:
    """Take the optimizer steps; returns statistics over steps and ranks.

    Where the gradient is zero the optimizer makes no step: momentum and weight decay do not move
    the weights either.
    """
    if len(updates) > 1:  # with a single one the update computes them itself
        with torch.no_grad():
            for micro in (m for u in updates for m in u.micro_batches):
                micro.old_logprobs = packed_logprobs(policy, micro.packed, cfg.temperature)
    sums, gaps, norm, skipped = torch.zeros(len(SUMS), dtype=torch.float64), [], 0.0, 0
    for one in updates:
        own = loss_denominator(one.loss_mask, cfg.loss_mode, cfg.max_response_tokens)
        (denominator,) = distributed.all_reduce_sum([own])
        loss = partial(policy_loss, policy, cfg, denominator)
        measured = training.backward(
            policy, one.micro_batches, loss, dist.world, cfg.gather_once, cfg.reduce_each
        )
        norm = distributed.clip_grad_norm(policy, cfg.max_grad_norm)
        if not math.isfinite(norm):
            skipped += 1
        elif norm:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += sum(s for s, _ in measured).cpu()
        gaps += [gap for _, gap in measured]
    totals = dict(zip(SUMS, distributed.all_reduce_sum(sums.tolist())))
    tokens = totals["tokens"] or math.nan  # all groups flat: the means are unknown, not 0
    means = {key: totals[key] / tokens for key in MEANS}
    return {
        "loss": totals["loss"] / len(updates),
        **means,
        "positive_logprob": totals["positive_logprob"] / (totals["positive"] or math.nan),
        "effective_samples": totals["weight"] ** 2 / (totals["weight_squared"] or 1) / tokens,
        "engine_gap_max": max(distributed.gather_objects(float(torch.stack(gaps).max()))),
        "grad_norm": norm,
        "skipped": skipped,
        "tokens": int(totals["tokens"]),
    }


def sync_engine(run: Run) -> None:
    """Send the policy's weights to the engine and let it sample again."""
    dtype = torch.bfloat16 if run.dist.device.type == "cuda" else None
    run.engine.sync_weights(distributed.full_parameters(run.policy, dtype))
    run.engine.wake()


# ==================== the loop


def main(cfg: GRPOConfig) -> dict | None:
    """Train; returns the run's summary (rank 0)."""
    dist = distributed.setup()
    check_config(cfg, dist.world)
    with distributed.held_by_rank_0(runs.only_writer(cfg.out)):
        run = start(cfg, dist)
        with distributed.noted_signals() as noted:
            row = training.resume(run)
            sync_engine(run)
            training.steps(run, row, logged_step, validate, noted)
            training.export(run, "final")
            if dist.rank == 0:
                report.run_page(cfg.out)
    distributed.cleanup()
    return training.summary(run) if dist.rank == 0 else None


def logged_step(run: Run, step: int) -> dict:
    """Take step `step`, from 0, and log its rollouts; returns its log row."""
    row, rollouts = train_step(run, step)
    training.log_rollouts(run, row, rollouts)
    return row


def validate(run: Run, step: int) -> dict[str, float]:
    """Figures of greedy responses to the dev items of all ranks; keeps the best policy."""
    began = time.perf_counter()
    mine = range(run.dist.rank, len(run.dev), run.dist.world)
    greedy = Sampling(temperature=0.0, max_tokens=run.cfg.max_response_tokens)
    bar = runs.Progress(len(mine), "validation", "responses", 0.1) if run.dist.rank == 0 else None
    asked = [run.dev_prompts[i] for i in mine]
    rollouts = run.task.rollouts(run.engine, asked, greedy, bar and bar.reach)
    if bar:
        bar.close()
    found = run.task.validate(rollouts, [run.dev[i] for i in mine], run.dev)
    figures = {f"dev_{key}": value for key, value in found.items()}
    training.keep_best(run, step, figures[run.task.best])
    seconds = time.perf_counter() - began
    distributed.print0(validation_line(figures, step, run.steps, run.best, seconds))
    return figures


def check_config(cfg: GRPOConfig, world: int) -> None:
    """ConfigError for settings that cannot work; loads nothing."""
    config.check_fields(cfg)
    config.check_given(cfg, "model", "train", "out")
    share, left_over = divmod(cfg.prompts_per_step, world)
    wrong = ""
    if left_over:
        wrong = (
            f"prompts_per_step={cfg.prompts_per_step} over {world} processes: groups are not "
            f"split; give a multiple, such as {max(1, share) * world}"
        )
    elif cfg.updates_per_batch > share * cfg.group_size:
        wrong = (
            f"updates_per_batch={cfg.updates_per_batch} is above the {share * cfg.group_size} "
            "sequences of a process; lower it"
        )
    elif cfg.lora.dropout:
        wrong = (
            f"lora.dropout={cfg.lora.dropout}: another policy than what sampled would be trained; "
            "set lora.dropout=0"
        )
    elif cfg.episode.gold_reward != "none" and not cfg.qrels:
        wrong = (
            f"episode.gold_reward={cfg.episode.gold_reward} needs the gold passages: give "
            "qrels=[FILE, …]"
        )
    if wrong:
        raise config.ConfigError(wrong)
    check_trackers(cfg.log_to)
    runs.claim_folder(cfg.out, "grpo.py")
    check_task(cfg)


def start(cfg: GRPOConfig, dist: Dist) -> Run:
    """Compare the settings with the newest checkpoint's, then load data and models."""
    settings = training.settings(cfg)
    if found := distributed.latest_checkpoint(cfg.out):
        training.check_state(cfg, settings, *found)
    return Run(cfg=cfg, dist=dist, settings=settings, **training.load(cfg, dist))


if __name__ == "__main__":
    config.run(GRPOConfig, main, status_file="exit.json")
