#!/bin/bash
# Run a coordinator command on the coordinator's node: ./control.sh status|drain|halt|continue|...
set -euo pipefail
cd "$(dirname "$0")"
. ./settings.sh
. ./step.sh
[ "$#" -gt 0 ] || { echo "samestep: expected a command, for example: ./control.sh status" >&2; exit 2; }
job=$(cat coordinator.job 2>/dev/null) || { echo "samestep: expected a coordinator started in $PWD, found none; run: sbatch coordinator.sbatch" >&2; exit 69; }
is_running "$job" || fail 69 "the coordinator, job $job, is not running: see samestep-coordinator-$job.log"
port=$(sed -n 's/.*"control": "\(.*\)".*/\1/p' address.json)
exec srun --jobid="$job" --overlap --ntasks=1 --quiet coordinator "$@" --control "$port"
