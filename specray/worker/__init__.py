"""Device side: one worker per rank. It owns rows by slot, committed lengths and KV tensors."""
