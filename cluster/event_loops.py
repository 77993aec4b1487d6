"""Variables that make Serve use one event loop in each of its processes.

By default a replica has a thread for Serve's calls, one for our code and one for its calls to other deployments, and
the proxy has two. Where all cores compute, each hand-over waits for a core. With one loop, 99 of 100 refusals at 20
times the capacity of two cores came within 37 instead of 48 ms (medians of twelve runs), for a seventh less CPU time
each. The price is that code of ours that blocks also blocks Serve's calls, such as health checks.
"""

# Serve reads them on import. A process that calls a deployment must then do so from an event loop that lives as long as
# the process; the launcher has none and must not have them.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
