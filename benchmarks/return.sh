#!/bin/sh
# Let a host disappear from an elastic training on two hosts, and come back. Prints what follows, and when.
#
#   sudo benchmarks/return.sh
#
# The hosts are network namespaces of this machine; torchrun starts one rank on each. Needs root, iproute2 and
# util-linux. The keys of --rdzv-conf let torchrun notice within seconds what takes it 45 s otherwise.
set -e
script=$(dirname "$0")/../examples/restartable_digits.py
scratch=$(mktemp -d)
unshare --net sleep 600 & first=$!
unshare --net sleep 600 & second=$!
trap 'end $agents; kill $first $second; rm -rf "$scratch"' EXIT
agents=
sleep 0.5
nsenter -t $first -n ip link add link0 type veth peer name link1 netns $second

host() { # PID DEVICE ADDRESS
    nsenter -t "$1" -n sh -c "ip link set lo up && ip addr add $3/24 dev $2 && ip link set $2 up"
}

end() { # PIDS of agents: kill them, and first their ranks
    for agent in "$@"; do kill -KILL $(pgrep -P "$agent") "$agent" 2>/dev/null || true; done
}

agent() { # PID NUMBER LOG: torchrun in the namespace of a host
    conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3
    [ "$2" = 0 ] && conf=$conf,is_host=true || conf=$conf,is_host=false
    nsenter -t "$1" -n env GLOO_SOCKET_IFNAME="link$2" OMP_NUM_THREADS=1 \
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python -m torch.distributed.run \
        --nnodes=1:2 --nproc-per-node=1 --max-restarts=5 --local-addr="10.9.0.$(($2 + 1))" \
        --rdzv-id=return --rdzv-backend=c10d --rdzv-endpoint=10.9.0.1:29511 --rdzv-conf="$conf" \
        "$script" --steps 1000000 --every 2 --directory "$scratch/run" >"$scratch/$3" 2>&1 &
    started=$!
    agents="$agents $started"
}

wait_for() { # LOG TEXT COUNT: until a log has so many lines with a text
    until [ "$(grep -cs "$2" "$scratch/$1")" -ge "$3" ]; do sleep 0.2; done
}

say() { echo "$(date +%T) $*"; }

host $first link0 10.9.0.1
host $second link1 10.9.0.2
agent $first 0 stays
sleep 1
agent $second 1 goes
wait_for stays '^step ' 5
say "both hosts train"
end $started
say "the second host is gone"
wait_for stays 'goes on after' 1
say "the first goes on alone: $(grep -h 'goes on after' "$scratch/stays" | tail -n 1)"
agent $second 1 comes
say "the second host is back"
wait_for stays 'goes on after' 2
say "both go on: $(grep -h 'goes on after' "$scratch/stays" | tail -n 1)"
grep -h 'is saved' "$scratch/stays" || true
