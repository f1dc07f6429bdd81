"""GRPO with retrieval rewards: sample, score by rank, take advantages inside each group, update, push the weights back.

Re-implements the reinforcement stage of ConvSearch-R1 (arXiv 2505.15776 §3.4; GRPO: arXiv 2402.03300).  Differs from
the paper or its code in (the field in brackets gives the original's behaviour back, where a study needs it):
 1. one strict parser decides what is well formed, in reward, warm-up filter and inference  [parser: paper]
 2. the loss is one sum over trained tokens / one global count, so it depends neither on the micro-batches nor on the
    number of processes; the original averages means of micro-batches
 3. a group of equal rewards has advantages of exactly zero  [scale_by_std: false leaves the division by std out]
 4. beyond d = kl_limit the k3 estimator goes on as a straight line: it keeps pulling and stays finite; the original
    clamps the result at 10, which ends the pull at d = 2.6 and gives NaN beyond 88.7
 5. no entropy bonus [entropy_coef: 0.001]; log-ratios bounded before exp; a non-finite gradient skips the step
 6. one update on a batch needs no pass for old log-probabilities: they are this pass's own, detached
 7. every rollout is ranked by its own query, under BM25 too; each distinct query is searched once
 8. the first optimizer step moves (lr / warmup_steps), the original's first has lr 0
 9. validation on held-out turns, the best policy kept, collapse noticed and stopped, checkpoints that resume
10. turns without a gold passage and rollouts that failed for a technical reason are left out and counted, never scored

The README's list goes beyond training: inference, metrics, prompts.

    python grpo.py --config configs/demo-grpo.yaml                             # one process
    torchrun --nproc-per-node 8 grpo.py --config configs/demo-grpo.yaml …      # many: same batch, same loss

Read it from `main` at the bottom upwards: main → train_step → sample_step, training_batch, plan_updates, update →
policy_loss → the mathematics at the top.

Shapes: N prompts per step, G group size, B sequences, T predicted positions.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

import config
import data
import distributed
import report
from batching import MicroBatch, plan_updates, share_rollouts
from engines.base import EngineConfig, Rollout, Sampling
from engines.torch_engine import TorchEngine
from episodes.episode import (AgentTask, answer_means, check_episode, Episode, episode_figures,
                              episode_reward, EpisodeConfig, note_task, open_task, run_episodes,
                              SearchTask)
from lora import adapter_base, LoRAConfig, starting_weights
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer
from packing import packed_logprobs
from prompts import decode_response, encode_chat, eos_token_ids, pad_token_id, rewrite_prompt
from retriever import open_retriever, retriever_settings, RetrieverConfig
from reward import parse_response, Parsed, score_rewrite
from rollout import check_engine, check_engine_gap, collate_rollouts, open_engine
from runs import (append_metrics, begin_metrics, changed_setting, item_id, named, only_writer,
                  write_jsonl)
from scoring.ranking import evaluate_run, read_qrels

# ============================================ the mathematics: from here to the configuration this block copies out;
# it needs `import math`, `import torch` and `from torch import Tensor`.


def group_advantages(rewards: Tensor, group_ids: Tensor, scale_by_std: bool = True) -> Tensor:
    """Advantage of each response over the others of its prompt (arXiv 2402.03300 §4.1.2).

    rewards (B,), group_ids (B,) → (B,) float32: (r - mean) / (std + 1e-6), std unbiased, over the responses of one
    group; without `scale_by_std` r - mean.  A group of one, or of rewards equal up to float32 rounding, gives exactly
    zero.
    Raises ValueError for a non-finite reward: a rollout that failed is left out, not scored.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, not {rewards.tolist()}: leave failed rollouts out of the batch")
    _, inverse = torch.unique(torch.as_tensor(group_ids), return_inverse=True)
    advantages = torch.zeros_like(rewards)
    for group in range(int(inverse.max()) + 1 if len(inverse) else 0):
        r = rewards[inverse == group]
        if r.max() - r.min() <= 1e-6 * max(1.0, float(r.abs().max())):
            continue
        centred = r - r.mean()
        advantages[inverse == group] = centred / (r.std() + 1e-6) if scale_by_std else centred
    return advantages.float()


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, limit: float = 5.0) -> Tensor:
    """The k3 estimator of KL(policy ‖ reference) per token: exp(d) - d - 1 with d = ref_logprob - logprob.

    logprobs (B, T), ref_logprobs (B, T) → (B, T), never negative.  Beyond d = `limit` it continues as its tangent,
    exp(limit)·(1 + d - limit) - d - 1: value and slope are continuous, nothing overflows, and the gradient pulls the
    policy back for every d > 0, beyond the limit as strongly as at it.
    """
    d = ref_logprobs - logprobs
    bent = d.clamp(max=limit)
    # not d - bent: its gradient would cancel against the other's, in float32 down to nothing for a high limit
    return torch.expm1(bent) - bent + math.expm1(limit) * torch.relu(d - limit)


def clipped_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor,
                        clip_eps: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token: max(-A·ratio, -A·clip(ratio, 1 - eps, 1 + eps)).

    logprobs, old_logprobs (B, T); advantages (B,), one a response → loss (B, T) and where the clip binds, (B, T) bool.
    The log-ratio is bounded to ±20 before exp, so the loss is finite for any finite or infinite difference.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-20.0, 20.0))
    a = advantages[:, None]
    free, clipped = -a * ratio, -a * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return torch.maximum(free, clipped), clipped > free


def truncated_importance(logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_trainer / π_engine, cap) per token (B, T), without gradient: weights where engine numerics differ."""
    return torch.exp((logprobs - engine_logprobs).detach().clamp(-20.0, 20.0)).clamp(max=cap)


def aggregate(per_token: Tensor, loss_mask: Tensor, mode: str, denominator: float) -> Tensor:
    """This micro-batch's share of the loss: a masked sum over a number that is global to the optimizer step.

    per_token (B, T), loss_mask (B, T) → ().  Micro-batches (and ranks) add up to the whole.  Modes and denominators:
    `token_mean`: trained tokens; `seq_mean_token_mean`: sequences with a trained token, each contributing its own token
    mean; `seq_sum_norm`: sequences × the fixed response limit.  What stands under a zero mask never matters, NaN
    included.  A denominator of 0 (nothing trained) gives 0.
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
    """This rank's share of `aggregate`'s denominator for loss_mask (B, T): the sum over ranks is what to divide by."""
    mask = loss_mask.bool()
    trained = int(mask.any(-1).sum())
    return float({"token_mean": int(mask.sum()), "seq_mean_token_mean": trained,
                  "seq_sum_norm": trained * max_response_tokens}[mode])


# ======================================================================================================= configuration


