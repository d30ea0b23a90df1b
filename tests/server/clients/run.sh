#!/bin/bash
# Clients from PyPI against a server:
#   run.sh CLIENTS FAKE_SERVER_BINARY      the fake server of the tests
#   run.sh CLIENTS DOVETAIL_BINARY MODEL   `dovetail serve` with a model of the test data (below DOVETAIL_TEST_DATA), or
#                                          with that of ./quickstart where MODEL is "smollm2"
# CLIENTS is a folder next to this file, with requirements.txt and tests. With DOVETAIL_SERVER_BINARY and
# DOVETAIL_SERVER_MODEL set, runs that binary with that model in their place. Exits 77 (skipped) when there is no
# server, no model, or the clients cannot be installed. The environment is kept for the next run.
set -euo pipefail
clients="${1:?the folder of the clients}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/dovetail"
binary="${DOVETAIL_SERVER_BINARY:-${2:-}}"
model="${DOVETAIL_SERVER_MODEL:-}"
flags="--chat-template chatml"  # for models without a template of their own
skip() { echo "skipped: $clients: $1" && exit 77; }
if [[ -z "$model" && "${3:-}" == smollm2 ]]; then
  model="$cache/smollm2-135m-instruct.gguf"
  [[ -e "$model" ]] || skip "missing model: $model (./quickstart fetches it)"
  flags="--max-model-len 4096"
elif [[ -z "$model" && -n "${3:-}" ]]; then
  [[ -n "${DOVETAIL_TEST_DATA:-}" && -e "$DOVETAIL_TEST_DATA/$3" ]] || skip "missing test data $3 (DOVETAIL_TEST_DATA)"
  model="$DOVETAIL_TEST_DATA/$3"
fi
[[ -x "$binary" ]] || skip "no server binary"
export DOVETAIL_SERVER_COMMAND="$binary"
# Two workers of mixed placement, so that the seam is in the way.
[[ -z "$model" ]] || DOVETAIL_SERVER_COMMAND+=" serve $model --port 0 --host 127.0.0.1 --attention-workers 2 \
  --placement mixed ${DOVETAIL_SERVER_FLAGS-$flags}"

stamp="$(sha256sum "$here/$clients/requirements.txt" | cut -c1-16)"
venv="${DOVETAIL_CACHE:-$cache}/$clients-clients-$stamp"
# One at a time: tests run side by side.
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [[ ! -f "$venv/complete" ]]; then
  rm -rf "$venv"
  { python3 -m venv "$venv" &&
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/$clients/requirements.txt"; } ||
    skip "cannot install the clients from PyPI"
  touch "$venv/complete"
fi
flock -u 9
export PYTHONDONTWRITEBYTECODE=1 LITELLM_LOCAL_MODEL_COST_MAP=True  # no list of models from the network
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider --rootdir "$here" --confcutdir "$here" "$here/$clients" 9>&-
