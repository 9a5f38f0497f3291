"""Runs: from a configuration to a folder of results.

``spec`` is the configuration of a run and its TOML form; ``presets`` are complete ones. ``run`` starts and
resumes a run. ``build`` loads and splits data and makes networks. ``loop`` is the one loop of every run, and
``base`` has its data and models: in ``simulation`` its nodes are in this process, in ``remote_run`` they are
elsewhere, and are reached over FLARE or by files (``offline``). ``flare_server`` is the server's program in
FLARE's job, ``deployment`` submits that job, or rehearses all of it on this machine.

``evaluation`` computes the metrics of models, ``simulation_metrics`` those that need the nodes' models and
data, ``results`` collects everything for ``result.json``. ``student_file`` is the trained student with a
description of its inputs. ``trained_model_cache`` shares trained models between the runs of a comparison.

This package may import ``methods`` and the packages below it. To add a preset, add a file to ``presets``.
"""
