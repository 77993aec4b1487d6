"""Routing in the ingress: choosing an engine for each request, failover and drafter rollout."""
