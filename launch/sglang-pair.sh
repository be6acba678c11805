#!/usr/bin/env bash
# Start one model's prefill and decode engine with SGLang, each on its own GPU (Faster-MoA, section 5).
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/sglang-pair.sh MODEL [PREFILL_GPU [DECODE_GPU [PORT]]] [-- SGLANG_OPTION...]

MODEL         a Hugging Face name or a folder
PREFILL_GPU   CUDA device of the prefill engine (default 0)
DECODE_GPU    CUDA device of the decode engine (default 1)
PORT          prefill listens on PORT, decode on PORT+1, the KV bootstrap server on PORT+2 (default 30000)
SGLANG_OPTION given to both engines, such as --mem-fraction-static 0.85

Both engines stay in the foreground; when one ends, so does the other. With the default port the configuration is
  pairs: [{prefill: "http://127.0.0.1:30000", decode: "http://127.0.0.1:30001", bootstrap_port: 30002}]
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
[[ $# -ge 1 ]] || { usage >&2; exit 2; }

places=()
while [[ $# -gt 0 && "$1" != "--" ]]; do places+=("$1"); shift; done
[[ "${1:-}" == "--" ]] && shift
model="${places[0]}"
prefill_gpu="${places[1]:-0}"
decode_gpu="${places[2]:-1}"
port="${places[3]:-30000}"

for taken in "$port" "$((port + 1))" "$((port + 2))"; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$taken") 2>/dev/null; then
        echo "port $taken of 127.0.0.1 is taken: stop what listens there, or name another PORT" >&2
        exit 1
    fi
done

# a dead prefill is noticed by decode after two missed heartbeats
export SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL="${SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL:-2}"
# over TCP, a KV transfer in more pieces than Mooncake queues fails, and with it all that follow for 30 s or more
export MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535 MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER=65535 MC_TCP_ADMISSION_TIMEOUT_MS=60000
# incremental streaming: the default repeats all earlier tokens in every event
# llguidance: the default grammar backend can spend minutes on one request's pattern
common=(--model-path "$model" --host 127.0.0.1 --enable-metrics --incremental-streaming-output
    --grammar-backend llguidance
    --disaggregation-transfer-backend mooncake --disaggregation-bootstrap-port "$((port + 2))")

CUDA_VISIBLE_DEVICES="$prefill_gpu" python -m sglang.launch_server "${common[@]}" \
    --disaggregation-mode prefill --port "$port" "$@" &
prefill=$!
CUDA_VISIBLE_DEVICES="$decode_gpu" python -m sglang.launch_server "${common[@]}" \
    --disaggregation-mode decode --port "$((port + 1))" "$@" &
decode=$!

trap 'kill "$prefill" "$decode" 2>/dev/null || true; wait' EXIT INT TERM
wait -n "$prefill" "$decode"
