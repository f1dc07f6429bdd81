#!/usr/bin/env bash
# The whole chain on one data set, for as long as it is given; every stage resumes, so a killed run goes on when called again.
#   bench/long_run.sh canard|demo-long OUT [key=value for grpo.py …]      PY=python3 chooses the interpreter
# Needs models/smollm2 (and models/minilm for demo-long), data/canard or data/demo.  Leaves in OUT what is worth keeping:
# metrics.jsonl, sft_sample_stats.json, sft_metrics.jsonl, table.md, metrics.json, environment.json.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 out=$2; shift 2
py=${PY:-.venv/bin/python} run=${RUN:-runs/$name}
mkdir -p "$out" "$run"
case $name in
  canard) data=data/canard tokens=96 search="retriever.kind=bm25 retriever.corpus=$data/corpus.jsonl retriever.analyzer=snowball" sft="--config configs/canard-sft.yaml" ;;
  demo-long)
    data=data/demo tokens=64 search="retriever.kind=dense retriever.index=$run/index retriever.encoder=models/minilm"
    sft="--config configs/demo-sft.yaml max_turns=null samples_per_turn=8 max_response_tokens=64 engine.batch=256 chunk=512 $search"
    $py retriever.py kind=dense corpus=$data/corpus.jsonl encoder=models/minilm index=$run/index ;;
  *) echo "error: unknown data set $name: canard or demo-long" >&2; exit 2 ;;
esac
keep() {
  cp -f "$run/grpo/metrics.jsonl" "$out/metrics.jsonl" 2>/dev/null || true
  cp -f "$run/sft/sample_stats.json" "$out/sft_sample_stats.json" 2>/dev/null || true
  cp -f "$run/sft/metrics.jsonl" "$out/sft_metrics.jsonl" 2>/dev/null || true
  $py - "$out/environment.json" "$name $*" <<'EOF'
import json, platform, sys, torch, transformers
card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
json.dump({"card": card, "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
           "command": "bench/long_run.sh " + sys.argv[2]}, open(sys.argv[1], "w"), indent=1)
EOF
}
trap 'keep "$@"' EXIT
$py sft.py $sft out=$run/sft
$py grpo.py --config configs/$name-grpo.yaml model=$run/sft/final out=$run/grpo $search "$@"
$py infer.py model=models/smollm2 turns=$data/test.jsonl prompt=few-shot examples=demo/examples.jsonl max_response_tokens=$tokens engine.batch=256 chunk=512 out=$run/base.jsonl
$py infer.py model=$run/sft/final turns=$data/test.jsonl max_response_tokens=$tokens engine.batch=256 chunk=512 out=$run/warmup.jsonl
best=$run/grpo/best; [ -d "$best" ] || best=$run/grpo/final
$py infer.py model=$best turns=$data/test.jsonl max_response_tokens=$tokens engine.batch=256 chunk=512 out=$run/grpo.jsonl
$py evaluate.py turns=$data/test.jsonl qrels=$data/test.qrels query=question,first+question,previous+question,rewrite rewrites=$run/base.jsonl,$run/warmup.jsonl,$run/grpo.jsonl $search out=$run/evaluation
cp -f $run/evaluation/table.md $run/evaluation/metrics.json "$out/"
