#!/usr/bin/env bash
# Start one prefill-decode pair per model, all on one GPU, without a supervisor: for trials of the whole on one machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/gpu/pairs.sh GPU MODEL... [-- SGLANG_OPTION...]

GPU           CUDA device that all engines share
MODEL         Hugging Face names or folders, one pair each; three small ones fit on 80 GB
SGLANG_OPTION given to all engines, after --max-total-tokens 32768 --cuda-graph-max-bs-decode 16

The pairs' ports begin at 30000, 30010, 30020, … as launch/sglang-pair.sh counts them; configs/sglang-one-gpu.yaml names
them. All stay in the foreground; when one pair ends, so do the others.
`shell-router launch --config configs/sglang-one-gpu.yaml` does the same, and starts dead engines again.
`python benchmarks/overlap.py --engine sglang --config configs/sglang-one-gpu.yaml` starts the same pairs, measures what
overlap saves on them, and stops them; with a deployment without `launch` it measures pairs that run already.
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
[[ $# -ge 2 ]] || { usage >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

gpu="$1"
shift
models=()
while [[ $# -gt 0 && "$1" != "--" ]]; do models+=("$1"); shift; done
[[ "${1:-}" == "--" ]] && shift

# by default an engine takes most of the memory that it finds free; here several find it together
shared=(--max-total-tokens 32768 --cuda-graph-max-bs-decode 16)
pairs=()
port=30000
for model in "${models[@]}"; do
    "$here/sglang-pair.sh" "$model" "$gpu" "$gpu" "$port" -- "${shared[@]}" "$@" &
    pairs+=($!)
    port=$((port + 10))
done

trap 'kill "${pairs[@]}" 2>/dev/null || true; wait' EXIT INT TERM
wait -n "${pairs[@]}"
