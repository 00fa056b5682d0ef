#!/bin/sh
# What TopKV and Mooncake still have after a restart and after a killed process, from one script.
#
#   restart_peers.sh BUILD PYTHON [OPTION...]   BUILD: folder of a build, with kvserver and kvctl;
#                                               PYTHON: what install_mooncake.sh printed; OPTION:
#                                               restart_peers.py's, such as --objects or --wait
#
# For each event: puts new objects, whose bytes follow from their names, waits, stops or kills,
# starts again, reads all of them.
# Prints the settings of each store and a table.  Every process and file that it makes is gone when
# it ends.  TMPDIR=... in the environment takes another folder for the disks; about 1 GiB is
# written for each store.
set -eu

case "${1:-}" in
'' | -*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"
    case "${1:-}" in -h | --help) exit 0 ;; *) exit 2 ;; esac
    ;;
esac

fail()
{
    echo "restart_peers: $*" >&2
    exit 2
}

[ $# -ge 2 ] || fail "PYTHON is missing: give what install_mooncake.sh printed"
[ -d "$1" ] || fail "$1: no such folder"
source=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
python=$2
shift 2
for program in kvserver/kvserver client/kvctl/kvctl; do
    [ -x "$build/$program" ] || fail "$build/$program: no such program: build TopKV first"
done
command -v "$python" >/dev/null || fail "$python: no such program"
"$python" -c 'import mooncake.store' 2>/dev/null ||
    fail "$python: cannot import mooncake.store: run install_mooncake.sh"

folder=$(mktemp -d "${TMPDIR:-/tmp}/restart_peers.XXXXXX")
helper=
clean_up()
{
    trap '' HUP INT TERM
    # Its children end with it, also if it is killed.
    [ -z "$helper" ] || kill "$helper" 2>/dev/null || :
    [ -z "$helper" ] || wait "$helper" 2>/dev/null || :
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

"$python" "$source/restart_peers.py" --build "$build" --folder "$folder" "$@" &
helper=$!
status=0
wait "$helper" || status=$?
helper=
exit "$status"
