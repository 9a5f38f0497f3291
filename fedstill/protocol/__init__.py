"""The words that server and nodes share: queries, kinds of tensor, methods, plans and messages.

``method`` is the base of every method, and the list of those that have names (``METHODS``). ``queries`` are
what nodes can be asked, ``declarations`` how a method marks the functions that answer them. ``kinds`` says of
each tensor that travels what it is of, which policies, mechanisms, checks and reports read. ``run_plan`` is
what a server declares before it asks, and ``run_description`` what an owner approves of it. ``messages`` are
all that a server says to a node, ``wire_format`` turns them into bytes, with ``tensor_bytes``, ``digests``
are their fingerprints; ``local_config`` is how long, with which optimizer and at which rate nodes train.

May import data, models, tasks, core. A newcomer adds a kind that several methods release.
"""
