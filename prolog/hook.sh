#!/bin/sh
# The common part of prolog, epilog and healthcheck. Slurm runs it as root (docs/how-to/install-slurm-hooks.md).
#   hook.sh HOOK        clears the environment and runs the last form under timeout(1)
#   hook.sh settings    prints the settings of hooks.conf, for nvrx doctor
#   hook.sh version     loads the hooks as HOOK does, and prints their version, for nvrx doctor
#   hook.sh HOOK SINCE  checks each file that root is about to execute, then starts Python
# Exit code: 0 go on; 1 Slurm must not use the node. ON_ERROR gives the code of a hook that does not work.

cd / || exit 0
umask 022

of_slurm() { # whether Slurm has started this, perhaps by a script of the site
    if [ -n "$SLURM_JOB_ID$SLURM_SCRIPT_CONTEXT$SLURMD_NODENAME" ]; then return 0; fi
    pid=$PPID
    while [ "$pid" -gt 1 ]; do
        parent=0
        while read -r key value _; do
            case $key,$value in Name:,slurm*) return 0 ;; PPid:,*) parent=$value && break ;; esac
        done <"/proc/$pid/status"
        pid=$parent
    done 2>/dev/null
    return 1
}

# slurmd waits for the end of its pipe, and a blocked process would hold it open. People see what happens, also by ssh.
case $1 in
settings | version) ;;
*) if [ ! -t 2 ] && of_slurm; then exec >/dev/null 2>&1; fi ;;
esac
here=${0%/*} hook=$1 since=$2 child=''
PYTHON='' PACKAGE='' CONFIG='' LOG='' SCONTROL='' SYSROOT='' ON_ERROR=pass
PROLOG_BUDGET=6 EPILOG_BUDGET=30 HEALTHCHECK_BUDGET=50 # seconds
conf=$SLURM_CONF

say() { # TEXT: to the system log, without waiting for it
    [ "$hook" = version ] || /usr/bin/timeout -s KILL 5 /usr/bin/logger -p daemon.err -t "nvrx-$hook" -- "$1" 2>/dev/null &
    echo "nvrx-$hook: $1" >&2
}

leave() { # CODE
    [ "$hook" = version ] || echo "nvrx-$hook: Slurm gets exit code $1" >&2
    exit "$1"
}

give_up() {
    case $ON_ERROR,$hook in fail,* | *,version) leave 1 ;; esac
    leave 0
}

broken() { # TEXT: this hook does not work
    say "$1"
    give_up
}

late() { # SIGALRM from timeout(1). A process that is blocked in the kernel is left to init.
    trap '' ALRM
    if [ -n "$child" ]; then kill -KILL "$child" 2>/dev/null; fi
    broken "not done after $budget s: Python does not start or is blocked; check the file system of $PYTHON"
}

# The rule of system/trust.py for root, applied to what runs before it can: each directory and link on the way belongs to
# root, only root can write to it, and none leads into /proc, where users decide what a link means.
untrusted() { # PATH...: prints why the first bad one is refused
    if ! listed=$(/usr/bin/namei -l -- "$@" 2>&1); then
        for path in "$@"; do
            if [ ! -e "$path" ]; then echo "$path cannot be used: there is no such file" && return; fi
        done
        echo "$* cannot be checked: $listed" && return
    fi
    echo "$listed" | while read -r mode owner group name; do
        case $mode,$owner,$name in
        f:,/proc/* | l*'-> /proc/'* | l*'-> '*../proc/*) echo "$owner $name is not trusted: it leads into /proc" && return ;;
        f:,*) path="$owner${group:+ $group}${name:+ $name}" ;;
        l*,root,* | d????????[tT],root,*) ;; # links have no mode; a sticky directory is like /tmp
        ?????w*,*,* | ????????w*,*,*) echo "$path is not trusted: others than root can change $name ($mode)" && return ;;
        *,root,*) ;;
        *) echo "$path is not trusted: others than root can change $name (owner $owner)" && return ;;
        esac
    done
}

# Python loads its standard library before it runs a line of ours: from above `home` of pyvenv.cfg, from above its own
# file, or from where it was compiled for. PYTHONHOME names the one that is checked.
find_library() { # sets prefix, the folder above the one with the standard library; "" if there is none
    home=$(/usr/bin/readlink -f -- "$PYTHON") home=${home%/*}
    cfg=${PYTHON%/*/*}/pyvenv.cfg
    if [ ! -r "$cfg" ]; then cfg=${PYTHON%/*}/pyvenv.cfg; fi
    if [ -r "$cfg" ]; then
        while IFS='= 	' read -r name value || [ -n "$name" ]; do
            case $name in [Hh][Oo][Mm][Ee]) home=${value%[[:cntrl:]]} && break ;; esac
        done <"$cfg"
    fi
    prefix=$home
    while [ -n "$prefix" ]; do
        prefix=${prefix%/*}
        for library in "$prefix"/lib*/python3*/os.py; do
            if [ -e "$library" ]; then prefix=${prefix:-/} && return; fi
        done
    done
}

