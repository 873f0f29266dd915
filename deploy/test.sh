#!/usr/bin/env bash
# Install what the tests need on this machine, and run them: test.sh [PYTEST ARGUMENTS...]
#
# As root, this installs missing Debian packages with apt. Tests that need something this machine
# cannot have are skipped, with the reason. SAMESTEP_VENV is as in environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

# ip creates the hosts of the network tests; systemd-nspawn boots the machine that runs the units;
# Mesa's software Vulkan runs the Vulkan backend; g++ compiles a failing Vulkan layer and a stand-in
# for a card; Chromium shows the page; qemu runs the arm64 kernels.
missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v systemd-nspawn >/dev/null || missing+=(systemd systemd-container)
ldconfig -p | grep -q libvulkan.so.1 || missing+=(libvulkan1)
compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || missing+=(mesa-vulkan-drivers)
command -v g++ >/dev/null || missing+=(g++ libc6-dev)
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || missing+=(munge slurmctld slurmd slurm-client)
command -v chromedriver >/dev/null || missing+=(chromium chromium-driver)
if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    printf 'samestep: installing %s\n' "${missing[*]}" >&2
    { apt-get update -qq && apt-get install -qq -y "${missing[@]}"; } >/dev/null 2>&1 ||
        echo "samestep: apt cannot install them; tests that need them are skipped" >&2
fi

bash deploy/environment.sh dev
venv=$(realpath "${SAMESTEP_VENV:-.venv}")
# The tests look for Ansible in a separate environment.
lock=requirements/ansible.txt
if ! cmp -s "$lock" "$venv/ansible/lock.txt"; then
    { python3 -m venv --clear "$venv/ansible" &&
        "$venv/ansible/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock" &&
        cp "$lock" "$venv/ansible/lock.txt"; } ||
        echo "samestep: cannot install Ansible; its tests are skipped" >&2
fi
PATH="$venv/bin:$PATH" exec python -m pytest "$@"
