"""Building blocks of models: tensor-parallel linears, norms, rotary embeddings, latent attention, experts.

Layers pack their weights when they are built, with the type and on the device that the weights have then: `Module.to`
is not supported.
"""