@dataclass
class GRPOConfig:
    task: Literal["rewrite", "search", "agent"] = "rewrite"
    """what a response is: a rewritten question, or an episode that searches and answers (episode.py)"""
    model: str = ""
    """policy to start from, and the frozen KL reference: the warm-up's output; a Hugging Face folder or hub name"""
    train: str = ""
    """training turns (JSONL); for search and agent questions"""
    dev: str = ""
    """held-out turns or questions for validation (JSONL); empty: no validation"""
    qrels: list[str] = field(default_factory=list)
    """search, agent: TREC files with the gold passages of `train` and `dev`, for gold_reward and metrics; optional"""
    out: str = "runs/grpo"
    """run folder: config.yaml, metrics.jsonl, rollouts/, checkpoint_*/, best/, final/, report.html"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the search engine whose ranks are the reward; search, agent: what episodes search, its `corpus` is shown"""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """search, agent: budgets, form and reward of an episode"""
    seed: int = 0
    """order of the turns and sampling; with a step and a prompt it determines every draw"""
    steps: int | None = None
    """optimizer steps on fresh rollouts; null: `epochs` passes over the turns"""
    epochs: int = 6
    """passes over the training turns when `steps` is null"""
    prompts_per_step: int = 128
    """N, prompts a step over all processes; the number of processes must divide it"""
    group_size: int = 8
    """G, responses per prompt (the paper's text: 8; its TopiOCQA scripts: 16)"""
    temperature: float = 0.7
    """in sampling and in all log-probabilities"""
    max_prompt_tokens: int = 1536
    """longer prompts are left out and counted"""
    max_response_tokens: int = 1024
    """sampling stops here; such a response is trained on with whatever reward it earns; search, agent: the episode's
    budget, what is shown to the model included"""
    reward: Literal["rank_incentive", "reciprocal", "exponential", "mrr@3", "ndcg@3", "recall@10",
                    "recall@100"] = "rank_incentive"
    """what a rank is worth (reward.REWARDS); the alternatives are the paper's ablation"""
    malformed_reward: float = -0.1
    """reward of a response that does not parse; it is not searched"""
    parser: Literal["strict", "paper"] = "strict"
    """what counts as well formed; `paper` is the original's regular expression with its loopholes"""
    lr: float = 1e-6
    """peak learning rate (AdamW, betas 0.9 / 0.999)"""
    warmup_steps: int = 100
    """linear warm-up, then constant"""
    weight_decay: float = 0.01
    """AdamW's, on all parameters"""
    max_grad_norm: float = 1.0
    """gradients are scaled to this global L2 norm"""
    clip_eps: float = 0.2
    """clip range of the ratio; binds only with updates_per_batch above 1"""
    updates_per_batch: int = 1
    """optimizer steps on one batch of rollouts, each on its share of the sequences (the paper: 1)"""
    kl_coef: float = 0.001
    """weight of the KL to the starting policy, in the loss; 0: no reference model is kept"""
    kl_limit: float = 5.0
    """where the KL estimator turns into its tangent"""
    entropy_coef: float = 0.0
    """entropy bonus (the original's default in force: 0.001)"""
    scale_by_std: bool = True
    """divide advantages by the group's standard deviation"""
    loss_mode: Literal["token_mean", "seq_mean_token_mean", "seq_sum_norm"] = "token_mean"
    """how token losses add up (grpo.aggregate)"""
    importance_cap: float | None = None
    """weight each token by min(π_trainer / π_engine, cap); null: not weighted, the difference is logged all the same"""
    micro_batch_tokens: int = 8192
    """tokens per forward pass and process, a group's prompt counted once: memory and speed only, never the result"""
    gradient_checkpointing: float = 0.0
    """share of the decoder layers, evenly spread, that recompute their activations in the backward pass: less memory,
    up to a third more work; raise it where micro_batch_tokens of one long group do not fit"""
    compile: bool = True
    """on a GPU: decoder layers and head through torch.compile (a minute or two in the first step)"""
    gather_once: bool = True
    """hold the cast and gathered weights for a whole update (2 bytes a parameter) instead of making them again in every
    forward and backward pass"""
    cpu_offload: Literal["none", "reference", "all"] = "none"
    """what rests in host memory between uses: the reference, or with all also weights, gradients and AdamW's moments"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """train an adapter instead of all weights; `model` may be an adapter's folder, which is then trained further"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """what samples the responses"""
    validate_every: int = 20
    """steps between validations (greedy, whole `dev`); the first is before step 1, one more at the end"""
    save_every: int = 100
    """steps between resumable checkpoints"""
    keep_checkpoints: int = 2
    """newest checkpoints kept"""
    stop_on_collapse: bool = True
    """stop (status 3) when format rate, reward, entropy or KL show that the policy has collapsed"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of best/ and final/; with `lora` they hold the adapter, float32, in PEFT's format"""


class Stopped(RuntimeError):
    """The run ended itself for a stated reason (collapse, repeated non-finite gradients); checkpoints are intact."""

    exit_status = 3


