"""Mechanisms, accounting and budgets: pure functions, no files.

``rules`` says what is done to each release, and its price. ``noise``, ``bounds``, ``votes`` and ``dpsgd``
are the mechanisms' mathematics; ``events`` are prices, ``accounting``, ``losses`` and ``renyi`` what they
compose to, ``budget`` whether one more fits. ``statement`` says all of this in words, ``audit`` what an
attack proves.

May import protocol and what lies below. A newcomer adds a mechanism's rule and its price here.
"""
