"""From a configuration to a folder of results: one run, wherever its nodes are.

``config`` is a run as TOML; ``presets`` are complete ones. ``run`` begins and resumes; ``experiment`` runs
nodes in this process, ``live`` asks nodes elsewhere, ``afar`` starts these, ``offline`` works by files.
``turns`` drives a method's program. ``evaluation``, ``measured`` and ``result`` say what models reach.

May import methods and what lies below. A newcomer adds a preset, or something that every result should say.
"""
