#!/usr/bin/env bash
# Sets up all that the tests need on this machine, and runs them: test.sh [PYTEST ARGUMENTS...]
#
# As root, what is missing of Debian's packages is installed with apt. What cannot be had is left
# out: the tests that need it are skipped, and say why. SAMESTEP_VENV as in environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

# Hosts of the network tests are made with ip, the machine that the units run on is booted with
# systemd-nspawn, the Vulkan backend is tested on Mesa's software Vulkan and on one that fails, which
# is compiled, and the page in Chromium.
missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v systemd-nspawn >/dev/null || missing+=(systemd systemd-container)
ldconfig -p | grep -q libvulkan.so.1 || missing+=(libvulkan1)
compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || missing+=(mesa-vulkan-drivers)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v chromedriver >/dev/null || missing+=(chromium chromium-driver)
if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    printf 'samestep: installing %s\n' "${missing[*]}" >&2
    { apt-get update -qq && apt-get install -qq -y "${missing[@]}"; } >/dev/null 2>&1 ||
        echo "samestep: apt could not install them: tests that need them are skipped" >&2
fi

bash deploy/environment.sh dev
venv=$(realpath "${SAMESTEP_VENV:-.venv}")
# Ansible has an environment of its own, where tests look for it.
lock=requirements/ansible.txt
if ! cmp -s "$lock" "$venv/ansible/lock.txt"; then
    { python3 -m venv --clear "$venv/ansible" &&
        "$venv/ansible/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock" &&
        cp "$lock" "$venv/ansible/lock.txt"; } ||
        echo "samestep: Ansible could not be installed: its tests are skipped" >&2
fi
PATH="$venv/bin:$PATH" exec python -m pytest "$@"
