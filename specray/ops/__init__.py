"""Operations on tensors: noise, sampling, attention. Each has one reference implementation, some a faster one."""
