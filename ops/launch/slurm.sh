#!/usr/bin/env bash
# One run on the nodes of a Slurm job: Ray on every node, the driver on the first.
#
#   sbatch --nodes=2 ops/launch/slurm.sh cluster_64gpu run.out=/shared/runs/first data.train=/shared/train.parquet
#
# The arguments are those of `asyncgrpo serve`. asyncgrpo must be installed at the same path on every node (BIN), and
# run.out, the data and the model must be on storage that every node sees. The same command goes on after an end.
#
#SBATCH --job-name=asyncgrpo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900   # 15 minutes before the end: the step ends, a checkpoint is written, exit code 0
set -euo pipefail

BIN=${BIN:-.venv/bin}
PORT=${PORT:-6379}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=$(wc -l <<<"$nodes")
head=$(head -n 1 <<<"$nodes")
# The address that the other nodes reach. With several networks, set ADDRESS to the one of this node that NCCL should use.
ADDRESS=${ADDRESS:-$(getent ahostsv4 "$head" | awk '$1 !~ /^127\./ {print $1; exit}')}
[ -n "$ADDRESS" ] || { echo "the name $head leads to no address but loopback; set ADDRESS" >&2; exit 1; }

# Whoever reaches Ray can run programs in it, so it asks for a token. The home folder is the same on all nodes.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RES_OPTIONS=timeout:1
[ -s ~/.ray/auth_token ] || "$BIN/ray" get-auth-token --generate >/dev/null
chmod 600 ~/.ray/auth_token

# A Ray worker has the environment of `ray start`. What the reward function needs (keys, addresses) is exported before it.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    "$BIN/ray" start --block --head --node-ip-address="$ADDRESS" --port="$PORT" --include-dashboard=false &
if [ "$count" -gt 1 ]; then
    sleep 10
    srun --overlap --nodes=$((count - 1)) --ntasks=$((count - 1)) --exclude="$head" \
        "$BIN/ray" start --block --address="$ADDRESS:$PORT" &
fi
until [ "$("$BIN/python" -c "
import ray
ray.init(address='$ADDRESS:$PORT', logging_level='ERROR')
print(sum(node['Alive'] for node in ray.nodes()))" 2>/dev/null)" = "$count" ]; do sleep 2; done

"$BIN/asyncgrpo" serve "$@" cluster.ray_address="$ADDRESS:$PORT" cluster.bind=0.0.0.0 &
driver=$!
trap 'kill -TERM "$driver"' TERM INT
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do # a signal ended the wait, not the driver
    code=0
    wait "$driver" || code=$?
done
exit "$code" # Slurm ends Ray with the job
