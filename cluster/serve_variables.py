"""Variables that Serve reads on import, for its processes and ours.

Ingresses and routers get them from `app`, Serve's proxy from where Ray is started.
"""

# One event loop in each process. By default a replica has a thread for Serve's calls, one for our code and one for its
# calls to other deployments, and the proxy has two. Where all cores compute, each hand-over waits for a core. With one
# loop, 99 of 100 refusals at 20 times the capacity of two cores came within 37 instead of 48 ms (medians of several
# runs), for a seventh less CPU time each. The price is that code of ours that blocks also blocks Serve's calls, such as
# health checks. A process that calls a deployment must then do so from an event loop that lives as long as the process;
# the launcher has none and must not have these.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}

# The largest message by gRPC, in bytes. Replies with the log-probabilities of long prompts exceed Ray's limit of 4 MiB.
LARGE_MESSAGES = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}
