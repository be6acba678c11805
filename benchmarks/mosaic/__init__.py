"""The parts of mosaic.py."""
