"""Clients that others wrote, run unmodified against a real server: `scripts/clients`, docs/advanced_features/clients.md."""
