#!/bin/bash
# One network namespace per rank, joined by a bridge; what each rank sends and receives is limited by a token bucket.
# Communication then takes wall time and hardly any processor time, as on a real network card. Needs root.
#
#   shapednet.sh up NUM_RANKS RATE [SLOW_RATE NEAR]
#                                      RATE as `tc` writes it (1gbit, 200mbit), or "none" for no limit. With SLOW_RATE, each
#                                      group of NEAR neighbours has the first network to itself, and a second one, as slow as
#                                      that, leads to all others
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

plug() { # rank device bridge rate
  local space=${prefix}_$1 port=$3port$1
  ip -n "$space" link add "$2" type veth peer name "$port" netns "$hub"
  ip -n "$space" link set "$2" up
  ip -n "$hub" link set "$port" master "$3" up
  limit "$space" "$2" "$4"
  limit "$hub" "$port" "$4"
}

up() {
  local num_ranks=$1 rate=$2 slow_rate=${3:-} near=${4:-$1} rank other
  ip netns add "$hub"
  for bridge in fast slow; do
    ip -n "$hub" link add "$bridge" type bridge
    ip -n "$hub" link set "$bridge" up
  done
  for ((rank = 0; rank < num_ranks; rank++)); do
    ip netns add "${prefix}_$rank"
    ip -n "${prefix}_$rank" link set lo up
    plug "$rank" eth0 fast "$rate"
    ip -n "${prefix}_$rank" addr add "10.77.0.$((rank + 1))/24" dev eth0
    [ -n "$slow_rate" ] || continue
    plug "$rank" eth1 slow "$slow_rate"
    for ((other = 0; other < num_ranks; other++)); do
      ((other / near == rank / near)) || # the address stays that of eth0
        ip -n "${prefix}_$rank" route add "10.77.0.$((other + 1))/32" dev eth1 src "10.77.0.$((rank + 1))"
    done
  done
}

stat() {
  local rank
  for ((rank = 0; rank < $1; rank++)); do
    echo "rank $rank: sender $(ip netns exec "${prefix}_$rank" tc -s qdisc show dev eth0 | grep -o 'dropped [0-9]*' | head -1)," \
      "receiver $(ip netns exec "$hub" tc -s qdisc show dev "fastport$rank" | grep -o 'dropped [0-9]*' | head -1)," \
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
  up) up "${@:2}" ;;
  exec) rank=$2; shift 2; exec ip netns exec "${prefix}_$rank" "$@" ;;
  stat) stat "$2" ;;
  down) down "$2" ;;
  *) sed -n '2,/^set /{/^#/p}' "$0"; exit 2 ;;
esac
