#!/bin/sh
# Installs Mooncake, the store that kv_bench compares objects with, for kv_bench --mooncake.
#
#   install_mooncake.sh [FOLDER]     FOLDER: of the virtual environment, default build/mooncake
#
# Prints the path of the Python to name.  VERSION=... in the environment takes another version.
set -eu

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
folder=${1:-$(dirname "$0")/../../build/mooncake}
version=${VERSION:-0.3.13.post1}

python3 -m venv "$folder"
"$folder/bin/pip" --quiet --disable-pip-version-check install \
    "mooncake-transfer-engine-non-cuda==$version" >&2
"$folder/bin/python" -c 'import mooncake.store'
echo "$(cd "$folder" && pwd)/bin/python"
