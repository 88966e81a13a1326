#!/usr/bin/env bash
# Installs megarl and the test tools for the CPU, then checks style, types and layers and runs the tests. See --help.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_environment.sh
source "$repo/scripts/_environment.sh"

case ${1:-} in
-h | --help)
    cat <<'TEXT'
usage: scripts/test.sh [--all] [pytest arguments]

Makes a virtual environment, installs megarl and the test tools for the CPU into it, and runs ruff (lint and format), mypy,
import-linter and pytest. All of them run; the exit status is 1 if any of them fails, and the last line says which.

  --all   also the tests marked slow
  Tests that need a GPU skip themselves where there is none, and are listed at the end with every other skipped test.
  pytest arguments come last and win: scripts/test.sh tests/unit -k advantages, scripts/test.sh -m sglang

TEXT
    environment_help
    exit 0
    ;;
esac

selection=(-m "not slow")
if [ "${1:-}" = --all ]; then
    selection=()
    shift
fi

install_environment test
cd "$repo"
export PATH="$venv/bin:$PATH"

failed=()
check() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
    printf '   (%d s)\n' $((SECONDS - started))
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "import-linter" lint-imports
check "pytest" pytest "${selection[@]}" "$@"

if [ ${#failed[@]} -ne 0 ]; then
    printf '\nFAILED:'
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '\nAll checks passed.\n'
