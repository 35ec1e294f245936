#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Stage 3 over a slow network: two hosts as network namespaces, joined by a link of 1 Gbit/s.
#
#     sudo benchmarks/network.sh [--rate 1gbit] [flags of network.py]
#
# Needs root and iproute2 (apt-get install iproute2); PYTHON names the interpreter. The namespaces, and what still runs
# in them, go when the script ends, however it ends.
set -euo pipefail

rate=1gbit
if [ "${1:-}" = --rate ]; then rate=$2; shift 2; fi
id="dsmuon$$"
one="$id-a" two="$id-b"

clean_up() {
    for namespace in "$one" "$two"; do
        ip netns pids "$namespace" 2>/dev/null | xargs -r kill -9 || true
        ip netns delete "$namespace" 2>/dev/null || true
    done
}
trap clean_up EXIT
trap 'exit 1' INT TERM HUP

ip netns add "$one"
ip netns add "$two"
ip -n "$one" link add link0 type veth peer name link0 netns "$two"
ip -n "$one" address add 10.213.0.1/24 dev link0
ip -n "$two" address add 10.213.0.2/24 dev link0
for namespace in "$one" "$two"; do
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set link0 up
    # A packet that the sender offloads whole has up to 64 KiB, so the bucket must hold more than one.
    tc -n "$namespace" qdisc add dev link0 root tbf rate "$rate" burst 256kb latency 50ms
done

"${PYTHON:-python}" "$(dirname "$0")/network.py" --rate "$rate" --hosts "$one" "$two" --master 10.213.0.1 \
    --interface link0 "$@" &
wait $!
