#!/bin/bash
# One network namespace per rank, joined by a bridge; what each rank sends and receives is limited by a token bucket.
# Communication then takes wall time and hardly any processor time, as on a real network card. Needs root.
#
#   shapednet.sh up NUM_RANKS RATE     RATE as `tc` writes it (1gbit, 200mbit), or "none" for no limit
#   shapednet.sh exec RANK COMMAND...  run a command as that rank
#   shapednet.sh stat NUM_RANKS        packets that were dropped, and segments that were sent again
#   shapednet.sh down NUM_RANKS        remove everything that `up` made
#
# Names begin with $NET_PREFIX (default hpbench), so that two networks do not meet.
set -euo pipefail

prefix=${NET_PREFIX:-hpbench}
hub=${prefix}_hub

limit() { # namespace device rate
  [ "$3" = none ] || ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$3" burst 128kb limit 8mb
}

up() {
  local num_ranks=$1 rate=$2 rank space
  ip netns add "$hub"
  ip -n "$hub" link add bridge0 type bridge
  ip -n "$hub" link set bridge0 up
  for ((rank = 0; rank < num_ranks; rank++)); do
    space=${prefix}_$rank
    ip netns add "$space"
    ip -n "$space" link set lo up
    ip -n "$space" link add eth0 type veth peer name "port$rank" netns "$hub"
    ip -n "$space" addr add "10.77.0.$((rank + 1))/24" dev eth0
    ip -n "$space" link set eth0 up
    ip -n "$hub" link set "port$rank" master bridge0 up
    limit "$space" eth0 "$rate"
    limit "$hub" "port$rank" "$rate"
  done
}

stat() {
  local rank
  for ((rank = 0; rank < $1; rank++)); do
    echo "rank $rank: sender $(ip netns exec "${prefix}_$rank" tc -s qdisc show dev eth0 | grep -o 'dropped [0-9]*' | head -1)," \
      "receiver $(ip netns exec "$hub" tc -s qdisc show dev "port$rank" | grep -o 'dropped [0-9]*' | head -1)," \
      "$(ip netns exec "${prefix}_$rank" awk '/^Tcp:/ && !n { n = split($0, name) ; next }
           /^Tcp:/ { for (i = 1; i <= n; i++) if (name[i] == "RetransSegs") print "retransmitted", $i }' /proc/net/snmp)"
  done
}

down() {
  local rank
  for ((rank = 0; rank < $1; rank++)); do ip netns del "${prefix}_$rank" 2>/dev/null || true; done
  ip netns del "$hub" 2>/dev/null || true
}

case ${1:-} in
  up) up "$2" "${3:-none}" ;;
  exec) rank=$2; shift 2; exec ip netns exec "${prefix}_$rank" "$@" ;;
  stat) stat "$2" ;;
  down) down "$2" ;;
  *) sed -n '2,/^set /{/^#/p}' "$0"; exit 2 ;;
esac
