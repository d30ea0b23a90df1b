#!/bin/bash
# A gRPC client generated from the public definition of VllmEngine (PyPI smg-grpc-proto) against a cluster.
#   run.sh DOVETAIL_BINARY
# Exits 77 (skipped) when the model is not there, or the client cannot be installed. The environment is kept for the
# next run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export DOVETAIL_BINARY="$1"
export DOVETAIL_MODEL="${DOVETAIL_TEST_DATA:-}/models/stories260K/stories260K-f32.gguf"
export DOVETAIL_TALES="$here/../../../models/tales-hybrid"
[[ -f "$DOVETAIL_MODEL" ]] || { echo "missing test data: models/stories260K/stories260K-f32.gguf"; exit 77; }

stamp="$(sha256sum "$here/requirements.txt" | cut -c1-16)"
venv="${DOVETAIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dovetail}/grpc-client-$stamp"
if [[ ! -f "$venv/complete" ]]; then
  rm -rf "$venv"
  mkdir -p "$(dirname "$venv")"
  if ! { python3 -m venv "$venv" &&
         "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; }; then
    echo "skipped: grpc_client: cannot install the client from PyPI" && exit 77
  fi
  touch "$venv/complete"
fi
export PYTHONDONTWRITEBYTECODE=1
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$here"
