#!/usr/bin/env bash
# Create the environment, then fine-tune MiniLM with LoRA on real SMS messages, with a coordinator and
# a worker of three devices on this machine. Arguments go to the coordinator, for example
# `bash deploy/quickstart.sh --set steps=20`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash deploy/environment.sh run
venv=$(realpath "${SAMESTEP_VENV:-.venv}")
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" # as if it were activated

exec coordinator --expect-workers 3 --local-workers 3 \
    --run deploy/runs/sms-spam.yaml "$@"
