# Sourced by scripts/demo, scripts/test and scripts/check: makes what a fresh machine lacks, says so, and is quick
# when there is nothing to do.
# shellcheck shell=bash
set -euo pipefail

repo=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$repo/.venv
# One that neither these scripts nor a developer has made is left alone, with its torch.
if [ -x "$venv/bin/python" ] && ! compgen -G "$venv/.nvrx-*" >/dev/null &&
    ! compgen -G "$venv/lib/python3*/site-packages/__editable__.nvrx_slurm*" >/dev/null; then
    venv=$repo/.venv-scripts
fi
cd "$repo"
# Tests and the demo start thousands of Pythons; each would compile all that it imports, torch too.
unset PYTHONDONTWRITEBYTECODE

say() { printf '== %s\n' "$*"; }

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# apt_install PACKAGE...: one at a time, and without starting the services of the packages.
apt_install() {
    local policy=/usr/sbin/policy-rc.d made= log
    log=$(mktemp)
    exec 9</var/lib/dpkg
    flock 9
    say "apt-get install $*"
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=$policy
    fi
    local rc=0
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@"; } \
        >"$log" 2>&1 9<&- || { rc=$?; tail -5 "$log" >&2; }
    rm -f "$log" ${made:+"$made"}
    exec 9<&-
    return "$rc"
}

# need_tools WHAT PROGRAM:PACKAGE...: installs the packages whose program is missing; returns 1 (and says why) where it cannot.
need_tools() {
    local what=$1 missing=() pair
    shift
    for pair in "$@"; do
        PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} = 0 ] && return 0
    can_apt && apt_install "${missing[@]}" && return 0
    say "$what: ${missing[*]} missing and cannot be installed: no root, no apt-get, or it failed"
    return 1
}

# need_slurm: Debian's Slurm.
need_slurm() {
    need_tools Slurm slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge numactl:numactl
}

# the_python: NVRX_PYTHON, else the distribution's Python, else the one in PATH. A distribution's is built with all
# optimisations, and pyenv's is not: the tests need a fifth more time with it.
the_python() {
    local one
    for one in ${NVRX_PYTHON:-/usr/bin/python3 python3}; do
        "$one" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$one" && return 0
    done
    return 1
}

# need_venv [EXTRAS]: .venv with this package in place and its EXTRAS ("test,dev").
need_venv() {
    local extras=${1:-} stamp wanted
    stamp=$venv/.nvrx-installed${extras:+-${extras//,/-}}
    wanted=$(cat setup.cfg scripts/constraints.txt | cksum)
    [ -x "$venv/bin/python" ] && [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
    if [ ! -x "$venv/bin/pip" ]; then
        the_python >/dev/null || { can_apt && apt_install python3-venv; }
        local python
        python=$(the_python) || { say "Python >= 3.10 with its venv module is needed; NVRX_PYTHON names one"; return 1; }
        say "making $venv of $("$python" --version)"
        "$python" -m venv "$venv"
        touch "$venv/.nvrx-made"
    fi
    say "pip install torch -e .${extras:+[$extras]} (once; 0.2 GB where PIP_INDEX_URL or PIP_FIND_LINKS have a torch for CPUs, else 5 GB)"
    # Python compiles what is imported; pip would compile all of torch, which takes longer than the download.
    "$venv/bin/pip" install -qq --disable-pip-version-check --no-compile -c scripts/constraints.txt \
        torch -e ".${extras:+[$extras]}"
    "$venv/bin/python" -W ignore -c 'import torch, torch._dynamo' # so that processes side by side need not each compile it
    printf '%s\n' "$wanted" >"$stamp"
}

# need_docs: mkdocs and what the manual pages import, in a virtual environment of its own; with npm also mermaid.
docs_venv=$repo/.venv-docs
mermaid=$docs_venv/package/dist/mermaid.min.js
need_docs() {
    [ -e "$docs_venv/ready" ] && return 0
    local python
    python=$(the_python) || return 1
    say "pip install mkdocs (in $docs_venv)"
    "$python" -m venv --clear "$docs_venv"
    "$docs_venv/bin/pip" install -qq --disable-pip-version-check 'mkdocs>=1.6,<2' click msgspec pyyaml || return 1
    if command -v npm >/dev/null; then
        say "npm pack mermaid"
        (cd "$docs_venv" && npm pack --silent mermaid@11 >/dev/null && tar -xzf mermaid-11*.tgz package/dist/mermaid.min.js) ||
            say "mermaid cannot be had"
    fi
    touch "$docs_venv/ready"
}
