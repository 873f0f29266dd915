#!/usr/bin/env bash
# The main job in one command: makes the environment, then fine-tunes MiniLM with LoRA on real SMS
# by a coordinator and three workers on this machine. Arguments go to the coordinator, for example
# `bash deploy/quickstart.sh --set steps=20`.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="${SAMESTEP_VENV:-$repository/.venv}"

# With the environment's commands on the PATH, as if it were activated.
bash "$repository/deploy/environment.sh" run
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"

cd "$repository"
exec coordinator --expect-workers 3 --local-workers 3 \
    --run deploy/runs/sms-spam.yaml --out runs/sms-spam "$@"
