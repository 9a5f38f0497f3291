"""From a configuration to a folder of results: one run, wherever its nodes are.

``config`` is a run as TOML; ``presets`` are complete ones. ``run`` begins and resumes, ``assemble`` reads
data and makes networks. ``loop`` is the one loop: ``simulation`` is it with nodes in this process
(``prepared`` makes them, ``measured`` looks at them), ``served`` with nodes elsewhere, reached by FLARE
(``flare`` at the server; ``deployed`` hands a job in, ``rehearsal`` plays all of it on this machine) or by
files (``bundles``). ``evaluation`` says what models reach.

May import methods and what lies below. A newcomer adds a preset, or something that every result should say.
"""
