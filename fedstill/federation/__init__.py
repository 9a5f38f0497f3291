"""Communication between server and nodes, with one module per way to reach nodes.

``federation`` is the base class: it sends a query and returns ``responses``, also with gradients
(``autograd``). ``response_checks`` validates what nodes send, and ``exclusions`` are the nodes that fail.
``secure_aggregation`` wraps a federation and adds responses up, and ``link_config`` has the options. Nodes
are reached

- in this process: ``inprocess``,
- by messages: ``remote``, over any link of ``transport``,
- over NVIDIA FLARE: ``flare`` is the link and the node's program,
- by files carried by hand: ``offline_files`` has the link and the node's side; ``signed_files`` signs them.

A deployed federation on FLARE: ``provision`` makes startup kits with permissions, ``flare_site`` runs a
site's process, ``flare_component`` is fedstill's part in it, ``admin`` controls a running server and reports
its state, ``server_rules`` restricts what a run may use there.

This package may import ``node`` and the packages below it. To add another way to reach nodes, add a module
here.
"""
