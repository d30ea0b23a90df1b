#!/bin/bash
# The official OpenAI Python client against a server.
#   run.sh FAKE_SERVER_BINARY      the fake server of the tests
#   run.sh DOVETAIL_BINARY MODEL   `dovetail serve` with a model of the test data (below DOVETAIL_TEST_DATA)
# With DOVETAIL_SERVER_BINARY and DOVETAIL_SERVER_MODEL set, runs that binary with that model in their place. Exits 77 (skipped) when
# there is no server, no model, or the client cannot be installed. The environment is kept for the next run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
binary="${DOVETAIL_SERVER_BINARY:-${1:-}}"
model="${DOVETAIL_SERVER_MODEL:-}"
if [[ -z "$model" && -n "${2:-}" ]]; then
  if [[ -z "${DOVETAIL_TEST_DATA:-}" || ! -e "$DOVETAIL_TEST_DATA/$2" ]]; then
    echo "skipped: openai_client: missing test data $2 (DOVETAIL_TEST_DATA)" && exit 77
  fi
  model="$DOVETAIL_TEST_DATA/$2"
fi
[[ -x "$binary" ]] || { echo "skipped: openai_client: no server binary" && exit 77; }
export DOVETAIL_SERVER_COMMAND="$binary"
# A model without a chat template of its own gets one; two workers of mixed placement, so that the seam is in the way.
[[ -z "$model" ]] || DOVETAIL_SERVER_COMMAND+=" serve $model --port 0 --host 127.0.0.1 --attention-workers 2 \
  --placement mixed ${DOVETAIL_SERVER_FLAGS:---chat-template chatml}"

stamp="$(sha256sum "$here/requirements.txt" | cut -c1-16)"
venv="${DOVETAIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dovetail}/openai-client-$stamp"
# One at a time: tests run side by side.
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [[ ! -f "$venv/complete" ]]; then
  rm -rf "$venv"
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; }; then
    echo "skipped: openai_client: cannot install the client from PyPI" && exit 77
  fi
  touch "$venv/complete"
fi
flock -u 9
export PYTHONDONTWRITEBYTECODE=1
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$here" 9>&-
