"""What both trainings stand on: the order of the data, prompts, loading, checkpoints, exports and
the log.

`run` is the object of a training that lives as long as it does (grpo.Run): its fields are named
where they are used.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator

import torch

import config
import data
import distributed
import prompts
import runs
from episodes.episode import episode_figures, episode_reward, open_task
from infer import end_and_pad_ids
from lora import adapter_base
from model import load_causal_lm, load_tokenizer, make_optimizer
from retriever import open_retriever, retriever_settings
from reward import parse_response
from rollout import open_engine
from scoring.health import answer_means, collapse_reason, step_line, validation_line  # noqa: F401
from scoring.ranking import evaluate_run, read_qrels


class Stopped(RuntimeError):
    """The run ended itself for a stated reason (collapse, non-finite gradients); checkpoints are
    intact."""

    exit_status = 3


class Clock:
    """Seconds of the phases of a step, work queued on the device included: `with clock("sample"):
    …`."""

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
    """Indices of the items of `step` (from 0): a fresh permutation each epoch; batches run across
    its end.

    A function of its arguments alone, so a resumed run, on any number of processes, goes on with
    the same items.
    """
    out: list[int] = []
    for position in range(step * prompts_per_step, (step + 1) * prompts_per_step):
        epoch, offset = divmod(position, count)
        if not out or offset == 0:
            order = list(range(count))
            random.Random(f"order {seed} {epoch}").shuffle(order)
        out.append(order[offset])
    return out


def prompt_tokens(before, after) -> dict[str, int]:
    """Prompt tokens that all ranks' engines computed, and that they held, between two totals."""
    names = ("prompt_tokens", "held_tokens")
    own = [getattr(after, name) - getattr(before, name) for name in names]
    return dict(zip(names, map(int, distributed.all_reduce_sum(own))))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


BEST = {"rewrite": "dev_mrr", "search": "dev_f1", "agent": "dev_f1"}  # what chooses the best policy


