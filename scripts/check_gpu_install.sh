#!/usr/bin/env bash
# Shows that the GPU installation of the README resolves, without installing it and without a GPU. See --help.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
-h | --help)
    cat <<'TEXT'
usage: scripts/check_gpu_install.sh

Resolves the GPU set for Python 3.12 with pip's dry run: what the README's command would install, from constraints/gpu.txt.
It takes about a minute and reads the packages' metadata only (no wheel of several hundred megabytes). Prints every version
and a verdict; exits 1 where the set does not resolve or has a package that constraints/gpu.txt does not pin.

Python 3.12 is MEGARL_PYTHON, or python3.12 on PATH, or one of pyenv's. pip's own variables and configuration are honoured.
TEXT
    exit 0
    ;;
esac

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_312() {
    [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.12 ]
}

python=""
for candidate in "${MEGARL_PYTHON:-python3.12}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python python3; do
    if is_312 "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.12 found (MEGARL_PYTHON, PATH, pyenv); the GPU set is for 3.12"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/pip.log

show_log_and_fail() {
    tail -n 40 "$log" >&2
    fail "$1"
}

echo "-- preparing pip on $("$python" --version)"
"$python" -m venv "$work/venv" >"$log" 2>&1 || show_log_and_fail "cannot make a virtual environment"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --upgrade pip >"$log" 2>&1 || show_log_and_fail "cannot upgrade pip"

# A copy, so that the build leaves nothing in the repository.
mkdir "$work/source"
cp -r "$repo"/{setup.py,pyproject.toml,LICENSE,megarl} "$work/source"

# fast-deps reads metadata out of remote wheels by ranges instead of downloading 4 GB of them.
echo "-- pip install --dry-run -c constraints/gpu.txt '.[gpu,test]' (about a minute)"
started=$SECONDS
"${pip[@]}" install --dry-run --ignore-installed --use-feature=fast-deps --report "$work/report.json" \
    -c "$repo/constraints/gpu.txt" "$work/source[gpu,test]" >"$log" 2>&1 || show_log_and_fail "the GPU set does not resolve"
echo "   resolved in $((SECONDS - started)) s"

# The second command of the installation compiles this one, without dependencies, so that its release must only exist.
extension=$(grep '^transformer-engine-torch==' "$repo/constraints/gpu.txt")
echo "-- pip index versions ${extension%%==*}"
"${pip[@]}" index versions "${extension%%==*}" >"$work/versions" 2>"$log" || show_log_and_fail "the index does not have ${extension%%==*}"
grep '^Available versions:' "$work/versions" | grep -Eo '[^ ,:]+' | grep -Fx "${extension##*==}" >"$log" ||
    fail "the index has no $extension"

"$work/venv/bin/python" - "$work/report.json" "$repo/constraints/gpu.txt" "$extension" <<'PY'
import json
import re
import sys

report_path, constraints_path, extension = sys.argv[1:]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


with open(report_path) as file:
    resolved = {canonical(i["metadata"]["name"]): i["metadata"]["version"] for i in json.load(file)["install"]}
with open(constraints_path) as file:
    pinned = {canonical(line.split("==")[0]) for line in file if "==" in line}
resolved.pop("megarl")
for name, version in sorted(resolved.items()):
    print(f"   {name}=={version}")
print(f"   {extension} (compiled, without dependencies)")
loose = sorted(set(resolved) - pinned)
if loose:
    sys.exit(f"error: not pinned by constraints/gpu.txt: {', '.join(loose)}")
print(f"The GPU set resolves: {len(resolved) + 1} packages, all pinned.")
PY
