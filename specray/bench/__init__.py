"""`specray bench`, `specray tune` and `specray load`.

`bench` and `tune` compare drafting methods in one process, interleaved, over the same weights. `load` sends requests to
a server.
"""