def summary(run) -> dict:
    """The last line of a finished run: mean reward of the first and the last steps, validation,
    folders."""
    rows = [row for _, row in data.read_jsonl(os.path.join(run.cfg.out, "metrics.jsonl"))]
    rewards = [row["reward"] for row in rows if row["step"]]
    tenth = max(1, len(rewards) // 10)
    key, final = BEST[run.cfg.task], os.path.join(run.cfg.out, "final")
    validations = [row[key] for row in rows if key in row] or [None]
    best = os.path.join(run.cfg.out, "best") if run.best["step"] > 0 else run.cfg.model
    return {
        "steps": run.steps,
        "reward_first_tenth": sum(rewards[:tenth]) / tenth,
        "reward_last_tenth": sum(rewards[-tenth:]) / tenth,
        f"{key}_start": validations[0],
        f"{key}_last": validations[-1],
        f"{key}_best": run.best["value"] if run.dev else None,
        "best_step": run.best["step"],
        "final": final,
        "best": best if run.dev else final,
    }


# ================================================================================= start and resume


def load(cfg, dist: distributed.Dist) -> dict:
    """What grpo.Run holds beside its configuration: data first, then models."""
    tokenizer = load_tokenizer(cfg.model)
    retriever, task, golds = None, None, {}
    if cfg.task == "rewrite":
        retriever = open_retriever(cfg.retriever)
    else:
        task = open_task(cfg.task, cfg.episode, tokenizer, cfg.retriever)
        inside = getattr(task.tools, "retriever", None)
        golds = read_golds(cfg.qrels, getattr(inside, "passage_ids", None))
    items, item_prompts = load_items(cfg, cfg.train, retriever, task, tokenizer)
    dev, dev_prompts = load_items(cfg, cfg.dev, retriever, task, tokenizer)
    warn_of_overlap(items, dev)
    longest = max(map(len, item_prompts + dev_prompts)) + cfg.max_response_tokens
    policy, reference, engine = load_models(cfg, dist, tokenizer, longest)
    optimizer = make_optimizer(policy, cfg.lr, tuple(cfg.betas), cfg.weight_decay)
    steps = cfg.steps or math.ceil(cfg.epochs * len(items) / cfg.prompts_per_step)
    sequences = cfg.prompts_per_step * cfg.group_size // dist.world
    kind = "turns" if task is None else "questions"
    distributed.print0(
        f"{cfg.prompts_per_step} prompts × {cfg.group_size} samples / {dist.world} "
        f"process{'es' * (dist.world > 1)} = {sequences} sequences per process in micro-batches of "
        f"{cfg.micro_batch_tokens} tokens; {len(items)} {kind} = "
        f"{len(items) / cfg.prompts_per_step:.1f} steps an epoch; {steps} steps, lr {cfg.lr:g} "
        f"after {cfg.warmup_steps} warm-up steps; {len(dev)} validation {kind} every "
        f"{cfg.validate_every} steps"
    )
    return {
        "tokenizer": tokenizer,
        "policy": policy,
        "reference": reference,
        "optimizer": optimizer,
        "engine": engine,
        "retriever": retriever,
        "task": task,
        "golds": golds,
        "items": items,
        "prompts": item_prompts,
        "dev": dev,
        "dev_prompts": dev_prompts,
        "steps": steps,
    }


def encode_items(
    items: list, encode: Callable, limit: int, name: str
) -> tuple[list, list[list[int]]]:
    """Turns (or questions) with their prompt ids; those with more than `limit` tokens are left out
    and counted."""
    pairs = [(item, encode(item)) for item in items]
    kept = [(item, ids) for item, ids in pairs if len(ids) <= limit]
    if len(kept) < len(items):
        distributed.print0(
            f"{name}: {len(items) - len(kept)} of {len(items)} left out: prompt above "
            f"max_prompt_tokens={limit}"
        )
    if not kept:
        raise data.DataError(
            f"{name}: every prompt is longer than max_prompt_tokens={limit}; raise the limit"
        )
    return [item for item, _ in kept], [ids for _, ids in kept]


def load_items(cfg, path: str, retriever, task, tokenizer) -> tuple[list, list[list[int]]]:
    """The turns or questions of a file with their prompts; none where no file is given."""
    if not path:
        return [], []
    if task is not None:
        questions = data.read_questions(path)
        return encode_items(
            questions, lambda q: task.prompt(q.question), cfg.max_prompt_tokens, path
        )
    turns, dropped = data.with_gold(data.read_turns(path), retriever.passage_ids, path)
    if dropped:
        distributed.print0(f"{path}: {dropped} turns without a gold passage left out")
    instruction = prompts.read_instruction(cfg.instruction)

    def encode(turn: data.Turn) -> list[int]:
        return prompts.encode_chat(tokenizer, prompts.rewrite_prompt(turn, instruction))

    return encode_items(turns, encode, cfg.max_prompt_tokens, path)


def warn_of_overlap(train: list, dev: list) -> None:
    keys = [{getattr(i, "conversation_id", i.question) for i in items} for items in (train, dev)]
    if both := keys[0] & keys[1]:
        distributed.print0(
            f"warning: {len(both)} conversations or questions are in both train and dev "
            f"({min(both)!r}, …): validation does not show generalisation"
        )


def read_golds(paths: list[str], passage_ids) -> dict[str, list[str]]:
    """Question id → its gold passages, of qrels files; DataError: one is not in the index."""
    golds: dict[str, list[str]] = {}
    for path in paths:
        for query, judged in read_qrels(path).items():
            golds[query] = [p for p, gain in judged.items() if gain > 0]
            if wrong := [
                p for p in golds[query] if passage_ids is not None and p not in passage_ids
            ]:
                raise data.DataError(
                    f"{path}: gold passage {wrong[0]!r} is not in the index; give the qrels of its "
                    "corpus"
                )
    return golds


def load_policy(cfg, cuda: bool, keep_start: bool = False) -> torch.nn.Module:
    """The model to train, on the CPU, with the adapter that `lora` asks for: float32 where all
    weights are trained."""
    if adapter_base(cfg.model) and not cfg.lora.r:
        distributed.print0(
            f"{cfg.model} is an adapter: it is merged and all weights are trained; lora.r goes on "
            "with it"
        )
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
    """(policy, reference or None, engine): policy and reference sharded over the ranks."""
    cuda = dist.device.type == "cuda"
    dtype, compiled = torch.bfloat16 if cuda else torch.float32, cuda and cfg.compile
    eos, pad_id = end_and_pad_ids(cfg.model, tokenizer)
    engine = open_engine(
        cfg.engine,
        cfg.model,
        tokenizer,
        eos,
        pad_id,
        dist.device,
        longest,
        cfg.seed,
        dtype,
        weights=False,
    )  # `main` sends them; opened while the card is empty: vLLM measures what is free
    if longest > engine.max_length:
        raise config.ConfigError(
            f"longest prompt + max_response_tokens = {longest} tokens, but the model has "
            f"{engine.max_length} positions; lower max_response_tokens or max_prompt_tokens"
        )
    with distributed.in_turn():
        policy = load_policy(cfg, cuda, keep_start=cfg.kl_coef > 0)
        distributed.shard_model(policy, dist, cuda, cfg.gather_once, cfg.cpu_offload == "all")
    reference = policy if cfg.kl_coef and cfg.lora.r else None
    if cfg.kl_coef and not cfg.lora.r:
        offload = cfg.cpu_offload != "none"
        with distributed.in_turn():
            reference = load_causal_lm(cfg.model, dtype, compiled=compiled).requires_grad_(False)
            distributed.shard_model(
                reference, dist, gather_once=cfg.gather_once, cpu_offload=offload
            )
    return policy, reference, engine


def export(policy: torch.nn.Module, tokenizer, cfg, name: str, notes: dict[str, dict]) -> None:
    """Write the policy to the folder `name` of the run, with `notes` as JSON files inside: a
    Hugging Face folder, or with LoRA its adapter in PEFT's format. A collective."""
    folder = os.path.join(cfg.out, name)
    if cfg.lora.r:
        distributed.export_adapter(policy, tokenizer, folder, notes)
    else:
        distributed.export_hf(policy, tokenizer, folder, getattr(torch, cfg.export_dtype), notes)


def export_run(run, name: str) -> None:
    """`export` with what prompt the policy was trained for; best/ also says which step it is, so
    that the folder and the record of it change in one moment."""
    notes = {"task.json": {"task": run.cfg.task, "template": run.cfg.episode.template}}
    if name == "best":
        notes["best.json"] = run.best
    export(run.policy, run.tokenizer, run.cfg, name, notes)


def checkpoint(run, row: dict) -> None:
    """Write a resumable checkpoint, before validation: whatever fails there loses no step."""
    extra = {"row": row, "config": config.to_dict(run.cfg), "settings": run.settings}
    keep = run.cfg.keep_checkpoints
    folder = distributed.save_checkpoint(
        run.cfg.out, row["step"], run.policy, run.optimizer, extra, keep
    )
    distributed.print0(f"checkpoint {folder}")


FREE = (  # keys that may change in a continuation
    "retriever steps epochs out validate_every save_every keep_checkpoints micro_batch_tokens "
    "gradient_checkpointing compile gather_once reduce_each cpu_offload engine stop_on_collapse "
    "export_dtype qrels"
).split()


def settings(cfg) -> dict:
    """What may not differ between a run and its continuation, because it decides the result; files
    by content."""
    return (
        {"engine.kind": cfg.engine.kind}
        | {key: value for key, value in config.to_dict(cfg).items() if key not in FREE}
        | {
            key: runs.path_with_digest(getattr(cfg, key))
            for key in ("model", "train", "dev", "instruction")
        }
        | {f"qrels {path}": runs.path_with_digest(path) for path in cfg.qrels}
        | retriever_settings(cfg.retriever)
    )


def resume(run) -> dict:
    """Continue from the newest checkpoint in `out`, if there is one; returns the row of the last
    step that is done."""
    cfg = run.cfg
    distributed.on_rank_0(distributed.clear_temporaries, cfg.out)
    dtype = getattr(torch, cfg.export_dtype)
    needed = distributed.run_bytes(run.policy, cfg.keep_checkpoints, 1 + bool(run.dev), dtype)
    distributed.on_rank_0(distributed.check_free_space, cfg.out, needed)
    found = distributed.latest_checkpoint(cfg.out)
    metrics, best = (os.path.join(cfg.out, name) for name in ("metrics.jsonl", "best"))
    row: dict = {"step": 0}
    if found is None:
        if os.path.isdir(os.path.join(cfg.out, "final")):
            raise config.ConfigError(
                f"{cfg.out} holds a finished run without a checkpoint to go on from; use another "
                "out folder, or move it away to start anew"
            )
        distributed.print0(f"{cfg.out} holds no checkpoint: the run begins at step 0")
        if run.dist.rank == 0:  # an earlier run's best would pass for this one's
            shutil.rmtree(best, ignore_errors=True)
    else:
        row = load_state(run, *found)
    history = []
    if run.dist.rank == 0:
        config.save_config(cfg, os.path.join(cfg.out, "config.yaml"))
        history = runs.begin_metrics(metrics, row["step"] - 1 if found else None)
        runs.keep_steps(os.path.join(cfg.out, "rollouts"), row["step"])
    history, best = distributed.broadcast_object((history, runs.read_json(f"{best}/best.json")))
    steps = [r for r in history if r["step"]] + [row] * bool(row["step"])
    run.history = [{key: math.nan if v is None else v for key, v in r.items()} for r in steps]
    if len(run.history) < row["step"]:
        distributed.print0(
            f"warning: {metrics} lacks {row['step'] - len(run.history)} of {row['step']} steps: "
            "the summary and the guard against collapse know only what is there"
        )
    start = next((r for r in history if r["step"] == 0 and BEST[cfg.task] in r), None)
    run.best = best or (start and {"value": start[BEST[cfg.task]], "step": 0}) or run.best
    return row


def load_state(run, folder: str, state: dict) -> dict:
    """Fill the run from a checkpoint; returns the log row of its step."""
    if not {"settings", "row"} <= state.keys():
        raise config.ConfigError(
            f"{folder} is no checkpoint of this version of grpo.py; use another out folder, or "
            "finish the run with the version that began it"
        )
    if change := runs.changed_setting(state["settings"], run.settings):
        raise config.ConfigError(
            f"{folder} was made with other settings: {change}; use another out folder, or the same "
            "settings to continue"
        )
    if state["step"] > run.steps:
        raise config.ConfigError(
            f"steps={run.steps}, but {folder} has {state['step']} steps done; set steps to that "
            "number or more, or use another out folder"
        )
    distributed.load_checkpoint(folder, run.policy, run.optimizer)
    distributed.print0(f"resumed from {folder}: {state['step']} steps done")
    return state["row"]


def gather_rows(run, rollouts: list, scores: list, advantages: list, items: list) -> list[dict]:
    """The step's rollouts of all ranks as they are written to rollouts/step_*.jsonl."""
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
    return [row for part in distributed.gather_objects(rows) for row in part]


def dev_figures(run, rollouts: list, items: list) -> dict[str, float]:
    """`dev_…` metrics over the items of all ranks, of greedy rollouts (rewrites or episodes) of
    this rank's items."""
    own = rewrite_figures if run.task is None else answer_figures
    figures, rows = own(run, rollouts, items)
    figures["format_rate"] = sum(row["well_formed"] for row in rows) / len(rows)
    return {f"dev_{key}": value for key, value in figures.items()}


def rewrite_figures(run, rollouts: list, turns: list[data.Turn]) -> tuple[dict, list[dict]]:
    """Retrieval metrics over all dev turns; a malformed response searches the raw question."""
    texts = [prompts.decode_response(run.tokenizer, r.response_ids) for r in rollouts]
    parsed = [parse_response(text, run.cfg.parser) for text in texts]
    queries = [
        data.one_line(p.rewrite if p.well_formed else t.question) for t, p in zip(turns, parsed)
    ]
    found = run.retriever.search(queries, 100)
    own = [
        {"id": t.query_id, "well_formed": p.well_formed, "hits": hits}
        for t, p, hits in zip(turns, parsed, found)
    ]
    rows = [row for part in distributed.gather_objects(own) for row in part]
    qrels = {t.query_id: dict.fromkeys(t.gold_ids, 1) for t in run.dev}
    metrics = evaluate_run({row["id"]: row["hits"] for row in rows}, qrels)
    return {key: value for key, value in metrics.items() if key not in ("queries", "missing")}, rows


def answer_figures(run, episodes: list, questions: list[data.Question]) -> tuple[dict, list[dict]]:
    """Answers to all dev questions; an episode that failed technically scores 0 and is counted."""
    own = []
    for e, q in zip(episodes, questions):
        golds = run.golds.get(q.id, ())
        reward = episode_reward(e, q, run.task, golds)
        own.append(episode_figures(e, q, run.task, golds) | {"failed": reward is None})
    rows = [row for part in distributed.gather_objects(own) for row in part]
    return answer_means(rows) | {"failed": sum(row["failed"] for row in rows)}, rows


def log_rollouts(run, row: dict, rollouts: list[dict]) -> None:
    """Rank 0: the step's rollouts file, its line, and two samples now and then."""
    if run.dist.rank:
        return
    runs.write_jsonl(
        os.path.join(run.cfg.out, "rollouts", f"step_{row['step']:06d}.jsonl"), rollouts
    )
    phases = ("sample", "reward", "reference", "update", "sync")
    recent = [sum(r[f"seconds_{phase}"] for phase in phases) for r in run.history[-20:]]
    print(step_line(row, run.steps, sum(recent) / len(recent)), flush=True)
    if row["step"] == 1 or row["step"] % run.cfg.validate_every == 0:
        if row["step"] == 1:
            print(f"  first prompt: {run.tokenizer.decode(run.prompts[0])!r}")
        for shown in (rollouts[0], rollouts[-1]):
            how = f"rank {shown['rank']}" if "rank" in shown else shown["end"]
            print(
                f"  sample {shown['query_id']}: {how}, reward {shown['reward']}: "
                f"{shown['response']!r}",
                flush=True,
            )


def log_step(run, row: dict) -> None:
    """Rank 0: the step's row of metrics.jsonl."""
    if run.dist.rank == 0:
        runs.append_metrics(os.path.join(run.cfg.out, "metrics.jsonl"), row)


def guard(run) -> None:
    """Stop a run that has failed (three steps in a row skipped for non-finite gradients, or a
    collapsed policy); warn of one that cannot learn."""
    recent = run.history[-3:]
    if len(recent) == 3 and all(row["skipped"] for row in recent):
        raise Stopped(
            "the gradient was not finite in three steps in a row; start anew in another out "
            "folder, with a lower lr or a higher kl_coef"
        )
    if len(run.history) == 3 and all(row["flat_groups"] == 1.0 for row in recent):
        distributed.print0(
            "warning: in the first three steps every group was flat (format rate "
            f"{recent[-1]['format_rate']:.2f}): nothing is learned from rewards that are all "
            "equal, and validation of malformed responses searches the raw questions; warm the "
            "policy up first, or raise group_size or temperature"
        )
    reason = collapse_reason(run.history) if run.cfg.stop_on_collapse else None
    if reason:
        best = (
            f"; best/ holds the policy of step {run.best['step']}" if run.best["step"] > 0 else ""
        )
        raise Stopped(
            f"the policy has collapsed: {reason}{best}; try a higher kl_coef or a lower lr in "
            "another out folder, or stop_on_collapse=false to go on in this one"
        )


def check_engine_follows(engine_gap: float, start_gap: float, limit: float) -> None:
    """Raise Stopped where the engine samples from the starting policy although the trained one has
    moved away from it.

    engine_gap, start_gap: mean |log-probability of the trained, of the starting policy - of the
    engine|, in nats. An adapter moves slowly: an engine that never gets it stays far below `limit`,
    and rewards look plausible for hours.
    """
    if engine_gap > limit / 6 and engine_gap > 2 * start_gap:
        raise Stopped(
            f"the engine's log-probabilities are {engine_gap:.4g} nats from the trained policy's "
            f"and {start_gap:.4g} from the starting policy's: the weights that are sent do not "
            "reach it; mend the weight sync"
        )