def check_config(cfg: GRPOConfig, world: int) -> None:
    """Everything that can be known to be wrong before a model is loaded; raises ConfigError."""
    def need(ok: bool, text: str) -> None:
        if not ok:
            raise config.ConfigError(text)

    for key in ("model", "train", "out"):
        need(bool(getattr(cfg, key)), f"{key} is empty; give {key}=…")
    need(os.path.isdir(cfg.out) or not os.path.exists(cfg.out), f"out={cfg.out} is a file; name a folder")
    need(cfg.group_size >= 2, f"group_size={cfg.group_size}: an advantage needs at least 2 responses a prompt; "
                              "set group_size >= 2")
    need(cfg.prompts_per_step % world == 0 and cfg.prompts_per_step > 0,
         f"prompts_per_step={cfg.prompts_per_step} over {world} processes: groups are never split, so the number of "
         f"processes must divide it; set prompts_per_step={max(1, round(cfg.prompts_per_step / world)) * world}")
    sequences = cfg.prompts_per_step * cfg.group_size // world
    need(1 <= cfg.updates_per_batch <= sequences,
         f"updates_per_batch={cfg.updates_per_batch} must lie between 1 and the {sequences} sequences of a process")
    need(1e-3 <= cfg.temperature < math.inf,
         f"temperature={cfg.temperature}: training samples need a finite temperature of at least 0.001")
    for key in ("micro_batch_tokens", "max_response_tokens", "max_prompt_tokens", "validate_every", "save_every",
                "keep_checkpoints", "epochs"):
        need(getattr(cfg, key) >= 1, f"{key}={getattr(cfg, key)} must be at least 1")
    need(cfg.steps is None or cfg.steps >= 1, f"steps={cfg.steps} must be at least 1, or null for whole epochs")
    for key in ("lr", "max_grad_norm", "kl_limit"):
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be above 0")
    need(cfg.kl_limit <= 80, f"kl_limit={cfg.kl_limit}: exp of it must be a float32; 80 at most")
    for key in ("kl_coef", "weight_decay", "warmup_steps"):
        need(getattr(cfg, key) >= 0, f"{key}={getattr(cfg, key)} must be at least 0")
    for key in ("lr", "kl_limit", "kl_coef", "weight_decay", "entropy_coef", "malformed_reward"):
        need(math.isfinite(getattr(cfg, key)), f"{key}={getattr(cfg, key)} must be finite")
    need(0 <= cfg.gradient_checkpointing <= 1, f"gradient_checkpointing={cfg.gradient_checkpointing} is a share of the "
                                               "layers: from 0 (none) to 1 (all)")
    check_engine(cfg.engine, equal_calls=cfg.task == "rewrite")
    if cfg.task != "rewrite":
        check_episode(cfg.episode, cfg.task, cfg.max_response_tokens)
        need(cfg.episode.gold_reward == "none" or bool(cfg.qrels),
             f"episode.gold_reward={cfg.episode.gold_reward} needs the gold passages: give qrels=[FILE, …]")
    need(cfg.lora.dropout == 0, f"lora.dropout={cfg.lora.dropout}: with dropout the trainer's log-probabilities are "
                                "not those of the policy that sampled, and the ratio is noise; set lora.dropout=0")
    need(0 < cfg.clip_eps < 1, f"clip_eps={cfg.clip_eps} must lie between 0 and 1")
    need(cfg.importance_cap is None or cfg.importance_cap >= 1,
         f"importance_cap={cfg.importance_cap} must be at least 1, or null")


# ============================================================================================== the stages of one step


@dataclass
class Score:
    """What one response earned.  reward is None when the rollout failed for a technical reason and is left out."""

    text: str
    parsed: Parsed | None  # of a rewrite
    rank: int | None
    reward: float | None
    figures: dict = field(default_factory=dict)  # of an episode: episode.episode_figures


def step_turns(count: int, step: int, prompts_per_step: int, seed: int) -> list[int]:
    """Indices of the turns of `step` (from 0): a fresh permutation each epoch; batches run across its end.

    A function of its arguments alone, so a resumed run, on any number of processes, goes on with the same turns.
    """
    out: list[int] = []
    for position in range(step * prompts_per_step, (step + 1) * prompts_per_step):
        epoch, offset = divmod(position, count)
        if not out or offset == 0:
            order = list(range(count))
            random.Random(f"order {seed} {epoch}").shuffle(order)
        out.append(order[offset])
    return out


def sampling_for(cfg: GRPOConfig, step: int, prompt_index: int) -> Sampling:
    """Sampling of one group; its seed follows from run seed, step and the prompt's place in it, not the process."""
    seed = random.Random(f"sample {cfg.seed} {step} {prompt_index}").getrandbits(62)
    return Sampling(n=cfg.group_size, temperature=cfg.temperature, max_tokens=cfg.max_response_tokens, seed=seed)


def score_rollouts(rollouts: list[Rollout], turns: list[data.Turn], retriever, tokenizer,
                   cfg: GRPOConfig) -> list[Score]:
    """Parse, search, reward.  `turns[i]` belongs to rollouts of group_id i.

    Malformed responses are not searched, equal queries of one turn are searched once; every rollout has its own rank.
    """
    texts = [decode_response(tokenizer, r.response_ids) for r in rollouts]
    parsed = [parse_response(t, cfg.parser) for t in texts]
    wanted: dict[tuple[int, str], int | None] = {}
    for r, p in zip(rollouts, parsed):
        if p.well_formed and r.end != "engine_error":
            wanted[r.group_id, p.rewrite] = None
    ranks = retriever.gold_ranks([query for _, query in wanted], [turns[group].gold_ids for group, _ in wanted])
    wanted = dict(zip(wanted, ranks))  # asked by every rank, if only for nothing: an index across ranks needs all
    scores = []
    for r, text, p in zip(rollouts, texts, parsed):
        rank = wanted.get((r.group_id, p.rewrite))
        failed = r.end == "engine_error" or (rank is not None and math.isnan(rank))  # retriever.FAILED
        rank = None if failed else rank
        reward = None if failed else score_rewrite(text, rank, cfg.malformed_reward, cfg.reward, cfg.parser)
        scores.append(Score(text, p, rank, reward))
    return scores


def score_episodes(run: Run, episodes: list[Episode], questions: list[data.Question]) -> list[Score]:
    """Answers and what was retrieved, as rewards.  `questions[i]` belongs to episodes of group_id i."""
    asked = [questions[e.group_id] for e in episodes]
    return [Score(e.text, None, None, episode_reward(e, q, run.task, run.golds.get(q.id, ())),
                  episode_figures(e, q, run.task, run.golds.get(q.id, ()))) for e, q in zip(episodes, asked)]


def score(run: Run, rollouts: list[Rollout], items: list) -> list[Score]:
    """The scores of rollouts of turns or of questions; `items[i]` belongs to rollouts of group_id i."""
    if run.task is not None:
        return score_episodes(run, rollouts, items)
    return score_rollouts(rollouts, items, run.retriever, run.tokenizer, run.cfg)


@torch.no_grad()
def add_reference(reference, plans: list[list[MicroBatch]], temperature: float) -> None:
    """Fill in the reference's log-probabilities, in one pass over everything."""
    with starting_weights(reference):  # with LoRA the reference is the policy itself, its adapter off
        for micro in (m for plan in plans for m in plan):
            micro.ref_logprobs = packed_logprobs(reference, micro.packed, temperature)
    distributed.give_back(reference)


def add_advantages(plans: list[list[MicroBatch]], advantages: list[float | None]) -> None:
    """Fill in the advantages of the batch's sequences; one with None (its search failed) is not trained."""
    for micro in (m for plan in plans for m in plan if m.rows):
        values = [advantages[row] for row in micro.rows]
        micro.part.advantages.copy_(torch.tensor([v or 0.0 for v in values]))
        micro.part.loss_mask[[i for i, v in enumerate(values) if v is None]] = 0.0


SUMS = ("tokens", "kl", "clipped", "entropy", "engine_gap", "start_gap", "loss")


