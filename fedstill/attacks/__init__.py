"""What an adversary gets of private data from what has left a node.

Audits of privacy mechanisms (``audits``, ``canary``, ``releases``, ``worlds``) are by somebody who knows
all records but one. Attacks on runs: ``tap`` hears what left. ``inversion`` with ``updates`` and ``layers``
seeks images whose update is the one that was released. ``membership`` with ``shadows``, ``proxy`` and
``rates`` tells who was in the training data. ``copying``, ``quality``, ``features`` and ``neighbours``
compare generated images with private ones. ``histograms`` says what label counts told.

May import runs and what lies below, since a finished run is done once more to be heard. A newcomer adds an
attack: a file here, and its part in ``leakage``.
"""
