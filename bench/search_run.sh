#!/usr/bin/env bash
# Task `search` or `agent` from the base model to GRPO on one card: SFT on the model's own successful episodes, then GRPO, and a table
# of every stage.  All stages resume: called again, it goes on where it was stopped.
#   bench/search_run.sh search|agent OUT [key=value for grpo.py …]      PY=python3 chooses the interpreter
# Needs models/qwen0.5b (python prepare.py model name=qwen0.5b out=models/qwen0.5b) and data/multihop (hotpotqa_train, hotpotqa_eval,
# musique_eval).  Trains on hotpotqa_train/train.jsonl alone; its last DEV questions are set aside for validation.
# Leaves in OUT: table.md, metrics_SET.json, metrics.jsonl (GRPO), sft_metrics.jsonl, seconds.txt, environment.json, and of the sampled
# episodes and those after GRPO what report.py makes: report_NAME.txt (its tables), trajectory_stats_NAME.json and .md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "usage: bench/search_run.sh search|agent OUT [key=value for grpo.py …]" >&2; exit 2; }
task=$1 out=$2; shift 2
case $task in search|agent) ;; *) echo "error: unknown task $task: search or agent" >&2; exit 2 ;; esac

# ------------------------------------------------- sizes: those of bench/results/search_run_*, six minutes of an H200; smaller for a rehearsal
MODEL=${MODEL:-models/qwen0.5b}     # a Hugging Face folder
DATA=${DATA:-data/multihop}
QUESTIONS=${QUESTIONS:-560}         # training questions that episodes are sampled for
SAMPLES=${SAMPLES:-6}               # episodes of each
SUCCESS=${SUCCESS:-em}              # which are successful: em (exact answer) or f1 (F1 >= 0.8); right form and a search are always asked
KEEP=${KEEP:-3}                     # successful ones kept of each
LEAST=${LEAST:-30}                  # with fewer records there is no SFT: the run ends and says what to change
CAP=${CAP:-300}                     # most that are kept of each number of searches
DEV=${DEV:-64}                      # training questions set aside for validation
LIMIT=${LIMIT:-200}                 # questions of each evaluation set, from its beginning
STEPS=${STEPS:-13}                  # of GRPO
TOKENS=${TOKENS:-1792}              # budget of an episode, what is shown to the model included
ENGINE=${ENGINE:-torch}             # torch or vllm, for sampling and GRPO
EVAL_ENGINE=${EVAL_ENGINE:-torch}   # for the evaluations, which run three at a time
BATCH=${BATCH:-256}                 # sequences decoded together
EPISODE=${EPISODE:-episode.top_k=3 episode.max_rounds=5 episode.max_calls=4 episode.result_tokens=400 episode.turn_tokens=160}

py=${PY:-.venv/bin/python} run=${RUN:-runs/$task} train=$DATA/hotpotqa_train
mkdir -p "$out" "$run"
few="prompt=few-shot examples=demo/${task}_examples.jsonl episode.stop_at_answer=true max_prompt_tokens=1536"
[ "$task" = agent ] && few="$few episode.bare_calls=true"  # the base model was never taught the tags of a call
SETS="hotpotqa_test hotpotqa_eval musique_eval"
began=$SECONDS

note() { printf '%s %s s\n' "$1" $((SECONDS - began)) | tee -a "$out/seconds.txt"; began=$SECONDS; }
files() {  # corpus, questions and qrels of an evaluation set
  case $1 in hotpotqa_test) echo "$train/corpus.jsonl $train/test.jsonl $train/test.qrels" ;;
             *) echo "$DATA/$1/corpus.jsonl $DATA/$1/questions.jsonl $DATA/$1/questions.qrels" ;; esac
}
fail() { echo "error: $*" >&2; exit 2; }
answer() {  # $1: stage, $2: model, then key=value: trajectories of all sets, three processes on the one card
  local stage=$1 model=$2 set corpus questions qrels pids=() began=$SECONDS; shift 2
  for set in $SETS; do
    read -r corpus questions qrels <<<"$(files "$set")"
    mkdir -p "$run/$set"
    head -n "$LIMIT" "$questions" > "$run/$set/questions.jsonl"
    $py infer.py task="$task" model="$model" questions="$run/$set/questions.jsonl" out="$run/$set/$stage.jsonl" \
      retriever.kind=bm25 retriever.corpus="$corpus" $EPISODE max_response_tokens="$TOKENS" chunk=512 \
      engine.kind="$EVAL_ENGINE" engine.batch="$BATCH" engine.gpu_memory=0.25 "$@" > "$run/$set/$stage.log" 2>&1 &
    pids+=($!)
  done
  trap 'kill "${pids[@]}" 2>/dev/null' TERM
  for pid in "${pids[@]}"; do wait "$pid" || { for set in $SETS; do tail -n 3 "$run/$set/$stage.log"; done >&2; exit 1; }; done
  note "evaluation $stage"
}
keep() {
  cp -f "$run/grpo/metrics.jsonl" "$out/metrics.jsonl" 2>/dev/null || true
  cp -f "$run/sft/metrics.jsonl" "$out/sft_metrics.jsonl" 2>/dev/null || true
  for name in sampled grpo; do
    for kind in json md; do cp -f "$run/report_$name/trajectory_stats.$kind" "$out/trajectory_stats_$name.$kind" 2>/dev/null || true; done
  done
  $py - "$out/environment.json" "$task $*" <<'EOF'
import json, os, platform, sys, torch, transformers
card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
names = ("MODEL", "QUESTIONS", "SAMPLES", "SUCCESS", "KEEP", "CAP", "DEV", "LIMIT", "STEPS", "TOKENS", "ENGINE", "EVAL_ENGINE", "BATCH", "EPISODE")
json.dump({"card": card, "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
           "command": "bench/search_run.sh " + sys.argv[2], "set": {n: os.environ[n] for n in names if n in os.environ}},
          open(sys.argv[1], "w"), indent=1)
EOF
}
trap 'kill $(jobs -p) 2>/dev/null || true; keep "$@"' EXIT

