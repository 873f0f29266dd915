#!/usr/bin/env bash
# Create or update .venv with the locked requirements and samestep itself:
# environment.sh coordinator|worker|run|dev
# If it is up to date, this prints and changes nothing. Each failure is one line on stderr.
#
# coordinator   only the coordinator, without torch
# worker        both daemons and all tasks
# run           worker, plus the weights and data of deploy/quickstart.sh
# dev           run, plus what the tests need
#
# PYTHON        which Python to use (default: python3.11, else python3 if it is 3.11 or later)
# SAMESTEP_VENV where to create the environment (default: .venv in the repository)
# SAMESTEP_WHEEL install samestep from this wheel instead of the repository, which then needs only
#               requirements/ and pyproject.toml
# TORCH         cpu, cuda or rocm (default: cuda if NVIDIA's driver is loaded and recent enough; else
#               cpu if pip finds that build; else the index's build, which also computes on CPUs).
#               rocm needs PyTorch's index of ROCm builds; exact versions, without hashes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly set_name="${1:-run}"
readonly venv="${SAMESTEP_VENV:-.venv}"
readonly wheel="${SAMESTEP_WHEEL:-}"
readonly requested_torch="${TORCH:-}"
readonly stamp="$venv/samestep.lock"
readonly coordinator_mib=400 cpu_mib=2000 cuda_mib=9000 rocm_mib=17000 compiler_mib=600 # measured sizes of the finished environment, plus a margin

# Exit codes as in the daemons: 1 failed, 2 usage, 69 unreachable, 78 mismatch.
fail() {
    printf 'samestep: %s\n' "$2" >&2
    exit "$1"
}

say() { printf 'samestep: %s\n' "$1" >&2; }

readonly set_names=(coordinator worker run dev) # each contains the ones before it

case "$set_name" in
coordinator) requirements=(coordinator) ;;
worker) requirements=(run) ;;
run) requirements=(run assets) ;;
dev) requirements=(run assets dev) ;;
*) fail 2 "expected environment.sh with one of ${set_names[*]}, got '$set_name'" ;;
esac
case "$requested_torch" in
"" | cpu | cuda | rocm) ;;
*) fail 2 "expected TORCH=cpu, TORCH=cuda or TORCH=rocm, got '$requested_torch'" ;;
esac

# One line per set, so that an environment for development also counts as one for running.
stamp_lines() {
    local name files=(pyproject.toml ${wheel:+"$wheel"})
    [ -n "$wheel" ] || files+=($(compgen -G 'protocol/exact/kernels/*.[ch]'))
    for name in "${set_names[@]}"; do
        case "$name" in
        coordinator) files+=(requirements/coordinator.txt) ;;
        worker) files+=(requirements/{run,cpu,cuda,rocm}.txt) ;;
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
    fail 78 "expected Python 3.11 or later, found ${found:-none}; install it, or set PYTHON"
}

need_space() {
    local free
    free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge "$1" ] ||
        fail 1 "expected $1 MiB free for $venv, found $free; free some space, or set SAMESTEP_VENV"
}

make_venv() {
    local python output
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail 78 \
        "expected Python's venv module, which $python lacks; on Debian: apt install python3-venv"
    say "creating $venv with $("$python" -V)"
    output=$("$python" -m venv "$venv" 2>&1) || explain "$output"
}

# Run pip with a progress line on a terminal; its output stays in $log for `explain`.
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
        "cannot reach the package index; check the network or pip's settings, then run this again"
    case "$1" in
    *"No space left on device"* | *"Disk quota exceeded"*)
        fail 1 "the disk is full; free some space for $venv, then run this again"
        ;;
    *"DO NOT MATCH THE HASHES"*)
        fail 78 "a downloaded package differs from the locked one (wrong hash) and was not installed"
        ;;
    *"No matching distribution found"*)
        last=${1##*No matching distribution found for }
        fail 69 "pip finds no ${last%%$'\n'*}; check pip's settings and the Python version"
        ;;
    esac
    last=$(grep -iE 'error|failed' <<<"$1" | tail -n 1)
    fail 1 "cannot create $venv: ${last:-no reason given}"
}

# Print the version of NVIDIA's driver; print an empty string if none is loaded.
nvidia_driver() {
    local found
    found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    found=${found%%$'\n'*} # one line per card
    [[ "$found" =~ ^[0-9]+(\.[0-9]+)*$ ]] && printf '%s' "$found"
    return 0
}

# Print cpu, cuda or rocm; print an empty string if cpu and cuda are both fine.
choose_torch() {
    local found least
    found=$(nvidia_driver)
    least=$(sed -n "s/^# Needs NVIDIA's driver \([0-9.]*\) or later.*/\1/p" requirements/cuda.txt)
    if [ -n "$found" ] && [ "$(printf '%s\n' "$least" "$found" | sort -V | head -n 1)" != "$least" ]; then
        [ "$requested_torch" = cuda ] && fail 78 \
            "expected NVIDIA's driver $least or later, found $found; see docs/deploying.md"
        [ -n "$requested_torch" ] ||
            say "NVIDIA's driver is $found, but CUDA needs $least or later: cards are not used (see docs/deploying.md)"
        found=""
    fi
    if [ -n "$requested_torch" ]; then
        printf '%s' "$requested_torch"
    elif [ -n "$found" ]; then
        printf cuda
    fi
}

