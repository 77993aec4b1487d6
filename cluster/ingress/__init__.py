"""The HTTP server of `specray.server` as a Serve deployment, and its calls to routers."""
