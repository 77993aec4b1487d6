"""Routing in the ingress: choosing an engine for each request, failover, drafter rollout and autoscaling."""
