"""Operations on tensors: noise, sampling, attention. Each has one reference; fast twins stand beside it."""
