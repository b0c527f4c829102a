#!/bin/sh
# What prolog, epilog and healthcheck have in common; they run it as root (docs/administrators.md):
#   hook.sh HOOK        clear the environment and run the second form below timeout(1)
#   hook.sh settings    print what hooks.conf is read as
#   hook.sh HOOK SINCE  look whom we are about to trust, start Python, and end in time even if Python does not
# Exit code: 0 go on; 1 the node shall not be used; where the hook itself does not work, as ON_ERROR says.

cd / || exit 0
umask 022
if [ ! -t 2 ] && [ "$1" != settings ]; then exec >/dev/null 2>&1; fi # whoever reads slurmd's pipe never waits for a blocked process
here=${0%/*} hook=$1 since=$2 child='' hurry=''
PYTHON='' PACKAGE='' CONFIG='' LOG='' SCONTROL='' SYSROOT='' ON_ERROR=pass
PROLOG_BUDGET=6 EPILOG_BUDGET=30 HEALTHCHECK_BUDGET=50 # seconds
conf=$SLURM_CONF

say() { # to the system's log, without waiting for it; where it does not listen, not for ever
    /usr/bin/timeout -s KILL 5 /usr/bin/logger -p daemon.err -t "nvrx-$hook" -- "$1" 2>/dev/null 9>&- &
    echo "nvrx-$hook: $1" >&2
}

give_up() {
    if [ "$ON_ERROR" = fail ] || found_sick; then exit 1; fi
    exit 0
}

found_sick() { # whether a hook, this one or another, has found this node sick since we came (nvrx_slurm/health/hooks/sick.py)
    sick=$SYSROOT/run/nvrx-health/sick-$SLURMD_NODENAME at=''
    if ! ours "${sick%/*}" || ! ours "$sick"; then return 1; fi
    read -r at <"$sick"
    case $at,$since in
    ,* | *[!0-9]*,* | *,*[!0-9.]* | *, | *.*.*) return 1 ;;
    esac
    [ "$at" -ge "${since%.*}${since#*.}" ]
}

ours() { [ -O "$1" ] && [ ! -L "$1" ]; }

broken() { # SENTENCE: this hook does not work
    say "$1"
    give_up
}

late() { # SIGALRM of timeout(1). A process blocked in the kernel is not waited for: init gets it.
    trap '' ALRM
    if [ -n "$child" ]; then kill -KILL "$child" 2>/dev/null; fi
    broken "not done after $budget s: Python does not start or is blocked; look at the file system of $PYTHON"
}

# Loading takes most of a hook's processor time, and ON_ERROR is for hooks that are late. So as many as there are
# processors do that at a time, and who gets no turn while there is time for it does not begin at all.
# Descriptor 9 is the turn, NVRX_TURN says that there is one; start.py or our end gives it back.
turn() { # whether we may go on
    NVRX_TURN='' turns=$SYSROOT/run/nvrx-health
    if [ ! -x /usr/bin/flock ] || ! count=$(/usr/bin/nproc); then return 0; fi
    if [ ! -e "$turns" ]; then /bin/mkdir -m 700 "$turns" 2>/dev/null; fi
    turns=$turns/turn.$(($$ % count))
    if ! ours "${turns%/*}" || [ -L "$turns" ] || ! true 9<>"$turns"; then return 0; fi # a full /run is no reason to end
    exec 9<>"$turns"
    whole=${budget%%.*}
    whole=${whole#"${whole%%[!0]*}"} # 08 would be octal
    tenths=$((${whole:-0} * 8)) # of the budget's seconds; the checks, and slurmctld, need time, too
    if [ "$tenths" = 0 ]; then tenths=1; fi
    /usr/bin/flock -w "$((tenths / 10)).$((tenths % 10))" 9
    case $? in
    0) NVRX_TURN=9 ;;
    1) return 1 ;;
    *) exec 9>&- ;; # it cannot do that here
    esac
}

# The rule of trust.py for root, for what runs before it: namei(1) shows each directory and link on the way; all must be root's,
# and only root's to write to, and none may lead into /proc, whose links go where users want.
untrusted() { # PATH...: prints the first one that is not, and why
    if ! listed=$(/usr/bin/namei -l -- "$@" 2>&1); then
        echo "$* cannot be looked at: ${listed##*"
"}" && return
    fi
    echo "$listed" | while read -r mode owner group name; do
        case $mode,$owner,$name in
        f:,/proc/* | l*'-> /proc/'* | l*'-> '*../proc/*) echo "$owner $name is not used: it leads into /proc" && return ;;
        f:,*) path="$owner${group:+ $group}${name:+ $name}" ;;
        l*,root,* | d????????[tT],root,*) ;; # a link has no mode of its own; sticky like /tmp
        ?????w*,*,* | ????????w*,*,*) echo "$path is not used: others than root could change $name ($mode)" && return ;;
        *,root,*) ;;
        *) echo "$path is not used: others than root could change $name (owner $owner)" && return ;;
        esac
    done
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
        *) if [ "$hook" = settings ]; then echo "?$name"; elif [ -n "$since" ]; then say "$here/hooks.conf: there is no setting called $name"; fi ;;
        esac
    done <"$here/hooks.conf"
fi
case $hook in
settings) # nvrx doctor asks what is read
    echo "PYTHON=$PYTHON
PACKAGE=$PACKAGE
CONFIG=$CONFIG
LOG=$LOG
SCONTROL=$SCONTROL
SLURM_CONF=$conf
SYSROOT=$SYSROOT
ON_ERROR=$ON_ERROR
PROLOG_BUDGET=$PROLOG_BUDGET
EPILOG_BUDGET=$EPILOG_BUDGET
HEALTHCHECK_BUDGET=$HEALTHCHECK_BUDGET"
    exit 0
    ;;
prolog) budget=$PROLOG_BUDGET hurry='/usr/bin/nice -n -10' ;; # a job waits, and others keep the processors busy
epilog) budget=$EPILOG_BUDGET ;;
*) budget=$HEALTHCHECK_BUDGET ;;
esac

case $budget in
*[!0-9.]* | *.*.* | ?????*.* | [!.][!.][!.][!.][!.]*) wrong=yes ;; # timeout(1) would end with 125, and Slurm drain the node
*[1-9]*) wrong='' ;; # 0 is no limit at all
*) wrong=yes ;;
esac
if [ -n "$wrong" ]; then
    broken "$here/hooks.conf: a budget of '$budget' is no number of seconds (> 0, < 10000); correct it"
fi

if [ -z "$since" ]; then
    read -r since _ </proc/uptime
    # CUDA_VISIBLE_DEVICES is left out: the checks are about the node, not about the job's part of it.
    exec /usr/bin/env -i LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF="$conf" \
        SLURMD_NODENAME="$SLURMD_NODENAME" SLURM_CLUSTER_NAME="$SLURM_CLUSTER_NAME" \
        SLURM_JOB_ID="$SLURM_JOB_ID" SLURM_JOB_UID="$SLURM_JOB_UID" SLURM_JOB_USER="$SLURM_JOB_USER" \
        SLURM_JOB_SLUID="$SLURM_JOB_SLUID" SLURM_JOB_GPUS="$SLURM_JOB_GPUS" SLURM_JOB_COMMENT="$SLURM_JOB_COMMENT" \
        SLURM_JOB_PARTITION="$SLURM_JOB_PARTITION" SLURM_JOB_CONSTRAINTS="$SLURM_JOB_CONSTRAINTS" \
        SLURM_JOB_RESTART_COUNT="$SLURM_JOB_RESTART_COUNT" SLURM_JOB_EXIT_CODE="$SLURM_JOB_EXIT_CODE" \
        SLURM_JOB_EXIT_CODE2="$SLURM_JOB_EXIT_CODE2" SLURM_JOB_DERIVED_EC="$SLURM_JOB_DERIVED_EC" \
        SLURM_SCRIPT_CONTEXT="$SLURM_SCRIPT_CONTEXT" \
        $hurry /usr/bin/timeout --preserve-status -s ALRM -k 2 "$budget" /bin/sh "$0" "$hook" "$since"
fi

trap late ALRM
if [ -z "$PYTHON" ]; then broken "$here/hooks.conf sets no PYTHON; give it the absolute path of nvrx_slurm's Python"; fi
export NVRX_PACKAGE="$PACKAGE" NVRX_CONFIG="$CONFIG" NVRX_LOG="$LOG" NVRX_SCONTROL="$SCONTROL" \
    NVRX_SYSROOT="$SYSROOT" NVRX_SINCE="$since" NVRX_BUDGET="$budget"
( # all that may block: while it is waited for, and only then, SIGALRM is heard at once
    if ! turn; then
        say "not its turn in time: other hooks keep this node's processors busy; this one does not look at the node"
        exit 12
    fi
    if [ "$hook" = prolog ] && found_sick; then
        say "another hook has found this node sick meanwhile"
        exit 10
    fi
    export NVRX_TURN
    case $(/usr/bin/id -u) in
    *[1-9]*) found='' ;; # not root: he runs what is his own
    *) found=$(untrusted "$0" "$here/hooks.conf" "$here/start.py" "$here/trust.py" "$PYTHON") ;;
    esac
    if [ -n "$found" ]; then say "$found"; exit 11; fi
    exec "$PYTHON" -I -S "$here/start.py" "$hook"
) </dev/null &
child=$!
wait "$child"
code=$?
case $code in
0) exit 0 ;;
10) exit 1 ;; # what no accident exits with
11) give_up ;;
12) if found_sick; then exit 1; else exit 0; fi ;; # the hook works
*) broken "$PYTHON ended with $code; run $here/$hook in a terminal to see why" ;;
esac
