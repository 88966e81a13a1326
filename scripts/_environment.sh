# shellcheck shell=bash
# The CPU environment that quickstart.sh and test.sh run in; meant to be sourced. Needs $repo, the repository's root.
#   install_environment run    megarl and SGLang on the CPU
#   install_environment test   the same and the test tools
# Both leave $venv set. A stamp in the environment, a hash of what decides its contents, lets later calls return at once.

venv=${MEGARL_VENV:-$repo/.venv}

environment_help() {
    cat <<'TEXT'
Needs Python 3.11 or 3.12 with its venv module, about 3 GB of disk, and a package index that pip can reach. The first call
installs the versions in constraints/cpu.txt (3 to 15 minutes, by network and disk); later calls find them there.

Environment variables:
  MEGARL_PYTHON   the Python to use (else the first of python3.12, python3.11, python3 that is 3.11 or 3.12)
  MEGARL_VENV     where the virtual environment goes (else .venv in the repository)
  PIP_...         pip's own variables and configuration files are honoured: index, mirrors, proxies, certificates

PyTorch: the default package index holds its CUDA build. It runs without a GPU too, but is 3 GB more to
download and makes 6 GB on disk of 2.5.
For the CPU build (200 MB), set PIP_EXTRA_INDEX_URL to the address of PyTorch's CPU wheel index, which the installation
page of PyTorch names, before the first call. pip then takes the CPU build, because its version sorts as the newer one.
TEXT
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints "3.11" or the like; fails for a command that is missing or that only pretends to be there, such as a pyenv shim.
python_minor() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_supported() {
    [ "$1" = 3.11 ] || [ "$1" = 3.12 ]
}

# Sets $python.
find_python() {
    local candidate version found=""
    if [ -n "${MEGARL_PYTHON:-}" ]; then
        version=$(python_minor "$MEGARL_PYTHON") || fail "MEGARL_PYTHON=$MEGARL_PYTHON does not run as a Python interpreter"
        is_supported "$version" || fail "MEGARL_PYTHON=$MEGARL_PYTHON is Python $version; megarl needs 3.11 or 3.12"
        python=$MEGARL_PYTHON
        return
    fi
    for candidate in python3.12 python3.11 python3; do
        version=$(python_minor "$candidate") || continue
        if is_supported "$version"; then
            python=$candidate
            return
        fi
        found="$found $candidate is $version;"
    done
    fail "no Python 3.11 or 3.12 on PATH (${found:-no python3 at all}).
Install one (Debian and Ubuntu: apt install python3 python3-venv) or set MEGARL_PYTHON to its path."
}

# What pip is at, from its log.
newest_line() {
    tail -n 200 "$log" | grep -E '^ *(Collecting|Processing|Downloading|Building|Installing|Successfully)' | tail -n 1 | cut -c 1-100
}

# Runs a long command with its output in $log, says what goes on, and shows the log's last lines where it fails.
run_step() {
    local what=$1 status=0 started=$SECONDS ticks=0 ticker
    shift
    printf -- '-- %s\n' "$what"
    printf '\n$ %s\n' "$*" >>"$log"
    (
        while sleep 1; do
            ticks=$((ticks + 1))
            [ $((ticks % 30)) -ne 0 ] || printf '   %d s: %s\n' "$ticks" "$(newest_line)"
        done
    ) &
    ticker=$!
    "$@" >>"$log" 2>&1 || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    if [ "$status" -ne 0 ]; then
        printf '\nThe last lines of %s:\n' "$log" >&2
        tail -n 25 "$log" >&2
        fail "failed with status $status: $what"
    fi
    printf '   done in %d s\n' $((SECONDS - started))
}

create_venv() {
    if [ -e "$venv" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        fail "$venv exists and is not a virtual environment; set MEGARL_VENV to another path"
    fi
    find_python
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python ($(python_minor "$python")) has no venv module. Debian and Ubuntu: apt install python$(python_minor "$python")-venv"
    mkdir -p "$(dirname "$venv")"
    log=$venv.log
    : >"$log" || fail "cannot write $log"
    run_step "creating $venv with Python $(python_minor "$python")" "$python" -m venv --clear "$venv"
    mv "$log" "$venv/install.log"
}

install_environment() {
    local kind=$1 extras=sglang-cpu version wanted
    [ "$kind" = run ] || extras=sglang-cpu,test

    version=""
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        version=$(python_minor "$venv/bin/python")
    fi
    if [ -n "${MEGARL_PYTHON:-}" ] && [ -n "$version" ]; then
        find_python
        [ "$(python_minor "$python")" = "$version" ] ||
            fail "$venv has Python $version, MEGARL_PYTHON is $(python_minor "$python"); remove $venv or set MEGARL_VENV"
    fi
    if [ -z "$version" ]; then
        create_venv
        version=$(python_minor "$venv/bin/python")
    fi
    is_supported "$version" || fail "$venv has Python $version; megarl needs 3.11 or 3.12. Remove it or set MEGARL_VENV."

    # The path is part of it: the editable installation points there.
    wanted=$({ cat "$repo/setup.py" "$repo/constraints/cpu.txt" "${BASH_SOURCE[0]}"; echo "$version $repo"; } | sha256sum | cut -d ' ' -f 1)
    [ "$(cat "$venv/.megarl-$kind" 2>/dev/null)" != "$wanted" ] || return 0

    log=$venv/install.log
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    local pinned=(-c "$repo/constraints/cpu.txt")
    printf 'Installing megarl into %s (once). pip writes to %s\n' "$venv" "$log"
    run_step "torch (about 1 minute for the CPU build of 200 MB, several for the CUDA build of 3 GB)" \
        "${pip[@]}" install "${pinned[@]}" torch
    run_step "megarl with Megatron-Core, Ray and transformers, about 100 packages (1 to 3 minutes)" \
        "${pip[@]}" install "${pinned[@]}" -e "${repo}[$extras]"
    # Without their dependencies: those are for GPUs, and what the CPU needs of them is the sglang-cpu extra.
    run_step "SGLang for the CPU (under a minute)" \
        "${pip[@]}" install "${pinned[@]}" --no-deps sglang xgrammar apache-tvm-ffi
    echo "$wanted" >"$venv/.megarl-run"
    [ "$kind" = run ] || echo "$wanted" >"$venv/.megarl-test"
    echo "Installed."
}