unfit() { # prints why Python may not be started: all that it loads before trust.py must be root's alone
    trust=$PACKAGE
    if [ ! -f "$PACKAGE" ]; then trust=$PACKAGE/nvrx_slurm/system/trust.py; fi # else a bundle
    set -- "$0" "$here/hooks.conf" "$here/start.py" "$PYTHON" "$home" "$trust"
    for path in "$prefix"/lib*/python3*/encodings/__init__.py "$prefix"/lib*/python3*/lib-dynload "$prefix"/lib*/python3*.zip \
        "$prefix"/lib*/libpython3*; do
        if [ -e "$path" ]; then set -- "$@" "$path"; fi
    done
    found=$(untrusted "$@")
    if [ -n "$found" ]; then echo "$found" && return; fi
    set --
    for path in "$prefix"/lib*/python3*/os.py; do
        for folder in "${path%/*}" "${path%/*}/encodings" "${path%/*}/lib-dynload"; do
            if [ -e "$folder" ]; then set -- "$@" "$folder"; fi
            if [ -e "$folder/__pycache__" ]; then set -- "$@" "$folder/__pycache__"; fi
        done
    done
    found=$(/usr/bin/find "$@" -maxdepth 1 \( ! -uid 0 -o ! -type l -perm /022 \) -print -quit 2>&1)
    if [ -n "$found" ]; then echo "the standard library is not trusted: others than root can change $found"; fi
}

if [ -r "$here/hooks.conf" ]; then
    while IFS='=' read -r name value || [ -n "$name" ]; do # the last line may lack its end
        name=${name%[[:cntrl:]]} value=${value%[[:cntrl:]]} # lines of Windows end with CR LF
        value=${value#[\"\']}
        value=${value%[\"\']}
        case $name in
        PYTHON | PACKAGE | CONFIG | LOG | SCONTROL | SYSROOT | ON_ERROR) eval "$name=\$value" ;;
        PROLOG_BUDGET | EPILOG_BUDGET | HEALTHCHECK_BUDGET) eval "$name=\$value" ;;
        SLURM_CONF) conf=${conf:-$value} ;; # Slurm sets it, but not for the HealthCheckProgram
        '' | \#*) ;;
        *) if [ "$hook" = settings ]; then echo "?$name"; elif [ -n "$since" ]; then say "$here/hooks.conf: unknown setting $name"; fi ;;
        esac
    done <"$here/hooks.conf"
fi
case $hook in
settings)
    for name in PYTHON PACKAGE CONFIG LOG SCONTROL SYSROOT ON_ERROR PROLOG_BUDGET EPILOG_BUDGET HEALTHCHECK_BUDGET; do
        eval "echo $name=\"\$$name\""
    done
    echo "SLURM_CONF=$conf"
    exit 0
    ;;
prolog) budget=$PROLOG_BUDGET ;;
epilog) budget=$EPILOG_BUDGET ;;
*) budget=$HEALTHCHECK_BUDGET ;;
esac

