#!/usr/bin/env bash
# Start an embedded pair by hand: one model's prefill and decode engine on this machine, without a GPU.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/embedded.sh MODEL_FOLDER [PORT] [-- OPTION...]

MODEL_FOLDER  a Hugging Face folder of a Qwen3 or Llama model
PORT          prefill listens on PORT, decode on PORT+1, the KV bootstrap server on PORT+2 (default 30000)
OPTION        given to both engines, such as --threads 4; python -m shell_router.standins.embedded --help lists them

Both engines stay in the foreground; when one ends, so does the other. With the default port the configuration is
  pairs: [{prefill: "http://127.0.0.1:30000", decode: "http://127.0.0.1:30001", bootstrap_port: 30002}]
The router starts such pairs itself for models without `pairs`; by hand is for several machines and for experiments.
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
[[ $# -ge 1 ]] || { usage >&2; exit 2; }

places=()
while [[ $# -gt 0 && "$1" != "--" ]]; do places+=("$1"); shift; done
[[ "${1:-}" == "--" ]] && shift
model="${places[0]}"
port="${places[1]:-30000}"

# incremental streaming: the default repeats all earlier tokens in every event
common=(--model-path "$model" --disaggregation-bootstrap-port "$((port + 2))" --incremental-streaming-output)

python -m shell_router.standins.embedded "${common[@]}" --disaggregation-mode prefill --port "$port" "$@" &
prefill=$!
python -m shell_router.standins.embedded "${common[@]}" --disaggregation-mode decode --port "$((port + 1))" "$@" &
decode=$!

trap 'kill "$prefill" "$decode" 2>/dev/null || true; wait' EXIT INT TERM
wait -n "$prefill" "$decode"