total=$(wc -l < "$train/train.jsonl")
head -n $((total - DEV)) "$train/train.jsonl" > "$run/train.jsonl"
tail -n "$DEV" "$train/train.jsonl" > "$run/dev.jsonl"
head -n "$QUESTIONS" "$run/train.jsonl" > "$run/sampled.jsonl"
search="retriever.kind=bm25 retriever.corpus=$train/corpus.jsonl"

# What the next stage does not wait for runs beside it: the evaluations of the base model while episodes are sampled, those after SFT
# while GRPO runs (its seconds include them).  vLLM measures the card's free memory as it starts, so beside it nothing may run.
answer base "$MODEL" $few & base=$!
[ "$ENGINE" = torch ] || wait "$base"
began=$SECONDS
$py infer.py task="$task" model="$MODEL" questions="$run/sampled.jsonl" out="$run/trajectory.jsonl" $few samples="$SAMPLES" temperature=0.5 top_p=0.95 \
  $search $EPISODE max_response_tokens="$TOKENS" chunk=512 engine.kind="$ENGINE" engine.batch="$BATCH" engine.gpu_memory=0.4
note sampling
$py report.py trajectories="$run/trajectory.jsonl" questions="$run/sampled.jsonl" out="$run/report_sampled" success="$SUCCESS" \
  title="$task, base model, few-shot" well_formed=true min_calls=1 per_question="$KEEP" balance_by=tool_calls cap="$CAP" \
  | tee "$out/report_sampled.txt"
records=$(wc -l < "$run/report_sampled/trajectory_success.jsonl")
[ "$records" -ge "$LEAST" ] || fail "$records successful episodes to train on, LEAST=$LEAST are wanted; set SUCCESS=f1 or KEEP=$SAMPLES, or" \
  "sample more (QUESTIONS, SAMPLES) into another folder (RUN), or lower LEAST"
wait "$base"
answer zero-shot "$MODEL" & zero=$!
began=$SECONDS
$py sft.py --config "configs/$task-sft.yaml" model="$MODEL" records="$run/report_sampled/trajectory_success.jsonl" out="$run/sft"
note sft
wait "$zero"
answer sft "$run/sft/final" & sft=$!
[ "$ENGINE" = torch ] || wait "$sft"
began=$SECONDS
$py grpo.py --config "configs/$task-grpo.yaml" model="$run/sft/final" train="$run/train.jsonl" dev="$run/dev.jsonl" \
  "qrels=[$train/train.qrels]" out="$run/grpo" $search $EPISODE max_response_tokens="$TOKENS" steps="$STEPS" \
  engine.kind="$ENGINE" engine.batch="$BATCH" "$@" || { ended=$?; [ "$ended" = 3 ] && [ -d "$run/grpo/best" ] || exit "$ended"
  echo "GRPO ended itself (see above); the best policy on the validation questions is evaluated"; }
note grpo
wait "$sft"
best=$run/grpo/best; [ -d "$best" ] || best=$run/grpo/final
answer grpo "$best"
$py report.py trajectories="$run/hotpotqa_test/grpo.jsonl" questions="$run/hotpotqa_test/questions.jsonl" out="$run/report_grpo" \
  title="$task, after GRPO" | tee "$out/report_grpo.txt"
echo "Task $task: base model with the few-shot prompt, without examples, after SFT on its own successes, after GRPO; greedy, BM25." > "$out/table.md"
for set in $SETS; do
  read -r corpus questions qrels <<<"$(files "$set")"
  $py evaluate.py answers="$run/$set/zero-shot.jsonl,$run/$set/sft.jsonl,$run/$set/grpo.jsonl" baseline="$run/$set/base.jsonl" \
    questions="$run/$set/questions.jsonl" qrels="$qrels" out="$run/$set/evaluation"
  cp -f "$run/$set/evaluation/metrics.json" "$out/metrics_$set.json"
  $py evaluate.py answers="$run/$set/grpo.jsonl" baseline="$run/$set/sft.jsonl" questions="$run/$set/questions.jsonl" qrels="$qrels" \
    out="$run/$set/evaluation_grpo"
  { printf '\n## %s\n\n' "$set"; cat "$run/$set/evaluation/table.md"
    printf '\n'; sed -n '/^| minus/,/^$/p' "$run/$set/evaluation_grpo/table.md"; } >> "$out/table.md"
done
cat "$out/table.md"
