#!/bin/sh
# Starts Ray on this machine, then the server in the foreground. Used by the containers and the systemd unit.
#   one-machine.sh /etc/specray/serve.yaml
# Ray's ports require the token, except for metrics. Some listen on all interfaces despite --node-ip-address. Containers
# therefore do not publish them, and the systemd unit allows loopback only.
set -eu
umask 077

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_SERVE_PROXY_USE_GRPC=1 \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=2147483647

# `ray start` requires a token; this one stays on the machine.
ray get-auth-token --generate >/dev/null
RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0 ray start --head --node-ip-address=127.0.0.1 --port=6379 \
    --include-dashboard=false --metrics-export-port="${RAY_METRICS_PORT:-8080}"

# Shuts the application down on SIGINT, but not on SIGTERM.
exec serve run --address=127.0.0.1:6379 "$1"
