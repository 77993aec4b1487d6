"""A simulator of many ingresses and engines in virtual time.

Real are routing, streams, heartbeats, leases and failover of the ingresses, the engines' admission, scheduler, prefix
cache and draft budget, and the autoscaling policy. Simulated are time, the network, Ray Serve, the work of the ranks,
and what a target accepts of the drafts.
"""
