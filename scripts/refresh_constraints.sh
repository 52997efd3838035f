#!/bin/sh
# Rewrites constraints.txt from a clean install of sglang-afd[test]: newest versions that fit.
# Usage: scripts/refresh_constraints.sh [python3.11]. Needs a package index and 10 GB in TMPDIR.
set -eu

python=${1:-python3.11}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install "$root/python[test]"
"$work/venv/bin/pip" check
"$work/venv/bin/pip" freeze --all >"$work/all"
grep -v -i -e '^pip==' -e '^sglang[-_.]afd' "$work/all" >"$work/pins"

if grep -v '^[A-Za-z0-9._-]*==[^ ]*$' "$work/pins"; then
    echo "refresh_constraints: the lines above did not come from a release on an index" >&2
    exit 1
fi

{
    sed -n '/^#/p' "$root/constraints.txt"
    cat "$work/pins"
} >"$work/new"
mv "$work/new" "$root/constraints.txt"
echo "constraints.txt: $(grep -c == "$root/constraints.txt") pins"
