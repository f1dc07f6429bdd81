"""The tables of docs/scaling.md, from the JSON of bench/scaling.sh, and what has not been run.

    python bench/scaling_tables.py [FOLDER]        bench/results/scaling, where none is given

A kind of measurement that the folder lacks is taken from earlier runs of one and two cards (EARLIER).  Efficiency: of a
batch that stays (strong) seconds on one card over cards × seconds; of a batch that grows with the cards (weak, 16 prompts
a card) seconds on one card over seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COUNTS = (1, 2, 4, 8)
EARLIER = {
    "update": ["update_3b_one", "update_3b_two"],
    "step": ["step_3b_vllm_h200", "step_3b_two"],
    "sync": ["sync_3b_vllm", "sync_3b_two"],
    "large": ["memory_7b_two"],
}
PARTS = {  # what bench/scaling.sh runs: NAME_CARDS.json
    "update": COUNTS,
    "step_vllm": COUNTS,
    "step_torch": COUNTS,
    "paper": (1, 8),
    "sync": COUNTS,
    "across": COUNTS,
    "large_lean": (4, 8),
    "large_gathered": (4, 8),
    "encode": (1, 8),
}
NVLINK = 450e9  # bytes a second into a card and as many out of it, data sheet of the H100 and H200
FLOPS = 989e12  # dense bf16, the same
PHASES = ("sample", "reward", "reference", "update", "sync")


def load(folder: Path) -> dict[str, dict[str, dict]]:
    """Kind → name → what was measured."""
    found: dict[str, dict[str, dict]] = {kind: {} for kind in SHOW}
    for path in sorted(folder.glob("*.json")):
        if (kind := path.stem.split("_")[0]) in found:
            found[kind][path.stem] = json.loads(path.read_text())
    for kind, names in EARLIER.items():
        if not found[kind] or kind == "large":
            found[kind] = {
                name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names
            }
    return found


def table(head: list[str], rows: list[list]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [["" if c is None else str(c) for c in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def efficiency(base: float | None, seconds: float, cards: int, weak: bool = False) -> str | None:
    return f"{base / seconds / (1 if weak else cards):.2f}" if base and cards > 1 else None


def updates(files: dict[str, dict]) -> str:
    rows = [
        (f["processes"], name, f, s)
        for name, f in files.items()
        for s in f["settings"]
        if "seconds" in s
    ]
    rows.sort(key=lambda row: row[0])
    one = next((s for n, _, _, s in rows if n == 1), None)
    lines = []
    for n, name, f, s in rows:
        same = one and n > 1
        lines.append(
            [
                n,
                f"{s['seconds']:.2f} s",
                f"{100 * s['mfu']:.1f} %",
                efficiency(one and one["seconds"], s["seconds"], n),
                s.get("peak_gib"),
                f"{abs(s['loss'] - one['loss']):.0e}, {abs(s['grad_norm'] / one['grad_norm'] - 1):.0e}"
                if same
                else None,
                f"`{name}`",
            ]
        )
    f = rows[0][2]
    head = f"Update alone, {f['shape']}, {f['groups']} groups of {f['responses']}, {f['prompt_tokens']} + {f['response_tokens']} tokens:"
    names = [
        "cards",
        "update",
        "MFU",
        "efficiency",
        "GiB a card",
        "loss (absolute) and gradient norm (relative) differ from one card's by",
        "file",
    ]
    return f"{head}\n\n{table(names, lines)}"


def steps(files: dict[str, dict]) -> str:
    """Phases of steps: weak (16 prompts a card), and every batch that two numbers of cards had."""
    found = []
    for name, f in files.items():
        for key, s in f["ours"].items():
            entry = dict(
                engine=key.split(",")[0],
                prompts=s.get("prompts", f["prompts"]),
                cards=f["processes"],
            )
            found.append(entry | {"file": name, "s": s, "sizes": f})
    sizes = found[0]["sizes"]
    groups: dict[tuple, list[dict]] = {}
    for e in found:
        if e["prompts"] == 16 * e["cards"]:
            groups.setdefault((e["engine"], "weak, 16 a card"), []).append(e)
        groups.setdefault((e["engine"], f"strong, {e['prompts']}"), []).append(e)
    lines = []
    for (engine, kind), members in sorted(
        groups.items(), key=lambda g: (g[0][0] != "vllm", "weak" not in g[0][1])
    ):
        members.sort(key=lambda e: e["cards"])
        if len({e["cards"] for e in members}) < 2:
            continue
        one = next((e["s"]["step_seconds"] for e in members if e["cards"] == 1), None)
        for e in members:
            s = e["s"]
            lines.append(
                [
                    engine,
                    kind,
                    e["cards"],
                    f"{s['step_seconds']:.2f} s",
                    *(f"{s['phases'][p]:.2f}" for p in PHASES),
                    efficiency(one, s["step_seconds"], e["cards"], "weak" in kind),
                    s.get("peak_gib"),
                    f"`{e['file']}`",
                ]
            )
    head = f"Step, {sizes['shape']}, {sizes['responses']} responses a prompt, {sizes['prompt_len']} + {sizes['new']} tokens, KL on:"
    names = ["engine", "prompts", "cards", "step", *PHASES, "efficiency", "GiB a card", "file"]
    return f"{head}\n\n{table(names, lines)}"


def papers(files: dict[str, dict]) -> str:
    lines = []
    for name, f in sorted(files.items(), key=lambda x: x[1]["processes"]):
        ((engine, s),) = f["ours"].items()
        lines.append(
            [
                f["processes"],
                engine,
                f"{s['step_seconds']:.2f} s",
                *(f"{s['phases'][p]:.2f}" for p in PHASES),
                s.get("peak_gib"),
                f"`{name}`",
            ]
        )
    f = next(iter(files.values()))
    head = f"The paper's step: {f['prompts']} × {f['responses']}, {f['prompt_len']} + {f['new']} tokens, an index of {f['index']:,} passages asked in `reward`:"
    return f"{head}\n\n{table(['cards', 'engine', 'step', *PHASES, 'GiB a card', 'file'], lines)}"


def across(files: dict[str, dict]) -> str:
    rows = sorted(files.items(), key=lambda x: x[1]["processes"])
    one = next((f for _, f in rows if f["processes"] == 1), None)
    lines = [
        [
            f["processes"],
            f"{f['ms']} ms",
            efficiency(one and one["ms"], f["ms"], f["processes"]),
            (f["digest_of_ranks"] == one["digest_of_ranks"] and "equal") or "differ"
            if one and f is not one
            else None,
            f"`{name}`",
        ]
        for name, f in rows
    ]
    f = rows[0][1]
    head = f"Gold ranks of {f['queries']:,} queries among {f['passages']:,} × {f['dim']} fp16, shared out, the whole call:"
    return f"{head}\n\n{table(['cards', 'call', 'efficiency', 'ranks, beside one card', 'file'], lines)}"


def syncs(files: dict[str, dict]) -> str:
    lines = [
        [
            f["processes"],
            *(f"{f['seconds'][k]:.3f} s" for k in ("wake", "weights", "cache", "total")),
            f.get("peak_gib"),
            f"`{name}`",
        ]
        for name, f in sorted(files.items(), key=lambda x: x[1]["processes"])
    ]
    f = next(iter(files.values()))
    return f"Weight sync alone, {f['shape']}, {f['engine']}:\n\n" + table(
        ["cards", "wake", "weights", "cache", "total", "GiB a card", "file"], lines
    )


def large(files: dict[str, dict]) -> str:
    lines = [
        [
            f["processes"],
            f"{f['prompts']} × {f['responses']}",
            s["setting"],
            f"{s['step_seconds']:.1f} s",
            f"{s['resident_gb']:.1f}, {arithmetic['resident between steps']}",
            *(f"{s['peak_gb'][p]:.1f}" for p in ("sample", "reference", "update")),
            arithmetic["update, without activations"],
            f"`{name}`",
        ]
        for name, f in sorted(files.items(), key=lambda x: x[1]["processes"])
        for s in f["settings"]
        for arithmetic in [s["arithmetic_gb"]]
    ]
    f = next(iter(files.values()))
    head = f"Full fine-tuning with a reference, {f['shape']}, PyTorch engine (settings: [memory.md](memory.md)):"
    names = [
        "cards",
        "prompts",
        "setting",
        "step",
        "GB a card: between steps, arithmetic",
        "sampling",
        "reference",
        "update",
        "arithmetic, without activations",
        "file",
    ]
    return f"{head}\n\n{table(names, lines)}"


def encodes(files: dict[str, dict]) -> str:
    rows = sorted(files.items(), key=lambda x: x[1].get("processes", 1))
    one = next((f for _, f in rows if f.get("processes", 1) == 1), None)
    lines = [
        [
            n := f.get("processes", 1),
            f"{f['seconds']} s",
            f"{f.get('steady_passages_s', f['passages_s']):,}",
            f"{f['steady_passages_s'] / one['steady_passages_s'] / n:.2f}"
            if one and n > 1 and "steady_passages_s" in f
            else None,
            f"`{name}`",
        ]
        for name, f in rows
    ]
    f = rows[0][1]
    head = f"Encoding {f['passages']:,} passages of {f['mean_tokens']} tokens, text to shards:"
    return f"{head}\n\n{table(['cards', 'in all, with start', 'passages/s once started', 'efficiency', 'file'], lines)}"


SHOW = {
    "update": updates,
    "step": steps,
    "paper": papers,
    "sync": syncs,
    "across": across,
    "large": large,
    "encode": encodes,
}


def bounds() -> str:
    """What the strong update of bench/scaling.sh computes and moves on so many cards: arithmetic, nothing measured but one MFU."""
    f = json.loads((RESULTS / "update_3b_one.json").read_text())
    p, groups, mfu = f["parameters"], 64, f["settings"][0]["mfu"]
    tokens = groups * (f["prompt_tokens"] + f["responses"] * (f["response_tokens"] - 1))
    lines = []
    for n in COUNTS:
        computing = 6 * p * tokens / n / FLOPS / mfu
        weights, gradients = (size * p * (n - 1) / n / NVLINK for size in (2, 4))
        lines.append(
            [
                n,
                f"{computing:.2f} s",
                f"{1e3 * weights:.0f} ms",
                f"{1e3 * gradients:.0f} ms",
                f"{computing / (computing + weights + gradients):.3f}",
                f"{1e3 * weights:.0f} ms",
            ]
        )
    head = (
        f"Arithmetic, 3b, an update of {groups} groups of {f['responses']}, {f['prompt_tokens']} + {f['response_tokens']} tokens, "
        f"computing at one card's {100 * mfu:.1f} % of {FLOPS / 1e12:.0f} TFLOP/s, {NVLINK / 1e9:.0f} GB/s into a card:"
    )
    names = [
        "cards",
        "computing",
        "weights in, bf16",
        "gradients, float32",
        "efficiency without any overlap",
        "weight sync, bf16",
    ]
    return f"{head}\n\n{table(names, lines)}"


def page(folder: Path) -> str:
    """All tables, and the parts that have no file in the folder."""
    found = load(folder)
    shown = [SHOW[kind](found[kind]) for kind in SHOW if found[kind]]
    shown.append(bounds())
    done = {name for files in found.values() for name in files}
    missing = []
    for part, counts in PARTS.items():
        if left := [str(n) for n in counts if f"{part}_{n}" not in done]:
            missing.append(f"`{part}` on {', '.join(left)}")
    if missing:
        shown.append(
            "Of `bench/scaling.sh` not run, by number of cards: " + "; ".join(missing) + "."
        )
    return "\n\n".join(shown)


if __name__ == "__main__":
    print(page(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "scaling"))
