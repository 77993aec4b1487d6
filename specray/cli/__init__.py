"""The `specray` command and the commands that talk to a running server."""
