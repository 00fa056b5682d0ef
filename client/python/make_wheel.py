#!/usr/bin/env python3
"""make_wheel.py BUILD OUT: packs the wheel from a build folder; prints its path.

Shared libraries that are carried get a name of their own, libucp-topkv.so.0 for libucp.so.0: a process
may have loaded another version under the old name, and the dynamic linker would take that one.  UCX looks for its
modules in the folder ucx beside libucs, and then where Debian has them; those would bring
Debian's libucs along, so the second place is overwritten in the library.  Its modules for RDMA are left
out: they need drivers and libraries of the system, and the store uses tcp and shared memory.
"""
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TAG = "py3-none-manylinux_2_36_x86_64"
PYTHON = ">=3.8"
MODULES = ["libuct_cma.so.0"]

# Those that PEP 600 leaves to the system, of those that anything here uses.
SYSTEM = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libpthread|libdl|librt|libresolv|libgcc_s|"
                    r"libstdc\+\+)\.so\.\d+$")


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def needed_by(file):
    """Paths by soname of all shared libraries that a program needs, directly or not."""
    found = {}
    for line in run("ldd", file).splitlines():
        parts = re.match(r"\s*(\S+) => (\S+)", line)
        if parts and parts[2] == "not":
            sys.exit(f"make_wheel: {file}: {parts[1]}: not found")
        if parts and not SYSTEM.search(parts[1]):
            found[parts[1]] = pathlib.Path(parts[2]).resolve()
    return found


def own_name(soname):
    stem, dot, rest = soname.partition(".so")
    return f"{stem}-topkv{dot}{rest}"


def package_of(path):
    """The Debian package that a file is of, and its version."""
    for name in (path, pathlib.Path("/", *path.parts[2:])):  # /usr/lib may have been installed as /lib
        found = subprocess.run(["dpkg", "-S", str(name)], capture_output=True, text=True)
        if found.returncode == 0:
            package = found.stdout.split(": ")[0].split(",")[0]
            return package.split(":")[0], run("dpkg-query", "-W", "-f", "${Version}", package)
    sys.exit(f"make_wheel: {path}: of no package: whose licence is it under?")


def place(source, to, rpath, libraries):
    """Copies a program or library, without symbols, and has it find the carried libraries."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    to.chmod(0o755)
    run("strip", "--strip-unneeded", to)
    own = run("readelf", "-d", to)
    renames = []
    for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", own):
        if soname in libraries:
            renames += ["--replace-needed", soname, own_name(soname)]
    if renames:
        run("patchelf", *renames, to)
    run("patchelf", "--set-rpath", rpath, to)  # in one call, 0.14 takes the one's words for the other's


def forget_modules(library, folder):
    """Has libucs look for modules beside itself only."""
    old = str(folder).encode() + b"\0"
    content = library.read_bytes()
    if content.count(old) != 1:
        sys.exit(f"make_wheel: {library.name}: {folder} is in it {content.count(old)} times, not once")
    library.write_bytes(content.replace(old, b"/dev/null/ucx".ljust(len(old), b"\0")))


def version():
    text = (HERE / "topkv/_version.py").read_text()
    return re.search(r'__version__ = "(.*)"', text)[1]


def metadata():
    return (f"Metadata-Version: 2.1\nName: topkv\nVersion: {version()}\n"
            "Summary: Client of TopKV, a store of KV caches for LLM serving, and its storage node\n"
            f"Requires-Python: {PYTHON}\nProvides-Extra: numpy\n"
            'Requires-Dist: numpy>=1.21; extra == "numpy"\n'
            "Description-Content-Type: text/markdown\n\n" + (HERE / "README.md").read_text())


def fill(folder, build):
    package = folder / "topkv"
    info = folder / f"topkv-{version()}.dist-info"
    for source in sorted((HERE / "topkv").glob("*.py")) + [HERE / "topkv/py.typed"]:
        package.mkdir(exist_ok=True)
        shutil.copyfile(source, package / source.name)

    library = build / "client/libkvclient.so.0"
    programs = [build / "kvserver/kvserver", build / "client/kvctl/kvctl"]
    libraries = {}
    for file in [library, *programs]:
        libraries.update(needed_by(file))
    libraries.pop("libkvclient.so.0", None)
    ucx = next(path for name, path in libraries.items() if name.startswith("libucs.")).parent / "ucx"
    modules = [(ucx / name).resolve() for name in MODULES]
    for module in modules:
        libraries.update(needed_by(module))

    place(library, package / "lib/libkvclient.so.0", "$ORIGIN", libraries)
    for program in programs:
        place(program, package / "bin" / program.name, "$ORIGIN/../lib", libraries)
    for name, module in zip(MODULES, modules):
        place(module, package / "lib/ucx" / name, "$ORIGIN/..", libraries)
    for soname, path in libraries.items():
        to = package / "lib" / own_name(soname)
        place(path, to, "$ORIGIN", libraries)
        run("patchelf", "--set-soname", own_name(soname), to)
        if soname.startswith("libucs."):
            forget_modules(to, ucx)

    licences = info / "licenses"
    licences.mkdir(parents=True)
    lines = []
    for soname, path in sorted([*libraries.items(), *zip(MODULES, modules)]):
        name, of_version = package_of(path)
        lines.append(f"{soname}\t{name} {of_version}\t{name}.copyright\n")
        shutil.copyfile(f"/usr/share/doc/{name}/copyright", licences / f"{name}.copyright")
    (licences / "CARRIED.txt").write_text(
        "Shared libraries of Debian that this wheel carries, renamed and stripped: file, package and version,\n"
        "and the file here with its licence.\n\n" + "".join(lines))

    (info / "METADATA").write_text(metadata())
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: make_wheel.py\nRoot-Is-Purelib: false\nTag: {TAG}\n")
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nkvctl = topkv._programs:kvctl\nkvserver = topkv._programs:kvserver\n")
    return info


def pack(folder, info, to):
    """The same files give the same bytes."""
    record = []
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            name = path.relative_to(folder).as_posix()
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if os.access(path, os.X_OK) else 0o100644) << 16
            content = path.read_bytes()
            archive.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}\n")
        name = f"{info.name}/RECORD"
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = 0o100644 << 16
        archive.writestr(entry, "".join(record) + f"{name},,\n")


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: make_wheel.py BUILD OUT")
    build, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        info = fill(folder, build)
        to = out / f"topkv-{version()}-{TAG}.whl"
        pack(folder, info, to)
    print(to)


if __name__ == "__main__":
    main()
