#!/bin/sh
# packages.sh build|test|wheel: installs missing Debian packages; prints nothing if none is missing.
#   build   packages to build and run; Python and certificates are for fetch_model.sh
#   test    those, and packages for the tests
#   wheel   those of build, and what client/python/build_wheel.sh needs
set -eu

build="gcc libc6-dev cmake ninja-build pkg-config libucx-dev libgrpc-dev libprotobuf-c-dev
    protobuf-c-compiler libssl-dev libmicrohttpd-dev libpcre2-dev libjansson-dev
    libzmq3-dev libmsgpack-dev librocksdb-dev
    python3 ca-certificates"
tests="libcmocka-dev clang clang-format curl libclang-rt-dev python3-venv
    python3-numpy"
wheel="binutils patchelf"

case ${1:-} in
build) wanted=$build ;;
test) wanted="$build $tests" ;;
wheel) wanted="$build $wheel" ;;
*)
    echo "usage: packages.sh build|test|wheel" >&2
    exit 2
    ;;
esac

# On other systems the names differ; cmake reports what it does not find.
command -v dpkg-query >/dev/null 2>&1 || {
    echo "packages: not a Debian system: install the equivalents of:" $wanted >&2
    exit 0
}

# shellcheck disable=SC2086 # the lists are to be split
have=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $wanted 2>/dev/null |
    sed -n 's/^installed //p' | tr '\n' ' ')
missing=
for package in $wanted; do
    case " $have" in
    *" $package "*) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

root=
if [ "$(id -u)" -ne 0 ]; then
    root=sudo
    command -v sudo >/dev/null 2>&1 || {
        echo "packages: requires root or sudo; as root, run: apt-get install$missing" >&2
        exit 1
    }
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run_apt() {
    $root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get "$@" >"$log" 2>&1
}
failed() {
    tail -n 15 "$log" >&2
    echo "packages: $1" >&2
    exit 1
}

echo "installing$missing"
# Package lists are fetched only if a package is not in them, or if they are out of date.
if ! apt-cache show $missing >/dev/null 2>&1 ||
    ! run_apt install -y --no-install-recommends $missing; then
    run_apt update || failed "apt-get update failed: check the network"
    # apt-get update succeeds even if it cannot reach a mirror.
    run_apt install -y --no-install-recommends $missing ||
        failed "apt-get install failed (see above), packages:$missing"
fi