# Fail if pip does not find the CPU build and TORCH does not request it: then the index's build is fine.
install_cpu_torch() {
    local python locked
    python=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    locked=$(sed -n 's/^# For Python \(.*\)\.$/\1/p' requirements/cpu.txt)
    if [[ " $locked " == *" $python "* ]]; then
        pip --require-hashes -r requirements/cpu.txt && return
        unreachable "$log" || [[ "$log" != *"No matching"* ]] && explain "$log"
        [ "$requested_torch" = cpu ] && fail 69 \
            "pip does not find torch's CPU build; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or unset TORCH (see docs/deploying.md)"
        say "pip does not find torch's CPU build; installing the index's build, several GB"
    else
        [ "$requested_torch" = cpu ] && fail 78 \
            "torch's CPU build is locked for Python $locked, found $python; set PYTHON, or unset TORCH"
        say "torch's CPU build is not locked for Python $python; installing the index's build, several GB"
    fi
    return 1
}

# Remove torch, and the triton beside it, if it is of another build than this one (+rocm; empty: CUDA's).
# pip considers +cpu and +rocm versions equal to one without and would keep them, and the files of both
# tritons have the same names.
remove_other_torch() {
    local found
    found=$(compgen -G "$venv/lib/python3*/site-packages/torch-*.dist-info") || return 0
    found=${found##*/torch-}
    case "$found" in
    *+rocm*) found=+rocm ;;
    *+cpu*) found=+cpu ;;
    *) found="" ;;
    esac
    [ "$found" = "$1" ] && return
    "$venv/bin/python" -m pip --no-input uninstall --quiet --yes triton triton-rocm torch ||
        fail 1 "cannot remove torch's other build from $venv"
}

install_torch() {
    if [ "$torch" = rocm ]; then
        say "installing torch's ROCm build by exact version, without hashes"
        need_space "$rocm_mib"
        remove_other_torch +rocm
        pip -r requirements/rocm.txt && return
        unreachable "$log" || [[ "$log" != *"No matching"* ]] && explain "$log"
        fail 69 "pip does not find torch's ROCm build; set PIP_EXTRA_INDEX_URL to PyTorch's index of ROCm builds (see docs/deploying.md)"
    fi
    if [ "$torch" != cuda ] && install_cpu_torch; then
        torch=cpu
        return
    fi
    torch=cuda
    need_space "$cuda_mib"
    remove_other_torch ""
    pip --require-hashes -r requirements/cuda.txt || explain "$log"
}

# Compile the native kernels once. If there is no compiler, download one and remove it again.
build_kernels() {
    local compiler="$venv/compiler"
    "$venv/bin/python" -m protocol.machine.compiler 2>/dev/null && return
    say "downloading a compiler for the native kernels (about 100 MB); it is removed afterwards"
    need_space "$compiler_mib"
    pip --target "$compiler" --require-hashes -r requirements/build.txt &&
        PYTHONPATH="$compiler" "$venv/bin/python" -m protocol.machine.compiler ||
        say "cannot build the native kernels; numpy gives the same bits without them, more slowly"
    rm -rf "$compiler"
}

install() {
    local name files=()
    for name in "${requirements[@]}"; do files+=(-r "requirements/$name.txt"); done
    if [ "$set_name" = coordinator ]; then
        say "installing the locked packages"
    else
        say "installing the locked packages (about 400 MB the first time; takes minutes)"
    fi
    pip --require-hashes "${files[@]}" || explain "$log"
    [ "$set_name" = coordinator ] || install_torch
    if [ -n "$wheel" ]; then
        pip --no-index --force-reinstall "$wheel" || explain "$log"
    else
        pip --no-build-isolation --no-index -e . || explain "$log"
        build_kernels
    fi
    # Without bytecode files, torch and transformers take twice as long at each start. A few files
    # are for later Pythons and do not compile; that does not matter.
    "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" backends coordinator protocol worker \
        >/dev/null || true
}

# Succeed if the build in the stamp's last line is the requested one. If none is requested, CUDA's
# build is always fine, and the CPU build is fine until there is a driver for CUDA.
build_fits() {
    if [ -n "$requested_torch" ]; then
        [ "$1" = "torch $requested_torch" ]
        return
    fi
    if [ "$1" != "torch cpu" ] || [ "$(choose_torch 2>/dev/null)" != cuda ]; then
        return 0
    fi
    say "NVIDIA's driver is now recent enough for CUDA: replacing torch's CPU build (TORCH=cpu keeps it)"
    return 1
}

main() {
    local lines previous=""
    lines=$(stamp_lines)
    [ -r "$stamp" ] && previous=$(cat "$stamp")
    case $'\n'"$previous"$'\n' in
    *$'\n'"$lines"$'\n'*)
        # The set fits; does torch's build?
        [ "$set_name" = coordinator ] || build_fits "${previous##*$'\n'}" && return
        ;;
    esac
    torch=""
    [ "$set_name" = coordinator ] || torch=$(choose_torch)
    # An interrupted run left the environment incomplete.
    [ "$previous" = making ] && rm -rf "$venv"
    if [ ! -x "$venv/bin/python" ]; then
        need_space "$([ "$set_name" = coordinator ] && echo "$coordinator_mib" || echo "$cpu_mib")"
        make_venv
    fi
    echo making >"$stamp" || fail 1 "cannot write $stamp"
    install
    printf '%s\n' "$lines" ${torch:+"torch $torch"} >"$stamp" || fail 1 "cannot write $stamp"
    say "ready; next: . $venv/bin/activate"
}

main
