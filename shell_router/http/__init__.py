"""HTTP without words of the product: an application, its server, and the client of engines."""
