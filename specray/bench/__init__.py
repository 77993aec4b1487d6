"""Measuring: drafting methods compared in one process, interleaved, over the same weights.

`command` is `specray bench`, `tune_command` is `specray tune`; `figures` prints the README's table. Not here: anything
that serves.
"""
