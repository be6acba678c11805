"""Pure decisions: the model, the engine, the next request, prefill updates and hold-outs."""
