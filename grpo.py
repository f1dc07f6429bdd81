"""GRPO with retrieval rewards: sample, score by rank, take advantages inside each group, update, push the weights back.

Re-implements the reinforcement stage of ConvSearch-R1 (arXiv 2505.15776 §3.4; GRPO: arXiv 2402.03300).  Differs from
the paper or its code in (the field in brackets gives the original's behaviour back, where a study needs it):
 1. one strict parser decides what is well formed, in reward, warm-up filter and inference  [parser: paper]
 2. the loss is one sum over trained tokens / one global count, so it depends neither on the micro-batch size nor on
    the number of processes; the original averages means of micro-batches
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

Read it from `main` at the bottom upwards: main → train_step → sample_step, training_batch, update → policy_loss → the
mathematics at the top.

Shapes: N prompts per step, G group size, B sequences, T predicted positions.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

import config
import data
import distributed as D
import infer
import model as M
from evaluate import evaluate_run
from retriever import RetrieverConfig, open_retriever
from reward import Parsed, parse_response, score_rewrite
from rollout import Rollout, RolloutBatch, Sampling, TorchEngine, collate_rollouts

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
    return torch.expm1(bent) - bent + math.expm1(limit) * (d - bent)


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
    model: str = ""
    """policy to start from, and the frozen KL reference: the warm-up's output; a Hugging Face folder or hub name"""
    train: str = ""
    """training turns (JSONL)"""
    dev: str = ""
    """held-out turns for validation (JSONL); empty: no validation"""
    out: str = "runs/grpo"
    """run folder: config.yaml, metrics.jsonl, rollouts/, checkpoint_*/, best/, final/"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the search engine whose ranks are the reward"""
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
    """sampling stops here; such a response is trained on with whatever reward it earns"""
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
    micro_batch_size: int = 8
    """sequences per forward pass and process: memory and speed only, never the result"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, a third more work"""
    engine_batch: int = 256
    """sequences the engine decodes together"""
    validate_every: int = 20
    """steps between validations (greedy, whole `dev`); the first is before step 1, one more at the end"""
    save_every: int = 100
    """steps between resumable checkpoints"""
    keep_checkpoints: int = 2
    """newest checkpoints kept"""
    stop_on_collapse: bool = True
    """stop (status 3) when format rate, reward, entropy or KL show that the policy has collapsed"""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of best/ and final/"""


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
    need(0 < cfg.temperature < math.inf,
         f"temperature={cfg.temperature}: training samples need a finite temperature above 0")
    for key in ("micro_batch_size", "max_response_tokens", "max_prompt_tokens", "engine_batch", "validate_every",
                "save_every", "keep_checkpoints", "epochs"):
        need(getattr(cfg, key) >= 1, f"{key}={getattr(cfg, key)} must be at least 1")
    need(cfg.steps is None or cfg.steps >= 1, f"steps={cfg.steps} must be at least 1, or null for whole epochs")
    for key in ("lr", "max_grad_norm", "kl_limit"):
        need(getattr(cfg, key) > 0, f"{key}={getattr(cfg, key)} must be above 0")
    for key in ("kl_coef", "weight_decay", "warmup_steps"):
        need(getattr(cfg, key) >= 0, f"{key}={getattr(cfg, key)} must be at least 0")
    for key in ("lr", "kl_limit", "kl_coef", "weight_decay", "entropy_coef", "malformed_reward"):
        need(math.isfinite(getattr(cfg, key)), f"{key}={getattr(cfg, key)} must be finite")
    need(0 < cfg.clip_eps < 1, f"clip_eps={cfg.clip_eps} must lie between 0 and 1")
    need(cfg.importance_cap is None or cfg.importance_cap >= 1,
         f"importance_cap={cfg.importance_cap} must be at least 1, or null")


# ============================================================================================== the stages of one step


@dataclass
class Score:
    """What one response earned.  reward is None when the rollout failed for a technical reason and is left out."""

    text: str
    parsed: Parsed
    rank: int | None
    reward: float | None


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
    texts = [data.decode_response(tokenizer, r.response_ids) for r in rollouts]
    parsed = [parse_response(t, cfg.parser) for t in texts]
    wanted: dict[tuple[int, str], int | None] = {}
    for r, p in zip(rollouts, parsed):
        if p.well_formed and r.end != "engine_error":
            wanted[r.group_id, p.rewrite] = None
    if wanted:
        ranks = retriever.gold_ranks([query for _, query in wanted], [turns[group].gold_ids for group, _ in wanted])
        wanted = dict(zip(wanted, ranks))
    scores = []
    for r, text, p in zip(rollouts, texts, parsed):
        rank = wanted.get((r.group_id, p.rewrite))
        failed = r.end == "engine_error" or (rank is not None and math.isnan(rank))  # retriever.FAILED
        rank = None if failed else rank
        reward = None if failed else score_rewrite(text, rank, cfg.malformed_reward, cfg.reward, cfg.parser)
        scores.append(Score(text, p, rank, reward))
    return scores


def policy_loss(policy, reference, batch: RolloutBatch, old_logprobs: Tensor | None, cfg: GRPOConfig,
                denominator: float) -> tuple[Tensor, dict[str, float]]:
    """The loss of one micro-batch (its share of the step's loss) and sums over its trained tokens for the log.

    old_logprobs (B, T): of the policy that sampled; None where that is the policy as it stands, the ratio exactly 1.
    """
    mask = batch.loss_mask.bool()  # (B, T), as all per-token tensors here
    inputs = dict(tokens=batch.tokens, attention_mask=batch.attention_mask, temperature=cfg.temperature, positions=mask,
                  groups=(batch.prompt_lengths, batch.group_ids))  # the prompt of a group is computed once
    if cfg.entropy_coef:
        logprobs, entropy = M.token_logprobs(policy, **inputs, with_entropy=True)
    else:
        logprobs, entropy = M.token_logprobs(policy, **inputs), None
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    per_token, clipped = clipped_policy_loss(logprobs, old, batch.advantages, cfg.clip_eps)
    if cfg.importance_cap is not None:
        per_token = per_token * truncated_importance(old, batch.logprobs, cfg.importance_cap)
    kl = torch.zeros_like(per_token)
    if reference is not None:
        with torch.no_grad():
            ref = M.token_logprobs(reference, **inputs)
        kl = low_var_kl(logprobs, ref, cfg.kl_limit)
        per_token = per_token + cfg.kl_coef * kl
    if entropy is not None:
        per_token = per_token - cfg.entropy_coef * entropy
    loss = aggregate(per_token, mask, cfg.loss_mode, denominator)
    with torch.no_grad():
        gap = (old - batch.logprobs).abs()[mask]
        measured = float(kl[mask].sum()) if reference is not None else math.nan  # without a reference KL is not 0, but unknown
        sums = {"tokens": float(mask.sum()), "kl": measured, "clipped": float(clipped[mask].sum()),
                "entropy": -float(logprobs[mask].sum()), "engine_gap": float(gap.sum()),
                "engine_gap_max": float(gap.max()) if gap.numel() else 0.0, "loss": float(loss)}
    return loss, sums


def share_of(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The given rows of the batch; where there are none, its last sequence with an empty loss mask.

    So everyone joins every collective, with a sequence that trains nothing where there is nothing else to do.
    """
    share = batch.select(rows if len(rows) else torch.tensor([len(batch) - 1]))
    if not len(rows):
        share.loss_mask.zero_()
    return share


def micro_batches(batch: RolloutBatch, size: int) -> list[RolloutBatch]:
    """The batch cut into pieces of at most `size` sequences, as many on every rank.

    Groups stay together, so that what they share is computed once a piece.
    """
    pieces = list(torch.argsort(batch.group_ids, stable=True).split(size))
    pieces += [torch.tensor([], dtype=torch.int64)] * (max(D.gather_objects(len(pieces))) - len(pieces))
    return [share_of(batch, rows) for rows in pieces]


def update(policy, reference, optimizer, batch: RolloutBatch, cfg: GRPOConfig, where: D.Dist) -> dict[str, float]:
    """`updates_per_batch` optimizer steps, each on its share of the batch; returns statistics over shares and ranks."""
    shares = [share_of(batch, rows) for rows in torch.arange(len(batch)).tensor_split(cfg.updates_per_batch)]
    plans = [micro_batches(share, cfg.micro_batch_size) for share in shares]
    old = [[None] * len(plan) for plan in plans]
    if cfg.updates_per_batch > 1:  # with one update the policy has not moved: the pass would give the update's numbers
        with torch.no_grad():
            old = [[M.token_logprobs(policy, m.tokens, m.attention_mask, cfg.temperature, m.loss_mask) for m in plan]
                   for plan in plans]
    totals = dict.fromkeys(("tokens", "kl", "clipped", "entropy", "engine_gap", "loss"), 0.0)
    gap_max, norm, skipped = 0.0, 0.0, 0
    policy.train()
    for share, plan, old_logprobs in zip(shares, plans, old):
        (denominator,) = D.all_reduce_sum([loss_denominator(share.loss_mask, cfg.loss_mode, cfg.max_response_tokens)])
        for i, micro in enumerate(plan):
            policy.set_requires_gradient_sync(i == len(plan) - 1)
            loss, sums = policy_loss(policy, reference, micro, old_logprobs[i], cfg, denominator)
            (loss * where.world).backward()  # FSDP averages over ranks; the loss is a sum
            gap_max = max(gap_max, sums.pop("engine_gap_max"))
            totals = {key: totals[key] + sums[key] for key in totals}
        norm = D.clip_grad_norm(policy, cfg.max_grad_norm)
        if not math.isfinite(norm):
            skipped += 1
        elif denominator:  # something is trained
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    policy.eval()
    totals = dict(zip(totals, D.all_reduce_sum(list(totals.values()))))
    tokens = max(1.0, totals["tokens"])
    return {"loss": totals["loss"] / cfg.updates_per_batch,
            **{key: totals[key] / tokens for key in ("kl", "clipped", "entropy", "engine_gap")},
            "engine_gap_max": max(D.gather_objects(gap_max)), "grad_norm": norm, "skipped": skipped,
            "tokens": int(totals["tokens"])}


def reward_stats(rows: list[dict]) -> dict[str, float]:
    """Statistics of a step's rollouts (all ranks): reward, format, ranks, lengths, flat groups, failures."""
    scored = [r for r in rows if r["reward"] is not None]
    groups: dict[int, set[float]] = {}
    for r in scored:
        groups.setdefault(r["group"], set()).add(r["reward"])
    n = max(1, len(scored))
    ranks = [r["rank"] for r in scored if r["rank"] is not None]
    return {
        "reward": sum(r["reward"] for r in scored) / n,
        "reward_std": float(torch.tensor([r["reward"] for r in scored]).std()) if len(scored) > 1 else 0.0,
        "format_rate": sum(r["well_formed"] for r in scored) / n,
        "hit@1": sum(k == 1 for k in ranks) / n, "hit@10": sum(k <= 10 for k in ranks) / n, "hit@100": len(ranks) / n,
        "mrr": sum(1 / k for k in ranks) / n,
        "flat_groups": sum(len(v) == 1 for v in groups.values()) / max(1, len(groups)),
        "response_tokens": sum(r["tokens"] for r in rows) / max(1, len(rows)),
        "rewrite_words": sum(len((r["rewrite"] or "").split()) for r in scored) / n,
        "length_stops": sum(r["end"] == "length" for r in rows) / max(1, len(rows)),
        "failed": len(rows) - len(scored),
    }


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
    where: D.Dist
    tokenizer: object
    policy: torch.nn.Module
    reference: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    engine: TorchEngine
    retriever: object
    turns: list[data.Turn]
    prompts: list[list[int]]  # of each turn, token ids
    dev: list[data.Turn]
    dev_prompts: list[list[int]]
    steps: int  # of the whole run
    settings: dict  # `settings` of cfg, at the start
    best: dict  # {"mrr": …, "step": …} of the best validation so far
    history: list[dict] = field(default_factory=list)  # the log rows of all steps so far


def encode_turns(turns: list[data.Turn], tokenizer, limit: int, name: str) -> tuple[list[data.Turn], list[list[int]]]:
    """Turns with their prompt ids; those with more than `limit` tokens are left out and counted."""
    kept, prompts = [], []
    for turn in turns:
        ids = data.encode_chat(tokenizer, data.rewrite_prompt(turn))
        if len(ids) <= limit:
            kept.append(turn)
            prompts.append(ids)
    if len(kept) < len(turns):
        D.print0(f"{name}: {len(turns) - len(kept)} of {len(turns)} turns left out: prompt above max_prompt_tokens="
                 f"{limit}")
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
            D.print0(f"{path}: {dropped} turns without a gold passage left out")
        out += encode_turns(turns, tokenizer, cfg.max_prompt_tokens, path)
    overlap = {t.conversation_id for t in out[0]} & {t.conversation_id for t in out[2]}
    if overlap:
        D.print0(f"warning: {len(overlap)} conversations are in both train and dev ({sorted(overlap)[0]}, …): "
                 "validation does not show generalisation")
    return out


def start(cfg: GRPOConfig, where: D.Dist) -> Run:
    """Check everything that is cheap to check, then load: tokenizer, retriever, turns, policy, reference, engine."""
    check_config(cfg, where.world)
    tokenizer = M.load_tokenizer(cfg.model)
    retriever = open_retriever(cfg.retriever)
    turns, prompts, dev, dev_prompts = load_turns(cfg, retriever, tokenizer)
    cuda = where.device.type == "cuda"
    policy = M.load_causal_lm(cfg.model, torch.float32, where.device, cfg.gradient_checkpointing)
    eos = data.eos_token_ids(tokenizer, policy.generation_config)
    dtype = torch.bfloat16 if cuda else torch.float32
    pad_id = data.pad_token_id(tokenizer, eos, policy.get_input_embeddings().num_embeddings)
    engine = TorchEngine(M.load_causal_lm(cfg.model, dtype, where.device), eos, pad_id, tokenizer, cfg.engine_batch)
    longest = max(map(len, prompts + dev_prompts)) + cfg.max_response_tokens
    if longest > engine.max_length:
        raise config.ConfigError(f"longest prompt + max_response_tokens = {longest} tokens, but the model has "
                                 f"{engine.max_length} positions; lower max_response_tokens or max_prompt_tokens")
    reference = None
    if cfg.kl_coef:
        reference = D.shard_model(M.load_causal_lm(cfg.model, dtype, where.device).requires_grad_(False), where)
    D.shard_model(policy, where, bf16=cuda)
    optimizer = M.make_optimizer(policy, cfg.lr, weight_decay=cfg.weight_decay)
    steps = cfg.steps or math.ceil(cfg.epochs * len(turns) / cfg.prompts_per_step)
    sequences = cfg.prompts_per_step * cfg.group_size // where.world
    D.print0(f"{cfg.prompts_per_step} prompts × {cfg.group_size} samples / {where.world} "
             f"process{'es' * (where.world > 1)} = {sequences} sequences per process = "
             f"{math.ceil(sequences / cfg.micro_batch_size)} micro-batches of {min(sequences, cfg.micro_batch_size)}; "
             f"{len(turns)} turns = {len(turns) / cfg.prompts_per_step:.1f} steps an epoch; "
             f"{steps} steps, lr {cfg.lr:g} after {cfg.warmup_steps} warm-up steps; {len(dev)} validation turns "
             f"every {cfg.validate_every} steps")
    return Run(cfg, where, tokenizer, policy, reference, optimizer, engine, retriever, turns, prompts, dev, dev_prompts,
               steps, settings(cfg), best={"mrr": -1.0, "step": -1})


def settings(cfg: GRPOConfig) -> dict:
    """What may not differ between a run and its continuation, because it decides the result; files by their content."""
    free = ("retriever", "steps", "epochs", "out", "validate_every", "save_every", "keep_checkpoints",
            "micro_batch_size", "engine_batch", "gradient_checkpointing", "stop_on_collapse", "export_dtype")
    return ({key: value for key, value in config.to_dict(cfg).items() if key not in free}
            | {key: infer.named(getattr(cfg, key)) for key in ("model", "train", "dev")}
            | infer.retriever_settings(cfg.retriever))


def resume(run: Run) -> int:
    """Continue from the newest checkpoint in `out`, if there is one; returns the number of steps already done."""
    cfg, found = run.cfg, D.latest_checkpoint(run.cfg.out)
    metrics, rollouts = (os.path.join(cfg.out, name) for name in ("metrics.jsonl", "rollouts"))
    if found is None:
        if os.path.isdir(os.path.join(cfg.out, "final")):
            raise config.ConfigError(f"{cfg.out} holds a finished run without a checkpoint to go on from; use another "
                                     "out folder, or move it away to start anew")
        if os.path.exists(metrics) and os.path.getsize(metrics):
            D.print0(f"{cfg.out} has no checkpoint: its metrics.jsonl and rollouts are begun anew")
    else:
        folder, state = found
        if "settings" not in state:
            raise config.ConfigError(f"{folder} is no checkpoint of grpo.py; use another out folder")
        if change := infer.changed_setting(state["settings"], run.settings):
            raise config.ConfigError(f"{folder} was made with other settings: {change}; use another out folder, or the "
                                     "same settings to continue")
        if state["step"] > run.steps:
            raise config.ConfigError(f"steps={run.steps}, but {folder} has {state['step']} steps done; set steps to "
                                     "that number or more, or use another out folder")
        D.load_checkpoint(folder, run.policy, run.optimizer)
        run.best = state["best"]
        D.print0(f"resumed from {folder}: {state['step']} steps done")
    done, rows = found[1]["step"] if found else 0, []
    if run.where.rank == 0:
        os.makedirs(rollouts, exist_ok=True)
        config.save_config(cfg, os.path.join(cfg.out, "config.yaml"))
        rows = data.begin_metrics(metrics, done)
        for name in os.listdir(rollouts):  # of steps that are taken again, or half-written
            if name.startswith("step_") and name not in {f"step_{step:06d}.jsonl" for step in range(1, done + 1)}:
                os.remove(os.path.join(rollouts, name))
    run.history = [{key: math.nan if value is None else value for key, value in row.items()}
                   for row in D.broadcast_object(rows) if row["step"]]
    return done


def sample_step(run: Run, step: int) -> tuple[list[Rollout], list[Score], list[data.Turn], int]:
    """This rank's rollouts of a step with their scores and turns, and the global number of its first prompt."""
    cfg, share = run.cfg, run.cfg.prompts_per_step // run.where.world
    first = run.where.rank * share
    picked = step_turns(len(run.turns), step, cfg.prompts_per_step, cfg.seed)[first:first + share]
    samplings = [sampling_for(cfg, step, first + j) for j in range(share)]
    rollouts = run.engine.generate([run.prompts[i] for i in picked], samplings)
    turns = [run.turns[i] for i in picked]
    return rollouts, score_rollouts(rollouts, turns, run.retriever, run.tokenizer, cfg), turns, first


def training_batch(rollouts: list[Rollout], scores: list[Score], pad_id: int, cfg: GRPOConfig, where: D.Dist
                   ) -> tuple[RolloutBatch, list[float | None]]:
    """The scored rollouts as tensors, and each rollout's advantage (None for one that failed and is left out).

    A rank whose rollouts all failed takes part with one token that is not trained; Stopped where that is so on all.
    """
    kept = [i for i, s in enumerate(scores) if s.reward is not None]
    if not any(D.gather_objects(bool(kept))):
        engine = sum(r.end == "engine_error" for r in rollouts)
        raise Stopped(f"rank {where.rank}: all {len(scores)} rollouts of this step failed, {engine} in the engine "
                      f"(weights that are not finite), {len(scores) - engine} in the retriever; mend that, then start "
                      "again: the run resumes from its newest checkpoint")
    rewards = torch.tensor([scores[i].reward for i in kept], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([rollouts[i].group_id for i in kept]), cfg.scale_by_std)
    idle = Rollout(rollouts[0].prompt_ids, [pad_id], [0.0], [0], 0, "eos")
    batch = collate_rollouts([rollouts[i] for i in kept] or [idle], advantages if kept else [0.0], pad_id)
    by_index = dict(zip(kept, advantages.tolist()))
    return batch.to(where.device), [by_index.get(i) for i in range(len(rollouts))]


def rollout_rows(rollouts: list[Rollout], scores: list[Score], advantages: list[float | None], turns: list[data.Turn],
                 first: int) -> list[dict]:
    """The step's rollouts as they are written to rollouts/step_*.jsonl."""
    return [{"query_id": turns[r.group_id].query_id, "group": first + r.group_id, "response": s.text,
             "rewrite": s.parsed.rewrite, "well_formed": s.parsed.well_formed, "rank": s.rank, "reward": s.reward,
             "advantage": a, "tokens": len(r.response_ids), "end": r.end}
            for r, s, a in zip(rollouts, scores, advantages)]


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """Step `step` (from 0): sample, score, advantages, update, sync.  Returns the log row and all ranks' rollouts."""
    cfg = run.cfg
    t0 = time.perf_counter()
    rollouts, scores, turns, first = sample_step(run, step)
    t1 = time.perf_counter()
    batch, advantages = training_batch(rollouts, scores, run.engine.pad_id, cfg, run.where)
    for group in run.optimizer.param_groups:
        group["lr"] = M.lr_at(step, cfg.lr, cfg.warmup_steps, run.steps)
    stats = update(run.policy, run.reference, run.optimizer, batch, cfg, run.where)
    t2 = time.perf_counter()
    run.engine.sync_weights(D.full_parameters(run.policy))
    t3 = time.perf_counter()
    rows = [r for part in D.gather_objects(rollout_rows(rollouts, scores, advantages, turns, first)) for r in part]
    return {"step": step + 1, **reward_stats(rows), **stats, "lr": run.optimizer.param_groups[0]["lr"],
            "seconds_sample": t1 - t0, "seconds_update": t2 - t1, "seconds_sync": t3 - t2}, rows


def validate(run: Run) -> dict[str, float]:
    """Retrieval metrics of greedy rewrites of the dev turns, on all ranks; a malformed one searches the question."""
    mine = range(run.where.rank, len(run.dev), run.where.world)
    greedy = Sampling(temperature=0.0, max_tokens=run.cfg.max_response_tokens)
    rollouts = run.engine.generate([run.dev_prompts[i] for i in mine], greedy)
    parsed = [parse_response(data.decode_response(run.tokenizer, r.response_ids), run.cfg.parser) for r in rollouts]
    queries = [p.rewrite if p.well_formed else run.dev[i].question for i, p in zip(mine, parsed)]
    results = run.retriever.search(queries, 100) if queries else []
    found, formed = {}, 0
    own = {run.dev[i].query_id: hits for i, hits in zip(mine, results)}
    for part, good in D.gather_objects((own, sum(p.well_formed for p in parsed))):
        found |= part
        formed += good
    metrics = evaluate_run(found, {t.query_id: dict.fromkeys(t.gold_ids, 1) for t in run.dev})
    shown = {f"dev_{k}": v for k, v in metrics.items() if k not in ("queries", "missing")}
    return shown | {"dev_format_rate": formed / len(run.dev)}


def export(run: Run, name: str) -> None:
    """Write the policy to the Hugging Face folder `name` of the run."""
    D.export_hf(run.policy, run.tokenizer, os.path.join(run.cfg.out, name), getattr(torch, run.cfg.export_dtype))


def validate_and_keep_best(run: Run, step: int) -> dict[str, float]:
    """Validate; export the policy to best/ when its MRR is the highest so far."""
    if not run.dev:
        return {}
    t = time.perf_counter()
    metrics = validate(run)
    if metrics["dev_mrr"] > run.best["mrr"]:
        run.best = {"mrr": metrics["dev_mrr"], "step": step}
        if step:  # the start is the SFT policy, which exists already
            export(run, "best")
    D.print0(f"validation {step:05d}/{run.steps:05d} | mrr {metrics['dev_mrr']:.4f} | "
             f"ndcg@3 {metrics['dev_ndcg@3']:.4f} | recall@10 {metrics['dev_recall@10']:.4f} | "
             f"recall@100 {metrics['dev_recall@100']:.4f} | format {metrics['dev_format_rate']:.3f} | "
             f"best {run.best['mrr']:.4f} at {run.best['step']} | {time.perf_counter() - t:.1f}s")
    return metrics


def step_line(row: dict, steps: int, seconds: float) -> str:
    """The one line a step prints; `seconds` is what a step takes."""
    left = seconds * (steps - row["step"])
    return (f"step {row['step']:05d}/{steps:05d} | reward {row['reward']:.4f} | mrr {row['mrr']:.3f} | "
            f"hit@1 {row['hit@1']:.3f} | format {row['format_rate']:.3f} | kl {row['kl']:.4f} | "
            f"entropy {row['entropy']:.3f} | flat {row['flat_groups']:.2f} | clipped {100 * row['clipped']:.1f}% | "
            f"len {row['response_tokens']:.0f} | norm {row['grad_norm']:.2f} | lr {row['lr']:.2g} | "
            f"gen {row['seconds_sample']:.1f}s | train {row['seconds_update']:.1f}s | "
            f"sync {row['seconds_sync']:.1f}s | left {left / 60:.0f}m")


def log_step(run: Run, row: dict, rows: list[dict] = ()) -> None:
    """Rank 0: a row of metrics.jsonl, rollouts/step_*.jsonl, the step's line, and two samples now and then."""
    if run.where.rank:
        return
    data.append_metrics(os.path.join(run.cfg.out, "metrics.jsonl"), row)
    if not rows:
        return
    data.write_jsonl(os.path.join(run.cfg.out, "rollouts", f"step_{row['step']:06d}.jsonl"), rows)
    recent = [r["seconds_sample"] + r["seconds_update"] + r["seconds_sync"] for r in run.history[-20:]]
    D.print0(step_line(row, run.steps, sum(recent) / len(recent)))
    if row["step"] == 1 or row["step"] % run.cfg.validate_every == 0:
        for sample in (rows[0], rows[-1]):
            D.print0(f"  sample {sample['query_id']}: rank {sample['rank']}, reward {sample['reward']}: "
                     f"{sample['response']!r}")


def summary(run: Run) -> dict:
    """The last line of a finished run: first and last steps' mean reward, validation before, best and last, folders."""
    rows = [row for _, row in data.read_jsonl(os.path.join(run.cfg.out, "metrics.jsonl"))]
    steps = [row for row in rows if row["step"]]
    tenth = max(1, len(steps) // 10)
    validations = [row["dev_mrr"] for row in rows if "dev_mrr" in row]
    return {"steps": run.steps, "reward_first_tenth": sum(r["reward"] for r in steps[:tenth]) / tenth,
            "reward_last_tenth": sum(r["reward"] for r in steps[-tenth:]) / tenth,
            "dev_mrr_start": validations[0] if validations else None,
            "dev_mrr_last": validations[-1] if validations else None,
            "dev_mrr_best": run.best["mrr"] if validations else None, "best_step": run.best["step"],
            "final": os.path.join(run.cfg.out, "final"),
            "best": os.path.join(run.cfg.out, "best") if run.best["step"] > 0 else run.cfg.model}


def checkpoint(run: Run, step: int) -> None:
    """Write a resumable checkpoint."""
    folder = D.save_checkpoint(run.cfg.out, step, run.policy, run.optimizer,
                               {"best": run.best, "config": config.to_dict(run.cfg), "settings": run.settings},
                               run.cfg.keep_checkpoints)
    D.print0(f"checkpoint {folder}")


def guard(run: Run) -> None:
    """Stop a run that has failed (three steps in a row skipped for non-finite gradients, or a collapsed policy); warn of
    one that cannot learn."""
    if len(run.history) >= 3 and all(row["skipped"] for row in run.history[-3:]):
        raise Stopped("the gradient was not finite in three steps in a row; start anew in another out folder, with a "
                      "lower lr or a higher kl_coef")
    if len(run.history) == 3 and all(row["flat_groups"] == 1.0 for row in run.history):
        D.print0(f"warning: in the first three steps every group was flat (format rate {run.history[-1]['format_rate']:.2f}): "
                 "nothing is learned from rewards that are all equal, and validation of malformed responses searches the "
                 "raw questions; warm the policy up first, or raise group_size or temperature")
    reason = collapse_reason(run.history) if run.cfg.stop_on_collapse else None
    if reason:
        best = f"; best/ holds the policy of step {run.best['step']}" if run.best["step"] > 0 else ""
        raise Stopped(f"the policy has collapsed: {reason}{best}; try a higher kl_coef or a lower lr in another out "
                      "folder, or stop_on_collapse=false to go on in this one")


def main(cfg: GRPOConfig) -> dict | None:
    """Train; returns the run's summary."""
    where = D.setup()
    run = start(cfg, where)
    alone = data.only_writer(cfg.out) if where.rank == 0 else contextlib.nullcontext()
    with alone, D.noted_signals() as noted:
        done = resume(run)
        run.engine.sync_weights(D.full_parameters(run.policy))
        if done == 0:
            log_step(run, {"step": 0, **validate_and_keep_best(run, 0)})
        for step in range(done, run.steps):
            row, rows = train_step(run, step)
            run.history.append(row)
            last, signalled = step + 1 == run.steps, D.signal_of_any(noted)
            if last or (step + 1) % cfg.validate_every == 0:
                row |= validate_and_keep_best(run, step + 1)
            log_step(run, row, rows)
            if last or signalled or (step + 1) % cfg.save_every == 0:
                checkpoint(run, step + 1)
            if signalled and not last:
                D.print0(f"stopped by signal {signalled} after step {step + 1} of {run.steps}; "
                         "the same command continues")
                raise SystemExit(128 + signalled)
            guard(run)
        export(run, "final")
    D.cleanup()
    return summary(run) if where.rank == 0 else None


if __name__ == "__main__":
    config.run(GRPOConfig, main)
