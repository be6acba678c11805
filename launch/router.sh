#!/usr/bin/env bash
# Start the router with one of the deployments in configs/.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/router.sh [CONFIG] [OPTION...]

Runs `shell-router serve --config CONFIG OPTION...` (default configs/embedded.yaml) in the foreground.
SIGTERM and Ctrl-C let running requests end first.
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
config="${1:-$here/configs/embedded.yaml}"
[[ $# -gt 0 ]] && shift
exec shell-router serve --config "$config" "$@"
