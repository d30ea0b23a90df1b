#!/usr/bin/env bash
# Serves a model and measures many streams of it: bench/server/run.sh BUILD_FOLDER MODEL [flags of server_streams_bench]
# SERVE_FLAGS, if set, are further flags of `dovetail serve`.
set -euo pipefail
build=$1 model=$2
shift 2
log=$(mktemp)
# shellcheck disable=SC2086  # several flags
"$build/dovetail" serve "$model" --port 0 --served-model-name bench ${SERVE_FLAGS:-} >"$log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server; rm -f "$log"' EXIT
until grep -q listening "$log"; do
  kill -0 $server || exit 1
  sleep 0.05
done
port=$(sed -n 's/.*:\([0-9]*\)$/\1/p' "$log")
"$build/bench/server/server_streams_bench" --port "$port" --model bench "$@"
