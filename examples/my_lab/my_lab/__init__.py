"""Plug-ins of a lab for fedstill."""
