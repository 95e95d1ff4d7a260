"""Measurements that a sceptic can repeat: libraries that return results, nothing printed."""
