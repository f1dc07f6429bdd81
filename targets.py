"""SFT targets: the self-driven warm-up that samples them, and their encoding as training rows.

Warm-up (arXiv 2505.15776 §3.3): the model answers the training turns with the few-shot prompt, and
responses whose rewrite finds a gold passage at rank <= max_rank become records, at most
keep_per_turn per turn, best rank first. `cfg` is sft.SFTConfig.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import data
import distributed
import infer
import runs
from config import save_config
from data import DataError, Turn
from distributed import Dist, print0
from episodes import trajectories
from episodes.episode import ENDED
from prompts import (
    encode_chat,
    encode_example,
    eos_token_ids,
    read_instruction,
    response_text,
    rewrite_prompt,
)
from retriever import open_retriever, retriever_settings
from reward import parse_response


def begin_stage(cfg, dist: Dist, stage: str, settings: dict, *outputs: str) -> dict | None:
    """Prepare `out` and return the JSON in the last of `outputs`, or None if it or what it reports,
    the output before, must be made.

    Removes `outputs` on overwrite; DataError if other settings began them. A collective.
    """
    if dist.rank == 0:
        patterns = [os.path.join(glob.escape(cfg.out), name) for name in outputs]
        meta = os.path.join(cfg.out, f"{stage}.settings.json")
        runs.begin_output(meta, settings, patterns, cfg)
        name = "config.yaml" if stage == "train" else "sample.config.yaml"
        save_config(cfg, os.path.join(cfg.out, name))
    distributed.broadcast_object(None)
    path = os.path.join(cfg.out, outputs[-1])
    made = os.path.exists(os.path.join(cfg.out, outputs[-2]))
    if result := runs.read_json(path) if made else None:
        print0(f"{path} is there: nothing to do; overwrite=true repeats this stage")
    return result


# ---- warm-up

SAMPLE_KEYS = (  # they decide the records
    "seed max_turns samples_per_turn temperature max_response_tokens max_prompt_tokens max_rank "
    "keep_per_turn"
).split()
INFER_KEYS = (  # passed on to infer
    "model turns examples instruction temperature max_response_tokens max_prompt_tokens seed chunk "
    "engine"
).split()


def sample_records(cfg, dist: Dist) -> dict:
    """Write `records.jsonl` and `sample_stats.json` if missing; return the statistics."""
    records_path = os.path.join(cfg.out, "records.jsonl")
    settings = runs.settings(cfg, SAMPLE_KEYS, ("model", "turns", "examples", "instruction"))
    settings |= retriever_settings(cfg.retriever)
    outputs = (
        "samples.jsonl",
        "samples.jsonl.rank[0-9][0-9][0-9]",
        "records.jsonl",
        "sample_stats.json",
    )
    stats = begin_stage(cfg, dist, "sample", settings, *outputs)
    if stats is None:
        records, stats = make_records(cfg, dist)
        print0("sample: " + " | ".join(f"{key} {value}" for key, value in stats.items()))
        if dist.rank == 0:
            runs.write_jsonl(records_path, records)
            runs.write_json(os.path.join(cfg.out, "sample_stats.json"), stats)
        distributed.broadcast_object(None)
    if not stats["kept"]:
        raise DataError(
            f"{records_path}: none of {stats['samples']} samples is kept, {stats['well_formed']} "
            "are well formed; raise samples_per_turn or max_rank, or change the examples"
        )
    return stats


def make_records(cfg, dist: Dist) -> tuple[list[dict], dict]:
    """Sample responses and search their rewrites; return (records, statistics)."""
    retriever = open_retriever(cfg.retriever)
    turns = data.read_turns(cfg.turns)
    turns, without_gold = data.with_gold(turns, retriever.passage_ids, cfg.turns)
    if cfg.max_turns is not None and cfg.max_turns < len(turns):
        drawn = random.Random(cfg.seed).sample(range(len(turns)), cfg.max_turns)
        turns = [turns[i] for i in sorted(drawn)]
    sampling = infer.InferConfig(
        out=os.path.join(cfg.out, "samples.jsonl"),
        prompt="few-shot",
        samples=cfg.samples_per_turn,
        **{key: getattr(cfg, key) for key in INFER_KEYS},
    )
    rows, summary = infer.respond(sampling, turns, dist)
    searches = rank_rewrites(retriever, turns, rows, dist)
    ranked = [row for row in rows if "rank" in row]
    found = [row for row in ranked if row["rank"] is not None]
    good = [row for row in found if row["rank"] <= cfg.max_rank]
    records = select_records(turns, good, cfg.keep_per_turn)
    return records, {
        "turns": len(turns),
        "turns_without_gold": without_gold,
        "samples": len(rows),
        "well_formed": summary["ok"],
        **{key: summary[key] for key in ("malformed", "too_long", "engine_error")},
        "searches": searches,
        "search_failed": summary["ok"] - len(ranked),
        "found_in_100": len(found),
        "within_max_rank": len(good),
        "turns_covered": len({row["query_id"] for row in good}),
        "kept": len(records),
        "mean_tokens": round(sum(row["tokens"] for row in rows) / len(rows), 1),
    }


def rank_rewrites(retriever, turns: list[Turn], rows: list[dict], dist: Dist) -> int:
    """Set `rank` in the well-formed rows whose search did not fail; return the number of searches:
    equal rewrites of a turn are searched once. A collective."""
    golds = {t.query_id: t.gold_ids for t in turns}
    good = [((row["query_id"], row["rewrite"]), row) for row in rows if row["status"] == "ok"]
    searches = list(dict.fromkeys(search for search, _ in good))
    mine = searches[dist.rank :: dist.world]
    own = retriever.gold_ranks([text for _, text in mine], [golds[q] for q, _ in mine], cutoff=100)
    parts = distributed.gather_objects(dict(zip(mine, own)))
    ranks = {search: rank for part in parts for search, rank in part.items()}
    for search, row in good:
        if ranks[search] is None or not math.isnan(ranks[search]):
            row["rank"] = ranks[search]
    return len(searches)


def select_records(turns: list[Turn], good: list[dict], keep_per_turn: int) -> list[dict]:
    """Make records of the rows in `good`, the best of each turn."""
    best: dict[str, dict[str, dict]] = {}  # query id → response → its best row
    for row in sorted(good, key=lambda row: (row["rank"], row["sample"])):
        best.setdefault(row["query_id"], {}).setdefault(row["response"].strip(), row)
    records = []
    for turn in turns:
        kept = list(best.get(turn.query_id, {}).items())[:keep_per_turn]
        for i, (response, row) in enumerate(kept):
            query_id = f"{turn.query_id}#{row['sample']}" if i else turn.query_id
            record = dataclasses.replace(turn, query_id=query_id, response=response).record()
            records.append(record | {"rank": row["rank"], "sample": row["sample"]})
    return records


# ---- rows


@dataclass(frozen=True)
class Example:
    """A training row."""

    tokens: list[int]  # T+1
    loss_mask: list[int]  # T
    conversation_id: str
    well_formed: bool = True  # can a turn's target be parsed?


def make_examples(
    records: list, tokenizer, cfg, path: str, agentic: bool = False
) -> tuple[list[Example], Counter]:
    """Encode turns, or trajectories if `agentic`; count dropped records by reason."""
    encode = partial(trajectory_example, tokenizer)
    if not agentic:
        instruction, eos_id = read_instruction(cfg.instruction), eos_token_ids(tokenizer)[0]
        encode = partial(turn_example, tokenizer, cfg.target, instruction, eos_id)
    examples, dropped = [], Counter()
    for record in records:
        try:
            made = encode(record)
        except DataError as e:
            raise DataError(f"{path}: {e}") from e
        if isinstance(made, str):
            dropped[made] += 1
        elif len(made.tokens) > cfg.max_length:
            dropped[f"longer than {cfg.max_length} tokens"] += 1
        else:
            examples.append(made)
    if not examples:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        wanted = "trajectories that end in an answer" if agentic else f"turns with a `{cfg.target}`"
        raise DataError(
            f"{path}: none of its {len(records)} records can be trained on ({why}); raise "
            f"max_length, or give {wanted}"
        )
    if malformed := sum(not e.well_formed for e in examples):
        print0(
            f"note: {malformed} of the {len(examples)} targets of {path} are not one think block "
            "and one rewrite block: inference and rewards will call such responses malformed"
        )
    return examples, dropped


def turn_example(tokenizer, kind: str, instruction: str, eos_id: int, turn: Turn) -> Example | str:
    """Encode a turn as zero-shot prompt, target and EOS, or say why it is dropped."""
    target = getattr(turn, kind) or ""
    if not target.strip():
        return f"without {kind}"
    if kind == "rewrite":
        target = human_response(turn.question, target)
    prompt_ids = encode_chat(tokenizer, rewrite_prompt(turn, instruction))
    tokens, mask = encode_example(tokenizer, prompt_ids, target, eos_id)
    return Example(tokens, mask, turn.conversation_id, parse_response(target).well_formed)


def human_response(question: str, rewrite: str) -> str:
    """Make a target of a human rewrite; the think block lists the words it adds."""
    known = set(question.lower().split())
    added = [word for word in rewrite.split() if word.lower() not in known]
    return response_text("missing: " + (" ".join(added) or "nothing"), rewrite)


def trajectory_example(tokenizer, row: dict) -> Example | str:
    """Encode a trajectory to train its assistant turns, or say why it is dropped."""
    if row.get("error"):
        return "failed for a technical reason"
    if row.get("end", "answered") not in ENDED:
        return f"ended as {row['end']}"
    last = row["messages"][-1]
    if last["role"] != "assistant" or trajectories.is_blank(last):
        return "without a last answer"
    example = Example(*trajectories.encode(tokenizer, row), trajectories.question_key(row))
    return example if any(example.loss_mask) else "without a turn to train"


def split_heldout(
    examples: list[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split by conversation into (train, held out); a single one is never held out."""
    conversations = sorted({e.conversation_id for e in examples})
    random.Random(seed).shuffle(conversations)
    count = min(max(1, round(fraction * len(conversations))), len(conversations) - 1)
    held = set(conversations[:count] if fraction > 0 else [])
    train = [e for e in examples if e.conversation_id not in held]
    return train, [e for e in examples if e.conversation_id in held]
