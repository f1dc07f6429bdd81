# Sourced by scripts of measurements that go on when they are called again. A part that succeeded leaves NAME.json; one that
# failed leaves its log in NAME.failed, to be removed before it is tried again; one that no longer fits into `budget` seconds
# waits for the next call. Needs: root, budget, cards, py.
missing=""

part() {  # NAME SECONDS CARDS SCRIPT …: one measurement, written to NAME.part
  local name=$1 limit=$2 count=$3 status start=""; shift 3
  if [ -e "$name.json" ] || [ "$count" -gt "$cards" ]; then return; fi
  if [ -e "$name.failed" ]; then missing+=" $name (failed)"; return; fi
  if [ $((SECONDS + limit)) -gt "$budget" ]; then missing+=" $name"; return; fi
  echo "$name on $count of $cards cards, at $SECONDS s"
  [ "$count" -eq 1 ] || start="-m torch.distributed.run --standalone --nproc-per-node $count"
  timeout -k 15 "$limit" "$py" $start "$root/bench/$1" "${@:2}" > "$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ] && [ -e "$name.part" ]; then mv "$name.part" "$name.json"; rm "$name.log"
  else echo "  status $status: $name.failed"; mv "$name.log" "$name.failed"; missing+=" $name (failed)"; fi
}

finished() {  # WHAT: the last line, and status 3 where something is left to do
  if [ -z "$missing" ]; then echo "everything is measured $1"; else echo "not measured yet:$missing"; exit 3; fi
}
