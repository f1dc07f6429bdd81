"""GRPO with retrieval rewards: sample, score by rank, take advantages inside each group, update,
sync the weights.

Re-implements the reinforcement stage of ConvSearch-R1 (arXiv 2505.15776 §3.4; GRPO: arXiv
2402.03300). What differs from the paper and its code, and the field that gives the original's
behaviour back, is listed in the README.

    python grpo.py --config configs/demo-grpo.yaml
    torchrun --nproc-per-node 8 grpo.py --config configs/demo-grpo.yaml    # same batch, same loss

The file reads from top to bottom: configuration, mathematics, one step, the loop. What the loop
stands on (loading, resuming, exports, the log) is in training.py.

Shapes: N prompts per step, G group size, B sequences, T predicted positions.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

import config
import data
import distributed
import prompts
import report
import runs
import training
from batching import MicroBatch, Update, deal_out, plan_updates, training_batch
from config import FINITE, above, at_least, between
from distributed import Dist
from engines.base import EngineConfig, Rollout, Sampling
from episodes import episode
from episodes.episode import AgentTask, EpisodeConfig, SearchTask
from lora import LoRAConfig, starting_weights
from model import lr_at
from packing import packed_logprobs
from retriever import RetrieverConfig
from reward import parse_response, score_rewrite
from rollout import TorchEngine, check_engine, check_engine_gap
from scoring.health import step_figures
from training import Stopped

# ================================================================================== configuration


@dataclass
class GRPOConfig:
    task: Literal["rewrite", "search", "agent"] = "rewrite"
    """what a response is: a rewritten question, or an episode that searches and answers
    (episodes/episode.py)"""
    model: str = ""
    """policy to start from, and the frozen KL reference: the warm-up's output; a Hugging Face
    folder or hub name"""
    train: str = ""
    """training turns (JSONL); for search and agent questions"""
    dev: str = ""
    """held-out turns or questions for validation (JSONL); empty: no validation"""
    qrels: list[str] = field(default_factory=list)
    """search, agent: TREC files with the gold passages of `train` and `dev`, for gold_reward and
    metrics; optional"""
    instruction: str = ""
    """rewrite: a text file with the instruction of the prompt; empty: prompts.INSTRUCTION"""
    out: str = "runs/grpo"
    """run folder: config.yaml, metrics.jsonl, rollouts/, checkpoint_*/, best/, final/, report.html,
    and exit.json with the status and reason of a run that ended early"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the search engine whose ranks are the reward; search, agent: what episodes search, its
    `corpus` is shown"""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """search, agent: budgets, form and reward of an episode"""
    seed: int = 0
    """order of the turns and sampling; with a step and a prompt it determines every draw"""
    steps: Annotated[int | None, at_least(1)] = None
    """optimizer steps on fresh rollouts; null: `epochs` passes over the turns"""
    epochs: Annotated[int, at_least(1)] = 6
    """passes over the training turns when `steps` is null"""
    prompts_per_step: Annotated[int, at_least(1)] = 128
    """N, prompts a step over all processes; the number of processes must divide it"""
    group_size: Annotated[int, at_least(2)] = 8
    """G, responses per prompt (the paper's text: 8; its TopiOCQA scripts: 16)"""
    temperature: Annotated[float, at_least(0.001)] = 0.7
    """in sampling and in all log-probabilities"""
    max_prompt_tokens: Annotated[int, at_least(1)] = 1536
    """longer prompts are left out and counted"""
    max_response_tokens: Annotated[int, at_least(1)] = 1024
    """sampling stops here; such a response is trained on with whatever reward it earns; search,
    agent: the episode's budget, what is shown to the model included"""
    reward: Literal[
        "rank_incentive", "reciprocal", "exponential", "mrr@3", "ndcg@3", "recall@10", "recall@100"
    ] = "rank_incentive"
    """what a rank is worth (reward.REWARDS); the alternatives are the paper's ablation"""
    malformed_reward: Annotated[float, FINITE] = -0.1
    """reward of a response that does not parse; it is not searched"""
    parser: Literal["strict", "paper"] = "strict"
    """what counts as well formed; `paper` is the original's regular expression with its loopholes
    """
    lr: Annotated[float, above(0)] = 1e-6
    """peak learning rate of AdamW"""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's"""
    warmup_steps: Annotated[int, at_least(0)] = 100
    """linear warm-up, then constant"""
    weight_decay: Annotated[float, at_least(0)] = 0.01
    """AdamW's, on all parameters"""
    max_grad_norm: Annotated[float, above(0)] = 1.0
    """gradients are scaled to this global L2 norm"""
    clip_eps: Annotated[float, above(0, 1)] = 0.2
    """clip range of the ratio; binds only with updates_per_batch above 1"""
    updates_per_batch: Annotated[int, at_least(1)] = 1
    """optimizer steps on one batch of rollouts, each on its share of the sequences (the paper: 1)
    """
    kl_coef: Annotated[float, at_least(0)] = 0.001
    """weight of the KL to the starting policy, in the loss; 0: no reference model is kept"""
    kl_limit: Annotated[float, above(0, 80)] = 5.0
    """where the KL estimator turns into its tangent"""
    entropy_coef: Annotated[float, FINITE] = 0.0
    """entropy bonus (the original's default in force: 0.001)"""
    scale_by_std: bool = True
    """divide advantages by the group's standard deviation"""
    loss_mode: Literal["token_mean", "seq_mean_token_mean", "seq_sum_norm"] = "token_mean"
    """how token losses add up (grpo.aggregate)"""
    importance_cap: Annotated[float | None, at_least(1)] = None
    """weight each token by min(π_trainer / π_engine, cap); null: not weighted, the difference is
    logged all the same"""
    micro_batch_tokens: Annotated[int, at_least(1)] = 8192
    """tokens per forward pass and process, a group's prompt counted once: memory and speed only,
    never the result"""
    gradient_checkpointing: Annotated[float, between(0, 1)] = 0.0
    """share of the decoder layers, evenly spread, that recompute their activations in the backward
    pass: less memory, up to a third more work; raise it where micro_batch_tokens of one long group
    do not fit"""
    compile: bool = True
    """on a GPU: decoder layers and head through torch.compile (a minute or two in the first step)
    """
    gather_once: bool = True
    """hold the cast and gathered weights for a whole update (2 bytes a parameter) instead of making
    them again in every forward and backward pass"""
    reduce_each: bool = False
    """reduce gradients after every micro-batch: each process then holds its shard alone, not 4
    bytes for every parameter between micro-batches, for more traffic"""
    cpu_offload: Literal["none", "reference", "all"] = "none"
    """what rests in host memory between uses: the reference, or with all also weights, gradients
    and AdamW's moments"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """train an adapter instead of all weights; `model` may be an adapter's folder, which is then
    trained further"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """what samples the responses"""
    validate_every: Annotated[int, at_least(1)] = 20
    """steps between validations (greedy, whole `dev`); the first is before step 1, one more at the
    end"""
    save_every: Annotated[int, at_least(1)] = 100
    """steps between resumable checkpoints"""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """newest checkpoints kept"""
    stop_on_collapse: bool = True
    """stop (status 3) when format rate, reward, entropy or KL show that the policy has collapsed"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of best/ and final/; with `lora` they hold the adapter, float32, in PEFT's format"""


# ============================================================ mathematics: this block copies out;
# it needs `import math`, `import torch` and `from torch import Tensor`.


def group_advantages(rewards: Tensor, group_ids: Tensor, scale_by_std: bool = True) -> Tensor:
    """Advantage of each response over the others of its prompt (arXiv 2402.03300 §4.1.2).

    rewards (B,), group_ids (B,) → (B,) float32: (r - mean) / (std + 1e-6), std unbiased, over the
    responses of one group; without `scale_by_std` r - mean. A group of one, or of rewards that
    differ by less than a float32 of their size can tell apart, gives exactly zero. Raises
    ValueError for a non-finite reward: a rollout that failed is left out, not scored.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if not torch.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, not {rewards.tolist()}: leave failed rollouts out of the "
            "batch"
        )
    _, inverse = torch.unique(torch.as_tensor(group_ids), return_inverse=True)
    advantages = torch.zeros_like(rewards)
    for group in range(int(inverse.max()) + 1 if len(inverse) else 0):
        r = rewards[inverse == group]
        if r.max() - r.min() <= 1e-6 * r.abs().max():
            continue
        centred = r - r.mean()
        advantages[inverse == group] = centred / (r.std() + 1e-6) if scale_by_std else centred
    return advantages.float()


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b of log-probabilities (B, T): two equal infinities differ by 0, others by ±10,000; only
    a NaN gives a NaN."""
    equal = torch.isinf(a) & (a == b)
    return torch.nan_to_num(torch.where(equal, 0.0, a - b), nan=math.nan, posinf=1e4, neginf=-1e4)


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, limit: float = 5.0) -> Tensor:
    """The k3 estimator of KL(policy ‖ reference) per token: exp(d) - d - 1 with d = ref_logprob -
    logprob.

    logprobs (B, T), ref_logprobs (B, T) → (B, T), never negative. Beyond d = `limit` it continues
    as its tangent, exp(limit)·(1 + d - limit) - d - 1: value and slope are continuous, nothing
    overflows, and the gradient pulls the policy back for every d > 0, beyond the limit as strongly
    as at it.
    """
    d = difference(ref_logprobs, logprobs)
    bent = d.clamp(max=limit)
    # not d - bent: its gradient would cancel against the other's, in float32 down to nothing for a
    # high limit
    return torch.expm1(bent) - bent + math.expm1(limit) * torch.relu(d - limit)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_eps: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token: max(-A·ratio, -A·clip(ratio, 1 - eps, 1 + eps)).

    logprobs, old_logprobs (B, T); advantages (B,), one a response → loss (B, T) and where the clip
    binds, (B, T) bool. The log-ratio is bounded to ±20 before exp, so the loss is finite for any
    log-probabilities but NaN.
    """
    ratio = torch.exp(difference(logprobs, old_logprobs).clamp(-20.0, 20.0))
    a = advantages[:, None]
    free, clipped = -a * ratio, -a * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return torch.maximum(free, clipped), clipped > free


def truncated_importance(logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_trainer / π_engine, cap) per token (B, T), without gradient: weights where engine
    numerics differ."""
    log_ratio = difference(logprobs, engine_logprobs).detach().clamp(-20.0, 20.0)
    return torch.exp(log_ratio).clamp(max=cap)


