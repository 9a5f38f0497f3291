"""What an adversary gets of private data from what has left a node.

Audits of privacy mechanisms (``audits``, ``canary``, ``releases``, ``worlds``) are by somebody who knows
all records but one. Attacks on runs: ``attack`` says what one is, ``heard`` and ``tap`` what it hears,
``rows`` how it tells what it got; ``leakage`` tries those that a ``config`` names. ``gradient_inversion``
with ``victims``, ``inversion``, ``updates`` and ``layers`` seeks images whose update is the one that was
released. ``members`` with ``outsider``, ``candidates``, ``membership``, ``shadows``, ``proxy`` and ``rates``
tells who was in the training data. ``data_copying`` with ``generated``, ``copying``, ``quality``,
``features`` and ``neighbours`` compares generated images with private ones. ``label_counts`` with
``histograms`` says what label counts told.

May import runs and what lies below, since a finished run is done once more to be heard. A newcomer adds an
attack: one class in one file, and its name in ``attack.ATTACKS``; or in a package of their own.
"""