def policy_loss(policy, micro: MicroBatch, cfg: GRPOConfig, denominator: float) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one micro-batch (its share of the step's loss); sums for the log, (len(SUMS),) float64, over its
    trained tokens; and the largest difference to the engine's log-probabilities, ().  Nothing waits for the device."""
    part, mask = micro.part, micro.part.loss_mask.bool()  # (b, T), as all per-token tensors here
    if cfg.entropy_coef:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature, "entropy")
    else:
        logprobs, entropy = packed_logprobs(policy, micro.packed, cfg.temperature), None
    old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
    per_token, clipped = clipped_policy_loss(logprobs, old, part.advantages, cfg.clip_eps)
    if cfg.importance_cap is not None:
        per_token = per_token * truncated_importance(old, part.logprobs, cfg.importance_cap)
    kl = start_gap = torch.full_like(per_token, math.nan)  # without a reference KL is not 0, but unknown
    if micro.ref_logprobs is not None:
        start_gap = (micro.ref_logprobs - part.logprobs).abs()
        kl = low_var_kl(logprobs, micro.ref_logprobs, cfg.kl_limit)
        per_token = per_token + cfg.kl_coef * kl
    if entropy is not None:
        per_token = per_token - cfg.entropy_coef * entropy
    loss = aggregate(per_token, mask, cfg.loss_mode, denominator)
    with torch.no_grad():
        gap = torch.where(mask, (old - part.logprobs).abs(), 0.0)
        summed = [torch.where(mask, x, 0.0).sum(dtype=torch.float64)
                  for x in (mask, kl, clipped, -logprobs, gap, start_gap)]
        return loss, torch.stack([*summed, loss.double()]), gap.max()


def update(policy, optimizer, plans: list[list[MicroBatch]], cfg: GRPOConfig, where: distributed.Dist) -> dict[str, float]:
    """An optimizer step for every plan; returns statistics over plans and ranks.

    The policy stays in eval mode: nothing may change of what sampled, dropout least of all.
    """
    if len(plans) > 1:  # with one update the policy has not moved: the pass would give the update's numbers
        with torch.no_grad():
            for micro in (m for plan in plans for m in plan):
                micro.old_logprobs = packed_logprobs(policy, micro.packed, cfg.temperature)
    sums, gap_max = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(())
    norm, skipped = 0.0, 0
    for plan in plans:
        own = sum(loss_denominator(m.part.loss_mask, cfg.loss_mode, cfg.max_response_tokens) for m in plan)
        (denominator,) = distributed.all_reduce_sum([own])
        measured = []
        for i, micro in enumerate(plan):
            policy.set_requires_gradient_sync(i == len(plan) - 1)
            policy.set_reshard_after_backward(i == len(plan) - 1 or not cfg.gather_once)
            loss, *measures = policy_loss(policy, micro, cfg, denominator)
            (loss * where.world).backward()  # FSDP averages over ranks; the loss is a sum
            measured.append(measures)
        norm = distributed.clip_grad_norm(policy, cfg.max_grad_norm)
        if not math.isfinite(norm):
            skipped += 1
        elif denominator:  # something is trained
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += sum(s for s, _ in measured).cpu()
        gap_max = torch.maximum(gap_max, torch.stack([g for _, g in measured]).max().cpu())
    totals = dict(zip(SUMS, distributed.all_reduce_sum(sums.tolist())))
    tokens = max(1.0, totals["tokens"])
    return {"loss": totals["loss"] / len(plans),
            **{key: totals[key] / tokens for key in ("kl", "clipped", "entropy", "engine_gap", "start_gap")},
            "engine_gap_max": max(distributed.gather_objects(float(gap_max))), "grad_norm": norm, "skipped": skipped,
            "tokens": int(totals["tokens"])}


def reward_stats(rows: list[dict]) -> dict[str, float]:
    """Statistics of a step's rollouts (all ranks): reward, format, ranks or answers, lengths, flat groups, failures."""
    scored = [r for r in rows if r["reward"] is not None]
    groups: dict[int, set[float]] = {}
    for r in scored:
        groups.setdefault(r["group"], set()).add(r["reward"])
    n = max(1, len(scored))
    return {
        "reward": sum(r["reward"] for r in scored) / n,
        "reward_std": float(torch.tensor([r["reward"] for r in scored]).std()) if len(scored) > 1 else 0.0,
        "format_rate": sum(r["well_formed"] for r in scored) / n,
        **(answer_means(scored) if rows and "f1" in rows[0] else rank_stats(scored)),
        "flat_groups": sum(len(v) == 1 for v in groups.values()) / max(1, len(groups)),
        "response_tokens": sum(r["tokens"] for r in rows) / max(1, len(rows)),
        "length_stops": sum(r["end"] == "length" for r in rows) / max(1, len(rows)),
        "failed": len(rows) - len(scored),
    }


def rank_stats(scored: list[dict]) -> dict[str, float]:
    """Retrieval by the rewrites of a step, and their length."""
    n, ranks = max(1, len(scored)), [r["rank"] for r in scored if r["rank"] is not None]
    return {"hit@1": sum(k == 1 for k in ranks) / n, "hit@10": sum(k <= 10 for k in ranks) / n,
            "hit@100": len(ranks) / n, "mrr": sum(1 / k for k in ranks) / n,
            "rewrite_words": sum(len((r["rewrite"] or "").split()) for r in scored) / n}


def collapse_reason(history: list[dict], window: int = 10) -> str | None:
    """Why the run should stop, by its last `window` steps against the best window before them; None while all is well.

    Four signs: the format rate halves, the mean reward falls below a quarter of its best, entropy triples (babble),
    KL per token passes 2 nats.
    """
    if len(history) < 2 * window:
        return None

    def mean(key: str, rows: list[dict]) -> float:
        return sum(r[key] for r in rows) / len(rows)

    now = history[-window:]
    before = [history[i:i + window] for i in range(0, len(history) - 2 * window + 1, window)]
    best_format, best_reward = max(mean("format_rate", w) for w in before), max(mean("reward", w) for w in before)
    if best_format > 0.2 and mean("format_rate", now) < 0.5 * best_format:
        return f"the format rate fell from {best_format:.2f} to {mean('format_rate', now):.2f}"
    if best_reward > 0.2 and mean("reward", now) < 0.25 * best_reward:
        return f"the mean reward fell from {best_reward:.3f} to {mean('reward', now):.3f}"
    lowest = min(mean("entropy", w) for w in before)
    if mean("entropy", now) > 3 * lowest + 0.5:
        return f"the entropy rose from {lowest:.2f} to {mean('entropy', now):.2f} nats a token"
    if mean("kl", now) > 2.0:
        return f"the KL to the starting policy is {mean('kl', now):.2f} nats a token"
    return None


# ============================================================================================================ the loop


