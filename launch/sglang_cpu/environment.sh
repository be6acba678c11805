#!/usr/bin/env bash
# Build, once, the virtual environment in which real SGLang runs on a machine without a GPU, and print its path.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<'TEXT'
usage: launch/sglang_cpu/environment.sh [--path]

Prints the environment's path as its only line on standard output; building it goes to standard error. It lies under
${XDG_CACHE_HOME:-$HOME/.cache}/shell-router, named by a hash of pins.txt, takes about 11 GB and 4 minutes to build,
and is built only once.

--path    print where it is or would be, and build nothing
PYTHON    the interpreter to build it with (default python3.11, else python3)
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
key="$(sha256sum "$here/pins.txt" | cut -c1-12)"
venv="${XDG_CACHE_HOME:-$HOME/.cache}/shell-router/sglang-$key"
[[ "${1:-}" == "--path" ]] && { echo "$venv"; exit 0; }
[[ $# -eq 0 ]] || { usage >&2; exit 2; }

# Libraries that Mooncake's wheel loads; SGLang imports it at its start.
libraries=(libibverbs1 librdmacm1 libnuma1)
missing=()
for library in "${libraries[@]}"; do
    ldconfig -p | grep -q "${library%1}.so.1 " || missing+=("$library")
done
if [[ ${#missing[@]} -gt 0 ]]; then
    if [[ "$(id -u)" -eq 0 ]]; then
        { apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"; } >&2
    else
        echo "Missing system libraries. Install them with: sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9 # a second caller waits here for the first one's build
# A mark at the end, not a rename: the scripts in a virtual environment hold its path.
if [[ ! -e "$venv/complete" ]]; then
    {
        echo "building $venv"
        rm -rf "$venv"
        "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$venv"
        install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
        "${install[@]}" "$(grep ^sglang= "$here/pins.txt")"
        # --no-deps: what it names besides is for other backends than SGLang's transfer over TCP
        "${install[@]}" --no-deps "$(grep ^mooncake "$here/pins.txt")"
        touch "$venv/complete"
    } >&2
fi
echo "$venv"
