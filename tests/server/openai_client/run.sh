#!/bin/bash
# The official OpenAI Python client against a server.
#   run.sh [FAKE_SERVER_BINARY]
# With DOVETAIL_SERVER_BINARY and DOVETAIL_SERVER_MODEL set, runs that binary as `BINARY serve MODEL --port 0 --host 127.0.0.1`; else the
# fake server. Exits 77 (skipped) when there is no server, or the client cannot be installed. The environment is kept for the next run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
fake="${1:-}"

if [[ -n "${DOVETAIL_SERVER_BINARY:-}" && -n "${DOVETAIL_SERVER_MODEL:-}" ]]; then
  export DOVETAIL_SERVER_COMMAND="${DOVETAIL_SERVER_BINARY} serve ${DOVETAIL_SERVER_MODEL} --port 0 --host 127.0.0.1"
elif [[ -n "$fake" && -x "$fake" ]]; then
  export DOVETAIL_SERVER_COMMAND="$fake"
else
  echo "skipped: openai_client: no server binary" && exit 77
fi

stamp="$(sha256sum "$here/requirements.txt" | cut -c1-16)"
venv="${DOVETAIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dovetail}/openai-client-$stamp"
if [[ ! -f "$venv/complete" ]]; then
  rm -rf "$venv"
  mkdir -p "$(dirname "$venv")"
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; }; then
    echo "skipped: openai_client: cannot install the client from PyPI" && exit 77
  fi
  touch "$venv/complete"
fi
export PYTHONDONTWRITEBYTECODE=1
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$here"
