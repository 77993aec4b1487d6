"""Building blocks of models: tensor-parallel linears, norms, rotary positions. Plain classes over tensors.

Plain classes rather than `nn.Module`: a decoder calls some 200 of them per token, and a module's call
machinery costs more than the small operations inside.
"""
