"""Helpers shared by tests; `test/` is on the import path, so `from kits.server import Server`."""
