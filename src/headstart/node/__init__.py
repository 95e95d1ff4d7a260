"""The node: one process a machine that holds the tiers for all its engines."""
