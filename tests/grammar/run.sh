#!/bin/bash
# Schemas and texts under them, judged by PyPI's jsonschema: run.sh STRUCTURED_SAMPLES_BINARY SCHEMAS
# Exits 77 (skipped) when it cannot be installed. The environment is kept for the next run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
stamp="$(sha256sum "$here/requirements.txt" | cut -c1-16)"
venv="${DOVETAIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dovetail}/jsonschema-$stamp"
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [[ ! -f "$venv/complete" ]]; then
  rm -rf "$venv"
  if ! { python3 -m venv "$venv" &&
         "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; }; then
    echo "skipped: structured_schemas: cannot install jsonschema from PyPI" && exit 77
  fi
  touch "$venv/complete"
fi
flock -u 9
export PYTHONDONTWRITEBYTECODE=1
exec "$venv/bin/python" "$here/structured_schemas_test.py" "$@" 9>&-
