"""CPU kernels of our own: products with packed weights, paged tree attention, and whole stacks of decoder layers.

The sources are in `specray/csrc/cpu`. `build` compiles them for this machine, `library` loads them. In every type, a
row's result has the same bits alone and in any batch, tree or prompt chunk, and on any number of threads.
"""
