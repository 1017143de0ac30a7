"""What a run knows, apart from how it is spread over ranks: trees of values, whole tensors, state dicts."""
