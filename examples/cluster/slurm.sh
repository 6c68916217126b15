#!/bin/bash
# A training that survives failures, preemption and its time limit: sbatch examples/cluster/slurm.sh
#
# torchrun starts the ranks of a host again when one of them fails. When Slurm takes the hosts away, it sends
# SIGTERM 120 seconds before: all ranks save and end, and the job goes back into the queue.
#SBATCH --job-name=pipec
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# An agent that joins later would wait for ever for a store that torch has published before it came.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# How long torchrun lets ranks save before it kills them, in seconds; 30 if this is not set.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110

# SIGTERM goes to the tasks, not to this shell; exec, so that it reaches torchrun itself.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_PER_NODE" --max-restarts=10 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint="$0:29500" \
    examples/restartable_digits.py --directory "$SLURM_SUBMIT_DIR/run"' "$first"
status=$?

# Not 0, as after SIGTERM: go on from the checkpoint when there is room, up to ten times.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
