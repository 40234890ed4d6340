#!/usr/bin/env bash
# A run under Slurm, on one node or on several. docs/guides/deploy.md explains it.
#
#   sbatch deploy/slurm.sh quickstart                                    # one node
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh scale-4nodes      # a Ray cluster over four nodes
#   sbatch deploy/slurm.sh my.toml run.seed=1                            # more arguments are overrides
#
# Before the time limit the run is saved and the job is put into the queue again; it then continues where it was.
# All nodes need this environment (SORTEDRL_VENV) and the folder of the job under the same paths.

#SBATCH --job-name=sortedrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Send SIGTERM to this script ten minutes before the limit: time for the current update and a checkpoint.
#SBATCH --signal=B:TERM@600

set -euo pipefail

CONFIG=${1:?usage: sbatch slurm.sh CONFIG [KEY=VALUE]...}
shift
PORT=${RAY_PORT:-6379}
# A job that is put into the queue again keeps its number, and so it finds its own run.
RUN_NAME=${RUN_NAME:-job-$SLURM_JOB_ID}
RUN=runs/$RUN_NAME

# The environment that has sortedrl, for example one made by `make quickstart`.
SORTEDRL_VENV=${SORTEDRL_VENV:-.venv}
# shellcheck disable=SC1091
source "$SORTEDRL_VENV/bin/activate"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}

# The signal goes on to the trainer, once, and also where it comes before the trainer's number is known.
trainer="" asked="" told=""
pass_on() {
    if [ -n "$trainer" ] && [ -z "$told" ]; then
        told=yes
        kill -TERM "$trainer" 2>/dev/null || true
    fi
}
trap 'asked=yes; pass_on' TERM

cluster=()
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # This script runs on the first node of the job, and so does the trainer. Ray gets one process per node.
    head=$SLURMD_NODENAME
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
        ray start --head --port="$PORT" --dashboard-host=127.0.0.1 --block &
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address="$head:$PORT" --block &
    cluster=(--cluster "$head:$PORT")
    for attempt in {1..60}; do
        found=$(python -c "import ray; ray.init('$head:$PORT', log_to_driver=False); print(len(ray.nodes()))" 2>/dev/null || echo 0)
        [ "$found" -ge "$SLURM_JOB_NUM_NODES" ] && break
        [ -z "$asked" ] || break
        [ "$attempt" -lt 60 ] || { echo "only $found of $SLURM_JOB_NUM_NODES nodes joined Ray" >&2; exit 1; }
        sleep 5
    done
fi
if [ -n "$asked" ]; then # there is no trainer yet
    scontrol requeue "$SLURM_JOB_ID"
    exit 143
fi

if [ -e "$RUN/config.toml" ]; then
    sortedrl train --resume "$RUN" "${cluster[@]}" &
else
    sortedrl train "$CONFIG" run.name="$RUN_NAME" "$@" "${cluster[@]}" &
fi
trainer=$!
[ -z "$asked" ] || pass_on

# `wait` also returns when the signal comes; the run then needs a while to save, so wait until it has ended.
while kill -0 "$trainer" 2>/dev/null; do
    wait "$trainer" || true
done
code=0
wait "$trainer" || code=$?

# 143: SIGTERM stopped the run; what was saved is continued.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
