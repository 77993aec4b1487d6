"""Building blocks of models: tensor-parallel linears, norms, rotary embeddings, latent attention, experts."""
