#!/usr/bin/env bash
# One card: what docs/speed.md has of sampling, of small cards and of the step beside its peer; a JSON file a part in OUT.
#   bench/one_card.sh OUT [SECONDS]     a call ends within SECONDS (570) and goes on where the last one ended
# PY=python3 chooses the interpreter, PEER=trl_grpo.py the peer's script (left out without one), SHAPE=tiny rehearses it on a CPU.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,4p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
[ -z "${PEER:-}" ] || PEER=$(realpath "$PEER")
mkdir -p "$1" && cd "$1" || exit 2
budget=${2:-570} py=${PY:-python3} cards=1
vllm=$("$py" -c 'import importlib.util as u; print("vllm" if u.find_spec("vllm") else "")')
peer=${PEER:+--peer hf${vllm:+ vllm} --peer-script $PEER --peer-steps 2 --peer-limit 150}
whole=${PEER:+--peer hf --peer-script $PEER --peer-steps 2 --peer-limit 100 --peer-micro 4}  # on the same 24 GB, all weights
adapted=${PEER:+--peer hf --peer-script $PEER --peer-steps 2 --peer-limit 150 --peer-micro 4}  # or the same adapter
if [ "${SHAPE:-}" = tiny ]; then
  small=tiny middle=tiny large=tiny step="--prompt-len 24 --new 8 --steps 1 --prompts 4" card="" lengths="--prompts 4 --n 4 --prompt-len 24 --new 16 --mean 8"
  rounds="--prompts 4 --n 2 --prompt-len 24 --rounds 2 --new 8 --shown 8"
else
  small=0.5b middle=1.5b large=3b step="--steps 2" card="--card-gib 24" lengths="--prompts 16 --n 16 --prompt-len 600 --new 1024 --mean 300"
  rounds="--rounds 4 --new 150 --shown 600"
fi
. "$root/bench/parts.sh"

part lengths 200 1 sampling.py --shape $large --engines torch${vllm:+,vllm} $lengths --calls 1 --out lengths.part
part rounds 200 1 sampling.py --shape $large --engines torch${vllm:+,vllm} $rounds --calls 1 --out rounds.part
part full_small 200 1 step.py --shape $small $card $step --budget 4096 --recompute 0.5 $whole --out full_small.part
part lora_middle 150 1 step.py --shape $middle --lora 16 $card $step --budget 4096 --recompute 0.5 --out lora_middle.part
part lora_large 350 1 step.py --shape $large --lora 16 $card $step --budget 2600 --recompute 1 $adapted --out lora_large.part
part beside 540 1 step.py --shape $small --engine torch $vllm $step --budget 16384 --recompute 0 --gpu-memory 0.25 $peer --out beside.part
finished "on one card"
