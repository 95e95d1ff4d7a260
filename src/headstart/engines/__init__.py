"""Adapters that put Headstart under an inference engine. Only these modules import torch."""
