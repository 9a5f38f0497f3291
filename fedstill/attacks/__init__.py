"""Attacks on what leaves a node, by somebody who knows all of its records but one: they audit its privacy."""
