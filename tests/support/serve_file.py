"""A small, valid configuration file for `serve run`."""

SERVE_CONFIG = """
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: specray
    import_path: cluster.app:build
    args:
      model: smollm2-135m-instruct
      max_running_requests: 4
      speculative: {algorithm: NGRAM}
      server: {request_timeout_s: 60}
"""
