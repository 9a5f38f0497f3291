"""Attacks: what an adversary learns about private data from the releases of nodes.

Audits of privacy mechanisms (``mechanism_audits``) have an adversary who knows all records but one. Attacks
on runs start with a replay of a finished run, which gives the ``transcript`` of its releases. ``attack``
holds their base class and their results for reports, and ``attack_runner`` runs those that a configuration
names. There are five attacks:

- ``gradient_inversion``: images whose update is the released one. ``simulated_updates`` computes the update
  of given images; ``gradient_matching`` and ``layerwise_inversion`` search for the images.
- ``membership_inference``: detection of training records by ``membership_scores``, with shadow models.
- ``memorization``: comparison of generated images with private ones, with ``generative_metrics``.
- ``label_counts``: comparison of released label counts with the true ones.
- ``label_inference``: shares of classes at a node, estimated from its responses.

This package may import runs and the packages below it, as a finished run is replayed. A new attack is one
class in one file, registered in ``attack.ATTACKS``, or in a package of its own (docs/custom-attack.md).
"""
