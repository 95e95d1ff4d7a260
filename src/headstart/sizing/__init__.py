"""Sizing before buying: what memory, storage and network must deliver so that hits pay. Pure."""
