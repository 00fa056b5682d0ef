#!/bin/sh
# check.sh [--venv DIR] [--newest] [--build DIR] [--quick] [--only WORD]: LMCache's own checks over the plugin and real nodes.
#   --venv DIR    the virtual environment; default .cache/lmcache-0.5.6. LMCache is installed there if it is
#                 missing: 6.2 GB from the Python index, and nothing else
#   --newest      the newest LMCache of the index, to learn before users do that its interface has changed
#   --build DIR   a build of this repository; default: what is needed is built in build-lmcache
#   --quick       less data
#   --only WORD   the checks whose names have the word: shm, tcp, bench, killed, stopped, ...
# Takes about three minutes once everything is installed. Prints a line for each check; exit status 1 if one fails.
set -eu
. "$(dirname "$0")/common.sh"
echo "checks topkv.lmcache under LMCache $(has lmcache) in $venv"
exec "$venv/bin/python" "$top/tests/lmcache/checks.py" "--quick=$quick" "--only=$only"
