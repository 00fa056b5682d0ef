#!/usr/bin/env python3
"""check_wheel.py WHEEL: is the wheel what its name says?  Prints its size.

    symbols     no program or library needs a symbol above the floor: glibc 2.36, which is the tag's, and
                GCC 12's libstdc++ (FLOOR)
    libraries   every shared library is in the wheel, or one that PEP 600 leaves to the system, and
                is found there from where the wheel was unpacked; UCX has no module elsewhere
    licences    every library that is carried is listed, and the licence named there is in the wheel
    record      RECORD lists every file, with its digest
    source      no code is compiled for this machine's processor only: no -march=native in the sources

Exit status: 1 if something is wrong, 2 if the call is.
"""
import base64
import csv
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

FLOOR = {"GLIBC": (2, 36), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}
SYSTEM = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libpthread|libdl|librt|libresolv|libgcc_s|"
                    r"libstdc\+\+)\.so\.\d+$")
ROOT = pathlib.Path(__file__).resolve().parents[2]
errors = []


def wrong(text):
    errors.append(text)
    print(f"check_wheel: {text}", file=sys.stderr)


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def check_symbols(name, file, highest):
    for label, digits in re.findall(r"\((GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\)", run("objdump", "-T", file)):
        number = tuple(int(digit) for digit in digits.split("."))
        highest[label] = max(highest.get(label, ()), number)
        if number > FLOOR[label]:
            wrong(f"{name}: needs {label}_{digits}")
    if re.search(r"\(GLIBC_PRIVATE\)", run("objdump", "-T", file)):
        wrong(f"{name}: needs GLIBC_PRIVATE")


def check_libraries(name, file, folder):
    out = subprocess.run(["env", "-i", "ldd", str(file)], capture_output=True, text=True).stdout
    for soname, where in re.findall(r"^\s*(\S+) => (\S+)", out, re.MULTILINE):
        if where == "not":
            wrong(f"{name}: {soname}: not found")
        elif not SYSTEM.search(soname) and folder not in pathlib.Path(where).resolve().parents:
            wrong(f"{name}: {soname}: is the system's: {where}")


def check_ucx(folder):
    for library in folder.glob("topkv/lib/libucs*"):
        if re.search(rb"/usr/\S*/ucx\0", library.read_bytes()):
            wrong(f"{library.name}: looks for modules in the system's folder")


def check_licences(folder, libraries):
    carried = next(folder.glob("*.dist-info")) / "licenses"
    lines = [line.split("\t") for line in (carried / "CARRIED.txt").read_text().splitlines() if "\t" in line]
    for _, _, licence in lines:
        if not (carried / licence).is_file():
            wrong(f"licenses: {licence}: missing")
    listed = {soname for soname, _, _ in lines}
    for library in libraries:
        if library.name.replace("-topkv", "") not in listed and library.name != "libkvclient.so.0":
            wrong(f"licenses: {library.name}: not listed")


def check_record(folder):
    record = next(folder.glob("*.dist-info/RECORD"))
    listed = {}
    for name, digest, _ in csv.reader(record.read_text().splitlines()):
        listed[name] = digest
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path == record:
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        if listed.get(name) != f"sha256={digest}":
            wrong(f"RECORD: {name}")


def main():
    if len(sys.argv) != 2:
        print("usage: check_wheel.py WHEEL", file=sys.stderr)
        sys.exit(2)
    wheel = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            for entry in archive.infolist():
                (folder / entry.filename).chmod(entry.external_attr >> 16 & 0o777)
        files = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
        highest = {}
        for file in files:
            name = file.relative_to(folder).as_posix()
            check_symbols(name, file, highest)
            check_libraries(name, file, folder)
        if not files:
            wrong("no program in it")
        check_licences(folder, [file for file in files if "/lib/" in file.as_posix()])
        check_record(folder)
        check_ucx(folder)
        unpacked = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for path in [ROOT / "CMakeLists.txt", *ROOT.glob("*/**/CMakeLists.txt")]:
        if "build" not in path.relative_to(ROOT).parts[0] and "march=native" in path.read_text():
            wrong(f"{path.relative_to(ROOT)}: -march=native")
    text = ", ".join(f"{label}_{'.'.join(map(str, number))}" for label, number in sorted(highest.items()))
    print(f"check_wheel: {wheel.stat().st_size / 1e6:.1f} MB, {unpacked / 1e6:.1f} MB unpacked, "
          f"{len(files)} programs and libraries; needs {text}; {len(errors)} errors", file=sys.stderr)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