case $budget in
*[!0-9.]* | *.*.* | ?????*.* | [!.][!.][!.][!.][!.]*) wrong=yes ;; # timeout(1) would end with 125, and Slurm drain the node
*[1-9]*) wrong='' ;; # timeout(1) takes 0 as no limit
*) wrong=yes ;;
esac
if [ -n "$wrong" ]; then broken "$here/hooks.conf: the budget '$budget' is not a number of seconds (> 0, < 10000); correct it"; fi

if [ -z "$since" ]; then
    read -r since _ </proc/uptime
    # Without CUDA_VISIBLE_DEVICES: the checks are about the node, not about the job's part of it.
    exec /usr/bin/env -i LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF="$conf" \
        SLURMD_NODENAME="$SLURMD_NODENAME" SLURM_CLUSTER_NAME="$SLURM_CLUSTER_NAME" \
        SLURM_JOB_ID="$SLURM_JOB_ID" SLURM_JOB_UID="$SLURM_JOB_UID" SLURM_JOB_USER="$SLURM_JOB_USER" \
        SLURM_JOB_SLUID="$SLURM_JOB_SLUID" SLURM_JOB_GPUS="$SLURM_JOB_GPUS" SLURM_JOB_COMMENT="$SLURM_JOB_COMMENT" \
        SLURM_JOB_PARTITION="$SLURM_JOB_PARTITION" SLURM_JOB_CONSTRAINTS="$SLURM_JOB_CONSTRAINTS" \
        SLURM_JOB_RESTART_COUNT="$SLURM_JOB_RESTART_COUNT" SLURM_JOB_EXIT_CODE="$SLURM_JOB_EXIT_CODE" \
        SLURM_JOB_EXIT_CODE2="$SLURM_JOB_EXIT_CODE2" SLURM_JOB_DERIVED_EC="$SLURM_JOB_DERIVED_EC" \
        SLURM_SCRIPT_CONTEXT="$SLURM_SCRIPT_CONTEXT" \
        /usr/bin/timeout --preserve-status -s ALRM -k 2 "$budget" /bin/sh "$0" "$hook" "$since"
fi

trap late ALRM
case $PYTHON in
*//* | */./* | */../*) broken "$here/hooks.conf: PYTHON=$PYTHON must not contain //, /./ or /../" ;;
/*) ;;
*) broken "$here/hooks.conf: PYTHON=$PYTHON is not an absolute path; give it the path of nvrx_slurm's Python" ;;
esac
( # all that may block runs here, because sh handles SIGALRM at once only while it waits
    if [ -z "$PACKAGE" ]; then
        for PACKAGE in "${PYTHON%/*/*}"/lib*/python3*/*-packages /usr/local/lib/python3*/dist-packages /usr/lib/python3/dist-packages; do
            if [ -e "$PACKAGE/nvrx_slurm/system/trust.py" ]; then break; fi
        done
    fi
    find_library
    case $(/usr/bin/id -u),$prefix in
    *,) why="there is no standard library (lib/python3*/os.py) above PYTHON=$PYTHON" ;;
    *[1-9]*,*) why='' ;; # not root: it runs what is its own
    *) why=$(unfit) ;;
    esac
    if [ -n "$why" ]; then say "$why" && exit 11; fi
    export PYTHONHOME="$prefix" PYTHONSAFEPATH=1 NVRX_PACKAGE="$PACKAGE" NVRX_CONFIG="$CONFIG" NVRX_LOG="$LOG" \
        NVRX_SCONTROL="$SCONTROL" NVRX_SYSROOT="$SYSROOT" NVRX_SINCE="$since" NVRX_BUDGET="$budget"
    exec "$PYTHON" -s -S "$here/start.py" "$hook"
) </dev/null &
child=$!
wait "$child"
code=$?
case $code in
0) leave 0 ;;
10) leave 1 ;; # start.py alone exits with 10
11) give_up ;;
*) broken "$PYTHON ended with $code; run $here/$hook in a terminal to see why" ;;
esac
