# measure.sh - what the scripts MEASURE BUILD [FOLDER] [OPTION]... of this folder begin with, after
# `set -eu`: prints the script's head where there is no BUILD; else sets source, build, folder (made if
# missing, BUILD/compare by default) and model, and leaves the options in $@.
case "${1:-}" in
'' | -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
source=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
shift
folder=$build/compare
case "${1:-}" in
'' | -*) ;;
*)
    folder=$1
    shift
    ;;
esac
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
model=$(sh "$source/../../deploy/fetch_model.sh")
