"""Measuring: drafting methods compared in one process, interleaved, over the same weights.

`command` is `specray bench`; `figures` prints the README's table. Not here: tuning, and anything that serves.
"""
