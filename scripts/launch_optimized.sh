#!/usr/bin/env bash
# The launcher of report 003: scripts/launch_optimized.sh small|optimized|default [key=value ...]
set -euo pipefail
mode=${1:-}
case "$mode" in
    small | optimized | default) ;;
    *)
        echo "usage: $0 small|optimized|default [key=value ...]   (given: '${mode}')" >&2
        exit 2
        ;;
esac
shift
exec "$(dirname "${BASH_SOURCE[0]}")/oomph" train "npt_${mode}" "$@"
