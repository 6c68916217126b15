#!/bin/sh
# Run a command as the ranks of a process group on two hosts that a link of a given rate joins: one on each
# host, or as many as RANKS_PER_HOST says.
#
#   sudo benchmarks/link.sh 2gbit python train.py
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

each=${RANKS_PER_HOST:-1}
export MASTER_ADDR=10.9.0.1 MASTER_PORT=29511 WORLD_SIZE=$((2 * each)) LOCAL_WORLD_SIZE=$each
peers=
for rank in $(seq $((2 * each - 1)) -1 0); do
    host=$((rank / each))
    test $host = 0 && pid=$first || pid=$second
    export RANK=$rank LOCAL_RANK=$((rank % each)) GLOO_SOCKET_IFNAME=link$host
    if [ $rank = 0 ]; then nsenter -t $pid -n "$@"; else nsenter -t $pid -n "$@" & peers="$peers $!"; fi
done
for peer in $peers; do wait $peer; done
