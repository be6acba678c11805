"""The online path: walks the agent graph, grows prompts while precursors decode, and exits
early."""
