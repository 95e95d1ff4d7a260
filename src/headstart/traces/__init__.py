"""Traces of what a service was asked: the files they come in, read line by line."""
