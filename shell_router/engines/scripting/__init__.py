"""Parts of the scripted engine server: a raw HTTP protocol, its script, its answers and its prefix cache."""
