#!/usr/bin/env bash
# The launcher of report 000: scripts/run_pretrain.sh configs/hn_xs.yaml [key=value ...]
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: $0 CONFIG.yaml [key=value ...]   e.g. $0 configs/hn_xs.yaml" >&2
    exit 2
fi
exec "$(dirname "${BASH_SOURCE[0]}")/oomph" train "$@"
