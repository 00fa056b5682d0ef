#!/bin/sh
# test_install.sh CMAKE BUILD SOURCE CC FLAGS KVSERVER: installs into a folder, moves it, compiles
# the examples and the READMEs' programs against it by pkg-config and by CMake, as C11 and as C++, and
# runs them.
set -eu
cmake=$1
build=$2
source=$3
cc=$4
flags=$5
kvserver=$6
work=$(mktemp -d)
server=

finish() {
    [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

"$cmake" --install "$build" --prefix "$work/first" >"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
}
mv "$work/first" "$work/prefix"
prefix=$work/prefix
[ "$(find "$prefix/include" -type f)" = "$prefix/include/kvclient.h" ] || {
    echo "not one header:" "$prefix"/include/*
    exit 1
}

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name topkv.pc)")
LD_LIBRARY_PATH=$(dirname "$(find "$prefix" -name libkvclient.so)")
export PKG_CONFIG_PATH LD_LIBRARY_PATH
for name in put_get session; do
    # shellcheck disable=SC2046,SC2086 # lists of words
    "$cc" -std=c11 -pedantic -Wall -Wextra -Werror $flags "$source/client/examples/$name.c" \
        $(pkg-config --cflags --libs topkv) -o "$work/$name"
done

# readmes ADDRESS: compiles the READMEs' programs, for a node there
readmes() {
    for readme in README client/README; do
        program=$work/$(echo "$readme" | tr / _)
        sed -n '/^```c$/,/^```$/{ /^```/!p; }' "$source/$readme.md" |
            sed "s/127\.0\.0\.1:7400/$1/" >"$program.c"
        # shellcheck disable=SC2046,SC2086
        "$cc" -std=c11 -pedantic -Wall -Wextra -Werror $flags "$program.c" \
            $(pkg-config --cflags --libs topkv) -o "$program"
    done
}

# Who unpacks the static library gets every member.
twice=$(ar t "$LD_LIBRARY_PATH/libkvclient.a" | sort | uniq -d)
[ -z "$twice" ] || {
    echo "libkvclient.a: two members of one name:" $twice
    exit 1
}

# The static library needs nothing of this project's beside it.
# shellcheck disable=SC2046,SC2086
"$cc" -std=c11 $flags "$source/client/examples/put_get.c" \
    $(pkg-config --cflags topkv) "$LD_LIBRARY_PATH/libkvclient.a" \
    $(pkg-config --static --libs-only-l topkv | sed 's/-lkvclient//') -o "$work/put_get_static"
if ldd "$work/put_get_static" | grep -q kvclient; then
    echo "the static program needs the shared library"
    exit 1
fi

# c++ may be of another house than cc: their sanitizers do not go together.
if [ -z "$flags" ] && command -v c++ >/dev/null 2>&1; then
    printf '#include <kvclient.h>\nint main() { return kv_client_version()[0] == 0; }\n' \
        >"$work/use.cc"
    # shellcheck disable=SC2046,SC2086
    c++ -std=c++11 -pedantic -Wall -Wextra -Werror $flags "$work/use.cc" \
        $(pkg-config --cflags --libs topkv) -o "$work/use"
    "$work/use"
fi

mkdir "$work/project"
cp "$source/client/examples/put_get.c" "$work/project"
cat >"$work/project/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(use C)
find_package(topkv 0.1 REQUIRED)
add_executable(use put_get.c)
target_link_libraries(use topkv::kvclient)
END
"$cmake" -G Ninja -S "$work/project" -B "$work/project/build" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_C_FLAGS="$flags" >"$work/log" 2>&1 &&
    "$cmake" --build "$work/project/build" >>"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
}

[ -n "$kvserver" ] || {
    readmes 127.0.0.1:7400
    echo "compiled; this build has no kvserver to run against"
    exit 0
}
"$prefix/bin/kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --threads 1 --memory 128M \
    --dir "$work/node" >"$work/ready" 2>"$work/log" &
server=$!
tries=0
until grep -qs '^ready ' "$work/ready"; do
    tries=$((tries + 1))
    [ "$tries" -lt 600 ] && kill -0 "$server" 2>/dev/null || {
        cat "$work/log"
        echo "kvserver did not become ready"
        exit 1
    }
    sleep 0.1
done
address=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/ready")
"$work/put_get" "$address"
"$work/put_get_static" "$address"
"$work/session" "$address"
"$work/project/build/use" "$address"
readmes "$address"
"$work/README" | grep -x stored
"$work/client_README"
"$prefix/bin/kvctl" --server "$address" status
kill "$server"
wait "$server"
server=
