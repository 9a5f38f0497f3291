"""Federated distillation: one central model from private data that stays in many places."""

__version__ = "0.1.0"
