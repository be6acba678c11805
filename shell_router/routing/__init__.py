"""Pure choices: which engine, whose turn, when to send a prefill update, and whether that pays."""
