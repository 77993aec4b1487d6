"""`make bench-peers`: SpecRay beside other engines on this machine.

`engines` lists them, `environments` installs them, `worker_process` talks to their workers, `measure` takes the times
and `report` makes tables and the chart. `workers` runs in the engines' own environments and imports nothing else here.
"""
