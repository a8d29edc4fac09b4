#!/bin/bash
# Runs a benchmark, one process per rank, on a shaped network or on loopback, and takes the network down again.
#
#   launch.sh NUM_RANKS RATE SCRIPT [ARGUMENTS...]     RATE: 1gbit, 200mbit, ...; "none" shapes nothing; "loopback" needs no root;
#                                                      RATE,SLOW_RATE,NEAR: slower between groups of NEAR ranks (shapednet.sh)
#
# A rank finds RANK, WORLD_SIZE and BENCH_STORE (a file for the rendezvous) in its environment. PYTHON chooses the interpreter.
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2,/^set /{/^#/p}' "$0"; exit 2; }
num_ranks=$1 rate=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
export NET_PREFIX=hpbench$$ WORLD_SIZE=$num_ranks BENCH_RATE=$rate
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR PYTHONDONTWRITEBYTECODE=1
BENCH_STORE=$(mktemp -u "${TMPDIR:-/tmp}/hpbench.XXXXXX")
export BENCH_STORE

pids=()
finish() {
  trap '' INT TERM # `timeout` sends its signal twice
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  rm -f "$BENCH_STORE"
  [ "$rate" = loopback ] || "$here/shapednet.sh" down "$num_ranks"
}
trap finish EXIT
trap 'exit 130' INT TERM

if [ "$rate" = loopback ]; then
  export GLOO_SOCKET_IFNAME=lo
  enter() { shift; exec "$@"; }
else
  export GLOO_SOCKET_IFNAME=eth0
  IFS=, read -ra rates <<<"$rate"
  "$here/shapednet.sh" up "$num_ranks" "${rates[@]}"
  enter() { exec "$here/shapednet.sh" exec "$@"; }
fi
for ((rank = 0; rank < num_ranks; rank++)); do
  (export RANK=$rank; enter "$rank" "$python" "$@") &
  pids+=($!)
done
# The first rank that fails ends the others.
for ((rank = 0; rank < num_ranks; rank++)); do wait -n || exit 1; done