@dataclass
class Run:
    """What lives as long as the run."""

    cfg: GRPOConfig
    where: distributed.Dist
    tokenizer: object
    policy: torch.nn.Module
    reference: torch.nn.Module | None  # with LoRA the policy (model.starting_weights)
    optimizer: torch.optim.Optimizer
    engine: TorchEngine
    retriever: object | None  # None where episodes have it
    task: SearchTask | AgentTask | None  # of episodes; None: rewrites
    golds: dict[str, list[str]]  # of episodes: question id → gold passages, where qrels tell
    turns: list  # data.Turn; of episodes data.Question
    prompts: list[list[int]]  # of each turn, token ids
    dev: list
    dev_prompts: list[list[int]]
    steps: int  # of the whole run
    settings: dict  # `settings` of cfg, at the start
    best: dict  # {"value": …, "step": …} of the best validation so far, by `BEST`
    history: list[dict] = field(default_factory=list)  # the log rows of all steps so far


BEST = {"rewrite": "dev_mrr", "search": "dev_f1", "agent": "dev_f1"}  # what the best policy is chosen by


def encode_turns(turns: list, encode: Callable, limit: int, name: str) -> tuple[list, list[list[int]]]:
    """Turns (or questions) with their prompt ids; those with more than `limit` tokens are left out and counted."""
    kept, prompts = [], []
    for turn in turns:
        ids = encode(turn)
        if len(ids) <= limit:
            kept.append(turn)
            prompts.append(ids)
    if len(kept) < len(turns):
        distributed.print0(f"{name}: {len(turns) - len(kept)} of {len(turns)} left out: prompt above max_prompt_tokens={limit}")
    if not kept:
        raise data.DataError(f"{name}: every prompt is longer than max_prompt_tokens={limit}; raise the limit")
    return kept, prompts


def load_turns(cfg: GRPOConfig, retriever, tokenizer) -> list:
    """Training and validation turns with their prompts: [turns, prompts, dev turns, dev prompts]."""
    out: list = []
    for path in (cfg.train, cfg.dev):
        if not path:
            out += [[], []]
            continue
        turns, dropped = data.with_gold(data.read_turns(path), retriever.passage_ids, path)
        if dropped:
            distributed.print0(f"{path}: {dropped} turns without a gold passage left out")
        out += encode_turns(turns, lambda t: encode_chat(tokenizer, rewrite_prompt(t)), cfg.max_prompt_tokens,
                            path)
    overlap = {t.conversation_id for t in out[0]} & {t.conversation_id for t in out[2]}
    if overlap:
        distributed.print0(f"warning: {len(overlap)} conversations are in both train and dev ({sorted(overlap)[0]}, …): "
                 "validation does not show generalisation")
    return out


def load_questions(cfg: GRPOConfig, task: SearchTask | AgentTask) -> tuple[list, dict[str, list[str]]]:
    """Training and validation questions with their prompts, as `load_turns`; and gold passages by question id."""
    out: list = []
    for path in (cfg.train, cfg.dev):
        if not path:
            out += [[], []]
            continue
        out += encode_turns(data.read_questions(path), lambda q: task.prompt(q.question), cfg.max_prompt_tokens, path)
    if overlap := {q.question for q in out[0]} & {q.question for q in out[2]}:
        distributed.print0(f"warning: {len(overlap)} questions are in both train and dev ({sorted(overlap)[0]!r}, …): validation "
                 "does not show generalisation")
    golds: dict[str, list[str]] = {}
    for path in cfg.qrels:
        golds |= {query: [p for p, gain in judged.items() if gain > 0] for query, judged in read_qrels(path).items()}
    known = getattr(task.tools, "retriever", None)
    if golds and known is not None:
        wrong = next((p for ids in golds.values() for p in ids if p not in known.passage_ids), None)
        if wrong is not None:
            raise data.DataError(f"{cfg.qrels}: gold passage {wrong!r} is not in the index; give the qrels of its "
                                 "corpus")
    return out, golds


def start(cfg: GRPOConfig, where: distributed.Dist) -> Run:
    """Check everything that is cheap to check, then load: tokenizer, retriever, turns, policy, reference, engine."""
    check_config(cfg, where.world)
    tokenizer = load_tokenizer(cfg.model)
    retriever, task, golds = None, None, {}
    if cfg.task == "rewrite":
        retriever = open_retriever(cfg.retriever)
        loaded = load_turns(cfg, retriever, tokenizer)
    else:
        task = open_task(cfg.task, cfg.episode, tokenizer, cfg.retriever)
        loaded, golds = load_questions(cfg, task)
    turns, prompts, dev, dev_prompts = loaded
    cuda = where.device.type == "cuda"
    dtype, compiled = torch.bfloat16 if cuda else torch.float32, cuda and cfg.compile
    if adapter_base(cfg.model) and not cfg.lora.r:
        distributed.print0(f"{cfg.model} is an adapter: it is merged and all weights are trained; its own lora.r would go on with it")
    policy = load_causal_lm(cfg.model, dtype if cfg.lora.r else torch.float32, "cpu", cfg.gradient_checkpointing,
                              cfg.lora, cfg.seed, keep_start=cfg.kl_coef > 0, compiled=compiled)
    eos = eos_token_ids(tokenizer, policy.generation_config)
    pad_id = pad_token_id(tokenizer, eos, policy.get_input_embeddings().num_embeddings)
    longest = max(map(len, prompts + dev_prompts)) + cfg.max_response_tokens
    engine = open_engine(cfg.engine, cfg.model, tokenizer, eos, pad_id, where.device, longest, cfg.seed, dtype,
                         weights=False)  # `main` sends them; opened while the card is empty: vLLM measures what is free
    if longest > engine.max_length:
        raise config.ConfigError(f"longest prompt + max_response_tokens = {longest} tokens, but the model has "
                                 f"{engine.max_length} positions; lower max_response_tokens or max_prompt_tokens")
    distributed.shard_model(policy.to(where.device), where, cuda, cfg.gather_once, cfg.cpu_offload == "all")
    reference = policy if cfg.kl_coef and cfg.lora.r else None
    if cfg.kl_coef and not cfg.lora.r:
        reference = load_causal_lm(cfg.model, dtype, where.device, compiled=compiled).requires_grad_(False)
        distributed.shard_model(reference, where, gather_once=cfg.gather_once, cpu_offload=cfg.cpu_offload != "none")
    optimizer = make_optimizer(policy, cfg.lr, weight_decay=cfg.weight_decay)
    steps = cfg.steps or math.ceil(cfg.epochs * len(turns) / cfg.prompts_per_step)
    sequences = cfg.prompts_per_step * cfg.group_size // where.world
    asked = "turns" if cfg.task == "rewrite" else "questions"
    distributed.print0(f"{cfg.prompts_per_step} prompts × {cfg.group_size} samples / {where.world} "
             f"process{'es' * (where.world > 1)} = {sequences} sequences per process in micro-batches of "
             f"{cfg.micro_batch_tokens} tokens; "
             f"{len(turns)} {asked} = {len(turns) / cfg.prompts_per_step:.1f} steps an epoch; "
             f"{steps} steps, lr {cfg.lr:g} after {cfg.warmup_steps} warm-up steps; {len(dev)} validation {asked} "
             f"every {cfg.validate_every} steps")
    return Run(cfg, where, tokenizer, policy, reference, optimizer, engine, retriever, task, golds, turns, prompts,
               dev, dev_prompts, steps, settings(cfg), best={"value": -1.0, "step": -1})


