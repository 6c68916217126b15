#!/bin/sh
# Run a command as the two ranks of a process group on two hosts that a link of a given rate joins.
#
#   sudo benchmarks/link.sh 2gbit python benchmarks/schedules.py --message-mib 2 4
#
# The hosts are network namespaces, the link is a veth pair with a token bucket at either end, and both are
# gone when the command ends. Over the loopback device messages cost processor time, which on a machine of few
# cores slows down everything else; here they cost time on the link. Needs root, iproute2 and util-linux.
set -e
rate=$1
shift
unshare --net sleep 600 & first=$!
unshare --net sleep 600 & second=$!
trap 'kill $first $second' EXIT
sleep 0.5

nsenter -t $first -n ip link add link0 type veth peer name link1 netns $second
host() { # PID DEVICE ADDRESS
    nsenter -t "$1" -n sh -c "
        ip link set lo up && ip addr add $3/24 dev $2 && ip link set $2 up
        tc qdisc add dev $2 root tbf rate $rate burst 256k latency 50ms
        echo 131072 > /proc/sys/net/ipv4/tcp_limit_output_bytes
        echo 4096 8388608 16777216 | tee /proc/sys/net/ipv4/tcp_rmem > /proc/sys/net/ipv4/tcp_wmem"
}
host $first link0 10.9.0.1
host $second link1 10.9.0.2

export MASTER_ADDR=10.9.0.1 MASTER_PORT=29511 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
RANK=1 GLOO_SOCKET_IFNAME=link1 nsenter -t $second -n "$@" & peer=$!
RANK=0 GLOO_SOCKET_IFNAME=link0 nsenter -t $first -n "$@"
wait $peer
