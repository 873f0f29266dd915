#!/usr/bin/env bash
# The main job in one command: makes the environment, then fine-tunes MiniLM with LoRA on real SMS
# by a coordinator and three workers on this machine. Arguments go to the coordinator, for example
# `bash deploy/quickstart.sh --set steps=20`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash deploy/environment.sh run
venv=$(realpath "${SAMESTEP_VENV:-.venv}")
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" # as if it were activated

exec coordinator --expect-workers 3 --local-workers 3 \
    --run deploy/runs/sms-spam.yaml "$@"
