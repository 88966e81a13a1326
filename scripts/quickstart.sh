#!/usr/bin/env bash
# Installs megarl for the CPU and trains a tiny model with configs/quickstart.yaml. See --help.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_environment.sh
source "$repo/scripts/_environment.sh"

case ${1:-} in
-h | --help)
    cat <<'TEXT'
usage: scripts/quickstart.sh [key=value ...]

Makes a virtual environment, installs megarl for the CPU into it, and runs

    megarl train configs/quickstart.yaml [key=value ...]

on the CPU, also where there is a GPU (the GPU set is another installation: see the README).

TEXT
    environment_help
    exit 0
    ;;
esac

install_environment run
cd "$repo"
export CUDA_VISIBLE_DEVICES=""
exec "$venv/bin/megarl" train configs/quickstart.yaml "$@"
