"""Draft heads: small networks over a target's hidden states, each described once for serving and for training."""
