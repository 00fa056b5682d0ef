#!/bin/sh
# bench.sh [--venv DIR] [--newest] [--build DIR] [--quick] [--json FILE] [--workers N]: the plugin beside others.
# LMCache's own bench of second levels, in one process and interleaved round by round: the plugin over shared
# memory and tcp, redis (Debian's redis-server) over loopback, LMCache's fs_native in /dev/shm, and its mock,
# which stores nothing anywhere but in its own process. Everything loaded is compared with what was stored.
#   --venv, --newest, --build   as for check.sh
#   --quick       fewer rounds
#   --json FILE   the results as JSON, too
#   --workers N   threads of the plugin, of redis' and of fs_native's client; default: the plugin's default,
#                 and 2 for the others
# Takes about a minute once everything is installed, 4 GB of memory. Exit status 1 if
# anything was lost or altered; the figures are not judged: run it on a machine without other work.
set -eu
. "$(dirname "$0")/common.sh"
command -v redis-server >/dev/null || fail "redis-server: not installed: apt-get install redis-server"
exec "$venv/bin/python" "$top/tests/lmcache/bench.py" "--quick=$quick" "--json=$json" "--workers=$workers"