def aggregate(per_token: Tensor, loss_mask: Tensor, mode: str, denominator: float) -> Tensor:
    """This micro-batch's share of the loss: a masked sum over a number that is global to the
    optimizer step.

    per_token (B, T), loss_mask (B, T) → (). Micro-batches (and ranks) add up to the whole. Modes
    and denominators: `token_mean`: trained tokens; `seq_mean_token_mean`: sequences with a trained
    token, each contributing its own token mean; `seq_sum_norm`: sequences × the fixed response
    limit. What stands under a zero mask never matters, NaN included. A denominator of 0 (nothing
    trained) gives 0.
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
    """This rank's share of `aggregate`'s denominator for loss_mask (B, T): the sum over ranks is
    what to divide by."""
    mask = loss_mask.bool()
    if mode == "token_mean":
        return float(mask.sum())
    return float(mask.any(-1).sum()) * (max_response_tokens if mode == "seq_sum_norm" else 1)


# ======================================================================================= one step


@dataclass
class Score:
    """What one response earned. reward is None when the rollout failed for a technical reason and
    is left out."""

    text: str
    reward: float | None
    figures: dict  # of a rewrite: rewrite, well_formed, rank; of an episode: episode_figures


@dataclass
class Run:
    """What lives as long as the run."""

    cfg: GRPOConfig
    dist: Dist
    tokenizer: object
    policy: torch.nn.Module
    reference: torch.nn.Module | None  # with LoRA the policy itself (lora.starting_weights)
    optimizer: torch.optim.Optimizer
    engine: TorchEngine
    retriever: object | None  # None where episodes have it
    task: SearchTask | AgentTask | None  # of episodes; None: rewrites
    golds: dict[str, list[str]]  # of episodes: question id → gold passages, where qrels tell
    items: list  # data.Turn; of episodes data.Question
    prompts: list[list[int]]  # of each item, token ids
    dev: list
    dev_prompts: list[list[int]]
    steps: int  # of the whole run
    settings: dict  # what may not change in a continuation
    best: dict = field(default_factory=lambda: {"value": -1.0, "step": -1})  # by training.BEST
    history: list[dict] = field(default_factory=list)  # the log rows of all steps so far


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """Step `step` (from 0). Returns its log row and the rollouts of all ranks as they are written
    to disk."""
    clock, before = training.Clock(run.dist.device), run.engine.total
    with clock("sample"):
        rollouts, items = sample_step(run, step)
        run.engine.sleep()
    prompt_tokens = training.prompt_tokens(before, run.engine.total)
    with clock("reward"):
        scores = score(run, rollouts, items)
    advantages = rollout_advantages(rollouts, scores, run.cfg.scale_by_std)
    with clock("reference"):
        updates = build_updates(run, rollouts, advantages)
    with clock("update"):
        training.set_lr(run.optimizer, lr_at(step, run.cfg.lr, run.cfg.warmup_steps, run.steps))
        stats = update(run.policy, run.optimizer, updates, run.cfg, run.dist)
    if not stats["skipped"]:
        check_engine_gap(stats["engine_gap"], stats["engine_gap_max"], run.engine.gap_limit)
        training.check_engine_follows(stats["engine_gap"], stats["start_gap"], run.engine.gap_limit)
    with clock("sync"):
        sync_engine(run)
    rows = training.gather_rows(run, rollouts, scores, advantages, items)
    extra = prompt_tokens | {"lr": run.optimizer.param_groups[0]["lr"]}
    if run.task:
        extra["seconds_search"] = run.task.tools.seconds
    return {"step": step + 1, **step_figures(rows), **stats, **extra, **clock.seconds}, rows


def sample_step(run: Run, step: int) -> tuple[list[Rollout], list]:
    """This rank's rollouts of a step, and their turns or questions: items[r.group_id].

    The seed of a group follows from the run's seed, the step and the prompt's place in it, not from
    the process.
    """
    cfg, share = run.cfg, run.cfg.prompts_per_step // run.dist.world
    places = range(run.dist.rank * share, (run.dist.rank + 1) * share)
    order = training.step_items(len(run.items), step, cfg.prompts_per_step, cfg.seed)
    seeds = [random.Random(f"sample {cfg.seed} {step} {place}").getrandbits(62) for place in places]
    how = Sampling(cfg.group_size, cfg.temperature, max_tokens=cfg.max_response_tokens)
    rollouts = sample(
        run, [run.prompts[order[p]] for p in places], [replace(how, seed=s) for s in seeds]
    )
    return rollouts, [run.items[order[p]] for p in places]


def sample(run: Run, prompt_ids: list[list[int]], samplings: list[Sampling]) -> list[Rollout]:
    """Responses of the prompts: one turn each, or whole episodes."""
    if run.task is None:
        return run.engine.generate(prompt_ids, samplings)
    return episode.run_episodes(run.engine, prompt_ids, samplings, run.task, run.engine.max_length)


def score(run: Run, rollouts: list[Rollout], items: list) -> list[Score]:
    """The rewards of rollouts; items[i] (turn or question) belongs to those of group_id i."""
    if run.task is None:
        return score_rewrites(rollouts, items, run.retriever, run.tokenizer, run.cfg)
    scores = []
    for e in rollouts:
        case = e, items[e.group_id], run.task, run.golds.get(items[e.group_id].id, ())
        scores.append(Score(e.text, episode.episode_reward(*case), episode.episode_figures(*case)))
    return scores


def score_rewrites(
    rollouts: list[Rollout], turns: list[data.Turn], retriever, tokenizer, cfg: GRPOConfig
) -> list[Score]:
    """Parse, search, reward. turns[i] belongs to rollouts of group_id i.

    Malformed responses are not searched, equal queries of one turn are searched once; every rollout
    has its own rank.
    """
    texts = [prompts.decode_response(tokenizer, r.response_ids) for r in rollouts]
    parsed = [parse_response(text, cfg.parser) for text in texts]
    keys = [(r.group_id, data.one_line(p.rewrite or "")) for r, p in zip(rollouts, parsed)]
    sampled = [r.end != "engine_error" for r in rollouts]
    searched = list(
        dict.fromkeys(k for k, p, ok in zip(keys, parsed, sampled) if ok and p.well_formed)
    )
    # Every rank asks, if only for nothing: an index across the ranks needs all of them.
    golds = [turns[group].gold_ids for group, _ in searched]
    found = dict(zip(searched, retriever.gold_ranks([query for _, query in searched], golds)))
    scores = []
    for text, p, key, ok in zip(texts, parsed, keys, sampled):
        rank, reward = found.get(key), None
        if rank is not None and math.isnan(rank):  # search.passages.FAILED
            rank, ok = None, False
        if ok:
            reward = score_rewrite(text, rank, cfg.malformed_reward, cfg.reward, cfg.parser)
        figures = {"rewrite": p.rewrite, "well_formed": p.well_formed, "rank": rank}
        scores.append(Score(text, reward, figures))
    return scores


def rollout_advantages(
    rollouts: list[Rollout], scores: list[Score], scale_by_std: bool = True
) -> list[float | None]:
    """Each rollout's advantage; None for one that failed and is left out. Stopped where all failed,
    on all ranks."""
    kept = [i for i, s in enumerate(scores) if s.reward is not None]
    if not any(distributed.gather_objects(bool(kept))):
        engine = sum(r.end == "engine_error" for r in rollouts)
        raise Stopped(
            f"all {len(scores)} rollouts of this step failed, {engine} in the engine (weights that "
            f"are not finite), {len(scores) - engine} in the retriever; mend that, then start "
            "again: the run resumes from its newest checkpoint"
        )
    rewards = torch.tensor([scores[i].reward for i in kept], dtype=torch.float64)
    groups = torch.tensor([rollouts[i].group_id for i in kept])
    found = dict(zip(kept, group_advantages(rewards, groups, scale_by_std).tolist()))
    return [found.get(i) for i in range(len(rollouts))]


def build_updates(
    run: Run, rollouts: list[Rollout], advantages: list[float | None]
) -> list[Update]:
    """The training batch: groups dealt out to the ranks, packed into micro-batches, with the
    reference's log-probabilities. Without KL and entropy bonus the sequences of flat groups have no
    gradient and stay out."""
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
def add_reference(reference: torch.nn.Module, updates: list[Update], temperature: float) -> None:
    """Fill in the reference's log-probabilities, in one pass over everything."""
    with starting_weights(reference):  # with LoRA it is the policy itself, its adapter off
        for micro in (m for u in updates for m in u.micro_batches):
            micro.ref_logprobs = packed_logprobs(reference, micro.packed, temperature)
    distributed.reshard(reference)


