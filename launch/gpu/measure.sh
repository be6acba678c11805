#!/usr/bin/env bash
# Measure on GPUs what a machine without one cannot; the tables go to the terminal and to a folder.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/gpu/measure.sh CONFIG [FOLDER]

CONFIG  a deployment, such as configs/sglang-one-gpu.yaml; engines with `launch` are started and stopped for each table
FOLDER  takes the tables (default runs/gpu)

Run it in the repository, with the package installed. It measures overlap, drafts, batches beside chats, and component pools.
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
[[ $# -ge 1 ]] || { usage >&2; exit 2; }
config="$1"
folder="${2:-runs/gpu}"
mkdir -p "$folder"
nvidia-smi | tee "$folder/nvidia-smi.txt"

failed=0
measure() { # NAME COMMAND...: one that fails does not keep the others from running
    echo "== $1"
    "${@:2}" 2>&1 | tee "$folder/$1.txt" || { echo "$1 failed" >&2; failed=1; }
}
measure overlap python benchmarks/overlap.py --engine sglang --config "$config"
measure drafts python benchmarks/drafts.py --engine sglang --config "$config"
measure batches python benchmarks/programs.py --config "$config"
measure component-pools python benchmarks/coserve.py --table real --device cuda:0 --seeds 2
exit "$failed"
