#!/usr/bin/env bash
# Start the Redis (or Valkey) that holds the Agent Prompt Cache; nothing is written to disk.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/redis.sh [PORT]

Starts redis-server or valkey-server, whichever is installed, on 127.0.0.1:PORT (default 6379) in the foreground.
Name it in the configuration:  cache: {backend: redis, url: redis://127.0.0.1:6379/0}

Without a password every process of this machine may read and change what agents wrote. REDIS_PASSWORD sets one; then
add password: {env: REDIS_PASSWORD} to cache. For other machines start a Redis with a password and TLS yourself.
TEXT
}

[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { usage; exit 0; }
port="${1:-6379}"
password="${REDIS_PASSWORD:-}"
password="${password//\\/\\\\}"

for server in redis-server valkey-server; do
    if command -v "$server" >/dev/null; then
        # noeviction: a log that loses its head would end the requests that read it
        # the password comes by stdin, as the command line is for all to see
        exec "$server" - --bind 127.0.0.1 --port "$port" --save '' --appendonly no --maxmemory-policy noeviction \
            <<<"${password:+requirepass \"${password//\"/\\\"}\"}"
    fi
done
echo "launch/redis.sh: neither redis-server nor valkey-server is on PATH. Install one of them." >&2
exit 2
