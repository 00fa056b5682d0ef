#!/bin/sh
# test_help.sh PROGRAM...: what --help of each program, script and kvworker command prints: it fits 80
# columns, calls no value TEXT that is a number, a file or a list, and says what a SIZE is.
set -eu
bad=0

wrong() {
    bad=$((bad + 1))
    echo "FAILED: $*"
}

# check PROGRAM [COMMAND]
check() {
    what=$(basename "$1")${2:+ $2}
    text=$(case $1 in *.sh) sh "$@" --help ;; *) "$@" --help ;; esac) || wrong "$what --help: exit status $?"
    case $what in
    *.sh) echo "$text" | grep -q "^$what " || wrong "$what --help: no usage" ;;
    *) echo "$text" | grep -q '^Usage: ' || wrong "$what --help: no usage" ;;
    esac
    wide=$(echo "$text" | awk 'length > 80')
    [ -z "$wide" ] || wrong "$what --help: wider than 80 columns: $wide"
    labels=$(echo "$text" | grep -E '^  --[a-z-]+ TEXT' | grep -v '^  --prompt ') || true
    [ -z "$labels" ] || wrong "$what --help: any text: $labels"
    sizes=$(echo "$text" | grep -Ec '^  --[a-z-]+ SIZE') || true
    told=$(echo "$text" | grep -c '^SIZE: ') || true
    [ "$told" -eq "$((sizes > 0))" ] || wrong "$what --help: says $told times what a SIZE is"
}

for program; do
    check "$program"
    case $(basename "$program") in
    kvworker)
        commands=$("$program" --help | sed -n 's/^  \([a-z]*\) .*/\1/p')
        [ -n "$commands" ] || wrong "kvworker --help: no commands"
        for command in $commands; do
            check "$program" "$command"
        done
        ;;
    esac
done
[ "$bad" -eq 0 ]
