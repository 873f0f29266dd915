#!/usr/bin/env bash
# Makes .venv with the locked requirements and samestep itself:
# environment.sh coordinator|worker|run|dev
# Says nothing and changes nothing where it is there already. Each failure is one line on stderr.
#
# coordinator   to coordinate and no more: without torch
# worker        for both daemons and all tasks
# run           also the weights and data of deploy/quickstart.sh
# dev           also what the tests need
#
# PYTHON        which Python to use (default: python3.11, else python3 of at least 3.11)
# SAMESTEP_VENV where to make the environment (default: .venv in the repository)
# SAMESTEP_WHEEL installs samestep from this wheel, not from the repository, which then holds no more
#               than requirements/ and pyproject.toml
# TORCH         cpu or cuda (default: cuda where NVIDIA's driver answers and is new enough, else cpu
#               where pip is offered that build, else what the index has: it computes on CPUs too)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly set_name="${1:-run}"
readonly venv="${SAMESTEP_VENV:-.venv}"
readonly wheel="${SAMESTEP_WHEEL:-}"
readonly torch_asked="${TORCH:-}"
readonly stamp="$venv/samestep.lock"
readonly coordinator_mib=400 cpu_mib=2000 cuda_mib=9000 # measured sizes of the finished environment, and some room

# Exit codes as of the daemons: 1 failed, 2 usage, 69 cannot reach, 78 mismatch.
fail() {
    printf 'samestep: %s\n' "$2" >&2
    exit "$1"
}

say() { printf 'samestep: %s\n' "$1" >&2; }

readonly set_names=(coordinator worker run dev) # each holds what those before it hold

case "$set_name" in
coordinator) requirements=(coordinator) ;;
worker) requirements=(run) ;;
run) requirements=(run assets) ;;
dev) requirements=(run assets dev) ;;
*) fail 2 "expected environment.sh with one of ${set_names[*]}, got '$set_name'" ;;
esac
case "$torch_asked" in
"" | cpu | cuda) ;;
*) fail 2 "expected TORCH=cpu or TORCH=cuda, got '$torch_asked'" ;;
esac

# One line per set, so that an environment made for development also serves for running.
wanted() {
    local name files=(pyproject.toml ${wheel:+"$wheel"})
    for name in "${set_names[@]}"; do
        case "$name" in
        coordinator) files+=(requirements/coordinator.txt) ;;
        worker) files+=(requirements/{run,cpu,cuda}.txt) ;;
        run) files+=(requirements/assets.txt) ;;
        dev) files+=(requirements/dev.txt) ;;
        esac
        printf '%s %s %s\n' "$name" "$PWD" "$(cat "${files[@]}" | sha256sum | cut -c1-64)"
        [ "$name" = "$set_name" ] && break
    done
}

find_python() {
    local candidate found=""
    for candidate in ${PYTHON:-python3.11 python3 python3.13 python3.12}; do
        command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
        found="$candidate is $("$candidate" -V 2>/dev/null || echo 'not working')"
    done
    fail 78 "expected Python 3.11 or later, found ${found:-none}; install it or set PYTHON"
}

need_space() {
    local free
    free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge "$1" ] ||
        fail 1 "expected $1 MiB free for $venv, found $free; free some or set SAMESTEP_VENV"
}

make_venv() {
    local python output
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail 78 \
        "expected Python's venv module, $python has none; on Debian: apt install python3-venv"
    say "making $venv with $("$python" -V)"
    output=$("$python" -m venv "$venv" 2>&1) || explain "$output"
}

# Runs pip with a line of progress on a terminal; its output is left in $log for `explain`.
log=""
pip() {
    local line count=0 code=1
    log=""
    while IFS= read -r line; do
        case "$line" in
        "exit code "*) code=${line#exit code } ;;
        Collecting*)
            count=$((count + 1))
            [ -t 2 ] && printf '\r\033[K%d: %s' "$count" "${line:0:70}" >&2
            ;;
        esac
        log+="$line"$'\n'
    done < <(
        "$venv/bin/python" -m pip --no-input --disable-pip-version-check \
            install --no-deps --no-compile --retries 2 "$@" 2>&1
        echo "exit code $?"
    )
    [ -t 2 ] && [ "$count" -gt 0 ] && printf '\r\033[K' >&2
    return "$code"
}

unreachable() {
    case "$1" in
    *NewConnectionError* | *NameResolution* | *ConnectTimeout* | *ReadTimeout* | *ProxyError* | \
        *"connection broken"* | *"Connection refused"* | *"Network is unreachable"*) ;;
    *) return 1 ;;
    esac
}

explain() {
    local last
    unreachable "$1" && fail 69 \
        "cannot reach the package index; check the network or pip's settings and run again"
    case "$1" in
    *"No space left on device"* | *"Disk quota exceeded"*)
        fail 1 "the disk is full; free some space for $venv and run this again"
        ;;
    *"DO NOT MATCH THE HASHES"*)
        fail 78 "a downloaded package is not the locked one (its hash differs); not installed"
        ;;
    *"No matching distribution found"*)
        last=${1##*No matching distribution found for }
        fail 69 "pip is not offered ${last%%$'\n'*}; check pip's settings and the version of Python"
        ;;
    esac
    last=$(grep -iE 'error|failed' <<<"$1" | tail -n 1)
    fail 1 "could not make $venv: ${last:-no reason given}"
}

