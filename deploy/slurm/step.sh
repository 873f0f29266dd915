# Sourced by the other scripts: run a command as a step of this job, and requeue
# the job if Slurm ended the command.

# In an array, SLURM_JOB_ID of the last task is the ID of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:-}}

fail() { # CODE TEXT
    printf 'samestep: %s\n' "$2" >&2
    exit "$1"
}

is_finished() {
    grep -qs '"outcome": *"finished"' run/result.json
}

is_running() { # JOB
    [ -n "$(squeue --noheader --jobs="$1" --states=RUNNING --format=%i 2>/dev/null)" ]
}

# Print the message that a coordinator leaves for its workers when it ends with an error that its user
# must fix. Print an empty string if there is none since this job's start.
failure() {
    local text
    text=$(cat coordinator.failed 2>/dev/null) || :
    [ "$text" = "$earlier" ] || printf '%s' "$text"
}
earlier=$(cat coordinator.failed 2>/dev/null) || :

end_with_coordinator() {
    until [ -n "$(failure)" ]; do sleep "${LOOK_EVERY_S:-10}"; done
    scancel --quiet --signal=TERM "$job.0"
}

is_preempted() {
    scontrol --oneliner show job "$job" | grep -q ' PreemptTime=[0-9]'
}

# Run COMMAND until it ends. SIGTERM, which Slurm sends to steps when it preempts or cancels the job,
# makes coordinator and worker finish the work in progress and leave. This script gets USR1 before the
# time limit (--signal in the job's header).
run_step() { # COMMAND...
    local step code limit watcher= interrupted=yes at_time_limit=
    limit=$(squeue --noheader --jobs="$job" --format=%l 2>/dev/null)
    case $limit in
    [0-2]:[0-9][0-9] | 3:00) # Slurm would requeue the job forever, each time before a step
        fail 2 "expected a time limit of more than 3 minutes, got $limit: jobs leave 2 minutes before it; set --time"
        ;;
    esac
    trap 'at_time_limit=yes interrupted=yes; scancel --quiet --signal=TERM "$job.0" 2>/dev/null || :' USR1
    srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit "$@" &
    step=$!
    if [ "$1" != coordinator ]; then
        end_with_coordinator >/dev/null 2>&1 &
        watcher=$!
    fi
    while [ -n "$interrupted" ]; do
        interrupted= code=0
        wait "$step" || code=$? # a trap ends `wait` too; a later `wait` still gives the exit code
    done
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || :
    # The coordinator's exit code is final; a worker of a finished run finds no coordinator and fails.
    if [ "$1" != coordinator ] && is_finished; then exit 0; fi
    if [ "$1" != coordinator ] && [ -n "$(failure)" ]; then fail 2 "$(failure)"; fi
    case "$1 $code" in
    "coordinator 2" | "coordinator 77" | "coordinator 78") # its workers need not hold their nodes
        printf 'the coordinator, job %s, ended with exit code %s at %s: see samestep-coordinator-%s.log, then submit both again\n' \
            "$job" "$code" "$(date +%FT%T)" "$job" >coordinator.failed.new
        mv coordinator.failed.new coordinator.failed
        ;;
    esac
    # The signal ends a worker that still waits for its coordinator.
    if [ "$code" -eq 143 ] && { [ -n "$at_time_limit" ] || is_preempted; }; then code=0; fi
    if [ "$code" -ne 0 ]; then exit "$code"; fi
    if is_finished; then exit 0; fi
    if [ -n "$at_time_limit" ] || is_preempted; then
        printf 'samestep: requeueing job %s\n' "$job"
        scontrol requeue "$job" # ends this script too
    fi
    exit 0
}
