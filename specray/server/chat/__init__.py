"""Chat requests: messages, prompt, output and replies of /v1/chat/completions, which other dialects translate to."""
