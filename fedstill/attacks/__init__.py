"""What an adversary gets of private data from what has left a node.

Audits of privacy mechanisms (``mechanism_audits``, ``worlds``) are by somebody who knows all records but one.
Attacks on runs: ``attack`` says what one is, ``rerun`` does the run once more, ``transcript`` is what left
meanwhile, ``attack_runner`` tries those that a ``config`` names, ``leakage_rows`` tell what each got and
``leakage_file`` keeps it. There are four:

- ``gradient_inversion``: images whose update is the one that was released. ``victims`` release it,
  ``updates`` says how it follows from images, ``gradient_matching`` and ``layerwise_inversion`` seek them,
  and ``recovered_images`` says how near they come.
- ``membership_inference``: who was in the training data, by ``membership_scores`` of ``candidates``, through
  the ``outsider``'s view, with ``shadow_models``; ``roc`` is how often that is right.
- ``data_copying``: ``generated_images`` beside private ones, by ``copy_tests`` and ``generative_metrics``.
- ``label_counts``: what label counts told.

May import runs and what lies below, since a finished run is done once more to be heard. A newcomer adds an
attack: one class in one file, and its name in ``attack.ATTACKS``; or in a package of their own.
"""