def settings(cfg: GRPOConfig) -> dict:
    """What may not differ between a run and its continuation, because it decides the result; files by their content."""
    free = ("retriever", "steps", "epochs", "out", "validate_every", "save_every", "keep_checkpoints",
            "micro_batch_tokens", "gradient_checkpointing", "compile", "gather_once", "cpu_offload", "engine",
            "stop_on_collapse", "export_dtype")
    return ({"engine.kind": cfg.engine.kind}
            | {key: value for key, value in config.to_dict(cfg).items() if key not in free}
            | {key: named(getattr(cfg, key)) for key in ("model", "train", "dev")}
            | {f"qrels {path}": named(path) for path in cfg.qrels}
            | retriever_settings(cfg.retriever))


def resume(run: Run) -> int:
    """Continue from the newest checkpoint in `out`, if there is one; returns the number of steps already done."""
    cfg, found = run.cfg, distributed.latest_checkpoint(run.cfg.out)
    metrics, rollouts = (os.path.join(cfg.out, name) for name in ("metrics.jsonl", "rollouts"))
    if found is None:
        if os.path.isdir(os.path.join(cfg.out, "final")):
            raise config.ConfigError(f"{cfg.out} holds a finished run without a checkpoint to go on from; use another "
                                     "out folder, or move it away to start anew")
        if os.path.exists(metrics) and os.path.getsize(metrics):
            distributed.print0(f"{cfg.out} has no checkpoint: its metrics.jsonl, rollouts and best are begun anew")
            if run.where.rank == 0:  # it would pass for this run's
                shutil.rmtree(os.path.join(cfg.out, "best"), ignore_errors=True)
    else:
        folder, state = found
        if "settings" not in state:
            raise config.ConfigError(f"{folder} is no checkpoint of grpo.py; use another out folder")
        if change := changed_setting(state["settings"], run.settings):
            raise config.ConfigError(f"{folder} was made with other settings: {change}; use another out folder, or the "
                                     "same settings to continue")
        if state["step"] > run.steps:
            raise config.ConfigError(f"steps={run.steps}, but {folder} has {state['step']} steps done; set steps to "
                                     "that number or more, or use another out folder")
        distributed.load_checkpoint(folder, run.policy, run.optimizer)
        run.best = state["best"]
        distributed.print0(f"resumed from {folder}: {state['step']} steps done")
    done, rows = found[1]["step"] if found else 0, []
    if run.where.rank == 0:
        os.makedirs(rollouts, exist_ok=True)
        config.save_config(cfg, os.path.join(cfg.out, "config.yaml"))
        rows = begin_metrics(metrics, done)
        for name in os.listdir(rollouts):  # of steps that are taken again, or half-written
            if name.startswith("step_") and name not in {f"step_{step:06d}.jsonl" for step in range(1, done + 1)}:
                os.remove(os.path.join(rollouts, name))
    run.history = [{key: math.nan if value is None else value for key, value in row.items()}
                   for row in distributed.broadcast_object(rows) if row["step"]]
    return done


def sample_step(run: Run, step: int) -> tuple[list[Rollout], list[data.Turn], int]:
    """This rank's rollouts of a step with their turns, and the global number of its first prompt."""
    cfg, share = run.cfg, run.cfg.prompts_per_step // run.where.world
    first = run.where.rank * share
    picked = step_turns(len(run.turns), step, cfg.prompts_per_step, cfg.seed)[first:first + share]
    samplings = [sampling_for(cfg, step, first + j) for j in range(share)]
    return sample(run, [run.prompts[i] for i in picked], samplings), [run.turns[i] for i in picked], first


def sample(run: Run, prompts: list[list[int]], samplings: list[Sampling]) -> list[Rollout]:
    """Responses of the prompts: one turn each, or whole episodes."""
    if run.task is None:
        return run.engine.generate(prompts, samplings)
    return run_episodes(run.engine, prompts, samplings, run.task, run.engine.max_length)


def rollout_advantages(rollouts: list[Rollout], scores: list[Score], cfg: GRPOConfig) -> list[float | None]:
    """Each rollout's advantage; None for one that failed and is left out.  Stopped where they failed on all ranks."""
    kept = [i for i, s in enumerate(scores) if s.reward is not None]
    if not any(distributed.gather_objects(bool(kept))):
        engine = sum(r.end == "engine_error" for r in rollouts)
        raise Stopped(f"all {len(scores)} rollouts of this step failed, {engine} in the engine "
                      f"(weights that are not finite), {len(scores) - engine} in the retriever; mend that, then start "
                      "again: the run resumes from its newest checkpoint")
    rewards = torch.tensor([scores[i].reward for i in kept], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([rollouts[i].group_id for i in kept]), cfg.scale_by_std)
    by_index = dict(zip(kept, advantages.tolist()))
    return [by_index.get(i) for i in range(len(rollouts))]


def rollout_rows(rollouts: list[Rollout], scores: list[Score], advantages: list[float | None], turns: list,
                 first: int) -> list[dict]:
    """The step's rollouts as they are written to rollouts/step_*.jsonl."""
    def figures(s: Score) -> dict:
        return s.figures or {"rewrite": s.parsed.rewrite, "well_formed": s.parsed.well_formed, "rank": s.rank}

    return [{"query_id": item_id(turns[r.group_id]), "group": first + r.group_id, "response": s.text, **figures(s),
             "reward": s.reward, "advantage": a, "tokens": len(r.response_ids), "end": r.end}
            for r, s, a in zip(rollouts, scores, advantages)]


CPU = torch.device("cpu")


def timed(device: torch.device, function: Callable, *args) -> tuple[object, float]:
    """(what the function returns, the seconds it took, work queued on the device included)."""
    began = time.perf_counter()
    out = function(*args)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return out, time.perf_counter() - began


def prepare_update(run: Run, rollouts: list[Rollout]) -> tuple[list[list[MicroBatch]], list[tuple[int, int]]]:
    """The micro-batches of this rank's update, reference log-probabilities filled in, and the origins of their rows."""
    held, origins = share_rollouts(rollouts, run.engine.pad_id, run.where)
    batch = collate_rollouts(held, [0.0] * len(held), run.engine.pad_id)
    plans = plan_updates(run.policy, batch, run.cfg, run.where)
    if run.reference is not None:
        add_reference(run.reference, plans, run.cfg.temperature)
    return plans, origins


