#!/usr/bin/env bash
# One driver and two workers on this machine, each as a scheduler would start it: same command, other environment.
#     ./local.sh [number of workers]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
count=${1:-2}
port=${PORT:-7000}
aiograd=(${PYTHON:-python3} -m aiograd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(umask 077; openssl rand -hex 32 > "$folder/cluster.key")
export AIOGRAD_SECRET_FILE=$folder/cluster.key AIOGRAD_JOIN=http://127.0.0.1:$port

workers=()
for ((rank = 0; rank < count; rank++)); do
    RANK=$rank "${aiograd[@]}" worker --service program:service &      # the name, w0 and so on, comes from RANK
    workers+=($!)
done
"${PYTHON:-python3}" program.py --expect "$count" --listen "127.0.0.1:$port"
wait "${workers[@]}"                                                   # told that the cluster is closed, they end with status 0
