"""What an adversary gets of private data from what has left a node.

Audits of privacy mechanisms (``audits``, ``worlds``) are by somebody who knows all records but one. Attacks
on runs: ``attack`` says what one is, ``heard`` what it hears, ``rows`` how it tells what it got; ``leakage``
tries those that a ``config`` names. There are four:

- ``gradient_inversion``: images whose update is the one that was released. ``victims`` release it,
  ``updates`` says how it follows from images, ``gradient_matching`` and ``layerwise`` seek them.
- ``membership_inference``: who was in the training data, by ``membership_scores`` of ``candidates``, through
  the ``outsider``'s view, with ``shadows`` and copies of models; ``rates`` are how often that is right.
- ``data_copying``: ``generated`` images beside private ones, by ``copy_tests`` and ``quality``.
- ``label_counts``: what label counts told.

May import runs and what lies below, since a finished run is done once more to be heard. A newcomer adds an
attack: one class in one file, and its name in ``attack.ATTACKS``; or in a package of their own.
"""