def check_engine_follows(engine_gap: float, start_gap: float, limit: float) -> None:
    """Raise Stopped where the engine samples from the starting policy although the trained one has moved away from it.

    engine_gap, start_gap: mean |log-probability of the trained, of the starting policy - of the engine|, in nats.  An
    adapter moves slowly: an engine that never gets it stays far below `limit`, and rewards look plausible for hours.
    """
    if engine_gap > limit / 6 and engine_gap > 2 * start_gap:
        raise Stopped(f"the engine's log-probabilities are {engine_gap:.4g} nats from the trained policy's and "
                      f"{start_gap:.4g} from the starting policy's: the weights that are sent do not reach it; mend "
                      "the weight sync")


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """Step `step` (from 0): sample, score, advantages, update, sync.  Returns the log row and all ranks' rollouts.

    Scores need the texts alone and the reference the tokens alone, so the search runs in a thread beside the
    reference's pass.  (A retriever that spans the ranks has a process group of its own: the other thread uses ours.)
    """
    cfg, where = run.cfg, run.where
    (rollouts, turns, first), sample_seconds = timed(where.device, sample_step, run, step)
    run.engine.sleep()
    with ThreadPoolExecutor(1, initializer=distributed.use_device, initargs=(where, torch.get_num_threads())) as pool:
        scoring = pool.submit(timed, CPU, score, run, rollouts, turns)
        (plans, origins), reference_seconds = timed(where.device, prepare_update, run, rollouts)
        scores, reward_seconds = scoring.result()
    advantages = rollout_advantages(rollouts, scores, cfg)
    everyone = distributed.gather_objects(advantages)
    add_advantages(plans, [everyone[rank][i] if rank >= 0 else None for rank, i in origins])
    for group in run.optimizer.param_groups:
        group["lr"] = lr_at(step, cfg.lr, cfg.warmup_steps, run.steps)
    stats, update_seconds = timed(where.device, update, run.policy, run.optimizer, plans, cfg, where)
    if not stats["skipped"]:  # log-probabilities that are no numbers are the trainer's own fault: `guard` counts those
        check_engine_gap(stats["engine_gap"], stats["engine_gap_max"], run.engine.gap_limit)
        check_engine_follows(stats["engine_gap"], stats["start_gap"], run.engine.gap_limit)
    _, sync_seconds = timed(where.device, wake_engine, run)
    rows = [r for part in distributed.gather_objects(rollout_rows(rollouts, scores, advantages, turns, first)) for r in part]
    return {"step": step + 1, **reward_stats(rows), **stats, "lr": run.optimizer.param_groups[0]["lr"],
            **({"seconds_search": run.task.tools.seconds} if run.task else {}),
            "seconds_sample": sample_seconds, "seconds_reward": reward_seconds, "seconds_reference": reference_seconds,
            "seconds_update": update_seconds, "seconds_sync": sync_seconds}, rows


def wake_engine(run: Run) -> None:
    """Send the policy's weights to the engine, in its dtype, and let it sample again."""
    dtype = torch.bfloat16 if run.where.device.type == "cuda" else None
    run.engine.sync_weights(distributed.full_parameters(run.policy, dtype))
    run.engine.wake()


def validate(run: Run) -> dict[str, float]:
    """Retrieval metrics of greedy rewrites of the dev turns, on all ranks; a malformed one searches the question."""
    mine = range(run.where.rank, len(run.dev), run.where.world)
    greedy = Sampling(temperature=0.0, max_tokens=run.cfg.max_response_tokens)
    rollouts = run.engine.generate([run.dev_prompts[i] for i in mine], greedy)
    parsed = [parse_response(decode_response(run.tokenizer, r.response_ids), run.cfg.parser) for r in rollouts]
    queries = [p.rewrite if p.well_formed else run.dev[i].question for i, p in zip(mine, parsed)]
    results = run.retriever.search(queries, 100)
    found, formed = {}, 0
    own = {run.dev[i].query_id: hits for i, hits in zip(mine, results)}
    for part, good in distributed.gather_objects((own, sum(p.well_formed for p in parsed))):
        found |= part
        formed += good
    metrics = evaluate_run(found, {t.query_id: dict.fromkeys(t.gold_ids, 1) for t in run.dev})
    shown = {f"dev_{k}": v for k, v in metrics.items() if k not in ("queries", "missing")}
    return shown | {"dev_format_rate": formed / len(run.dev)}


def validate_answers(run: Run) -> dict[str, float]:
    """Answers of greedy episodes to the dev questions, on all ranks; one that failed technically scores 0, counted."""
    mine = range(run.where.rank, len(run.dev), run.where.world)
    greedy = Sampling(temperature=0.0, max_tokens=run.cfg.max_response_tokens)
    episodes = sample(run, [run.dev_prompts[i] for i in mine], [greedy] * len(mine))
    scores = score_episodes(run, episodes, [run.dev[i] for i in mine])
    rows = [row for part in distributed.gather_objects([s.figures | {"reward": s.reward} for s in scores]) for row in part]
    return {f"dev_{k}": v for k, v in answer_means(rows).items()} | {
        "dev_format_rate": sum(row["well_formed"] for row in rows) / len(rows),
        "dev_failed": sum(row["reward"] is None for row in rows)}


def export(run: Run, name: str) -> None:
    """Write the policy to the folder `name` of the run: a Hugging Face folder, or its adapter in PEFT's format."""
    folder = os.path.join(run.cfg.out, name)
    if run.cfg.lora.r:
        distributed.export_adapter(run.policy, run.tokenizer, folder)
    else:
        distributed.export_hf(run.policy, run.tokenizer, folder, getattr(torch, run.cfg.export_dtype))
    if run.where.rank == 0:
        note_task(folder, run.cfg.task, run.cfg.episode.template)


def validate_and_keep_best(run: Run, step: int) -> dict[str, float]:
    """Validate; export the policy to best/ when its MRR (episodes: answer F1) is the highest so far."""
    if not run.dev:
        return {}
    t = time.perf_counter()
    metrics = validate(run) if run.task is None else validate_answers(run)
    value = metrics[BEST[run.cfg.task]]
    if value > run.best["value"]:
        run.best = {"value": value, "step": step}
        if step:  # the start is the SFT policy, which exists already
            export(run, "best")
    keys = (("dev_mrr", "dev_ndcg@3", "dev_recall@10", "dev_recall@100") if run.task is None else
            ("dev_f1", "dev_em", "dev_gold_recall", "dev_all_gold", "dev_searches"))
    shown = "".join(f"{key.removeprefix('dev_')} {metrics[key]:.4f} | " for key in keys)
    distributed.print0(f"validation {step:05d}/{run.steps:05d} | {shown}format {metrics['dev_format_rate']:.3f} | "
             f"best {run.best['value']:.4f} at {run.best['step']} | {time.perf_counter() - t:.1f}s")
    return metrics


