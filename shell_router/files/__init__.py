"""YAML files and JSON documents as typed values: text, lines, types, and what is wrong with them.

`document` reads YAML into plain values and remembers the line of each. `read` checks plain values
against a class by pydantic, and names all problems with their lines. `types` holds the types that
settings share. `schema` writes the JSON Schema of a class, and words for its parts.
"""
