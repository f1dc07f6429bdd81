#!/usr/bin/env bash
# Baselines without any training: rules (raw, first, first + raw, previous + raw question, whole context) and the given rewrite
# x (BM25, MiniLM, both fused) on the test splits.
#   bench/baselines.sh DATA ENCODER WORK [OUT]        PY=python3 chooses the interpreter, SETS="canard mtrag" the data sets
# DATA holds canard/ and mtrag/ (corpus.jsonl, test.jsonl, test.qrels), ENCODER all-MiniLM-L6-v2 (prepare.py model name=minilm).
# WORK takes the indexes (kept, and continued after a kill: mtrag's 13,101 passages take half an hour on a busy core) and the
# runs; OUT (bench/results) gets baselines_SET.json: metrics, intervals, tests and groups of every system, and the machine.
set -euo pipefail
data=$(realpath "$1") encoder=$(realpath "$2") work=$(realpath -m "$3") out=$(realpath -m "${4:-$(dirname "$0")/results}")
cd "$(dirname "$0")/.."
py=${PY:-.venv/bin/python} sets=${SETS:-canard mtrag}
for set in $sets; do
  "$py" retriever.py kind=hybrid corpus="$data/$set/corpus.jsonl" encoder="$encoder" index="$work/$set" shard_size=2048
done
"$py" evaluate.py sets="${sets// /,}" turns="$data/@set/test.jsonl" qrels="$data/@set/test.qrels" \
  corpus="$data/@set/corpus.jsonl" query=question,first,first+question,previous+question,context,rewrite out="$work/baselines" \
  "retrievers={BM25: {kind: bm25, index: '$work/@set'}, MiniLM: {kind: dense, index: '$work/@set', encoder: '$encoder'},
               hybrid: {kind: hybrid, index: '$work/@set', encoder: '$encoder'}}"
for set in $sets; do
  "$py" - "$work/baselines/metrics.json" "$set" "$out/baselines_$set.json" <<'EOF'
import json, os, platform, subprocess, sys, time
import torch, transformers
source, name, target = sys.argv[1:]
with open(source, encoding="utf-8") as f:
    cells = {key.partition("/")[2]: systems for key, systems in json.load(f)["cells"].items() if key.startswith(f"{name}/")}
machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
           "torch": torch.__version__, "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"),
           "commit": subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip(),
           "command": "bench/baselines.sh DATA ENCODER WORK"}
os.makedirs(os.path.dirname(target), exist_ok=True)
with open(target, "w", encoding="utf-8") as f:
    json.dump({"set": name, **machine, "cells": cells}, f, ensure_ascii=False, indent=None, separators=(",", ":"))
print(target)
EOF
done