def step_line(row: dict, steps: int, seconds: float) -> str:
    """The one line a step prints; `seconds` is what a step takes."""
    left = seconds * (steps - row["step"])
    keys = ("mrr", "hit@1") if "mrr" in row else ("f1", "em", "all_gold", "searches")
    shown = "".join(f"{key.replace('_', ' ')} {row[key]:.3f} | " for key in keys)
    return (f"step {row['step']:05d}/{steps:05d} | reward {row['reward']:.4f} | {shown}"
            f"format {row['format_rate']:.3f} | kl {row['kl']:.4f} | "
            f"entropy {row['entropy']:.3f} | flat {row['flat_groups']:.2f} | clipped {100 * row['clipped']:.1f}% | "
            f"len {row['response_tokens']:.0f} | norm {row['grad_norm']:.2f} | lr {row['lr']:.2g} | "
            f"gen {row['seconds_sample']:.1f}s | reward {row['seconds_reward']:.1f}s | "
            f"ref {row['seconds_reference']:.1f}s | train {row['seconds_update']:.1f}s | "
            f"sync {row['seconds_sync']:.1f}s | left {left / 60:.0f}m")


def log_step(run: Run, row: dict, rows: list[dict] = ()) -> None:
    """Rank 0: a row of metrics.jsonl, rollouts/step_*.jsonl, the step's line, and two samples now and then."""
    if run.where.rank:
        return
    append_metrics(os.path.join(run.cfg.out, "metrics.jsonl"), row)
    if not rows:
        return
    write_jsonl(os.path.join(run.cfg.out, "rollouts", f"step_{row['step']:06d}.jsonl"), rows)
    recent = [r["seconds_sample"] + max(r["seconds_reward"], r["seconds_reference"]) + r["seconds_update"]
              + r["seconds_sync"] for r in run.history[-20:]]
    distributed.print0(step_line(row, run.steps, sum(recent) / len(recent)))
    if row["step"] == 1 or row["step"] % run.cfg.validate_every == 0:
        if row["step"] == 1:
            distributed.print0(f"  first prompt: {run.tokenizer.decode(run.prompts[0])!r}")
        for shown in (rows[0], rows[-1]):
            how = f"rank {shown['rank']}" if "rank" in shown else shown["end"]
            distributed.print0(f"  sample {shown['query_id']}: {how}, reward {shown['reward']}: {shown['response']!r}")


def summary(run: Run) -> dict:
    """The last line of a finished run: first and last steps' mean reward, validation before, best and last, folders."""
    rows = [row for _, row in data.read_jsonl(os.path.join(run.cfg.out, "metrics.jsonl"))]
    steps = [row for row in rows if row["step"]]
    tenth = max(1, len(steps) // 10)
    best_by = BEST[run.cfg.task]
    validations = [row[best_by] for row in rows if best_by in row]
    return {"steps": run.steps, "reward_first_tenth": sum(r["reward"] for r in steps[:tenth]) / tenth,
            "reward_last_tenth": sum(r["reward"] for r in steps[-tenth:]) / tenth,
            f"{best_by}_start": validations[0] if validations else None,
            f"{best_by}_last": validations[-1] if validations else None,
            f"{best_by}_best": run.best["value"] if validations else None, "best_step": run.best["step"],
            "final": os.path.join(run.cfg.out, "final"),
            "best": os.path.join(run.cfg.out, "best") if run.best["step"] > 0 else run.cfg.model}


def checkpoint(run: Run, step: int) -> None:
    """Write a resumable checkpoint."""
    folder = distributed.save_checkpoint(run.cfg.out, step, run.policy, run.optimizer,
                               {"best": run.best, "config": config.to_dict(run.cfg), "settings": run.settings},
                               run.cfg.keep_checkpoints)
    distributed.print0(f"checkpoint {folder}")


def guard(run: Run) -> None:
    """Stop a run that has failed (three steps in a row skipped for non-finite gradients, or a collapsed policy); warn of
    one that cannot learn."""
    if len(run.history) >= 3 and all(row["skipped"] for row in run.history[-3:]):
        raise Stopped("the gradient was not finite in three steps in a row; start anew in another out folder, with a "
                      "lower lr or a higher kl_coef")
    if len(run.history) == 3 and all(row["flat_groups"] == 1.0 for row in run.history):
        distributed.print0(f"warning: in the first three steps every group was flat (format rate {run.history[-1]['format_rate']:.2f}): "
                 "nothing is learned from rewards that are all equal, and validation of malformed responses searches the "
                 "raw questions; warm the policy up first, or raise group_size or temperature")
    reason = collapse_reason(run.history) if run.cfg.stop_on_collapse else None
    if reason:
        best = f"; best/ holds the policy of step {run.best['step']}" if run.best["step"] > 0 else ""
        raise Stopped(f"the policy has collapsed: {reason}{best}; try a higher kl_coef or a lower lr in another out "
                      "folder, or stop_on_collapse=false to go on in this one")


def main(cfg: GRPOConfig) -> dict | None:
    """Train; returns the run's summary."""
    where = distributed.setup()
    run = start(cfg, where)
    alone = only_writer(cfg.out) if where.rank == 0 else contextlib.nullcontext()
    with alone, distributed.noted_signals() as noted:
        done = resume(run)
        wake_engine(run)
        if done == 0:
            log_step(run, {"step": 0, **validate_and_keep_best(run, 0)})
        for step in range(done, run.steps):
            row, rows = train_step(run, step)
            run.history.append(row)
            last, signalled = step + 1 == run.steps, distributed.signal_of_any(noted)
            if last or (step + 1) % cfg.validate_every == 0:
                row |= validate_and_keep_best(run, step + 1)
            log_step(run, row, rows)
            if last or signalled or (step + 1) % cfg.save_every == 0:
                checkpoint(run, step + 1)
            if signalled and not last:
                distributed.print0(f"stopped by signal {signalled} after step {step + 1} of {run.steps}; "
                         "the same command continues")
                raise SystemExit(128 + signalled)
            guard(run)
        export(run, "final")
        if where.rank == 0:
            report.run_page(cfg.out)
    distributed.cleanup()
    return summary(run) if where.rank == 0 else None


if __name__ == "__main__":
    config.run(GRPOConfig, main)
