"""The online path: runs agent graphs, grows prompts while precursors decode, and exits early."""
