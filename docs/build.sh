#!/usr/bin/env bash
# Builds the documentation as a site in build/site; a bad link or a page without a place fails it.
# The tools have an environment of their own, build/docs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/docs.txt venv=build/docs
if ! cmp -s "$lock" "$venv/lock.txt"; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-deps --require-hashes -r "$lock"
    cp "$lock" "$venv/lock.txt"
fi
exec "$venv/bin/python" -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/site "$@"
