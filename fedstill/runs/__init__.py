"""Runs: from a configuration to a folder of results.

``config`` is a run as TOML; ``presets`` are complete ones. ``run`` begins and resumes, ``assemble`` reads
data and makes networks, into a ``setting``. ``loop`` is the one loop: ``simulation`` is it with nodes in this
process (``simulation_nodes`` makes them, ``simulation_metrics`` looks at them, ``trained_models`` keeps what
runs train alike), ``remote_run`` with nodes elsewhere, reached by FLARE (``flare`` at the server;
``deployed`` hands a job in, ``local_processes`` plays all of it on this machine) or by files (``offline``).
``evaluation`` says what models reach, ``resampling`` how far test cases move it, ``collect_warnings`` what a
reader should know of it; ``example_predictions`` shows some.

May import methods and what lies below. A newcomer adds a preset, or something that every result should say.
"""
