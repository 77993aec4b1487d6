#!/bin/sh
# Ray on this machine alone, then the server in the foreground: what the containers and the systemd unit start.
#   one-machine.sh /etc/specray/serve.yaml
# Ray's own ports ask for the token, its metrics do not. Some listen on every interface in spite of --node-ip-address, so
# a container publishes none of them and the unit lets only loopback through.
set -eu
umask 077

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_SERVE_PROXY_USE_GRPC=1

# `ray start` refuses to run without a token; this one never leaves the machine.
ray get-auth-token --generate >/dev/null
ray start --head --node-ip-address=127.0.0.1 --port=6379 --include-dashboard=false \
    --metrics-export-port="${RAY_METRICS_PORT:-8080}"

# Ends the application on SIGINT, and not on SIGTERM.
exec serve run --address=127.0.0.1:6379 "$1"
