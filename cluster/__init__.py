"""SpecRay on Ray: placement, supervision, routing and the HTTP API. The engine itself lives in `specray`."""