# The version of NVIDIA's driver; empty where none answers.
nvidia_driver() {
    local found
    found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    found=${found%%$'\n'*} # a line for each card
    [[ "$found" =~ ^[0-9]+(\.[0-9]+)*$ ]] && printf '%s' "$found"
    return 0
}

# Prints cpu or cuda, or nothing where either will do.
choose_torch() {
    local found least
    found=$(nvidia_driver)
    least=$(sed -n "s/^# Needs NVIDIA's driver \([0-9.]*\) or later.*/\1/p" requirements/cuda.txt)
    if [ -n "$found" ] && [ "$(printf '%s\n' "$least" "$found" | sort -V | head -n 1)" != "$least" ]; then
        [ "$torch_asked" = cuda ] && fail 78 \
            "expected NVIDIA's driver $least or later, found $found; docs/deploying.md says how to get one"
        [ -n "$torch_asked" ] ||
            say "NVIDIA's driver is $found, CUDA here needs $least or later: cards are left out (docs/deploying.md)"
        found=""
    fi
    if [ -n "$torch_asked" ]; then
        printf '%s' "$torch_asked"
    elif [ -n "$found" ]; then
        printf cuda
    fi
}

# Fails where pip is not offered the CPU build and that was not asked for: then the index's will do.
install_cpu_torch() {
    local python locked
    python=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    locked=$(sed -n 's/^# For Python \(.*\)\.$/\1/p' requirements/cpu.txt)
    if [[ " $locked " == *" $python "* ]]; then
        pip --require-hashes -r requirements/cpu.txt && return
        unreachable "$log" || [[ "$log" != *"No matching"* ]] && explain "$log"
        [ "$torch_asked" = cpu ] && fail 69 \
            "pip is not offered torch's CPU build: name PyTorch's index of them in PIP_EXTRA_INDEX_URL, or leave TORCH out (docs/deploying.md)"
        say "pip is not offered torch's CPU build; taking the index's, several GB"
    else
        [ "$torch_asked" = cpu ] && fail 78 \
            "torch's CPU build is locked for Python $locked, found $python; set PYTHON, or leave TORCH out"
        say "torch's CPU build is not locked for Python $python; taking the index's, several GB"
    fi
    return 1
}

install_torch() {
    if [ "$torch" != cuda ] && install_cpu_torch; then
        torch=cpu
        return
    fi
    torch=cuda
    need_space "$cuda_mib"
    # To pip a version with +cpu is as good as one without, so it would leave that.
    if compgen -G "$venv/lib/python3*/site-packages/torch-*+cpu.dist-info" >/dev/null; then
        "$venv/bin/python" -m pip --no-input uninstall --quiet --yes torch ||
            fail 1 "could not remove torch's CPU build from $venv"
    fi
    pip --require-hashes -r requirements/cuda.txt || explain "$log"
}

install() {
    local name files=()
    for name in "${requirements[@]}"; do files+=(-r "requirements/$name.txt"); done
    if [ "$set_name" = coordinator ]; then
        say "installing the locked packages"
    else
        say "installing the locked packages (some 400 MB the first time, minutes)"
    fi
    pip --require-hashes "${files[@]}" || explain "$log"
    [ "$set_name" = coordinator ] || install_torch
    if [ -n "$wheel" ]; then
        pip --no-index --force-reinstall "$wheel" || explain "$log"
    else
        pip --no-build-isolation --no-index -e . || explain "$log"
    fi
    # Without compiled files torch and transformers take twice as long at each start. A few files
    # are for later Pythons and do not compile; that is theirs.
    "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" backends coordinator protocol worker \
        >/dev/null || true
}

# Whether this last line of the stamp names the build that is asked for, or that will do. Where none
# is asked for, CUDA's will do everywhere, the CPU build until there is a driver for CUDA.
fits() {
    if [ -n "$torch_asked" ]; then
        [ "$1" = "torch $torch_asked" ]
        return
    fi
    if [ "$1" != "torch cpu" ] || [ "$(choose_torch 2>/dev/null)" != cuda ]; then
        return 0
    fi
    say "NVIDIA's driver is new enough for CUDA now: changing torch's build (TORCH=cpu keeps it)"
    return 1
}

main() {
    local wanted held=""
    wanted=$(wanted)
    [ -r "$stamp" ] && held=$(cat "$stamp")
    case $'\n'"$held"$'\n' in
    *$'\n'"$wanted"$'\n'*)
        # Also if it was made with the other build of torch than what is now asked for?
        [ "$set_name" = coordinator ] || fits "${held##*$'\n'}" && return
        ;;
    esac
    torch=""
    [ "$set_name" = coordinator ] || torch=$(choose_torch)
    # Half made by a run that was cut off: what it holds cannot be trusted.
    [ "$held" = making ] && rm -rf "$venv"
    if [ ! -x "$venv/bin/python" ]; then
        need_space "$([ "$set_name" = coordinator ] && echo "$coordinator_mib" || echo "$cpu_mib")"
        make_venv
    fi
    echo making >"$stamp" || fail 1 "cannot write $stamp"
    install
    printf '%s\n' "$wanted" ${torch:+"torch $torch"} >"$stamp" || fail 1 "cannot write $stamp"
    say "ready; next: . $venv/bin/activate"
}

main