SUMS = ("tokens", "kl", "clipped", "entropy", "engine_gap", "start_gap", "loss")


def policy_loss(
    policy: torch.nn.Module, micro: MicroBatch, cfg: GRPOConfig, denominator: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one micro-batch, (): its share of the step's loss; for the log sums over its
    trained tokens, (len(SUMS),) float64, and the largest difference to the engine's
    log-probabilities, (). Nothing waits for the device."""
    part, mask = micro.part, micro.part.loss_mask.bool()  # (b, T), as all per-token tensors here
    if cfg.entropy_coef:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature, "entropy")
    else:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature), None
    old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
    per_token, clipped = clipped_policy_loss(logprobs, old, part.advantages, cfg.clip_eps)
    if cfg.importance_cap is not None:
        per_token = per_token * truncated_importance(old, part.logprobs, cfg.importance_cap)
    kl = start_gap = torch.full_like(per_token, math.nan)  # without a reference: unknown, not 0
    if micro.ref_logprobs is not None:
        start_gap = difference(micro.ref_logprobs, part.logprobs).abs()
        kl = low_var_kl(logprobs, micro.ref_logprobs, cfg.kl_limit)
        per_token = per_token + cfg.kl_coef * kl
    if entropy is not None:
        per_token = per_token - cfg.entropy_coef * entropy
    loss = aggregate(per_token, mask, cfg.loss_mode, denominator)
    with torch.no_grad():
        gap = torch.where(mask, difference(old, part.logprobs).abs(), 0.0)
        values = (mask, kl, clipped, -logprobs, gap, start_gap)
        sums = [torch.where(mask, x, 0.0).sum(dtype=torch.float64) for x in values]
        return loss, torch.stack([*sums, loss.double()]), gap.max()


def update(
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: list[Update],
    cfg: GRPOConfig,
    dist: Dist,
) -> dict[str, float]:
    """Take the optimizer steps; returns statistics over steps and ranks.

    The policy stays in eval mode: nothing may change of what sampled, dropout least of all. A step
    in which no sequence has a gradient is none: neither momentum nor weight decay moves the
    weights.
    """
    if len(updates) > 1:  # with one the policy has not moved: the update's own numbers serve
        with torch.no_grad():
            for micro in (m for u in updates for m in u.micro_batches):
                micro.old_logprobs = packed_logprobs(policy, micro.packed, cfg.temperature)
    sums, gap_max = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(())
    norm, skipped = 0.0, 0
    for one in updates:
        own = loss_denominator(one.loss_mask, cfg.loss_mode, cfg.max_response_tokens)
        pulls = one.advantages.bool() | bool(cfg.kl_coef or cfg.entropy_coef)  # (B,)
        with_gradient = int(one.loss_mask[pulls].sum())
        denominator, with_gradient = distributed.all_reduce_sum([own, with_gradient])
        measured = []
        for i, micro in enumerate(one.micro_batches):
            last = i == len(one.micro_batches) - 1
            policy.set_requires_gradient_sync(last or cfg.reduce_each)
            policy.set_reshard_after_backward(last or not cfg.gather_once)
            loss, *figures = policy_loss(policy, micro, cfg, denominator)
            (loss * dist.world).backward()  # FSDP averages over ranks; the loss is a sum
            measured.append(figures)
        norm = distributed.clip_grad_norm(policy, cfg.max_grad_norm)
        if not math.isfinite(norm):
            skipped += 1
        elif with_gradient:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += sum(s for s, _ in measured).cpu()
        gap_max = torch.maximum(gap_max, torch.stack([g for _, g in measured]).max().cpu())
    totals = dict(zip(SUMS, distributed.all_reduce_sum(sums.tolist())))
    tokens = max(1.0, totals["tokens"])
    means = {key: totals[key] / tokens for key in SUMS[1:-1]}
    gap_max = max(distributed.gather_objects(float(gap_max)))
    return {
        "loss": totals["loss"] / len(updates),
        **means,
        "engine_gap_max": gap_max,
        "grad_norm": norm,
        "skipped": skipped,
        "tokens": int(totals["tokens"]),
    }


def sync_engine(run: Run) -> None:
    """Send the policy's weights to the engine, in its dtype, and let it sample again."""
    dtype = torch.bfloat16 if run.dist.device.type == "cuda" else None
    run.engine.sync_weights(distributed.full_parameters(run.policy, dtype))
    run.engine.wake()


# ======================================================================================= the loop


def main(cfg: GRPOConfig) -> dict | None:
    """Train; returns the run's summary (rank 0)."""
    dist = distributed.setup()
    run = start(cfg, dist)
    alone = runs.only_writer(cfg.out) if dist.rank == 0 else contextlib.nullcontext()
    with alone, distributed.noted_signals() as noted:
        row = training.resume(run)  # of the last step that is done; {"step": 0} at the start
        sync_engine(run)
        while True:
            if run.dev and due(run, row, cfg.validate_every):
                row |= validate(run, row["step"])
            training.log_step(run, row)
            training.guard(run)
            if row["step"] == run.steps:
                break
            row, rollouts = train_step(run, row["step"])
            run.history.append(row)
            training.log_rollouts(run, row, rollouts)
            signalled = distributed.signal_of_any(noted)
            if signalled or due(run, row, cfg.save_every):
                training.checkpoint(run, row)
            if signalled and row["step"] < run.steps:
                distributed.print0(
                    f"stopped by signal {signalled} after step {row['step']} of {run.steps}; the "
                    "same command continues"
                )
                raise SystemExit(128 + signalled)
        training.export_run(run, "final")
        if dist.rank == 0:
            report.run_page(cfg.out)
    distributed.cleanup()
    return training.summary(run) if dist.rank == 0 else None


def due(run: Run, row: dict, every: int) -> bool:
    """Whether what happens every so many steps, and at the end, happens after the row's step."""
    return row["step"] % every == 0 or row["step"] == run.steps


def validate(run: Run, step: int) -> dict[str, float]:
    """Figures of greedy responses to the dev items, on all ranks; keeps the best policy."""
    began = time.perf_counter()
    mine = range(run.dist.rank, len(run.dev), run.dist.world)
    greedy = Sampling(temperature=0.0, max_tokens=run.cfg.max_response_tokens)
    rollouts = sample(run, [run.dev_prompts[i] for i in mine], [greedy] * len(mine))
    figures = training.dev_figures(run, rollouts, [run.dev[i] for i in mine])
    value = figures[training.BEST[run.cfg.task]]
    if value > run.best["value"]:
        run.best = {"value": value, "step": step}
        if step:  # the start is the SFT policy, which exists already
            training.export_run(run, "best")
    seconds = time.perf_counter() - began
    distributed.print0(training.validation_line(figures, step, run.steps, run.best, seconds))
    return figures


def check_config(cfg: GRPOConfig, world: int) -> None:
    """Everything that can be known to be wrong before a model is loaded; raises ConfigError."""
    config.check_ranges(cfg)
    share, left_over = divmod(cfg.prompts_per_step, world)
    divisible = max(1, round(cfg.prompts_per_step / world)) * world
    episodes, gold = cfg.task != "rewrite", cfg.episode.gold_reward
    wrong = [
        f"{key} is empty; give {key}=…"
        for key in ("model", "train", "out")
        if not getattr(cfg, key)
    ]
    if left_over:
        wrong.append(
            f"prompts_per_step={cfg.prompts_per_step} over {world} processes: groups are never "
            f"split; give a number that they divide, such as prompts_per_step={divisible}"
        )
    if cfg.updates_per_batch > share * cfg.group_size:
        wrong.append(
            f"updates_per_batch={cfg.updates_per_batch} is above the {share * cfg.group_size} "
            "sequences of a process; lower it"
        )
    if len(cfg.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.betas):
        wrong.append(f"betas={cfg.betas}; AdamW takes two, from 0 to below 1")
    if cfg.lora.dropout:
        wrong.append(
            f"lora.dropout={cfg.lora.dropout}: the trainer's log-probabilities would not be those "
            "of the policy that sampled, and the ratio noise; set lora.dropout=0"
        )
    if episodes and gold != "none" and not cfg.qrels:
        wrong.append(f"episode.gold_reward={gold} needs the gold passages: give qrels=[FILE, …]")
    if wrong:
        raise config.ConfigError(wrong[0])
    runs.claim_folder(cfg.out, "grpo.py")
    check_engine(cfg.engine, equal_calls=not episodes)
    if episodes:
        episode.check_episode(cfg.episode, cfg.task, cfg.max_response_tokens)


def start(cfg: GRPOConfig, dist: Dist) -> Run:
    """Check what is cheap to check, then load data and models."""
    check_config(cfg, dist.world)
    return Run(cfg, dist, settings=training.settings(cfg), **training.load(cfg, dist))


if __name__ == "__main__":
    config.run(GRPOConfig, main, status_file="exit.json")
